"""The axis maps of reshapes against brute force: every element is a number, and goes where numpy puts it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cmrc.ir.axes import blocks, compress, move, move_slab, product, segments
from cmrc.ir.graph import Shape

Draw = Callable[[st.SearchStrategy[Any]], Any]


@st.composite
def factorings(draw: Draw, size: int) -> tuple[int, ...]:
    results = []
    for _ in range(draw(st.integers(0, 3))):
        factor = draw(st.sampled_from([f for f in range(1, size + 1) if size % f == 0]))
        results.append(factor)
        size //= factor
    return tuple(draw(st.permutations([*results, size])))


@st.composite
def reshapes(draw: Draw) -> tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]:
    """Two shapes of as many elements, an axis of the first, and positions of it."""
    size = draw(st.sampled_from([1, 2, 4, 6, 8, 12, 24, 36]))
    before, after = draw(factorings(size)), draw(factorings(size))
    axis = draw(st.integers(0, len(before) - 1))
    index = draw(st.lists(st.integers(0, before[axis] - 1), min_size=1, unique=True))
    return before, after, axis, tuple(index)


def elements(shape: tuple[int, ...], axis: int, index: tuple[int, ...]) -> set[int]:
    """The numbers of the elements at these positions."""
    return set(np.take(np.arange(math.prod(shape)).reshape(shape), index, axis=axis).reshape(-1).tolist())


@given(reshapes())
def test_segments_hold_the_same_elements(case: tuple[Any, ...]) -> None:
    before, after, _, _ = case
    parts = segments(before, after)
    assert [s.before for s in parts] == list(
        zip([0, *(s.before[1] for s in parts[:-1])], [s.before[1] for s in parts], strict=True)
    )
    assert (parts[-1].before[1], parts[-1].after[1]) == (len(before), len(after))
    for segment in parts:
        assert math.prod(before[slice(*segment.before)]) == math.prod(after[slice(*segment.after)])


@given(reshapes())
def test_move_finds_an_axis_exactly_where_there_is_one(case: tuple[Any, ...]) -> None:
    before, after, axis, index = case
    wanted = elements(before, axis, index)
    moved = move(before, after, axis, index)
    if isinstance(moved, str):
        for other, size in enumerate(after):
            profile = [i for i in range(size) if elements(after, other, (i,)) <= wanted]
            assert not profile or elements(after, other, tuple(profile)) != wanted, "there is one"
    else:
        assert elements(after, moved.axis, moved.index) == wanted


@given(reshapes(), st.data())
def test_a_slab_moves_with_its_units(case: tuple[Any, ...], data: st.DataObject) -> None:
    before, after, axis, index = case
    index = tuple(sorted(index))
    moved = move(before, after, axis, index)
    assume(not isinstance(moved, str))
    assert not isinstance(moved, str)
    varies = [data.draw(st.booleans()) for _ in before]
    shape = [len(index) if i == axis else n if varies[i] else 1 for i, n in enumerate(before)]
    slab = np.random.default_rng(0).normal(0.0, 1.0, shape)
    slab_after = move_slab(before, after, axis, index, moved, slab)
    x = np.zeros(before)
    x[(slice(None),) * axis + (list(index),)] = slab
    if isinstance(slab_after, str):
        assert slab_after == "the constants differ along an axis that is reshaped too"
        return
    y = np.zeros(after)
    y[(slice(None),) * moved.axis + (list(moved.index),)] = slab_after
    assert np.array_equal(x.reshape(after), y)


@given(reshapes())
def test_blocks_are_the_elements_of_each_unit_in_order(case: tuple[Any, ...]) -> None:
    before, after, axis, index = case
    runs = blocks(before, after, axis, index)
    assume(not isinstance(runs, str))
    assert not isinstance(runs, str)
    new_axis, places = runs
    others = [n for i, n in enumerate(before) if i != axis]
    numbers = np.arange(math.prod(before))
    old, new = np.moveaxis(numbers.reshape(before), axis, 0), np.moveaxis(numbers.reshape(after), new_axis, 0)
    for unit, row in zip(index, places, strict=True):
        assert row.size <= math.prod(others)
        assert np.array_equal(np.sort(new[row].reshape(-1)), np.sort(old[unit].reshape(-1)))
    # Block positions correspond: the k-th position of one unit's block is the same place of the other axes as another's.
    offsets = [new[row] - new[places[0]] for row in places]
    assert all(len(np.unique(offset)) == 1 for offset in offsets)


SYMBOLS = [
    (("N", 4, 6), ("N", 24), 1, (1,), (1, (6, 7, 8, 9, 10, 11))),
    (("N", 24), ("N", 4, 6), 1, tuple(range(6, 12)), (1, (1,))),
    (("N", 24), ("N", 4, 6), 1, (1, 7, 13, 19), (2, (1,))),
    (("N", "T", 12), ("N", "T", 3, 4), 2, (4, 5, 6, 7), (2, (1,))),
    (("N", 5, "H", "W"), ("N", 5, "H*W"), 1, (3,), (1, (3,))),
    (("N", 5, "H*W"), ("N", 5, "H", "W"), 1, (3,), (1, (3,))),
    (("N", 1, 5), ("N", 5), 2, (3,), (1, (3,))),
    (("N", 5), ("N", 1, 5, 1), 1, (3,), (2, (3,))),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after", "axis", "index", "expected"), SYMBOLS)
def test_sizes_of_run_time_take_part_as_symbols(
    before: Shape, after: Shape, axis: int, index: Any, expected: Any
) -> None:
    moved = move(before, after, axis, index)
    assert not isinstance(moved, str)
    assert (moved.axis, moved.index, moved.period) == (*expected, 0)


@pytest.mark.parametrize(
    ("before", "after", "axis", "index", "reason"),
    [
        (
            ("N", 24),
            ("N", 4, 6),
            1,
            (0, 1),
            "the units do not fill whole positions of any axis of ['N', 4, 6]; a position is units 0 to 5, or units 0, 6, 12, ...",
        ),
        (("N", 4, "T"), ("N", "T", 4), 1, (0,), "it merges the units with a size known only at run time"),
        (("N", 4, "T"), ("M", 4), 1, (0,), "it merges the units with a size known only at run time"),
        (("N", 8), ("2*N", 4), 1, (0, 5), "it merges the units with a size known only at run time"),
        (("N", 8), ("N//2", 16), 1, (0,), "it merges the units with a size known only at run time"),
        ((4, 2**40), (2**42,), 0, (0,), "where the units go would have to be worked out at 4,398,046,511,104 places"),
        (
            ("N", 2**40),
            ("2*N", 2**39),
            1,
            (0,),
            "where the units go would have to be worked out at 1,099,511,627,776 places",
        ),
    ],
)
def test_move_says_why_not(before: Shape, after: Shape, axis: int, index: Any, reason: str) -> None:
    assert move(before, after, axis, index) == reason


@pytest.mark.parametrize(
    ("before", "after", "axis", "reason"),
    [
        (("N", 24), ("N", 4, 6), 1, "it splits the units over several axes"),
        (("N", 4, "T"), ("N", "4*T"), 1, "it merges the units with a size known only at run time"),
        ((4, 2**40), (2**42,), 0, "where the units go would have to be worked out at 4,398,046,511,104 places"),
    ],
)
def test_blocks_says_why_not(before: Shape, after: Shape, axis: int, reason: str) -> None:
    assert blocks(before, after, axis, (0, 1)) == reason


@given(st.integers(1, 3), st.integers(2, 4), st.integers(1, 3), st.integers(1, 4), st.data())
def test_samples_merged_with_units(n: int, units: int, inner: int, outer: int, data: st.DataObject) -> None:
    """(N, C, D) with N known at run time, merged or taken apart: positions of every run of the merged axis."""
    index = tuple(sorted(data.draw(st.sets(st.integers(0, units - 1), min_size=1, max_size=units - 1))))
    before: Shape = ("N", units, inner)
    after: Shape = data.draw(st.sampled_from([(f"{units}*N", inner), (f"{units * inner}*N",), ("N", units * inner)]))
    moved = move(before, after, 1, index)
    assert not isinstance(moved, str)
    real = [n * product((d,))[0] if isinstance(d, str) else d for d in after]
    where = moved.index
    if moved.period:
        where = tuple(run + i for run in range(0, real[moved.axis], moved.period) for i in moved.index)
    assert elements(tuple(real), moved.axis, where) == elements((n, units, inner), 1, index)
    back = move(after, before, moved.axis, moved.index, moved.period)
    assert not isinstance(back, str)
    assert (back.axis, back.index, back.period) == (1, index, 0)


@given(st.integers(1, 3), st.integers(2, 4), st.integers(1, 3), st.data())
def test_merged_samples_and_units_take_apart_otherwise(n: int, units: int, inner: int, data: st.DataObject) -> None:
    """(C*N, D) to (N, C*D) and back, as nn.MultiheadAttention has its heads: the runs of one are blocks of the other."""
    index = tuple(sorted(data.draw(st.sets(st.integers(0, units - 1), min_size=1, max_size=units - 1))))
    before: Shape = (f"{units}*N", inner)
    after: Shape = data.draw(st.sampled_from([("N", units * inner), (f"{units * inner}*N",)]))
    moved = move(before, after, 0, index, units)
    assert not isinstance(moved, str)
    period = moved.period or units * inner
    where = tuple(run + i for run in range(0, n * period if moved.period else period, period) for i in moved.index)
    real = (n * period,) if moved.period else (n, period)
    flat = tuple(run + i for run in range(0, n * units, units) for i in index)
    assert elements(real, moved.axis, where) == elements((n * units, inner), 0, flat)
    back = move(after, before, moved.axis, moved.index, moved.period)
    assert not isinstance(back, str)
    assert (back.axis, back.index, back.period) == (0, index, units)


@pytest.mark.parametrize(
    ("dims", "number", "symbols"),
    [
        ((2, "N", 3), 6, {"N": 1}),
        (("2*N", "N"), 2, {"N": 2}),
        (("(N+1)//2", 4), 4, {"(N+1)//2": 1}),
        (("N**2",), 1, {"N**2": 1}),
        ((), 1, {}),
    ],
)
def test_product(dims: Shape, number: int, symbols: dict[str, int]) -> None:
    assert product(dims) == (number, symbols)


def test_compress_keeps_what_varies() -> None:
    slab = np.broadcast_to(np.arange(3.0).reshape(1, 3, 1), (2, 3, 4))
    assert compress(slab, keep=1).shape == (1, 3, 1)
    assert compress(np.ones((2, 3, 4)), keep=1).shape == (1, 3, 1)
    assert compress(np.arange(24.0).reshape(2, 3, 4), keep=1).shape == (2, 3, 4)
