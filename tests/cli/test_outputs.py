"""Outputs that would destroy something, or cannot be what they are called, are refused before the work."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from command import cli

import cmrc

DIGITS = Path(__file__).parent.parent.parent / "examples" / "digits.onnx"
LOST = "it is an input and would be lost\n  fix: write to another file, or overwrite it with --force\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copy(DIGITS, "model.onnx")
    Path("model.json").symlink_to("model.onnx")
    Path("link.onnx").symlink_to("model.onnx")
    cmrc.Plan(cmrc.trace("model.onnx")).do("act3", units=[0], constant=0.5).save("plan.json")
    np.save("images.npy", np.zeros((4, 1, 8, 8), np.float32))
    return tmp_path


@pytest.mark.parametrize(
    ("command", "output"),
    [
        (("lower", "model.onnx", "plan.json"), "model.onnx"),
        (("lower", "model.onnx", "plan.json"), "../{folder}/model.onnx"),
        (("lower", "model.onnx", "plan.json"), "link.onnx"),
        (("annotate", "model.onnx", "plan.json"), "model.onnx"),
        (("plan", "model.onnx", "--data", "images.npy"), "model.json"),
    ],
)
def test_an_input_is_not_overwritten(folder: Path, command: tuple[str, ...], output: str) -> None:
    before = Path("model.onnx").read_bytes()
    output = output.format(folder=folder.name)
    shown = cli(*command, "-o", output)
    assert (shown.exit_code, shown.stderr) == (2, f"file: cannot write {output}: {LOST}")
    assert Path("model.onnx").read_bytes() == before


def test_an_input_is_overwritten_by_force_and_a_symlink_stays_one(folder: Path) -> None:
    before = Path("model.onnx").read_bytes()
    assert cli("lower", "model.onnx", "plan.json", "-o", "link.onnx", "--force").exit_code == 0
    assert Path("link.onnx").is_symlink()
    assert Path("model.onnx").read_bytes() != before
    Path("other.json").symlink_to("real.json")
    assert cli("plan", "model.onnx", "--data", "images.npy", "--keep", "0.5", "-o", "other.json").exit_code == 0
    assert Path("other.json").is_symlink()
    assert len(cmrc.Plan.load("real.json")) == len(cmrc.Plan.load("other.json")) > 0


@pytest.mark.parametrize(
    ("command", "what", "suffix"),
    [
        (("lower", "model.onnx", "plan.json"), "a model", ".onnx"),
        (("annotate", "model.onnx", "plan.json"), "a model", ".onnx"),
        (("calibrate", "model.onnx", "--data", "images.npy"), "a file of statistics", ".safetensors"),
        (("plan", "model.onnx", "--data", "images.npy"), "a plan", ".json"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_names_that_are_not_those_of_such_a_file(
    folder: Path, command: tuple[str, ...], what: str, suffix: str
) -> None:
    before = sorted(folder.iterdir())
    stream = f"{what} is not written to standard output\n  fix: give the path of a file: -o out{suffix}\n"
    for output, message in (
        *([("-", stream)] if what == "a file of statistics" else []),  # models and plans can go there
        ("x.bin", f"cannot write x.bin: {what} has a name that ends in {suffix}\n  fix: -o x.bin{suffix}\n"),
        ("/dev/null", "cannot write /dev/null: it is a device or a pipe\n  fix: give the path of a file\n"),
    ):
        shown = cli(*command, "-o", output)
        assert (shown.exit_code, shown.stderr) == (2, f"file: {message}")
    assert sorted(folder.iterdir()) == before
