"""The command line as a user calls it, with room enough that no cell wraps."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from cmrc.cli import app as command
from cmrc.cli import terminal

# click before 8.2 mixes the two streams unless it is asked not to; later ones cannot be asked.
APART: dict[str, Any] = {"mix_stderr": False} if "mix_stderr" in inspect.signature(CliRunner).parameters else {}


def cli(*arguments: str) -> Result:
    with pytest.MonkeyPatch.context() as patch:  # a console keeps the width that it was made with
        patch.setattr(terminal, "out", Console(width=200, soft_wrap=True, highlight=False, markup=False, emoji=False))
        return CliRunner(**APART).invoke(command.app, list(arguments))
