"""`cmrc lower`: a model and a plan become a smaller model."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from cmrc.cli import terminal
from cmrc.cli.options import AsJson, Force, Model, OutputOrStream, Quiet, Verbose, examples, new_app
from cmrc.cli.outputs import STREAM, readable, writable
from cmrc.cli.terminal import reported
from cmrc.errors import CmrcError
from cmrc.files import require_new_folder
from cmrc.ir.graph import Graph
from cmrc.ir.text import to_text
from cmrc.program.lower import lower

app = new_app()


@app.command(
    "lower",
    epilog=examples(
        "cmrc lower model.onnx plan.json -o small.onnx",
        "cmrc lower annotated.onnx -o small.onnx --residue keep",
        "cmrc lower checkpoint/ plan.json -o smaller",
    ),
)
def lower_command(
    model: Model,
    output: OutputOrStream,
    plan: Annotated[
        Path | None,
        typer.Argument(
            metavar="PLAN",
            help="A plan file; - for standard input.",
            show_default="the plan on the model",
            callback=readable(".json"),
        ),
    ] = None,
    residue: Annotated[
        str,
        typer.Option(
            metavar="error|keep",
            help="If a replacement cannot be folded: stop with an error, or keep it in the model at run time.",
        ),
    ] = "error",
    growth: Annotated[
        str,
        typer.Option(
            metavar="error|allow",
            help="If the result would hold more numbers than the model: stop with an error, or write it anyway.",
        ),
    ] = "error",
    print_passes: Annotated[bool, typer.Option("--print-passes", help="Print the IR after every pass.")] = False,
    force: Force = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Lower a model by a plan and write the smaller one.

    The result computes exactly what the model computes with those units replaced. Check it with `cmrc check`.

    A checkpoint folder becomes another folder, which `from_pretrained` loads, or an .onnx file. Weights are read one at
    a time, while they are written.
    """
    with reported(as_json), ExitStack() as outputs:
        if residue not in ("error", "keep"):
            raise CmrcError(f"--residue is {residue!r}", fix="write --residue error or --residue keep")
        if growth not in ("error", "allow"):
            raise CmrcError(f"--growth is {growth!r}", fix="write --growth error or --growth allow")
        path = output
        if model.is_dir() and not output.suffix and str(output) != STREAM:
            require_new_folder(output)
        else:
            reads = [model, plan]
            place = writable(output, "a model", ".onnx", reads=reads, force=force, as_json=as_json)
            path = outputs.enter_context(place)

        def show(name: str, graph: Graph) -> None:
            if print_passes:
                terminal.err.print(f"; {name}\n{to_text(graph)}", soft_wrap=True)

        lowered = lower(model, plan, residue=residue, growth=growth, watch=show)  # type: ignore[arg-type]
        lowered.save(path, overwrite=force)
        if as_json:
            print(json.dumps({"output": str(output), "report": lowered.report.to_json()}, indent=1))
            return
        terminal.out.print(str(lowered.report))
        if terminal.verbose:
            stages = ", ".join(f"{stage} {seconds:.3f} s" for stage, seconds in lowered.report.seconds.items())
            terminal.out.print(f"\n{stages}")
        written = sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]))
        terminal.out.print(f"\nwrote {output} ({written:,} bytes)")
