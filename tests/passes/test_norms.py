"""Norms across units of which some are constant, as one op and spelled out: what is left is as wide as it need be, and equal."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from graphs import Do, Net, batch, with_do
from meaning import gap, outputs_of
from rewrites.start import done, image, sequence
from rules import SIZES
from tolerances import EXACT_F64, MOVES

from cmrc.ir.graph import Graph, Tensor, literal
from cmrc.passes.pipeline import Result, run
from cmrc.passes.rewriting.spelled import spelled_norms

UNITS, CONSTANTS = (5, 0, 3), [0.5, -1.0, 0.25]


def lowered(graph: Graph) -> Result:
    """The result of the passes, equal to the graph with its do's."""
    result, inputs = run(graph), batch(graph, **SIZES)
    assert gap(outputs_of(result.graph, inputs), outputs_of(graph, inputs)) <= EXACT_F64
    do = next(node for node in graph.nodes if node.op == "do")
    moved = with_do(graph, Do(do.name, do.attrs["axis"], do.attrs["units"][:1], [9.0]))
    assert gap(outputs_of(moved, inputs), outputs_of(graph, inputs)) > MOVES * EXACT_F64
    return result


Step = Callable[[Net, str], str]

SQUARES: dict[str, Step] = {
    "square": lambda net, d: net.pointwise("square", d),
    "power": lambda net, d: net.pointwise("pow", d, literal(2.0)),
    "product": lambda net, d: net.pointwise("mul", d, d),
}


def divided(net: Net, d: str, variance: str) -> str:
    return net.pointwise("div", d, net.pointwise("sqrt", variance))


def by_inverse_root(net: Net, d: str, variance: str) -> str:
    return net.pointwise("mul", net.pointwise("rsqrt", variance), d)


def by_reciprocal(net: Net, d: str, variance: str) -> str:
    return net.pointwise("mul", d, net.pointwise("reciprocal", net.pointwise("sqrt", variance)))


SCALES = {"divided": divided, "inverse root": by_inverse_root, "reciprocal": by_reciprocal}


def spelled(
    net: Net, x: str, axis: int, square: Step, scale: Callable[[Net, str, str], str], *, centred: bool = True
) -> str:
    d = net.pointwise("sub", x, net.along("mean", x, (axis,))) if centred else x
    return scale(net, d, net.pointwise("add", net.along("mean", square(net, d), (axis,)), literal(0.1)))


@pytest.mark.parametrize("square", SQUARES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("centred", [True, False])
def test_a_norm_that_is_spelled_out_folds(square: str, scale: str, centred: bool) -> None:
    net, h = sequence(6)
    y = spelled(net, h, 2, SQUARES[square], SCALES[scale], centred=centred)
    y = net.pointwise("add", net.pointwise("mul", y, net.leaf(6)), net.leaf(6))
    net.linear(y, 2)
    result = lowered(done(net, Do(h, 2, UNITS, CONSTANTS)))
    assert result.residue == []
    read = next(node for node in result.graph.nodes if node.name == "linear_2").inputs[1]
    assert isinstance(read, Tensor)
    assert read.shape == (2, 3 + 1 + centred)  # the units that stay, and one or two numbers more


def test_along_an_axis_in_the_middle() -> None:
    net, h = image(channels=6)
    y = spelled(net, h, 1, SQUARES["square"], divided)
    y = net.pointwise("add", net.pointwise("mul", y, net.leaf(6, 1, 1)), net.leaf(6, 1, 1))
    net.conv(y, 2, (1, 1))
    result = lowered(done(net, Do(h, 1, UNITS, CONSTANTS)))
    assert result.residue == []
    norm = next(node for node in result.graph.nodes if node.attrs.get("fn") == "rms_norm")
    assert norm.attrs["align"] == (None, (1,))


def test_what_others_read_of_a_norm_stays() -> None:
    """The mean is read twice, and the norm is not the only one who needs it."""
    net, h = sequence(6)
    mean = net.along("mean", h, (2,))
    d = net.pointwise("sub", h, mean)
    variance = net.pointwise("add", net.along("mean", net.pointwise("square", d), (2,)), literal(0.1))
    net.linear(net.pointwise("add", net.linear(divided(net, d, variance), 2), mean), 2)
    result = lowered(done(net, Do(h, 2, UNITS, CONSTANTS)))
    assert result.residue == []
    assert "mean_1" in {node.name for node in result.graph.nodes}


def test_where_it_helps_nowhere_the_norm_stays_as_it_was() -> None:
    net, h = sequence(6, steps=2)
    net.linear(spelled(net, h, 2, SQUARES["square"], divided), 2)
    slab = np.linspace(-1.0, 1.0, 6).reshape(1, 2, 3)
    result = lowered(done(net, Do(h, 2, UNITS, slab)))
    assert "sub" in {residue.stopped_op for residue in result.residue}
    assert {"sub_1", "div_1"} <= {node.name for node in result.graph.nodes}


def almost(change: str) -> Graph:
    """Something that is no norm, in one place."""
    net, h = sequence(6)
    axis = 1 if change == "another axis" else 2
    d = net.pointwise("sub", h, net.along("mean", h, (2,)))
    other = net.pointwise("relu", d) if change == "another value" else d
    square = net.pointwise("pow", other, literal(3.0 if change == "another power" else 2.0))
    mean = net.along("mean", square, (axis,))
    shift = net.leaf(6) if change == "no number" else literal(0.1)
    variance = net.pointwise("add", mean, shift)
    net.output(net.pointwise("div", d, net.pointwise("sqrt", variance)))
    return net.graph()


@pytest.mark.parametrize("change", ["another value", "another power", "no number"])
def test_what_is_no_norm(change: str) -> None:
    assert list(spelled_norms(almost(change))) == []
    assert [norm.node.attrs["fn"] for norm in spelled_norms(almost(""))] == ["layer_norm"]


def test_over_another_axis_than_its_mean_it_is_a_root_mean_square() -> None:
    (norm,) = spelled_norms(almost("another axis"))
    assert (norm.node.attrs["fn"], norm.node.attrs["axes"]) == ("rms_norm", (1,))
