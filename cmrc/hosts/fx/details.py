"""What every call of a torch graph is besides its operands, in one line each: for the fingerprint.

The op and all its arguments, those of no tensor included, and the graphs that higher-order ops run. Devices and torch's symbols
for dynamic sizes are left out: they change when the same model is exported again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import fx

from cmrc.hosts.fx.lifted import LiftedProgram

NUMBERS = {int, float, bool, type(None)}


def details(program: LiftedProgram) -> dict[str, str]:
    """By the name of the node, which is its origin in the IR."""

    def called(node: fx.Node) -> str:
        if node.op == "get_attr":
            return _graph(program.subgraph(str(node.target)))
        return f"%{node.name}"

    return {node.name: _call(node, called) for node in program.graph.nodes if node.op == "call_function"}


def _call(node: fx.Node, called: Callable[[fx.Node], str]) -> str:
    arguments: list[str] = []
    _write(node.args, called, arguments)
    names = sorted(node.kwargs)
    _write([node.kwargs[name] for name in names], called, arguments)
    return repr((_name(node.target), arguments, names))


def _write(argument: Any, called: Callable[[fx.Node], str], texts: list[str]) -> None:
    """Append what an argument holds, one by one. A call of torch has no other containers; pytree takes three times as long."""
    kind = type(argument)
    if kind is fx.Node:
        texts.append(called(argument))
    elif kind in NUMBERS:
        texts.append(repr(argument))
    elif isinstance(argument, (tuple, list)):
        for part in argument:
            _write(part, called, texts)
    elif isinstance(argument, dict):
        for part in argument.values():
            _write(part, called, texts)
    elif isinstance(argument, torch.device):
        texts.append("device")
    elif isinstance(argument, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        texts.append("?")
    else:
        texts.append(repr(argument))


@cache
def _name(target: Any) -> str:
    """What a call calls; torch puts the name of an overload together anew each time."""
    return str(target)


def _graph(module: Any) -> str:
    """A graph that an op runs, its nodes by number; a constant that it reads, by its own name."""
    if not isinstance(module, fx.GraphModule):
        return type(module).__name__
    numbers = {node: i for i, node in enumerate(module.graph.nodes)}

    def called(node: fx.Node) -> str:
        return f"%{numbers[node]}"

    return repr([(node.op, _call(node, called) if node.op in ("call_function", "output") else "") for node in numbers])
