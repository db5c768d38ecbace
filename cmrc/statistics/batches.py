"""Calibration data as batches: inputs by name, labels where there are any, and whatever else a batch holds.

    an iterable of arrays or tensors            one input
    an iterable of tuples                       the inputs in order, then the labels if there is one more
    an iterable of mappings                     inputs by name (a single one by any); `labels` or `label`; masks by their names
    a folder of .npy or .npz files, or one file the same, a file at a time, in pieces of `size`

A torch DataLoader is such an iterable. Nothing is read before it is needed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from cmrc.errors import InputError, StatsError
from cmrc.ir.graph import Array

LABELS = ("labels", "label", "y")
SIZE = 256
FILES = "give a .npy file (numpy.save), a .npz file (numpy.savez), or a folder of them"
FORMS = "give arrays, tuples (inputs..., labels), mappings by input name, or a folder of .npy or .npz files"


@dataclass(frozen=True, slots=True)
class Batch:
    """The model's inputs, the labels, and the rest of a mapping (a mask that is no input)."""

    inputs: dict[str, Any]
    labels: Array | None = None
    others: dict[str, Array] = field(default_factory=dict)

    def __len__(self) -> int:
        return int(next(iter(self.inputs.values())).shape[0])

    def mask(self, name: str) -> Array:
        for held in (self.others, self.inputs):
            if name in held:
                return as_array(held[name])
        raise StatsError(
            f"a batch has no mask {name!r}", fix=f"its arrays are {', '.join([*self.inputs, *self.others])}"
        )

    def arrays(self) -> list[Array]:
        labels = [] if self.labels is None else [self.labels]
        return [*map(as_array, self.inputs.values()), *labels]


def as_array(value: Any) -> Array:
    """A numpy array of what may be a torch tensor."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    return np.asarray(value)


def batches(data: Any, names: Sequence[str], *, size: int = SIZE, shard: tuple[int, int] = (0, 1)) -> Iterator[Batch]:
    """The batches of some data for a model with these inputs; of shard (i, n) every n-th from the i-th on."""
    count = 0
    for count, item in enumerate(_items(data, size), 1):
        if (count - 1) % shard[1] == shard[0]:
            yield _batch(item, names)
    if not count:
        raise StatsError("there is no data to calibrate on", fix=FORMS)


def length(data: Any) -> int | None:
    """How many batches there will be, where that is known."""
    return len(data) if hasattr(data, "__len__") and not isinstance(data, (str, Path, Mapping)) else None


def _items(data: Any, size: int) -> Iterator[Any]:
    if isinstance(data, (str, Path)):
        yield from _files(Path(data), size)
    elif isinstance(data, Mapping) or hasattr(data, "shape"):
        raise StatsError("the data are one batch, not an iterable of batches", fix="give a list: [batch]")
    elif isinstance(data, Iterable):
        yield from data
    else:
        raise StatsError(f"a {type(data).__name__} is no calibration data", fix=FORMS)


def read_arrays(path: Path) -> Array | dict[str, Array]:
    """The array of a .npy file, mapped from there; or those of a .npz file by their names."""
    try:
        if path.suffix == ".npy":
            return np.load(path, mmap_mode="r")  # type: ignore[no-any-return]
        with path.open("rb") as file:
            held = np.load(file)
            return held if isinstance(held, np.ndarray) else {name: held[name] for name in held.files}
    except (OSError, ValueError, EOFError, BadZipFile, zlib.error) as error:
        objects = any(word in str(error) for word in ("pickle", "Python objects"))
        told = "it is no file of arrays of numbers" if objects else getattr(error, "strerror", None) or error
        raise InputError(f"cannot be read: {told}", at=str(path), fix=FILES) from error


def _files(path: Path, size: int) -> Iterator[Any]:
    if not path.exists():
        raise InputError("there is no such file or folder", at=str(path), fix=FILES)
    files = [path] if path.is_file() else sorted(p for p in path.glob("*") if p.suffix in (".npy", ".npz"))
    if not files:
        raise InputError("holds no .npy or .npz files", at=str(path), fix=FILES)
    for file in files:
        arrays = read_arrays(file)
        held = {"it": arrays} if isinstance(arrays, np.ndarray) else arrays
        rows = {array.shape[0] if array.ndim else -1 for array in held.values()}
        if len(rows) != 1 or -1 in rows:
            told = ", ".join(f"{name} {list(array.shape)}" for name, array in held.items())
            raise InputError(
                f"does not hold a row for every sample: {told or 'no array'}",
                at=str(file),
                fix="save arrays that all have the samples as their first axis",
            )
        for start in range(0, rows.pop(), size):
            piece = slice(start, start + size)
            # a copy: what is mapped from the file may not be written to, which torch warns of
            yield (
                np.array(arrays[piece]) if isinstance(arrays, np.ndarray) else {n: a[piece] for n, a in arrays.items()}
            )


def _batch(item: Any, names: Sequence[str]) -> Batch:
    if isinstance(item, Mapping):
        if len(names) == 1 and names[0] not in item and len(only := [key for key in item if key not in LABELS]) == 1:
            item = {names[0]: item[only[0]], **{key: item[key] for key in item if key in LABELS}}  # needs no name
        missing = [name for name in names if name not in item]
        if missing:
            raise StatsError(
                f"a batch has no {missing[0]!r}",
                fix=f"the model's inputs are {', '.join(names)}; it has {', '.join(item)}",
            )
        labels = next((as_array(item[key]) for key in LABELS if key in item and key not in names), None)
        others = {key: as_array(value) for key, value in item.items() if key not in (*names, *LABELS)}
        return Batch({name: item[name] for name in names}, labels, others)
    parts = list(item) if isinstance(item, (tuple, list)) else [item]
    if len(parts) not in (len(names), len(names) + 1) or not all(hasattr(part, "shape") for part in parts):
        raise StatsError(
            f"a batch has {len(parts)} parts, the model takes {len(names)}: {', '.join(names)}",
            fix="give the inputs in order, then the labels if there are any",
        )
    labels = as_array(parts[-1]) if len(parts) > len(names) else None
    return Batch(dict(zip(names, parts, strict=False)), labels)
