"""`cmrc inspect`: the inputs, outputs, cost and sites of a model; or its groups; or its IR."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from cmrc.cli import terminal
from cmrc.cli.options import AsJson, Model, Quiet, Verbose, examples, new_app
from cmrc.cli.terminal import columns, listed, progress, reported, shortened
from cmrc.ir.graph import Value
from cmrc.ir.text import to_text
from cmrc.program.program import Program, trace
from cmrc.program.reach import last_of_each_run, reach
from cmrc.program.sites import Site

app = new_app()

SHOWN = 20  # sites, unless more are asked for
WIDTH = 100  # characters of a cell
READERS = 60  # characters of the names of what reads a site


@app.command(epilog=examples("cmrc inspect model.onnx", "cmrc inspect model.onnx --groups --sites 'layer2*'"))
def inspect(
    model: Model,
    sites: Annotated[
        str, typer.Option(metavar="GLOB", help="Only sites (or groups) whose name matches this glob.")
    ] = "*",
    foldable: Annotated[
        bool, typer.Option("--foldable", help="List all sites that fold, not only the best ones.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="List all sites, in the order of the model.")] = False,
    groups: Annotated[
        bool, typer.Option("--groups", help="Show which units are coupled and why, instead of the sites.")
    ] = False,
    ir: Annotated[bool, typer.Option("--ir", help="Print the intermediate representation and nothing else.")] = False,
    folds: Annotated[bool, typer.Option(help="Show how a replaced unit folds, with a dry run per site.")] = True,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show a model: inputs, sizes, units that can be replaced.

    A site is a value of the model with an axis of units (channels, neurons, heads). "reach" is the share of the model's
    parameters that belong to ops which write or read these units. A unit that folds leaves nothing behind at run time.
    """
    with reported(as_json):
        program = trace(model)
        if ir:
            print(json.dumps({"ir": to_text(program.graph)}, indent=1) if as_json else to_text(program.graph))
            return
        if groups:
            inspect_groups(program, sites, folds, as_json)
            return
        every = program.sites(sites, folds=False)
        if folds:
            every = [program.describe(site) for site in progress(every, len(every), "dry runs")]
        if as_json:
            print(json.dumps(document(program, model, [s for s in every if does_fold(s) or not foldable]), indent=1))
            return
        show_model(program, model)
        show_summary(program, every, folds)
        show_sites(program, every, everything=everything or not folds or sites != "*", foldable=foldable)


def does_fold(site: Site) -> bool:
    return site.folding is not None and site.folding.constant.folds


def folds_both_ways(site: Site) -> bool:
    return site.folding is not None and site.folding.folds


def document(program: Program, model: Path, sites: Sequence[Site]) -> dict[str, Any]:
    """Everything, with whole names."""
    rows = [
        {"name": s.name, "value": s.value, "op": s.op, "axis": s.axis, "units": s.units, "shape": list(s.shape),
         "consumers": list(s.consumers), "folds": s.folds, "reach": asdict(reach(program, [s]))} for s in sites
    ]  # fmt: skip
    inputs, outputs = ends(program)
    return {
        "model": str(model),
        "digest": program.fingerprint.digest,
        "ops": program.fingerprint.ops,
        "inputs": [asdict(value) for value in inputs],
        "outputs": [asdict(value) for value in outputs],
        "cost": asdict(program.cost()),
        "foldable": sum(map(does_fold, sites)),
        "reach": asdict(reach(program, [site for site in sites if does_fold(site)])),
        "sites": rows,
    }


def ends(program: Program) -> tuple[Sequence[Value], list[Value]]:
    return program.graph.inputs, [program.values[name] for name in program.graph.outputs]


def show_model(program: Program, model: Path) -> None:
    """Its inputs, its outputs and its cost."""
    inputs, outputs = ends(program)
    cost = program.cost()
    dynamic = sorted({str(n) for value in inputs for n in value.shape if not isinstance(n, int)})
    note = f" (with {', '.join(dynamic)} = 1)" if dynamic else ""
    for word, values in (("inputs", inputs), ("outputs", outputs)):
        ends_shown = listed([f"{v.name} {v.dtype}[{', '.join(map(str, v.shape))}]" for v in values], 4)
        terminal.out.print(f"{word:<8} {ends_shown}")
    terminal.out.print(f"{'size':<8} {cost.parameters:,} parameters, {cost.bytes:,} bytes, {cost.macs:,} MACs{note}")


