"""Records of long runs, kept beside the tests that they belong to. `docs/reliability.md` is made of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def save_record(record: Mapping[str, Any], path: Path | None) -> None:
    """Write a record as JSON; without a path there is none to keep."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
