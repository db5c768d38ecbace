"""A piece of the torch graph between two cuts, as a GraphModule of its own.

`torch.fx.Interpreter(initial_env=...)` would run the ancestors of the cut all the same; a module that holds only the nodes
behind it cannot.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cmrc.errors import HostError
from cmrc.hosts.fx.host import LIFTED, FxHost, from_numpy, to_numpy
from cmrc.hosts.fx.module import LoweredModule
from cmrc.hosts.fx.ops import opname
from cmrc.ir.graph import Array


@dataclass(frozen=True, slots=True, eq=False)
class FxPiece:
    """`inputs` are the values it reads; of `sizes` it reads the shape alone."""

    inputs: tuple[str, ...]
    sizes: tuple[str, ...]
    outputs: tuple[str, ...]
    module: fx.GraphModule
    device: torch.device

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        arguments = [from_numpy(feeds[name]).to(self.device) for name in (*self.inputs, *self.sizes)]
        try:
            with torch.no_grad():
                made = self.module(*arguments)
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            told = ", ".join(f"{name} {feeds[name].dtype.name}{list(feeds[name].shape)}" for name in self.inputs)
            raise HostError(f"torch failed on {told}: {str(error).strip().splitlines()[0]}") from error
        return {name: to_numpy(tensor) for name, tensor in zip(self.outputs, made, strict=True)}


def extract(host: FxHost, inputs: Sequence[str], outputs: Sequence[str], beyond: Collection[str]) -> FxPiece:
    """The nodes between named values. A size of a value beyond the cut is read from a stand-in of its shape."""
    nodes = {node.name: node for node in host.lifted.nodes}
    specs = {spec.arg.name: spec for spec in host.specs}
    given, needed, sizes = set(inputs), set[str](), dict[str, None]()
    waiting = [nodes[name] for name in outputs]
    while waiting:
        node = waiting.pop()
        if node.name in needed:
            continue
        needed.add(node.name)
        spec = specs.get(node.name) if node.op == "placeholder" else None
        if node.name in given or (spec is not None and spec.kind in LIFTED):
            continue
        if node.op == "placeholder":
            raise HostError("is read on both sides of the cut", node=node.name, op="input")
        source = node.args[0] if opname(node) in ("sym_size", "sym_numel") else None
        if isinstance(source, fx.Node) and source.name in beyond and source.name not in given:
            sizes[source.name] = None
        else:
            waiting.extend(node.all_input_nodes)
    read = tuple(name for name in inputs if name in needed)
    return FxPiece(
        read, tuple(sizes), tuple(outputs), _module(host, read, tuple(sizes), outputs, needed), _device(host)
    )


def _module(
    host: FxHost, inputs: tuple[str, ...], sizes: tuple[str, ...], outputs: Sequence[str], needed: set[str]
) -> fx.GraphModule:
    graph = fx.Graph()
    specs = {spec.arg.name: spec for spec in host.specs}
    made = {name: graph.placeholder(f"given_{i}") for i, name in enumerate((*inputs, *sizes))}
    attributes: dict[str, Any] = {}
    for node in host.lifted.nodes:
        if node.name not in needed or node.name in made:
            continue
        spec = specs.get(node.name)
        if node.op == "placeholder":
            assert spec is not None and spec.target is not None
            attributes[spec.target] = host.state[spec.target]
            made[node.name] = graph.create_node("get_attr", spec.target)
            made[node.name].meta = copy.copy(node.meta)
            continue
        if node.op == "get_attr":
            attributes[node.target] = operator.attrgetter(node.target)(host.exported.graph_module)
        made[node.name] = graph.node_copy(node, lambda n: made[n.name])
    graph.output(tuple(made[name] for name in outputs))
    module = LoweredModule(attributes, graph)
    module.eval()
    return module


def _device(host: FxHost) -> torch.device:
    return next((tensor.device for tensor in host.state.values()), torch.device("cpu"))
