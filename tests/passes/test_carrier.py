"""A channel that stays and carries the constants of a zero-padded convolution: when it is taken, and that it is exact."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from graphs import Do, Net, batch
from hypothesis import given
from hypothesis import strategies as st
from meaning import gap, outputs_of
from rewrites.start import Example, done, image
from tolerances import EXACT_F64

from cmrc.ir.cost import cost
from cmrc.ir.graph import Graph, Node
from cmrc.passes.pipeline import Result, run
from cmrc.passes.rewriting.carrier import BLOCK

PADDED = ((1, 1), (1, 1))
CARRIED = "which carries them, exact at the zero-padded border"
THREE = ((4, 0, 2), [0.5, -1.0, 2.0])


def lowered(graph: Graph) -> Result:
    """The graph after all passes, which computes the same."""
    result = run(graph)
    inputs = batch(graph, N=2, H=5, W=4)
    assert gap(outputs_of(result.graph, inputs), outputs_of(graph, inputs)) <= EXACT_F64
    return result


def is_carried(result: Result) -> bool:
    carried = any(CARRIED in action.detail for action in result.actions)
    assert carried != any("plane" in action.detail or "buffer" in action.detail for action in result.actions)
    return carried


def node_of(result: Result, name: str) -> Node:
    return next(node for node in result.graph.nodes if node.name == name)


def pair(
    channels: int = 6, between: Callable[[Net, str], str] = lambda net, h: net.pointwise("relu", h)
) -> tuple[Net, str]:
    """A convolution, what stands behind it, and a padded convolution."""
    net, h = image(channels, height="H", width="W")
    x = between(net, h)
    net.conv(x, 2, (3, 3), pad=PADDED)
    return net, x


def test_what_stays_and_the_carrier_fill_a_block() -> None:
    widths = {}
    for channels in range(5, 14):
        net, x = pair(channels)
        result = lowered(done(net, Do(x, 1, (1, 0), [0.5, -1.0])))
        widths[channels] = node_of(result, "relu_1").output.shape[1]
        assert is_carried(result) == (widths[channels] % BLOCK == 0 and widths[channels] == channels - 1)
    assert [channels for channels, width in widths.items() if width == channels - 1] == [5, 9, 13]


def test_the_carrier_is_the_number_and_nothing_else() -> None:
    """Its weights are 0, so that what the model is given does not reach it."""
    net, x = pair()
    result = lowered(done(net, Do(x, 1, *THREE)))
    inputs = batch(result.graph, N=2, H=5, W=4)
    inside = Graph(result.graph.inputs, result.graph.nodes, ("relu_1",))
    (values,) = outputs_of(inside, {name: 1e6 * array for name, array in inputs.items()})
    assert values.shape[1] == 4
    assert [bool((values[:, i] == 1.0).all()) for i in range(4)].count(True) == 1


def sigmoid() -> Graph:
    net, x = pair(between=lambda net, h: net.pointwise("sigmoid", h))
    return done(net, Do(x, 1, *THREE))


def shifted() -> Graph:
    """What is added behind the convolution is part of no bias."""
    net, x = pair(between=lambda net, h: net.pointwise("add", h, net.leaf(6, 1, 1)))
    return done(net, Do(x, 1, *THREE))


def summed() -> Graph:
    net, x = pair(between=lambda net, h: net.pointwise("relu", net.pointwise("add", h, net.conv("x", 6, (1, 1)))))
    return done(net, Do(x, 1, *THREE))


def read_twice() -> Graph:
    net, x = pair()
    net.pointwise("add", "conv_2", net.conv(x, 2, (1, 1)))
    return done(net, Do(x, 1, *THREE))


def read_before() -> Graph:
    """The value in front of the activation has another reader, which sees the unit as it is."""
    net, x = pair()
    net.pointwise("add", "conv_2", net.conv("conv_1", 2, (1, 1)))
    return done(net, Do(x, 1, *THREE))


def shown() -> Graph:
    net, x = pair()
    graph = done(net, Do(x, 1, *THREE))
    return Graph(graph.inputs, graph.nodes, (*graph.outputs, "conv_1"))


def first_in_groups() -> Graph:
    net = Net()
    x = net.pointwise("relu", net.conv(net.input("N", 6, "H", "W"), 6, (3, 3), groups=6))
    net.conv(x, 2, (3, 3), pad=PADDED)
    return done(net, Do(x, 1, *THREE))


def second_in_groups() -> Graph:
    net, h = image(10, height="H", width="W")
    net.conv(net.pointwise("relu", h), 4, (3, 3), pad=PADDED, groups=2)
    return done(net, Do("relu_1", 1, (4, 0, 5), [0.5, -1.0, 2.0]), Do("relu_1", 1, (1, 6, 9), 0.0))


def made_at_run_time() -> Graph:
    net = Net()
    weight = net.reshape(net.linear(net.input(6, 3, name="other"), 2), 6, 2, 1, 1)
    attrs = {"axis": 1, "stride": (1, 1), "pad": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}
    x = net.node("conv", (net.input("N", 2, "H", "W"), weight, None), ("N", 6, "H", "W"), **attrs)
    net.conv(x, 2, (3, 3), pad=PADDED)
    return done(net, Do(x, 1, *THREE))


def no_room_for_a_bias() -> Graph:
    """Four numbers of a new bias, and one row of two numbers that goes."""
    net = Net()
    x = net.conv(net.input("N", 2, "H", "W"), 5, (1, 1), bias=False)
    net.conv(x, 2, (3, 3), pad=PADDED)
    return done(net, Do(x, 1, (1, 0), [0.5, -1.0]))


def one_unit() -> Graph:
    """As many channels as before would stay."""
    net, x = pair(4)
    return done(net, Do(x, 1, (1,), [0.5]))


def rebuilt_from_a_replaced_unit() -> Graph:
    """Unit 2 is replaced for the convolution, and its own numbers rebuild the others: it stays as well."""
    net, x = pair(5)
    return done(net, Do(x, 1, *THREE, (2, 1), [[1.0, 2.0], [0.0, -0.5], [1.0, 1.0]]))


def replaced_twice() -> Graph:
    """The value that the convolution reads is not the activation's own."""
    net, x = pair(8)
    return done(net, Do(x, 1, (5, 6), [1.0, 2.0], (3,), [[2.0], [1.0]]), Do(x, 1, *THREE))


