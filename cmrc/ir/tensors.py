"""Tensor expressions: making them, and computing their arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cmrc.ir.axes import Index, is_whole
from cmrc.ir.dtypes import as_dtype
from cmrc.ir.graph import Apply, Array, ArrayLiteral, Leaf, Tensor
from cmrc.ir.meanings import Attrs
from cmrc.ir.ops import OPS


def evaluate_op(op: str, attrs: Mapping[str, Any], *operands: Array | None) -> Array:
    """The result of an op on arrays."""
    meaning = OPS[op].meaning
    assert meaning is not None, op
    return meaning(attrs, *operands)


def materialise(tensor: Tensor) -> Array:
    """The array of a tensor expression, in its own dtype. Selecting moves bytes; arithmetic runs in float64, cast once."""
    return as_dtype(_compute(tensor), tensor.dtype)


def constant(tensor: Tensor) -> Array:
    """The array of a tensor expression in float64, for folding."""
    array = _compute(tensor)
    return array if array.dtype.kind in "biu" else array.astype(np.float64, copy=not isinstance(tensor, ArrayLiteral))


def _compute(tensor: Tensor) -> Array:
    if isinstance(tensor, Leaf):
        return tensor.load()
    if isinstance(tensor, ArrayLiteral):
        return tensor.array
    read = _compute if OPS[tensor.op].as_stored else constant
    return evaluate_op(tensor.op, tensor.attrs, *[read(part) for part in tensor.inputs])


def apply(op: str, inputs: Sequence[Tensor], attrs: Attrs, shape: Sequence[int], dtype: str) -> Tensor:
    """A tensor that is `op` of tensors."""
    return Apply(op, tuple(inputs), dict(attrs), tuple(shape), dtype)


def take(tensor: Tensor, axis: int, keep: Sequence[int]) -> Tensor:
    """Positions of an axis of a tensor; all of them are the tensor itself."""
    if is_whole(keep, tensor.shape[axis]):
        return tensor
    shape = (*tensor.shape[:axis], len(keep), *tensor.shape[axis + 1 :])
    return Apply("select", (tensor,), {"axis": axis, "keep": Index.of(keep)}, shape, tensor.dtype)
