"""Constants that exist only when the model runs: golden rewrites, and every reason to stop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from graphs import Do, Net
from rewrites.runtime import RUN_TIME, at_run_time, known_at_run_time
from rewrites.start import TWO, done
from rules import BESIDE, before_and_after, reasons, untested

from cmrc.ir.graph import Graph
from cmrc.passes import constant_fold
from cmrc.passes.rewriting import runtime


@pytest.mark.parametrize("name", RUN_TIME)
def test_rewrite_at_run_time(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"runtime/{name}", before_and_after("constant_fold", constant_fold.run, RUN_TIME[name]()))


def test_every_rule_at_run_time_has_an_example() -> None:
    assert {name.split("-")[0] for name in RUN_TIME} == set(runtime.RULES)


def rt_one_operand() -> Graph:
    net, h = known_at_run_time()
    net.pointwise("add", h, net.conv("x", 4, (1, 1)))
    return at_run_time(net)


def rt_different_axes() -> Graph:
    net, h = known_at_run_time(width=4)
    other = net.conv("x", 4, (1, 1))
    net.pointwise("add", h, other)
    return at_run_time(net, Do(other, 3, (1,), [0.5]))


def rt_different_units() -> Graph:
    net, h = known_at_run_time()
    other = net.conv("x", 4, (1, 1))
    net.pointwise("add", h, other)
    return at_run_time(net, Do(other, 1, (1,), [0.5]))


def rt_broadcast_axis() -> Graph:
    net, h = known_at_run_time(1)
    net.pointwise("mul", h, net.leaf(4, 1, 1))
    return done(net, Do("conv_1", 1, (0,), [0.5]))


def rt_replaced_parameter() -> Graph:
    net, h = known_at_run_time()
    net.along("instance_norm", net.conv("x", 4, (1, 1)), (2, 3), h, eps=1e-5)
    return at_run_time(net)


def rt_mixed_units() -> Graph:
    net, h = known_at_run_time()
    net.along("softmax", h, (1,))
    return at_run_time(net)


def rt_same_at_every_position() -> Graph:
    net, h = known_at_run_time()
    net.along("sum", h, (0, 2))
    return at_run_time(net)


def rt_resize() -> Graph:
    net, h = known_at_run_time()
    net.along("resize", h, (2, 3), shape=("N", 4, "2*H", "2*W"))
    return at_run_time(net)


def rt_pads_the_batch() -> Graph:
    net = Net()
    h = net.conv(net.conv(net.input(1, 2, "H", "W"), 4, (1, 1)), 4, (3, 3), pad=((1, 1), (1, 1)), groups=4)
    net.along("pad", h, (0,), shape=(2, 4, "H", "W"), pads=((0, 1), (0, 0), (0, 0), (0, 0)), value=0.0)
    return at_run_time(net)


def rt_parameter_of_run_time() -> Graph:
    net, h = known_at_run_time()
    scale = net.along("mean", net.conv("x", 4, (1, 1)), (0, 2, 3), drop=True)
    net.along("instance_norm", h, (2, 3), scale, eps=1e-5, align=(None, (1,)))
    return at_run_time(net)


def rt_parameter_by_sample() -> Graph:
    net, h = known_at_run_time()
    net.along("instance_norm", h, (2, 3), net.leaf(2), eps=1e-5, align=(None, (0,)))
    return at_run_time(net)


def rt_merged() -> Graph:
    net, h = known_at_run_time()
    net.reshape(h, "N", "4*H*W")
    return at_run_time(net)


def rt_two_sizes() -> Graph:
    net, h = known_at_run_time()
    net.reshape(h, "N", 1, 4, "H", "W")
    return at_run_time(net)


def rt_weight() -> Graph:
    net, h = known_at_run_time()
    w = net.linear(net.input(2, 3, name="other"), 4)
    net.node("linear", (h, w, None), ("N", 2, "H", "W"), axis=1, w_in=1, w_out=0)
    return at_run_time(net)


def rt_kernel() -> Graph:
    net, h = known_at_run_time()
    w = net.conv(net.input(2, 2, 1, 1, name="other"), 4, (1, 1))
    attrs = {"stride": (1, 1), "pad": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}
    net.node("conv", (h, w, None), ("N", 2, "H", "W"), axis=1, **attrs)
    return at_run_time(net)


def rt_another_axis() -> Graph:
    net, h = known_at_run_time(width=4)
    net.linear(h, 2, axis=3)
    return at_run_time(net)


def rt_mixed_positions() -> Graph:
    net, h = known_at_run_time(width=4)
    turned = net.transpose(h, 0, 3, 1, 2)
    net.conv(turned, 2, (3, 1))
    return at_run_time(net)


def rt_uneven_groups() -> Graph:
    net, h = known_at_run_time(6)
    net.conv(h, 2, (1, 1), groups=2)
    return at_run_time(net)


def rt_another_op() -> Graph:
    net, h = known_at_run_time()
    net.node("matmul", (h, h), ("N", 4, "H", "W"))
    return at_run_time(net)


def rt_two_parts() -> Graph:
    net, h = known_at_run_time()
    other = net.conv("x", 4, (1, 1))
    net.concat(h, other, axis=1)
    return at_run_time(net, Do(other, 1, (2, 0), *TWO))


def rt_joined_along_another_axis() -> Graph:
    net, h = known_at_run_time(width=4)
    net.concat(h, net.conv("x", 4, (1, 1)), axis=3)
    return at_run_time(net)


def rt_part_of_any_size() -> Graph:
    net, h = known_at_run_time()
    net.node("concat", (net.input("N", "C", "H", "W", name="other"), h), ("N", "C+4", "H", "W"), axis=1)
    return at_run_time(net)


DECLINES_AT_RUN_TIME: list[tuple[Callable[[], Graph], str]] = [
    (rt_one_operand, BESIDE.format("conv_2", "conv_3")),
    (rt_different_axes, "its operands are replaced along different axes"),
    (rt_different_units, "its operands are replaced in different units"),
    (rt_broadcast_axis, "the replaced axis is broadcast here"),
    (rt_replaced_parameter, "one of its parameters is replaced"),
    (rt_mixed_units, "it mixes the units with each other"),
    (rt_same_at_every_position, "the constant is the same at every position, and the number of positions is not fixed"),
    (rt_resize, "it needs sizes that a batch of one does not have"),
    (rt_pads_the_batch, "it pads the batch"),
    (rt_parameter_by_sample, "one of its parameters differs along an axis where the constants are the same"),
    (rt_parameter_of_run_time, "one of its parameters is computed at run time"),
    (rt_merged, "it merges the units with a size known only at run time"),
    (rt_two_sizes, "the constants differ along an axis that is reshaped too"),
    (rt_weight, "its weight is computed at run time"),
    (rt_kernel, "its weight is computed at run time"),
    (rt_another_axis, "it acts along a different axis than the replacement"),
    (rt_mixed_positions, "it mixes positions along the replaced axis"),
    (rt_uneven_groups, "its groups would keep different numbers of channels"),
    (rt_another_op, "matmul cannot take constants that exist only at run time"),
    (rt_two_parts, "several of its parts are replaced, one of them by values known only at run time"),
    (rt_joined_along_another_axis, "another part of the concatenation is not replaced"),
    (rt_part_of_any_size, "the size of a part is known only at run time"),
]


@pytest.mark.parametrize(
    ("build", "reason"), DECLINES_AT_RUN_TIME, ids=[build.__name__ for build, _ in DECLINES_AT_RUN_TIME]
)
def test_stops_at_run_time(build: Callable[[], Graph], reason: str) -> None:
    assert reasons(constant_fold.run, build(), moves=True) == {reason}


def test_every_reason_at_run_time_is_tested() -> None:
    assert untested(runtime, {reason for _, reason in DECLINES_AT_RUN_TIME}) == []
