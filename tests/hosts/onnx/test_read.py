"""Reading an ONNX model: what is opaque and why, constants in every form, subgraphs, models that cannot be read."""

from __future__ import annotations

import numpy as np
import pytest
from hosts.onnx.lowering import (
    ints,
    lower,
    model,
    nodes_of,
    put_do,
    random,
)
from onnx import TensorProto, helper, parser

from cmrc.errors import CmrcError, HostError, TraceError
from cmrc.hosts.onnx.host import OnnxHost
from cmrc.ir.graph import Tensor
from cmrc.ir.tensors import evaluate_op
from cmrc.ir.verify import verify_graph
from cmrc.program.plan import Plan
from cmrc.program.program import trace


def test_an_unknown_op_is_opaque_and_says_why() -> None:
    proto = model(
        """
        a = Relu(x)
        v, i = TopK<axis=1>(a, k)
        b = MatMul(v, three)
        t = Unique(b)
        y = Add(t, t)
        """,
        {"x": ("N", 8)}, "y", k=ints(4), three=random(4),
    )  # fmt: skip
    kinds = {node.name: (node.op, node.kind, node.marks.why) for node in OnnxHost.from_model(proto).graph.nodes}
    assert kinds["v"] == ("opaque", "TopK", "")
    assert kinds["b"] == ("opaque", "MatMul", "one of its operands is a vector")
    assert kinds["t"] == ("opaque", "Unique", "")
    assert kinds["y"][0] == "pointwise"


@pytest.mark.parametrize(
    ("node", "why"),
    [
        ("y = Gemm<transA=1>(x, w)", "it transposes its input"),
        ("y = Gemm(w, x)", "its matrix B is computed at run time"),
        ("y = Gemm<beta=0.0>(x, w, b)", "its bias of shape [4] is not one number per output"),
        ("y = Gemm(x, w, c)", "its bias of shape [8, 4] is not one number per output"),
    ],
)
def test_a_form_of_gemm_that_is_left_whole_says_why(node: str, why: str) -> None:
    arrays = {"w": random(8, 4), "b": random(4), "c": random(8, 4)}
    proto = model(node, {"x": (8, 8)}, "y", **{name: array for name, array in arrays.items() if f"{name}" in node[4:]})
    (read,) = OnnxHost.from_model(proto).graph.nodes
    assert (read.op, read.marks.why) == ("opaque", why)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("from = Cast<to=7>(a)\nto = Cast<to=7>(b)\ny = Slice(x, from, to)", "its bounds are computed at run time"),
        ("a1 = Relu(a)\nb1 = Relu(b)\ny = Slice(x, two, two, one)", "it selects nothing"),
    ],
    ids=["bounds", "nothing"],
)
def test_a_form_of_slice_that_is_left_whole_says_why(lines: str, why: str) -> None:
    arrays = {"two": ints(2), "one": ints(1)} if "two" in lines else {}
    graph = OnnxHost.from_model(model(lines, {"x": (4, 8), "a": (2,), "b": (2,)}, "y", **arrays)).graph
    assert (graph.nodes[-1].op, graph.nodes[-1].marks.why) == ("opaque", why)


def test_an_expand_to_sizes_of_run_time_has_the_shape_that_the_model_declares() -> None:
    proto = model("to = Cast<to=7>(t)\ny = Expand(x, to)", {"x": ("N", 1, 8), "t": (3,)}, "y")
    proto.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 5, 8]))
    read = OnnxHost.from_model(proto).graph.nodes[-1]
    assert (read.op, read.output.shape) == ("expand", ("N", 5, 8))


def test_unknown_rank_makes_readers_opaque() -> None:
    proto = model("a = Relu(x)\ny = Add(a, a)", {"x": (2, 3)}, "y")
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    graph = OnnxHost.from_model(proto).graph
    verify_graph(graph)
    assert [node.op for node in graph.nodes] == ["opaque", "opaque"]
    assert graph.nodes[0].marks.why == "it reads a value of unknown rank"


