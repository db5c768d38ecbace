"""`cmrc.calibrate`: one pass over some data, batch by batch, that fills the statistics of the chosen sites.

    program, data ─> batches ─> host.run(taps) ─> rows of each site ─> SiteStats.add
                                └─> g, h, H of the loss at each site, where they are needed (curvature.py)

Only the sums of a batch are kept, so memory does not grow with the data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from cmrc.errors import SiteError, StatsError
from cmrc.hosts.protocols import Host
from cmrc.ir.graph import Array
from cmrc.one_order import one_order
from cmrc.program.program import Program
from cmrc.program.reach import last_of_each_function, last_of_each_run
from cmrc.program.sites import Site
from cmrc.statistics.batches import SIZE, Batch, as_array, batches, in_batches_of_model, length, samples_of
from cmrc.statistics.checkpoint import EVERY, Checkpoint, Seen, digest_of
from cmrc.statistics.columns import Columns, Positions, columns_of, position_of, rows_of
from cmrc.statistics.curvature import Options, derivatives
from cmrc.statistics.drawn import ENOUGH, Enough
from cmrc.statistics.site_stats import NEEDS, SiteStats
from cmrc.statistics.stats import Stats, digest_of_batch

Item = TypeVar("Item")


class Watch(Protocol):
    """Shows how far a loop has come: gives back its items, of which there are so many if that is known."""

    def __call__(self, items: Iterable[Item], count: int | None, /) -> Iterable[Item]: ...


def unwatched(items: Iterable[Item], count: int | None, /) -> Iterable[Item]:
    return items


CURVATURES = ("auto", "gauss-newton", "full", "monte-carlo")
BY_DERIVATIVES = frozenset({"curvature", "coupling"})


@one_order()
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
    rows_per_unit: int = ENOUGH,
    shard: tuple[int, int] = (0, 1),
    host: Host | None = None,
    taps: Taps | None = None,
    watch: Watch = unwatched,
    checkpoint: str | Path | None = None,
    every: float = EVERY,
) -> Stats:
    """The statistics of some sites (names or globs; by default all that fold) over all of the data.

    `need` asks for more than means and variances: see `site_stats`. `positions` says which positions of a value are
    samples: "all" (tokens, pixels), a number (a class token), the name of a mask in the batch (True or non-zero
    where a token counts), or "each" (every position has its own columns); a mapping gives it by site.
    `need=["curvature"]` differentiates `loss`, in the way that `curvature` says. `shard=(i, n)` takes every n-th batch
    from the i-th on; `Stats.merge` puts shards together.
    `rows_per_unit` says how many rows are enough for products of columns, for each of them (`drawn.py`): of data whose number of
    samples is known beforehand so many are drawn, or all if they are not twice as many; 0 takes all. `host` runs another form of the model (with earlier
    replacements in place; `need=["drift"]` compares it with the model itself), and `taps` provide the sites' values in
    another way than by running it (`planning/stream.py`). `watch` wraps the batches, for a progress bar.

    `checkpoint` is a file that holds the sums so far, written every `every` seconds. If this call is interrupted, the
    same call continues from there, to the same bits; the file is removed at the end. A shard adds its number to the name.
    """
    needs = _require_known_needs(need, curvature)
    columns = [columns_of(program, site, position_of(positions, site)) for site in choose(program, sites, apart=True)]
    for apart in (c for c in columns if needs & BY_DERIVATIVES and program.why_apart(c.value)):
        fix = "use an objective without gradients here, such as reconstruction; or leave this site out"
        raise StatsError(f"gradients do not reach it: {program.why_apart(apart.value)}", node=apart.name, fix=fix)
    data = in_batches_of_model(data, program.graph.inputs)
    samples = samples_of(data, program.host.inputs) if rows_per_unit and "scatter" in needs else None
    recorded = {"need": sorted(needs), "seed": seed, "positions": {c.name: c.positions for c in columns}}
    if needs & BY_DERIVATIVES:
        recorded |= {"loss": loss, "curvature": curvature, "draws": draws}
    if samples is not None:
        recorded |= {"rows_per_unit": rows_per_unit, "samples": samples}
    stats = Stats({c.value: SiteStats(c, needs) for c in columns}, program.fingerprint, options=recorded)
    saved = None
    if checkpoint is not None:
        if host is not None or taps is not None:
            raise StatsError("checkpoint= cannot be combined with host= or taps=", fix="leave out checkpoint=")
        columns_asked = [dataclasses.astuple(c) for c in columns]
        asked = {**recorded, "model": stats.header()["model"], "columns": columns_asked, "size": size, "shard": shard}
        saved = Checkpoint(_of_shard(Path(checkpoint), shard), digest_of(asked), every)
        stats = saved.load() or stats
    running = program.host if host is None else host
    tapped = {name: program.tapped(name) for name in stats.sites}
    source = Taps(program.host, running, tapped) if taps is None else taps
    options, enough = Options(loss, curvature, draws, seed), Enough(rows_per_unit, samples)
    calibration = _Calibration(program, running, source, stats.sites, needs, options, enough)
    parts = batches(data, program.host.inputs, size=size, shard=shard)
    seen = Seen()
    for i, batch in enumerate(watch(parts, length(data))):
        digest = digest_of_batch(batch.arrays()) if source.read_anew else b""
        seen.take(digest)
        if saved is not None and i < saved.reached.batches:
            if seen.batches == saved.reached.batches:
                saved.require_same(seen)
            continue
        stats.see(digest)
        stats.samples += len(batch)
        number = shard[0] + i * shard[1]
        with np.errstate(invalid="ignore", over="ignore"):  # `_require_finite` reports it with the place
            calibration.add(batch, number)
        known = None if shard[1] > 1 else stats.samples - len(batch)
        _require_finite([*stats.sites.values(), *source.halves], batch, number, known)
        if saved is not None:
            saved.save_if_due(stats, seen)
    if saved is not None:
        if seen.batches < saved.reached.batches:
            saved.require_same(seen)
        saved.finish()
    return stats


def _require_known_needs(need: str | Iterable[str], curvature: str) -> frozenset[str]:
    needs = frozenset([need] if isinstance(need, str) else need) | {"moments"}
    if curvature not in CURVATURES:
        raise StatsError(f"curvature={curvature!r} is not known", fix=f"use one of {', '.join(CURVATURES)}")
    unknown = sorted(needs - set(NEEDS))
    if unknown:
        raise StatsError(f"need={unknown[0]!r} is not known", fix=f"use any of {', '.join(NEEDS)}")
    return needs


def _of_shard(path: Path, shard: tuple[int, int]) -> Path:
    return path if shard[1] == 1 else path.with_name(f"{path.name}.{shard[0]}-of-{shard[1]}")


def _require_finite(sites: Iterable[SiteStats], batch: Batch, number: int, first: int | None) -> None:
    """One NaN or infinity makes the sums of its column NaN or infinite, so the rows are searched only if there is one.

    `first` is how many samples came before the batch, where that is known.
    """
    for site in sites:
        if not site.count:
            continue
        broken = np.flatnonzero(~np.isfinite(site.mean) | ~np.isfinite(site.arrays["squares"])).tolist()
        if not broken:
            continue
        for name, given in batch.inputs.items():
            array = as_array(given)
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                row = int(np.argwhere(~np.isfinite(array))[0][0])
                place = "" if first is None else f", sample {first + row} of the data"
                raise StatsError(
                    f"input {name!r} is NaN or infinite in row {row} of batch {number}{place}",
                    fix="leave out samples that are not finite",
                )
        raise StatsError(
            f"unit {broken[0] // site.columns.features} is NaN or infinite, or too large to square, on batch {number}",
            node=site.columns.name,
            fix="leave out samples that are not finite, or on which the model is not",
        )


class Taps:
    """The values of some sites for a batch, by the model itself and by the form in use. Only what they depend on is run."""

    def __init__(self, plain: Host, host: Host, names: Iterable[str] | Mapping[str, str]) -> None:
        """A mapping of names gives for each site the value that shows its numbers."""
        self.plain, self.host = plain, host
        self.names = dict(names) if isinstance(names, Mapping) else {name: name for name in names}
        self.beside: Columns | None = None  # of a single site: see `readers.beside`
        self.read_anew = True  # whether nobody has told yet which data these are
        self.unmoved: SiteStats | None = None  # of a single site, where wanted: its statistics in the model itself
        self.halves: tuple[SiteStats, ...] = ()  # likewise: of every other batch, instead of all together
        self._pieces: dict[int, Any] = {}

    def original(self, number: int, batch: Batch) -> Mapping[str, Array]:
        return self._run(self.plain, batch)

    def running(self, number: int, batch: Batch) -> Mapping[str, Array]:
        return self._run(self.host, batch)

    def _run(self, host: Host, batch: Batch) -> Mapping[str, Array]:
        if id(host) not in self._pieces:
            beside = [self.beside.value] if self.beside else list[str]()
            names = dict.fromkeys([*self.names.values(), *beside])
            self._pieces[id(host)] = host.extract([value.name for value in host.graph.inputs], list(names))
        values: Mapping[str, Array] = self._pieces[id(host)].run(host.bind(batch.inputs))
        return {**values, **{site: values[name] for site, name in self.names.items()}}


def choose(program: Program, sites: str | Sequence[str], *, apart: bool = False) -> list[Site]:
    """The sites that names and globs mean, in the order of the graph. The glob * means those that fold, and at which the model can
    be cut. A site `apart`, at which it cannot, may be named where its statistics suffice.

    Where none folds for affine maps as well (in a quantised model), it means those that fold for constants.
    """
    patterns = [sites] if isinstance(sites, str) else list(sites)
    if patterns == ["*"]:
        several = [
            site
            for site in program.sites()
            if site.folding is not None and site.units > 1 and not program.why_apart(site.value)
        ]
        whole = [site for site in several if site.folding is not None and site.folding.folds]
        constant = [site for site in several if site.folding is not None and site.folding.constant.folds]
        return last_of_each_run(program, whole) if whole else last_of_each_function(program, constant)
    order = {name: i for i, name in enumerate(program.values)}
    named = {site.value: site for pattern in patterns for site in program.find(pattern)}
    if not named:
        raise SiteError("no site was named", fix="name sites, or globs of them")
    for site in named.values():
        problem = program.why_apart(site.value)
        if problem and not (apart and program.tapped(site.value)):
            fix = "leave this site out, and choose its units and constants by hand"
            raise SiteError(problem, node=site.name, op=site.op, fix=fix)
    return sorted(named.values(), key=lambda site: order[site.value])


@dataclass(frozen=True, slots=True, eq=False)
class _Calibration:
    """What one pass over the data needs in order to add a batch to the statistics of its sites."""

    program: Program
    host: Host
    taps: Taps
    sites: Mapping[str, SiteStats]
    needs: frozenset[str]
    options: Options
    enough: Enough

    def add(self, batch: Batch, number: int) -> None:
        original = self.taps.original(number, batch) if "drift" in self.needs else None
        if self.needs & BY_DERIVATIVES:
            self._add_derivatives(batch, number, original)
        else:
            self._add_values(batch, number, original)

    def _add_values(self, batch: Batch, number: int, original: Mapping[str, Array] | None) -> None:
        values, beside = self.taps.running(number, batch), self.taps.beside
        draws = self.enough.draws(batch)
        for name, stats in self.sites.items():
            lost = None
            if original is not None and beside is not None:
                same_rows = dataclasses.replace(beside, positions=stats.columns.positions)
                lost = rows_of(same_rows, original[beside.value] - values[beside.value], batch)
            rows, before = rows_of(stats.columns, values[name], batch), self._origin(stats, original, batch)
            drawn = draws.of(stats.columns, rows)
            self._part(stats, number).add(rows, samples=len(batch), origin=before, lost=lost, drawn=drawn)
            if self.taps.unmoved is not None and before is not None:
                self.taps.unmoved.add(before, samples=len(batch), drawn=drawn)

    def _add_derivatives(self, batch: Batch, number: int, original: Mapping[str, Array] | None) -> None:
        columns = [stats.columns for stats in self.sites.values()]
        coupled, draws = "coupling" in self.needs, self.enough.draws(batch)
        by_site = derivatives(self.program, self.host, batch, columns, self.options, number, coupled)
        for whole, d in zip(self.sites.values(), by_site, strict=True):
            stats = self._part(whole, number)
            stats.how = d.how
            rows, *derived = (
                rows_of(stats.columns, part, batch) for part in (d.value, d.gradient, d.curvature, *d.factors)
            )
            gradient, curvature, *factors = (part.reshape(-1, stats.columns.count) for part in derived)
            stats.add(
                rows,
                samples=len(batch),
                gradient=gradient,
                curvature=curvature,
                factors=np.stack(factors, axis=1) if coupled else None,
                origin=self._origin(stats, original, batch),
                drawn=draws.of(stats.columns, rows),
            )

    def _part(self, stats: SiteStats, number: int) -> SiteStats:
        return self.taps.halves[number % 2] if self.taps.halves else stats

    @staticmethod
    def _origin(stats: SiteStats, original: Mapping[str, Array] | None, batch: Batch) -> Array | None:
        return None if original is None else rows_of(stats.columns, original[stats.columns.value], batch)
