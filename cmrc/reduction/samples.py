"""Data of any kind as rows: arrays by input name, labels if there are any; read when they are asked for.

    a .npy or .npz file, or a folder of them     names need not match where shapes say which array is which input
    a folder of pictures                         resized and normalised (images.py)
    a folder of audio files                      one channel at the model's rate, in windows (sounds.py)
    .txt, .jsonl, a folder of .txt               tokens, by the model's tokenizer (texts.py)
    script.py:loader                             a function, or a thing to iterate over, that gives batches
    an iterable of batches                       as for `cmrc.calibrate`
    nothing                                      random numbers, which say nothing about the model's real work

`Samples.split` parts the rows by a seed; `Rows` gives some of them batch by batch, as often as they are asked for.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cmrc.errors import InputError
from cmrc.hosts.inputs import random_inputs
from cmrc.ir.graph import Array, Value, numpy_dtype
from cmrc.reduction.file_reader import FileReader
from cmrc.reduction.images import Pictures, is_picture_folder, picture_reader
from cmrc.reduction.sounds import Sounds, is_sound_folder, sound_reader
from cmrc.reduction.texts import Texts, is_text, read_texts
from cmrc.statistics.arrays import read_arrays
from cmrc.statistics.batches import LABELS, SIZE, as_array, batches, fixed_batch

LIMIT = 2048  # rows, unless more are asked for or cost little
MOST = 8192  # rows of a model that is light
WORK = 10**11  # multiply-adds of one pass over more than `LIMIT` rows: seconds
RANDOM = 256  # random rows
HELD = (
    2**30
)  # bytes of pictures and sounds that stay in memory once they are read: every layer is fitted by a pass over the rows
KINDS = "give a .npy or .npz file, a folder of them, of pictures or of audio files, texts (.txt, .jsonl), or script.py:loader"
Take = Callable[[Array], dict[str, Array]]


def affordable_rows(inputs: Sequence[Value], macs: int) -> int:
    """How many rows are used if nobody says: the more the better the fits, as long as a pass over them takes seconds."""
    sizes = [size for value in inputs for size in value.shape[1:]]
    if not all(isinstance(size, int) for size in sizes):
        return LIMIT  # what a row costs is not known yet
    return min(MOST, max(LIMIT, WORK // max(macs, 1)))


@dataclass(frozen=True, slots=True)
class Samples:
    """So many rows of some data, what they are, and remarks about how they were read."""

    inputs: tuple[Value, ...]
    count: int
    take: Take  # rows by number: the inputs by name, and `labels` if there are any
    what: str
    remarks: tuple[str, ...] = ()
    is_random: bool = False
    mask: str | None = None  # the input that tells real tokens from padding

    def __len__(self) -> int:
        return self.count

    def finite(self, numbers: Array) -> dict[str, Array]:
        """Rows by number. What is NaN or infinite is named by its place in the user's data."""
        rows = self.take(numbers)
        for value in self.inputs:
            array = rows[value.name]
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                row = int(np.argwhere(~np.isfinite(array))[0][0])
                raise InputError(
                    f"sample {numbers[row]} has a NaN or infinite number in input {value.name!r}",
                    at=self.what,
                    fix="leave out samples that are not finite",
                )
        return rows

    def split(self, share: float, seed: int, limit: int | None) -> tuple[Rows, Rows]:
        """Calibration rows and held-out rows, at random; of at most `limit` rows."""
        order = np.random.default_rng(seed).permutation(self.count)[:limit]
        apart = round(share * len(order))
        if not 0 < apart < len(order):
            raise InputError(
                f"{len(order)} samples cannot be split into calibration and held-out data",
                fix="give more data=, or held-out data: held_out=",
            )
        return Rows(self, np.sort(order[apart:])), Rows(self, np.sort(order[:apart]))

    def all(self, seed: int, limit: int | None) -> Rows:
        order = np.random.default_rng(seed).permutation(self.count)[:limit]
        return Rows(self, np.sort(order))


