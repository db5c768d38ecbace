"""Files of a torch model after the first: lowered in one export of the original, equal to exporting the lowered model."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from nets import Branches, data, seeded, traced
from tolerances import ACROSS_F32, distance
from torch import nn

import cmrc
from cmrc.hosts.fx.host import FxHost
from cmrc.program import lower as lowering
from cmrc.program.provenance import verify_provenance


class Convolutions(nn.Module):
    """Convolutions, batch norms, a residual sum, a gate, a pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.gate = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = torch.relu(self.norm(self.first(x)))
        b = torch.nn.functional.silu(self.second(a)) * torch.sigmoid(self.gate(a.mean((2, 3))))[:, :, None, None]
        return self.last(torch.nn.functional.adaptive_avg_pool2d(b, 1).flatten(1))


class Twins(nn.Module):
    """The same activation twice on the same value: the exporter merges the two."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.one, self.other = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc(x)
        return self.one(torch.relu(h)) + self.other(torch.relu(h))


def program_of(model: nn.Module, *shape: int) -> cmrc.Program:
    x = torch.randn(3, *shape)
    return cmrc.trace(model.float().eval(), (x,), dynamic_shapes=({0: torch.export.Dim("n")},))


def file_results(path: Path, x: np.ndarray) -> Any:
    return onnxruntime.InferenceSession(str(path)).run(None, {onnx.load(path).graph.input[0].name: x})[0]


def require_same_files(program: cmrc.Program, plan: cmrc.Plan, x: np.ndarray, folder: Path) -> None:
    """Both ways give the same numbers from the same ops, and weights of the same shapes."""
    paths = [folder / "module.onnx", folder / "once.onnx"]
    for once, path in zip((False, True), paths, strict=True):
        program.exports_once = once
        cmrc.lower(program, plan).save(path, overwrite=True)
    first, second = (file_results(path, x) for path in paths)
    assert distance(second, first) < ACROSS_F32
    graphs = [onnx.load(path).graph for path in paths]
    ops, shapes = (
        [Counter(map(of, nodes)) for nodes in each]
        for of, each in (
            (lambda node: node.op_type, [graph.node for graph in graphs]),
            (lambda tensor: tuple(tensor.dims), [graph.initializer for graph in graphs]),
        )
    )
    assert ops[0] == ops[1]
    assert shapes[0] == shapes[1]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[FxHost]:
    """The hosts that are exported."""
    hosts: list[FxHost] = []
    to_onnx = FxHost.to_onnx

    def noted(host: FxHost, *arguments: Any) -> Any:
        hosts.append(host)
        return to_onnx(host, *arguments)

    monkeypatch.setattr(FxHost, "to_onnx", noted)
    return hosts


def test_from_the_second_file_on_only_the_original_is_exported(counted: list[FxHost], tmp_path: Path) -> None:
    program = program_of(seeded(Convolutions()), 3, 6, 6)
    lowered = [cmrc.lower(program, cmrc.Plan(program).do("relu", units=[k], constant=0.3)) for k in range(3)]
    for k, each in enumerate(lowered):
        each.save(tmp_path / f"{k}.onnx")
    assert counted == [lowered[0].host, program.host]
    x = np.random.default_rng(0).standard_normal((5, 3, 6, 6)).astype(np.float32)
    for k, each in enumerate(lowered):
        assert distance(file_results(tmp_path / f"{k}.onnx", x), each.host.run([x])[0]) < ACROSS_F32


def test_both_ways_give_the_same_file(tmp_path: Path) -> None:
    program, random = program_of(seeded(Convolutions()), 3, 6, 6), np.random.default_rng(0)
    x = random.standard_normal((5, 3, 6, 6)).astype(np.float32)
    plan = cmrc.Plan(program).do("relu", units=random.choice(8, 3, replace=False), constant=random.normal(size=3))
    for site in ("silu", "sigmoid"):
        plan.do(site, units=[1, 6], constant=random.normal(size=2))
    require_same_files(program, plan, x, tmp_path)


def test_affine_replacements_of_branches_give_the_same_file(tmp_path: Path) -> None:
    program, (x, _) = traced(seeded(Branches()), 5), data(40, 5)
    stats = cmrc.calibrate(program, [x], need=["scatter"])
    plan = cmrc.plan(program, stats, preset="joint", keep=0.5)
    assert any(entry.weight is not None for entry in plan.entries)
    require_same_files(program, plan, x[:7], tmp_path)


def test_what_the_exporter_merged_is_exported_again(counted: list[FxHost], tmp_path: Path) -> None:
    program = program_of(seeded(Twins()), 5)
    program.exports_once = True
    values = [node.name for node in program.graph.nodes if node.kind.startswith("relu")]
    assert len(values) == 2
    x = np.random.default_rng(0).standard_normal((5, 5)).astype(np.float32)
    plan = cmrc.Plan(program)
    for value, constant in zip(values, (0.7, -0.2), strict=True):
        plan.do(value, units=[1, 3], constant=constant)
    lowered = cmrc.lower(program, plan)
    lowered.save(tmp_path / "m.onnx")
    assert counted == [program.host, lowered.host]
    assert distance(file_results(tmp_path / "m.onnx", x), lowered.host.run([x])[0]) < ACROSS_F32


def test_a_replacement_in_another_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(seeded(Convolutions()), 3, 6, 6)
    lowered = cmrc.lower(program, cmrc.Plan(program).do("relu", units=[1], constant=0.3))
    assert lowered.in_export() is not None
    carried = lowering.carried
    for other in ({"units": (2,)}, {"constant": np.array([0.31])}):
        monkeypatch.setattr(lowering, "carried", lambda *a, o=other: [replace(e, **o) for e in carried(*a)])
        assert lowered.in_export() is None


def test_a_trained_model_and_one_with_other_names_are_exported_themselves(
    counted: list[FxHost], tmp_path: Path
) -> None:
    program = program_of(seeded(Convolutions()), 3, 6, 6)
    program.exports_once = True
    lowered = cmrc.lower(program, cmrc.Plan(program).do("relu", units=[1], constant=0.3))
    lowered.save(tmp_path / "named.onnx", output_names=["logits"])
    assert [value.name for value in onnx.load(tmp_path / "named.onnx").graph.output] == ["logits"]
    with torch.no_grad():
        lowered.module.last.bias += 1
    lowered.save(tmp_path / "trained.onnx")
    assert counted == [lowered.host, lowered.host]
    x = np.random.default_rng(0).standard_normal((5, 3, 6, 6)).astype(np.float32)
    first, second = (file_results(tmp_path / f"{name}.onnx", x) for name in ("named", "trained"))
    assert distance(second - 1, first) < ACROSS_F32


def test_the_record_of_a_file_holds_whichever_way_it_was_made(tmp_path: Path) -> None:
    program = program_of(seeded(Convolutions()), 3, 6, 6)
    plan = cmrc.Plan(program).do("relu", units=[1, 4], constant=0.3)
    for once in (False, True):
        program.exports_once = once
        cmrc.lower(program, plan).save(path := tmp_path / f"{once}.onnx")
        assert all(link.holds for link in verify_provenance(cmrc.trace(path), program, plan))
        assert program.exports_once
