"""Which rows of every sample stand for all of its rows in products of columns.

    rows of a sample     | . . x . | . x . . | x . . . | . . . x |      one of each of k equal parts

Products of w columns cost w² for every row, as much as the layer itself. Least squares with w parents on m rows has an expected
error about w/m above the least that is possible. So m = `ENOUGH` · w rows add at most 1/`ENOUGH` to the error. Of m rows a correlation r is
off by at most (1−r²)/√m, a standard error. Few columns cost little: they get as many rows as make `LEAST` numbers.

Rows of a picture or a text are alike, so every sample gives the same number of them, evenly spread: which ones follows from its
contents. So they are the same whatever the batches, the processes and the host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from cmrc.ir.graph import Array
from cmrc.statistics.batches import Batch, as_array
from cmrc.statistics.columns import Columns, rows_of_samples

ENOUGH = 32  # rows per column
LEAST = 2**20  # numbers in the rows of all samples
LOOKED_AT = 16  # numbers of an input that tell its samples apart
GOLDEN = (math.sqrt(5) - 1) / 2  # whose multiples spread evenly, so that no two parts are drawn from at the same place


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """Rows by number, and how many rows each of them stands for."""

    index: Array
    weight: Array

    def of(self, rows: Array) -> Array:
        """These rows of [..., columns], without a copy of the others."""
        if rows.ndim == 2:
            return np.asarray(rows[self.index])
        first, second = np.divmod(self.index, rows.shape[1])
        return np.asarray(rows[first, second])


@dataclass(frozen=True, slots=True)
class Enough:
    """How many rows are enough for each column, of data with so many samples. None: nobody knows, so all rows are taken."""

    rows_per_column: int
    samples: int | None

    def of_each_sample(self, columns: int) -> int:
        """How many rows a sample gives."""
        assert self.samples is not None
        return max(1, math.ceil(max(LEAST / columns, self.rows_per_column * columns) / max(self.samples, 1)))

    def draws(self, batch: Batch) -> Draws:
        return Draws(self, batch, None if self.samples is None else _places(batch))


@dataclass(slots=True, eq=False)
class Draws:
    """The drawn rows of one batch, for one site after the other."""

    enough: Enough
    batch: Batch
    places: Array | None
    _known: dict[tuple[bytes, int], Drawn | None] = field(default_factory=dict)  # many sites have the same positions

    def of(self, columns: Columns, rows: Array) -> Drawn | None:
        """Those of these rows that stand for all of them; None takes all."""
        if self.places is None or not rows.size:
            return None
        lengths = rows_of_samples(columns, rows, self.batch)
        most = self.enough.of_each_sample(columns.count) * len(self.batch) // len(lengths)
        key = lengths.tobytes(), most
        if key not in self._known:
            self._known[key] = draw(lengths, self.places[: len(lengths)], most)
        return self._known[key]


def draw(lengths: Array, places: Array, most: int) -> Drawn | None:
    """Of samples with so many rows each, one after the other: `most` rows where a sample has at least twice as many, else all.

    `places` says by a number in [0, 1) for each sample where in the parts the drawn rows lie. None stands for all rows.
    """
    long = lengths >= 2 * most
    if not long.any():
        return None
    starts, part = np.cumsum(lengths) - lengths, lengths / most
    steps = np.arange(most)
    inside = (steps + (places[:, None] + steps * GOLDEN) % 1) * part[:, None]
    picked = np.minimum(inside.astype(np.int64), lengths[:, None] - 1) + starts[:, None]
    index, weight = picked[long].reshape(-1), np.repeat(part[long], most)
    if not long.all():
        short = np.flatnonzero(~np.repeat(long, lengths))
        index, weight = np.concatenate([index, short]), np.concatenate([weight, np.ones(len(short))])
        order = np.argsort(index, kind="stable")
        index, weight = index[order], weight[order]
    return Drawn(index, weight)


def _places(batch: Batch) -> Array:
    """A number in [0, 1) for each sample, by what is in it."""
    number = np.zeros(len(batch), dtype=np.uint64)
    random = np.random.default_rng(0)
    for given in batch.inputs.values():
        array = as_array(given)
        if array.ndim == 0 or len(array) != len(batch) or not array.size:
            continue
        rows = array.reshape(len(array), -1)
        some = np.ascontiguousarray(rows[:, :: -(-rows.shape[1] // LOOKED_AT)]).view(np.uint8)
        odd = random.integers(0, 2**63, some.shape[1], dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        number += (some * odd).sum(axis=1, dtype=np.uint64)
    number = (number ^ (number >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)
    return np.asarray((number >> np.uint64(11)) * 2.0**-53)
