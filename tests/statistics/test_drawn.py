"""Rows that stand for all of them in products: evenly spread, the same however the data are run, and right on average."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from nets import Convs, Tokens, activations, data, exported, seeded, traced
from tolerances import ACROSS_F32, EXACT_F64, distance

import cmrc
from cmrc.statistics import drawn
from cmrc.statistics.batches import Batch, batches, samples_of
from cmrc.statistics.columns import Columns
from cmrc.statistics.drawn import Enough, draw
from cmrc.statistics.site_stats import SiteStats
from cmrc.statistics.stats import Stats


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small data have rows to spare."""
    monkeypatch.setattr(drawn, "LEAST", 1)


def test_one_row_of_every_equal_part() -> None:
    chosen = draw(np.array([64, 64]), np.array([0.1, 0.7]), 8)
    assert chosen is not None
    first, second = chosen.index[:8], chosen.index[8:] - 64
    assert (first // 8).tolist() == (second // 8).tolist() == list(range(8))
    assert len(set(first % 8)) > 4  # not the same place in each of them
    assert not np.array_equal(first, second)
    assert np.array_equal(chosen.weight, np.full(16, 8.0))


def test_every_row_is_drawn_as_often_as_any_other() -> None:
    places = np.random.default_rng(0).random(20_000)
    chosen = draw(np.full(20_000, 10), places, 4)
    assert chosen is not None
    times = np.bincount(chosen.index % 10, weights=chosen.weight, minlength=10) / 20_000
    assert np.abs(times - 1).max() < 0.05


@pytest.mark.parametrize("most", [5, 6, 100])
def test_all_rows_where_a_sample_has_less_than_twice_as_many(most: int) -> None:
    assert draw(np.full(3, 9), np.zeros(3), most) is None


def test_short_samples_give_all_their_rows() -> None:
    chosen = draw(np.array([3, 40, 5]), np.array([0.0, 0.5, 0.0]), 4)
    assert chosen is not None
    own = [chosen.index < 3, (chosen.index >= 3) & (chosen.index < 43), chosen.index >= 43]
    assert [part.sum() for part in own] == [3, 4, 5]
    assert [chosen.weight[part].sum() for part in own] == [3, 40, 5]
    assert np.array_equal(chosen.index, np.sort(chosen.index))


@pytest.mark.usefixtures("few")
def test_the_rows_follow_from_the_samples_and_not_from_the_batches() -> None:
    x = np.random.default_rng(0).normal(size=(12, 3, 8)).astype(np.float32)
    columns, enough = Columns("site", "site", 2, 4), Enough(1500, 2000)
    value = np.arange(12 * 50 * 4, dtype=np.float32).reshape(12, 50, 4)

    def taken(start: int, end: int) -> np.ndarray:
        chosen = enough.draws(Batch({"x": x[start:end]})).of(columns, value[start:end])
        assert chosen is not None
        return chosen.of(value[start:end])

    whole = taken(0, 12)
    assert len(whole) == 12 * enough.of_each_sample(4) == 36
    assert np.array_equal(whole, np.concatenate([taken(0, 5), taken(5, 6), taken(6, 12)]))
    other = Batch({"x": torch.from_numpy(x)})
    assert np.array_equal(whole, enough.draws(other).of(columns, value).of(value))  # type: ignore[union-attr]


@pytest.mark.parametrize("layout", ["tokens", "channels first"])
def test_sums_of_drawn_rows_are_those_of_all_on_average(layout: str) -> None:
    rng = np.random.default_rng(0)
    mixed = np.array([[1.0, 0.6, 0.0], [0.0, 0.8, 0.3], [0.0, 0.0, 1.0]])
    rows = (5 + rng.normal(size=(400, 100, 3)) @ mixed).astype(np.float32)
    if layout == "channels first":
        rows = np.ascontiguousarray(rows.transpose(0, 2, 1)).transpose(0, 2, 1)
    before, taken = rows + np.float32(0.1) * rng.normal(size=rows.shape).astype(np.float32), rows[..., :2] ** 2
    site_stats = SiteStats(Columns("site", "site", 2, 3), frozenset({"moments", "scatter", "drift"}))
    chosen = 0
    for part in np.split(np.arange(400), 4):
        some = draw(np.full(100, 100), rng.random(100), 40)
        assert some is not None
        chosen += len(some.index)
        site_stats.add(rows[part], samples=100, origin=before[part], lost=taken[part], drawn=some)
    assert chosen == 16_000
    flat, origin, lost = (a.reshape(-1, a.shape[-1]).astype(np.float64) for a in (rows, before, taken))
    assert (site_stats.count, site_stats.samples) == (40_000, 400)
    assert distance(site_stats.mean, flat.mean(0)) < EXACT_F64  # means are of all rows
    assert distance(site_stats.arrays["origin"], origin.mean(0)) < EXACT_F64
    assert distance(site_stats.arrays["lost"], lost.mean(0)) < EXACT_F64
    # 16,000 rows: standard errors of 1/126 and less, so four of them
    exact = np.cov(flat.T, bias=True)
    assert 1e-6 < distance(site_stats.covariance, exact) < 4 * 2**0.5 / 126
    assert np.array_equal(site_stats.variance, site_stats.covariance.diagonal())
    cross, with_lost = (np.cov(flat.T, b.T, bias=True)[:3, 3:] for b in (origin, lost))
    assert distance(site_stats.arrays["cross"] / site_stats.count, cross) < 4 * 2**0.5 / 126
    assert distance(site_stats.arrays["lost_cross"] / site_stats.count, with_lost) < 0.1
    # the drift itself is no difference of two draws
    drift = (site_stats.arrays["cross"] - site_stats.arrays["scatter"]) / site_stats.count
    assert distance(drift, cross - exact) < 4 * 0.1 / 126


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("site", ["act1", "act2"])
def test_both_hosts_draw_the_same_rows(site: str) -> None:
    program, (x, _) = traced(seeded(Convs(8)).float(), 2, 8, 8), data(30, 2, 8, 8)
    x = x.astype(np.float32)
    parts = [x[:10], x[10:]]
    on_torch, on_onnx = (
        cmrc.calibrate(p, parts, sites=site, need="scatter", rows_per_unit=8) for p in (program, exported(program))
    )
    for key in ("mean", "squares", "scatter"):
        assert distance(on_onnx[site].arrays[key], on_torch[site].arrays[key]) < ACROSS_F32
    whole = cmrc.calibrate(program, parts, sites=site, need="scatter", rows_per_unit=0)
    assert distance(on_torch[site].mean, whole[site].mean) < EXACT_F64
    assert 1e-6 < distance(on_torch[site].covariance, whole[site].covariance) < 1
    a = activations(program, x, site).transpose(0, 2, 3, 1).reshape(-1, whole[site].columns.count)
    assert distance(whole[site].covariance, np.cov(a.T, bias=True)) < 1e-6


@pytest.mark.usefixtures("few")
def test_shards_draw_the_rows_of_one_pass(tmp_path: Path) -> None:
    program, (x, _) = traced(seeded(Convs(8)), 2, 8, 8), data(40, 2, 8, 8)
    parts = [x[i : i + 8] for i in range(0, 40, 8)]

    def calibrated(shard: tuple[int, int] = (0, 1)) -> Stats:
        return cmrc.calibrate(program, parts, sites="act*", need="scatter", rows_per_unit=8, shard=shard)

    whole, first, second = calibrated(), calibrated((0, 2)), calibrated((1, 2))
    merged = first.merge(second)
    assert whole.options["samples"] == first.options["samples"] == 40
    for name, site_stats in whole.sites.items():
        for key, array in site_stats.arrays.items():
            assert distance(merged.sites[name].arrays[key], array) < 1e-12, key


@pytest.mark.usefixtures("few")
def test_a_mask_leaves_samples_of_several_lengths() -> None:
    program, (x, _) = traced(seeded(Tokens(tokens=24)), 24, 6), data(30, 24, 6)
    mask = np.arange(24) < np.random.default_rng(0).integers(1, 25, 30)[:, None]
    batch = {next(iter(program.host.inputs)): x, "mask": mask}
    site = next(iter(cmrc.calibrate(program, [x], need="scatter").sites.values())).columns.name
    some, every = (
        cmrc.calibrate(program, [batch], sites=site, need="scatter", positions="mask", rows_per_unit=count)[site]
        for count in (16, 0)
    )
    assert some.count == every.count == mask.sum()
    assert distance(some.mean, every.mean) < EXACT_F64
    assert 1e-6 < distance(some.covariance, every.covariance) < 0.5


def test_few_columns_get_more_rows() -> None:
    enough = Enough(32, 1000)
    assert [enough.of_each_sample(columns) for columns in (16, 256, 4096)] == [66, 9, 132]
    assert Enough(32, 10**7).of_each_sample(256) == 1


def test_how_many_samples_there_are(tmp_path: Path) -> None:
    x = np.zeros((7, 3), np.float32)
    np.save(tmp_path / "a.npy", x)
    np.savez(tmp_path / "b.npz", x=x[:4])
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.from_numpy(x)), batch_size=2)
    assert samples_of(tmp_path, ["x"]) == 11
    assert samples_of([x, (x[:2],), {"x": x[:1]}], ["x"]) == 10
    assert samples_of(loader, ["x"]) == 7
    assert samples_of(iter([x]), ["x"]) is None
    assert samples_of((part for part in [x]), ["x"]) is None
    assert sum(len(batch) for batch in batches(tmp_path, ["x"])) == 11
