"""What is asked of an output before the work begins: that it can be written, and that nothing is lost by it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cmrc.errors import FileError
from cmrc.files import require_writable


def require_output(output: Path, what: str, suffix: str, *, reads: Iterable[Path | None], force: bool) -> None:
    """Refuse an output that cannot appear, that has the name of another kind of file, or that the command also reads."""
    if str(output) == "-":
        raise FileError(f"{what} is not written to standard output", fix=f"give the path of a file: -o out{suffix}")
    require_writable(output)
    if output.suffix.lower() != suffix:
        raise FileError(f"cannot write {output}: {what} has a name that ends in {suffix}", fix=f"-o {output}{suffix}")
    for path in reads:
        if not force and path is not None and output.exists() and path.exists() and output.samefile(path):
            raise FileError(
                f"cannot write {output}: it is an input, and would be lost",
                fix="write to another file, or overwrite it with --force",
            )
