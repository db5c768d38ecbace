"""Where the units of an axis go when a value is reshaped.

    (N, C, H, W) -> (N, C*H*W)     a unit becomes a block of H*W positions
    (N, T, H*D)  -> (N, T, H, D)   whole blocks of D units become one position, or the same units of every block do
    (N, C, H, W) -> (N, C, H*W)    C is not affected

Dynamic sizes are symbols: `N` is followed, `N*C` merged into one axis is not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cmrc.ir.graph import Array, Dim, Index, Keep, Shape, quickly_made

Product = tuple[int, Counter[str]]

MOST = 1 << 28  # places of an array that is worked out place by place; a file may declare any size


def _too_many(sizes: Sequence[int]) -> str:
    count = math.prod(sizes)
    return f"would have to be worked out at {count:,} places" if count > MOST else ""


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring axes before and after a reshape that hold the same elements: [start, stop) on each side."""

    before: tuple[int, int]
    after: tuple[int, int]


@quickly_made
@dataclass(frozen=True, slots=True)
class Moved:
    """The axis and the positions where units went."""

    axis: int
    index: tuple[int, ...]
    segment: Segment
    period: int = (
        0  # the positions repeat in every run of this many along the axis; 0: they are positions of the whole axis
    )


def product(dims: Sequence[Dim]) -> Product:
    """The product of sizes: a number times symbols. `a*b` in a symbol is split, other expressions are not."""
    number, symbols = 1, Counter[str]()
    for dim in dims:
        if isinstance(dim, int):
            number *= dim
            continue
        plain = not set(dim) & set("+-/() ") and "**" not in dim
        for factor in dim.split("*") if plain else [dim]:
            if factor.isdigit():
                number *= int(factor)
            else:
                symbols[factor] += 1
    return number, symbols


def _divides(small: Product, large: Product) -> bool:
    return small[0] != 0 and large[0] % small[0] == 0 and small[1] <= large[1]


@lru_cache(maxsize=4096)  # a model has the same few reshapes in every layer
def segments(before: Shape, after: Shape) -> tuple[Segment, ...]:
    """The finest segments. If sizes cannot be compared, the rest is one segment."""
    parts: list[Segment] = []
    i = j = 0
    while i < len(before) and j < len(after):
        start_i, start_j = i, j
        i, j = i + 1, j + 1
        left, right = product(before[start_i:i]), product(after[start_j:j])
        while left != right:
            if i < len(before) and (_divides(left, right) or j == len(after)):
                i += 1
            elif j < len(after):
                j += 1
            elif i < len(before):
                i += 1
            else:
                break
            left, right = product(before[start_i:i]), product(after[start_j:j])
        parts.append(Segment((start_i, i), (start_j, j)))
    if parts and (i < len(before) or j < len(after)):  # the remaining axes have size 1
        last = parts.pop()
        parts.append(Segment((last.before[0], len(before)), (last.after[0], len(after))))
    return tuple(parts)


def _sizes(shape: Shape, span: tuple[int, int]) -> tuple[int, ...] | None:
    part = shape[span[0] : span[1]]
    return tuple(int(n) for n in part) if all(isinstance(n, int) for n in part) else None


def move(before: Shape, after: Shape, axis: int, index: Sequence[int], period: int = 0) -> Moved | str:
    """Follow positions of an axis through a reshape. A `str` says why they do not remain positions of one axis."""
    segment = next((s for s in segments(before, after) if s.before[0] <= axis < s.before[1]), None)
    if segment is None:
        return f"{list(before)} to {list(after)} cannot be followed"
    one_to_one = segment.before[1] - segment.before[0] == segment.after[1] - segment.after[0] == 1
    if one_to_one and before[axis] == after[segment.after[0]]:
        return Moved(segment.after[0], Index.of(index), segment, period)
    old, new = _sizes(before, segment.before), _sizes(after, segment.after)
    first = segment.before[0]
    if 0 in before:
        return f"{list(before)} has no elements"
    if old is None or new is None or math.prod(old) != math.prod(new):
        return _move_repeated(before, after, axis, index, period, segment)
    if too_many := _too_many(old):
        return f"where the units go {too_many}"
    mask = np.zeros(old, dtype=bool)
    mask[(slice(None),) * (axis - first) + (Index.of(index).array,)] = True
    place = _whole_positions(mask.reshape(new))
    if place is None:
        choices = _positions_of(old, new, axis - first)
        examples = f"; a position is units {', or units '.join(choices)}" if choices else ""
        return f"the units do not fill whole positions of any axis of {list(after)}{examples}"
    return Moved(segment.after[0] + place[0], place[1], segment)


