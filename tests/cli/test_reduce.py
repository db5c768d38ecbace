"""`cmrc reduce` as a user calls it: files, tables, verdicts, exit codes, JSON, and errors in the words of flags."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from command import cli

import cmrc

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICK = ("--frontier", "0.8,0.5", "--no-refit", "--no-timed", "--samples", "600")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, copy in (
        ("digits.onnx", "model.onnx"),
        ("digits_train.npz", "train.npz"),
        ("digits_test.npz", "test.npz"),
    ):
        shutil.copy(EXAMPLES / name, tmp_path / copy)
    return tmp_path


def test_from_files_to_a_small_model_that_checks(folder: Path) -> None:
    shown = cli("reduce", "model.onnx", "--data", "train.npz", "--held-out", "test.npz", "-o", "small.onnx", *QUICK)
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert lines[-1].startswith("ready: ")
    assert lines[-2] == "wrote small.onnx and small.plan.json"
    assert sum(line.startswith(" > ") for line in lines) == 1
    assert "  sites       which units can be replaced" in shown.stderr
    assert cli("check", "model.onnx", "small.onnx", "small.plan.json").exit_code == 0
    test = np.load("test.npz")
    answers = [cmrc.trace(path).run([test["images"]])[0].argmax(1) for path in ("model.onnx", "small.onnx")]
    assert f"agrees with the original on {100 * (answers[0] == answers[1]).mean():.1f} %" in lines[-1]
    assert {path.name for path in folder.iterdir() if path.suffix != ".safetensors"} == {
        "model.onnx", "train.npz", "test.npz", "small.onnx", "small.plan.json", "small.work",
    }  # fmt: skip


def test_another_size_is_picked_from_the_same_work(folder: Path) -> None:
    call = ("reduce", "model.onnx", "--data", "train.npz", "--held-out", "test.npz", "-o", "small.onnx", *QUICK)
    cli(*call)
    small = cmrc.trace("small.onnx").cost().macs
    again = cli(*call, "--pick", "0.8", "--json")
    document = json.loads(again.stdout)
    assert (again.exit_code, document["chosen"], document["goals"]) == (0, 0.8, [])
    assert cmrc.trace("small.onnx").cost().macs > small
    assert "calibration done before" in again.stderr


def test_a_goal_that_is_not_met_ends_with_1(folder: Path) -> None:
    shown = cli(
        "reduce", "model.onnx", "--data", "train.npz", "-o", "small.onnx", "--speedup", "90", "--frontier", "0.5"
    )
    assert shown.exit_code == 1
    verdict = shown.stdout.splitlines()[-1]
    assert verdict.startswith("not ready: speedup 90 is out of reach: ")
    assert " times as fast at the smallest size tried, 0.5 of the multiply-adds; " in verdict
    assert "try smaller sizes, --frontier " in verdict
    assert (folder / "small.onnx").exists()


def test_without_data_it_is_never_ready(folder: Path) -> None:
    shown = cli("reduce", "model.onnx", "-o", "small.onnx", *QUICK)
    assert shown.exit_code == 1
    assert "note: the data are random numbers: what is measured on them says nothing about real inputs" in shown.stdout
    assert shown.stdout.splitlines()[-1].endswith(
        "it was judged on random numbers; give --data of the kind that the model will see"
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--size", "2"), "recipe: --size 2.0 is not a fraction of the original\n  fix: give a number up to 1: --size 0.6\n"),
        (("--speedup", "0.5"), "recipe: --speedup 0.5 is not above 1\n  fix: give a larger number: --speedup\n"),
        (("--latency", "fast"), "recipe: --latency fast is not a time\n  fix: write --latency 5ms\n"),
        (
            ("--frontier", "0.5;0.4"),
            "recipe: --frontier 0.5;0.4 is not a list of shares\n  fix: write --frontier 0.8,0.6,0.4\n",
        ),
        (
            ("--frontier", "1.5"),
            "recipe: the sizes are not fractions of the model\n  fix: give numbers between 0 and 1: --frontier 0.8,0.6,0.4\n",
        ),
        (
            ("--held-out", "0"),
            "recipe: --held-out 0.0 is not a part of the data\n  fix: give --held-out 0.25, or other data\n",
        ),
        (
            ("--agreement", "0.999"),
            "certify: --agreement 0.999 needs at least 2995 held-out samples to be certified, but there are 150\n"
            "  fix: give more data, ask for --agreement 0.98, or accept the measured agreement: --measured\n",
        ),
        (
            ("--speedup", "2"),
            "recipe: a speed goal needs timing\n  fix: leave out --no-timed\n",
        ),
        (
            ("--answer", "probabilities"),
            "verify: the model has no output 'probabilities'\n  fix: give --answer one of logits\n",
        ),
    ],
)  # fmt: skip
def test_errors_speak_of_flags(folder: Path, options: tuple[str, ...], text: str) -> None:
    shown = cli("reduce", "model.onnx", "--data", "train.npz", "-o", "small.onnx", *QUICK, *options)
    assert shown.exit_code == 2
    assert shown.stderr.endswith(text), shown.stderr
    assert not (folder / "small.onnx").exists()


@pytest.mark.parametrize(("text", "milliseconds"), [("5ms", 5.0), ("5", 5.0), ("0.5 s", 500.0), ("300us", 0.3)])
def test_times_have_units(text: str, milliseconds: float) -> None:
    from cmrc.cli.reduce import as_milliseconds

    assert as_milliseconds(text) == pytest.approx(milliseconds)


def test_a_metric_and_a_loader_of_the_user(folder: Path) -> None:
    (folder / "mine.py").write_text(
        "import numpy as np\n"
        "def loader():\n"
        "    with np.load('train.npz') as arrays:\n"
        "        yield {'image': arrays['images'][:600], 'labels': arrays['labels'][:600]}\n"
        "def accuracy(outputs, labels):\n    return outputs.argmax(1) == labels\n"
    )
    shown = cli("reduce", "model.onnx", "--data", "mine.py:loader", "-o", "small.onnx", "--metric", "mine.py:accuracy",
                "--drop", "0.03", "--json", *QUICK)  # fmt: skip
    document = json.loads(shown.stdout)
    assert shown.exit_code == 0, document["verdict"]
    chosen = next(size for size in document["frontier"] if size["share"] == document["chosen"])
    assert chosen["quality"]["metric"] == chosen["quality"]["accuracy"]


def test_an_interrupted_run_continues(folder: Path) -> None:
    """Killed while it plans: what is done stays, and the result is that of a run without interruption."""
    call = ("reduce", "model.onnx", "--data", "train.npz", "--held-out", "test.npz", *QUICK)
    whole = cli(*call, "-o", "whole.onnx", "--json")
    process = subprocess.Popen(
        [sys.executable, "-m", "cmrc", *call, "-o", "small.onnx", "-q"], cwd=folder, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    while process.poll() is None and not (folder / "small.work" / "plan-macs-0.800.json").exists():
        pass
    process.kill()
    process.wait()
    again = cli(*call, "-o", "small.onnx", "--json")
    documents = [json.loads(shown.stdout) for shown in (whole, again)]
    assert "calibration done before" in again.stderr
    assert [document["frontier"] for document in documents] == [documents[0]["frontier"]] * 2
    assert (folder / "small.plan.json").read_bytes() == (folder / "whole.plan.json").read_bytes().replace(
        b"whole.", b"small."
    )


def test_a_model_without_layers_is_refused_with_the_reason(folder: Path) -> None:
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 8]) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Softmax", ["x"], ["y"], axis=1)], "g", [x], [y])
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9), "none.onnx"
    )
    shown = cli("reduce", "none.onnx", "-o", "small.onnx", "--no-timed")
    assert shown.exit_code == 2
    assert shown.stderr.endswith(
        "recipe: this model has no units to replace: no linear op and no convolution whose weights are stored in it\n"
        "  fix: give a model with layers of its own, not one that is quantised or only prepares its inputs\n"
    )


def test_a_provider_that_is_not_there_is_refused_before_the_work(folder: Path) -> None:
    shown = cli(
        "reduce", "model.onnx", "--data", "train.npz", "-o", "small.onnx", "--provider", "rocm", "--frontier", "0.8"
    )
    assert shown.exit_code == 2
    assert "host: onnxruntime has no provider 'rocm'\n  fix: use cpu, cuda, tensorrt, or a name" in shown.stderr
    assert "calibration" not in shown.stderr
