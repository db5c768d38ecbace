"""The statistics of one site: sums over samples in float64 that merge, so that shards give the result of one pass.

A sample is a row of the site, with one number per column (`columns.py`). With a the row, and g and h the loss's first and
second derivatives with respect to it:

    moments     n, mean ā, Σ(a−ā)²             always           merged by Chan's formula
    range       min a, max a                   need="range"
    scatter     Σ(a−ā)(a−ā)ᵀ                   need="scatter"   merged by Chan's formula
    curvature   Σg, Σh, Σga, Σha, Σha², Σ|ga|  need="curvature"
    coupling    ΣH, ΣHA, ΣAHA (A = diag a)     need="coupling"  H is the Gauss-Newton matrix of a sample
    drift       ã, Σ(a−ā)(ã−mean ã)ᵀ           need="drift"     ã: the same rows before earlier replacements. Likewise e:
                                                                what these took from the value that the next op adds to
    rows        at most `ROWS` rows of a, g, h need="rows"      those with the smallest hash: a sample that merges
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.linalg import blas

from cmrc.errors import StatsError
from cmrc.ir.graph import Array
from cmrc.one_order import gram, product
from cmrc.statistics.columns import Columns
from cmrc.statistics.drawn import Drawn

NEEDS = ("moments", "range", "scatter", "curvature", "coupling", "drift", "rows")
ROWS = 4096
LARGE = 100.0  # Σa² over Σ(a−ā)²: up to here the difference of sums keeps all but two of sixteen digits
BLOCK = 2**15  # numbers that are widened to float64 at a time, so that they stay in the cache

# How the arrays of two parts become one. Those with means and the scatter are merged by Chan's formula.
SUMS = ("g", "h", "ga", "ha", "haa", "abs_ga", "H", "HA", "AHA")
SAMPLED = ("rows", "hash", "row_g", "row_h")
EXTREMES = {"low": np.minimum, "high": np.maximum}


@dataclass(slots=True, eq=False)
class SiteStats:
    """The sums at one site."""

    columns: Columns
    needs: frozenset[str]
    count: float = 0.0  # rows
    samples: float = 0.0  # what the rows were taken from: a picture has many positions
    arrays: dict[str, Array] = field(default_factory=dict)
    how: str = ""  # how the curvature was computed

    # ------------------------------------------------------------ reading

    @property
    def mean(self) -> Array:
        return self.arrays["mean"]

    @property
    def variance(self) -> Array:
        """The variance of every column over the samples: Σ(a−ā)²/n."""
        return self.arrays["squares"] / self.count

    @property
    def covariance(self) -> Array:
        """C = Σ(a−ā)(a−ā)ᵀ/n."""
        return self.wanted("scatter", "scatter") / self.count

    def wanted(self, name: str, need: str) -> Array:
        """An array that calibration was asked for, or an error that says what to ask for."""
        if name not in self.arrays:
            raise StatsError(
                f"the statistics have no {need}", node=self.columns.name, fix=f'calibrate with need=[..., "{need}"]'
            )
        return self.arrays[name]

    # ------------------------------------------------------------ adding

    def add(
        self,
        rows: Array,
        *,
        samples: int | None = None,
        gradient: Array | None = None,
        curvature: Array | None = None,
        factors: Array | None = None,
        origin: Array | None = None,
        lost: Array | None = None,
        drawn: Drawn | None = None,
    ) -> None:
        """Add rows [..., columns] of some samples, g and h of the same shape, and factors B [n, k, columns] of H = BᵀB.

        `origin` are the same rows in the model without earlier replacements, `lost` what these took from another value. Where
        rows are `drawn`, they stand for all in squares and products; means are of all rows.
        """
        count = math.prod(rows.shape[:-1])
        if not count:
            return
        part = SiteStats(
            self.columns, self.needs, float(count), float(count if samples is None else samples), {}, self.how
        )
        if drawn is None or "scatter" not in self.needs:
            rows, drawn = rows.reshape(-1, rows.shape[-1]), None
            part.arrays = _moments(rows)
        else:
            part.arrays = {"mean": _mean(rows)}
        if "range" in self.needs:
            over = tuple(range(rows.ndim - 1))
            part.arrays |= {"low": rows.min(over).astype(np.float64), "high": rows.max(over).astype(np.float64)}
        if "scatter" in self.needs or origin is not None or lost is not None:
            part.arrays |= _products(rows, part.mean, origin, lost, drawn, scatter="scatter" in self.needs)
        if drawn is not None:
            part.arrays["squares"] = part.arrays["scatter"].diagonal().copy()
        if self.needs & {"curvature", "coupling", "rows"}:
            rows = rows.reshape(-1, rows.shape[-1])
        wide = rows.astype(np.float64) if self.needs & {"curvature", "coupling", "rows"} else rows
        if gradient is not None and curvature is not None:
            part.arrays |= _curvature_sums(wide, gradient, curvature)
        if factors is not None:
            part.arrays |= _coupling_sums(wide, factors)
        if "rows" in self.needs:
            part.arrays |= _sampled(wide, gradient, curvature)
        self._take(part)

    def merge(self, other: SiteStats) -> SiteStats:
        """The statistics of both parts together."""
        if (self.columns, self.needs) != (other.columns, other.needs):
            raise StatsError(
                "the two parts were calibrated differently",
                node=self.columns.name,
                fix="calibrate both with the same sites, positions and need",
            )
        both = SiteStats(self.columns, self.needs, self.count, self.samples, dict(self.arrays), self.how or other.how)
        both._take(other)
        return both

    def _take(self, other: SiteStats) -> None:
        """Chan's formula: M = M₁ + M₂ + dᵀd·n₁n₂/n with d the difference of the means; everything else adds up."""
        if not other.count:
            return
        if not self.count:
            self.count, self.samples = other.count, self.samples + other.samples
            self.arrays, self.how = dict(other.arrays), other.how or self.how
            return
        mine, theirs, total = self.arrays, other.arrays, self.count + other.count
        apart, weight = theirs["mean"] - mine["mean"], self.count * other.count / total
        merged = {"mean": mine["mean"] + apart * (other.count / total)}
        merged["squares"] = mine["squares"] + theirs["squares"] + apart**2 * weight
        if "scatter" in mine:
            merged["scatter"] = _together(mine["scatter"], theirs["scatter"], weight, apart, apart)
        for mean, cross in (("origin", "cross"), ("lost", "lost_cross")):
            if cross in mine:
                moved = theirs[mean] - mine[mean]
                merged[mean] = mine[mean] + moved * (other.count / total)
                merged[cross] = _together(mine[cross], theirs[cross], weight, apart, moved)
        merged |= {name: mine[name] + theirs[name] for name in SUMS if name in mine}
        merged |= {name: of(mine[name], theirs[name]) for name, of in EXTREMES.items() if name in mine}
        self.count, self.samples, self.arrays = total, self.samples + other.samples, merged
        if "rows" in mine:
            self.keep_rows([mine, theirs])

    def keep_rows(self, parts: Sequence[Mapping[str, Array]]) -> None:
        """Of the rows that the parts have sampled, keep those with the smallest hash."""
        names = [name for name in SAMPLED if name in parts[0]]
        self.arrays |= _smallest_hashes({name: np.concatenate([part[name] for part in parts]) for name in names})


