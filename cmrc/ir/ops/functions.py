"""The ops `pointwise` (element by element) and `along` (over some axes), and their functions, one spec each.

A function means what its numpy code computes, in float64. A function without numpy code can be computed only by hosts. That is
enough for replacements that pass it unchanged, if the spec says that it keeps constants.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NotRequired, TypedDict

import numpy as np

from cmrc.ir.axes import aligned
from cmrc.ir.graph import Array, Dim, Node, as_dtype, attributes
from cmrc.ir.ops.arrays import softmax, windows
from cmrc.ir.ops.group_norm import group_norm, known_group_norm
from cmrc.ir.spec import Alignment, Extent, Function, Op, Pads, Shapes, differ, either, several

# No `from __future__ import annotations` here: `NotRequired` must be seen when a class is made.


Attrs = Mapping[str, Any]

# ---------------------------------------------------------------- element by element


def _erf(x: Array) -> Array:
    from scipy.special import erf  # loaded when it is used: it takes longer than the rest of the IR

    return np.asarray(erf(x))


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


def integers(dtype: str) -> tuple[int, int]:
    """The smallest and the largest number of an integer type."""
    bits = int(dtype.removeprefix("u").removeprefix("int"))
    return (0, 2**bits - 1) if dtype.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _quantize(x: Array, scale: Array, zero: Array | None = None, *, dtype: str) -> Array:
    """Round as runtimes do: divide in float32, and round to even."""
    steps = np.rint(x.astype(np.float32) / scale.astype(np.float32)).astype(np.float64)
    shifted = steps if zero is None else steps + zero.astype(np.float64)
    return np.clip(shifted, *integers(dtype))


def _dequantize(
    x: Array, scale: Array, zero: Array | None = None, *, dtype: str, axis: int = 0, block: int = 0
) -> Array:
    """(x − zero) · scale; with a block, as many positions of an axis share a scale."""
    if block:
        size = x.shape[axis]
        scale = np.repeat(scale, block, axis=axis).take(range(size), axis=axis)
        zero = None if zero is None else np.repeat(zero, block, axis=axis).take(range(size), axis=axis)
    centred = x.astype(np.float64) if zero is None else x.astype(np.float64) - zero.astype(np.float64)
    return np.asarray(centred * scale.astype(np.float64))


def _elu(x: Array, alpha: float = 1.0, gamma: float = 1.0, input_scale: float = 1.0) -> Array:
    return gamma * np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0) * input_scale))


POINTWISE: dict[str, Function] = {
    "identity": Function(lambda x: x, affine_in=(0,)),
    "cast": Function(lambda x, *, dtype: as_dtype(x, dtype), needs=("dtype",), affine_in=(0,)),
    "quantize": Function(_quantize, needs=("dtype",)),
    "dequantize": Function(_dequantize, needs=("dtype",), options=("axis", "block"), affine_in=(0, 1)),
    "fill": Function(lambda x, *, value: np.full_like(x, value), needs=("value",), affine_in=(0,)),
    "neg": Function(np.negative, affine_in=(0,)),
    "abs": Function(np.abs),
    "exp": Function(np.exp),
    "expm1": Function(np.expm1),
    "log": Function(np.log),
    "log1p": Function(np.log1p),
    "sqrt": Function(np.sqrt),
    "rsqrt": Function(lambda x: 1.0 / np.sqrt(x)),
    "reciprocal": Function(lambda x: 1.0 / x),
    "square": Function(np.square),
    "sin": Function(np.sin),
    "cos": Function(np.cos),
    "atan": Function(np.arctan),
    "erf": Function(_erf),
    "sign": Function(np.sign),
    "floor": Function(np.floor),
    "ceil": Function(np.ceil),
    "round": Function(np.rint),
    "not": Function(np.logical_not),
    "isnan": Function(np.isnan),
    "isinf": Function(np.isinf),
    "relu": Function(lambda x: np.maximum(x, 0.0)),
    "leaky_relu": Function(lambda x, alpha=0.01: np.where(x >= 0, x, alpha * x), options=("alpha",)),
    "elu": Function(_elu, options=("alpha", "gamma", "input_scale")),
    "celu": Function(
        lambda x, alpha=1.0: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0) / alpha)), options=("alpha",)
    ),
    "selu": Function(
        lambda x, alpha=1.6732632423543772, gamma=1.0507009873554805: _elu(x, alpha, gamma), options=("alpha", "gamma")
    ),
    "gelu": Function(_gelu),
    "gelu_tanh": Function(_gelu_tanh),
    "quick_gelu": Function(lambda x, alpha=1.702: x * _sigmoid(alpha * x), options=("alpha",)),
    "sigmoid": Function(_sigmoid),
    "log_sigmoid": Function(lambda x: -np.logaddexp(0.0, -x)),
    "tanh": Function(np.tanh),
    "silu": Function(lambda x: x * _sigmoid(x)),
    "mish": Function(lambda x: x * np.tanh(_softplus(x))),
    "softplus": Function(_softplus, options=("beta", "threshold")),
    "softsign": Function(lambda x: x / (1.0 + np.abs(x))),
    "hard_sigmoid": Function(_hard_sigmoid, options=("alpha", "beta")),
    "hard_swish": Function(lambda x, alpha=1 / 6: x * _hard_sigmoid(x, alpha), options=("alpha",)),
    "threshold": Function(
        lambda x, *, threshold, value: np.asarray(np.where(x > threshold, x, value)), needs=("threshold", "value")
    ),
    "thresholded_relu": Function(lambda x, alpha=1.0: np.where(x > alpha, x, 0.0), options=("alpha",)),
    "shrink": Function(
        lambda x, lambd=0.5, bias=0.0: np.where(np.abs(x) > lambd, x - bias * np.sign(x), 0.0),
        options=("lambd", "bias"),
    ),
    "clip": Function(_clip, options=("min", "max")),
    "prelu": Function(lambda x, slope: np.where(x >= 0, x, slope * x)),
    "batch_norm": Function(_batch_norm, needs=("eps",), affine_in=(0,)),
    "add": Function(lambda x, y, alpha=1.0: x + alpha * y, options=("alpha",), affine_in=(0, 1)),
    "sub": Function(lambda x, y, alpha=1.0: x - alpha * y, options=("alpha",), affine_in=(0, 1)),
    "rsub": Function(lambda x, y, alpha=1.0: y - alpha * x, options=("alpha",), affine_in=(0, 1)),
    "addcmul": Function(lambda x, y, z, value=1.0: x + value * y * z, options=("value",), affine_in=(0, 1, 2)),
    "mul": Function(np.multiply, affine_in=(0, 1)),
    "div": Function(np.divide, affine_in=(0,)),
    "pow": Function(np.power),
    "min": Function(np.minimum),
    "max": Function(np.maximum),
    "fmod": Function(np.fmod),
    "where": Function(lambda condition, x, y: np.asarray(np.where(condition != 0, x, y)), affine_in=(1, 2)),
    "equal": Function(np.equal),
    "not_equal": Function(np.not_equal),
    "greater": Function(np.greater),
    "greater_equal": Function(np.greater_equal),
    "less": Function(np.less),
    "less_equal": Function(np.less_equal),
    "and": Function(np.logical_and),
    "or": Function(np.logical_or),
}


# ---------------------------------------------------------------- over axes


def windows_in_ceil_mode(size: int, pad: tuple[int, int], reach: int, stride: int) -> int:
    """How many windows of `reach` positions there are. The last may extend beyond the end, but must not start in the padding there."""
    count = -(-(size + sum(pad) - reach) // stride) + 1
    return count - 1 if (count - 1) * stride >= size + pad[0] else count


def pool_pads(spatial: Sequence[int], attrs: Attrs) -> list[tuple[int, int]]:
    """The padding before and after each axis; ceil mode adds what its last window needs.

    A window that is too large by less than its stride also extends beyond the end: onnxruntime rounds the number of windows
    towards zero. torch refuses such an input. This occurs only with dynamic sizes; nodes of such fixed sizes stay opaque.
    """
    pads, kernel, stride = list(attrs["pad"]), attrs["kernel"], attrs["stride"]
    dilation = attrs.get("dilation", (1,) * len(kernel))
    for i, n in enumerate(spatial):
        size, reach = n + sum(pads[i]), dilation[i] * (kernel[i] - 1) + 1
        if attrs.get("ceil"):
            count = windows_in_ceil_mode(n, pads[i], reach, stride[i])
        elif 0 < reach - size < stride[i]:
            count = 1
        else:
            continue
        pads[i] = (pads[i][0], pads[i][1] + max(0, (count - 1) * stride[i] + reach - size))
    return pads


def _pool_windows(x: Array, attrs: Attrs, fill: float) -> Array:
    """Windows of the trailing axes, padded by `fill`: shape (..., *out, *kernel)."""
    rank = len(attrs["kernel"])
    pads, dilation = pool_pads(x.shape[x.ndim - rank :], attrs), attrs.get("dilation", (1,) * rank)
    return windows(x, attrs["kernel"], attrs["stride"], pads, dilation, fill)


def _max_pool(x: Array, attrs: Attrs) -> Array:
    rank = len(attrs["kernel"])
    return np.asarray(_pool_windows(x, attrs, -np.inf).max(axis=tuple(range(-rank, 0))))


def pool_counts(spatial: Sequence[int], attrs: Attrs) -> Array:
    """By how many positions an average pooling divides each of its windows: shape (*out)."""
    dilation, over = attrs.get("dilation", (1,) * len(spatial)), tuple(range(-len(spatial), 0))
    inside, beyond = np.ones(spatial), 0.0
    pads = pool_pads(spatial, attrs)
    if attrs.get("include_pad"):  # the declared padding counts; what ceil mode adds does not
        inside = np.pad(inside, attrs["pad"], constant_values=1.0)
        pads = [(0, after - declared[1]) for (_, after), declared in zip(pads, attrs["pad"], strict=True)]
        beyond = 0.0 if attrs.get("ceil") else 1.0
    return np.asarray(windows(inside, attrs["kernel"], attrs["stride"], pads, dilation, beyond).sum(axis=over))


def _avg_pool(x: Array, attrs: Attrs) -> Array:
    over = tuple(range(-len(attrs["kernel"]), 0))
    total = _pool_windows(x, attrs, 0.0).sum(axis=over)
    return np.asarray(total / (attrs.get("divisor") or pool_counts(x.shape[x.ndim + over[0] :], attrs)))


def _standardise(x: Array, attrs: Attrs, weight: Array | None, bias: Array | None, *, centre: bool) -> Array:
    axes = tuple(attrs["axes"])
    mean = x.mean(axis=axes, keepdims=True) if centre else 0.0
    scale = np.sqrt(np.square(x - mean).mean(axis=axes, keepdims=True) + attrs["eps"])
    y = (x - mean) / scale
    y = y if weight is None else y * weight
    return np.asarray(y if bias is None else y + bias)


def _reduce(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda x, attrs: np.asarray(function(x, axis=tuple(attrs["axes"]), keepdims=not attrs.get("drop", False)))


def _is_plain_mean(attrs: Attrs) -> bool:
    """Whether an average pooling divides by the number of real positions, without padding."""
    counts_padding = attrs.get("include_pad") and any(pad != (0, 0) for pad in attrs["pad"])
    return not attrs.get("divisor") and not counts_padding


def _reduction(function: Callable[..., Array] | None = None, **facts: Any) -> Function:
    return Function(function and _reduce(function), options=("drop",), extent=Extent.ONE, **facts)


def _norm(meaning: Callable[..., Array]) -> Function:
    return Function(meaning, needs=("eps",))


def _movement(meaning: Callable[..., Array] | None = None, **facts: Any) -> Function:
    """Elements are moved, left out or repeated: linear, and constants are kept."""
    return Function(meaning, linear=True, keeps_constants=True, extent=Extent.OTHER, **facts)


def _pool(meaning: Callable[..., Array], *options: str, **facts: Any) -> Function:
    return Function(meaning, needs=("kernel", "stride", "pad"), options=options, extent=Extent.OTHER, **facts)


ALONG: dict[str, Function] = {
    "mean": _reduction(np.mean, linear=True, keeps_constants=True),
    "sum": _reduction(np.sum, linear=True),
    "amax": _reduction(np.max, keeps_constants=True),
    "amin": _reduction(np.min, keeps_constants=True),
    "prod": _reduction(np.prod),
    "max_pool": _pool(_max_pool, "dilation", "ceil", keeps_constants=True),
    "avg_pool": _pool(
        _avg_pool, "dilation", "ceil", "include_pad", "divisor", linear=True, keeps_constants=_is_plain_mean
    ),
    "softmax": Function(softmax),
    "layer_norm": _norm(lambda x, attrs, w=None, b=None: _standardise(x, attrs, w, b, centre=True)),
    "instance_norm": _norm(lambda x, attrs, w=None, b=None: _standardise(x, attrs, w, b, centre=True)),
    "rms_norm": _norm(lambda x, attrs, w=None: _standardise(x, attrs, w, None, centre=False)),
    "group_norm": Function(group_norm, needs=("eps", "groups")),
    "known_group_norm": Function(
        known_group_norm, needs=("eps", "counts", "known", "centres", "squares"), extent=Extent.OTHER
    ),
    "pick": _movement(
        lambda x, attrs: np.take(x, attrs["index"], axis=attrs["axes"][0]), needs=("index",), options=("drop",)
    ),
    "gather_elements": Function(
        lambda x, attrs, index: np.take_along_axis(x, index.astype(np.int64), axis=attrs["axes"][0]),
        keeps_constants=True,
        extent=Extent.OTHER,
    ),
    "take": Function(
        lambda x, attrs, index: np.take(x, index.reshape(-1).astype(np.int64), axis=attrs["axes"][0]),
        keeps_constants=True,
        extent=Extent.OTHER,
    ),
    "tile": _movement(lambda x, attrs: np.tile(x, attrs["times"]), needs=("times",)),
    "pad": Function(
        lambda x, attrs: np.pad(x, attrs["pads"], constant_values=attrs["value"]),
        needs=("pads", "value"),
        linear=True,
        extent=Extent.OTHER,
    ),
    # What only hosts compute.
    "adaptive_avg_pool": _movement(),
    "adaptive_max_pool": Function(keeps_constants=True, extent=Extent.OTHER),
    "all": _reduction(),
    "any": _reduction(),
    "argmax": _reduction(),
    "argmin": _reduction(),
    "cache": Function(extent=Extent.OTHER),
    "crop": Function(extent=Extent.OTHER),
    "cumsum": Function(options=("drop",)),
    "flip": _movement(),
    "gather": _movement(options=("drop",)),
    "hardmax": Function(),
    "l1": _reduction(),
    "l2": _reduction(),
    "log_softmax": Function(),
    "log_sum": _reduction(),
    "log_sum_exp": _reduction(),
    "logsumexp": _reduction(),
    "lp_normalize": Function(),
    "lp_pool": Function(options=("dilation", "ceil", "kernel", "stride", "pad"), extent=Extent.OTHER),
    "max_pool_indices": Function(extent=Extent.OTHER),
    "pad_edge": _movement(),
    "resize": _movement(),
    "roll": _movement(),
    "rotary": Function(),
    "slice": _movement(),
    "std": _reduction(),
    "sum_square": _reduction(),
    "var": _reduction(),
}


# ---------------------------------------------------------------- the two ops

NOT_OPTIONS = {"fn", "align", "rank"}  # attributes of `pointwise` itself


class PointwiseAttrs(TypedDict):
    """`fn` is the function; `rank` is the number of axes of the result, if no operand determines it. The rest are its options."""

    fn: str
    align: NotRequired[Alignment]
    rank: NotRequired[int]
    alpha: NotRequired[float]
    axis: NotRequired[int]
    beta: NotRequired[float]
    bias: NotRequired[float]
    block: NotRequired[int]
    dtype: NotRequired[str]
    eps: NotRequired[float]
    gamma: NotRequired[float]
    input_scale: NotRequired[float]
    lambd: NotRequired[float]
    max: NotRequired[float]
    min: NotRequired[float]
    threshold: NotRequired[float]
    value: NotRequired[float]


def pointwise_shape(node: Node, shapes: Shapes) -> str:
    attrs = attributes(node, PointwiseAttrs)
    out = node.output.shape
    align = attrs.get("align") or (None,) * len(shapes)
    for shape, dims in zip(shapes, align, strict=True):
        if shape is None or (dims is None and shape == out):
            continue
        if dims is None and len(shape) > len(out):
            return f"an operand of shape {shape} does not fit the result {out}"
        beside = out[len(out) - len(shape) :] if dims is None else tuple([out[dim] for dim in dims])
        if shape == beside:
            continue
        for size, other in zip(shape, beside, strict=True):
            if size != other and size != 1 and differ(size, other):
                return f"an operand of shape {shape} does not fit the result {out}"
    return ""


def pointwise_meaning(attrs: PointwiseAttrs, *operands: Array | None) -> Array:
    align = attrs.get("align") or (None,) * len(operands)
    free = [o.ndim for o, dims in zip(operands, align, strict=True) if o is not None and dims is None]
    rank = attrs.get("rank") or max(free)
    placed = [None if o is None else aligned(o, dims, rank) for o, dims in zip(operands, align, strict=True)]
    options = {k: v for k, v in attrs.items() if k not in NOT_OPTIONS}
    with np.errstate(all="ignore"):
        return np.asarray(_function(POINTWISE, attrs["fn"])(*placed, **options))


class AlongAttrs(TypedDict):
    """`fn` acts over `axes`, and drops them if `drop`. The rest are its options."""

    fn: str
    axes: tuple[int, ...]
    align: NotRequired[Alignment]
    drop: NotRequired[bool]
    centres: NotRequired[tuple[float, ...]]
    ceil: NotRequired[bool]
    counts: NotRequired[tuple[int, ...]]
    dilation: NotRequired[tuple[int, ...]]
    divisor: NotRequired[int | None]
    eps: NotRequired[float]
    groups: NotRequired[int]
    include_pad: NotRequired[bool]
    index: NotRequired[int]
    kernel: NotRequired[tuple[int, ...]]
    known: NotRequired[tuple[int, ...]]
    pad: NotRequired[Pads | str]
    pads: NotRequired[Pads]
    squares: NotRequired[tuple[float, ...]]
    stride: NotRequired[tuple[int, ...]]
    times: NotRequired[tuple[Dim, ...]]
    value: NotRequired[float]


def along_shape(node: Node, shapes: Shapes) -> str:
    attrs, x, out = attributes(node, AlongAttrs), shapes[0], node.output.shape
    assert x is not None
    axes, extent = attrs["axes"], ALONG[attrs["fn"]].extent
    if axes and not (min(axes) >= 0 and max(axes) < len(x)):
        return f"acts over axes {axes} of a value with {len(x)}"
    dropped = bool(attrs.get("drop"))
    if extent is Extent.SAME and not dropped and out == x:
        return ""
    left = [axis for axis in range(len(x)) if not (dropped and axis in axes)]
    if len(out) != len(left):
        return f"the result has shape {node.output.shape}"
    for size, axis in zip(out, left, strict=True):
        if axis not in axes or extent is Extent.SAME:
            if differ(size, x[axis]):
                return f"the result has shape {node.output.shape}, its operand {x}"
        elif extent is Extent.ONE and size != 1:
            return f"the result has shape {node.output.shape}: axis {axis} is reduced"
    return ""


def along_meaning(attrs: AlongAttrs, x: Array, *parameters: Array | None) -> Array:
    align = attrs.get("align") or (None,) * (len(parameters) + 1)
    placed = [None if p is None else aligned(p, dims, x.ndim) for p, dims in zip(parameters, align[1:], strict=True)]
    with np.errstate(all="ignore"):
        return _function(ALONG, attrs["fn"])(x, attrs, *placed)


def _function(functions: Mapping[str, Function], name: str) -> Callable[..., Array]:
    meaning = functions[name].meaning
    assert meaning is not None, name  # callers check first whether there is one
    return meaning


FUNCTIONS: dict[str, Op] = {
    "pointwise": Op(
        (either("x"), several("others")),
        PointwiseAttrs,
        pointwise_shape,
        pointwise_meaning,
        passes=True,
        functions=POINTWISE,
    ),
    "along": Op(
        (either("x"), several("parameters")), AlongAttrs, along_shape, along_meaning, passes=True, functions=ALONG
    ),
}
