"""Calibration: the same statistics as numpy on all activations at once, on both hosts, in any shards, from any data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nets import Convs, Tokens, activations, data, exported, mlp, seeded, traced
from processes import torchrun
from tolerances import ACROSS_F32, EXACT_F64, distance

import cmrc
from cmrc.errors import InputError, StatsError
from cmrc.statistics.batches import batches
from cmrc.statistics.columns import Columns
from cmrc.statistics.site_stats import ROWS, SiteStats
from cmrc.statistics.stats import Stats

EVERYTHING = ("moments", "range", "scatter", "rows")
SHARDS = 1e-12  # one pass and merged shards


def test_moments_are_those_of_all_activations() -> None:
    program, (x, _) = mlp(), data(70, 5)
    parts = [x[:30], x[30:32], x[32:]]
    stats = cmrc.calibrate(program, parts, sites="acts.*", need=EVERYTHING)
    assert [s.columns.name for s in stats.sites.values()] == ["acts.0", "acts.1"]
    for name in ("acts.0", "acts.1"):
        a, site_stats = np.concatenate([activations(program, part, name) for part in parts]), stats[name]
        assert distance(site_stats.mean, a.mean(0)) < EXACT_F64
        assert distance(site_stats.variance, a.var(0)) < EXACT_F64
        assert distance(site_stats.covariance, np.cov(a.T, bias=True)) < EXACT_F64
        assert distance(site_stats.arrays["low"], a.min(0)) == distance(site_stats.arrays["high"], a.max(0)) == 0
        sample = site_stats.arrays["rows"]
        assert sorted(map(tuple, sample)) == sorted(map(tuple, a))  # 70 rows fit
    assert (stats.samples, site_stats.count, site_stats.samples) == (70, 70, 70)


def test_a_large_mean_costs_no_digits() -> None:
    rows = 1e8 + np.random.default_rng(0).normal(size=(500, 3))
    stats = SiteStats(mlp_columns(3), frozenset({"moments", "scatter"}))
    for part in np.array_split(rows, 7):
        stats.add(part)
    assert distance(stats.variance, rows.var(0)) < 1e-7  # 1e8 itself has eight digits behind the point
    assert distance(stats.covariance, np.cov(rows.T, bias=True)) < 1e-7


def mlp_columns(units: int) -> Columns:
    return Columns("site", "site", 1, units)


@pytest.mark.parametrize("shards", [2, 3, 5])
def test_shards_give_the_result_of_one_pass(shards: int, tmp_path: Path) -> None:
    program, (x, y) = mlp(), data(64, 5)
    pieces = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 64, 8)]
    need = (*EVERYTHING, "curvature", "coupling")
    whole = cmrc.calibrate(program, pieces, sites="acts.*", need=need)
    merged: Stats | None = None
    for i in range(shards):
        part = cmrc.calibrate(program, pieces, sites="acts.*", need=need, shard=(i, shards))
        part.save(tmp_path / "part")
        part = Stats.load(tmp_path / "part")
        merged = part if merged is None else merged.merge(part)
    assert merged is not None
    assert (merged.samples, merged.digest) == (64, whole.digest)
    for name, site_stats in whole.sites.items():
        other = merged.sites[name]
        assert (site_stats.count, site_stats.columns, site_stats.how) == (other.count, other.columns, other.how)
        for key, array in site_stats.arrays.items():
            assert distance(other.arrays[key], array) < SHARDS, key


def test_drift_is_the_covariance_with_the_model_as_it_was() -> None:
    program, (x, _) = mlp(), data(40, 5)
    changed = program.clamped(cmrc.Plan(program).do("acts.0", units=[0, 1, 4], constant=0.3))
    parts = [
        cmrc.calibrate(program, [x[i : i + 10]], sites="acts.1", need="drift", host=changed) for i in range(0, 40, 10)
    ]
    site_stats = parts[0].merge(parts[1]).merge(parts[2]).merge(parts[3])["acts.1"]
    value = program.find("acts.1")[0].value
    after, before = changed.run([x], [value])[-1], activations(program, x, "acts.1")
    expected = (after - after.mean(0)).T @ (before - before.mean(0))
    assert distance(site_stats.arrays["cross"], expected) < EXACT_F64
    assert distance(site_stats.arrays["origin"], before.mean(0)) < EXACT_F64
    assert distance(site_stats.mean, after.mean(0)) < EXACT_F64


def test_the_sample_of_rows_is_bounded_and_does_not_depend_on_shards() -> None:
    rows = np.random.default_rng(0).normal(size=(3 * ROWS, 2))
    samples = []
    for parts in (3, 11):
        stats = SiteStats(mlp_columns(2), frozenset({"moments", "rows"}))
        for part in np.array_split(rows, parts):
            stats.add(part)
        samples.append(stats.arrays["rows"])
    assert len(samples[0]) == ROWS
    assert np.array_equal(samples[0], samples[1])
    assert abs(samples[0].mean()) < 0.05  # not only the first or the smallest ones
    assert len(set(map(tuple, samples[0])) & set(map(tuple, rows[:ROWS]))) < 0.4 * ROWS


@pytest.mark.parametrize("site", ["acts.0", "acts.1"])
def test_both_hosts_give_the_same(site: str) -> None:
    program, (x, _) = mlp(), data(40, 5)
    on_torch = cmrc.calibrate(program, [x], sites=site, need=EVERYTHING)
    on_onnx = cmrc.calibrate(exported(program), [x], sites=site, need=EVERYTHING)
    for key in ("mean", "squares", "scatter", "low", "high"):
        assert distance(on_onnx[site].arrays[key], on_torch[site].arrays[key]) < ACROSS_F32


def test_positions_are_pooled_picked_masked_or_apart() -> None:
    program = traced(seeded(Tokens()), 3, 6)
    x, _ = data(20, 3, 6)
    a = activations(program, x, "act")

    def mean(**options: object) -> np.ndarray:
        return cmrc.calibrate(program, options.pop("data", [x]), sites="act", **options)["act"].mean

    assert distance(mean(), a.reshape(-1, 8).mean(0)) < EXACT_F64
    assert distance(mean(positions=0), a[:, 0].mean(0)) < EXACT_F64
    assert distance(mean(positions={"act": -1}), a[:, -1].mean(0)) < EXACT_F64
    mask = np.arange(3)[None] < np.random.default_rng(0).integers(1, 4, 20)[:, None]
    batch = {"x": x, "padding": mask}
    assert distance(mean(data=[batch], positions="padding"), a[mask].mean(0)) < EXACT_F64
    assert distance(mean(positions="each").reshape(8, 3), a.mean(0).T) < EXACT_F64
    with pytest.raises(StatsError, match="there is no position 3: the site has 3"):
        mean(positions=3)
    with pytest.raises(StatsError, match="a batch has no mask 'padding'"):
        mean(positions="padding")
    with pytest.raises(StatsError, match=r"the mask 'padding' has shape \[20, 2\], the positions \[20, 3\]"):
        mean(data=[{"x": x, "padding": mask[:, :2]}], positions="padding")


def test_channels_are_taken_over_all_pixels_and_heads_as_vectors() -> None:
    program, (x, _) = traced(seeded(Convs()), 2, 4, 4), data(20, 2, 4, 4)
    a = activations(program, x, "act1")
    site_stats = cmrc.calibrate(program, [x], sites="act1", need="scatter")["act1"]
    assert (site_stats.count, site_stats.samples) == (320, 20)
    assert distance(site_stats.covariance, np.cov(a.transpose(1, 0, 2, 3).reshape(6, -1), bias=True)) < EXACT_F64
    program, (x, _) = traced(seeded(Tokens()), 3, 6), data(20, 3, 6)
    name = next(site.name for site in program.sites(folds=False) if site.op == "attention")
    heads = cmrc.calibrate(program, [x], sites=name)[name]
    assert (heads.columns.units, heads.columns.features) == (2, 3)
    a = activations(program, x, name)
    assert distance(heads.mean, a.mean((0, 2)).reshape(-1)) < EXACT_F64
    each = cmrc.calibrate(program, [x], sites=name, positions="each")[name]
    assert distance(each.columns.by_unit(each.mean).reshape(2, 3, 3), a.mean(0)) < EXACT_F64


def test_data_come_in_many_forms(tmp_path: Path) -> None:
    program, (x, y) = mlp(), data(24, 5)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), batch_size=7
    )
    plain, named = tmp_path / "plain", tmp_path / "named"
    for folder in (plain, named):
        folder.mkdir()
    np.save(plain / "0.npy", x[:10])
    np.save(plain / "1.npy", x[10:])
    np.savez(named / "all.npz", x=x, labels=y)
    forms = [[x[:5], x[5:]], [(x, y)], [{"x": x, "labels": y}], loader, (part for part in (x[:3], x[3:])),
             plain, str(named), plain.parent / "named" / "all.npz", [torch.from_numpy(x)]]  # fmt: skip
    expected = activations(program, x, "acts.0").mean(0)
    for form in forms:
        stats = cmrc.calibrate(program, form, sites="acts.0", size=6)
        assert distance(stats["acts.0"].mean, expected) < EXACT_F64
        assert stats.samples == 24
    labelled = cmrc.calibrate(program, named, sites="acts.1", need="curvature", size=10)
    assert labelled["acts.1"].how == "closed form"


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ([], "there are no data to calibrate on"),
        (7, "cannot calibrate on data of type int"),
        (np.zeros((3, 5)), "the data are one batch, not an iterable of batches"),
        ([(np.zeros((3, 5)),) * 3], "a batch has 3 parts, but the model takes 1: x"),
        ([{"y": np.zeros(3)}], "a batch has no 'x'"),
    ],
)
def test_data_that_will_not_do_are_refused(form: object, reason: str) -> None:
    with pytest.raises(StatsError) as caught:
        cmrc.calibrate(mlp(), form, sites="acts.0")
    assert reason in str(caught.value)
    assert caught.value.fix


def broken_files(folder: Path) -> dict[str, str]:
    """Files that hold no data, to what is said of each."""
    x, y = data(12, 5)
    np.savez(folder / "whole.npz", x=x, labels=y)
    (folder / "cut.npz").write_bytes((folder / "whole.npz").read_bytes()[:200])
    np.save(folder / "whole.npy", x)
    (folder / "cut.npy").write_bytes((folder / "whole.npy").read_bytes()[:-8])
    (folder / "text.npy").write_text("nothing")
    (folder / "empty.npy").touch()
    np.save(folder / "object.npy", np.array([{}]), allow_pickle=True)
    np.save(folder / "number.npy", np.float32(1.0))
    np.savez(folder / "none.npz")
    np.savez(folder / "uneven.npz", x=x, labels=y[:9])
    (folder / "folder").mkdir()
    return {
        "cut.npz": "is not a file of arrays: a .npz file that is cut short",
        "cut.npy": "is not a file of arrays: mmap length is greater than file size",
        "text.npy": "is not a file of arrays: it does not begin as a .npy file does",
        "empty.npy": "is not a file of arrays: it does not begin as a .npy file does",
        "object.npy": "the array 'array' holds Python objects, not numbers",
        "number.npy": "the arrays do not have one row per sample: array []",
        "none.npz": "the arrays do not have one row per sample: there is no array",
        "uneven.npz": "the arrays do not have one row per sample: x [12, 5], labels [9]",
        "folder": "the folder has no .npy or .npz files",
        "absent.npy": "there is no such file or folder",
    }


def test_a_file_that_holds_no_data_is_named(tmp_path: Path) -> None:
    for name, reason in broken_files(tmp_path).items():
        with pytest.raises(InputError) as caught:
            cmrc.calibrate(mlp(), tmp_path / name, sites="acts.0", size=8)
        assert (caught.value.reason, caught.value.at) == (reason, str(tmp_path / name))
        assert caught.value.fix


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_data_that_are_not_finite_are_refused_where_they_are(value: float) -> None:
    x, _ = data(12, 5)
    x = x.copy()
    x[7, 2] = value
    with pytest.raises(StatsError) as error:
        cmrc.calibrate(mlp(), [x[:4], x[4:8], x[8:]], sites="acts.1")
    assert str(error.value) == (
        "stats: input 'x' is NaN or infinite in row 3 of batch 1, sample 7 of the data\n  fix: leave out samples that are not finite"
    )


def test_data_on_which_the_model_is_not_finite_are_refused_where_they_are() -> None:
    x, _ = data(12, 5)
    x = x.copy()
    x[7] = 1.7e308 * np.where(np.arange(5) % 2, 1, -1)
    with pytest.raises(StatsError) as error:
        cmrc.calibrate(mlp(), [x[:4], x[4:8], x[8:]], sites="acts.1")
    assert str(error.value) == (
        "stats: %acts.1: unit 0 is NaN or infinite, or too large to square, on batch 1\n"
        "  fix: leave out samples that are not finite, or on which the model is not"
    )


def test_what_is_asked_is_checked() -> None:
    x, _ = data(4, 5)
    with pytest.raises(StatsError, match="need='means' is not known"):
        cmrc.calibrate(mlp(), [x], need="means")
    with pytest.raises(StatsError, match="curvature='all' is not known"):
        cmrc.calibrate(mlp(), [x], curvature="all")
    with pytest.raises(StatsError, match="the loss 'cross-entropy' needs labels, and the data have none"):
        cmrc.calibrate(mlp(), [x], sites="acts.1", need="curvature")
    with pytest.raises(StatsError, match="loss='hinge' is not known"):
        cmrc.calibrate(mlp(), [x], sites="acts.1", need="curvature", loss="hinge")
    with pytest.raises(StatsError, match="the statistics have no scatter"):
        _ = cmrc.calibrate(mlp(), [x], sites="acts.1")["acts.1"].covariance
    with pytest.raises(StatsError, match=r"no statistics for site 'acts\.0' \(there are some for: acts\.1\)"):
        cmrc.calibrate(mlp(), [x], sites="acts.1")["acts.0"]
    first = cmrc.calibrate(mlp(), [x], sites="acts.1")
    with pytest.raises(StatsError, match="the two parts belong to different models or sites"):
        first.merge(cmrc.calibrate(mlp(), [x], sites="acts.0"))
    with pytest.raises(StatsError, match="the two parts were calibrated differently"):
        first.merge(cmrc.calibrate(mlp(), [x], sites="acts.1", need="range"))


def test_by_default_the_sites_that_fold_are_calibrated() -> None:
    program, (x, _) = mlp(), data(4, 5)
    assert [s.columns.name for s in cmrc.calibrate(program, [x]).sites.values()] == ["acts.0", "acts.1"]


def test_a_broken_file_of_statistics_is_refused(tmp_path: Path) -> None:
    (tmp_path / "stats").write_bytes(b"nothing")
    with pytest.raises(StatsError, match="cannot be read"):
        Stats.load(tmp_path / "stats")
    from safetensors.numpy import save_file

    save_file({"a": np.zeros(2)}, tmp_path / "other")
    with pytest.raises(StatsError, match="is not a file of statistics"):
        Stats.load(tmp_path / "other")


def test_an_onnx_model_is_differentiated_anywhere() -> None:
    program, (x, y) = mlp(), data(16, 5)
    onnx = exported(program)
    for site in ("acts.0", "acts.1"):
        last = cmrc.calibrate(onnx, [(x, y)], sites=site, need="curvature")[site]
        same = cmrc.calibrate(program, [(x, y)], sites=site, need="curvature")[site]
        assert distance(last.arrays["h"], same.arrays["h"]) < ACROSS_F32


def test_two_processes_merge_to_one_result(tmp_path: Path) -> None:
    program, (x, _) = mlp(), data(64, 5)
    program.save(tmp_path / "model.onnx")
    (tmp_path / "data").mkdir()
    for i in range(8):
        np.save(tmp_path / "data" / f"{i}.npy", x[8 * i : 8 * i + 8])
    command = ["calibrate", "model.onnx", "--data", "data", "--need", "scatter", "--need", "rows", "--need", "range"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    for runner, out in (([sys.executable], "one"), (torchrun(), "two")):
        done = subprocess.run(
            [*runner, "-m", "cmrc", *command, "-o", f"{out}.safetensors", "--json"],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["samples"] == 64
    one, two = (Stats.load(tmp_path / f"{name}.safetensors") for name in ("one", "two"))
    assert (one.digest, one.samples, list(one.sites)) == (two.digest, two.samples, list(two.sites))
    for name, site_stats in one.sites.items():
        for key, array in site_stats.arrays.items():
            assert distance(two.sites[name].arrays[key], array) < SHARDS, key


def test_a_shard_takes_every_nth_batch_from_its_own_on() -> None:
    parts = [np.full((1, 2), float(i), dtype=np.float32) for i in range(5)]
    taken = [[int(b.inputs["x"][0, 0]) for b in batches(parts, ["x"], shard=(i, 2))] for i in range(2)]
    assert taken == [[0, 2, 4], [1, 3]]


def test_a_picture_counts_once_however_many_positions_it_has() -> None:
    columns = Columns("s", "s", 1, 3)
    first, second = SiteStats(columns, frozenset({"moments"})), SiteStats(columns, frozenset({"moments"}))
    first.add(np.random.default_rng(0).normal(size=(8, 3)), samples=2)
    first.add(np.random.default_rng(1).normal(size=(12, 3)), samples=3)
    second.add(np.random.default_rng(2).normal(size=(4, 3)), samples=1)
    assert (first.count, first.samples) == (20, 5)
    both = first.merge(second)
    assert (both.count, both.samples) == (24, 6)


def test_every_batch_draws_labels_of_its_own() -> None:
    """The same batch twice is not twice what one draw gives."""
    program, (x, y) = mlp(), data(16, 5)
    options: dict[str, Any] = {"sites": "acts.0", "need": "curvature", "curvature": "monte-carlo", "draws": 1}
    once, twice = (cmrc.calibrate(program, [(x, y)] * n, **options)["acts.0"].arrays["h"] for n in (1, 2))
    assert distance(twice, 2 * once) > 1e-3
