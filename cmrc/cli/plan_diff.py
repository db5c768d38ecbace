"""`cmrc plan diff`: what two plans replace differently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cmrc.cli import terminal
from cmrc.cli.options import AsJson, PlanFile
from cmrc.cli.terminal import columns, fail, reported, shortened
from cmrc.program.difference import difference
from cmrc.program.plan import Plan

app = typer.Typer(add_completion=False)


@app.command("diff")
def plan_diff(
    first: PlanFile,
    second: Annotated[Path, typer.Argument(help="Another plan.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Compare two plans: units that one replaces and the other does not. Exit code 1 if they differ."""
    with reported(as_json):
        rows = difference(Plan.load(first), Plan.load(second))
        if as_json:
            print(json.dumps({"same": not rows, "sites": rows}, indent=1))
        elif not rows:
            terminal.out.print("the plans are the same")
        else:
            table = columns(
                "site", "only in the first", "only in the second", "in both", "Jaccard of kept", "values differ by"
            )
            for row in rows:
                apart = "" if row["values"] is None else f"{row['values']:.3g}"
                cells = (
                    shortened(str(row["first"])),
                    shortened(str(row["second"])),
                    str(row["both"]),
                    f"{row['jaccard']:.3f}",
                )
                table.add_row(row["site"], *cells, apart)
            terminal.out.print(table)
    if rows:
        fail(1)
