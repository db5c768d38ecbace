"""`cmrc.interpret(program)`: run a model with interventions on its values, executed directly on its graph.

interpreter = cmrc.interpret(program)
interpreter.run((x,))                                          # the outputs
interpreter.tap((x,), "blocks.3.mlp.act")                      # a value
interpreter.patch((x,), "act", values, mask)                   # units := values, where the mask is set
interpreter.interchange((base,), (source,), "act", mask)       # units := what they are on another input
interpreter.intervene((base,), Swap("a", (s1,), m1), Patch("b", 0.0, m2), plan)   # several at once

Row i of the result is the model on row i of the base under row i of every intervention. The graph is cut at the sites
(`passes/interchange.py`): the prefix runs once for every distinct input, the rest once for every intervention, in chunks
that fit a memory budget. A source is run without interventions. Where one site lies behind another, its own intervention
comes after the effect of the first. It shares nothing with the folding passes, which it serves to judge.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cmrc.errors import InterventionError, SiteError
from cmrc.ir.graph import Array, Do, Graph, Value, numpy_dtype
from cmrc.passes.interchange import made_in
from cmrc.program.plan import Plan
from cmrc.program.program import Program, trace
from cmrc.program.sites import Site
from cmrc.verification.interventions import (
    Intervention,
    Patch,
    Place,
    Ready,
    Step,
    Swap,
    put_values,
    replace_units,
    rows_of,
    swap_rows,
)
from cmrc.verification.pieces import Pieces

Inputs: TypeAlias = Sequence[Any] | Mapping[str, Any]

BUDGET = 32 * 2**20  # bytes of values that one chunk may take: more leave the cache
HELD_AT_ONCE = 4  # values of a piece that a runtime holds at a time, as a rough bound for the budget


def interpret(model: Any, args: tuple[Any, ...] = (), *, budget: int = BUDGET, **options: Any) -> Interpreter:
    """An interpreter for a program, or for anything that `cmrc.trace` takes."""
    return Interpreter(trace(model, args, **options), budget)


@dataclass(eq=False, repr=False)
class Interpreter:
    """Runs one program under interventions. `budget` bounds the bytes of a chunk; results do not depend on it."""

    program: Program
    budget: int = BUDGET
    _pieces: dict[tuple[str, ...], Pieces] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Interpreter({self.program!r})"

    def run(self, inputs: Inputs) -> list[Array]:
        """The outputs, without any intervention."""
        return self.hold(inputs, ()).intervene()

    def tap(self, inputs: Inputs, site: str) -> Array:
        """The value of a site, without any intervention."""
        tapped = self.site(site)
        return self.hold(inputs, (tapped,)).tap(tapped.value)

    def patch(self, inputs: Inputs, site: str, values: npt.ArrayLike, mask: npt.ArrayLike | None = None) -> list[Array]:
        """The outputs with units of a site replaced by given values."""
        return self.intervene(inputs, Patch(site, values, mask))

    def interchange(
        self, base: Inputs, source: Inputs, site: str, mask: npt.ArrayLike, *, group: int = 1
    ) -> list[Array]:
        """The outputs on `base` with the masked units of a site as they are on `source`."""
        return self.intervene(base, Swap(site, source, mask, group))

    def intervene(self, base: Inputs, *interventions: Intervention) -> list[Array]:
        """The outputs on `base` under interventions; those on one site act in the order given.

        Base and sources have a row for every intervention, or a single one for all.
        """
        steps = self.flatten(interventions)
        batches = [self.program.host.bind(base)]
        batches += [self.program.host.bind(step.source) for step in steps if isinstance(step, Swap)]
        pool, indices = distinct(batches)
        prepared = self.hold(pool, [self.site_of(step) for step in steps])
        rows = max([len(index) for index in indices] + [rows_of(step) for step in steps])
        for index in indices:
            if len(index) not in (1, rows):
                raise InterventionError(
                    f"there are {rows} rows of interventions and {len(index)} of inputs",
                    fix="give base, sources and masks the same number of rows, or one row for all",
                )
        spread = [np.broadcast_to(index, rows) for index in indices]
        sources = iter(spread[1:])
        return prepared.intervene(
            spread[0], [replace(s, source=next(sources)) if isinstance(s, Swap) else s for s in steps]
        )

    # ------------------------------------------------------------ parts

    def site(self, name: str | Site) -> Site:
        """The one site of a name; a glob that means several is an error here."""
        if isinstance(name, Site):
            return name
        sites = self.program.find(name)
        if len(sites) != 1:
            raise SiteError(f"{name!r} means {len(sites)} sites", fix="an intervention is at one site: name it")
        return sites[0]

    def site_of(self, step: Step) -> Site:
        if isinstance(step, Do):
            return self.program.site_of(step.value, step.axis, step.site)
        site = self.site(step.site)
        return site if step.axis is None else self.program.site_of(site.value, step.axis, site.name)

    def flatten(self, interventions: Sequence[Intervention]) -> list[Step]:
        """Plans as their do's, everything else as it is."""
        steps: list[Step] = []
        for step in interventions:
            if isinstance(step, Plan):
                self.program.require(step)
                steps.extend(step.entries)
            else:
                steps.append(step)
        return steps

    def hold(self, inputs: Inputs, sites: Sequence[str | Site]) -> HeldInputs:
        """Run the prefix on every row: what any number of interventions at these sites will start from."""
        chosen = {self.site(site).value for site in sites}
        order = tuple(name for name in self.program.values if name in chosen)
        if order not in self._pieces:
            self._pieces[order] = Pieces.make(self.program, order)
        return HeldInputs(self, self._pieces[order], self.program.host.bind(inputs))


