"""A plan: the ordered do's, and the fingerprint of the model they were made for. A file to read, diff and review.

`plan.json` holds everything a person wants to see; arrays of more than `INLINE` numbers lie beside it in a safetensors
file named by its content, so that a plan is never half-written and never needs pickle.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from cmrc.errors import DoError, DoShapeError, DoUnitsError, DoValueError, PlanError
from cmrc.files import require_writable, write_whole
from cmrc.ir.axes import Index
from cmrc.ir.fingerprint import Fingerprint
from cmrc.ir.graph import Array

if TYPE_CHECKING:
    from cmrc.program.groups import Group
    from cmrc.program.program import Program, Site

FORMAT = "cmrc-plan-1"
INLINE = 64


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

    def to_json(self, pack: Callable[[str, Array], Any]) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "site": self.site,
            "value": self.value,
            "axis": self.axis,
            "units": to_ranges(self.units),
        }
        if self.weight is None:
            return {**entry, "constant": pack("constant", self.constant)}
        weight, bias = pack("weight", self.weight), pack("bias", self.constant)
        return {**entry, "affine": {"parents": to_ranges(self.parents), "weight": weight, "bias": bias}}

    @classmethod
    def from_json(cls, entry: Any, unpack: Callable[[Any], Array], at: str) -> Self:
        try:
            site, value, axis = str(entry["site"]), str(entry.get("value", entry["site"])), int(entry["axis"])
            units = from_ranges(entry["units"])
            if "affine" not in entry:
                return cls(site, value, axis, units, unpack(entry["constant"]))
            affine = entry["affine"]
            parents = from_ranges(affine["parents"])
            return cls(site, value, axis, units, unpack(affine["bias"]), parents, unpack(affine["weight"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(
                f"an entry cannot be read: {error}", at=at, fix="compare it with the entries that `Plan.save` writes"
            ) from error


@dataclass(eq=False, repr=False)
class Plan:
    """Ordered do's for one model. `do` checks each against the model's sites as it is added."""

    program: Program | None = None
    entries: list[Do] = field(default_factory=list)
    fingerprint: Fingerprint | None = None
    source: str = "plan"
    made: dict[str, Any] = field(default_factory=dict)  # how `cmrc.plan` made it: recipe, data, what each site kept
    scores: dict[str, Array] = field(default_factory=dict)  # of every unit, by site

    def __post_init__(self) -> None:
        if self.program is not None and self.fingerprint is None:
            self.fingerprint = self.program.fingerprint

    def do(
        self,
        site: str,
        *,
        units: Iterable[int] | npt.ArrayLike | str,
        constant: npt.ArrayLike | None = None,
        affine: Affine | None = None,
        axis: int | None = None,
    ) -> Self:
        """Replace units of a site, or of every site that a glob names, by constants or by an affine function of others.

        `units` are indices, a boolean mask, or "all"; `constant` is one number for all, one per unit, or a slab that
        broadcasts against the units' values at every position. `axis` is the site's own unless given.
        """
        at = f"{self.source}: do[{len(self.entries)}]"
        if self.program is None:
            raise DoError("this plan is not bound to a model", at=at, fix="make it with cmrc.Plan(program)")
        if (constant is None) == (affine is None):
            raise DoError("a do takes either constant= or affine=", at=at, fix="give exactly one of the two")
        for found in self.program.find(site, at=at):
            self.entries.append(_checked(found, units, constant, affine, axis, self.entries, at))
        return self

    def do_group(
        self,
        group: str | Group,
        *,
        units: Iterable[int] | npt.ArrayLike | str,
        constant: npt.ArrayLike | Mapping[str, npt.ArrayLike],
    ) -> Self:
        """Replace units of a group (`program.groups()`) by constants: one request becomes a do on each of its writers.

        `constant` is one number, or one a unit: it enters by the first writer of the unit, and nothing (0) by the others, so
        that it is what a residual stream or a concatenation carries. Or it names for every writer what that becomes, as
        `do` takes it. What would not fold is refused here, with the reason, and the plan stays as it was.
        """
        from cmrc.program.groups import dry_run, expand

        at = f"{self.source}: do[{len(self.entries)}]"
        if self.program is None:
            raise DoError("this plan is not bound to a model", at=at, fix="make it with cmrc.Plan(program)")
        found = self.program.group(group, at=at) if isinstance(group, str) else group
        where = {"node": found.name, "op": "group", "at": at}
        places = _units(units, found.units, where)
        entries: list[Do] = []
        for writer, own, values in expand(found, places, constant, where):
            site = self.program.site_of(writer.value, writer.axis, writer.site, at=at)
            entries.append(_checked(site, own, values, None, writer.axis, [*self.entries, *entries], at))
        stops = dry_run(self.program, entries, self.entries)
        if stops:
            raise DoError(f"a replaced unit {stops}", **where, fix="choose another group, or sites behind that node")
        self.entries += entries
        return self

    def check(self, program: Program) -> None:
        """Check every entry against a model: for a plan that was read from a file."""
        seen: list[Do] = []
        for i, entry in enumerate(self.entries):
            at = f"{self.source}: do[{i}]"
            site = program.site_of(entry.value, entry.axis, entry.site, at=at)
            affine = None if entry.weight is None else Affine(entry.parents, entry.weight, entry.constant)
            constant = entry.constant if affine is None else None
            seen.append(_checked(site, entry.units, constant, affine, entry.axis, seen, at))

    def save(self, path: str | Path) -> None:
        """Write `path` (JSON), and a safetensors file beside it if there are large arrays. Whole or not at all."""
        path = Path(path)
        require_writable(path)
        large: dict[str, Array] = {}

        def packer(i: int) -> Callable[[str, Array], Any]:
            def pack(name: str, array: Array) -> Any:
                if array.size <= INLINE:
                    return array.tolist()
                large[f"do[{i}].{name}"] = np.ascontiguousarray(array)
                return {"tensor": f"do[{i}].{name}", "shape": list(array.shape)}

            return pack

        def pack_scores(site: str, array: Array) -> Any:
            if array.size <= INLINE:
                return array.tolist()
            large[f"scores[{site}]"] = np.ascontiguousarray(array)
            return {"tensor": f"scores[{site}]", "shape": list(array.shape)}

        dos = [entry.to_json(packer(i)) for i, entry in enumerate(self.entries)]
        document: dict[str, Any] = {"format": FORMAT}
        if self.fingerprint is not None:
            document["model"] = self.fingerprint.to_json()
        if self.made:
            document["made"] = self.made
        if self.scores:
            document["scores"] = {site: pack_scores(site, array) for site, array in self.scores.items()}
        if large:
            data = save(large)
            name = f"{path.stem}.{hashlib.sha256(data).hexdigest()[:12]}.safetensors"
            document["tensors"] = name
            write_whole(path.parent / name, data)
        document["do"] = dos
        write_whole(path, (json.dumps(document, indent=1) + "\n").encode())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        path = Path(path)
        try:
            document = json.loads(path.read_text())
        except OSError as error:
            raise PlanError(
                f"cannot be read: {error.strerror}", at=str(path), fix="give the path of a plan file"
            ) from error
        except ValueError as error:
            raise PlanError(f"is not JSON: {error}", at=str(path), fix="give a file that `Plan.save` wrote") from error
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise PlanError(f"is not a plan of format {FORMAT}", at=str(path), fix="give a file that `Plan.save` wrote")
        tensors: dict[str, Array] = {}
        if "tensors" in document:
            beside = path.parent / str(document["tensors"])
            try:
                tensors = load_file(beside)
            except (OSError, SafetensorError) as error:
                raise PlanError(
                    f"its arrays in {beside.name} cannot be read: {error}",
                    at=str(path),
                    fix="keep that file beside the plan, unchanged",
                ) from error

        def unpack(packed: Any) -> Array:
            if isinstance(packed, dict):
                return np.asarray(tensors[packed["tensor"]], dtype=np.float64)
            return np.asarray(packed, dtype=np.float64)

        dos = [Do.from_json(entry, unpack, f"{path.name}: do[{i}]") for i, entry in enumerate(document.get("do", []))]
        model = document.get("model")
        scores = {str(site): unpack(packed) for site, packed in document.get("scores", {}).items()}
        known = Fingerprint.from_json(model) if model else None
        return cls(None, dos, known, path.name, dict(document.get("made", {})), scores)

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        return f"Plan({len(self.entries)} do's on {len({e.value for e in self.entries})} sites)"


def difference(first: Plan, second: Plan) -> list[dict[str, Any]]:
    """By site, what two plans replace differently: units, and how far apart the values of common units are."""
    rows = []
    sites = dict.fromkeys(entry.site for plan in (first, second) for entry in plan.entries)
    for site in sites:
        mine, other = ({u: e for e in plan.entries if e.site == site for u in e.units} for plan in (first, second))
        both = sorted(set(mine) & set(other))
        apart = max((_apart(mine[u], other[u], u) for u in both), default=0.0)
        if set(mine) == set(other) and apart == 0.0:
            continue
        scores = next((plan.scores[site] for plan in (first, second) if site in plan.scores), None)
        units = len(scores) if scores is not None else max([*mine, *other]) + 1
        kept, either = units - len(set(mine) | set(other)), units - len(both)
        rows.append(
            {"site": site, "first": to_ranges(sorted(set(mine) - set(other))),
             "second": to_ranges(sorted(set(other) - set(mine))), "both": len(both),
             "jaccard": kept / either if either else 1.0, "values": apart if np.isfinite(apart) else None}
        )  # fmt: skip
    return rows


def _apart(mine: Do, other: Do, unit: int) -> float:
    """How far the replacements of a unit are apart; infinite where they are of different kinds or shapes."""
    parts = []
    for entry in (mine, other):
        place = entry.units.index(unit)
        constant = entry.constant if entry.constant.ndim == 1 else np.moveaxis(entry.constant, entry.axis, 0)
        parts.append((constant[place], entry.parents, None if entry.weight is None else entry.weight[place]))
    (c1, p1, w1), (c2, p2, w2) = parts
    if np.shape(c1) != np.shape(c2) or p1 != p2:
        return math.inf
    gap = float(np.max(np.abs(c1 - c2)))
    return gap if w1 is None or w2 is None else max(gap, float(np.max(np.abs(w1 - w2))))


def pack_text(name: str, array: Array) -> Any:
    """An array as JSON on its own: for annotations, which have no file beside them."""
    if array.size <= INLINE:
        return array.tolist()
    return {
        "float64": base64.b64encode(np.ascontiguousarray(array, dtype="<f8").tobytes()).decode(),
        "shape": list(array.shape),
    }


def unpack_text(packed: Any) -> Array:
    if isinstance(packed, dict):
        return np.frombuffer(base64.b64decode(packed["float64"]), dtype="<f8").reshape(packed["shape"])
    return np.asarray(packed, dtype=np.float64)


def to_ranges(index: Sequence[int]) -> str | list[int]:
    """`0:3,7` for 0, 1, 2, 7; a list where the order is not ascending."""
    if list(index) != sorted(set(index)):
        return [int(i) for i in index]
    runs: list[list[int]] = []
    for i in index:
        if runs and i == runs[-1][1]:
            runs[-1][1] = i + 1
        else:
            runs.append([i, i + 1])
    return ",".join(str(a) if b == a + 1 else f"{a}:{b}" for a, b in runs)


def from_ranges(text: str | list[int]) -> tuple[int, ...]:
    if isinstance(text, list):
        return tuple(int(i) for i in text)
    found: list[int] = []
    for part in text.split(",") if text else []:
        first, _, last = part.partition(":")
        found.extend(range(int(first), int(last)) if last else [int(first)])
    return tuple(found)


# ---------------------------------------------------------------- checks


def _checked(
    site: Site,
    units: Iterable[int] | npt.ArrayLike | str,
    constant: npt.ArrayLike | None,
    affine: Affine | None,
    axis: int | None,
    earlier: Sequence[Do],
    at: str,
) -> Do:
    where = {"node": site.name, "op": site.op, "at": at}
    rank = len(site.shape)
    if axis is None:
        axis = site.axis
    if not -rank <= axis < rank:
        raise DoError(
            f"has no axis {axis}, its shape is {list(site.shape)}", **where, fix=f"name an axis from 0 to {rank - 1}"
        )
    axis %= rank
    size = site.shape[axis]
    if not isinstance(size, int):
        raise DoError(
            f"the size of axis {axis} is known only at run time ({size})", **where, fix="replace units of a fixed axis"
        )
    chosen = _units(units, size, where)
    for other in earlier:
        if other.value != site.value or other.axis != axis:
            continue
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
    if affine is None:
        assert constant is not None
        values = _floats(constant, "constants", where)
        return Do(site.name, site.value, axis, chosen, _slab(values, len(chosen), size, axis, site.shape, where))
    parents = _units(affine.parents, size, where, what="parents")
    replaced = set(chosen) | {
        u for other in earlier if other.value == site.value and other.axis == axis for u in other.units
    }
    bad = sorted(set(parents) & replaced)
    if bad:
        raise DoUnitsError(
            f"parents {_some(bad)} are themselves replaced", **where, fix="choose parents among the units that stay"
        )
    weight = _floats(affine.weight, "weights", where)
    if weight.shape != (len(chosen), len(parents)):
        raise DoShapeError(
            f"the affine weight has shape {list(weight.shape)} for {len(chosen)} units and {len(parents)} parents",
            **where,
            fix=f"give weight as [units, parents] = [{len(chosen)}, {len(parents)}]",
        )
    bias = _slab(_floats(affine.bias, "biases", where), len(chosen), size, axis, site.shape, where, what="biases")
    return Do(site.name, site.value, axis, chosen, bias, parents, weight)


def _units(units: Any, size: int, where: dict[str, str], what: str = "units") -> Index:
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
    found = Index.from_array(array.astype(np.int64))
    if len(set(found)) != len(found):
        raise DoUnitsError(f"{what} are named twice", **where, fix="name each unit once")
    return found


def _floats(values: npt.ArrayLike, what: str, where: dict[str, str]) -> Array:
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DoShapeError(f"the {what} are not an array of numbers", **where, fix="give numbers") from error
    bad = int(np.size(array) - np.count_nonzero(np.isfinite(array)))
    if bad:
        raise DoValueError(f"{bad} of the {what} are NaN or infinite", **where, fix="give finite numbers")
    return array


def _slab(
    values: Array,
    count: int,
    size: int,
    axis: int,
    shape: Sequence[int | str],
    where: dict[str, str],
    what: str = "constants",
) -> Array:
    """One number a unit, kept as a vector; or a slab of the value's rank where it differs by position."""
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