def _moments(rows: Array) -> dict[str, Array]:
    """Mean and Σ(a−ā)² of some rows; about their first row where a mean is so large that digits would be lost."""
    count = len(rows)
    total, squares = _sums(rows, None)
    spread = squares - total**2 / count
    if (squares > LARGE * spread).any():
        pivot = rows[0].astype(np.float64)
        total, squares = _sums(rows, pivot)
        return {"mean": pivot + total / count, "squares": np.maximum(squares - total**2 / count, 0.0)}
    return {"mean": total / count, "squares": spread}


def _sums(rows: Array, pivot: Array | None) -> tuple[Array, Array]:
    """Σ(a−pivot) and Σ(a−pivot)², by blocks that stay in the cache."""
    width = rows.shape[1]
    total, squares = np.zeros(width), np.zeros(width)
    for block, ones in _wide_blocks(rows):
        if pivot is not None:
            block -= pivot
        total += ones @ block
        np.multiply(block, block, out=block)
        squares += ones @ block
    return total, squares


def _mean(rows: Array) -> Array:
    """The mean of all rows [..., columns]. Where the numbers of a column lie side by side they are summed as they lie."""
    width = rows.shape[-1]
    if rows.ndim == 3 and rows.strides[1] < rows.strides[2]:
        lines = rows.transpose(0, 2, 1).reshape(-1, rows.shape[1])
        ones = np.ones(lines.shape[1])
        sums = np.concatenate([block @ ones for block, _ in _wide_blocks(lines)])
        total = sums.reshape(-1, width).sum(0)
    else:
        total = np.zeros(width)
        for block, ones in _wide_blocks(rows.reshape(-1, width)):
            total += ones @ block
    return np.asarray(total / math.prod(rows.shape[:-1]))


