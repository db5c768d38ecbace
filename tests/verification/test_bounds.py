"""Intervals: against other libraries' values, and by how often they hold."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from cmrc.verification.bounds import (
    bootstrap,
    lower_any_time,
    lower_mean,
    lower_rate,
    needed,
    rate,
    refuted,
    shown_percent,
    upper_any_time,
    upper_mean,
    upper_rate,
)

DELTA = 0.05
# How far below 1 − δ the share of 400 repetitions may lie by chance: three standard deviations.
CHANCE = 3 * np.sqrt(DELTA * (1 - DELTA) / 400)


@given(st.integers(1, 3000), st.floats(0, 1), st.floats(0.001, 0.3))
def test_clopper_and_pearson(count: int, share: float, delta: float) -> None:
    hits = round(share * count)
    exact = stats.binomtest(hits, count).proportion_ci(1 - 2 * delta, method="exact")
    assert np.isclose(lower_rate(hits, count, delta), exact.low, atol=1e-9)
    assert np.isclose(upper_rate(hits, count, delta), exact.high, atol=1e-9)


def test_a_shown_bound_is_never_more_than_the_bound() -> None:
    assert [shown_percent(bound) for bound in (0.9746, 0.97499, 0.975, 1.0, 0.0)] == [
        "97.4",
        "97.4",
        "97.5",
        "100.0",
        "0.0",
    ]


def test_the_rate_of_a_few() -> None:
    interval = rate(np.array([1.0] * 9 + [0.0]), binary=True)
    assert (interval.value, round(interval.low, 4), round(interval.high, 4)) == (0.9, 0.5550, 0.9975)
    assert str(interval) == "0.9000 [0.5550, 0.9975]"


@pytest.mark.parametrize("draw", ["rare", "even", "fractions", "skewed"])
def test_bounds_hold_as_often_as_they_say(draw: str) -> None:
    """Lower and upper bounds at a fixed time, and those that are looked at after every value."""
    samplers = {
        "rare": (0.03, lambda rng, n: (rng.random(n) < 0.03).astype(float)),
        "even": (0.5, lambda rng, n: (rng.random(n) < 0.5).astype(float)),
        "fractions": (0.75, lambda rng, n: rng.beta(3, 1, n)),
        "skewed": (1 / 21, lambda rng, n: rng.beta(0.5, 10, n)),
    }
    truth, sample = samplers[draw]
    holds = np.zeros(4)
    for seed in range(400):
        values = sample(np.random.default_rng(seed), 400)
        holds += [
            lower_mean(values, DELTA, binary=draw in ("rare", "even")) <= truth,
            upper_mean(values, DELTA, binary=draw in ("rare", "even")) >= truth,
            not refuted(values, [truth], DELTA)[0],  # looked at after every value
            not refuted(1 - values, [1 - truth], DELTA)[0],
        ]
    assert (holds / 400 >= 1 - DELTA - CHANCE).all()


def test_intervals_narrow_to_the_truth() -> None:
    rng = np.random.default_rng(0)
    for values in ((rng.random(20_000) < 0.9).astype(float), rng.beta(9, 1, 20_000)):
        assert 0.885 < lower_any_time(values, DELTA) < 0.9 < upper_any_time(values, DELTA) < 0.915
        assert 0.89 < lower_mean(values, DELTA) < 0.9


def test_nothing_is_known_before_the_first_sample() -> None:
    assert (lower_any_time([], DELTA), upper_any_time([], DELTA)) == (0.0, 1.0)
    assert upper_any_time([1.0], DELTA) == 1.0
    assert lower_mean([0.5], DELTA) < 0.05


def test_many_successes_leave_room_for_a_failure() -> None:
    """After n successes the rate may still be about 1 − 3/n: an interval without width would be wrong."""
    for count in (50, 500, 10_000):
        exact = lower_rate(count, count, DELTA)
        assert exact - 0.2 * (1 - exact) < lower_any_time(np.ones(count), DELTA) <= exact
        assert lower_any_time(np.zeros(count), DELTA) == 0.0


@pytest.mark.parametrize("rate_of", [0.01, 0.1, 0.5])
def test_betting_is_nearly_as_tight_as_the_exact_bound_and_tighter_for_averages(rate_of: float) -> None:
    rng = np.random.default_rng(0)
    chance = rng.beta(rate_of, 1 - rate_of, size=(30, 500))  # of a failure, for each pair
    ones, means = 1.0 - (rng.random(chance.shape) < chance), 1 - rng.binomial(8, chance) / 8
    exact, betting, averaged = (
        np.mean([row.mean() - bound(row, DELTA) for row in rows])
        for bound, rows in (
            (functools.partial(lower_mean, binary=True), ones),
            (lower_any_time, ones),
            (lower_any_time, means),
        )
    )
    assert betting < 1.15 * exact
    assert averaged < 0.95 * exact


@given(st.integers(0, 1000), st.integers(2, 200), st.floats(0.05, 0.95))
def test_a_bound_never_forgets_what_was_refuted(seed: int, count: int, share: float) -> None:
    """Looking again later, with the same horizon, only raises the lower bound."""
    values = np.random.default_rng(seed).random(count) < share
    bounds = [lower_any_time(values[:n].astype(float), DELTA, horizon=count) for n in (count // 2, count)]
    assert bounds[0] <= bounds[1] or bounds[0] > values.mean()


def test_a_target_is_one_of_the_nulls() -> None:
    values = np.ones(100)
    times = refuted(values, [0.9, 0.99], DELTA)
    assert 0 < times[0] <= 100
    assert times[1] == 0
    assert lower_any_time(values[: times[0]], DELTA, horizon=100, least=0.9) >= 0.9
    assert lower_any_time(values[: times[0] - 1], DELTA, horizon=100, least=0.9) < 0.9


@pytest.mark.parametrize(("least", "expected"), [(0.5, 5), (0.9, 30), (0.95, 62), (0.99, 316)])
def test_how_many_are_needed(least: float, expected: int) -> None:
    assert needed(least, DELTA) == expected
    assert expected < 1.17 * np.log(DELTA) / np.log(least)  # what no bound can beat


def test_weights_bound_the_weighted_mean() -> None:
    """Successes count 0.3: the mean of 0.9 successes becomes 0.27 / 0.37."""
    truth, misses = 0.27 / 0.37, np.zeros(2)
    for seed in range(400):
        values = (np.random.default_rng(seed).random(200) < 0.9).astype(float)
        weights = np.where(values == 1, 0.3, 1.0)
        misses += [
            lower_any_time(values, DELTA, weights=weights) > truth,
            upper_any_time(values, DELTA, weights=weights) < truth,
        ]
    assert (misses / 400 <= DELTA + CHANCE).all()


def test_the_bootstrap_of_a_mean() -> None:
    values = np.random.default_rng(0).exponential(size=500)
    interval = bootstrap(values)
    normal = 1.96 * values.std() / np.sqrt(500)
    assert np.isclose(interval.high - interval.low, 2 * normal, rtol=0.1)
    assert interval.low < interval.value < interval.high
    assert bootstrap(np.ones(5)).low == 1.0


def test_many_samples_are_tested_at_once_as_one_by_one() -> None:
    values = np.random.default_rng(0).beta(9, 1, size=(150, 20))
    nulls = np.linspace(0.8, 0.95, 20)
    weights = np.random.default_rng(1).random((150, 20))
    for heavy in (None, weights):
        each = [
            refuted(values[:, [i]], [m], DELTA, weights=None if heavy is None else heavy[:, i], horizon=200)[0]
            for i, m in enumerate(nulls)
        ]
        assert refuted(values, nulls, DELTA, weights=heavy, horizon=200).tolist() == each
    assert refuted(values[:, 0], nulls, DELTA).tolist() == [refuted(values[:, 0], [m], DELTA)[0] for m in nulls]
