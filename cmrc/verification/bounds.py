"""Bounds for means of independent values within [0, 1], at a fixed number of values and at any time.

    0s and 1s by nature, number fixed  Clopper and Pearson 1934: exact
    any values, weights, any time      betting (Ville 1939; Waudby-Smith and Ramdas 2024)
    mean without limits                the bootstrap: approximate, for reports only

**Betting.** To refute "the mean is at most m", start with a capital of 1 and stake a part λ of it on every value x:

    capital := capital · (1 + λ u (x − m)),    0 ≤ λ < 1/m,    u within [0, 1] the weight of the value

λ depends on earlier values only. If the mean is at most m, the capital is a supermartingale, and it ever reaches 1/δ with
probability at most δ. So one may look after every value, and stop as soon as it does. With weights, m is compared with
E[u x] / E[u]: nothing needs to be known of E[u].

Any λ is sound; a good one makes the bound tight. The number of values that can come, the horizon, is known. What is wanted
is a capital of 1/δ at its end, no matter how much more: a digital option, whose hedge is known. With p = δ · capital,
σ² the variance so far and r values to come, λ = φ(Φ⁻¹(p)) / (p σ √r). (STaR-Bets, Voráček and Orabona 2025, arXiv 2505.22422,
also recompute each stake from the capital that is still missing and the values to come.) Such bounds come close to the normal
approximation, and hold with certainty.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cmrc.ir.graph import Array

RESAMPLES = 1999
AIM = 1.1  # stakes aim at this multiple of 1/δ, since values come in steps
STAKE = 0.99  # the largest part of the capital that one value may cost
STEPS = 200  # how often stakes are recomputed over the horizon
FIRST = 20  # values from the first on, before which stakes are recomputed each time
FINE = 0.05  # distance of neighbouring nulls, in standard errors of the mean
MOST_NULLS = 4096


def shown_percent(bound: float) -> str:
    """A lower bound in per cent for a person: rounded down, so that what is read is never more than what holds."""
    return f"{math.floor(1000 * bound) / 10:.1f}"


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


# ---------------------------------------------------------------- betting


def refuted(
    values: npt.ArrayLike,
    nulls: npt.ArrayLike,
    delta: float,
    *,
    weights: Array | None = None,
    horizon: int | None = None,
) -> Array:
    """For each null m: after how many values "the mean is at most m" is refuted at level 1 − δ; 0 where it is not.

    Each null is tested by itself: all on the same values, or values [n, nulls] with a column for each. The horizon is how
    many values may come, those given included.
    """
    from scipy import special  # here, since a lowering needs none of it

    x, m = np.asarray(values, dtype=np.float64), np.asarray(nulls, dtype=np.float64)
    x = x[:, None] if x.ndim == 1 else x
    u = np.ones((len(x), 1)) if weights is None else weights.reshape(len(x), -1)
    total = max(len(x), horizon or 0)
    enough, aim = math.log(1 / delta), math.log(AIM / delta)
    capital, after, live = np.zeros(len(m)), np.zeros(len(m), dtype=np.int64), np.arange(len(m))
    weight, mass, spread, count = 1.0, 0.5, np.full(1, 0.25), 1  # as if a half had been seen, with the largest variance
    for start, stop in _steps(total):
        some, heavy = x[start:stop], u[start:stop]
        if not len(some) or not len(live):
            break
        left = np.maximum(np.exp(capital[live] - aim), 1e-300)
        hedge = np.exp(-(special.ndtri(left) ** 2) / 2) / (math.sqrt(2 * math.pi) * left)
        deviation = np.sqrt(spread / count * (total - start))
        stake = np.minimum(hedge / _of(deviation[None], live)[0], STAKE / m[live])
        path = capital[live] + np.cumsum(np.log1p(stake * (_of(heavy, live) * (_of(some, live) - m[live]))), axis=0)
        there = path >= enough
        done = there.any(axis=0)
        capital[live] = path[-1]
        after[live[done]] = start + 1 + there[:, done].argmax(axis=0)
        live = live[~done]
        spread = spread + ((heavy * (some - mass / weight)) ** 2).sum(axis=0)
        weight, mass, count = weight + heavy.sum(axis=0), mass + (heavy * some).sum(axis=0), count + len(some)
    return after


def _of(columns: Array, chosen: Array) -> Array:
    """These columns; a single one is for all."""
    return columns if columns.shape[1] == 1 else columns[:, chosen]


def _steps(horizon: int) -> list[tuple[int, int]]:
    """The blocks of values within which stakes stay: single ones at first. They depend on nothing but the horizon."""
    edges = np.unique([*range(min(horizon, FIRST) + 1), *np.linspace(0, horizon, STEPS + 1).astype(np.int64)])
    return list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))


def _nulls(horizon: int) -> Array:
    """Nulls from small to large, at equal distances of arcsin √m, where the standard error of a rate is the same everywhere."""
    count = min(MOST_NULLS, math.ceil(math.pi * math.sqrt(horizon) / FINE))
    return np.asarray(np.sin(np.linspace(0, math.pi / 2, count + 1)[1:-1]) ** 2)


def lower_any_time(
    values: npt.ArrayLike,
    delta: float,
    *,
    weights: Array | None = None,
    horizon: int | None = None,
    least: float | None = None,
) -> float:
    """The mean is above this with probability 1 − δ, at all times together.

    Nulls are tested from the smallest up to the first that stands; their places depend on the horizon alone, and `least`, a
    target, is one of them. The bound is wrong only if the smallest true null is refuted, which has probability at most δ.
    """
    x = np.asarray(values, dtype=np.float64)
    if not len(x):
        return 0.0
    nulls = _nulls(max(len(x), horizon or 0))
    if least is not None:
        nulls = np.sort(np.append(nulls, least))
    nulls = nulls[nulls < np.average(x, weights=weights)]  # those above are not refuted
    stands = refuted(x, nulls, delta, weights=weights, horizon=horizon) == 0
    count = int(stands.argmax()) if stands.any() else len(nulls)
    return float(nulls[count - 1]) if count else 0.0


def upper_any_time(
    values: npt.ArrayLike,
    delta: float,
    *,
    weights: Array | None = None,
    horizon: int | None = None,
    most: float | None = None,
) -> float:
    least = None if most is None else 1.0 - most
    others = 1.0 - np.asarray(values, dtype=np.float64)
    return 1.0 - lower_any_time(others, delta, weights=weights, horizon=horizon, least=least)


def needed(least: float, delta: float) -> int:
    """How many values are needed to show that a mean is at least this, even if every one is 1."""
    low = max(1, math.ceil(math.log(delta) / math.log(least)))  # no test can do with fewer
    high = 2 * low + 8

    def suffices(count: int) -> bool:
        return bool(refuted(np.ones(count), [least], delta)[0])

    while not suffices(high):
        high *= 2
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle + 1, high)
    return high


# ---------------------------------------------------------------- a fixed number of values


def lower_rate(hits: int, count: int, delta: float) -> float:
    """The rate is above this with probability 1 − δ: the rate at which so many hits or more have probability δ."""
    from scipy import special

    return float(special.betaincinv(hits, count - hits + 1, delta)) if hits else 0.0


def upper_rate(hits: int, count: int, delta: float) -> float:
    return 1.0 - lower_rate(count - hits, count, delta)


def lower_mean(values: npt.ArrayLike, delta: float, *, weights: Array | None = None, binary: bool = False) -> float:
    """For values within [0, 1] whose number was fixed beforehand: by betting; exact where they can be nothing but 0 and 1.

    `binary` says what the values can be, not what they happen to be: the choice between two bounds must not look at the data.
    """
    array = np.asarray(values, dtype=np.float64)
    if binary and weights is None:
        return lower_rate(int(array.sum()), len(array), delta)
    return lower_any_time(array, delta, weights=weights)


def upper_mean(values: npt.ArrayLike, delta: float, *, weights: Array | None = None, binary: bool = False) -> float:
    return 1.0 - lower_mean(1.0 - np.asarray(values, dtype=np.float64), delta, weights=weights, binary=binary)


def rate(values: npt.ArrayLike, *, weights: Array | None = None, binary: bool = False, level: float = 0.95) -> Estimate:
    """The mean of values within [0, 1] with a two-sided interval."""
    array, delta = np.asarray(values, dtype=np.float64), (1 - level) / 2
    low, high = (bound(array, delta, weights=weights, binary=binary) for bound in (lower_mean, upper_mean))
    return Estimate(float(np.average(array, weights=weights)), low, high)


# ---------------------------------------------------------------- means without limits


def bootstrap(values: npt.ArrayLike, *, weights: Array | None = None, level: float = 0.95, seed: int = 0) -> Estimate:
    """The mean with the percentile interval of the bootstrap."""
    array = np.asarray(values, dtype=np.float64)
    low, high = np.quantile(resampled(array, seed, weights), [(1 - level) / 2, (1 + level) / 2])
    return Estimate(float(np.average(array, weights=weights)), float(low), float(high))


def resampled(values: Array, seed: int, weights: Array | None = None) -> Array:
    """The means of bootstrap samples; the same seed draws the same samples, so differences are paired."""
    if len(values) < 2 or np.ptp(values) == 0 or np.isnan(values).any():
        return np.full(RESAMPLES, float(values.mean()))
    from scipy import stats

    rng = np.random.default_rng(seed)
    if weights is None:
        result = stats.bootstrap((values,), np.mean, n_resamples=RESAMPLES, method="percentile", batch=100, rng=rng)
    else:
        result = stats.bootstrap(
            (values * weights, weights), _ratio, n_resamples=RESAMPLES, paired=True, method="percentile",
            batch=100, rng=rng,
        )  # fmt: skip
    means: Array = np.asarray(result.bootstrap_distribution)
    return means


def _ratio(numbers: Array, weights: Array, axis: int = -1) -> Array:
    return np.asarray(numbers.sum(axis=axis) / weights.sum(axis=axis))
