"""`lowered.check`: every output, every batch, and an error that is judged beside the rounding of the model itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from differential.models import chain, to_onnx
from onnx import helper, numpy_helper
from torch import nn

import cmrc
from cmrc.errors import CheckError, InputError
from cmrc.hosts.inputs import random_batches
from cmrc.ir.graph import Tensor, literal
from cmrc.ir.tensors import constant
from cmrc.program.check import FOLDED, USUAL, check_batches, clamped_in_float64, folded_apart, nudge
from cmrc.program.steps import rounds_to_steps

DYNAMIC = torch.export.Dim.DYNAMIC
X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


class TwoHeads(nn.Module):
    """One hidden layer, and two outputs of it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(6, 8), nn.ReLU()
        self.first, self.last = nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.act(self.fc(x))
        return self.first(hidden), self.last(hidden)


def lowered_by(model: nn.Module, *args: Any, site: str = "act", constant: float = 0.5, **options: Any) -> cmrc.Lowered:
    torch.manual_seed(0)
    program = cmrc.trace(model.eval(), args or (X,), **options)
    return cmrc.lower(program, cmrc.Plan(program).do(site, units=[1, 4], constant=constant))


def add(lowered: cmrc.Lowered, parameter: str, amount: float) -> None:
    """A wrong number in the lowered model alone."""
    with torch.no_grad():
        lowered.host.state[parameter] += amount  # type: ignore[attr-defined]


@pytest.mark.parametrize(("parameter", "place"), [("first.bias", 0), ("last.bias", 1)])
def test_every_output_is_compared(parameter: str, place: int) -> None:
    lowered = lowered_by(TwoHeads())
    assert lowered.check((X,)).holds
    add(lowered, parameter, 1e-3)
    check = lowered.check((X,))
    assert [output.error > output.tolerance for output in check.outputs] == [place == 0, place == 1]
    assert not check.holds
    assert check.worst is check.outputs[place]
    assert (check.error, check.tolerance) == (check.outputs[place].error, check.outputs[place].tolerance)


def test_not_a_number_is_infinitely_far() -> None:
    lowered = lowered_by(TwoHeads())
    add(lowered, "first.bias", float("nan"))
    check = lowered.check((X,))
    assert not check.holds
    assert check.error == float("inf")


class Classes(nn.Module):
    """Whole numbers as output: the larger of two logits."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act, self.last = nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.act(self.fc(x))).argmax(1)


def test_whole_numbers_are_equal_or_not() -> None:
    lowered = lowered_by(Classes())
    assert lowered.check((X,)).holds
    with torch.no_grad():
        lowered.host.state["last.bias"].copy_(torch.tensor([1e3, -1e3]))  # type: ignore[attr-defined]
    zeros = lowered.check((X,))
    with torch.no_grad():
        lowered.host.state["last.bias"].copy_(torch.tensor([-1e3, 1e3]))  # type: ignore[attr-defined]
    ones = lowered.check((X,))
    assert not (zeros.holds and ones.holds)  # they cannot both be right
    assert {zeros.error, ones.error} <= {0.0, 1.0}


def test_every_batch_is_compared() -> None:
    """A wrong weight of the first layer does not show where the inputs are zero."""
    lowered = lowered_by(TwoHeads())
    add(lowered, "fc.weight", 1e-2)
    zeros = torch.zeros_like(X)
    assert lowered.check((zeros,)).holds
    for batches in ([(zeros,), (X,)], [(X,), (zeros,)]):
        check = lowered.check(*batches)
        assert not check.holds
        assert check.batches == 2


def test_the_text_says_how_far_rounding_goes() -> None:
    check = lowered_by(TwoHeads()).check((X,), (2 * X,))
    worst = check.worst
    assert str(check) == (
        f"lowered and clamped are equal on 2 batches: they differ at {worst.name}, the worst of 2 outputs, "
        f"by {check.error:.2e} of the output's scale "
        f"(allowed {check.tolerance:.0e}, the clamped model's own rounding {check.rounding:.2e}); "
        f"the replacement itself moves it by {check.moved:.2e}; in float64 they differ by {check.folded:.1e} (allowed 1e-09)"
    )


def test_an_error_that_rounding_does_not_explain_is_found_below_the_usual_tolerance() -> None:
    lowered = lowered_by(TwoHeads())
    scale = float(np.abs(lowered.clamped.run((X,))[0]).max())
    add(lowered, "first.bias", 5e-6 * scale)
    check = lowered.check((X,))
    assert check.error < USUAL["float32"]
    assert check.error > check.tolerance >= 4 * check.rounding
    assert not check.holds


class Cancelling(nn.Module):
    """The difference of two large and nearly equal numbers: most of its digits are rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act, self.out, self.other = nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3), nn.Linear(64, 3)
        with torch.no_grad():
            self.other.weight.copy_(self.out.weight * 0.99)
            self.other.bias.copy_(self.out.bias * 0.99)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.act(self.fc(x))
        return self.out(hidden) - self.other(hidden)


