"""Tests on a tree, each time in a fork of this process: what torch, onnx and pytest need is imported once."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "--tb=line",
           "-W", "ignore::pytest.PytestAssertRewriteWarning")  # fmt: skip
THIRD_PARTY = (
    "hypothesis", "hypothesis.extra.numpy", "matplotlib", "ml_dtypes", "networkx", "numpy", "onnx", "onnx.checker", "onnx.reference", "onnx_ir",
    "onnxruntime", "pydantic", "pytest", "rich.console", "safetensors.numpy", "scipy.linalg", "scipy.special", "scipy.stats",
    "torch", "torch.export", "torch.fx", "torch.onnx", "typer.testing", "yaml",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ran:
    """How a run of tests ended: the first test that failed, if one did."""

    passed: bool
    failed: str  # the test that noticed, or why nothing more can be said
    ran: int
    seconds: float
    in_time: bool = True  # a run that had to be ended proves nothing


class NothingRan(RuntimeError):
    """The arguments of pytest select no test: the row of the table is wrong."""


def preload() -> None:
    """Import what every run needs. Nothing of cmrc: that is what changes."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a fork has none of the threads of its parent
    for name in THIRD_PARTY:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def run_tests(root: Path, tests: Sequence[str], *, timeout: float, log: Path) -> Ran:
    """Run tests of the project at `root`. What takes longer than `timeout` seconds is ended."""
    start, report = time.monotonic(), log.with_suffix(".json")
    report.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        _child(root, tests, log, report)
    seconds = 0.0
    while True:
        finished, status = os.waitpid(child, os.WNOHANG)
        seconds = time.monotonic() - start
        if finished:
            break
        if seconds > timeout:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return Ran(False, f"still running after {timeout:.0f} s", 0, seconds, in_time=False)
        time.sleep(0.02)
    if not report.exists():
        return Ran(False, f"the process ended with status {os.waitstatus_to_exitcode(status)}", 0, seconds)
    document = json.loads(report.read_text(encoding="utf-8"))
    if document["code"] in (4, 5):
        raise NothingRan(f"pytest {' '.join(tests)} runs nothing: see {log}")
    return Ran(document["code"] == 0, document["failed"], document["ran"], seconds)


def _child(root: Path, tests: Sequence[str], log: Path, report: Path) -> None:
    """Never returns."""
    code = 70
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.chdir(root)
        sys.path[:] = [str(root), *(path for path in sys.path if path and not _is_project(path))]
        for name in [n for n in sys.modules if n.split(".")[0] in ("cmrc", "tests")]:
            del sys.modules[name]
        importlib.invalidate_caches()
        sys.dont_write_bytecode = True
        os.environ |= {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        import pytest

        seen = _Seen()
        code = int(pytest.main([*OPTIONS, *tests], plugins=[seen]))
        report.write_text(json.dumps({"code": code, "failed": seen.failed, "ran": seen.ran}), encoding="utf-8")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if 0 <= code < 128 else 70)


def _is_project(path: str) -> bool:
    return (Path(path) / "cmrc").is_dir() or (Path(path) / "conftest.py").is_file()


class _Seen:
    """A plugin of pytest that keeps the first failure."""

    def __init__(self) -> None:
        self.failed, self.ran = "", 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.ran += report.when == "call"
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = f"{report.nodeid} cannot be imported"
