"""What a run has done so far, in a folder: an interrupted run continues there, and another choice costs seconds.

    asked.json              what the files were made for: a digest of the model, the data, the recipe and cmrc's own code
    stats.safetensors       the calibration; `calibration` is its checkpoint while it runs
    plan-macs-0.600.json    the plan of each size, a part of the multiply-adds here, and model-macs-0.600.onnx
    measures-macs-0.600.json  what was measured of it, and under which conditions
    account.json            what a report shows of the last choice

Files of another run are removed, and the run begins anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cmrc._version import __version__
from cmrc.errors import FileError
from cmrc.files import write_whole
from cmrc.ir.fingerprint import Fingerprint
from cmrc.reduction.samples import Rows
from cmrc.statistics.batches import as_array
from cmrc.statistics.stats import digest_of_batch

ASKED = "asked.json"
ACCOUNT = "account.json"
OURS = (
    "plan-*",
    "recovery-*",
    "model-*",
    "measures-*",
    "stats.safetensors",
    "calibration*",
    "original.onnx*",
    ASKED,
    ACCOUNT,
)


@dataclass(frozen=True, slots=True)
class WorkFolder:
    """The folder, and whether it holds work of the same run."""

    folder: Path
    asked: str
    of: str  # what sizes are parts of
    resumed: bool
    emptied: bool  # it held the work of another run

    @classmethod
    def open(cls, folder: Path, asked: str, of: str) -> WorkFolder:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(
                f"cannot make the folder {folder}: {error.strerror or error}", fix="name another folder: work="
            ) from error
        note = folder / ASKED
        known = json.loads(note.read_text()).get("asked") if note.is_file() else None
        if known != asked:
            for pattern in OURS:
                for path in folder.glob(pattern):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            write_whole(note, json.dumps({"asked": asked, "cmrc": __version__}, indent=1).encode())
        return cls(folder, asked, of, known == asked, known not in (None, asked))

    @property
    def stats(self) -> Path:
        return self.folder / "stats.safetensors"

    @property
    def calibration(self) -> Path:
        return self.folder / "calibration"

    @property
    def original(self) -> Path:
        return self.folder / "original.onnx"

    @property
    def account(self) -> Path:
        return self.folder / ACCOUNT

    def name(self, share: float) -> str:
        return f"{self.of}-{share:.3f}"

    def plan(self, share: float) -> Path:
        return self.folder / f"plan-{self.name(share)}.json"

    def model(self, share: float) -> Path:
        return self.folder / f"model-{self.name(share)}.onnx"

    def recovery(self, share: float) -> Path:
        return self.folder / f"recovery-{self.name(share)}"

    def forget(self, name: str) -> None:
        """What was noted of another model of this name."""
        (self.folder / f"measures-{name}.json").unlink(missing_ok=True)

    def load(self, name: str, judged: str) -> dict[str, Any] | None:
        """What was noted under a name in the same conditions."""
        path = self.folder / f"measures-{name}.json"
        if not path.is_file():
            return None
        document: dict[str, Any] = json.loads(path.read_text())
        return document["measures"] if document.get("judged") == judged else None

    def save(self, name: str, judged: str, measures: Mapping[str, Any]) -> None:
        document = {"judged": judged, "measures": measures}
        write_whole(self.folder / f"measures-{name}.json", json.dumps(document, indent=1).encode())


def digest_of_run(model: Fingerprint, rows: Rows, recipe: Mapping[str, Any]) -> str:
    """A name for a model, its data and how it is planned."""
    asked = json.dumps(recipe, sort_keys=True, default=str)
    return hashlib.sha256(f"{digest_of_code()} {model.digest} {asked} {digest_of_rows(rows)}".encode()).hexdigest()


def digest_of_rows(rows: Rows) -> str:
    """A name for what the rows hold, whatever reads them."""
    digest = hashlib.sha256()
    for batch in rows:
        digest.update(digest_of_batch([as_array(batch[name]) for name in sorted(batch)]))
    return digest.hexdigest()


@cache
def digest_of_code(package: Path = Path(__file__).parents[1]) -> str:
    """A name for the code of cmrc: other code may plan otherwise, also where the version is still the same."""
    digest = hashlib.sha256()
    for path in sorted(
        Path(folder) / name for folder, _, names in os.walk(package, followlinks=True) for name in names
    ):
        if path.suffix == ".py":
            digest.update(f"{path.relative_to(package)} {hashlib.sha256(path.read_bytes()).hexdigest()}".encode())
    return digest.hexdigest()


def digest_of(conditions: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(conditions, sort_keys=True, default=str).encode()).hexdigest()
