"""How the values of a site become rows of numbers: one row per sample, one column per unit.

    [batch, tokens, units]   positions="all"    [batch · tokens, units]
                             positions=0        [batch, units]             one position, such as a class token
                             positions="mask"   [True entries, units]      a mask in the batch, such as padding
                             positions="each"   [batch, units · tokens]    every position has its own columns

At a site of attention heads a unit is a vector, and each element of it has a column.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cmrc.errors import StatsError
from cmrc.ir.graph import Array, attributes
from cmrc.ir.ops.layout import TransposeAttrs
from cmrc.program.sites import Site, Sites
from cmrc.statistics.batches import Batch

Positions = str | int


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a site's rows: `features` columns per unit, which are `slots` positions of a vector each."""

    name: str
    value: str
    axis: int
    units: int
    features: int = 1
    positions: Positions = "all"
    slots: int = 1

    @property
    def count(self) -> int:
        return self.units * self.features

    def of_units(self, units: Sequence[int] | Array) -> Array:
        """The columns of some units, one unit after the other."""
        first = np.asarray(units, dtype=np.int64)[:, None] * self.features
        return (first + np.arange(self.features)).reshape(-1)

    def by_unit(self, array: Array) -> Array:
        """[..., columns] as [..., units, features]."""
        return array.reshape(*array.shape[:-1], self.units, self.features)


def columns_of(program: Sites, site: Site, positions: Positions = "all") -> Columns:
    """The columns of a site: one per element of a head's vector, one per unit everywhere else."""
    headed = _holds_heads(program, site)
    vector = site.shape[-1] if headed else 1
    if not isinstance(vector, int):
        raise StatsError(
            "the size of a head is known only at run time", node=site.name, fix="export the model with fixed sizes"
        )
    slots = 1
    if positions == "each":
        places = positions_at(program, site)
        if not all(isinstance(n, int) for n in places):
            raise StatsError(
                "the number of positions is known only at run time",
                node=site.name,
                fix='use positions="all", or export the model with fixed sizes',
            )
        slots = int(np.prod([int(n) for n in places], dtype=np.int64))
    return Columns(site.name, site.value, site.axis, site.units, vector * slots, positions, slots)


def positions_at(program: Sites, site: Site) -> list[int | str]:
    """How many positions a site has, along each of the axes that count them."""
    fixed = _not_positions(site.shape, site.axis, _holds_heads(program, site))
    return [n for axis, n in enumerate(site.shape) if axis not in fixed]


def _holds_heads(program: Sites, site: Site) -> bool:
    """Whether a unit is a vector along the last axis: what attention makes, also where only the other axes were moved since."""
    node, last = program.producers.get(site.value), len(site.shape) - 1
    while node is not None and node.op == "transpose" and attributes(node, TransposeAttrs)["perm"][-1] == last:
        node = program.producers.get(str(node.inputs[0]))
    return node is not None and node.op in ("attention", "matmul") and site.axis < last


def position_of(positions: Positions | Mapping[str, Positions], site: Site) -> Positions:
    """What `positions` says about one site: a mapping gives it by name, and "all" where it has no entry."""
    if not isinstance(positions, Mapping):
        return positions
    return next((p for name, p in positions.items() if name in (site.name, site.value)), "all")


def rows_of(columns: Columns, value: Array, batch: Batch | None = None) -> Array:
    """A value (or its gradient) as rows [..., columns], sample by sample and without a copy where that is possible.

    `batch` holds the mask that `positions` may name.
    """
    headed = columns.features // columns.slots > 1
    fixed = _not_positions(value.shape, columns.axis, headed)
    places = [d for d in range(value.ndim) if d not in fixed]
    batched = [0] if columns.axis else []
    last = [value.ndim - 1] if headed else []
    if columns.positions == "each":
        return value.transpose([*batched, columns.axis, *places, *last]).reshape(-1, columns.count)
    ordered = value.transpose([*batched, *places, columns.axis, *last])
    leading = ordered.shape[: len(batched) + len(places)]
    by_position = ordered.reshape(leading[0] if batched else 1, math.prod(leading[len(batched) :]), columns.count)
    if columns.positions == "all":
        return by_position
    if isinstance(columns.positions, int):
        return _one_position(columns, by_position, columns.positions)
    return np.asarray(by_position[_mask_of(columns, by_position, batch)])


def rows_of_samples(columns: Columns, rows: Array, batch: Batch) -> Array:
    """How many of these rows each sample of the batch has. Where their rows do not lie one after the other, all are those of one."""
    count = math.prod(rows.shape[:-1])
    if isinstance(columns.positions, str) and columns.positions not in ("all", "each"):
        counts = batch.mask(columns.positions).astype(bool).reshape(len(batch), -1).sum(1)
        return np.asarray(counts)
    each, over = divmod(count, len(batch))
    return np.array([count]) if over or not columns.axis else np.full(len(batch), each)


def _mask_of(columns: Columns, by_position: Array, batch: Batch | None) -> Array:
    assert batch is not None
    assert isinstance(columns.positions, str)
    mask = batch.mask(columns.positions).astype(bool)
    if mask.shape != by_position.shape[:2]:
        raise StatsError(
            f"the mask {columns.positions!r} has shape {list(mask.shape)}, the positions {list(by_position.shape[:2])}",
            node=columns.name,
            fix="give one entry for each sample and position",
        )
    return mask


def _one_position(columns: Columns, by_position: Array, position: int) -> Array:
    count = by_position.shape[1]
    if not -count <= position < count:
        raise StatsError(
            f"there is no position {position}: the site has {count}",
            node=columns.name,
            fix='give a position that exists, or positions="all"',
        )
    return by_position[:, position]


def _not_positions(shape: Sequence[Any], axis: int, headed: bool) -> set[int]:
    """The axes that do not count positions: the batch, the units, and the vector of a head."""
    return {axis, *({0} if axis else ()), *({len(shape) - 1} if headed else ())}
