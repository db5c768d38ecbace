"""Goals: what is asked, whether a size meets it, and which size is chosen."""

from __future__ import annotations

import numpy as np
import pytest

from cmrc.errors import CertifyError, RecipeError
from cmrc.reduction.goals import Goals, Measures, Quality, Speed, Whole
from cmrc.reduction.measuring import SCALE, Judge
from cmrc.verification.bounds import Estimate

WHOLE = Whole(parameters=1000, macs=1000, bytes=1000, milliseconds=10.0)


def measures(part: float, agreement: float, *, bound: float | None = None, drop: float | None = None) -> Measures:
    """A size with this part of everything, as much faster, and this agreement."""
    quality = Quality(
        Estimate(agreement, agreement - 0.01, agreement + 0.01), agreement - 0.02 if bound is None else bound, 0.1, 0.9,
        None, None, None if drop is None else Estimate(drop, drop - 0.01, drop + 0.01),
    )  # fmt: skip
    speed = Speed(Estimate(10 * part, 10 * part, 10 * part), Estimate(1 / part, 1 / part, 1 / part), "CPU")
    return Measures(round(1000 * part), round(1000 * part), round(1000 * part), quality, speed)


SIZES = [measures(0.8, 1.0, drop=0.0), measures(0.6, 0.98, drop=0.01), measures(0.4, 0.9, drop=0.05)]


@pytest.mark.parametrize(
    ("goals", "chosen"),
    [
        (Goals(size=0.6), 1),  # the largest that is small enough
        (Goals(macs=0.9), 0),
        (Goals(speedup=2), 2),
        (Goals(latency=6.5), 1),
        (Goals(agreement=0.95), 1),  # the smallest that is good enough, by its bound
        (Goals(agreement=0.97), 0),
        (Goals(agreement=0.97, measured=True), 1),
        (Goals(drop=0.01), 1),
        (Goals(size=0.9, agreement=0.85), 0),  # the best that meets both
        (Goals(size=0.5, agreement=0.85), 2),
        (Goals().or_default(), 1),
    ],
)
def test_a_size_is_chosen(goals: Goals, chosen: int) -> None:
    assert goals.choose(SIZES, WHOLE) == chosen
    assert all(judgement.met for judgement in goals.judge(SIZES[chosen], WHOLE))


@pytest.mark.parametrize(
    ("goals", "chosen"),
    [
        (Goals(size=0.3), 2),  # the smallest there is
        (Goals(agreement=0.995), 0),  # the best there is
        (Goals(size=0.5, agreement=0.95), 1),  # what is good stands before what is small
    ],
)
def test_what_comes_closest_is_chosen_where_no_size_meets_all(goals: Goals, chosen: int) -> None:
    assert goals.choose(SIZES, WHOLE) == chosen
    assert not all(judgement.met for judgement in goals.judge(SIZES[chosen], WHOLE))


def test_sizes_behind_the_first_that_fails_are_not_certified() -> None:
    """The order is fixed beforehand: a smaller size that happens to hold is no evidence."""
    lucky = [measures(0.8, 1.0), measures(0.6, 0.9), measures(0.4, 1.0)]
    assert Goals(agreement=0.95).choose(lucky, WHOLE) == 0


def test_without_times_no_goal_of_speed_is_met() -> None:
    slow = Measures(1, 1, 1, SIZES[0].quality, None)
    assert [(j.met, j.value) for j in Goals(speedup=1.1, latency=5).judge(slow, WHOLE)] == [(False, "not measured")] * 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"size": 1.5}, "recipe: size=1.5 is not a fraction of the original\n  fix: give a number up to 1: size=0.6"),
        ({"speedup": 0.9}, "recipe: speedup=0.9 is not above 1\n  fix: give a larger number: speedup="),
        ({"latency": 0.0}, "recipe: latency=0.0 is not above 0\n  fix: give a larger number: latency="),
        ({"drop": -0.1}, "recipe: drop=-0.1 is not a loss of the metric\n  fix: give a number from 0 on: drop=0.01"),
        (
            {"keep": 0.5, "pick": 0.5},
            "recipe: keep= and pick= both name a size\n  fix: leave out one of keep= and pick=",
        ),
    ],
)
def test_goals_that_make_no_sense(options: dict[str, float], text: str) -> None:
    with pytest.raises(RecipeError) as caught:
        Goals(**options)
    assert str(caught.value) == text


def test_too_few_samples_to_certify_are_said_before_the_work() -> None:
    Goals(agreement=0.99).require_enough(299)
    Goals(agreement=0.99, measured=True).require_enough(10)
    with pytest.raises(CertifyError) as caught:
        Goals(agreement=0.99).require_enough(298)
    assert str(caught.value) == (
        "certify: agreement=0.99 needs at least 299 held-out samples to be certified, but there are 298\n"
        "  fix: give more data, ask for agreement=0.989, or accept the measured agreement: measured=True"
    )
    with pytest.raises(CertifyError, match="agreement=1 cannot be certified by any number of samples"):
        Goals(agreement=1.0).require_enough(10**9)


def test_what_is_about_as_near_is_as_good_a_find() -> None:
    judge = object.__new__(Judge)
    judge.slack = 0.01
    before = SCALE * np.array([[0.900, 0.895, 0.1], [0.900, 0.500, 0.1], [0.3, 0.2, 0.1]])
    after = SCALE * np.array([[0.890, 0.891, 0.1], [0.700, 0.701, 0.1], [0.3, 0.2, 0.1]])
    assert judge._finds_as_near(before, after).tolist() == [[True], [False], [True]]


def test_size_is_judged_by_the_file_and_macs_by_the_multiply_adds() -> None:
    some = measures(0.5, 1.0)
    sizes = Measures(500, 100, 900, some.quality, some.speed)
    met = {goal: Goals(**{goal: 0.5}).judge(sizes, WHOLE)[0].met for goal in ("size", "macs")}
    assert met == {"size": False, "macs": True}
