"""`cmrc plan diff`: what two plans replace differently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cmrc.cli import terminal
from cmrc.cli.options import AsJson, PlanFile, Quiet, ReportFile, Verbose, examples, new_app
from cmrc.cli.terminal import fail, print_table, reported, shortened
from cmrc.program.difference import difference
from cmrc.program.plan import Plan
from cmrc.reduction.page import page_of_difference, require_report, write_page

app = new_app()


@app.command(
    "diff", epilog=examples("cmrc plan diff first.json second.json", "cmrc plan diff first.json second.json --json")
)
def plan_diff(
    first: PlanFile,
    second: Annotated[Path, typer.Argument(metavar="OTHER", help="Another plan.", show_default=False)],
    report: ReportFile = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Compare two plans: units that one replaces and the other does not.

    The exit code is 1 if they differ.
    """
    with reported(as_json):
        if report is not None:
            require_report(report)
        rows = difference(Plan.load(first), Plan.load(second))
        head = ("site", "only in the first", "only in the second", "in both", "Jaccard of kept", "values differ by")
        cells = [
            (row["site"], str(row["first"]), str(row["second"]), str(row["both"]), f"{row['jaccard']:.3f}",
             "" if row["values"] is None else f"{row['values']:.3g}")
            for row in rows
        ]  # fmt: skip
        files = []
        if report is not None:
            names = (first.stem, second.stem) if first.stem != second.stem else (str(first), str(second))
            files = write_page(
                page_of_difference(rows, names, [head, *cells]), {"same": not rows, "sites": rows}, report
            )
        if as_json:
            print(json.dumps({"same": not rows, "sites": rows}, indent=1))
        elif not rows:
            terminal.out.print("the plans are the same")
        else:
            print_table(head, [(site, shortened(a), shortened(b), *rest) for site, a, b, *rest in cells])
        if files and not as_json:
            terminal.out.print(f"wrote {', '.join(map(str, files[:-1]))} and {files[-1]}")
    if rows:
        fail(1)
