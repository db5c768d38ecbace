"""The command line as a process: Ctrl-C, closed pipes, and streams that lack characters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cmrc.cli.process import accept_every_character, spell_in_ascii

ROOT = Path(__file__).parent.parent.parent
DIGITS = ROOT / "examples" / "digits.onnx"
LONG = {
    "bench": ("bench", str(DIGITS), "--sessions", "100000"),
    "calibrate": ("calibrate", str(DIGITS), "--data", "data", "-o", "stats.safetensors", "--batch", "1"),
}


def start(*arguments: str, **options: object) -> subprocess.Popen[str]:
    call = [sys.executable, "-m", "cmrc", *arguments]
    return subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **{"text": True, **options})  # type: ignore[call-overload, no-any-return]


def interrupt(process: subprocess.Popen[str]) -> tuple[str, str, float]:
    """Ctrl-C: what it had to say, and the seconds until it ended."""
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    return out, err, time.monotonic() - begin


@pytest.mark.parametrize("wait", [0.8, 2.0, 4.0])
@pytest.mark.parametrize("command", LONG.values(), ids=list(LONG))
def test_ctrl_c_ends_with_one_line_and_leaves_nothing(tmp_path: Path, command: tuple[str, ...], wait: float) -> None:
    import numpy as np

    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data" / "x.npy", np.zeros((200_000, 1, 8, 8), np.float32))
    process = start(*command, cwd=tmp_path)
    time.sleep(wait)
    out, err, seconds = interrupt(process)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")
    assert seconds < 2  # one, and room for a busy machine
    assert os.listdir(tmp_path) == ["data"]


def test_ctrl_c_is_heard_while_the_main_thread_is_inside_a_library() -> None:
    """A signal handler runs when the call is over: in half a minute, here."""
    script = """
import hashlib
from cmrc.cli import process
with process.stoppable():
    print("begins", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000_000)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begins\n"
    time.sleep(0.2)
    _, err, seconds = interrupt(process)
    assert (process.returncode, err) == (130, "interrupted\n")
    assert seconds < 2


@pytest.mark.parametrize("options", [(), ("--ir",), ("--json",)])
def test_a_closed_pipe_is_quiet(options: tuple[str, ...]) -> None:
    process = start("inspect", str(DIGITS), "--no-folds", *options)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == ""
    assert process.wait(timeout=20) == -signal.SIGPIPE


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("plan", "make", "--help"), ("inspect", str(DIGITS)), ("inspect", "naïve‖.onnx"), ("nonsense",)],
    ids=" ".join,
)
def test_streams_that_lack_characters_get_a_spelling(encoding: str, arguments: tuple[str, ...]) -> None:
    process = start(*arguments, env={**os.environ, "PYTHONIOENCODING": encoding}, encoding=encoding)
    _, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    assert process.returncode == (2 if arguments[-1] in ("naïve‖.onnx", "nonsense") else 0)
    if arguments[-1] == "naïve‖.onnx":
        name = "naive||.onnx" if encoding == "ascii" else "naïve||.onnx"
        assert err.splitlines()[0] == f"trace: cannot read {name}: there is no such file"


def test_spellings() -> None:
    assert spell_in_ascii("‖W‖² ≤ ε, 3 → 2 … é") == "||W||^2 <= eps, 3 -> 2 ... e"
    assert spell_in_ascii("漢") == "?"


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", "E||Deltaz||^2"), ("cp1252", "E||Deltaz||²")])
def test_columns_stay_in_line_where_characters_are_spelled(encoding: str, shown: str) -> None:
    accept_every_character()
    lines = "E‖Δz‖²             1.0  é\nagreement          2.0\n"
    written = lines.encode(encoding, "cmrc.ascii").decode(encoding).splitlines()
    assert written[0].startswith(shown)
    assert written[0].index("1.0") == written[1].index("2.0")
