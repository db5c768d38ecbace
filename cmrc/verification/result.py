"""The result of a verification: a verdict in words, numbers with intervals, controls, certificates; as text, JSON and picture."""

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
from cmrc.verification.bounds import Estimate, bootstrap, lower_mean, rate, resampled
from cmrc.verification.certificates import Rung, ladder
from cmrc.verification.draws import Scope
from cmrc.verification.evidence import Evidence
from cmrc.verification.targets import Decision, Standing, forecast

CONTROLS = {
    "ignored": "retained units swapped in the original alone: a model that ignores swaps",
    "replaced": "replaced units swapped, which the reduced model cannot follow",
    "random": "as many units retained at random, the others at their means",
    "unswapped": "no unit swapped",
}
SHOWN = 6  # sites that are named; `to_json` has all
ABOUT = {Scope.POPULATION: "inputs like the held-out ones", Scope.FIXED: "these held-out inputs only"}


@dataclass(frozen=True, slots=True)
class Plain:
    """Both models without interventions: how they agree, and for each input whether it is answered rightly."""

    evidence: Evidence
    original: Array | None
    reduced: Array | None

    @property
    def agreement(self) -> Estimate:
        return rate(self.evidence.mean(self.evidence.agree), binary=self.evidence.binary)

    @property
    def accuracy(self) -> tuple[Estimate, Estimate] | None:
        """Of the original and of the reduced model, where there are labels."""
        if self.original is None or self.reduced is None:
            return None
        binary = self.evidence.binary
        return rate(self.original, binary=binary), rate(self.reduced, binary=binary)

    def values(self, name: str) -> Array:
        """For each input: `agreement`, `accuracy` of the reduced model, or the `drop` of accuracy."""
        if name == "agreement":
            return self.evidence.mean(self.evidence.agree)
        if self.original is None or self.reduced is None:
            raise VerifyError(f"{name} needs labels", fix="give held-out data with labels")
        return np.asarray(self.reduced if name == "accuracy" else self.original - self.reduced)


@dataclass(frozen=True, slots=True)
class Difference:
    """One plan minus another on the same swaps, with paired bootstrap intervals and two-sided p-values (approximate)."""

    iia: Estimate
    iia_p: float
    kl: Estimate
    kl_p: float

    def __str__(self) -> str:
        return f"ΔIIA {self.iia} (p = {self.iia_p:.3f}), ΔKL {self.kl} (p = {self.kl_p:.3f})"


@dataclass(frozen=True, slots=True)
class Power:
    """Whether the test could have failed: the IIA beside that of a model which ignores swaps, and of a random selection.

    Each comparison is on the same swaps; `above` says whether the IIA is higher at level 1 − δ.
    """

    iia: float
    ignored: float
    above_ignored: bool
    random: float
    above_random: bool

    @property
    def warnings(self) -> tuple[str, ...]:
        said = []
        if not self.above_ignored:
            said.append(
                "swaps at these sites prove nothing: on the swaps that the controls repeat, a model that ignores swaps has IIA "
                f"{self.ignored:.4f}, this one {self.iia:.4f}"
            )
        if not self.above_random:
            said.append(
                "the selection is not shown to matter: on the same swaps, units retained at random have IIA "
                f"{self.random:.4f}, these {self.iia:.4f}"
            )
        return tuple(said)

    def __str__(self) -> str:
        if self.warnings:
            return "\n".join(f"Warning: {text}." for text in self.warnings)
        return (
            f"The controls show power: a model that ignores the swaps would have IIA {self.ignored:.4f}, units retained at "
            f"random have {self.random:.4f}."
        )


