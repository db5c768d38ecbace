"""A plan: the ordered do's, and the fingerprint of the model they were made for. A file to read, diff and review."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import numpy.typing as npt

from cmrc.errors import DoError
from cmrc.ir.fingerprint import Fingerprint
from cmrc.ir.graph import Array, Graph
from cmrc.program.do import Affine, Do, checked_do, unit_index
from cmrc.program.dry_run import try_dos
from cmrc.program.groups import Group, expand
from cmrc.program.plan_file import Contents, read_plan, write_plan
from cmrc.program.sites import Site


class Model(Protocol):
    """What a plan needs of the program that it is made for."""

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
    fingerprint: Fingerprint | None = None
    source: str = "plan"
    made: dict[str, Any] = field(default_factory=dict)  # how `cmrc.plan` made it: recipe, data, what each site kept
    scores: dict[str, Array] = field(default_factory=dict)  # by site: what the selection went by, of every unit

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
        at = self._next_line()
        program = self._model(at)
        if (constant is None) == (affine is None):
            raise DoError("a do takes either constant= or affine=", at=at, fix="give exactly one of the two")
        for place in program.find(site, at=at):
            self.entries.append(
                checked_do(place, units, constant=constant, affine=affine, axis=axis, earlier=self.entries, at=at)
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

        `constant` is one number, or one per unit: it enters by the first writer of the unit, and nothing (0) by the others,
        so that it is what a residual stream or a concatenation carries. Or it names for every writer what that becomes, as
        `do` takes it. What would not fold is refused here, with the reason, and the plan stays as it was.
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
                checked_do(site, entry.units, constant=constant, affine=affine, axis=entry.axis, earlier=seen, at=at)
            )
        self.entries[:] = seen

    def save(self, path: str | Path, *, one_file: bool = False) -> None:
        """Write `path` (JSON), and a safetensors file beside it if there are large arrays. Whole or not at all.

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
