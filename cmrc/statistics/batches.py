"""Calibration data as batches: inputs by name, labels if there are any, and whatever else a batch holds.

    an iterable of arrays or tensors        one input
    an iterable of tuples                   the inputs in order, then the labels if there is one more
    an iterable of mappings                 inputs by name (a single one by any); `labels` or `label`; masks by their names
    a folder of .npy or .npz files, or one  the same, file by file, in pieces of `size` rows

A torch DataLoader is such an iterable. Nothing is read before it is needed. Files for a model of a fixed batch are read in pieces
of that size (`in_batches_of_model`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from cmrc.errors import InputError, StatsError
from cmrc.ir.graph import Array, Value
from cmrc.statistics.arrays import FILES, native, read_arrays

LABELS = ("labels", "label", "y")
SIZE = 256
FORMS = "give arrays, tuples (inputs..., labels), mappings by input name, or a folder of .npy or .npz files"


@dataclass(frozen=True, slots=True)
class Batch:
    """The model's inputs, the labels, and the rest of a mapping (such as a mask that the model does not read)."""

    inputs: dict[str, Any]
    labels: Array | None = None
    others: dict[str, Array] = field(default_factory=dict)

    def __len__(self) -> int:
        return int(next(iter(self.inputs.values())).shape[0])

    def mask(self, name: str) -> Array:
        for arrays in (self.others, self.inputs):
            if name in arrays:
                return as_array(arrays[name])
        names = ", ".join([*self.inputs, *self.others])
        raise StatsError(
            f"a batch has no mask {name!r} (its arrays are {names})", fix="add the mask to the data, or name another"
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
    """The batches of some data for a model with these inputs; shard (i, n) takes every n-th batch from the i-th on."""
    count = 0
    for count, item in enumerate(_items(data, size), 1):
        if (count - 1) % shard[1] == shard[0]:
            yield _batch(item, names)
    if not count:
        raise StatsError("there are no data to calibrate on", fix=FORMS)


def fixed_batch(inputs: Sequence[Value]) -> int | None:
    """The number of samples that a model takes at a time, if it is fixed."""
    first = {value.shape[0] for value in inputs if value.shape}
    fixed = {int(number) for number in first if isinstance(number, int)}
    return fixed.pop() if len(fixed) == 1 and len(first) == 1 else None


def in_batches_of_model(data: Any, inputs: Sequence[Value]) -> Any:
    """The same data; files for a model of a fixed batch in pieces of that size."""
    size = fixed_batch(inputs)
    return WholePieces(Path(data), size) if size is not None and isinstance(data, (str, Path)) else data


@dataclass(frozen=True, slots=True)
class WholePieces:
    """Files in pieces of exactly `size` rows, as often as they are asked for. What is left over at the end of a file is not run."""

    path: Path
    size: int

    @property
    def known_samples(self) -> int:
        return sum(_samples(read_arrays(file), file) // self.size * self.size for file in _files(self.path))

    def __iter__(self) -> Iterator[Any]:
        some = False
        for piece in _pieces_of_files(self.path, self.size):
            if len(piece if isinstance(piece, np.ndarray) else next(iter(piece.values()))) == self.size:
                some = True
                yield piece
        if not some:
            raise StatsError(
                f"the model takes {self.size} samples at a time, but no file has that many",
                fix=f"give at least {self.size} samples, or export the model with a dynamic batch",
            )


def length(data: Any) -> int | None:
    """How many batches there will be, if that is known."""
    return len(data) if hasattr(data, "__len__") and not isinstance(data, (str, Path, Mapping)) else None


@runtime_checkable
class Counted(Protocol):
    """Data that know how many samples they hold."""

    @property
    def known_samples(self) -> int: ...


def samples_of(data: Any, names: Sequence[str]) -> int | None:
    """How many samples there are in all, if that is known before they are read."""
    if isinstance(data, (str, Path)):
        return sum(_samples(read_arrays(file), file) for file in _files(Path(data)))
    if isinstance(data, (list, tuple)):
        return sum(len(_batch(item, names)) for item in data)
    if isinstance(data, Counted):
        return data.known_samples
    sampler = getattr(data, "sampler", None)  # of a DataLoader
    return len(sampler) if isinstance(sampler, Sized) else None


def _items(data: Any, size: int) -> Iterator[Any]:
    if isinstance(data, (str, Path)):
        yield from _pieces_of_files(Path(data), size)
    elif isinstance(data, Mapping) or hasattr(data, "shape"):
        raise StatsError("the data are one batch, not an iterable of batches", fix="give a list: [batch]")
    elif isinstance(data, Iterable):
        yield from data
    else:
        raise StatsError(f"cannot calibrate on data of type {type(data).__name__}", fix=FORMS)


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise InputError("there is no such file or folder", at=str(path), fix=FILES)
    files = [path] if path.is_file() else sorted(p for p in path.glob("*") if p.suffix in (".npy", ".npz"))
    if not files:
        raise InputError("the folder has no .npy or .npz files", at=str(path), fix=FILES)
    return files


def _pieces_of_files(path: Path, size: int) -> Iterator[Any]:
    for file in _files(path):
        arrays = read_arrays(file)
        for start in range(0, _samples(arrays, file), size):
            piece = slice(start, start + size)
            # A copy: an array that is mapped from the file is read-only, and torch warns about that.
            if isinstance(arrays, np.ndarray):
                yield np.array(arrays[piece])
            else:
                yield {name: array[piece] for name, array in arrays.items()}


def _samples(arrays: Array | dict[str, Array], file: Path) -> int:
    """The length of the first axis, which all arrays of a file must share."""
    named = {"array": arrays} if isinstance(arrays, np.ndarray) else arrays
    lengths = {array.shape[0] if array.ndim else -1 for array in named.values()}
    if len(lengths) != 1 or -1 in lengths:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in named.items())
        raise InputError(
            f"the arrays do not have one row per sample: {shapes or 'there is no array'}",
            at=str(file),
            fix="save arrays whose first axis counts the samples",
        )
    return lengths.pop()


def _batch(item: Any, names: Sequence[str]) -> Batch:
    if isinstance(item, Mapping):
        if len(names) == 1 and names[0] not in item and len(only := [key for key in item if key not in LABELS]) == 1:
            item = {names[0]: item[only[0]], **{key: item[key] for key in item if key in LABELS}}  # needs no name
        missing = [name for name in names if name not in item]
        if missing:
            raise StatsError(
                f"a batch has no {missing[0]!r} (it has {', '.join(map(str, item))})",
                fix=f"give every input of the model: {', '.join(names)}",
            )
        labels = next((native(as_array(item[key])) for key in LABELS if key in item and key not in names), None)
        others = {key: native(as_array(value)) for key, value in item.items() if key not in (*names, *LABELS)}
        return Batch({name: native(item[name]) for name in names}, labels, others)
    parts = [native(part) for part in item] if isinstance(item, (tuple, list)) else [native(item)]
    if len(parts) not in (len(names), len(names) + 1) or not all(hasattr(part, "shape") for part in parts):
        raise StatsError(
            f"a batch has {len(parts)} parts, but the model takes {len(names)}: {', '.join(names)}",
            fix="give the inputs in order, then the labels if there are any",
        )
    labels = as_array(parts[-1]) if len(parts) > len(names) else None
    return Batch(dict(zip(names, parts, strict=False)), labels)