class Span(NamedTuple):
    """The columns of a batch that hold tokens, of so many."""

    begin: int
    end: int
    whole: int


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Some rows of the samples, in batches of `size`, or of the size that the model takes."""

    samples: Samples
    numbers: Array
    size: int | None = None
    is_trimmed: bool = False  # each batch of texts ends with its longest: what only pads is not run

    def __len__(self) -> int:
        return -(-len(self._numbers()) // self.batch)

    @property
    def known_samples(self) -> int:
        return len(self._numbers())

    def __iter__(self) -> Iterator[dict[str, Array]]:
        mask = self.samples.mask if self.is_trimmed else None
        return (rows if mask is None else without_padding(rows, mask)[1] for rows in self._whole())

    def with_spans(self) -> Iterator[tuple[Span, dict[str, Array]]]:
        """Trimmed batches, each with the tokens that it holds of how many."""
        assert self.samples.mask is not None
        return (without_padding(rows, self.samples.mask) for rows in self._whole())

    def _whole(self) -> Iterator[dict[str, Array]]:
        numbers = self._numbers()
        for start in range(0, len(numbers), self.batch):
            yield self.samples.finite(numbers[start : start + self.batch])

    def trimmed(self) -> Rows:
        """Batches of texts of about the same length. The first one stays as it is drawn: units and sizes are judged by it."""
        assert self.samples.mask is not None
        first, rest = self.numbers[: self.batch], self.numbers[self.batch :]
        if len(rest):
            lengths = self.samples.take(rest)[self.samples.mask].sum(axis=1)
            rest = rest[np.argsort(lengths, kind="stable")]
        return replace(self, numbers=np.concatenate([first, rest]), is_trimmed=True)

    @property
    def batch(self) -> int:
        return self.fixed or self.size or SIZE

    @property
    def fixed(self) -> int | None:
        return fixed_batch(self.samples.inputs)

    def all(self) -> dict[str, Array]:
        """Every row at once."""
        return self.samples.finite(self.numbers)

    def _numbers(self) -> Array:
        """A model of a fixed batch gets whole batches: what is left over is not run, a few rows are repeated."""
        if self.fixed is None:
            return self.numbers
        whole = len(self.numbers) // self.fixed * self.fixed
        return self.numbers[:whole] if whole else np.resize(self.numbers, self.fixed)


# ---------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class Reading:
    """How data are read: at most so many rows, and what each kind of file becomes."""

    limit: int | None = LIMIT
    seed: int = 0
    pictures: Pictures = field(default_factory=Pictures)
    texts: Texts = field(default_factory=Texts)
    sounds: Sounds = field(default_factory=Sounds)


def read_samples(data: Any, inputs: Sequence[Value], reading: Reading | None = None) -> Samples:
    """The rows of some data for a model with these inputs."""
    values, how = tuple(inputs), reading or Reading()
    _require_one_row_per_sample(values)
    if data is None:
        return _random(values, how.seed, how.limit)
    if isinstance(data, str) and ".py:" in data:
        return _collected(_given_by(load_function(data), data), values, how.limit, data)
    if isinstance(data, (str, Path)):
        return _from_path(Path(data), values, how)
    if isinstance(data, Mapping) or hasattr(data, "shape"):
        data = [data]
    return _collected(data, values, how.limit, "batches")


def _require_one_row_per_sample(inputs: Sequence[Value]) -> None:
    """That the first axis of every input counts the samples: a rate or a state that is carried on has no such axis."""
    first = [value.shape[0] for value in inputs if value.shape]
    counts = next((size for size in first if not isinstance(size, int)), first[0] if first else None)
    others = [v for v in inputs if not v.shape or (isinstance(v.shape[0], int) and v.shape[0] != counts)]
    if others:
        value = others[0]
        shape = f"has the shape [{', '.join(map(str, value.shape))}]" if value.shape else "is a single number"
        given = " ".join(f"{other.name}=VALUE" for other in others)
        raise InputError(
            f"input {value.name!r} {shape}: it has no axis that counts the samples",
            fix=f"fix its value first, and reduce that model: `cmrc assume MODEL {given} -o fixed.onnx`",
        )


def held(take: Take, budget: int = HELD) -> Take:
    """The same rows, each read once, as long as they fit into the budget."""
    known: dict[int, dict[str, Array]] = {}
    left = budget

    def taken(numbers: Array) -> dict[str, Array]:
        nonlocal left
        rows = {number: known[number] for number in numbers.tolist() if number in known}
        missing = [number for number in numbers.tolist() if number not in rows]
        if missing:
            read = take(np.array(missing))
            for i, number in enumerate(missing):
                rows[number] = row = {name: array[i].copy() for name, array in read.items()}
                size = sum(array.nbytes for array in row.values())
                if size <= left:
                    known[number], left = row, left - size
        names = rows[int(numbers[0])]
        return {name: np.stack([rows[number][name] for number in numbers.tolist()]) for name in names}

    return taken


def load_function(text: str) -> Any:
    """What `script.py:name` names. The script is run."""
    path, _, name = text.rpartition(":")
    if not Path(path).is_file():
        raise InputError("there is no such script", at=path, fix="write script.py:function")
    try:
        names = runpy.run_path(path)
    except Exception as error:  # the script is the user's own
        raise InputError(
            f"the script failed: {type(error).__name__}: {error}", at=path, fix="run it by itself"
        ) from error
    if name not in names:
        raise InputError(
            f"the script has no {name!r}", at=path, fix="name a function of the script: script.py:function"
        )
    return names[name]


def _given_by(loader: Callable[[], Iterable[Any]] | Iterable[Any], what: str) -> Iterator[Any]:
    """What a loader of the user's own gives, or why it does not."""
    try:
        yield from loader() if callable(loader) else loader
    except Exception as error:
        raise InputError(
            f"the loader failed: {type(error).__name__}: {error}",
            at=what,
            fix="it is a function without arguments that returns batches, or a thing to iterate over: run it by itself",
        ) from error


