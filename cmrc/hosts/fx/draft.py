"""A copy of a lifted torch graph while it is patched: its nodes by value, its parameters, and new ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from cmrc.hosts.folded import fold
from cmrc.hosts.fx.clean import copy_graph
from cmrc.hosts.fx.lifted import TENSORS
from cmrc.hosts.fx.memory import from_numpy, torch_dtype
from cmrc.hosts.fx.parameters import NewParameters
from cmrc.hosts.fx.read import LiftedReading, add_with_owners
from cmrc.ir.graph import ArrayLiteral, Leaf, Node, Operand, Tensor, Value, leaves_of

aten = torch.ops.aten


@dataclass(eq=False)
class Draft:
    """`nodes` maps every value of the IR to the fx node that computes it; `state` has the tensors by name."""

    reading: LiftedReading
    parameters: NewParameters
    lifted: fx.Graph = field(init=False)
    nodes: dict[str, fx.Node] = field(init=False)
    values: dict[str, Value] = field(init=False)  # of the graph that is patched
    state: dict[str, torch.Tensor] = field(init=False)
    specs: list[InputSpec] = field(init=False)
    placeholders: dict[str, fx.Node] = field(init=False)  # by parameter
    tensors: dict[Tensor, list[str]] = field(default_factory=dict)  # names of new parameters, by what they hold

    def __post_init__(self) -> None:
        program = self.reading.program
        self.lifted = copy_graph(program.graph)
        self.nodes = {node.name: node for node in self.lifted.nodes}
        self.values = self.reading.graph.values()
        self.state = self.parameters.state
        self.specs = list(program.specs)
        self.placeholders = {target: self.nodes[name] for name, target in program.tensor_names().items()}
        self._taken = set(self.reading.taken)

    # ------------------------------------------------------------ nodes

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new call, after the one before it."""
        node = self.lifted.call_function(target, args, kwargs)
        self.lifted.inserting_after(node)
        return node

    def take(self, target: fx.Node, x: fx.Node, axis: int, keep: Sequence[int]) -> None:
        """Turn a node into a slice, or an index_select where the positions are no range."""
        if is_range(keep):
            target.target, target.args = aten.slice.Tensor, (x, axis, keep[0], keep[-1] + 1)
        else:
            index = self.constant(torch.tensor(keep), f"{x.name.replace('.', '_')}_keep")
            target.target, target.args = aten.index_select.default, (x, axis, index)
        target.kwargs = {}

    # ------------------------------------------------------------ tensors

    def constant(self, tensor: torch.Tensor, base: str, *, parameter: bool = False) -> fx.Node:
        """A new parameter or buffer as an input of the lifted graph."""
        return self.placeholders[self._add(tensor, base, parameter=parameter)]

    def _add(self, tensor: torch.Tensor, base: str, *, parameter: bool) -> str:
        name, count = base, 0
        while name in self._taken:
            count += 1
            name = f"{base}_{count}"
        add_with_owners(self._taken, name)
        kind = InputKind.PARAMETER if parameter else InputKind.BUFFER
        self.state[name] = torch.nn.Parameter(tensor) if parameter and tensor.dtype.is_floating_point else tensor
        first = next(iter(self.lifted.nodes))
        with self.lifted.inserting_before(first):
            node = self.lifted.placeholder(("p_" if parameter else "b_") + name.replace(".", "_"))
            node.target = node.name  # a module may be called anything; the name is unique, and an identifier
        persistent = None if parameter else True
        self.specs.insert(0, InputSpec(kind, TensorArgument(node.name), name, persistent))
        self.placeholders[name] = node
        return name

    def operand(self, operand: Operand, node: Node, position: int, dtype: torch.dtype) -> Any:
        """The fx argument for an IR operand."""
        if operand is None:
            return None
        if isinstance(operand, str):
            return self.nodes[operand]
        if isinstance(operand, Leaf):
            return self.placeholders[operand.name]
        if isinstance(operand, ArrayLiteral) and operand.array.ndim == 0 and node.origin:
            return operand.array.item()
        return self._present(operand, node, dtype) or self._folded(operand, node, position, dtype)

    def _present(self, operand: Tensor, node: Node, dtype: torch.dtype) -> fx.Node | None:
        """The node that has this tensor already: a parameter in its new form, or what the model computes."""
        own = self.parameters.named(operand)
        holders = self.tensors.get(operand, ())
        for name in (own, *holders) if self.parameters.forms.get(own) == operand else holders:
            if self.state[name].dtype == dtype or not dtype.is_floating_point:
                return self.placeholders[name]
        computed = self.nodes.get(self.reading.computed.get(operand, ""))
        if computed is not None and node.origin and computed < self.nodes[node.origin]:
            return computed
        return None

    def _folded(self, operand: Tensor, node: Node, position: int, dtype: torch.dtype) -> fx.Node:
        """A new parameter, or a buffer where nothing that was trained is in it."""
        base, trained = self._naming(operand, node, position)
        kind = str(dtype).removeprefix("torch.") if dtype.is_floating_point else operand.dtype
        tensor = from_numpy(fold(operand, kind, name=base, node=node))
        name = self._add(tensor, base, parameter=trained)
        self.tensors.setdefault(operand, []).append(name)
        return self.placeholders[name]

    def _naming(self, operand: Tensor, node: Node, position: int) -> tuple[str, bool]:
        """The name of a new tensor, and whether it is trained."""
        role = {1: "weight", 2: "bias"}.get(position) if node.op in ("linear", "conv") else None
        if role is None:
            one_axis = sum(n > 1 for n in operand.shape) <= 1
            role = "bias" if node.marks.addend and one_axis else "offset"
        base = f"{node.path}.{role}" if node.path else f"{node.name.replace('.', '_')}_{role}"
        if role != "offset" or node.marks.addend:
            return base, role != "offset"
        trained = any(
            isinstance(self.reading.program.state[leaf.name], torch.nn.Parameter) for leaf in leaves_of(operand)
        )
        return self.parameters.named(operand) or base, trained

    def dtype_of(self, was: Operand, dtype: torch.dtype) -> torch.dtype:
        """What an operand must be: that of the operand it replaces, unless that was a number or nothing."""
        if isinstance(was, str):
            return torch_dtype(self.values[was].dtype)
        return torch_dtype(was.dtype) if was is not None and was.shape else dtype

    def drop(self, names: set[str]) -> None:
        """Parameters that nobody reads any more."""
        for name in names:
            self.lifted.erase_node(self.placeholders[name])
        self.specs = [s for s in self.specs if not (s.kind in TENSORS and s.target in names)]
        self.state = {name: tensor for name, tensor in self.state.items() if name not in names}


def is_range(index: Sequence[int]) -> bool:
    return tuple(index) == tuple(range(index[0], index[0] + len(index)))
