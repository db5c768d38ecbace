"""Pages that are generated are up to date."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_the_table_of_ops_is_not_stale() -> None:
    spec = importlib.util.spec_from_file_location("ops_table", ROOT / "docs" / "ops_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "ops.md").read_text() == module.page(), "run: python docs/ops_table.py"


def test_the_examples_of_the_page_on_verification_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "verification.md").read_text()
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), {})
    assert "2000 swaps at rate 0.5 on 360 inputs: act3 (88 of 128 units retained)" in capsys.readouterr().out


def test_the_page_of_results_and_its_pictures_are_not_stale() -> None:
    from PIL import Image

    from benchmarks import report, section

    told = "run: python -m benchmarks.report"
    assert (ROOT / "docs" / "results.md").read_text() == report.page(), told
    shown = set()
    for modules in report.CHAPTERS.values():
        for _, each in section.sections(modules):
            record = each.read()
            if record is not None and each.draw is not None:
                with Image.open(ROOT / "docs" / "pictures" / f"{each.record}.png") as picture:
                    assert picture.info["Record"] == section.fingerprint(record), told
                shown.add(f"{each.record}.png")
    assert {path.name for path in (ROOT / "docs" / "pictures").glob("*.png")} == shown


def test_every_record_is_shown_and_none_is_of_a_quick_run() -> None:
    from benchmarks import report, section
    from benchmarks.measure import RECORDS

    found = {each.path() for modules in report.CHAPTERS.values() for _, each in section.sections(modules)}
    records = {path for path in RECORDS.glob("*.json") if not path.name.endswith(".part.json")}
    assert records <= found
    assert not [path.name for path in records if json.loads(path.read_text())["quick"]]
