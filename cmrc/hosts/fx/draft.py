"""A copy of a lifted torch graph while it is patched: its nodes by value, its parameters, and new ones.

A parameter that changes keeps its name. If several uses of one parameter became different, the unchanged use keeps the name
and the others get private copies (`Draft.operand`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import fx
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from cmrc.hosts.autograd.arrays import from_numpy, torch_dtype
from cmrc.hosts.fx.clean import copy_graph
from cmrc.hosts.fx.lifted import TENSORS
from cmrc.hosts.fx.read import LiftedReading, add_with_owners
from cmrc.ir.graph import Apply, ArrayLiteral, Leaf, Node, Operand, Tensor, Value
from cmrc.ir.tensors import fold


class Fold(Protocol):
    """Computes the tensor of an expression."""

    def __call__(self, expression: Tensor, dtype: str, *, name: str, node: Node | None = None) -> torch.Tensor: ...


def fold_now(expression: Tensor, dtype: str, *, name: str, node: Node | None = None) -> torch.Tensor:
    return from_numpy(fold(expression, dtype, name=name, node=node))


class NewParameters:
    """`state` has the tensors by name, `forms` the expression of each changed parameter, `untied` the uses that became different."""

    def __init__(self, reading: LiftedReading, now: Mapping[str, Node], changed: Sequence[Node], fold: Fold) -> None:
        self.reading, self.fold = reading, fold
        self.state = dict(reading.program.state)
        self.forms: dict[str, Tensor] = {}
        self.untied: list[str] = []
        uses = self._uses(changed)
        self._add_unchanged_uses(uses, now)
        self._replace(uses)

    def is_computed(self, operand: Tensor) -> bool:
        """Whether nodes of the model compute this from parameters only."""
        computed = self.reading.computed
        return bool(computed) and operand in computed

    def named(self, operand: Tensor) -> str:
        """The parameter that an expression is a form of: the bias of `bias + W c`, the weight of `W_P += W_S B`."""
        while isinstance(operand, Apply) and not self.is_computed(operand):
            operand = operand.inputs[0]
        return operand.name if isinstance(operand, Leaf) and operand.name not in self.reading.sources else ""

    def _uses(self, changed: Sequence[Node]) -> dict[str, list[Tensor]]:
        """The different forms in which the changed nodes read each parameter."""
        uses: dict[str, list[Tensor]] = {}
        for node in changed:
            for operand in node.inputs:
                if operand is None or isinstance(operand, (str, ArrayLiteral)):
                    continue
                named: list[tuple[str, Tensor]] = [(self.named(operand), operand)]
                if self.is_computed(operand):  # its nodes continue to read the parameters as they are
                    named = [(leaf.name, leaf) for leaf in self.reading.parameters_of(operand)]
                for name, form in named:
                    if name and form not in uses.setdefault(name, []):
                        uses[name].append(form)
        return uses

    def _add_unchanged_uses(self, uses: dict[str, list[Tensor]], now: Mapping[str, Node]) -> None:
        """Unchanged nodes, and the outputs, read their parameters unchanged."""
        users = self.reading.users
        for name, forms in uses.items():
            for node, leaf in users.get(name, ()):
                if now.get(node.name) is node and leaf not in forms:
                    forms.append(leaf)
        for output in self.reading.program.graph.output_node().all_input_nodes:
            tensor = self.reading.leaves.get(output.name)
            for leaf in self.reading.parameters_of(tensor) if tensor is not None else ():
                uses.setdefault(leaf.name, []).append(leaf)

    def _replace(self, uses: Mapping[str, list[Tensor]]) -> None:
        """Give each changed parameter its new tensor under the old name, if all its uses agree on it."""
        owners = self.reading.owners
        tied: dict[str, tuple[Tensor, torch.Tensor]] = {}
        for name, forms in uses.items():
            if len(forms) > 1:
                self.untied.append(f"{name}: its {len(forms)} uses became different")
            if any(isinstance(form, Leaf) for form in forms):
                continue  # a reader needs it unchanged, and keeps the name
            form, owner = forms[0], owners.get(name)
            plain = form if owner is None else _renamed(form, name, owner)
            if owner in tied and tied[owner][0] == plain:
                tensor = tied[owner][1]
            else:
                tensor = self._tensor(form, name, like=self.reading.program.state[name])
            if owner is not None:
                tied.setdefault(owner, (plain, tensor))
            self.state[name], self.forms[name] = tensor, form
        self._follow(owners)
        for name, owner in owners.items():
            if self.state[owner] is not self.state[name]:
                self.untied.append(f"{name} and {owner} became different")

    def _tensor(self, expression: Tensor, name: str, like: torch.Tensor) -> torch.Tensor:
        """The tensor of an expression, of the same kind as the one that it replaces."""
        tensor = self.fold(expression, str(like.dtype).removeprefix("torch."), name=name).to(like.device)
        if not isinstance(like, torch.nn.Parameter):
            return tensor
        return torch.nn.Parameter(tensor, requires_grad=like.requires_grad)

    def _follow(self, owners: Mapping[str, str]) -> None:
        """A shared parameter's name that no node reads stays tied to the names that nodes read."""
        for owner in dict.fromkeys(owners.values()):
            names = [owner, *(name for name, other in owners.items() if other == owner)]
            read = {id(self.state[name]): self.state[name] for name in names if self.reading.users.get(name)}
            if len(read) == 1:
                self.state.update(dict.fromkeys(names, *read.values()))


