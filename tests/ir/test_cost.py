"""Multiply-accumulates, counted by hand, on both hosts and in every form that attention has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, parser
from torch import nn
from torch.nn import functional

import cmrc
from cmrc.ir.cost import cost
from cmrc.ir.graph import ArrayLiteral, Graph, Node, Value

BATCH, HEADS, SERVED, QUERIES, KEYS, SIZE, WIDTH = 2, 6, 3, 5, 7, 8, 4  # keys are of SIZE, values of WIDTH
BY_HAND = BATCH * HEADS * QUERIES * KEYS * SIZE + BATCH * HEADS * QUERIES * KEYS * WIDTH


class Attention(nn.Module):
    """Six heads of queries in two groups, over keys and values of three heads of other sizes."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def example() -> tuple[torch.Tensor, ...]:
    shapes = ((HEADS, QUERIES, SIZE), (SERVED, KEYS, SIZE), (SERVED, KEYS, WIDTH))
    return tuple(torch.randn(BATCH, *shape) for shape in shapes)


def model(nodes: str, inputs: dict[str, tuple[int, ...]], opset: int) -> onnx.ModelProto:
    graph = helper.make_graph(
        [parser.parse_node(line) for line in nodes.strip().splitlines()],
        "main",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def test_attention_in_torch_and_as_it_is_exported(tmp_path: Path) -> None:
    program = cmrc.trace(Attention().eval(), example())
    assert [node.op for node in program.graph.nodes] == ["attention"]
    assert program.cost().macs == BY_HAND
    path = tmp_path / "attention.onnx"
    cmrc.lower(program, cmrc.Plan(program)).save(path)
    exported = cmrc.trace(path)
    assert "attention" not in {node.op for node in exported.graph.nodes}  # products of matrices and a softmax
    assert exported.cost().macs == BY_HAND


@pytest.mark.parametrize(
    ("nodes", "apart", "opset"),
    [
        ("y = Attention(q, k, v)", True, 23),
        (f"y = Attention <q_num_heads = {HEADS}, kv_num_heads = {SERVED}> (q, k, v)", False, 23),
        (f"y = com.microsoft.MultiHeadAttention <num_heads = {HEADS}> (q, k, v)", False, 17),
    ],
)
def test_attention_in_onnx(nodes: str, apart: bool, opset: int) -> None:
    served = HEADS if "num_heads" in nodes and "kv" not in nodes else SERVED
    shapes = {"q": (HEADS, QUERIES, SIZE), "k": (served, KEYS, SIZE), "v": (served, KEYS, WIDTH)}
    together = {name: (BATCH, tokens, heads * size) for name, (heads, tokens, size) in shapes.items()}
    inputs = {name: (BATCH, *shape) for name, shape in shapes.items()} if apart else together
    program = cmrc.trace(model(nodes, inputs, opset))
    assert "attention" in {node.op for node in program.graph.nodes}
    assert program.cost().macs == BY_HAND


def test_packed_attention_counts_its_projections_too() -> None:
    width, tokens = HEADS * SIZE, 5
    proto = model(f"y = com.microsoft.Attention <num_heads = {HEADS}> (x, w)", {"x": (BATCH, tokens, width)}, 17)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((width, 3 * width), np.float32), "w"))
    assert cmrc.trace(proto).cost().macs == BATCH * tokens * width * (3 * width) + 2 * BATCH * tokens * tokens * width


def test_sizes_of_run_time_count_as_given() -> None:
    tokens = torch.export.Dim("tokens")
    x = torch.randn(1, 2, 6, 4)
    program = cmrc.trace(Attention().eval(), (x, x, x), dynamic_shapes=({2: tokens},) * 3)
    (name,) = {size for size in program.graph.inputs[0].shape if isinstance(size, str)}
    assert program.cost().macs == 2 * (2 * 1 * 1 * 4)
    assert program.cost({name: 10}).macs == 2 * (2 * 10 * 10 * 4)


