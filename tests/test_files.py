"""Files that appear whole or not at all: what happens in which order, and what others are writing at the same time."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from cmrc import Plan
from cmrc.files import STAGING, staging, write_whole
from cmrc.ir.graph import Do


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real operations, watched: the content is synced under another name, then renamed, then the folder is synced."""
    steps: list[str] = []
    sync, replace = os.fsync, os.replace

    def watched_sync(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        steps.append(f"sync {'folder' if path.is_dir() else path.read_text()}")
        sync(handle)

    def watched_replace(old: Path, new: Path) -> None:
        assert STAGING in str(old)
        steps.append(f"rename to {new.name} while {sorted(p.name for p in tmp_path.iterdir() if p.is_file())}")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(os, "replace", watched_replace)
    write_whole(tmp_path / "file.txt", b"content")
    assert steps == ["sync content", "rename to file.txt while []", "sync folder"]
    assert (tmp_path / "file.txt").read_bytes() == b"content"


def test_what_others_are_writing_stays_and_what_the_dead_left_goes(tmp_path: Path) -> None:
    left = tmp_path / f"{STAGING}left"
    left.mkdir()
    (left / "half").write_text("written")
    with staging(tmp_path) as mine:
        (mine / "part").write_text("mine")
        assert not left.exists()
        write_whole(tmp_path / "other.txt", b"other")
        assert (mine / "part").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["other.txt"]


def test_the_arrays_of_a_plan_are_there_before_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[str] = []
    replace = os.replace

    def watched(old: Path, new: Path) -> None:
        published.append(new.suffix)
        replace(old, new)

    monkeypatch.setattr(os, "replace", watched)
    entry = Do("act", "act", 1, tuple(range(300)), np.arange(300.0))
    Plan(None, [entry]).save(tmp_path / "plan.json")
    assert published == [".safetensors", ".json"]
    assert Plan.load(tmp_path / "plan.json").entries[0].constant.tolist() == entry.constant.tolist()
