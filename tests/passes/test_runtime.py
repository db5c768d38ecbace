"""Constants that exist only at run time: depthwise convolutions with zero padding, at sizes that are not known before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tolerances import EXACT_F32, MOVES
from torch import nn

import cmrc
from cmrc.passes import constant_fold
from cmrc.passes.rewriting import runtime
from cmrc.passes.rewriting.rewriter import Log

DYNAMIC = torch.export.Dim.DYNAMIC


class Inverted(nn.Module):
    """Two inverted bottlenecks without their residuals: expand, depthwise, batch norm, pool, project, classify."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.act1 = nn.Conv2d(3, 8, 1), nn.ReLU()
        self.dw1, self.bn1, self.act2 = nn.Conv2d(8, 8, 3, 2, 1, groups=8), nn.BatchNorm2d(8), nn.SiLU()
        self.dw2, self.pool = nn.Conv2d(8, 8, 5, 1, 2, groups=8, bias=False), nn.AvgPool2d(3, 1, 1)
        self.project, self.act3, self.head = nn.Conv2d(8, 4, 3, padding=1), nn.ReLU(), nn.Linear(4, 5)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)
        nn.init.normal_(self.bn1.running_mean)
        nn.init.uniform_(self.bn1.running_var, 0.5, 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act2(self.bn1(self.dw1(self.act1(self.expand(x)))))
        return self.head(self.act3(self.project(self.pool(self.dw2(x)))).mean((2, 3)))


@pytest.fixture(scope="module", params=["fx", "onnx"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> cmrc.Program:
    torch.manual_seed(0)
    module, sizes = Inverted().eval(), ({0: DYNAMIC, 2: DYNAMIC, 3: DYNAMIC},)
    image = torch.randn(2, 3, 16, 16)
    if request.param == "fx":
        return cmrc.trace(module, (image,), dynamic_shapes=sizes)
    path = tmp_path_factory.mktemp("runtime") / "model.onnx"
    torch.onnx.export(module, (image,), path, dynamo=True, verbose=False, dynamic_shapes=sizes)
    return cmrc.trace(path)


@pytest.mark.parametrize("units", [[1, 5], [0, 1, 2, 4, 5, 6, 7]], ids=["some", "most"])
def test_constants_pass_padded_depthwise_convolutions_of_any_size(program: cmrc.Program, units: list[int]) -> None:
    values = np.linspace(1.0, 3.0, len(units))
    lowered = cmrc.lower(program, cmrc.Plan(program).do("act1", units=units, constant=values), residue="error")
    for height, width in ((16, 16), (19, 12), (8, 31)):
        image = np.random.default_rng(height).normal(size=(3, 3, height, width)).astype(np.float32)
        check = lowered.check([image])
        assert check.error <= EXACT_F32
        assert check.moved >= MOVES * EXACT_F32
    before, after = lowered.report.before, lowered.report.after
    assert after.macs <= before.macs


def test_the_result_is_a_plain_onnx_file(program: cmrc.Program, tmp_path: Path) -> None:
    lowered = cmrc.lower(program, cmrc.Plan(program).do("act1", units=[2, 6], constant=[1.5, -0.5]))
    lowered.save(tmp_path / "small.onnx")
    small = cmrc.trace(tmp_path / "small.onnx")
    image = np.random.default_rng(0).normal(size=(2, 3, 17, 14)).astype(np.float32)
    expected = lowered.clamped.run([image])[0]
    assert np.abs(small.run([image])[0] - expected).max() <= EXACT_F32 * np.abs(expected).max()


def test_what_stays_of_them_still_runs(program: cmrc.Program) -> None:
    """A do that carries a value and stops at an op is a clamp of that value."""
    plan = cmrc.Plan(program).do("act1", units=[1, 5], constant=[0.7, 2.3])
    graph = program.with_dos(plan)
    log = Log()
    for _ in range(2):
        graph, _ = constant_fold.run(graph, log)
    cut = [n for n in graph.nodes if n.op == "do"]
    assert not cut  # all of it folds
    stopped = constant_fold.RULES.pop("linear")
    kept = runtime.RULES.pop("conv")
    try:
        lowered = cmrc.lower(program, plan, residue="keep")
    finally:
        constant_fold.RULES["linear"] = stopped
        runtime.RULES["conv"] = kept
    assert [d.reason for d in lowered.report.declined] == ["conv cannot take constants that exist only at run time"]
    image = np.random.default_rng(0).normal(size=(2, 3, 17, 14)).astype(np.float32)
    assert lowered.check([image]).error <= EXACT_F32
