"""A plan: the ordered do's, and the fingerprint of the model they were made for. A file to read, diff and review."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cmrc.errors import DoError, DoShapeError, DoUnitsError, DoValueError
from cmrc.ir.fingerprint import Fingerprint
from cmrc.ir.graph import CONSTANT, Array, Do, Graph, Index, as_dtype, numpy_dtype
from cmrc.passes.rewriting.recurrent import why_not_held
from cmrc.program.dry_run import try_dos
from cmrc.program.groups import Group, expand
from cmrc.program.plan_file import Contents, read_plan, write_plan
from cmrc.program.sites import Site

CONDITION = 1e4  # of a basis: float32 keeps three digits then


class Model(Protocol):
    """What a plan needs from the program that it is made for."""

    @property
    def graph(self) -> Graph: ...

    @property
    def args(self) -> tuple[Any, ...]: ...

    @property
    def options(self) -> Mapping[str, Any]: ...

    @property
    def fingerprint(self) -> Fingerprint: ...

    def find(self, pattern: str, *, at: str = "") -> list[Site]: ...

    def site_of(self, value: str, axis: int | None, name: str = "", *, at: str = "") -> Site: ...

    def group(self, name: str, *, at: str = "") -> Group: ...


@dataclass(eq=False, repr=False)
class Plan:
    """Ordered do's for one model. `do` checks each against the model's sites as it is added."""

    program: Model | None = None
    entries: list[Do] = field(default_factory=list)
    recorded: Fingerprint | None = None  # of the model that a plan from a file was made for
    source: str = "plan"
    made: dict[str, Any] = field(default_factory=dict)  # how `cmrc.plan` made it: recipe, data, what each site kept
    scores: dict[str, Array] = field(
        default_factory=dict
    )  # by site: the number by which the selection ranked each unit

    @property
    def fingerprint(self) -> Fingerprint | None:
        """Of the model that the plan is for. Of a program's own plan it is made when it is asked for: it reads every weight."""
        return self.program.fingerprint if self.recorded is None and self.program is not None else self.recorded

    def do(
        self,
        site: str,
        *,
        units: Iterable[int] | npt.ArrayLike | str,
        constant: npt.ArrayLike | None = None,
        affine: Affine | None = None,
        axis: int | None = None,
        basis: npt.ArrayLike | None = None,
    ) -> Self:
        """Replace units of a site, or of every site that a glob names, by constants or by an affine function of others.

        `units` are indices, a boolean mask, or "all"; `constant` is one number for all, one per unit, or a slab that
        broadcasts against the units' values at every position. `axis` is the site's own unless given.

        With a `basis`, x becomes T⁻¹ · do(T · x): the units are those of T · x. T is an invertible matrix for each block
        of units, an array [blocks, size, size]: for a head of attention, say, whose units lie side by side.
        """
        at = self._next_line()
        program = self._model(at)
        if (constant is None) == (affine is None):
            raise DoError("a do takes either constant= or affine=", at=at, fix="give exactly one of the two")
        for place in program.find(site, at=at):
            self.entries.append(
                checked_do(
                    place, units, constant=constant, affine=affine, axis=axis, basis=basis, earlier=self.entries, at=at
                )
            )
        return self

    def do_group(
        self,
        group: str | Group,
        *,
        units: Iterable[int] | npt.ArrayLike | str,
        constant: npt.ArrayLike | Mapping[str, npt.ArrayLike],
    ) -> Self:
        """Replace units of a group (`program.groups()`) by constants: one request becomes a do on each of its writers.

        `constant` is one number, or one per unit. The first writer of the unit gets it and the others get 0, so a
        residual stream or a concatenation carries it. Or it is a mapping that gives a constant for each writer, as `do`
        takes it. A request that would not fold is refused here with the reason, and the plan stays as it was.
        """
        at = self._next_line()
        program = self._model(at)
        target = program.group(group, at=at) if isinstance(group, str) else group
        where = {"node": target.name, "op": "group", "at": at}
        places = unit_index(units, target.units, where)
        entries: list[Do] = []
        for writer, own, values in expand(target, places, constant, where):
            site = program.site_of(writer.value, writer.axis, writer.site, at=at)
            earlier = [*self.entries, *entries]
            entries.append(checked_do(site, own, constant=values, axis=writer.axis, earlier=earlier, at=at))
        outcome = try_dos(program.graph, entries, earlier=self.entries)
        if not outcome.folds:
            raise DoError(f"a replaced unit {outcome}", **where, fix="choose another group, or sites behind that node")
        self.entries += entries
        return self

    def _next_line(self) -> str:
        return f"{self.source}: do[{len(self.entries)}]"

    def _model(self, at: str) -> Model:
        if self.program is None:
            raise DoError("this plan is not bound to a model", at=at, fix="make it with cmrc.Plan(program)")
        return self.program

    def check(self, program: Model) -> None:
        """Check every entry against a model, and keep it as `do` would have made it: for a plan that was read from a file."""
        seen: list[Do] = []
        for i, entry in enumerate(self.entries):
            at = f"{self.source}: do[{i}]"
            site = program.site_of(entry.value, entry.axis, entry.site, at=at)
            affine = None if entry.weight is None else Affine(entry.parents, entry.weight, entry.constant)
            constant = entry.constant if affine is None else None
            seen.append(
                checked_do(
                    site,
                    entry.units,
                    constant=constant,
                    affine=affine,
                    axis=entry.axis,
                    basis=entry.basis,
                    earlier=seen,
                    at=at,
                )
            )
        self.entries[:] = seen

    def save(self, path: str | Path, *, one_file: bool = False) -> None:
        """Write `path` (JSON), and a safetensors file beside it if there are large arrays. Both are written completely or not at all.

        With `one_file` there is no second file: every array is written as text.
        """
        write_plan(Path(path), Contents(self.entries, self.fingerprint, self.made, self.scores), one_file=one_file)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a plan file. The plan is checked against a model where it is used."""
        path = Path(path)
        contents = read_plan(path)
        return cls(None, contents.entries, contents.fingerprint, path.name, dict(contents.made), dict(contents.scores))

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        return f"Plan({len(self.entries)} do's on {len({e.value for e in self.entries})} sites)"


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """units := weight · parents + bias. `parents` are retained units of the same site; `weight` is [units, parents]."""

    parents: Sequence[int]
    weight: npt.ArrayLike
    bias: npt.ArrayLike = 0.0


def checked_do(
    site: Site,
    units: Iterable[int] | npt.ArrayLike | str,
    *,
    constant: npt.ArrayLike | None = None,
    affine: Affine | None = None,
    axis: int | None = None,
    basis: npt.ArrayLike | None = None,
    earlier: Sequence[Do] = (),
    at: str = "",
) -> Do:
    """A do that fits the site and the do's before it, or an error that says why it does not."""
    where = {"node": site.name, "op": site.op, "at": at}
    if site.op == CONSTANT:
        raise DoError(
            "is a constant that the model returns: its readers use it as a weight, which no replacement can reach",
            **where,
            fix="choose a value that is computed from the inputs",
        )
    axis, size = _fixed_axis(site, axis, where)
    chosen = unit_index(units, size, where)
    turned = None if basis is None else _matrices(basis, size, where)
    beside = [other for other in earlier if other.value == site.value and other.axis == axis]
    _require_one_basis(turned, [other for other in earlier if other.value == site.value], site, where)
    _require_free(chosen, beside, where)
    if affine is None:
        assert constant is not None
        values = _slab(_floats(constant, "constants", where), len(chosen), axis, site.shape, where)
        _require_range(values, chosen, axis, "constant", site.dtype, where)
        return _held(site, Do(site.name, site.value, axis, chosen, values, basis=turned), where)
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
    return _held(site, Do(site.name, site.value, axis, chosen, bias, parents, weight, turned), where)