def test_a_model_that_rounds_much_is_allowed_as_much() -> None:
    plain, cancelling = lowered_by(TwoHeads()).check(), lowered_by(Cancelling()).check()
    assert cancelling.rounding > 10 * plain.rounding
    assert cancelling.holds
    assert cancelling.tolerance > plain.tolerance


def test_a_tolerance_that_is_given_is_kept() -> None:
    lowered = lowered_by(TwoHeads())
    assert {output.tolerance for output in lowered.check((X,), tolerance=0.25).outputs} == {0.25}
    assert lowered.check((X,), tolerance=0.25).holds
    assert not lowered.check((X,), tolerance=0.0).holds


def test_without_batches_they_are_drawn_from_the_seed() -> None:
    lowered = lowered_by(TwoHeads(), X, dynamic_shapes=({0: DYNAMIC},))
    first, again, other = lowered.check(), lowered.check(), lowered.check(seed=1)
    assert first.batches == 3
    assert first == again != other
    assert first.holds
    assert other.holds
    batches = [batch["x"] for batch in random_batches(lowered.program.host, seed=3, count=8)]
    assert len({len(batch) for batch in batches}) > 1
    scales = [np.abs(batch).mean() for batch in batches]
    assert max(scales) > 5 * min(scales)


class Image(nn.Module):
    """Needs at least 24 pixels on each side."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act, self.pool = nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.AvgPool2d(24)
        self.out = nn.Conv2d(6, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.pool(self.act(self.conv(x))))


def test_sizes_are_those_that_the_model_runs_with() -> None:
    image, sizes = torch.randn(2, 3, 32, 32), ({0: DYNAMIC, 2: DYNAMIC, 3: DYNAMIC},)
    lowered = lowered_by(Image(), image, dynamic_shapes=sizes)
    batches = random_batches(lowered.program.host)
    assert [batch["x"].shape[2:] for batch in batches] == [(32, 32)] * 3
    assert lowered.check().holds


class Elevens(nn.Module):
    """Takes its input apart into rows of eleven."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act, self.out = nn.Linear(11, 8), nn.ReLU(), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.act(self.fc(x.reshape(-1, 11))))


def test_a_model_that_no_size_suits_says_so() -> None:
    lowered = lowered_by(Elevens(), torch.randn(22), dynamic_shapes=({0: DYNAMIC},))
    with pytest.raises(InputError) as error:
        random_batches(lowered.program.host)
    assert str(error.value) == (
        "input: the model does not run on random inputs with dynamic sizes of 2, 8, 32, 64, 224\n"
        "  fix: give batches: lowered.check((batch,))"
    )
    assert lowered.check().holds  # on the inputs of the trace
    (name,) = {str(n) for value in lowered.program.graph.inputs for n in value.shape}
    assert [len(batch["x"]) for batch in random_batches(lowered.program.host, sizes={name: 33})] == [33] * 3


