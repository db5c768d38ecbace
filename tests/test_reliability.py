"""docs/reliability.md is what the records say, and names tests that exist."""

from __future__ import annotations

import json

from tests import reliability


def test_the_page_is_that_of_the_records() -> None:
    text = reliability.PAGE.read_text(encoding="utf-8")
    assert text == reliability.page(), "run python -m tests.reliability"


def test_every_promise_names_tests_that_exist() -> None:
    for promise, paths in reliability.PROMISES:
        assert paths, promise
        assert all((reliability.TESTS / path).is_file() for path in paths), promise


def test_every_record_names_its_commit_and_its_command() -> None:
    folders = ("fuzz/records", "faults/records", "loaders/records", "numerics", "supply")
    paths = [path for folder in folders for path in (reliability.TESTS / folder).glob("*.json")]
    assert len(paths) > 10
    for path in paths:
        record = json.loads(path.read_text(encoding="utf-8"))
        assert record["commit"], path
        assert record["command"].startswith("python -m tests."), path
