"""`cmrc.reduce` on a torch module."""

from __future__ import annotations

from pathlib import Path

import torch
from nets import Net, seeded

import cmrc


def test_a_module_is_reduced_timed_and_saved(tmp_path: Path) -> None:
    model = seeded(Net((5, 32, 24, 4))).float()
    x = torch.randn(600, 5, generator=torch.Generator().manual_seed(0))
    result = cmrc.reduce(
        model, [x[:300], x[300:]], args=(x[:2],), dynamic_shapes=({0: torch.export.Dim("n")},), frontier=[0.7],
        pick=0.7, refit=False,
    )  # fmt: skip
    assert result.measures.macs < 0.7 * result.whole.macs
    assert result.measures.speed is not None
    small = result.lowered.module
    agree = (small(x).argmax(1) == model(x).argmax(1)).float().mean()
    assert agree > 0.5
    result.save(tmp_path / "small.onnx")
    assert cmrc.trace(tmp_path / "small.onnx").cost().macs == result.measures.macs


def test_the_chosen_size_is_trained_and_judged_again(tmp_path: Path) -> None:
    examples = Path(__file__).parents[2] / "examples"
    call = {
        "held_out": examples / "digits_test.npz", "frontier": [0.1], "pick": 0.1, "refit": False, "timed": False,
        "samples": 600, "work": tmp_path / "w",
    }  # fmt: skip
    plain = cmrc.reduce(examples / "digits.onnx", examples / "digits_train.npz", **call)
    trained = cmrc.reduce(examples / "digits.onnx", examples / "digits_train.npz", recover=0.05, **call)
    before, after = plain.measures.quality.kl, trained.measures.quality.kl
    assert before is not None
    assert after is not None
    assert after < before
    assert trained.lowered.recovery is not None
    assert trained.measures.macs == plain.measures.macs
    assert any(str(trained.lowered.recovery) in remark for remark in trained.remarks)
    assert trained.check.holds  # of what was lowered, before it was trained
    trained.save(tmp_path / "small.onnx")
    assert trained.to_json()["recovery"]["steps"] > 0
    rows = {row[1]: row for row in trained.frontier()}
    assert rows["0.1, recovered"][0] == ">"
    assert (
        rows["0.1"][1:] == next(row for row in plain.frontier() if row[1] == "0.1")[1:]
    )  # what it began with stays to see
    assert trained.to_json()["recovery"]["before"]["quality"]["kl"] == before
    assert "recovery" in {row[0] for row in trained.summary()}


class Repeated(torch.nn.Module):
    """One block, twice: uses of a weight that lose different units need several."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b, self.head = (
            torch.nn.Linear(6, 48), torch.nn.ReLU(), torch.nn.Linear(48, 6), torch.nn.Linear(6, 4)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x + self.b(self.act(self.a(x)))
        return self.head(x)


def test_a_size_that_would_hold_more_numbers_is_left_out() -> None:
    x = torch.randn(400, 6, generator=torch.Generator().manual_seed(0))
    result = cmrc.reduce(
        seeded(Repeated()).float().eval(), [x[:200], x[200:]], args=(x[:2],), dynamic_shapes=({0: torch.export.Dim("n")},),
        frontier=[0.8, 0.3], pick=0.3, refit=False, timed=False,
    )  # fmt: skip
    assert [size.share for size in result.sizes] == [0.3]
    (remark,) = [remark for remark in result.remarks if remark.startswith("the size 0.8 is left out: ")]
    assert "more numbers than the model" in remark
    assert result.measures.parameters < result.whole.parameters


def test_a_smaller_size_holds_the_goal_after_training(tmp_path: Path) -> None:
    examples = Path(__file__).parents[2] / "examples"
    call = {
        "held_out": examples / "digits_test.npz", "frontier": [0.5, 0.04], "measured": True, "refit": False,
        "timed": False, "samples": 800, "work": tmp_path / "w",
    }  # fmt: skip
    easy = cmrc.reduce(examples / "digits.onnx", examples / "digits_train.npz", agreement=0.5, **call)
    assert (easy.ready, easy.size.share) == (True, 0.04)
    call["agreement"] = goal = easy.measures.quality.agreement.value + 0.004  # two samples more
    plain = cmrc.reduce(examples / "digits.onnx", examples / "digits_train.npz", **call)
    assert (plain.ready, plain.size.share) == (True, 0.5)
    trained = cmrc.reduce(examples / "digits.onnx", examples / "digits_train.npz", recover=0.25, **call)
    assert trained.lowered.recovery is not None
    assert (trained.ready, trained.size.share) == (True, 0.04)
    assert not trained.lowered.recovery.labels  # the data have labels, and training does without
    assert trained.measures.quality.agreement.value >= goal > trained.size.measures.quality.agreement.value
    assert trained.check.holds
