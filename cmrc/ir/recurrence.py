"""Recurrent ops: the hidden state of each as a value that can be named, and where its units are."""

from __future__ import annotations

from dataclasses import replace

from cmrc.ir.graph import Graph, Node, Operand, Recurrence, Tensor, Value

HIDDEN = ":hidden"  # behind the name of what the op returns: the state that it reads itself


def hidden_states(graph: Graph) -> dict[str, tuple[Node, Value]]:
    """The hidden state of every recurrent op, by its name."""
    states = {}
    for node in graph.nodes:
        if node.marks.recurrence is None:
            continue
        returned = returned_state(node)
        if returned.shape and isinstance(returned.shape[-1], int):
            states[returned.name + HIDDEN] = (node, replace(returned, name=returned.name + HIDDEN))
    return states


def returned_state(node: Node) -> Value:
    """The result that the hidden state is called by."""
    results = recurrence_of(node).results
    return node.outputs[results.index("every")] if "every" in results else node.outputs[0]


def recurrence_of(node: Node) -> Recurrence:
    assert node.marks.recurrence is not None
    return node.marks.recurrence


def hidden_matrix(node: Node) -> Operand:
    return node.inputs[recurrence_of(node).cells[0][1]]


def hidden_size(node: Node) -> int:
    """How many hidden units each direction has."""
    matrix = hidden_matrix(node)
    assert isinstance(matrix, Tensor)
    return matrix.shape[-1]


def is_joined(node: Node, value: Value) -> bool:
    """Whether the units of both directions stand one behind the other along the last axis."""
    cells = len(recurrence_of(node).cells)
    return cells > 1 and value.shape[-1] == cells * hidden_size(node)


def first_units(node: Node) -> tuple[int, ...]:
    """The first hidden unit of each direction. Of weights that are computed at run time, nobody knows where the second begins."""
    if not isinstance(hidden_matrix(node), Tensor) or not is_joined(node, returned_state(node)):
        return (0,)
    return tuple(i * hidden_size(node) for i in range(len(recurrence_of(node).cells)))


def initial_states(node: Node) -> list[str]:
    """The values that a recurrent op begins with."""
    return [state for place in recurrence_of(node).states if isinstance(state := node.inputs[place], str)]
