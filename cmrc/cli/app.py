"""The command line. Exit codes: 0 it holds, 1 it does not (a check fails, a replacement stays), 2 the input is bad."""

from __future__ import annotations

from typing import Annotated, ClassVar

import typer

from cmrc._version import __version__
from cmrc.cli import process
from cmrc.cli.lazy import Entry, LazyGroup


class Commands(LazyGroup):
    """All of them, in the order of a first round."""

    entries: ClassVar = {
        "inspect": Entry("cmrc.cli.inspect", "List the sites of a model, or its groups of coupled units."),
        "calibrate": Entry("cmrc.cli.calibrate", "Run a model over data and write the statistics of its sites."),
        "plan": Entry("cmrc.cli.plan", "Make a plan: `cmrc plan MODEL ...`; or read one."),
        "lower": Entry("cmrc.cli.lower", "Lower a model by a plan and write the smaller one."),
        "check": Entry("cmrc.cli.check", "Compare a lowered model with the original, its units literally replaced."),
        "verify": Entry("cmrc.cli.verify", "Verify lowered models under interchange interventions."),
        "bench": Entry("cmrc.cli.bench", "Compare how fast ONNX files run under onnxruntime."),
        "annotate": Entry("cmrc.cli.annotate", "Write the plan's do's onto the model's nodes, without lowering."),
    }


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=(
    "Causal mechanism reduction compiler: fold do(unit := constant or affine function of others) into a smaller model."
    "\n\nA first round:  cmrc inspect MODEL.onnx;  "
    "cmrc plan MODEL.onnx --data DIR --keep 0.5 -o plan.json (or write one in Python: cmrc.Plan);  "
    "cmrc lower MODEL.onnx plan.json -o small.onnx;  "
    "cmrc check MODEL.onnx small.onnx plan.json;  "
    "cmrc verify MODEL.onnx small.onnx plan.json --data held-out.npz"
))  # fmt: skip


@app.callback(invoke_without_command=True)
def main_options(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    process.accept_every_character()
    with process.stoppable():
        app(prog_name="cmrc")


if __name__ == "__main__":
    main()
