"""constant_fold, rule by rule: the text before and after, and every reason to stop."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from graphs import Do, Net, with_do
from rewrites.constant import CONSTANT
from rewrites.start import TWO, done, image, sequence, vector
from rules import BESIDE, RISING, before_and_after, reasons, untested

from cmrc.ir.graph import Graph, Marks, Node, Value, literal
from cmrc.ir.text import to_text
from cmrc.passes import constant_fold
from cmrc.passes.rewriting import absorb, convolution, norms


@pytest.mark.parametrize("name", CONSTANT)
def test_rewrite(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"constant_fold/{name}", before_and_after("constant_fold", constant_fold.run, CONSTANT[name]()))


def test_every_rule_has_an_example() -> None:
    assert {name.split("-")[0] for name in CONSTANT} == set(constant_fold.RULES)


# ---------------------------------------------------------------- reasons to stop


def on(site: str, net: Net, *more: Do, axis: int = 1) -> Graph:
    """Units 2 and 0 of a value replaced, ahead of the net's last node."""
    return done(net, Do(site, axis, (2, 0), *TWO), *more)


def not_finite() -> Graph:
    net, h = vector()
    net.pointwise("log", h)
    return done(net, Do(h, 1, (2,), [-1.0]))


def not_finite_product() -> Graph:
    net, h = sequence(4, steps=2)
    net.along("prod", h, (1,))
    return done(net, Do(h, 2, (2,), [1e200]))


def not_finite_in_part() -> Graph:
    """Both operands are known in unit 2 only, where one divides by 0."""
    net, h = vector()
    other = net.linear("x", 4)
    net.pointwise("div", h, other)
    return done(net, Do(h, 1, (2, 1), *TWO), Do(other, 1, (2,), [0.0]))


def maximum_with_zero() -> Graph:
    """0 absorbs a factor, and nothing else."""
    net, h = vector()
    net.pointwise("max", h, net.linear("x", 4))
    return done(net, Do(h, 1, (2, 0), 0.0))


def different_axes() -> Graph:
    net, h = sequence()
    other = net.linear("x", 4)
    net.pointwise("add", h, other)
    return done(net, Do(h, 2, (2, 0), *TWO), Do(other, 1, (0,), [0.5]))


def broadcast_axis() -> Graph:
    net, h = vector(1)
    net.pointwise("mul", h, net.linear("x", 4))
    return done(net, Do(h, 1, (0,), [0.5]))


def different_units() -> Graph:
    net, h = vector()
    other = net.linear("x", 4)
    net.pointwise("add", h, other)
    return done(net, Do(h, 1, (2,), [0.5]), Do(other, 1, (0,), [0.5]))


def one_operand_only() -> Graph:
    net, h = vector()
    net.pointwise("add", h, net.linear("x", 4))
    return on(h, net)


def known_operand_that_gives_the_shape() -> Graph:
    """The other operand has one row: as a tensor of one row, the known one would lose the batch."""
    net, h = vector()
    net.pointwise("add", h, net.along("mean", net.linear("x", 4), (0,)))
    return done(net, Do(h, 1, (0, 1, 2, 3), 0.5))


def replaced_parameter() -> Graph:
    net, h = vector()
    net.along("layer_norm", net.linear("x", 4), (1,), h, eps=1e-5)
    return on(h, net)


def tiled_units() -> Graph:
    net, h = vector()
    net.along("tile", h, (1,), shape=("N", 8), times=(1, 2))
    return on(h, net)


def tiled_positions() -> Graph:
    """Constants that differ by position, repeated as often as there are samples."""
    net = Net()
    h = net.linear(net.input(3, 2), 4)
    net.along("tile", h, (0,), shape=("3*N", 4), times=("N", 1))
    return done(net, Do(h, 1, (1,), [[0.5], [1.0], [-1.0]]))


def norm_of_zeros_with_weight_of_run_time() -> Graph:
    net, h = vector()
    weight = net.along("mean", net.linear("x", 4), (0,), drop=True)
    net.along("rms_norm", h, (1,), weight, eps=0.1)
    return done(net, Do(h, 1, (1,), [0.0]))


def norm_of_constants_by_position() -> Graph:
    net, h = sequence(4, steps=2)
    net.along("layer_norm", h, (2,), net.leaf(4), net.leaf(4), eps=0.1)
    return done(net, Do(h, 2, (2, 0), np.linspace(-1.0, 1.0, 4).reshape(1, 2, 2)))


def group_norm_of_constants_by_position() -> Graph:
    net, h = image(channels=4, height=2, width=1)
    net.along("group_norm", h, (1, 2, 3), eps=0.1, groups=2)
    return done(net, Do(h, 1, (2, 0), np.linspace(-1.0, 1.0, 4).reshape(1, 2, 2, 1)))


