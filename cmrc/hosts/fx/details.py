"""What every call of a torch graph is besides its operands, in one line each: for the fingerprint.

The op and all its arguments, those of no tensor included, and the graphs that higher-order ops run. Devices and torch's symbols
for dynamic sizes are left out: they change when the same model is exported again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from cmrc.hosts.fx.lifted import LiftedProgram


def details(program: LiftedProgram) -> dict[str, str]:
    """By the name of the node, which is its origin in the IR."""

    def called(node: fx.Node) -> str:
        if node.op == "get_attr":
            return _graph(program.subgraph(str(node.target)))
        return f"%{node.name}"

    return {node.name: _call(node, called) for node in program.graph.nodes if node.op == "call_function"}


def _call(node: fx.Node, called: Callable[[fx.Node], str]) -> str:
    def text(argument: Any) -> str:
        if isinstance(argument, fx.Node):
            return called(argument)
        if isinstance(argument, torch.device):
            return "device"
        if isinstance(argument, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return "?"
        return repr(argument)

    named = sorted(node.kwargs.items())
    arguments = [text(leaf) for leaf in (*_leaves(node.args), *_leaves([argument for _, argument in named]))]
    return repr((str(node.target), arguments, [name for name, _ in named]))


def _leaves(arguments: Any) -> Iterator[Any]:
    """What lists, tuples and dictionaries of arguments hold. A call of torch has no others; pytree takes three times as long."""
    for argument in arguments:
        if isinstance(argument, (tuple, list)):
            yield from _leaves(argument)
        elif isinstance(argument, dict):
            yield from _leaves(argument.values())
        else:
            yield argument


def _graph(module: Any) -> str:
    """A graph that an op runs, its nodes by number; a constant that it reads, by its own name."""
    if not isinstance(module, fx.GraphModule):
        return type(module).__name__
    numbers = {node: i for i, node in enumerate(module.graph.nodes)}

    def called(node: fx.Node) -> str:
        return f"%{numbers[node]}"

    return repr([(node.op, _call(node, called) if node.op in ("call_function", "output") else "") for node in numbers])
