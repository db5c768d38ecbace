"""Makers of affine ops: products and convolutions with weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.fuzz.builder import Builder, Held, Unfit, onnx_type
from tests.fuzz.nodes.maker import Maker
from tests.fuzz.nodes.windows import windows
from tests.fuzz.session import BFLOAT16


def matmul(b: Builder) -> None:
    x = b.pick(least=1)
    units = x.shape[-1]
    width = b.choose([1, 2, 3, 4, 5, 6, 8])
    form = b.rng.random()
    b.channels_first = False
    if form < 0.72:
        weight = b.const(b.weights(units, width))
        if b.chance(0.1) and x.array.dtype.name in ("float32", "float64"):
            weight = _narrow_constant(b, weight.array)
        b.node("MatMul", [x, weight])
        if b.chance(0.35):
            b.node("Add", [b.current, b.const(b.weights(width))])
    elif form < 0.8 and x.rank >= 2:
        b.node("MatMul", [b.const(b.weights(width, x.shape[-2])), x])
    elif form < 0.86 and x.rank >= 3:
        b.node("MatMul", [x, b.const(b.weights(*x.shape[:-2], units, width))])
    elif form < 0.9:
        b.node("MatMul", [x, b.const(b.weights(units))])
    else:
        others = [v for v in b.values.values() if v.floating and v.rank >= 2 and v.shape[-2] == units]
        if others and b.chance(0.5):
            b.node("MatMul", [x, b.choose(others)])
        elif x.rank >= 2:
            perm = [*range(x.rank - 2), x.rank - 1, x.rank - 2]
            turned = b.node("Transpose", [b.pick(same=x) if b.chance(0.3) else x], perm=perm)[0]
            b.node("MatMul", [x, turned])


def _narrow_constant(b: Builder, array: Any) -> Held:
    """A weight that is stored in 16 bits and cast where it is used."""
    low = b.const(array.astype(BFLOAT16 if b.opset >= 13 and b.chance(0.5) else np.float16))
    wide = b.node("Cast", [low], to=onnx_type(array.dtype))[0]
    return wide


def gemm(b: Builder) -> None:
    x = b.pick(least=2, most=2)
    across = b.chance(0.05)
    units, rows = (x.shape[0], x.shape[1]) if across else (x.shape[1], x.shape[0])
    width, trans = b.between(1, 8), b.chance(0.5)
    operands: list[Held | None] = [x, b.const(b.weights(*((width, units) if trans else (units, width))))]
    if b.chance(0.75) or b.opset < 11:
        shapes = [(width,), (width,), (1, width), (1,), (), (rows, width), (rows, 1)]
        operands.append(b.const(b.weights(*b.choose(shapes))))
    attrs: dict[str, Any] = {"transB": 1} if trans else {}
    if across:
        attrs["transA"] = 1
    if b.chance(0.25):
        attrs["alpha"] = float(b.choose([0.5, 2.0, -1.0, 0.0, 1.0]))
    if b.chance(0.25):
        attrs["beta"] = float(b.choose([0.5, 2.0, -1.0, 0.0, 1.0]))
    b.node("Gemm", operands, **attrs)
    b.channels_first = False


def conv(b: Builder) -> None:
    x = b.pick(least=3, most=5)
    channels = x.shape[1]
    if not channels:
        raise Unfit("no channels")
    groups = b.choose([1, 1, 1, channels, *(g for g in range(1, channels + 1) if channels % g == 0)])
    each = b.choose([1, 2, 3]) if groups > 1 else b.between(1, 6)
    kernel, attrs = windows(b, x)
    operands = [x, b.const(b.weights(groups * each, channels // groups, *kernel))]
    if b.chance(0.6):
        operands.append(b.const(b.weights(groups * each)))
    if groups > 1 or b.chance(0.1):
        attrs["group"] = groups
    b.node("Conv", operands, kernel_shape=kernel if b.chance(0.7) else None, **attrs)
    b.channels_first = True


def conv_transpose(b: Builder) -> None:
    x = b.pick(least=3, most=4)
    channels = x.shape[1]
    if not channels:
        raise Unfit("no channels")
    groups = b.choose([1, 1, channels, *(g for g in range(1, channels + 1) if channels % g == 0)])
    each = b.between(1, 3) if groups > 1 else b.between(1, 5)
    kernel, attrs = windows(b, x)
    if b.chance(0.2):
        attrs["output_padding"] = [b.between(0, 1) for _ in kernel]
    operands = [x, b.const(b.weights(channels, each, *kernel))]
    if b.chance(0.6):
        operands.append(b.const(b.weights(groups * each)))
    b.node("ConvTranspose", operands, group=groups if groups > 1 else None, **attrs)
    b.channels_first = True


AFFINE: dict[str, Maker] = {"matmul": matmul, "gemm": gemm, "conv": conv, "conv_transpose": conv_transpose}
