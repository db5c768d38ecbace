"""What every op means, in numpy and float64: the one evaluator. Folding calls it, and so do the tests.

Three tables, a row an op: `MEANINGS` (evaluate), `CHECKS` (shapes), and for `pointwise` and `along` their functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from cmrc.ir.axes import Index, is_whole
from cmrc.ir.graph import Apply, Array, Leaf, Literal, Node, Shape, Tensor

Attrs = Mapping[str, Any]

# ---------------------------------------------------------------- pointwise functions

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _gelu(x: Array) -> Array:
    return np.asarray(0.5 * x * (1.0 + _erf(x / math.sqrt(2.0))))


def _gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def _sigmoid(x: Array) -> Array:
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def _softplus(x: Array, beta: float = 1.0, threshold: float = math.inf) -> Array:
    return np.where(x * beta > threshold, x, np.logaddexp(0.0, x * beta) / beta)


def _hard_sigmoid(x: Array, alpha: float = 1 / 6, beta: float = 0.5) -> Array:
    return np.clip(alpha * x + beta, 0.0, 1.0)


def _clip(
    x: Array, low: Array | None = None, high: Array | None = None, *, min: float = -math.inf, max: float = math.inf
) -> Array:
    low = np.asarray(min) if low is None else low
    high = np.asarray(max) if high is None else high
    return np.minimum(np.maximum(x, low), high)


def _batch_norm(x: Array, weight: Array | None, bias: Array | None, mean: Array, var: Array, *, eps: float) -> Array:
    y = (x - mean) / np.sqrt(var + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _elu(x: Array, alpha: float = 1.0, gamma: float = 1.0, input_scale: float = 1.0) -> Array:
    return gamma * np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0) * input_scale))


POINTWISE: dict[str, Callable[..., Array]] = {
    "identity": lambda x: x,
    "cast": lambda x, *, dtype: as_dtype(x, dtype),
    "neg": np.negative,
    "abs": np.abs,
    "exp": np.exp,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "reciprocal": lambda x: 1.0 / x,
    "square": np.square,
    "sin": np.sin,
    "cos": np.cos,
    "erf": _erf,
    "sign": np.sign,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.round,
    "not": np.logical_not,
    "isnan": np.isnan,
    "isinf": np.isinf,
    "relu": lambda x: np.maximum(x, 0.0),
    "leaky_relu": lambda x, alpha=0.01: np.where(x >= 0, x, alpha * x),
    "elu": _elu,
    "celu": lambda x, alpha=1.0: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0) / alpha)),
    "selu": lambda x, alpha=1.6732632423543772, gamma=1.0507009873554805: _elu(x, alpha, gamma),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": lambda x, alpha=1.702: x * _sigmoid(alpha * x),
    "sigmoid": _sigmoid,
    "log_sigmoid": lambda x: -np.logaddexp(0.0, -x),
    "tanh": np.tanh,
    "silu": lambda x: x * _sigmoid(x),
    "mish": lambda x: x * np.tanh(_softplus(x)),
    "softplus": _softplus,
    "softsign": lambda x: x / (1.0 + np.abs(x)),
    "hard_sigmoid": _hard_sigmoid,
    "hard_swish": lambda x: x * _hard_sigmoid(x),
    "threshold": lambda x, *, threshold, value: np.asarray(np.where(x > threshold, x, value)),
    "thresholded_relu": lambda x, alpha=1.0: np.where(x > alpha, x, 0.0),
    "shrink": lambda x, lambd=0.5, bias=0.0: np.where(np.abs(x) > lambd, x - bias * np.sign(x), 0.0),
    "clip": _clip,
    "prelu": lambda x, slope: np.where(x >= 0, x, slope * x),
    "batch_norm": _batch_norm,
    "add": lambda x, y, alpha=1.0: x + alpha * y,
    "sub": lambda x, y, alpha=1.0: x - alpha * y,
    "rsub": lambda x, y, alpha=1.0: y - alpha * x,
    "addcmul": lambda x, y, z, value=1.0: x + value * y * z,
    "mul": np.multiply,
    "div": np.divide,
    "pow": np.power,
    "min": np.minimum,
    "max": np.maximum,
    "fmod": np.fmod,
    "where": lambda condition, x, y: np.asarray(np.where(condition != 0, x, y)),
    "equal": np.equal,
    "not_equal": np.not_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "and": np.logical_and,
    "or": np.logical_or,
}

# Operands in which a function is affine once the others are constant: f(x) = scale*x + shift, element by element.
AFFINE_OPERANDS: dict[str, tuple[int, ...]] = {
    "identity": (0,), "cast": (0,), "neg": (0,), "batch_norm": (0,), "add": (0, 1), "sub": (0, 1), "rsub": (0, 1),
    "mul": (0, 1), "div": (0,), "where": (1, 2), "addcmul": (0, 1, 2),
}  # fmt: skip


# ---------------------------------------------------------------- functions along axes


def _pool_pads(spatial: Sequence[int], attrs: Attrs) -> list[tuple[int, int]]:
    """The padding before and after each axis; ceil mode adds what its last window needs."""
    pads, kernel, stride = list(attrs["pad"]), attrs["kernel"], attrs["stride"]
    dilation = attrs.get("dilation", (1,) * len(kernel))
    for i, n in enumerate(spatial if attrs.get("ceil") else ()):
        size, reach = n + sum(pads[i]), dilation[i] * (kernel[i] - 1) + 1
        count = -(-(size - reach) // stride[i]) + 1
        if (count - 1) * stride[i] >= n + pads[i][0]:
            count -= 1  # a window may not start in the padding after the end
        pads[i] = (pads[i][0], pads[i][1] + max(0, (count - 1) * stride[i] + reach - size))
    return pads


def _pool_windows(x: Array, attrs: Attrs, fill: float) -> Array:
    """Windows of the trailing axes, padded by `fill`: shape (..., *out, *kernel)."""
    rank = len(attrs["kernel"])
    pads, dilation = _pool_pads(x.shape[x.ndim - rank :], attrs), attrs.get("dilation", (1,) * rank)
    return _windows(x, attrs["kernel"], attrs["stride"], pads, dilation, fill)


def _windows(
    x: Array,
    kernel: Sequence[int],
    stride: Sequence[int],
    pads: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    fill: float,
) -> Array:
    rank = len(kernel)
    lead = x.ndim - rank
    x = np.pad(x, [(0, 0)] * lead + [(max(lo, 0), max(hi, 0)) for lo, hi in pads], constant_values=fill)
    inner = [slice(max(-lo, 0), x.shape[lead + i] - max(-hi, 0)) for i, (lo, hi) in enumerate(pads)]
    x = x[tuple([slice(None)] * lead + inner)]
    reach = tuple(d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True))
    windows = sliding_window_view(x, reach, axis=tuple(range(lead, x.ndim)))
    steps = [slice(None)] * lead + [slice(None, None, s) for s in stride] + [slice(None, None, d) for d in dilation]
    return np.asarray(windows[tuple(steps)])


def _max_pool(x: Array, attrs: Attrs) -> Array:
    rank = len(attrs["kernel"])
    return np.asarray(_pool_windows(x, attrs, -np.inf).max(axis=tuple(range(-rank, 0))))


def _avg_pool(x: Array, attrs: Attrs) -> Array:
    over = tuple(range(-len(attrs["kernel"]), 0))
    total = _pool_windows(x, attrs, 0.0).sum(axis=over)
    if attrs.get("divisor"):
        return np.asarray(total / attrs["divisor"])
    spatial = x.shape[x.ndim + over[0] :]
    inside = np.ones(spatial)
    pads = _pool_pads(spatial, attrs)
    if attrs.get("include_pad"):  # the declared padding counts, what ceil mode adds beyond it does not
        inside = np.pad(inside, attrs["pad"], constant_values=1.0)
        pads = [(0, after - declared[1]) for (_, after), declared in zip(pads, attrs["pad"], strict=True)]
    count = _windows(inside, attrs["kernel"], attrs["stride"], pads, (1,) * len(over), 0.0).sum(axis=over)
    return np.asarray(total / count)


def _softmax(x: Array, attrs: Attrs) -> Array:
    axes = tuple(attrs["axes"])
    shifted = np.exp(x - x.max(axis=axes, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=axes, keepdims=True))


def _standardise(x: Array, attrs: Attrs, weight: Array | None, bias: Array | None, *, centre: bool) -> Array:
    axes = tuple(attrs["axes"])
    mean = x.mean(axis=axes, keepdims=True) if centre else 0.0
    scale = np.sqrt(np.square(x - mean).mean(axis=axes, keepdims=True) + attrs["eps"])
    y = (x - mean) / scale
    y = y if weight is None else y * weight
    return np.asarray(y if bias is None else y + bias)


def _reduce(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda x, attrs: np.asarray(function(x, axis=tuple(attrs["axes"]), keepdims=not attrs.get("drop", False)))


ALONG: dict[str, Callable[..., Array]] = {
    "mean": _reduce(np.mean),
    "sum": _reduce(np.sum),
    "amax": _reduce(np.max),
    "amin": _reduce(np.min),
    "prod": _reduce(np.prod),
    "max_pool": _max_pool,
    "avg_pool": _avg_pool,
    "softmax": _softmax,
    "layer_norm": lambda x, attrs, w=None, b=None: _standardise(x, attrs, w, b, centre=True),
    "instance_norm": lambda x, attrs, w=None, b=None: _standardise(x, attrs, w, b, centre=True),
    "rms_norm": lambda x, attrs, w=None: _standardise(x, attrs, w, None, centre=False),
    "pick": lambda x, attrs: np.take(x, attrs["index"], axis=attrs["axes"][0]),
    "gather_elements": lambda x, attrs, index: np.take_along_axis(x, index.astype(np.int64), axis=attrs["axes"][0]),
    "tile": lambda x, attrs: np.tile(x, attrs["times"]),
    "pad": lambda x, attrs: np.pad(x, attrs["pads"], constant_values=attrs["value"]),
}

# Functions that map a slab that is constant over their axes to the same constant.
KEEPS_CONSTANTS = {"mean", "amax", "amin", "max_pool", "pick", "resize", "adaptive_avg_pool", "adaptive_max_pool",
                   "flip", "roll", "slice", "gather", "pad_edge", "tile", "gather_elements"}  # fmt: skip
# Linear functions, alike for every unit: an affine relation among units passes through.
LINEAR_ALONG = {"mean", "sum", "avg_pool", "adaptive_avg_pool", "pick", "resize", "flip", "roll", "slice", "gather",
                "pad", "pad_edge", "tile"}  # fmt: skip


def keeps_constants(attrs: Attrs) -> bool:
    """Whether a function along axes maps a slab that is constant over them to the same constant."""
    counts_padding = attrs.get("include_pad") and any(p != (0, 0) for p in attrs["pad"])
    plain_mean = attrs["fn"] == "avg_pool" and not attrs.get("divisor") and not counts_padding
    return plain_mean or attrs["fn"] in KEEPS_CONSTANTS


# ---------------------------------------------------------------- ops


def _aligned(array: Array, dims: tuple[int, ...] | None, rank: int) -> Array:
    """Put an operand's axes where they belong in a result of `rank` axes; `None` means right-aligned, as numpy does."""
    if dims is None:
        return array
    shape = [1] * rank
    for axis, dim in enumerate(dims):
        shape[dim] = array.shape[axis]
    return array.reshape(shape)


