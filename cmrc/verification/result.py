"""The result of a verification: numbers with intervals, breakdowns, controls, certificates; as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from cmrc.errors import VerifyError
from cmrc.files import write_picture
from cmrc.ir.graph import Array
from cmrc.verification.bounds import Estimate, bootstrap, rate, resampled
from cmrc.verification.certificates import Decision, Rung, ladder
from cmrc.verification.evidence import Evidence

CONTROLS = {
    "replaced": "replaced units swapped, which the reduced model cannot follow",
    "random": "as many units retained at random, the others at their means",
    "unswapped": "no unit swapped",
}


@dataclass(frozen=True, slots=True)
class Plain:
    """Both models without interventions: how they agree, and for each input whether it is answered rightly."""

    evidence: Evidence
    original: Array | None
    reduced: Array | None

    @property
    def agreement(self) -> Estimate:
        return rate(self.evidence.mean(self.evidence.agree))

    @property
    def accuracy(self) -> tuple[Estimate, Estimate] | None:
        """Of the original and of the reduced model, where there are labels."""
        return None if self.original is None or self.reduced is None else (rate(self.original), rate(self.reduced))


@dataclass(frozen=True, slots=True)
class Difference:
    """One plan minus another on the same swaps, with paired bootstrap intervals and two-sided p-values."""

    iia: Estimate
    iia_p: float
    kl: Estimate
    kl_p: float

    def __str__(self) -> str:
        return f"ΔIIA {self.iia} (p = {self.iia_p:.3f}), ΔKL {self.kl} (p = {self.kl_p:.3f})"


@dataclass(eq=False, repr=False)
class Verification:
    """What `cmrc.verify` returns. Intervals are two-sided at level 0.95; `ladder` are lower bounds at level 1 − δ."""

    keep: dict[str, tuple[int, int]]  # by site: retained units, of all
    evidence: Evidence
    plain: Plain
    controls: dict[str, Evidence]
    decision: Decision | None
    delta: float
    setting: dict[str, Any]

    @cached_property
    def iia(self) -> Estimate:
        """How often both answer the same under an intervention: Clopper-Pearson; over tokens, empirical Bernstein."""
        return rate(self.evidence.mean(self.evidence.agree))

    @cached_property
    def kl(self) -> Estimate:
        """KL(original ‖ reduced); not a number for a regression."""
        return bootstrap(self.evidence.mean(self.evidence.kl))

    @cached_property
    def d2(self) -> Estimate:
        """E‖Δz‖²."""
        return bootstrap(self.evidence.mean(self.evidence.squared))

    @cached_property
    def largest2(self) -> Estimate:
        """E‖Δz‖∞²."""
        return bootstrap(self.evidence.mean(self.evidence.largest**2))

    @cached_property
    def margin(self) -> Estimate:
        """The mean margin of the original under interventions."""
        return bootstrap(self.evidence.mean(self.evidence.margin))

    @cached_property
    def ladder(self) -> tuple[Rung, ...]:
        return ladder(self.evidence, delta=self.delta)

    @property
    def is_regression(self) -> bool:
        return bool(np.isnan(self.evidence.kl).all())

    def by_class(self) -> dict[int, Estimate]:
        """IIA for each top class of the original under the intervention (of the first token in a sequence)."""
        classes, agree = self.evidence.classes[:, 0], self.evidence.mean(self.evidence.agree)
        return {int(c): rate(agree[classes == c]) for c in np.unique(classes)}

    def by_rate(self) -> dict[float, tuple[Estimate, Estimate]]:
        """IIA and KL for each rate of swapping."""
        agree, kl = self.evidence.mean(self.evidence.agree), self.evidence.mean(self.evidence.kl)
        rates = self.evidence.rate
        return {round(float(r), 6): (rate(agree[rates == r]), bootstrap(kl[rates == r])) for r in np.unique(rates)}

    def minus(self, other: Verification) -> Difference:
        """This plan minus another, on the same swaps: both must be of one seed, number, rate, sites and data."""
        if self.setting != other.setting:
            differ = [key for key in self.setting if self.setting[key] != other.setting.get(key)]
            raise VerifyError(
                f"the two were not made on the same swaps: {', '.join(differ)} differ", fix="verify both alike"
            )
        found = []
        for name in ("agree", "kl"):
            ours, theirs = (e.mean(getattr(e, name).astype(np.float64)) for e in (self.evidence, other.evidence))
            found.append(_paired(ours - theirs))
        (iia, iia_p), (kl, kl_p) = found
        return Difference(iia, iia_p, kl, kl_p)

    def __repr__(self) -> str:
        return f"Verification(IIA {self.iia}, {len(self.evidence)} swaps)"

    def to_json(self) -> dict[str, Any]:
        accuracy = self.plain.accuracy
        regression = self.is_regression
        return {
            "keep": {site: list(pair) for site, pair in self.keep.items()},
            **{key: self.setting[key] for key in ("swaps", "p", "seed", "inputs")},
            "iia": self.iia.to_json(),
            "kl": None if regression else self.kl.to_json(),
            "d2": self.d2.to_json(),
            "largest2": self.largest2.to_json(),
            "margin": None if regression else self.margin.to_json(),
            "agreement": self.plain.agreement.to_json(),
            "accuracy": None if accuracy is None else {"original": accuracy[0].to_json(), "reduced": accuracy[1].to_json()},
            "by_class": {} if regression else {str(c): e.to_json() for c, e in self.by_class().items()},
            "by_rate": {str(r): {"iia": i.to_json(), "kl": None if regression else k.to_json()} for r, (i, k) in self.by_rate().items()},
            "controls": {name: _control(e) for name, e in self.controls.items()},
            "certificates": {
                "delta": self.delta,
                **{r.name: {"value": r.value, "bound": r.bound, "epsilon": r.epsilon, "needs": r.needs} for r in self.ladder},
            },
            "decision": None if self.decision is None else self.decision.to_json(),
        }  # fmt: skip

    def __str__(self) -> str:
        where = ", ".join(f"{site} ({kept} of {units} units retained)" for site, (kept, units) in self.keep.items())
        lines = [
            f"{self.setting['swaps']} swaps at rate {self.setting['p']} on {self.setting['inputs']} inputs: {where}",
            "",
        ]
        rows = [("IIA", str(self.iia))]
        if not self.is_regression:
            rows += [("KL(original ‖ reduced)", str(self.kl)), ("margin", str(self.margin))]
        rows += [("D2 = E‖Δz‖²", str(self.d2)), ("E‖Δz‖∞²", str(self.largest2))]
        rows += [("agreement without swaps", str(self.plain.agreement))]
        if self.plain.accuracy is not None:
            before, after = self.plain.accuracy
            rows += [("accuracy, original", str(before)), ("accuracy, reduced", str(after))]
        if len(self.by_rate()) > 1:
            rows += [(f"IIA at rate {r:g}", str(i)) for r, (i, _) in self.by_rate().items()]
        lines += [f"  {name:26}{told}" for name, told in rows]
        if self.controls:
            lines += ["", "controls (IIA)"]
            lines += [f"  {name:12}{_control(e)['iia']:.4f}  {CONTROLS[name]}" for name, e in self.controls.items()]
        lines += ["", f"certificates: IIA is at least           estimate   with probability {1 - self.delta:g}"]
        lines += [f"  {r.name:36}{r.value:10.4f}   {r.bound:.4f}" for r in self.ladder]
        if self.decision is not None:
            lines += ["", str(self.decision)]
        return "\n".join(lines)


def _control(evidence: Evidence) -> dict[str, float | None]:
    kl = evidence.mean(evidence.kl)
    return {
        "iia": float(evidence.mean(evidence.agree).mean()),
        "kl": None if np.isnan(kl).any() else float(kl.mean()),
        "d2": float(evidence.mean(evidence.squared).mean()),
    }


def _paired(differences: Array) -> tuple[Estimate, float]:
    if np.isnan(differences).any():
        return Estimate(np.nan, np.nan, np.nan), np.nan
    means = resampled(differences, 0)
    low, high = np.quantile(means, [0.025, 0.975])
    p = min(1.0, 2 * min((1 + np.sum(means <= 0)) / (1 + len(means)), (1 + np.sum(means >= 0)) / (1 + len(means))))
    return Estimate(float(differences.mean()), float(low), float(high)), float(p)


def draw_plans(results: Mapping[str, Verification], path: Path) -> None:
    """IIA with its interval, and KL, against the share of the units that are kept, as a picture."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise VerifyError("matplotlib is not installed", fix="pip install 'cmrc[plot]'") from error
    shares = {name: _share(result) for name, result in results.items()}
    order = sorted(results, key=shares.__getitem__)
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, title in ((left, "IIA"), (right, "KL(original ‖ reduced)")):
        found = [getattr(results[name], "iia" if axes is left else "kl") for name in order]
        below, above = ([e.value - e.low for e in found], [e.high - e.value for e in found])
        axes.errorbar([shares[n] for n in order], [e.value for e in found], (below, above), marker="o", capsize=3)
        axes.set(xlabel="share of units kept", title=title)
    write_picture(figure, path)


def _share(result: Verification) -> float:
    kept, units = (sum(pair[i] for pair in result.keep.values()) for i in (0, 1))
    return kept / units
