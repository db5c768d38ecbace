"""What calibration knows of each site: sums over samples in float64 that merge, so that shards give one pass's result.

A sample is a row of the site: one number for each of its columns, where a column is a unit (or, at a site of attention
heads, an element of a unit's vector). With a the row, g and h the loss's first and second derivatives by it:

    moments     n, mean ā, Σ(a−ā)²             always           merged by Chan's formula
    range       min a, max a                   need="range"
    scatter     Σ(a−ā)(a−ā)ᵀ                   need="scatter"   merged by Chan's formula
    curvature   Σg, Σh, Σga, Σha, Σha², Σ|ga|  need="curvature"
    coupling    ΣH, ΣHA, ΣAHA (A = diag a)     need="coupling"  H the Gauss-Newton matrix of a sample
    drift       ã, Σ(a−ā)(ã−mean ã)ᵀ           need="drift"     ã the same rows before earlier replacements; and alike e, what
                                                                they took from the value that the next op's result is added to
    rows        at most `ROWS` rows of a, g, h need="rows"      those of smallest hash: a sample that merges
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from cmrc.errors import StatsError
from cmrc.files import write_whole
from cmrc.ir.fingerprint import Fingerprint
from cmrc.ir.graph import Array

FORMAT = "cmrc-stats-1"
NEEDS = ("moments", "range", "scatter", "curvature", "coupling", "drift", "rows")
ROWS = 4096
LARGE = 100.0  # Σa² over Σ(a−ā)²: up to here the difference of sums keeps all but two of sixteen digits
BLOCK = 64  # rows that are widened to float64 at a time, so that they stay in the cache

# How the arrays of two parts become one. What stands in neither is merged by a formula of its own.
SUMS = ("g", "h", "ga", "ha", "haa", "abs_ga", "H", "HA", "AHA")
SAMPLED = ("rows", "hash", "row_g", "row_h")
EXTREMES = {"low": np.minimum, "high": np.maximum}


@dataclass(frozen=True, slots=True)
class Columns:
    """How the columns of a site's rows are its units: `features` columns a unit, of which `slots` are positions."""

    name: str
    value: str
    axis: int
    units: int
    features: int = 1
    positions: str | int = "all"
    slots: int = 1

    @property
    def count(self) -> int:
        return self.units * self.features

    def by_unit(self, array: Array) -> Array:
        """[..., columns] as [..., units, features]."""
        return array.reshape(*array.shape[:-1], self.units, self.features)


