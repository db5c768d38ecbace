"""Rows of unlabelled data, and what the original makes of them.

Rows of one shape are shuffled and put into batches anew in every epoch. Where batches differ in shape (texts of different
lengths), they stay as they are given, and only their order changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cmrc.errors import InputError
from cmrc.hosts.protocols import Host, Lesson
from cmrc.ir.graph import Array
from cmrc.statistics.batches import as_array, batches, fixed_batch

HELD_OUT = 0.1  # of the data, where nothing else is given
MOST_HELD_OUT = 512
LABELS = "labels"
Part = dict[str, Array]


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
        """The first rows, no more than so many."""
        if len(self.parts) > 1:
            return Pool(self.parts[: max(1, most // self.size)], self.size)
        return Pool([_take(self.parts[0], np.arange(min(most, len(self))))], self.size)

    def in_order(self) -> Iterator[Part]:
        """Every batch once; what does not fill a batch is left out, unless there is no other."""
        for part in self.parts:
            yield from _batches(part, np.arange(_rows(part)), self.size)

    def epoch(self, number: int, seed: int) -> Iterator[Part]:
        """Every batch once, in an order that follows from the seed and the number of the epoch."""
        rng = np.random.default_rng([seed, 1, number])
        for i in rng.permutation(len(self.parts)):
            part = self.parts[i]
            order = rng.permutation(_rows(part)) if len(self.parts) == 1 else np.arange(_rows(part))
            yield from _batches(part, order, self.size)


def _rows(part: Part) -> int:
    return len(next(iter(part.values())))


def _take(part: Part, rows: Array) -> Part:
    return {name: array[rows] for name, array in part.items()}


def _batches(part: Part, order: Array, size: int) -> Iterator[Part]:
    whole = len(order) // size * size
    if not whole:
        yield _take(part, order)
    for start in range(0, whole, size):
        yield _take(part, order[start : start + size])


@dataclass(slots=True, eq=False)
class Teacher:
    """The original model, and the inner values that it is asked for."""

    host: Host
    values: tuple[str, ...]
    trains_on_labels: bool
    _judged: list[Lesson] = field(default_factory=list)

    def teach(self, rows: Part, *, values: Sequence[str] | None = None) -> Lesson:
        inputs = {name: array for name, array in rows.items() if name != LABELS or name in self.host.inputs}
        taps = self.values if values is None else tuple(values)
        arrays = self.host.run(inputs, taps)
        outputs = arrays[: len(arrays) - len(taps)]
        labels = rows.get(LABELS) if self.trains_on_labels else None
        return Lesson(inputs, outputs, dict(zip(taps, arrays[len(outputs) :], strict=True)), labels)

    def judged(self, pool: Pool) -> list[Lesson]:
        """The held-out batches with the original's outputs: asked once."""
        if not self._judged:
            self._judged = [self.teach(rows, values=()) for rows in pool.in_order()]
        return self._judged
