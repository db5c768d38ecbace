"""What an op and a function of the IR declare about themselves, and the check of a node against it."""

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, NotRequired, TypedDict, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from cmrc.ir.graph import Array, Dim, Node, Operand, Shape

# No `from __future__ import annotations` here: `NotRequired` must be seen when a class is made.
Alignment = tuple[
    tuple[int, ...] | None, ...
]  # for each operand the axes of the result that its axes are; None: the last
Pads = tuple[tuple[int, int], ...]  # before and after each axis


class NoAttrs(TypedDict):
    """The op has none: its operands and the shape of its result say it all."""


class LinearAttrs(TypedDict):
    """Contract `axis` of x with axis `w_in` of the weight; `w_out` takes its place. alpha · W x + beta · b."""

    axis: int
    w_in: int
    w_out: int
    alpha: NotRequired[float]
    beta: NotRequired[float]


class ConvAttrs(TypedDict):
    """Channels lie along `axis`, the spatial axes behind it. `pad` may be "same_upper" or "same_lower"."""

    axis: int
    stride: tuple[int, ...]
    pad: Pads | str
    dilation: tuple[int, ...]
    groups: int
    transposed: NotRequired[bool]
    output_padding: NotRequired[tuple[int, ...]]


class PointwiseAttrs(TypedDict):
    """`fn` is the function; `rank` the number of axes of the result, where no operand says it. The rest are its options."""

    fn: str
    align: NotRequired[Alignment]
    rank: NotRequired[int]
    alpha: NotRequired[float]
    beta: NotRequired[float]
    bias: NotRequired[float]
    dtype: NotRequired[str]
    eps: NotRequired[float]
    gamma: NotRequired[float]
    input_scale: NotRequired[float]
    lambd: NotRequired[float]
    max: NotRequired[float]
    min: NotRequired[float]
    threshold: NotRequired[float]
    value: NotRequired[float]


class AlongAttrs(TypedDict):
    """`fn` acts over `axes`, which it drops where `drop`. The rest are its options."""

    fn: str
    axes: tuple[int, ...]
    align: NotRequired[Alignment]
    drop: NotRequired[bool]
    ceil: NotRequired[bool]
    dilation: NotRequired[tuple[int, ...]]
    divisor: NotRequired[int | None]
    eps: NotRequired[float]
    include_pad: NotRequired[bool]
    index: NotRequired[int]
    kernel: NotRequired[tuple[int, ...]]
    pad: NotRequired[Pads | str]
    pads: NotRequired[Pads]
    stride: NotRequired[tuple[int, ...]]
    times: NotRequired[tuple[Dim, ...]]
    value: NotRequired[float]


class ShapeAttrs(TypedDict):
    """Of a reshape or expand of tensors; that of a value has its result's shape, which may be dynamic."""

    shape: NotRequired[tuple[int, ...]]


class TransposeAttrs(TypedDict):
    """Axis i of the result is axis perm[i] of x."""

    perm: tuple[int, ...]


class ConcatAttrs(TypedDict):
    axis: int


class EmbeddingAttrs(TypedDict):
    """With `tuples`, an index is a tuple of one number along a last axis of its own (GatherND)."""

    tuples: NotRequired[bool]


class AttentionAttrs(TypedDict):
    """`scale` is absent where only the host can tell it. `past`: the mask is causal counted from the last key.

    `padding` is added to the scores of keys that only fill up.
    """

    scale: NotRequired[float]
    causal: NotRequired[bool]
    past: NotRequired[bool]
    padding: NotRequired[float]
    align: NotRequired[Alignment]


class SelectAttrs(TypedDict):
    """Positions `keep` of `axis`, in their order; with a `period`, those of every run of that many positions."""

    axis: int
    keep: tuple[int, ...]
    period: NotRequired[int]


class DoAttrs(TypedDict):
    """Replace `units` of `axis`; where there is a weight, by an affine function of `parents`."""

    axis: int
    units: tuple[int, ...]
    parents: NotRequired[tuple[int, ...]]


class PlaneAttrs(TypedDict):
    """Ones of the sizes behind `axis`."""

    axis: int


