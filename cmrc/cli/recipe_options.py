"""Options that set keys of a recipe. They have a module of their own because their imports are slow."""

from __future__ import annotations

from typing import Any

import typer

from cmrc.hosts.protocols import LOSSES
from cmrc.planning.recipe import AUTO, PRESETS


def preset_option(default: str | bool = True) -> Any:
    names = ", ".join((AUTO, *PRESETS))
    return typer.Option(metavar="NAME", help=f"How units are chosen: {names}.", show_default=default)


def positions_option(default: str | bool = True) -> Any:
    which = "Which positions count as samples: all, each, a number, or the name of a mask in the data."
    return typer.Option(metavar="WHICH", help=which, show_default=default)


def loss_option(default: str | bool = True) -> Any:
    return typer.Option(metavar="NAME", help=f"The loss for curvature: {', '.join(LOSSES)}.", show_default=default)
