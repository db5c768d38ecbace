"""Ops that move elements and compute nothing, and `opaque`. Attributes, shape rule, meaning and spec of each, one below the other."""

import math
from typing import NotRequired, TypedDict

import numpy as np

from cmrc.ir.graph import Array, Node, Shape, attributes
from cmrc.ir.spec import NoAttrs, Op, Shapes, differ, either, several, value

# No `from __future__ import annotations` here: `NotRequired` must be seen when a class is made.
LAYOUT: dict[str, Op] = {}


# ---------------------------------------------------------------- reshape, expand


class ShapeAttrs(TypedDict):
    """Of a reshape or expand of tensors; that of a value has its result's shape, which may be dynamic."""

    shape: NotRequired[tuple[int, ...]]


def reshape_shape(node: Node, shapes: Shapes) -> str:
    def known(shape: Shape) -> int | None:
        return math.prod(int(n) for n in shape) if all(isinstance(n, int) for n in shape) else None

    assert shapes[0] is not None
    before, after = known(shapes[0]), known(node.output.shape)
    return (
        "" if before is None or after is None or before == after else f"{shapes[0]} cannot become {node.output.shape}"
    )


def reshape_meaning(attrs: ShapeAttrs, x: Array) -> Array:
    return x.reshape(attrs["shape"])


LAYOUT["reshape"] = Op(
    (either("x"),), ShapeAttrs, reshape_shape, reshape_meaning, as_stored=True, passes=True, sized=True
)


def expand_shape(node: Node, shapes: Shapes) -> str:
    x, out = shapes[0], node.output.shape
    assert x is not None
    lead = len(out) - len(x)
    wrong = lead < 0 or any(n != 1 and differ(n, out[lead + i]) for i, n in enumerate(x))
    return "" if not wrong else f"{x} cannot be expanded to {out}"


def expand_meaning(attrs: ShapeAttrs, x: Array) -> Array:
    return np.broadcast_to(x, attrs["shape"])


LAYOUT["expand"] = Op((either("x"),), ShapeAttrs, expand_shape, expand_meaning, passes=True, sized=True)


# ---------------------------------------------------------------- transpose


class TransposeAttrs(TypedDict):
    """Axis i of the result is axis perm[i] of x."""

    perm: tuple[int, ...]


def transpose_shape(node: Node, shapes: Shapes) -> str:
    perm, x = attributes(node, TransposeAttrs)["perm"], shapes[0]
    assert x is not None
    if sorted(perm) != [*range(len(x))]:
        return f"{perm} is not an order of {len(x)} axes"
    return (
        "" if node.output.shape == tuple([x[p] for p in perm]) else "the result does not have that permutation of axes"
    )


def transpose_meaning(attrs: TransposeAttrs, x: Array) -> Array:
    return np.transpose(x, attrs["perm"])


LAYOUT["transpose"] = Op(
    (either("x"),), TransposeAttrs, transpose_shape, transpose_meaning, as_stored=True, passes=True
)


# ---------------------------------------------------------------- concat


class ConcatAttrs(TypedDict):
    axis: int


def concat_shape(node: Node, shapes: Shapes) -> str:
    attrs = attributes(node, ConcatAttrs)
    axis = attrs["axis"]
    sizes = [shape[axis] for shape in shapes if shape is not None]
    total = node.output.shape[axis]
    known = all(isinstance(n, int) for n in (*sizes, total))
    return "" if not known or sum(int(n) for n in sizes) == total else f"{sizes} do not add up to {total}"


def concat_meaning(attrs: ConcatAttrs, *parts: Array) -> Array:
    return np.concatenate(parts, axis=attrs["axis"])


LAYOUT["concat"] = Op((several("parts"),), ConcatAttrs, concat_shape, concat_meaning, passes=True)


# ---------------------------------------------------------------- embedding


class EmbeddingAttrs(TypedDict):
    """With `tuples`, an index is a tuple of one number along a last axis of its own (GatherND)."""

    tuples: NotRequired[bool]


def embedding_shape(node: Node, shapes: Shapes) -> str:
    ids, table = shapes[:2]
    assert ids is not None and table is not None
    index = ids[:-1] if attributes(node, EmbeddingAttrs).get("tuples") else ids
    expected = (*index, *table[1:])
    wrong = len(expected) != len(node.output.shape) or any(map(differ, expected, node.output.shape))
    return "" if not wrong else f"the result has shape {node.output.shape}"


def embedding_meaning(attrs: EmbeddingAttrs, ids: Array, table: Array) -> Array:
    """Rows of a table."""
    return np.asarray(table[(ids[..., 0] if attrs.get("tuples") else ids).astype(np.int64)])


LAYOUT["embedding"] = Op((either("ids"), either("table")), EmbeddingAttrs, embedding_shape, embedding_meaning)


# ---------------------------------------------------------------- plane


class PlaneAttrs(TypedDict):
    """Ones of the sizes behind `axis`."""

    axis: int


def plane_shape(node: Node, shapes: Shapes) -> str:
    axis, x = attributes(node, PlaneAttrs)["axis"], shapes[0]
    assert x is not None
    return (
        "" if node.output.shape == (*(1,) * (axis + 1), *x[axis + 1 :]) else f"the result has shape {node.output.shape}"
    )


def plane_meaning(attrs: PlaneAttrs, x: Array) -> Array:
    """Ones of the sizes of x behind an axis, a batch of one."""
    return np.ones((1,) * (attrs["axis"] + 1) + x.shape[attrs["axis"] + 1 :])


LAYOUT["plane"] = Op((value("x"),), PlaneAttrs, plane_shape, plane_meaning)


# ---------------------------------------------------------------- anything else: only the host knows what it means


def as_the_host_says(node: Node, shapes: Shapes) -> str:
    """An opaque op: only its host knows its shapes."""
    return ""


# Why a recurrent op, which is opaque, does not do with fewer units behind it.
HIDDEN_UNITS = (
    "its gates read every hidden unit at the next step, so a unit that is replaced behind it must still be computed: "
    "the site with `:hidden` behind the name of this op replaces it inside the recurrence"
)

LAYOUT["opaque"] = Op((several("operands"),), NoAttrs, as_the_host_says, None)
