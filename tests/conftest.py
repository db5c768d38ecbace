"""Hypothesis profiles, and the flag that writes golden files anew."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=100, suppress_health_check=SLOW_IS_FINE)
settings.register_profile("hunt", deadline=None, max_examples=3000, suppress_health_check=SLOW_IS_FINE)
settings.load_profile(os.environ.get("CMRC_HYPOTHESIS", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files under tests/golden anew")