def _from_path(path: Path, inputs: tuple[Value, ...], how: Reading) -> Samples:
    if not path.exists():
        raise InputError("there is no such file or folder", at=str(path), fix=KINDS)
    if is_picture_folder(path):
        return _of_files(picture_reader(path, inputs, how.pictures), inputs)
    if is_sound_folder(path):
        return _of_files(sound_reader(path, inputs, how.sounds), inputs)
    if is_text(path):
        texts = read_texts(path, inputs, how.texts)
        return replace(_of_arrays([texts.arrays], inputs, texts.what, texts.remarks), mask=texts.mask)
    files = [path] if path.is_file() else sorted(p for p in path.glob("*") if p.suffix in (".npy", ".npz"))
    if not files:
        raise InputError("the folder has no pictures, audio, .txt, .npy or .npz files", at=str(path), fix=KINDS)
    parts, remarks = [], dict[str, None]()
    for file in files:
        arrays = read_arrays(file)
        named = {"array": arrays} if isinstance(arrays, np.ndarray) else arrays
        matched, said = _match(named, inputs, str(file))
        parts.append(matched)
        remarks.update(dict.fromkeys(said))
    return _of_arrays(parts, inputs, f"{path.name}", tuple(remarks))


def _of_files(reader: FileReader[Any], inputs: tuple[Value, ...]) -> Samples:
    return Samples(inputs, len(reader), held(reader.take), reader.what, reader.remarks)


def _of_arrays(
    parts: Sequence[Mapping[str, Array]], inputs: tuple[Value, ...], what: str, remarks: tuple[str, ...] = ()
) -> Samples:
    """Rows out of several files: each file keeps its arrays, and a row is looked up in its file."""
    counts = [len(part[inputs[0].name]) for part in parts]
    ends = np.cumsum(counts)
    names = set.intersection(*(set(part) for part in parts))
    wanted = {value.name: numpy_dtype(value.dtype) for value in inputs}

    def take(numbers: Array) -> dict[str, Array]:
        place = np.searchsorted(ends, numbers, side="right")
        taken = {}
        for name in names:
            rows = [parts[i][name][n - (ends[i] - counts[i])] for i, n in zip(place, numbers, strict=True)]
            array = np.stack(rows)
            taken[name] = array.astype(wanted[name], copy=False) if name in wanted else array
        return taken

    return Samples(inputs, int(ends[-1]), take, what, remarks)