class HeldInputs:
    """What the prefix made of some inputs: every value that is live across the cut, a row of the batch to each position
    of the first axis; and the value of every site without interventions."""

    def __init__(self, interpreter: Interpreter, pieces: Pieces, feeds: dict[str, Array]) -> None:
        self.interpreter, self.pieces = interpreter, pieces
        self.graph = interpreter.program.graph
        self._rank: dict[str, int] = {}  # of a value as the host has it
        self._row: dict[str, tuple[int, ...]] = {}  # the shape of one row
        self.count = _common_rows(feeds)
        self._sizes = _bind_sizes(self.graph, feeds)
        self.plain = {name: self._front(name, array, self.count) for name, array in feeds.items()}
        self.constant: dict[str, Array] = {}  # outputs that no input reaches
        last = max(pieces.cut.levels.values(), default=0)
        for level in range(last + 1):
            self.plain.update(self._in_chunks(level))

    def row(self, value: str) -> tuple[int, ...]:
        """The shape of a value for one input."""
        return self._row[value]

    def tap(self, value: str) -> Array:
        """A site without interventions, as the host has it."""
        return self._back(value, self.plain[value])

    # ------------------------------------------------------------ interventions

    def intervene(self, base: Array | None = None, interventions: Sequence[Intervention] = ()) -> list[Array]:
        """The outputs for rows `base` of what is held (all without one); a Swap's source are rows of it too."""
        index = np.arange(self.count) if base is None else np.asarray(base)
        steps = [self._ready(step, len(index)) for step in self.interpreter.flatten(interventions)]
        outputs: dict[str, list[Array]] = {}
        size = self._chunk(1)
        for start in range(0, len(index), size):
            rows = slice(start, min(start + size, len(index)))
            for name, array in self._one_chunk(index[rows], rows, steps).items():
                outputs.setdefault(name, []).append(array)
        joined = {name: np.concatenate(parts) if len(parts) > 1 else parts[0] for name, parts in outputs.items()}
        return [
            self.constant[name] if name in self.pieces.cut.free else self._back(name, joined[name])
            for name in self.graph.outputs
        ]

    def _one_chunk(self, index: Array, rows: slice, steps: Sequence[Ready]) -> dict[str, Array]:
        cut, whole = self.pieces.cut, len(index) == self.count and np.array_equal(index, np.arange(self.count))
        changed, own = {step.value for step in steps}, set[str]()
        start = min(
            (cut.levels[step.value] for step in steps), default=0
        )  # what lies before is held without interventions
        later = {v.name for piece in cut.pieces[start + 1 :] for v in piece.inputs} | set(self.graph.outputs)
        first = {v.name for v in self.graph.inputs}.union(*(made_in(piece.nodes) for piece in cut.pieces[: start + 1]))
        env = {
            name: self.plain[name][index] if not whole or name in changed else self.plain[name]
            for name in first & later - cut.free
        }
        for level, piece in enumerate(cut.pieces):
            if level > start:
                env.update(self._run(level, {v.name: env[v.name] for v in piece.inputs}, len(index)))
            for step in steps:
                if cut.levels[step.value] == level and step.value in env:
                    value = env[step.value]
                    if level > start and step.value not in own:  # its memory may be that of another value
                        value = value.copy()
                        own.add(step.value)
                    env[step.value] = step.apply(value, rows)
        return {name: env[name] for name in self.graph.outputs if name not in cut.free}

    def _ready(self, step: Step, count: int) -> Ready:
        site = self.interpreter.site_of(step)
        if site.value not in self.pieces.cut.levels:
            raise SiteError(
                "the held values were not cut there", node=site.name, op=site.op, fix="hold them for this site"
            )
        row, batch = self._row[site.value], self.pieces.rows[site.value]
        if site.axis == batch:
            raise InterventionError(
                "its units are along the batch axis", node=site.name, op=site.op, fix="name an axis"
            )
        axis = site.axis + (self._rank[site.value] == len(row) or site.axis < batch)
        place = Place(site, axis, row, count)
        if isinstance(step, Do):
            return replace_units(place, step)
        if isinstance(step, Patch):
            return put_values(place, step)
        return swap_rows(place, step, self.plain[site.value])

    # ------------------------------------------------------------ pieces

    def _in_chunks(self, level: int) -> dict[str, Array]:
        """A piece on every row that is held, without interventions."""
        chunks: dict[str, list[Array]] = {}
        names = [value.name for value in self.pieces.cut.pieces[level].inputs]
        size = self._chunk(level)
        for start in range(0, self.count, size):
            stop = min(start + size, self.count)
            for name, array in self._run(level, {n: self.plain[n][start:stop] for n in names}, stop - start).items():
                chunks.setdefault(name, []).append(array)
        return {name: np.concatenate(parts) if len(parts) > 1 else parts[0] for name, parts in chunks.items()}

    def _run(self, level: int, feeds: Mapping[str, Array], count: int) -> dict[str, Array]:
        """One piece on one chunk. A model that was traced for a fixed batch always gets that many rows."""
        runner, batch = self.pieces.runners[level], self.pieces.batch
        if runner is None:
            return {}
        rows = batch if isinstance(batch, int) else count
        given = {name: self._back(name, _padded(array, rows)) for name, array in feeds.items() if name in runner.inputs}
        for name in runner.sizes:
            given[name] = self._back(name, np.empty((rows, *self._row[name]), self._dtype(name)))
        results: dict[str, Array] = {}
        for name, array in runner.run(given).items():
            if name in self.pieces.cut.free:
                self.constant[name] = array
                continue
            front = self._front(name, array, rows)
            if name in self.pieces.cut.pieces[level].outputs:
                results[name] = front[:count]
        return results

    def _chunk(self, level: int) -> int:
        """How many rows fit the budget, from here to the last piece."""
        if isinstance(self.pieces.batch, int):
            return self.pieces.batch
        largest = live = 0
        for piece in self.pieces.cut.pieces[level:]:
            sizes = [self._bytes(value) for node in piece.nodes for value in node.outputs]
            largest = max([largest, *sizes])
            live += sum(self._bytes(value) for value in piece.inputs)
        return max(1, self.interpreter.budget // max(1, HELD_AT_ONCE * largest + live))

    def _bytes(self, value: Value) -> int:
        width = {"float64": 8, "int64": 8, "float16": 2, "bfloat16": 2, "bool": 1}.get(value.dtype, 4)
        dims = [
            1 if n == self.pieces.batch else n if isinstance(n, int) else self._sizes.get(n, 1) for n in value.shape
        ]
        return width * math.prod(dims)

    # ------------------------------------------------------------ rows of the batch

    def _front(self, name: str, array: Array, count: int) -> Array:
        """The value with the rows of the batch along its first axis; several to an input become an axis of their own."""
        axis = self.pieces.rows.get(name, 0)
        size = array.shape[axis] if array.ndim > axis else 0
        if size == count:
            front = np.moveaxis(array, axis, 0) if axis else array
        elif axis == 0 and size and size % count == 0:
            front = array.reshape(count, size // count, *array.shape[1:])
        else:
            raise InterventionError(
                f"has shape {list(array.shape)} for {count} inputs: its rows do not match the batch",
                node=self.interpreter.program.title(name),
                fix="name another site, or trace the model for a batch of 1",
            )
        self._rank[name], self._row[name] = array.ndim, front.shape[1:]
        return front

    def _back(self, name: str, array: Array) -> Array:
        if array.ndim > self._rank[name]:
            return array.reshape(-1, *array.shape[2:])
        axis = self.pieces.rows.get(name, 0)
        return np.moveaxis(array, 0, axis) if axis else array

    def _dtype(self, name: str) -> Any:
        return numpy_dtype(self.interpreter.program.values[name].dtype)


def _padded(array: Array, rows: int) -> Array:
    """As many rows as the model takes: the last one again and again."""
    if len(array) == rows:
        return array
    return np.concatenate([array, np.broadcast_to(array[-1:], (rows - len(array), *array.shape[1:]))])


def _common_rows(feeds: Mapping[str, Array]) -> int:
    counts = {name: len(array) if array.ndim else 0 for name, array in feeds.items()}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise InterventionError(f"the inputs differ in their rows, or have none: {listed}", fix="give a batch of each")
    return next(iter(counts.values()))


def _bind_sizes(graph: Graph, feeds: Mapping[str, Array]) -> dict[str, int]:
    """What the dynamic sizes are for these inputs."""
    sizes: dict[str, int] = {}
    for value in graph.inputs:
        sizes.update(
            {n: size for n, size in zip(value.shape, feeds[value.name].shape, strict=False) if isinstance(n, str)}
        )
    return sizes


def distinct(batches: Sequence[dict[str, Array]]) -> tuple[dict[str, Array], list[Array]]:
    """Every row of the batches once, and for each batch which of them its rows are."""
    seen: dict[bytes, int] = {}
    taken: list[tuple[int, int]] = []
    indices: list[Array] = []
    for b, batch in enumerate(batches):
        arrays = [np.ascontiguousarray(array) for array in batch.values()]
        index = np.empty(_common_rows(batch), dtype=np.int64)
        for i in range(len(index)):
            key = b"|".join(array[i].tobytes() for array in arrays)
            if key not in seen:
                seen[key] = len(taken)
                taken.append((b, i))
            index[i] = seen[key]
        indices.append(index)
    names = list(batches[0])
    for batch in batches[1:]:
        for name in names:
            if batch[name].shape[1:] != batches[0][name].shape[1:]:
                shapes = f"{list(batches[0][name].shape)} and {list(batch[name].shape)}"
                fix = "give base and source rows of one shape"
                raise InterventionError(f"base and source differ in shape: {shapes}", node=name, op="input", fix=fix)
    pool = {name: np.stack([batches[b][name][i] for b, i in taken]) for name in names}
    return pool, indices
