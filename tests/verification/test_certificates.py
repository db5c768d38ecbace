"""The ladder of certificates: ordered, valid, and how the search for the smallest plan is corrected."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cmrc.errors import CertifyError
from cmrc.verification.certificates import NAMES, Decision, Target, decide, from_scores, ladder, smallest
from cmrc.verification.evidence import Evidence, Readout, compare


def evidence(
    seed: int, count: int, *, noise: float = 0.3, classes: int = 4, tokens: int = 1, shift: float = 0.0
) -> Evidence:
    """Logits, and the same with noise: a part of it common to all classes, which the range does not count."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(count, tokens, classes)) * rng.choice([0.2, 1, 5], size=(count, 1, 1))
    other = z + noise * rng.standard_t(3, size=z.shape) + shift * rng.normal(size=(count, tokens, 1))
    return compare(Readout("classes", 2), z, other, None, np.full(count, 0.5))


@given(
    st.integers(0, 10_000), st.integers(1, 60), st.floats(0, 3), st.integers(2, 6), st.integers(1, 4), st.floats(0, 2)
)
def test_each_rung_is_below_the_next(
    seed: int, count: int, noise: float, classes: int, tokens: int, shift: float
) -> None:
    values = [
        rung.value for rung in ladder(evidence(seed, count, noise=noise, classes=classes, tokens=tokens, shift=shift))
    ]
    assert all(low <= high + 1e-12 for low, high in itertools.pairwise(values))
    assert min(values) >= 0


def test_the_rungs_are_told_apart() -> None:
    found = {rung.name: rung.value for rung in ladder(evidence(0, 4000, noise=0.15, shift=0.3))}
    values = [found[name] for name in NAMES]
    assert all(high - low > 0.01 for low, high in itertools.pairwise(values))


@given(st.integers(0, 10_000), st.floats(0.01, 4))
def test_the_best_epsilon_is_found(seed: int, d2: float) -> None:
    margins = np.random.default_rng(seed).exponential(3, size=40)
    value, epsilon = from_scores(margins, d2)
    grid = [1 - np.mean(margins <= 2 * e) - d2 / e**2 for e in np.linspace(0.01, margins.max(), 500)]
    assert value >= max(0.0, *grid) - 1e-9
    if value > 0:
        assert np.isclose(value, 1 - np.mean(margins <= 2 * epsilon) - d2 / epsilon**2)


def test_a_regression_is_on_the_same_ladder() -> None:
    rng = np.random.default_rng(0)
    y = rng.normal(size=(500, 3))
    found = compare(Readout("values", tolerance=0.5), y, y + 0.2 * rng.normal(size=y.shape), None, np.full(500, 0.5))
    values = [rung.value for rung in ladder(found)]
    assert all(low <= high + 1e-12 for low, high in itertools.pairwise(values))
    assert np.isclose(values[-1], np.mean(found.largest <= 0.5))


@pytest.mark.parametrize("tokens", [1, 3])
def test_every_bound_holds_as_often_as_it_says(tokens: int) -> None:
    """A population of which everything is known, and samples of it."""
    population = evidence(1, 40_000, noise=0.2, shift=0.2, tokens=tokens)
    truth = {rung.name: rung.value for rung in ladder(population)}
    rng, repetitions = np.random.default_rng(0), 200
    held = dict.fromkeys(NAMES, 0)
    for _ in range(repetitions):
        for rung in ladder(population.part(rng.integers(len(population), size=600))):
            held[rung.name] += (
                rung.bound <= truth["direct"] if rung.name == "markov" else rung.bound <= truth[rung.name]
            )
    chance = 3 * np.sqrt(0.05 * 0.95 / repetitions)
    assert min(held.values()) / repetitions >= 0.95 - chance


def test_the_direct_bound_is_close() -> None:
    found = ladder(evidence(2, 2000, noise=0.1))[-1]
    assert 0 < found.value - found.bound < 0.02


def test_few_swaps_certify_nothing_that_needs_a_choice() -> None:
    assert [rung.bound for rung in ladder(evidence(0, 5))][:2] == [0.0, 0.0]


# ---------------------------------------------------------------- targets


@pytest.mark.parametrize("text", ["iia>0.9", "iia>=1.5", "kl>=0.1", "iia>=", "iia>=0.9.1", "markov>=0.5"])
def test_a_target_that_is_not_understood(text: str) -> None:
    with pytest.raises(CertifyError) as caught:
        Target.parse(text)
    assert str(caught.value) == (
        f"certify: the target {text!r} is not understood\n  fix: write iia>=0.95, range>=0.9 or samplewise>=0.9"
    )


def test_a_target_is_decided_once_the_swaps_suffice() -> None:
    sure = replace(evidence(0, 400), agree=np.ones((400, 1), dtype=bool))
    target = Target.parse(" iia >= 0.95 ")
    assert str(target) == "iia>=0.95"
    assert decide(target, sure, 0.05).holds is True
    assert decide(target, sure.part(slice(0, 20)), 0.05).holds is None
    assert decide(target, replace(sure, agree=~sure.agree), 0.05).holds is False
    assert str(decide(target, sure, 0.05)).startswith("iia>=0.95 holds after 400 swaps: [0.98")


def test_the_search_stops_at_the_first_that_is_not_certified() -> None:
    verdicts = {"large": True, "medium": True, "small": None, "tiny": True}
    seen = []

    def test(name: str) -> Decision:
        seen.append(name)
        return Decision(Target("direct", 0.9), verdicts[name], 0.0, 1.0, 100, 0.05)

    found = smallest(list(verdicts), test)
    assert (found.chosen, seen) == (1, ["large", "medium", "small"])
    verdicts["large"] = False
    assert smallest(list(verdicts), test).chosen is None


def test_the_search_errs_no_more_often_than_one_test() -> None:
    """Five candidates whose true IIA falls below the target at the third: how often is one of those chosen?"""
    rates, wrong = [0.97, 0.95, 0.895, 0.89, 0.6], 0
    target = Target("direct", 0.9)
    for seed in range(300):
        rng = np.random.default_rng(seed)

        def test(rate: float, rng: np.random.Generator = rng) -> Decision:
            part = evidence(0, 3000)
            return decide(target, replace(part, agree=rng.random((3000, 1)) < rate), 0.05)

        chosen = smallest(rates, test).chosen
        wrong += chosen is not None and rates[chosen] < 0.9
    assert wrong / 300 <= 0.05
