"""Which parameters a patch changes, and what they then hold.

A parameter that changes keeps its name. Where several uses of one parameter became different, the use that did not change
keeps the name and the others get private copies (`Draft.operand`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from cmrc.hosts.folded import fold
from cmrc.hosts.fx.memory import from_numpy
from cmrc.hosts.fx.read import LiftedReading
from cmrc.ir.graph import Apply, ArrayLiteral, Graph, Leaf, Node, Tensor, leaves_of


class NewParameters:
    """`state` has the tensors by name; `forms` what each changed parameter holds; `untied` what became different."""

    def __init__(self, reading: LiftedReading, graph: Graph, changed: Sequence[Node]) -> None:
        self.reading = reading
        self.state = dict(reading.program.state)
        self.forms: dict[str, Tensor] = {}
        self.untied: list[str] = []
        uses = self._uses(changed)
        self._add_unchanged_uses(uses, graph)
        self._replace(uses)

    def is_computed(self, operand: Tensor) -> bool:
        """Whether nodes of the model compute this from parameters alone."""
        computed = self.reading.computed
        return bool(computed) and operand in computed

    def named(self, operand: Tensor) -> str:
        """The parameter that an expression is a form of: the bias of `bias + W c`, the weight of `W_P += W_S B`."""
        while isinstance(operand, Apply) and not self.is_computed(operand):
            operand = operand.inputs[0]
        return operand.name if isinstance(operand, Leaf) else ""

    def _uses(self, changed: Sequence[Node]) -> dict[str, list[Tensor]]:
        """The different forms in which the changed nodes read each parameter."""
        uses: dict[str, list[Tensor]] = {}
        for node in changed:
            for operand in node.inputs:
                if operand is None or isinstance(operand, (str, ArrayLiteral)):
                    continue
                named: list[tuple[str, Tensor]] = [(self.named(operand), operand)]
                if self.is_computed(operand):  # its nodes go on reading the parameters as they are
                    named = [(leaf.name, leaf) for leaf in leaves_of(operand)]
                for name, form in named:
                    if name and form not in uses.setdefault(name, []):
                        uses[name].append(form)
        return uses

    def _add_unchanged_uses(self, uses: dict[str, list[Tensor]], graph: Graph) -> None:
        """Nodes that stayed as they are, and the outputs, read their parameters as they were."""
        now, users = {node.name: node for node in graph.nodes}, self.reading.users
        for name, forms in uses.items():
            for node, leaf in users.get(name, ()):
                if now.get(node.name) is node and leaf not in forms:
                    forms.append(leaf)
        for output in self.reading.program.graph.output_node().all_input_nodes:
            tensor = self.reading.leaves.get(output.name)
            for leaf in leaves_of(tensor) if tensor is not None else ():
                uses.setdefault(leaf.name, []).append(leaf)

    def _replace(self, uses: Mapping[str, list[Tensor]]) -> None:
        """Give each changed parameter its new tensor under the old name, where all its uses agree on it."""
        owners = self.reading.owners
        tied: dict[str, tuple[Tensor, torch.Tensor]] = {}
        for name, forms in uses.items():
            if len(forms) > 1:
                self.untied.append(f"{name}: its {len(forms)} uses became different")
            if any(isinstance(form, Leaf) for form in forms):
                continue  # somebody reads it unchanged, and keeps the name
            form, owner = forms[0], owners.get(name)
            plain = form if owner is None else _renamed(form, name, owner)
            if owner in tied and tied[owner][0] == plain:
                tensor = tied[owner][1]
            else:
                tensor = _tensor(form, name, like=self.reading.program.state[name])
            if owner is not None:
                tied.setdefault(owner, (plain, tensor))
            self.state[name], self.forms[name] = tensor, form
        for name, owner in owners.items():
            if self.state[owner] is not self.state[name]:
                self.untied.append(f"{name} and {owner} became different")


def _tensor(expression: Tensor, name: str, like: torch.Tensor) -> torch.Tensor:
    """The value of an expression as a tensor of the same kind as the one it replaces."""
    tensor = from_numpy(fold(expression, str(like.dtype).removeprefix("torch."), name=name)).to(like.device)
    if not isinstance(like, torch.nn.Parameter):
        return tensor
    return torch.nn.Parameter(tensor, requires_grad=like.requires_grad)


def _renamed(tensor: Tensor, old: str, new: str) -> Tensor:
    """The same expression over another parameter."""
    if isinstance(tensor, Leaf):
        return replace(tensor, name=new) if tensor.name == old else tensor
    if isinstance(tensor, ArrayLiteral):
        return tensor
    return replace(tensor, inputs=tuple(_renamed(t, old, new) for t in tensor.inputs))
