"""A folder of audio files as rows: one channel, at the model's rate, in windows of the length that it takes.

    shape [n, samples], also with an axis of 1     a waveform between -1 and 1
    a dynamic length                               4 seconds, unless said
    rate                                           16,000 a second, unless said

A long file is cut into windows, one after the other; a file that is shorter than a window is repeated until it fills one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cmrc.errors import InputError
from cmrc.ir.graph import Array, Value, numpy_dtype
from cmrc.reduction.file_reader import FileReader, files_under, labels_by_folder

SUFFIXES = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".aiff", ".aif", ".au")
RATE = 16_000
SECONDS = 4.0
SHORTEST = 160  # samples: a shorter axis is one of features, not of a waveform
LEAST = 0.5  # of a window, which what is left at the end of a file must fill


@dataclass(frozen=True, slots=True)
class Sounds:
    """How audio is read; what is None follows from the model's input."""

    rate: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of a file, in the file's own samples."""

    file: Path
    start: int
    length: int
    rate: int


@dataclass(frozen=True, slots=True)
class SoundReader(FileReader[Window]):
    """What every window becomes."""

    length: int
    rate: int

    def read(self, window: Window, /) -> Array:
        from scipy.signal import resample_poly

        try:
            sound, _ = _soundfile().read(window.file, window.length, window.start, dtype="float32", always_2d=True)
        except RuntimeError as error:  # soundfile's own errors are of this class
            raise _unreadable(window.file, error) from error
        one = sound.mean(axis=1)
        if window.rate != self.rate:
            shared = math.gcd(window.rate, self.rate)
            one = resample_poly(one, self.rate // shared, window.rate // shared)
        sound = np.resize(one, self.length).astype(numpy_dtype(self.value.dtype))  # repeats what is too short
        axis = 1 if self.value.shape[-1] == 1 else 0
        return sound if len(self.value.shape) == 2 else np.expand_dims(sound, axis)


def is_sound_folder(path: Path) -> bool:
    if path.is_file():
        return path.suffix.lower() in SUFFIXES
    return path.is_dir() and not any(path.glob("*.np[yz]")) and any(files_under(path, SUFFIXES))


def sound_reader(path: Path, inputs: Sequence[Value], asked: Sounds) -> SoundReader:
    """A reader for a model with one input that is a waveform."""
    value = _waveform(path, inputs)
    rate, taken = asked.rate or RATE, _length(value)
    length = taken if isinstance(taken, int) else round((asked.seconds or SECONDS) * rate)
    remarks = []
    if asked.rate is None:
        remarks.append(f"audio is read at {RATE:,} samples a second, a guess: say rate= if the model takes another")
    if asked.seconds is None and not isinstance(taken, int):
        remarks.append(f"audio is cut into windows of {SECONDS:g} seconds: say seconds= for another length")
    files = [path] if path.is_file() else files_under(path, SUFFIXES)
    windows, short = list[Window](), 0
    for file in files:
        parts, is_short = _windows(file, length, rate)
        windows, short = windows + parts, short + is_short
    if not windows:
        raise InputError("the audio files are empty", at=str(path), fix="give files that hold sound")
    if short:
        remarks.append(
            f"{short} of {len(files)} files are shorter than {length / rate:.3g} s, and are repeated to fill it"
        )
    labels, said = labels_by_folder([window.file for window in windows])
    what = f"{len(windows)} windows of {len(files)} audio files in {path.name}, {length / rate:.3g} s at {rate} Hz"
    return SoundReader(tuple(windows), labels, value, what, (*remarks, *said), length, rate)


def _waveform(path: Path, inputs: Sequence[Value]) -> Value:
    value = inputs[0]
    is_wave = len(value.shape) == 2 or (len(value.shape) == 3 and 1 in value.shape[1:])
    is_long = is_wave and (not isinstance(length := _length(value), int) or length >= SHORTEST)
    if len(inputs) != 1 or not is_wave or not is_long or not value.dtype.startswith("float"):
        shapes = ", ".join(f"{each.name} {each.dtype} {list(each.shape)}" for each in inputs)
        raise InputError(
            f"audio files are for a model with one input that is a waveform, [samples, time]; this one takes {shapes}",
            at=str(path),
            fix="compute what it takes (a spectrogram, say), and give arrays (.npz), or a loader: script.py:loader",
        )
    return value


def _length(value: Value) -> int | str:
    """The axis of time: the last one, unless that is of one channel."""
    return value.shape[1] if value.shape[-1] == 1 and len(value.shape) == 3 else value.shape[-1]


def _windows(file: Path, length: int, rate: int) -> tuple[list[Window], bool]:
    """The windows of a file, and whether it is too short for one."""
    try:
        known = _soundfile().info(file)
    except RuntimeError as error:
        raise _unreadable(file, error) from error
    own = round(length * known.samplerate / rate)
    count = known.frames // own
    if known.frames - count * own >= LEAST * own or (not count and known.frames):
        count += 1  # what is left at the end, or a short file
    starts = range(0, count * own, own)
    parts = [Window(file, start, min(own, known.frames - start), known.samplerate) for start in starts]
    return parts, 0 < known.frames < own


def _unreadable(file: Path, error: Exception) -> InputError:
    return InputError(f"is not a sound that can be read: {error}", at=str(file), fix="remove it, or save it as .wav")


def _soundfile() -> Any:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: the library beside it is missing
        raise InputError("soundfile is not installed, which reads audio", fix="pip install 'cmrc[audio]'") from error
    return soundfile
