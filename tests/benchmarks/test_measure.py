"""Where the benchmarks write: a real run its record, a quick run never among the records."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

import pytest

from benchmarks import measure, report
from benchmarks.section import Section, sections

TABLES = [each for modules in report.CHAPTERS.values() for each in sections(modules)]


class Parsed(Exception):
    """Raised in place of the measuring."""


def parsed(monkeypatch: pytest.MonkeyPatch, module: str, *given: str) -> argparse.Namespace:
    """What the command of a benchmark makes of its options."""
    parse = measure.Parser.parse_args

    def stop(self: measure.Parser, args: object = None, namespace: object = None) -> None:
        raise Parsed(parse(self, args, namespace))

    monkeypatch.setattr(measure.Parser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [module, *given])
    with pytest.raises(Parsed) as caught:
        importlib.import_module(f"benchmarks.{module}").main()
    return caught.value.args[0]


@pytest.mark.parametrize(("module", "section"), TABLES, ids=[section.record for _, section in TABLES])
def test_a_quick_run_leaves_every_record_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, section: Section
) -> None:
    with monkeypatch.context() as patch:
        quick = parsed(patch, module, *section.arguments, "--quick")
    assert quick.json.parent == measure.QUICK
    with monkeypatch.context() as patch:
        named = parsed(patch, module, *section.arguments, "--quick", "--json", str(tmp_path / "out.json"))
    assert named.json == tmp_path / "out.json"
    real = parsed(monkeypatch, module, *section.arguments)
    assert real.json == section.path()


def test_a_quick_run_is_refused_among_the_records(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(measure.ROOT)
    with pytest.raises(SystemExit):
        measure.parser("", "latency.json").parse_args(["--quick", "--json", "benchmarks/records/latency.json"])
    error = "error: a quick run is no record: give --json a place outside of benchmarks/records"
    assert capsys.readouterr().err.strip().endswith(error)


def test_a_record_and_its_parts_are_written_into_a_folder_that_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(measure, "QUICK", tmp_path / "quick")
    options = measure.parser("", "some_{part}.json")
    options.add_argument("part")
    parsed = options.parse_args(["one", "--quick"])
    assert parsed.json == tmp_path / "quick" / "some_one.json"
    resumed = measure.Resumed(parsed.json)
    assert [resumed("a", lambda: 1), measure.Resumed(parsed.json)("a", lambda: 2)] == [1, 1]
    measure.write_record(parsed.json, "some", [], parsed, number=resumed("a", lambda: 3))
    resumed.forget()
    assert [path.name for path in parsed.json.parent.iterdir()] == ["some_one.json"]
    assert (json.loads(parsed.json.read_text())["quick"], json.loads(parsed.json.read_text())["number"]) == (True, 1)
