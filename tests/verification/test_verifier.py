"""Verification: the protocol against a plain loop, how outputs are read, breakdowns, controls, targets, and refusals."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from interventions import make, seen, traced
from tolerances import DIFFERENCE_F32
from torch import nn
from verification.small_heads import INPUT, outputs_of

import cmrc
from cmrc.errors import CertifyError, VerifyError
from cmrc.verification.draws import draw_anew, easy_inputs, pair_hard, pair_up
from cmrc.verification.evidence import highest

EXAMPLES = Path(__file__).parents[2] / "examples"
MEANS = {"act": [0.1, 0.4, -0.2], "act2": [0.3, 0.2]}


@functools.cache
def program_of(host: str = "fx") -> cmrc.Program:
    model, draw = make("layers")
    return traced(model, draw(3, 0), host)


def plan_of(program: cmrc.Program, *sites: str) -> cmrc.Plan:
    plan = cmrc.Plan(program)
    for site in sites:
        plan.do(site, units=range(len(MEANS[site])), constant=MEANS[site])
    return plan


def data(rows: int = 60, seed: int = 5) -> list[tuple[np.ndarray, np.ndarray]]:
    x = np.asarray(make("layers")[1](rows, seed))
    return [(x, np.arange(rows) % 3)]


@pytest.mark.parametrize("classes", [1, 2, 10, 32, 33, 1000])
def test_the_highest_of_many_short_rows_or_of_long_ones(classes: int) -> None:
    z = np.random.default_rng(classes).normal(size=(7, 3, classes))
    assert np.array_equal(highest(z), [[max(row) for row in rows] for rows in z.tolist()])


@pytest.mark.parametrize("host", ["fx", "onnx"])
def test_the_protocol_is_a_loop_over_swaps(host: str) -> None:
    """Both models written out with torch's hooks, one swap at a time."""
    model, _ = make("layers")
    program = program_of(host)
    ((x, _),) = data()
    verifier = cmrc.Verifier(program, cmrc.lower(program, plan_of(program, "act2")), [x])
    draw = verifier.draw(np.random.default_rng(1), 25)
    evidence = verifier.swap(draw)
    inputs, (mask,) = torch.from_numpy(x), draw.masks.values()
    for i in range(25):
        base, source = inputs[draw.base[i] : draw.base[i] + 1], inputs[draw.source[i] : draw.source[i] + 1]
        theirs, chosen = seen(model, source, "act2"), torch.from_numpy(mask[i])

        def original(out: torch.Tensor, theirs: torch.Tensor = theirs, chosen: torch.Tensor = chosen) -> torch.Tensor:
            out = out.clone()
            out[0, 2:] = torch.where(chosen[2:], theirs[0, 2:], out[0, 2:])
            return out

        def reduced(out: torch.Tensor, edit: object = original) -> torch.Tensor:
            out = edit(out)
            out[0, :2] = torch.tensor(MEANS["act2"])
            return out

        handle = model.act2.register_forward_hook(lambda _, __, out, edit=original: edit(out))
        z = model(base).detach().double()
        handle.remove()
        handle = model.act2.register_forward_hook(lambda _, __, out, edit=reduced: edit(out))
        other = model(base).detach().double()
        handle.remove()
        p, q = torch.log_softmax(z, 1), torch.log_softmax(other, 1)
        assert bool(evidence.agree[i, 0]) == bool(z.argmax() == other.argmax())
        assert np.isclose(evidence.kl[i, 0], float((p.exp() * (p - q)).sum()), **DIFFERENCE_F32)
        assert np.isclose(evidence.squared[i, 0], float(((other - z) ** 2).sum()), **DIFFERENCE_F32)
        assert np.isclose(evidence.largest[i, 0], float((other - z).abs().max()), **DIFFERENCE_F32)
        assert np.isclose(evidence.margin[i, 0], float(-torch.diff(z.topk(2).values)), **DIFFERENCE_F32)


def test_the_control_swaps_the_replaced_units_in_the_original_alone() -> None:
    program = program_of("fx")
    verifier = cmrc.Verifier(program, plan_of(program, "act2"), data())
    (v,) = verifier.variables
    draw = verifier.draw(np.random.default_rng(0), 40, 0.7)
    mask = draw.masks[v.value] & np.isin(np.arange(v.units), v.replaced)
    rows = {name: np.asarray(array) for name, array in verifier.data.inputs.items()}
    base, source = ({name: array[index] for name, array in rows.items()} for index in (draw.base, draw.source))
    original = cmrc.interpret(program).interchange(base, source, "act2", mask)[0]
    expected = verifier.compare(draw, original, verifier.answers[1][draw.base])
    control = verifier.swap_replaced(draw)
    assert np.allclose(control.squared, expected.squared, **DIFFERENCE_F32)
    assert control.squared.max() > 1e-3


