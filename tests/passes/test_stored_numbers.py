"""A lowered model holds no more numbers than the model: constants under zero padding are planes that are stored only where few."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from graphs import Do, Net, batch, with_do
from hypothesis import given
from hypothesis import strategies as st
from meaning import gap, outputs_of
from rewrites.start import TWO, done, image
from tolerances import EXACT_F32, EXACT_F64, MOVES
from torch import nn

import cmrc
from cmrc.ir.cost import cost
from cmrc.ir.graph import Graph
from cmrc.passes.pipeline import run

PADDED = ((2, 2), (2, 2))


class Separable(nn.Module):
    """Expand, depthwise under zero padding, project."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.act = nn.Conv2d(3, 64, 1), nn.ReLU()
        self.depthwise, self.project = nn.Conv2d(64, 64, 5, padding=2, groups=64), nn.Conv2d(64, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(self.depthwise(self.act(self.expand(x))))


class Inverted(nn.Module):
    """An inverted residual with batch norms, and a padded convolution behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.norm, self.act = nn.Conv2d(16, 48, 1, bias=False), nn.BatchNorm2d(48), nn.ReLU6()
        self.depthwise, self.norm2 = nn.Conv2d(48, 48, 3, padding=1, groups=48, bias=False), nn.BatchNorm2d(48)
        self.project, self.head = nn.Conv2d(48, 16, 1), nn.Conv2d(16, 24, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.norm2(self.depthwise(self.act(self.norm(self.expand(x)))))
        return self.head(x + self.project(nn.functional.relu6(wide)))


def numbers_in(path: Path) -> int:
    return sum(int(np.prod(tensor.dims)) for tensor in onnx.load(path, load_external_data=False).graph.initializer)


@pytest.mark.parametrize("host", ["fx", "onnx"])
@pytest.mark.parametrize(
    ("module", "shape"), [(Separable, (1, 3, 200, 152)), (Inverted, (1, 16, 28, 20))], ids=["separable", "inverted"]
)
def test_a_depthwise_convolution_of_a_fixed_size(
    module: type[nn.Module], shape: tuple[int, ...], host: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, image = module().eval(), torch.randn(shape)
    torch.onnx.export(model, (image,), tmp_path / "model.onnx", dynamo=True, verbose=False)
    program = cmrc.trace(model, (image,)) if host == "fx" else cmrc.trace(tmp_path / "model.onnx")
    plan = cmrc.Plan(program).do("act", units=range(0, 48, 2), constant=np.linspace(0.5, 2.0, 24))
    lowered = cmrc.lower(program, plan)
    check = lowered.check([image.numpy()])
    assert check.error <= EXACT_F32
    assert check.moved >= MOVES * EXACT_F32
    before, after = lowered.report.before, lowered.report.after
    assert after.parameters <= before.parameters
    assert after.macs <= before.macs
    lowered.save(tmp_path / "small.onnx")
    assert numbers_in(tmp_path / "small.onnx") <= numbers_in(tmp_path / "model.onnx")
    saved = cmrc.trace(tmp_path / "small.onnx").host.run([image.numpy()])[0]
    np.testing.assert_allclose(saved, lowered.host.run([image.numpy()])[0], rtol=0, atol=1e-4)


def depthwise(size: int) -> tuple[Net, str]:
    net, h = image(height=size, width=size)
    return net, net.conv(h, 4, (5, 5), pad=PADDED, groups=4)


def flattened() -> Graph:
    net, h = depthwise(6)
    net.linear(net.reshape(h, "N", 4 * 36), 3)
    return done(net, Do("conv_1", 1, (2, 0), *TWO))


def joined() -> Graph:
    net, h = depthwise(6)
    net.conv(net.concat(h, h, axis=1), 2, (1, 1))
    return done(net, Do("conv_1", 1, (2, 0), *TWO))


def replaced_again() -> Graph:
    net, h = depthwise(6)
    net.conv(net.pointwise("relu", h), 2, (1, 1))
    return done(net, Do("conv_1", 1, (2, 0), *TWO), Do(h, 1, (0, 1), [0.3, 0.7]))


def multiplied() -> Graph:
    net, h = depthwise(6)
    net.conv(net.pointwise("mul", h, net.conv("x", 4, (1, 1))), 2, (1, 1))
    return done(net, Do("conv_1", 1, (2, 0), *TWO), Do("conv_3", 1, (2, 0), 0.0))


@pytest.mark.parametrize("example", [flattened, joined, replaced_again, multiplied])
def test_a_plane_of_a_fixed_size_passes_where_a_value_cannot(example: Callable[[], Graph]) -> None:
    """There it goes on as numbers, as if it had never been a value."""
    graph = example()
    result = run(graph)
    assert result.residue == []
    inputs = batch(graph, N=2)
    assert gap(outputs_of(result.graph, inputs), outputs_of(graph, inputs)) <= EXACT_F64


@pytest.mark.parametrize(("size", "stored"), [(3, True), (5, True), (6, False)])
def test_a_plane_is_stored_where_it_has_no_more_numbers_than_the_columns(size: int, stored: bool) -> None:
    net, h = image(6, height=size, width=size)
    net.conv(h, 2, (5, 5), pad=PADDED)
    graph = done(net, Do(h, 1, (3,), [0.5]))
    result = run(graph)
    assert any(node.op == "plane" for node in result.graph.nodes) is not stored
    assert cost(result.graph).parameters <= cost(graph).parameters


def test_a_small_plane_behind_a_depthwise_convolution_is_stored() -> None:
    """Two channels of 3x3 numbers become nine sums for each output of a 3x3 convolution, which are fewer than its columns."""
    net, h = image(height=3, width=3)
    net.conv(net.conv(h, 4, (2, 2), pad=((1, 0), (1, 0)), groups=4), 2, (3, 3), pad=((1, 1), (1, 1)))
    graph = done(net, Do(h, 1, (2, 0), *TWO))
    result = run(graph)
    assert [node.op for node in result.graph.nodes] == ["conv", "conv", "conv", "pointwise"]
    inputs = batch(graph, N=2)
    assert gap(outputs_of(result.graph, inputs), outputs_of(graph, inputs)) <= EXACT_F64


@st.composite
def stacks(draw: st.DrawFn) -> tuple[Graph, Graph]:
    """Convolutions in a row, with and without padding, groups and batch norms, at a fixed size; one has replaced channels."""
    net = Net(draw(st.integers(0, 99)))
    h = net.input("N", 3, draw(st.integers(7, 16)), draw(st.integers(7, 16)))
    h, sites = net.conv(h, 4, (1, 1)), list[str]()
    for _ in range(draw(st.integers(1, 3))):
        kernel, groups = draw(st.sampled_from([1, 3, 5])), draw(st.sampled_from([1, 1, 4]))
        outs = 4 if groups == 4 else draw(st.sampled_from([4, 8]))
        groups = min(groups, int(net.shape(h)[1]))
        outs = int(net.shape(h)[1]) if groups == 4 else outs
        pad = ((kernel // 2, kernel // 2),) * 2
        sites.append(h)
        h = net.conv(h, outs, (kernel, kernel), pad=pad, groups=groups, bias=draw(st.booleans()))
        h = net.batch_norm(h) if draw(st.booleans()) else h
        h = net.pointwise("relu", h) if draw(st.booleans()) else h
    net.output(net.conv(h, 2, (1, 1)))
    units = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True))
    return net.graph(), with_do(net.graph(), Do(draw(st.sampled_from(sites)), 1, tuple(units), 0.7))


@given(stacks())
def test_no_stack_of_convolutions_grows(stack: tuple[Graph, Graph]) -> None:
    plain, graph = stack
    result = run(graph)
    before, after = cost(plain), cost(result.graph)
    if not result.residue:
        assert after.parameters <= before.parameters
        assert after.macs <= before.macs
    inputs = batch(graph, N=2)
    assert gap(outputs_of(result.graph, inputs), outputs_of(graph, inputs)) <= EXACT_F64


class Tokens(nn.Module):
    """A small MLP on many positions."""

    def __init__(self) -> None:
        super().__init__()
        self.rise, self.act, self.fall = nn.Linear(48, 24), nn.GELU(), nn.Linear(24, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fall(self.act(self.rise(x)))


class Pixels(nn.Module):
    """The same as convolutions, the second padded."""

    def __init__(self) -> None:
        super().__init__()
        self.rise, self.act, self.fall = nn.Conv2d(300, 24, 1), nn.ReLU(), nn.Conv2d(24, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fall(self.act(self.rise(x)))


@pytest.mark.parametrize("host", ["fx", "onnx"])
@pytest.mark.parametrize(
    ("module", "shape", "slab"),
    [(Tokens, (2, 30, 48), (1, 30, 2)), (Pixels, (2, 300, 12, 9), (1, 2, 12, 9))],
    ids=["tokens", "pixels"],
)
def test_constants_by_position_are_stored_as_factors_where_their_product_is_larger(
    host: str, module: type[nn.Module], shape: tuple[int, ...], slab: tuple[int, ...], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x = module().eval(), torch.randn(shape)
    wide = cmrc.trace(model, (x,))
    wide.host.save(tmp_path / "wide.onnx")
    program = wide if host == "fx" else cmrc.trace(tmp_path / "wide.onnx")
    constants = np.random.default_rng(0).normal(size=slab)
    site = next(s for s in program.sites() if s.units == 24 and ("gelu" in s.op.lower() or "relu" in s.op.lower()))
    plan = cmrc.Plan(program)
    plan.do(site.value, units=[3, 17], constant=constants, axis=site.axis)
    lowered = cmrc.lower(program, plan)
    assert lowered.check([x.numpy()]).holds
    if host == "fx":  # torch's exporter multiplies small factors itself
        numbers = [sum(t.numel() for t in m.state_dict().values()) for m in (lowered.module, model)]
    else:
        lowered.save(tmp_path / "small.onnx")
        numbers = [numbers_in(tmp_path / name) for name in ("small.onnx", "wide.onnx")]
    assert numbers[0] < numbers[1]
    assert not lowered.report.growth().keys() - {
        "bytes in the file"
    }  # names weigh more than numbers in a file so small
    clamped = program.clamped(plan)
    expected, got = (h.run([x.numpy()]) for h in (clamped, lowered.host))
    for a, b in zip(expected, got, strict=True):
        assert np.abs(a - b).max() <= 1e-5 * np.abs(a).max()
