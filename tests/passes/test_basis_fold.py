"""basis_fold: the text before and after, every reason to stop, and the walk that follows units."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable

import numpy as np
import pytest
from graphs import Net
from hypothesis import given
from hypothesis import strategies as st
from rewrites.start import attend, sequence
from rules import before_and_after, rewritten

from cmrc.ir.graph import Do, Graph, apply, literal
from cmrc.passes import basis_fold, pipeline
from cmrc.passes.rewriting.layouts import Layout, split
from cmrc.passes.rewriting.rewriter import Log

BASIS = np.random.default_rng(0).normal(size=(2, 3, 3)) + 2 * np.eye(3)


def heads(net: Net, h: str, count: int = 2) -> str:
    return net.transpose(net.reshape(h, "N", 3, count, 3), 0, 2, 1, 3)


def projections(count: int = 2) -> tuple[Net, str, str, str]:
    """Queries of two heads, keys and values of as many or fewer."""
    net, q = sequence(6)
    return net, q, net.linear("x", 3 * count), net.linear("x", 3 * count)


def attention(net: Net, q: str, k: str, v: str) -> str:
    return attend(net, heads(net, q), heads(net, k), heads(net, v))


def cut(
    net: Net, site: str, *, output: str = "", axis: int = 2, basis: np.ndarray = BASIS, constant: float = 0.0
) -> Graph:
    """The last units of each head := a constant, in another basis."""
    net.output(output or net.nodes[-1].name)
    units = tuple(len(basis[0]) * (head + 1) - 1 for head in range(len(basis)))
    return pipeline.put_dos(net.graph(), [Do(site, site, axis, units, np.full(len(units), constant), basis=basis)])


def keys() -> Graph:
    net, q, k, v = projections()
    attention(net, q, k, v)
    return cut(net, k)


def values() -> Graph:
    net, q, k, v = projections()
    attention(net, q, k, v)
    return cut(net, v, constant=0.5)


def products() -> Graph:
    net, q, k, _ = projections()
    shifted = net.pointwise("add", k, net.leaf(6))
    scaled = net.pointwise("mul", heads(net, shifted), literal(0.5))
    net.matmul(heads(net, q), net.transpose(scaled, 0, 1, 3, 2))
    return cut(net, shifted)


def packed() -> Graph:
    net, qkv = sequence(18)
    q, k, v = (net.select(qkv, 2, range(6 * i, 6 * i + 6)) for i in range(3))
    attention(net, q, k, v)
    return cut(net, k)


def layers() -> Graph:
    net, h = sequence(6)
    net.linear(net.pointwise("add", net.pointwise("sub", h, literal(0.5)), net.leaf(1, 6)), 2)
    return cut(net, h)


FOLDS = {"keys": keys, "values": values, "products": products, "packed": packed, "layers": layers}


@pytest.mark.parametrize("name", FOLDS)
def test_a_basis_goes_into_weights(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"basis_fold/{name}", before_and_after("basis_fold", basis_fold.run, FOLDS[name]()))


@pytest.mark.parametrize("name", FOLDS)
def test_a_second_run_changes_nothing(name: str) -> None:
    after = rewritten(basis_fold.run, FOLDS[name]())
    assert basis_fold.run(after, Log()) == (after, False)
    assert "turn" not in {node.op for node in after.nodes}


@pytest.mark.parametrize("name", FOLDS)
def test_the_pipeline_cuts_the_units(name: str) -> None:
    result = pipeline.run(FOLDS[name]())
    assert not result.residue
    assert {"turn", "do", "select"}.isdisjoint(node.op for node in result.graph.nodes if not node.origin)


# ---------------------------------------------------------------- reasons to stop


def of_an_input() -> Graph:
    net = Net()
    net.linear(net.input("N", 6), 2)
    return cut(net, "x", axis=1)


def of_a_sum() -> Graph:
    net, h = sequence(6)
    total = net.pointwise("add", h, net.linear("x", 6))
    net.linear(total, 2)
    return cut(net, total)


def of_weights_at_run_time() -> Graph:
    net = Net()
    weight = net.linear(net.input(6, 2), 6)
    net.linear(net.node("linear", (net.input("N", 6, name="y"), weight), ("N", 6), axis=1, w_in=1, w_out=0), 2)
    return cut(net, net.nodes[1].name, axis=1)


def of_an_activation() -> Graph:
    net, h = sequence(6)
    act = net.pointwise("relu", h)
    net.linear(act, 2)
    return cut(net, act)


def read_before() -> Graph:
    net, h = sequence(6)
    shifted = net.pointwise("add", h, net.leaf(6))
    net.linear(net.concat(net.pointwise("relu", h), shifted, axis=2), 2)
    return cut(net, shifted)


def read_by_an_activation() -> Graph:
    net, h = sequence(6)
    net.linear(net.pointwise("relu", h), 2)
    return cut(net, h)


def at_the_output() -> Graph:
    net, h = sequence(6)
    net.linear(h, 2)
    return cut(net, h, output=h)


def behind_at_the_output() -> Graph:
    net, h = sequence(6)
    moved = net.transpose(h, 0, 2, 1)
    net.linear(moved, 2, axis=1)
    return cut(net, h, output=moved)


def by_positions() -> Graph:
    """Rotary positions: each unit times a number of its own."""
    net, q, k, v = projections()
    turned = net.pointwise("mul", heads(net, k), net.leaf(3, 3))
    attend(net, heads(net, q), turned, heads(net, v))
    return cut(net, k)


def with_a_parameter() -> Graph:
    net, h = sequence(6)
    net.matmul(heads(net, h), net.leaf(3, 4))  # type: ignore[arg-type]
    return cut(net, h)


def other_is_no_linear() -> Graph:
    net, q, k, v = projections()
    attend(net, heads(net, net.pointwise("relu", q)), heads(net, k), heads(net, v))
    return cut(net, k)


def other_is_read_too() -> Graph:
    net, q, k, v = projections()
    seen = net.pointwise("relu", q)
    y = attention(net, q, k, v)
    net.concat(seen, y, axis=2)
    return cut(net, k)


def over_several_heads() -> Graph:
    net, q, k, _ = projections()
    net.matmul(q, net.transpose(k, 0, 2, 1))
    return cut(net, k)


def query_heads_that_are_shared() -> Graph:
    """One head of queries for two of keys."""
    net, _, k, _ = projections()
    one = heads(net, net.linear("x", 3), 1)
    net.matmul(one, net.transpose(heads(net, k), 0, 1, 3, 2))
    return cut(net, k)


def in_another_order() -> Graph:
    net, h = sequence(6)
    net.linear(net.select(h, 2, (1, 0, 2, 3, 4, 5)), 2)
    return cut(net, h)


def in_parts() -> Graph:
    net, h = sequence(6)
    net.linear(net.select(h, 2, range(4)), 2)
    return cut(net, h)


def added_to_heads() -> Graph:
    net, q, k, v = projections()
    shifted = net.pointwise("add", heads(net, k), net.leaf(3))
    attend(net, heads(net, q), shifted, heads(net, v))
    return cut(net, k)


def uneven() -> Graph:
    net, h = sequence(7)
    part = net.select(h, 2, range(6))
    net.linear(part, 2)
    return cut(net, part)


def heads_apart() -> Graph:
    net, q, k, v = projections()
    apart = heads(net, k)
    attend(net, heads(net, q), apart, heads(net, v))
    return cut(net, apart, axis=3, basis=BASIS[:1])


def paired_otherwise() -> Graph:
    """Heads and samples on one axis, in another order for keys than for queries."""
    net, q, k, _ = projections()
    left = net.reshape(heads(net, q), "2*N", 3, 3)
    right = net.reshape(net.transpose(net.reshape(k, "N", 3, 2, 3), 2, 0, 1, 3), "2*N", 3, 3)
    net.matmul(left, net.transpose(right, 0, 2, 1))
    return cut(net, k)


def quantised() -> Graph:
    numbers = literal(np.arange(12).reshape(6, 2), "int8")
    attrs = {"fn": "dequantize", "dtype": "float32", "align": (None, None), "rank": 2}
    weight = apply("pointwise", (numbers, literal(0.1, "float32")), attrs, (6, 2), "float32")
    net = Net()
    h = net.node("linear", (net.input("N", 3, 2), weight), ("N", 3, 6), axis=2, w_in=1, w_out=0)
    net.linear(h, 2)
    return cut(net, h)


def read_at_run_time() -> Graph:
    net, h = sequence(6)
    weight = net.linear(net.input(6, 2, name="y"), 2)
    net.node("linear", (h, weight), ("N", 3, 2), axis=2, w_in=0, w_out=1)
    return cut(net, h)


def along_rows() -> Graph:
    """[N, T·heads, 3] times its own transpose from elsewhere."""
    net, q, k, _ = projections()
    left, right = (net.reshape(x, "N", 6, 3) for x in (q, k))
    net.matmul(left, net.transpose(right, 0, 2, 1))
    return cut(net, k)


def reader_of_units_alone() -> Graph:
    net, h = sequence(6)
    net.linear(heads(net, h), 2)
    return cut(net, h)


WHY = "its basis does not go into weights: "
DECLINES: dict[str, tuple[Callable[[], Graph], str]] = {
    "an input": (of_an_input, "%x is an input of the model, and no weights make it"),
    "a sum": (of_a_sum, "%add_1 (add) makes its units, and has no weights that could be turned"),
    "weights at run time": (of_weights_at_run_time, "%linear_2 (linear) has weights that are computed at run time"),
    "an activation": (of_an_activation, "%relu_1 (relu) treats its units one by one"),
    "read before": (read_before, "%relu_1 (relu) reads these units, too"),
    "read by an activation": (read_by_an_activation, "%relu_1 (relu) treats its units one by one"),
    "the output": (at_the_output, "the value is an output of the model"),
    "an output behind": (behind_at_the_output, "%transpose_1 (transpose) is an output of the model"),
    "positions": (by_positions, "%mul_1 (mul) treats its units one by one"),
    "a parameter": (with_a_parameter, "%matmul_1 (matmul) multiplies it with a parameter"),
    "other units of an activation": (other_is_no_linear, "%relu_1 (relu) treats its units one by one"),
    "other units that are read": (other_is_read_too, "%relu_1 (relu) reads these units, too"),
    "several heads": (over_several_heads, "%matmul_1 (matmul) sums over more than the units of a block"),
    "shared query heads": (query_heads_that_are_shared, "%matmul_1 (matmul) multiplies one block with several that have bases of their own"),
    "another order": (in_another_order, "%select_1 (select) treats its units one by one"),
    "parts": (in_parts, "%linear_2 (linear) reads its blocks in parts, or in another order"),
    "heads on several axes": (added_to_heads, "%add_1 (add) adds numbers to it where its blocks lie along several axes"),
    "heads apart": (heads_apart, "%linear_2 (linear) has its blocks along several axes here"),
    "pairs": (paired_otherwise, "%matmul_1 (matmul) pairs its blocks in a way that is not followed"),
    "parts of blocks": (uneven, "%linear_1 (linear) does not make whole blocks of 3 units"),
    "integers": (quantised, "%linear_1 (linear) has weights that are stored as integers"),
    "reader at run time": (read_at_run_time, "%linear_3 (linear) has weights that are computed at run time"),
    "heads along rows": (along_rows, "%matmul_1 (matmul) has its blocks along the rows of the product"),
    "linear over several axes": (reader_of_units_alone, "%linear_2 (linear) reads its blocks along several axes"),
}  # fmt: skip


def test_every_reason_is_tested() -> None:
    """Each text in the source that a basis is declined with."""
    tree = ast.parse(inspect.getsource(basis_fold))
    calls = [c for c in ast.walk(tree) if isinstance(c, ast.Call) and getattr(c.func, "id", "") == "Unfoldable"]
    assert len(calls) > 10
    for call in calls:
        (text,) = call.args
        parts = text.values if isinstance(text, ast.JoinedStr) else [text]
        pattern = "".join(re.escape(str(p.value)) if isinstance(p, ast.Constant) else ".*" for p in parts)
        assert any(re.fullmatch(pattern, reason) for _, reason in DECLINES.values()), pattern


@pytest.mark.parametrize("name", DECLINES)
def test_stops(name: str) -> None:
    build, reason = DECLINES[name]
    graph = build()
    after, changed = basis_fold.run(graph, Log())
    assert not changed
    assert {node.marks.why for node in after.nodes if node.op == "turn"} == {f"{WHY}{reason}"}
    (residue,) = pipeline.run(graph).residue
    assert residue.reason == f"{WHY}{reason}"


# ---------------------------------------------------------------- the walk


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
def test_units_are_followed_through_a_reshape(sizes: list[int], data: st.DataObject) -> None:
    """The factors of any shape, laid over any other of as many elements, count the same units."""
    count = int(np.prod(sizes))
    rest, others = count, list[int]()
    while rest > 1:
        others.append(data.draw(st.sampled_from([n for n in range(2, rest + 1) if rest % n == 0])))
        rest //= others[-1]
    laid = split([(count, 1)], others or [1])
    assert laid is not None
    whole = Layout(0, tuple(laid))
    assert whole.units().tolist() == list(range(count))
    back = split([factor for axis in laid for factor in axis], [count])
    assert back == list(Layout.of((count,), 0).axes)
