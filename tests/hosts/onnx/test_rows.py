"""Every row of the table of ops: it means what onnxruntime computes, and constants and affine do's go past it."""

from __future__ import annotations

import numpy as np
import pytest
from hosts.onnx.lowering import (
    MOVED,
    TOLERANCE,
    lower,
    model,
    put_do,
    random,
    sizes_of,
)
from hosts.onnx.rows import ROWS, row_model

from cmrc.hosts.onnx.host import OnnxHost
from cmrc.ir.evaluate import evaluate
from cmrc.ir.graph import Array
from cmrc.ir.ops import OPS
from cmrc.ir.tensors import evaluate_op, materialise
from cmrc.ir.verify import verify_graph
from cmrc.passes import pipeline as passes


@pytest.mark.parametrize("key", ROWS)
def test_a_row_means_what_onnxruntime_computes(key: str) -> None:
    """Every IR node, evaluated on the values that onnxruntime gave it, gives the value that onnxruntime gave."""
    proto, feeds = row_model(key)
    host = OnnxHost.from_model(proto)
    verify_graph(host.graph)
    assert not [node.name for node in host.graph.nodes if node.op == "opaque"]
    names = list(host.graph.values())
    values = dict(zip(names, host.run(feeds, taps=names)[len(host.graph.outputs) :], strict=True))
    for node in host.graph.nodes:
        assert node.output.shape == values[node.name].shape
        assert node.output.dtype == values[node.name].dtype.name
        if node.attrs.get("fn") and OPS[node.op].functions[node.attrs["fn"]].meaning is None:
            continue
        attrs = {**node.attrs, "shape": node.output.shape}
        attrs = {k: v for k, v in attrs.items() if k != "shape"} if node.op == "pointwise" else attrs
        operands = [
            None if o is None else _float(values[o]) if isinstance(o, str) else _float(materialise(o))
            for o in node.inputs
        ]
        got = evaluate_op(node.op, attrs, *operands)
        np.testing.assert_allclose(got, values[node.name], rtol=2e-5, atol=2e-5, err_msg=node.name)


@pytest.mark.parametrize("pool", ["MaxPool", "AveragePool", "AveragePool count_include_pad = 1, "])
def test_a_pool_whose_window_is_larger_than_a_dynamic_size(pool: str) -> None:
    op, _, more = pool.partition(" ")
    text = f"y = {op}<{more}kernel_shape = [3, 5], strides = [3, 4], pads = [0, 1, 0, 1]>(x)"
    host = OnnxHost.from_model(model(text, {"x": ("n", 2, "rows", "columns")}, "y"))
    for rows, columns in ((1, 1), (2, 2), (2, 7), (4, 3), (6, 11)):
        x = random(2, 2, rows, columns)
        got, want = evaluate(host.graph, {"x": x})["y"], host.run([x])[0]
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("opset", [11, 22])
def test_an_average_that_counts_a_padding_that_is_none(opset: int) -> None:
    """Before opset 19 onnxruntime divides by the whole window also where it stands out."""
    text = "y = AveragePool<kernel_shape = [3, 3], strides = [2, 2], count_include_pad = 1>(x)"
    proto = model(text, {"x": ("n", 2, "rows", "columns")}, "y")
    proto.opset_import[0].version, proto.ir_version = opset, 8
    host = OnnxHost.from_model(proto)
    for rows, columns in ((2, 2), (2, 7), (4, 3)):
        x = random(2, 2, rows, columns)
        got, want = evaluate(host.graph, {"x": x})["y"], host.run([x])[0]
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("q", "k"), [((2, 5, 8), (2, 2, 7, 4)), ((2, 2, 5, 4), (2, 7, 8))], ids=["keys", "queries"])
def test_attention_of_which_some_operands_have_heads_is_left_whole(q: tuple[int, ...], k: tuple[int, ...]) -> None:
    text = "y = Attention<q_num_heads = 2, kv_num_heads = 2>(q, k, k)"
    host = OnnxHost.from_model(model(text, {"q": q, "k": k}, "y"))
    (node,) = host.graph.nodes
    assert node.op == "opaque"
    assert "have an axis of heads" in node.marks.why


def _float(array: Array) -> Array:
    return array if array.dtype.kind in "biu" else array.astype(np.float64)


@pytest.mark.parametrize("key", ROWS)
def test_lowering_past_a_row_equals_clamping(key: str) -> None:
    proto, feeds = row_model(key)
    moved = 0.0 if key in ("Sign", "logic", "Floor", "Ceil", "Round") else MOVED
    units, constants = ((1, 4), (0.6, -0.8)) if "grouped" not in key else ((1, 3, 4, 5), (0.6, -0.8, 0.5, 0.3))
    host = OnnxHost.from_model(proto)
    lowered = lower(host, feeds, "h", 1, units, constants, residue=not ROWS[key][3], moved=moved)
    if ROWS[key][3]:
        assert sizes_of(lowered)["W"][0] <= 8 - len(units)


@pytest.mark.parametrize("key", ROWS)
def test_an_affine_do_past_a_row_equals_clamping(key: str) -> None:
    proto, feeds = row_model(key)
    host = OnnxHost.from_model(proto)
    edited = put_do(host.graph, "h", 1, (1, 4), (0.6, -0.8), parents=(0, 7), weight=random(2, 2))
    clamped, lowered = host.build(edited), host.build(passes.run(edited).graph)
    expected, got = clamped.run(feeds)[0], lowered.run(feeds)[0]
    assert np.abs(expected - got).max() <= TOLERANCE * max(1e-6, np.abs(expected).max())
