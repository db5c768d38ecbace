"""A folder of pictures as rows: resized to what the model takes, cut at the centre, and normalised.

    shape [n, 3, h, w] or [n, h, w, 3]     colour; with 1 instead of 3, grey
    a dynamic size                         224, unless said
    normalise                              imagenet: (x/255 − mean) / std;  unit: x/255;  symmetric: x/127.5 − 1;  raw: 0 to 255

Pictures in folders of their own, as many as the model has classes, are labelled by the order of the folders' names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from cmrc.errors import InputError
from cmrc.ir.graph import Array, Value, numpy_dtype
from cmrc.reduction.file_reader import FileReader, files_under, labels_by_folder

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".tif", ".tiff")
SIDE = 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Normalise = Literal["imagenet", "unit", "symmetric", "raw"]


@dataclass(frozen=True, slots=True)
class Pictures:
    """How pictures are read; what is None follows from the model's input."""

    normalise: str | None = None
    height: int | None = None
    width: int | None = None

    @classmethod
    def of(cls, normalise: str | None, side: int | str | None) -> Pictures:
        """`side` is 224 for a square, or "48x320", height by width."""
        if side is None:
            return cls(normalise)
        sides = str(side).lower().split("x")
        if len(sides) > 2 or not all(each.isdigit() and int(each) for each in sides):
            raise InputError(
                f"side={side} is not a size of pictures", fix="write side=224, or height by width: side=48x320"
            )
        return cls(normalise, int(sides[0]), int(sides[-1]))

    def __post_init__(self) -> None:
        if self.normalise not in (None, *get_args(Normalise)):
            raise InputError(
                f"normalise={self.normalise!r} is not known", fix=f"use one of {', '.join(get_args(Normalise))}"
            )


@dataclass(frozen=True, slots=True)
class PictureReader(FileReader[Path]):
    """What every picture becomes; an item is its file."""

    height: int
    width: int
    channels: int
    first: bool  # channels before height and width
    normalise: str

    def read(self, path: Path, /) -> Array:
        image = _pillow()
        try:
            with image.open(path) as picture:
                picture = picture.convert("RGB" if self.channels == 3 else "L")
                scale = max(self.width / picture.width, self.height / picture.height)
                wide, high = (
                    max(round(scale * n), m) for n, m in zip(picture.size, (self.width, self.height), strict=True)
                )
                picture = picture.resize((wide, high), image.Resampling.BILINEAR)
                left, top = (wide - self.width) // 2, (high - self.height) // 2
                picture = picture.crop((left, top, left + self.width, top + self.height))
                array = np.asarray(picture, dtype=np.float32)
        except OSError as error:
            raise InputError(f"is not a picture that can be read: {error}", at=str(path), fix="remove it") from error
        array = _normalised(array if array.ndim == 3 else array[..., None], self.normalise)
        return (array.transpose(2, 0, 1) if self.first else array).astype(numpy_dtype(self.value.dtype))


def _normalised(array: Array, how: str) -> Array:
    if how == "raw":
        return array
    if how == "symmetric":
        return np.asarray(array / 127.5 - 1)
    if how == "unit" or array.shape[-1] != 3:
        return np.asarray(array / 255)
    return np.asarray((array / 255 - MEAN) / STD)


def is_picture_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.glob("*.np[yz]")) and any(files_under(path, SUFFIXES))


def picture_reader(path: Path, inputs: Sequence[Value], asked: Pictures) -> PictureReader:
    """A reader for a model with one input that is a picture."""
    _pillow()
    wanted = [value for value in inputs if len(value.shape) == 4]
    if len(inputs) != 1 or not wanted:
        shapes = ", ".join(f"{value.name} {list(value.shape)}" for value in inputs)
        raise InputError(
            f"pictures need a model with one input of four axes; this one takes {shapes}",
            at=str(path),
            fix="give arrays (.npz), or a loader: script.py:loader",
        )
    value = wanted[0]
    _, a, b, c = value.shape
    if a in (1, 3):
        first, channels, height, width = True, int(a), b, c
    elif c in (1, 3):
        first, channels, height, width = False, int(c), a, b
    else:
        raise InputError(
            f"input {value.name!r} of shape {list(value.shape)} has no axis of 1 or 3 colours",
            at=str(path),
            fix="give arrays (.npz), or a loader: script.py:loader",
        )
    sides = [
        n if isinstance(n, int) else said or SIDE
        for n, said in ((height, asked.height), (width, asked.width))
    ]  # fmt: skip
    floating = value.dtype.startswith(("float", "bfloat"))
    normalise = asked.normalise or (("imagenet" if first and channels == 3 else "unit") if floating else "raw")
    remarks = []
    if asked.normalise is None and floating:
        remarks.append(
            f"pictures are normalised as {normalise!r}, guessed from the model's shape: give normalise= if that is wrong"
        )
    if asked.height is None and not all(isinstance(n, int) for n in (height, width)):
        remarks.append(f"pictures are resized to {SIDE} x {SIDE}: give side= for another size")
    files = files_under(path, SUFFIXES)
    labels, said = labels_by_folder(files)
    what = f"{len(files)} pictures in {path.name}, {sides[0]} x {sides[1]}, {normalise}"
    return PictureReader(
        tuple(files), labels, value, what, (*remarks, *said), sides[0], sides[1], channels, first, normalise
    )


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise InputError("Pillow, which reads pictures, is not installed", fix="pip install 'cmrc[images]'") from error
    return Image
