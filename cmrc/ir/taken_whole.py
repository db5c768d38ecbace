"""A fused node taken as one opaque node, since something would have to stay in the middle of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cmrc.ir.graph import Graph, Marks, Node, Value, fused_groups, outer_values


def reason_inside(members: Sequence[Node], residue: Sequence[tuple[Node, str]]) -> str:
    """Why something stayed in the middle of a fused node: the reason of a do or select that did."""
    own = {value.name for member in members for value in member.outputs}
    read = {operand for member in members for operand in member.values()}
    for node, why in residue:
        if node.inputs[0] in own or node.name in read:
            return why
    return "what is folded would have to be added inside it"


def taken_whole(graph: Graph, reasons: Mapping[str, str]) -> Graph:
    """The graph with these fused nodes taken as one opaque node each."""
    groups = fused_groups(graph)
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.origin not in reasons:
            nodes.append(node)
        elif node is groups[node.origin][-1]:
            nodes.append(_opaque(groups[node.origin], reasons[node.origin]))
    return Graph(graph.inputs, tuple(nodes), graph.outputs)


def _opaque(members: Sequence[Node], reason: str) -> Node:
    last = members[-1]
    kind = next(m.marks.inside for m in members if m.marks.inside)
    inputs = tuple(outer_values(members))
    return Node("opaque", inputs, _outputs(members), {}, last.origin, last.path, Marks(host_op=kind, why=reason))


def _outputs(members: Sequence[Node]) -> tuple[Value, ...]:
    """What leaves the node; the last part's result is what it is called by."""
    shared = [member.output for member in members[:-1] if member.marks.shown or not member.marks.inside]
    return (members[-1].output, *shared)
