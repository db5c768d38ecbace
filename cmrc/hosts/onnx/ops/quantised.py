"""The rows of the ONNX table for numbers that are stored as small integers.

QuantizeLinear, DequantizeLinear     element by element; of a parameter, a quantised tensor (`ir/tensors.py`)
QLinearConv, QLinearMatMul           dequantize, conv or linear, quantize: inside one node
MatMulNBits                          a linear op whose weights share scales in blocks
DynamicQuantizeLinear and its like   left whole: their scale follows from the range of all units together
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import onnx_ir

from cmrc.hosts.onnx.nodes import dtype_name
from cmrc.hosts.onnx.ops.affine import read_conv
from cmrc.hosts.onnx.ops.row import LeftWhole, Step, View
from cmrc.ir.graph import Array, Leaf, Marks, Operand, Shape, Tensor, literal
from cmrc.ir.tensors import Quantised, materialise

INTEGERS = ("int", "uint")
FLOAT_ROAD = "lower the float model, then quantise"


def read_quantize(view: View) -> Step:
    dtype = _stored_as(view)
    return _pointwise(view, "quantize", dtype)


def read_dequantize(view: View) -> Step:
    scale = view.tensor(1, "scale")
    return _pointwise(view, "dequantize", scale.dtype)


def _stored_as(view: View) -> str:
    zero = view.operand(2)
    named = view.attr("output_dtype", 0)
    dtype = dtype_name(onnx_ir.DataType(named)) if named else "uint8" if zero is None else view.tensor(2, "zero").dtype
    if not dtype.startswith(INTEGERS):
        raise LeftWhole(f"it stores numbers as {dtype}")
    return dtype


def _pointwise(view: View, fn: str, dtype: str) -> Step:
    shape, scale = view.shape(), view.tensor(1, "scale")
    block = view.attr("block_size", 0)
    slots = (0, 1) if view.operand(2) is None else (0, 1, 2)
    if len(slots) == 3:
        view.tensor(2, "zero point")
    attrs: dict[str, Any] = {"fn": fn, "dtype": dtype}
    if block:
        if fn == "quantize" or isinstance(view.operand(0), str):
            raise LeftWhole("it quantises a value in blocks")
        attrs |= {"block": block, "axis": view.axis(view.attr("axis", 1))}
    elif len(scale.shape) == 1 and scale.shape[0] != 1:
        axis = view.axis(view.attr("axis", 1))
        attrs["align"] = (None, *((axis,),) * (len(slots) - 1))
    return Step("pointwise", slots, attrs, view.out(shape))


# ---------------------------------------------------------------- ops on integers


def read_q_linear_conv(view: View) -> list[Step]:
    """y = quantize(conv(dequantize(x), dequantize(w)) + b)."""
    step = view.tensor(1, "scale of its input")
    weight = _weight(view, 3, 0)
    tensors: dict[int, Tensor] = {3: weight.tensor()}
    if view.operand(8) is not None:
        grid = materialise(weight.scale).reshape(-1).astype(np.float64) * float(materialise(step).reshape(()))
        scale = literal(grid if weight.axis is not None else grid.reshape(()), "float32")
        bias = Quantised(view.tensor(8, "bias"), scale, None, None if weight.axis is None else 0)
        tensors[8] = bias.tensor()
    conv = replace(read_conv(view, tensors[3]), slots=("x", 3, 8), tensors=tensors, key="sum")
    return [_opened(view, 0, 1, 2), conv, _closed(view, conv.shape, 6, 7)]


def read_q_linear_matmul(view: View) -> list[Step]:
    """y = quantize(dequantize(a) dequantize(b))."""
    weight = _weight(view, 3, 1)
    shape = view.shape()
    if len(weight.numbers.shape) != 2 or not shape or shape[-1] != weight.numbers.shape[0]:
        raise LeftWhole("its second operand is not a matrix of a size that is known to match")
    out = (*shape[:-1], weight.numbers.shape[1])
    attrs = {"axis": len(shape) - 1, "w_in": 0, "w_out": 1}
    linear = Step("linear", ("x", 3), attrs, out, tensors={3: weight.tensor()}, key="sum")
    return [_opened(view, 0, 1, 2), linear, _closed(view, out, 6, 7)]


def _weight(view: View, slot: int, axis: int) -> Quantised:
    """A weight of integers, then its scale and zero point: one for all, or one for each output along `axis`."""
    numbers, scale, zero = (view.tensor(slot + i, what) for i, what in enumerate(("weight", "scale", "zero point")))
    several = len(scale.shape) == 1 and scale.shape[0] != 1
    return Quantised(numbers, scale, zero, axis if several else None)


def _opened(view: View, *slots: int) -> Step:
    for slot in slots[1:]:
        if np.prod(view.tensor(slot, "scale of its input").shape) != 1:
            raise LeftWhole("its input has several scales")
    attrs = {"fn": "dequantize", "dtype": view.tensor(1, "scale of its input").dtype}
    return Step("pointwise", slots, attrs, view.shape(), key="x")


def _closed(view: View, shape: Shape, *slots: int) -> Step:
    dtype = view.tensor(slots[1], "zero point").dtype
    return Step("pointwise", ("sum", *slots), {"fn": "quantize", "dtype": dtype}, view.out(shape))


def leave_dynamic(view: View) -> Step:
    raise LeftWhole(f"its scale follows from the range of all units, so no unit can be removed alone; {FLOAT_ROAD}")


def leave_integers(view: View) -> Step:
    raise LeftWhole(f"it computes with integers whose scale follows from the range of all units; {FLOAT_ROAD}")


# ---------------------------------------------------------------- weights in blocks


def read_matmul_n_bits(view: View) -> Step:
    """A linear op whose weights, of 4 or 8 bits, share a scale in blocks along the inputs."""
    bits, block = view.attr("bits", 4), view.attr("block_size", 0)
    ins, outs = view.attr("K", 0), view.attr("N", 0)
    if bits not in (4, 8) or view.operand(4) is not None:
        raise LeftWhole(
            f"its weights have {bits} bits" if bits not in (4, 8) else "its blocks have an order of their own"
        )
    packed, scales = view.tensor(1, "weight"), view.tensor(2, "scale")
    blocks = -(-ins // block)
    numbers = Leaf(f"{_name(packed)}::numbers", (outs, ins), f"uint{bits}", partial(_unpacked, packed, bits, outs, ins))
    scale = Leaf(f"{_name(scales)}::blocks", (outs, blocks), scales.dtype, partial(_laid_out, scales, (outs, blocks)))
    zero = _zero_points(view.operand(3), bits, (outs, blocks))
    weight = Quantised(numbers, scale, zero, 1, block)
    shape = view.fitted(0, len(view.shape()) - 1, ins)
    if not shape or shape[-1] != ins:
        raise LeftWhole(f"its weight takes {ins} units, but the size of its input is not known to match")
    attrs = {"axis": len(shape) - 1, "w_in": 1, "w_out": 0}
    slots, bias = (0, 1), view.operand(5)
    if bias is not None:
        view.tensor(5, "bias")
    marks = Marks(takes_bias=True)
    return Step("linear", (*slots, 5), attrs, (*shape[:-1], outs), tensors={1: weight.tensor()}, marks=marks)


def _name(tensor: Tensor) -> str:
    if not isinstance(tensor, Leaf):
        raise LeftWhole("its weight is computed from other constants")
    return tensor.name


def _unpacked(packed: Tensor, bits: int, outs: int, ins: int) -> Array:
    array = materialise(packed).reshape(outs, -1)
    if bits == 4:
        array = np.stack([array & 15, array >> 4], axis=-1).reshape(outs, -1)
    return array[:, :ins]


def _laid_out(tensor: Tensor, shape: tuple[int, int]) -> Array:
    return materialise(tensor).reshape(shape)


def _zero_points(operand: Operand, bits: int, shape: tuple[int, int]) -> Tensor:
    if operand is None:
        return literal(np.full(shape, 2 ** (bits - 1)), "uint8")
    if isinstance(operand, str):
        raise LeftWhole("its zero points are computed at run time")
    if not operand.dtype.startswith("uint"):
        return Leaf(f"{_name(operand)}::blocks", shape, operand.dtype, partial(_laid_out, operand, shape))
    load = partial(_unpacked, operand, bits, *shape)
    return Leaf(f"{_name(operand)}::blocks", shape, f"uint{bits}", load)