def _wide_blocks(rows: Array) -> Iterator[tuple[Array, Array]]:
    """Some rows at a time in float64, in one buffer that stays in the cache, and as many ones."""
    count, width = rows.shape
    size = max(1, min(BLOCK // max(width, 1), count))
    buffer, ones = np.empty((size, width)), np.ones(size)
    for start in range(0, count, size):
        part = rows[start : start + size]
        block = buffer[: len(part)]
        block[...] = part
        yield block, ones[: len(part)]


def _products(
    rows: Array, mean: Array, origin: Array | None, lost: Array | None, drawn: Drawn | None, *, scatter: bool
) -> dict[str, Array]:
    """Σ(a−ā)(a−ā)ᵀ, and Σ(a−ā)(b−b̄)ᵀ with other rows b of the same samples; means are of all rows.

    In float64, because matrices are solved with it: products rounded to float32 leave correlations with eigenvalues down to
    −1e-4, where ridges are 1e-6. With the rows as they were before, ã = a + (ã−a). The second part, and what was lost, stand on
    right-hand sides only, so there float32 does.
    """

    def some(array: Array) -> Array:
        return array.reshape(-1, array.shape[-1]) if drawn is None else drawn.of(array)

    own_rows = some(rows)
    centred = own_rows - mean
    if drawn is not None:
        centred *= np.sqrt(drawn.weight)[:, None]

    def with_other(other: Array, mean_of_other: Array) -> Array:
        apart = other - mean_of_other.astype(other.dtype)
        if drawn is not None:
            apart *= np.sqrt(drawn.weight).astype(other.dtype)[:, None]
        return np.asarray(product(centred.astype(other.dtype, copy=False), apart), dtype=np.float64)

    own = gram(centred)
    sums = {"scatter": own} if scatter else {}
    if origin is not None:
        sums["origin"] = _mean(origin)
        sums["cross"] = own + with_other(some(origin) - own_rows, sums["origin"] - mean)
    if lost is not None:
        sums["lost"] = _mean(lost)
        sums["lost_cross"] = with_other(some(lost), sums["lost"])
    return sums


def _together(mine: Array, theirs: Array, weight: float, apart: Array, moved: Array) -> Array:
    """M₁ + M₂ + weight · apart movedᵀ, in one new array."""
    total = np.add(mine, theirs, order="C")
    return np.asarray(blas.dger(weight, moved, apart, a=total.T, overwrite_a=1)).T  # pyright: ignore[reportAttributeAccessIssue]


def _curvature_sums(rows: Array, gradient: Array, curvature: Array) -> dict[str, Array]:
    """Σg, Σh, Σga, Σha, Σha², Σ|ga|."""
    g, h = gradient.astype(np.float64), curvature.astype(np.float64)
    terms = {"g": g, "h": h, "ga": g * rows, "ha": h * rows, "haa": h * rows**2, "abs_ga": np.abs(g * rows)}
    return {name: array.sum(0) for name, array in terms.items()}


def _coupling_sums(rows: Array, factors: Array) -> dict[str, Array]:
    """ΣH, ΣHA and ΣAHA from H = BᵀB of each sample: products of B and of BA, all samples stacked."""
    width = rows.shape[1]
    plain = factors.astype(np.float64).reshape(-1, width)
    scaled = (factors * rows[:, None, :]).reshape(-1, width)
    return {"H": gram(plain), "HA": product(plain, scaled), "AHA": gram(scaled)}


def _sampled(rows: Array, gradient: Array | None, curvature: Array | None) -> dict[str, Array]:
    sample = {"rows": rows, "hash": _hashes(rows)}
    if gradient is not None and curvature is not None:
        sample |= {"row_g": gradient.astype(np.float64), "row_h": curvature.astype(np.float64)}
    return _smallest_hashes(sample)


def _hashes(rows: Array) -> Array:
    """A number in [0, 1) for each row that depends on nothing but the row: the same sample whatever the shards."""
    bits = np.ascontiguousarray(rows).view(np.uint64)
    odd = np.random.default_rng(0).integers(0, 2**63, rows.shape[1], dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    mixed = (bits ^ (bits >> np.uint64(29))) * odd
    mixed = (mixed ^ (mixed >> np.uint64(32))).sum(axis=1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return np.asarray((mixed ^ (mixed >> np.uint64(31))).astype(np.float64) / 2.0**64)


def _smallest_hashes(sample: dict[str, Array]) -> dict[str, Array]:
    order = np.argsort(sample["hash"], kind="stable")[:ROWS]
    return {name: array[order] for name, array in sample.items()}
