"""docs/reliability.md is what the records say, and names tests that exist."""

from __future__ import annotations

from tests import reliability


def test_the_page_is_that_of_the_records() -> None:
    text = reliability.PAGE.read_text(encoding="utf-8")
    assert text == reliability.page(), "run python -m tests.reliability"


def test_every_promise_names_tests_that_exist() -> None:
    for promise, paths in reliability.PROMISES:
        assert paths, promise
        assert all((reliability.TESTS / path).is_file() for path in paths), promise
