"""`cmrc plan show`: print a plan for people to read."""

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

MOST = 8  # units whose c* is shown in parts, unless -v asks for all


@app.command("show", epilog=examples("cmrc plan show plan.json", "cmrc plan show plan.json --json"))
def plan_show(plan: PlanFile, as_json: AsJson = False, quiet: Quiet = False, verbose: Verbose = False) -> None:
    """Show a plan: every do with its site, units and constants.

    Also shows the model that the plan is for, and how the plan was made. Where constants are c*, it shows their parts:
    the curvature-weighted mean, the gradient part, and the value that was folded after clipping; -v shows every unit.
    """
    with reported(as_json):
        loaded = Plan.load(plan)
        rows = [
            {"do": i, "site": e.site, "value": e.value, "axis": e.axis, "units": to_ranges(e.units),
             "count": len(e.units),
             "becomes": "affine" if e.weight is not None else "constant",
             "basis": None if e.basis is None else list(e.basis.shape[:2]), "parents": to_ranges(e.parents),
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
            if e.basis is not None:
                becomes += f", in a basis of {e.basis.shape[0]} blocks of {e.basis.shape[1]}"
            table.add_row(f"[{r['do']}]", e.site, str(e.axis), str(r["count"]), shortened(str(r["units"])), becomes)
        terminal.out.print(table)
        show_made(loaded, every_unit=verbose)
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


class _Parts(BaseModel):
    """c* = weighted mean − gradient part, of each unit."""

    units: list[int]
    lengths: bool
    weighted_mean: list[float] = Field(alias="weighted mean")
    gradient_part: list[float] = Field(alias="gradient part")


class _Site(BaseModel):
    units: int
    kept: int
    predicted: float
    curvature: str = ""
    means: int = Field(default=0, alias="mean instead of c*")
    parts: _Parts | None = Field(default=None, alias="c*")


class _Certificate(BaseModel):
    target: str
    delta: float
    keep: float
    tests: list[Any]


class _Made(BaseModel):
    """What `cmrc.plan` records. A plan that was written by other means may record anything, or nothing."""

    recipe: _Recipe
    data: str
    samples: int
    sites: dict[str, _Site]
    certificate: _Certificate | None = None
    left_out: dict[str, str] = {}


def show_made(plan: Plan, *, every_unit: bool = False) -> None:
    """How a plan was made, for people to read."""
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
    for name, reason in record.left_out.items():
        terminal.out.print(f"left out: {name}: {reason}")
    for name, site in record.sites.items():
        if site.parts is not None:
            show_parts(plan, name, site.parts, every_unit)
    certificate = record.certificate
    if certificate is not None:
        terminal.out.print(
            f"{certificate.target} is certified with probability {1 - certificate.delta:g} at keep {certificate.keep:g}, "
            f"the smallest of {len(certificate.tests)} tested"
        )


def show_parts(plan: Plan, site: str, parts: _Parts, every_unit: bool) -> None:
    """The parts of a site's c*: for the units with the largest gradient part, or for all."""
    count = min({len(parts.units), len(parts.weighted_mean), len(parts.gradient_part)})
    order = sorted(range(count), key=lambda i: (-abs(parts.gradient_part[i]), i))
    folded = {
        unit: value.item()
        for entry in plan.entries
        if entry.site == site and entry.weight is None and entry.constant.size == len(entry.units)
        for unit, value in zip(entry.units, entry.constant.ravel(), strict=True)
    }
    shown = sorted(order) if every_unit else order[:MOST]
    what = "lengths of the vectors" if parts.lengths else "c* = weighted mean − gradient part"
    rest = "" if len(shown) == count else f"; the {len(shown)} largest gradient parts of {count}, all with -v"
    terminal.out.print(f"{site}: {what}{rest}")
    table = columns("unit", "weighted mean", "gradient part", "c*", "folded")
    for i in shown:
        unit, mean, gradient = parts.units[i], parts.weighted_mean[i], parts.gradient_part[i]
        optimal = "" if parts.lengths else f"{mean - gradient:.4g}"
        table.add_row(
            str(unit), f"{mean:.4g}", f"{gradient:.4g}", optimal, f"{folded[unit]:.4g}" if unit in folded else ""
        )
    terminal.out.print(table)
