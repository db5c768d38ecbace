"""The call of an aten op, read and written by the argument names of its schema."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from cmrc.ir.graph import Shape


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of an op's schema."""

    name: str
    default: Any
    by_keyword: bool


@cache
def parameters(target: Any) -> tuple[Parameter, ...]:
    """The schema of an op, read once: torch makes its parts anew whenever they are asked for.

    `_schema` is private in torch, but there is no public way to an overload's argument names.
    """
    schema = getattr(target, "_schema", None)
    if schema is None:
        return ()
    return tuple(
        Parameter(a.name, a.default_value if a.has_default_value() else None, a.kwarg_only) for a in schema.arguments
    )


@cache
def positions(target: Any) -> dict[str, int]:
    """Where each argument of an op stands, by name."""
    return {parameter.name: i for i, parameter in enumerate(parameters(target))}


def opname(node: fx.Node) -> str:
    """`relu` for aten.relu.default, `getitem` for operator.getitem."""
    return str(getattr(node.target, "_opname", "")) or getattr(node.target, "__name__", "")


WHOLE = {int}


def shape_of(node: Any) -> Shape:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return ()
    sizes: tuple[Any, ...] = tuple(value.shape)  # integers, or torch's symbols
    if WHOLE.issuperset(map(type, sizes)):
        return sizes
    return tuple(int(n) if isinstance(n, int) or str(n).isdigit() else str(n).replace(" ", "") for n in sizes)


class Arguments:
    """The arguments of a node, defaults filled in: by name, or by place in the schema; with shapes at hand."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        self.values: list[Any] = list(node.args)
        missing = parameters(node.target)[len(self.values) :]
        self.values += [node.kwargs.get(parameter.name, parameter.default) for parameter in missing]

    def at(self, argument: int | str) -> int:
        return argument if isinstance(argument, int) else positions(self.node.target)[argument]

    def __getitem__(self, argument: int | str) -> Any:
        return self.values[self.at(argument)]

    def get(self, name: str, default: Any = None) -> Any:
        place = positions(self.node.target).get(name)
        return default if place is None else self.values[place]

    def shape(self, argument: int | str) -> Shape:
        return shape_of(self[argument])

    def rank(self, argument: int | str = 0) -> int:
        return len(self.shape(argument))

    def out_shape(self) -> Shape:
        return shape_of(self.node)

    def axes(self, argument: int | str) -> tuple[int, ...]:
        """An argument that names axes of the first one, counted from the front; nothing given means all."""
        rank, named = self.rank(), self[argument]
        if named is None or named == []:
            return tuple(range(rank))
        return tuple(int(d) % max(rank, 1) for d in (named if isinstance(named, (list, tuple)) else [named]))

    def axis(self, argument: int | str) -> int:
        return self.axes(argument)[0]


class Call(Arguments):
    """Arguments that may be changed, and are then written back to the node."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(node)
        self.changed = False

    def __setitem__(self, argument: int | str, value: Any) -> None:
        self.values[self.at(argument)] = value
        self.changed = True

    def write(self, node: fx.Node | None = None) -> None:
        """Into the node (or another call of the same op): positional as far as the schema allows, the rest by keyword."""
        target = self.node if node is None else node
        known = parameters(target.target)
        split = next((i for i, p in enumerate(known) if p.by_keyword), len(known))
        target.args = tuple(self.values[:split])
        target.kwargs = {
            p.name: value
            for p, value in zip(known[split:], self.values[split:], strict=True)
            if p.name in target.kwargs or value != p.default
        }
