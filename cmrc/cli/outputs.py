"""Files that a command writes and reads: checks of the outputs before the work begins, and `-` for the standard streams."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from cmrc.cli import terminal
from cmrc.errors import FileError
from cmrc.files import require_writable

STREAM = "-"


def require_output(output: Path, what: str, suffix: str, *, reads: Iterable[Path | None], force: bool) -> None:
    """Refuse an output that cannot be written, whose name is of another kind of file, or that the command also reads."""
    if str(output) == STREAM:
        raise FileError(f"{what} is not written to standard output", fix=f"give the path of a file: -o out{suffix}")
    require_writable(output)
    if output.suffix.lower() != suffix:
        raise FileError(f"cannot write {output}: {what} has a name that ends in {suffix}", fix=f"-o {output}{suffix}")
    for path in reads:
        if not force and path is not None and output.exists() and path.exists() and output.samefile(path):
            raise FileError(
                f"cannot write {output}: it is an input and would be lost",
                fix="write to another file, or overwrite it with --force",
            )


@contextmanager
def writable(
    output: Path, what: str, suffix: str, *, reads: Iterable[Path | None], force: bool, as_json: bool
) -> Iterator[Path]:
    """Where to write. `-` is a temporary file that is copied to standard output at the end; messages go to standard error."""
    if str(output) != STREAM:
        require_output(output, what, suffix, reads=reads, force=force)
        yield output
        return
    if as_json:
        raise FileError(
            f"{what} and --json cannot both go to standard output", fix=f"-o out{suffix}, or without --json"
        )
    if sys.stdout.isatty():
        raise FileError(f"{what} is not written to a terminal", fix=f"-o out{suffix}, or a pipe behind -o -")
    shown = terminal.out
    with tempfile.TemporaryDirectory(prefix="cmrc-") as folder:
        path = Path(folder) / f"stdout{suffix}"
        terminal.out = shown if shown.quiet else terminal.err
        try:
            yield path
        finally:
            terminal.out = shown
        if len(list(Path(folder).iterdir())) > 1:
            raise FileError(
                f"{what} of this size has a second file beside it", fix=f"give the path of a file: -o out{suffix}"
            )
        sys.stdout.buffer.write(path.read_bytes())
        sys.stdout.buffer.flush()


_received: list[tempfile.TemporaryDirectory[str]] = []  # removed as the process ends


def readable(suffix: str) -> Callable[[Path | None], Path | None]:
    """The callback of an argument: `-` is standard input, stored in a temporary file."""

    def receive(path: Path | None) -> Path | None:
        if path is None or str(path) != STREAM:
            return path
        data = sys.stdin.buffer.read()
        if not data:
            raise typer.BadParameter("nothing came from standard input; `-` can be given once")
        _received.append(tempfile.TemporaryDirectory(prefix="cmrc-"))
        received = Path(_received[-1].name) / f"stdin{suffix}"
        received.write_bytes(data)
        return received

    return receive