@lru_cache(maxsize=4096)
def _positions_of(old: tuple[int, ...], new: tuple[int, ...], axis: int) -> list[str]:
    """The units of an axis before a reshape that are the first position of an axis after it, for each that has such."""
    choices = []
    for local, size in enumerate(new):
        mask = np.zeros(new, dtype=bool)
        mask[(slice(None),) * local + (0,)] = True
        place = _whole_positions(mask.reshape(old)) if 1 < size < old[axis] else None
        if place is not None and place[0] == axis and (text := in_runs(place[1])) not in choices:
            choices.append(text)
    return choices


def in_runs(index: Sequence[int]) -> str:
    """`0 to 3, 8 to 11` for ascending positions; of many runs the first three."""
    ends = [i for i in range(1, len(index)) if index[i] != index[i - 1] + 1]
    parts = [index[a:b] for a, b in zip([0, *ends], [*ends, len(index)], strict=True)]
    shown = [str(p[0]) if len(p) == 1 else f"{p[0]} to {p[-1]}" for p in parts[:3]]
    return ", ".join(shown) + (", ..." if len(parts) > 3 else "")


def _whole_positions(mask: Array) -> tuple[int, tuple[int, ...]] | None:
    """The axis and its positions that are equal to a mask, if there is one."""
    if mask.size == 1:
        return (0, (0,)) if mask.ndim else None  # a single unit may have no axis left
    count = np.count_nonzero(mask)
    for local, size in enumerate(mask.shape):
        if size == 1:
            continue
        profile = mask.any(axis=tuple(i for i in range(mask.ndim) if i != local)) if mask.ndim > 1 else mask
        if count == np.count_nonzero(profile) * (mask.size // size):
            return local, tuple(np.flatnonzero(profile).tolist())
    return None


def _move_repeated(
    before: Shape, after: Shape, axis: int, index: Sequence[int], period: int, segment: Segment
) -> Moved | str:
    """Through a reshape that merges a dynamic number of samples with the units after them: N×3 to 3N and back."""
    problem = "it merges the units with a size known only at run time"
    old, new = before[slice(*segment.before)], after[slice(*segment.after)]
    if product(old) != product(new):
        return problem
    local = axis - segment.before[0]
    fixed, tail = [int(n) for n in _fixed_tail(old)], [int(n) for n in _fixed_tail(new)]
    if too_many := _too_many(fixed) or _too_many(tail):
        return f"where the units go {too_many}"
    if period:
        if local != len(old) - len(fixed) - 1:
            return problem
        run = np.repeat(np.isin(np.arange(period), index), math.prod(fixed))
    else:
        if local < len(old) - len(fixed):
            return problem
        run = np.zeros(fixed, dtype=bool)
        run[(slice(None),) * (local - (len(old) - len(fixed))) + (list(index),)] = True
        run = run.reshape(-1)
    span = math.prod(tail)
    if span % run.size == 0:
        place = _whole_positions(np.tile(run, span // run.size).reshape(tail))
        return problem if place is None else Moved(segment.after[1] - len(tail) + place[0], place[1], segment)
    # Whole positions of the axis of unknown size before the known ones, the same in every run.
    above = segment.after[1] - len(tail) - 1
    rows = run.reshape(-1, span) if run.size % span == 0 else run[None]
    if product(after[above : above + 1])[0] % len(rows) or not np.all(rows == rows[:, :1]):
        return problem
    return Moved(above, tuple(np.flatnonzero(rows[:, 0]).tolist()), segment, len(rows))


def _fixed_tail(dims: Sequence[Dim]) -> Sequence[Dim]:
    """The known sizes after the last unknown one."""
    last = max((i for i, n in enumerate(dims) if not isinstance(n, int)), default=-1)
    return dims[last + 1 :]


def move_slab(before: Shape, after: Shape, axis: int, index: Sequence[int], moved: Moved, slab: Array) -> Array | str:
    """The constants of the units, in the order and at the place that `move` gave them."""
    segment = moved.segment
    result_shape = [1] * len(after)
    if not slab.any():
        result_shape[moved.axis] = len(moved.index)
        return np.zeros(result_shape)
    for other in segments(before, after):
        if other == segment:
            continue
        varying = [i for i in range(*other.before) if slab.shape[i] != 1]
        if not varying:
            continue
        if other.before[1] - other.before[0] != 1 or other.after[1] - other.after[0] != 1:
            return "the constants differ along an axis that is reshaped too"
        result_shape[other.after[0]] = slab.shape[other.before[0]]
    old, new = _sizes(before, segment.before), _sizes(after, segment.after)
    if old is None or new is None:
        return _move_repeated_slab(before, after, axis, index, moved, slab)
    first, last = segment.before
    local = axis - first
    lead, trail = slab.shape[:first], slab.shape[last:]
    if too_many := _too_many([*lead, *old, *trail]):
        return f"the constant {too_many}"
    part = np.broadcast_to(slab, (*lead, *(len(index) if i == local else n for i, n in enumerate(old)), *trail))
    full = np.zeros((*lead, *old, *trail))
    full[(slice(None),) * axis + (list(index),)] = part
    full = full.reshape(*lead, *new, *trail)
    local_after = moved.axis - segment.after[0]
    full = np.take(full, list(moved.index), axis=len(lead) + local_after)
    for i in range(len(new)):
        result_shape[segment.after[0] + i] = full.shape[len(lead) + i]
    return compress(full.reshape(result_shape), keep=moved.axis)


def _move_repeated_slab(
    before: Shape, after: Shape, axis: int, index: Sequence[int], moved: Moved, slab: Array
) -> Array | str:
    """The same if the reshape merges or splits a dynamic number of samples: see `_move_repeated`."""
    if slab.size != slab.shape[axis]:
        return "the constants differ along an axis that is reshaped too"
    (first, last), stop = moved.segment.before, moved.segment.after[1]
    fixed = [int(n) for n in _fixed_tail(before[first:last])]
    tail = [int(n) for n in _fixed_tail(after[moved.segment.after[0] : stop])]
    if too_many := _too_many(fixed) or _too_many(tail):
        return f"the constant {too_many}"
    run = np.zeros(fixed)
    along = axis - (last - len(fixed))
    run[(slice(None),) * along + (list(index),)] = slab.reshape([-1, *[1] * (len(fixed) - along - 1)])
    full = np.tile(run.reshape(-1), math.prod(tail) // run.size).reshape(tail)
    full = np.take(full, list(moved.index), axis=moved.axis - (stop - len(tail)))
    return compress(full.reshape([1] * (stop - len(tail)) + list(full.shape) + [1] * (len(after) - stop)), moved.axis)


def blocks(before: Shape, after: Shape, axis: int, index: Sequence[int]) -> tuple[int, Array] | str:
    """The positions of each unit's block, for a reshape that merges the axis with others: (axis, positions[unit, k])."""
    segment = next((s for s in segments(before, after) if s.before[0] <= axis < s.before[1]), None)
    if segment is None:
        return f"{list(before)} to {list(after)} cannot be followed"
    if 0 in before:
        return f"{list(before)} has no elements"
    old, new = _sizes(before, segment.before), _sizes(after, segment.after)
    wide = [i for i in range(*segment.after) if after[i] != 1]
    if segment.before[1] - segment.before[0] == 1 and len(wide) == 1 and before[axis] == after[wide[0]]:
        return wide[0], np.asarray(index).reshape(-1, 1)
    if old is None or new is None:
        return "it merges the units with a size known only at run time"
    if len(wide) != 1:
        return "it splits the units over several axes"
    if too_many := _too_many(old):
        return f"where the units go {too_many}"
    positions = np.arange(math.prod(old)).reshape(old)
    chosen = np.take(positions, list(index), axis=axis - segment.before[0])
    return wide[0], np.moveaxis(chosen, axis - segment.before[0], 0).reshape(len(index), -1)


def compress(slab: Array, keep: int) -> Array:
    """Reduce axes along which nothing varies to size 1, except `keep`."""
    for axis in range(slab.ndim):
        if axis != keep and slab.shape[axis] > 1:
            first = np.take(slab, [0], axis=axis)
            if np.array_equal(slab, np.broadcast_to(first, slab.shape)):
                slab = first
    return slab


def laid_out(slab: Array, before: Shape, axes: Sequence[int], times: Sequence[Dim] = ()) -> Array | str:
    """The slab at every position of some axes of its value, which an op repeats so many times, or why it cannot be."""
    sizes = {axis: before[axis] for axis in axes}
    if any(isinstance(n, str) for n in (*sizes.values(), *times)):
        return "would differ by position, and the number of positions is not fixed"
    shape = [int(sizes[d]) if d in sizes else n for d, n in enumerate(slab.shape)]
    return _too_many([*shape, *map(int, times)]) or np.broadcast_to(slab, shape)


def spread(slab: Array, axis: int, count: int) -> Array:
    """A slab with this many positions along an axis, if it had one for all of them or has them already."""
    shape = (*slab.shape[:axis], count, *slab.shape[axis + 1 :])
    return slab if slab.shape == shape else np.broadcast_to(slab, shape)


def join(slabs: Sequence[Array], axis: int) -> Array:
    """Slabs concatenated along an axis, and broadcast along the others."""
    rank = slabs[0].ndim
    others = [(*s.shape[:axis], 1, *s.shape[axis + 1 :]) for s in slabs]
    shape = np.broadcast_shapes(*others)
    parts = [np.broadcast_to(s, [s.shape[d] if d == axis else shape[d] for d in range(rank)]) for s in slabs]
    return np.concatenate(parts, axis=axis)


def members(groups: Array, each: int) -> Index:
    """The positions in these groups of `size` positions."""
    return Index.from_array((groups[:, None] * each + np.arange(each)).reshape(-1))


def count_by_group(index: Sequence[int], groups: int, each: int) -> Array:
    """How many of these positions are in each group of `size` positions."""
    return np.bincount(Index.of(index).array // each, minlength=groups)


def complement(units: Sequence[int] | Array, size: int) -> Array:
    """The positions of an axis that are not among these."""
    left = np.ones(size, dtype=bool)
    left[units.array if isinstance(units, Index) else np.asarray(units, dtype=np.int64)] = False
    return left.nonzero()[0]


def narrowed(shape: Shape, axis: int, keep: Keep) -> Shape:
    """The shape when only these positions of an axis are left."""
    period = keep.period
    if not period:
        return resized(shape, axis, len(keep))
    number, symbols = product((shape[axis],))
    number = number * len(keep) // period
    parts = [str(number)] if number != 1 else []
    return (*shape[:axis], "*".join(parts + sorted(symbols.elements())), *shape[axis + 1 :])


def resized(shape: Shape, axis: int, size: int) -> Shape:
    return (*shape[:axis], size, *shape[axis + 1 :])


def aligned(array: Array, dims: tuple[int, ...] | None, rank: int) -> Array:
    """Put an operand's axes where they belong in a result of `rank` axes; `None` means right-aligned, as numpy does."""
    if dims is None:
        return array
    shape = [1] * rank
    for axis, dim in enumerate(dims):
        shape[dim] = array.shape[axis]
    return array.reshape(shape)
