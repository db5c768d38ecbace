"""`cmrc compare`: two reductions side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cmrc.cli import terminal
from cmrc.cli.options import AsJson, Quiet, ReportFile, Verbose, examples, new_app
from cmrc.cli.terminal import print_table, reported
from cmrc.reduction.comparison import SideBySide, read_account
from cmrc.reduction.page import page_of_comparison, require_report, write_page

app = new_app()


@app.command(
    "compare",
    epilog=examples("cmrc compare a.work b.work", "cmrc compare a.onnx b.onnx --report compare.html"),
)
def compare_command(
    first: Annotated[
        Path,
        typer.Argument(
            metavar="A", help="The work folder of `cmrc reduce`, or the model that it wrote.", show_default=False
        ),
    ],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another one.", show_default=False)],
    report: ReportFile = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Compare two reductions: sizes, speed, agreement, and the widths of their layers."""
    with reported(as_json):
        if report is not None:
            require_report(report)
        names = (first.stem, second.stem) if first.stem != second.stem else (str(first), str(second))
        comparison = SideBySide(read_account(first), read_account(second), names)
        files = [] if report is None else write_page(page_of_comparison(comparison), comparison.to_json(), report)
        if as_json:
            print(json.dumps(comparison.to_json(), indent=1))
            return
        head, *rows = comparison.table
        print_table(head, rows)
        terminal.out.print(f"\n{comparison.verdict}")
        if files:
            terminal.out.print(f"wrote {', '.join(map(str, files[:-1]))} and {files[-1]}")
