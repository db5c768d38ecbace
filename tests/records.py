"""Records of long runs, kept beside the tests that they belong to. `docs/reliability.md` is made of them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def save_record(record: Mapping[str, Any], path: Path | None) -> None:
    """Write a record as JSON, with the commit of the code; without a path there is none to keep."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**record, "commit": commit()}, indent=1) + "\n", encoding="utf-8")


def commit() -> str:
    """The commit that is checked out, and whether something was changed since; nothing where git does not know."""
    call = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
