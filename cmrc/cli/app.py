"""The command line: all commands, and how they are started.

Exit codes: 0: success; 1: the answer is no (a check fails, a replacement cannot be folded); 2: invalid input; 130: interrupted.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import typer

from cmrc._version import __version__
from cmrc.cli.lazy import Entry, LazyGroup
from cmrc.cli.options import examples


class Commands(LazyGroup):
    """Every command, in the order in which a newcomer needs them."""

    entries: ClassVar = {
        "reduce": Entry("cmrc.cli.reduce", "From a model and a goal to a small, verified model."),
        "demo": Entry("cmrc.cli.demo", "Run the whole workflow offline, with a small model."),
        "inspect": Entry("cmrc.cli.inspect", "Show a model: inputs, sizes, units that can be replaced."),
        "calibrate": Entry("cmrc.cli.calibrate", "Run a model over data and write the statistics of its sites."),
        "plan": Entry("cmrc.cli.plan", "Make a plan: `cmrc plan MODEL ...`; or read one."),
        "diagnose": Entry("cmrc.cli.diagnose", "Check how far the scores of units can be trusted, with advice."),
        "lower": Entry("cmrc.cli.lower", "Lower a model by a plan and write the smaller one."),
        "recover": Entry("cmrc.cli.recover", "Lower a model by a plan, then train the result."),
        "check": Entry("cmrc.cli.check", "Check a lowered model against the original."),
        "verify": Entry("cmrc.cli.verify", "Verify lowered models under interchange interventions."),
        "report": Entry("cmrc.cli.report", "Write the report of a reduction again."),
        "compare": Entry("cmrc.cli.compare", "Compare two reductions."),
        "provenance": Entry("cmrc.cli.provenance", "Show where a lowered model comes from, and verify it."),
        "bench": Entry("cmrc.cli.bench", "Compare how fast ONNX files run under onnxruntime."),
        "assume": Entry("cmrc.cli.assume", "Fix inputs of an ONNX model to constant values."),
        "annotate": Entry("cmrc.cli.annotate", "Write a plan onto the nodes of a model, without lowering it."),
        "schema": Entry("cmrc.cli.schema", "Print the JSON schema of what a command prints with --json."),
    }


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help=(
        "Make a trained network smaller: replace units by constants or by functions of other units, and fold that into the "
        "weights. The result is a plain, dense ONNX file."
    ),
    epilog=examples(
        "cmrc demo",
        "cmrc reduce model.onnx --data images/ -o small.onnx --speedup 1.5",
        "cmrc inspect model.onnx",
        "cmrc plan model.onnx --data train.npz --preset joint --keep 0.5 -o plan.json",
        "cmrc lower model.onnx plan.json -o small.onnx",
        "cmrc check model.onnx small.onnx plan.json",
        "cmrc verify model.onnx small.onnx plan.json --data held-out.npz",
    )
    + "\n\nExit codes: 0: success; 1: the answer is no (a check fails, a target is missed); 2: invalid input; 130: interrupted.",
)


@app.callback(invoke_without_command=True)
def main_options(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit
