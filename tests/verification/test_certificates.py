"""The ladder of certificates: ordered, valid, and how the search for the smallest plan is corrected."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cmrc.errors import CertifyError
from cmrc.verification.bounds import refuted
from cmrc.verification.certificates import NAMES, best_markov, best_tail, by_margin, from_d2, ladder, smallest
from cmrc.verification.draws import Scope
from cmrc.verification.evidence import Evidence, Readout, compare
from cmrc.verification.targets import Decision, Standing, Target, decide, forecast, require_enough


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
    rungs = ladder(evidence(seed, count, noise=noise, classes=classes, tokens=tokens, shift=shift))
    for numbers in ([rung.value for rung in rungs], [rung.bound for rung in rungs]):
        assert all(low <= high + 1e-12 for low, high in itertools.pairwise(numbers))
        assert min(numbers) >= 0


def test_an_epsilon_is_chosen_on_the_first_fifth_of_the_units() -> None:
    whole = evidence(3, 200, noise=0.3)
    first, _ = whole.first_units(40)
    for rung, choose in zip(ladder(whole), (best_markov, best_tail), strict=False):
        assert rung.epsilon == choose(first)[1] != choose(whole)[1]


def test_the_rungs_are_told_apart() -> None:
    rungs = {rung.name: rung.value for rung in ladder(evidence(0, 4000, noise=0.15, shift=0.3))}
    values = [rungs[name] for name in NAMES]
    assert all(high - low > 0.01 for low, high in itertools.pairwise(values))


@given(st.integers(0, 10_000), st.floats(0.01, 4))
def test_the_best_epsilon_is_found(seed: int, d2: float) -> None:
    margins = np.random.default_rng(seed).exponential(3, size=40)
    value, epsilon = from_d2(margins, d2)
    grid = [1 - np.mean(margins <= 2 * e) - d2 / e**2 for e in np.linspace(0.01, margins.max(), 500)]
    assert value >= max(0.0, *grid) - 1e-9
    if value > 0:
        assert np.isclose(value, 1 - np.mean(margins <= 2 * epsilon) - d2 / epsilon**2)


@pytest.mark.parametrize("flipped", [0.0, 0.05, 0.2])
@pytest.mark.parametrize("gamma", [0.5, 3.0])
def test_a_margin_everywhere_bounds_how_many_answers_differ(gamma: float, flipped: float) -> None:
    """Margins of γ at least. The shortest step that changes an answer is γ/√2 long, so at most twice as many are charged."""
    rng = np.random.default_rng(0)
    z = np.zeros((1000, 1, 3))
    z[:, 0, 0] = gamma + rng.exponential(0.1, size=1000) * (rng.random(1000) < 0.5)
    other = z.copy()
    gone = rng.permutation(1000)[: round(flipped * 1000)]
    middle = z[gone, 0, 0] / 2
    other[gone, 0, 0], other[gone, 0, 1] = middle - 1e-6, middle + 1e-6
    seen = compare(Readout("classes", 2), z, other, None, np.full(1000, 0.5))
    d2 = float(seen.squared.mean())
    assert float(seen.agree.mean()) == 1 - flipped
    assert 1 - 2.5 * flipped <= by_margin(gamma, d2) <= 1 - 2 * flipped + 1e-4
    assert by_margin(0.0, d2) == 0.0


def test_a_regression_is_on_the_same_ladder() -> None:
    rng = np.random.default_rng(0)
    y = rng.normal(size=(500, 3))
    shown = compare(Readout("values", tolerance=0.5), y, y + 0.2 * rng.normal(size=y.shape), None, np.full(500, 0.5))
    values = [rung.value for rung in ladder(shown)]
    assert all(low <= high + 1e-12 for low, high in itertools.pairwise(values))
    assert np.isclose(values[-1], np.mean(shown.largest <= 0.5))


@pytest.mark.parametrize("tokens", [1, 3])
def test_every_bound_holds_as_often_as_it_says(tokens: int) -> None:
    """A population of which everything is known, and samples of it."""
    population = evidence(1, 40_000, noise=0.2, shift=0.2, tokens=tokens)
    truth = {rung.name: rung.value for rung in ladder(population)}
    rng, repetitions = np.random.default_rng(0), 200
    holds = dict.fromkeys(NAMES, 0)
    for _ in range(repetitions):
        for rung in ladder(population.part(rng.integers(len(population), size=600))):
            holds[rung.name] += (
                rung.bound <= truth["direct"] if rung.name == "markov" else rung.bound <= truth[rung.name]
            )
    chance = 3 * np.sqrt(0.05 * 0.95 / repetitions)
    assert min(holds.values()) / repetitions >= 0.95 - chance


def test_the_direct_bound_is_close() -> None:
    rung = ladder(evidence(2, 2000, noise=0.1))[-1]
    assert 0 < rung.value - rung.bound < 0.02


def test_few_swaps_certify_nothing_that_needs_a_choice() -> None:
    assert [rung.bound for rung in ladder(evidence(0, 5))][:2] == [0.0, 0.0]


def paired(seed: int, pairs: int, masks: int, noise: float) -> Evidence:
    """Swaps of one pair are alike: the pair's logits, with a little noise for every mask."""
    rng = np.random.default_rng(seed)
    z = np.repeat(rng.normal(size=(pairs, 1, 4)) * 2, masks, axis=0)
    change = np.repeat(noise * rng.standard_t(3, size=(pairs, 1, 4)), masks, axis=0)
    other = z + change + 0.1 * noise * rng.normal(size=z.shape)
    unit = np.repeat(np.arange(pairs), masks)
    return compare(Readout("classes", 2), z, other, None, np.full(len(z), 0.5), unit=unit)


