"""The file of statistics: safetensors with a JSON header, checked strictly before anything uses it.

    header   format, sites (columns, needs, counts), the model's fingerprint, the data's digest, the options
    arrays   "<number of the site>.<name>", float64, finite, in the shape that the columns say

A file may come from anywhere, so every key, type, shape and number is checked, and an error names the file and the fix.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open

from cmrc.errors import StatsError
from cmrc.files import write_parts
from cmrc.ir.graph import Array
from cmrc.program.plan_schema import ModelRecord
from cmrc.strict_json import parse_json

FORMAT = "cmrc-stats-1"
FIX = "give a file that `Stats.save` wrote, or calibrate again"

# The axes of every array: c columns of the site, r sampled rows, o units of the value that the next op's result is added to.
AXES = {
    **dict.fromkeys(("mean", "squares", "low", "high", "g", "h", "ga", "ha", "haa", "abs_ga", "origin"), "c"),
    **dict.fromkeys(("scatter", "H", "HA", "AHA", "cross"), "cc"),
    **dict.fromkeys(("rows", "row_g", "row_h"), "rc"),
    "hash": "r",
    "lost": "o",
    "lost_cross": "co",
}
# The arrays that each need brings with it; the others may be there or not.
BROUGHT = {
    "moments": ("mean", "squares"),
    "range": ("low", "high"),
    "scatter": ("scatter",),
    "curvature": ("g", "h", "ga", "ha", "haa", "abs_ga"),
    "coupling": ("H", "HA", "AHA"),
    "drift": ("origin", "cross"),
    "rows": ("rows", "hash"),
}
OPTIONAL = {"coupling": BROUGHT["curvature"], "drift": ("lost", "lost_cross"), "rows": ("row_g", "row_h")}

Count = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Size = Annotated[int, Field(ge=1, lt=2**31)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ColumnsHeader(_Strict):
    name: str
    value: str
    axis: Annotated[int, Field(ge=0, lt=64)]
    units: Size
    features: Size
    positions: str | int
    slots: Size


class SiteHeader(_Strict):
    columns: ColumnsHeader
    needs: list[Literal["moments", "range", "scatter", "curvature", "coupling", "drift", "rows"]]
    count: Count
    samples: Count
    how: str


class CalibrationProgress(_Strict):
    """Of a calibration that is not finished: see `checkpoint.py`."""

    asked: str
    batches: Annotated[int, Field(ge=0)]
    order: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]


class Header(_Strict):
    format: Literal["cmrc-stats-1"]
    sites: dict[str, SiteHeader]
    model: ModelRecord | None
    data: Annotated[str, Field(pattern=r"^0x[0-9a-f]{1,64}$")]
    samples: Annotated[int, Field(ge=0)]
    options: dict[str, Any]
    progress: CalibrationProgress | None = None


def write(path: Path, header: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """Write one file, completely or not at all, array by array."""
    table: dict[str, Any] = {"__metadata__": {"stats": json.dumps({"format": FORMAT, **header})}}
    names, end = sorted(arrays), 0
    for name in names:
        start, end = end, end + arrays[name].nbytes
        table[name] = {"dtype": "F64", "shape": arrays[name].shape, "data_offsets": [start, end]}
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text

    def part(index: int) -> memoryview:
        return np.ascontiguousarray(arrays[names[index]], "<f8").reshape(-1).view(np.uint8).data

    write_parts(path, head, [arrays[name].nbytes for name in names], part)


def read(path: Path, *, mapped: bool = False) -> tuple[Header, list[dict[str, Array]]]:
    """The header, and for every site its arrays by name: all checked, or a StatsError that says what is wrong.

    With `mapped` the arrays stay in the file, and cannot be written to.
    """
    metadata, arrays = _read_tensors(path, mapped)
    if "stats" not in metadata:
        raise StatsError("is not a file of statistics", at=str(path), fix=FIX)
    header = _parse_header(metadata["stats"], metadata.get("format"), path)
    by_site: list[dict[str, Array]] = [{} for _ in header.sites]
    for key, array in arrays.items():
        number, _, name = key.partition(".")
        if not number.isdecimal() or int(number) >= len(by_site) or name not in AXES:
            raise StatsError(f"the array {key!r} belongs to no site", at=str(path), fix=FIX)
        by_site[int(number)][name] = array
    for (site, entry), own in zip(header.sites.items(), by_site, strict=True):
        _check_site(site, entry, own, path)
    return header, by_site


def _read_tensors(path: Path, mapped: bool) -> tuple[dict[str, str], dict[str, Array]]:
    try:
        with safe_open(str(path), "np") as file:
            names = list(file.keys())
            for name in names:
                dtype = file.get_slice(name).get_dtype()
                if dtype != "F64":
                    raise StatsError(f"the array {name!r} has dtype {dtype}, not F64", at=str(path), fix=FIX)
            metadata: dict[str, str] = file.metadata() or {}
            return metadata, _in_file(path) if mapped else {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise StatsError(f"cannot be read: {error}", at=str(path), fix=FIX) from error


def _in_file(path: Path) -> dict[str, Array]:
    """The arrays of a sound file as maps of it, which count as no memory of the process."""
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    start = 8 + int.from_bytes(content[:8], "little")
    table = json.loads(content[8:start])
    del table["__metadata__"]
    return {
        name: np.frombuffer(content, "<f8", math.prod(entry["shape"]), start + entry["data_offsets"][0]).reshape(entry["shape"])
        for name, entry in table.items()
    }  # fmt: skip


def _parse_header(text: str, beside: str | None, path: Path) -> Header:
    """The header; the first files had the format beside it."""
    try:
        document = parse_json(text)
        if beside is not None and isinstance(document, dict):
            document.setdefault("format", beside)
        return Header.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise StatsError(f"the header is wrong at {where}: {first['msg']}", at=str(path), fix=FIX) from error
    except ValueError as error:
        raise StatsError(f"the header is not JSON: {error}", at=str(path), fix=FIX) from error


def _check_site(site: str, entry: SiteHeader, arrays: Mapping[str, Array], path: Path) -> None:
    """The arrays that were asked for, in their shapes, with numbers that sums over samples can have."""

    def refuse(reason: str) -> StatsError:
        return StatsError(reason, node=site, at=str(path), fix=FIX)

    columns, needs = entry.columns, {"moments", *entry.needs}
    if columns.features % columns.slots:
        raise refuse(f"{columns.features} features cannot be divided into {columns.slots} positions")
    if not entry.count and arrays:
        raise refuse(f"there are no rows, but there is an array {min(arrays)!r}")
    brought = {name for need in needs for name in BROUGHT[need]} if entry.count else set()
    for name in sorted(brought - set(arrays)):
        raise refuse(f"the array {name!r} is missing")
    known = brought | {name for need in needs for name in OPTIONAL.get(need, ())}
    for name in sorted(set(arrays) - known):
        raise refuse(f"there is an array {name!r}, which was not asked for")
    sizes = {"c": columns.units * columns.features}
    for name, array in sorted(arrays.items()):
        if array.ndim != len(AXES[name]):
            raise refuse(f"the array {name!r} has {array.ndim} axes, not {len(AXES[name])}")
        for axis, length in zip(AXES[name], array.shape, strict=True):
            if sizes.setdefault(axis, length) != length:
                raise refuse(f"the array {name!r} has shape {list(array.shape)}, not {_shape(name, sizes)}")
        if not np.isfinite(array).all():
            raise refuse(f"the array {name!r} holds NaN or infinity")
    if any((arrays[name] < 0).any() for name in ("squares", "abs_ga", "hash") if name in arrays):
        raise refuse("a sum of squares, or of absolute values, is negative")
    if "low" in arrays and (arrays["low"] > arrays["high"]).any():
        raise refuse("the smallest value of a column is above its largest")


def _shape(name: str, sizes: Mapping[str, int]) -> list[int | str]:
    return [sizes.get(axis, "?") for axis in AXES[name]]
