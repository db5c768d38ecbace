"""One replacement: units of a site become constants, or an affine function of units that stay.

    x[units] := constant                           do(units := c)
    x[units] := weight · x[parents] + constant     do(units := B · parents + β)

`checked_do` holds a request against the site and the do's before it, in the user's own words. `put_dos` writes do's into the IR.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cmrc.errors import DoError, DoShapeError, DoUnitsError, DoValueError
from cmrc.ir.axes import Index
from cmrc.ir.graph import Array, Graph, Marks, Node, Value, as_dtype, literal, numpy_dtype
from cmrc.program.sites import Site


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """units := weight · parents + bias. `parents` are retained units of the same site; `weight` is [units, parents]."""

    parents: Sequence[int]
    weight: npt.ArrayLike
    bias: npt.ArrayLike = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Do:
    """One replacement, checked: units of an axis of a value, and what they become. Arrays are float64."""

    site: str
    value: str
    axis: int
    units: tuple[int, ...]
    constant: Array  # the constants; for an affine replacement its bias
    parents: tuple[int, ...] = ()
    weight: Array | None = None


def checked_do(
    site: Site,
    units: Iterable[int] | npt.ArrayLike | str,
    *,
    constant: npt.ArrayLike | None = None,
    affine: Affine | None = None,
    axis: int | None = None,
    earlier: Sequence[Do] = (),
    at: str = "",
) -> Do:
    """A do that fits the site and the do's before it, or the error that says why it does not."""
    where = {"node": site.name, "op": site.op, "at": at}
    axis, size = _fixed_axis(site, axis, where)
    chosen = unit_index(units, size, where)
    beside = [other for other in earlier if other.value == site.value and other.axis == axis]
    _require_free(chosen, beside, where)
    if affine is None:
        assert constant is not None
        values = _slab(_floats(constant, "constants", where), len(chosen), axis, site.shape, where)
        _require_range(values, chosen, axis, "constant", site.dtype, where)
        return Do(site.name, site.value, axis, chosen, values)
    parents = unit_index(affine.parents, size, where, what="parents")
    replaced = set(chosen).union(*(other.units for other in beside))
    gone = sorted(set(parents) & replaced)
    if gone:
        raise DoUnitsError(
            f"parents {_some(gone)} are themselves replaced", **where, fix="choose parents among the units that stay"
        )
    weight = _floats(affine.weight, "weights", where)
    if weight.shape != (len(chosen), len(parents)):
        raise DoShapeError(
            f"the affine weight has shape {list(weight.shape)} for {len(chosen)} units and {len(parents)} parents",
            **where,
            fix=f"give weight as [units, parents] = [{len(chosen)}, {len(parents)}]",
        )
    bias = _slab(_floats(affine.bias, "biases", where), len(chosen), axis, site.shape, where, what="biases")
    _require_range(weight, chosen, 0, "weight", site.dtype, where)
    _require_range(bias, chosen, axis, "bias", site.dtype, where)
    return Do(site.name, site.value, axis, chosen, bias, parents, weight)


def _fixed_axis(site: Site, axis: int | None, where: dict[str, str]) -> tuple[int, int]:
    """The axis, counted from the front, and its size, which must be known before the model runs."""
    rank = len(site.shape)
    if axis is None:
        axis = site.axis
    if not -rank <= axis < rank:
        raise DoError(
            f"has no axis {axis}, its shape is {list(site.shape)}", **where, fix=f"name an axis from 0 to {rank - 1}"
        )
    size = site.shape[axis]
    if not isinstance(size, int):
        raise DoError(
            f"the size of axis {axis % rank} is known only at run time ({size})",
            **where,
            fix="replace units of a fixed axis",
        )
    return axis % rank, size


def _require_free(chosen: Index, beside: Sequence[Do], where: dict[str, str]) -> None:
    """That no earlier do on this axis replaces one of these units, or rebuilds others from it."""
    for other in beside:
        twice = sorted(set(other.units) & set(chosen))
        if twice:
            raise DoUnitsError(f"units {_some(twice)} are replaced twice", **where, fix="name each unit in one do")
        orphaned = sorted(set(other.parents) & set(chosen))
        if orphaned:
            raise DoUnitsError(
                f"units {_some(orphaned)} are parents of an earlier do",
                **where,
                fix="rebuild that unit from units that stay",
            )


def unit_index(units: Any, size: int, where: dict[str, str], *, what: str = "units") -> Index:
    """Indices, a boolean mask or "all", as positions of an axis of this size."""
    if isinstance(units, str):
        if units != "all":
            raise DoUnitsError(
                f"{what}={units!r} is not understood", **where, fix='give indices, a boolean mask, or "all"'
            )
        return Index(range(size))
    array = np.asarray(list(units) if not isinstance(units, np.ndarray) else units)
    if array.dtype == bool and array.shape == (size,):
        array = np.flatnonzero(array)
    if array.size == 0:
        raise DoUnitsError(f"names no {what}", **where, fix=f"give at least one of the {size} units")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DoUnitsError(
            f"{what} are not a list of whole numbers", **where, fix='give indices, a boolean mask, or "all"'
        )
    outside = np.unique(array[(array < 0) | (array >= size)]).tolist()
    if outside:
        raise DoUnitsError(
            f"{what} {_some(outside)} are out of range: it has {size} units",
            **where,
            fix=f"units run from 0 to {size - 1}",
        )
    index = Index.from_array(array.astype(np.int64))
    if len(set(index)) != len(index):
        raise DoUnitsError(f"{what} are named twice", **where, fix="name each unit once")
    return index


