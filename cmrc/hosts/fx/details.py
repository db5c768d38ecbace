"""One line for every call of a torch graph that describes it besides its operands, for the fingerprint.

The line has the op, all its arguments, and the graphs that higher-order ops run. Devices and torch's symbols for dynamic sizes
are left out: they change when the same model is exported again.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import fx

from cmrc.hosts.fx.lifted import LiftedProgram

NUMBERS = {int, float, bool, type(None)}


def details(program: LiftedProgram) -> dict[str, str]:
    """The lines by the name of the node, which is its origin in the IR."""
    names = {
        node: _graph(program.subgraph(str(node.target))) if node.op == "get_attr" else f"%{node.name}"
        for node in program.graph.nodes
    }
    return {node.name: _call(node, names) for node in names if node.op == "call_function"}


def _call(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    arguments: list[str] = []
    _write(node.args, names, arguments)
    keywords = node.kwargs
    if not keywords:
        return repr((_name(node.target), arguments, []))
    sorted_names = sorted(keywords)
    _write([keywords[name] for name in sorted_names], names, arguments)
    return repr((_name(node.target), arguments, sorted_names))


def _write(arguments: Any, names: Mapping[fx.Node, str], texts: list[str]) -> None:
    """Append the arguments one by one. A call of torch has no other containers than these; pytree takes three times as long."""
    for argument in arguments:
        kind = type(argument)
        if kind is fx.Node:
            texts.append(names[argument])
        elif kind in NUMBERS:
            texts.append(repr(argument))
        elif isinstance(argument, (tuple, list)):
            _write(argument, names, texts)
        elif isinstance(argument, dict):
            _write(argument.values(), names, texts)
        elif isinstance(argument, torch.device):
            texts.append("device")
        elif isinstance(argument, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            texts.append("?")
        else:
            texts.append(repr(argument))


@cache
def _name(target: Any) -> str:
    """The name of what is called, cached: torch builds the name of an overload anew each time."""
    return str(target)


def _graph(module: Any) -> str:
    """A graph that an op runs, with nodes as numbers; a constant that it reads, by its type."""
    if not isinstance(module, fx.GraphModule):
        return type(module).__name__
    names = {node: f"%{i}" for i, node in enumerate(module.graph.nodes)}
    return repr([(node.op, _call(node, names) if node.op in ("call_function", "output") else "") for node in names])