NOT_OPTIONS = {"fn", "align", "rank"}


def _pointwise(attrs: Attrs, *operands: Array | None) -> Array:
    align = attrs.get("align") or (None,) * len(operands)
    free = [o.ndim for o, dims in zip(operands, align, strict=True) if o is not None and dims is None]
    rank = attrs.get("rank") or max(free)
    placed = [None if o is None else _aligned(o, dims, rank) for o, dims in zip(operands, align, strict=True)]
    options = {k: v for k, v in attrs.items() if k not in NOT_OPTIONS}
    with np.errstate(all="ignore"):
        return np.asarray(POINTWISE[attrs["fn"]](*placed, **options))


def _along(attrs: Attrs, x: Array, *parameters: Array | None) -> Array:
    align = attrs.get("align") or (None,) * (len(parameters) + 1)
    placed = [None if p is None else _aligned(p, dims, x.ndim) for p, dims in zip(parameters, align[1:], strict=True)]
    with np.errstate(all="ignore"):
        return ALONG[attrs["fn"]](x, attrs, *placed)


def _linear(attrs: Attrs, x: Array, weight: Array, bias: Array | None = None) -> Array:
    axis, alpha, beta = attrs["axis"], attrs.get("alpha", 1.0), attrs.get("beta", 1.0)
    y = alpha * np.tensordot(np.moveaxis(x, axis, -1), weight, axes=([-1], [attrs["w_in"]]))
    y = np.moveaxis(y, -1, axis)
    return np.asarray(y if bias is None else y + beta * _aligned(bias.reshape(-1), (axis,), y.ndim))


