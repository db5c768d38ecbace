"""Idle nodes: those of the host on which no output and no effect depends, such as a last state that nobody asks for.

They stay as they were, because the model is the user's. They go where they would keep units alive that nobody else needs. Part of
dead_subgraph.
"""

from __future__ import annotations

from collections.abc import Collection

from cmrc.ir.graph import Graph
from cmrc.passes.rewriting.rewriter import DROPPED, Rise


def idle_and_whole(graph: Graph, idle: frozenset[str], now: frozenset[str]) -> frozenset[str]:
    """Those of the host's idle nodes that do not keep anything else alive, of what is idle `now`: they stay as they were."""
    inputs = {value.name for value in graph.inputs}
    sizes = {
        node.name for node in graph.nodes if node.marks.shape_only is not None and inputs.issuperset(node.values())
    }
    lost = set(now - idle - sizes)  # an input is there anyway
    if not lost:
        return idle
    for node in graph.nodes:
        if node.name in idle and any(
            operand in graph.makers and graph.makers[operand].name in lost for operand in node.values()
        ):
            lost.add(node.name)
    return idle - lost


def without_sizes(graph: Graph, idle: frozenset[str]) -> frozenset[str]:
    """Those that no size is read from: a host may need a size for a target shape, which no operand of the IR names."""
    read = set[str]()
    for node in reversed(graph.nodes):
        if node.marks.shape_only is not None or any(value.name in read for value in node.outputs):
            read.update((node.name, *node.values()))
    return idle - read


def drop_idle_readers(rise: Rise, name: str, idle: Collection[str]) -> None:
    """Drop the idle nodes that read a value, and all that read those: the value is about to lose units."""
    waiting = [reader for reader in rise.uses[name] if reader in idle]
    while waiting:
        node = rise.settled.pop(waiting.pop(), None)
        if node is not None:
            rise.changed = True
            operands = [rise.final_name(operand) for operand in node.values()]
            rise.lost_readers.update(operands)
            rise.log.did("dead_subgraph", node, DROPPED)
            waiting += [reader for value in node.outputs for reader in rise.uses[value.name]]
            for operand in operands:
                rise.uses[operand] = [reader for reader in rise.uses[operand] if reader != node.name]
