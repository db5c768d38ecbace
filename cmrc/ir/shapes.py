"""The rule for the shapes of each op: what is wrong with those of a node, or nothing.

Sizes known only at run time are names. Where a name meets a number, or another name, a rule says nothing: the host's shape
inference may call one size by two names. `..._products` are the multiply-accumulates of an op, as products of these shapes; an op
without them in its spec counts as none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cmrc.ir.axes import Index
from cmrc.ir.functions import ALONG
from cmrc.ir.graph import Dim, Node, Shape
from cmrc.ir.spec import (
    AlongAttrs,
    ConcatAttrs,
    ConvAttrs,
    DoAttrs,
    EmbeddingAttrs,
    Extent,
    LinearAttrs,
    PlaneAttrs,
    PointwiseAttrs,
    SelectAttrs,
    Shapes,
    TransposeAttrs,
    attributes,
)


def _unless(ok: bool, problem: str) -> str:
    return "" if ok else problem


def linear(node: Node, shapes: Shapes) -> str:
    attrs = attributes(node, LinearAttrs)
    x, w, b = (*shapes, None)[:3]
    assert x is not None and w is not None
    axis, units, outs = attrs["axis"], w[attrs["w_in"]], w[attrs["w_out"]]
    if x[axis] != units:
        return f"axis {axis} has {x[axis]} units, the weight takes {units}"
    if b is not None and b not in ((outs,), (1,), ()):
        return f"the bias has shape {b} for {outs} outputs"
    return _unless(node.output.shape == (*x[:axis], outs, *x[axis + 1 :]), f"the result has shape {node.output.shape}")


def conv(node: Node, shapes: Shapes) -> str:
    attrs = attributes(node, ConvAttrs)
    x, w, b = (*shapes, None)[:3]
    assert x is not None and w is not None
    groups, axis = attrs["groups"], attrs["axis"]
    first, second = int(w[0]), int(w[1])
    ins, outs = (first, second * groups) if attrs.get("transposed") else (second * groups, first)
    if x[axis] != ins:
        return f"the input has {x[axis]} channels, the weight takes {ins}"
    if b is not None and b != (outs,):
        return f"the bias has shape {b} for {outs} outputs"
    return _unless(node.output.shape[axis] == outs, f"the result has {node.output.shape[axis]} channels, not {outs}")


def pointwise(node: Node, shapes: Shapes) -> str:
    attrs = attributes(node, PointwiseAttrs)
    out = node.output.shape
    align = attrs.get("align") or (None,) * len(shapes)
    for shape, dims in zip(shapes, align, strict=True):
        if shape is None or (shape == out and dims is None):
            continue
        if dims is None and len(shape) > len(out):
            return f"an operand of shape {shape} does not fit the result {out}"
        for size, dim in zip(shape, dims if dims is not None else range(len(out) - len(shape), len(out)), strict=True):
            if size != 1 and size != out[dim] and isinstance(size, int) and isinstance(out[dim], int):
                return f"an operand of shape {shape} does not fit the result {out}"
    return ""


def concat(node: Node, shapes: Shapes) -> str:
    attrs = attributes(node, ConcatAttrs)
    axis = attrs["axis"]
    sizes = [shape[axis] for shape in shapes if shape is not None]
    total = node.output.shape[axis]
    known = all(isinstance(n, int) for n in (*sizes, total))
    return _unless(not known or sum(int(n) for n in sizes) == total, f"{sizes} do not add up to {total}")


def _within(positions: Sequence[int], size: int) -> bool:
    if not positions:
        return True
    low, high = Index.of(positions).span
    return low >= 0 and high < size


def select(node: Node, shapes: Shapes) -> str:
    attrs = attributes(node, SelectAttrs)
    axis, keep, x = attrs["axis"], attrs["keep"], shapes[0]
    assert x is not None
    size = attrs.get("period") or x[axis]
    if not keep or not isinstance(size, int) or not _within(keep, size):
        return f"positions out of 0..{size}"
    if "period" in attrs:
        return ""
    return _unless(
        node.output.shape == (*x[:axis], len(keep), *x[axis + 1 :]), f"the result has shape {node.output.shape}"
    )


def do(node: Node, shapes: Shapes) -> str:
    attrs = attributes(node, DoAttrs)
    axis, x = attrs["axis"], shapes[0]
    assert x is not None
    units, parents, size = attrs["units"], attrs.get("parents", ()), x[axis]
    if not units or not isinstance(size, int) or not (_within(units, size) and _within(parents, size)):
        return f"units out of 0..{size}"
    return _unless(node.output.shape == x, f"the result has shape {node.output.shape}, not {x}")


def transpose(node: Node, shapes: Shapes) -> str:
    attrs = attributes(node, TransposeAttrs)
    assert shapes[0] is not None
    return _unless(node.output.shape == tuple(shapes[0][p] for p in attrs["perm"]), "the result is not so permuted")


def reshape(node: Node, shapes: Shapes) -> str:
    def known(shape: Shape) -> int | None:
        return math.prod(int(n) for n in shape) if all(isinstance(n, int) for n in shape) else None

    assert shapes[0] is not None
    before, after = known(shapes[0]), known(node.output.shape)
    return _unless(before is None or after is None or before == after, f"{shapes[0]} cannot become {node.output.shape}")


def attention(node: Node, shapes: Shapes) -> str:
    q, k, v = shapes[:3]
    assert q is not None and k is not None and v is not None
    if q[-1] != k[-1]:
        return f"queries have {q[-1]} units, keys {k[-1]}"
    return _unless(node.output.shape == (*q[:-1], v[-1]), f"the result has shape {node.output.shape}")


def _differ(first: Dim, second: Dim) -> bool:
    return isinstance(first, int) and isinstance(second, int) and first != second


def _result(node: Node) -> str:
    return f"the result has shape {node.output.shape}"


def along(node: Node, shapes: Shapes) -> str:
    attrs, x, out = attributes(node, AlongAttrs), shapes[0], node.output.shape
    assert x is not None
    axes, extent = attrs["axes"], ALONG[attrs["fn"]].extent
    if any(not 0 <= axis < len(x) for axis in axes):
        return f"acts over axes {axes} of a value with {len(x)}"
    dropped = bool(attrs.get("drop"))
    left = [axis for axis in range(len(x)) if not (dropped and axis in axes)]
    if len(out) != len(left):
        return _result(node)
    for size, axis in zip(out, left, strict=True):
        if axis not in axes or extent is Extent.SAME:
            if _differ(size, x[axis]):
                return f"{_result(node)}, its operand {x}"
        elif extent is Extent.ONE and size != 1:
            return f"{_result(node)}: axis {axis} is reduced"
    return ""


def expand(node: Node, shapes: Shapes) -> str:
    x, out = shapes[0], node.output.shape
    assert x is not None
    lead = len(out) - len(x)
    wrong = lead < 0 or any(n != 1 and _differ(n, out[lead + i]) for i, n in enumerate(x))
    return _unless(not wrong, f"{x} cannot be expanded to {out}")


def matmul(node: Node, shapes: Shapes) -> str:
    x, y = shapes[:2]
    assert x is not None and y is not None
    if not x or not y:
        return "one of its operands is a number"
    if _differ(x[-1], y[-2:][0]):
        return f"{x} and {y} do not fit"
    ends = (*x[-2:-1], *(y[-1:] if len(y) > 1 else ()))
    out = node.output.shape
    tail = out[len(out) - len(ends) :]
    return _unless(not any(_differ(a, b) for a, b in zip(ends, tail, strict=False)), _result(node))


def embedding(node: Node, shapes: Shapes) -> str:
    ids, table = shapes[:2]
    assert ids is not None and table is not None
    index = ids[:-1] if attributes(node, EmbeddingAttrs).get("tuples") else ids
    expected = (*index, *table[1:])
    wrong = len(expected) != len(node.output.shape) or any(map(_differ, expected, node.output.shape))
    return _unless(not wrong, _result(node))


def plane(node: Node, shapes: Shapes) -> str:
    axis, x = attributes(node, PlaneAttrs)["axis"], shapes[0]
    assert x is not None
    return _unless(node.output.shape == (*(1,) * (axis + 1), *x[axis + 1 :]), _result(node))


def as_the_host_says(node: Node, shapes: Shapes) -> str:
    """An opaque op: only its host knows its shapes."""
    return ""


def linear_products(node: Node, shapes: Shapes) -> list[Shape]:
    weight = shapes[1]
    assert weight is not None
    return [(*node.output.shape, weight[attributes(node, LinearAttrs)["w_in"]])]


def conv_products(node: Node, shapes: Shapes) -> list[Shape]:
    """A transposed one: every input element meets every output channel of its group and kernel position."""
    x, weight = shapes[:2]
    assert x is not None and weight is not None
    many = x if attributes(node, ConvAttrs).get("transposed") else node.output.shape
    return [(*many, *weight[1:])]


def matmul_products(node: Node, shapes: Shapes) -> list[Shape]:
    x = shapes[0]
    assert x is not None
    return [(*node.output.shape, x[-1])]


def attention_products(node: Node, shapes: Shapes) -> list[Shape]:
    """q kᵀ, then the weights times v: whole products, also where a mask is causal."""
    q, k, v = shapes[:3]
    assert q is not None and k is not None and v is not None
    return [(*q, k[-2]), (*q[:-1], k[-2], v[-1])]