def group_norm_of_positions() -> Graph:
    net, h = image(channels=4, height=2, width=1)
    net.along("group_norm", h, (1, 2, 3), eps=0.1, groups=2)
    return done(net, Do(h, 2, (0,), [0.5]))


def recurrent(do: Do, *, bias: bool = True) -> Graph:
    """An op of the host that reads four units at three steps by a weight alone."""
    net, h = sequence(4)
    operands = (h, net.leaf(8, 4), net.leaf(8) if bias else None)
    marks = Marks(host_op="rnn", weighed=((1, 2 if bias else -1),))
    net.values["rnn"] = Value("rnn", ("N", 3, 8))
    net.nodes.append(Node("opaque", operands, (net.values["rnn"],), origin="rnn", marks=marks))
    return done(net, do)


def recurrent_by_step() -> Graph:
    return recurrent(Do("linear_1", 2, (2, 0), np.linspace(-1.0, 1.0, 6).reshape(1, 3, 2)))


def recurrent_of_nothing() -> Graph:
    return recurrent(Do("linear_1", 2, (0, 1, 2, 3), [0.5, 1.0, 0.2, 0.1]))


def recurrent_without_bias() -> Graph:
    return recurrent(Do("linear_1", 2, (2, 0), *TWO), bias=False)


def recurrent_along_steps() -> Graph:
    return recurrent(Do("linear_1", 1, (2, 0), *TWO))


def no_positions() -> Graph:
    net, h = image(height=0)
    net.along("mean", h, (2, 3))
    return on(h, net)


def mixed_units() -> Graph:
    net, h = vector()
    net.along("softmax", h, (1,))
    return on(h, net)


def unknown_function() -> Graph:
    net, h = sequence()
    net.along("cumsum", h, (1,))
    return on(h, net, axis=2)


def number_of_positions() -> Graph:
    net, h = sequence(steps="T")
    net.along("sum", h, (1,))
    return on(h, net, axis=2)


def very_many_positions() -> Graph:
    net, h = sequence(steps=2**40)
    net.along("softmax", h, (1,))
    return on(h, net, axis=2)


def parameter_of_run_time() -> Graph:
    net, h = sequence()
    scale = net.along("mean", net.linear("x", 3, axis=2), (0, 1), drop=True)
    norm = net.along("layer_norm", net.transpose(h, 0, 2, 1), (2,), scale, eps=1e-5)
    return with_do(Graph(tuple(net.inputs), tuple(net.nodes), (norm,)), Do("transpose_1", 1, (2, 0), *TWO))


def merged_with_run_time() -> Graph:
    net, h = image(height="H")
    net.reshape(h, "N", "16*H")
    return on(h, net)


def merged_samples() -> Graph:
    net, h = vector()
    net.reshape(h, "4*N")
    return on(h, net)


def not_whole_positions() -> Graph:
    net, h = vector()
    net.reshape(h, "N", 2, 2)
    return done(net, Do(h, 1, (0,), [0.5]))


def slab_reshaped() -> Graph:
    net, h = image(height=2, width=2)
    net.reshape(h, "N", 4, 4)
    return done(net, Do(h, 1, (2,), np.arange(4.0).reshape(1, 1, 2, 2)))


def slab_of_merged_samples() -> Graph:
    net = Net()
    h = net.reshape(net.linear(net.input("N", 2, 3, 2), 4), "2*N", 3, 4)
    net.reshape(h, "N", 6, 4)
    return done(net, Do(h, 1, (2,), np.arange(4.0).reshape(1, 1, 4)))


def repeated_units() -> Graph:
    net, h = vector(1)
    net.expand(h, "N", 3)
    return done(net, Do(h, 1, (0,), [0.5]))


def concat_different_axes() -> Graph:
    net, h = sequence()
    other = net.linear("x", 4)
    net.concat(h, other, axis=1)
    return done(net, Do(h, 2, (2, 0), *TWO), Do(other, 1, (0,), [0.5]))


def concat_one_part() -> Graph:
    net, h = sequence()
    net.concat(h, net.linear("x", 4), axis=1)
    return on(h, net, axis=2)


def concat_different_units() -> Graph:
    net, h = sequence()
    other = net.linear("x", 4)
    net.concat(h, other, axis=1)
    return done(net, Do(h, 2, (2, 0), *TWO), Do(other, 2, (0, 1), *TWO))


