"""A replacement that stays in an ONNX model, literally, and the turns around it if it is one in another basis.

Constants: `Where(mask, constants, x)`. Affine: the parents are gathered, multiplied, and the rebuilt units put in place:
`Gather(Concat(x, W · parents + β), order)`. A turn is a product with one matrix.
"""

from __future__ import annotations

import numpy as np
import onnx_ir

from cmrc.hosts import clamp
from cmrc.hosts.onnx.patch import ModelPatch
from cmrc.ir.graph import ArrayLiteral, Node, Tensor, Value, attributes, numpy_dtype
from cmrc.ir.ops.affine import DoAttrs
from cmrc.ir.spec import AxisAttrs
from cmrc.ir.tensors import constant


def source_of(patch: ModelPatch, node: Node) -> onnx_ir.Value:
    value = patch.value(node.inputs[0], node.output.dtype)
    assert value is not None
    return value


def integers(patch: ModelPatch, *values: int) -> onnx_ir.Value:
    return patch.array(np.asarray(values, dtype=np.int64))


def insert_do(patch: ModelPatch, node: Node) -> None:
    x = source_of(patch, node)
    if node.output.dtype != "bfloat16":
        _insert_literally(patch, node, x, node.output, node.output.dtype)
        return
    # onnxruntime computes nothing in bfloat16, and ONNX has no Where of it before opset 16.
    wide = cast(patch, x, onnx_ir.DataType.FLOAT, f"{node.name}.wide")
    chosen = _insert_literally(patch, node, wide, f"{node.name}.chosen", "float32")
    cast(patch, chosen, onnx_ir.DataType.BFLOAT16, node.output)


def cast(patch: ModelPatch, x: onnx_ir.Value, to: onnx_ir.DataType, output: Value | str) -> onnx_ir.Value:
    return patch.insert("Cast", [x], output, [onnx_ir.AttrInt64("to", to)])


def _insert_literally(
    patch: ModelPatch, node: Node, x: onnx_ir.Value, output: Value | str, dtype: str
) -> onnx_ir.Value:
    """The replaced units of x, computed in `dtype`."""
    if isinstance(node.inputs[1], str):
        return _insert_runtime(patch, node, x, output, dtype)
    if len(node.inputs) > 2:
        return _insert_affine(patch, node, x, output, dtype)
    rounded = clamp.constants(node).astype(numpy_dtype(node.output.dtype))
    constants = patch.initializer(ArrayLiteral(rounded.astype(np.float64)), dtype=dtype)
    mask = clamp.mask(node)
    if dtype == "bool":  # onnxruntime has no Where of truth values
        others = patch.insert("And", [x, patch.array(~mask)], f"{node.name}.others")
        return patch.insert("Or", [others, constants], output)
    return patch.insert("Where", [patch.array(mask), constants, x], output)


def _insert_runtime(patch: ModelPatch, node: Node, x: onnx_ir.Value, output: Value | str, dtype: str) -> onnx_ir.Value:
    """Where(mask, value, x), the value's positions spread over the axis."""
    assert isinstance(node.inputs[1], str)
    value = patch.values[node.inputs[1]]
    if dtype != node.output.dtype:
        value = cast(patch, value, onnx_ir.DataType.FLOAT, f"{node.name}.value")
    along = [onnx_ir.AttrInt64("axis", attributes(node, AxisAttrs)["axis"])]
    spread = patch.insert("Gather", [value, patch.array(clamp.places(node))], f"{node.name}.spread", along)
    if dtype == "bool":  # onnxruntime has no Where of truth values
        others = patch.insert("And", [x, patch.array(~clamp.mask(node))], f"{node.name}.others")
        chosen = patch.insert("And", [spread, patch.array(clamp.mask(node))], f"{node.name}.chosen")
        return patch.insert("Or", [others, chosen], output)
    return patch.insert("Where", [patch.array(clamp.mask(node)), spread, x], output)


