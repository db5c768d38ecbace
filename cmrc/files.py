"""Files that appear whole or not at all.

A writer works in a staging folder of its own, `.cmrc-*`, beside the file to come. What is finished and on the disk is moved
into place by one rename. A staging folder is locked as long as its writer lives: one that a killed writer left is removed by
the next. Renames and removals happen under a lock of the folder, so that two writers never remove each other's files.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

import xxhash

try:
    import fcntl
except ImportError:  # Windows: without locks, what a killed writer leaves stays until somebody removes it
    fcntl = None  # type: ignore[assignment]

from cmrc.errors import FileError

PICTURES = (".png", ".svg", ".pdf")
MANY = 1 << 28  # bytes from which on two threads are worth their own memory
STAGING = ".cmrc-"


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
    """That a picture can appear there, and that matplotlib is there to draw it."""
    require_writable(path)
    if find_spec("matplotlib") is None:
        raise FileError(f"cannot draw {path}: matplotlib is not installed", fix="pip install 'cmrc[plot]'")
    if path.suffix.lower() not in PICTURES:
        raise FileError(f"cannot draw {path}", fix=f"give a path that ends in {', '.join(PICTURES)}")


def write_whole(path: Path, data: bytes) -> None:
    """Write to a staging folder, then rename: a failure leaves what was there before."""
    write_parts(path, data, [], lambda _: memoryview(b""))


def write_parts(path: Path, head: bytes, sizes: Sequence[int], part: Callable[[int], memoryview]) -> None:
    """The same, for what does not fit into memory: see `fill`."""
    require_writable(path)
    path = target(path)
    with writing(path), staging(path.parent) as folder:
        staged = folder / path.name
        fill(staged, sizes, part, head=head)
        publish(staged, path)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which appears as `path` when all is done; nothing appears after a failure."""
    require_new_folder(path)
    with writing(path), staging(path.parent) as place:
        filled = place / path.name
        filled.mkdir()
        yield filled
        for file in filled.iterdir():
            _sync(file)
        os.replace(filled, path)
        _sync(path.parent)


def require_new_folder(path: Path) -> None:
    """That a folder can appear there."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise FileError(f"cannot write {path}: it exists already", fix="give the name of a new folder")
    if not path.parent.is_dir():
        raise FileError(f"cannot write {path}: there is no folder {path.parent}", fix=f"mkdir -p {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise FileError(f"cannot write {path}: the folder {path.parent} is read-only", fix="write somewhere else")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Report what the system refuses as an error about `path`."""
    try:
        yield
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def staging(folder: Path) -> Iterator[Path]:
    """A new folder inside `folder` for files that are not finished yet; it is removed at the end, come what may."""
    with locked(folder):
        _remove_abandoned(folder)
        place = Path(tempfile.mkdtemp(dir=folder, prefix=STAGING))
        try:
            handle = _lock(place)
        except BaseException:
            place.rmdir()
            raise
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
        if handle is not None:
            os.close(handle)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other writers from renaming and removing files in this folder."""
    handle = _lock(folder)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def publish(staged: Path, path: Path) -> None:
    """Move a finished file into place: it is on the disk before it has its name."""
    if path.exists():
        shutil.copymode(path, staged)
    _sync(staged)
    os.replace(staged, path)
    _sync(path.parent)


def fill(path: Path, sizes: Sequence[int], part: Callable[[int], memoryview], *, head: bytes = b"") -> bytes:
    """Write a head and parts of known sizes, each computed when it is written; returns a digest of all of them.

    Of many bytes two threads compute and write a part each, so that one can wait for the disk: two parts are in memory at most.
    """
    offsets = list(accumulate(sizes, initial=len(head)))
    with path.open("wb") as file:
        file.write(head)
        file.truncate(offsets[-1])

    def write(index: int) -> bytes:
        data = part(index)
        with path.open("r+b") as file:
            file.seek(offsets[index])
            file.write(data)
        return xxhash.xxh3_128_digest(data)

    every = range(len(sizes))
    if sum(sizes) < MANY:
        digests = [write(index) for index in every]
    else:
        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(write, index) for index in every]
            try:
                digests = [future.result() for future in futures]
            finally:
                for future in futures:
                    future.cancel()
    return xxhash.xxh3_128_digest(head + b"".join(digests))


def is_mentioned(data: Path) -> bool:
    """Whether a file beside this one, which is not itself data, contains its name."""
    others = [file for file in data.parent.iterdir() if file.suffix not in (".data", ".safetensors") and file.is_file()]
    return any(_contains(file, data.name.encode()) for file in others)


def _contains(file: Path, name: bytes) -> bool:
    with file.open("rb") as content:
        if not os.fstat(content.fileno()).st_size:
            return False
        with mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return mapped.find(name) >= 0


def _sync(path: Path) -> None:
    if fcntl is None and path.is_dir():  # Windows has no handles of folders
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _lock(folder: Path, *, wait: bool = True) -> int | None:
    """The handle of a folder, locked until it is closed; `None` where there are no locks, or another has it."""
    if fcntl is None:
        return None
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another writer has it, or the file system knows no locks
        os.close(handle)
        return None
    except BaseException:
        os.close(handle)
        raise
    return handle


def _remove_abandoned(folder: Path) -> None:
    """Staging folders that nobody has locked: their writers were killed."""
    for place in [folder / name for name in os.listdir(folder) if name.startswith(STAGING)]:
        handle = None
        with contextlib.suppress(OSError):
            handle = _lock(place, wait=False)
        if handle is not None:
            shutil.rmtree(place, ignore_errors=True)
            os.close(handle)


def write_picture(figure: Any, path: Path) -> None:
    """A figure of matplotlib, in the format that the path's end says."""
    require_picture(path)
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix.lower().removeprefix("."))
    write_whole(path, drawn.getvalue())
