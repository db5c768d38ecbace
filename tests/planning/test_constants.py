"""Where only constants fold, the order of units that loses least is taken."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from nets import Net, seeded, traced

import cmrc
from cmrc.errors import HostError
from cmrc.hosts.fx.host import FxHost
from cmrc.planning import probe as probing
from cmrc.planning.constants import CURVATURE, MEASURED, RECONSTRUCTION, SINGLE, with_best_orders, with_orders_for
from cmrc.planning.probe import LossProbe, probed_counts
from cmrc.planning.ranking import Ranked, rank
from cmrc.planning.recipe import make_recipe
from cmrc.statistics.calibrate import unwatched

SITE = "layers.0"  # what a ReLU reads: constants pass it, affine maps do not


@pytest.fixture(scope="module")
def ranked() -> tuple[LossProbe, Ranked]:
    program = traced(seeded(Net((5, 12, 6, 4))), 5)
    x = np.random.default_rng(0).normal(size=(80, 5))
    recipe = make_recipe(sites=[SITE])
    stats = cmrc.calibrate(program, [x], sites=[SITE], need=recipe.needs)
    (site,) = program.find(SITE)
    return LossProbe(program, recipe, [x], unwatched), rank(program, site, stats[site.value], recipe, ())


def lost(probe: LossProbe, r: Ranked) -> float:
    (losses,) = probe.of_sites([r], [probed_counts(r.site, vanishes=False)])
    return float(np.log(losses).sum())


def test_the_order_that_loses_least_is_taken(ranked: tuple[LossProbe, Ranked]) -> None:
    probe, plain = ranked
    assert plain.recipe.preset == RECONSTRUCTION
    (best,) = with_best_orders([plain], probe.recipe, probe)
    others = [
        rank(probe.program, plain.site, plain.stats, dataclasses.replace(probe.recipe, preset=preset), ())
        for preset in (RECONSTRUCTION, SINGLE)
    ]
    assert all(lost(probe, best) <= lost(probe, other) for other in others)
    assert np.array_equal(best.stats.mean, plain.stats.mean)


def test_without_measurement_gradients_are_asked_and_without_them_the_other_orders_are_left(
    ranked: tuple[LossProbe, Ranked], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise HostError("no gradients")

    monkeypatch.setattr(probing, "PAIRS_WORK", 1)
    probe, plain = ranked
    (best,) = with_best_orders([plain], probe.recipe, probe)
    assert [r.recipe.preset for r in best.tried] == [RECONSTRUCTION, SINGLE, CURVATURE]
    monkeypatch.setattr(FxHost, "differentiate", refuse)
    (best,) = with_best_orders([plain], probe.recipe, probe)
    assert [r.recipe.preset for r in best.tried] == [RECONSTRUCTION, SINGLE]


def test_measured_pairs_choose_the_unit_that_adds_least(ranked: tuple[LossProbe, Ranked]) -> None:
    probe, plain = ranked
    (best,) = with_best_orders([plain], probe.recipe, probe)
    measured, (pairs,) = best.tried[-1], probe.of_pairs([plain]) or ()
    assert measured.ordered_by == MEASURED
    gone: list[int] = []
    for unit, added in zip(measured.order.units.tolist(), measured.order.added, strict=True):
        left = [one for one in range(plain.site.units) if one not in gone]
        losses = {one: pairs[np.ix_([*gone, one], [*gone, one])].sum() for one in left}
        assert losses[unit] == pytest.approx(min(losses.values()), rel=1e-9)
        assert added == pytest.approx(losses[unit] - pairs[np.ix_(gone, gone)].sum(), rel=1e-6)
        gone.append(unit)


def test_a_preset_that_was_chosen_stays(ranked: tuple[LossProbe, Ranked]) -> None:
    probe, plain = ranked
    chosen = dataclasses.replace(probe.recipe, preset=RECONSTRUCTION)
    assert with_best_orders([plain], chosen, probe) == [plain]
    assert with_best_orders([plain], probe.recipe, dataclasses.replace(probe, data=None)) == [plain]


def test_the_order_is_the_best_for_the_number_of_units_that_goes(ranked: tuple[LossProbe, Ranked]) -> None:
    probe, plain = ranked

    def loss(r: Ranked, count: int) -> float:
        ((single,),) = probe.of_sites([r], [[count]])
        return single

    (overall,) = with_best_orders([plain], probe.recipe, probe)
    assert len(overall.tried) == 3
    improved, measured = [], []
    for count in range(1, plain.site.units):
        least = min(loss(one, count) for one in overall.tried)
        for one in overall.tried:  # whichever was the best over all
            (chosen,) = with_orders_for([dataclasses.replace(one, tried=overall.tried)], [count], probe)
            assert loss(chosen, count) == least
            improved.append(least < loss(one, count))
        plan = cmrc.plan(probe.program, data=probe.data, sites=[SITE], keep=plain.site.units - count)
        assert plan.entries[0].units == chosen.order.first(count)
        (recorded,) = plan.made["sites"].values()
        assert recorded.get("order", "") == chosen.ordered_by
        measured.append(chosen.ordered_by == MEASURED)
    assert any(improved)
    assert any(measured)
    assert not all(measured)
    assert with_orders_for([plain], [2], probe) == [plain]
