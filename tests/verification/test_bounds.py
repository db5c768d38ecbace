"""Intervals: against other libraries' values, and by how often they hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from cmrc.verification.bounds import at_any_time, bootstrap, lower_mean, lower_rate, rate, upper_mean, upper_rate

DELTA = 0.05
# How far below 1 − δ the share of 400 repetitions may lie by chance: three standard deviations.
CHANCE = 3 * np.sqrt(DELTA * (1 - DELTA) / 400)


@given(st.integers(1, 3000), st.floats(0, 1), st.floats(0.001, 0.3))
def test_clopper_and_pearson(count: int, share: float, delta: float) -> None:
    hits = round(share * count)
    exact = stats.binomtest(hits, count).proportion_ci(1 - 2 * delta, method="exact")
    assert np.isclose(lower_rate(hits, count, delta), exact.low, atol=1e-9)
    assert np.isclose(upper_rate(hits, count, delta), exact.high, atol=1e-9)


def test_the_rate_of_a_few() -> None:
    found = rate(np.array([1.0] * 9 + [0.0]))
    assert (found.value, round(found.low, 4), round(found.high, 4)) == (0.9, 0.5550, 0.9975)
    assert str(found) == "0.9000 [0.5550, 0.9975]"


@pytest.mark.parametrize("draw", ["rare", "even", "fractions", "skewed"])
def test_bounds_hold_as_often_as_they_say(draw: str) -> None:
    """Lower and upper bounds at a fixed time, and the interval that is looked at again and again."""
    samplers = {
        "rare": (0.03, lambda rng, n: (rng.random(n) < 0.03).astype(float)),
        "even": (0.5, lambda rng, n: (rng.random(n) < 0.5).astype(float)),
        "fractions": (0.75, lambda rng, n: rng.beta(3, 1, n)),
        "skewed": (1 / 21, lambda rng, n: rng.beta(0.5, 10, n)),
    }
    truth, sample = samplers[draw]
    held = np.zeros(3)
    for seed in range(400):
        values = sample(np.random.default_rng(seed), 400)
        looks = [at_any_time(values[:n], DELTA) for n in (20, 60, 150, 400)]
        held += [
            lower_mean(values, DELTA) <= truth,
            upper_mean(values, DELTA) >= truth,
            all(low <= truth <= high for low, high in looks),
        ]
    assert (held / 400 >= 1 - DELTA - CHANCE).all()


def test_intervals_narrow_to_the_truth() -> None:
    rng = np.random.default_rng(0)
    for values in ((rng.random(20_000) < 0.9).astype(float), rng.beta(9, 1, 20_000)):
        low, high = at_any_time(values, DELTA)
        assert 0.885 < low < 0.9 < high < 0.915
        assert 0.89 < lower_mean(values, DELTA) < 0.9


def test_nothing_is_known_before_the_first_sample() -> None:
    assert at_any_time([], DELTA) == (0.0, 1.0)
    assert at_any_time([1.0], DELTA)[1] == 1.0
    assert lower_mean([0.5], DELTA) == 0.0


def test_the_bootstrap_of_a_mean() -> None:
    values = np.random.default_rng(0).exponential(size=500)
    found = bootstrap(values)
    normal = 1.96 * values.std() / np.sqrt(500)
    assert np.isclose(found.high - found.low, 2 * normal, rtol=0.1)
    assert found.low < found.value < found.high
    assert bootstrap(np.ones(5)).low == 1.0
