"""`cmrc diagnose`: can the scores of a model's units be trusted?"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from cmrc.cli import terminal
from cmrc.cli.options import (
    AsJson,
    BatchSize,
    CalibrationData,
    Model,
    Quiet,
    ReportFile,
    Seed,
    SiteNames,
    Verbose,
    examples,
    new_app,
)
from cmrc.cli.recipe_options import preset_option
from cmrc.cli.terminal import columns, progress, reported
from cmrc.hosts.protocols import LOSSES
from cmrc.planning.advice import MEANINGS, examine
from cmrc.planning.recipe import AUTO, make_recipe
from cmrc.program.program import trace
from cmrc.reduction.page import page_of_diagnosis, require_report, write_page

app = new_app()


@app.command(
    "diagnose",
    epilog=examples(
        "cmrc diagnose model.onnx --data train.npz",
        "cmrc diagnose model.onnx --data train.npz --report page.html",
        "cmrc diagnose model.onnx --data train.npz --sites act3 --preset cmr-logit --loss cross-entropy",
    ),
)
def diagnose_command(
    model: Model,
    data: CalibrationData,
    sites: SiteNames = None,
    preset: Annotated[str, preset_option()] = AUTO,
    loss: Annotated[
        str,
        typer.Option(metavar="NAME", help=f"The loss to predict: {', '.join(LOSSES)}. kl needs no labels."),
    ] = "kl",
    count: Annotated[
        int, typer.Option("--units", min=2, metavar="NUMBER", help="How many units of each site to clamp.")
    ] = 16,
    batch: BatchSize = 64,
    seed: Seed = 0,
    report: ReportFile = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Check how far the scores of units can be trusted, with advice: one sentence per site and diagnostic.

    Coupling: how much is missed when single scores are added up. Predictions: whether predicted and measured losses
    rank alike. Kinks: where the bound on the remainder does not hold. Sensitivity: how many of the units that the
    preset keeps would change with half of the data.
    """
    with reported(as_json):
        if report is not None:
            require_report(report)
        recipe = make_recipe(preset=preset, loss=loss, batch=batch, seed=seed)
        findings = examine(trace(model), data, recipe, sites=sites or "*", count=count, watch=progress)
        document = {"model": str(model), "findings": [f.to_json() for f in findings]}
        files = [] if report is None else write_page(page_of_diagnosis(model.name, findings), document, report)
        if as_json:
            print(json.dumps(document, indent=1))
            return
        table = columns("site", "what", "value", "advice")
        for f in findings:
            table.add_row(f.site, f.what, "" if f.value is None else f"{f.value:.3f}", f.advice)
        terminal.out.print(table)
        for what in dict.fromkeys(f.what for f in findings if f.what in MEANINGS):
            terminal.out.print(f"{what}: {MEANINGS[what]}")
        if files:
            terminal.out.print(f"wrote {', '.join(map(str, files[:-1]))} and {files[-1]}")
