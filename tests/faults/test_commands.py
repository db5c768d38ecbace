"""Full disks, read-only folders, several writers at once, and Ctrl-C, for commands as processes of their own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest

import cmrc

ROOT = Path(__file__).parent.parent.parent
DIGITS, TEST = ROOT / "examples" / "digits.onnx", ROOT / "examples" / "digits_test.npz"
OUTPUTS = {
    "lower": (["lower", "model.onnx", "plan.json"], "small.onnx"),
    "external": (["lower", "external.onnx", "plan.json"], "small.onnx"),
    "calibrate": (["calibrate", "model.onnx", "--data", str(TEST), "--need", "scatter"], "stats.safetensors"),
    "plan": (["plan", "model.onnx", "--data", str(TEST), "--preset", "joint", "--keep", "0.5"], "plan.json"),
}
OWN_MOUNTS = bool(shutil.which("unshare")) and not subprocess.run(["unshare", "-rm", "true"], check=False).returncode


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model in both forms, two plans for it, and an `out` that holds an older output of every kind."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(DIGITS, "model.onnx")
    location = {"save_as_external_data": True, "location": "weights", "size_threshold": 0}
    onnx.save(onnx.load(DIGITS), "external.onnx", **location)
    program = cmrc.trace("model.onnx")
    for name, unit in (("plan.json", 0), ("other.json", 1)):
        cmrc.Plan(program).do("act3", units=[unit], constant=0.5).save(name)
    Path("out").mkdir()
    for _, name in OUTPUTS.values():
        Path("out", name).write_bytes(b"old")
    return tmp_path


def start(*arguments: str, before: str = "") -> subprocess.Popen[str]:
    """A command as a process of its own, in a shell that does something first."""
    call = ["bash", "-c", f'{before}\nexec "$@"', "bash", sys.executable, "-m", "cmrc", *arguments]
    if "mount" in before:
        call = ["unshare", "-rm", *call]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def code_of(process: subprocess.Popen[str]) -> int:
    process.communicate(timeout=240)
    return process.returncode


def files() -> dict[str, bytes]:
    return {path.name: path.read_bytes() if path.is_file() else b"" for path in sorted(Path("out").iterdir())}


@pytest.mark.parametrize("fault", ["no larger files", "full disk"])
@pytest.mark.parametrize("name", OUTPUTS)
def test_a_full_disk_is_one_message_and_leaves_the_old_output(folder: Path, name: str, fault: str) -> None:
    command, output = OUTPUTS[name]
    if fault == "no larger files":
        process = start(*command, "-o", f"out/{output}", before="ulimit -f 2")
        _, err = process.communicate(timeout=120)
        assert files() == {other: b"old" for _, other in sorted(OUTPUTS.values(), key=lambda pair: pair[1])}
        reason = "File too large"
    else:
        if not OWN_MOUNTS:
            pytest.skip("this system lets nobody mount a small disk")
        # The small disk is seen by this shell alone: what is on it afterwards is printed.
        script = f"""
            mount -t tmpfs -o size=16k tmpfs out && echo -n old > out/{output}
            {sys.executable} -m cmrc "$@" -o out/{output}
            code=$?
            ls -A out; cat out/{output}
            exit $code
        """
        call = ["unshare", "-rm", "bash", "-c", script, "bash", *command]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        out, err = process.communicate(timeout=120)
        assert out == f"{output}\nold"
        reason = "No space left on device"
    assert (process.returncode, err) == (2, f"file: cannot write out/{output}: {reason}\n")


def test_a_full_disk_behind_standard_output_is_one_message(folder: Path) -> None:
    for options in ((), ("--json",), ("--ir",)):
        with Path("/dev/full").open("w") as full:
            call = [sys.executable, "-m", "cmrc", "inspect", "model.onnx", "--no-folds", *options]
            ended = subprocess.run(call, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        said = "file: cannot write to standard output: No space left on device\n"
        assert (ended.returncode, ended.stderr) == (2, said)


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_read_only_folder_is_one_message_before_the_work(folder: Path, name: str) -> None:
    if os.geteuid() == 0 and not OWN_MOUNTS:
        pytest.skip("nothing is read-only for root here")
    Path("out").chmod(0o555)
    command, output = OUTPUTS[name]
    before = "mount --bind out out && mount -o remount,ro,bind out && cd ." if os.geteuid() == 0 else ""
    process = start(*command, "-o", f"out/{output}", before=before)
    _, err = process.communicate(timeout=120)
    Path("out").chmod(0o755)
    text = f"file: cannot write out/{output}: the folder out is read-only\n  fix: write somewhere else\n"
    assert (process.returncode, err) == (2, text)
    assert set(files().values()) == {b"old"}


PAIRS: dict[str, tuple[list[str], list[str], str]] = {
    "lower": (["lower", "model.onnx", "plan.json"], ["lower", "model.onnx", "other.json"], "small.onnx"),
    "external": (["lower", "external.onnx", "plan.json"], ["lower", "external.onnx", "other.json"], "small.onnx"),
    "plan": (
        ["plan", "model.onnx", "--data", str(TEST), "--preset", "joint", "--keep", "0.5"],
        ["plan", "model.onnx", "--data", str(TEST), "--preset", "joint", "--keep", "0.4"],
        "plan.json",
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_two_writers_at_once_leave_the_output_of_one(folder: Path, name: str) -> None:
    *commands, output = PAIRS[name]
    alone = []
    for command in commands:
        shutil.rmtree("out")
        Path("out").mkdir()
        assert code_of(start(*command, "-o", f"out/{output}")) == 0
        alone.append(files())
    assert alone[0] != alone[1]
    processes = [start(*command, "-o", f"out/{output}") for command in (*commands, *commands)]
    assert [code_of(process) for process in processes] == [0] * 4
    assert files() in alone


@pytest.mark.parametrize("name", ["plan", "verify"])
def test_ctrl_c_within_a_second(folder: Path, name: str) -> None:
    np.savez("long.npz", input=np.zeros((60_000, 1, 8, 8), np.float32), labels=np.zeros(60_000, np.int64))
    program = cmrc.trace("model.onnx")  # swaps at the first layer run almost the whole model: minutes of them
    cmrc.Plan(program).do("act1", units=[0], constant=0.5).save("early.json")
    command = {
        "plan": ["plan", "model.onnx", "--data", "long.npz", "--batch", "1", "-o", "out/plan.json"],
        "verify": ["verify", "model.onnx", "-", "early.json", "--data", "long.npz", "--swaps", "3000000"],
    }[name]
    before = files()
    process = start(*command)
    time.sleep(5)
    assert process.poll() is None
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "interrupted"
    assert time.monotonic() - begin < 2  # one, and room for a busy machine
    assert files() == before