def test_swaps_of_one_pair_are_not_counted_as_independent() -> None:
    """Sixteen swaps of 100 pairs bound the IIA hardly better than 100 swaps, and hold for new pairs."""
    truth = {rung.name: rung.value for rung in ladder(paired(0, 20_000, 1, 0.3))}
    repetitions, holds = 200, dict.fromkeys(NAMES, 0)
    for seed in range(1, repetitions + 1):
        for rung in ladder(paired(seed, 100, 16, 0.3)):
            holds[rung.name] += rung.bound <= truth["direct" if rung.name == "markov" else rung.name]
    assert min(holds.values()) / repetitions >= 0.95 - 3 * np.sqrt(0.05 * 0.95 / repetitions)
    assert ladder(paired(1, 100, 16, 0.3))[-1].bound < ladder(paired(1, 1600, 1, 0.3))[-1].bound


# ---------------------------------------------------------------- targets


@pytest.mark.parametrize(
    "text", ["iia>0.9", "kl>=0.1", "drop>=0.1", "iia<=0.9", "iia>=", "iia>=0.9.1", "markov>=0.5", "iia>=0.9 clipped"]
)
def test_a_target_that_is_not_understood(text: str) -> None:
    with pytest.raises(CertifyError) as caught:
        Target.parse(text)
    assert str(caught.value) == (
        f"certify: the target {text!r} is not understood\n  fix: write iia>=0.95, range>=0.9, samplewise>=0.9, "
        "agreement>=0.98, accuracy>=0.9, drop<=0.01, kl<=0.1 or d2<=5"
    )


def test_a_target_out_of_range() -> None:
    for text, reason in (
        ("iia>=1.5", "between 0 and 1"),
        ("kl<=2 clip 1", "between 0 and 1"),
        ("drop<=0", "between 0 and 1"),
    ):
        with pytest.raises(CertifyError) as caught:
            Target.parse(text)
        assert str(caught.value) == f"certify: the target {text!r} is out of range\n  fix: give a value {reason}"
    with pytest.raises(CertifyError) as caught:
        Target.parse("iia>=0.9 clip 2")
    assert str(caught.value) == "certify: iia is not clipped\n  fix: write iia>=0.9"


@pytest.mark.parametrize("text", ["iia>=0.95", "drop<=0.01", "kl<=0.1", "d2<=5 clip 20", "accuracy>=0.9", "kl<=1e-05"])
def test_targets_are_written_as_they_are_read(text: str) -> None:
    target = Target.parse(f" {text.replace('=', '= ')} ")
    assert str(target) == text
    assert Target.parse(str(target)) == target
    assert np.isclose(target.back(target.least), target.value)


def decided(target: Target, shown: Evidence) -> Decision:
    return decide(target, target.values(shown), 0.05, horizon=400, swaps=len(shown))