def _floats(values: npt.ArrayLike, what: str, where: dict[str, str]) -> Array:
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DoShapeError(f"the {what} are not an array of numbers", **where, fix="give numbers") from error
    bad = int(np.size(array) - np.count_nonzero(np.isfinite(array)))
    if bad:
        raise DoValueError(f"{bad} of the {what} are NaN or infinite", **where, fix="give finite numbers")
    return array


def _require_range(values: Array, units: Index, axis: int, what: str, dtype: str, where: dict[str, str]) -> None:
    """That numbers which are finite in float64 are finite where the model holds them."""
    with np.errstate(over="ignore"):
        lost = ~np.isfinite(as_dtype(values, dtype))
    if not lost.any():
        return
    by_unit = (lost if lost.ndim == 1 else np.moveaxis(lost, axis, 0)).reshape(len(units), -1).any(axis=1)
    largest = float(ml_dtypes.finfo(numpy_dtype(dtype)).max)  # type: ignore[no-untyped-call]
    raise DoValueError(
        f"the {what} {values[lost][0]:.3g} of unit {units[int(by_unit.argmax())]} is infinite in {dtype}, "
        f"which ends at {largest:.3g}",
        **where,
        fix="give a smaller number, leave that unit out, or trace the model in a wider type",
    )


def _slab(
    values: Array, count: int, axis: int, shape: Sequence[int | str], where: dict[str, str], *, what: str = "constants"
) -> Array:
    """One number per unit, kept as a vector; or a slab of the value's rank where it differs by position."""
    if values.ndim == 0:
        return np.full(count, float(values))
    if values.ndim == 1 and len(values) == count:
        return values
    if values.ndim == 2 and axis < len(shape) - 1 and values.shape == (count, shape[-1]):  # a vector for each head
        spread = [1] * len(shape)
        spread[axis], spread[-1] = values.shape
        return values.reshape(spread)
    if values.ndim == len(shape) and values.ndim > 1:
        wanted = [count if i == axis else n for i, n in enumerate(shape)]
        if all(n == 1 or n == w for n, w in zip(values.shape, wanted, strict=True)) and values.shape[axis] == count:
            return values
    given = len(values) if values.ndim == 1 else f"an array {list(values.shape)} of {math.prod(values.shape)}"
    raise DoShapeError(
        f"the plan gives {given} {what} for {count} units",
        **where,
        fix="give one constant per replaced unit, or one for all",
    )


def _some(numbers: Sequence[int]) -> str:
    shown = ", ".join(str(n) for n in numbers[:5])
    return f"{shown} and {len(numbers) - 5} more" if len(numbers) > 5 else shown


def put_dos(graph: Graph, entries: Sequence[Do]) -> Graph:
    """Insert a do node for each entry behind the value it names; everyone who read the value reads the last do."""
    by_value: dict[str, list[tuple[int, Do]]] = {}
    for i, entry in enumerate(entries):
        by_value.setdefault(entry.value, []).append((i, entry))
    renamed: dict[str, str] = {}
    nodes: list[Node] = []

    def chain(value: Value) -> None:
        name = value.name
        for i, entry in by_value[value.name]:
            output = Value(f"{value.name}.do{i}", value.shape, value.dtype)
            slab = entry.constant
            if slab.ndim == 1:
                slab = slab.reshape((1,) * entry.axis + slab.shape + (1,) * (len(value.shape) - entry.axis - 1))
            slab = as_dtype(slab, value.dtype)  # the model holds the constant in its own precision
            attrs: dict[str, Any] = {"axis": entry.axis, "units": Index.of(entry.units)}
            inputs: tuple[Any, ...] = (name, literal(slab))
            if entry.weight is not None:
                attrs["parents"] = entry.parents
                inputs = (*inputs, literal(entry.weight))
            nodes.append(Node("do", inputs, (output,), attrs, path=entry.site, marks=Marks(sources=(i,))))
            name = output.name
        renamed[value.name] = name

    for value in graph.inputs:
        if value.name in by_value:
            chain(value)
    for node in graph.nodes:
        if not renamed.keys().isdisjoint(node.values()):
            node = node.with_inputs([renamed.get(o, o) if isinstance(o, str) else o for o in node.inputs])
        nodes.append(node)
        for value in node.outputs:
            if value.name in by_value:
                chain(value)
    return Graph(graph.inputs, tuple(nodes), tuple(renamed.get(name, name) for name in graph.outputs))
