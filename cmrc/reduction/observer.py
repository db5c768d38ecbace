"""Observers of a run, and how long its stages take."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol


class Observer(Protocol):
    """Observes a run: stages and first results by name, and work with its length."""

    def stage(self, name: str, detail: str) -> None: ...

    def track(self, items: Iterable[Any], count: int | None, what: str) -> Iterable[Any]: ...


class Unobserved:
    """Nobody watches."""

    def stage(self, name: str, detail: str) -> None:
        pass

    def track(self, items: Iterable[Any], count: int | None, what: str) -> Iterable[Any]:
        return items


@dataclass(slots=True)
class Clock:
    """Passes on what happens, and keeps the seconds of every stage."""

    observer: Observer
    seconds: dict[str, float] = field(default_factory=dict)
    current: str = ""
    begin: float = 0.0

    def stage(self, name: str, detail: str = "") -> None:
        self.stop()
        self.current, self.begin = name, time.perf_counter()
        self.observer.stage(name, detail)

    def say(self, name: str, detail: str) -> None:
        """A result within a stage."""
        self.observer.stage(name, detail)

    def stop(self) -> None:
        if self.current:
            spent = time.perf_counter() - self.begin
            self.seconds[self.current] = self.seconds.get(self.current, 0.0) + spent
        self.current = ""

    def track(self, items: Iterable[Any], count: int | None, what: str) -> Iterable[Any]:
        return self.observer.track(items, count, what)
