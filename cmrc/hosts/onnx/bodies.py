"""The bodies of If, Loop and Scan: graphs inside nodes, which may read values of the graph around them."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir


def subgraphs(node: onnx_ir.Node) -> list[onnx_ir.Graph]:
    """The bodies of one node."""
    bodies: list[onnx_ir.Graph] = []
    for attr in node.attributes.values():
        if attr.type == onnx_ir.AttributeType.GRAPH:
            bodies.append(attr.as_graph())
        elif attr.type == onnx_ir.AttributeType.GRAPHS:
            bodies.extend(attr.as_graphs())
    return bodies


def inner_nodes(node: onnx_ir.Node) -> Iterator[onnx_ir.Node]:
    """Every node inside the bodies of a node, however deep."""
    for body in subgraphs(node):
        yield from onnx_ir.traversal.RecursiveGraphIterator(body)


def captured_by(node: onnx_ir.Node) -> list[str]:
    """The values of the main graph that the bodies of a node read, each once."""
    bodies = subgraphs(node)
    read = [value for inner in inner_nodes(node) for value in inner.inputs if value is not None]
    returned = [value for body in bodies for value in body.outputs]
    return list(dict.fromkeys(value.name for value in (*read, *returned) if value.name and value.graph is node.graph))


def is_sorted(graph: onnx_ir.Graph) -> bool:
    """Whether every node stands behind those that it reads from."""
    seen: set[onnx_ir.Node] = set()
    for node in graph:
        inner = (value for each in inner_nodes(node) for value in each.inputs)
        for value in (*node.inputs, *inner):
            maker = None if value is None else value.producer()
            if maker is not None and maker.graph is graph and maker not in seen:
                return False
        seen.add(node)
    return True
