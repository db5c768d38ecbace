"""The functions of `pointwise` and `along` in torch: one row for each that has a meaning in numpy (`ir/ops/functions.py`).

The numpy code is the definition; these compute the same and can be differentiated. A test compares them row by row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cmrc.hosts.autograd.arrays import torch_dtype
from cmrc.ir.ops.functions import integers, pool_counts, pool_pads
from cmrc.ir.ops.group_norm import sums_of

Attrs = Mapping[str, Any]
Meaning = Callable[..., Tensor]

# ---------------------------------------------------------------- element by element


def _softplus(x: Tensor, beta: float = 1.0, threshold: float = math.inf) -> Tensor:
    scaled = x * beta
    return torch.where(scaled > threshold, x, torch.logaddexp(torch.zeros_like(x), scaled) / beta)


def _hard_sigmoid(x: Tensor, alpha: float = 1 / 6, beta: float = 0.5) -> Tensor:
    return (alpha * x + beta).clamp(0.0, 1.0)


def _clip(
    x: Tensor, low: Tensor | None = None, high: Tensor | None = None, *, min: float = -math.inf, max: float = math.inf
) -> Tensor:
    x = torch.maximum(x, low) if low is not None else x.clamp(min=min) if min > -math.inf else x
    return torch.minimum(x, high) if high is not None else x.clamp(max=max) if max < math.inf else x


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, *, eps: float
) -> Tensor:
    scale = torch.rsqrt(var + eps) if weight is None else weight * torch.rsqrt(var + eps)
    y = (x - mean) * scale
    return y if bias is None else y + bias


def _quantize(x: Tensor, scale: Tensor, zero: Tensor | None = None, *, dtype: str) -> Tensor:
    """Rounding as in numpy. Its gradient is that of the identity, because the true gradient of steps is zero."""
    line = x / scale
    steps = line + (torch.round(x.float() / scale.float()).to(line) - line).detach()
    low, high = integers(dtype)
    return (steps if zero is None else steps + zero.to(line)).clamp(low, high)


def _dequantize(
    x: Tensor, scale: Tensor, zero: Tensor | None = None, *, dtype: str, axis: int = 0, block: int = 0
) -> Tensor:
    if block:
        size = x.shape[axis]
        scale = scale.repeat_interleave(block, axis).narrow(axis, 0, size)
        zero = None if zero is None else zero.repeat_interleave(block, axis).narrow(axis, 0, size)
    return (x.to(scale) if zero is None else x.to(scale) - zero.to(scale)) * scale


def _elu(x: Tensor, alpha: float = 1.0, gamma: float = 1.0, input_scale: float = 1.0) -> Tensor:
    return gamma * torch.where(x > 0, x, alpha * torch.expm1(x.clamp(max=0) * input_scale))


def _celu(x: Tensor, alpha: float = 1.0) -> Tensor:
    return torch.where(x > 0, x, alpha * torch.expm1(x.clamp(max=0) / alpha))


def _shrink(x: Tensor, lambd: float = 0.5, bias: float = 0.0) -> Tensor:
    return torch.where(x.abs() > lambd, x - bias * x.sign(), torch.zeros_like(x))


def _div(x: Tensor, y: Tensor) -> Tensor:
    whole = not x.is_floating_point() and not y.is_floating_point()
    return torch.div(x.double(), y) if whole else torch.div(x, y)


POINTWISE: dict[str, Meaning] = {
    "identity": lambda x: x,
    "cast": lambda x, *, dtype: x.to(torch_dtype(dtype)),
    "quantize": _quantize,
    "dequantize": _dequantize,
    "neg": torch.neg,
    "abs": torch.abs,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "square": torch.square,
    "sin": torch.sin,
    "cos": torch.cos,
    "atan": torch.atan,
    "erf": torch.erf,
    "sign": torch.sign,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "not": torch.logical_not,
    "isnan": torch.isnan,
    "isinf": torch.isinf,
    "relu": torch.relu,
    "leaky_relu": lambda x, alpha=0.01: functional.leaky_relu(x, alpha),
    "elu": _elu,
    "celu": _celu,
    "selu": lambda x, alpha=1.6732632423543772, gamma=1.0507009873554805: _elu(x, alpha, gamma),
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x, alpha=1.702: x * torch.sigmoid(alpha * x),
    "sigmoid": torch.sigmoid,
    "log_sigmoid": functional.logsigmoid,
    "tanh": torch.tanh,
    "silu": functional.silu,
    "mish": lambda x: x * torch.tanh(_softplus(x)),
    "softplus": _softplus,
    "softsign": functional.softsign,
    "hard_sigmoid": _hard_sigmoid,
    "hard_swish": lambda x, alpha=1 / 6: x * _hard_sigmoid(x, alpha),
    "threshold": lambda x, *, threshold, value: functional.threshold(x, threshold, value),
    "fill": lambda x, *, value: torch.full_like(x, value),
    "thresholded_relu": lambda x, alpha=1.0: functional.threshold(x, alpha, 0.0),
    "shrink": _shrink,
    "clip": _clip,
    "prelu": lambda x, slope: torch.where(x >= 0, x, slope * x),
    "batch_norm": _batch_norm,
    "add": lambda x, y, alpha=1.0: x + y if alpha == 1.0 else x + alpha * y,
    "sub": lambda x, y, alpha=1.0: x - y if alpha == 1.0 else x - alpha * y,
    "rsub": lambda x, y, alpha=1.0: y - alpha * x,
    "addcmul": lambda x, y, z, value=1.0: x + value * y * z,
    "mul": torch.mul,
    "div": _div,
    "pow": torch.pow,
    "min": torch.minimum,
    "max": torch.maximum,
    "fmod": torch.fmod,
    "where": lambda condition, x, y: torch.where(condition != 0, x, y),
    "equal": torch.eq,
    "not_equal": torch.ne,
    "greater": torch.gt,
    "greater_equal": torch.ge,
    "less": torch.lt,
    "less_equal": torch.le,
    "and": torch.logical_and,
    "or": torch.logical_or,
}


# ---------------------------------------------------------------- over axes


def pad(x: Tensor, pads: Sequence[tuple[int, int]], value: float) -> Tensor:
    """The last axes with numbers before and after them; negative ones cut off."""
    if not any(before or after for before, after in pads):
        return x
    flat = [number for before_after in reversed(pads) for number in before_after]
    return functional.pad(x, flat, value=value)


def _pooled(x: Tensor, attrs: Attrs, fill: float, pool: Callable[[Tensor, Sequence[int]], Tensor]) -> Tensor:
    """Pool the trailing axes, padded beforehand; all other axes count as channels."""
    rank = len(attrs["kernel"])
    lead, spatial = x.shape[: x.ndim - rank], x.shape[x.ndim - rank :]
    padded = pad(x, pool_pads(spatial, attrs), fill)
    flat = padded.reshape(1, -1, *padded.shape[x.ndim - rank :])
    result = pool(flat, attrs.get("dilation", (1,) * rank))
    return result.reshape(*lead, *result.shape[2:])


def _max_pool(x: Tensor, attrs: Attrs) -> Tensor:
    pool = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)[len(attrs["kernel"]) - 1]
    kernel, stride = tuple(attrs["kernel"]), tuple(attrs["stride"])
    return _pooled(x, attrs, -math.inf, lambda flat, dilation: pool(flat, kernel, stride, 0, tuple(dilation)))


def _avg_pool(x: Tensor, attrs: Attrs) -> Tensor:
    kernel, stride = tuple(attrs["kernel"]), tuple(attrs["stride"])
    rank = len(kernel)

    def totals(flat: Tensor, dilation: Sequence[int]) -> Tensor:
        summed = convolve(flat.transpose(0, 1), flat.new_ones(1, 1, *kernel), stride, tuple(dilation), 1)
        return summed.transpose(0, 1)

    def means(flat: Tensor, dilation: Sequence[int]) -> Tensor:
        pool: Any = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[rank - 1]
        result: Tensor = pool(flat, kernel, stride)
        return result * float(math.prod(kernel))

    dilated = any(step != 1 for step in attrs.get("dilation", ()))
    total = _pooled(x, attrs, 0.0, totals if dilated else means)
    if attrs.get("divisor"):
        return total / float(attrs["divisor"])
    counts = torch.from_numpy(pool_counts(tuple(x.shape[x.ndim - rank :]), attrs))
    return total / counts.to(total)


def convolve(x: Tensor, weight: Tensor, stride: Sequence[int], dilation: Sequence[int], groups: int) -> Tensor:
    """A convolution without padding, over one to three axes."""
    function: Any = (functional.conv1d, functional.conv2d, functional.conv3d)[weight.ndim - 3]
    result: Tensor = function(x, weight, None, tuple(stride), 0, tuple(dilation), groups)
    return result


def softmax(x: Tensor, attrs: Attrs) -> Tensor:
    axes = tuple(attrs["axes"])
    if len(axes) == 1:
        return torch.softmax(x, axes[0])
    shifted = torch.exp(x - x.amax(axes, keepdim=True).detach())
    return shifted / shifted.sum(axes, keepdim=True)


def _standardise(x: Tensor, attrs: Attrs, weight: Tensor | None, bias: Tensor | None, *, centre: bool) -> Tensor:
    axes = tuple(attrs["axes"])
    if centre and axes == tuple(range(x.ndim - len(axes), x.ndim)):
        y = functional.layer_norm(x, x.shape[x.ndim - len(axes) :], eps=attrs["eps"])
    else:
        y = x - x.mean(axes, keepdim=True) if centre else x
        y = y * torch.rsqrt(y.square().mean(axes, keepdim=True) + attrs["eps"])
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _group_norm(x: Tensor, attrs: Attrs, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    y = functional.group_norm(x, attrs["groups"], eps=attrs["eps"])
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _known_group_norm(x: Tensor, attrs: Attrs, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    sums, flat = sums_of(attrs), x.flatten(2) if x.ndim > 2 else x.unsqueeze(2)
    places, of_unit = torch.from_numpy(sums.places), torch.from_numpy(sums.group_of)
    shares = torch.from_numpy(sums.shares).to(x)
    shift, share, more, centre = torch.from_numpy(sums.constants).to(x)
    mean = (flat.mean(2)[:, places] * shares).mean(2) + shift
    centred = flat - mean[:, of_unit].unsqueeze(2)
    distance = centre - mean
    squares = (centred.square().mean(2)[:, places] * shares).mean(2)
    root = torch.rsqrt(squares + share * distance.square() + more)
    carriers = torch.cat([(distance * root)[:, sums.shifted], root[:, sums.spread]], 1)
    planes = carriers.unsqueeze(2).expand(-1, -1, flat.shape[2])
    y = torch.cat([centred * root[:, of_unit].unsqueeze(2), planes], 1)
    y = y.reshape(x.shape[0], y.shape[1], *x.shape[2:])
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _reduce(function: Callable[..., Tensor]) -> Meaning:
    return lambda x, attrs: function(x, tuple(attrs["axes"]), keepdim=not attrs.get("drop", False))


def _mean(x: Tensor, axes: tuple[int, ...], *, keepdim: bool) -> Tensor:
    return (x if x.is_floating_point() else x.double()).mean(axes, keepdim=keepdim)


def _prod(x: Tensor, axes: tuple[int, ...], *, keepdim: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = x.prod(axis, keepdim=keepdim)
    return x


ALONG: dict[str, Meaning] = {
    "mean": _reduce(_mean),
    "sum": _reduce(torch.sum),
    "amax": _reduce(torch.amax),
    "amin": _reduce(torch.amin),
    "prod": _reduce(_prod),
    "max_pool": _max_pool,
    "avg_pool": _avg_pool,
    "softmax": softmax,
    "layer_norm": lambda x, attrs, w=None, b=None: _standardise(x, attrs, w, b, centre=True),
    "instance_norm": lambda x, attrs, w=None, b=None: _standardise(x, attrs, w, b, centre=True),
    "rms_norm": lambda x, attrs, w=None: _standardise(x, attrs, w, None, centre=False),
    "group_norm": _group_norm,
    "known_group_norm": _known_group_norm,
    "pick": lambda x, attrs: x.select(attrs["axes"][0], attrs["index"]),
    "gather_elements": lambda x, attrs, index: torch.take_along_dim(x, index.long(), attrs["axes"][0]),
    "take": lambda x, attrs, index: x.index_select(attrs["axes"][0], index.reshape(-1).long()),
    "tile": lambda x, attrs: x.tile(attrs["times"]),
    "pad": lambda x, attrs: pad(x, attrs["pads"], attrs["value"]),
}
