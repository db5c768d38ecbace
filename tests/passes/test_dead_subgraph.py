"""dead_subgraph, rule by rule: the text before and after, and every reason to stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from graphs import Net
from rewrites.dead import DEAD, heads, read
from rewrites.start import done, image, sequence, vector
from rules import RISING, before_and_after, reasons, untested

from cmrc.ir.graph import Graph, Keep, Marks, Node, Value, literal
from cmrc.ir.text import to_text
from cmrc.passes import dead_subgraph
from cmrc.passes.dead_subgraph import idle_nodes
from cmrc.passes.pipeline import run
from cmrc.passes.rewriting.rewriter import Log


@pytest.mark.parametrize("name", DEAD)
def test_rewrite(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"dead_subgraph/{name}", before_and_after("dead_subgraph", dead_subgraph.run, DEAD[name]()))


def test_every_rule_has_an_example() -> None:
    assert {name.split("-")[0] for name in DEAD} == set(dead_subgraph.RULES)


# ---------------------------------------------------------------- reasons to stop


def weight_of_run_time() -> Graph:
    net, h = vector()
    w = net.linear(net.input(4, 3, name="other"), 4)
    return read(net, net.node("linear", (h, w, None), ("N", 4), axis=1, w_in=1, w_out=0), (1, 3))


def kernel_of_run_time() -> Graph:
    net, h = image()
    w = net.conv(net.input(4, 2, 1, 1, name="other"), 4, (1, 1))
    attrs = {"stride": (1, 1), "pad": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}
    return read(net, net.node("conv", (h, w, None), ("N", 4, 5, 4), axis=1, **attrs), (1, 3))


def mixed_positions() -> Graph:
    net, h = image()
    return read(net, net.conv(h, 2, (1, 1)), (1, 3), axis=2)


def uneven_groups() -> Graph:
    net, h = image()
    return read(net, net.conv(h, 4, (1, 1), groups=2), (0, 1, 3))


def part_of_transposed_groups() -> Graph:
    net, h = image()
    return read(net, net.conv(h, 4, (1, 1), groups=2, transposed=True), (0, 2))


def mixed_units() -> Graph:
    net, h = vector()
    return read(net, net.along("softmax", h, (1,)), (1, 3))


def part_of_a_normed_group() -> Graph:
    net, h = image(channels=4)
    norm = net.along("group_norm", h, (1, 2, 3), net.leaf(4), net.leaf(4), eps=0.1, groups=2, align=(None, (1,), (1,)))
    return read(net, norm, (0, 1, 3))


def not_whole_positions() -> Graph:
    net, h = image(height=2, width=2)
    return read(net, net.reshape(h, "N", 16), (0, 5))


def merged_with_run_time() -> Graph:
    net, h = image(4, height="H", width="W")
    return read(net, net.reshape(net.reshape(h, "N", "4*H*W"), "N", "H*W", 4), (0, 2), axis=2)


def samples(net: Net, h: str) -> str:
    """(N, 4) as (4*N,): the samples one after the other."""
    return net.reshape(h, "4*N")


def repeats_read_differently() -> Graph:
    net, h = vector()
    return read(net, net.along("tile", h, (1,), shape=("N", 8), times=(1, 2)), (1, 3, 5))


def joined_samples() -> Graph:
    net, h = vector()
    both = net.node("concat", (samples(net, h), samples(net, net.linear("x", 4))), ("8*N",), axis=0)
    return read(net, net.reshape(both, "2*N", 4), (1, 3))


def part_of_dynamic_size() -> Graph:
    """Two parts that have 4 units together, of which each has M."""
    net, _ = vector()
    part = net.input("N", "M", name="y")
    return read(net, net.node("concat", (part, part), ("N", 4), axis=1), (1, 3))


def samples_taken_apart() -> Graph:
    """A select of every other of the samples' units, below one of the same axis."""
    net, h = vector()
    upper = net.node("select", (samples(net, h),), ("2*N",), axis=0, keep=(0, 2), period=4)
    return read(net, net.reshape(upper, "N", 2), (1,))


