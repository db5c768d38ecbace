"""One do as JSON, in a plan file and as an annotation on a model. It is written for people and read strictly.

    {"site": "act", "value": "relu", "axis": 1, "units": "0:3,7", "constant": [0.1, 0.2, 0.3, 0.4]}
    {"site": "act", "value": "relu", "axis": 1, "units": "2", "affine": {"parents": "4,6", "weight": [[1, 2]], "bias": [0]}}
    {"site": "key", "value": "key", "axis": 2, "units": "2:4", "basis": [[[1, 2], [0, 1]], [[1, 0], [1, 1]]], "constant": [0, 0]}

An array is written as nested lists of numbers. A large array is stored elsewhere; the reader says where (`Unpack`).
"""

from __future__ import annotations

import base64
import math
import re
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cmrc.errors import PlanError
from cmrc.ir.graph import Array, Do

INLINE = 64  # the largest array that is written as text
LARGEST_AXIS = 1 << 22  # how many units one number may stand for
LAST = 10**10  # position of an axis
POSITION = r"(?:0|[1-9][0-9]{0,9})"  # none beyond LAST
RANGE = re.compile(f"{POSITION}(?::{POSITION})?")
RANGES = re.compile(rf"(?:{RANGE.pattern}(?:,{RANGE.pattern})*+)?")
WITHOUT_DIGITS = dict.fromkeys(map(ord, "0123456789"))
COLON = ord(":")
NUMBERS = {int, float}
RANK = 16  # axes that a value can have
Pack = Callable[[str, Array], Any]
Unpack = Callable[[Any], Array]  # raises ValueError


def entry_to_json(entry: Do, pack: Pack) -> dict[str, Any]:
    """`pack` decides how an array is written."""
    document: dict[str, Any] = {
        "site": entry.site,
        "value": entry.value,
        "axis": entry.axis,
        "units": to_ranges(entry.units),
    }
    if entry.basis is not None:
        document["basis"] = pack("basis", entry.basis)
    if entry.weight is None:
        return {**document, "constant": pack("constant", entry.constant)}
    weight, bias = pack("weight", entry.weight), pack("bias", entry.constant)
    return {**document, "affine": {"parents": to_ranges(entry.parents), "weight": weight, "bias": bias}}


def entry_from_json(document: Any, unpack: Unpack, at: str) -> Do:
    """A do that is consistent by itself. Whether it fits a model is checked when it is used with one."""
    from cmrc.program import plan_schema  # imported here: only reading needs pydantic, which is slow to load

    record = plan_schema.validated(plan_schema.DoRecord, document, what="the entry", at=at)
    site, value = record.site, record.value or record.site
    try:
        if (record.constant is None) == (record.affine is None):
            raise ValueError("it needs exactly one of `constant` and `affine`")
        basis = None if record.basis is None else unpack(record.basis)
        if record.affine is None:
            units, constant = _units_with(record.units, unpack(record.constant), record.axis, "constants")
            return Do(site, value, record.axis, units, constant, basis=basis)
        units, bias = _units_with(record.units, unpack(record.affine.bias), record.axis, "biases")
        weight = unpack(record.affine.weight)
        shape = (len(units), count_positions(record.affine.parents))
        if weight.shape != shape:
            raise ValueError(f"the affine weight has shape {list(weight.shape)} for units and parents {list(shape)}")
        parents = _positions(_runs(record.affine.parents), "parents")
        return Do(site, value, record.axis, units, bias, parents, weight, basis)
    except ValueError as error:
        raise PlanError(str(error), at=at, fix=plan_schema.FIX) from error


def _units_with(packed: Any, values: Array, axis: int, what: str) -> tuple[tuple[int, ...], Array]:
    """The units and their numbers. Ranges are expanded only if there are as many numbers."""
    runs = _runs(packed)
    count = runs.count()
    if not np.isfinite(values).all():
        raise ValueError(f"{np.size(values) - np.count_nonzero(np.isfinite(values))} of the {what} are NaN or infinite")
    if values.ndim == 0 and count <= LARGEST_AXIS:
        values = np.full(count, float(values))
    along = 0 if values.ndim == 1 else axis
    if along >= values.ndim or values.shape[along] != count:
        raise ValueError(f"it gives {list(values.shape) or 'one number'} as {what} for {count:,} units")
    return _positions(runs, "units"), values


def _positions(runs: Positions, what: str) -> tuple[int, ...]:
    positions = runs.expanded()
    if not positions:
        raise ValueError(f"it names no {what}")
    ascending = (runs.first[1:] >= runs.end[:-1]).all()
    if not ascending and len(set(positions)) != len(positions):
        raise ValueError(f"{what} are named twice")
    return positions


# ---------------------------------------------------------------- positions


