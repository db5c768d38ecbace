"""A seeded bug: a piece of source text that stands in the project exactly once, and what a slip of the hand makes of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("cmrc", "passes")


@dataclass(frozen=True, slots=True)
class Mutant:
    """`tests` are arguments of pytest: the few tests that must be enough to notice it."""

    name: str
    text: str
    replacement: str
    simulates: str
    tests: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Another one where the bug or its tests were changed: then an old result does not count."""
        parts = (self.text, self.replacement, *self.tests)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


class Table:
    """Rows of one room, collected as they are written down."""

    def __init__(self) -> None:
        self.rows: list[Mutant] = []

    def __call__(self, name: str, text: str, replacement: str, simulates: str, *tests: str) -> None:
        self.rows.append(Mutant(name, text, replacement, simulates, tests))


def sources(root: Path) -> Iterator[Path]:
    """The modules of the project; cmrc/passes is a link to passes, and counts once."""
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*.py")):
            if not path.is_relative_to(root / "cmrc" / "passes"):
                yield path


def places(root: Path, text: str) -> list[Path]:
    """The module of every occurrence of a text."""
    return [path for path in sources(root) for _ in range(path.read_text(encoding="utf-8").count(text))]


def place_of(root: Path, mutant: Mutant) -> Path:
    """The module that the mutant changes."""
    where = places(root, mutant.text)
    if len(where) != 1:
        listed = ", ".join(str(path.relative_to(root)) for path in where) or "nowhere"
        raise LookupError(f"{mutant.name}: its text stands {len(where)} times in the source, not once ({listed})")
    return where[0]