def select_along_another_axis() -> Graph:
    """Two selects of one value: they stay in the order of their axes."""
    net = Net()
    x = net.input("N", 3, 4)
    return read(net, net.cut(x, 1, (0, 2)), (1, 3), axis=2)


def affine_do_reads_dropped_units() -> Graph:
    net, h = vector()
    tensors = (literal([0.5]), literal([[0.5]]))
    value = net.insert("do", (h, *tensors), ("N", 4), axis=1, units=(2,), parents=(3,), sources=(0,))
    return read(net, value, (1, 2))


def affine_do_of_blocks() -> Graph:
    net, h = vector(6)
    tensors = (literal(0.5), literal([[0.5]]))
    value = net.insert("do", (h, *tensors), ("N", 6), axis=1, units=(2, 3), parents=(4, 5), sources=(0,))
    return read(net, value, (1, 2, 3, 4, 5))


def vector_operand() -> Graph:
    net, _ = sequence()
    row = net.along("mean", net.linear("x", 4), (0, 1), drop=True)
    right = net.linear("x", 4)
    turned = net.transpose(right, 0, 2, 1)
    return read(net, net.node("matmul", (row, turned), ("N", 3)), (0, 2))


def uneven_heads() -> Graph:
    net, _ = sequence()
    q, k, v = heads(net, 4), heads(net, 2), heads(net, 2)
    return read(net, net.node("attention", (q, k, v), net.shape(q), scale=0.7), (0, 2, 3))


def uneven_copies() -> Graph:
    net, _ = sequence()
    k = net.reshape(heads(net, 2), "N", 2, 1, 3, 2)
    return read(net, net.reshape(net.expand(k, "N", 2, 3, 3, 2), "N", 6, 3, 2), (0, 2, 3))


def causal_queries() -> Graph:
    net, _ = sequence()
    q, k, v = heads(net, 2), heads(net, 2), heads(net, 2)
    return read(net, net.node("attention", (q, k, v), net.shape(q), scale=0.7, causal=True), (0, 2), axis=2)


def values_as_wide_as_queries() -> Graph:
    net, _ = sequence()
    q, k, v = heads(net, 2), heads(net, 2), heads(net, 2)
    return read(net, net.node("attention", (q, k, v), net.shape(q), scale=0.7, square=True), (1,), axis=3)


def another_order() -> Graph:
    """A reader of a norm wants the units that stay first; a reshape of several axes knows ascending positions only."""
    net, h = image(height=2, width=2)
    graph = read(net, net.reshape(h, "N", 16), (8, 4))
    other = Keep((8, 4), ordered=False)
    nodes = [n.with_attrs(keep=other) if n.op == "select" else n for n in graph.nodes]
    return replace(graph, nodes=tuple(nodes))


def operand_of_dynamic_size() -> Graph:
    """4 units of which one operand has M, which may be 4 or 1."""
    net, h = vector()
    return read(net, net.node("pointwise", (h, net.input("M", name="y")), ("N", 4), fn="add"), (1, 3))


def another_op() -> Graph:
    net, h = vector()
    net.nodes.append(Node("opaque", (h,), (Value("sorted", ("N", 4)),), origin="sorted", marks=Marks(host_op="sort")))
    net.values["sorted"] = net.nodes[-1].output
    return read(net, "sorted", (1, 3))


def another_op_that_says_why() -> Graph:
    net, h = vector()
    net.nodes.append(
        Node("opaque", (h,), (Value("odd", ("N", 4)),), origin="odd", marks=Marks(host_op="odd", why="it is odd"))
    )
    net.values["odd"] = net.nodes[-1].output
    return read(net, "odd", (1, 3))


def input_of_the_model() -> Graph:
    net = Net()
    return read(net, net.input("N", 4), (1, 3))


