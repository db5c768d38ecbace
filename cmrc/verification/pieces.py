"""A graph cut at sites into pieces that a host can run: the prefix, then one piece behind every level of sites."""

from __future__ import annotations

from dataclasses import dataclass

from cmrc.errors import InterventionError, SiteError
from cmrc.hosts.protocols import Host, Piece
from cmrc.ir.graph import Dim, Value
from cmrc.passes.interchange import Cut, cut
from cmrc.program.sites import Sites


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """A cut with its pieces ready to run, and where the rows of the batch lie in every value."""

    cut: Cut
    runners: tuple[Piece | None, ...]
    rows: dict[str, int]  # the axis of each value that depends on the inputs
    batch: Dim

    @classmethod
    def make(cls, program: Sites, sites: tuple[str, ...]) -> Pieces:
        graph_cut = cut(program.graph, sites)
        for name in sites:
            node = program.producers.get(name)
            where = {"node": program.title(name), "op": node.kind if node else "input"}
            if problem := program.why_apart(name):
                raise SiteError(problem, **where, fix="verify at a site after it")
            if name in graph_cut.free:
                raise SiteError("does not depend on the inputs of the model", **where, fix="name another site")
            if name in graph_cut.dead:
                raise SiteError("no output of the model depends on it", **where, fix="name another site")
        batch = {value.shape[0] if value.shape else 0 for value in program.graph.inputs}
        if len(batch) != 1 or 0 in batch:
            shapes = ", ".join(f"{v.name} {list(v.shape)}" for v in program.graph.inputs)
            fix = "interventions are on rows of the inputs: trace the model with the batch as the first axis of each"
            raise InterventionError(f"the inputs have no common first axis: {shapes}", fix=fix)
        (dim,) = batch
        runners = tuple(part.runner for part in parts_of(program, graph_cut, len(graph_cut.pieces)))
        rows = {value.name: _batch_axis(value, dim) for value in program.values.values()}
        return cls(graph_cut, runners, rows, dim)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A piece of a cut, ready to run: which values it makes of which, and of which others it may read the sizes."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    beyond: frozenset[str]
    runner: Piece | None  # None where it makes nothing that is asked for

    @classmethod
    def make(cls, host: Host, inputs: tuple[str, ...], outputs: tuple[str, ...], beyond: frozenset[str]) -> Part:
        return cls(inputs, outputs, beyond, host.extract(inputs, outputs, beyond=beyond) if outputs else None)

    @property
    def sizes(self) -> tuple[str, ...]:
        return self.runner.sizes if self.runner else ()


def parts_of(program: Sites, graph_cut: Cut, count: int) -> list[Part]:
    """The first `count` pieces of a cut."""
    parts: list[Part] = []
    sized: set[str] = set()
    for piece in reversed(
        graph_cut.pieces[:count]
    ):  # a later piece says which sizes it wants of values of an earlier one
        inside = {value.name for node in piece.nodes for value in node.outputs}
        outputs = (*piece.outputs, *(n for n in sorted(sized) if n in inside and n not in piece.outputs))
        beyond = frozenset(program.values.keys() - inside - graph_cut.free)
        part = Part.make(program.host, tuple(v.name for v in piece.inputs), outputs, beyond)
        sized.update(part.sizes)
        parts.insert(0, part)
    return parts


def _batch_axis(value: Value, batch: Dim) -> int:
    return next((i for i, size in enumerate(value.shape) if size == batch), 0)
