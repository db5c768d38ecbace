"""What the benchmarks ask of other libraries, and how they judge: on small things whose answer is known."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from benchmarks import abstraction, heads, pretrained, pruners, subjects, widths
from benchmarks.data import Images
from benchmarks.trained import ResNet, tuned

TOLD = {"block_size": 16, "beg_size": 4, "end_size": 3, "padding_token": 256}


def test_a_pruned_model_is_the_model_with_its_weakest_units_at_zero() -> None:
    pytest.importorskip("torch_pruning", reason="torch-pruning is not installed: pip install 'cmrc[bench]'")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    x = torch.randn(5, 6)
    small = pruners.torch_pruned(model, (x,), ["0"], "L2 of the layer", keep=0.5)
    weakest = model[0].weight.norm(dim=1).argsort()[:4]
    with torch.no_grad():
        hidden = model[1](model[0](x))
        hidden[:, weakest] = 0.0
        assert torch.allclose(small(x), model[2](hidden), atol=1e-6)
    assert pruners.sizes_of_module(small, (x,)) == {"parameters": 4 * 6 + 4 + 3 * 4 + 3, "macs": 4 * 6 + 3 * 4}
    assert model[0].out_features == 8


def test_the_last_stage_is_cut_in_every_layer_that_shares_it() -> None:
    """As by hand: the channels of the last stage at zero, wherever they are written, and the head without their columns."""
    pytest.importorskip("torch_pruning", reason="torch-pruning is not installed: pip install 'cmrc[bench]'")
    torch.manual_seed(0)
    model = ResNet((4, 6, 8), blocks=2).eval()
    nn.init.normal_(model.head.weight, std=3.0)
    nn.init.zeros_(model.head.bias)
    x = np.random.default_rng(0).normal(size=(64, 3, 8, 8)).astype(np.float32)
    with torch.no_grad():
        labels = model(torch.from_numpy(x)).argmax(1).numpy()
    images = Images(np.zeros(0), np.zeros(0), x, labels)
    weakest = model.head.weight.norm(dim=0).argsort()
    for row, keep in zip(abstraction.depgraph(model, images), (6, 4, 2), strict=True):
        zeroed = copy.deepcopy(model)
        gone = weakest[: 8 - keep]

        def without(module: nn.Module, inputs: object, output: torch.Tensor, gone: torch.Tensor = gone) -> torch.Tensor:
            return output.index_fill(1, gone, 0.0)

        for block in zeroed.blocks[-2:]:
            block.register_forward_hook(without)
        with torch.no_grad():
            answers = zeroed(torch.from_numpy(images.test)).argmax(1).numpy()
        assert row["accuracy"] == (answers == images.test_labels).mean()
        assert row["parameters"] < 1
    assert row["accuracy"] < 1


def test_taylor_scores_follow_the_loss() -> None:
    pytest.importorskip("torch_pruning", reason="torch-pruning is not installed: pip install 'cmrc[bench]'")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)).eval()
    with torch.no_grad():
        model[1].weight[0] = torch.tensor([0.0, 0.0, 1.0, 1.0])  # the loss below sees units 2 and 3 alone
    x = torch.randn(16, 6)
    small = pruners.torch_pruned(model, (x,), ["0"], "Taylor", losses=lambda m: [m(x)[:, 0].square().sum()])
    assert torch.equal(small[0].weight, model[0].weight[2:])


def test_stored_numbers_are_counted_wherever_they_lie() -> None:
    stored = numpy_helper.from_array(np.ones((2, 3), dtype=np.float32), "held")
    constant = numpy_helper.from_array(np.ones(5, dtype=np.float16), "c")
    whole = numpy_helper.from_array(np.ones(7, dtype=np.int64), "shape")
    nodes = [helper.make_node("Constant", [], ["c"], value=constant), helper.make_node("Identity", ["c"], ["y"])]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT16, [5])
    assert pruners.stored(helper.make_model(helper.make_graph(nodes, "g", [], [output], [stored, whole]))) == 11


def test_onnxsim_is_matched_in_size(tmp_path: Path) -> None:
    pytest.importorskip("onnxsim", reason="onnxsim is not installed: pip install 'cmrc[bench]'")
    rng = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(rng.normal(size=s).astype(np.float32), n) for n, s in (("a", (8, 64)), ("b", (64, 4)))
    ]
    nodes = [helper.make_node(*step) for step in (
        ("MatMul", ["x", "a"], ["h"]), ("Relu", ["h"], ["r"]), ("MatMul", ["r", "b"], ["y"]))]  # fmt: skip
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, size]) for n, size in (("x", 8), ("y", 4)))
    model = helper.make_model(helper.make_graph(nodes, "g", [x], [y], weights), ir_version=10,
                              opset_imports=[helper.make_opsetid("", 18)])  # fmt: skip
    onnx.save(model, tmp_path / "whole.onnx")
    sparsity, removed = pruners.onnxsim_pruned(tmp_path / "whole.onnx", tmp_path / "small.onnx", 12 * 20)
    assert removed
    assert pruners.stored(onnx.load(tmp_path / "small.onnx")) == 12 * 20
    assert sparsity == pytest.approx(44 / 64, abs=0.02)


@pytest.mark.parametrize(
    ("a", "b", "apart"),
    [("", "", 0), ("whale", "whale", 0), ("whale", "wale", 1), ("kitten", "sitting", 3), ("", "ab", 2)],
)
def test_the_distance_of_strings(a: str, b: str, apart: int) -> None:
    assert subjects.distance(a, b) == subjects.distance(b, a) == apart


@pytest.mark.parametrize(
    ("content", "features"),
    [
        (b"  abcdefgh\n", [97, 98, 99, 100, 102, 103, 104]),
        (b"ab", [97, 98, 256, 256, 256, 97, 98]),
        (b"x" * 40 + b"yz ", [120, 120, 120, 120, 120, 121, 122]),
    ],
)
def test_a_file_is_read_by_its_ends(tmp_path: Path, content: bytes, features: list[int]) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    assert subjects.file_features(path, TOLD).tolist() == features


def test_one_head_of_every_group_goes() -> None:
    assert heads.weakest(np.array([3.0, 1.0, 2.0, 0.5, 0.7, 0.6])) == [1, 3]


def test_rounding_is_told_for_widths_that_are_no_multiple() -> None:
    seconds = {"7": np.full((2, 3), 4.0), "8": np.full((2, 3), 1.0), "9": np.full((2, 3), 2.0)}
    assert widths.rounded((7, 8, 9), seconds) == [{"kept": 7, "rounded": 8, "ratio": 0.25, "low": 0.25, "high": 0.25}]


def test_claims_count_what_is_lost_beyond_the_whole_network() -> None:
    rows = [
        {"kind": kind, "method": kind, "KL": kl}
        for kind, kl in (("cmrc", 12.0), ("peer", 20.0), ("as published", 14.0))
    ]
    claims = pretrained.claims_of(rows, "KL", 10.0)
    assert [(c["value"], c["met"]) for c in claims] == [(0.2, True), (0.5, True)]


def test_divergence_of_a_model_from_itself_is_none_and_of_another_is_the_kl() -> None:
    first, second = np.log([[0.5, 0.5]]), np.log([[0.25, 0.75]])
    assert subjects.divergence(first, first) == 0
    assert subjects.divergence(first, second) == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3))


def test_tuning_sees_the_same_pictures_whatever_the_model() -> None:
    from benchmarks.data import Images

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(64, 3, 32, 32)).astype(np.float32), rng.integers(0, 2, 64)

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.seen = nn.Parameter(torch.zeros(2)), []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.append(float(x.sum()))
            return x.mean((1, 2, 3))[:, None] * self.weight

    plain = Sums()
    first, second = (tuned(plain, Images(x, y, x, y), 3, batch=16) for _ in range(2))
    assert not plain.weight.any()
    assert first.weight.any()
    assert first.seen == second.seen
    assert len(set(first.seen)) == 3
    assert not first.training
