"""Targets that a run can decide: `iia>=0.95`, `agreement>=0.99`, `drop<=0.01`, `kl<=0.1`.

    iia, range, samplewise    a certificate's event, under swaps                at least
    agreement                 the same answer without swaps                     at least
    accuracy                  of the reduced model, without swaps               at least
    drop                      accuracy of the original minus the reduced's      at most
    kl, d2                    KL(original ‖ reduced), ‖Δz‖², under swaps        at most

KL and ‖Δz‖² have no upper limit, so nothing can be shown about their means from a sample. Each swap is counted with at most
`clip` (ten times the target unless said: `kl<=0.1 clip 5`), and what is decided is the mean of that.

A decision looks at a bound that holds at all times together (`bounds.refuted`), so a run may stop as soon as it falls. "It holds" is
wrong with probability at most δ, and so is "it does not": only one of the two can be wrong.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from cmrc.errors import CertifyError
from cmrc.ir.graph import Array
from cmrc.verification import bounds
from cmrc.verification.draws import Scope
from cmrc.verification.evidence import Evidence

SAMPLES, MOST_SAMPLED = 9, 100_000  # of a forecast: how many samples, and up to how many units each
CLIP = 10  # times the target: what a swap counts at most where values have no limit
NUMBER = r"([0-9]*\.?[0-9]+(?:e-?[0-9]+)?)"


@dataclass(frozen=True, slots=True)
class Quantity:
    """What a target may name: in words, whether large is good, whether swaps are needed, and its limits (None: clipped)."""

    words: str
    at_least: bool
    swaps: bool
    limits: tuple[float, float] | None = (0.0, 1.0)


QUANTITIES = {
    "iia": Quantity("IIA", at_least=True, swaps=True),
    "range": Quantity("the certificate `range`", at_least=True, swaps=True),
    "samplewise": Quantity("the certificate `samplewise`", at_least=True, swaps=True),
    "agreement": Quantity("agreement without swaps", at_least=True, swaps=False),
    "accuracy": Quantity("the reduced model's accuracy", at_least=True, swaps=False),
    "drop": Quantity("the drop of accuracy", at_least=False, swaps=False, limits=(-1.0, 1.0)),
    "kl": Quantity("KL", at_least=False, swaps=True, limits=None),
    "d2": Quantity("D2", at_least=False, swaps=True, limits=None),
}
FORMS = "write iia>=0.95, range>=0.9, samplewise>=0.9, agreement>=0.98, accuracy>=0.9, drop<=0.01, kl<=0.1 or d2<=5"


@dataclass(frozen=True, slots=True)
class Target:
    """A quantity and the value that it must reach (or must not exceed)."""

    name: str
    value: float
    clip: float | None = None  # of kl and d2

    @classmethod
    def parse(cls, text: str) -> Target:
        match = re.fullmatch(rf"\s*([a-z0-9]+?)\s*(>=|<=)\s*{NUMBER}(?:\s+clip\s+{NUMBER})?\s*", text)
        quantity = QUANTITIES.get(match.group(1)) if match else None
        if match is None or quantity is None or (match.group(2) == ">=") != quantity.at_least:
            raise CertifyError(f"the target {text!r} is not understood", fix=FORMS)
        value, clip = float(match.group(3)), None if match.group(4) is None else float(match.group(4))
        if quantity.limits is None:
            clip = CLIP * value if clip is None else clip
        elif clip is not None:
            raise CertifyError(
                f"{match.group(1)} is not clipped", fix=f"write {match.group(1)}{match.group(2)}{value:g}"
            )
        low, high = quantity.limits or (0.0, clip or 0.0)
        if not max(low, 0.0) < value < high:
            raise CertifyError(
                f"the target {text!r} is out of range", fix=f"give a value between {max(low, 0.0):g} and {high:g}"
            )
        return cls(match.group(1), value, clip)

    @classmethod
    def of(cls, target: str | Target) -> Target:
        return cls.parse(target) if isinstance(target, str) else target

    @property
    def quantity(self) -> Quantity:
        return QUANTITIES[self.name]

    @property
    def limits(self) -> tuple[float, float]:
        return self.quantity.limits or (0.0, self.clip or 0.0)

    def __str__(self) -> str:
        clip = "" if self.clip is None or self.clip == CLIP * self.value else f" clip {self.clip:g}"
        return f"{self.name}{'>=' if self.quantity.at_least else '<='}{self.value:g}{clip}"

    @property
    def words(self) -> str:
        """The quantity, and where it is clipped."""
        return self.quantity.words + ("" if self.clip is None else f" (a swap counts at most {self.clip:g})")

    # ------------------------------------------------------------ on a scale where 1 is best

    def good(self, values: Array) -> Array:
        """Values within [0, 1], large ones good."""
        low, high = self.limits
        share = (np.clip(values, low, high) - low) / (high - low)
        return np.asarray(share if self.quantity.at_least else 1 - share)

    def back(self, good: float) -> float:
        low, high = self.limits
        return low + (high - low) * (good if self.quantity.at_least else 1 - good)

    @property
    def least(self) -> float:
        """The target itself on that scale."""
        return float(self.good(np.asarray(self.value)))

    def needed(self, delta: float) -> int:
        """How many units (pairs of inputs, or inputs where nothing is swapped) it takes at least, if every one is perfect."""
        return bounds.needed(self.least, delta)

    def values(self, evidence: Evidence) -> Array:
        """For each unit of evidence under swaps, on that scale."""
        if self.name in EVENTS:
            return self.good(EVENTS[self.name](evidence))
        numbers = evidence.kl if self.name == "kl" else evidence.squared
        return self.good(evidence.per_unit(np.minimum(numbers, self.limits[1])))


def same_class(evidence: Evidence) -> Array:
    """For each unit how often both answer the same."""
    return evidence.per_unit(evidence.agree)


def within_range(evidence: Evidence) -> Array:
    """For each unit how often the margin exceeds max Δz − min Δz, which rules out another answer."""
    return evidence.per_unit(evidence.margin > evidence.spread)


def within_twice_largest(evidence: Evidence) -> Array:
    """For each unit how often the margin exceeds 2‖Δz‖∞, which rules out another answer too."""
    return evidence.per_unit(evidence.margin > 2 * evidence.largest)


EVENTS = {"iia": same_class, "range": within_range, "samplewise": within_twice_largest}


class Standing(Enum):
    """How a decision ended, with the words for it."""

    HOLDS = "holds"
    FAILS = "does not hold"
    OPEN = "is undecided"
    HOPELESS = "cannot be shown any more"  # not even if all that is left were perfect


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a target holds, with its estimate, and a lower and an upper bound that each hold with probability 1 − δ."""

    target: Target
    outcome: Standing
    value: float
    low: float
    high: float
    units: int
    swaps: int
    delta: float
    scope: Scope = Scope.POPULATION

    @property
    def holds(self) -> bool | None:
        """None where the inputs did not suffice to tell."""
        return {Standing.HOLDS: True, Standing.FAILS: False}.get(self.outcome)

    @property
    def counted(self) -> str:
        """What was examined, in words."""
        if not self.swaps:
            return "no swaps"
        return f"{self.swaps} swaps" + (f" on {self.units} pairs" if self.scope is Scope.POPULATION else "")

    def __str__(self) -> str:
        return (
            f"{self.target} {self.outcome.value} after {self.counted}: {self.value:.4f}, above {self.low:.4f} and "
            f"below {self.high:.4f} with probability {1 - self.delta:g} each"
        )

    def to_json(self) -> dict[str, Any]:
        return {"target": str(self.target), "holds": self.holds, "outcome": self.outcome.name.lower(), "value": self.value,
                "bounds": [self.low, self.high], "units": self.units, "swaps": self.swaps, "delta": self.delta,
                "about": str(self.scope)}  # fmt: skip


