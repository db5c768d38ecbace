"""What is known of the shapes and dtypes of an ONNX model's values before it runs.

onnx's own shape inference does the work, on a clone without its large weights. Sizes that a weight implies (a MatMul
with a [64, 10] matrix reads 64 units) are put in where inference could not know them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import onnx
import onnx_ir

from cmrc.ir.dtypes import numpy_dtype
from cmrc.ir.graph import Dim, Shape

SMALL = 1024  # bytes: larger constants say nothing about shapes
Known = dict[str, tuple[Shape | None, str]]


def dtype_name(dtype: onnx_ir.DataType | None) -> str:
    """The name that numpy and ml_dtypes have for it."""
    if dtype is None or dtype == onnx_ir.DataType.UNDEFINED:
        return "unknown"
    return dtype.numpy().name


def data_type(dtype: str) -> onnx_ir.DataType:
    """What ONNX calls a dtype of the IR."""
    return onnx_ir.DataType.from_numpy(numpy_dtype(dtype))


def infer(model: onnx_ir.Model, unknown: Iterator[str]) -> Known:
    """Shape (`None` where even the rank is unknown) and dtype by value; unknown sizes get a symbol of their own."""
    declared = [v for v in (*model.graph.inputs, *(v for node in model.graph for v in node.outputs)) if v.name]
    if all(_is_declared(value) for value in declared):  # as torch's exporter does: nothing is left to infer
        return {v.name or "": (_dims(v.shape, unknown), dtype_name(v.dtype)) for v in declared}
    clone = _light(model, unknown)
    inferred = _infer(clone)
    implied = list(_implied_sizes(model, inferred))
    if implied:
        values = {v.name: v for v in (*clone.graph.inputs, *(v for node in clone.graph for v in node.outputs))}
        for name, axis, size in implied:
            if name in values:
                dims = list(inferred[name].shape or ())
                dims[axis] = size
                inferred[name].shape = onnx_ir.Shape(dims)
                values[name].shape, values[name].type = onnx_ir.Shape(dims), inferred[name].type
        inferred = {**inferred, **_infer(clone)}
    return {name: (_dims(value.shape, unknown), dtype_name(value.dtype)) for name, value in inferred.items()}


def _is_declared(value: onnx_ir.Value) -> bool:
    """Rank and dtype suffice: sizes that are left open are found where the rows work out what their ops give."""
    return value.shape is not None and value.dtype not in (None, onnx_ir.DataType.UNDEFINED)


def _dims(shape: onnx_ir.Shape | None, unknown: Iterator[str]) -> Shape | None:
    if shape is None:
        return None
    return tuple(next(unknown) if (dim := _dim(d)) is None else dim for d in shape)


def _dim(dim: int | onnx_ir.SymbolicDim) -> Dim | None:
    """Some exporters write -1 for a size that they do not know."""
    if isinstance(dim, int):
        return dim if dim >= 0 else None
    return dim.value


def _light(model: onnx_ir.Model, unknown: Iterator[str]) -> onnx_ir.Model:
    """A clone whose large constants are inputs without data, and whose inputs have a symbol for every unknown size."""
    clone = model.clone()
    graph = clone.graph
    for value in graph.inputs:
        if value.shape is not None:
            value.shape = onnx_ir.Shape(_dims(value.shape, unknown) or ())
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or tensor.nbytes > SMALL:
            if tensor is not None:
                value.type, value.shape = onnx_ir.TensorType(tensor.dtype), onnx_ir.Shape(tensor.shape.numpy())
                value.const_value = None
            del graph.initializers[name]
            if not value.is_graph_input():
                graph.inputs.append(value)
    for node in list(graph):
        tensor = onnx_ir.convenience.get_const_tensor(node.outputs[0]) if node.op_type == "Constant" else None
        if tensor is not None and tensor.nbytes > SMALL and not node.outputs[0].is_graph_output():
            old = node.outputs[0]
            shape = onnx_ir.Shape(tensor.shape.numpy())
            value = onnx_ir.Value(name=old.name, type=onnx_ir.TensorType(tensor.dtype), shape=shape)
            old.replace_all_uses_with(value)
            graph.remove(node, safe=True)
            graph.inputs.append(value)
    return clone


def _infer(clone: onnx_ir.Model) -> dict[str, onnx_ir.Value]:
    proto = onnx_ir.to_proto(clone)
    with contextlib.suppress(onnx.shape_inference.InferenceError):  # the shapes that the model declares remain
        proto = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    graph = proto.graph
    described = (*graph.input, *graph.value_info, *graph.output)
    inferred = {info.name: onnx_ir.serde.deserialize_value_info_proto(info, None) for info in described}
    for value in clone.graph.initializers.values():
        inferred.setdefault(value.name or "", value)
    for node in clone.graph:
        for value in node.outputs:
            inferred.setdefault(value.name or "", value)
    return inferred


def _implied_sizes(model: onnx_ir.Model, inferred: dict[str, onnx_ir.Value]) -> Iterator[tuple[str, int, int]]:
    for node in model.graph:
        if len(node.inputs) < 2 or node.inputs[0] is None or node.inputs[1] is None or node.domain:
            continue
        value, tensor = inferred.get(node.inputs[0].name or ""), node.inputs[1].const_value
        shape = None if value is None else value.shape
        if tensor is None or shape is None or value is None or value.name is None:
            continue
        weight = tensor.shape.numpy()
        if node.op_type == "MatMul" and len(weight) == 2:
            axis, size = len(shape) - 1, weight[0]
        elif node.op_type == "Gemm" and not ("transA" in node.attributes and node.attributes["transA"].as_int()):
            turned = "transB" in node.attributes and node.attributes["transB"].as_int()
            axis, size = 1, weight[1 if turned else 0]
        elif node.op_type == "Conv":
            groups = node.attributes["group"].as_int() if "group" in node.attributes else 1
            axis, size = 1, weight[1] * groups
        else:
            continue
        if 0 <= axis < len(shape) and not isinstance(shape[axis], int):
            yield value.name, axis, size


def symbols() -> Iterator[str]:
    """?0, ?1, ... : sizes that nothing is known of, each different from all others."""
    return (f"?{i}" for i in itertools.count())
