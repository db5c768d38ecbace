"""`cmrc annotate`: a plan written onto a model, not yet lowered."""

from __future__ import annotations

import json

from cmrc.cli import terminal
from cmrc.cli.options import AsJson, Force, Model, OutputOrStream, PlanFile, Quiet, Verbose, examples, new_app
from cmrc.cli.outputs import writable
from cmrc.cli.terminal import reported
from cmrc.program.plan import Plan
from cmrc.program.program import trace

app = new_app()


@app.command(
    epilog=examples("cmrc annotate model.onnx plan.json -o annotated.onnx", "cmrc lower annotated.onnx -o small.onnx")
)
def annotate(
    model: Model,
    plan: PlanFile,
    output: OutputOrStream,
    force: Force = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write a plan onto the nodes of a model, without lowering it.

    `cmrc lower` takes such a file as it is.
    """
    with (
        reported(as_json),
        writable(output, "a model", ".onnx", reads=[model, plan], force=force, as_json=as_json) as path,
    ):
        trace(model).annotate(Plan.load(plan)).save(path, overwrite=force)
        print(json.dumps({"output": str(output)})) if as_json else terminal.out.print(f"wrote {output}")