def concat_run_time_sizes() -> Graph:
    net, h = sequence(steps="T")
    other = net.linear("x", 4)
    net.node("concat", (h, other), ("N", "2*T", 4), axis=1)
    return done(net, Do(h, 2, (2, 0), *TWO), Do(other, 2, (2, 0), [0.1, 0.2]))


def concat_run_time_part() -> Graph:
    net, h = sequence(4, steps=3)
    more = net.input("N", "S", 4, name="past")
    net.node("concat", (more, h), ("N", "S+3", 4), axis=1)
    return done(net, Do(h, 1, (2, 0), *TWO))


def run_time_do() -> Graph:
    net, h = vector()
    known = net.linear(net.input(1, 3, name="one"), 1)
    net.insert("do", (h, known), ("N", 4), axis=1, units=(1,), sources=(1,))
    return on(h, net)


def do_along_another_axis() -> Graph:
    net, h = sequence()
    net.insert("do", (h, literal([0.5])), ("N", 3, 4), axis=1, units=(1,), sources=(1,))
    return on(h, net, axis=2)


def parents_of_blocks() -> Graph:
    net, h = vector()
    tensors = (literal(0.0), literal([[2.0]]))
    net.insert("do", (h, *tensors), ("N", 4), axis=1, units=(0, 1), parents=(2, 3), sources=(1,))
    return done(net, Do(h, 1, (3,), [0.5]))


def weight_of_run_time() -> Graph:
    net, h = vector()
    w = net.linear(net.input(2, 3, name="other"), 4)
    net.node("linear", (h, w, None), ("N", 2), axis=1, w_in=1, w_out=0, takes_bias=True)
    return on(h, net)


def kernel_of_run_time() -> Graph:
    net, h = image()
    w = net.conv(net.input(2, 2, 1, 1, name="other"), 4, (1, 1))
    attrs = {"stride": (1, 1), "pad": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}
    net.node("conv", (h, w, None), ("N", 2, 5, 4), axis=1, **attrs)
    return on(h, net)


def bias_of_run_time() -> Graph:
    net, h = vector()
    bias = net.along("mean", net.linear("x", 2), (0,), drop=True)
    net.linear(h, 2, bias=bias)
    return done(net, Do(h, 1, (0, 1, 2, 3), 0.5))


def conv_bias_of_run_time() -> Graph:
    net, h = image()
    bias = net.along("mean", net.conv("x", 2, (1, 1)), (0, 2, 3), drop=True)
    attrs = {"stride": (1, 1), "pad": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}
    net.node("conv", (h, net.leaf(2, 4, 1, 1), bias), ("N", 2, 5, 4), axis=1, **attrs)
    return on(h, net)


def mixed_positions() -> Graph:
    net, h = image()
    net.conv(h, 2, (3, 1))
    return on(h, net, axis=2)


def uneven_groups() -> Graph:
    net, h = image(6)
    net.conv(h, 2, (1, 1), groups=2)
    return on(h, net)


def positions_of_run_time() -> Graph:
    net, h = image(height="H", width=2)
    net.conv(h, 2, (1, 1))
    return done(net, Do(h, 1, (2,), np.asarray([0.5, 1.0]).reshape(1, 1, 1, 2)))


def depthwise_positions_of_run_time() -> Graph:
    net, h = image(height="H", width=2)
    net.conv(h, 4, (1, 1), pad=((1, 0), (0, 0)), groups=4)
    return done(net, Do(h, 1, (2,), np.asarray([0.5, 1.0]).reshape(1, 1, 1, 2)))


def another_op() -> Graph:
    net, h = sequence()
    net.nodes.append(
        Node("opaque", (h,), (Value("sorted", ("N", 3, 4)),), origin="sorted", marks=Marks(host_op="sort"))
    )
    return on(h, net, axis=2)


def another_op_that_says_why() -> Graph:
    net, h = vector()
    why = "it drops at random: trace the model in eval mode"
    net.nodes.append(
        Node("opaque", (h,), (Value("dropped", ("N", 4)),), origin="dropped", marks=Marks(host_op="dropout", why=why))
    )
    return on(h, net)


def output() -> Graph:
    net, h = vector()
    return on(h, net)


