"""A calibration that was interrupted continues to the same bits; a checkpoint of another run is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from nets import data, mlp

import cmrc
from cmrc.errors import StatsError
from cmrc.statistics.stats import Stats

NEED = ("range", "scatter", "curvature", "coupling", "rows")


@pytest.fixture(autouse=True)
def after_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes to write one."""
    monkeypatch.setattr("cmrc.statistics.checkpoint.SHARE", 0)


def parts(seed: int = 1) -> list[tuple[np.ndarray, np.ndarray]]:
    x, y = data(70, 5, seed=seed)
    return [(x[i : i + 10], y[i : i + 10]) for i in range(0, 70, 10)]


def calibrated(given: Any, checkpoint: Path | None = None, **options: Any) -> Stats:
    asked = {"sites": "acts.*", "need": NEED, "every": 0.0, **options}
    return cmrc.calibrate(mlp(), given, checkpoint=checkpoint, **asked)


class Killed(BaseException):
    """What ends a process from outside."""


@dataclass
class interrupted:
    """The same data, and the end after so many batches."""

    count: int
    given: list[Any]

    @property
    def known_samples(self) -> int:
        return sum(len(x) for x, _ in self.given)

    def __iter__(self) -> Iterator[Any]:
        yield from self.given[: self.count]
        raise Killed


def same_bits(first: Stats, second: Stats) -> bool:
    """By the bytes of their files."""
    with TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("first", "second")]
        for stats, path in zip((first, second), paths, strict=True):
            stats.save(path)
        return paths[0].read_bytes() == paths[1].read_bytes()


@pytest.mark.parametrize("count", [0, 1, 4, 7])
@pytest.mark.parametrize("curvature", ["auto", "monte-carlo"])
def test_an_interrupted_calibration_continues_to_the_same_bits(count: int, curvature: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    with pytest.raises(Killed):
        calibrated(interrupted(count, parts()), path, curvature=curvature)
    assert path.exists() == (count > 0)
    ran: list[int] = []

    def watch(batches: Any, _: int | None) -> Any:
        for i, batch in enumerate(batches):
            ran.append(i)
            yield batch

    resumed = calibrated(parts(), path, curvature=curvature, watch=watch)
    assert same_bits(resumed, calibrated(parts(), curvature=curvature))
    assert ran == list(range(7))  # read, in order to know that they are the same data
    assert list(tmp_path.iterdir()) == []


def test_batches_that_were_run_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Killed):
        calibrated(interrupted(5, parts()), tmp_path / "checkpoint", need="scatter")
    ran = []
    running = cmrc.statistics.calibrate.Taps.running
    monkeypatch.setattr(
        "cmrc.statistics.calibrate.Taps.running",
        lambda self, number, batch: ran.append(number) or running(self, number, batch),
    )
    calibrated(parts(), tmp_path / "checkpoint", need="scatter")
    assert ran == [5, 6]


def test_it_may_be_interrupted_again_and_again(tmp_path: Path) -> None:
    for count in (2, 3, 5):
        with pytest.raises(Killed):
            calibrated(interrupted(count, parts()), tmp_path / "checkpoint")
    assert same_bits(calibrated(parts(), tmp_path / "checkpoint"), calibrated(parts()))


def test_shards_have_checkpoints_of_their_own(tmp_path: Path) -> None:
    for i in range(2):
        with pytest.raises(Killed):
            calibrated(interrupted(5, parts()), tmp_path / "checkpoint", shard=(i, 2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.0-of-2", "checkpoint.1-of-2"]
    for i in range(2):
        resumed = calibrated(parts(), tmp_path / "checkpoint", shard=(i, 2))
        assert same_bits(resumed, calibrated(parts(), shard=(i, 2)))


OTHER = "the checkpoint was written for another model, other sites or other options"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"need": "range"}, OTHER),
        ({"sites": "acts.0"}, OTHER),
        ({"loss": "kl"}, OTHER),
        ({"seed": 1}, OTHER),
        ({"size": 3}, OTHER),
        ({"given": parts(seed=2)}, "the first 4 batches are not those of the interrupted calibration"),
        ({"given": parts()[::-1]}, "the first 4 batches are not those of the interrupted calibration"),
        ({"given": parts()[:3]}, OTHER),  # the number of samples decides how many rows each of them gives
    ],
)
def test_a_checkpoint_of_another_run_is_refused(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    with pytest.raises(Killed):
        calibrated(interrupted(4, parts()), path)
    before = path.read_bytes()
    with pytest.raises(StatsError) as caught:
        calibrated(**{"given": parts(), "checkpoint": path, **options})
    assert (caught.value.reason, caught.value.at) == (reason, str(path))
    assert "delete the checkpoint to start again" in caught.value.fix
    assert path.read_bytes() == before


def test_statistics_are_no_checkpoint_and_a_checkpoint_is_no_statistics(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    calibrated(parts()).save(path)
    with pytest.raises(StatsError, match="is a complete file of statistics, not a checkpoint"):
        calibrated(parts(), path)
    path.unlink()
    with pytest.raises(Killed):
        calibrated(interrupted(4, parts()), path)
    with pytest.raises(StatsError, match="is a checkpoint of a calibration that did not finish"):
        Stats.load(path)
    with pytest.raises(StatsError, match="checkpoint= cannot be combined with host= or taps="):
        calibrated(parts(), path, host=mlp().host)


def test_without_time_for_it_no_checkpoint_is_written(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        calibrated(interrupted(4, parts()), tmp_path / "checkpoint", every=60.0)
    assert list(tmp_path.iterdir()) == []
