"""Intervals for rates and means, at a fixed number of samples and at any time.

    rate of 0s and 1s     Clopper and Pearson 1934: exact                at any time: a beta mixture (Robbins 1970)
    mean within [0, 1]    empirical Bernstein: Maurer and Pontil 2009    at any time: Waudby-Smith and Ramdas 2023, thm. 2
    mean without bounds   the bootstrap: approximate, for reports only

"At any time" means that the interval may be looked at after every sample, and the run stopped by what it says: with
probability 1 − δ it holds at all times together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cmrc.ir.graph import Array

RESAMPLES = 1999


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"

    def to_json(self) -> list[float]:
        return [self.value, self.low, self.high]


def is_binary(values: Array) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())


# ---------------------------------------------------------------- a fixed number of samples


def lower_rate(hits: int, count: int, delta: float) -> float:
    """The rate is above this with probability 1 − δ: the rate at which so many hits or more have probability δ."""
    from scipy import special  # here, since a lowering needs none of it

    return float(special.betaincinv(hits, count - hits + 1, delta)) if hits else 0.0


def upper_rate(hits: int, count: int, delta: float) -> float:
    return 1.0 - lower_rate(count - hits, count, delta)


def lower_mean(values: npt.ArrayLike, delta: float) -> float:
    """For values within [0, 1]: exact where they are 0 and 1, else mean − √(2V ln(2/δ)/n) − 7 ln(2/δ)/(3(n − 1))."""
    array = np.asarray(values, dtype=np.float64)
    if is_binary(array):
        return lower_rate(int(array.sum()), len(array), delta)
    count, log = len(array), math.log(2 / delta)
    if count < 2:
        return 0.0
    wide = math.sqrt(2 * float(array.var(ddof=1)) * log / count) + 7 * log / (3 * (count - 1))
    return max(0.0, float(array.mean()) - wide)


def upper_mean(values: npt.ArrayLike, delta: float) -> float:
    return 1.0 - lower_mean(1.0 - np.asarray(values, dtype=np.float64), delta)


def rate(values: npt.ArrayLike, *, level: float = 0.95) -> Estimate:
    """The mean of values within [0, 1] with a two-sided interval; exact where they are 0 and 1."""
    array, delta = np.asarray(values, dtype=np.float64), (1 - level) / 2
    return Estimate(float(array.mean()), lower_mean(array, delta), upper_mean(array, delta))


def bootstrap(values: npt.ArrayLike, *, level: float = 0.95, seed: int = 0) -> Estimate:
    """The mean with the percentile interval of the bootstrap."""
    array = np.asarray(values, dtype=np.float64)
    low, high = np.quantile(resampled(array, seed), [(1 - level) / 2, (1 + level) / 2])
    return Estimate(float(array.mean()), float(low), float(high))


def resampled(values: Array, seed: int) -> Array:
    """The means of bootstrap samples; the same seed draws the same samples, so differences are paired."""
    if len(values) < 2 or np.ptp(values) == 0 or np.isnan(values).any():
        return np.full(RESAMPLES, float(values.mean()))
    from scipy import stats

    found = stats.bootstrap(
        (values,), np.mean, n_resamples=RESAMPLES, method="percentile", batch=100, rng=np.random.default_rng(seed)
    )
    means: Array = np.asarray(found.bootstrap_distribution)
    return means


# ---------------------------------------------------------------- at any time


def at_any_time(values: npt.ArrayLike, delta: float) -> tuple[float, float]:
    """An interval for the mean of values within [0, 1] that may be looked at after every sample."""
    array = np.asarray(values, dtype=np.float64)
    if not len(array):
        return 0.0, 1.0
    return _mixture(int(array.sum()), len(array), delta) if is_binary(array) else _predictable(array, delta)


def _mixture(hits: int, count: int, delta: float) -> tuple[float, float]:
    """{θ : B(½ + s, ½ + f) / B(½, ½) / (θ^s (1 − θ)^f) < 1/δ}: the likelihood ratio is a martingale at the true rate."""
    from scipy import optimize, special

    misses = count - hits
    evidence = special.betaln(0.5 + hits, 0.5 + misses) - special.betaln(0.5, 0.5) - math.log(1 / delta)

    def beyond(theta: float) -> float:
        return float(evidence - special.xlogy(hits, theta) - special.xlog1py(misses, -theta))

    edge, middle = 1e-12, hits / count
    low = optimize.brentq(beyond, edge, middle) if hits and beyond(edge) > 0 else 0.0
    high = optimize.brentq(beyond, middle, 1 - edge) if misses and beyond(1 - edge) > 0 else 1.0
    return float(low), float(high)


def _predictable(values: Array, delta: float) -> tuple[float, float]:
    """Σλx/Σλ ± (ln(2/δ) + Σ v ψ(λ))/Σλ with v = 4(x − mean before)², ψ(λ) = (−ln(1 − λ) − λ)/4, λ from what came before."""
    time = np.arange(1, len(values) + 1)
    means = (0.5 + np.cumsum(values)) / (time + 1)
    variances = (0.25 + np.cumsum((values - means) ** 2)) / (time + 1)
    before, spread = np.concatenate([[0.5], means[:-1]]), np.concatenate([[0.25], variances[:-1]])
    log = math.log(2 / delta)
    bets = np.minimum(np.sqrt(2 * log / (spread * time * np.log1p(time))), 0.5)
    cost = 4 * (values - before) ** 2 * (-np.log1p(-bets) - bets) / 4
    center, wide = float(bets @ values / bets.sum()), float((log + cost.sum()) / bets.sum())
    return max(0.0, center - wide), min(1.0, center + wide)
