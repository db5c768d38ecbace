"""Makers of quantised layers as onnxruntime's tool writes them: QuantizeLinear and DequantizeLinear around every op of a chain."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto

from tests.fuzz.builder import Builder, Held, Unfit
from tests.fuzz.layers import _active, _linear, _qdq, _quantised, _stored, _unstored
from tests.fuzz.nodes.maker import Maker


def _float32(b: Builder, least: int, most: int) -> Held:
    x = b.pick(least=least, most=most)
    if not x.array.size:
        raise Unfit("there is nothing to round")
    if x.array.dtype != np.float32 or b.opset < 13:
        raise Unfit("quantised models are of float32, and of opset 13 or more")
    return x


def _biased(b: Builder, x: Held, width: int) -> Held:
    """A linear op as a quantised Gemm with a bias of int32 (on matrices), or as a product and a quantised sum."""
    numbers, scale, point = _quantised(b, x)
    x = b.node("DequantizeLinear", [numbers, scale, point])[0]
    stored, grid, zero = _stored(b, b.weights(x.shape[-1], width), 1)
    axis = 1 if grid.rank else None
    weight = b.node("DequantizeLinear", [stored, grid, zero], axis=axis)[0]
    if x.rank == 2 and b.chance(0.7):
        whole = b.const(b.rng.integers(-400, 400, size=width).astype(np.int32), plain=True)
        both = np.broadcast_to(scale.array * grid.array, width if grid.rank else ()).astype(np.float32)
        bias = b.node(
            "DequantizeLinear", [whole, b.const(both, plain=True)], axis=0 if grid.rank else None
        )[0]  # fmt: skip
        return b.node("Gemm", [x, weight, bias])[0]
    y = b.node("MatMul", [x, weight])[0]
    return b.node("Add", [_qdq(b, y), _qdq(b, b.const(b.weights(width)))])[0] if b.chance(0.5) else y


def chain(b: Builder) -> None:
    """Two or three linear ops with what stands between them, every value rounded."""
    x = _float32(b, 2, 3)
    for _ in range(b.between(2, 3)):
        x = _active(b, _biased(b, x, b.between(2, 8)))
        form = b.rng.random()
        if form < 0.2:
            x = b.node("Add", [_qdq(b, x), _qdq(b, _biased(b, x, x.shape[-1]))])[0]
        elif form < 0.35:
            x = b.node("Mul", [_qdq(b, x), b.node("Sigmoid", [_qdq(b, x)])[0]])[0]
        elif form < 0.5:
            x = b.node("Reshape", [_qdq(b, x), b.ints(*x.shape[:-1], 1, x.shape[-1])])[0]
            x = b.node("Squeeze", [_qdq(b, x), b.ints(x.rank - 2)])[0]
    _qdq(b, _biased(b, x, b.between(1, 4)))


def pictures(b: Builder) -> None:
    """Convolutions with padding, of groups, pooled and turned back, every value rounded."""
    x = _float32(b, 4, 4)
    x = b.node("Conv", [_qdq(b, x), _unstored(b, b.weights(b.between(2, 6), x.shape[1], 1, 1), 0)])[0]
    for _ in range(b.between(1, 2)):
        x, channels = _qdq(b, _active(b, x)), x.shape[1]
        form = b.rng.random()
        if form < 0.3:
            kernel = b.choose([1, 3])
            x = b.node(
                "Conv", [x, _unstored(b, b.weights(channels, 1, kernel, kernel), 0)], group=channels, pads=[kernel // 2] * 4
            )[0]  # fmt: skip
        elif form < 0.5:
            x = b.node(
                "ConvTranspose", [x, _unstored(b, b.weights(channels, b.between(1, 4), 2, 2), 0)], strides=[2, 2]
            )[0]
        elif form < 0.6:
            x = b.node(b.choose(["AveragePool", "MaxPool"]), [x], kernel_shape=[2, 2])[0]
        else:
            pads = [1] * 4 if b.chance(0.6) else None
            x = b.node("Conv", [x, _unstored(b, b.weights(b.between(1, 5), channels, 3, 3), 0)], pads=pads)[0]
    _qdq(b, x)
    b.channels_first = True


def blocked(b: Builder) -> None:
    """A linear op whose weight DequantizeLinear makes of integers of 4 or 8 bits that share scales in blocks along the inputs."""
    x = _float32(b, 2, 3)
    if b.opset < 21:
        raise Unfit("blocks came with opset 21")
    units, width, block = b.choose([8, 16, 16, 24]), b.between(1, 4), b.choose([4, 8])
    x = _active(b, _linear(b, x, units))
    low, high, kind = b.choose([
        (-8, 7, TensorProto.INT4), (0, 15, TensorProto.UINT4), (-128, 127, TensorProto.INT8),
    ])  # fmt: skip
    stored = np.int8 if kind != TensorProto.UINT4 else np.uint8
    drawn: Any = b.rng.integers(low, high + 1, size=(units, width)).astype(stored)
    numbers = b.const(drawn, plain=True)
    if kind != TensorProto.INT8:
        numbers = b.node("Cast", [numbers], to=kind, wild=True)[0]
    scales = (np.abs(b.rng.normal(size=(-(-units // block), width))) * 0.3 / high + 0.001).astype(np.float32)
    weight = b.node("DequantizeLinear", [numbers, b.const(scales, plain=True)], axis=0, block_size=block)[0]
    b.node("MatMul", [x, weight])


def conv_integer(b: Builder) -> None:
    """DynamicQuantizeLinear and ConvInteger, which are left whole."""
    x = _float32(b, 4, 4)
    x = _active(b, b.node("Conv", [x, b.const(b.weights(b.between(2, 5), x.shape[1], 1, 1))])[0])
    numbers, scale, zero = b.node("DynamicQuantizeLinear", [x], outputs=3)
    weight = b.const(b.rng.integers(0, 90, size=(b.between(1, 3), x.shape[1], 1, 1)).astype(np.uint8), plain=True)
    wide = b.node(
        "Cast", [b.node("ConvInteger", [numbers, weight, zero], wild=True)[0]], to=TensorProto.FLOAT, wild=True
    )[0]
    b.node("Mul", [wide, b.node("Mul", [scale, b.const(np.asarray(0.01, np.float32))])[0]])
    b.channels_first = True


QUANTISED: dict[str, Maker] = {
    "chain": chain, "chain2": chain, "pictures": pictures, "pictures2": pictures, "blocked": blocked,
    "conv_integer": conv_integer,
}  # fmt: skip
