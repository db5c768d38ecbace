"""Lower bounds of interchange-intervention agreement, from loose to sharp, and what each rests on.

Under an intervention drawn from the protocol, m is the margin of the original's top logit over the next, Δz the logits of
the reduced model minus the original's. Each rung bounds IIA = Pr[same top class] from below, and each is below the next:

    markov       max over ε of 1 − Pr[m ≤ 2ε] − E‖Δz‖²/ε²        the paper's certificate (D2 = E‖Δz‖²)
    tail         max over ε of 1 − Pr[m ≤ 2ε] − Pr[‖Δz‖∞ > ε]
    samplewise   Pr[m > 2‖Δz‖∞]
    range        Pr[m > max Δz − min Δz]
    direct       Pr[same top class], the IIA itself

Each is given as an estimate, and as a lower confidence bound at level 1 − δ over independent units: pairs of inputs for
statements about the population (`draws.py`). The estimates are in this order always. Bounds come from different numbers and need
not be, so a rung's bound is lowered to the next one's where it lies above it: that keeps every bound true, and the order too.

Where an ε is chosen, it is chosen on the first fifth of the units, and the bound is made of the rest. ‖Δz‖² has no upper limit,
so the bound of `markov` uses E min(‖Δz‖²/ε², 1): no less than Pr[‖Δz‖∞ > ε], and never more than D2/ε².

`markov` needs no more than a distribution of margins and the number D2: `from_d2`, with D2 from calibration statistics
(`distortion.py`), needs no swap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cmrc.errors import CertifyError
from cmrc.ir.graph import Array
from cmrc.verification.bounds import lower_mean, upper_mean
from cmrc.verification.evidence import Evidence
from cmrc.verification.targets import EVENTS, Decision

NAMES = ("markov", "tail", "samplewise", "range", "direct")
NEEDS = {
    "markov": "margins and D2: calibration statistics suffice",
    "tail": "the distributions of margins and of distortion, apart",
    "samplewise": "interchange runs",
    "range": "interchange runs",
    "direct": "interchange runs",
}
FOR_CHOICE = 5  # one unit in so many chooses ε


@dataclass(frozen=True, slots=True)
class Rung:
    """One certificate: the estimate, the bound that holds with probability 1 − δ, and the ε that it was made with."""

    name: str
    value: float
    bound: float
    needs: str
    epsilon: float | None = None


def require_level(delta: float) -> None:
    """Require a valid probability of failure, before the work."""
    if not 0 < delta < 1:
        raise CertifyError(f"delta is {delta:g}", fix="give a probability between 0 and 1, such as 0.05")


def ladder(evidence: Evidence, *, delta: float = 0.05) -> tuple[Rung, ...]:
    """All rungs, each bound at level 1 − δ by itself, and no higher than the next."""
    rungs = [_rung(name, evidence, delta) for name in NAMES]
    for i in reversed(range(len(rungs) - 1)):
        rungs[i] = replace(rungs[i], bound=min(rungs[i].bound, rungs[i + 1].bound))
    return tuple(rungs)


def _rung(name: str, evidence: Evidence, delta: float) -> Rung:
    if name in ("samplewise", "range", "direct"):
        values, weights = EVENTS["iia" if name == "direct" else name](evidence), evidence.unit_weights
        bound = lower_mean(values, delta, weights=weights, binary=evidence.binary)
        return Rung(name, float(np.average(values, weights=weights)), bound, NEEDS[name])
    choose = best_markov if name == "markov" else best_tail
    value, _ = choose(evidence)
    first, rest = evidence.first_units(evidence.units // FOR_CHOICE)
    epsilon = choose(first)[1] if first.units > 1 else np.inf
    if not np.isfinite(epsilon):
        return Rung(name, value, 0.0, NEEDS[name])
    close = rest.margin <= 2 * epsilon
    far: Array = rest.largest > epsilon
    if name == "markov":
        far = np.minimum(rest.squared, epsilon**2) / epsilon**2 if epsilon > 0 else np.ones_like(rest.squared)
    either = upper_mean((rest.per_unit(close) + rest.per_unit(far)) / 2, delta, weights=rest.unit_weights)
    return Rung(name, value, max(0.0, 1 - 2 * either), NEEDS[name], float(epsilon))


def best_markov(evidence: Evidence) -> tuple[float, float]:
    return from_d2(evidence.margin.ravel(), evidence.average(evidence.squared), weights=evidence.shares.ravel())


def from_d2(margins: npt.ArrayLike, d2: float, *, weights: npt.ArrayLike | None = None) -> tuple[float, float]:
    """The best of 1 − Pr[m ≤ 2ε] − D2/ε² over ε, and that ε, for margins and a number for D2.

    With the D2 of calibration statistics (`distortion`) it needs no swap. It then holds as far as the margins without swaps are
    those with them. The best ε lies just below half a margin.
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


def best_tail(evidence: Evidence) -> tuple[float, float]:
    return from_tails(evidence.margin.ravel(), evidence.largest.ravel(), weights=evidence.shares.ravel())


def from_tails(
    margins: npt.ArrayLike, largest: npt.ArrayLike, *, weights: npt.ArrayLike | None = None
) -> tuple[float, float]:
    """The best of 1 − Pr[m ≤ 2ε] − Pr[‖Δz‖∞ > ε] over ε, and that ε.

    Between two distortions Pr[‖Δz‖∞ > ε] stays, and Pr[m ≤ 2ε] grows: the best ε is one of the distortions.
    """
    m, m_share = _sorted_shares(margins, weights)
    e, e_share = _sorted_shares(largest, weights)
    close = np.concatenate([[0.0], np.cumsum(m_share)])[np.searchsorted(m, 2 * e, side="right")]
    beyond = np.concatenate([np.cumsum(e_share[::-1])[::-1], [0.0]])  # summed from above: exactly 0 beyond the largest
    far = beyond[np.searchsorted(e, e, side="right")]
    values = 1 - close - far
    best = int(np.argmax(values))
    return max(0.0, float(values[best])), float(e[best])


def _sorted_shares(values: npt.ArrayLike, weights: npt.ArrayLike | None) -> tuple[Array, Array]:
    array = np.asarray(values, dtype=np.float64)
    weight = np.ones(len(array)) if weights is None else np.asarray(weights, dtype=np.float64)
    order = np.argsort(array, kind="stable")
    return array[order], weight[order] / weight.sum()


# ---------------------------------------------------------------- the smallest of several


@dataclass(frozen=True, slots=True)
class Search:
    """The smallest certified candidate (its place in the list; None where not even the first is), and every test."""

    chosen: int | None
    decisions: tuple[Decision, ...]


def smallest(candidates: Iterable[Any], test: Callable[[Any], Decision]) -> Search:
    """Test candidates from the largest to the smallest, and stop at the first that is not certified.

    The order is fixed before any held-out data are seen, and a candidate is tested only if all larger ones were certified. So
    the chance that any certified one does not meet its target is at most the δ of a single test, however many are tested:
    the tests may all use the same inputs.
    """
    decisions: list[Decision] = []
    chosen: int | None = None
    for i, candidate in enumerate(candidates):
        decisions.append(test(candidate))
        if decisions[-1].holds is not True:
            break
        chosen = i
    return Search(chosen, tuple(decisions))
