"""What a lowering did: for each site what was folded and where, sizes before and after, and what stayed with the reason."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cmrc.ir.cost import Cost, elements
from cmrc.ir.graph import Graph, Node, attributes
from cmrc.ir.ops.affine import DoAttrs, SelectAttrs
from cmrc.ir.recurrence import HIDDEN
from cmrc.passes.pipeline import Residue, Result
from cmrc.program.plan import Plan
from cmrc.program.sites import Sites


@dataclass(frozen=True, slots=True)
class SiteReport:
    """One do of the plan: its site, what it replaced, and where it was folded."""

    site: str
    op: str
    replaced: int
    units_before: int
    units_after: int
    folded: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Decline:
    """A replacement that stayed: the node and op where it stopped, the reason, and its cost at run time."""

    kind: str
    site: str
    node: str
    op: str
    reason: str
    cost: str


@dataclass(frozen=True, slots=True)
class Files:
    """Bytes of the file that was read and of the one that was written, each with its external data."""

    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Report:
    """The whole report. `to_json()` for machines, `str()` for people."""

    sites: tuple[SiteReport, ...]
    declined: tuple[Decline, ...]
    before: Cost
    after: Cost
    untied: tuple[str, ...]
    seconds: dict[str, float]
    shared: tuple[str, ...] = ()  # values that several readers share and each reads in part, at run time
    files: Files | None = None  # once the result is saved, where the model came from a file

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return document

    def __str__(self) -> str:
        rows = [("", "before", "after", "ratio")]
        for name in ("parameters", "bytes", "macs"):
            before, after = getattr(self.before, name), getattr(self.after, name)
            rows.append((name, f"{before:,}", f"{after:,}", f"{after / before:.3f}" if before else ""))
        lines = [*self.warning(), *_table(rows)]
        lines += ["", *_table([("site", "op", "units", "folded"), *(
            (s.site, s.op, f"{s.units_before} -> {s.units_after}", "; ".join(s.folded) or "not at all")
            for s in self.sites
        )])]  # fmt: skip
        if self.declined:
            lines += ["", "not folded:"]
            lines += [
                f"  {d.kind} of {d.site or d.node} stops at {d.node} ({d.op}): {d.reason}; {d.cost}"
                for d in self.declined
            ]
        if self.untied:
            lines += ["", *(f"no longer shared: {what}" for what in self.untied)]
        if self.shared:
            lines += ["", *(f"read in part: {what}" for what in self.shared)]
        return "\n".join(lines)

    def growth(self) -> dict[str, int]:
        """How much more the result costs than the model, by kind of cost; empty if nothing grew."""
        names = {"parameters": "parameters", "bytes": "bytes", "macs": "multiply-accumulates"}
        more = {what: getattr(self.after, name) - getattr(self.before, name) for name, what in names.items()}
        if self.files is not None:  # names and metadata, too
            more["bytes in the file"] = self.files.after - self.files.before
        return {what: count for what, count in more.items() if count > 0}

    def warning(self) -> list[str]:
        """The first line of the report if the result costs more than the model."""
        more = [f"{count:,} more {what}" for what, count in self.growth().items()]
        return [f"this costs more than the model: {', '.join(more)}"] if more else []


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def make_report(
    program: Sites,
    plan: Plan,
    result: Result,
    before: Cost,
    after: Cost,
    untied: Sequence[str],
    seconds: dict[str, float],
) -> Report:
    final = result.graph.values()
    gone: dict[tuple[str, int], set[int]] = {}
    for entry in plan.entries:
        gone.setdefault((entry.value, entry.axis), set()).update(entry.units)
    sites = []
    for i, entry in enumerate(plan.entries):
        size = int(program.values[entry.value].shape[entry.axis])
        left = final.get(entry.value.removesuffix(HIDDEN) if entry.value in program.hidden_states else entry.value)
        folded = [f"{a.node} ({a.op}): {a.detail}" for a in result.actions if i in a.sources and a.ends_here]
        node = program.producers.get(entry.value)
        sites.append(
            SiteReport(
                entry.site,
                node.kind if node else "input",
                len(entry.units),
                size,
                # A value may disappear, such as a concatenation of which one part stays. Its units remain.
                int(left.shape[entry.axis]) if left is not None else size - len(gone[entry.value, entry.axis]),
                tuple(dict.fromkeys(folded)),
            )
        )
    declined = [_decline(residue, plan, result.graph) for residue in result.residue]
    shared = dict.fromkeys(_shared(node, result.graph) for node in result.shared)
    return Report(tuple(sites), tuple(declined), before, after, tuple(untied), seconds, tuple(shared))


def _shared(select: Node, graph: Graph) -> str:
    """Which part a reader takes of a value that others share."""
    axis, keep = attributes(select, SelectAttrs)["axis"], attributes(select, SelectAttrs)["keep"]
    shape = graph.values()[str(select.inputs[0])].shape
    return f"{len(keep)} of {shape[axis]} of %{select.inputs[0]}, whose readers need different parts of it"


def _decline(residue: Residue, plan: Plan, graph: Graph) -> Decline:
    node = residue.node
    count = elements(node.output.shape, {})
    if node.op == "do":
        site = ", ".join(dict.fromkeys(plan.entries[i].site for i in residue.sources))
        units = len(attributes(node, DoAttrs)["units"])
        stays = f"a clamp over {count:,} elements per sample stays, and so do the {units} units with their parameters"
        return Decline("do", site, residue.stopped_at, residue.stopped_op, residue.reason, stays)
    stays = f"a gather of {count:,} elements per sample stays, and so do the ops that compute the other elements"
    return Decline("select", "", residue.stopped_at, residue.stopped_op, residue.reason, stays)
