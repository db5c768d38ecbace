"""Do's and selects as nodes of the model: they run literally under onnxruntime."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir
import pytest
from hosts.onnx.lowering import (
    ints,
    mlp,
    model,
    put_do,
    random,
)
from onnx import TensorProto

from cmrc.errors import HostError
from cmrc.hosts.onnx.host import OnnxHost
from cmrc.ir.graph import Graph, Node, Value
from cmrc.ir.tensors import evaluate_op
from cmrc.ir.verify import verify_graph


def test_a_constant_do_runs_literally() -> None:
    host = mlp()
    x = random(4, 5)
    edited = put_do(host.graph, "a", 1, (6, 2), (0.5, -1.0))
    clamped = host.build(edited)
    before, after = host.run([x], taps=["a"])[1], clamped.run([x], taps=["a.do"])[1]
    before[:, [6, 2]] = 0.5, -1.0
    np.testing.assert_array_equal(after, before)
    where = next(node for node in clamped.model.graph if node.op_type == "Where")
    assert (where.name, where.metadata_props["cmrc.inserted"]) == ("cmrc.a.do", "do")


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_an_affine_do_runs_literally_on_every_axis(axis: int) -> None:
    host = OnnxHost.from_model(model("a = Relu(x)\ny = Neg(a)", {"x": (4, 5, 6, 7)}, "y"))
    weight, constants = random(2, 2), random(2)
    edited = put_do(host.graph, "a", axis, (3, 1), constants, parents=(0, 2), weight=weight)
    x = random(4, 5, 6, 7)
    got = host.build(edited).run([x], taps=["a.do"])[1]
    expected = evaluate_op("do", edited.nodes[1].attrs, np.maximum(x, 0), edited.nodes[1].inputs[1].array, weight)  # type: ignore[union-attr]
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def test_an_affine_do_of_blocks_runs_literally() -> None:
    """A unit that became a block of three positions: each row of the weight serves three units."""
    host = OnnxHost.from_model(model("a = Relu(x)\ny = Neg(a)", {"x": ("N", 12, 2)}, "y"))
    weight, x = random(1, 2), random(2, 12, 2)
    edited = put_do(host.graph, "a", 1, (3, 4, 5), (0.1, 0.2, 0.3), parents=(0, 1, 2, 9, 10, 11), weight=weight)
    got = host.build(edited).run([x], taps=["a.do"])[1]
    expected = np.maximum(x, 0)
    expected[:, 3:6] = (
        weight[0, 0] * expected[:, :3] + weight[0, 1] * expected[:, 9:] + np.asarray([0.1, 0.2, 0.3])[None, :, None]
    )
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def test_a_select_of_every_run_runs_literally() -> None:
    """Samples and heads merged into one axis: heads 0 and 2 of every sample."""
    host = OnnxHost.from_model(model("r = Reshape(x, to)\ny = Neg(r)", {"x": ("N", 3, 4)}, "y", to=ints(-1, 4)))
    reshape, negate = host.graph.nodes
    assert reshape.output.shape == ("3*N", 4)
    part = Value("part", ("2*N", 4))
    select = Node("select", ("r",), (part,), {"axis": 0, "keep": (0, 2), "period": 3})
    smaller = replace(negate, inputs=("part",), outputs=(replace(negate.output, shape=part.shape),))
    edited = Graph(host.graph.inputs, (reshape, select, smaller), ("y",))
    verify_graph(edited)
    x = random(5, 3, 4)
    np.testing.assert_array_equal(host.build(edited).run([x])[0], -x[:, [0, 2]].reshape(10, 4))


def test_a_do_on_an_input_and_on_an_output() -> None:
    host = mlp()
    x = random(4, 5)
    got = host.build(put_do(host.graph, "x", 1, [2], [9.0])).run([x])[0]
    there = x.copy()
    there[:, 2] = 9.0
    np.testing.assert_allclose(got, host.run([there])[0], rtol=1e-6)
    clamped = host.build(put_do(host.graph, "y", 1, [1], [7.0]))
    assert [value.name for value in clamped.model.graph.outputs] == ["y"]
    assert (clamped.run([x])[0][:, 1] == 7.0).all()


def test_half_precision_do_runs() -> None:
    proto = model("a = Relu(x)\ny = Neg(a)", {"x": ("N", 4)}, "y")
    for half in (TensorProto.FLOAT16, TensorProto.BFLOAT16):
        for value in (*proto.graph.input, *proto.graph.output):
            value.type.tensor_type.elem_type = half
        host = OnnxHost.from_model(proto)
        x = np.ones((2, 4), dtype=onnx_ir.DataType(half).numpy())
        try:
            got = host.build(put_do(host.graph, "a", 1, [1], [3.0])).run([x])[0]
        except HostError as error:
            assert "onnxruntime refuses the model" in str(error)  # noqa: PT017
            continue
        assert got.dtype == x.dtype
        assert got.astype(np.float32).tolist() == [[-1, -3, -1, -1]] * 2


def test_a_do_by_a_value_known_at_run_time_runs_literally() -> None:
    """Its units are named in another order than they stand in: the value has them in that order."""
    nodes = "a = Relu(x)\nv = Gather<axis=1>(x, some)\ny = Neg(a)"
    host = OnnxHost.from_model(model(nodes, {"x": ("N", 4)}, "y", some=ints(1, 3)))
    relu, gather, negate = host.graph.nodes
    do = Node("do", ("a", "v"), (Value("a.do", relu.output.shape),), {"axis": 1, "units": (2, 0)})
    edited = Graph(host.graph.inputs, (relu, gather, do, replace(negate, inputs=("a.do",))), ("y",))
    verify_graph(edited)
    x = random(5, 4)
    expected = np.maximum(x, 0)
    expected[:, [2, 0]] = x[:, [1, 3]]
    np.testing.assert_array_equal(host.build(edited).run([x])[0], -expected)
