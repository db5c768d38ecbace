"""Tensor expressions in numbers: computed by the meanings in `ops/`, folded into a model's own precision, and stored as small integers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from cmrc.errors import HostError
from cmrc.ir.graph import Apply, Array, ArrayLiteral, Leaf, Node, Tensor, apply, as_dtype, literal, numpy_dtype, take
from cmrc.ir.ops import OPS
from cmrc.one_order import one_order

ON_ONE_THREAD = 4096  # products of no more numbers are computed by one thread anyway
MOVES = frozenset({"select", "select_in_groups", "reshape", "transpose", "concat", "expand"})  # no new numbers


def evaluate_op(op: str, attrs: Mapping[str, Any], *operands: Array | None) -> Array:
    """The result of an op on arrays."""
    meaning = OPS[op].meaning
    assert meaning is not None, op
    if op in MOVES or all(operand is None or operand.size <= ON_ONE_THREAD for operand in operands):
        return meaning(attrs, *operands)
    with one_order():
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


def is_computable(node: Node) -> bool:
    """Whether the node has a meaning of its own; otherwise only its host can run it."""
    op = OPS[node.op]
    if op.meaning is None or (op.functions and op.functions[node.attrs["fn"]].meaning is None):
        return False
    return node.op != "attention" or "scale" in node.attrs


# ---------------------------------------------------------------- folded parameters


def fold(tensor: Tensor, dtype: str, *, name: str, node: Node | None = None) -> Array:
    """The array of a tensor expression in `dtype`: a new one, unless it is an unchanged parameter.

    Every number p' that arithmetic makes is computed in float64 from the n products that it adds up, and rounded once. With u
    and v the unit roundoffs of `dtype` and of float64 and p* the exact result (b + Σ W_s c_s, or W_p + Σ W_s B_sp),

        |p' − p*| ≤ u |p*| + (1 + u) γ (|b| + Σ |W_s c_s|) + η,     γ = (n + 1) v / (1 − (n + 1) v)

    where η is half of the smallest subnormal number. What is only selected or moved has no error.

    A number that is finite in float64 and infinite in `dtype` would turn the output into infinity, where the clamped model,
    which adds the same terms up in another order, may be finite. It is refused. What is infinite because a parameter of the
    model is infinite stays so.
    """
    if not _adds_numbers(tensor):
        return _converted(materialise(tensor), dtype)
    with np.errstate(over="ignore"):
        array = materialise(tensor)
        converted = _converted(array.copy() if isinstance(tensor, ArrayLiteral) else array, dtype)
    if converted.dtype.kind not in "biu" and not _finite(converted):
        _require_finite(tensor, converted, dtype, name, node)
    return converted


def _converted(array: Array, dtype: str) -> Array:
    """In `dtype`; whole numbers stay as they are."""
    return array if array.dtype.kind in "biu" else as_dtype(array, dtype)


def within_last_bits(first: Array, second: Array) -> bool:
    """Whether two folds of the same expression are equal up to the order in which a machine adds numbers in float64."""
    if first.dtype.kind in "biu" or not first.size:
        return bool(np.array_equal(first, second))
    a, b = first.astype(np.float64), second.astype(np.float64)
    unit = float(ml_dtypes.finfo(first.dtype).eps)  # type: ignore[no-untyped-call]
    largest = np.abs(np.where(np.isfinite(b), b, 0.0)).max()
    with np.errstate(invalid="ignore"):
        apart = np.abs(a - b)
    close = (apart <= 2 * unit * np.abs(b) + 1e-12 * largest) | (a == b) | (np.isnan(a) & np.isnan(b))
    return bool(close.all())


def _adds_numbers(tensor: Tensor) -> bool:
    """Whether there is arithmetic, or a number from the plan. Parameters that are only moved keep their numbers."""
    while isinstance(tensor, Apply):
        if tensor.op not in MOVES or any(map(_adds_numbers, tensor.inputs[1:])):
            return True
        tensor = tensor.inputs[0]
    return isinstance(tensor, ArrayLiteral)


def _finite(array: Array) -> bool:
    return bool(np.isfinite(array).all())


def _leaves_finite(tensor: Tensor) -> bool:
    if isinstance(tensor, Apply):
        return all(_leaves_finite(part) for part in tensor.inputs)
    array = tensor.load() if isinstance(tensor, Leaf) else tensor.array
    return array.dtype.kind in "biu" or _finite(array)


def _require_finite(tensor: Tensor, converted: Array, dtype: str, name: str, node: Node | None) -> None:
    exact = np.asarray(constant(tensor))
    lost = ~np.isfinite(converted) & (np.isfinite(exact) | _leaves_finite(tensor))
    if not lost.any():
        return
    place = tuple(int(i) for i in np.argwhere(lost)[0])
    largest = float(ml_dtypes.finfo(numpy_dtype(dtype)).max)  # type: ignore[no-untyped-call]
    raise HostError(
        f"the fold makes {name}[{', '.join(map(str, place))}] {float(exact[place]):.3g}, "
        f"which is infinite in {dtype} (its largest number is {largest:.3g})",
        node="" if node is None else node.label,
        op="" if node is None else node.kind,
        fix="replace the units by smaller numbers, leave out units with large weights, or lower the model in a wider type",
    )


# ---------------------------------------------------------------- weights that are stored as small integers

# w = (q − z) · s, with one scale for all, one per channel, or one per block.
#
#     dequantize(q, s, z)            what the model computes with, a tensor like any other
#     select(dequantize(q, s, z))    is dequantize(select(q), select(s), select(z)): the integers are sliced, nothing is rounded

STAY_ON_GRID = ("select", "transpose", "reshape", "select_in_groups")


@dataclass(frozen=True, slots=True)
class Quantised:
    """The parts of a quantised tensor. Scales run along `axis`, one per block of `block`; without an axis, there is one for all."""

    numbers: Tensor
    scale: Tensor
    zero: Tensor | None
    axis: int | None = None
    block: int = 0

    def tensor(self) -> Tensor:
        """The numbers that the integers represent."""
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
        """Some positions of an axis; `None` if they cut a block into pieces."""
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
        """Scales or zero points of some positions; if there is a single one, it stays."""
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
    """Whether the kept positions, when divided into blocks again, would mix positions of different blocks."""
    kept = np.asarray(keep)
    blocks = kept // block
    whole = [blocks[i : i + block] for i in range(0, len(blocks), block)]
    mixed = any(part.min() != part.max() for part in whole)
    short = any(len(part) < min(block, size - int(part[0]) * block) for part in whole[:-1])
    return mixed or short


def quantised(tensor: Tensor | None) -> Quantised | None:
    """The parts of a quantised tensor, or of positions of one; `None` for anything else."""
    if not isinstance(tensor, Apply):
        return None
    if tensor.op == "pointwise" and tensor.attrs["fn"] == "dequantize":
        numbers, scale, *zero = tensor.inputs
        axis = tensor.attrs.get("axis")
        align = tensor.attrs.get("align", (None, None))[1]
        axis = align[0] if axis is None and align is not None else axis
        return Quantised(numbers, scale, zero[0] if zero else None, axis, tensor.attrs.get("block", 0))
    inner = quantised(tensor.inputs[0]) if tensor.op in STAY_ON_GRID else None
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