@pytest.mark.parametrize("host", ["fx", "onnx"])
@pytest.mark.parametrize("sites", [("act",), ("act2",), ("act", "act2")])
def test_a_lowered_model_and_its_plan_taken_literally_are_one(host: str, sites: tuple[str, ...]) -> None:
    program = program_of(host)
    plan = plan_of(program, *sites)
    lowered = cmrc.lower(program, plan)
    ours, literal = (cmrc.verify(program, m, data(), swaps=300, controls=False) for m in (lowered, plan))
    assert ours.iia == literal.iia
    assert np.allclose(ours.evidence.squared, literal.evidence.squared, **DIFFERENCE_F32)
    assert (ours.keep, len(ours.evidence)) == (literal.keep, 300)
    assert ours.evidence.squared.mean() > 1e-3


def test_a_clamp_that_stays_is_verified_too() -> None:
    """The residual model lets no replacement pass: the site still has all of its units."""
    model, draw = make("residual")
    program = traced(model, draw(3, 0), "fx")
    plan = plan_of(program, "act2")
    lowered = cmrc.lower(program, plan, residue="keep")
    ours, literal = (cmrc.verify(program, m, data(), swaps=300, controls=False) for m in (lowered, plan))
    assert ours.iia == literal.iia
    assert ours.d2.value > 1e-3


def test_a_module_that_is_called_like_the_value_of_another() -> None:
    class Confusing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.linear, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.linear(self.first(x)))

    torch.manual_seed(0)
    program = traced(Confusing(), torch.zeros(2, 6), "fx")
    assert (program.find("first")[0].value, program.find("linear")[0].value) == ("linear", "linear_1")
    plan = cmrc.Plan(program).do("first", units=[0, 1], constant=0.5)
    lowered = cmrc.lower(program, plan)
    ours, literal = (cmrc.verify(program, m, data(), swaps=100, controls=False) for m in (lowered, plan))
    assert ours.keep == {"first": (6, 8)}
    assert np.allclose(ours.evidence.squared, literal.evidence.squared, **DIFFERENCE_F32)


def test_a_saved_model_is_verified_beside_its_plan(tmp_path: object) -> None:
    program = program_of("onnx")
    plan = plan_of(program, "act2")
    plan.save(f"{tmp_path}/plan.json")
    lowered = cmrc.lower(program, plan)
    lowered.save(f"{tmp_path}/small.onnx")
    result = cmrc.verify(program, f"{tmp_path}/small.onnx", data(), plan=f"{tmp_path}/plan.json", swaps=200)
    assert result.iia == cmrc.verify(program, lowered, data(), swaps=200).iia


def test_the_same_seed_gives_the_same_swaps() -> None:
    program = program_of()
    plan = plan_of(program, "act2")
    one, same, other = (cmrc.verify(program, plan, data(), swaps=200, seed=s, controls=False) for s in (0, 0, 1))
    assert np.array_equal(one.evidence.squared, same.evidence.squared)
    assert not np.array_equal(one.evidence.squared, other.evidence.squared)


def test_controls_say_what_a_good_number_would_mean() -> None:
    program = program_of()
    result = cmrc.verify(program, plan_of(program, "act2"), data(), swaps=400)
    assert np.isclose(result.controls["unswapped"].agree.mean(), result.plain.agreement.value, atol=0.1)
    assert result.power is not None
    assert np.isclose(result.power.ignored, result.controls["ignored"].agree.mean(), atol=0.02)
    assert len(result.power.warnings) == 2  # swaps move this untrained model too little for 30 pairs to show anything
    moved = result.controls["replaced"]
    assert moved.squared.mean() > 1e-3  # what the replaced units do to the original, the reduced model does not follow
    assert result.controls["random"].squared.mean() > 1e-3