def test_constants_in_every_form_are_tensors() -> None:
    proto = model(
        """
        w = Transpose<perm=[1,0]>(stored)
        s = Constant<value_ints=[0,2,4]>()
        alias = Identity(bias)
        h = MatMul(x, w)
        a = Add(h, alias)
        y = Reshape(a, s)
        """,
        {"x": ("N", 5)}, "y", stored=random(8, 5), bias=random(8),
    )  # fmt: skip
    host = OnnxHost.from_model(proto)
    assert [(node.op, node.output.shape) for node in host.graph.nodes] == [
        ("linear", ("N", 8)), ("pointwise", ("N", 8)), ("reshape", ("N", 2, 4)),
    ]  # fmt: skip
    assert isinstance(host.graph.nodes[0].inputs[1], Tensor)
    assert set(host.graph.leaves()) == {"stored", "bias"}
    lowered = compare_relu_like(host, "x")
    assert "Transpose" not in nodes_of(lowered)


def compare_relu_like(host: OnnxHost, name: str) -> OnnxHost:
    """Replace units of an input, which nothing can shrink: the weight is folded all the same, a Slice stays."""
    return lower(host, [random(3, 5)], name, 1, (1, 2), (2.0, -3.0), residue=True)


def test_values_that_subgraphs_read_are_seen_and_rewired() -> None:
    branch = helper.make_graph(
        [helper.make_node("Neg", ["a"], ["n"])],
        "then",
        [],
        [helper.make_tensor_value_info("n", TensorProto.FLOAT, None)],
    )
    other = helper.make_graph(
        [helper.make_node("Identity", ["a"], ["m"])],
        "else",
        [],
        [helper.make_tensor_value_info("m", TensorProto.FLOAT, None)],
    )
    graph = helper.make_graph(
        [
            helper.make_node("Relu", ["x"], ["a"]),
            helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
            helper.make_node("Cast", ["s"], ["c"], to=TensorProto.BOOL),
            helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=other),
        ],
        "main",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 4])],
    )
    host = OnnxHost.from_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    assert host.graph.nodes[-1].inputs == ("c", "y/then/n", "y/else/m")
    assert [node.inputs for node in host.graph.nodes[-3:-1]] == [("a",), ("a",)]
    clamped = host.build(put_do(host.graph, "a", 1, [2], [0.5]))
    np.testing.assert_array_equal(clamped.run([np.ones((3, 4), np.float32)])[0][:, 2], np.full(3, -0.5, np.float32))


def test_attention_is_read_with_its_heads() -> None:
    proto = model(
        "z = Attention<is_causal=1, scale=0.3>(q, k, v)\ny = Relu(z)",
        {"q": ("N", 4, 5, 6), "k": ("N", 2, 7, 6), "v": ("N", 2, 7, 3)}, "y", opset=23,
    )  # fmt: skip
    node = OnnxHost.from_model(proto).graph.nodes[0]
    assert (node.op, node.output.shape, dict(node.attrs)) == (
        "attention", ("N", 4, 5, 3), {"scale": pytest.approx(0.3), "causal": True},
    )  # fmt: skip
    host = OnnxHost.from_model(proto)
    feeds = [random(2, 4, 5, 6), random(2, 2, 7, 6), random(2, 2, 7, 3)]
    try:
        got = host.run(feeds, taps=["z"])[1]
    except HostError:
        pytest.skip("this onnxruntime has no Attention")
    np.testing.assert_allclose(evaluate_op("attention", node.attrs, *feeds), got, rtol=1e-5, atol=1e-5)


def test_nodes_out_of_order() -> None:
    proto = model("a = Relu(x)\ny = Neg(a)", {"x": (2, 3)}, "y")
    nodes = list(proto.graph.node)
    del proto.graph.node[:]
    proto.graph.node.extend(reversed(nodes))
    with pytest.raises(TraceError, match="the model cannot be read"):
        OnnxHost.from_model(proto)


def test_a_value_inside_a_branch_is_called_by_its_place() -> None:
    """Both branches have a value y; neither has an axis of units."""
    body = parser.parse_graph("body () => (float[N] y) { y = Relu(x) }")
    node = helper.make_node("If", ["flag"], ["z"], name="choice", then_branch=body, else_branch=body)
    inputs = [
        helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N"]),
    ]
    output = helper.make_tensor_value_info("z", TensorProto.FLOAT, ["N"])
    graph = helper.make_graph([node], "branch", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    program = trace(model)
    assert program.sites() == []
    with pytest.raises(CmrcError) as error:
        Plan(program).do("y", units=[0], constant=0.0)
    assert "no site is called 'y'" in str(error.value)
    assert "near matches: choice/then/y, choice/else/y" in str(error.value)