DECLINES: list[tuple[Callable[[], Graph], str]] = [
    (not_finite, "its result for these constants is infinite or not a number"),
    (not_finite_product, "its result for these constants is infinite or not a number"),
    (not_finite_in_part, "its result for these constants is infinite or not a number"),
    (maximum_with_zero, BESIDE.format("linear_1", "linear_2")),
    (different_axes, "its operands are replaced along different axes"),
    (broadcast_axis, "the replaced axis is broadcast here"),
    (different_units, "its operands are replaced in different units"),
    (one_operand_only, BESIDE.format("linear_1", "linear_2")),
    (known_operand_that_gives_the_shape, BESIDE.format("linear_1", "mean_1")),
    (replaced_parameter, "one of its parameters is replaced"),
    (mixed_units, "it mixes the units with each other"),
    (recurrent_by_step, "the constants differ by position, but its bias is the same at every step"),
    (recurrent_of_nothing, "nothing of its input would be left"),
    (recurrent_without_bias, "it has no bias that could absorb the constants"),
    (recurrent_along_steps, "it mixes positions along the replaced axis"),
    (no_positions, "it combines an axis of size 0"),
    (
        norm_of_constants_by_position,
        "the constants differ by position, so two numbers cannot represent them in a norm across the units",
    ),
    (
        group_norm_of_constants_by_position,
        "the constants differ by position, so two numbers cannot represent them in the norm of a group",
    ),
    (group_norm_of_positions, "it mixes positions along the replaced axis"),
    (norm_of_zeros_with_weight_of_run_time, "one of its parameters is computed at run time"),
    (tiled_units, "it repeats the units"),
    (tiled_positions, "the constant would differ by position, and the number of positions is not fixed"),
    (unknown_function, "what cumsum does to a constant is not known"),
    (number_of_positions, "the constant would differ by position, and the number of positions is not fixed"),
    (very_many_positions, "the constant would have to be worked out at 2,199,023,255,552 places"),
    (parameter_of_run_time, "one of its parameters is computed at run time"),
    (merged_with_run_time, "it merges the units with a size known only at run time"),
    (merged_samples, "it merges the units with a size known only at run time"),
    (
        not_whole_positions,
        "the units do not fill whole positions of any axis of ['N', 2, 2]; a position is units 0 to 1, or units 0, 2",
    ),
    (slab_reshaped, "the constants differ along an axis that is reshaped too"),
    (slab_of_merged_samples, "the constants differ along an axis that is reshaped too"),
    (repeated_units, "it repeats the units"),
    (concat_different_axes, "its operands are replaced along different axes"),
    (concat_one_part, "another part of the concatenation is not replaced"),
    (concat_different_units, "the parts are replaced in different units"),
    (concat_run_time_sizes, "the constants differ between parts whose sizes are known only at run time"),
    (concat_run_time_part, "the size of a part is known only at run time"),
    (run_time_do, "there is already a replacement by values known only at run time here"),
    (do_along_another_axis, "there is already a replacement along another axis here"),
    (parents_of_blocks, "the parents of an affine replacement of blocks are themselves replaced"),
    (weight_of_run_time, "its weight is computed at run time"),
    (kernel_of_run_time, "its weight is computed at run time"),
    (bias_of_run_time, "its bias is computed at run time"),
    (conv_bias_of_run_time, "its bias is computed at run time"),
    (mixed_positions, "it mixes positions along the replaced axis"),
    (uneven_groups, "its groups would keep different numbers of channels"),
    (positions_of_run_time, "the constants differ by position, and the number of positions is not fixed"),
    (depthwise_positions_of_run_time, "the constants differ by position, and the number of positions is not fixed"),
    (another_op, "sort is not an op that replacements can pass"),
    (another_op_that_says_why, "it drops at random: trace the model in eval mode"),
    (output, "it is an output of the model"),
]


@pytest.mark.parametrize(("build", "reason"), DECLINES, ids=[build.__name__ for build, _ in DECLINES])
def test_stops(build: Callable[[], Graph], reason: str) -> None:
    declined = reasons(constant_fold.run, build())
    assert reason in declined
    assert declined <= {reason, "it is an output of the model"}


def test_every_reason_is_tested() -> None:
    tested = {reason for _, reason in DECLINES}
    assert untested(constant_fold, tested) == []
    assert untested(absorb, tested) == []
    assert untested(convolution, tested) == []
    assert untested(norms, tested | RISING) == []


def test_units_that_stay_in_one_operand_say_so() -> None:
    declined = reasons(constant_fold.run, CONSTANT["pointwise-residual"](), moves=True)
    assert declined == {"these units are replaced in one operand only"}


def test_an_op_that_reads_sizes_does_not_see_a_replacement() -> None:
    net, h = vector()
    net.nodes.append(Node("opaque", (h,), (Value("size", (), "int64"),), origin="size", marks=Marks(shape_only=(0,))))
    net.output("size")
    graph = with_do(net.graph(), Do(h, 1, (2, 0), *TWO))
    after, changed = constant_fold.run(graph, constant_fold.Log())
    assert changed
    assert to_text(after) == to_text(net.graph())
