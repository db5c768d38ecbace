"""What became of every mutant, in a file that is written after each one."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.records import commit

RECORD = Path(__file__).with_name("record.json")


@dataclass(slots=True)
class Record:
    """By kind (seeded or sampled) and name: the outcome, the test that noticed, the seconds that it took."""

    path: Path | None
    data: dict[str, dict[str, Any]] = field(default_factory=lambda: {"seeded": {}, "sampled": {}})

    @classmethod
    def open(cls, path: Path | None) -> Record:
        record = cls(path)
        if path is not None and path.exists():
            record.data |= json.loads(path.read_text(encoding="utf-8"))
        return record

    def put(self, kind: str, name: str, entry: dict[str, Any]) -> None:
        self.data[kind][name] = {**entry, "commit": commit()}
        if self.path is not None:
            self.path.write_text(json.dumps(self.data, indent=1, sort_keys=True) + "\n", encoding="utf-8")

    def forget(self, kind: str, names: set[str]) -> None:
        """Leave out what is in none of these: mutants that are no longer there."""
        self.data[kind] = {name: entry for name, entry in self.data[kind].items() if name in names}


def tell(name: str, entry: dict[str, Any]) -> None:
    by = f" by {entry['by']}" if entry["by"] else ""
    print(f"{entry['outcome']:9} {entry['seconds']:6.1f} s  {name}{by}", flush=True)  # noqa: T201
