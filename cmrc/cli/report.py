"""`cmrc report`: write the report of a reduction again, from its work folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cmrc.cli import terminal
from cmrc.cli.options import AsJson, Force, Output, Quiet, Verbose, examples, new_app
from cmrc.cli.outputs import require_output
from cmrc.cli.terminal import reported
from cmrc.cli.wording import page_in_flags
from cmrc.reduction.comparison import read_account
from cmrc.reduction.page import page_of, write_page

app = new_app()


@app.command(
    "report", epilog=examples("cmrc report small.work -o report.html", "cmrc report small.onnx -o report.html")
)
def report_command(
    reduction: Annotated[
        Path,
        typer.Argument(
            metavar="WORK", help="The work folder of `cmrc reduce`, or the model that it wrote.", show_default=False
        ),
    ],
    output: Output,
    force: Force = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write the report of a reduction again, without the model and the data.

    The same content is written as Markdown (.md) and JSON (.json) beside the page.
    """
    with reported(as_json):
        require_output(output, "a report", ".html", reads=[reduction], force=force)
        account = page_in_flags(read_account(reduction))
        files = write_page(page_of(account), account, output)
        if as_json:
            print(json.dumps({"output": [str(file) for file in files]}))
            return
        terminal.out.print(f"wrote {', '.join(map(str, files[:-1]))} and {files[-1]}")
