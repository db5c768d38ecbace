"""The loss of cutting one site alone: that of a run of the clamped model, and each piece run no more often than it must."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from nets import Branches, Net, data, exported, seeded, traced
from torch import nn

import cmrc
from cmrc.errors import StatsError
from cmrc.planning import counts as counting
from cmrc.planning import probe
from cmrc.planning.counts import measured_risk
from cmrc.planning.probe import LossProbe, divergence, shifted
from cmrc.planning.ranking import rank
from cmrc.planning.recipe import make_recipe
from cmrc.planning.replacements import replace_units
from cmrc.statistics.calibrate import unwatched
from cmrc.verification.interpreter import HeldInputs

SITES = ["act_a", "act_b", "act_c"]


@pytest.fixture(params=["fx", "onnx"])
def program(request: pytest.FixtureRequest) -> cmrc.Program:
    program = traced(seeded(Branches()), 5)
    return program if request.param == "fx" else exported(program)


@pytest.mark.parametrize("loss", ["kl", "logit"])
def test_losses_are_those_of_the_clamped_model(program: cmrc.Program, loss: str) -> None:
    x, _ = data(60, 5)
    recipe = make_recipe(preset="joint", sites=SITES, loss=loss)
    stats = cmrc.calibrate(program, [x], sites=SITES, need=["scatter"])
    ranked = [rank(program, program.find(name)[0], stats[name], recipe, ()) for name in SITES]
    counts = [[2, 4], [1, 3], [3]]
    measured = LossProbe(program, recipe, [x[:25], x[25:]], unwatched).of_sites(ranked, counts)
    plain = program.run([x])[0].astype(np.float64)
    for r, some, losses in zip(ranked, counts, measured, strict=True):
        for count, value in zip(some, losses, strict=True):
            plan = replace_units(program, r, count, cmrc.Plan(program), {})
            cut = program.clamped(plan).run([x])[0].astype(np.float64)
            expected = divergence(plain, cut).mean() if loss == "kl" else ((plain - cut) ** 2).sum(1).mean()
            assert np.isclose(value, expected, rtol=1e-6)
            assert value > 0


def test_only_what_lies_behind_a_site_runs_again(program: cmrc.Program, monkeypatch: pytest.MonkeyPatch) -> None:
    x, _ = data(20, 5)
    recipe = make_recipe(preset="joint", sites=SITES)
    stats = cmrc.calibrate(program, [x], sites=SITES, need=["scatter"])
    ranked = [rank(program, program.find(name)[0], stats[name], recipe, ()) for name in SITES]
    ran: list[tuple[int, int]] = []
    real = HeldInputs._run
    monkeypatch.setattr(
        HeldInputs, "_run", lambda self, level, feeds, n: ran.append((level, n)) or real(self, level, feeds, n)
    )
    LossProbe(program, recipe, [x], unwatched).of_sites(ranked, [[1], [1], [1]])
    levels = [level for level, rows in ran if rows == 20]  # a single row is asked how large everything is
    last = max(levels)
    units = list(range(last))
    # held; the whole model's answer from the first cut on; then each site from its own level on
    deeper = {"act_a": 1, "act_b": 2, "act_c": 2}  # the last two lie side by side
    expected = [*units, *range(1, last + 1), *(k for name in SITES for k in range(deeper[name], last + 1))]
    assert levels == expected


@pytest.mark.parametrize(("passes", "rows"), [(10**9, 1024), (300, 300), (1, probe.FEWEST)])
def test_a_heavy_model_is_probed_on_fewer_rows(
    passes: int, rows: int, program: cmrc.Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, _ = data(1100, 5)
    recipe = make_recipe(preset="joint", sites=SITES)
    stats = cmrc.calibrate(program, [x], sites=SITES, need=["scatter"])
    ranked = [rank(program, program.find(name)[0], stats[name], recipe, ()) for name in SITES]
    monkeypatch.setattr(probe, "WORK", passes * (program.cost().macs * 3 // 2))
    counted: list[int] = []
    real = LossProbe._loss
    monkeypatch.setattr(LossProbe, "_loss", lambda self, a, b, c: counted.append(len(c)) or real(self, a, b, c))
    LossProbe(program, recipe, [x], unwatched).of_sites(ranked, [[1], [1], [1]])
    assert sum(counted) == 3 * rows


def test_padding_does_not_count() -> None:
    program = traced(seeded(nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))), 5, 6)
    x, _ = data(12, 5, 6)
    mask = np.arange(5)[None] < np.random.default_rng(0).integers(1, 5, size=(12, 1))
    recipe = make_recipe(preset="cmr-logit", positions="mask", sites=["1"])
    stats = cmrc.calibrate(program, [{program.host.inputs[0]: x, "mask": mask}], sites="1", positions="mask")
    ranked = [rank(program, program.find("1")[0], stats["1"], recipe, ())]
    ((loss,),) = LossProbe(program, recipe, [{program.host.inputs[0]: x, "mask": mask}], unwatched).of_sites(
        ranked, [[3]]
    )
    plan = replace_units(program, ranked[0], 3, cmrc.Plan(program), {})
    apart = divergence(program.run([x])[0], program.clamped(plan).run([x])[0])
    assert np.isclose(loss, apart[mask].mean(), rtol=1e-5)
    assert not np.isclose(loss, apart.mean(), rtol=1e-3)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_pairs_add_up_to_the_loss_where_the_outputs_are_linear(count: int) -> None:
    """Behind the last activation the outputs are linear in the units, so what a set loses is the sum over its pairs."""
    program = traced(seeded(Net((5, 7, 4))), 5)
    recipe, (site,) = (
        make_recipe(preset="reconstruction", sites=["acts.0"], loss="squared-error"),
        program.find("acts.0"),
    )
    x, _ = data(40, 5)
    stats = cmrc.calibrate(program, [x], sites=["acts.0"], need=recipe.needs)
    probe = LossProbe(program, recipe, [x[:30], x[30:]], unwatched)
    r = rank(program, site, stats["acts.0"], recipe, ())
    (pairs,) = probe.of_pairs([r]) or ()
    gone = list(r.order.first(count))
    ((lost,),) = probe.of_sites([r], [[count]])
    assert lost > 0
    assert np.isclose(pairs[np.ix_(gone, gone)].sum(), lost, rtol=1e-5)


def test_pairs_are_left_out_where_they_take_too_long(program: cmrc.Program, monkeypatch: pytest.MonkeyPatch) -> None:
    x, _ = data(20, 5)
    recipe = make_recipe(preset="reconstruction", sites=["act_a"])
    stats = cmrc.calibrate(program, [x], sites=["act_a"], need=recipe.needs)
    r = rank(program, program.find("act_a")[0], stats["act_a"], recipe, ())
    assert LossProbe(program, recipe, [x], unwatched).of_pairs([r, r]) is not None
    monkeypatch.setattr(probe, "PAIRS_WORK", 1)
    assert LossProbe(program, recipe, [x], unwatched).of_pairs([r]) is None


def test_a_small_shift_of_classes_is_their_divergence() -> None:
    rng = np.random.default_rng(0)
    plain = rng.normal(size=(6, 5))
    cut = plain + 1e-3 * rng.normal(size=(6, 5))
    exact = divergence(plain, cut)
    assert np.allclose((shifted(plain, cut, 1.0) ** 2).sum(-1), exact, rtol=1e-2, atol=0)
    assert np.allclose(shifted(plain, plain + 2.0), 0, atol=1e-12)  # no change of probabilities
    soft = np.exp(plain / 3) / np.exp(plain / 3).sum(-1, keepdims=True)
    change = cut - plain
    variance = (soft * change**2).sum(-1) - (soft * change).sum(-1) ** 2
    assert np.allclose((shifted(plain, cut, 3.0) ** 2).sum(-1), variance / 2, rtol=1e-6)


def test_probabilities_are_compared_as_they_are() -> None:
    rng = np.random.default_rng(0)
    p, q = (rng.dirichlet(np.ones(5), size=7) for _ in range(2))
    expected = (p * np.log(p / q)).sum(1)
    assert np.allclose(divergence(p, q), expected)
    assert np.allclose(divergence(np.log(p) + 3, np.log(q) - 1), expected)


def test_curves_pass_through_what_was_measured() -> None:
    risk = np.concatenate([[0.0], np.cumsum(np.linspace(1, 3, 10))])
    counts, losses = [2, 5, 8], [0.1, 0.3, 1.1]
    curve = measured_risk(risk, counts, losses)
    assert np.allclose(curve[counts], losses)
    assert np.allclose(curve[:3], risk[:3] * losses[0] / risk[2])
    between = np.log(losses[2] / losses[1]) / np.log(risk[8] / risk[5])
    assert np.allclose(curve[5:], losses[1] * (risk[5:] / risk[5]) ** between)
    assert np.allclose(measured_risk(risk, [4], [2.0]), risk * 2 / risk[4])
    steep = measured_risk(risk, [3, 8], [1e-9, 1.0])  # noise at the small end: no steeper than the square
    assert np.allclose(steep[3:8], 1e-9 * (risk[3:8] / risk[3]) ** 2)
    assert np.isclose(steep[8], 1.0)
    fallen = measured_risk(risk, [3, 8], [1.0, 0.5])
    assert (np.diff(fallen) >= 0).all()
    nothing = measured_risk(risk, [3, 8], [0.0, 0.0])
    assert 0 < nothing[-1] < 1e-9
    assert (np.diff(nothing) > 0).all()


def test_the_candidate_that_is_best_together_is_taken(program: cmrc.Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """The candidates meet one budget; the last is the same part of every site; the plan has the least loss as measured."""
    x, _ = data(60, 5)
    given = {"preset": "joint", "sites": SITES, "multiple_of": 1, "budget": {"of": "parameters", "amount": 0.7}}
    seen: list[tuple[list[list[int]], list[float]]] = []
    real = LossProbe.together

    def together(self: LossProbe, ranked: list, candidates: list[list[int]]) -> list[float]:
        seen.append((candidates, real(self, ranked, candidates)))
        return seen[-1][1]

    monkeypatch.setattr(LossProbe, "together", together)
    plan = cmrc.plan(program, data=[x], **given)
    ((candidates, losses),) = seen
    units = [program.find(name)[0].units for name in SITES]
    before = program.cost().parameters
    plain = program.run([x])[0]
    for counts, loss in zip(candidates, losses, strict=True):
        keep = {name: n - k for name, n, k in zip(SITES, units, counts, strict=True)}
        one = cmrc.plan(program, data=[x], preset="joint", sites=SITES, multiple_of=1, keep=keep)
        assert cmrc.lower(program, one).report.after.parameters <= 0.7 * before
        assert np.isclose(divergence(plain, program.clamped(one).run([x])[0]).mean(), loss, rtol=1e-5)
    shares = [k / n for k, n in zip(candidates[-1], units, strict=True)]
    assert max(shares) - min(shares) < 1.5 / min(units)
    assert [site["units"] - site["kept"] for site in plan.made["sites"].values()] == candidates[int(np.argmin(losses))]


def test_steps_of_channels_give_way_where_they_cost_much() -> None:
    """The digits classifier has 16 channels: in steps of 4 its loss on pictures that it was not calibrated on is three times as high."""
    examples = Path(__file__).parents[2] / "examples"
    program = cmrc.trace(examples / "digits.onnx")
    train, test = (np.load(examples / f"digits_{part}.npz")["images"] for part in ("train", "test"))

    def planned(**options: dict[str, int]) -> tuple[int, float]:
        plan = cmrc.plan(program, data=[train], budget={"of": "macs", "amount": 0.7}, **options)
        lost = divergence(program.run([test])[0], program.clamped(plan).run([test])[0]).mean()
        return plan.made["sites"]["act1"]["kept"], lost

    (finest, loss), (stepped, higher) = planned(), planned(multiple_of={})
    assert finest % counting.FINE
    assert not stepped % counting.FINE
    assert 2 * loss < higher


def test_a_candidate_that_is_clearly_behind_is_given_up(program: cmrc.Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is ahead is measured on every row, to the same number as alone; what is behind stays behind."""
    x, _ = data(64, 5)
    stats = cmrc.calibrate(program, [x], sites=SITES, need=["scatter"])
    recipe = make_recipe(preset="joint", sites=SITES)
    ranked = [rank(program, program.find(name)[0], stats[name], recipe, ()) for name in SITES]
    most = [r.site.units - 1 for r in ranked]
    candidates = [[1, 0, 0], most, [1, 1, 0]]
    probe = LossProbe(program, recipe, [x[i : i + 16] for i in range(0, 64, 16)], unwatched)
    runs: list[int] = []
    real = LossProbe._loss
    monkeypatch.setattr(LossProbe, "_loss", lambda self, *given: runs.append(1) or real(self, *given))
    losses = probe.together(ranked, candidates)
    assert len(runs) < 4 * len(candidates)
    alone = [LossProbe(program, recipe, [x], unwatched).together(ranked, [counts])[0] for counts in candidates]
    best = int(np.argmin(alone))
    assert int(np.argmin(losses)) == best
    assert np.isclose(losses[best], alone[best], rtol=1e-5)
    assert losses[1] > 1.3 * losses[best]


