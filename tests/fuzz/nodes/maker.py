"""What a maker of random nodes is: it puts one op, or one small block of ops, into the model that a `Builder` grows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.fuzz.builder import Builder

Maker = Callable[[Builder], Any]
MICROSOFT = "com.microsoft"
