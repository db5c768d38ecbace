"""The steps by which a random graph grows: each puts a few nodes behind a value, or declines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from graphs import Net, broadcast
from hypothesis import strategies as st

from cmrc.ir.graph import ArrayLiteral, Leaf, Operand, Shape, literal

Draw = Callable[[st.SearchStrategy[Any]], Any]


UNARY: dict[str, dict[str, Any]] = {
    "identity": {}, "neg": {}, "abs": {}, "relu": {}, "gelu": {}, "gelu_tanh": {}, "quick_gelu": {}, "sigmoid": {},
    "log_sigmoid": {}, "tanh": {}, "silu": {}, "mish": {}, "softplus": {}, "softsign": {}, "hard_sigmoid": {},
    "hard_swish": {}, "elu": {"alpha": 0.7}, "celu": {"alpha": 1.3}, "selu": {}, "leaky_relu": {"alpha": 0.2},
    "clip": {"min": -0.5, "max": 0.8}, "threshold": {"threshold": 0.1, "value": 0.3}, "square": {}, "sin": {},
    "cos": {}, "erf": {}, "thresholded_relu": {"alpha": 0.2},
}  # fmt: skip
BINARY = ("add", "add", "sub", "rsub", "mul", "mul", "min", "max")


def _known(shape: Shape) -> bool:
    return all(isinstance(n, int) for n in shape)


def axis_with_units(draw: Draw, shape: Shape, least: int = 2) -> int | None:
    """An axis of known size, most often the second or the last, where models have their units."""
    axes = [i for i, n in enumerate(shape) if isinstance(n, int) and n >= least]
    usual = [i for i in axes if i in (1, len(shape) - 1)]
    if not axes:
        return None
    return draw(st.sampled_from(usual if usual and draw(st.integers(0, 3)) else axes))


def sorted_subset(draw: Draw, size: int, least: int = 1, most: int | None = None) -> tuple[int, ...]:
    return tuple(sorted(draw(st.sets(st.integers(0, size - 1), min_size=least, max_size=most or size))))


def _step_linear(draw: Draw, net: Net, x: str) -> str | None:
    axis = axis_with_units(draw, net.shape(x), 1)
    if axis is None:
        return None
    same = [n for n in net.nodes if n.op == "linear" and n.inputs[1].shape[n.attrs["w_in"]] == net.shape(x)[axis]]  # type: ignore[union-attr]
    if same and draw(st.integers(0, 3)) == 0:  # tied weights
        other = draw(st.sampled_from(same))
        weight = other.inputs[1]
        assert isinstance(weight, Leaf)
        return net.linear(x, weight.shape[other.attrs["w_out"]], axis=axis, weight=weight, turned=other.attrs["w_out"] == 1,
                          bias=other.inputs[2] if draw(st.booleans()) else False)  # fmt: skip
    gemm = {"alpha": 0.5, "beta": 2.0} if draw(st.integers(0, 4)) == 0 else {}
    return net.linear(x, draw(st.integers(1, 6)), axis=axis, bias=draw(st.booleans()), turned=draw(st.booleans()),
                      takes_bias=draw(st.integers(0, 3)) > 0, **gemm)  # fmt: skip


def _step_conv(draw: Draw, net: Net, x: str) -> str | None:
    shape = net.shape(x)
    axis = 1 if len(shape) > 2 and draw(st.integers(0, 9)) else 0
    rank = len(shape) - axis - 1
    if rank not in (1, 2) or not isinstance(shape[axis], int):
        return None
    ins = int(shape[axis])
    groups = draw(st.sampled_from([g for g in range(1, ins + 1) if ins % g == 0]))
    kernel = [draw(st.integers(1, 3)) for _ in range(rank)]
    dilation = [draw(st.sampled_from([1, 1, 2])) for _ in range(rank)]
    stride = [draw(st.sampled_from([1, 1, 2])) for _ in range(rank)]
    outs = groups * draw(st.integers(1, max(1, 6 // groups)))
    bias = draw(st.booleans())
    least = [n if isinstance(n, int) else 5 for n in shape[axis + 1 :]]
    if draw(st.integers(0, 4)) == 0:
        pad = [(draw(st.integers(0, 1)), draw(st.integers(0, 1))) for _ in range(rank)]
        extra = [draw(st.integers(0, s - 1)) for s in stride]
        reach = [
            (n - 1) * s - sum(p) + d * (k - 1) + 1
            for n, s, p, d, k in zip(least, stride, pad, dilation, kernel, strict=True)
        ]
        if min(reach) < 1:
            return None
        return net.conv(x, outs, kernel, stride=stride, dilation=dilation, pad=pad, groups=groups, transposed=True,
                        bias=bias, output_padding=extra, axis=axis)  # fmt: skip
    if draw(st.integers(0, 4)) == 0:
        same = draw(st.sampled_from(["same_upper", "same_lower"]))
        return net.conv(
            x, outs, kernel, stride=stride, dilation=dilation, pad=same, groups=groups, bias=bias, axis=axis
        )
    padded = draw(st.booleans())
    pad = [(draw(st.integers(0, 2)), draw(st.integers(0, 2))) if padded else (0, 0) for _ in range(rank)]
    if any(n + sum(p) < d * (k - 1) + 1 for n, p, d, k in zip(least, pad, dilation, kernel, strict=True)):
        return None
    return net.conv(x, outs, kernel, stride=stride, dilation=dilation, pad=pad, groups=groups, bias=bias, axis=axis)


def _step_unary(draw: Draw, net: Net, x: str) -> str:
    fn = draw(st.sampled_from(sorted(UNARY)))
    return net.pointwise(fn, x, **UNARY[fn])


def _step_binary(draw: Draw, net: Net, x: str) -> str:
    """Two values that fit, or a value and a parameter of any shape that broadcasts."""
    shape = net.shape(x)
    fits = [v for v in net.values if net.values[v].dtype == "float32" and broadcast(net.shape(v), shape)]
    other: Operand
    if draw(st.integers(0, 2)):
        other = draw(st.sampled_from(fits))
    else:
        other = _parameter(draw, net, shape)
    operands = (x, other) if draw(st.booleans()) else (other, x)
    fn = draw(st.sampled_from(BINARY))
    alpha = {"alpha": 0.5} if fn in ("add", "sub", "rsub") and draw(st.integers(0, 3)) == 0 else {}
    return net.pointwise(fn, *operands, **alpha)


def _parameter(draw: Draw, net: Net, shape: Shape, low: float | None = None) -> Leaf | ArrayLiteral:
    sizes = [n if isinstance(n, int) and draw(st.booleans()) else 1 for n in shape]
    lead = draw(st.integers(0, len(sizes)))
    while lead and sizes[lead - 1] != 1:
        lead -= 1
    if draw(st.integers(0, 5)) == 0:
        return literal(1.5)
    return net.leaf(*sizes[lead:], low=low)


def _step_other_pointwise(draw: Draw, net: Net, x: str) -> str | None:
    shape = net.shape(x)
    kind = draw(st.sampled_from(["batch_norm", "prelu", "div", "where", "clip", "cast", "pow"]))
    if kind == "div":
        return net.pointwise("div", x, _parameter(draw, net, shape, low=0.5))
    if kind == "where":
        signs = _parameter(draw, net, shape)
        mask = literal(np.asarray(signs.array if isinstance(signs, ArrayLiteral) else signs.load()) > 0, "bool")
        operands = (x, _parameter(draw, net, shape))
        return net.pointwise("where", mask, *(operands if draw(st.booleans()) else operands[::-1]))
    if kind == "clip":
        return net.pointwise("clip", x, literal(-0.5), None)
    if kind == "cast":
        return net.pointwise("cast", x, dtype="float64")
    if kind == "pow":
        return net.pointwise("pow", x, literal(2.0))
    axis = axis_with_units(draw, shape)
    if axis is None:
        return None
    if kind == "prelu":
        slope = net.leaf(int(shape[axis]) if draw(st.booleans()) else 1)
        return net.pointwise("prelu", x, slope, align=(None, (axis,)))
    return net.batch_norm(x, axis=axis)


def _step_mask(draw: Draw, net: Net, x: str) -> str:
    """A condition that is computed, and what it chooses between."""
    fn = draw(st.sampled_from(["greater", "less_equal"]))
    condition = net.pointwise(fn, x, _parameter(draw, net, net.shape(x)), value_dtype="bool")
    return net.pointwise("where", condition, x, literal(0.25) if draw(st.booleans()) else net.pointwise("neg", x))


def _step_reduce(draw: Draw, net: Net, x: str) -> str | None:
    shape = net.shape(x)
    axes = sorted_subset(draw, len(shape), 1, max(1, len(shape) - 1))
    if len(shape) < 2:
        return None
    fn = draw(st.sampled_from(["mean", "mean", "sum", "amax", "amin", "prod"]))
    if fn == "prod":
        axes = tuple(a for a in axes if isinstance(shape[a], int) and int(shape[a]) < 4)
        if not axes:
            return None
    return net.along(fn, x, axes, drop=draw(st.booleans()))


def _step_norm(draw: Draw, net: Net, x: str) -> str | None:
    shape = net.shape(x)
    fn = draw(st.sampled_from(["softmax", "layer_norm", "rms_norm", "instance_norm"]))
    if fn == "softmax":
        return net.along(fn, x, (draw(st.integers(0, len(shape) - 1)),))
    if fn == "instance_norm":
        if len(shape) < 3 or not isinstance(shape[1], int):
            return None
        pair = (net.leaf(int(shape[1])), net.leaf(int(shape[1])))
        return net.along(fn, x, range(2, len(shape)), *pair, eps=1e-2, align=(None, (1,), (1,)))
    first = draw(st.integers(max(0, len(shape) - 2), len(shape) - 1))
    if not _known(shape[first:]):
        return None
    sizes = [int(n) for n in shape[first:]]
    parameters = [net.leaf(*sizes) for _ in range(1 if fn == "rms_norm" else 2)] if draw(st.booleans()) else []
    return net.along(fn, x, range(first, len(shape)), *parameters, eps=1e-2)


def _step_pool(draw: Draw, net: Net, x: str) -> str | None:
    shape = net.shape(x)
    rank = draw(st.integers(1, 2))
    if len(shape) < rank + 1:
        return None
    kernel = [draw(st.integers(1, 3)) for _ in range(rank)]
    stride = [draw(st.integers(1, 3)) for _ in range(rank)]
    pad = [(draw(st.integers(0, k // 2)), draw(st.integers(0, k // 2))) for k in kernel]
    least = [n if isinstance(n, int) else 5 for n in shape[-rank:]]
    if any(n + sum(p) < k for n, p, k in zip(least, pad, kernel, strict=True)):
        return None
    ceil = draw(st.booleans())
    if draw(st.booleans()):
        return net.pool("max_pool", x, kernel, stride, pad, ceil=ceil, dilation=(1,) * rank)
    divisor = 3 if draw(st.integers(0, 4)) == 0 else None
    return net.pool("avg_pool", x, kernel, stride, pad, ceil=ceil, include_pad=draw(st.booleans()), divisor=divisor)


def _step_pick(draw: Draw, net: Net, x: str) -> str | None:
    shape = net.shape(x)
    axis = axis_with_units(draw, shape)
    if axis is None or len(shape) < 2:
        return None
    return net.along("pick", x, (axis,), drop=True, index=draw(st.integers(0, int(shape[axis]) - 1)))


def _step_pad(draw: Draw, net: Net, x: str) -> str | None:
    shape = net.shape(x)
    axis = axis_with_units(draw, shape, 1)
    if axis is None:
        return None
    pads = tuple((draw(st.integers(0, 1)), 1) if i == axis else (0, 0) for i in range(len(shape)))
    out = tuple(int(n) + sum(pads[i]) if i == axis else n for i, n in enumerate(shape))
    return net.along("pad", x, (axis,), shape=out, pads=pads, value=draw(st.sampled_from([0.0, 0.0, 0.7])))


def _step_reshape(draw: Draw, net: Net, x: str) -> str | None:
    """Split, merge or regroup neighbouring axes of known size; put in or take out axes of size one; merge run-time ones."""
    shape = net.shape(x)
    start = draw(st.integers(0, len(shape) - 1))
    stop = draw(st.integers(start + 1, len(shape)))
    part = shape[start:stop]
    if not _known(part):
        names = [str(n) for n in part]
        return net.reshape(x, *shape[:start], "*".join(names), *shape[stop:]) if len(part) > 1 else None
    size, new = math.prod(int(n) for n in part), []
    for _ in range(draw(st.integers(0, 2))):
        factor = draw(st.sampled_from([f for f in range(1, size + 1) if size % f == 0]))
        new.append(factor)
        size //= factor
    out = (*shape[:start], *new, size, *shape[stop:])
    return net.reshape(x, *out) if 1 < len(out) <= 5 else None


def _step_transpose(draw: Draw, net: Net, x: str) -> str:
    return net.transpose(x, *draw(st.permutations(range(len(net.shape(x))))))


def _step_expand(draw: Draw, net: Net, x: str) -> str | None:
    shape = net.shape(x)
    ones = [i for i, n in enumerate(shape) if n == 1]
    if not ones:
        return net.expand(x, draw(st.integers(1, 3)), *shape) if len(shape) < 4 else None
    axis = draw(st.sampled_from(ones))
    return net.expand(x, *(draw(st.integers(2, 3)) if i == axis else n for i, n in enumerate(shape)))


def _step_concat(draw: Draw, net: Net, x: str) -> str | None:
    shape = net.shape(x)
    axis = axis_with_units(draw, shape, 1)
    if axis is None:
        return None
    rest = (*shape[:axis], *shape[axis + 1 :])
    fits = [v for v in net.values if len(net.shape(v)) == len(shape) and net.values[v].dtype == "float32"
            and (*net.shape(v)[:axis], *net.shape(v)[axis + 1 :]) == rest and isinstance(net.shape(v)[axis], int)]  # fmt: skip
    parts: list[Operand] = [x, *(draw(st.sampled_from(fits)) for _ in range(draw(st.integers(1, 2))))]
    if _known(shape) and draw(st.integers(0, 3)) == 0:
        parts.append(net.leaf(*(int(n) for n in shape)))
    if sum(int(net.shape(p)[axis]) for p in parts) > 16:
        return None
    return net.concat(*draw(st.permutations(parts)), axis=axis)


def _step_select(draw: Draw, net: Net, x: str) -> str | None:
    shape = net.shape(x)
    axis = axis_with_units(draw, shape)
    if axis is None:
        return None
    size = int(shape[axis])
    kind = draw(st.integers(0, 5))
    if kind == 0:  # any order, any number of times
        keep = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=size))
    elif kind == 1:
        keep = list(range(draw(st.integers(0, 1)), size, 2))
    else:
        start = draw(st.integers(0, size - 1))
        keep = list(range(start, draw(st.integers(start + 1, size))))
    return net.select(x, axis, keep)


def _step_matmul(draw: Draw, net: Net, x: str) -> str | None:
    shape = net.shape(x)
    if len(shape) < 3:
        return None
    turned = net.transpose(x, *range(len(shape) - 2), len(shape) - 1, len(shape) - 2)
    scores = net.along("softmax", net.matmul(x, turned), (len(shape) - 1,))
    return net.matmul(scores, x)


def _step_squeeze_excite(draw: Draw, net: Net, x: str) -> str | None:
    shape = net.shape(x)
    if len(shape) != 4 or not isinstance(shape[1], int):
        return None
    pooled = net.along("mean", x, (2, 3), drop=False)
    gate = net.pointwise("sigmoid", net.conv(net.pointwise("relu", net.conv(pooled, 2, (1, 1))), int(shape[1]), (1, 1)))
    return net.pointwise("mul", x, gate)


def _step_gated(draw: Draw, net: Net, x: str) -> str | None:
    shape = net.shape(x)
    if not isinstance(shape[-1], int):
        return None
    wide = draw(st.integers(2, 6))
    gate, up = net.linear(x, wide, bias=False), net.linear(x, wide, bias=draw(st.booleans()))
    return net.linear(
        net.pointwise("mul", net.pointwise("silu", gate), up), draw(st.integers(1, 6)), bias=draw(st.booleans())
    )


def _step_flatten(draw: Draw, net: Net, x: str) -> str | None:
    """A classifier's end: units become blocks of a flat axis that a linear op reads."""
    shape = net.shape(x)
    if len(shape) < 3 or not _known(shape[1:]):
        return None
    flat = net.reshape(x, shape[0], math.prod(int(n) for n in shape[1:]))
    if draw(st.booleans()):
        flat = net.batch_norm(flat) if draw(st.booleans()) else net.pointwise("mul", flat, net.leaf(1))
    return net.linear(flat, draw(st.integers(1, 4)))