@dataclass(slots=True, eq=False)
class SiteStats:
    """The sums at one site."""

    columns: Columns
    needs: frozenset[str]
    count: float = 0.0  # rows
    samples: float = 0.0  # what the rows were taken from: a picture has many positions
    arrays: dict[str, Array] = field(default_factory=dict)
    how: str = ""  # how the curvature was found

    # ------------------------------------------------------------ reading

    @property
    def mean(self) -> Array:
        return self.arrays["mean"]

    @property
    def variance(self) -> Array:
        """Of every column, over the samples: Σ(a−ā)²/n."""
        return self.arrays["squares"] / self.count

    @property
    def covariance(self) -> Array:
        """C = Σ(a−ā)(a−ā)ᵀ/n."""
        return self.wanted("scatter", "scatter") / self.count

    def wanted(self, name: str, need: str) -> Array:
        """An array that calibration was asked for, or an error that says what to ask."""
        if name not in self.arrays:
            raise StatsError(
                f"the statistics hold no {need}", node=self.columns.name, fix=f'calibrate with need=[..., "{need}"]'
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
    ) -> None:
        """Add rows [n, columns] of some samples, g and h of the same shape, and factors B [n, k, columns] of H = BᵀB.

        `origin` are the same rows in the model without earlier replacements, and `lost` what these took from another value.
        """
        if not len(rows):
            return
        told = float(len(rows) if samples is None else samples)
        part = SiteStats(self.columns, self.needs, float(len(rows)), told, _moments(rows), self.how)
        if "range" in self.needs:
            part.arrays |= {"low": rows.min(0).astype(np.float64), "high": rows.max(0).astype(np.float64)}
        if "scatter" in self.needs:
            centred = rows - part.arrays["mean"]
            part.arrays["scatter"] = centred.T @ centred
        if origin is not None:
            part.arrays["origin"] = origin.mean(0, dtype=np.float64)
            part.arrays["cross"] = (rows - part.arrays["mean"]).T @ (origin - part.arrays["origin"])
        if lost is not None:
            part.arrays["lost"] = lost.mean(0, dtype=np.float64)
            part.arrays["lost_cross"] = (rows - part.arrays["mean"]).T @ (lost - part.arrays["lost"])
        wide = rows.astype(np.float64) if self.needs & {"curvature", "coupling", "rows"} else rows
        if gradient is not None and curvature is not None:
            g, h = gradient.astype(np.float64), curvature.astype(np.float64)
            sums = {"g": g, "h": h, "ga": g * wide, "ha": h * wide, "haa": h * wide**2, "abs_ga": np.abs(g * wide)}
            part.arrays |= {name: array.sum(0) for name, array in sums.items()}
        if factors is not None:
            plain = factors.astype(np.float64).reshape(-1, rows.shape[1])
            scaled = (factors * wide[:, None, :]).reshape(-1, rows.shape[1])
            part.arrays |= {"H": plain.T @ plain, "HA": plain.T @ scaled, "AHA": scaled.T @ scaled}
        if "rows" in self.needs:
            held = {"rows": wide, "hash": _hashes(wide)}
            if gradient is not None and curvature is not None:
                held |= {"row_g": gradient.astype(np.float64), "row_h": curvature.astype(np.float64)}
            part.arrays |= _fewest(held)
        self._take(part)

    def merge(self, other: SiteStats) -> SiteStats:
        """The statistics of both parts together."""
        if (self.columns, self.needs) != (other.columns, other.needs):
            raise StatsError(
                "the two parts were not calibrated alike",
                node=self.columns.name,
                fix="give both the same sites and need",
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
        made = {"mean": mine["mean"] + apart * (other.count / total)}
        made["squares"] = mine["squares"] + theirs["squares"] + apart**2 * weight
        if "scatter" in mine:
            made["scatter"] = mine["scatter"] + theirs["scatter"] + np.outer(apart, apart) * weight
        for mean, cross in (("origin", "cross"), ("lost", "lost_cross")):
            if cross in mine:
                moved = theirs[mean] - mine[mean]
                made[mean] = mine[mean] + moved * (other.count / total)
                made[cross] = mine[cross] + theirs[cross] + np.outer(apart, moved) * weight
        made |= {name: mine[name] + theirs[name] for name in SUMS if name in mine}
        made |= {name: of(mine[name], theirs[name]) for name, of in EXTREMES.items() if name in mine}
        self.count, self.samples, self.arrays = total, self.samples + other.samples, made
        if "rows" in mine:
            self.keep_rows([mine, theirs])

    def keep_rows(self, parts: Sequence[Mapping[str, Array]]) -> None:
        """Of the rows that the parts have sampled, those of smallest hash."""
        held = [name for name in SAMPLED if name in parts[0]]
        self.arrays |= _fewest({name: np.concatenate([part[name] for part in parts]) for name in held})


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
    count, width = rows.shape
    total, squares = np.zeros(width), np.zeros(width)
    held, ones = np.empty((min(BLOCK, count), width)), np.ones(min(BLOCK, count))
    for start in range(0, count, BLOCK):
        part = rows[start : start + BLOCK]
        block, one = held[: len(part)], ones[: len(part)]
        block[...] = part
        if pivot is not None:
            block -= pivot
        total += one @ block
        np.multiply(block, block, out=block)
        squares += one @ block
    return total, squares


def _hashes(rows: Array) -> Array:
    """A number in [0, 1) for each row that depends on nothing but the row: the same sample whatever the shards."""
    bits = np.ascontiguousarray(rows).view(np.uint64)
    odd = np.random.default_rng(0).integers(0, 2**63, rows.shape[1], dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    mixed = (bits ^ (bits >> np.uint64(29))) * odd
    mixed = (mixed ^ (mixed >> np.uint64(32))).sum(axis=1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return np.asarray((mixed ^ (mixed >> np.uint64(31))).astype(np.float64) / 2.0**64)


def _fewest(held: dict[str, Array]) -> dict[str, Array]:
    order = np.argsort(held["hash"], kind="stable")[:ROWS]
    return {name: array[order] for name, array in held.items()}


@dataclass(slots=True, eq=False)
class Stats:
    """What `cmrc.calibrate` returns: the statistics of every site, the model and the data they belong to."""

    sites: dict[str, SiteStats]
    fingerprint: Fingerprint | None = None
    data: int = 0  # the sum of the hashes of all batches
    samples: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> SiteStats:
        for found in self.sites.values():
            if name in (found.columns.name, found.columns.value):
                return found
        raise StatsError(f"there are no statistics of {name!r}", fix=f"calibrated are {', '.join(self.sites)}")

    def __repr__(self) -> str:
        return f"Stats({len(self.sites)} sites, {self.samples} samples)"

    @property
    def digest(self) -> str:
        """A name for the data, whatever the order of its batches."""
        return f"{self.data:064x}"[:16]

    def see(self, arrays: Iterable[Array]) -> None:
        """Take a batch into the data's fingerprint."""
        digest = hashlib.sha256()
        for array in arrays:
            digest.update(f"{array.dtype}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data if array.size else b"")
        self.data = (self.data + int.from_bytes(digest.digest(), "big")) % 2**256

    def merge(self, other: Stats) -> Stats:
        """The statistics of two shards of the data."""
        if self.fingerprint != other.fingerprint or list(self.sites) != list(other.sites):
            raise StatsError("they are of another model or of other sites", fix="calibrate every shard alike")
        sites = {name: found.merge(other.sites[name]) for name, found in self.sites.items()}
        data = (self.data + other.data) % 2**256
        return Stats(sites, self.fingerprint, data, self.samples + other.samples, self.options)

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, whole or not at all."""
        described = {
            name: {"columns": _fields(s.columns), "needs": sorted(s.needs), "count": s.count,
                   "samples": s.samples, "how": s.how}
            for name, s in self.sites.items()
        }  # fmt: skip
        model = self.fingerprint.to_json() if self.fingerprint else None
        document = {"sites": described, "model": model, "data": hex(self.data), "samples": self.samples}
        metadata = {"format": FORMAT, "stats": json.dumps({**document, "options": self.options})}
        arrays = {f"{i}.{key}": array for i, s in enumerate(self.sites.values()) for key, array in s.arrays.items()}
        write_whole(Path(path), save({key: np.ascontiguousarray(a) for key, a in arrays.items()}, metadata))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        try:
            with safe_open(str(path), "np") as file:
                metadata = file.metadata() or {}
                arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise StatsError(
                f"cannot be read: {error}", at=str(path), fix="give a file that `Stats.save` wrote"
            ) from error
        if metadata.get("format") != FORMAT:
            raise StatsError("is no file of statistics", at=str(path), fix="give a file that `Stats.save` wrote")
        document = json.loads(metadata["stats"])
        sites = {}
        for i, (name, told) in enumerate(document["sites"].items()):
            mine = {key.partition(".")[2]: a for key, a in arrays.items() if key.partition(".")[0] == str(i)}
            columns, needs = Columns(**told["columns"]), frozenset(told["needs"])
            sites[name] = SiteStats(columns, needs, told["count"], told["samples"], mine, told["how"])
        model = Fingerprint.from_json(document["model"]) if document["model"] else None
        return cls(sites, model, int(document["data"], 16), document["samples"], document["options"])


def _fields(columns: Columns) -> Mapping[str, Any]:
    return {name: getattr(columns, name) for name in Columns.__slots__}
