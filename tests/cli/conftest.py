"""A folder with models, plans and data for commands."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from command import cli

import cmrc

DIGITS = Path(__file__).parents[2] / "examples" / "digits.onnx"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a model and a plan for it."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(DIGITS, tmp_path / "model.onnx")
    program = cmrc.trace("model.onnx")
    plan = cmrc.Plan(program).do("act1", units=[0, 3], constant=[0.5, 1.0])
    plan.do("act3", units=range(0, 128, 2), constant=np.linspace(-1, 1, 64)).save("plan.json")
    return tmp_path


@pytest.fixture
def held_out(folder: Path) -> Path:
    """The lowered model beside a gentler plan, and held-out digits with their labels."""
    test = np.load(DIGITS.parent / "digits_test.npz")
    np.savez("held-out.npz", image=test["images"], labels=test["labels"])
    program = cmrc.trace("model.onnx")
    means = cmrc.interpret(program).tap((test["images"],), "act4").mean(0)
    cmrc.Plan(program).do("act4", units=range(4), constant=means[:4]).save("gentle.json")
    assert cli("lower", "model.onnx", "gentle.json", "-o", "gentle.onnx").exit_code == 0
    cmrc.Plan(program).do("act4", units=range(40), constant=means[:40]).save("harsh.json")
    return folder
