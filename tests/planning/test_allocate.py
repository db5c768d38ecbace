"""One budget for FFN units, heads and whole sublayers: what choices cost, and what goes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from nets import Net, Tokens, data, exported, seeded, traced

import cmrc
from cmrc.errors import OutOfReachError
from cmrc.planning.allocate import Costs
from cmrc.planning.planner import plan_sizes
from cmrc.planning.probe import LossProbe
from cmrc.program.reach import passed_by
from cmrc.statistics.calibrate import choose


@pytest.mark.parametrize("of", ["macs", "parameters"])
def test_what_a_choice_costs_is_foretold_from_few_lowered_models(of: str) -> None:
    program = traced(seeded(Net((5, 16, 12, 10, 4))), 5)
    costs = Costs(program, choose(program, "*"), of)
    rng = np.random.default_rng(0)
    choices = [[int(rng.integers(0, site.units)) for site in costs.sites] for _ in range(12)]
    foretold = [costs.foretell(counts) for counts in choices]
    assert len(costs.measured) == 1 + 3 + 2  # the model, each of three sites, and the two pairs that share a layer
    assert foretold == pytest.approx([costs.measure(counts) for counts in choices], rel=1e-9)


def test_several_budgets_share_what_was_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    program, (x, _) = traced(seeded(Net((5, 16, 12, 10, 4))), 5), data(60, 5)
    lowered: list[object] = []
    real = Costs._lowered
    monkeypatch.setattr(Costs, "_lowered", lambda self, counts: lowered.append(counts) or real(self, counts))
    stats = cmrc.calibrate(program, [x], need=["scatter"])
    amounts = [{"budget": {"of": "macs", "amount": amount}} for amount in (0.9, 0.8, 0.7, 0.6, 0.5)]
    for plan, asked in zip(plan_sizes(program, stats, amounts, data=[x]), amounts, strict=True):
        small = cmrc.lower(program, plan).report
        assert small.after.macs <= asked["budget"]["amount"] * small.before.macs
    assert len(lowered) <= 6 + 6 * len(amounts)  # candidates, for their cost and for what they store


def test_a_loss_that_rounding_makes_negative_still_leaves_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probabilities of float32 do not quite add up to 1, so that a divergence of nothing may lie below 0."""
    program, (x, _) = traced(seeded(Net((5, 16, 12, 10, 4))), 5), data(60, 5)
    stats = cmrc.calibrate(program, [x], need=["scatter"])
    monkeypatch.setattr(
        LossProbe, "together", lambda self, ranked, candidates: [-1e-9 * (i + 1) for i in range(len(candidates))]
    )
    budget = {"of": "macs", "amount": 0.5}
    small = cmrc.lower(program, cmrc.plan(program, stats, data=[x], preset="joint", budget=budget)).report
    assert small.after.macs <= 0.5 * small.before.macs


def test_a_smaller_size_is_also_tried_as_one_within_the_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    program, (x, _) = traced(seeded(Net((5, 16, 12, 10, 4))), 5), data(60, 5)
    stats = cmrc.calibrate(program, [x], need=["scatter"])
    tried: list[list[list[int]]] = []
    real = LossProbe.together

    def together(self: LossProbe, ranked: list, candidates: list[list[int]]) -> list[float]:
        tried.append(candidates)
        return real(self, ranked, candidates)

    monkeypatch.setattr(LossProbe, "together", together)
    amounts = [{"budget": {"of": "macs", "amount": amount}} for amount in (0.8, 0.5)]
    first, second = plan_sizes(program, stats, amounts, data=[x])
    gone = [site["units"] - site["kept"] for site in first.made["sites"].values()]
    assert any(all(more >= less for more, less in zip(counts, gone, strict=True)) for counts in tried[1])
    assert [site["units"] - site["kept"] for site in second.made["sites"].values()] in tried[1]


def test_what_cannot_be_reached_is_found_before_any_loss_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    program, (x, _) = traced(seeded(Net((5, 16, 12, 10, 4))), 5), data(60, 5)
    stats = cmrc.calibrate(program, [x], need=["scatter"])
    monkeypatch.setattr(LossProbe, "of_sites", lambda *_: pytest.fail("a loss was measured"))
    amounts = [{"budget": {"of": "macs", "amount": amount}} for amount in (0.8, 0.001)]
    with pytest.raises(OutOfReachError, match="cannot be met: with all units removed that may be removed, it is"):
        next(plan_sizes(program, stats, amounts, data=[x]))


def faint(model: Tokens, part: str) -> Tokens:
    """A block of which one part hardly adds to the stream."""
    with torch.no_grad():
        for parameter in getattr(model, part).parameters():
            parameter.mul_(1e-4)
    return model


@pytest.mark.parametrize("host", ["torch", "onnx"])
@pytest.mark.parametrize(("part", "amount"), [("fc2", 0.8), ("proj", 0.4)])
def test_a_sublayer_that_hardly_matters_goes_as_a_whole(part: str, amount: float, host: str) -> None:
    model = faint(seeded(Tokens(12, 4), seed=3).float(), part)
    program, (x, _) = traced(model, 3, 12), data(60, 3, 12)
    program, x = exported(program) if host == "onnx" else program, x.astype(np.float32)
    plan = cmrc.plan(program, data=[x[:30], x[30:]], budget={"of": "parameters", "amount": amount})
    kept = {site["units"]: site["kept"] for site in plan.made["sites"].values()}
    assert kept[8 if part == "fc2" else 4] == 0
    assert kept[4 if part == "fc2" else 8] > 0
    lowered = cmrc.lower(program, plan)
    assert lowered.check((x[:8],)).holds
    assert lowered.report.after.parameters <= amount * lowered.report.before.parameters
    several = cmrc.plan(program, data=[x], budget={"of": "parameters", "amount": 0.8}, minimum=2)
    assert all(site["kept"] >= 2 for site in several.made["sites"].values())


def test_what_nothing_passes_by_never_goes_as_a_whole() -> None:
    program, (x, _) = traced(seeded(Net((5, 16, 12, 4))), 5), data(60, 5)
    assert not any(passed_by(program, site) for site in choose(program, "*"))
    plan = cmrc.plan(program, data=[x], budget={"of": "macs", "amount": 0.2})
    assert all(site["kept"] >= 1 for site in plan.made["sites"].values())
    block = traced(seeded(Tokens()), 3, 6)
    assert all(passed_by(block, site) for site in choose(block, "*"))
