"""A piece of the torch graph between two cuts, as a separate GraphModule.

`torch.fx.Interpreter(initial_env=...)` would still run the ancestors of the cut; a module with only the nodes after it cannot.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cmrc.errors import HostError
from cmrc.hosts.autograd.arrays import from_numpy, to_numpy
from cmrc.hosts.fx.lifted import LiftedProgram
from cmrc.hosts.fx.module import LoweredModule
from cmrc.hosts.fx.schema import opname
from cmrc.ir.graph import Array


@dataclass(frozen=True, slots=True, eq=False)
class FxPiece:
    """`inputs` are the values that it reads; of `sizes` it reads only the shapes."""

    inputs: tuple[str, ...]
    sizes: tuple[str, ...]
    outputs: tuple[str, ...]
    module: fx.GraphModule
    device: torch.device

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        arguments = [from_numpy(feeds[name]).to(self.device) for name in (*self.inputs, *self.sizes)]
        try:
            with torch.no_grad():
                results = self.module(*arguments)
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            given = ", ".join(f"{name} {feeds[name].dtype.name}{list(feeds[name].shape)}" for name in self.inputs)
            raise HostError(f"torch failed on {given}: {str(error).strip().splitlines()[0]}") from error
        return {name: to_numpy(tensor) for name, tensor in zip(self.outputs, results, strict=True)}


def extract(program: LiftedProgram, inputs: Sequence[str], outputs: Sequence[str], beyond: Collection[str]) -> FxPiece:
    """The nodes between named values. A size of a value beyond the cut is read from a placeholder of its shape."""
    nodes, parameters = {node.name: node for node in program.graph.nodes}, program.tensor_names()
    given, needed, sizes = set(inputs), set[str](), dict[str, None]()
    waiting = [nodes[name] for name in outputs]
    while waiting:
        node = waiting.pop()
        if node.name in needed:
            continue
        needed.add(node.name)
        if node.name in given or node.name in parameters:
            continue
        if node.op == "placeholder":
            raise HostError("is read on both sides of the cut", node=node.name, op="input")
        source = node.args[0] if opname(node) in ("sym_size", "sym_numel") else None
        if isinstance(source, fx.Node) and source.name in beyond and source.name not in given:
            sizes[source.name] = None
        else:
            waiting.extend(node.all_input_nodes)
    read = tuple(name for name in inputs if name in needed)
    module = _module(program, (*read, *sizes), outputs, needed)
    return FxPiece(read, tuple(sizes), tuple(outputs), module, program.device)


def _module(
    program: LiftedProgram, inputs: Sequence[str], outputs: Sequence[str], needed: Collection[str]
) -> fx.GraphModule:
    graph, parameters = fx.Graph(), program.tensor_names()
    nodes = {name: graph.placeholder(f"given_{i}") for i, name in enumerate(inputs)}
    attributes: dict[str, Any] = {}
    for node in program.graph.nodes:
        if node.name not in needed or node.name in nodes:
            continue
        if node.op == "placeholder":
            name = parameters[node.name]
            attributes[name] = program.state[name]
            nodes[node.name] = graph.create_node("get_attr", name)
            nodes[node.name].meta = copy.copy(node.meta)
            continue
        if node.op == "get_attr":
            attributes[node.target] = program.subgraph(node.target)
        nodes[node.name] = graph.node_copy(node, lambda n: nodes[n.name])
    graph.output(tuple(nodes[name] for name in outputs))
    module = LoweredModule(attributes, graph)
    module.eval()
    return module