DECLINES: list[tuple[Callable[[], Graph], str]] = [
    (weight_of_run_time, "its weight is computed at run time"),
    (kernel_of_run_time, "its weight is computed at run time"),
    (mixed_positions, "it mixes positions along this axis"),
    (uneven_groups, "its groups would keep different numbers of outputs"),
    (part_of_transposed_groups, "a grouped transposed convolution can only lose whole groups"),
    (mixed_units, "it mixes the units with each other"),
    (part_of_a_normed_group, "the statistics of a group need all of its units: only whole groups can go"),
    (repeats_read_differently, "its readers need different positions of its repeats"),
    (
        not_whole_positions,
        "the units do not fill whole positions of any axis of ['N', 4, 2, 2]; a position is units 0 to 3, or units 0 to 1, 4 to 5, 8 to 9, ..., "
        "or units 0, 2, 4, ...",
    ),
    (select_along_another_axis, "there is already a select along another axis here"),
    (affine_do_reads_dropped_units, "an affine replacement reads units that are dropped here"),
    (affine_do_of_blocks, "an affine replacement of blocks stays here"),
    (vector_operand, "one of its operands is a vector"),
    (uneven_heads, "query heads that share a key-value head must go together, or equally many in every such group"),
    (uneven_copies, "query heads that share a key-value head must go together, or equally many in every such group"),
    (causal_queries, "it counts positions from the first query"),
    (values_as_wide_as_queries, "its values have the size of its queries"),
    (another_order, "its readers want the units in another order"),
    (operand_of_dynamic_size, "the size of axis 0 of its operand is dynamic (M)"),
    (part_of_dynamic_size, "one of its parts has a dynamic size"),
    (another_op, "sort makes all of its units at once"),
    (another_op_that_says_why, "it is odd"),
    (input_of_the_model, "it is an input of the model"),
]
# The select has passed another op before it stops.
DECLINES_LATER: list[tuple[Callable[[], Graph], str]] = [
    (merged_with_run_time, "it merges the units with a size known only at run time"),
    (joined_samples, "it joins samples"),
    (samples_taken_apart, "it splits the samples"),
]


@pytest.mark.parametrize(("build", "reason"), DECLINES, ids=[build.__name__ for build, _ in DECLINES])
def test_stops(build: Callable[[], Graph], reason: str) -> None:
    declined = reasons(dead_subgraph.run, build())
    assert reason in declined
    assert declined <= {reason, "it is an input of the model"}


@pytest.mark.parametrize(("build", "reason"), DECLINES_LATER, ids=[build.__name__ for build, _ in DECLINES_LATER])
def test_stops_later(build: Callable[[], Graph], reason: str) -> None:
    assert reasons(dead_subgraph.run, build(), moves=True) == {reason}


def test_every_reason_is_tested() -> None:
    tested = {reason for _, reason in (*DECLINES, *DECLINES_LATER)}
    assert untested(dead_subgraph, tested) == []
    assert tested >= RISING


# ---------------------------------------------------------------- what stays


def unchanged(graph: Graph) -> None:
    after, changed = dead_subgraph.run(graph, Log())
    assert not changed
    assert to_text(after) == to_text(graph)


def test_a_value_that_is_read_whole_stays() -> None:
    net, h = vector()
    net.pointwise("relu", h)
    graph = read(net, h, (1, 3))
    unchanged(replace(graph, outputs=(*graph.outputs, "relu_1")))


def test_an_output_stays() -> None:
    net, h = vector()
    net.output(h)
    unchanged(read(net, h, (1, 3)))


def test_selects_along_different_axes_stay() -> None:
    net, h = sequence()
    net.output(net.pointwise("relu", net.cut(h, 2, (1, 3))))
    unchanged(read(net, h, (0, 2)))


def test_the_hosts_own_selects_stay() -> None:
    """Nothing asks for less than the model itself does."""
    net, h = vector()
    net.pointwise("relu", net.select(h, 1, (1, 3)))
    unchanged(done(net))


def test_the_hosts_own_idle_nodes_stay() -> None:
    net, h = vector()
    net.pointwise("relu", h)
    unchanged(done(net, output=h))