def _renamed(tensor: Tensor, old: str, new: str) -> Tensor:
    """The same expression over another parameter."""
    if isinstance(tensor, Leaf):
        return replace(tensor, name=new) if tensor.name == old else tensor
    if isinstance(tensor, ArrayLiteral):
        return tensor
    return replace(tensor, inputs=tuple(_renamed(t, old, new) for t in tensor.inputs))


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

    def expressions(self) -> dict[str, Tensor]:
        """The expression of every changed and every new parameter."""
        new = {name: tensor for tensor, names in self.tensors.items() for name in names}
        return {name: tensor for name, tensor in {**self.parameters.forms, **new}.items() if name in self.state}

    # ------------------------------------------------------------ nodes

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call after the one before it."""
        node = self.lifted.call_function(target, args, kwargs)
        self.lifted.inserting_after(node)
        return node

    def take(self, target: fx.Node, x: fx.Node, axis: int, keep: Sequence[int]) -> None:
        """Turn a node into a slice, or into an index_select if the positions are not a range."""
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
            node.target = node.name  # a module may have any name; this one is unique, and an identifier
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
        if isinstance(operand, Leaf) and operand.name not in self.reading.sources:
            return self.placeholders[operand.name]
        if isinstance(operand, ArrayLiteral) and operand.array.ndim == 0 and node.origin:
            return operand.array.item()
        return self._present(operand, node, dtype) or self._folded(operand, node, position, dtype)

    def _present(self, operand: Tensor, node: Node, dtype: torch.dtype) -> fx.Node | None:
        """The node that already has this tensor: a parameter in its new form, or a value that the model computes."""
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
        """A new parameter, or a buffer if it contains nothing that was trained."""
        base, trained = self._naming(operand, node, position)
        kind = str(dtype).removeprefix("torch.") if dtype.is_floating_point else operand.dtype
        tensor = self.parameters.fold(operand, kind, name=base, node=node)
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
            isinstance(self.reading.program.state[leaf.name], torch.nn.Parameter)
            for leaf in self.reading.parameters_of(operand)
        )
        return self.parameters.named(operand) or base, trained

    def dtype_of(self, was: Operand, dtype: torch.dtype) -> torch.dtype:
        """The dtype of an operand: that of the operand that it replaces, unless that was a number or absent."""
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
