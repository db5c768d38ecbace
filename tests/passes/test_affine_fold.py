"""affine_fold, rule by rule: the text before and after, and every reason to stop."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from graphs import Do, Net, with_do
from rewrites.affine import AFFINE, affine
from rewrites.start import MIX, TWO, done, image, sequence, vector
from rules import before_and_after, reasons, untested

from cmrc.ir.graph import Graph, Marks, Node, Value, literal
from cmrc.ir.text import to_text
from cmrc.passes import affine_fold
from cmrc.passes.rewriting.rewriter import Log


@pytest.mark.parametrize("name", AFFINE)
def test_rewrite(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"affine_fold/{name}", before_and_after("affine_fold", affine_fold.run, AFFINE[name]()))


def test_every_rule_has_an_example() -> None:
    assert {name.split("-")[0] for name in AFFINE} == set(affine_fold.RULES)


# ---------------------------------------------------------------- reasons to stop


def by_position(net: Net, site: str) -> Graph:
    """A constant part that differs along the last axis, of size 3."""
    rank = len(net.shape(site))
    slab = np.arange(6.0).reshape([2 if i == 1 else 3 if i == rank - 1 else 1 for i in range(rank)])
    return done(net, Do(site, 1, (2, 0), slab, **MIX))


def weight_of_run_time() -> Graph:
    net, h = vector()
    w = net.linear(net.input(2, 3, name="other"), 4)
    net.node("linear", (h, w, None), ("N", 2), axis=1, w_in=1, w_out=0, takes_bias=True)
    return affine(net, h)


def replaced_weight() -> Graph:
    """The do is on the weight, not on what it multiplies."""
    net, h = vector()
    w = net.linear(net.input(2, 3, name="other"), 4)
    net.node("linear", (h, w, None), ("N", 2), axis=1, w_in=1, w_out=0, takes_bias=True)
    return affine(net, w)


def replaced_bias() -> Graph:
    net, h = vector(2)
    bias = net.along("mean", net.linear("x", 4), (0,), drop=True)
    net.linear(h, 4, bias=bias)
    return affine(net, bias, axis=0)


def kernel_of_run_time() -> Graph:
    net, h = image()
    w = net.conv(net.input(2, 2, 1, 1, name="other"), 4, (1, 1))
    attrs = {"stride": (1, 1), "pad": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}
    net.node("conv", (h, w, None), ("N", 2, 5, 4), axis=1, **attrs)
    return affine(net, h)


def conv_bias_of_run_time() -> Graph:
    net, h = image()
    bias = net.along("mean", net.conv("x", 2, (1, 1)), (0, 2, 3), drop=True)
    attrs = {"stride": (1, 1), "pad": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}
    net.node("conv", (h, net.leaf(2, 4, 1, 1), bias), ("N", 2, 5, 4), axis=1, **attrs)
    return affine(net, h)


def linear_along_another_axis() -> Graph:
    net, h = sequence()
    net.linear(h, 2, axis=1)
    return affine(net, h, axis=2)


def conv_along_another_axis() -> Graph:
    net, h = image()
    net.conv(h, 2, (1, 1))
    return affine(net, h, axis=2)


def positions_of_run_time() -> Graph:
    net, h = image(height="H", width=3)
    net.conv(h, 2, (1, 1))
    return by_position(net, h)


def transposed_groups() -> Graph:
    net, h = image()
    net.conv(h, 2, (1, 1), groups=2, transposed=True)
    return affine(net, h)


def blocks_in_groups() -> Graph:
    net, h = image(height=2, width=3)
    net.conv(net.reshape(h, "N", 8, 3), 2, (1,), groups=2)
    return with_do(Graph(tuple(net.inputs), tuple(net.nodes), ("conv_2",)), Do(h, 1, (2, 0), *TWO, **MIX))


def parents_of_another_group() -> Graph:
    net, h = image(4)
    net.conv(h, 2, (1, 1), groups=2)
    return done(net, Do(h, 1, (0, 2), [0.5, 1.0], (1, 3), [[0.5, 1.0], [0.0, 1.0]]))


def uneven_groups() -> Graph:
    net, h = image(4)
    net.conv(h, 2, (1, 1), groups=2)
    return done(net, Do(h, 1, (0,), [0.5], (1,), [[0.5]]))


def nonlinear() -> Graph:
    net, h = vector()
    net.pointwise("relu", h)
    return affine(net, h)


def divisor() -> Graph:
    net, h = vector()
    net.pointwise("div", literal(1.0), h)
    return affine(net, h)


def cast_to_integers() -> Graph:
    net, h = vector()
    net.pointwise("cast", h, dtype="int64")
    return affine(net, h)


def another_value() -> Graph:
    net, h = vector()
    net.pointwise("add", h, net.linear("x", 4))
    return affine(net, h)


def with_itself() -> Graph:
    net, h = vector()
    net.pointwise("mul", h, h)
    return affine(net, h)


def broadcast_units() -> Graph:
    """Relations need two units at least, so only a hand-made graph broadcasts them."""
    net, h = vector(1)
    tensors = (literal(0.5), literal([[0.5]]))
    value = net.insert("do", (h, *tensors), ("N", 1), axis=1, units=(0,), parents=(0,), sources=(0,))
    net.pointwise("mul", value, net.leaf(4))
    return done(net)


def unbounded() -> Graph:
    net, h = vector()
    net.pointwise("div", h, literal([1.0, 1.0, 0.0, 1.0]))
    return affine(net, h)


def vanishing_parent() -> Graph:
    net, h = vector()
    net.pointwise("mul", h, literal([1.0, 0.0, 1.0, 1.0]))
    return affine(net, h)


def almost_vanishing_parent() -> Graph:
    """Dividing by it would lose the digits of the result."""
    net, h = vector()
    net.pointwise("mul", h, literal([1.0, 1e-9, 1.0, 1.0]))
    return affine(net, h)


def small_scale_and_large_shift() -> Graph:
    """What is left of the unit behind it would be a difference of numbers 200 times as large."""
    net, h = vector()
    gamma, beta = literal([1.0, 0.005, 1.0, 1.0]), literal([0.0, 2.0, 0.0, 0.0])
    net.pointwise("batch_norm", h, gamma, beta, literal(np.zeros(4)), literal(np.ones(4)), eps=0.0)
    return affine(net, h)


def operand_by_position() -> Graph:
    net, h = image(height=2, width=3)
    net.pointwise("mul", h, net.leaf(3))
    return affine(net, h)


def block_by_position() -> Graph:
    net, h = image(height=2, width=1)
    net.pointwise("mul", net.reshape(h, "N", 8), net.leaf(8))
    return affine(net, h)


def no_positions() -> Graph:
    net, h = image(height=0)
    net.along("mean", h, (2, 3))
    return affine(net, h)


def mixed_units() -> Graph:
    net, h = vector()
    net.along("mean", h, (1,))
    return affine(net, h)


def largest() -> Graph:
    net, h = image()
    net.along("amax", h, (2, 3))
    return affine(net, h)


def padded_by_something() -> Graph:
    net, h = image()
    net.along("pad", h, (3,), shape=("N", 4, 5, 5), pads=((0, 0), (0, 0), (0, 0), (0, 1)), value=1.0)
    return affine(net, h)


def unknown_function_by_position() -> Graph:
    net, h = image(height=2, width=3)
    net.along("flip", h, (3,))
    return by_position(net, h)


def number_of_positions() -> Graph:
    net, h = image(height="H")
    net.along("sum", h, (2,))
    return affine(net, h)


def very_many_positions() -> Graph:
    net, h = image(height=2**40)
    net.along("sum", h, (2,))
    return affine(net, h)


def split_units() -> Graph:
    net, h = vector()
    net.reshape(h, "N", 2, 2)
    return affine(net, h)


def merged_with_run_time() -> Graph:
    net, h = image(height="H")
    net.reshape(h, "N", "16*H")
    return affine(net, h)


def reshaped_by_position() -> Graph:
    net, h = image(height=1, width=3)
    net.reshape(h, "N", 12)
    return by_position(net, h)


def concat_along_another_axis() -> Graph:
    net, h = sequence()
    net.concat(h, net.linear("x", 4), axis=1)
    return affine(net, h, axis=2)


def concat_behind_run_time() -> Graph:
    net, h = sequence(2, steps=4)
    more = net.input("N", "S", 2, name="past")
    net.node("concat", (more, h), ("N", "S+4", 2), axis=1)
    return affine(net, h)


def dropped_parents() -> Graph:
    net, h = vector()
    net.select(h, 1, (0, 2, 3))
    return affine(net, h)


def part_of_a_block() -> Graph:
    net, h = image(height=2, width=1)
    net.select(net.reshape(h, "N", 8), 1, (1, 2, 3, 6, 7))
    return affine(net, h)


def repeated_units() -> Graph:
    net, h = vector()
    net.select(h, 1, (0, 1, 2, 2, 3))
    return affine(net, h)


def do_along_another_axis() -> Graph:
    net, h = sequence()
    net.insert("do", (h, literal([0.5])), ("N", 3, 4), axis=1, units=(1,), sources=(1,))
    return affine(net, h, axis=2)


def replaced_parents() -> Graph:
    net, h = vector()
    net.insert("do", (h, literal([0.5]), literal([[1.0]])), ("N", 4), axis=1, units=(1,), parents=(2,), sources=(1,))
    return affine(net, h)


def constants_behind() -> Graph:
    net, h = vector(6)
    net.insert("do", (h, literal([0.5])), ("N", 6), axis=1, units=(5,), sources=(1,))
    return affine(net, h)


def same_units() -> Graph:
    net, h = vector(6)
    net.insert("do", (h, literal([0.5]), literal([[1.0]])), ("N", 6), axis=1, units=(2,), parents=(5,), sources=(1,))
    return affine(net, h)


def parents_replaced_behind() -> Graph:
    """Unit 1 is a parent here, and rebuilt from unit 5 behind."""
    net, h = vector(6)
    net.insert("do", (h, literal([0.5]), literal([[1.0]])), ("N", 6), axis=1, units=(1,), parents=(5,), sources=(1,))
    return affine(net, h)


def joined_blocks() -> Graph:
    net, h = vector(6)
    tensors = (literal(0.5), literal([[1.0]]))
    net.insert("do", (h, *tensors), ("N", 6), axis=1, units=(4, 5), parents=(1, 3), sources=(1,))
    return affine(net, h)


def another_op() -> Graph:
    net, h = vector()
    net.nodes.append(Node("opaque", (h,), (Value("sorted", ("N", 4)),), origin="sorted", marks=Marks(host_op="sort")))
    return affine(net, h)


def another_op_that_says_why() -> Graph:
    net, h = vector()
    net.nodes.append(
        Node("opaque", (h,), (Value("odd", ("N", 4)),), origin="odd", marks=Marks(host_op="odd", why="it is odd"))
    )
    return affine(net, h)


def several_operands() -> Graph:
    net, h = vector()
    other = net.linear("x", 4)
    net.pointwise("add", h, other)
    return done(net, Do(h, 1, (2, 0), *TWO, **MIX), Do(other, 1, (2, 0), *TWO, **MIX))


def output() -> Graph:
    net, h = vector()
    return affine(net, h)


DECLINES: list[tuple[Callable[[], Graph], str]] = [
    (weight_of_run_time, "its weight is computed at run time"),
    (replaced_weight, "its weight is computed at run time"),
    (replaced_bias, "its weight is computed at run time"),
    (kernel_of_run_time, "its weight is computed at run time"),
    (conv_bias_of_run_time, "its bias is computed at run time"),
    (linear_along_another_axis, "it acts along a different axis than the replacement"),
    (conv_along_another_axis, "it mixes positions along the replaced axis"),
    (positions_of_run_time, "the constants differ by position, and the number of positions is not fixed"),
    (transposed_groups, "a grouped transposed convolution cannot rebuild channels"),
    (parents_of_another_group, "a unit and its parents are in different groups"),
    (uneven_groups, "its groups would keep different numbers of channels"),
    (nonlinear, "it is not an affine function of the replaced units"),
    (divisor, "it is not an affine function of the replaced units"),
    (cast_to_integers, "it is not an affine function of the replaced units"),
    (another_value, "its other operand is not a constant"),
    (with_itself, "its other operand is not a constant"),
    (broadcast_units, "the replaced axis is broadcast here"),
    (unbounded, "it scales or shifts the units without bound"),
    (almost_vanishing_parent, "it scales a parent by (almost) 0"),
    (vanishing_parent, "it scales a parent by (almost) 0"),
    (small_scale_and_large_shift, "after its shift, the units would be small differences of large numbers"),
    (operand_by_position, "its other operand differs by position"),
    (mixed_units, "it mixes the units with each other"),
    (no_positions, "it combines an axis of size 0"),
    (largest, "it is not an affine function of the replaced units"),
    (padded_by_something, "it is not an affine function of the replaced units"),
    (unknown_function_by_position, "its constant part differs by position"),
    (number_of_positions, "its constant part would differ by position, and the number of positions is not fixed"),
    (very_many_positions, "its constant part would have to be worked out at 2,199,023,255,552 places"),
    (split_units, "it splits the units over several axes"),
    (merged_with_run_time, "it merges the units with a size known only at run time"),
    (reshaped_by_position, "its constant part differs by position"),
    (concat_along_another_axis, "the concatenation is along another axis"),
    (concat_behind_run_time, "the size of a part is known only at run time"),
    (dropped_parents, "it drops parents from which the units are rebuilt"),
    (repeated_units, "it repeats the units"),
    (do_along_another_axis, "there is already a replacement along another axis here"),
    (replaced_parents, "the parents of an affine replacement are themselves replaced"),
    (constants_behind, "there is already a replacement by constants here"),
    (same_units, "there is already a replacement of the same units here"),
    (parents_replaced_behind, "there is already a replacement of the same units here"),
    (joined_blocks, "there is already an affine replacement of blocks here"),
    (another_op, "sort is not an op that replacements can pass"),
    (another_op_that_says_why, "it is odd"),
    (several_operands, "several operands are replaced by affine functions"),
    (output, "it is an output of the model"),
]
# The do has passed another op before it stops.
DECLINES_LATER: list[tuple[Callable[[], Graph], str]] = [
    (blocks_in_groups, "a grouped convolution cannot rebuild blocks of channels"),
    (block_by_position, "it scales the positions within a unit's block differently"),
    (part_of_a_block, "it drops parents from which the units are rebuilt"),
]


@pytest.mark.parametrize(("build", "reason"), DECLINES, ids=[build.__name__ for build, _ in DECLINES])
def test_stops(build: Callable[[], Graph], reason: str) -> None:
    declined = reasons(affine_fold.run, build())
    assert reason in declined
    assert declined <= {reason, "it is an output of the model"}


@pytest.mark.parametrize(("build", "reason"), DECLINES_LATER, ids=[build.__name__ for build, _ in DECLINES_LATER])
def test_stops_later(build: Callable[[], Graph], reason: str) -> None:
    assert reasons(affine_fold.run, build(), moves=True) == {reason}


def test_every_reason_is_tested() -> None:
    assert untested(affine_fold, {reason for _, reason in (*DECLINES, *DECLINES_LATER)}) == []


def test_an_op_that_reads_sizes_does_not_see_a_replacement() -> None:
    net, h = vector()
    net.nodes.append(Node("opaque", (h,), (Value("size", (), "int64"),), origin="size", marks=Marks(shape_only=(0,))))
    net.output("size")
    after, changed = affine_fold.run(with_do(net.graph(), Do(h, 1, (2, 0), *TWO, **MIX)), Log())
    assert changed
    assert to_text(after) == to_text(net.graph())