def _match(
    arrays: Mapping[str, Array], inputs: tuple[Value, ...], where: str
) -> tuple[dict[str, Array], tuple[str, ...]]:
    """Which array is which input: by name, else by shape and kind where only one fits."""
    matched, remarks = {}, []
    free = {name: array for name, array in arrays.items() if name not in {value.name for value in inputs}}
    labels = next((name for name in LABELS if name in free), None)
    candidates = {name: array for name, array in free.items() if name not in LABELS}
    for value in inputs:
        if value.name in arrays:
            matched[value.name] = arrays[value.name]
            continue
        fitting = [name for name, array in candidates.items() if _fits(array, value)]
        if len(fitting) != 1 and len(inputs) == len(candidates) == 1:
            fitting = list(candidates)
        if len(fitting) != 1:
            has = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
            raise InputError(
                f"no array is called {value.name!r}, and {'several fit' if fitting else 'none fits'} its shape "
                f"{list(value.shape)} (there are {has})",
                at=where,
                fix="save every array under the name of its input, with numpy.savez",
            )
        matched[value.name] = candidates.pop(fitting[0])
        if fitting[0] not in ("array", "arr_0"):
            remarks.append(f"the array {fitting[0]!r} is taken as input {value.name!r}")
    for value in inputs:
        _require_shape(matched[value.name], value, where)
        kinds = matched[value.name].dtype.kind, numpy_dtype(value.dtype).kind
        if kinds[0] in "iub" and kinds[1] == "f":
            given = matched[value.name].dtype.name
            remarks.append(f"input {value.name!r} is {given}, and is given to the model as {value.dtype}, not scaled")
    lengths = {name: len(array) for name, array in matched.items()}
    if labels is not None:
        matched["labels"] = free[labels]
        lengths[labels] = len(free[labels])
    if len(set(lengths.values())) != 1:
        shown = ", ".join(f"{name} {count}" for name, count in lengths.items())
        raise InputError(
            f"the arrays do not have one row per sample: {shown}",
            at=where,
            fix="save arrays whose first axis counts the samples",
        )
    return matched, tuple(remarks)


def _fits(array: Array, value: Value) -> bool:
    if array.ndim != len(value.shape) or (array.dtype.kind == "f") != value.dtype.startswith(("float", "bfloat")):
        return False
    return all(not isinstance(n, int) or n == m for n, m in zip(value.shape[1:], array.shape[1:], strict=True))


def _require_shape(array: Array, value: Value, where: str) -> None:
    same = array.ndim == len(value.shape) and all(
        not isinstance(n, int) or n == m for n, m in zip(value.shape[1:], array.shape[1:], strict=True)
    )
    if not same:
        raise InputError(
            f"the samples are of shape {list(array.shape[1:])}, input {value.name!r} takes {list(value.shape[1:])}",
            at=where,
            fix="save the samples as the model takes them",
        )


def _collected(data: Iterable[Any], inputs: tuple[Value, ...], limit: int | None, what: str) -> Samples:
    """Batches in memory, no more of them than are needed."""
    names, parts, rows = [value.name for value in inputs], list[dict[str, Array]](), 0
    for batch in batches(data, names):
        part = {name: as_array(array) for name, array in batch.inputs.items()}
        if batch.labels is not None:
            part["labels"] = as_array(batch.labels)
        parts.append({**part, **{name: array for name, array in batch.others.items() if len(array) == len(batch)}})
        rows += len(batch)
        if limit is not None and rows >= limit:
            break
    return _of_arrays(parts, inputs, what)


def _random(inputs: tuple[Value, ...], seed: int, limit: int | None) -> Samples:
    count = RANDOM if limit is None else min(RANDOM, limit)
    sizes = {str(value.shape[0]): count for value in inputs if value.shape and not isinstance(value.shape[0], int)}
    shaped = [replace(v, shape=(count, *v.shape[1:])) if v.shape else v for v in inputs]
    arrays = random_inputs(shaped, sizes, seed, default=16)
    warning = "the data are random numbers: what is measured on them says nothing about real inputs"
    return replace(_of_arrays([arrays], inputs, "random numbers", (warning,)), is_random=True)


def without_padding(rows: Mapping[str, Array], mask: str) -> tuple[Span, dict[str, Array]]:
    """The same rows without the columns in which no text has a token, and where those that stay stood."""
    whole = rows[mask].shape[1]
    used = np.flatnonzero(rows[mask].any(axis=0))
    begin, end = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, whole)
    of_tokens = {name for name, array in rows.items() if array.ndim > 1 and array.shape[1] == whole}
    return Span(begin, end, whole), {n: a[:, begin:end] if n in of_tokens else a for n, a in rows.items()}


def padded_again(array: Array, span: Span) -> Array:
    """An output of rows `without_padding`, with zeros where those columns were, if it has a column for each token."""
    if array.ndim < 2 or array.shape[1] != span.end - span.begin:
        return array
    widths = [(0, 0), (span.begin, span.whole - span.end), *[(0, 0)] * (array.ndim - 2)]
    return np.pad(array, widths)


def first_rows(data: Rows, count: int) -> dict[str, Array]:
    """The first few rows, for a run."""
    return next(iter(islice(iter(replace(data, size=count, is_trimmed=False)), 1)))
