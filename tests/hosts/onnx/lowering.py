"""What the tests of the ONNX host share: a model from lines of text, a do put into its graph, lowered against clamped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
from onnx import TensorProto, helper, numpy_helper, parser

from cmrc.hosts.onnx.host import OnnxHost
from cmrc.ir.graph import Array, Graph, Marks, Node, Value, literal
from cmrc.ir.verify import verify_graph
from cmrc.passes import pipeline as passes

TOLERANCE = 1e-5  # of the output's scale: float32 sums in another order
MOVED = 1000 * TOLERANCE  # what a do must change for a comparison to mean anything
Shape = Sequence[int | str | None]


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Array:
    return (np.random.default_rng([seed, *shape]).normal(size=shape) * scale).astype(np.float32)


def model(
    nodes: str, inputs: dict[str, Shape], outputs: str, *, opset: int = 17, ir_version: int = 8, **arrays: Any
) -> onnx.ModelProto:
    """A model from lines of ONNX text; `arrays` are its initializers, the shapes of its outputs are inferred."""
    lines = [line.strip() for line in nodes.strip().splitlines()]
    graph = helper.make_graph(
        [parser.parse_node(line) for line in lines if line],
        "main",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs.split()],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)
    inferred = onnx.shape_inference.infer_shapes(proto).graph.output
    del proto.graph.output[:]
    proto.graph.output.extend(inferred)
    return proto


def put_do(
    graph: Graph, name: str, axis: int, units: Sequence[int], constants: Any, parents: Any = None, weight: Any = None
) -> Graph:
    """The graph with units of a value replaced for everyone who reads it."""
    value = graph.values()[name]
    new = Value(f"{name}.do", value.shape, value.dtype)
    slab = np.asarray(constants, dtype=np.float64)
    if slab.ndim < len(value.shape):
        slab = slab.reshape([-1 if i == axis else 1 for i in range(len(value.shape))])
    inputs: tuple[Any, ...] = (name, literal(slab))
    attrs: dict[str, Any] = {"axis": axis, "units": tuple(units)}
    if weight is not None:
        inputs, attrs["parents"] = (*inputs, literal(weight)), tuple(parents)
    do = Node("do", inputs, (new,), attrs, marks=Marks(sources=(0,)))
    nodes = [do] if name in {v.name for v in graph.inputs} else []
    for node in graph.nodes:
        nodes.append(replace(node, inputs=tuple(new.name if o == name else o for o in node.inputs)))
        if name in {v.name for v in node.outputs}:
            nodes.append(do)
    edited = Graph(graph.inputs, tuple(nodes), tuple(new.name if o == name else o for o in graph.outputs))
    verify_graph(edited)
    return edited


def compare(
    host: OnnxHost, feeds: Sequence[Array], edited: Graph, *, residue: bool = False, moved: float = MOVED
) -> OnnxHost:
    """Lowered and clamped agree under onnxruntime, and the do matters."""
    clamped = host.build(edited)
    result = passes.run(edited)
    lowered = host.build(result.graph)
    full, expected, got = host.run(feeds), clamped.run(feeds), lowered.run(feeds)
    for a, b, c in zip(full, expected, got, strict=True):
        assert b.shape == c.shape == a.shape
        assert b.dtype == c.dtype == a.dtype
        scale = max(float(np.abs(b).max()), 1e-6)
        assert float(np.abs(b - c).max()) <= TOLERANCE * scale
        assert float(np.abs(a - b).max()) >= moved * scale
    assert bool(result.residue) == residue, [(r.node.name, r.stopped_at, r.reason) for r in result.residue]
    onnx.checker.check_model(onnx_ir.to_proto(lowered.model))
    assert lowered.graph.outputs == host.graph.outputs
    return lowered


def lower(
    host: OnnxHost, feeds: Sequence[Array], name: str, axis: int, units: Sequence[int], constants: Any, **more: Any
) -> OnnxHost:
    options = {key: more.pop(key) for key in ("residue", "moved") if key in more}
    return compare(host, feeds, put_do(host.graph, name, axis, units, constants, **more), **options)


def nodes_of(host: OnnxHost) -> list[str]:
    return [node.op_type for node in host.model.graph]


def sizes_of(host: OnnxHost) -> dict[str, list[int]]:
    return {name: list(value.shape.numpy()) for name, value in host.model.graph.initializers.items()}  # type: ignore[union-attr]


def ints(*values: int) -> Array:
    return np.asarray(values, dtype=np.int64)


def mlp(**options: Any) -> OnnxHost:
    return OnnxHost.from_model(
        model(
            "h = Gemm<transB=1>(x, fc1, b1)\na = Relu(h)\ny = Gemm<transB=1>(a, fc2, b2)",
            {"x": ("N", 5)}, "y", fc1=random(8, 5), b1=random(8), fc2=random(3, 8), b2=random(3), **options,
        )
    )  # fmt: skip


def external(tmp_path: Path) -> Path:
    proto = model(
        "h = MatMul(x, w1)\na = Relu(h)\ny = MatMul(a, w2)", {"x": ("N", 50)}, "y", w1=random(50, 80), w2=random(80, 30)
    )
    path = tmp_path / "big.onnx"
    onnx.save(proto, path, save_as_external_data=True, location="big.onnx.data", size_threshold=0)
    return path
