"""The first thing that people see is true: the command of the README, its numbers, its links, and the example.

`python docs/site/readme_table.py` writes the numbers anew.
"""

from __future__ import annotations

import re
import shlex
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


def test_the_command_does_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, called in (
        ("digits.onnx", "model.onnx"),
        ("digits_train.npz", "train.npz"),
        ("digits_test.npz", "test.npz"),
    ):
        (tmp_path / called).symlink_to(ROOT / "examples" / name)
    (command,) = commands()
    shown = cli(*command, "--no-timed")
    assert shown.exit_code == 0, shown.output
    text = " ".join(README.split())
    assert shown.stdout.splitlines()[-1] in text
    rows = [line.split() for line in shown.stdout.splitlines()[1:8]]
    for row in (row[1:] if row[0] == ">" else row for row in rows):
        assert " ".join(row[:2] + row[3:]) in text  # without the multiply-adds, which stand in front
    test = np.load("test.npz")
    before, after = cmrc.trace("model.onnx"), cmrc.trace("small.onnx")
    scores = [(program.run([test["images"]])[0].argmax(1) == test["labels"]).mean() for program in (before, after)]
    shares = [getattr(after.cost(), name) / getattr(before.cost(), name) for name in ("parameters", "macs")]
    assert f"leaves {shares[0]:.0%} of the parameters and {shares[1]:.0%}".replace("%", " %") in text
    assert f"goes from {scores[0]:.4f} to {scores[1]:.4f}" in text


def test_the_example_runs_the_command_of_the_page() -> None:
    script = (ROOT / "examples" / "run.sh").read_text()
    (command,) = commands()
    plain = " ".join(command)
    for name, called in (
        ("digits.onnx", "model.onnx"),
        ("digits_train", "train"),
        ("digits_test", "test"),
        ("out/small", "small"),
    ):
        plain = plain.replace(called, name)
    assert f'python -m cmrc {plain} "$@"' in script


def test_every_link_leads_somewhere() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)", README)
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]
