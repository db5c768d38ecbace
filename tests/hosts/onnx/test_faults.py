"""A save that is killed, or that fails, at every one of its file operations; and two that run at the same time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from hosts.onnx import faults
from hosts.onnx.faults import REMOVALS, listing
from hosts.onnx.lowering import model

from cmrc.hosts.onnx.host import OnnxHost


def write(path: Path, seed: int, *, external: bool) -> None:
    """A model of 50 times 80 numbers, as cmrc saves it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    weight = np.random.default_rng(seed).normal(size=(50, 80)).astype(np.float32)
    proto, plain = model("y = MatMul(x, w)", {"x": ("N", 50)}, "y", w=weight), path.with_name("plain.onnx")
    onnx.save(proto, plain, save_as_external_data=external, location="plain.onnx.data")
    OnnxHost.load(plain).save(path)
    for each in path.parent.glob("plain.*"):
        each.unlink()


@pytest.mark.parametrize("external", [False, True], ids=["one file", "external data"])
@pytest.mark.parametrize("how", ["kill", "fail"])
def test_the_old_model_or_the_new_one_is_there(tmp_path: Path, how: str, external: bool) -> None:
    write(tmp_path / "new" / "m.onnx", 1, external=external)
    write(tmp_path / "old" / "m.onnx", 2, external=external)
    (tmp_path / "out").mkdir()
    command = [sys.executable, faults.__file__, str(tmp_path), how]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert not done.returncode, done.stderr
    records = json.loads(done.stdout)
    assert len(records) > 15
    assert {tuple(record["which"]) for record in records} == {("old",), ("new",)}  # each, and nothing else
    assert records[-1]["ended"] == "saved"
    for record in records:
        assert record["ended"] in {"kill": ("saved", "killed"), "fail": ("saved", "refused")}[how], record
        if record["ended"] == "refused" and record["operation"] not in REMOVALS:
            assert record["files"] == listing(tmp_path / record["which"][0]), record
        assert record["then"] == listing(tmp_path / "new"), record
        assert record["well"], record


WRITER = """
import sys
from pathlib import Path
from cmrc.hosts.onnx.host import OnnxHost
host = OnnxHost.load(sys.argv[1])
for _ in range(12):
    host.save(Path(sys.argv[2]))
"""


def test_two_writers_at_once_never_mix(tmp_path: Path) -> None:
    for seed, name in ((1, "one"), (2, "two")):
        write(tmp_path / name / "m.onnx", seed, external=True)
    (tmp_path / "out").mkdir()
    target, x = tmp_path / "out" / "m.onnx", np.eye(50, dtype=np.float32)
    commands = [[sys.executable, "-c", WRITER, str(tmp_path / name / "m.onnx"), str(target)] for name in ("one", "two")]
    running = [subprocess.Popen(command) for command in commands]
    assert [process.wait(timeout=120) for process in running] == [0, 0]
    answers = {name: OnnxHost.load(tmp_path / name / "m.onnx").run([x])[0] for name in ("one", "two")}
    (which,) = [name for name, y in answers.items() if np.array_equal(y, OnnxHost.load(target).run([x])[0])]
    assert listing(tmp_path / "out") == listing(tmp_path / which)
