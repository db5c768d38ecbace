"""`cmrc plan diff`: what two plans replace differently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cmrc.cli import terminal
from cmrc.cli.options import AsJson, PlanFile, Quiet, Verbose, examples, new_app
from cmrc.cli.terminal import columns, fail, reported, shortened
from cmrc.program.difference import difference
from cmrc.program.plan import Plan

app = new_app()


@app.command(
    "diff", epilog=examples("cmrc plan diff first.json second.json", "cmrc plan diff first.json second.json --json")
)
def plan_diff(
    first: PlanFile,
    second: Annotated[Path, typer.Argument(metavar="OTHER", help="Another plan.", show_default=False)],
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Compare two plans: units that one replaces and the other does not.

    The exit code is 1 if they differ.
    """
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
