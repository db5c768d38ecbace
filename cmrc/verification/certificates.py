"""Lower bounds of interchange-intervention agreement, from loose to sharp, and what each rests on.

Under an intervention drawn from the protocol, m is the margin of the original's top logit over the next, Δz the logits of
the reduced model minus the original's. Each rung bounds IIA = Pr[same top class] from below, and each is below the next:

    markov       max over ε of 1 − Pr[m ≤ 2ε] − E‖Δz‖²/ε²        the paper's certificate (D2 = E‖Δz‖²)
    tail         max over ε of 1 − Pr[m ≤ 2ε] − Pr[‖Δz‖∞ > ε]
    samplewise   Pr[m > 2‖Δz‖∞]
    range        Pr[m > max Δz − min Δz]
    direct       Pr[same top class], the IIA itself

`markov` needs no more than a distribution of margins and one number D2, so planning can read it off calibration statistics
(`from_scores`); `tail` needs both distributions but not jointly; the others need the interchange runs themselves.

Each is given as an estimate, and as a lower confidence bound over the interventions at level 1 − δ. Where an ε is chosen, it
is chosen on the first fifth of the swaps and the bound is made of the rest. ‖Δz‖² has no bound, so the confidence bound of
`markov` uses E min(‖Δz‖²/ε², 1): larger than Pr[‖Δz‖∞ > ε], and never larger than D2/ε².
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cmrc.errors import CertifyError
from cmrc.ir.graph import Array
from cmrc.verification.bounds import at_any_time, lower_mean, upper_mean
from cmrc.verification.evidence import Evidence

NAMES = ("markov", "tail", "samplewise", "range", "direct")
NEEDS = {
    "markov": "margins and D2: calibration statistics suffice",
    "tail": "the distributions of margins and of distortion, apart",
    "samplewise": "interchange runs",
    "range": "interchange runs",
    "direct": "interchange runs",
}
FOR_CHOICE = 5  # one swap in so many chooses ε


@dataclass(frozen=True, slots=True)
class Rung:
    """One certificate: the estimate, the bound that holds with probability 1 − δ, and the ε it was made with."""

    name: str
    value: float
    bound: float
    needs: str
    epsilon: float | None = None


def require_level(delta: float) -> None:
    """That a bound may fail with this probability: asked before the work."""
    if not 0 < delta < 1:
        raise CertifyError(f"delta is {delta:g}", fix="give a probability between 0 and 1, such as 0.05")


def ladder(evidence: Evidence, *, delta: float = 0.05) -> tuple[Rung, ...]:
    """All rungs, each bound at level 1 − δ by itself."""
    return tuple(_rung(name, evidence, delta) for name in NAMES)


def indicator(name: str, evidence: Evidence) -> Array:
    """For each swap the share of its tokens (one where there are none) on which a rung's event holds."""
    if name == "direct":
        return evidence.mean(evidence.agree)
    wide = evidence.spread if name == "range" else 2 * evidence.largest
    return evidence.mean(evidence.margin > wide)


def _rung(name: str, evidence: Evidence, delta: float) -> Rung:
    if name in ("samplewise", "range", "direct"):
        values = indicator(name, evidence)
        return Rung(name, float(values.mean()), lower_mean(values, delta), NEEDS[name])
    choose = _best_markov if name == "markov" else _best_tail
    value, _ = choose(evidence)
    split = len(evidence) // FOR_CHOICE
    first, rest = evidence.part(slice(0, split)), evidence.part(slice(split, None))
    if split < 2:
        return Rung(name, value, 0.0, NEEDS[name])
    _, epsilon = choose(first)
    if not np.isfinite(epsilon):
        return Rung(name, value, 0.0, NEEDS[name])
    close = upper_mean(rest.mean(rest.margin <= 2 * epsilon), delta / 2)
    if name == "markov":
        ratio = np.minimum(rest.squared, epsilon**2) / epsilon**2 if epsilon > 0 else np.ones_like(rest.squared)
        far = upper_mean(rest.mean(ratio), delta / 2)
    else:
        far = upper_mean(rest.mean(rest.largest > epsilon), delta / 2)
    return Rung(name, value, max(0.0, 1 - close - far), NEEDS[name], float(epsilon))


def _best_markov(evidence: Evidence) -> tuple[float, float]:
    d2 = float(evidence.mean(evidence.squared).mean())
    return from_scores(evidence.margin.ravel(), d2, weights=evidence.weights.ravel())


