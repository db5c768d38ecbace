"""The ops of the fold: linear and conv, the do and select that move between them, and what folding makes of their weights.

Each op has its attributes, its shape rule, its meaning and its spec here, one below the other.
"""

import math
from collections.abc import Sequence
from typing import NotRequired, TypedDict

import numpy as np

from cmrc.ir.axes import aligned
from cmrc.ir.graph import Array, Index, Node, Shape, attributes
from cmrc.ir.ops.arrays import windows
from cmrc.ir.spec import Op, Pads, Shapes, either, optional, value

# No `from __future__ import annotations` here: `NotRequired` must be seen when a class is made.
AFFINE: dict[str, Op] = {}


# ---------------------------------------------------------------- linear


class LinearAttrs(TypedDict):
    """Contract `axis` of x with axis `w_in` of the weight; `w_out` takes its place. alpha · W x + beta · b."""

    axis: int
    w_in: int
    w_out: int
    alpha: NotRequired[float]
    beta: NotRequired[float]


def linear_shape(node: Node, shapes: Shapes) -> str:
    attrs = attributes(node, LinearAttrs)
    x, w, b = (*shapes, None)[:3]
    assert x is not None and w is not None
    axis, units, outs = attrs["axis"], w[attrs["w_in"]], w[attrs["w_out"]]
    if x[axis] != units:
        return f"axis {axis} has {x[axis]} units, the weight takes {units}"
    if b is not None and b not in ((outs,), (1,), ()):
        return f"the bias has shape {b} for {outs} outputs"
    return "" if node.output.shape == (*x[:axis], outs, *x[axis + 1 :]) else f"the result has shape {node.output.shape}"


def linear_meaning(attrs: LinearAttrs, x: Array, weight: Array, bias: Array | None = None) -> Array:
    axis, alpha, beta = attrs["axis"], attrs.get("alpha", 1.0), attrs.get("beta", 1.0)
    y = alpha * np.tensordot(np.moveaxis(x, axis, -1), weight, axes=([-1], [attrs["w_in"]]))
    y = np.moveaxis(y, -1, axis)
    return np.asarray(y if bias is None else y + beta * aligned(bias.reshape(-1), (axis,), y.ndim))


def linear_products(node: Node, shapes: Shapes) -> list[Shape]:
    weight = shapes[1]
    assert weight is not None
    return [(*node.output.shape, weight[attributes(node, LinearAttrs)["w_in"]])]


AFFINE["linear"] = Op(
    (either("x"), either("weight"), optional("bias")),
    LinearAttrs,
    linear_shape,
    linear_meaning,
    affine_in=(0,),
    work=linear_products,
)


# ---------------------------------------------------------------- conv


class ConvAttrs(TypedDict):
    """Channels lie along `axis`, the spatial axes behind it. `pad` may be "same_upper" or "same_lower"."""

    axis: int
    stride: tuple[int, ...]
    pad: Pads | str
    dilation: tuple[int, ...]
    groups: int
    transposed: NotRequired[bool]
    output_padding: NotRequired[tuple[int, ...]]


def conv_shape(node: Node, shapes: Shapes) -> str:
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
    return "" if node.output.shape[axis] == outs else f"the result has {node.output.shape[axis]} channels, not {outs}"


