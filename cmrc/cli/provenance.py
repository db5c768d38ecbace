"""`cmrc provenance`: where a lowered model comes from, and whether its record is true."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cmrc.cli import terminal
from cmrc.cli.options import AsJson, Quiet, Verbose, examples, new_app
from cmrc.cli.terminal import columns, fail, reported
from cmrc.errors import CmrcError
from cmrc.program.plan import Plan
from cmrc.program.program import trace
from cmrc.program.provenance import EXACT, SAME, SAME_GRAPH, Link, read_provenance, verify_provenance

app = new_app()

WHAT = {
    "version": "cmrc",
    "source": "original model",
    "plan": "plan",
    "recipe": "recipe of the plan",
    "data": "calibration data",
    "versions": "made with",
    "recovered": "trained after lowering",
    SAME: "lowered again",
    SAME_GRAPH: "graph, lowered again",
    EXACT: "exact",
    "quality": "on held-out data",
    "verification": "under interventions",
    "retrained": "changed by training",
}


@app.command(
    epilog=examples(
        "cmrc provenance small.onnx", "cmrc provenance small.onnx --model model.onnx --plan plan.json --json"
    )
)
def provenance(
    small: Annotated[Path, typer.Argument(metavar="SMALL", help="A lowered ONNX model.", show_default=False)],
    model: Annotated[
        Path | None, typer.Option("--model", metavar="FILE", help="The model that was lowered.", show_default=False)
    ] = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", metavar="FILE", help="The plan that it was lowered by.", show_default=False)
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show where a lowered model comes from, and verify it.

    With --model and --plan, every digest is computed again and the model is lowered again: the result must be identical
    to this file. The exit code is 1 if anything does not match.
    """
    with reported(as_json):
        if (model is None) != (plan is None):
            raise CmrcError("--model and --plan verify a file together", fix="give both of them, or neither")
        lowered = trace(small)
        recorded = read_provenance(lowered)
        links: list[Link] = []
        if model is not None and plan is not None:
            links = verify_provenance(lowered, trace(model), Plan.load(plan))
        holds = all(link.holds for link in links)
        if as_json:
            verified = {
                link.name: {"recorded": link.recorded, "actual": link.actual, "holds": link.holds} for link in links
            }
            verdict = {"holds": holds, "links": verified} if links else {}
            print(json.dumps({"file": str(small), "recorded": recorded, **verdict}, indent=1))
        else:
            _show(recorded, {link.name: link for link in links})
    if not holds:
        fail(1)


def in_words(name: str, text: str) -> str:
    """A recorded result for people to read. A record that has another form than those of `reduce` is shown as it is."""
    try:
        finding = json.loads(text) if name in (EXACT, "quality", "verification") else {}
        if name == EXACT:
            return "exact" if finding["holds"] is True else "not exact"
        if name == "quality":
            certain = f"at least {finding['at_least']:.4f} with probability {finding['probability']:g}"
            before_after = finding["metric"] or finding["accuracy"]
            task = (
                f", {'metric' if finding['metric'] else 'accuracy'} {before_after[0]:.4f} -> {before_after[1]:.4f}"
                if before_after
                else ""
            )
            return f"agreement {finding['agreement'][0]:.4f} ({certain}; {finding['held_out']} samples){task}"
        if name == "verification":
            value, low, high = finding["iia"]
            return f"IIA {value:.4f} [{low:.4f}, {high:.4f}] ({finding['swaps']} swaps)"
    except (ValueError, TypeError, KeyError, IndexError):
        pass
    return text


def _show(recorded: dict[str, str], links: dict[str, Link]) -> None:
    table = columns("", "recorded", *(["verified"] if links else []))
    for name, what in WHAT.items():
        link = links.get(name)
        text = link.recorded if link is not None else in_words(name, recorded.get(name, ""))
        if not text and link is None:
            continue
        said = "" if link is None else "holds" if link.holds else f"does not hold: it is {link.actual or 'missing'}"
        table.add_row(what, text, *([said] if links else []))
    terminal.out.print(table)
    if not links:
        terminal.out.print("\nverify it with --model and --plan")
    elif all(link.holds for link in links.values()):
        trained = ", and trained afterwards: its numbers are not those of the plan" if SAME_GRAPH in links else ""
        terminal.out.print(f"\nthis is that model, lowered by that plan{trained}")
    else:
        broken = ", ".join(WHAT[link.name] for link in links.values() if not link.holds)
        terminal.out.print(f"\nNOT verified: {broken}")
