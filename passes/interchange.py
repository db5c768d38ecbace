"""interchange: cut a graph at sites into pieces, so that an intervention recomputes only what comes after it.

    %h = linear(%x, ...)                    piece 0, once for every input:       %x -> %h, %a
    %a = relu(%h)
    %b = swap(%a, %source, %mask)     ->    swap, between the pieces
    %y = linear(%b, ...) + %h               piece 1, once for every intervention: %a, %h -> %y

The level of a value is the number of sites on the longest path to it. Piece k computes the values of level k from those of
lower levels that are live across the cut (above: %h, which goes around the site). In a piece after a site, the site's name
means its value after the intervention. Sites that do not depend on each other share a level.

Values that depend on no input's numbers (constants, sizes, and what follows from them alone) are not live: each piece that
reads them computes them again. Sizes must be those of the batch on which the piece runs. A size of a value beyond the cut is
read from nothing here; the host provides it.

It only reads the graph: nothing is folded, moved or computed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cmrc.ir.bodies import without_bodies
from cmrc.ir.graph import Graph, Node, fused_groups
from cmrc.ir.taken_whole import taken_whole


@dataclass(frozen=True, slots=True)
class Cut:
    """The pieces in the order in which they run, the level of each site, and sites that cannot have an effect."""

    pieces: tuple[Graph, ...]
    levels: dict[str, int]
    free: frozenset[str]  # values that no input reaches
    dead: tuple[str, ...]  # sites that reach no output


def cut(graph: Graph, sites: Iterable[str]) -> Cut:
    """Cut at values, by name. Without sites there is one piece: the graph. A fused node is never cut, nor is a body."""
    sites, graph = tuple(dict.fromkeys(sites)), without_bodies(graph)
    graph = taken_whole(graph, dict.fromkeys(fused_groups(graph), ""))
    made_at, seen_at, free = _levels(graph, frozenset(sites))
    count = max((made_at[name] for name in made_at), default=0) + 1
    pieces = tuple(_piece(graph, level, made_at, seen_at, free, frozenset(sites)) for level in range(count))
    alive = _alive(graph)
    return Cut(pieces, {s: made_at.get(s, 0) for s in sites}, free, tuple(s for s in sites if s not in alive))


def reads_only_sizes(node: Node) -> bool:
    return node.marks.shape_only is not None


def _levels(graph: Graph, sites: frozenset[str]) -> tuple[dict[str, int], dict[str, int], frozenset[str]]:
    """For every value that depends on the inputs: the level that computes it, and the level from which it is visible."""
    made_at = {value.name: 0 for value in graph.inputs}
    seen_at = {name: int(name in sites) for name in made_at}
    free: set[str] = set()
    for node in graph.nodes:
        above = [] if reads_only_sizes(node) else [seen_at[o] for o in node.values() if o in seen_at]
        for value in node.outputs:
            if not above:
                free.add(value.name)
                continue
            made_at[value.name] = max(above)
            seen_at[value.name] = max(above) + int(value.name in sites)
    return made_at, seen_at, frozenset(free)


def _piece(
    graph: Graph,
    level: int,
    made_at: dict[str, int],
    seen_at: dict[str, int],
    free: frozenset[str],
    sites: frozenset[str],
) -> Graph:
    own = [node for node in graph.nodes if made_at.get(node.name) == level]
    needed = {name for node in own for name in node.values() if name in free}
    if level == 0:  # outputs that no input reaches
        needed |= {name for name in graph.outputs if name in free}
    again: list[Node] = []
    for node in reversed(graph.nodes):
        if any(value.name in needed for value in node.outputs):
            again.append(node)
            needed |= {name for name in node.values() if name in free}
    chosen = {node.name for node in (*own, *again)}
    nodes = tuple(node for node in graph.nodes if node.name in chosen)
    inside = set(made_in(nodes))
    read_later = {
        name for node in graph.nodes if made_at.get(node.name, -1) > level for name in node.values() if name not in free
    }
    wanted = read_later | sites | set(graph.outputs)
    values = graph.values()
    read = {name for node in own for name in node.values() if name not in inside}
    outputs = tuple(name for name in made_in(nodes) if name in wanted and (name not in free or level == 0))
    nodes = tuple(
        node.with_inputs(()) if reads_only_sizes(node) and not set(node.values()) <= inside | read else node
        for node in nodes
    )
    return Graph(tuple(values[name] for name in values if name in read), nodes, outputs)


def made_in(nodes: Iterable[Node]) -> Iterator[str]:
    return (value.name for node in nodes for value in node.outputs)


def _alive(graph: Graph) -> set[str]:
    """The values whose numbers some output depends on."""
    alive = set(graph.outputs)
    for node in reversed(graph.nodes):
        if not reads_only_sizes(node) and any(value.name in alive for value in node.outputs):
            alive.update(node.values())
    return alive
