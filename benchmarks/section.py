"""One section of docs/results.md: how a record reads in words, tables and a picture.

Every benchmark module holds `SECTIONS`; `benchmarks.report` puts them together.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measure import RECORDS, show

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Record = Mapping[str, Any]
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")  # Okabe and Ito
STYLE = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.alpha": 0.3,
    "font.size": 10,
    "savefig.dpi": 120,
}


@dataclass(frozen=True, slots=True)
class Section:
    """What the page says about one record, and how the record is made."""

    record: str  # records/<record>.json, and the picture's name
    title: str
    text: str  # markdown; {names} are fields of the record
    body: Callable[[Record], str]
    draw: Callable[[Record, Figure], None] | None = None
    arguments: tuple[str, ...] = ()  # of the module's command
    size: tuple[float, float] = (8.0, 3.6)
    beside: tuple[str, ...] = ()  # records whose networks the picture shows, too: each apart from the others

    def path(self, folder: Path = RECORDS) -> Path:
        return folder / f"{self.record}.json"

    def read(self, folder: Path = RECORDS) -> Record | None:
        path = self.path(folder)
        return json.loads(path.read_text()) if path.exists() else None

    def shown(self, record: Record, folder: Path = RECORDS) -> Record:
        """What the picture shows: the record, and the networks of those beside it."""
        if not self.beside:
            return record
        networks = dict(record["networks"])
        for path in (folder / f"{name}.json" for name in self.beside):
            if path.exists():
                networks |= json.loads(path.read_text())["networks"]
        return {**record, "networks": networks}

    def picture(self, record: Record, folder: Path) -> Path | None:
        """Draw what `shown` gives into folder; the file names what it shows."""
        if self.draw is None:
            return None
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        with rc_context({**STYLE, "axes.prop_cycle": _cycle()}):
            figure = Figure(figsize=self.size, layout="constrained")
            self.draw(record, figure)
            path = folder / f"{self.record}.png"
            folder.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, metadata={"Record": fingerprint(record)})
        return path


def _cycle() -> Any:
    from cycler import cycler

    return cycler(color=COLOURS)


def fingerprint(record: Record) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]


def sections(modules: Iterable[str]) -> list[tuple[str, Section]]:
    """Every section of these benchmark modules, with the module's name."""
    return [(name, one) for name in modules for one in importlib.import_module(f"benchmarks.{name}").SECTIONS]


# ---------------------------------------------------------------- tables


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [" | ".join(head), " | ".join("---" for _ in head), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def verdict(met: bool) -> str:
    return "yes" if met else "**no**"


def comparisons(record: Record) -> str:
    """Every timed comparison of the record."""
    rows = []
    for r in record["ratios"]:
        target, met = ("", "") if r["target"] is None else (f"≤ {r['target']:.3g}", verdict(r["met"]))
        sides = (f"{r['ours']} ({show(r['ours_seconds'])})", f"{r['theirs']} ({show(r['theirs_seconds'])})")
        interval = f"{r['ratio']:.3f} ({r['low']:.3f} to {r['high']:.3f})"
        rows.append((r["name"], *sides, interval, target, met, str(r["pairs"])))
    return table(("what", "ours", "theirs", "ratio", "target", "met", "pairs"), rows)


def claim(name: str, value: float, relation: str, target: float) -> dict[str, Any]:
    """A number that a target is set for, for the record's `claims`; the page lists those that are missed."""
    is_met = {">=": value >= target, "<=": value <= target, "<": value < target, ">": value > target}[relation]
    return {"name": name, "value": value, "relation": relation, "target": target, "met": bool(is_met)}


def claims(rows_claimed: Iterable[Mapping[str, Any]]) -> str:
    rows = [
        (c["name"], f"{c['value']:.4f}", f"{c['relation']} {c['target']:.4g}", verdict(c["met"])) for c in rows_claimed
    ]
    return table(("claim", "measured", "target", "met"), rows)


def megabytes(count: float) -> str:
    return f"{count / 1e6:.0f} MB"