def test_controls_show_power_where_swaps_matter() -> None:
    program = cmrc.trace(EXAMPLES / "digits.onnx")
    images = np.load(EXAMPLES / "digits_test.npz")["images"]
    values = cmrc.interpret(program).tap((images,), "act3")
    gone = np.argsort(values.var(0))[:20]
    plan = cmrc.Plan(program).do("act3", units=gone, constant=values.mean(0)[gone])
    result = cmrc.verify(program, plan, [images], swaps=400)
    assert result.power is not None
    assert result.power.warnings == ()
    assert result.verdict.splitlines() == [
        f"IIA is at least {result.ladder[-1].bound:.4f} for inputs like the held-out ones, with probability 0.95 (estimate "
        f"{result.iia.value:.4f}; 360 inputs, 180 pairs, 400 swaps).",
        f"The controls show power: a model that ignores the swaps would have IIA {result.power.ignored:.4f}, units retained "
        f"at random have {result.power.random:.4f}.",
    ]


def test_rates_take_turns() -> None:
    program = program_of()
    result = cmrc.verify(program, plan_of(program, "act2"), data(), swaps=300, p=(0.0, 0.5, 1.0), controls=False)
    assert list(result.by_rate()) == [0.0, 0.5, 1.0]
    assert np.allclose([np.mean(result.evidence.rate == r) for r in (0.0, 0.5, 1.0)], 1 / 3, atol=0.04)
    verifier = cmrc.Verifier(program, plan_of(program, "act2"), data())
    draw = verifier.draw(np.random.default_rng(0), 4000, (0.0, 0.25, 1.0), about="fixed")
    (mask,) = draw.masks.values()
    assert np.allclose([mask[draw.rate == r].mean() for r in (0.0, 0.25, 1.0)], [0, 0.25, 1], atol=0.01)


def test_classes_are_told_apart() -> None:
    program = program_of()
    result = cmrc.verify(program, plan_of(program, "act2"), data(), swaps=300, controls=False)
    classes = result.evidence.classes[:, 0]
    by_class = result.by_class()
    for c in np.unique(classes):  # ten swaps of each pair: the mean over pairs, weighted by swaps, is that over swaps
        assert np.isclose(by_class[int(c)].value, result.evidence.agree[classes == c].mean())
        assert by_class[int(c)].low < by_class[int(c)].value < by_class[int(c)].high


def test_plans_are_compared_on_the_same_swaps() -> None:
    program = program_of()
    good = cmrc.verify(program, plan_of(program, "act2"), data(), swaps=500, controls=False)
    plan = cmrc.Plan(program).do("act2", units=range(6), constant=3.0)
    bad = cmrc.verify(program, plan, data(), swaps=500, controls=False)
    gap = good.minus(bad)
    assert gap.iia.low > 0
    assert gap.kl.high < 0
    assert gap.iia_p < 0.01
    assert gap.kl_p < 0.01
    assert np.isclose(gap.iia.value, good.iia.value - bad.iia.value)
    assert good.minus(good).iia_p == 1.0
    assert str(gap).startswith("ΔIIA 0.")
    with pytest.raises(VerifyError, match="the two were not verified on the same swaps: seed differ"):
        good.minus(cmrc.verify(program, plan, data(), swaps=500, seed=1, controls=False))


def one_unit(program: cmrc.Program) -> cmrc.Plan:
    return cmrc.Plan(program).do("act2", units=[0], constant=float(MEANS["act2"][0]))


def test_a_run_stops_when_its_target_is_decided() -> None:
    program = program_of()
    plan, many = one_unit(program), data(400)
    early = cmrc.verify(program, plan, many, swaps=4000, until="iia>=0.6", controls=False)
    assert early.decision is not None
    assert early.decision.holds is True
    assert len(early.evidence) < 2000
    assert early.verdict.startswith(
        f"iia>=0.6 HOLDS for inputs like the held-out ones. IIA is at least {early.decision.low:.4f} with probability 0.95"
    )
    never = cmrc.verify(program, plan, many, swaps=4000, until="iia>=0.98", controls=False)
    assert never.decision is not None
    assert never.decision.holds is not True
    assert len(never.evidence) < 4000
    open_end = cmrc.verify(program, plan, many, swaps=300, until=f"iia>={early.iia.value - 0.01:.3f}", controls=False)
    assert open_end.decision is not None
    assert open_end.decision.holds is None
    assert "It needs at least" in open_end.verdict


