"""`cmrc plan`: a plan from a model, data (or statistics) and a recipe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from cmrc.cli import terminal
from cmrc.cli.options import (
    NPY,
    AsJson,
    Delta,
    Force,
    Model,
    OutputOrStream,
    Protected,
    Quiet,
    SiteNames,
    Verbose,
    as_position,
    batch_option,
    data_option,
    examples,
    held_out_option,
    keep_option,
    new_app,
    seed_option,
)
from cmrc.cli.outputs import writable
from cmrc.cli.plan_show import show_made
from cmrc.cli.recipe_options import loss_option, positions_option, preset_option
from cmrc.cli.terminal import progress, reported
from cmrc.errors import RecipeError
from cmrc.files import require_picture
from cmrc.planning.planner import plan as make_plan
from cmrc.planning.plots import plot_scores
from cmrc.planning.progress import remove_checkpoint
from cmrc.planning.recipe import Recipe
from cmrc.program.program import trace
from cmrc.statistics import distributed
from cmrc.statistics.stats import Stats

app = new_app()

DEFAULTS = Recipe()


@app.command(
    "make",
    epilog=examples(
        "cmrc plan model.onnx --data images.npy --preset joint --keep 0.5 -o plan.json",
        "cmrc plan model.onnx --data images.npy --preset joint --budget macs=0.7 -o plan.json",
        "cmrc plan model.onnx --data train/ --certify 'iia>=0.95' --held-out test.npz -o plan.json",
    ),
)
def plan_make(
    model: Model,
    output: OutputOrStream,
    data: Annotated[Path | None, data_option(NPY)] = None,
    stats: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Statistics that `cmrc calibrate` wrote, instead of data (--budget needs both)."
        ),
    ] = None,
    preset: Annotated[str | None, preset_option(DEFAULTS.preset)] = None,
    keep: Annotated[
        list[str] | None,
        keep_option("a share (0.5) or a number (64); for some sites: 'blocks.*=0.5'. Can be repeated", "0.5"),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT=AMOUNT",
            help="Instead of --keep, a budget for the whole model: parameters, macs, bytes, latency or units, as macs=0.5.",
        ),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A recipe file (YAML). Options on the command line take precedence over it."),
    ] = None,
    sites: SiteNames = None,
    protect: Protected = None,
    certify: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET",
            help="Instead of --keep: find the smallest plan for which this target is certified, as 'iia>=0.95'.",
        ),
    ] = None,
    held_out: Annotated[Path | None, held_out_option("DATA")] = None,
    delta: Delta = 0.05,
    positions: Annotated[str | None, positions_option("all")] = None,
    loss: Annotated[str | None, loss_option(DEFAULTS.loss)] = None,
    batch: Annotated[int | None, batch_option(str(DEFAULTS.batch))] = None,
    seed: Annotated[int | None, seed_option("0")] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Where to save intermediate results; after an interruption, the same command resumes from there.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Plot the scores of every site, with the cut: .png, .svg or .pdf."),
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Make a plan from a model, data (or statistics) and a recipe.

    The plan says which units are replaced, and by what. The word `make` may be left out. Under torchrun, each process
    runs its share of the data.
    """
    reads, first = [model, data, stats, recipe, held_out], not distributed.shard()[0]
    with (
        reported(as_json),
        distributed.group(),
        writable(output, "a plan", ".json", reads=reads, force=force, as_json=as_json)
        if first
        else nullcontext() as path,
    ):
        if plot is not None:
            require_picture(plot)
        options: dict[str, Any] = {
            "preset": preset, "sites": sites, "protect": protect or None, "seed": seed, "batch": batch, "loss": loss,
            "positions": None if positions is None else as_position(positions),
        }  # fmt: skip
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
        plan = make_plan(
            program, known, data=data, recipe=recipe, watch=progress, certify=certify, held_out=held_out, delta=delta,
            checkpoint=checkpoint, keep_checkpoint=True, spread=True, **options,
        )  # fmt: skip
        if path is None:  # only the first process writes
            return
        plan.save(path, one_file=path is not output)
        if plot is not None:
            plot_scores(plan, plot)
        if as_json:
            print(json.dumps({"output": str(output), **plan.made}, indent=1))
        else:
            show_made(plan)
            terminal.out.print(f"wrote {output}: {len(plan)} replacements")
    if checkpoint is not None:  # the plan itself is complete by now
        remove_checkpoint(checkpoint)


def as_amount(text: str) -> int | float:
    """0.5 is a share, 64 a number."""
    try:
        return int(text) if text.isdigit() else float(text)
    except ValueError as error:
        raise RecipeError(f"{text!r} is not a number", fix="write 0.5 for a share, 64 for a number") from error


def pairs(texts: Sequence[str]) -> int | float | dict[str, int | float]:
    """--keep 0.5, or --keep 'blocks.*=0.5', repeated as needed."""
    if len(texts) == 1 and "=" not in texts[0]:
        return as_amount(texts[0])
    split = [text.rpartition("=") for text in texts]
    if whole := [amount for name, _, amount in split if not name]:
        raise RecipeError(
            f"--keep {whole[0]} is given together with other values",
            fix="give one value for all sites, or write each as 'site=0.5'",
        )
    return {name: as_amount(amount) for name, _, amount in split}