@dataclass(eq=False, repr=False)
class Verification:
    """What `cmrc.verify` returns. Intervals are two-sided at level 0.95; `ladder` are lower bounds at level 1 − δ."""

    keep: dict[str, tuple[int, int]]  # by site: retained units, of all
    swapped: Evidence | None  # None where nothing was swapped
    plain: Plain
    controls: dict[str, Evidence]
    decision: Decision | None
    delta: float
    scope: Scope
    setting: dict[str, Any]
    repeated: Evidence | None = None  # what the swaps showed that the controls repeat

    @property
    def evidence(self) -> Evidence:
        """What every swap showed."""
        if self.swapped is None:
            raise VerifyError("nothing was swapped", fix="verify with swaps, or read .plain")
        return self.swapped

    @cached_property
    def iia(self) -> Estimate:
        """How often both answer the same under an intervention."""
        return self._rate(self.evidence.agree)

    @cached_property
    def kl(self) -> Estimate:
        """KL(original ‖ reduced); not a number for a regression."""
        return self._mean(self.evidence.kl)

    @cached_property
    def d2(self) -> Estimate:
        """E‖Δz‖²."""
        return self._mean(self.evidence.squared)

    @cached_property
    def largest2(self) -> Estimate:
        """E‖Δz‖∞²."""
        return self._mean(self.evidence.largest**2)

    @cached_property
    def margin(self) -> Estimate:
        """The mean margin of the original under interventions."""
        return self._mean(self.evidence.margin)

    @cached_property
    def ladder(self) -> tuple[Rung, ...]:
        return ladder(self.evidence, delta=self.delta)

    @property
    def is_regression(self) -> bool:
        return bool(np.isnan(self.plain.evidence.kl).all())

    @cached_property
    def power(self) -> Power | None:
        """None without controls."""
        if not self.controls or self.repeated is None:
            return None
        same, ignored, random = self.repeated, self.controls["ignored"], self.controls["random"]
        return Power(
            same.average(same.agree), ignored.average(ignored.agree), self._is_above(same, ignored),
            random.average(random.agree), self._is_above(same, random),
        )  # fmt: skip

    def _is_above(self, result: Evidence, control: Evidence) -> bool:
        gain = (1 + result.per_unit(result.agree) - control.per_unit(control.agree)) / 2
        return lower_mean(gain, self.delta, weights=result.unit_weights) > 0.5

    # ------------------------------------------------------------ breakdowns

    def by_class(self) -> dict[int, Estimate]:
        """IIA for each top class of the original under the intervention (of the first token in a sequence)."""
        classes = self.evidence.classes[:, 0]
        return {int(c): self._among(self.evidence.agree, classes == c) for c in np.unique(classes)}

    def by_rate(self) -> dict[float, tuple[Estimate, Estimate]]:
        """IIA and KL for each rate of swapping."""
        rates, estimates = self.evidence.rate, {}
        for r in np.unique(rates):
            some = self.evidence.part(rates == r)
            kl = bootstrap(some.per_unit(some.kl), weights=some.unit_weights)
            estimates[round(float(r), 6)] = (self._among(self.evidence.agree, rates == r, planned=True), kl)
        return estimates

    def minus(self, other: Verification) -> Difference:
        """This plan minus another, on the same swaps: both must be of one seed, number, rate, sites and data.

        For a decision that may stop early: `cmrc.better`.
        """
        if self.setting != other.setting:
            differ = [key for key in self.setting if self.setting[key] != other.setting.get(key)]
            raise VerifyError(
                f"the two were not verified on the same swaps: {', '.join(differ)} differ", fix="verify both alike"
            )
        pairs = []
        for name in ("agree", "kl"):
            ours, theirs = (e.per_unit(getattr(e, name).astype(np.float64)) for e in (self.evidence, other.evidence))
            pairs.append(_paired(ours - theirs, self.evidence.unit_weights))
        (iia, iia_p), (kl, kl_p) = pairs
        return Difference(iia, iia_p, kl, kl_p)

    def _rate(self, values: Array) -> Estimate:
        e = self.evidence
        return rate(e.per_unit(values), weights=e.unit_weights, binary=e.binary)

    def _mean(self, values: Array) -> Estimate:
        return bootstrap(self.evidence.per_unit(values), weights=self.evidence.unit_weights)

    def _among(self, values: Array, rows: Array, *, planned: bool = False) -> Estimate:
        """The rate among some of the swaps. Units count by their share of such swaps, E[u x]/E[u] as in `bounds`.

        Where the shares were planned and no outcome, weights may be scaled by the largest of them.
        """
        some = self.evidence.part(rows)
        everyone, all_counts = np.unique(self.evidence.unit, return_counts=True)
        names, counts = np.unique(some.unit, return_counts=True)
        share = counts / all_counts[np.searchsorted(everyone, names)]
        weights = share if some.unit_weights is None else share * some.unit_weights
        scaled = weights / weights.max() if planned else weights
        plain = None if (scaled == 1).all() else scaled
        return rate(some.per_unit(values[rows]), weights=plain, binary=self.evidence.binary)

    # ------------------------------------------------------------ words

    @cached_property
    def verdict(self) -> str:
        """What may be concluded, in a few sentences."""
        level, about = f"{1 - self.delta:g}", ABOUT[self.scope]
        inputs = self.setting["inputs"]
        if self.decision is not None:
            d = self.decision
            words, counted = d.target.words, f"{inputs} inputs, {d.counted}"
            said = f"{d.target} {d.outcome.value.upper() if d.holds is not None else d.outcome.value} for {about}."
            upward = d.target.quantity.at_least == (d.holds is not False)
            shown = f"at least {d.low:.4f}" if upward else f"at most {d.high:.4f}"
            lines = [
                f"{said} {_capital(words)} is {shown} with probability {level} (estimate {d.value:.4f}; {counted})."
            ]
            if d.outcome in (Standing.OPEN, Standing.HOPELESS):
                lines.append(self._advice(d))
        elif self.swapped is None:
            least = lower_mean(self.plain.values("agreement"), self.delta, binary=self.plain.evidence.binary)
            lines = [
                f"Without swaps, both models give the same answer on at least {least:.4f} of {about}, with probability {level} "
                f"(estimate {self.plain.agreement.value:.4f}; {inputs} inputs). This says nothing about interventions."
            ]
        else:
            e = self.evidence
            units = f", {e.units} pairs" if self.scope is Scope.POPULATION else ""
            lines = [
                f"IIA is at least {self.ladder[-1].bound:.4f} for {about}, with probability {level} "
                f"(estimate {self.iia.value:.4f}; {inputs} inputs{units}, {len(e)} swaps)."
            ]
        if self.power is not None:
            lines.append(str(self.power))
        return "\n".join(filter(None, lines))

    def _advice(self, decision: Decision) -> str:
        """How many inputs an undecided target needs."""
        target, delta = decision.target, decision.delta
        each, what = 1, "inputs"
        if decision.swaps and decision.scope is Scope.FIXED:
            what = "swaps"
        elif decision.swaps and self.setting["stress"] is not None:
            what = "pairs"  # of the inputs that the stress lets in
        elif decision.swaps:
            each = 2
        least = f"It needs at least {each * target.needed(delta)} {what} even if all are perfect"
        if decision.swaps:
            enough = forecast(target, target.values(self.evidence), delta, weights=self.evidence.unit_weights)
        else:
            enough = forecast(target, target.good(self.plain.values(target.name)), delta)
        if enough is None:
            return f"{least}; by this estimate it does not hold."
        return f"{least}, and about {each * enough} if the estimate is right."

    def __repr__(self) -> str:
        if self.swapped is None:
            return f"Verification(agreement {self.plain.agreement}, no swaps)"
        return f"Verification(IIA {self.iia}, {len(self.evidence)} swaps)"

    def __str__(self) -> str:
        sites = [f"{site} ({kept} of {units} units retained)" for site, (kept, units) in self.keep.items()]
        more = f" and {len(sites) - SHOWN} more sites" if len(sites) > SHOWN else ""
        where = ", ".join(sites[:SHOWN]) + more
        swaps = f"{self.setting['swaps']} swaps at rate {self.setting['p']}" if self.swapped is not None else "no swaps"
        lines = [
            f"{swaps} on {self.setting['inputs']} inputs: {where}"
            if where
            else f"{swaps} on {self.setting['inputs']} inputs"
        ]
        if self.swapped is not None:
            lines += [f"not swapped: {site}: {why}" for site, why in self.setting.get("not swapped", {}).items()]
        lines += [""]
        rows = []
        if self.swapped is not None:
            rows = [("IIA", str(self.iia))]
            if not self.is_regression:
                rows += [("KL(original ‖ reduced)", str(self.kl)), ("margin", str(self.margin))]
            rows += [("D2 = E‖Δz‖²", str(self.d2)), ("E‖Δz‖∞²", str(self.largest2))]
        rows += [("agreement without swaps", str(self.plain.agreement))]
        if self.plain.accuracy is not None:
            before, after = self.plain.accuracy
            rows += [("accuracy, original", str(before)), ("accuracy, reduced", str(after))]
        if self.swapped is not None and len(rates := self.by_rate()) > 1:
            rows += [(f"IIA at rate {r:g}", str(i)) for r, (i, _) in rates.items()]
        lines += [f"  {name:26}{value}" for name, value in rows]
        if self.controls:
            lines += ["", "controls (IIA)"]
            lines += [f"  {name:12}{_control(e)['iia']:.4f}  {CONTROLS[name]}" for name, e in self.controls.items()]
        if self.swapped is not None:
            lines += ["", f"certificates: IIA is at least           estimate   with probability {1 - self.delta:g}"]
            lines += [f"  {r.name:36}{r.value:10.4f}   {r.bound:.4f}" for r in self.ladder]
        return "\n".join([*lines, "", self.verdict])

    def to_json(self) -> dict[str, Any]:
        accuracy = self.plain.accuracy
        document: dict[str, Any] = {
            "verdict": self.verdict,
            "about": str(self.scope),
            "keep": {site: list(pair) for site, pair in self.keep.items()},
            **{key: self.setting[key] for key in ("swaps", "p", "seed", "inputs")},
            "agreement": self.plain.agreement.to_json(),
            "accuracy": None if accuracy is None else {"original": accuracy[0].to_json(), "reduced": accuracy[1].to_json()},
            "decision": None if self.decision is None else self.decision.to_json(),
        }  # fmt: skip
        return document if self.swapped is None else {**document, **self._swapped_json()}

    def _swapped_json(self) -> dict[str, Any]:
        regression = self.is_regression
        return {
            "units": self.evidence.units,
            "iia": self.iia.to_json(),
            "kl": None if regression else self.kl.to_json(),
            "d2": self.d2.to_json(),
            "largest2": self.largest2.to_json(),
            "margin": None if regression else self.margin.to_json(),
            "by_class": {} if regression else {str(c): e.to_json() for c, e in self.by_class().items()},
            "by_rate": {str(r): {"iia": i.to_json(), "kl": None if regression else k.to_json()} for r, (i, k) in self.by_rate().items()},
            "controls": {name: _control(e) for name, e in self.controls.items()},
            "warnings": [] if self.power is None else list(self.power.warnings),
            "certificates": {
                "delta": self.delta,
                **{r.name: {"value": r.value, "bound": r.bound, "epsilon": r.epsilon, "needs": r.needs} for r in self.ladder},
            },
        }  # fmt: skip


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _control(evidence: Evidence) -> dict[str, float | None]:
    return {
        "iia": evidence.average(evidence.agree),
        "kl": None if np.isnan(evidence.kl).any() else evidence.average(evidence.kl),
        "d2": evidence.average(evidence.squared),
    }


def _paired(differences: Array, weights: Array | None) -> tuple[Estimate, float]:
    if np.isnan(differences).any():
        return Estimate(np.nan, np.nan, np.nan), np.nan
    means = resampled(differences, 0, weights)
    low, high = np.quantile(means, [0.025, 0.975])
    p = min(1.0, 2 * min((1 + np.sum(means <= 0)) / (1 + len(means)), (1 + np.sum(means >= 0)) / (1 + len(means))))
    return Estimate(float(np.average(differences, weights=weights)), float(low), float(high)), float(p)


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
        estimates = [getattr(results[name], "iia" if axes is left else "kl") for name in order]
        below, above = ([e.value - e.low for e in estimates], [e.high - e.value for e in estimates])
        axes.errorbar([shares[n] for n in order], [e.value for e in estimates], (below, above), marker="o", capsize=3)
        axes.set(xlabel="share of units kept", title=title)
    write_picture(figure, path)


def _share(result: Verification) -> float:
    kept, units = (sum(pair[i] for pair in result.keep.values()) for i in (0, 1))
    return kept / units
