"""Ops that hold graphs (If, Loop, Scan). A host reads the nodes of such a body in front of the op, in the same graph:

    %s     = opaque(%x) {host_op='Loop body'}                        what the body is given, anew in every iteration
    %r     = linear(%s, @W, @b)             {body='y'}               the nodes of the body read those, and values around it
    %next  = linear(%r, @V, %captured ...)  {body='y'}
    %y     = opaque(%trip, %x, %next)       {host_op='Loop'}         the op reads what its bodies return

A rule that holds for one run of a node holds for each of its runs, so the passes need not know. What runs a graph does: for it,
`without_bodies` puts the nodes back.
"""

from __future__ import annotations

from cmrc.ir.graph import Graph, Node, Operand


def without_bodies(graph: Graph) -> Graph:
    """The graph with every body inside its op, which reads whatever the body reads from outside."""
    around = {node.marks.body for node in graph.nodes if node.marks.body}
    if not around:
        return graph
    outer = {node.name: node.marks.body for node in graph.nodes if node.name in around}
    home: dict[str, str] = {}  # the op inside which each value is
    read: dict[str, dict[Operand, None]] = {name: {} for name in around}
    kept: list[Node] = []
    for node in graph.nodes:
        body = node.marks.body or max(
            (home[o] for o in node.values() if o in home), key=lambda h: _depth(h, outer), default=""
        )
        if node.name in around:  # its own body is not where it is
            body = node.marks.body
            own = dict.fromkeys(o for o in node.inputs if not isinstance(o, str) or home.get(o, "") != node.name)
            node = node.with_inputs({**own, **{o: None for o in read[node.name] if home.get(str(o)) != node.name}})
        if body:
            home.update((value.name, body) for value in node.outputs)
            read[body].update(dict.fromkeys(node.values()))
        else:
            kept.append(node)
    return Graph(graph.inputs, tuple(kept), graph.outputs)


def _depth(op: str, outer: dict[str, str]) -> int:
    return 0 if not op else 1 + _depth(outer.get(op, ""), outer)
