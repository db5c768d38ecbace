"""Weights that are stored as small integers: w = (q − z) · s, with one scale for all, one per channel, or one per block.

    dequantize(q, s, z)            what the model computes with, a tensor like any other
    select(dequantize(q, s, z))    is dequantize(select(q), select(s), select(z)): the integers are sliced, nothing is rounded

A reader of integers x = (p − y) · t adds up (q − z)(p − y), which is a whole number. So constants on the grid of x fold into a
bias on the grid s · t without any rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cmrc.ir.evaluate import apply, constant, take
from cmrc.ir.graph import Apply, Array, Tensor, literal


@dataclass(frozen=True, slots=True)
class Quantised:
    """The parts of a quantised tensor. Scales lie along `axis`, in blocks of `block`; without an axis there is one for all."""

    numbers: Tensor
    scale: Tensor
    zero: Tensor | None
    axis: int | None = None
    block: int = 0

    def tensor(self) -> Tensor:
        """What the integers stand for."""
        return self._as(self.scale, self.scale.dtype)

    def whole_numbers(self) -> Tensor:
        """q − z."""
        return self._as(literal(np.ones(())), "float64")

    def _as(self, scale: Tensor, dtype: str) -> Tensor:
        parts = (self.numbers, scale) if self.zero is None else (self.numbers, scale, self.zero)
        aligned = [None] + [(self.axis,) if self.axis is not None and len(p.shape) == 1 else None for p in parts[1:]]
        attrs = {"fn": "dequantize", "dtype": dtype, "align": tuple(aligned), "rank": len(self.numbers.shape)}
        if self.block:
            attrs |= {"block": self.block, "axis": self.axis}
        return apply("pointwise", parts, attrs, self.numbers.shape, dtype)

    def taken(self, axis: int, keep: Sequence[int]) -> Quantised | None:
        """Some positions of an axis; `None` where they cut a block into pieces."""
        numbers, at = take(self.numbers, axis, keep), keep
        if self.block and axis == self.axis:
            if cuts_blocks(keep, self.block, self.numbers.shape[axis]):
                return None
            at = [k // self.block for k in keep[:: self.block]]
        elif not self.block and axis != self.axis:
            return replace(self, numbers=numbers)
        return replace(self, numbers=numbers, scale=self._part(self.scale, axis, at), zero=self._zeros(axis, at))

    def _zeros(self, axis: int, keep: Sequence[int]) -> Tensor | None:
        return None if self.zero is None else self._part(self.zero, axis, keep)

    def _part(self, part: Tensor, axis: int, keep: Sequence[int]) -> Tensor:
        """Scales or zero points of some positions; a single one stays."""
        local = axis if self.block else 0
        return part if not part.shape or part.shape[local] == 1 else take(part, local, keep)

    def turned(self, perm: Sequence[int]) -> Quantised | None:
        if self.block:
            return None
        shape = tuple(self.numbers.shape[p] for p in perm)
        numbers = apply("transpose", (self.numbers,), {"perm": tuple(perm)}, shape, self.numbers.dtype)
        return replace(self, numbers=numbers, axis=None if self.axis is None else list(perm).index(self.axis))

    def reshaped(self, shape: tuple[int, ...]) -> Quantised | None:
        before = self.numbers.shape
        if self.block or (self.axis is not None and shape[: self.axis + 1] != before[: self.axis + 1]):
            return None
        return replace(self, numbers=apply("reshape", (self.numbers,), {"shape": shape}, shape, self.numbers.dtype))


def cuts_blocks(keep: Sequence[int], block: int, size: int) -> bool:
    """Whether positions that stay, laid out in blocks again, would mix positions of different blocks."""
    kept = np.asarray(keep)
    blocks = kept // block
    whole = [blocks[i : i + block] for i in range(0, len(blocks), block)]
    mixed = any(part.min() != part.max() for part in whole)
    short = any(len(part) < min(block, size - int(part[0]) * block) for part in whole[:-1])
    return mixed or short


def quantised(tensor: Tensor | None) -> Quantised | None:
    """The parts of a tensor that is a quantised one, or positions of one; `None` where it is anything else."""
    if not isinstance(tensor, Apply):
        return None
    if tensor.op == "pointwise" and tensor.attrs["fn"] == "dequantize":
        numbers, scale, *zero = tensor.inputs
        axis = tensor.attrs.get("axis")
        align = tensor.attrs.get("align", (None, None))[1]
        axis = align[0] if axis is None and align is not None else axis
        return Quantised(numbers, scale, zero[0] if zero else None, axis, tensor.attrs.get("block", 0))
    inner = quantised(tensor.inputs[0]) if tensor.op in MOVES else None
    if inner is None:
        return None
    if tensor.op == "select":
        return None if tensor.attrs.get("period") else inner.taken(tensor.attrs["axis"], tensor.attrs["keep"])
    if tensor.op == "transpose":
        return inner.turned(tensor.attrs["perm"])
    if tensor.op == "reshape":
        return inner.reshaped(tensor.shape)
    if inner.block or inner.axis not in (None, 0):
        return None
    numbers = apply("select_in_groups", (inner.numbers,), tensor.attrs, tensor.shape, inner.numbers.dtype)
    return replace(inner, numbers=numbers)


MOVES = ("select", "transpose", "reshape", "select_in_groups")
LARGEST = 2**30  # half of what an int32 holds: the bias that is there may have the other half


def on_grid(values: Array, step: float) -> Array | None:
    """values / step as whole numbers, if that is what they are."""
    steps = np.rint(values / step)
    return steps if bool(np.all(np.abs(steps * step - values) <= 1e-6 * np.abs(values))) else None


def fits_in_int32(steps: Array, width: int) -> bool:
    """Whether a sum of products with weights of `width` values cannot overflow."""
    return float(np.abs(steps).sum()) * width < LARGEST


def is_nothing(zero: Tensor | None) -> bool:
    return zero is None or not np.any(constant(zero))


def packed_numbers(numbers: Tensor, bits: int, block: int, blocks: int) -> Tensor:
    """Integers of 4 or 8 bits as bytes, block by block, the last one filled up."""
    outs, ins = numbers.shape
    pads = ((0, 0), (0, blocks * block - ins))
    attrs = {"fn": "pad", "axes": (1,), "pads": pads, "value": 0.0}
    full = apply("along", (numbers,), attrs, (outs, blocks * block), "uint8") if pads[1][1] else numbers
    return _in_bytes(full, bits, (outs, blocks, block * bits // 8))


def packed_zeros(zeros: Tensor, bits: int) -> Tensor:
    """Zero points, packed likewise row by row."""
    outs, blocks = zeros.shape
    odd = bits == 4 and blocks % 2
    attrs = {"fn": "pad", "axes": (1,), "pads": ((0, 0), (0, 1)), "value": 0.0}
    full = apply("along", (zeros,), attrs, (outs, blocks + 1), "uint8") if odd else zeros
    return _in_bytes(full, bits, (outs, full.shape[1] * bits // 8))


def _in_bytes(numbers: Tensor, bits: int, shape: tuple[int, ...]) -> Tensor:
    if bits == 4:
        half = (numbers.shape[0], numbers.shape[1] // 2)
        low, high = (
            apply("select", (numbers,), {"axis": 1, "keep": tuple(range(i, numbers.shape[1], 2))}, half, "uint8")
            for i in (0, 1)
        )
        numbers = apply("pointwise", (low, high), {"fn": "add", "alpha": 16.0, "rank": 2}, half, "uint8")
    return apply("reshape", (numbers,), {"shape": shape}, shape, "uint8")