DECLINED: list[Example] = [
    sigmoid, shifted, summed, read_twice, read_before, shown, first_in_groups, second_in_groups, made_at_run_time,
    no_room_for_a_bias, one_unit, rebuilt_from_a_replaced_unit, replaced_twice,
]  # fmt: skip


@pytest.mark.parametrize("example", DECLINED)
def test_otherwise_a_plane_is_added(example: Example) -> None:
    assert not is_carried(lowered(example()))


FUNCTIONS = [None, "relu", "abs", "elu", "hard_swish", "sigmoid"]


@given(
    left=st.sampled_from([3, 3, 7, 4]),
    gone=st.integers(1, 4),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    fn=st.sampled_from(FUNCTIONS),
    norm=st.booleans(),
    bias=st.booleans(),
    transposed=st.tuples(st.booleans(), st.booleans()),
    stride=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    fixed=st.booleans(),
    mixed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_convolution(
    left: int, gone: int, kernel: tuple[int, int], fn: str | None, norm: bool, bias: bool,
    transposed: tuple[bool, bool], stride: tuple[int, int], fixed: bool, mixed: bool, seed: int,
) -> None:  # fmt: skip
    """It computes the same, and never holds more numbers or does more work than before."""
    net, draw = Net(seed), np.random.default_rng(seed)
    x = net.conv(
        net.input("N", 3, *((5, 4) if fixed else "HW")), left + gone, (1, 2), bias=bias, transposed=transposed[0]
    )
    x = net.batch_norm(x) if norm else x
    x = net.pointwise(fn, x) if fn is not None else x
    pad = [tuple(int(n) for n in draw.integers(0, k, 2)) for k in kernel]
    net.conv(x, 2, kernel, stride=stride, pad=pad, transposed=transposed[1])
    units = draw.permutation(left + gone)
    mix = {"parents": (int(units[-1]),), "weight": draw.normal(size=(gone, 1))} if mixed else {}
    graph = done(net, Do(x, 1, tuple(int(u) for u in units[:gone]), draw.normal(size=gone), **mix))
    result = run(graph)
    inputs = batch(graph, N=2, H=5, W=4)
    assert gap(outputs_of(result.graph, inputs), outputs_of(graph, inputs)) <= EXACT_F64
    carried = any(CARRIED in action.detail for action in result.actions)
    border = transposed[1] or any(lo or hi for lo, hi in pad)
    room = bias or norm or left + 1 <= (gone - 1) * 6
    assert carried == (border and left != 4 and gone > 1 and fn != "sigmoid" and room)
    if carried:
        sizes = {"N": 2, "H": 5, "W": 4}
        before, after = cost(net.graph(), sizes), cost(result.graph, sizes)
        assert after.parameters <= before.parameters
        assert after.macs <= before.macs
