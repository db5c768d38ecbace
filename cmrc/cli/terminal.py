"""The terminal: the consoles, tables, progress, and how an error becomes an exit code."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from cmrc.cli.process import leave_if_interrupted
from cmrc.cli.wording import on_the_command_line
from cmrc.errors import CheckError, CmrcError, GrowthError, ResidueError, message

WIDE = 10_000  # characters per line in a file or a pipe, so that no name is cut
# Names come from files: `[/x]` and `:smile:` in a name are not markup.
out = Console(soft_wrap=True, highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else WIDE)
err = Console(stderr=True, highlight=False, markup=False, emoji=False, width=None if sys.stderr.isatty() else WIDE)
EVERY = 5.0  # seconds between progress lines in a pipe; shorter work prints none
verbose = False


def set_quiet(value: bool) -> bool:
    """-q: only errors, the exit code, and JSON if --json is given."""
    out.quiet = value
    return value


def set_verbose(value: bool) -> bool:
    """-v: also how long steps took, and where an error comes from."""
    global verbose
    verbose = value
    return value


@contextmanager
def reported(as_json: bool) -> Iterator[None]:
    """Turn a CmrcError into its text (or JSON) and exit code."""
    try:
        yield
    except CmrcError as error:
        leave_if_interrupted()
        parts = on_the_command_line(error)
        if as_json:
            print(json.dumps({"error": parts}, indent=1))
        else:
            err.print(message(**parts), soft_wrap=True)
        if verbose:
            traceback.print_exception(error)
        raise typer.Exit(1 if isinstance(error, (ResidueError, GrowthError, CheckError)) else 2) from error


def columns(*names: str) -> Table:
    """A table whose cells are wrapped if the window is narrow, and never cut."""
    table = Table(box=None, header_style="bold")
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = columns(*head)
    for row in rows:
        table.add_row(*row)
    out.print(table)


def fail(code: int) -> NoReturn:
    raise typer.Exit(code)


def progress(items: Iterable[Any], count: int | None, what: str = "calibrating") -> Iterable[Any]:
    """The items, with a progress bar in a terminal, and a line now and then if the output goes to a file."""
    if out.quiet:
        return items
    if err.is_terminal:
        return track(items, what, total=count, console=err, transient=True)
    return _with_lines(items, count, what)


def _with_lines(items: Iterable[Any], count: int | None, what: str) -> Iterator[Any]:
    begin = last = time.monotonic()
    for number, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - last >= EVERY and number != count:
            last = now
            left = f" of {count}, about {(now - begin) / number * (count - number):.0f} s left" if count else ""
            err.print(f"{what}: {number}{left}")


def shortened(text: str, width: int = 40) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def listed(names: Sequence[str], count: int) -> str:
    """The first few items of a list, and how many more there are."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more
