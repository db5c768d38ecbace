"""The numbers of a folded parameter, in the precision that the model holds them in: finite, or refused."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from cmrc.errors import HostError
from cmrc.ir.evaluate import constant, materialise
from cmrc.ir.graph import Apply, Array, ArrayLiteral, Leaf, Node, Tensor, as_dtype, numpy_dtype

MOVES = frozenset({"select", "select_in_groups", "reshape", "transpose", "concat", "expand"})  # no new numbers


def fold(tensor: Tensor, dtype: str, *, name: str, node: Node | None = None) -> Array:
    """The array of a tensor expression in `dtype`: a fresh one, unless it is a parameter as it is.

    Every number p' that arithmetic makes is computed in float64 from the n products that it adds up, and rounded once. With u
    and v the unit roundoffs of `dtype` and of float64 and p* the exact result (b + Σ W_s c_s, or W_p + Σ W_s B_sp),

        |p' − p*| ≤ u |p*| + (1 + u) γ (|b| + Σ |W_s c_s|) + η,     γ = (n + 1) v / (1 − (n + 1) v)

    where η is half of the smallest subnormal number. What is only selected or moved has no error.

    A number that is finite in float64 and infinite in `dtype` would turn the output into infinity, where the clamped model,
    which adds the same terms up in another order, may be finite. It is refused. What is infinite because a parameter of the
    model is stays so.
    """
    with np.errstate(over="ignore"):
        array = materialise(tensor)
        array = array.copy() if isinstance(tensor, ArrayLiteral) else array
        converted = as_dtype(array, dtype) if array.dtype.kind not in "biu" else array
    if _adds_numbers(tensor) and converted.dtype.kind not in "biu" and not _finite(converted):
        _require_finite(tensor, converted, dtype, name, node)
    return converted


def within_last_bits(first: Array, second: Array) -> bool:
    """Whether two folds of the same expression are equal but for the order in which a machine adds numbers up in float64."""
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
    """Whether arithmetic is done, or a number of the plan comes in: parameters that are only moved keep their numbers."""
    if isinstance(tensor, Apply):
        return tensor.op not in MOVES or any(_adds_numbers(part) for part in tensor.inputs)
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
