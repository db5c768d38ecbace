"""`cmrc plan MODEL ...` makes a plan; `cmrc plan show` and `cmrc plan diff` read one."""

from __future__ import annotations

from typing import Any, ClassVar

import typer

from cmrc.cli.lazy import Entry, LazyGroup


class MakeOrRead(LazyGroup):
    """The word `make` may be left out: an argument that is not a command is the model to plan for."""

    entries: ClassVar = {
        "make": Entry("cmrc.cli.plan_make", "Make a plan from a model, data (or statistics) and a recipe."),
        "show": Entry("cmrc.cli.plan_show", "Show a plan: every do with its site, units and constants."),
        "diff": Entry("cmrc.cli.plan_diff", "Compare two plans: units that one replaces and the other does not."),
    }

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help"):
            args = ["make", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=MakeOrRead,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Make a plan: `cmrc plan MODEL ...`; or read one.",
)


@app.callback()
def group() -> None:
    """The help of the group is given above; the callback makes it a group."""