def show_summary(program: Program, sites: Sequence[Site], folds: bool) -> None:
    """How many sites there are, how many of them fold, and what they reach; or why there are none."""
    if not sites:
        terminal.out.print(f"{'sites':<8} none: {why_none(program)}")
        return
    if not folds:
        terminal.out.print(f"{'sites':<8} {len(sites)}")
        return
    foldable = [site for site in sites if does_fold(site)]
    constants = sum(not folds_both_ways(site) for site in foldable)
    alone = f" ({constants} of them for constants only)" if constants else ""
    if foldable:
        reached = reach(program, foldable)
        rest = (
            f"fold{alone}; they reach {reached.share_of_parameters:.0%} of the parameters "
            f"and {reached.share_of_macs:.0%} of the MACs"
        )
    else:
        reasons = Counter(site.folding.constant.reason or str(site.folding.constant) for site in sites if site.folding)
        reason, count = reasons.most_common(1)[0]
        rest = f"fold; most often ({count} times) because: {reason}"
    terminal.out.print(f"{'sites':<8} {len(sites)}, of which {len(foldable) or 'none'} {rest}")
    hidden = [site.name for site in foldable if site.recurrence is not None]
    inside = [site.name for site in foldable if site.recurrence is None and program.why_apart(site.value)]
    if hidden:
        terminal.out.print(f"{'hidden':<8} units of recurrent layers, replaced at every step: {listed(hidden, 4)}")
    if inside:
        terminal.out.print(f"{'inside':<8} {len(inside)} of those that fold lie in If, Loop or Scan, as {inside[0]}")


def why_none(program: Program) -> str:
    """Why a model has no sites: what it lacks, or which ops cmrc does not know."""
    unknown = Counter(node.kind for node in program.graph.nodes if node.op == "opaque")
    if not any(node.op in ("linear", "conv", "embedding", "matmul", "attention") for node in program.graph.nodes):
        ops = listed([f"{count} {kind}" for kind, count in unknown.most_common()], 4)
        lacks = "the model has no linear op and no convolution whose weights are stored in it"
        return f"{lacks}; ops that cmrc does not know: {ops}" if ops else lacks
    return "no value has an axis of units whose size is fixed"


def show_sites(program: Program, sites: Sequence[Site], *, everything: bool, foldable: bool) -> None:
    """The best sites that fold: first those that fold for both kinds of replacement, then by how much they reach. Or all sites."""
    folding = [site for site in sites if does_fold(site)]
    shown = sites if everything else folding
    if not (everything or foldable):
        best = last_of_each_run(program, folding)
        shown = sorted(best, key=lambda site: (not folds_both_ways(site), -reach(program, [site]).parameters))[:SHOWN]
    if not shown:
        if sites:
            terminal.out.print(
                "\n`cmrc inspect --all` lists them, each with the reason; --groups shows what is coupled"
            )
        return
    table = columns("site", "op", "axis", "units", "reach", "read by", "a replaced unit")
    for site in shown:
        share = f"{reach(program, [site]).share_of_parameters:.0%}"
        readers, end = shortened(listed(site.consumers, 3), READERS), shortened(site.folds, WIDTH)
        table.add_row(site.name, site.op, str(site.axis), str(site.units), share, readers, end)
    terminal.out.print()
    terminal.out.print(table)
    if len(shown) < len(folding):
        terminal.out.print(f"\nthe {len(shown)} best; --foldable lists all {len(folding)} that fold, --all every site")
    elif len(shown) < len(sites):
        terminal.out.print(f"\n--all lists the other {len(sites) - len(shown)} sites too")


def inspect_groups(program: Program, pattern: str, folds: bool, as_json: bool) -> None:
    groups = program.groups(pattern, folds=folds)
    if as_json:
        print(json.dumps({"groups": [group.to_json() for group in groups]}, indent=1))
        return
    for group in groups:
        terminal.out.print(str(group))
    terminal.out.print(f"{len(groups)} groups")
