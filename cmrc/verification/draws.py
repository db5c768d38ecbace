"""Which pairs of inputs are swapped, and at which units.

For statements about the **population** the held-out inputs are drawn from it, so each input may be used in one pair only:

    inputs, shuffled:   a b   c d   e f   ...        n inputs make ⌊n/2⌋ independent pairs
    swaps of a pair:    a ← b, b ← a, a ← b, ...     new masks each time, averaged into one number within [0, 1]

For statements about the **fixed** set base and source are drawn from it anew for every swap, and each swap stands for itself.

**Stress.** Failures are rare and sit where the original's margin is small or its class is rare. With `stress=4` other inputs
become the base of a pair with probability 1/4 only, and then count four times as much: an input enters with probability a(x)
and counts 1/a(x), so weighted means stay those of the population, and weights are at most 4. Sources are not chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from cmrc.errors import VerifyError
from cmrc.ir.graph import Array

HARD = 0.25  # the share of inputs, by smallest margin, that count as hard
RARE = 0.5  # a class is rare below this part of an even share


class Scope(StrEnum):
    """What a statement is about: inputs like the held-out ones, or these very inputs."""

    POPULATION = "population"
    FIXED = "fixed"

    @classmethod
    def parse(cls, text: str | Scope) -> Scope:
        try:
            return cls(text)
        except ValueError:
            raise VerifyError(f"a statement cannot be about {text!r}", fix="use population or fixed") from None


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """For every swap of a run, in order: the rows of base and source, which unit it belongs to, and what it counts."""

    base: Array
    source: Array
    unit: Array
    importance: Array

    def __len__(self) -> int:
        return len(self.base)

    @property
    def units(self) -> int:
        return int(self.unit[-1]) + 1

    @property
    def turn(self) -> Array:
        """The position of every swap within its unit, from 0."""
        starts = np.flatnonzero(np.diff(self.unit, prepend=-1))
        return np.asarray(np.arange(len(self)) - np.repeat(starts, np.diff(starts, append=len(self))))

    def part(self, rows: slice | Array) -> Schedule:
        return Schedule(self.base[rows], self.source[rows], self.unit[rows], self.importance[rows])

    def parts(self, size: int) -> list[Schedule]:
        """Whole units in turn, until a part has `size` swaps."""
        ends = np.flatnonzero(np.diff(self.unit, append=-1)) + 1  # behind the last swap of each unit
        cuts, start = [], 0
        for end in ends.tolist():
            if end - start >= size or end == len(self):
                cuts.append(slice(start, end))
                start = end
        return [self.part(cut) for cut in cuts]


def pair_up(rng: np.random.Generator, rows: int, swaps: int) -> Schedule:
    """Disjoint pairs of inputs, for the population. The swaps are spread evenly over as many pairs as there are."""
    _require(swaps, rows)
    order = rng.permutation(rows)
    pairs = min(rows // 2, swaps)
    unit, turn = _spread(pairs, swaps)
    first, second = order[2 * unit], order[2 * unit + 1]
    back = turn % 2 == 1
    return Schedule(np.where(back, second, first), np.where(back, first, second), unit, np.ones(swaps))


def pair_hard(rng: np.random.Generator, easy: Array, swaps: int, stress: float) -> Schedule:
    """Disjoint pairs whose base is rarely an easy input. Bases and sources come from two halves, so that sources stay as they are."""
    rows = len(easy)
    _require(swaps, rows)
    if not stress >= 1:
        raise VerifyError(
            f"stress is {stress:g}", fix="give by what factor easy inputs are drawn less often, such as 4"
        )
    order = rng.permutation(rows)
    half = rows // 2
    bases, sources = order[:half], order[half : 2 * half]
    enters = rng.random(half) < np.where(easy[bases], 1 / stress, 1.0)
    bases, sources = bases[enters], sources[enters]
    if not len(bases):
        raise VerifyError("no input is left to serve as a base", fix="give more held-out data, or less stress")
    pairs = min(len(bases), swaps)
    unit, _ = _spread(pairs, swaps)
    importance = np.where(easy[bases[unit]], 1.0, 1 / stress)
    return Schedule(bases[unit], sources[unit], unit, importance)


def draw_anew(rng: np.random.Generator, rows: int, swaps: int, *, distinct: bool = False) -> Schedule:
    """Base and source drawn from the set for every swap, for the fixed set. `distinct`: never an input with itself."""
    _require(swaps, rows, least=2 if distinct else 1)
    base, source = rng.integers(rows, size=(2, swaps))
    if distinct:
        source = (base + 1 + rng.integers(rows - 1, size=swaps)) % rows
    return Schedule(base, source, np.arange(swaps), np.ones(swaps))


def easy_inputs(margin: Array, classes: Array) -> Array:
    """Inputs that are not hard: neither of small margin nor of a rare class (as the original answers)."""
    hard = margin <= np.quantile(margin, HARD)
    names, place, count = np.unique(classes, return_inverse=True, return_counts=True)
    return np.asarray(~(hard | (count < RARE * len(classes) / len(names))[place]))


def _spread(pairs: int, swaps: int) -> tuple[Array, Array]:
    """For every swap, its pair and its position within the pair."""
    counts = np.full(pairs, swaps // pairs)
    counts[: swaps % pairs] += 1
    unit = np.repeat(np.arange(pairs), counts)
    return unit, np.arange(swaps) - np.repeat(np.cumsum(counts) - counts, counts)


def _require(swaps: int, rows: int, *, least: int = 2) -> None:
    if swaps < 1:
        raise VerifyError(f"{swaps} swaps", fix="ask for at least one swap")
    if rows < least:
        raise VerifyError(f"{rows} held-out input(s) are not enough for a pair", fix="give more held-out data")


# ---------------------------------------------------------------- masks


def bernoulli(rng: np.random.Generator, p: float, shape: tuple[int, ...]) -> Array:
    """True with probability p each, to 2^-17. Takes as many random bits for each as p has binary digits: one for a half.

    From the last digit to the first, m := bit | m where the digit is 1, bit & m where it is 0: P(m) := (digit + P(m)) / 2.
    """
    digits, size = round(p * 2**16), math.prod(shape)
    if digits == 2**16:
        return np.ones(shape, dtype=bool)
    packed = np.zeros(-(-size // 8), dtype=np.uint8)
    for i in range((digits & -digits).bit_length() - 1, 16) if digits else ():
        bits = np.frombuffer(rng.bytes(len(packed)), dtype=np.uint8)
        packed = bits | packed if digits >> i & 1 else bits & packed
    return np.unpackbits(packed, count=size).view(bool).reshape(shape)


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """Interventions: rows of the data, and for every site a mask over all of its units, so that plans share a draw."""

    schedule: Schedule
    masks: dict[str, Array]
    rate: Array

    @property
    def base(self) -> Array:
        return self.schedule.base

    @property
    def source(self) -> Array:
        return self.schedule.source

    @classmethod
    def make(cls, rng: np.random.Generator, schedule: Schedule, sizes: Mapping[str, int], p: Sequence[float]) -> Draw:
        """Several rates take turns within a unit, from a random one on: each swap has each rate equally often."""
        count = len(schedule)
        turn = np.zeros(count, dtype=np.int64)
        if len(p) > 1:
            _, place = np.unique(schedule.unit, return_inverse=True)
            turn = (np.arange(count) + rng.integers(len(p), size=int(place.max()) + 1)[place]) % len(p)
        masks = {value: np.empty((count, units), dtype=bool) for value, units in sizes.items()}
        for mask in masks.values():
            for i, rate in enumerate(p):
                rows = slice(None) if len(p) == 1 else turn == i
                mask[rows] = bernoulli(rng, rate, mask[rows].shape)
        return cls(schedule, masks, np.asarray(p, dtype=np.float64)[turn])

    def part(self, rows: Array) -> Draw:
        return Draw(
            self.schedule.part(rows), {value: mask[rows] for value, mask in self.masks.items()}, self.rate[rows]
        )

    @classmethod
    def join(cls, parts: Sequence[Draw]) -> Draw:
        masks = {value: np.concatenate([part.masks[value] for part in parts]) for value in parts[0].masks}
        arrays = (
            np.concatenate([getattr(part.schedule, name) for part in parts])
            for name in ("base", "source", "unit", "importance")
        )
        return cls(Schedule(*arrays), masks, np.concatenate([part.rate for part in parts]))
