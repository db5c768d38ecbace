"""Rows of ops that act over some axes, alike and apart on the others: reductions, pooling, norms, padding."""

from __future__ import annotations

from typing import Any

import torch

from cmrc.hosts.fx.ops.row import Barrier, Read, along, integers, row
from cmrc.hosts.fx.schema import Arguments, opname


@row("mean.dim", "sum.dim_IntList", "amax", "amin", "prod.dim_int", "argmax", "argmin", "var.correction",
     "std.correction", "logsumexp", "any.dim", "all.dim", "cumsum")  # fmt: skip
def read_reduction(a: Arguments) -> Read:
    return along(opname(a.node), a.axes("dim"), drop=len(a.out_shape()) < a.rank())


@row("mean", "sum")
def read_whole_reduction(a: Arguments) -> Read:
    return along(opname(a.node), range(a.rank()), drop=len(a.out_shape()) < a.rank())


@row("max.dim", "min.dim")
def read_extreme(a: Arguments) -> Read:
    values = {"fn": f"a{opname(a.node)}", "axes": a.axes("dim"), "drop": not a["keepdim"]}
    return Read("along", (0,), parts=(values, {**values, "fn": f"arg{opname(a.node)}"}))


@row("linalg_vector_norm")
def read_vector_norm(a: Arguments) -> Read | None:
    return along("l2", a.axes("dim"), drop=not a["keepdim"]) if a["ord"] == 2 and a["dtype"] is None else None


@row("softmax.int", "log_softmax.int", "_softmax", "_log_softmax")
def read_softmax(a: Arguments) -> Read:
    return along(opname(a.node).lstrip("_"), a.axes("dim"))


# ---------------------------------------------------------------- pooling


def _spatial_rank(a: Arguments) -> int:
    """2 for max_pool2d and its like."""
    return int(opname(a.node).removesuffix("_with_indices")[-2])


def _spatial_axes(a: Arguments) -> tuple[int, ...]:
    return tuple(range(a.rank() - _spatial_rank(a), a.rank()))


def _pool(a: Arguments, fn: str, **more: Any) -> Read:
    rank = _spatial_rank(a)
    kernel = integers(a["kernel_size"], rank)
    stride = integers(a["stride"], rank) if a["stride"] else kernel
    pad = tuple((p, p) for p in integers(a["padding"], rank))
    return along(fn, _spatial_axes(a), kernel=kernel, stride=stride, pad=pad, ceil=bool(a["ceil_mode"]), **more)


@row("max_pool1d", "max_pool2d", "max_pool3d")
def read_max_pool(a: Arguments) -> Read:
    return _max_pool(a)


def _max_pool(a: Arguments) -> Read:
    return _pool(a, "max_pool", dilation=integers(a["dilation"], _spatial_rank(a)))


@row("max_pool2d_with_indices", "max_pool3d_with_indices")
def read_max_pool_with_indices(a: Arguments) -> Read:
    values = _max_pool(a).attrs
    return Read("along", (0,), parts=(values, {"fn": "max_pool_indices", "axes": values["axes"]}))