def test_a_target_that_the_data_cannot_show_is_refused_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of()
    monkeypatch.setattr(cmrc.Verifier, "outputs", lambda *_: pytest.fail("it began to swap"))
    with pytest.raises(CertifyError) as caught:
        cmrc.verify(program, one_unit(program), data(60), until="iia>=0.95")
    assert caught.value.reason == (
        "iia>=0.95 at level 0.95 needs at least 124 held-out inputs, even if all agree, but there are 60"
    )


def test_targets_that_need_no_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of()
    monkeypatch.setattr(cmrc.Verifier, "outputs", lambda *_: pytest.fail("it began to swap"))
    ((x, _),) = data(400)
    labels = cmrc.interpret(program).run((x,))[0].argmax(1)  # the original is always right
    plan = one_unit(program)
    for until in ("agreement>=0.7", "accuracy>=0.7", "drop<=0.3"):
        result = cmrc.verify(program, plan, [(x, labels)], until=until)
        assert result.decision is not None
        assert result.decision.holds is True
        assert result.decision.swaps == 0
        value = result.plain.agreement.value  # also the accuracy, and one minus its drop
        assert np.isclose(result.decision.value, 1 - value if until.startswith("drop") else value)
    with pytest.raises(VerifyError, match="accuracy needs labels"):
        cmrc.verify(program, plan, [x], until="accuracy>=0.7")
    with pytest.raises(CertifyError, match=r"iia>=0\.5 needs swaps"):
        cmrc.verify(program, plan, [x], swaps=0, until="iia>=0.5")
    cheap = cmrc.verify(program, plan, [x], swaps=0)
    assert "This says nothing about interventions." in str(cheap)
    assert "iia" not in cheap.to_json()
    with pytest.raises(VerifyError, match="nothing was swapped"):
        _ = cheap.iia


def test_the_smallest_certified_plan() -> None:
    program = program_of()
    ((x, _),) = data(600)
    means = cmrc.interpret(program).tap((x,), "act2").mean(0) + 0.3  # IIA 0.86, 0.78, 0.76, 0.40
    plans = [cmrc.Plan(program).do("act2", units=range(n), constant=means[:n]) for n in (1, 2, 4, 6)]
    result = cmrc.smallest_certified(program, plans, [x], "iia>=0.65", swaps=3000)
    assert result.chosen == 2
    assert [decision.holds for decision in result.decisions][:3] == [True, True, True]
    assert result.decisions[3].holds is not True
    assert cmrc.smallest_certified(program, plans[3:], [x], "iia>=0.98").chosen is None
    assert cmrc.smallest_certified(program, plans, [x], "agreement>=0.6").decisions[0].swaps == 0
    with pytest.raises(CertifyError, match="there are no plans to choose from"):
        cmrc.smallest_certified(program, [], [x], "iia>=0.9")


def test_which_of_two_plans_is_better_is_decided_early() -> None:
    program = program_of()
    good, bad = one_unit(program), cmrc.Plan(program).do("act2", units=range(6), constant=3.0)
    many = data(400)
    for by in ("iia", "kl"):
        result = cmrc.better(program, good, bad, many, by=by, swaps=4000)
        assert (result.better, result.swaps < 2000) == (0, True)
        assert (result.low > 0) if by == "iia" else (result.high < 0)
        assert str(result).startswith(f"The first is better by {by} (first − second ")
    assert cmrc.better(program, bad, good, many, swaps=4000).better == 1
    same = cmrc.better(program, good, good, many, swaps=400)
    assert (same.better, same.difference) == (None, 0.0)
    with pytest.raises(VerifyError, match="plans cannot be compared by 'accuracy'"):
        cmrc.better(program, good, bad, many, by="accuracy")


# ---------------------------------------------------------------- which inputs meet


