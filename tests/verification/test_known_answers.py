"""Known answers: networks in which it is known what every unit means."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from known import BATCH, Counting, Equality, Reversing, circuit, linear, trained_circuit
from tolerances import DIFFERENCE_F32
from torch import nn

import cmrc
from cmrc.errors import VerifyError
from cmrc.verification.certificates import by_margin, from_d2
from cmrc.verification.distortion import distortion


def traced(model: nn.Module, example: torch.Tensor) -> cmrc.Program:
    return cmrc.trace(model.eval(), (example,), dynamic_shapes=({0: BATCH},))


# ---------------------------------------------------------------- hierarchical equality


def equality_iia(units: list[int], variable: int) -> float:
    """Swap units, and ask whether the answer is what the algorithm says when that variable comes from the source."""
    interpreter = cmrc.interpret(traced(Equality(), torch.zeros(2, 4)))
    base, source = Equality.inputs(500, 1), Equality.inputs(500, 2)
    mask = np.isin(np.arange(6), units)
    classes = interpreter.interchange((base,), (source,), "act2", mask)[0].argmax(1)
    first, second = base[:, 0] == base[:, 1], base[:, 2] == base[:, 3]
    if variable == 0:
        first = source[:, 0] == source[:, 1]
    else:
        second = source[:, 2] == source[:, 3]
    return float(np.mean(classes == (first == second)))


def test_equality_is_what_the_units_are_said_to_hold() -> None:
    assert equality_iia([0, 1, 5], 0) == 1.0
    assert equality_iia([2, 3], 1) == 1.0


@pytest.mark.parametrize(("units", "variable"), [([0, 2], 0), ([2, 3], 0), ([0, 1, 5], 1), ([4], 0)])
def test_a_wrong_alignment_is_seen(units: list[int], variable: int) -> None:
    assert equality_iia(units, variable) < 0.9


@pytest.mark.parametrize("kind", ["constant", "affine"])
def test_truly_constant_and_truly_affine_units_leave_nothing_behind(kind: str) -> None:
    """A truly affine unit follows its parents where they are computed: under swaps before it, not under swaps of them alone."""
    program = traced(Equality(), torch.zeros(2, 4))
    plan = cmrc.Plan(program)
    if kind == "constant":
        plan.do("act2", units=[4], constant=1.0)
    else:
        plan.do("act2", units=[5], affine=cmrc.Affine([0], [[2.0]], 1.0))
    x = Equality.inputs(400, 3)
    y = ((x[:, 0] == x[:, 1]) == (x[:, 2] == x[:, 3])).astype(int)
    lowered = cmrc.lower(program, plan)
    result = cmrc.verify(program, lowered, [(x, y)], swaps=500, site="act2" if kind == "constant" else "act1")
    assert result.iia.value == 1.0
    assert result.d2.value <= 1e-10
    assert [rung.value for rung in result.ladder] == [1.0] * 5
    assert result.plain.accuracy is not None
    assert [accuracy.value for accuracy in result.plain.accuracy] == [1.0, 1.0]
    assert result.controls["unswapped"].agree.all()
    if kind == "affine":  # in the original the unit stays the base's when only its parent is swapped
        assert cmrc.verify(program, lowered, [x], swaps=500, controls=False).iia.value < 1.0


def test_a_wrong_constant_is_seen() -> None:
    program = traced(Equality(), torch.zeros(2, 4))
    plan = cmrc.Plan(program).do("act2", units=[5], constant=1.0)
    result = cmrc.verify(program, cmrc.lower(program, plan), [Equality.inputs(400, 3)], swaps=500, controls=False)
    assert result.iia.high < 0.9


# ---------------------------------------------------------------- transformers written by hand


def test_a_counting_transformer_keeps_its_count_in_one_coordinate() -> None:
    interpreter = cmrc.interpret(traced(Counting(), torch.zeros(2, 6, dtype=torch.int64)))
    rng = np.random.default_rng(0)
    base, source = rng.integers(0, 3, size=(2, 200, 6))
    ours, theirs = (base == 1).sum(1), (source == 1).sum(1)
    assert np.array_equal(interpreter.run((base,))[0].argmax(2), np.repeat(ours[:, None], 6, 1))
    mask = np.zeros((200, 6, 10), dtype=bool)
    mask[:, 2, Counting.SHARE] = True
    classes = interpreter.interchange((base,), (source,), "residual", mask)[0].argmax(2)
    expected = np.repeat(ours[:, None], 6, 1)
    expected[:, 2] = theirs
    assert np.array_equal(classes, expected)
    others = np.ones((200, 10), dtype=bool)
    others[:, Counting.SHARE] = False
    assert np.array_equal(interpreter.interchange((base,), (source,), "residual", others)[0].argmax(2)[:, 0], ours)


def test_a_reversing_transformer_moves_tokens_from_place_to_place() -> None:
    interpreter = cmrc.interpret(traced(Reversing(), torch.zeros(2, 5, dtype=torch.int64)))
    rng = np.random.default_rng(0)
    base, source = rng.integers(0, 4, size=(2, 200, 5))
    assert np.array_equal(interpreter.run((base,))[0].argmax(2), base[:, ::-1])
    places = rng.random((200, 5)) < 0.5
    mask = np.zeros((200, 5, 13), dtype=bool)
    mask[:, :, Reversing.TOKEN] = places[:, :, None]
    classes = interpreter.interchange((base,), (source,), "stream", mask)[0].argmax(2)
    assert np.array_equal(classes, np.where(places, source, base)[:, ::-1])
    copied = interpreter.interchange((base,), (source,), "value", np.isin(np.arange(13), Reversing.MIRROR))[0].argmax(2)
    assert np.array_equal(copied, source[:, ::-1])


def test_a_transformer_without_its_idle_coordinates_is_the_same_algorithm() -> None:
    """The value projection writes MIRROR alone: its other coordinates are 0 on every input."""
    program = traced(Reversing(), torch.zeros(2, 5, dtype=torch.int64))
    plan = cmrc.Plan(program).do("value", units=range(9), constant=0.0)
    tokens = np.random.default_rng(0).integers(0, 4, size=(300, 5))
    result = cmrc.verify(program, plan, [(tokens, tokens[:, ::-1])], swaps=400)
    assert (result.iia.value, result.d2.value) == (1.0, 0.0)
    assert result.plain.accuracy is not None
    assert result.plain.accuracy[1].value == 1.0


# ---------------------------------------------------------------- closed forms


def test_a_linear_network_has_closed_forms() -> None:
    """Δz = W_S (c − a_S(base)), whatever is swapped: D2 = tr(W_S C_SS W_Sᵀ), and every swap can be predicted."""
    rng = np.random.default_rng(0)
    inner, outer = rng.normal(size=(6, 4)), rng.normal(size=(3, 6))
    model = nn.Sequential(linear(inner, rng.normal(size=6)), linear(outer, rng.normal(size=3)))
    program = traced(model, torch.zeros(2, 4))
    x = rng.normal(size=(300, 4)).astype(np.float32)
    values = cmrc.interpret(program).tap((x,), "0").astype(np.float64)
    gone = [1, 3, 4]
    plan = cmrc.Plan(program).do("0", units=gone, constant=values.mean(0)[gone])
    verifier = cmrc.Verifier(program, cmrc.lower(program, plan), [x])
    draw = verifier.draw(np.random.default_rng(1), 20_000)
    evidence = verifier.swap(draw)
    change = (values.mean(0) - values)[:, gone] @ outer[:, gone].T
    assert np.allclose(evidence.squared[:, 0], (change**2).sum(1)[draw.base], **DIFFERENCE_F32)
    assert np.allclose(evidence.spread[:, 0], np.ptp(change, axis=1)[draw.base], **DIFFERENCE_F32)
    covariance = np.cov(values[:, gone].T, bias=True)
    d2 = float(np.trace(outer[:, gone] @ covariance @ outer[:, gone].T))
    assert np.isclose((change**2).sum(1).mean(), d2)
    assert np.isclose(evidence.squared.mean(), d2, rtol=0.05)
    margins = evidence.margin[:, 0]
    grid = np.linspace(1e-3, margins.max(), 4001)
    best = max(1 - np.mean(margins <= 2 * e) - evidence.squared.mean() / e**2 for e in grid)
    value, epsilon = from_d2(margins, float(evidence.squared.mean()))
    assert value >= max(0.0, best)
    assert epsilon > 0
    assert np.isclose(by_margin(2.0, 0.1), 0.9)


@pytest.mark.parametrize("p", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("kind", ["constant", "affine"])
def test_the_scatter_gives_d2_without_swaps(kind: str, p: float) -> None:
    """Units that vary together: single scores add up to far less than D2, the scatter gives it exactly."""
    rng = np.random.default_rng(0)
    mixed = rng.normal(size=(6, 4)) + 3 * rng.normal(size=(1, 4))
    model = nn.Sequential(linear(mixed, rng.normal(size=6)), linear(rng.normal(size=(3, 6)) + 1, np.zeros(3)))
    program = traced(model, torch.zeros(2, 4))
    x = rng.normal(size=(400, 4)).astype(np.float32)
    gone = [1, 3, 4]
    stats = cmrc.calibrate(program, [x], sites="0", need=["scatter"])
    plan = cmrc.Plan(program)
    if kind == "constant":
        plan.do("0", units=gone, constant=stats["0"].mean[gone] + 0.1)
    else:
        plan.do("0", units=gone[:2], affine=cmrc.Affine([0, 2, 5], rng.normal(size=(2, 3)), 0.3))
        plan.do("0", units=gone[2:], constant=0.5)
    (shown,) = distortion(program, plan, stats, p=p)
    assert shown.exact
    if p == 0:
        measured = cmrc.verify(program, plan, [x], swaps=0).plain.evidence.squared.mean()
        assert np.isclose(shown.d2, measured, **DIFFERENCE_F32)
    verifier = cmrc.Verifier(program, plan, [x])
    many = verifier.swap(verifier.draw(np.random.default_rng(1), 40_000, p, about="fixed"))
    assert np.isclose(shown.d2, many.squared.mean(), rtol=0.05)
    if kind == "constant":
        weight = np.asarray(model[1].weight.detach(), dtype=np.float64)
        added = float((stats["0"].variance * (weight**2).sum(0))[gone].sum())
        assert added < 0.6 * shown.d2


def test_d2_from_statistics_needs_units_that_are_read() -> None:
    model = nn.Sequential(
        linear(np.eye(4), np.zeros(4)),
        nn.Tanh(),
        linear(np.ones((3, 4)), np.zeros(3)),
        nn.Tanh(),
        linear(np.eye(3), np.zeros(3)),
    )
    program = traced(model, torch.zeros(2, 4))
    stats = cmrc.calibrate(
        program, [np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)], need=["scatter"]
    )
    (before,) = distortion(program, cmrc.Plan(program).do("1", units=[0], constant=0.0), stats)
    assert not before.exact
    by_position = cmrc.Plan(program).do("3", units=[0], constant=np.zeros((1, 1)))
    with pytest.raises(VerifyError, match="D2 from statistics is for units that are single numbers"):
        distortion(program, by_position, stats)


# ---------------------------------------------------------------- a Boolean circuit


def test_a_trained_boolean_circuit() -> None:
    """XOR(AND(x1, x2), OR(x3, x4)) over six seeds: units chosen by Var·‖W‖² stand for it better than as many at random."""
    x, y = circuit()
    pairs: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for seed in range(6):
        model = trained_circuit(seed)
        program = traced(model, torch.zeros(2, 8))
        activations = cmrc.interpret(program).tap((x,), "3")
        weight = model[4].weight.detach().numpy()
        scores = {"logit": activations.var(0) * (weight**2).sum(0), "random": np.random.default_rng(seed).random(64)}
        for name, score in scores.items():
            for keep in (32, 16):
                gone = np.sort(np.argsort(score)[: 64 - keep])
                plan = cmrc.Plan(program).do("3", units=gone, constant=activations.mean(0)[gone])
                result = cmrc.verify(program, plan, [(x, y)], seed=seed, controls=False)
                assert result.plain.accuracy is not None
                assert result.plain.accuracy[0].value == 1.0
                pairs.setdefault((name, keep), []).append((result.iia.value, float(result.evidence.kl.mean())))
    mean = {key: np.mean(values, axis=0) for key, values in pairs.items()}
    for keep in (32, 16):
        assert mean["logit", keep][0] > mean["random", keep][0] + 0.03
        assert mean["logit", keep][1] < mean["random", keep][1]
    assert mean["logit", 32][0] > 0.85
