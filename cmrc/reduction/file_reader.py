"""What readers of pictures and of audio share: items that lie in files, each read when its row is asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from cmrc.ir.graph import Array, Value

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class FileReader(ABC, Generic[Item]):
    """The items, one per row, and the model's one input that they become."""

    items: tuple[Item, ...]
    labels: Array | None
    value: Value
    what: str
    remarks: tuple[str, ...]

    @abstractmethod
    def read(self, item: Item, /) -> Array:
        """One row, as the model takes it."""

    def __len__(self) -> int:
        return len(self.items)

    def take(self, numbers: Array) -> dict[str, Array]:
        taken = {self.value.name: np.stack([self.read(self.items[i]) for i in numbers])}
        return taken if self.labels is None else {**taken, "labels": self.labels[numbers]}


def files_under(path: Path, suffixes: Sequence[str]) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.suffix.lower() in suffixes and p.is_file())


def labels_by_folder(files: Sequence[Path]) -> tuple[Array | None, tuple[str, ...]]:
    """The class of each file, by the order of the folders' names, and a remark that says so; nothing if all lie in one folder."""
    folders = sorted({file.parent for file in files})
    if len(folders) < 2:
        return None, ()
    remark = f"the {len(folders)} folders are used as classes 0 to {len(folders) - 1}, by name"
    return np.array([folders.index(file.parent) for file in files]), (remark,)
