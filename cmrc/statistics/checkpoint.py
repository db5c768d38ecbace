"""A calibration that continues where it was interrupted, to the same bits.

    every `every` seconds   the sums so far and the number of batches they hold ─> one file, whole or not at all
    on the next start       the same model, options and first batches? ─> those batches are read, but not run again
    at the end              the file is removed

The sums are float64 and are stored as they are, so the result is that of a run without interruption.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cmrc.errors import StatsError
from cmrc.files import require_writable
from cmrc.statistics import stats_file
from cmrc.statistics.stats import Stats

EVERY = 60.0  # seconds between two checkpoints
SHARE = 20  # and at least this many times as long as writing one takes
DELETE = "delete the checkpoint to start again, or give another path"


@dataclass(slots=True)
class Seen:
    """How many batches were seen, and a digest of them in their order: the sums depend on it in their last bits."""

    batches: int = 0
    digest: str = ""

    def take(self, batch: bytes) -> None:
        self.batches += 1
        self.digest = hashlib.sha256(bytes.fromhex(self.digest) + batch).hexdigest()


@dataclass(slots=True)
class Checkpoint:
    """The file, and what it must have been written for: `asked` is a digest of the model and of all options."""

    path: Path
    asked: str
    every: float = EVERY
    reached: Seen = field(default_factory=Seen)  # by the run that wrote the file
    _due: float = 0.0

    def __post_init__(self) -> None:
        require_writable(self.path)
        self._due = time.monotonic() + self.every

    def load(self) -> Stats | None:
        """The sums that an interrupted run left here, or None where there is no file. Another run's file is refused."""
        if not self.path.exists():
            return None
        header, arrays = stats_file.read(self.path)
        progress = header.progress
        if progress is None:
            raise StatsError(
                "is a complete file of statistics, not a checkpoint", at=str(self.path), fix="give another path"
            )
        if progress.asked != self.asked:
            raise StatsError(
                "the checkpoint was written for another model, other sites or other options",
                at=str(self.path),
                fix=DELETE,
            )
        self.reached = Seen(progress.batches, progress.order)
        return Stats.from_parts(header, arrays)

    def require_same(self, seen: Seen) -> None:
        """That the batches so far are those of the interrupted run."""
        if seen != self.reached:
            raise StatsError(
                f"the first {self.reached.batches} batches are not those of the interrupted calibration",
                at=str(self.path),
                fix=f"give the same data in the same order; or {DELETE}",
            )

    def save_if_due(self, stats: Stats, seen: Seen) -> None:
        """Write the sums, if the last time was long enough ago."""
        start = time.monotonic()
        if start < self._due:
            return
        progress = {"asked": self.asked, "batches": seen.batches, "order": seen.digest}
        stats_file.write(self.path, {**stats.header(), "progress": progress}, stats.arrays())
        end = time.monotonic()
        self._due = end + max(self.every, SHARE * (end - start))

    def finish(self) -> None:
        """The result is complete: there is nothing to resume."""
        self.path.unlink(missing_ok=True)


def digest_of(asked: Mapping[str, Any]) -> str:
    """A digest of everything that decides the sums."""
    return hashlib.sha256(repr(sorted(asked.items())).encode()).hexdigest()