def conv_pads(attrs: Attrs, spatial: Sequence[int], kernel: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The padding before and after each spatial axis; `same_upper` and `same_lower` depend on the size."""
    pad = attrs["pad"]
    if not isinstance(pad, str):
        return tuple(pad)
    found = []
    more = attrs.get("output_padding", (0,) * len(kernel))
    for size, k, stride, dilation, extra in zip(spatial, kernel, attrs["stride"], attrs["dilation"], more, strict=True):
        if attrs.get("transposed"):  # the result has size * stride positions
            total = max(0, dilation * (k - 1) + 1 + extra - stride)
        else:
            total = max(0, (-(-size // stride) - 1) * stride + dilation * (k - 1) + 1 - size)
        small, large = total // 2, total - total // 2
        found.append((small, large) if pad == "same_upper" else (large, small))
    return tuple(found)


def _conv(attrs: Attrs, x: Array, weight: Array, bias: Array | None = None) -> Array:
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
    windows = _windows(batched, kernel, stride, pads, dilation, 0.0)  # N, C, *out, *kernel
    n, channels, out = windows.shape[0], windows.shape[1], windows.shape[2 : 2 + rank]
    windows = windows.reshape(n, groups, channels // groups, *out, *kernel)
    grouped = weight.reshape(groups, -1, *weight.shape[1:])
    over_windows = [2, *range(3 + rank, 3 + 2 * rank)]
    parts = [
        np.tensordot(windows[:, g : g + 1], grouped[g], axes=(over_windows, [1, *range(2, 2 + rank)]))[:, 0]
        for g in range(groups)
    ]
    y = np.moveaxis(np.concatenate(parts, axis=-1), -1, 1)
    y = y if bias is None else y + bias.reshape(1, -1, *([1] * rank))
    return y if attrs["axis"] == 1 else y[0]


def slab_of(value: Array, axis: int, rank: int) -> Array:
    """The constants of a do with as many axes as the value they go into: fewer axes mean one number a unit, or one for all."""
    return value if value.ndim == rank else value.reshape([value.size if i == axis else 1 for i in range(rank)])


def _attention(
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
            padding, dims = np.arange(scores.shape[-1]) < padding[:, None], (0, scores.ndim - 1)
        scores = scores + attrs["padding"] * (_aligned(padding, dims, scores.ndim) == 0)
    return _softmax(scores, {"axes": (scores.ndim - 1,)}) @ v


def _do(attrs: Attrs, x: Array, value: Array, weight: Array | None = None) -> Array:
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


def _fold_columns(attrs: Attrs, weight: Array, mix: Array) -> Array:
    """W_P += W_S · B along `axis` of a weight (units as in `_do`); with `groups`, a unit counts over all groups."""
    axis, groups, per = attrs["axis"], attrs.get("groups", 1), weight.shape[attrs["axis"]]
    moved = np.array(np.moveaxis(weight, axis, 0), dtype=np.float64)  # per, (out, ...)
    units = np.asarray(attrs["units"]).reshape(mix.shape[0], -1)
    parents = np.asarray(attrs["parents"]).reshape(mix.shape[1], -1)
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


def _weigh_columns(attrs: Attrs, weight: Array, constant: Array) -> Array:
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


def _select(attrs: Attrs, x: Array) -> Array:
    """Positions of an axis; with a period, the same of every run of that many."""
    axis, keep, period = attrs["axis"], Index.of(attrs["keep"]).array, attrs.get("period")
    if period:
        keep = (np.arange(x.shape[axis] // period)[:, None] * period + keep).reshape(-1)
    return x.take(keep, axis=axis)


def _select_in_groups(attrs: Attrs, weight: Array) -> Array:
    """Other columns for each group of rows: the weight of a grouped convolution whose groups lose different channels."""
    keep = np.asarray(attrs["keep"])
    rows = weight.reshape(len(keep), -1, *weight.shape[1:])
    parts = [np.take(block, columns, axis=1) for block, columns in zip(rows, keep, strict=True)]
    return np.concatenate(parts, axis=0)


MEANINGS: dict[str, Callable[..., Array]] = {
    "linear": _linear,
    "conv": _conv,
    "pointwise": _pointwise,
    "along": _along,
    "reshape": lambda attrs, x: x.reshape(attrs["shape"]),
    "transpose": lambda attrs, x: np.transpose(x, attrs["perm"]),
    "concat": lambda attrs, *xs: np.concatenate(xs, axis=attrs["axis"]),
    "expand": lambda attrs, x: np.broadcast_to(x, attrs["shape"]),
    "matmul": lambda attrs, x, y: np.matmul(x, y),
    "embedding": lambda attrs, ids, table: table[(ids[..., 0] if attrs.get("tuples") else ids).astype(np.int64)],
    "attention": _attention,
    "select": _select,
    "do": _do,
    "plane": lambda attrs, x: np.ones((1,) * (attrs["axis"] + 1) + x.shape[attrs["axis"] + 1 :]),
    "fold_columns": _fold_columns,
    "weigh_columns": _weigh_columns,
    "select_in_groups": _select_in_groups,
}
# Ops that take their operands as they are stored: they move elements, or widen only the part that they need.
AS_STORED = {"select", "select_in_groups", "reshape", "transpose", "weigh_columns"}


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """By the name that the IR has for it: numpy's own, or ml_dtypes' (bfloat16)."""
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def as_dtype(array: Array, dtype: str) -> Array:
    return array.astype(numpy_dtype(dtype), copy=False)


def materialise(tensor: Tensor) -> Array:
    """The array of a tensor expression, in its own dtype. Selecting moves bytes; arithmetic runs in float64, cast once."""
    return as_dtype(_compute(tensor), tensor.dtype)


def constant(tensor: Tensor) -> Array:
    """The array of a tensor expression in float64, for folding."""
    array = _compute(tensor)
    return array if array.dtype.kind in "biu" else array.astype(np.float64, copy=not isinstance(tensor, Literal))


def _compute(tensor: Tensor) -> Array:
    if isinstance(tensor, Leaf):
        return tensor.load()
    if isinstance(tensor, Literal):
        return tensor.array
    read = _compute if tensor.op in AS_STORED else constant
    return MEANINGS[tensor.op](tensor.attrs, *[read(part) for part in tensor.inputs])


def apply(op: str, inputs: Sequence[Tensor], attrs: Attrs, shape: Sequence[int], dtype: str) -> Tensor:
    """A tensor that is `op` of tensors."""
    return Apply(op, tuple(inputs), dict(attrs), tuple(shape), dtype)


def take(tensor: Tensor, axis: int, keep: Sequence[int]) -> Tensor:
    """Positions of an axis of a tensor; all of them are the tensor itself."""
    if is_whole(keep, tensor.shape[axis]):
        return tensor
    shape = (*tensor.shape[:axis], len(keep), *tensor.shape[axis + 1 :])
    return Apply("select", (tensor,), {"axis": axis, "keep": Index.of(keep)}, shape, tensor.dtype)


# ---------------------------------------------------------------- shape checks

Shapes = list[Shape | None]


def _is(ok: bool, problem: str) -> str:
    return "" if ok else problem


def _check_linear(node: Node, shapes: Shapes) -> str:
    x, w, b = (*shapes, None)[:3]
    assert x is not None and w is not None
    axis, units, outs = node.attrs["axis"], w[node.attrs["w_in"]], w[node.attrs["w_out"]]
    if x[axis] != units:
        return f"axis {axis} has {x[axis]} units, the weight takes {units}"
    if b is not None and b not in ((outs,), (1,), ()):
        return f"the bias has shape {b} for {outs} outputs"
    return _is(node.output.shape == (*x[:axis], outs, *x[axis + 1 :]), f"the result has shape {node.output.shape}")


def _check_conv(node: Node, shapes: Shapes) -> str:
    x, w, b = (*shapes, None)[:3]
    assert x is not None and w is not None
    groups, axis = node.attrs["groups"], node.attrs["axis"]
    first, second = int(w[0]), int(w[1])
    ins, outs = (first, second * groups) if node.attrs.get("transposed") else (second * groups, first)
    if x[axis] != ins:
        return f"the input has {x[axis]} channels, the weight takes {ins}"
    if b is not None and b != (outs,):
        return f"the bias has shape {b} for {outs} outputs"
    return _is(node.output.shape[axis] == outs, f"the result has {node.output.shape[axis]} channels, not {outs}")


def _check_pointwise(node: Node, shapes: Shapes) -> str:
    out = node.output.shape
    align = node.attrs.get("align") or (None,) * len(shapes)
    for shape, dims in zip(shapes, align, strict=True):
        if shape is None or (shape == out and dims is None):
            continue
        if dims is None and len(shape) > len(out):
            return f"an operand of shape {shape} does not fit the result {out}"
        for size, dim in zip(shape, dims if dims is not None else range(len(out) - len(shape), len(out)), strict=True):
            if size != 1 and size != out[dim] and isinstance(size, int) and isinstance(out[dim], int):
                return f"an operand of shape {shape} does not fit the result {out}"
    return ""


def _check_concat(node: Node, shapes: Shapes) -> str:
    axis = node.attrs["axis"]
    sizes = [shape[axis] for shape in shapes if shape is not None]
    total = node.output.shape[axis]
    known = all(isinstance(n, int) for n in (*sizes, total))
    return _is(not known or sum(int(n) for n in sizes) == total, f"{sizes} do not add up to {total}")


def _within(positions: Sequence[int], size: int) -> bool:
    if not positions:
        return True
    low, high = Index.of(positions).span
    return low >= 0 and high < size


def _check_select(node: Node, shapes: Shapes) -> str:
    axis, keep, x = node.attrs["axis"], node.attrs["keep"], shapes[0]
    assert x is not None
    size = node.attrs.get("period") or x[axis]
    if not keep or not isinstance(size, int) or not _within(keep, size):
        return f"positions out of 0..{size}"
    if "period" in node.attrs:
        return ""
    return _is(node.output.shape == (*x[:axis], len(keep), *x[axis + 1 :]), f"the result has shape {node.output.shape}")


def _check_do(node: Node, shapes: Shapes) -> str:
    axis, x = node.attrs["axis"], shapes[0]
    assert x is not None
    units, parents, size = node.attrs["units"], node.attrs.get("parents", ()), x[axis]
    if not units or not isinstance(size, int) or not (_within(units, size) and _within(parents, size)):
        return f"units out of 0..{size}"
    return _is(node.output.shape == x, f"the result has shape {node.output.shape}, not {x}")


def _check_transpose(node: Node, shapes: Shapes) -> str:
    assert shapes[0] is not None
    return _is(node.output.shape == tuple(shapes[0][p] for p in node.attrs["perm"]), "the result is not so permuted")


def _check_reshape(node: Node, shapes: Shapes) -> str:
    def known(shape: Shape) -> int | None:
        return math.prod(int(n) for n in shape) if all(isinstance(n, int) for n in shape) else None

    assert shapes[0] is not None
    before, after = known(shapes[0]), known(node.output.shape)
    return _is(before is None or after is None or before == after, f"{shapes[0]} cannot become {node.output.shape}")


def _check_attention(node: Node, shapes: Shapes) -> str:
    q, k, v = shapes[:3]
    assert q is not None and k is not None and v is not None
    if q[-1] != k[-1]:
        return f"queries have {q[-1]} units, keys {k[-1]}"
    return _is(node.output.shape == (*q[:-1], v[-1]), f"the result has shape {node.output.shape}")


CHECKS: dict[str, Callable[[Node, Shapes], str]] = {
    "linear": _check_linear,
    "conv": _check_conv,
    "pointwise": _check_pointwise,
    "concat": _check_concat,
    "select": _check_select,
    "do": _check_do,
    "transpose": _check_transpose,
    "reshape": _check_reshape,
    "attention": _check_attention,
    **dict.fromkeys(("along", "expand", "matmul", "embedding", "plane", "opaque"), lambda node, shapes: ""),
}
