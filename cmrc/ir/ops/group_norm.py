"""Group norms, and those of which some units are known.

Of the units of a group, those that are left are x, and s are constants with mean c̄ and sum of squared deviations D. Over the positions
of each sample, with mean(x) and mean((x − μ)²) over the k units that are left:

    μ = (k·mean(x) + s·c̄) / (k + s)        σ² = (k·mean((x − μ)²) + s·(c̄ − μ)² + D) / (k + s)        r = 1 / √(σ² + ε)

`known_group_norm` gives (x − μ)·r, and as units behind it what a constant unit becomes, c ↦ (c̄ − μ)·r + (c − c̄)·r: first (c̄ − μ)·r
of each group with constants, then r of each group whose constants differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cmrc.ir.graph import Array

Attrs = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sums:
    """How the hosts compute it from the means of units: group by group, weighted by `shares`."""

    places: Array  # [groups, most units of a group]: which units; where a group has fewer, any
    shares: Array  # by how much the mean of each row counts them, 0 where a group has fewer
    group_of: Array  # the group of each unit
    alike: bool  # whether all groups have equally many units: then `places` are in order, and all shares one number
    constants: Array  # by group: s·c̄ / n, s / n, D / n + ε and c̄
    shifted: Sequence[int]  # the groups with constants
    spread: Sequence[int]  # those whose constants differ


def sums_of(attrs: Attrs) -> Sums:
    counts, known = np.asarray(attrs["counts"]), np.asarray(attrs["known"])
    centres, squares = np.asarray(attrs["centres"], np.float64), np.asarray(attrs["squares"], np.float64)
    size, starts = counts + known, np.cumsum(counts) - counts
    column = np.arange(counts.max())
    there = column < counts[:, None]
    return Sums(
        np.where(there, starts[:, None] + column, 0),
        there * len(column) / size[:, None],
        np.repeat(np.arange(len(counts)), counts),
        bool(there.all() and (size == size[0]).all()),
        np.stack([known * centres / size, known / size, squares / size + attrs["eps"], centres]),
        np.flatnonzero(known).tolist(),
        np.flatnonzero(squares).tolist(),
    )


def group_norm(x: Array, attrs: Attrs, weight: Array | None = None, bias: Array | None = None) -> Array:
    grouped = x.reshape(x.shape[0], attrs["groups"], -1)
    centred = grouped - grouped.mean(axis=2, keepdims=True)
    scale = np.sqrt(np.square(centred).mean(axis=2, keepdims=True) + attrs["eps"])
    return _weighted((centred / scale).reshape(x.shape), weight, bias)


def known_group_norm(x: Array, attrs: Attrs, weight: Array | None = None, bias: Array | None = None) -> Array:
    sums, flat = sums_of(attrs), x.reshape(*x.shape[:2], -1)

    def over_groups(values: Array) -> Array:
        return np.asarray((values.mean(axis=2)[:, sums.places] * sums.shares).mean(axis=2))

    shift, share, more, centre = sums.constants
    mean = over_groups(flat) + shift
    centred = flat - mean[:, sums.group_of, None]
    distance = centre - mean
    root = 1.0 / np.sqrt(over_groups(np.square(centred)) + share * np.square(distance) + more)
    carriers = np.concatenate([(distance * root)[:, sums.shifted], root[:, sums.spread]], axis=1)
    planes = np.broadcast_to(carriers[:, :, None], (*carriers.shape, flat.shape[2]))
    both = np.concatenate([centred * root[:, sums.group_of, None], planes], axis=1)
    return _weighted(both.reshape(x.shape[0], both.shape[1], *x.shape[2:]), weight, bias)


def _weighted(y: Array, weight: Array | None, bias: Array | None) -> Array:
    y = y if weight is None else y * weight
    return np.asarray(y if bias is None else y + bias)
