"""Hard numbers: plans from degenerate moments are finite and sensible, or refused with a reason."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from nets import Net, activations, data, seeded, traced
from tolerances import EXACT_F64, distance

import cmrc
from cmrc.errors import CmrcError
from cmrc.ir.axes import complement
from cmrc.planning.recipe import PRESETS

ROOT = Path(__file__).parents[2]
PRESET_NAMES = [name for name in PRESETS if not name.startswith("heads")]
WIDE = (5, 16, 12, 4)


def network(case: str) -> torch.nn.Module:
    model = seeded(Net(WIDE), 3)
    with torch.no_grad():
        first, last = model.layers[1], model.layers[2]
        if case == "duplicates":
            first.weight[6:] = first.weight[:6]
            first.bias[6:] = first.bias[:6]
        elif case == "constants":
            first.weight[:5] = 0.0
            first.bias[:5] = 0.7
        elif case == "dead":
            first.weight[:5] = 0.0
            first.bias[:5] = -1.0
        elif case == "all constant":
            first.weight[:] = 0.0
            first.bias[:] = 0.3
        elif case == "tiny weights":
            last.weight[:, :4] = 1e-39
            first.weight[8:] *= 1e-39
            first.bias[8:] *= 1e-39
        elif case == "ill-conditioned":
            first.weight[1] = first.weight[0] * (1 + 1e-9)
            first.bias[1] = first.bias[0]
            first.weight[2:6] *= torch.tensor([1e8, 1e-8, 1e4, 1e-4], dtype=torch.float64)[:, None]
        elif case == "no outputs":
            last.weight[:] = 0.0
    return model


CASES = ("duplicates", "constants", "dead", "all constant", "tiny weights", "ill-conditioned", "no outputs")


@pytest.mark.parametrize("samples", [1, 2, 60])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("recompute", ["never", "fits"])
def test_degenerate_moments_give_finite_plans(case: str, samples: int, recompute: str) -> None:
    program, (x, y) = traced(network(case), 5), data(samples, 5)
    for preset in PRESET_NAMES:
        plan = cmrc.plan(program, data=[(x, y)], preset=preset, keep=0.5, recompute=recompute)
        assert [len(entry.units) for entry in plan.entries] == [8, 6], preset
        for i, entry in enumerate(plan.entries):
            values = [entry.constant, *([] if entry.weight is None else [entry.weight])]
            assert all(np.isfinite(array).all() for array in values), preset
            # what the fit saw: the model with the replacements before this site
            upstream = cmrc.Plan(program, plan.entries[:i]) if recompute == "fits" else cmrc.Plan(program)
            host = program.clamped(upstream) if len(upstream) else program.host
            a = host.run([x], [entry.value])[-1]
            rebuilt = (
                entry.constant if entry.weight is None else a[:, list(entry.parents)] @ entry.weight.T + entry.constant
            )
            largest = max(np.abs(a).max(), np.abs(activations(program, x, entry.site)).max(), 1e-30)
            assert np.abs(rebuilt).max() <= 100 * largest, preset  # nothing is blown up
        assert np.isfinite(plan.made["sites"]["acts.1"]["predicted"])


@pytest.mark.parametrize("preset", ["joint", "joint-task", "joint-interchange", "merge"])
def test_one_of_two_equal_units_costs_nothing(preset: str) -> None:
    program, (x, y) = traced(network("duplicates"), 5), data(80, 5)
    keep = 6 if preset != "joint-interchange" else 11  # a swapped twin is no copy
    plan = cmrc.plan(program, data=[(x, y)], sites=["acts.1"], preset=preset, keep=keep)
    entry = plan.entries[0]
    if preset in ("joint", "joint-task"):
        kept = complement(entry.units, 12) % 6
        alive = activations(program, x, "acts.1").std(0)[:6] > 0
        assert set(np.flatnonzero(alive)) <= set(kept.tolist())  # one of each pair stays
        assert distance(cmrc.lower(program, plan).host.run([x])[0], program.run([x])[0]) < 1e-5  # by the ridge


@pytest.mark.parametrize("preset", ["vbp", "cmr-logit", "joint", "joint-task", "reconstruction"])
def test_units_that_never_vary_go_first_and_change_nothing(preset: str) -> None:
    program, (x, y) = traced(network("constants"), 5), data(80, 5)
    plan = cmrc.plan(program, data=[(x, y)], sites=["acts.1"], preset=preset, keep=7)
    dead = set(np.flatnonzero(np.ptp(activations(program, x, "acts.1"), axis=0) == 0).tolist())
    assert {0, 1, 2, 3, 4} <= dead
    assert set(plan.entries[0].units) <= dead or dead <= set(plan.entries[0].units)
    assert distance(cmrc.lower(program, plan).host.run([x])[0], program.run([x])[0]) < EXACT_F64


def test_values_too_large_to_square_are_refused() -> None:
    program, (x, _) = traced(network("duplicates"), 5), data(8, 5)
    with pytest.raises(CmrcError, match="is NaN or infinite, or too large to square, on batch 0"):
        cmrc.plan(program, data=[x * 1e200], preset="vbp")


def test_statistics_without_rows_are_refused() -> None:
    program, (x, _) = traced(network("duplicates"), 5), data(8, 5)
    stats = cmrc.calibrate(program, [x], shard=(1, 2), need="scatter")
    for preset in ("vbp", "joint"):
        with pytest.raises(CmrcError, match="the statistics have no rows for this site"):
            cmrc.plan(program, stats, preset=preset)


SCRIPT = """
import os, sys
sys.path.insert(0, "tests")
if os.environ["OMP_NUM_THREADS"] == "1":  # onnxruntime takes a thread for each core
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import numpy as np, cmrc
from nets import data, exported, mlp
program = mlp((5, 300, 520, 4))
program = exported(program) if sys.argv[2] == "onnx" else program
x, y = data(900, 5)
batches = [x[:500], x[500:]]
cmrc.calibrate(program, batches, need=["scatter", "range", "rows"]).save(sys.argv[1] + ".safetensors")
for preset, extra in (("joint", {}), ("joint-interchange", {}), ("joint", {"ridge": "loo"}), ("merge", {})):
    plan = cmrc.plan(program, data=batches, preset=preset, keep=0.3, **extra)
    plan.save(f"{sys.argv[1]}.{preset}.{len(extra)}.json")
    if sys.argv[2] == "onnx":
        cmrc.lower(program, plan).save(f"{sys.argv[1]}.{preset}.{len(extra)}.onnx")
"""


def files_of(threads: int, folder: Path, name: str, host: str) -> dict[str, bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}  # fmt: skip
    script = SCRIPT.replace('"tests"', repr(str(ROOT / "tests")))
    done = subprocess.run(
        [sys.executable, "-c", script, name, host],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    contents = {path.name.removeprefix(name): path.read_bytes() for path in sorted(folder.glob(f"{name}.*"))}
    own = f'"{name}.'.encode()  # a plan names the file of its arrays
    return {key: each.replace(own, b'"') if key.endswith("json") else each for key, each in contents.items()}


@pytest.mark.parametrize("host", ["onnx", "torch"])
def test_the_same_seed_gives_the_same_bytes_in_every_process_on_any_number_of_threads(
    host: str, tmp_path: Path
) -> None:
    one, again, two, three = (files_of(n, tmp_path, name, host) for n, name in ((1, "a"), (1, "b"), (2, "c"), (3, "d")))
    assert len(one) == (13 if host == "onnx" else 9)
    for other in (again, two, three):
        assert other.keys() == one.keys()
        assert [name for name, content in one.items() if other[name] != content] == []