def test_idle_nodes_go_with_what_they_read() -> None:
    """A node that nobody ever read does not hold a dead branch alive."""
    net, h = vector()
    net.pointwise("tanh", net.pointwise("relu", h))
    kept = net.pointwise("sigmoid", net.linear("x", 3))
    out = net.linear("x", 2)
    net.output(net.pointwise("mul", out, net.linear(h, 2)))
    before = net.graph()
    idle = idle_nodes(before)
    assert idle == {"relu_1", "tanh_1", "linear_2", kept}
    folded = replace(before, nodes=before.nodes[:-1], outputs=(out,))  # as if the product had become its first factor
    after, changed = dead_subgraph.run(folded, Log(idle=idle))
    assert changed
    assert [node.name for node in after.nodes] == ["linear_2", kept, out]


def test_idle_nodes_go_where_they_hold_units_alive() -> None:
    """A last state that nobody asks for needs no units: it goes with the first that are dropped, and so does what reads it."""
    net, h = vector()
    state = net.pointwise("relu", h)
    net.pointwise("tanh", net.select(state, 1, (0, 1)))
    net.output(net.linear(net.cut(state, 1, (1, 3)), 2))
    before = net.graph()
    after, changed = dead_subgraph.run(before, Log())
    assert changed
    assert [node.op for node in after.nodes] == ["linear", "pointwise", "linear"]
    assert after.nodes[0].output.shape == ("N", 2)


def test_sizes_of_an_input_hold_nothing_alive() -> None:
    """A target shape, which no operand names, is made of them: the op that takes it still needs it where others of its readers went."""
    net, h = vector()
    size = net.node("opaque", ("x",), (1,), name="size", value_dtype="int64", shape_only=(0,))
    target = net.node("concat", (size, literal(np.array([4]))), (2,), name="target", value_dtype="int64", axis=0)
    counted = net.pointwise("cast", size, dtype="float32")
    out = net.linear(h, 2)
    net.output(net.pointwise("mul", out, counted))
    before = net.graph()
    assert idle_nodes(before) == {target}
    folded = replace(before, nodes=before.nodes[:-1], outputs=(out,))
    after, _ = dead_subgraph.run(folded, Log(idle=idle_nodes(before)))
    assert {size, target} <= {node.name for node in after.nodes}
    assert counted not in {node.name for node in after.nodes}


def test_nodes_with_an_effect_stay() -> None:
    net, h = vector()
    net.node("opaque", (h,), ("N", 4), name="print", effect=True)
    unchanged(done(net, output=net.linear(h, 2)))


def test_sizes_of_the_units_that_are_read_stay() -> None:
    """A node that reads the number of units needs them all; one that reads another size does not."""
    net, h = vector()
    net.output(net.node("opaque", (h,), (), name="size", value_dtype="int64", shape_only=(1,)))
    unchanged(read(net, h, (1, 3)))
    net, h = vector()
    net.output(net.node("opaque", (h,), (), name="size", value_dtype="int64", shape_only=(0,)))
    after, changed = dead_subgraph.run(read(net, h, (1, 3)), Log())
    assert changed
    assert after.values()[h].shape == ("N", 2)


def test_a_plane_keeps_the_positions_it_counts() -> None:
    net, h = image(height=5, width=4)
    turned = net.pointwise("relu", h)
    net.output(net.insert("plane", (turned,), (1, 1, 5, 4), axis=1))
    unchanged(read(net, turned, (1, 3), axis=2))


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda net, h: (net.output(h), read(net, h, (0, 2)))[1], "the whole value is an output of the model"),
        (
            lambda net, h: (net.output(net.pointwise("tanh", h)), read(net, h, (0, 2)))[1],
            "the whole value is also read by tanh_1",
        ),
        (lambda net, h: two_axes(net, h), "readers need different parts of it"),
    ],
)
def test_residue_says_who_reads_the_rest(build: Callable[[Net, str], Graph], reason: str) -> None:
    net, h = sequence()
    assert reason in {left.reason for left in run(build(net, h)).residue}


def two_axes(net: Net, h: str) -> Graph:
    net.output(net.pointwise("tanh", net.cut(h, 2, (1, 3))))
    return read(net, h, (0, 2))
