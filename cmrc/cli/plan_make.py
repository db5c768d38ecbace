"""`cmrc plan`: a plan from a model, data (or statistics) and a recipe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from cmrc.cli import terminal
from cmrc.cli.options import AsJson, Force, Model, Output, SiteNames
from cmrc.cli.outputs import require_output
from cmrc.cli.plan_show import show_made
from cmrc.cli.terminal import bar, reported
from cmrc.errors import RecipeError
from cmrc.files import require_picture
from cmrc.planning.planner import plan as make_plan
from cmrc.planning.plots import plot_scores
from cmrc.planning.recipe import PRESETS
from cmrc.program.trace import trace
from cmrc.statistics.stats import Stats

app = typer.Typer(add_completion=False)


@app.command("make")
def plan_make(
    model: Model,
    output: Output,
    data: Annotated[
        Path | None, typer.Option(help="Calibration data: a folder of .npy or .npz files, or one file.")
    ] = None,
    stats: Annotated[Path | None, typer.Option(help="Statistics that `cmrc calibrate` wrote, instead of data.")] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="A recipe (YAML). What is said here besides overrides it.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help=f"One of {', '.join(PRESETS)}.")] = None,
    keep: Annotated[
        list[str] | None, typer.Option(help="What stays: 0.5 or 64, or by site or glob: 'blocks.*=0.5'.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Instead of keep, for the whole model: parameters=0.5, macs, bytes or latency.")
    ] = None,
    sites: SiteNames = None,
    seed: Annotated[int | None, typer.Option(min=0, help="For what is drawn.")] = None,
    certify: Annotated[
        str | None, typer.Option(help="Instead of keep: the smallest plan of which this is certified, 'iia>=0.95'.")
    ] = None,
    held_out: Annotated[Path | None, typer.Option(help="Data to certify on, apart from those of calibration.")] = None,
    delta: Annotated[float, typer.Option(help="The certificate may fail with this probability.")] = 0.05,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the scores of every site, with the cut, to this file.")
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Make a plan from a model, data (or statistics) and a recipe. The word `make` may be left out."""
    with reported(as_json):
        require_output(output, "a plan", ".json", reads=[model, data, stats, recipe, held_out], force=force)
        if plot is not None:
            require_picture(plot)
        options: dict[str, Any] = {"preset": preset, "sites": sites, "seed": seed}
        program = trace(model)
        if keep:
            options["keep"] = pairs(keep)
        if budget is not None:
            of, _, amount = budget.partition("=")
            if not amount:
                raise RecipeError(f"--budget {of} needs an amount", fix=f"write --budget {of}=0.5")
            options["budget"] = {"of": of, "amount": as_amount(amount)}
        options = {name: value for name, value in options.items() if value is not None}
        known = Stats.load(stats) if stats is not None else None
        made = make_plan(
            program, known, data=data, recipe=recipe, watch=bar, certify=certify, held_out=held_out, delta=delta,
            **options,
        )  # fmt: skip
        made.save(output)
        if plot is not None:
            plot_scores(made, plot)
        if as_json:
            print(json.dumps({"output": str(output), **made.made}, indent=1))
            return
        show_made(made)
        terminal.out.print(f"wrote {output}: {len(made)} replacements", markup=False)


def as_amount(text: str) -> int | float:
    """0.5 is a part, 64 a number."""
    try:
        return int(text) if text.isdigit() else float(text)
    except ValueError as error:
        raise RecipeError(f"{text!r} is no number", fix="write 0.5 for a part, 64 for a number") from error


def pairs(texts: Sequence[str]) -> int | float | dict[str, int | float]:
    """--keep 0.5, or --keep 'blocks.*=0.5' as often as needed."""
    if len(texts) == 1 and "=" not in texts[0]:
        return as_amount(texts[0])
    split = [text.rpartition("=") for text in texts]
    if whole := [amount for name, _, amount in split if not name]:
        raise RecipeError(
            f"--keep {whole[0]} stands beside others", fix="give one for all sites, or each as 'site=0.5'"
        )
    return {name: as_amount(amount) for name, _, amount in split}
