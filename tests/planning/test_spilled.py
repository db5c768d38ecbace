"""Calibration piece by piece: the statistics of the ordinary pass, whatever interrupts it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from command import cli
from nets import Branches, data, exported, seeded, traced
from tolerances import ACROSS_F32, distance

import cmrc
from cmrc.errors import StatsError
from cmrc.planning.spilled import _Spill, calibrate_by_pieces

SITES = ["act_a", "act_b", "act_c", "act_early"]
NEED = ["scatter", "range"]


@pytest.fixture(params=["fx", "onnx"])
def program(request: pytest.FixtureRequest) -> cmrc.Program:
    traced_model = traced(seeded(Branches()), 5)
    return traced_model if request.param == "fx" else exported(traced_model)


def parts() -> list[np.ndarray]:
    x, _ = data(60, 5)
    return [x[:20], x[20:50], x[50:]]


def require_equal(a: cmrc.Stats, b: cmrc.Stats) -> None:
    assert (list(a.sites), a.digest, a.samples, a.options) == (list(b.sites), b.digest, b.samples, b.options)
    for one, other in zip(a.sites.values(), b.sites.values(), strict=True):
        assert (one.columns, one.needs, one.count, one.samples) == (
            other.columns,
            other.needs,
            other.count,
            other.samples,
        )
        assert sorted(one.arrays) == sorted(other.arrays)
        assert all(np.array_equal(one.arrays[name], other.arrays[name]) for name in one.arrays)


def test_statistics_are_those_of_one_pass_to_the_last_bit(program: cmrc.Program, tmp_path: Path) -> None:
    ordinary = cmrc.calibrate(program, parts(), sites=SITES, need=NEED)
    spilled = calibrate_by_pieces(program, parts(), tmp_path / "pieces", sites=SITES, need=NEED)
    require_equal(spilled, ordinary)
    assert not (tmp_path / "pieces").exists()
    plans = [cmrc.plan(program, stats, preset="joint", keep=4) for stats in (ordinary, spilled)]
    assert all(distance(a.weight, b.weight) < ACROSS_F32 for a, b in zip(*(p.entries for p in plans), strict=True))


def test_a_piece_that_is_done_is_not_run_again(
    program: cmrc.Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, ran = _Spill.save, list[tuple[int, int]]()

    def failing(spill: _Spill, level: int, number: int, *values: object) -> None:
        if (level, number) == (1, 1) and (1, 1) not in ran:
            ran.append((1, 1))
            raise OSError("no space left on device")
        ran.append((level, number))
        saved(spill, level, number, *values)

    monkeypatch.setattr(_Spill, "save", failing)
    with pytest.raises(OSError, match="no space"):
        calibrate_by_pieces(program, parts(), tmp_path, sites=SITES, need=NEED)
    resumed = calibrate_by_pieces(program, parts(), tmp_path, sites=SITES, need=NEED)
    first = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert ran[:5] == first
    assert (0, 0) not in ran[5:]
    require_equal(resumed, cmrc.calibrate(program, parts(), sites=SITES, need=NEED))


class Changing:
    """Other numbers each time they are read."""

    def __init__(self) -> None:
        self.reads = 0

    def __iter__(self) -> Iterator[np.ndarray]:
        self.reads += 1
        return iter([part + self.reads for part in parts()])


def test_data_that_change_between_pieces_are_refused(program: cmrc.Program, tmp_path: Path) -> None:
    with pytest.raises(StatsError, match="the data are not the same for every piece"):
        calibrate_by_pieces(program, Changing(), tmp_path, sites=SITES)


def test_what_cannot_be_done_is_refused(program: cmrc.Program, tmp_path: Path) -> None:
    with pytest.raises(StatsError) as error:
        calibrate_by_pieces(program, parts(), tmp_path, need="curvature")
    assert str(error.value) == (
        "stats: need='curvature' differentiates the whole model, which is not in memory\n"
        "  fix: leave it out, or calibrate without a folder for the pieces"
    )
    with pytest.raises(StatsError, match="the data are read once for each piece"):
        calibrate_by_pieces(program, iter(parts()), tmp_path)
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(StatsError, match="the folder is not empty"):
        calibrate_by_pieces(program, parts(), tmp_path, sites=SITES)
    (tmp_path / "mine.txt").unlink()
    (tmp_path / "asked").write_text("of another model")
    with pytest.raises(StatsError, match="pieces of another model, other sites or other options"):
        calibrate_by_pieces(program, parts(), tmp_path, sites=SITES)


def test_on_the_command_line(tmp_path: Path) -> None:
    cmrc_program = exported(traced(seeded(Branches()), 5))
    cmrc_program.save(tmp_path / "model.onnx")
    np.save(tmp_path / "x.npy", data(60, 5)[0])
    given = ["calibrate", str(tmp_path / "model.onnx"), "--data", str(tmp_path / "x.npy"), "--need", "scatter"]
    for name, more in (("one", ()), ("many", ("--pieces", str(tmp_path / "pieces")))):
        done = cli(*given, *more, "-o", str(tmp_path / f"{name}.safetensors"))
        assert done.exit_code == 0, done.stderr
    require_equal(*(cmrc.Stats.load(tmp_path / f"{name}.safetensors") for name in ("one", "many")))
    both = [
        *given,
        "--pieces",
        str(tmp_path / "pieces"),
        "--checkpoint",
        str(tmp_path / "sums"),
        "-o",
        str(tmp_path / "two.safetensors"),
    ]
    assert "--pieces cannot be combined with --checkpoint" in cli(*both).stderr
