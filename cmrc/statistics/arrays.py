"""Arrays from untrusted .npy and .npz files: nothing is executed, and memory is bounded.

An array is read only after its header: the dtype must be a number's, and its bytes must be there. A .npz file may expand to
`EXPANDS` times its size, or to `ALWAYS` bytes if that is more; a file that would need more is refused before it is read.
"""

from __future__ import annotations

import math
import warnings
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from cmrc.errors import InputError
from cmrc.ir.graph import Array

FILES = "give a .npy file (numpy.save), a .npz file (numpy.savez), or a folder of them"
EXPANDS = 100
ALWAYS = 2**30
HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def read_arrays(path: Path) -> Array | dict[str, Array]:
    """The array of a .npy file, mapped into memory; or those of a .npz file by their names. In native byte order."""
    try:
        with warnings.catch_warnings(), path.open("rb") as file:
            warnings.simplefilter("ignore")  # numpy warns about headers from Python 2, which it reads all the same
            if zipfile.is_zipfile(file):
                return _read_zip(file, path)
            file.seek(0)
            _require_numbers(_header(file)[1], "array", path)
            return native(np.load(path, mmap_mode="r", allow_pickle=False))  # type: ignore[no-any-return]
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", at=str(path), fix=FILES) from error
    except Exception as error:  # numpy and zipfile document no list of what a broken file may raise
        reason = str(error) or type(error).__name__
        raise InputError(f"is not a file of arrays: {reason}", at=str(path), fix=FILES) from error


def native(array: Any) -> Any:
    """The same numbers in the byte order of this machine: runtimes read the bytes as they are."""
    if isinstance(array, np.ndarray) and not array.dtype.isnative:
        return array.astype(array.dtype.newbyteorder("="))
    return array


def _read_zip(file: IO[bytes], path: Path) -> dict[str, Array]:
    arrays = {}
    with zipfile.ZipFile(file) as archive:
        members = [member for member in archive.infolist() if not member.is_dir()]
        expanded, allowed = sum(member.file_size for member in members), _allowed(path)
        if expanded > allowed:
            raise InputError(
                f"expands to {expanded:,} bytes, and {allowed:,} are allowed for a file of this size",
                at=str(path),
                fix="save it with numpy.savez (not compressed), or as several files in a folder",
            )
        for member in members:
            name = member.filename.removesuffix(".npy")
            with archive.open(member) as part:
                shape, dtype = _header(part)
                _require_numbers(dtype, name, path)
                if math.prod(shape) * dtype.itemsize != member.file_size - part.tell():
                    raise InputError(f"the array {name!r} is cut short", at=str(path), fix="copy or save it again")
            with archive.open(member) as part:
                arrays[name] = native(npy.read_array(part, allow_pickle=False))
    return arrays


def _allowed(path: Path) -> int:
    return max(ALWAYS, EXPANDS * path.stat().st_size)


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of the array that begins here."""
    start = file.read(len(npy.MAGIC_PREFIX) + 2)
    if start.startswith(b"PK"):
        raise ValueError("a .npz file that is cut short")
    if not start.startswith(npy.MAGIC_PREFIX) or len(start) < len(npy.MAGIC_PREFIX) + 2:
        raise ValueError("it does not begin as a .npy file does")
    version = (start[-2], start[-1])
    if version not in HEADERS:
        # 3.0 differs from 2.0 by the encoding of field names, and arrays of numbers have none.
        raise ValueError(f"version {version} of the .npy format is for structured arrays")
    shape, _, dtype = HEADERS[version](file)
    if any(size < 0 for size in shape):
        raise ValueError(f"the shape {list(shape)} is negative")
    return shape, dtype


def _require_numbers(dtype: np.dtype[Any], name: str, path: Path) -> None:
    if dtype.kind not in "biuf":
        what = "Python objects" if dtype.hasobject else f"{dtype}"
        raise InputError(
            f"the array {name!r} holds {what}, not numbers", at=str(path), fix="save numbers: numpy.save(path, array)"
        )
