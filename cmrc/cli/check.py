"""`cmrc check`: is a lowered model equal to the original with its units literally replaced?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from cmrc.cli import terminal
from cmrc.cli.options import AsJson, Data, Model, PlanFile, Sizes, parse_sizes
from cmrc.cli.terminal import fail, reported
from cmrc.errors import InputError
from cmrc.hosts.inputs import random_inputs, require_known
from cmrc.program.lower import compare
from cmrc.program.plan import Plan
from cmrc.program.program import Program
from cmrc.program.trace import trace
from cmrc.statistics.batches import read_arrays

app = typer.Typer(add_completion=False)


@app.command()
def check(
    model: Model,
    lowered: Annotated[Path, typer.Argument(help="The lowered model.", show_default=False)],
    plan: PlanFile,
    data: Data = None,
    size: Sizes = None,
    seed: Annotated[int, typer.Option(min=0, help="For random inputs.")] = 0,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0, help="Allowed difference, of the output's scale. By the outputs' precision if absent."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare a lowered model with the original, its units literally replaced. Exit code 0 only if they are equal."""
    with reported(as_json):
        program, small = trace(model), trace(lowered)
        loaded = Plan.load(plan)
        program.require(loaded)
        inputs = read_inputs(program, data) if data else draw_inputs(program, parse_sizes(size or []), seed)
        result = compare(program.host, program.clamped(loaded), small.host, inputs, tolerance)
        if as_json:
            print(
                json.dumps(
                    {
                        "holds": result.holds,
                        "error": result.error,
                        "tolerance": result.tolerance,
                        "moved": result.moved,
                    },
                    indent=1,
                )
            )
        else:
            terminal.out.print(str(result))
    if not result.holds:
        fail(1)


def draw_inputs(program: Program, sizes: Mapping[str, int], seed: int) -> dict[str, Any]:
    require_known(sizes, program.graph.inputs)
    return random_inputs(program.graph.inputs, sizes, seed)


def read_inputs(program: Program, path: Path) -> dict[str, Any]:
    names = [value.name for value in program.graph.inputs]
    loaded = read_arrays(path)
    if isinstance(loaded, np.ndarray):
        return {names[0]: loaded}
    missing = [name for name in names if name not in loaded]
    if missing:
        raise InputError(
            f"there is no array for input {missing[0]!r}", at=str(path), fix=f"name the arrays {', '.join(names)}"
        )
    return {name: loaded[name] for name in names}
