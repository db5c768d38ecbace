"""A plugin of pytest that writes down which test executes which line of the project, and how long each test takes.

python -m pytest -p tests.mutation.lines --lines lines.json tests/passes tests/ir
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from tests.mutation.mutant import ROOT, SOURCES

Watched = dict[CodeType, tuple[str, set[int]] | None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lines", type=Path, required=True, help="the file to write")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Lines(config.getoption("--lines")), "lines of tests")


class Lines:
    """For every module and line the tests that execute it, by their numbers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tests: list[dict[str, Any]] = []
        self.by_line: dict[str, dict[int, list[int]]] = {}
        self.codes: Watched = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        for watched in self.codes.values():
            if watched is not None:
                watched[1].clear()
        start = time.perf_counter()
        sys.settrace(self._enter)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            number = len(self.tests)
            self.tests.append({"test": item.nodeid, "seconds": round(time.perf_counter() - start, 4)})
            for watched in self.codes.values():
                if watched is not None:
                    for line in watched[1]:
                        self.by_line.setdefault(watched[0], {}).setdefault(line, []).append(number)

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps({"tests": self.tests, "lines": self.by_line}), encoding="utf-8")

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code not in self.codes:
            path = os.path.realpath(code.co_filename)
            inside = path.startswith(tuple(f"{ROOT / folder}/" for folder in SOURCES))
            self.codes[code] = (os.path.relpath(path, ROOT), set()) if inside else None
        watched = self.codes[code]
        if watched is None:
            return None
        lines = watched[1]
        lines.add(frame.f_lineno)

        def step(frame: FrameType, event: str, argument: Any) -> Any:
            lines.add(frame.f_lineno)
            return step

        return step
