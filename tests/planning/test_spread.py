"""Several processes make one plan and one verification, as one process does; a killed one goes on from its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from nets import Branches, data, exported, seeded, traced
from processes import run_alone_and_together
from tolerances import EXACT_F64, distance

import cmrc

SCRIPT = Path(__file__).with_name("spread.py")


def test_two_processes_plan_and_verify_as_one_does_and_one_may_be_killed(tmp_path: Path) -> None:
    x, _ = data(60, 5)
    exported(traced(seeded(Branches()), 5)).save(tmp_path / "model.onnx")
    np.save(tmp_path / "x.npy", x)
    run_alone_and_together(SCRIPT, "x.npy", tmp_path)
    alone = json.loads((tmp_path / "one.0.told").read_text())
    for rank in (0, 1):
        together = json.loads((tmp_path / f"two.{rank}.told").read_text())
        assert together["before"]  # it was killed, and went on from there
        assert set(together["before"]).isdisjoint(f"site-0-{i}.safetensors" for i in together["sites"])
    one = cmrc.Plan.load(tmp_path / "one.0.json")
    for kind in ("json", "resumed.json"):
        first, second = (tmp_path / f"two.{rank}.{kind}" for rank in (0, 1))
        assert first.read_bytes() == second.read_bytes()
        two = cmrc.Plan.load(first)
        assert [(e.site, e.units, e.parents) for e in one.entries] == [
            (e.site, e.units, e.parents) for e in two.entries
        ]
        assert (two.made["data"], two.made["samples"]) == (one.made["data"], 60)
        for a, b in zip(one.entries, two.entries, strict=True):
            assert distance(b.weight, a.weight) < EXACT_F64
            assert distance(b.constant, a.constant) < EXACT_F64
    every, early = alone["verified"]
    assert (every["swaps"], early["swaps"]) == (1100, 250)  # five pieces for two processes; decided by the first
    assert together["verified"] == alone["verified"]  # to the last bit