def from_scores(margins: npt.ArrayLike, d2: float, *, weights: npt.ArrayLike | None = None) -> tuple[float, float]:
    """The best of 1 − Pr[m ≤ 2ε] − D2/ε² over ε, and that ε, for margins and any number for D2.

    With D2 as a sum of scores (Var·‖W‖², the additive estimate) it needs no interchange run, and holds only as far as
    the margins without interventions are those with them, and the scores add up. The best ε lies just below half a margin.
    """
    m, share = _sorted_shares(margins, weights)
    below = np.concatenate([[0.0], np.cumsum(share)[:-1]])  # Pr[margin < m_i], where ties count as below their first
    below = below[np.searchsorted(m, m)]
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.where(m > 0, 1 - below - (d2 / (m / 2) ** 2 if d2 else 0.0), -np.inf)
    best = int(np.argmax(values)) if len(values) else 0
    if not len(values) or values[best] <= 0:
        return 0.0, float(np.median(m) / 2) if len(m) else np.inf
    return float(values[best]), float(np.nextafter(m[best] / 2, 0))


def by_margin(gamma: float, d2: float) -> float:
    """1 − 4·D2/γ², where the margin is at least γ under every intervention: an assumption, which no sample can prove."""
    return max(0.0, 1 - 4 * d2 / gamma**2) if gamma > 0 else 0.0


def _best_tail(evidence: Evidence) -> tuple[float, float]:
    """Between two distortions Pr[‖Δz‖∞ > ε] stays, and Pr[m ≤ 2ε] grows: the best ε is one of the distortions."""
    weights = evidence.weights.ravel()
    m, m_share = _sorted_shares(evidence.margin.ravel(), weights)
    e, e_share = _sorted_shares(evidence.largest.ravel(), weights)
    close = np.concatenate([[0.0], np.cumsum(m_share)])[np.searchsorted(m, 2 * e, side="right")]
    far = 1 - np.cumsum(e_share)[np.searchsorted(e, e, side="right") - 1]
    values = 1 - close - np.maximum(far, 0.0)  # the shares add up to 1 only within rounding
    best = int(np.argmax(values))
    return max(0.0, float(values[best])), float(e[best])


def _sorted_shares(values: npt.ArrayLike, weights: npt.ArrayLike | None) -> tuple[Array, Array]:
    array = np.asarray(values, dtype=np.float64)
    weight = np.ones(len(array)) if weights is None else np.asarray(weights, dtype=np.float64)
    order = np.argsort(array, kind="stable")
    return array[order], weight[order] / weight.sum()


# ---------------------------------------------------------------- targets


@dataclass(frozen=True, slots=True)
class Target:
    """`iia>=0.95`, or a rung by its name: `range>=0.9`."""

    rung: str
    least: float

    @classmethod
    def parse(cls, text: str) -> Target:
        found = re.fullmatch(r"\s*([a-z]+)\s*>=\s*([0-9.]+)\s*", text)
        name = {"iia": "direct"}.get(found.group(1), found.group(1)) if found else ""
        try:
            least = float(found.group(2)) if found else np.nan
        except ValueError:
            least = np.nan
        if name not in ("direct", "range", "samplewise") or not 0 < least < 1:
            raise CertifyError(
                f"the target {text!r} is not understood", fix="write iia>=0.95, range>=0.9 or samplewise>=0.9"
            )
        return cls(name, least)

    def __str__(self) -> str:
        return f"{'iia' if self.rung == 'direct' else self.rung}>={self.least:g}"


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a target holds: True, False, or None where the swaps did not suffice to tell; with its interval."""

    target: Target
    holds: bool | None
    low: float
    high: float
    swaps: int
    delta: float

    def __str__(self) -> str:
        said = {True: "holds", False: "does not hold", None: "is undecided"}[self.holds]
        return f"{self.target} {said} after {self.swaps} swaps: [{self.low:.4f}, {self.high:.4f}] at level {1 - self.delta:g}"

    def to_json(self) -> dict[str, Any]:
        return {"target": str(self.target), "holds": self.holds, "interval": [self.low, self.high], "swaps": self.swaps,
                "delta": self.delta}  # fmt: skip


def decide(target: Target, evidence: Evidence, delta: float) -> Decision:
    """Look at an interval that may be looked at as often as one likes."""
    low, high = at_any_time(indicator(target.rung, evidence), delta)
    holds = True if low >= target.least else False if high < target.least else None
    return Decision(target, holds, low, high, len(evidence), delta)


@dataclass(frozen=True, slots=True)
class Search:
    """The smallest certified candidate (its place in the list; None where not even the first is), and every test made."""

    chosen: int | None
    decisions: tuple[Decision, ...]


def smallest(candidates: Iterable[Any], test: Callable[[Any], Decision]) -> Search:
    """Test candidates from the largest to the smallest, and stop at the first that is not certified.

    The order is fixed before any data are seen, and a candidate is tested only if all larger ones were certified: then the
    chance that any certified one does not meet its target is at most the δ of a single test, however many are tested.
    """
    decisions: list[Decision] = []
    chosen: int | None = None
    for i, candidate in enumerate(candidates):
        decisions.append(test(candidate))
        if decisions[-1].holds is not True:
            break
        chosen = i
    return Search(chosen, tuple(decisions))
