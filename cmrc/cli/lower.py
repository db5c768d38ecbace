"""`cmrc lower`: a model and a plan become a smaller model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cmrc.cli import terminal
from cmrc.cli.options import AsJson, Force, Model, Output
from cmrc.cli.outputs import require_output
from cmrc.cli.terminal import reported
from cmrc.errors import CmrcError
from cmrc.ir.graph import Graph
from cmrc.ir.text import to_text
from cmrc.program.lower import lower

app = typer.Typer(add_completion=False)


@app.command("lower")
def lower_command(
    model: Model,
    output: Output,
    plan: Annotated[
        Path | None, typer.Argument(help="A plan file; the plan that is annotated on the model if absent.")
    ] = None,
    residue: Annotated[
        str,
        typer.Option(help="What to do with a replacement that cannot be folded: 'error', or 'keep' it at run time."),
    ] = "error",
    print_passes: Annotated[bool, typer.Option("--print-passes", help="Print the IR after every pass.")] = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Lower a model by a plan and write the smaller one."""
    with reported(as_json):
        if residue not in ("error", "keep"):
            raise CmrcError(f"--residue is {residue!r}", fix="write --residue error or --residue keep")
        require_output(output, "a model", ".onnx", reads=[model, plan], force=force)

        def show(name: str, graph: Graph) -> None:
            if print_passes:
                terminal.err.print(f"; {name}\n{to_text(graph)}", markup=False, soft_wrap=True)

        lowered = lower(model, plan, residue=residue, watch=show)  # type: ignore[arg-type]
        lowered.save(output, overwrite=force)
        if as_json:
            print(json.dumps({"output": str(output), "report": lowered.report.to_json()}, indent=1))
            return
        terminal.out.print(str(lowered.report), markup=False)
        terminal.out.print(f"\nwrote {output} ({output.stat().st_size:,} bytes)", markup=False)