class Tokens(nn.Module):
    """A large map of every token, and a larger one of their mean: which of them costs more depends on the number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.act = nn.Linear(4, 16), nn.Linear(16, 4), nn.ReLU()
        self.c, self.d, self.late = nn.Linear(4, 32), nn.Linear(32, 3), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean: torch.Tensor = self.b(self.act(self.a(x))).mean(1)
        return self.d(self.late(self.c(mean)))


@pytest.mark.parametrize("kind", ["fx", "onnx"])
def test_a_budget_counts_the_tokens_of_the_data(kind: str) -> None:
    dynamic = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")}
    program = cmrc.trace(seeded(Tokens()), (torch.randn(2, 5, 4),), dynamic_shapes=(dynamic,))
    if kind == "onnx":
        program = exported(program)
    x = np.random.default_rng(0).normal(size=(64, 50, 4)).astype(np.float32)
    recipe = make_recipe(preset="joint", sites=["act", "late"])
    sites = [program.find(name)[0] for name in recipe.sites]
    costs = LossProbe(program, recipe, [x], unwatched).costs_of("macs", sites)
    assert costs.measure([0, 0]) == 50 * 2 * 4 * 16 + 4 * 32 + 32 * 3
    assert costs.savings.tolist() == [50 * 8, 7]


def test_a_budget_needs_data() -> None:
    program = traced(seeded(Branches()), 5)
    x, _ = data(60, 5)
    stats = cmrc.calibrate(program, [x], sites=SITES, need=["scatter"])
    with pytest.raises(StatsError) as caught:
        cmrc.plan(program, stats, preset="joint", sites=SITES, budget={"of": "macs", "amount": 0.8})
    assert str(caught.value) == (
        "stats: a budget is shared by what the cut at each site does to the output, but there are no data to measure it on\n"
        "  fix: give data= beside the statistics (some batches suffice), or keep= instead of a budget"
    )
    plan = cmrc.plan(
        program, stats, data=[x], preset="joint", sites=SITES, multiple_of=1, budget={"of": "units", "amount": 0.7}
    )
    kept, units = (sum(site[key] for site in plan.made["sites"].values()) for key in ("kept", "units"))
    assert kept == int(0.7 * units)
