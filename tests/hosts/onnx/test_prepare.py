"""What is done to a model before it is read: an old opset, functions of its own, inputs with a fixed value, branches."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hosts.onnx.lowering import nodes_of, random
from onnx import TensorProto, helper, numpy_helper, parser
from tolerances import EXACT_F32

import cmrc

VECTOR = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 6])
RESULT = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3])
WEIGHTS = {"w1": random(6, 8), "w2": random(8, 3), "v1": random(6, 8, seed=5)}


def initializers(*names: str) -> list[onnx.TensorProto]:
    return [numpy_helper.from_array(WEIGHTS[name], name) for name in names]


def branch(name: str, weight: str, result: str) -> onnx.GraphProto:
    """MLPs that have a value of the same name, a weight of their own, and read x from outside."""
    nodes = [
        parser.parse_node(line) for line in (f"h = MatMul(x, {weight})", "a = Relu(h)", f"{result} = MatMul(a, w2)")
    ]
    return helper.make_graph(
        nodes, name, [], [helper.make_tensor_value_info(result, TensorProto.FLOAT, None)], initializers(weight)
    )


def chosen(condition: str = "c = Equal(rate, sixteen)") -> onnx.ModelProto:
    decide = helper.make_node(
        "If", ["c"], ["z"], then_branch=branch("then", "w1", "t"), else_branch=branch("else", "v1", "e")
    )
    graph = helper.make_graph(
        [parser.parse_node(condition), decide, parser.parse_node("y = Identity(z)")],
        "main",
        [VECTOR, helper.make_tensor_value_info("rate", TensorProto.INT64, [])],
        [RESULT],
        [*initializers("w2"), numpy_helper.from_array(np.asarray(16), "sixteen")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize(("rate", "weight"), [(16, "w1"), (8, "v1")])
def test_a_branch_is_taken_where_its_input_is_assumed(rate: int, weight: str) -> None:
    program = cmrc.trace(chosen(), assume={"rate": rate})
    assert "If" not in nodes_of(program.host)  # type: ignore[arg-type]
    x = random(4, 6, seed=2)
    want = np.maximum(x @ WEIGHTS[weight], 0) @ WEIGHTS["w2"]
    np.testing.assert_allclose(program.host.run([x])[0], want, rtol=1e-5, atol=1e-5)
    lowered = cmrc.lower(program, cmrc.Plan(program).do("a", units=[0, 3], constant=[0.4, 0.9]))
    assert lowered.check((x,)).error <= EXACT_F32
    assert lowered.host.graph.values()["a"].shape == ("N", 6)


def test_the_original_is_not_changed() -> None:
    model = chosen()
    before = model.SerializeToString()
    cmrc.trace(model, assume={"rate": 16})
    assert model.SerializeToString() == before


def test_a_condition_that_varies_stays() -> None:
    program = cmrc.trace(chosen())
    assert "If" in nodes_of(program.host)  # type: ignore[arg-type]
    with pytest.raises(cmrc.CmrcError, match="near matches: z/then/a, z/else/a"):
        program.find("a")


def test_one_number_fills_an_input_of_several_axes() -> None:
    """A state that begins at 0 is so in all of its places; a size that is not known is 1."""
    x, state = (
        helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", ["N", 3]), ("s", [2, "N", 3]))
    )
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([parser.parse_node("y = Add(x, s)")], "main", [x, state], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    program = cmrc.trace(model, assume={"s": 0.5})
    (result,) = program.host.run([np.ones((1, 3), np.float32)])
    assert np.array_equal(result, np.full((2, 1, 3), 1.5, np.float32))


@pytest.mark.parametrize(
    ("assume", "problem"),
    [
        ({"speed": 3}, "the model has no input 'speed' whose value could be assumed"),
        ({"rate": "fast"}, "the input 'rate' is int64, and 'fast' is not"),
        ({"rate": [1, 2]}, "the input 'rate' has 0 axes"),
    ],
)
def test_what_cannot_be_assumed_is_said(assume: dict[str, Any], problem: str) -> None:
    with pytest.raises(cmrc.CmrcError, match=problem):
        cmrc.trace(chosen(), assume=assume)


def test_functions_of_the_model_are_put_in_place() -> None:
    function = helper.make_function(
        "own", "Block", ["x", "w"], ["a"], [parser.parse_node("h = MatMul(x, w)"), parser.parse_node("a = Relu(h)")],
        [helper.make_opsetid("", 17)],
    )  # fmt: skip
    nodes = [helper.make_node("Block", ["x", "w1"], ["a"], domain="own"), parser.parse_node("y = MatMul(a, w2)")]
    graph = helper.make_graph(nodes, "main", [VECTOR], [RESULT], initializers("w1", "w2"))
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    program = cmrc.trace(helper.make_model(graph, functions=[function], opset_imports=opsets, ir_version=8))
    lowered = cmrc.lower(program, cmrc.Plan(program).do("a", units=[0, 3], constant=[0.4, 0.9]))
    assert lowered.check((random(4, 6),)).error <= EXACT_F32
    assert "Block" not in nodes_of(lowered.host)  # type: ignore[arg-type]
    assert lowered.host.graph.values()["a"].shape == ("N", 6)


def test_an_old_opset_is_converted_and_said() -> None:
    nodes = [parser.parse_node(line) for line in ("h = MatMul(x, w1)", "a = Relu(h)", "y = MatMul(a, w2)")]
    inputs = [VECTOR, *(helper.make_tensor_value_info(n, TensorProto.FLOAT, WEIGHTS[n].shape) for n in ("w1", "w2"))]
    graph = helper.make_graph(nodes, "main", inputs, [RESULT], initializers("w1", "w2"))
    old = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 7)], ir_version=3)
    with pytest.warns(UserWarning, match="the model has opset 7: onnx.version_converter converted it to 17"):
        program = cmrc.trace(old)
    lowered = cmrc.lower(program, cmrc.Plan(program).do("a", units=[0, 3], constant=[0.4, 0.9]))
    assert lowered.check((random(4, 6),)).error <= EXACT_F32
