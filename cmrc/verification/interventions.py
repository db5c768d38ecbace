"""Interventions on the values of a site, as data, and what each does to the rows of a value."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cmrc.errors import InterventionError
from cmrc.ir.graph import Array, Do
from cmrc.ir.ops.affine import turn_meaning
from cmrc.program.plan import Plan
from cmrc.program.sites import Site


@dataclass(frozen=True, slots=True, eq=False)
class Swap:
    """Units where the mask is set take the values that they have on `source`.

    The mask is [units], [R, units], or [R, positions, units] where positions are the other axes of the site, flattened,
    or the first of them. With `group`, every column of the mask stands for that many consecutive units. The units lie along
    the site's own axis unless another is given.
    """

    site: str | Site
    source: Any
    mask: npt.ArrayLike
    group: int = 1
    axis: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Patch:
    """Units where the mask is set (all without one) become `values`: a number, [units], [R, units], or whole values."""

    site: str | Site
    values: npt.ArrayLike
    mask: npt.ArrayLike | None = None
    group: int = 1
    axis: int | None = None


Step: TypeAlias = Swap | Patch | Do
Intervention: TypeAlias = Step | Plan


@dataclass(frozen=True, slots=True)
class Place:
    """A site in the rows that are held: its units' axis when the batch comes first, the shape of a row, the rows of the call."""

    site: Site
    axis: int
    row: tuple[int, ...]
    count: int

    def error(self, reason: str, fix: str) -> InterventionError:
        return InterventionError(reason, node=self.site.name, op=self.site.op, fix=fix)

    @property
    def units(self) -> int:
        return self.row[self.axis - 1]

    def spread(self, array: Array, what: str) -> Array:
        """[units], [R, units] or [R, positions, units] in the axes of the value."""
        others = [n for i, n in enumerate(self.row, 1) if i != self.axis]
        if array.ndim == 1:
            array = array[None]
        fits = array.ndim in (2, 3) and array.shape[-1] == self.units and array.shape[0] in (1, self.count)
        positions = array.shape[1] if array.ndim == 3 else 1
        if fits and positions not in (1, math.prod(others), *others[:1]):
            fits = False
        if not fits:
            wanted = f"[{self.count}, {self.units}] or [{self.count}, {math.prod(others)}, {self.units}]"
            raise self.error(f"the {what} has shape {list(array.shape)}", fix=f"give it as {wanted}")
        if positions == math.prod(others):
            array = array.reshape(array.shape[0], *others, self.units)
        else:
            array = array.reshape(array.shape[0], positions, *[1] * (len(others) - 1), self.units)
        return np.moveaxis(array, -1, self.axis)

    def mask(self, mask: npt.ArrayLike | None, group: int) -> Array:
        if mask is None:
            return np.ones((1,) * (len(self.row) + 1), dtype=bool)
        array = np.asarray(mask)
        if array.dtype != bool and not np.isin(array, (0, 1)).all():
            raise self.error("the mask has numbers other than 0 and 1", fix="give a boolean mask")
        array = array.astype(bool, copy=False)
        if group > 1:
            array = np.repeat(array, group, axis=-1)
        return self.spread(array, "mask")


NEAR = 1 << 17  # bytes that stay in a processor's own cache while they are blended


@dataclass(frozen=True, slots=True)
class Ready:
    """An intervention that fits: `apply` takes a chunk of the value (which it may change) and says what becomes of it."""

    value: str
    apply: Callable[[Array, slice], Array]


def _part(array: Array, rows: slice) -> Array:
    return array if len(array) == 1 else array[rows]


def blend(value: Array, other: Array, mask: Array) -> Array:
    """value := other where the mask is set, in place; `other` is used up.

    As v ^ ((v ^ o) · m) on the bits: `np.where` and `np.copyto` branch on every element, which costs five times as much on a
    random mask.
    """
    bits = np.dtype(f"u{value.dtype.itemsize}")
    ours, change = value.view(bits), other.view(bits)
    change = np.bitwise_xor(change, ours, out=change if change.shape == ours.shape else None)
    change *= mask
    ours ^= change
    return value


def swap_rows(place: Place, step: Swap, values: Array) -> Ready:
    """value[mask] := the value on the source."""
    mask, source = place.mask(step.mask, step.group), np.broadcast_to(np.asarray(step.source), place.count)

    def apply(value: Array, rows: slice) -> Array:
        size = max(1, NEAR // max(1, value[:1].nbytes))
        for start in range(0, len(value), size):
            some = slice(rows.start + start, min(rows.start + start + size, rows.stop))
            blend(value[start : start + size], values[source[some]], _part(mask, some))
        return value

    return Ready(place.site.value, apply)


def put_values(place: Place, step: Patch) -> Ready:
    """value[mask] := given numbers."""
    mask, values = place.mask(step.mask, step.group), np.asarray(step.values)
    whole = values.ndim == len(place.row) + 1 and values.shape[1:] == place.row and len(values) in (1, place.count)
    if values.ndim == 0:
        values = values.reshape((1,) * (len(place.row) + 1))
    elif not whole:
        values = place.spread(values, "array of values")

    def apply(value: Array, rows: slice) -> Array:
        return blend(value, _part(values, rows).astype(value.dtype), _part(mask, rows))

    return Ready(place.site.value, apply)


def replace_units(place: Place, step: Do) -> Ready:
    """units := constants, or weight · parents + constants, the numbers of a plan."""
    slab = step.constant
    if slab.ndim == 1:
        slab = slab.reshape([1, *(len(slab) if i == place.axis else 1 for i in range(1, len(place.row) + 1))])
    elif slab.ndim != len(place.row) + 1 or slab.shape[0] != 1:
        raise place.error(
            f"constants of shape {list(slab.shape)} differ between rows of the batch", fix="give one for all rows"
        )
    units, parents = (np.asarray(index, dtype=np.int64) for index in (step.units, step.parents))

    def put(value: Array) -> Array:
        result = slab
        if step.weight is not None:
            read = np.moveaxis(np.take(value, parents, axis=place.axis), place.axis, -1).astype(np.float64)
            result = np.moveaxis(read @ step.weight.T, -1, place.axis) + slab
        np.moveaxis(value, place.axis, 0)[units] = np.moveaxis(
            np.broadcast_to(result, [*value.shape[: place.axis], len(units), *value.shape[place.axis + 1 :]]),
            place.axis,
            0,
        )
        return value

    def apply(value: Array, rows: slice) -> Array:
        if step.basis is None:
            return put(value)
        there = put(turn_meaning({"axis": place.axis}, value, step.basis))
        return turn_meaning({"axis": place.axis}, there, np.linalg.inv(step.basis)).astype(value.dtype)

    return Ready(place.site.value, apply)


def rows_of(step: Step) -> int:
    """How many rows an intervention itself asks for."""
    if isinstance(step, Do):
        return 1
    shapes = [np.shape(step.mask)] if step.mask is not None else []
    if isinstance(step, Patch):
        shapes.append(np.shape(step.values))
    return max([shape[0] for shape in shapes if len(shape) > 1], default=1)
