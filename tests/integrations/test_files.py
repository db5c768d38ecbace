"""The files of examples/integrations say what they do: the Makefile and the workflow are run, the stages of DVC are real commands."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from command import cli

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "integrations"
QUICK = ("--frontier", "0.7,0.5", "--no-refit", "--no-timed")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, called in (
        ("digits.onnx", "model.onnx"),
        ("digits_train.npz", "train.npz"),
        ("digits_test.npz", "test.npz"),
    ):
        shutil.copy(ROOT / "cmrc" / "demo" / name, tmp_path / called)
    return tmp_path


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_reduces_once_and_gates(folder: Path) -> None:
    shutil.copy(FOLDER / "Makefile", folder)
    make = ["make", f"CMRC={sys.executable} -m cmrc", f"REDUCE={shlex.join(QUICK)}"]
    done = subprocess.run([*make, "gate"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "this is that model, lowered by that plan" in done.stdout
    assert subprocess.run([*make, "-q", "small.onnx"], check=False).returncode == 0  # nothing is to be done
    refused = subprocess.run([*make, "gate", "AGREEMENT=0.9999"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "check" in refused.stdout  # the gate was reached, and shut


def test_the_page_shows_that_makefile() -> None:
    page = (ROOT / "docs" / "tutorials" / "mlops.md").read_text()
    (block,) = re.findall(r"```makefile\n(.*?)```", page, re.DOTALL)
    assert block == (FOLDER / "Makefile").read_text()


def test_the_steps_of_the_workflow_run(folder: Path) -> None:
    pytest.importorskip("vl_convert")
    steps = yaml.safe_load((FOLDER / "workflow.yml").read_text())["jobs"]["reduce"]["steps"]
    commands = [shlex.split(step["run"]) for step in steps if step.get("run", "").startswith("cmrc ")]
    assert [command[1] for command in commands] == ["reduce", "check", "provenance"]
    for command in commands:
        done = cli(*command[1:], *(QUICK if command[1] == "reduce" else ()))
        assert done.exit_code == 0, done.output
    uploaded = next(step for step in steps if "upload" in step.get("uses", ""))["with"]["path"].split()
    assert all((folder / name).exists() for name in (*uploaded, "report.md"))


def test_the_stages_of_dvc_run_and_name_their_files(folder: Path) -> None:
    stages = yaml.safe_load((FOLDER / "dvc.yaml").read_text())["stages"]
    line, written = stages["reduce"]["cmd"].split(" > ")
    done = cli(*shlex.split(line)[1:])
    assert done.exit_code == 0, done.output
    (folder / written).write_text(done.stdout)
    assert json.loads(done.stdout)["ready"]
    for stage in stages.values():
        assert all((folder / name).exists() for name in (*stage["deps"], *stage.get("outs", ())))
    for line in stages["gate"]["cmd"]:
        assert cli(*shlex.split(line)[1:]).exit_code == 0


def test_the_recipe_of_olive_names_options_of_the_pass() -> None:
    """The pass itself runs in .ci/integrations, where Olive is."""
    source = (ROOT / "cmrc" / "integrations" / "olive.py").read_text()
    recipe = json.loads((FOLDER / "recipe.json").read_text())
    for name in recipe["passes"]["reduce"].keys() - {"type"}:
        assert f'"{name}"' in source
