"""A node of the host that does several things at once is several nodes here: which of them may be left apart, and which not.

    BiasGelu       %y::sum = add(%x, b)  {inside='BiasGelu'}     ; y
                   %y      = gelu(%y::sum)                       ; y

A value inside such a node exists in no host: nothing can be put in front of it or behind it. The rules do not know that.
Where they leave something in the middle, the node is taken as a whole, opaque, with what stopped there as the reason,
and the passes start again. Only a node that its host can write as several (`separable`) comes apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cmrc.ir.graph import Graph, Marks, Node, Value

Groups = dict[str, list[Node]]


def fused(graph: Graph) -> Groups:
    """The nodes of every host node that is read as several which pass values inside it, by their origin."""
    origins = {node.origin for node in graph.nodes if node.marks.inside}
    groups: Groups = {}
    for node in graph.nodes if origins else ():
        if node.origin in origins:
            groups.setdefault(node.origin, []).append(node)
    return groups


def torn(before: Graph, after: Graph) -> list[str]:
    """The origins of the fused nodes that no single node of the host can stand for any more."""
    groups = fused(before)
    if not groups:
        return []
    left = {node.name: node for node in after.nodes}
    member_of = {node.name: origin for origin, members in groups.items() for node in members}
    torn_apart = {
        origin
        for origin, members in groups.items()
        if not any(m.marks.separable for m in members)
        and any(m.name in left for m in members)
        and differs(members, left)
    }
    for node in after.nodes:
        copied = member_of.get(node.marks.like)
        if copied is not None:
            torn_apart.add(copied)
    return [origin for origin in groups if origin in torn_apart]


def differs(members: Sequence[Node], left: Mapping[str, Node]) -> bool:
    """Whether a part is gone, reads something else inside, or has a tensor where it read a value."""
    own = {value.name for member in members for value in member.outputs}
    for member in members:
        now = left.get(member.name)
        if now is None or now.op != member.op:
            return True
        for i, operand in enumerate(member.inputs):
            seen = now.inputs[i] if i < len(now.inputs) else None
            if operand in own and seen != operand:
                return True
            if isinstance(operand, str) and not isinstance(seen, str):
                return True
    return False


def reason(members: Sequence[Node], residue: Sequence[tuple[Node, str]]) -> str:
    """Why something stayed in the middle of a fused node: the reason of a do or select that did."""
    own = {value.name for member in members for value in member.outputs}
    read = {operand for member in members for operand in member.values()}
    for node, why in residue:
        if node.inputs[0] in own or node.name in read:
            return why
    return "what is folded would have to be added inside it"


def whole(graph: Graph, reasons: Mapping[str, str]) -> Graph:
    """The graph with these fused nodes taken as one opaque node each."""
    groups = fused(graph)
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.origin not in reasons:
            nodes.append(node)
        elif node is groups[node.origin][-1]:
            nodes.append(_opaque(groups[node.origin], reasons[node.origin]))
    return Graph(graph.inputs, tuple(nodes), graph.outputs)


def outer_values(members: Sequence[Node]) -> list[str]:
    """The values that the parts of a fused node read from outside, each once, in order."""
    own = {value.name for member in members for value in member.outputs}
    return list(dict.fromkeys(o for member in members for o in member.values() if o not in own))


def _opaque(members: Sequence[Node], reason: str) -> Node:
    last = members[-1]
    kind = next(m.marks.inside for m in members if m.marks.inside)
    inputs = tuple(outer_values(members))
    return Node("opaque", inputs, _outputs(members), {}, last.origin, last.path, Marks(host_op=kind, why=reason))


def _outputs(members: Sequence[Node]) -> tuple[Value, ...]:
    """What leaves the node; the last part's result is what it is called by."""
    shared = [member.output for member in members[:-1] if member.marks.shown or not member.marks.inside]
    return (members[-1].output, *shared)