@pytest.mark.parametrize("first", [True, False])
def test_a_product_with_a_stored_matrix_on_either_side(first: bool) -> None:
    """[3, 4] · [4, 5], one of them stored."""
    shapes = (3, 4), (4, 5)
    stored = ArrayLiteral(np.ones(shapes[not first]))
    operands = (stored, "x") if first else ("x", stored)
    node = Node("matmul", operands, (Value("y", (3, 5)),))
    assert cost(Graph((Value("x", shapes[first]),), (node,), ("y",))).macs == 3 * 4 * 5


def test_a_transposed_convolution_meets_every_input_with_its_kernel() -> None:
    """[1, 3, 5, 5] by two kernels of 2 by 4, with stride 3: more positions come out than go in."""
    program = cmrc.trace(nn.ConvTranspose2d(3, 2, (2, 4), stride=3).eval(), (torch.zeros(1, 3, 5, 5),))
    assert program.graph.nodes[0].output.shape == (1, 2, 14, 16)
    assert program.cost().macs == (3 * 5 * 5) * (2 * 2 * 4)


def test_a_parameter_that_several_nodes_read_counts_once() -> None:
    shared, x = nn.Linear(4, 4), torch.zeros(2, 4)
    program = cmrc.trace(nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(4, 3)).eval(), (x,))
    assert program.cost().parameters == 4 * 4 + 4 + 4 * 3 + 3
    assert program.cost().bytes == 4 * program.cost().parameters


def test_what_no_input_reaches_is_computed_once() -> None:
    """A plane of a fixed size, and what is computed from it, is no work of a run; one of a dynamic size is."""
    kernel = ArrayLiteral(np.ones((5, 1, 3, 3)))
    attrs = {"axis": 1, "groups": 1, "stride": (1, 1), "pad": ((1, 1), (1, 1)), "dilation": (1, 1)}
    work = {}
    for size in (4, "H"):
        nodes = (
            Node("plane", ("x",), (Value("ones", (1, 1, size, 6)),), {"axis": 1}),
            Node("conv", ("ones", kernel, None), (Value("border", (1, 5, size, 6)),), attrs),
            Node("pointwise", ("x", "border"), (Value("y", ("N", 5, size, 6)),), {"fn": "add"}),
        )
        work[size] = cost(Graph((Value("x", ("N", 5, size, 6)),), nodes, ("y",)), {"H": 4}).macs
    assert work == {4: 0, "H": 5 * 4 * 6 * 9}


def test_an_expression_of_the_host_costs_what_it_is_made_of(tmp_path: Path) -> None:
    """A weight that is cast by a node of the model is stored as it was; cut, it is stored as what it became."""
    weight = numpy_helper.from_array(np.ones((8, 6), np.float16), "w")
    nodes = [
        helper.make_node("Cast", ["w"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["x", "wide"], ["h"], "first"),
        helper.make_node("Relu", ["h"], ["a"], "act"),
        helper.make_node("MatMul", ["a", "v"], ["y"], "second"),
        helper.make_node("MatMul", ["x", "wide"], ["z"], "other"),
    ]
    second = numpy_helper.from_array(np.ones((6, 2), np.float32), "v")
    values = {"x": ["N", 8], "y": ["N", 2], "z": ["N", 6]}
    x, y, z = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in values.items())
    graph = helper.make_graph(nodes, "main", [x], [y, z], [weight, second])
    program = cmrc.trace(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    assert (program.cost().parameters, program.cost().bytes) == (48 + 12, 96 + 48)
    lowered = cmrc.lower(program, cmrc.Plan(program).do("a", units=[0], constant=0.0), growth="allow")
    lowered.save(tmp_path / "small.onnx")
    saved = {t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / "small.onnx").graph.initializer}
    after = lowered.report.after
    assert after.parameters == sum(array.size for array in saved.values()) == 48 + 40 + 10
    assert after.bytes == sum(array.nbytes for array in saved.values()) == 96 + 160 + 40
    assert str(lowered.report).splitlines()[0] == "this costs more than the model: 38 more parameters, 152 more bytes"
