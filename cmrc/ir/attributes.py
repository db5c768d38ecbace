"""The attributes of each op: their names and types. `spec.py` checks nodes against them, rules read them typed.

attrs = attributes(node, ConvAttrs)
attrs["groups"]     an int, for the type checker too
"""

from typing import NotRequired, TypedDict, TypeVar, cast

from cmrc.ir.graph import Dim, Node

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
