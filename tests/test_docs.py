"""Pages that are generated are up to date."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_table_of_ops_is_not_stale() -> None:
    spec = importlib.util.spec_from_file_location("ops_table", ROOT / "docs" / "ops_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "ops.md").read_text() == module.page(), "run: python docs/ops_table.py"