def decide(
    target: Target,
    good: Array,
    delta: float,
    *,
    horizon: int,
    swaps: int,
    weights: Array | None = None,
    scope: Scope = Scope.POPULATION,
) -> Decision:
    """Look at the values of units so far, of at most `horizon` that may come. One may look as often as one likes."""
    least = target.least
    low = bounds.lower_any_time(good, delta, weights=weights, horizon=horizon, least=least)
    high = bounds.upper_any_time(good, delta, weights=weights, horizon=horizon, most=least)
    if low >= least:
        outcome = Standing.HOLDS
    elif high <= least:
        outcome = Standing.FAILS
    else:
        outcome = Standing.OPEN if _can_still_hold(good, least, delta, horizon, weights) else Standing.HOPELESS
    low, high = sorted((target.back(low), target.back(high)))
    value = target.back(float(np.average(good, weights=weights)))
    return Decision(target, outcome, value, low, high, len(good), swaps, delta, scope)


def forecast(target: Target, good: Array, delta: float, *, weights: Array | None = None) -> int | None:
    """About how many units would show the target if they are like these: most of a few samples of that many do.

    None where the estimate does not meet the target. The search begins at (z σ / (mean − target))², the normal approximation,
    and stays there where that is too many to sample.
    """
    from scipy import stats

    least, u = target.least, np.ones(len(good)) if weights is None else weights
    mean = float(np.average(good, weights=u))
    if mean <= least:
        return None
    spread = float(np.mean((u * (good - mean)) ** 2)) / float(u.mean()) ** 2
    count = max(bounds.needed(least, delta), round(float(stats.norm.isf(delta)) ** 2 * spread / (mean - least) ** 2))
    rng = np.random.default_rng(0)
    while count < MOST_SAMPLED:
        rows = rng.integers(len(good), size=(count, SAMPLES))
        shown = bounds.refuted(good[rows], np.full(SAMPLES, least), delta, weights=u[rows], horizon=count) > 0
        if shown.mean() > 0.5:
            break
        count = math.ceil(1.2 * count)
    return count


def _can_still_hold(good: Array, least: float, delta: float, horizon: int, weights: Array | None) -> bool:
    """Whether the target would be shown if every unit to come were perfect."""
    left = max(0, horizon - len(good))
    best = np.concatenate([good, np.ones(left)])
    full = None if weights is None else np.concatenate([weights, np.ones(left)])
    return bool(not left or bounds.refuted(best, [least], delta, weights=full, horizon=horizon)[0])


def require_enough(target: Target, delta: float, inputs: int, scope: Scope) -> None:
    """Require that the data can show the target, before the work."""
    if scope is Scope.FIXED and target.quantity.swaps:
        return
    each = 2 if target.quantity.swaps else 1
    least = each * target.needed(delta)
    if inputs < least:
        raise CertifyError(
            f"{target} at level {1 - delta:g} needs at least {least} held-out inputs, even if all agree, but there are {inputs}",
            fix="give more held-out data, ask for less, or allow a larger delta",
        )