@dataclass(frozen=True, slots=True)
class Positions:
    """Positions of an axis as runs: each from a `first` up to the `end` beside it, which is not included. Arrays, since a plan has thousands."""

    first: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]

    def count(self) -> int:
        return int((self.end - self.first).sum())

    def expanded(self) -> tuple[int, ...]:
        lengths = self.end - self.first
        before = lengths.cumsum() - lengths  # positions in the runs before
        return tuple((np.repeat(self.first - before, lengths) + np.arange(lengths.sum())).tolist())


def to_ranges(index: Sequence[int]) -> str | list[int]:
    """`0:3,7` for 0, 1, 2, 7; a list if the order is not ascending."""
    if list(index) != sorted(set(index)):
        return [int(i) for i in index]
    runs: list[list[int]] = []
    for i in index:
        if runs and i == runs[-1][1]:
            runs[-1][1] = i + 1
        else:
            runs.append([i, i + 1])
    return ",".join(str(a) if b == a + 1 else f"{a}:{b}" for a, b in runs)


def from_ranges(packed: Any) -> tuple[int, ...]:
    """The positions that `to_ranges` wrote."""
    return _runs(packed).expanded()


def count_positions(packed: Any) -> int:
    """How many there are, without expanding them."""
    return _runs(packed).count()


def _runs(packed: Any) -> Positions:
    if isinstance(packed, list) and all(type(i) is int and 0 <= i < LAST for i in packed):
        numbers = np.array(packed, dtype=np.int64)
        return Positions(numbers, numbers + 1)
    if not isinstance(packed, str):
        raise ValueError(f"{reprlib.repr(packed)} are not positions of an axis, such as '0:3,7' or [0, 1, 2, 7]")
    if RANGES.fullmatch(packed):
        runs = _parsed(packed)
        if (runs.first < runs.end).all():
            return runs
    bad = next(part for part in packed.split(",") if not RANGE.fullmatch(part) or _is_empty(part))
    raise ValueError(f"{reprlib.repr(bad)} is not a range of positions, such as 7 or 0:3")


def _is_empty(part: str) -> bool:
    runs = _parsed(part)
    return bool(runs.first >= runs.end)


def _parsed(text: str) -> Positions:
    """What a text that matches `RANGES` says. numpy reads the numbers, several times as fast as a loop over the parts."""
    numbers = np.fromstring(text.replace(":", ","), dtype=np.int64, sep=",")
    ends = numbers + 1
    if ":" not in text:
        return Positions(numbers, ends)
    with_end = np.frombuffer(text.translate(WITHOUT_DIGITS).encode(), np.uint8) == COLON
    is_first = np.ones(len(numbers), bool)
    is_first[1:] = ~with_end
    ends[:-1][with_end] = numbers[1:][with_end]
    return Positions(numbers[is_first], ends[is_first])


# ---------------------------------------------------------------- arrays


def unpack_lists(packed: Any) -> Array:
    """Nested lists of finite numbers as an array."""
    _require_numbers(packed, RANK)
    try:
        array = np.asarray(packed, dtype=np.float64)
    except (ValueError, OverflowError) as error:
        raise ValueError("the lists of an array differ in length, or a number is too large") from error
    if not np.isfinite(array).all():
        raise ValueError("an array holds a number that is not finite")
    return array


def _require_numbers(packed: Any, depth: int) -> None:
    if isinstance(packed, list) and depth:
        if depth > 1 and NUMBERS.issuperset(map(type, packed)):  # most lists contain only numbers
            return
        for part in packed:
            _require_numbers(part, depth - 1)
    elif type(packed) not in (int, float):
        raise ValueError(f"{reprlib.repr(packed)} is not a number, but an array of numbers is needed")


def shape_of(packed: Any) -> tuple[int, ...]:
    """The shape that stands beside an array."""
    if not isinstance(packed, list) or len(packed) > RANK or any(type(n) is not int or n < 0 for n in packed):
        raise ValueError(f"{reprlib.repr(packed)} is not the shape of an array")
    return tuple(packed)


def pack_text(name: str, array: Array) -> Any:
    """An array as self-contained JSON, for annotations, which have no file beside them."""
    if array.size <= INLINE:
        return array.tolist()
    data = base64.b64encode(np.ascontiguousarray(array, dtype="<f8").tobytes()).decode()
    return {"float64": data, "shape": list(array.shape)}


def unpack_text(packed: Any) -> Array:
    """Read what `pack_text` wrote."""
    if not isinstance(packed, dict):
        return unpack_lists(packed)
    if packed.keys() != {"float64", "shape"} or not isinstance(packed["float64"], str):
        raise ValueError("an array must have the keys `float64` and `shape`")
    shape = shape_of(packed["shape"])
    data = base64.b64decode(packed["float64"].encode(), validate=True)
    if len(data) != 8 * math.prod(shape):
        raise ValueError(f"an array of {len(data)} bytes cannot have shape {list(shape)}")
    return np.frombuffer(data, dtype="<f8").reshape(shape).astype(np.float64)