@pytest.mark.parametrize(("rows", "swaps"), [(10, 3), (11, 5), (10, 47), (2, 9)])
def test_every_input_is_in_one_pair(rows: int, swaps: int) -> None:
    drawn = pair_up(np.random.default_rng(0), rows, swaps)
    assert len(drawn) == swaps
    assert drawn.units == min(rows // 2, swaps)
    pairs = [frozenset(p) for p in zip(drawn.base.tolist(), drawn.source.tolist(), strict=True)]
    assert all(len(pair) == 2 for pair in pairs)
    by_unit = {unit: {pairs[i] for i in np.flatnonzero(drawn.unit == unit)} for unit in range(drawn.units)}
    assert all(len(members) == 1 for members in by_unit.values())
    assert len(set().union(*(pair for members in by_unit.values() for pair in members))) == 2 * drawn.units
    counts = np.bincount(drawn.unit)
    assert counts.max() - counts.min() <= 1
    parts = drawn.parts(4)
    assert np.array_equal(np.concatenate([part.unit for part in parts]), drawn.unit)
    assert not any(set(a.unit.tolist()) & set(b.unit.tolist()) for a, b in itertools.pairwise(parts))


def test_an_input_never_meets_itself_if_asked() -> None:
    pairs = draw_anew(np.random.default_rng(0), 3, 600, distinct=True)
    assert (pairs.base != pairs.source).all()
    assert np.allclose(
        np.bincount(pairs.base * 3 + pairs.source, minlength=9)[[1, 2, 3, 5, 6, 7]] / 600, 1 / 6, atol=0.06
    )
    assert (
        draw_anew(np.random.default_rng(0), 3, 600).base == draw_anew(np.random.default_rng(0), 3, 600).source
    ).any()


def test_stress_prefers_hard_inputs_and_stays_unbiased() -> None:
    """Failures sit on hard inputs: the weighted mean is that of the population, though hard ones are drawn more often."""
    rng = np.random.default_rng(0)
    margin = rng.random(4000)
    easy = easy_inputs(margin, np.zeros(4000, dtype=np.int64))
    assert np.isclose(easy.mean(), 0.75, atol=0.01)
    fails = (margin < 0.1).astype(float)
    means, hard = [], []
    for seed in range(60):
        drawn = pair_hard(np.random.default_rng(seed), easy, 2000, 4.0)
        used = np.flatnonzero(np.diff(drawn.unit, prepend=-1))
        base, weight = drawn.base[used], drawn.importance[used]
        means.append(np.average(fails[base], weights=weight))
        hard.append(1 - easy[base].mean())
        assert set(base.tolist()).isdisjoint(drawn.source.tolist())
    assert np.isclose(np.mean(means), fails.mean(), atol=3 * np.std(means) / np.sqrt(60))
    assert np.isclose(np.mean(hard), 0.25 / (0.25 + 0.75 / 4), atol=0.02)
    rare = easy_inputs(np.ones(100), np.repeat([0, 1], [99, 1]))
    assert not rare[99]
    program = program_of()
    drawn = cmrc.verify(program, one_unit(program), data(400), stress=3, swaps=400)
    assert set(np.unique(drawn.evidence.importance)) == {1 / 3, 1.0}


def test_statements_about_the_fixed_set_count_swaps() -> None:
    program = program_of()
    result = cmrc.verify(program, one_unit(program), data(60), swaps=500, about="fixed")
    assert result.evidence.units == 500
    assert "for these held-out inputs only" in result.verdict
    population = cmrc.verify(program, one_unit(program), data(60), swaps=500)
    assert population.evidence.units == 30
    assert population.ladder[-1].bound < result.ladder[-1].bound


def test_swaps_that_change_nothing_are_said_to_prove_nothing() -> None:
    """A site whose units the head hardly reads: a model that ignores the swaps scores as well."""
    program = outputs_of(3)
    head = next(iter(program.find("act")))
    plan = cmrc.Plan(program).do(head.name, units=range(7), constant=0.2)
    result = cmrc.verify(program, plan, [INPUT], p=0.0, swaps=200)
    assert result.power is not None
    assert not result.power.above_ignored
    assert (
        "Warning: swaps at these sites prove nothing: on the swaps that the controls repeat, a model that ignores"
        in str(result)
    )
    assert result.to_json()["warnings"]


def test_the_report_and_its_json() -> None:
    program = program_of()
    result = cmrc.verify(program, plan_of(program, "act2"), data(), swaps=300)
    text = str(result)
    for part in ("300 swaps at rate 0.5 on 60 inputs: act2 (6 of 8 units retained)", "IIA", "KL(original", "D2", "markov",
                 "accuracy, reduced", "replaced units swapped"):  # fmt: skip
        assert part in text
    document = json.loads(json.dumps(result.to_json()))
    assert document["keep"] == {"act2": [6, 8]}
    assert document["iia"] == result.iia.to_json()
    assert set(document["certificates"]) == {"delta", "markov", "tail", "samplewise", "range", "direct"}
    assert set(document["controls"]) == {"ignored", "replaced", "random", "unswapped"}
    assert document["about"] == "population"
    assert document["verdict"] == result.verdict