@row("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
def read_adaptive_max_pool(a: Arguments) -> Read:
    axes = _spatial_axes(a)
    parts = ({"fn": "adaptive_max_pool", "axes": axes}, {"fn": "max_pool_indices", "axes": axes})
    return Read("along", (0,), parts=parts)


@row("avg_pool1d", "avg_pool2d", "avg_pool3d")
def read_avg_pool(a: Arguments) -> Read:
    divisor = a.get("divisor_override")
    return _pool(a, "avg_pool", include_pad=bool(a["count_include_pad"]), divisor=divisor)


@row("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def read_adaptive_avg_pool(a: Arguments) -> Read:
    to_one = all(n == 1 for n in integers(a["output_size"], _spatial_rank(a)))
    return along("mean" if to_one else "adaptive_avg_pool", _spatial_axes(a))


# ---------------------------------------------------------------- norms


def _normalised(a: Arguments) -> range:
    return range(a.rank() - len(a["normalized_shape"]), a.rank())


@row("layer_norm")
def read_layer_norm(a: Arguments) -> Read:
    return along("layer_norm", _normalised(a), 2, 3, eps=float(a["eps"]))


@row("rms_norm")
def read_rms_norm(a: Arguments) -> Read:
    eps = float(a["eps"]) if a["eps"] is not None else torch.finfo(a.node.meta["val"].dtype).eps
    return along("rms_norm", _normalised(a), 2, eps=eps)


@row("group_norm")
def read_group_norm(a: Arguments) -> Read:
    attrs = {"eps": float(a["eps"]), "groups": int(a["num_groups"]), "align": (None, (1,), (1,))}
    return along("group_norm", range(1, a.rank()), 2, 3, **attrs)


@row("instance_norm")
def read_instance_norm(a: Arguments) -> Read | Barrier:
    if not a["use_input_stats"]:
        return Barrier("it uses running statistics")
    return along("instance_norm", range(2, a.rank()), 1, 2, eps=float(a["eps"]), align=(None, (1,), (1,)))


# ---------------------------------------------------------------- sizes and positions


@row("upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest3d.vec", "upsample_bilinear2d.vec",
     "upsample_linear1d.vec", "upsample_bicubic2d.vec", "upsample_trilinear3d.vec", "upsample_nearest2d",
     "upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa.vec",
     "_upsample_bicubic2d_aa.vec")  # fmt: skip
def read_resize(a: Arguments) -> Read:
    return along("resize", range(2, a.rank()))


@row("pad", "constant_pad_nd")
def read_pad(a: Arguments) -> Read | None:
    flat = list(a["pad"])
    if not all(isinstance(p, int) for p in flat):
        return None
    pads = [(0, 0)] * a.rank()
    for i in range(len(flat) // 2):  # torch counts axes from the last
        pads[a.rank() - 1 - i] = (flat[2 * i], flat[2 * i + 1])
    axes = [i for i, p in enumerate(pads) if p != (0, 0)]
    if any(p < 0 for p in flat):
        return along("slice" if all(p <= 0 for p in flat) else "crop", axes)
    if a.get("mode", "constant") != "constant":
        return along("pad_edge", axes)
    return along("pad", axes, pads=tuple(pads), value=float(a["value"] or 0.0))


@row("flip", "roll")
def read_flip(a: Arguments) -> Read:
    return along(opname(a.node), a.axes("dims"))


@row("select.int")
def read_select(a: Arguments) -> Read:
    axis, index = a.axis("dim"), a["index"]
    size = a.shape(0)[axis]
    if not isinstance(index, int):
        return along("gather", (axis,), drop=True)
    return along("pick", (axis,), drop=True, index=index % size if isinstance(size, int) else index)


@row("gather")
def read_gather(a: Arguments) -> Read | None:
    """x[i, index[i, j]], where index and x agree along the other axes."""
    axis = a.axis("dim")
    sizes = [(n, m) for d, (n, m) in enumerate(zip(a.shape(0), a.shape("index"), strict=True)) if d != axis]
    return along("gather_elements", (axis,), 2) if all(n == m for n, m in sizes) else None


@row("index_select")
def read_index_select(a: Arguments) -> Read:
    """x[index] along an axis: positions that are known only at run time, or a table of them."""
    axis = a.axis("dim")
    return along("take", (axis,), 2, align=(None, (axis,)))


@row("repeat")
def read_repeat(a: Arguments) -> Read | None:
    times = tuple(n if isinstance(n, int) else str(n.meta["val"]) for n in a["repeats"])
    axes = [d for d, n in enumerate(times) if n != 1]
    known = len(times) == a.rank() and all(isinstance(a.shape(0)[d], int) for d in axes)
    return along("tile", axes, times=times) if known else None


@row("unbind.int")
def read_unbind(a: Arguments) -> Read | None:
    axis = a.axis("dim")
    size = a.shape(0)[axis]
    if not isinstance(size, int):
        return None
    parts = tuple({"fn": "pick", "axes": (axis,), "drop": True, "index": i} for i in range(size))
    return Read("along", (0,), parts=parts)
