"""What every op of the IR computes, in torch: the rows of `ir/ops` once more, for autograd.

The numpy code is the definition; a test walks the specs and compares both. Meanings take the attributes first, then the
operands, absent ones as None. Operands come in the network's own precision, not in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from cmrc.hosts.autograd.functions import ALONG, POINTWISE, convolve, pad
from cmrc.ir.graph import Index
from cmrc.ir.ops.affine import ConvAttrs, conv_pads
from cmrc.ir.ops.functions import NOT_OPTIONS

Attrs = Mapping[str, Any]


def _aligned(tensor: Tensor, dims: Sequence[int] | None, rank: int) -> Tensor:
    """Put an operand's axes where they belong in a result of `rank` axes; `None` means right-aligned."""
    if dims is None:
        return tensor
    shape = [1] * rank
    for axis, dim in enumerate(dims):
        shape[dim] = tensor.shape[axis]
    return tensor.reshape(shape)


def _alike(*tensors: Tensor) -> list[Tensor]:
    """The operands in one dtype, the one that numpy would choose: torch's products do not convert."""
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return [tensor.to(dtype) for tensor in tensors]


def pointwise(attrs: Attrs, *operands: Tensor | None) -> Tensor:
    align = attrs.get("align") or (None,) * len(operands)
    free = [o.ndim for o, dims in zip(operands, align, strict=True) if o is not None and dims is None]
    rank = attrs.get("rank") or max(free)
    placed = [None if o is None else _aligned(o, dims, rank) for o, dims in zip(operands, align, strict=True)]
    options = {k: v for k, v in attrs.items() if k not in NOT_OPTIONS}
    return POINTWISE[attrs["fn"]](*placed, **options)


def along(attrs: Attrs, x: Tensor, *parameters: Tensor | None) -> Tensor:
    align = attrs.get("align") or (None,) * (len(parameters) + 1)
    placed = [None if p is None else _aligned(p, dims, x.ndim) for p, dims in zip(parameters, align[1:], strict=True)]
    return ALONG[attrs["fn"]](x, attrs, *placed)


