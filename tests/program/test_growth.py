"""A result that would hold more numbers than the model is refused, unless it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from command import cli
from torch import nn

import cmrc
from cmrc.errors import GrowthError


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Repeated(nn.Module):
    """One block, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x + self.b(self.act(self.a(x)))
        return x


X = torch.randn(5, 40, 6, generator=torch.Generator().manual_seed(0))


def by_position(program: cmrc.Program) -> cmrc.Plan:
    slab = np.random.default_rng(0).normal(size=(1, 40, 2))
    return cmrc.Plan(program).do("act", units=[1, 4], constant=slab)


def one_use(program: cmrc.Program) -> cmrc.Plan:
    return cmrc.Plan(program).do("act@0", units=[1, 4], constant=[0.5, -1.0])


def traced(make: Callable[[], nn.Module], host: str, folder: Path) -> cmrc.Program:
    torch.manual_seed(0)
    program = cmrc.trace(make().eval(), (X,))
    if host == "fx":
        return program
    program.host.save(folder / "model.onnx")
    return cmrc.trace(folder / "model.onnx")


@pytest.mark.parametrize("host", ["fx", "onnx"])
@pytest.mark.parametrize(
    ("make", "plan", "more"), [(Plain, by_position, 66), (Repeated, one_use, 84)], ids=["by position", "shared weight"]
)
def test_a_larger_result_is_refused_and_taken_on_request(
    make: Callable[[], nn.Module], plan: Callable[[cmrc.Program], cmrc.Plan], more: int, host: str, tmp_path: Path
) -> None:
    program = traced(make, host, tmp_path)
    for residue in ("error", "keep"):
        with pytest.raises(GrowthError) as error:
            cmrc.lower(program, plan(program), residue=residue)  # type: ignore[arg-type]
        assert error.value.reason.startswith(f"the result would hold {more} more numbers than the model: ")
        assert error.value.node
        assert error.value.fix == (
            "give each unit one constant for all positions, replace the same units wherever a weight is shared, "
            'leave that site out, or take the larger result with growth="allow"'
        )
    lowered = cmrc.lower(program, plan(program), growth="allow")
    assert lowered.report.growth()["parameters"] == more
    assert str(lowered.report).startswith(f"this costs more than the model: {more} more parameters")
    assert lowered.check().holds
    if host == "onnx":
        lowered.save(tmp_path / "larger.onnx")
        sizes = [_numbers(tmp_path / name) for name in ("larger.onnx", "model.onnx")]
        assert sizes[0] - sizes[1] == more


def _numbers(path: Path) -> int:
    return sum(int(np.prod(tensor.dims)) for tensor in onnx.load(path).graph.initializer)


@pytest.mark.parametrize("external", [False, True])
def test_a_file_that_grows_by_its_metadata_is_named_first(external: bool, tmp_path: Path) -> None:
    """Fewer numbers, and more bytes of names and metadata than they had."""
    model = onnx.load(_tiny(tmp_path / "tiny.onnx"))
    if external:
        onnx.save(model, tmp_path / "tiny.onnx", save_as_external_data=True, location="tiny.data", size_threshold=0)
    program = cmrc.trace(tmp_path / "tiny.onnx")
    lowered = cmrc.lower(program, cmrc.Plan(program).do("h", units=[1], constant=0.5))
    assert lowered.report.growth() == {}
    lowered.save(tmp_path / "small.onnx")
    before = sum(file.stat().st_size for file in tmp_path.glob("tiny.*"))
    after = sum(file.stat().st_size for file in tmp_path.glob("small.*"))
    assert after > before
    assert lowered.report.growth() == {"bytes in the file": after - before}
    first, *_ = str(lowered.report).splitlines()
    assert first == f"this costs more than the model: {after - before:,} more bytes in the file"
    assert lowered.report.to_json()["files"] == {"before": before, "after": after}
    lowered.save(tmp_path / "tiny.onnx", overwrite=True)  # the sizes are those from before it is replaced
    assert lowered.report.files is not None
    assert lowered.report.files.before == before


def _tiny(path: Path) -> Path:
    program = cmrc.trace(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)).eval(), (torch.ones(1, 2),))
    program.host.save(path)
    model = onnx.load(path)
    model.graph.node[1].output[0] = model.graph.node[2].input[0] = "h"
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("host", ["fx", "onnx"])
def test_the_same_units_at_every_use_keep_a_weight_shared(host: str, tmp_path: Path) -> None:
    program = traced(Repeated, host, tmp_path)
    plan = cmrc.Plan(program)
    for use in ("act@0", "act@1"):
        plan.do(use, units=[1, 4], constant=[0.5, -1.0])
    lowered = cmrc.lower(program, plan)
    assert lowered.report.untied == ()
    assert lowered.report.after.parameters == lowered.report.before.parameters - 2 * (6 + 1 + 6)
    assert lowered.check().holds


def test_what_stays_at_run_time_was_asked_for(tmp_path: Path) -> None:
    program = traced(Plain, "onnx", tmp_path)
    plan = cmrc.Plan(program).do("fc2", units=[0], constant=0.5)
    lowered = cmrc.lower(program, plan, residue="keep")
    assert lowered.result.residue


def test_the_command_names_its_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = traced(Plain, "onnx", tmp_path)
    by_position(program).save("plan.json")
    asked: tuple[Any, ...] = ("lower", "model.onnx", "plan.json", "-o", "larger.onnx")
    answer = cli(*asked)
    assert answer.exit_code == 1, answer.stderr
    assert answer.stderr.endswith("leave that site out, or take the larger result with --growth allow\n")
    assert not Path("larger.onnx").exists()
    assert cli(*asked, "--growth", "allow").exit_code == 0
    answer = cli(*asked, "--growth", "perhaps", "--force")
    assert answer.stderr == "error: --growth is 'perhaps'\n  fix: write --growth error or --growth allow\n"
    assert cli("check", "model.onnx", "larger.onnx", "plan.json").exit_code == 0
