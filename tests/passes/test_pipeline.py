"""The driver: it runs the passes until nothing moves, checks every graph, and says what stayed and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from graphs import Do, batch, with_do
from meaning import gap, outputs_of
from rewrites.start import MIX, TWO, done, image, vector
from rules import SIZES
from tolerances import EXACT_F64, MOVES

from cmrc.errors import GraphError
from cmrc.ir.graph import Graph, Node, Value
from cmrc.ir.text import parse, to_text
from cmrc.passes.pipeline import PIPELINE, Residue, run


def mlp() -> Graph:
    net, h = vector()
    net.linear(net.pointwise("relu", h), 2)
    return done(net, Do(h, 1, (2, 0), *TWO))


def test_the_three_screens(golden: Callable[[str, str], None]) -> None:
    """What `--print-passes` shows: the graph, then after each pass of the first round."""
    graph = mlp()
    screens = [to_text(graph)]
    result = run(graph, watch=lambda name, seen: screens.append(f"; {name} ->\n\n{to_text(seen)}"))
    golden("pipeline/mlp", "\n".join(screens[:4]))
    inputs = batch(graph, **SIZES)
    assert gap(outputs_of(result.graph, inputs), outputs_of(graph, inputs)) <= EXACT_F64
    plain = with_do(graph, Do("linear_1.do_0", 1, (2,), [9.0]))
    assert gap(outputs_of(plain, inputs), outputs_of(graph, inputs)) > MOVES * EXACT_F64
    assert result.residue == []
    assert result.graph.values()["linear_1"].shape == ("N", 2)
    assert set(result.seconds) == {rewrite.name for rewrite in PIPELINE}
    assert [(a.rule, a.node, a.detail, a.sources) for a in result.actions] == [
        ("constant_fold", "relu_1", "past", (0,)),
        ("constant_fold", "linear_2", "constants into the bias", (0,)),
        ("dead_subgraph", "relu_1", "4 -> 2 along axis 1", ()),
        ("dead_subgraph", "linear_1", "4 -> 2 along axis 1", ()),
    ]


def residue(graph: Graph) -> list[tuple[str, str, str, tuple[int, ...]]]:
    def told(left: Residue) -> tuple[str, str, str, tuple[int, ...]]:
        return left.stopped_at, left.stopped_op, left.reason, left.sources

    return [told(left) for left in run(graph).residue]


def test_a_do_that_stays_names_who_stopped_it() -> None:
    net, h = vector()
    net.along("softmax", h, (1,))
    assert residue(done(net, Do(h, 1, (2, 0), *TWO))) == [
        ("softmax_1", "softmax", "it mixes the units with each other", (0,))
    ]


def test_a_do_on_an_output() -> None:
    net, h = vector()
    assert residue(done(net, Do(h, 1, (2, 0), *TWO))) == [("output", "output", "it is an output of the model", (0,))]


def test_a_select_on_an_input() -> None:
    net, _ = vector()
    assert residue(done(net, Do("x", 1, (2,), [0.5]))) == [("x", "input", "it is an input of the model", ())]


def test_one_reader_folds_while_another_stops() -> None:
    net, h = vector()
    soft = net.along("softmax", h, (1,))
    net.pointwise("add", net.linear(h, 4), soft)
    graph = done(net, Do(h, 1, (2, 0), *TWO))
    left = residue(graph)
    assert ("softmax_1", "softmax", "it mixes the units with each other", (0,)) in left
    assert ("linear_1", "linear", "the whole value is also read by linear_1.do_0", ()) in left
    inputs = batch(graph, **SIZES)
    assert gap(outputs_of(run(graph).graph, inputs), outputs_of(graph, inputs)) <= EXACT_F64


@pytest.mark.parametrize("more", [{}, MIX], ids=["constant", "affine"])
def test_a_border_that_an_add_of_the_model_can_take_needs_no_op_of_its_own(more: dict[str, Any]) -> None:
    """(conv + border) + parameter is conv + (border + parameter)."""
    net, h = image(height=4)
    net.pointwise("add", net.conv(h, 2, (3, 3), pad=((1, 1), (1, 1))), net.leaf(2, 1, 1))
    graph = done(net, Do(h, 1, (2, 0), *TWO, **more))
    result = run(graph)
    assert [node.op for node in result.graph.nodes] == ["conv", "conv", "pointwise"]
    inputs = batch(graph, **SIZES)
    assert gap(outputs_of(result.graph, inputs), outputs_of(graph, inputs)) <= EXACT_F64


def test_a_border_stays_before_a_batch_norm_that_is_known_only_at_run_time() -> None:
    """Behind it, the border would need the scale of the norm."""
    net, h = image(height=4)
    y = net.conv(h, 2, (3, 3), pad=((1, 1), (1, 1)))
    variance = net.pointwise("exp", net.along("mean", y, (0, 2, 3), drop=True))
    parameters = (*(net.leaf(2) for _ in range(3)), variance)
    net.pointwise("batch_norm", y, *parameters, eps=1e-5, align=(None, *((1,),) * 4))
    graph = done(net, Do(h, 1, (2, 0), *TWO))
    result = run(graph)
    inputs = batch(graph, **SIZES)
    assert gap(outputs_of(result.graph, inputs), outputs_of(graph, inputs)) <= EXACT_F64


def test_a_broken_graph_is_refused() -> None:
    broken = Graph(
        (Value("x", ("N", 3)),), (Node("pointwise", ("y",), (Value("z", ("N", 3)),), {"fn": "relu"}),), ("z",)
    )
    with pytest.raises(GraphError, match="reads %y before it is defined"):
        run(broken)


SHARED = """graph(%ids: int64[N], %x: float32[N,3]) -> (%y, %z)
%bias = embedding(%ids, @table: float32[8,4]) : float32[N,4]
%a = linear(%x, @a: float32[4,3], _) {axis=1, w_in=1, w_out=0} : float32[N,4]
%s = pointwise(%a, %bias) {fn='add'} : float32[N,4]
%y = linear(%s, @c: float32[2,4], _) {axis=1, w_in=1, w_out=0} : float32[N,2]
%b = linear(%x, @b: float32[4,3], _) {axis=1, w_in=1, w_out=0} : float32[N,4]
%t = pointwise(%b, %bias) {fn='add'} : float32[N,4]
%z = linear(%t, @d: float32[2,4], _) {axis=1, w_in=1, w_out=0} : float32[N,2]
"""


def test_what_readers_share_is_read_in_part() -> None:
    """A table of positions that two readers need different parts of stays whole, and nothing of it counts as left over."""
    graph = parse(SHARED)
    result = run(with_do(with_do(graph, Do("s", 1, (0,), [0.0])), Do("t", 1, (1, 2), [0.0, 0.0])))
    assert result.residue == []
    assert [node.inputs[0] for node in result.shared] == ["bias", "bias"]
    assert sorted(tuple(node.attrs["keep"]) for node in result.shared) == [(0, 3), (1, 2, 3)]
    shapes = {name: value.shape for name, value in result.graph.values().items()}
    assert (shapes["a"], shapes["b"], shapes["bias"]) == (("N", 3), ("N", 2), ("N", 4))
    weighed = SHARED.replace(
        "embedding(%ids, @table: float32[8,4])", "linear(%x, @table: float32[4,3], _) {axis=1, w_in=1, w_out=0}"
    )
    left = run(with_do(with_do(parse(weighed), Do("s", 1, (0,), [0.0])), Do("t", 1, (1, 2), [0.0, 0.0])))
    assert {r.reason for r in left.residue} == {"readers need different parts of it"}  # there weights would be saved
    assert left.shared == []
    behind = "%table = embedding(%ids, @table: float32[8,4]) : float32[N,4]\n%bias = linear(%table, @w: float32[4,4], _) {axis=1, w_in=1, w_out=0} :"
    weighed = SHARED.replace("%bias = embedding(%ids, @table: float32[8,4]) :", behind)
    left = run(with_do(with_do(parse(weighed), Do("s", 1, (0,), [0.0])), Do("t", 1, (1, 2), [0.0, 0.0])))
    assert left.shared == []


def test_what_one_reader_alone_reads_in_part_is_left_over() -> None:
    lines = SHARED.replace("embedding(%ids, @table: float32[8,4])", "opaque(%ids) {| host_op='Table'}").splitlines(
        keepends=True
    )
    alone = run(with_do(parse("".join([lines[0].replace(", %z", ""), *lines[1:5]])), Do("s", 1, (0,), [0.0])))
    assert len(alone.residue) == 1
    assert alone.shared == []


def test_a_norm_behind_a_value_says_why_it_needs_every_unit() -> None:
    text = """graph(%x: float32[N,3]) -> (%y, %m)
%a = linear(%x, @a: float32[4,3], _) {axis=1, w_in=1, w_out=0} : float32[N,4]
%q = pointwise(%a, %a) {fn='mul'} : float32[N,4]
%m = along(%q) {fn='mean', axes=(1,), drop=False} : float32[N,1]
%r = pointwise(%a) {fn='relu'} : float32[N,4]
%y = linear(%r, @c: float32[2,4], _) {axis=1, w_in=1, w_out=0} : float32[N,2]
"""
    (left,) = run(with_do(parse(text), Do("r", 1, (0,), [0.0]))).residue
    assert left.reason == "the whole value is also read by q: the mean over all of its units needs each of them"
