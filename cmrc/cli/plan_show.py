"""`cmrc plan show`: a plan for a person to read."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from cmrc.cli import terminal
from cmrc.cli.options import AsJson, PlanFile, Quiet, Verbose, examples, new_app
from cmrc.cli.terminal import columns, reported, shortened
from cmrc.program.plan import Plan
from cmrc.program.plan_entry import to_ranges

app = new_app()


@app.command("show", epilog=examples("cmrc plan show plan.json", "cmrc plan show plan.json --json"))
def plan_show(plan: PlanFile, as_json: AsJson = False, quiet: Quiet = False, verbose: Verbose = False) -> None:
    """Show a plan: every do with its site, units and constants.

    Beside them, the model that the plan was made for and how it was made.
    """
    with reported(as_json):
        loaded = Plan.load(plan)
        rows = [
            {"do": i, "site": e.site, "value": e.value, "axis": e.axis, "units": to_ranges(e.units),
             "count": len(e.units),
             "becomes": "affine" if e.weight is not None else "constant", "parents": to_ranges(e.parents),
             "smallest": float(e.constant.min()), "largest": float(e.constant.max())}
            for i, e in enumerate(loaded.entries)
        ]  # fmt: skip
        if as_json:
            digest = loaded.fingerprint.digest if loaded.fingerprint else None
            print(json.dumps({"plan": str(plan), "model": digest, "made": loaded.made, "do": rows}, indent=1))
            return
        table = columns("do", "site", "axis", "replaced", "units", "becomes")
        for e, r in zip(loaded.entries, rows, strict=True):
            span = f"{r['smallest']:.4g} .. {r['largest']:.4g}"
            becomes = (
                f"affine function of {len(e.parents)} units, bias {span}"
                if e.weight is not None
                else f"constants {span}"
            )
            table.add_row(f"[{r['do']}]", e.site, str(e.axis), str(r["count"]), shortened(str(r["units"])), becomes)
        terminal.out.print(table)
        show_made(loaded)
        if loaded.fingerprint:
            terminal.out.print(
                f"for model {loaded.fingerprint.digest} with {len(loaded.fingerprint.weights)} parameters"
            )


class _Recipe(BaseModel):
    preset: str
    objective: str
    select: str
    replace: str
    seed: int


class _Site(BaseModel):
    units: int
    kept: int
    predicted: float
    curvature: str = ""
    means: int = Field(default=0, alias="mean instead of c*")


class _Certificate(BaseModel):
    target: str
    delta: float
    keep: float
    tests: list[Any]


class _Made(BaseModel):
    """What `cmrc.plan` records; a plan that was written otherwise may say anything, or nothing."""

    recipe: _Recipe
    data: str
    samples: int
    sites: dict[str, _Site]
    certificate: _Certificate | None = None


def show_made(plan: Plan) -> None:
    """How a plan came about, for a person."""
    if not plan.made:
        return
    try:
        record = _Made.model_validate(plan.made)
    except ValidationError:
        terminal.out.print(f"made: {shortened(json.dumps(plan.made), 400)}")
        return
    recipe = record.recipe
    terminal.out.print(
        f"{recipe.preset}: objective {recipe.objective}, selection {recipe.select}, replacement {recipe.replace}; "
        f"seed {recipe.seed}; data {record.data} of {record.samples} samples"
    )
    table = columns("site", "units", "kept", "predicted risk", "remark")
    for name, site in record.sites.items():
        remark = f"{site.curvature}; the mean for {site.means} columns without a c*" if site.means else site.curvature
        table.add_row(name, str(site.units), str(site.kept), f"{site.predicted:.4g}", remark)
    terminal.out.print(table)
    certificate = record.certificate
    if certificate is not None:
        terminal.out.print(
            f"{certificate.target} is certified with probability {1 - certificate.delta:g} at keep {certificate.keep:g}, "
            f"the smallest of {len(certificate.tests)} tested"
        )
