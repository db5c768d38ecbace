"""A few commands that are killed at random moments; `python -m tests.faults` kills hundreds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import kills

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("name", ["lower, external data", "calibrate", "plan"])
def test_the_old_output_or_the_new_one_and_the_next_run_gives_the_new_one(name: str) -> None:
    """In a process of its own, because it forks."""
    call = [sys.executable, "-m", "tests.faults", "--kills", "2", "--only", name]
    ended = subprocess.run(call, capture_output=True, text=True, check=False, cwd=ROOT, timeout=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    row = json.loads(ended.stdout)["commands"][name]
    assert (row["kills"], row["wrong"]) == (2, [])


def test_a_wrong_output_would_be_noticed(tmp_path: Path) -> None:
    old, new = {"a": b"old", "b": b"old"}, {"a": b"new"}
    after = {"a": b"old"}  # and not b
    assert not kills.has(after, old)
    assert not kills.has(after, new)
    assert kills.has({**new, "left": b""}, new)
    assert not kills.LEFT.fullmatch("a.tmp")
