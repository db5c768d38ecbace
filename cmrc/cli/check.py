"""`cmrc check`: does a lowered model equal the original with its units literally replaced?"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from cmrc.cli import terminal
from cmrc.cli.options import NPY, AsJson, Model, PlanFile, Quiet, Seed, Sizes, Verbose, examples, new_app, parse_sizes
from cmrc.cli.terminal import fail, progress, reported
from cmrc.hosts.inputs import random_batches, require_known
from cmrc.program.check import Check, check_batches, clamped_in_float64, nudged_host
from cmrc.program.lower import stored_otherwise
from cmrc.program.plan import Plan
from cmrc.program.program import Program, trace
from cmrc.program.provenance import provenance_notes
from cmrc.program.steps import rounded_anew
from cmrc.statistics.batches import SIZE, batches, fixed_batch

app = new_app()


@app.command(
    epilog=examples(
        "cmrc check model.onnx small.onnx plan.json", "cmrc check model.onnx small.onnx plan.json --data images.npy"
    )
)
def check(
    model: Model,
    lowered: Annotated[Path, typer.Argument(metavar="LOWERED", help="The lowered model.", show_default=False)],
    plan: PlanFile,
    data: Annotated[
        Path | None, typer.Option(metavar="DATA", help=f"Inputs: {NPY}.", show_default="random inputs")
    ] = None,
    size: Sizes = None,
    seed: Seed = 0,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="NUMBER",
            help="Allowed difference, relative to the largest output.",
            show_default="by precision",
        ),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Check a lowered model against the original with units replaced.

    The exit code is 0 only if they are equal, up to rounding. A file that `cmrc lower` wrote is also compared number by number
    with the result of folding the plan, unless a tolerance is given. The output also shows how often the lowered model
    has the same top class as the original: a model can equal its plan and still be bad.

    A model that was recovered (`cmrc recover`) no longer equals the plan, and the output says so: judge it with `cmrc verify`.
    """
    with reported(as_json):
        program, small = trace(model), trace(lowered)
        loaded = Plan.load(plan)
        program.require(loaded)
        inputs = read_inputs(program, data) if data else draw_inputs(program, parse_sizes(size or []), seed)
        result = check_batches(
            program.host,
            program.clamped(loaded),
            small.host,
            progress(inputs, None, "batches"),
            tolerance=tolerance,
            nudged=lambda: nudged_host(program, loaded.entries),
            exactly=clamped_in_float64(program, loaded.entries),
            anew=lambda: rounded_anew(program, loaded.entries),
            seed=seed,
        )
        stored = stored_otherwise(program, loaded, small) if tolerance is None else None
        result = replace(result, recovered="recovered" in provenance_notes(small), stored=stored)
        if as_json:
            print(
                json.dumps(
                    {
                        "holds": result.holds,
                        "error": result.error,
                        "tolerance": result.tolerance,
                        "rounding": result.rounding,
                        "moved": result.moved,
                        "batches": result.batches,
                        "agreement": result.agreement,
                        "answers": result.answers,
                        "random": data is None,
                        "recovered": result.recovered,
                        "stored": None if result.stored is None else list(result.stored),
                    },
                    indent=1,
                )
            )
        else:
            terminal.out.print(str(result))
            terminal.out.print(beside_the_original(result, data is None))
    if not result.holds:
        fail(1)


def beside_the_original(result: Check, is_random: bool) -> str:
    """How good the lowered model is, printed together with how exact it is."""
    if result.agreement is None:
        return "agreement with the original: no output has an axis of classes; `cmrc verify` compares values"
    share = f"the same top class in {100 * result.agreement:.1f} % of {result.answers} answers"
    remark = " on random inputs, which say little: give --data" if is_random else ""
    return f"agreement with the original: {share}{remark}"


def draw_inputs(program: Program, sizes: Mapping[str, int], seed: int) -> list[dict[str, Any]]:
    require_known(sizes, program.graph.inputs)
    return random_batches(program.host, sizes=sizes, seed=seed)


def read_inputs(program: Program, path: Path) -> Iterator[dict[str, Any]]:
    """The data in batches. A model with a fixed batch size gets that many rows each time; the last rows are repeated."""
    names = [value.name for value in program.graph.inputs]
    rows = fixed_batch(program.graph.inputs)
    for batch in batches(path, names, size=rows or SIZE):
        if rows is None or len(batch) == rows:
            yield batch.inputs
        else:
            again = np.minimum(np.arange(rows), len(batch) - 1)
            yield {name: array[again] for name, array in batch.inputs.items()}
