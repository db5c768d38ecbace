"""`cmrc.calibrate`: one pass over some data, batch by batch, that fills the statistics of the chosen sites.

    program, data ─> batches ─> host.run(taps) ─> rows of each site ─> SiteStats.add
                                └─> g, h, H of the loss by each site, where they are asked for (curvature.py)

Nothing is kept of a batch but its sums, so memory does not grow with the data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cmrc.errors import SiteError, StatsError
from cmrc.hosts.derivatives import Derivatives
from cmrc.hosts.protocols import Host
from cmrc.ir.graph import Array
from cmrc.program.program import Program
from cmrc.program.reach import last_of_each_run
from cmrc.program.sites import Site
from cmrc.statistics.batches import SIZE, Batch, as_array, batches, length
from cmrc.statistics.curvature import Options, derivatives
from cmrc.statistics.stats import NEEDS, Columns, SiteStats, Stats

Positions = str | int
Watch = Callable[[Iterable[Batch], int | None], Iterable[Batch]]
CURVATURES = ("auto", "gauss-newton", "full", "monte-carlo")
BY_DERIVATIVES = frozenset({"curvature", "coupling"})


def calibrate(
    program: Program,
    data: Any,
    *,
    sites: str | Sequence[str] = "*",
    need: str | Iterable[str] = ("moments",),
    positions: Positions | Mapping[str, Positions] = "all",
    loss: str = "cross-entropy",
    curvature: str = "auto",
    draws: int = 8,
    seed: int = 0,
    size: int = SIZE,
    shard: tuple[int, int] = (0, 1),
    host: Host | None = None,
    taps: Taps | None = None,
    watch: Watch = lambda found, count: found,
) -> Stats:
    """Statistics of the sites that names or globs mean (all that fold, by default), over all of the data.

    `need` asks for more than means and variances: see `cmrc.stats`. `positions` says which positions of a value are
    samples: "all" (tokens, pixels), a number (a class token), the name of a mask in the batch (True or non-zero
    where a token counts), or "each" (every position has columns of its own); a mapping gives it by site.
    `loss` and `curvature` are what `need=["curvature"]` differentiates, and how. `shard=(i, n)` takes every n-th batch
    from the i-th on; `Stats.merge` puts shards together. `host` runs another form of the model (one with earlier
    replacements in place; `need=["drift"]` compares it with the model itself), and `taps` get the sites' values from elsewhere than
    a run of it (`cmrc.stream`). `watch` wraps the batches, for a progress bar.
    """
    wanted = frozenset([need] if isinstance(need, str) else need) | {"moments"}
    if curvature not in CURVATURES:
        raise StatsError(f"curvature={curvature!r} is not understood", fix=f"say one of {', '.join(CURVATURES)}")
    unknown = sorted(wanted - set(NEEDS))
    if unknown:
        raise StatsError(f"need={unknown[0]!r} is not understood", fix=f"say any of {', '.join(NEEDS)}")
    chosen = choose(program, sites)
    columns = [columns_of(program, site, _position(positions, site)) for site in chosen]
    found = {c.value: SiteStats(c, wanted) for c in columns}
    options = Options(loss, curvature, draws, seed)
    recorded = {"need": sorted(wanted), "seed": seed, "positions": {c.name: c.positions for c in columns}}
    if wanted & BY_DERIVATIVES:
        recorded |= {"loss": loss, "curvature": curvature, "draws": draws}
    stats = Stats(found, program.fingerprint, options=recorded)
    running = program.host if host is None else host
    source = Taps(program.host, running, list(found)) if taps is None else taps
    parts = batches(data, program.host.inputs, size=size, shard=shard)
    for number, batch in enumerate(watch(parts, length(data))):
        stats.see(batch.arrays())
        stats.samples += len(batch)
        with np.errstate(invalid="ignore", over="ignore"):  # told in words right after
            _add(program, running, source, batch, found, wanted, options, shard[0] + number * shard[1])
        _require_finite(found.values(), batch, shard[0] + number * shard[1])
    return stats


def _require_finite(found: Iterable[SiteStats], batch: Batch, number: int) -> None:
    """A single NaN or infinity makes its column's mean one: no second look at the rows, unless there is one."""
    for site in found:
        broken = np.flatnonzero(~np.isfinite(site.mean)).tolist() if site.count else []
        if broken:
            for name, given in batch.inputs.items():
                array = as_array(given)
                if array.dtype.kind == "f" and not np.isfinite(array).all():
                    raise StatsError(
                        f"input {name!r} is NaN or infinite in row {np.argwhere(~np.isfinite(array))[0][0]} of batch {number}",
                        fix="leave out samples that are not finite",
                    )
            raise StatsError(
                f"unit {broken[0] // site.columns.features} is NaN or infinite on batch {number} of the data",
                node=site.columns.name,
                fix="leave out samples that are not finite, or on which the model is not",
            )


class Taps:
    """The values of some sites for a batch: only what they depend on is run, by the model itself and by the form in use."""

    def __init__(self, plain: Host, host: Host, names: Sequence[str]) -> None:
        self.plain, self.host, self.names = plain, host, list(names)
        self.beside: Columns | None = None  # of a single site: see `readers.beside`
        self._pieces: dict[int, Any] = {}

    def original(self, number: int, batch: Batch) -> Mapping[str, Array]:
        return self._run(self.plain, batch)

    def running(self, number: int, batch: Batch) -> Mapping[str, Array]:
        return self._run(self.host, batch)

    def _run(self, host: Host, batch: Batch) -> Mapping[str, Array]:
        if id(host) not in self._pieces:
            names = [*self.names, *([self.beside.value] if self.beside else [])]
            self._pieces[id(host)] = host.extract([value.name for value in host.graph.inputs], names)
        found: Mapping[str, Array] = self._pieces[id(host)].run(host.bind(batch.inputs))
        return found


