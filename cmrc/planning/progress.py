"""A plan that continues where it was interrupted, to the same bits: a folder with one file per finished piece of work.

    statistics-<step>.safetensors     the statistics that a step of the schedule starts from
    calibration                       the checkpoint of the first of them, while it runs (`statistics/checkpoint.py`)
    site-<step>-<number>.safetensors  what became of one site: its do, its scores, and which batches the stream had let go
    losses-<plans>.json               what plans did to the output, where a budget is shared out by it
    counts.json                       how many units of each site are replaced in the end

Every file is written once, whole or not at all, and names what it was written for: a digest of the model, the recipe, the
statistics and the data. A file of another run is refused. The folder is removed when the plan is complete.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from cmrc._version import __version__
from cmrc.errors import PlanError, StatsError
from cmrc.files import write_whole
from cmrc.ir.graph import Array, Do
from cmrc.planning.objectives import Scores
from cmrc.planning.ranking import Ranked
from cmrc.planning.recipe import Recipe
from cmrc.planning.selection import Order
from cmrc.program.lower import plan_digest
from cmrc.program.plan import Plan
from cmrc.program.program import Program
from cmrc.statistics import distributed
from cmrc.statistics.batches import batches
from cmrc.statistics.checkpoint import Seen
from cmrc.statistics.site_stats import SiteStats
from cmrc.statistics.stats import Stats, digest_of_batch
from cmrc.strict_json import parse_json

FIX = "delete the folder to start again, or give another one"


@dataclass(frozen=True, slots=True, eq=False)
class SiteResult:
    """What became of a site at one step."""

    entry: Do | None
    constants: dict[int, Array]  # of the units that are replaced so far
    scores: Scores
    order: Order
    how: str
    let_go: tuple[int, ...]  # batches that the stream does not hold

    def applied_to(self, ranked: Ranked) -> Ranked:
        """The ranked site as it was when this result was found; of its statistics only what a plan records."""
        stats = SiteStats(ranked.stats.columns, ranked.stats.needs, ranked.stats.count, how=self.how)
        return dataclasses.replace(ranked, scores=self.scores, order=self.order, stats=stats)


class _SiteHeader(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    asked: str
    site: str
    value: str
    axis: int
    how: str
    let_go: list[int]


class _Numbers(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    asked: str
    numbers: list[int | float]


@dataclass(frozen=True, slots=True)
class Progress:
    """The folder, and the digest of what its files must have been written for."""

    folder: Path
    asked: str

    @classmethod
    def start(cls, folder: Path, program: Program, recipe: Recipe, stats: Stats | None, data: Any) -> Self:
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise PlanError(
                f"cannot make the folder of the checkpoint: {error.strerror}", at=str(folder), fix="give another path"
            ) from error
        digest = hashlib.sha256(f"{__version__} {recipe!r} {program.fingerprint.digest}".encode())
        if stats is not None:
            digest.update(json.dumps(stats.header(), sort_keys=True).encode())
            for name, array in sorted(stats.arrays().items()):
                digest.update(name.encode())
                digest.update(np.ascontiguousarray(array).data)
        digest.update(_digest_of_data(program, recipe, data).encode())
        return cls(folder, digest.hexdigest())

    @property
    def calibration(self) -> Path:
        return self.folder / f"calibration-{self.asked[:12]}"

    def load_stats(self, step: int) -> Stats | None:
        path = self._statistics(step)
        if not path.exists():
            return None
        stats = Stats.load(path)
        if stats.options.get("asked") != self.asked:
            raise self._of_another_run(path)
        return stats

    def save_stats(self, step: int, stats: Stats) -> None:
        dataclasses.replace(stats, options={**stats.options, "asked": self.asked}).save(self._statistics(step))

    def load_site(self, step: int, number: int) -> SiteResult | None:
        path = self._site(step, number)
        if not path.exists():
            return None
        try:
            with safe_open(str(path), "np") as file:
                text = (file.metadata() or {}).get("site", "")
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            header = _SiteHeader.model_validate(parse_json(text))
            if header.asked != self.asked:
                raise self._of_another_run(path)
            return _unpack(header, arrays)
        except (OSError, SafetensorError, ValidationError, ValueError, TypeError, KeyError, IndexError) as error:
            raise PlanError(f"the checkpoint cannot be read: {error}", at=str(path), fix=FIX) from error

    def save_site(self, step: int, number: int, ranked: Ranked, result: SiteResult) -> None:
        place = result.entry or ranked.site  # a head's affine map lies behind the site
        header = {
            "asked": self.asked,
            "site": place.site if isinstance(place, Do) else place.name,
            "value": place.value,
            "axis": place.axis,
            "how": result.how,
            "let_go": list(result.let_go),
        }
        arrays = {name: np.ascontiguousarray(array) for name, array in _arrays_of(result)}
        write_whole(self._site(step, number), save(arrays, {"site": json.dumps(header)}))

    def load_counts(self) -> list[int] | None:
        numbers = self._load_numbers("counts")
        return None if numbers is None else [int(number) for number in numbers]

    def save_counts(self, counts: Sequence[int]) -> None:
        self._save_numbers("counts", counts)

    def load_losses(self, plans: Sequence[Plan]) -> list[float] | None:
        return self._load_numbers(_name_of_losses(plans))

    def save_losses(self, plans: Sequence[Plan], losses: Sequence[float]) -> None:
        self._save_numbers(_name_of_losses(plans), losses)

    def _load_numbers(self, name: str) -> list[float] | None:
        path = self.folder / f"{name}.json"
        if not path.exists():
            return None
        try:
            read = _Numbers.model_validate(parse_json(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise PlanError(f"the checkpoint cannot be read: {error}", at=str(path), fix=FIX) from error
        if read.asked != self.asked:
            raise self._of_another_run(path)
        return read.numbers

    def _save_numbers(self, name: str, numbers: Sequence[float]) -> None:
        text = json.dumps({"asked": self.asked, "numbers": list(numbers)})
        write_whole(self.folder / f"{name}.json", text.encode())

    def _statistics(self, step: int) -> Path:
        return self.folder / f"statistics-{step}.safetensors"

    def _site(self, step: int, number: int) -> Path:
        return self.folder / f"site-{step}-{number}.safetensors"

    def _of_another_run(self, path: Path) -> PlanError:
        return PlanError("the checkpoint was written for another model, recipe or data", at=str(path), fix=FIX)


class SpreadProgress(Progress):
    """Of several processes: the first one reads and writes, and tells the others."""

    def load_stats(self, step: int) -> Stats | None:
        load = super().load_stats
        return distributed.from_first(lambda: load(step))

    def save_stats(self, step: int, stats: Stats) -> None:
        if not distributed.shard()[0]:
            super().save_stats(step, stats)

    def load_site(self, step: int, number: int) -> SiteResult | None:
        load = super().load_site
        return distributed.from_first(lambda: load(step, number))

    def save_site(self, step: int, number: int, ranked: Ranked, result: SiteResult) -> None:
        if not distributed.shard()[0]:
            super().save_site(step, number, ranked, result)

    def _load_numbers(self, name: str) -> list[float] | None:
        load = super()._load_numbers
        return distributed.from_first(lambda: load(name))

    def _save_numbers(self, name: str, numbers: Sequence[float]) -> None:
        if not distributed.shard()[0]:
            super()._save_numbers(name, numbers)


def remove_checkpoint(folder: Path) -> None:
    """The plan is complete: remove what was written for it."""
    for pattern in ("statistics-*.safetensors", "site-*.safetensors", "losses-*.json", "counts.json", "calibration-*"):
        for path in folder.glob(pattern):
            path.unlink()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _name_of_losses(plans: Sequence[Plan]) -> str:
    together = " ".join(plan_digest(plan) for plan in plans)
    return f"losses-{hashlib.sha256(together.encode()).hexdigest()[:16]}"


def _digest_of_data(program: Program, recipe: Recipe, data: Any) -> str:
    if data is None:
        return ""
    if isinstance(data, Iterator):
        raise StatsError(
            "a plan with a checkpoint reads its data more than once", fix="give a list, a DataLoader or a folder"
        )
    seen = Seen()
    for batch in batches(data, program.host.inputs, size=recipe.batch):
        seen.take(digest_of_batch(batch.arrays()))
    return seen.digest


def _arrays_of(result: SiteResult) -> Iterator[tuple[str, Array]]:
    yield "score", result.scores.score
    yield "score_constant", result.scores.constant
    yield "fell_back", result.scores.fell_back
    yield "order", result.order.units
    yield "added", result.order.added
    if result.constants:
        yield "replaced", np.array(list(result.constants), dtype=np.int64)
        yield "replaced_constant", np.stack(list(result.constants.values()))
    if result.entry is not None:
        yield "units", np.array(result.entry.units, dtype=np.int64)
        yield "constant", result.entry.constant
        if result.entry.weight is not None:
            yield "parents", np.array(result.entry.parents, dtype=np.int64)
            yield "weight", result.entry.weight


def _unpack(header: _SiteHeader, arrays: dict[str, Array]) -> SiteResult:
    entry = None
    if "units" in arrays:
        units, parents = (tuple(arrays[name].tolist()) if name in arrays else () for name in ("units", "parents"))
        entry = Do(
            header.site, header.value, header.axis, units, arrays["constant"], parents, arrays.get("weight")
        )  # fmt: skip
    constants = {}
    if "replaced" in arrays:
        constants = dict(zip(arrays["replaced"].tolist(), arrays["replaced_constant"], strict=True))
    scores = Scores(arrays["score"], arrays["score_constant"], arrays["fell_back"])
    return SiteResult(
        entry, constants, scores, Order(arrays["order"], arrays["added"]), header.how, tuple(header.let_go)
    )