class Words(nn.Module):
    """Reads whole numbers: its inputs have no last bit."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.act, self.out = nn.Embedding(5, 16), nn.GELU(), nn.Linear(16, 4)
        self.fc = nn.Linear(16, 16)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.act(self.fc(self.table(words))))


def test_rounding_of_a_model_that_reads_whole_numbers_is_measured_by_its_constants() -> None:
    words = torch.arange(10).reshape(2, 5) % 5
    check = lowered_by(Words(), words).check((words,))
    assert 0 < check.rounding < 1e-5
    assert check.holds
    assert lowered_by(Words(), words).check().holds


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act, self.out = nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)

    def forward(self, pair: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.out(self.act(self.fc(pair["a"] + pair["b"])))


def test_a_model_with_nested_arguments_is_checked_on_those_of_the_trace() -> None:
    pair = {"a": X, "b": 2 * X}
    lowered = lowered_by(Pair(), pair)
    with pytest.raises(InputError, match="nested or constant arguments"):
        random_batches(lowered.program.host)
    check = lowered.check()
    assert (check.batches, check.holds) == (1, True)
    assert check.rounding > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_every_precision_is_judged_by_its_own_rounding(dtype: torch.dtype) -> None:
    lowered = lowered_by(TwoHeads().to(dtype), X.to(dtype))
    check = lowered.check()
    assert check.holds
    assert 0 < check.rounding < USUAL[str(dtype).removeprefix("torch.")]


def test_the_same_on_onnx() -> None:
    program = cmrc.trace(to_onnx(torch.export.export(TwoHeads().eval(), (X,))))
    (site,) = (site for site in program.sites(folds=False) if site.op == "relu")
    lowered = cmrc.lower(program, cmrc.Plan(program).do(site.name, units=[1, 4], constant=0.5))
    check = lowered.check()
    assert (check.holds, check.batches, len(check.outputs)) == (True, 3, 2)
    assert check.rounding > 0


class First(TwoHeads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)[0]


class Wider(TwoHeads):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, last = super().forward(x)
        return first, torch.cat([last, last], 1)


class Doubled(TwoHeads):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, last = super().forward(x)
        return first, last.double()


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (First, "the lowered model has 1 outputs, the clamped one 2"),
        (Wider, "the lowered model gives shape [5, 4], the clamped one [5, 2]"),
        (Doubled, "the lowered model gives float64, the clamped one float32"),
    ],
)
def test_models_that_cannot_be_compared(other: type[nn.Module], reason: str) -> None:
    lowered = lowered_by(TwoHeads())
    foreign = cmrc.trace(other().eval(), (X,)).host
    with pytest.raises(CheckError) as error:
        check_batches(lowered.program.host, lowered.clamped, foreign, [(X,)])
    assert str(error.value) == f"check: {reason}"


def test_nothing_to_compare_is_no_proof() -> None:
    lowered = lowered_by(TwoHeads())
    with pytest.raises(CheckError) as error:
        check_batches(lowered.program.host, lowered.clamped, lowered.host, [])
    assert str(error.value) == (
        "check: there is nothing to compare\n  fix: give at least one batch, and a model with outputs"
    )


def test_a_nudge_moves_numbers_by_their_last_bit() -> None:
    values = np.array([1.0, -3.0, 0.0, 1e-30], np.float32)
    moved = nudge(values, np.random.default_rng(0))
    assert moved.dtype == np.float32
    assert moved[2] == 0
    assert np.all((moved != values) == (values != 0))
    assert np.allclose(moved, values, rtol=2e-7, atol=0)
    assert np.array_equal(nudge(np.arange(3), np.random.default_rng(0)), np.arange(3))


class Twins(nn.Module):
    """The difference of two layers that are nearly the same: what is left is mostly rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(6, 64), nn.ReLU()
        self.first, self.second = nn.Linear(64, 9), nn.Linear(64, 9)
        with torch.no_grad():
            self.second.weight.copy_(self.first.weight * (1 + 1e-5 * torch.randn(9, 64)))
            self.second.bias.copy_(self.first.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.act(self.fc(x))
        return self.first(h) - self.second(h)


def lowered_twins() -> cmrc.Lowered:
    torch.manual_seed(0)
    program = cmrc.trace(Twins().eval(), (X,))
    return cmrc.lower(program, cmrc.Plan(program).do("act", units=range(40), constant=0.3))


def test_twice_its_own_rounding_is_allowed_where_float64_cannot_be_computed() -> None:
    def refuse(inputs: Mapping[str, Any]) -> list[Any]:
        raise CheckError("the model has ops that only its host can run")

    lowered = lowered_twins()
    hosts = (lowered.program.host, lowered.clamped, lowered.host)
    assert not check_batches(*hosts, [(X,)]).holds
    check = check_batches(*hosts, [(X,)], exactly=refuse)
    assert check.tolerance == 2 * check.rounding > 10 * USUAL["float32"]
    assert check.holds
    scale = float(np.abs(lowered.clamped.run((X,))[0]).max())
    add(lowered, "first.bias", 4 * check.rounding * scale)
    assert not check_batches(*hosts, [(X,)], exactly=refuse).holds


def test_what_rounding_in_float64_explains_is_equal() -> None:
    lowered = lowered_twins()
    host, graph = lowered.program.host, lowered.plan.entries
    expected, got = lowered.clamped.run((X,))[0], lowered.host.run((X,))[0]
    exactly = clamped_in_float64(lowered.program, graph)
    (truth,) = exactly({"x": X.numpy()})
    scale = np.abs(expected).max()
    assert np.abs(expected - truth).max() / scale > 10 * USUAL["float32"]
    without = check_batches(host, lowered.clamped, lowered.host, [(X,)])
    check = check_batches(host, lowered.clamped, lowered.host, [(X,)], exactly=exactly)
    assert not np.array_equal(expected, got)
    assert (without.holds, check.holds) == (False, True)
    assert check.worst.exact
    assert ", against float64)" in str(check)


def test_a_wrong_number_is_not_explained_by_float64() -> None:
    lowered = lowered_by(TwoHeads())
    add(lowered, "first.bias", 1e-3)
    exactly = clamped_in_float64(lowered.program, lowered.plan.entries)
    check = check_batches(lowered.program.host, lowered.clamped, lowered.host, [(X,)], exactly=exactly)
    assert not check.holds
    assert not check.worst.exact


def test_a_wrong_fold_that_float32_hides_is_seen_in_float64() -> None:
    """A weight that is wrong by less than float32 rounds by: no output shows it, and the fold is wrong all the same."""
    program = cmrc.trace(chain(a=nn.Linear(6, 8), act=nn.GELU(), b=nn.Linear(8, 3)).eval(), (torch.randn(4, 6),))
    plan = cmrc.Plan(program)
    plan.do("act", units=[2, 5], constant=[0.3, -0.2])
    lowered = cmrc.lower(program, plan)
    right = lowered.check()
    assert right.holds
    assert right.folded is not None
    assert right.folded < 1e-14
    bound = lowered.clamped.bind((np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32),))
    assert folded_apart(program, plan.entries, lowered.graph, bound) < 1e-14
    last = lowered.graph.nodes[-1]
    bias = last.inputs[2]
    assert isinstance(bias, Tensor)
    moved = literal(constant(bias) + np.array([0, 2e-8, 0]))
    wrong = replace(lowered.graph, nodes=(*lowered.graph.nodes[:-1], last.with_inputs((*last.inputs[:2], moved))))
    apart = folded_apart(program, plan.entries, wrong, bound)
    assert apart is not None
    assert apart > FOLDED
    assert not replace(right, folded=apart).holds
    assert "in float64 they differ by" in str(replace(right, folded=apart))