def _step_inverted_residual(draw: Draw, net: Net, x: str) -> str | None:
    """Wide, depthwise or grouped under zero padding, narrow: with batch norms or without."""
    shape = net.shape(x)
    if len(shape) not in (3, 4) or not isinstance(shape[1], int):
        return None
    rank = len(shape) - 2
    wide, norm = draw(st.sampled_from([2, 4, 6])), draw(st.booleans())
    h = net.conv(x, wide, (1,) * rank, bias=not norm)
    h = net.pointwise("relu", net.batch_norm(h) if norm else h)
    groups = draw(st.sampled_from([wide, wide, 2, 1]))
    h = net.conv(h, wide, (3,) * rank, pad=((1, 1),) * rank, groups=groups, bias=not norm)
    h = net.batch_norm(h) if norm else h
    h = net.pointwise("hard_swish", h) if draw(st.booleans()) else h
    h = net.conv(h, int(shape[1]), (1,) * rank, bias=draw(st.booleans()))
    return net.pointwise("add", x, h) if draw(st.booleans()) else h


def _step_grouped(draw: Draw, net: Net, x: str) -> str | None:
    """A convolution of two or three groups with several channels each, on a wide value."""
    shape = net.shape(x)
    if len(shape) not in (3, 4) or not isinstance(shape[1], int):
        return None
    if any(isinstance(n, int) and n < 3 for n in shape[2:]):
        return None
    rank, groups = len(shape) - 2, draw(st.integers(2, 3))
    h = net.pointwise("relu", net.conv(x, groups * draw(st.integers(2, 3)), (1,) * rank))
    pad = ((draw(st.integers(0, 1)), 1),) * rank
    return net.conv(h, groups * draw(st.integers(1, 2)), (draw(st.integers(2, 3)),) * rank, pad=pad, groups=groups,
                    transposed=draw(st.integers(0, 3)) == 0)  # fmt: skip


