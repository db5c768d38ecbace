"""Rows of unlabelled data, and the original's outputs on them.

Rows of one shape are shuffled and put into batches anew in every epoch. Where batches differ in shape (texts of different
lengths), they stay as they are given, and only their order changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cmrc.errors import InputError
from cmrc.hosts.protocols import Host, Lesson, Runner
from cmrc.ir.graph import Array
from cmrc.statistics.batches import as_array, batches, fixed_batch

HELD_OUT = 0.1  # of the data, where nothing else is given
MOST_HELD_OUT = 512
LABELS = "labels"
KNOWN = 2**28  # bytes of the original's outputs that are kept, so that it runs once for every row
Part = dict[str, Array]


@dataclass(frozen=True, slots=True, eq=False)
class PoolRows:
    """A batch, and where its rows lie in the pool."""

    arrays: Part
    places: Array


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Parts of data: one if all rows have the same shape, else the batches as they came. `labels` may be among the arrays."""

    parts: list[Part]
    size: int

    @classmethod
    def read(cls, data: Any, host: Host, size: int) -> Pool:
        """All of the data, in memory; a model of a fixed batch size gets batches of that size."""
        names = host.inputs
        parts = []
        for batch in batches(data, names):
            part = {name: as_array(array) for name, array in batch.inputs.items()}
            parts.append(part if batch.labels is None else {**part, LABELS: as_array(batch.labels)})
        rows = fixed_batch(host.graph.inputs) or size
        shapes = {tuple((name, array.shape[1:]) for name, array in part.items()) for part in parts}
        if len(shapes) == 1:
            parts = [{name: np.concatenate([part[name] for part in parts]) for name in parts[0]}]
        return cls(parts, rows)

    def __len__(self) -> int:
        return sum(_rows(part) for part in self.parts)

    @property
    def has_labels(self) -> bool:
        return all(LABELS in part for part in self.parts)

    def split(self, seed: int) -> tuple[Pool, Pool]:
        """To train on, and to judge by: a tenth, at random."""
        rng = np.random.default_rng([seed, 0])
        if len(self.parts) > 1:
            order = rng.permutation(len(self.parts))
            apart = max(1, min(round(HELD_OUT * len(order)), MOST_HELD_OUT // self.size))
            chosen = [self.parts[i] for i in order]
            return Pool(chosen[apart:], self.size), Pool(chosen[:apart], self.size)
        count = len(self)
        apart = min(max(round(HELD_OUT * count), 1), MOST_HELD_OUT)
        if apart >= self.size:
            apart -= apart % self.size
        if count < 2:
            raise InputError(
                "one sample cannot be split into data to train on and held-out data",
                fix="give more data=, or held-out data: held_out=",
            )
        order = rng.permutation(count)
        return Pool([_take(self.parts[0], order[apart:])], self.size), Pool(
            [_take(self.parts[0], order[:apart])], self.size
        )

    def limited(self, most: int) -> Pool:
        """The first rows, about `most` of them: parts of one shape are cut there, batches are taken whole."""
        if len(self.parts) > 1:
            return Pool(self.parts[: max(1, most // self.size)], self.size)
        return Pool([_take(self.parts[0], np.arange(min(most, len(self))))], self.size)

    def in_order(self) -> Iterator[PoolRows]:
        """Every batch once; what does not fill a batch is left out, unless there is no other."""
        for i, part in enumerate(self.parts):
            yield from self._batches(i, np.arange(_rows(part)))

    def epoch(self, number: int, seed: int) -> Iterator[PoolRows]:
        """Every batch once, in an order that follows from the seed and the number of the epoch."""
        rng = np.random.default_rng([seed, 1, number])
        for i in rng.permutation(len(self.parts)):
            count = _rows(self.parts[i])
            yield from self._batches(i, rng.permutation(count) if len(self.parts) == 1 else np.arange(count))

    def _batches(self, number: int, order: Array) -> Iterator[PoolRows]:
        """Batches of one part, in an order of its rows."""
        part, first = self.parts[number], sum(map(_rows, self.parts[:number]))
        size = min(self.size, len(order))
        for start in range(0, len(order) // size * size, size):
            rows = order[start : start + size]
            yield PoolRows(_take(part, rows), first + rows)


def own_rows(rows: PoolRows, rank: int, world: int) -> tuple[PoolRows, bool]:
    """The rows of a batch that one of several processes takes, and whether there are any; if not, one stands in."""
    some = np.arange(rank, len(rows.places), world)
    return PoolRows(
        _take(rows.arrays, some if len(some) else np.arange(1)), rows.places[some if len(some) else [0]]
    ), len(some) > 0


def _rows(part: Part) -> int:
    return len(next(iter(part.values())))


def _take(part: Part, rows: Array) -> Part:
    return {name: array[rows] for name, array in part.items()}


@dataclass(slots=True, eq=False)
class Teacher:
    """The original model, and the inner values that it is asked for. Small outputs of `count` rows are kept: each row is asked once."""

    host: Host
    values: tuple[str, ...]
    trains_on_labels: bool
    count: int
    _run: Runner = field(init=False)
    _seen: Array = field(init=False)
    _known: list[Array] | None = None

    def __post_init__(self) -> None:
        self._run, self._seen = self.host.runner(), np.zeros(self.count, dtype=bool)

    def teach(self, rows: PoolRows, *, values: bool) -> Lesson:
        """What the original makes of rows to train on; with its inner values if they are asked for."""
        taps = self.values if values else ()
        if not taps and self._known is not None and self._seen[rows.places].all():
            return self._lesson(rows, [array[rows.places] for array in self._known], {})
        outputs, seen = self._answer(rows, taps)
        self._keep(rows.places, outputs)
        return self._lesson(rows, outputs, seen)

    def judged(self, pool: Pool) -> list[Lesson]:
        """The held-out batches with the original's outputs."""
        return [self._lesson(rows, self._answer(rows, ())[0], {}) for rows in pool.in_order()]

    def _answer(self, rows: PoolRows, taps: Sequence[str]) -> tuple[list[Array], dict[str, Array]]:
        arrays = self._run(self._inputs(rows), taps)
        outputs = arrays[: len(arrays) - len(taps)]
        return outputs, dict(zip(taps, arrays[len(outputs) :], strict=True))

    def _keep(self, places: Array, outputs: Sequence[Array]) -> None:
        if self._known is None:
            if not all(len(output) == len(places) for output in outputs if output.ndim):
                return  # not one answer for each row
            if any(not output.ndim for output in outputs) or self._bytes(outputs) > KNOWN:
                return
            self._known = [np.empty((self.count, *output.shape[1:]), output.dtype) for output in outputs]
        if all(a.shape[1:] == b.shape[1:] for a, b in zip(self._known, outputs, strict=True)):
            for kept, output in zip(self._known, outputs, strict=True):
                kept[places] = output
            self._seen[places] = True

    def _bytes(self, outputs: Sequence[Array]) -> int:
        return sum(output.nbytes // max(len(output), 1) * self.count for output in outputs)

    def _inputs(self, rows: PoolRows) -> Part:
        return {name: array for name, array in rows.arrays.items() if name != LABELS or name in self.host.inputs}

    def _lesson(self, rows: PoolRows, outputs: Sequence[Array], values: dict[str, Array]) -> Lesson:
        labels = rows.arrays.get(LABELS) if self.trains_on_labels else None
        return Lesson(self._inputs(rows), outputs, values, labels)
