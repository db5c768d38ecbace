"""Several processes recover a model, as one process does; a killed one goes on from the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from nets import Branches, exported, seeded, traced
from processes import run_alone_and_together
from tolerances import distance

import cmrc
from cmrc.errors import InputError
from cmrc.hosts.autograd.learner import BatchScale
from cmrc.hosts.protocols import Lesson, Teaching, alone
from cmrc.recovery import recover as module

SCRIPT = Path(__file__).with_name("spread.py")
TOGETHER = 1e-9  # float64 sums in another order, through twelve steps of Adam


def test_two_processes_recover_as_one_does_and_one_may_be_killed(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    exported(traced(seeded(Branches()), 5)).save(tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", x=random.normal(0, 3, (70, 5)), y=random.integers(0, 3, 70))
    run_alone_and_together(SCRIPT, "data.npz", tmp_path)
    alone, *together = (
        json.loads((tmp_path / name).read_text()) for name in ("one.0.json", "two.0.json", "two.1.json")
    )
    assert alone["trained"]
    assert alone["after"] < 0.9 * alone["before"]
    assert alone["began"][0] == 1
    one, *two = (np.load(tmp_path / name) for name in ("one.0.npz", "two.0.npz", "two.1.npz"))
    for weights, known in zip(two, together, strict=True):
        assert known["began"] == alone["began"][3:]  # it was killed after three rounds, and went on from there
        assert {key: known[key] for key in ("steps", "trained", "samples", "held_out", "losses")} == {
            key: alone[key] for key in ("steps", "trained", "samples", "held_out", "losses")
        }
        assert abs(known["after"] - alone["after"]) < TOGETHER * alone["after"]
        assert known == together[0]
        for name in one:
            assert distance(weights[name], one[name]) < TOGETHER
            np.testing.assert_array_equal(weights[name], two[0][name])


@pytest.mark.parametrize("world", [2, 3, 7])
def test_what_errors_are_relative_to_is_that_of_the_whole_batch(world: int) -> None:
    random = np.random.default_rng(0)
    outputs, value, labels = random.normal(3, 2, (5, 4, 3)), random.normal(1, 2, (5, 6)), np.array([1, -100, 2, 0, 1])
    teaching = Teaching(("squared-error",), 0.3, 0.3)
    whole = BatchScale.of(Lesson({}, [outputs], {"v": value}, labels), teaching, alone)
    flat = outputs.reshape(-1, 3)
    assert (whole.samples, whole.labelled) == (5, 4)
    assert whole.outputs == pytest.approx([np.square(flat - flat.mean(0)).sum(1).mean()])
    assert whole.values == pytest.approx({"v": np.square(value - value.mean()).sum()})
    sums: list[np.ndarray] = []

    def noted(array: np.ndarray) -> np.ndarray:
        sums.append(array)
        return np.ones_like(array)

    for rank in range(world):
        some = np.arange(rank, 5, world)
        rows = some if len(some) else np.arange(1)
        lesson = Lesson({}, [outputs[rows]], {"v": value[rows]}, labels[rows], counts=len(some) > 0)
        BatchScale.of(lesson, teaching, noted)
    shared = BatchScale.of(
        Lesson({}, [outputs[:1]], {"v": value[:1]}, labels[:1]), teaching, lambda _: np.sum(sums, axis=0)
    )
    assert (shared.samples, shared.labelled) == (5, 4)
    assert shared.outputs == pytest.approx(whole.outputs)
    assert shared.values == pytest.approx(whole.values)


def test_a_batch_that_cannot_be_shared_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    program = traced(seeded(Branches()), 5)
    lowered = cmrc.lower(program, cmrc.Plan(program).do("act_a", units=[0, 1], constant=0.0))
    monkeypatch.setattr(module.distributed, "shard", lambda: (0, 2))
    monkeypatch.setattr(module.distributed, "from_first", lambda make: make())
    monkeypatch.setattr(module, "fixed_batch", lambda inputs: 8)
    with pytest.raises(InputError, match="this model takes a fixed number of rows"):
        cmrc.recover(program, lowered, [np.zeros((40, 5))], steps=2, spread=True)
