"""`cmrc annotate`: a plan written onto a model, not yet lowered."""

from __future__ import annotations

import json

import typer

from cmrc.cli import terminal
from cmrc.cli.options import AsJson, Force, Model, Output, PlanFile
from cmrc.cli.outputs import require_output
from cmrc.cli.terminal import reported
from cmrc.program.plan import Plan
from cmrc.program.trace import trace

app = typer.Typer(add_completion=False)


@app.command()
def annotate(model: Model, plan: PlanFile, output: Output, force: Force = False, as_json: AsJson = False) -> None:
    """Write the plan's do's onto the model's nodes, without lowering: `cmrc.lower` takes such a file as it is."""
    with reported(as_json):
        require_output(output, "a model", ".onnx", reads=[model, plan], force=force)
        trace(model).annotate(Plan.load(plan)).save(output, overwrite=force)
        print(json.dumps({"output": str(output)})) if as_json else terminal.out.print(f"wrote {output}", markup=False)