def _held(site: Site, do: Do, where: dict[str, str]) -> Do:
    """The do, if it replaces no hidden state, or one whose recurrence can read the replacement by its weights."""
    problem = None if site.recurrence is None else why_not_held(site.recurrence, do)
    if problem is not None:
        raise DoError(problem[0], **where, fix=problem[1])
    return do


def _matrices(basis: npt.ArrayLike, size: int, where: dict[str, str]) -> Array:
    """An invertible matrix for each block of units."""
    array = _floats(basis, "numbers of the basis", where)
    blocks = array[None] if array.ndim == 2 else array
    if blocks.ndim != 3 or blocks.shape[1] != blocks.shape[2] or blocks.shape[0] * blocks.shape[1] != size:
        raise DoShapeError(
            f"a basis of shape {list(array.shape)} does not fit {size} units",
            **where,
            fix=f"give a square matrix for each block of units, [blocks, size, size] with blocks · size = {size}",
        )
    condition = np.linalg.cond(blocks)
    worst = int(np.argmax(condition))
    if not condition[worst] <= CONDITION:
        raise DoValueError(
            f"matrix {worst} of the basis has condition number {condition[worst]:.3g}: it cannot be inverted without loss",
            **where,
            fix=f"give matrices with condition numbers up to {CONDITION:g}: an orthogonal one has 1",
        )
    return blocks


def _require_one_basis(basis: Array | None, beside: Sequence[Do], site: Site, where: dict[str, str]) -> None:
    """Units of different bases would not be different units."""
    if site.recurrence is not None and basis is not None:
        raise DoError(
            "is a hidden state, whose units have no other basis", **where, fix="replace its units without a basis"
        )
    if beside and (basis is not None or beside[0].basis is not None):
        raise DoError(
            "another replacement of this value is before it, and one of the two is in a basis",
            **where,
            fix="give all units of a value in one replacement with its basis",
        )


def _fixed_axis(site: Site, axis: int | None, where: dict[str, str]) -> tuple[int, int]:
    """The axis, counted from the front, and its size, which must not be dynamic."""
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
    """Check that no earlier do on this axis replaces one of these units, or rebuilds others from it."""
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
            f"{what} {_some(outside)} are out of range: there are {size} units",
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
    """Check that numbers which are finite in float64 are also finite in the model's type."""
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
    """One number per unit, kept as a vector; or a slab of the value's rank if it differs by position."""
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
