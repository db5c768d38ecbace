"""Files that appear whole or not at all."""

from __future__ import annotations

import io
import os
import tempfile
from pathlib import Path
from typing import Any

from cmrc.errors import FileError

PICTURES = (".png", ".svg", ".pdf")


def target(path: Path) -> Path:
    """Where a file that is written to `path` appears: a symlink stays, and what it points to is replaced."""
    return path.resolve() if path.is_symlink() else path


def require_writable(path: Path) -> None:
    """That a file can appear there: asked before the work that would be lost."""
    path = target(path)
    if path.is_dir():
        raise FileError(f"cannot write {path}: it is a folder", fix="give the path of a file")
    if path.exists() and not path.is_file():
        raise FileError(f"cannot write {path}: it is a device or a pipe", fix="give the path of a file")
    if not path.parent.is_dir():
        raise FileError(f"cannot write {path}: there is no folder {path.parent}", fix=f"mkdir -p {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise FileError(f"cannot write {path}: the folder {path.parent} is read-only", fix="write somewhere else")


def require_picture(path: Path) -> None:
    """That a picture can appear there."""
    require_writable(path)
    if path.suffix.lower() not in PICTURES:
        raise FileError(f"cannot draw {path}", fix=f"give a path that ends in {', '.join(PICTURES)}")


def write_whole(path: Path, data: bytes) -> None:
    """Write to a temporary file in the same folder, then rename: a failure leaves what was there before."""
    require_writable(path)
    path = target(path)
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            Path(temporary).chmod(0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror or error}") from error


def write_picture(figure: Any, path: Path) -> None:
    """A figure of matplotlib, in the format that the path's end says."""
    require_picture(path)
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix.lower().removeprefix("."))
    write_whole(path, drawn.getvalue())