def conv_pads(attrs: ConvAttrs, spatial: Sequence[int], kernel: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The padding before and after each spatial axis; `same_upper` and `same_lower` depend on the size."""
    pad = attrs["pad"]
    if not isinstance(pad, str):
        return tuple(pad)
    pads = []
    more = attrs.get("output_padding", (0,) * len(kernel))
    for size, k, stride, dilation, extra in zip(spatial, kernel, attrs["stride"], attrs["dilation"], more, strict=True):
        if attrs.get("transposed"):  # the result has size * stride positions
            total = max(0, dilation * (k - 1) + 1 + extra - stride)
        else:
            total = max(0, (-(-size // stride) - 1) * stride + dilation * (k - 1) + 1 - size)
        small, large = total // 2, total - total // 2
        pads.append((small, large) if pad == "same_upper" else (large, small))
    return tuple(pads)


def conv_meaning(attrs: ConvAttrs, x: Array, weight: Array, bias: Array | None = None) -> Array:
    rank, groups = weight.ndim - 2, attrs["groups"]
    batched = x if attrs["axis"] == 1 else x[None]
    kernel = weight.shape[2:]
    pads = conv_pads(attrs, batched.shape[2:], kernel)
    stride, dilation = attrs["stride"], attrs["dilation"]
    if attrs.get("transposed"):
        # Transposed: spread the input by the stride, then convolve with the kernel turned around.
        spread = [(n - 1) * s + 1 for n, s in zip(batched.shape[2:], stride, strict=True)]
        full = np.zeros((*batched.shape[:2], *spread))
        full[(slice(None), slice(None), *(slice(None, None, s) for s in stride))] = batched
        batched = full
        more = attrs.get("output_padding", (0,) * rank)
        pads = tuple(
            (d * (k - 1) - lo, d * (k - 1) - hi + extra)
            for (lo, hi), k, d, extra in zip(pads, kernel, dilation, more, strict=True)
        )
        stride = (1,) * rank
        per_in, per_out = weight.shape[0] // groups, weight.shape[1]
        weight = weight.reshape(groups, per_in, per_out, *kernel).swapaxes(1, 2)
        weight = np.flip(weight, axis=tuple(range(3, 3 + rank))).reshape(groups * per_out, per_in, *kernel)
    seen = windows(batched, kernel, stride, pads, dilation, 0.0)  # N, C, *out, *kernel
    n, channels, out = seen.shape[0], seen.shape[1], seen.shape[2 : 2 + rank]
    seen = seen.reshape(n, groups, channels // groups, *out, *kernel)
    grouped = weight.reshape(groups, -1, *weight.shape[1:])
    over_windows = [2, *range(3 + rank, 3 + 2 * rank)]
    parts = [
        np.tensordot(seen[:, g : g + 1], grouped[g], axes=(over_windows, [1, *range(2, 2 + rank)]))[:, 0]
        for g in range(groups)
    ]
    y = np.moveaxis(np.concatenate(parts, axis=-1), -1, 1)
    y = y if bias is None else y + bias.reshape(1, -1, *([1] * rank))
    return y if attrs["axis"] == 1 else y[0]


def conv_products(node: Node, shapes: Shapes) -> list[Shape]:
    """A transposed one: every input element meets every output channel of its group and kernel position."""
    x, weight = shapes[:2]
    assert x is not None and weight is not None
    many = x if attributes(node, ConvAttrs).get("transposed") else node.output.shape
    return [(*many, *weight[1:])]


AFFINE["conv"] = Op(
    (either("x"), either("weight"), optional("bias")),
    ConvAttrs,
    conv_shape,
    conv_meaning,
    affine_in=(0,),
    work=conv_products,
)


# ---------------------------------------------------------------- do


class DoAttrs(TypedDict):
    """Replace `units` of `axis`; where there is a weight, by an affine function of `parents`."""

    axis: int
    units: tuple[int, ...]
    parents: NotRequired[tuple[int, ...]]


def do_shape(node: Node, shapes: Shapes) -> str:
    attrs = attributes(node, DoAttrs)
    axis, x = attrs["axis"], shapes[0]
    assert x is not None
    units, parents, size = attrs["units"], attrs.get("parents", ()), x[axis]
    if not units or not isinstance(size, int) or not (_within(units, size) and _within(parents, size)):
        return f"units out of 0..{size}"
    return "" if node.output.shape == x else f"the result has shape {node.output.shape}, not {x}"


def slab_of(value: Array, axis: int, rank: int) -> Array:
    """The constants of a do with as many axes as the value they go into: fewer axes mean one number per unit, or one for all."""
    return value if value.ndim == rank else value.reshape([value.size if i == axis else 1 for i in range(rank)])


def do_meaning(attrs: DoAttrs, x: Array, value: Array, weight: Array | None = None) -> Array:
    """Replace `units` along `axis`: by `value`, or by `weight @ parents + value`. `value` broadcasts against the slab."""
    axis, units = attrs["axis"], list(attrs["units"])
    shape = [len(units) if i == axis else n for i, n in enumerate(x.shape)]
    slab = np.broadcast_to(slab_of(value, axis, x.ndim), shape)
    if weight is not None:
        parents = np.moveaxis(np.take(x, list(attrs["parents"]), axis=axis), axis, -1)
        repeat = len(units) // weight.shape[0]  # each row of the weight serves `repeat` units: a unit became a block
        parents = parents.reshape(*parents.shape[:-1], weight.shape[1], repeat)
        rebuilt = np.einsum("...pr,sp->...sr", parents, weight)
        slab = slab + np.moveaxis(rebuilt.reshape(*rebuilt.shape[:-2], len(units)), -1, axis)
    y = np.array(x, dtype=np.result_type(x, slab))
    y[(slice(None),) * axis + (units,)] = slab
    return y


AFFINE["do"] = Op((value("x"), either("value"), optional("weight")), DoAttrs, do_shape, do_meaning)


# ---------------------------------------------------------------- select


class SelectAttrs(TypedDict):
    """Positions `keep` of `axis`, in their order; with a `period`, those of every run of that many positions."""

    axis: int
    keep: tuple[int, ...]
    period: NotRequired[int]


def _within(positions: Sequence[int], size: int) -> bool:
    if not positions:
        return True
    low, high = Index.of(positions).span
    return low >= 0 and high < size


def select_shape(node: Node, shapes: Shapes) -> str:
    attrs = attributes(node, SelectAttrs)
    axis, keep, x = attrs["axis"], attrs["keep"], shapes[0]
    assert x is not None
    size = attrs.get("period") or x[axis]
    if not keep or not isinstance(size, int) or not _within(keep, size):
        return f"positions out of 0..{size}"
    if "period" in attrs:
        return ""
    return (
        ""
        if node.output.shape == (*x[:axis], len(keep), *x[axis + 1 :])
        else f"the result has shape {node.output.shape}"
    )


def select_meaning(attrs: SelectAttrs, x: Array) -> Array:
    """Positions of an axis; with a period, the same of every run of that many."""
    axis, keep, period = attrs["axis"], Index.of(attrs["keep"]).array, attrs.get("period")
    if period:
        keep = (np.arange(x.shape[axis] // period)[:, None] * period + keep).reshape(-1)
    return x.take(keep, axis=axis)


AFFINE["select"] = Op((either("x"),), SelectAttrs, select_shape, select_meaning, as_stored=True, passes=True)


# ---------------------------------------------------------------- turn


class TurnAttrs(TypedDict):
    """`axis` is cut into blocks of equal size, and each block has a matrix of its own."""

    axis: int


def turn_shape(node: Node, shapes: Shapes) -> str:
    x, blocks = shapes[:2]
    assert x is not None and blocks is not None
    size = x[attributes(node, TurnAttrs)["axis"]]
    if len(blocks) != 3 or blocks[1] != blocks[2] or size != int(blocks[0]) * int(blocks[1]):
        return f"matrices {list(blocks)} do not fit {size} units"
    return "" if node.output.shape == x else f"the result has shape {node.output.shape}, not {x}"


def is_turn(node: Node) -> bool:
    """Whether it is a change of basis that was not tried yet (basis_fold.py)."""
    return node.op == "turn" and not node.marks.why


def turn_meaning(attrs: TurnAttrs, x: Array, blocks: Array) -> Array:
    """Each block of units times its matrix: a change of basis, block by block."""
    axis, (count, size, _) = attrs["axis"], blocks.shape
    last = np.moveaxis(x, axis, -1)
    apart = np.moveaxis(last.reshape(*last.shape[:-1], count, size), -2, 0).reshape(count, -1, size)
    turned = np.moveaxis((apart @ blocks.swapaxes(1, 2)).reshape(count, *last.shape[:-1], size), 0, -2)
    return np.moveaxis(turned.reshape(last.shape), -1, axis)


def turn_products(node: Node, shapes: Shapes) -> list[Shape]:
    blocks = shapes[1]
    assert blocks is not None
    return [(*node.output.shape, blocks[2])]


AFFINE["turn"] = Op((either("x"), either("blocks")), TurnAttrs, turn_shape, turn_meaning, work=turn_products)


# ---------------------------------------------------------------- of tensors only: what folding makes of a weight


class ColumnAttrs(TypedDict):
    """Units along `axis` of a weight; with `groups`, a unit counts over all groups of a convolution."""

    axis: int
    units: tuple[int, ...]
    parents: NotRequired[tuple[int, ...]]
    groups: NotRequired[int]


def weigh_columns_meaning(attrs: ColumnAttrs, weight: Array, constant: Array) -> Array:
    """Σ_s W_s c_s along `axis` of a weight: what constant inputs add, per output and kernel position."""
    axis, groups, per = attrs["axis"], attrs.get("groups", 1), weight.shape[attrs["axis"]]
    if groups == 1:
        some = weight.take(Index.of(attrs["units"]).array, axis=axis).astype(np.float64)
        if constant.ndim == 1:  # without the transposed copy that tensordot makes
            inner = math.prod(some.shape[axis + 1 :])
            stacked = some.reshape(-1, some.shape[axis], inner) if inner > 1 else some.reshape(-1, some.shape[axis])
            total = constant @ stacked if inner > 1 else stacked @ constant
            return np.asarray(total).reshape(*some.shape[:axis], *some.shape[axis + 1 :])
        return np.tensordot(constant, some, axes=(0, axis))
    moved = np.moveaxis(weight.astype(np.float64), axis, 0)
    outs = moved.shape[1] // groups
    total = np.zeros((groups, outs, *moved.shape[2:]))
    view = moved.reshape(per, groups, outs, *moved.shape[2:])
    group, column = np.divmod(Index.of(attrs["units"]).array, per)
    np.add.at(total, group, constant.reshape(-1, *(1,) * (total.ndim - 1)) * view[column, group])
    return total.reshape(moved.shape[1:])


AFFINE["weigh_columns"] = Op(
    (either("weight"), either("constant")), ColumnAttrs, None, weigh_columns_meaning, as_stored=True
)


def fold_columns_meaning(attrs: ColumnAttrs, weight: Array, mix: Array) -> Array:
    """W_P += W_S · B along `axis` of a weight (units as in `do`); with `groups`, a unit counts over all groups."""
    axis, groups, per = attrs["axis"], attrs.get("groups", 1), weight.shape[attrs["axis"]]
    moved = np.array(np.moveaxis(weight, axis, 0), dtype=np.float64)  # per, (out, ...)
    units = np.asarray(attrs["units"], dtype=np.int64).reshape(mix.shape[0], -1)
    parents = np.asarray(attrs["parents"], dtype=np.int64).reshape(mix.shape[1], -1)
    if groups == 1:
        rows = moved[units]  # s, r, rest
        np.add.at(moved, parents, np.einsum("sr...,sp->pr...", rows, mix))
    else:  # grouped convolution: the axis of the weight runs within a group, the rows of each group stand apart
        outs = moved.shape[1] // groups
        view = moved.reshape(per, groups, outs, *moved.shape[2:])
        old = view.copy()
        for s, unit in enumerate(units[:, 0]):
            for p, parent in enumerate(parents[:, 0]):
                if unit // per == parent // per:
                    view[parent % per, unit // per] += mix[s, p] * old[unit % per, unit // per]
    return np.moveaxis(moved, 0, axis)


AFFINE["fold_columns"] = Op((either("weight"), either("mix")), ColumnAttrs, None, fold_columns_meaning)


class GroupedSelectAttrs(TypedDict):
    """For each group of rows, the columns that stay."""

    keep: tuple[tuple[int, ...], ...]


def select_in_groups_meaning(attrs: GroupedSelectAttrs, weight: Array) -> Array:
    """Other columns for each group of rows: the weight of a grouped convolution whose groups lose different channels."""
    keep = np.asarray(attrs["keep"])
    rows = weight.reshape(len(keep), -1, *weight.shape[1:])
    parts = [np.take(block, columns, axis=1) for block, columns in zip(rows, keep, strict=True)]
    return np.concatenate(parts, axis=0)


AFFINE["select_in_groups"] = Op((either("weight"),), GroupedSelectAttrs, None, select_in_groups_meaning, as_stored=True)
