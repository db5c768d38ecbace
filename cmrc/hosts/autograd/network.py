"""A mechanism graph that runs in torch with autograd: for models of a host that cannot differentiate by itself.

    inputs ─> ops by meanings.py ─> outputs and tapped values, with gradients to parameters and taps
                 └─ what has no meaning runs on its host, one node at a time; gradients stop there

Numbers are float32 (or float64), whatever the model stores: a cast between floating types changes nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from cmrc.hosts.autograd.arrays import from_numpy, to_numpy
from cmrc.hosts.autograd.meanings import MEANINGS
from cmrc.ir.evaluate import learn_sizes, sized_attributes
from cmrc.ir.graph import CONSTANT, Apply, Array, Graph, Leaf, Node, Value, as_dtype, leaves_of
from cmrc.ir.graph import Tensor as Known
from cmrc.ir.tensors import is_computable

FLOATING = ("float", "bfloat")
CONSTANTS = ("default", CONSTANT)  # opaque nodes that are nothing but their tensor

OnHost = Callable[[Sequence[str], Mapping[str, Array]], Mapping[str, Array]]
"""Run part of the host's model: the names of some values, made from others that are given."""


class Network(Protocol):
    """A model that runs with gradients. Parameters are tensors by name; those that are trained require a gradient."""

    @property
    def parameters(self) -> Mapping[str, Tensor]: ...

    def run(self, inputs: Mapping[str, Array], taps: Collection[str] = ()) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The outputs, and tapped values by name."""
        ...


@dataclass(eq=False)
class GraphNetwork:
    """A graph of the IR. `inside` names, for a value inside a fused host op, the op's output."""

    graph: Graph
    on_host: OnHost
    inside: Mapping[str, str] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    parameters: dict[str, Tensor] = field(default_factory=dict)
    _constants: dict[int, tuple[Known, Tensor]] = field(default_factory=dict)
    _ancestors: dict[frozenset[str], set[str]] = field(default_factory=dict)

    def train(self, names: Collection[str]) -> None:
        """Make these parameters trainable."""
        leaves = self.graph.leaves()
        for name in names:
            self.parameters[name] = self._tensor(leaves[name].load()).clone().requires_grad_()
        self._constants.clear()

    def reads_trained(self, node: Node) -> bool:
        """Whether a trained parameter is among its operands."""
        known = [operand for operand in node.inputs if operand is not None and not isinstance(operand, str)]
        return any(leaf.name in self.parameters for tensor in known for leaf in leaves_of(tensor))

    # ------------------------------------------------------------ what only the host can run

    @cached_property
    def _hosted(self) -> frozenset[str]:
        """The values of nodes that only the host can run, with the other steps of a fused op that has one of them."""
        nodes = self.graph.nodes
        whole = {self._whole(node) for node in nodes if not is_computable(node) or _is_unclear(node)}
        return frozenset(node.name for node in nodes if self._whole(node) in whole)

    def stops(self, values: Collection[str]) -> Node | None:
        """The first node, if there is one, where a gradient from an output to one of these values would stop."""
        reached, useful = set(values), self._needed(())
        for node in self.graph.nodes:
            if not reached.intersection(node.values()) or not _is_floating(node.output) or node.name not in useful:
                continue
            reached.update(value.name for value in node.outputs)
            if node.name in self._hosted and node.marks.shape_only is None:
                return node
        return None

    def _whole(self, node: Node) -> str:
        return self.inside.get(node.name, node.name)

    @cached_property
    def _reads(self) -> dict[str, list[str]]:
        """What a host op reads, by its output: its own operands, and those of the steps inside it."""
        reads: dict[str, list[str]] = {}
        for node in self.graph.nodes:
            reads.setdefault(self._whole(node), []).extend(node.values())
        return {name: [n for n in dict.fromkeys(read) if n not in self.inside] for name, read in reads.items()}

    # ------------------------------------------------------------ running

    def run(self, inputs: Mapping[str, Array], taps: Collection[str] = ()) -> tuple[list[Tensor], dict[str, Tensor]]:
        outputs, seen = self.watch(inputs, taps)
        return outputs, {name: seen[name] for name in taps}

    def watch(
        self, inputs: Mapping[str, Array], taps: Collection[str] = (), *, by_taps: bool = False
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The outputs and every value. With `by_taps`, the tapped values are what is differentiated by."""
        values: dict[str, Tensor] = {}
        sizes: dict[str, int] = {}

        def define(value: Value, result: Tensor) -> None:
            wanted = by_taps and value.name in taps and not result.requires_grad
            values[value.name] = result.requires_grad_() if wanted else result
            learn_sizes(value, result.shape, sizes)

        for value in self.graph.inputs:
            define(value, self._tensor(inputs[value.name]))
        needed = self._needed(taps)
        for node in self.graph.nodes:
            if not any(value.name in needed for value in node.outputs):
                continue
            if node.name not in self._hosted:
                define(node.output, self._compute(node, values, sizes))
            elif node.name not in self.inside:  # what is inside a fused op, its last step runs
                results = self._run_on_host(node, inputs, values)
                for value in node.outputs:
                    define(value, results[value.name])
        return [values[name] for name in self.graph.outputs], values

    def _compute(self, node: Node, values: Mapping[str, Tensor], sizes: Mapping[str, int]) -> Tensor:
        operands = [
            values[operand] if isinstance(operand, str) else None if operand is None else self.tensor(operand)
            for operand in node.inputs
        ]
        first = operands[0]
        attrs = sized_attributes(node, () if first is None else tuple(first.shape), sizes)
        if attrs.get("fn") == "cast" and first is not None and attrs["dtype"].startswith(FLOATING):
            return first.to(self.dtype)
        return MEANINGS[node.op](attrs, *operands)

    def _run_on_host(self, node: Node, inputs: Mapping[str, Array], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if node.marks.host_op in CONSTANTS and not node.values():
            (known,) = node.inputs
            assert known is not None
            assert not isinstance(known, str)
            return {node.name: self.tensor(known)}
        read = self._reads[node.name]
        feeds = {name: as_dtype(to_numpy(values[name]), self._dtypes[name]) for name in read} or dict(inputs)
        results = self.on_host([value.name for value in node.outputs], feeds)
        return {name: self._tensor(array) for name, array in results.items()}

    @cached_property
    def _dtypes(self) -> dict[str, str]:
        plain = {torch.float32: "float32", torch.float64: "float64"}[self.dtype]
        named = {name: value.dtype for name, value in self.graph.values().items()}
        return {name: plain if dtype == "unknown" else dtype for name, dtype in named.items()}

    def _needed(self, taps: Collection[str]) -> set[str]:
        """The values that the outputs and taps are made from, those themselves included."""
        wanted = frozenset(taps)
        if wanted not in self._ancestors:
            needed = {*self.graph.outputs, *wanted}
            for node in reversed(self.graph.nodes):
                if any(value.name in needed for value in node.outputs):
                    needed.update(value.name for value in node.outputs)
                    needed.update(node.values())
            self._ancestors[wanted] = needed
        return self._ancestors[wanted]

    # ------------------------------------------------------------ tensors

    def tensor(self, known: Known) -> Tensor:
        """A tensor expression: of trained parameters anew each time, of others once."""
        if isinstance(known, Leaf) and known.name in self.parameters:
            return self.parameters[known.name]
        if any(leaf.name in self.parameters for leaf in leaves_of(known)):
            assert isinstance(known, Apply)
            return MEANINGS[known.op](known.attrs, *map(self.tensor, known.inputs))
        cached = self._constants.get(id(known))
        if cached is None:
            cached = self._constants[id(known)] = (known, self._constant(known))
        return cached[1]

    def _constant(self, known: Known) -> Tensor:
        if isinstance(known, Apply):
            return MEANINGS[known.op](known.attrs, *map(self.tensor, known.inputs))
        return self._tensor(known.load() if isinstance(known, Leaf) else known.array)

    def _tensor(self, array: Array) -> Tensor:
        tensor = from_numpy(array)
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


def _is_floating(value: Value) -> bool:
    return value.dtype.startswith((*FLOATING, "unknown"))


def _is_unclear(node: Node) -> bool:
    """Whether the shape of the result does not follow from the sizes that the graph declares."""
    unclear = sum(isinstance(dim, str) and dim.startswith("?") for dim in node.output.shape)
    return unclear > {"expand": 0, "reshape": 1}.get(node.op, len(node.output.shape))