def linear(attrs: Attrs, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    axis, alpha, beta = attrs["axis"], attrs.get("alpha", 1.0), attrs.get("beta", 1.0)
    x, weight = _alike(x, weight)
    matrix = weight if attrs["w_in"] == 1 else weight.T
    own = bias is not None and alpha == beta == 1.0 and bias.numel() == matrix.shape[0]
    y = functional.linear(
        x.movedim(axis, -1), matrix, bias.reshape(-1).to(x.dtype) if own and bias is not None else None
    )
    y = (y if alpha == 1.0 else alpha * y).movedim(-1, axis)
    return y if bias is None or own else y + beta * _aligned(bias.reshape(-1), (axis,), y.ndim)


def conv(attrs: Attrs, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rank, stride, dilation, groups = weight.ndim - 2, attrs["stride"], attrs["dilation"], attrs["groups"]
    x, weight = _alike(x, weight)
    batched = x if attrs["axis"] == 1 else x[None]
    pads = conv_pads(cast(ConvAttrs, attrs), batched.shape[2:], weight.shape[2:])
    if attrs.get("transposed"):
        # Without padding, then cut: what `output_padding` adds is zero before the bias.
        function: Any = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)[
            rank - 1
        ]
        full = function(batched, weight, None, tuple(stride), 0, 0, groups, tuple(dilation))
        more = attrs.get("output_padding", (0,) * rank)
        y = pad(full, [(-lo, extra - hi) for (lo, hi), extra in zip(pads, more, strict=True)], 0.0)
    else:
        y = convolve(pad(batched, pads, 0.0), weight, stride, dilation, groups)
    y = y if bias is None else y + bias.reshape(1, -1, *(1,) * rank)
    return y if attrs["axis"] == 1 else y[0]


def matmul(attrs: Attrs, x: Tensor, y: Tensor) -> Tensor:
    return torch.matmul(*_alike(x, y))


def attention(
    attrs: Attrs, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, padding: Tensor | None = None
) -> Tensor:
    q, k, v = _alike(q, k, v)
    if q.ndim > 2 and q.shape[-3] != k.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], dim=-3) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * attrs["scale"]
    if attrs.get("causal"):
        rows, columns = scores.shape[-2:]
        seen = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows if attrs.get("past") else 0)
        scores = scores.masked_fill(~seen, -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if padding is not None:
        dims: Sequence[int] = attrs["align"][4]
        there = padding
        if tuple(dims) == (0,):  # the number of keys that are there
            there, dims = torch.arange(scores.shape[-1]) < padding[:, None], (0, scores.ndim - 1)
        scores = scores + attrs["padding"] * (_aligned(there, dims, scores.ndim) == 0).to(scores)
    return torch.softmax(scores, -1) @ v


def do(attrs: Attrs, x: Tensor, value: Tensor, weight: Tensor | None = None) -> Tensor:
    axis, units = attrs["axis"], torch.as_tensor(list(attrs["units"]))
    shape = [len(units) if i == axis else n for i, n in enumerate(x.shape)]
    if value.ndim != x.ndim:
        value = value.reshape([value.numel() if i == axis else 1 for i in range(x.ndim)])
    slab = value.expand(shape)
    if weight is not None:
        parents = x.index_select(axis, torch.as_tensor(list(attrs["parents"]))).movedim(axis, -1)
        repeat = len(units) // weight.shape[0]
        parents = parents.reshape(*parents.shape[:-1], weight.shape[1], repeat)
        rebuilt = torch.einsum("...pr,sp->...sr", *_alike(parents, weight))
        slab = slab + rebuilt.reshape(*rebuilt.shape[:-2], len(units)).movedim(-1, axis)
    x, slab = _alike(x, slab)
    return x.index_copy(axis, units, slab)


def fold_columns(attrs: Attrs, weight: Tensor, mix: Tensor) -> Tensor:
    axis, groups, per = attrs["axis"], attrs.get("groups", 1), weight.shape[attrs["axis"]]
    weight, mix = _alike(weight, mix)
    moved = weight.movedim(axis, 0)
    units = torch.as_tensor(list(attrs["units"])).reshape(mix.shape[0], -1)
    parents = torch.as_tensor(list(attrs["parents"])).reshape(mix.shape[1], -1)
    if groups == 1:
        added = torch.einsum("sr...,sp->pr...", moved[units], mix)
        return moved.index_put((parents,), added, accumulate=True).movedim(0, axis)
    view = moved.reshape(per, groups, moved.shape[1] // groups, *moved.shape[2:])
    same = (units // per == (parents // per).T).to(mix)  # a unit serves parents of its own group only
    s, p = (same != 0).nonzero(as_tuple=True)
    unit, parent = units[s, 0], parents[p, 0]
    added = (mix * same)[s, p].reshape(-1, *(1,) * (view.ndim - 2)) * view[unit % per, unit // per]
    folded = view.index_put((parent % per, unit // per), added, accumulate=True)
    return folded.reshape(moved.shape).movedim(0, axis)


def weigh_columns(attrs: Attrs, weight: Tensor, constant: Tensor) -> Tensor:
    axis, groups, per = attrs["axis"], attrs.get("groups", 1), weight.shape[attrs["axis"]]
    weight, constant = _alike(weight, constant)
    units = torch.as_tensor(list(attrs["units"]))
    if groups == 1:
        some: Tensor = torch.tensordot(constant, weight.index_select(axis, units), dims=([0], [axis]))  # pyright: ignore[reportArgumentType]
        return some
    moved = weight.movedim(axis, 0)
    view = moved.reshape(per, groups, moved.shape[1] // groups, *moved.shape[2:])
    weighed = constant.reshape(-1, *(1,) * (view.ndim - 2)) * view[units % per, units // per]
    return torch.zeros_like(view[0]).index_add(0, units // per, weighed).reshape(moved.shape[1:])


def select(attrs: Attrs, x: Tensor) -> Tensor:
    axis, keep, period = attrs["axis"], torch.from_numpy(Index.of(attrs["keep"]).array.copy()), attrs.get("period")
    if period:
        keep = (torch.arange(x.shape[axis] // period)[:, None] * period + keep).reshape(-1)
    return x.index_select(axis, keep)


def select_in_groups(attrs: Attrs, weight: Tensor) -> Tensor:
    keep = torch.as_tensor(attrs["keep"])
    rows = weight.reshape(len(keep), -1, *weight.shape[1:])
    return torch.cat([block.index_select(1, columns) for block, columns in zip(rows, keep, strict=True)])


def turn(attrs: Attrs, x: Tensor, blocks: Tensor) -> Tensor:
    x, blocks = _alike(x, blocks)
    last = x.movedim(attrs["axis"], -1)
    apart = last.reshape(*last.shape[:-1], blocks.shape[0], blocks.shape[1])
    return torch.einsum("hij,...hj->...hi", blocks, apart).reshape(last.shape).movedim(-1, attrs["axis"])


def embedding(attrs: Attrs, ids: Tensor, table: Tensor) -> Tensor:
    return table[(ids[..., 0] if attrs.get("tuples") else ids).long()]


def plane(attrs: Attrs, x: Tensor) -> Tensor:
    return x.new_ones((1,) * (attrs["axis"] + 1) + tuple(x.shape[attrs["axis"] + 1 :]))


MEANINGS: dict[str, Callable[..., Tensor]] = {
    "linear": linear,
    "conv": conv,
    "matmul": matmul,
    "attention": attention,
    "pointwise": pointwise,
    "along": along,
    "reshape": lambda attrs, x: x.reshape(tuple(attrs["shape"])),
    "transpose": lambda attrs, x: x.permute(tuple(attrs["perm"])),
    "concat": lambda attrs, *parts: torch.cat(_alike(*parts), attrs["axis"]),
    "expand": lambda attrs, x: x.broadcast_to(tuple(attrs["shape"])),
    "select": select,
    "embedding": embedding,
    "do": do,
    "turn": turn,
    "plane": plane,
    "fold_columns": fold_columns,
    "weigh_columns": weigh_columns,
    "select_in_groups": select_in_groups,
}
