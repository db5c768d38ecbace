"""`cmrc assume`: fix inputs of a model that always have the same value."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from cmrc.cli import terminal
from cmrc.cli.options import AsJson, Force, Model, Output, Quiet, Verbose, examples, new_app
from cmrc.cli.outputs import require_output
from cmrc.cli.terminal import reported
from cmrc.errors import InputError
from cmrc.program.program import trace

app = new_app()


@app.command(epilog=examples("cmrc assume silero_vad.onnx sr=16000 -o vad_16k.onnx", "cmrc inspect vad_16k.onnx"))
def assume(
    model: Model,
    values: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME=VALUE", help="An input and its value, as name=value. Can be repeated.", show_default=False
        ),
    ],
    output: Output,
    force: Force = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Fix inputs of an ONNX model to constant values, and write the model without them.

    An `If` whose condition becomes known is replaced by the branch that it takes, so values inside that branch become sites.
    """
    with reported(as_json):
        require_output(output, "a model", ".onnx", reads=[model], force=force)
        trace(model, assume=dict(_parsed(text) for text in values)).save(output, overwrite=force)
        print(json.dumps({"output": str(output)})) if as_json else terminal.out.print(f"wrote {output}")


def _parsed(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError as error:
        raise InputError(f"{text!r} is not understood", fix="write it as sr=16000") from error
