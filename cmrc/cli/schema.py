"""`cmrc schema`: the JSON schema of what a command prints with `--json`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from cmrc.cli import terminal
from cmrc.cli.documents import DOCUMENTS
from cmrc.cli.options import Quiet, Verbose, examples, new_app
from cmrc.cli.terminal import reported
from cmrc.errors import InputError

app = new_app()


@app.command("schema", epilog=examples("cmrc schema", "cmrc schema check", "cmrc schema plan show"))
def schema(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[COMMAND]", help="A command, or `error`.", show_default="list them"),
    ] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Print the JSON schema of what a command prints with --json.

    Fields of a schema keep their meaning. Documents may gain fields.
    """
    with reported(as_json=False):
        if not command:
            terminal.out.print("\n".join(DOCUMENTS))
            return
        name = " ".join(command)
        if name not in DOCUMENTS:
            raise InputError(f"there is no schema for {name!r}", fix=f"name one of {', '.join(DOCUMENTS)}")
        print(json.dumps(DOCUMENTS[name].model_json_schema(), indent=1))
