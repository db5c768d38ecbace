"""The file from which an interrupted recovery continues: one file of arrays, whole or not at all."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cmrc.errors import FileError
from cmrc.files import require_writable, write_whole
from cmrc.ir.graph import Array
from cmrc.statistics.arrays import read_arrays

HEADER = "cmrc.recovery"
STATE, BEST = "state/", "best/"
DELETE = "delete the checkpoint to start again, or give another path"


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """Where a run stands: numbers that count, the learner's state, and the best parameters so far."""

    counts: Mapping[str, Any]
    state: Mapping[str, Array]
    best: Mapping[str, Array]

    def write(self, path: Path, asked: str) -> None:
        header = np.frombuffer(json.dumps({"asked": asked, "counts": dict(self.counts)}).encode(), dtype=np.uint8)
        arrays = {
            HEADER: header,
            **{STATE + n: a for n, a in self.state.items()},
            **{BEST + n: a for n, a in self.best.items()},
        }
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)  # type: ignore[arg-type]
        write_whole(path, buffer.getvalue())


def read(path: Path, asked: str) -> Saved | None:
    """What an interrupted run left there; nothing where there is no file. Another run's file is refused."""
    require_writable(path)
    if not path.exists():
        return None
    arrays = read_arrays(path)
    header_bytes = arrays.get(HEADER) if isinstance(arrays, dict) else None
    if header_bytes is None or not isinstance(arrays, dict):
        raise FileError(f"{path} is not a checkpoint of a recovery", fix="give another path")
    header = json.loads(header_bytes.tobytes())
    if header["asked"] != asked:
        raise FileError(f"{path} is the checkpoint of a recovery of another model, data or options", fix=DELETE)

    def part(prefix: str) -> dict[str, Array]:
        return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}

    return Saved(header["counts"], part(STATE), part(BEST))
