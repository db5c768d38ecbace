"""Products of values: matmul and attention. Attributes, shape rule, meaning and spec of each, one below the other."""

from typing import NotRequired, TypedDict

import numpy as np

from cmrc.ir.axes import aligned
from cmrc.ir.graph import Array, Node, Shape
from cmrc.ir.ops.arrays import softmax
from cmrc.ir.spec import Alignment, NoAttrs, Op, Shapes, differ, either, optional

# No `from __future__ import annotations` here: `NotRequired` must be seen when a class is made.
PRODUCTS: dict[str, Op] = {}


# ---------------------------------------------------------------- matmul


def matmul_shape(node: Node, shapes: Shapes) -> str:
    x, y = shapes[:2]
    assert x is not None and y is not None
    if not x or not y:
        return "one of its operands is a number"
    if differ(x[-1], y[-2:][0]):
        return f"{x} and {y} do not fit"
    ends = (*x[-2:-1], *(y[-1:] if len(y) > 1 else ()))
    out = node.output.shape
    tail = out[len(out) - len(ends) :]
    return (
        ""
        if not any(differ(a, b) for a, b in zip(ends, tail, strict=False))
        else f"the result has shape {node.output.shape}"
    )


def matmul_meaning(attrs: NoAttrs, x: Array, y: Array) -> Array:
    return np.asarray(np.matmul(x, y))


def matmul_products(node: Node, shapes: Shapes) -> list[Shape]:
    x = shapes[0]
    assert x is not None
    return [(*node.output.shape, x[-1])]


PRODUCTS["matmul"] = Op(
    (either("x"), either("y")), NoAttrs, matmul_shape, matmul_meaning, passes=True, work=matmul_products
)


# ---------------------------------------------------------------- attention


class AttentionAttrs(TypedDict):
    """`scale` is absent where only the host can tell it. `past`: the mask is causal counted from the last key.

    `padding` is added to the scores of keys that only fill up.
    """

    scale: NotRequired[float]
    causal: NotRequired[bool]
    past: NotRequired[bool]
    padding: NotRequired[float]
    align: NotRequired[Alignment]


def attention_shape(node: Node, shapes: Shapes) -> str:
    q, k, v = shapes[:3]
    assert q is not None and k is not None and v is not None
    if q[-1] != k[-1]:
        return f"queries have {q[-1]} units, keys {k[-1]}"
    return "" if node.output.shape == (*q[:-1], v[-1]) else f"the result has shape {node.output.shape}"


def attention_meaning(
    attrs: AttentionAttrs, q: Array, k: Array, v: Array, mask: Array | None = None, padding: Array | None = None
) -> Array:
    """softmax(q kᵀ · scale + mask) v, over the last two axes; with fewer key-value heads, each serves a run of queries'.

    `padding` has 0 where a key is only there to fill up, or counts those that are not; `attrs["padding"]` is added there.
    """
    if q.ndim > 2 and q.shape[-3] != k.shape[-3]:
        k, v = (np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) for x in (k, v))
    scores = q @ np.swapaxes(k, -1, -2) * attrs["scale"]
    if attrs.get("causal"):
        rows, columns = scores.shape[-2:]
        scores = np.where(np.tri(rows, columns, columns - rows if attrs.get("past") else 0) > 0, scores, -np.inf)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    if padding is not None:
        dims = attrs["align"][4]
        if dims == (0,):  # the number of keys that are there
            there, dims = np.arange(scores.shape[-1]) < padding[:, None], (0, scores.ndim - 1)
        else:
            there = padding
        scores = scores + attrs["padding"] * (aligned(there, dims, scores.ndim) == 0)
    return softmax(scores, {"axes": (scores.ndim - 1,)}) @ v


def attention_products(node: Node, shapes: Shapes) -> list[Shape]:
    """q kᵀ, then the weights times v: whole products, also where a mask is causal."""
    q, k, v = shapes[:3]
    assert q is not None and k is not None and v is not None
    return [(*q, k[-2]), (*q[:-1], k[-2], v[-1])]


PRODUCTS["attention"] = Op(
    (either("q"), either("k"), either("v"), optional("mask"), optional("padding")),
    AttentionAttrs,
    attention_shape,
    attention_meaning,
    passes=True,
    work=attention_products,
)
