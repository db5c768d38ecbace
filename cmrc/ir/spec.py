"""What an op and a function of the IR declare about themselves.

A shape rule returns what is wrong with the shapes of a node, or an empty text. Dynamic sizes are names. A rule accepts a name
that meets a number or another name: the host's shape inference may give one size two names. The `work` of an op are its
multiply-accumulates, as products of these shapes; an op without it has none.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, NotRequired, TypedDict, Union, get_args, get_origin, get_type_hints

from cmrc.ir.graph import Array, Dim, Node, Shape

Alignment = tuple[
    tuple[int, ...] | None, ...
]  # for each operand the axes of the result that its axes are; None: the last
Pads = tuple[tuple[int, int], ...]  # before and after each axis


class AxisAttrs(TypedDict):
    """What linear, conv, select, do and concat have in common."""

    axis: int


class FunctionAttrs(TypedDict):
    """What pointwise and along have in common."""

    fn: str
    align: NotRequired[Alignment]


class NoAttrs(TypedDict):
    """No attributes: the operands and the shape of the result are enough."""


Shapes = list[Shape | None]  # of the operands; None if one is absent


class Takes(Enum):
    """What kind of operand is allowed."""

    VALUE = "a value"
    TENSOR = "a tensor"
    EITHER = "a value or a tensor"


@dataclass(frozen=True, slots=True)
class OperandSpec:
    """One operand of an op. The last may be `repeated`."""

    name: str
    takes: Takes = Takes.EITHER
    optional: bool = False
    repeated: bool = False


def value(name: str) -> OperandSpec:
    return OperandSpec(name, Takes.VALUE)


def either(name: str) -> OperandSpec:
    return OperandSpec(name)


def optional(name: str) -> OperandSpec:
    return OperandSpec(name, optional=True)


def several(name: str) -> OperandSpec:
    return OperandSpec(name, optional=True, repeated=True)


class Extent(Enum):
    """What a function does to the sizes of the axes that it acts over."""

    SAME = "they stay"
    ONE = "they become 1, or are dropped"
    OTHER = "its options say"


@dataclass(frozen=True, slots=True)
class Function:
    """A function of `pointwise` or `along`. Without a meaning only the host can compute it."""

    meaning: Callable[..., Array] | None = None
    needs: tuple[str, ...] = ()  # attributes that must be there
    options: tuple[str, ...] = ()  # attributes that may be there
    affine_in: tuple[
        int, ...
    ] = ()  # operands: f(x) = scale · x + shift, element by element, once the others are constants
    linear: bool = False  # linear, and the same for every unit: an affine relation between units passes
    keeps_constants: Callable[[Mapping[str, Any]], bool] | bool = False  # maps what is constant over its axes to itself
    extent: Extent = Extent.SAME

    def maps_constants_to_themselves(self, attrs: Mapping[str, Any]) -> bool:
        return self.keeps_constants(attrs) if callable(self.keeps_constants) else self.keeps_constants


@dataclass(frozen=True)
class Op:
    """One op of the IR: its operands, its attributes, the rule for its shapes, and what it means in numpy."""

    operands: tuple[OperandSpec, ...]
    attributes: type
    shape: Callable[[Node, Shapes], str] | None  # the problem, or nothing; None: the op makes no value of a graph
    meaning: Callable[..., Array] | None
    affine_in: tuple[int, ...] = ()  # operands in which the whole op is affine, once the others are constants
    as_stored: bool = (
        False  # its meaning accepts tensors in their own dtype: it moves elements, or widens what it needs
    )
    passes: bool = False  # replacements may go through it: its result may be known if its operand is
    sized: bool = (
        False  # it sets the shape of its result: for a value, the result's declared shape; for a tensor, an attribute
    )
    work: Callable[[Node, Shapes], list[Shape]] | None = None  # its multiply-accumulates are the products of these
    functions: Mapping[str, Function] = field(default_factory=dict)

    @cached_property
    def classes(self) -> dict[str, tuple[type, ...]]:
        """For each attribute, the classes that its value may have."""
        hints = get_type_hints(self.attributes)
        return {name: _classes(hint) for name, hint in hints.items()}

    @cached_property
    def required(self) -> frozenset[str]:
        return frozenset(self.attributes.__required_keys__)  # type: ignore[attr-defined]

    @cached_property
    def fitting_forms(self) -> set[tuple[object, ...]]:
        """The types of operands, and the names and types of attributes, that were checked and fit (`verify.py`)."""
        return set()

    @cached_property
    def own(self) -> frozenset[str]:
        """The attributes that do not belong to one function or the other."""
        every = {name for function in self.functions.values() for name in (*function.needs, *function.options)}
        return frozenset(self.classes) - every


def _classes(hint: Any) -> tuple[type, ...]:
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(c for part in get_args(hint) for c in _classes(part))
    return (get_origin(hint) or hint,)


def differ(first: Dim, second: Dim) -> bool:
    """Whether two sizes are both known and differ."""
    return isinstance(first, int) and isinstance(second, int) and first != second
