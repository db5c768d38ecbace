"""Whether a graph is well formed: every operand defined, every name unique, every shape as its op says."""

from __future__ import annotations

from cmrc.errors import GraphError
from cmrc.ir.graph import Graph
from cmrc.ir.ops import OPS
from cmrc.ir.spec import undeclared


def verify_graph(graph: Graph, *, since: Graph | None = None) -> None:
    """Check that operands are defined before their use, names are unique, and every node is as its op declares: operands, attributes, shapes.

    `since` is a graph that was verified: nodes of it that read the very same values fit as they did.
    """
    fits = set(map(id, since.nodes)) if since is not None else set()
    before = since.values() if since is not None else {}
    values = {value.name: value for value in graph.inputs}
    for node in graph.nodes:
        fit = id(node) in fits
        for operand in node.inputs:
            if isinstance(operand, str):
                value = values.get(operand)
                if value is None:
                    raise GraphError(node.label, node.kind, f"reads %{operand} before it is defined")
                fit = fit and value is before.get(operand)
        if not fit:
            op = OPS.get(node.op)
            if op is None or op.shape is None:
                raise GraphError(node.label, node.op, "is not an op of the IR")
            shapes = [values[o].shape if isinstance(o, str) else None if o is None else o.shape for o in node.inputs]
            problem = undeclared(op, node) or op.shape(node, shapes)
            if problem:
                raise GraphError(node.label, node.kind, problem)
        for value in node.outputs:
            if value.name in values:
                raise GraphError(node.label, node.kind, f"defines %{value.name} a second time")
            values[value.name] = value
    for name in graph.outputs:
        if name not in values:
            raise GraphError("output", "output", f"%{name} is not defined")
