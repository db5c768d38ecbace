"""`cmrc demo`: the story runs with the files of the package, and its commands are the real ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import cli

from cmrc.cli import demo


def test_the_story_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quick = [
        (why, f"{c} --frontier 0.7,0.5 --no-timed --no-refit" if c.startswith("reduce") else c) for why, c in demo.STORY
    ]
    monkeypatch.setattr(demo, "STORY", tuple(quick))
    shown = cli("demo", "here")
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.count("$ cmrc ") == len(demo.STORY)
    for said in ("9 fold", "ready: ", "lowered and clamped are equal", "agreement with the original", "IIA is at least",
                 "this is that model, lowered by that plan"):  # fmt: skip
        assert said in shown.stdout
    assert Path.cwd() == tmp_path
    assert {"model.onnx", "small.onnx", "small.plan.json"} <= {path.name for path in (tmp_path / "here").iterdir()}


def test_it_stops_where_a_step_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "STORY", (("a", "inspect nothing.onnx"), ("b", "inspect model.onnx")))
    shown = cli("demo", str(tmp_path / "here"))
    assert shown.exit_code == 2
    assert shown.stdout.count("$ cmrc ") == 1


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    shown = cli("demo", str(tmp_path / "file"))
    assert shown.exit_code == 2
    assert "fix: name another folder" in shown.stderr
