"""Hypothesis profiles, and golden files: text that a test compares and `--update-golden` writes anew."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=100, suppress_health_check=SLOW_IS_FINE)
settings.register_profile("hunt", deadline=None, max_examples=3000, suppress_health_check=SLOW_IS_FINE)
settings.load_profile(os.environ.get("CMRC_HYPOTHESIS", "ci"))

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files under tests/golden anew")


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
