"""The first thing that people see is true: the two commands of the README, its numbers, its links, and the example."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command import cli

import cmrc

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()


def commands() -> list[list[str]]:
    """The first block of the page, without its remarks."""
    block = re.search(r"\n((?:    .*\n)+)", README)
    assert block is not None
    return [shlex.split(line, comments=True)[1:] for line in block[1].splitlines()]


def test_the_two_commands_do_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.onnx").symlink_to(ROOT / "examples" / "digits.onnx")
    (tmp_path / "train.npz").symlink_to(ROOT / "examples" / "digits_train.npz")
    assert len(commands()) == 2
    for command in commands():
        shown = cli(*command)
        assert shown.exit_code == 0, shown.output
    test = np.load(ROOT / "examples" / "digits_test.npz")
    before, after = cmrc.trace("model.onnx"), cmrc.trace("small.onnx")
    scores = [(program.run([test["images"]])[0].argmax(1) == test["labels"]).mean() for program in (before, after)]
    shares = [getattr(after.cost(), name) / getattr(before.cost(), name) for name in ("parameters", "macs")]
    text = " ".join(README.split())
    assert f"leaves {shares[0]:.0%} of the parameters and {shares[1]:.0%}".replace("%", " %") in text
    assert f"goes from {scores[0]:.4f} to {scores[1]:.4f}" in text


def test_the_example_prints_the_same_numbers(tmp_path: Path) -> None:
    call = [sys.executable, "examples/digits.py", "--output", str(tmp_path / "small.onnx")]
    shown = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    numbers = re.search(r"test accuracy +(\S+) +(\S+)", shown)
    assert numbers is not None
    assert f"from {numbers[1]} to {numbers[2]}" in " ".join(README.split())
    assert "lowered and clamped are equal" in shown
    assert (tmp_path / "small.plan.json").exists()


def test_every_link_leads_somewhere() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)", README)
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]
