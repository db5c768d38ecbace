"""Calibrate a model that does not fit into memory: piece by piece, with the values between two pieces on disk.

    batches ─> piece 0 ─> FOLDER/0-* ─> piece 1 ─> FOLDER/1-* ─> ...
                  └ sums of its sites      └ sums of its sites

The graph is cut at the sites (`passes/interchange.py`). A piece runs over all batches before the next one is loaded, so that its own
weights, one batch and the sums of its sites are all that is in memory; sums that are done are maps of their files. A piece that is done
is not run again after an interruption.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from cmrc.errors import SiteError, StatsError
from cmrc.files import write_whole
from cmrc.ir.graph import Array
from cmrc.passes.interchange import cut
from cmrc.program.program import Program
from cmrc.statistics.batches import SIZE, Batch, in_batches_of_model
from cmrc.statistics.calibrate import BY_DERIVATIVES, Taps, Watch, calibrate, choose, unwatched
from cmrc.statistics.checkpoint import digest_of
from cmrc.statistics.columns import Positions, columns_of, position_of
from cmrc.statistics.drawn import ENOUGH
from cmrc.statistics.stats import Stats
from cmrc.verification.pieces import Part, parts_of

HALF = np.dtype(ml_dtypes.bfloat16)  # which safetensors writes for torch alone


def calibrate_by_pieces(
    program: Program,
    data: Any,
    folder: str | Path,
    *,
    sites: str | Sequence[str] = "*",
    need: str | Iterable[str] = ("moments",),
    positions: Positions | Mapping[str, Positions] = "all",
    size: int = SIZE,
    rows_per_unit: int = ENOUGH,
    watch: Watch = unwatched,
) -> Stats:
    """`cmrc.calibrate` for a model that does not fit into memory: the same statistics, one piece of the model after the other.

    `folder` takes the values that are live between two pieces, for every batch. After an interruption the same call goes on from the last
    piece that was done; at the end its files are removed. The data are read once for each piece. What differentiates
    the loss (`curvature`, `coupling`) needs the whole model.
    """
    needs = frozenset([need] if isinstance(need, str) else need)
    if needs & BY_DERIVATIVES:
        raise StatsError(
            f"need={min(needs & BY_DERIVATIVES)!r} differentiates the whole model, which is not in memory",
            fix="leave it out, or calibrate without a folder for the pieces",
        )
    if isinstance(data, Iterator):
        raise StatsError("the data are read once for each piece", fix="give a list, a DataLoader or a folder")
    data = in_batches_of_model(data, program.graph.inputs)
    chosen = choose(program, sites)
    graph_cut = cut(program.graph, [site.value for site in chosen])
    for site in chosen:
        if site.value in graph_cut.free:
            raise SiteError("does not depend on the inputs of the model", node=site.name, fix="name another site")
    levels = max(graph_cut.levels.values()) + 1
    parts: list[Part | None] = [*parts_of(program, graph_cut, levels)]
    columns = [asdict(columns_of(program, site, position_of(positions, site))) for site in chosen]
    asked = {
        "model": program.fingerprint.to_json(),
        "need": sorted(needs),
        "columns": columns,
        "size": size,
        "rows_per_unit": rows_per_unit,
    }
    spill = _Spill(Path(folder), digest_of(asked))
    done = list[Stats]()
    for level in range(levels):
        part, later = parts[level], [part for part in parts[level + 1 :] if part is not None]
        own = [site for site in chosen if graph_cut.levels[site.value] == level]
        here = [s.name if list(program.names.get(s.name, ())) == [s.value] else s.value for s in own]
        stats = spill.load_stats(level)
        if stats is None:
            assert part is not None
            taps = _AtLevel(program, [site.value for site in own], part, spill, level, _wanted(later))
            stats = calibrate(
                program,
                data,
                sites=here,
                need=needs,
                positions=positions,
                size=size,
                rows_per_unit=rows_per_unit,
                taps=taps,
                watch=watch,
            )
            if done and stats.data != done[0].data:
                raise StatsError("the data are not the same for every piece", fix="give data that do not change")
            stats = spill.save_stats(level, stats)
        done.append(stats)
        parts[level] = None  # with its weights
        spill.forget_values(level - 1)
    by_site = {name: sums for stats in done for name, sums in stats.sites.items()}
    options = {**done[0].options, "positions": {name: at for s in done for name, at in s.options["positions"].items()}}
    spill.finish(levels)
    return replace(done[0], sites={site.value: by_site[site.value] for site in chosen}, options=options)


def _wanted(later: Sequence[Part]) -> tuple[frozenset[str], frozenset[str]]:
    """What later pieces read, and of what they read the sizes alone."""
    read = frozenset(name for part in later for name in part.inputs)
    return read, frozenset(name for part in later for name in part.sizes) - read


class _AtLevel(Taps):
    """The values of the sites that end a piece: from those on disk, and written there for the next one."""

    def __init__(
        self,
        program: Program,
        names: Sequence[str],
        part: Part,
        spill: _Spill,
        level: int,
        wanted: tuple[frozenset[str], frozenset[str]],
    ) -> None:
        super().__init__(program.host, program.host, names)
        self.part, self.spill, self.level, self.wanted = part, spill, level, wanted

    def running(self, number: int, batch: Batch) -> Mapping[str, Array]:
        values = self.spill.load(self.level - 1, number) if self.level else self.host.bind(batch.inputs)
        if self.part.runner is not None:
            values = {**values, **self.part.runner.run(values)}
        self.spill.save(self.level, number, values, *self.wanted)
        return values


@dataclass(frozen=True, slots=True)
class _Spill:
    """The files of a folder: values by level and batch, and the statistics of every level that is done."""

    folder: Path
    asked: str

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        note = self.folder / "asked"
        if note.exists() and note.read_text() != self.asked:
            raise StatsError(
                "the folder holds pieces of another model, other sites or other options",
                at=str(self.folder),
                fix="delete it to start again, or give another folder",
            )
        if not note.exists() and any(self.folder.iterdir()):
            raise StatsError("the folder is not empty", at=str(self.folder), fix="give an empty or a new folder")
        write_whole(note, self.asked.encode())

    def load_stats(self, level: int) -> Stats | None:
        path = self.folder / f"{level}.stats"
        return Stats.load(path, mapped=True) if path.exists() else None

    def save_stats(self, level: int, stats: Stats) -> Stats:
        stats.save(path := self.folder / f"{level}.stats")
        return Stats.load(path, mapped=True)

    def save(
        self, level: int, number: int, values: Mapping[str, Array], read: frozenset[str], sized: frozenset[str]
    ) -> None:
        arrays = {name: np.ascontiguousarray(array) for name, array in values.items() if name in read}
        notes = {
            "halves": [name for name, array in arrays.items() if array.dtype == HALF],
            "sizes": {name: (array.dtype.name, array.shape) for name, array in values.items() if name in sized},
        }
        stored = {name: array.view(np.uint16) if array.dtype == HALF else array for name, array in arrays.items()}
        write_whole(self._values(level, number), save(stored, {"notes": json.dumps(notes)}))

    def load(self, level: int, number: int) -> dict[str, Array]:
        with safe_open(str(self._values(level, number)), "np") as file:
            notes = json.loads(file.metadata()["notes"])
            values: dict[str, Array] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for name in notes["halves"]:
            values[name] = values[name].view(HALF)
        for name, (dtype, shape) in notes["sizes"].items():
            values[name] = np.broadcast_to(np.zeros((), dtype), shape)
        return values

    def forget_values(self, level: int) -> None:
        for path in self.folder.glob(f"{level}-*"):
            path.unlink()

    def finish(self, levels: int) -> None:
        self.forget_values(levels - 1)
        for path in (*(self.folder / f"{level}.stats" for level in range(levels)), self.folder / "asked"):
            with contextlib.suppress(PermissionError):  # Windows keeps what is mapped
                path.unlink(missing_ok=True)
        if not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _values(self, level: int, number: int) -> Path:
        return self.folder / f"{level}-{number:06}"
