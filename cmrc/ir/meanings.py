"""What every op means, in numpy and float64: the one definition. Folding, the evaluator and the tests call it.

Meanings take the attributes first, then the operands as arrays, absent ones as None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cmrc.ir.axes import Index
from cmrc.ir.functions import ALONG, POINTWISE, softmax, windows
from cmrc.ir.graph import Array
from cmrc.ir.spec import Function

Attrs = Mapping[str, Any]
NOT_OPTIONS = {"fn", "align", "rank"}  # attributes of `pointwise` itself


def _aligned(array: Array, dims: tuple[int, ...] | None, rank: int) -> Array:
    """Put an operand's axes where they belong in a result of `rank` axes; `None` means right-aligned, as numpy does."""
    if dims is None:
        return array
    shape = [1] * rank
    for axis, dim in enumerate(dims):
        shape[dim] = array.shape[axis]
    return array.reshape(shape)


def _function(functions: Mapping[str, Function], attrs: Attrs) -> Callable[..., Array]:
    meaning = functions[attrs["fn"]].meaning
    assert meaning is not None, attrs["fn"]  # callers ask first whether there is one
    return meaning


def pointwise(attrs: Attrs, *operands: Array | None) -> Array:
    align = attrs.get("align") or (None,) * len(operands)
    free = [o.ndim for o, dims in zip(operands, align, strict=True) if o is not None and dims is None]
    rank = attrs.get("rank") or max(free)
    placed = [None if o is None else _aligned(o, dims, rank) for o, dims in zip(operands, align, strict=True)]
    options = {k: v for k, v in attrs.items() if k not in NOT_OPTIONS}
    with np.errstate(all="ignore"):
        return np.asarray(_function(POINTWISE, attrs)(*placed, **options))


def along(attrs: Attrs, x: Array, *parameters: Array | None) -> Array:
    align = attrs.get("align") or (None,) * (len(parameters) + 1)
    placed = [None if p is None else _aligned(p, dims, x.ndim) for p, dims in zip(parameters, align[1:], strict=True)]
    with np.errstate(all="ignore"):
        return _function(ALONG, attrs)(x, attrs, *placed)


def linear(attrs: Attrs, x: Array, weight: Array, bias: Array | None = None) -> Array:
    axis, alpha, beta = attrs["axis"], attrs.get("alpha", 1.0), attrs.get("beta", 1.0)
    y = alpha * np.tensordot(np.moveaxis(x, axis, -1), weight, axes=([-1], [attrs["w_in"]]))
    y = np.moveaxis(y, -1, axis)
    return np.asarray(y if bias is None else y + beta * _aligned(bias.reshape(-1), (axis,), y.ndim))


def conv_pads(attrs: Attrs, spatial: Sequence[int], kernel: Sequence[int]) -> tuple[tuple[int, int], ...]:
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


def conv(attrs: Attrs, x: Array, weight: Array, bias: Array | None = None) -> Array:
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


def slab_of(value: Array, axis: int, rank: int) -> Array:
    """The constants of a do with as many axes as the value they go into: fewer axes mean one number per unit, or one for all."""
    return value if value.ndim == rank else value.reshape([value.size if i == axis else 1 for i in range(rank)])


def attention(
    attrs: Attrs, q: Array, k: Array, v: Array, mask: Array | None = None, padding: Array | None = None
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
        scores = scores + attrs["padding"] * (_aligned(there, dims, scores.ndim) == 0)
    return softmax(scores, {"axes": (scores.ndim - 1,)}) @ v


def do(attrs: Attrs, x: Array, value: Array, weight: Array | None = None) -> Array:
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


def fold_columns(attrs: Attrs, weight: Array, mix: Array) -> Array:
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


def weigh_columns(attrs: Attrs, weight: Array, constant: Array) -> Array:
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


def select(attrs: Attrs, x: Array) -> Array:
    """Positions of an axis; with a period, the same of every run of that many."""
    axis, keep, period = attrs["axis"], Index.of(attrs["keep"]).array, attrs.get("period")
    if period:
        keep = (np.arange(x.shape[axis] // period)[:, None] * period + keep).reshape(-1)
    return x.take(keep, axis=axis)


def select_in_groups(attrs: Attrs, weight: Array) -> Array:
    """Other columns for each group of rows: the weight of a grouped convolution whose groups lose different channels."""
    keep = np.asarray(attrs["keep"])
    rows = weight.reshape(len(keep), -1, *weight.shape[1:])
    parts = [np.take(block, columns, axis=1) for block, columns in zip(rows, keep, strict=True)]
    return np.concatenate(parts, axis=0)


def reshape(attrs: Attrs, x: Array) -> Array:
    return x.reshape(attrs["shape"])


def transpose(attrs: Attrs, x: Array) -> Array:
    return np.transpose(x, attrs["perm"])


def concat(attrs: Attrs, *parts: Array) -> Array:
    return np.concatenate(parts, axis=attrs["axis"])


def expand(attrs: Attrs, x: Array) -> Array:
    return np.broadcast_to(x, attrs["shape"])


def matmul(attrs: Attrs, x: Array, y: Array) -> Array:
    return np.asarray(np.matmul(x, y))


def embedding(attrs: Attrs, ids: Array, table: Array) -> Array:
    """Rows of a table."""
    return np.asarray(table[(ids[..., 0] if attrs.get("tuples") else ids).astype(np.int64)])


def plane(attrs: Attrs, x: Array) -> Array:
    """Ones of the sizes of x behind an axis, a batch of one."""
    return np.ones((1,) * (attrs["axis"] + 1) + x.shape[attrs["axis"] + 1 :])