def choose(program: Program, sites: str | Sequence[str]) -> list[Site]:
    """The sites that names and globs mean, in the order of the graph. The glob * means those that fold."""
    patterns = [sites] if isinstance(sites, str) else list(sites)
    if patterns == ["*"]:
        found = [site for site in program.sites() if site.folding is not None and site.folding.folds and site.units > 1]
        return last_of_each_run(program, found)
    order = {name: i for i, name in enumerate(program.values)}
    named = {site.value: site for pattern in patterns for site in program.find(pattern)}
    if not named:
        raise SiteError("no site was named", fix="name sites, or globs of them")
    return sorted(named.values(), key=lambda site: order[site.value])


def _position(positions: Positions | Mapping[str, Positions], site: Site) -> Positions:
    if not isinstance(positions, Mapping):
        return positions
    return next((p for name, p in positions.items() if name in (site.name, site.value)), "all")


def columns_of(program: Program, site: Site, positions: Positions = "all") -> Columns:
    """How a site's values become rows: heads have a vector each, everything else a number a unit."""
    node = program.producers.get(site.value)
    headed = node is not None and node.op in ("attention", "matmul") and site.axis < len(site.shape) - 1
    vector = site.shape[-1] if headed else 1
    if not isinstance(vector, int):
        raise StatsError(
            "the size of a head is known only at run time", node=site.name, fix="export it with fixed sizes"
        )
    slots = 1
    if positions == "each":
        places = [n for d, n in enumerate(site.shape) if d not in _apart(site.shape, site.axis, headed)]
        if not all(isinstance(n, int) for n in places):
            raise StatsError(
                "its positions are known only at run time", node=site.name, fix='use positions="all", or fixed sizes'
            )
        slots = int(np.prod([int(n) for n in places], dtype=np.int64))
    return Columns(site.name, site.value, site.axis, site.units, vector * slots, positions, slots)


def _apart(shape: Sequence[Any], axis: int, headed: bool) -> set[int]:
    """The axes that are no positions: the batch, the units, and the vector of a head."""
    return {axis, *({0} if axis else ()), *({len(shape) - 1} if headed else ())}


def rows_of(columns: Columns, value: Array, batch: Batch | None = None) -> Array:
    """A value (or its gradient) as rows: [samples, columns]."""
    headed = columns.features // columns.slots > 1
    apart = _apart(value.shape, columns.axis, headed)
    places = [d for d in range(value.ndim) if d not in apart]
    batched = [0] if columns.axis else []
    last = [value.ndim - 1] if headed else []
    if columns.positions == "each":
        return value.transpose([*batched, columns.axis, *places, *last]).reshape(-1, columns.count)
    ordered = value.transpose([*batched, *places, columns.axis, *last])
    if columns.positions == "all":
        return ordered.reshape(-1, columns.count)
    leading = ordered.shape[: len(batched) + len(places)]
    spread = ordered.reshape(leading[0] if batched else 1, -1, columns.count)
    if isinstance(columns.positions, int):
        if not -spread.shape[1] <= columns.positions < spread.shape[1]:
            raise StatsError(
                f"there is no position {columns.positions}: it has {spread.shape[1]}", node=columns.name,
                fix='give a position that exists, or positions="all"',
            )  # fmt: skip
        return spread[:, columns.positions]
    assert batch is not None
    mask = batch.mask(columns.positions).astype(bool)
    if mask.shape != spread.shape[:2]:
        raise StatsError(
            f"the mask has shape {list(mask.shape)}, its positions are {list(spread.shape[:2])}", node=columns.name,
            fix="give one entry for each sample and position",
        )  # fmt: skip
    return np.asarray(spread[mask])


def _add(
    program: Program,
    host: Host,
    taps: Taps,
    batch: Batch,
    found: Mapping[str, SiteStats],
    wanted: frozenset[str],
    options: Options,
    number: int,
) -> None:
    plain = taps.original(number, batch) if "drift" in wanted else {}
    origins = [rows_of(s.columns, plain[name], batch) if plain else None for name, s in found.items()]
    if not wanted & BY_DERIVATIVES:
        values, other = taps.running(number, batch), taps.beside
        for (name, stats), origin in zip(found.items(), origins, strict=True):
            lost = None
            if plain and other is not None and stats.columns.features == 1:
                alike = dataclasses.replace(other, positions=stats.columns.positions)
                lost = rows_of(alike, plain[other.value] - values[other.value], batch)
            stats.add(rows_of(stats.columns, values[name], batch), samples=len(batch), origin=origin, lost=lost)
        return
    columns = [stats.columns for stats in found.values()]
    made: list[Derivatives] = derivatives(program, host, batch, columns, options, number, "coupling" in wanted)
    for stats, d, origin in zip(found.values(), made, origins, strict=True):
        stats.how = d.how
        given = {"rows": d.value, "gradient": d.gradient, "curvature": d.curvature}
        tables = {name: rows_of(stats.columns, array, batch) for name, array in given.items()}
        factors = None
        if "coupling" in wanted:
            factors = np.stack([rows_of(stats.columns, part, batch) for part in d.factors], axis=1)
        stats.add(tables.pop("rows"), samples=len(batch), factors=factors, origin=origin, **tables)