def test_a_wrong_fold_in_front_of_a_rounding_is_seen_in_float64() -> None:
    """Both roundings get the same steps, so that the outputs are equal: what is rounded is compared."""
    rng = np.random.default_rng(0)
    stored = {"a": rng.normal(size=(6, 8)), "b": rng.normal(size=(8, 3)), "step": np.array(0.05)}
    arrays = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in stored.items()]
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"]), helper.make_node("Relu", ["h"], ["act"]), helper.make_node("MatMul", ["act", "b"], ["o"]),
        helper.make_node("QuantizeLinear", ["o", "step", "zero"], ["q"]), helper.make_node("DequantizeLinear", ["q", "step", "zero"], ["y"]),
    ]  # fmt: skip
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [4, n]) for name, n in (("x", 6), ("y", 3))]
    zero = numpy_helper.from_array(np.array(128, np.uint8), "zero")
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], [*arrays, zero])
    program = cmrc.trace(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    lowered = cmrc.lower(program, cmrc.Plan(program).do("act", units=[2, 5], constant=[0.3, 0.2]))
    bound = {"x": rng.normal(size=(4, 6)).astype(np.float32)}
    right = folded_apart(program, lowered.plan.entries, lowered.graph, bound)
    assert right is not None
    assert right < 1e-14
    rounded = next(n for n in lowered.graph.nodes if rounds_to_steps(n)).inputs[0]
    place, added = next((i, n) for i, n in enumerate(lowered.graph.nodes) if n.name == rounded)
    bias = added.inputs[-1]
    assert isinstance(bias, Tensor)
    moved = added.with_inputs((*added.inputs[:-1], literal(constant(bias) + 0.01)))
    nodes_moved = (*lowered.graph.nodes[:place], moved, *lowered.graph.nodes[place + 1 :])
    wrong = folded_apart(program, lowered.plan.entries, replace(lowered.graph, nodes=nodes_moved), bound)
    assert wrong is not None
    assert wrong > FOLDED


@pytest.mark.parametrize("act", [torch.round, torch.sign], ids=["round", "sign"])
def test_functions_that_jump_are_not_compared_in_float64(act: Callable[[torch.Tensor], torch.Tensor]) -> None:
    class Jumping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(act(torch.relu(self.a(x))))

    program = cmrc.trace(Jumping().eval(), (torch.randn(4, 6),))
    plan = cmrc.Plan(program)
    plan.do("relu", units=[1], constant=0.3)
    assert cmrc.lower(program, plan).check().folded is None
