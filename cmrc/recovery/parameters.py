"""Which parameters of a model are trained, and which of its inner values are compared with the original's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cmrc.hosts.protocols import Host
from cmrc.ir.bodies import without_bodies
from cmrc.ir.graph import Graph, Leaf, Node, Operand, attributes, leaves_of
from cmrc.ir.spec import FunctionAttrs

NORMS = ("layer_norm", "instance_norm", "rms_norm")
LARGE = 1e4  # a vector with such numbers is a mask, and no parameter
VALUES = 4  # inner values that are compared


def trainable(graph: Graph) -> dict[str, Leaf]:
    """Weights and biases of affine ops, of norms, and vectors that are added or multiplied.

    Not trained are the statistics of batch norm, tables of embeddings, positions and masks, and what the body of an If, Loop or Scan
    reads, since gradients do not pass it.
    """
    leaves: dict[str, Leaf] = {}
    outside = without_bodies(graph)
    for node in outside.nodes:
        for operand in _parameters(node):
            for leaf in leaves_of(operand) if operand is not None and not isinstance(operand, str) else ():
                if leaf.dtype.startswith(("float", "bfloat")):
                    leaves[leaf.name] = leaf
    if outside is not graph:
        names = {node.name for node in outside.nodes}
        inside = Graph((), tuple(node for node in graph.nodes if node.name not in names), ()).leaves()
        return {name: leaf for name, leaf in leaves.items() if name not in inside}
    return leaves


def _parameters(node: Node) -> Iterator[Operand]:
    fn = attributes(node, FunctionAttrs).get("fn")
    if node.op in ("linear", "conv") or (node.op == "along" and fn in NORMS):
        yield from node.inputs[1:]
    elif fn == "batch_norm":
        yield from node.inputs[1:3]
    elif fn in ("add", "sub", "mul"):
        yield from (operand for operand in node.inputs if _is_vector(operand))


def _is_vector(operand: Operand) -> bool:
    """Whether it has numbers along one axis only, as biases and scales do."""
    if not isinstance(operand, Leaf) or sum(n > 1 for n in operand.shape) != 1:
        return False
    return bool((np.abs(operand.load().astype(np.float64)) < LARGE).all())


def folded(original: Graph, small: Graph) -> dict[str, Leaf]:
    """Of the parameters that can be trained, those that lowering made or changed."""
    before = original.leaves()
    return {name: leaf for name, leaf in trainable(small).items() if not _is_same(before.get(name), leaf)}


def _is_same(before: Leaf | None, now: Leaf) -> bool:
    return before is not None and before.shape == now.shape and np.array_equal(before.load(), now.load())


def compared(original: Host, small: Host) -> tuple[str, ...]:
    """Inner values that both models have with the same shape: some, evenly spaced from the first to the last.

    Those that several nodes read come first: there a residual network keeps what it knows.
    """
    theirs, names = original.graph.values(), set(original.graph.outputs)
    graph = without_bodies(small.graph)
    readers = graph.readers
    alike = [
        node.name
        for node in graph.nodes
        if node.name not in names
        and node.name in theirs
        and node.op != "opaque"
        and not node.marks.inside
        and len(node.outputs) == 1
        and len(node.output.shape) > 1
        and theirs[node.name].shape == node.output.shape
        and node.output.dtype.startswith(("float", "bfloat"))
    ]
    shared = [name for name in alike if len(readers[name]) > 1]
    affine = [node.name for node in graph.nodes if node.name in set(alike) and node.op in ("linear", "conv")]
    chosen = shared if len(shared) >= VALUES else affine
    places = np.linspace(0, len(chosen) - 1, min(VALUES, len(chosen))).round().astype(int)
    return tuple(chosen[place] for place in places)
