"""Hypothesis profiles, golden files (`--update-golden` writes them anew), and what is left out: `--quick`, no torch."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=100, suppress_health_check=SLOW_IS_FINE)
settings.register_profile("hunt", deadline=None, max_examples=3000, suppress_health_check=SLOW_IS_FINE)
settings.load_profile(os.environ.get("CMRC_HYPOTHESIS", "ci"))

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
# What `--quick` leaves out. The whole suite runs it all.
LONG = (
    "benchmarks/",
    "cli/test_process.py",
    "differential/",
    "docs/",
    "faults/",
    "fuzz/",
    "hosts/fx/test_checkpoint.py",
    "hosts/onnx/test_memory.py",
    "hosts/onnx/test_optimised.py",
    "integrations/",
    "loaders/",
    "mutation/test_machinery.py",
    "passes/test_properties.py",
    "passes/test_runtime.py",
    "planning/",
    "program/test_exported.py",
    "recovery/test_spread.py",
    "reduction/",
    "structures/",
    "verification/test_bounds.py",
    "verification/test_certificates.py",
    "verification/test_known_answers.py",
    "zoo/",
)
NEED_TORCH = {"torch", "transformers", "sklearn"}
WITHOUT_TORCH = find_spec("torch") is None


@cache
def needs_torch(path: Path) -> bool:
    """Whether a file imports torch as it is loaded, itself or through another file of the tests."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            shared = HERE / f"{name.replace('.', '/')}.py"
            if name.split(".")[0] in NEED_TORCH or (shared.exists() and shared != path and needs_torch(shared)):
                return True
    return False


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without torch only the ONNX path is tested: `bash .ci/core`."""
    if not WITHOUT_TORCH or collection_path in (HERE, Path(__file__)):
        return None
    path = collection_path / "conftest.py" if collection_path.is_dir() else collection_path
    return True if path.suffix == ".py" and path.exists() and needs_torch(path) else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help="leave out what takes long: whole models, many cases, training"
    )
    parser.addoption("--update-golden", action="store_true", help="write the golden files under tests/golden anew")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        long = [item for item in items if item.path.relative_to(HERE).as_posix().startswith(LONG)]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in set(long)]


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)`: the text is that of the file tests/golden/<name>.txt."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"there is no {path.name}: run pytest --update-golden, and read what it writes"
        assert text == path.read_text(encoding="utf-8")

    return check
