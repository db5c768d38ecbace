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