class ColumnAttrs(TypedDict):
    """Units along `axis` of a weight; with `groups`, a unit counts over all groups of a convolution."""

    axis: int
    units: tuple[int, ...]
    parents: NotRequired[tuple[int, ...]]
    groups: NotRequired[int]


class GroupedSelectAttrs(TypedDict):
    """For each group of rows, the columns that stay."""

    keep: tuple[tuple[int, ...], ...]


Kind = TypeVar("Kind")


def attributes(node: Node, kind: type[Kind]) -> Kind:
    """The attributes of a node, typed as those of its op."""
    return cast(Kind, node.attrs)


Shapes = list[Shape | None]  # of the operands; None where one is absent


class Takes(Enum):
    """What an operand may be."""

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
    options: tuple[str, ...] = ()  # and that may
    affine_in: tuple[
        int, ...
    ] = ()  # operands: f(x) = scale · x + shift, element by element, once the others are constants
    linear: bool = False  # linear, and alike for every unit: an affine relation among units passes
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
    as_stored: bool = False  # its meaning takes tensors in their own dtype: it moves elements, or widens what it needs
    passes: bool = False  # replacements may go through it: its result may be known where its operand is
    sized: bool = (
        False  # it makes the shape that its result has: of a value, that of the result; of a tensor, an attribute
    )
    work: Callable[[Node, Shapes], list[Shape]] | None = None  # its multiply-accumulates are the products of these
    functions: Mapping[str, Function] = field(default_factory=dict)

    @cached_property
    def classes(self) -> dict[str, tuple[type, ...]]:
        """For each attribute, what its value is an instance of."""
        hints = get_type_hints(self.attributes)
        return {name: _classes(hint) for name, hint in hints.items()}

    @cached_property
    def required(self) -> frozenset[str]:
        return frozenset(self.attributes.__required_keys__)  # type: ignore[attr-defined]

    @cached_property
    def own(self) -> frozenset[str]:
        """The attributes that do not belong to one function or the other."""
        every = {name for function in self.functions.values() for name in (*function.needs, *function.options)}
        return frozenset(self.classes) - every


def _classes(hint: Any) -> tuple[type, ...]:
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(c for part in get_args(hint) for c in _classes(part))
    return (get_origin(hint) or hint,)


def undeclared(op: Op, node: Node) -> str:
    """What is wrong with the operands and attributes of a node, if anything."""
    return _operand_problem(op.operands, node.inputs) or _attribute_problem(op, node.attrs)


def _operand_problem(declared: tuple[OperandSpec, ...], inputs: tuple[Operand, ...]) -> str:
    last = declared[-1] if declared else None
    if len(inputs) > len(declared) and not (last is not None and last.repeated):
        return f"has {len(inputs)} operands, {len(declared)} are declared"
    for i, parameter in enumerate(declared):
        operand = inputs[i] if i < len(inputs) else None
        if operand is None:
            if not parameter.optional:
                return f"has no operand {parameter.name!r}"
        elif parameter.takes is Takes.VALUE and not isinstance(operand, str):
            return f"its operand {parameter.name!r} is a tensor"
    return ""


def _attribute_problem(op: Op, attrs: Mapping[str, Any]) -> str:
    for name in op.required:
        if name not in attrs:
            return f"has no attribute {name!r}"
    allowed = op.classes
    for name, given in attrs.items():
        classes = allowed.get(name)
        if classes is None:
            return f"has an attribute {name!r} that the op does not declare"
        if not isinstance(given, classes):
            return f"its attribute {name!r} is {given!r}"
    return _option_problem(op, attrs) if op.functions else ""


def _option_problem(op: Op, attrs: Mapping[str, Any]) -> str:
    function = op.functions.get(attrs["fn"])
    if function is None:
        return f"there is no function {attrs['fn']!r}"
    for name in function.needs:
        if name not in attrs:
            return f"has no attribute {name!r}"
    for name in attrs:
        if name not in op.own and name not in function.needs and name not in function.options:
            return f"has an attribute {name!r} that {attrs['fn']!r} does not take"
    return ""
