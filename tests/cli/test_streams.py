"""`-` for the standard streams, and completion in a shell."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cmrc

DIGITS = Path(__file__).parents[2] / "examples" / "digits.onnx"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copy(DIGITS, "model.onnx")
    cmrc.Plan(cmrc.trace("model.onnx")).do("act3", units=range(100), constant=[0.1] * 100).save(
        "plan.json", one_file=True
    )
    return tmp_path


def run(*arguments: str, given: bytes = b"", **env: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "cmrc", *arguments]
    return subprocess.run(command, input=given, capture_output=True, check=False, env={**os.environ, **env})


def test_a_model_and_a_plan_through_pipes(folder: Path) -> None:
    assert run("lower", "model.onnx", "plan.json", "-o", "small.onnx").returncode == 0
    streamed = run("lower", "model.onnx", "-", "-o", "-", given=Path("plan.json").read_bytes())
    assert streamed.returncode == 0, streamed.stderr
    assert streamed.stdout == Path("small.onnx").read_bytes()
    assert b"wrote -" in streamed.stderr
    shown = run("inspect", "-", "--no-folds", given=streamed.stdout)
    assert shown.returncode == 0, shown.stderr
    assert b"parameters" in shown.stdout


def test_a_plan_to_standard_output_is_one_file(folder: Path) -> None:
    import numpy as np

    np.save("images.npy", np.random.default_rng(0).random((64, 1, 8, 8), np.float32))
    arguments = ("plan", "model.onnx", "--data", "images.npy", "--sites", "act3", "--preset", "joint", "--keep", "0.5")
    streamed = run(*arguments, "-o", "-")
    assert streamed.returncode == 0, streamed.stderr
    assert run(*arguments, "-o", "made.json").returncode == 0
    assert len(list(folder.glob("made.*.safetensors"))) == 1
    Path("streamed.json").write_bytes(streamed.stdout)
    same = run("plan", "diff", "made.json", "streamed.json")
    assert (same.returncode, same.stdout) == (0, b"the plans are the same\n")


def test_streams_that_cannot_be(folder: Path) -> None:
    empty = run("inspect", "-")
    assert empty.returncode == 2
    assert b"nothing came from standard input" in empty.stderr
    both = run("lower", "model.onnx", "plan.json", "-o", "-", "--json")
    assert both.returncode == 2
    assert b"cannot both go to standard output" in both.stdout


@pytest.mark.parametrize(
    ("words", "completed"), [("cmrc red", "reduce"), ("cmrc reduce --spe", "--speedup"), ("cmrc plan sh", "show")]
)
def test_a_shell_completes_commands_and_options(words: str, completed: str) -> None:
    env = {"_CMRC_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    assert run(**env).stdout.decode().split() == [completed]


def test_completion_can_be_installed() -> None:
    assert b"complete" in run("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1").stdout
