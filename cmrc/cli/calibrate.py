"""`cmrc calibrate`: run a model over data and write the statistics of its sites."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from cmrc.cli import terminal
from cmrc.cli.options import AsJson, BatchSize, CalibrationData, Force, Model, Output, PositionsOption, SiteNames
from cmrc.cli.outputs import require_output
from cmrc.cli.terminal import bar, reported
from cmrc.hosts.derivatives import LOSSES
from cmrc.program.trace import trace
from cmrc.statistics import distributed
from cmrc.statistics.batches import SIZE
from cmrc.statistics.calibrate import calibrate
from cmrc.statistics.stats import NEEDS

app = typer.Typer(add_completion=False)


@app.command("calibrate")
def calibrate_command(
    model: Model,
    data: CalibrationData,
    output: Output,
    sites: SiteNames = None,
    need: Annotated[
        list[str] | None, typer.Option(help=f"Any of {', '.join(NEEDS)}; means and variances are always there.")
    ] = None,
    positions: PositionsOption = "all",
    loss: Annotated[str, typer.Option(help=f"What curvature is of: {', '.join(LOSSES)}.")] = "cross-entropy",
    batch: BatchSize = SIZE,
    seed: Annotated[int, typer.Option(min=0, help="For what is drawn.")] = 0,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Run a model over data and write the statistics of its sites. Under torchrun every process takes its share."""
    with reported(as_json), distributed.group():
        require_output(output, "a file of statistics", ".safetensors", reads=[model, data], force=force)
        stats = calibrate(
            trace(model), data, sites=sites or "*", need=need or (), positions=as_position(positions),
            loss=loss, seed=seed, size=batch, shard=distributed.shard(), watch=bar,
        )  # fmt: skip
        stats = distributed.all_merge(stats)
        if distributed.shard()[0]:
            return
        stats.save(output)
        if as_json:
            told = {name: {"units": s.columns.units, "rows": s.count, "how": s.how} for name, s in stats.sites.items()}
            print(
                json.dumps(
                    {"output": str(output), "samples": stats.samples, "data": stats.digest, "sites": told}, indent=1
                )
            )
            return
        terminal.out.print(
            f"wrote {output}: {len(stats.sites)} sites, {stats.samples} samples, data {stats.digest}", markup=False
        )


def as_position(text: str) -> str | int:
    return int(text) if text.lstrip("-").isdigit() else text
