"""`cmrc calibrate`: run a model over data and write the statistics of its sites."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from cmrc.cli import terminal
from cmrc.cli.options import (
    AsJson,
    BatchSize,
    CalibrationData,
    Force,
    Model,
    Output,
    Quiet,
    Seed,
    SiteNames,
    Verbose,
    as_position,
    examples,
    new_app,
)
from cmrc.cli.outputs import require_output
from cmrc.cli.recipe_options import loss_option, positions_option
from cmrc.cli.terminal import progress, reported
from cmrc.errors import StatsError
from cmrc.planning.spilled import calibrate_by_pieces
from cmrc.program.program import trace
from cmrc.statistics import distributed
from cmrc.statistics.batches import SIZE
from cmrc.statistics.calibrate import calibrate
from cmrc.statistics.site_stats import NEEDS

app = new_app()


@app.command(
    "calibrate",
    epilog=examples(
        "cmrc calibrate model.onnx --data images.npy -o stats.safetensors",
        "cmrc calibrate model.onnx --data folder/ --sites 'blocks.*' --need scatter -o stats.safetensors",
    ),
)
def calibrate_command(
    model: Model,
    data: CalibrationData,
    output: Output,
    sites: SiteNames = None,
    need: Annotated[
        list[str] | None,
        typer.Option(metavar="WHAT", help=f"Beside means and variances: any of {', '.join(NEEDS)}; repeatable."),
    ] = None,
    positions: Annotated[str, positions_option()] = "all",
    loss: Annotated[str, loss_option()] = "cross-entropy",
    batch: BatchSize = SIZE,
    seed: Seed = 0,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where to save intermediate results; after an interruption, the same command resumes from there.",
        ),
    ] = None,
    pieces: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="For a model that does not fit into memory: run it piece by piece, with what is between two pieces in this folder; "
            "after an interruption, the same command resumes from the last piece.",
        ),
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Run a model over data and write the statistics of its sites.

    Several plans can then be made without the data. Under torchrun, each process runs its share.
    """
    with reported(as_json), distributed.group():
        require_output(output, "a file of statistics", ".safetensors", reads=[model, data], force=force)
        asked: dict[str, Any] = {"sites": sites or "*", "need": need or (), "positions": as_position(positions)}
        asked |= {"size": batch, "watch": progress}
        if pieces is not None:
            if checkpoint is not None or distributed.shard()[1] > 1:
                other = "--checkpoint" if checkpoint is not None else "torchrun"
                raise StatsError(f"--pieces cannot be combined with {other}", fix=f"leave out {other} or --pieces")
            stats = calibrate_by_pieces(trace(model), data, pieces, **asked)
        else:
            stats = calibrate(
                trace(model), data, loss=loss, seed=seed, shard=distributed.shard(), checkpoint=checkpoint, **asked
            )
        stats = distributed.all_merge(stats)
        if distributed.shard()[0]:
            return
        stats.save(output)
        if as_json:
            rows = {name: {"units": s.columns.units, "rows": s.count, "how": s.how} for name, s in stats.sites.items()}
            print(
                json.dumps(
                    {"output": str(output), "samples": stats.samples, "data": stats.digest, "sites": rows}, indent=1
                )
            )
            return
        terminal.out.print(f"wrote {output}: {len(stats.sites)} sites, {stats.samples} samples, data {stats.digest}")
