"""Commands whose modules are imported when they run: `--help` and `--version` need none of them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup


@dataclass(frozen=True, slots=True)
class Entry:
    """A command: the module that holds it as `app`, and the line that stands beside its name in the list of commands."""

    module: str
    summary: str


class LazyGroup(TyperGroup):
    """A group that lists its commands by their summaries, and imports a command's module once it is asked for."""

    entries: ClassVar[dict[str, Entry]]

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {name: TyperCommand(name, help=entry.summary) for name, entry in self.entries.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, listed, rest = super().resolve_command(ctx, args)
        return name, listed if name is None else load(self.entries[name]), rest


def load(entry: Entry) -> Any:
    """The command itself."""
    return typer.main.get_command(import_module(entry.module).app)