def _step_heads(draw: Draw, net: Net, x: str) -> str | None:
    """Attention with an output projection: fused, or as products; with fewer key-value heads, a mask, or causal."""
    shape = net.shape(x)
    if len(shape) != 3 or not isinstance(shape[2], int):
        return None
    n, t, _ = shape
    served, each, units = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["fused", "products", "merged"]))
    each = each if kind == "fused" else 1

    def heads(count: int) -> str:
        split = net.reshape(net.linear(x, count * units, bias=draw(st.booleans())), n, t, count, units)
        return net.transpose(split, 0, 2, 1, 3)

    q, k, v = heads(served * each), heads(served), heads(served)
    if kind == "fused":
        mask = net.leaf(*((1, 1) if draw(st.booleans()) else (served * each, 1, 1))) if draw(st.booleans()) else None
        inputs = (q, k, v) if mask is None else (q, k, v, mask)
        attended = net.node("attention", inputs, net.shape(q), scale=0.7, causal=draw(st.booleans()))
    elif kind == "merged":  # samples and heads in one axis, as bmm wants them
        flat = f"{served}*{n}" if isinstance(n, str) else served * n
        q, k, v = (net.reshape(h, flat, t, units) for h in (q, k, v))
        scores = net.along("softmax", net.matmul(q, net.transpose(k, 0, 2, 1)), (2,))
        attended = net.reshape(net.matmul(scores, v), n, served, t, units)
    else:
        scores = net.pointwise("mul", net.matmul(q, net.transpose(k, 0, 1, 3, 2)), literal(0.7))
        attended = net.matmul(net.along("softmax", scores, (3,)), v)
    merged = net.reshape(net.transpose(attended, 0, 2, 1, 3), n, t, served * each * units)
    return net.linear(merged, int(shape[2]))


STEPS: Mapping[str, tuple[int, Callable[[Draw, Net, str], str | None]]] = {
    "linear": (4, _step_linear),
    "conv": (5, _step_conv),
    "unary": (4, _step_unary),
    "binary": (4, _step_binary),
    "other_pointwise": (3, _step_other_pointwise),
    "mask": (1, _step_mask),
    "reduce": (1, _step_reduce),
    "norm": (1, _step_norm),
    "pool": (2, _step_pool),
    "pick": (1, _step_pick),
    "pad": (1, _step_pad),
    "reshape": (2, _step_reshape),
    "transpose": (1, _step_transpose),
    "expand": (1, _step_expand),
    "concat": (2, _step_concat),
    "select": (2, _step_select),
    "matmul": (1, _step_matmul),
    "squeeze_excite": (1, _step_squeeze_excite),
    "gated": (1, _step_gated),
    "flatten": (2, _step_flatten),
    "inverted_residual": (2, _step_inverted_residual),
    "grouped": (2, _step_grouped),
    "heads": (2, _step_heads),
}
BAG = [name for name, (weight, _) in STEPS.items() for _ in range(weight)]
