"""The terminal: the consoles, tables, progress, and how an error becomes an exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from cmrc.cli.wording import on_the_command_line
from cmrc.errors import CheckError, CmrcError, ResidueError, message

WIDE = 10_000  # characters of a line in a file or a pipe, where nobody's window cuts a name
out = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else WIDE)
err = Console(stderr=True, highlight=False)


@contextmanager
def reported(as_json: bool) -> Iterator[None]:
    """Turn a CmrcError into its text (or JSON) and exit code."""
    try:
        yield
    except CmrcError as error:
        parts = on_the_command_line(error)
        if as_json:
            print(json.dumps({"error": parts}, indent=1))
        else:
            err.print(message(**parts), markup=False, soft_wrap=True)
        raise typer.Exit(1 if isinstance(error, (ResidueError, CheckError)) else 2) from error


def columns(*names: str) -> Table:
    """A table whose cells are folded where the window is narrow, and never cut."""
    made = Table(box=None, header_style="bold")
    for name in names:
        made.add_column(name, overflow="fold")
    return made


def fail(code: int) -> NoReturn:
    raise typer.Exit(code)


def bar(found: Iterable[Any], count: int | None, what: str = "calibrating") -> Iterable[Any]:
    """A progress bar, where somebody watches."""
    return track(found, what, total=count, console=err, transient=True, disable=not err.is_terminal)


def shortened(text: str, width: int = 40) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def listed(names: Sequence[str], count: int) -> str:
    """The first few of a list, and how many more there are."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more
