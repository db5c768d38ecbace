"""What runs the rules: one step for every pass, and the walk down the graph for the two that sink do's.

constant_fold, affine_fold   down the graph: `sink_all`     dead_subgraph   up the graph, with the same step
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from cmrc.ir.graph import Graph, Node
from cmrc.passes.rewriting.rewriter import Declined, Log, Rewritten, RuleOutcome, Sweep

Arriving = TypeVar("Arriving")


class Walk(Protocol):
    """A sweep over the graph that is on its way."""

    log: Log
    changed: bool

    def emissions(self) -> int:
        """How many nodes have been emitted so far."""


WalkType = TypeVar("WalkType", bound=Walk)
Rule = Callable[[WalkType, Node, Arriving], RuleOutcome]


@dataclass(frozen=True, slots=True)
class Pass:
    """A rewrite: `run` gives the new graph and whether anything changed; `moves` says which nodes give it something to do."""

    name: str
    run: Callable[[Graph, Log], tuple[Graph, bool]]
    moves: Callable[[Node], bool]


def apply_rule(
    walk: WalkType, rule: Rule[WalkType, Arriving], node: Node, arriving: Arriving, places: Sequence[tuple[str, str]]
) -> Rewritten | None:
    """Let a rule look at a node. None where it declines: the reason is noted for these places (value, reader), nothing is emitted."""
    before = walk.emissions()
    outcome = rule(walk, node, arriving)
    if isinstance(outcome, Declined):
        assert walk.emissions() == before, f"{rule.__name__} emitted, then declined: {outcome.reason}"
        walk.log.reasons.update(dict.fromkeys(places, outcome.reason))
        return None
    walk.changed = True
    return outcome


@dataclass(frozen=True, slots=True)
class Sinking(Generic[Arriving]):
    """A pass that carries the do's of one kind down the graph."""

    name: str
    carries: Callable[[Node | None], bool]  # which do's
    arriving: Callable[[Sweep, Node, Mapping[int, Node]], Arriving]  # what they say, by the operand that they stand at
    rule: Callable[[Node, Arriving], Rule[Sweep, Arriving]]
    sources: Callable[[Arriving], tuple[int, ...]]
    prepare: Callable[[Sweep, Node], Node | None] = lambda sweep, node: (
        node
    )  # None where it has emitted the node itself
    at_output: Callable[[Node], str] = lambda do: "it is an output of the model"


def sink_all(sinking: Sinking[Arriving], graph: Graph, log: Log) -> tuple[Graph, bool]:
    """One walk in topological order: every do goes as far as it goes."""
    sweep = Sweep(graph, log)
    for original in graph.nodes:
        arrived = sweep.arrive(original)
        node = None if arrived is None else sinking.prepare(sweep, arrived)
        if node is None:
            continue
        dos = {
            i: sweep.producers[operand]
            for i, operand in enumerate(node.inputs)
            if isinstance(operand, str) and sinking.carries(sweep.producers.get(operand))
        }
        if not dos:
            sweep.emit(node)
            continue
        arriving = sinking.arriving(sweep, node, dos)
        places = [(str(node.inputs[i]), node.name) for i in dos]
        outcome = apply_rule(sweep, sinking.rule(node, arriving), node, arriving, places)
        if outcome is None:
            sweep.emit(node)
        else:
            log.did(sinking.name, node, outcome, sinking.sources(arriving))
    for name in graph.outputs:
        value = sweep.redirected.get(name, name)
        if sinking.carries(sweep.producers.get(value)):
            log.reasons[value, "output"] = sinking.at_output(sweep.producers[value])
    return sweep.finish(), sweep.changed