def _insert_affine(patch: ModelPatch, node: Node, x: onnx_ir.Value, output: Value | str, dtype: str) -> onnx_ir.Value:
    """Gather(Concat(x, parents · Wᵀ + β), order), the unit axis last in between.

    The gather of the parents stands behind the transposition: onnxruntime fuses a Transpose with the MatMul behind it, and what
    comes of that refuses a batch of no samples, as does a MatMul with the weight first.
    """
    slab, weight = clamp.slab(node), node.inputs[2]
    axis, rank, name = attributes(node, AxisAttrs)["axis"], slab.ndim, node.name
    units = list(attributes(node, DoAttrs)["units"])
    assert isinstance(weight, Tensor)
    rows, columns = weight.shape
    repeat = len(units) // rows  # each row of the weight serves a block of units
    last = [i for i in range(rank) if i != axis] + [axis]
    turned = x
    if axis != rank - 1:
        turned = patch.insert("Transpose", [x], f"{name}.turned", [onnx_ir.AttrInt64s("perm", last)])
    blocks = np.asarray(attributes(node, DoAttrs)["parents"]).reshape(columns, repeat).T.reshape(-1)
    parents = patch.insert(
        "Gather", [turned, integers(patch, *blocks)], f"{name}.parents", [onnx_ir.AttrInt64("axis", rank - 1)]
    )
    if repeat > 1:
        sizes = integers(patch, *(0,) * (rank - 1), repeat, columns)
        parents = patch.insert("Reshape", [parents, sizes], f"{name}.blocks")
    matrix = patch.array(np.ascontiguousarray(constant(weight).T.astype(numpy_dtype(dtype))))
    rebuilt = patch.insert("MatMul", [parents, matrix], f"{name}.mixed")
    if repeat > 1:
        rebuilt = patch.insert("Reshape", [rebuilt, integers(patch, *(0,) * (rank - 1), len(units))], f"{name}.units")
    order = np.arange(len(units)).reshape(rows, repeat).T.reshape(-1)  # as the product has them
    shift = np.transpose(slab, last)
    shift = shift if shift.shape[-1] == 1 else shift[..., order]
    rebuilt = patch.insert("Add", [rebuilt, patch.initializer(ArrayLiteral(shift), dtype=dtype)], f"{name}.rebuilt")
    if axis != rank - 1:
        back = [onnx_ir.AttrInt64s("perm", [last.index(i) for i in range(rank)])]
        rebuilt = patch.insert("Transpose", [rebuilt], f"{name}.back", back)
    along = [onnx_ir.AttrInt64("axis", axis)]
    joined = patch.insert("Concat", [x, rebuilt], f"{name}.joined", along)
    size = int(node.output.shape[axis])
    places = np.arange(size)
    places[np.asarray(units)[order]] = size + np.arange(len(units))
    return patch.insert("Gather", [joined, integers(patch, *places.tolist())], output, along)


def insert_turn(patch: ModelPatch, node: Node) -> None:
    """A product with the matrix of all blocks, the unit axis last in between."""
    x, name, rank = source_of(patch, node), node.name, len(node.output.shape)
    axis = attributes(node, AxisAttrs)["axis"]
    last = [i for i in range(rank) if i != axis] + [axis]
    dtype = (
        "float32" if node.output.dtype == "bfloat16" else node.output.dtype
    )  # onnxruntime computes nothing in bfloat16
    if dtype != node.output.dtype:
        x = cast(patch, x, onnx_ir.DataType.FLOAT, f"{name}.wide")
    if axis != rank - 1:
        x = patch.insert("Transpose", [x], f"{name}.last", [onnx_ir.AttrInt64s("perm", last)])
    plain = axis == rank - 1 and dtype == node.output.dtype
    matrix = patch.array(clamp.matrix(node).astype(numpy_dtype(dtype)))
    x = patch.insert("MatMul", [x, matrix], node.output if plain else f"{name}.product")
    if axis != rank - 1:
        back = [onnx_ir.AttrInt64s("perm", [last.index(i) for i in range(rank)])]
        x = patch.insert("Transpose", [x], node.output if dtype == node.output.dtype else f"{name}.placed", back)
    if dtype != node.output.dtype:
        cast(patch, x, onnx_ir.DataType.BFLOAT16, node.output)
