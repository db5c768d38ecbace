"""`cmrc inspect`: the sites of a model, its groups, or its IR."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from cmrc.cli import terminal
from cmrc.cli.options import AsJson, Model
from cmrc.cli.terminal import bar, columns, reported
from cmrc.ir.text import to_text
from cmrc.program.program import Program
from cmrc.program.trace import trace

app = typer.Typer(add_completion=False)


@app.command()
def inspect(
    model: Model,
    sites: Annotated[str, typer.Option(help="Only sites (or groups) whose name matches this glob.")] = "*",
    ir: Annotated[bool, typer.Option("--ir", help="Print the intermediate representation and nothing else.")] = False,
    groups: Annotated[
        bool, typer.Option("--groups", help="What is coupled with what, and why, instead of the sites.")
    ] = False,
    folds: Annotated[
        bool, typer.Option(help="Find out for every site how a replaced unit folds (a dry run each).")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """List the sites of a model, or its groups of coupled units: who reads them, how a replaced unit folds."""
    with reported(as_json):
        program = trace(model)
        if ir:
            print(json.dumps({"ir": to_text(program.graph)}, indent=1) if as_json else to_text(program.graph))
            return
        if groups:
            inspect_groups(program, sites, folds, as_json)
            return
        plain = program.sites(sites, folds=False)
        found = [program.describe(site) for site in bar(plain, None, "dry runs")] if folds else plain
        if as_json:
            rows = [
                {"name": s.name, "value": s.value, "op": s.op, "axis": s.axis, "units": s.units, "shape": list(s.shape),
                 "consumers": list(s.consumers), "folds": s.folds} for s in found
            ]  # fmt: skip
            ops = program.fingerprint.ops
            print(
                json.dumps(
                    {"model": str(model), "digest": program.fingerprint.digest, "ops": ops, "sites": rows}, indent=1
                )
            )
            return
        table = columns("site", "op", "axis", "units", "read by", "a replaced unit")
        for s in found:
            table.add_row(s.name, s.op, str(s.axis), str(s.units), ", ".join(s.consumers), s.folds)
        terminal.out.print(table)
        cost = program.cost()
        terminal.out.print(
            f"{len(found)} sites; {cost.parameters:,} parameters, {cost.macs:,} MACs (sizes of run time count as 1)"
        )


def inspect_groups(program: Program, pattern: str, folds: bool, as_json: bool) -> None:
    found = program.groups(pattern, folds=folds)
    if as_json:
        print(json.dumps({"groups": [group.to_json() for group in found]}, indent=1))
        return
    for group in found:
        terminal.out.print(str(group), markup=False)
    terminal.out.print(f"{len(found)} groups")