def test_a_target_is_decided_once_the_swaps_suffice() -> None:
    sure = replace(evidence(0, 400), agree=np.ones((400, 1), dtype=bool))
    target = Target.parse("iia>=0.95")
    assert decided(target, sure).holds is True
    assert decided(target, sure.part(slice(0, 20))).outcome is Standing.OPEN
    wrong = replace(sure, agree=~sure.agree)
    assert decided(target, wrong.part(slice(0, 60))).outcome is Standing.FAILS
    assert decided(target, wrong.part(slice(0, 1))).outcome is Standing.OPEN
    assert str(decided(target, sure)).startswith("iia>=0.95 holds after 400 swaps on 400 pairs: 1.0000, above 0.99")


def test_a_target_that_nothing_can_save_is_given_up() -> None:
    """Twelve failures in fifty leave too little of 100 units to show 0.95, though 0.95 is not refuted by six in forty."""
    agree = np.ones((40, 1), dtype=bool)
    agree[:6] = False
    shown = replace(evidence(0, 40), agree=agree)
    target = Target.parse("iia>=0.93")
    decision = decide(target, target.values(shown), 0.001, horizon=60, swaps=40)
    assert decision.outcome is Standing.HOPELESS
    assert decision.holds is None
    assert decide(target, target.values(shown), 0.001, horizon=5000, swaps=40).outcome is Standing.OPEN


@pytest.mark.parametrize("rate", [0.96, 0.975, 1.0])
def test_as_many_as_the_forecast_says_do_suffice(rate: float) -> None:
    """Half of the samples of that many show the target, few of half as many do."""
    rng = np.random.default_rng(1)
    target, values = Target.parse("iia>=0.95"), (rng.random(4000) < rate).astype(np.float64)
    enough = forecast(target, values, 0.05)
    assert enough is not None
    least = np.full(200, target.least)
    shown = {n: float((refuted(rng.choice(values, (n, 200)), least, 0.05) > 0).mean()) for n in (enough // 2, enough)}
    assert shown[enough] > 0.35
    assert shown[enough // 2] < (0.5 if rate < 1 else 1e-9)
    assert forecast(target, np.full(10, 0.9), 0.05) is None


def test_what_cannot_be_shown_is_said_beforehand() -> None:
    with pytest.raises(CertifyError) as caught:
        require_enough(Target.parse("iia>=0.99"), 0.05, 600, Scope.POPULATION)
    assert str(caught.value) == (
        "certify: iia>=0.99 at level 0.95 needs at least 632 held-out inputs, even if all agree, but there are 600\n"
        "  fix: give more held-out data, ask for less, or allow a larger delta"
    )
    require_enough(Target.parse("agreement>=0.99"), 0.05, 316, Scope.POPULATION)
    require_enough(Target.parse("iia>=0.99"), 0.05, 10, Scope.FIXED)


def test_the_mean_of_what_has_no_limit_is_clipped() -> None:
    shown = evidence(0, 400, noise=0.3)
    target = Target.parse("kl<=0.2 clip 1")
    decision = decided(target, shown)
    assert np.isclose(decision.value, np.minimum(shown.kl, 1).mean())
    assert decision.low < decision.value < decision.high
    assert (decision.holds is True) == (decision.high <= 0.2)
    assert Target.parse("d2<=3").clip == 30


def test_the_search_stops_at_the_first_that_is_not_certified() -> None:
    verdicts = {"large": Standing.HOLDS, "medium": Standing.HOLDS, "small": Standing.OPEN, "tiny": Standing.HOLDS}
    seen = []

    def test(name: str) -> Decision:
        seen.append(name)
        return Decision(Target("iia", 0.9), verdicts[name], 0.9, 0.0, 1.0, 50, 100, 0.05)

    search = smallest(list(verdicts), test)
    assert (search.chosen, seen) == (1, ["large", "medium", "small"])
    verdicts["large"] = Standing.FAILS
    assert smallest(list(verdicts), test).chosen is None


def test_the_search_errs_no_more_often_than_one_test() -> None:
    """Five candidates whose true IIA falls below the target at the third: how often is one of those chosen?"""
    rates, wrong, repetitions = [0.97, 0.95, 0.895, 0.89, 0.6], 0, 100
    target = Target("iia", 0.9)
    for seed in range(repetitions):
        rng = np.random.default_rng(seed)

        def test(rate: float, rng: np.random.Generator = rng) -> Decision:
            good = (rng.random(600) < rate).astype(np.float64)
            return decide(target, good, 0.05, horizon=600, swaps=600)

        chosen = smallest(rates, test).chosen
        wrong += chosen is not None and rates[chosen] < 0.9
    assert wrong / repetitions <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / repetitions)
