"""Makers of random layers: several nodes that exporters put together, around units that a plan can replace."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto

from tests.fuzz.builder import Builder, Held, Unfit
from tests.fuzz.nodes.maker import MICROSOFT, Maker

# ---------------------------------------------------------------- norms across the units


def _normed(b: Builder, x: Held) -> Held:
    """A norm along the last axis, as one node or spelled out."""
    units, options = x.shape[-1], ["spelled", "SimplifiedLayerNormalization"]
    options += ["LayerNormalization"] * 3 if b.opset >= 17 else []
    options += ["RMSNormalization"] * 2 if b.opset >= 23 else []
    op = b.choose(options)
    gamma = b.const(b.weights(units, dtype=x.array.dtype))
    if op != "spelled":
        beta = [b.const(b.weights(units, dtype=x.array.dtype))] if op == "LayerNormalization" and b.chance(0.7) else []
        return b.node(op, [x, gamma, *beta], axis=-1, epsilon=0.01)[0]
    centred = x
    if b.chance(0.6):
        centred = b.node("Sub", [x, _mean(b, x)])[0]
    square = b.node("Mul", [centred, centred])[0]
    if b.chance(0.5):
        square = b.node("Pow", [centred, b.const(np.asarray(2, x.array.dtype))])[0]
    raised = b.node("Add", [_mean(b, square), b.const(np.asarray(0.01, x.array.dtype))])[0]
    scaled = b.node("Div", [centred, b.node("Sqrt", [raised])[0]])[0]
    return b.node("Mul", [scaled, gamma])[0]


def _mean(b: Builder, x: Held) -> Held:
    if b.opset >= 18:
        return b.node("ReduceMean", [x, b.ints(-1)], keepdims=1)[0]
    return b.node("ReduceMean", [x], axes=[-1], keepdims=1)[0]


def _linear(b: Builder, x: Held, width: int) -> Held:
    return b.node("MatMul", [x, b.const(b.weights(x.shape[-1], width, dtype=x.array.dtype))])[0]


def _active(b: Builder, x: Held) -> Held:
    return b.node(b.choose(["Relu", "Tanh", "Sigmoid", "Relu"]), [x])[0]


def normed(b: Builder) -> None:
    """linear, activation, a norm across its units, and what reads them."""
    x = _active(b, _linear(b, b.pick(least=2, most=4), b.between(2, 8)))
    _linear(b, _normed(b, x), b.between(1, 6))


def stream(b: Builder) -> None:
    """A residual stream with norms before its blocks, as transformers have it."""
    x = _linear(b, b.pick(least=2, most=3), b.between(2, 8))
    skip = b.choose(["", "", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"])
    units = x.shape[-1]
    inner = _linear(b, _active(b, _linear(b, _normed(b, x), b.between(1, 5))), units)
    if skip and x.array.dtype == np.float32:
        norm = [b.const(b.weights(units)) for _ in range(2 if skip == "SkipLayerNormalization" else 1)]
        several = b.chance(0.5)
        results = b.node(skip, [x, inner, *norm], outputs=4 if several else 1, domain=MICROSOFT, epsilon=0.01)
        if several and b.chance(0.5):
            b.node("Add", [results[3], _linear(b, results[0], units)])
            _linear(b, _normed(b, b.current or x), b.between(1, 4))
            return
        _linear(b, results[0], b.between(1, 4))
        return
    x = b.node("Add", [x, inner] if b.chance(0.5) else [inner, x])[0]
    if b.chance(0.4):
        x = b.node("Add", [x, _linear(b, _active(b, _linear(b, _normed(b, x), b.between(1, 5))), units)])[0]
    _linear(b, _normed(b, x), b.between(1, 4))


def grouped_norm(b: Builder) -> None:
    """conv, a norm over groups of its channels, activation, conv."""
    x = b.pick(least=3, most=4)
    channels = b.choose([2, 4, 6])
    window = (1,) * (x.rank - 2)
    x = b.node("Conv", [x, b.const(b.weights(channels, x.shape[1], *window))])[0]
    groups = b.choose([g for g in (1, 2, 3, channels) if channels % g == 0])
    if b.opset >= 18:
        sizes = (channels if b.opset >= 21 else groups,)
        scale, shift = (b.const(b.weights(*sizes, dtype=x.array.dtype)) for _ in range(2))
        x = b.node("GroupNormalization", [x, scale, shift], num_groups=groups, epsilon=0.01)[0]
    else:  # as exporters spell it
        flat = b.node("Reshape", [x, b.ints(0, groups, -1)])[0]
        ones = [b.const(np.full(groups, n, x.array.dtype)) for n in (1, 0)]
        even = b.node("InstanceNormalization", [flat, *ones], epsilon=0.01)[0]
        back = b.node("Reshape", [even, b.ints(0, *x.shape[1:])])[0]
        x = b.node("Mul", [back, b.const(b.weights(channels, *window, dtype=x.array.dtype))])[0]
    b.node("Conv", [_active(b, x), b.const(b.weights(b.between(1, 4), channels, *window))])
    b.channels_first = True


def padded(b: Builder) -> None:
    """conv, often a batch norm, activation, and a zero-padded conv of either kind; now and then a second reader."""
    x = b.pick(least=3, most=5)
    dtype, space, channels = x.array.dtype, x.rank - 2, b.between(4, 9)
    bias = [b.const(b.weights(channels, dtype=dtype))] if b.chance(0.5) else []
    kind = ["Conv", "Conv", "ConvTranspose"]
    first, second = b.choose(kind), b.choose(kind)
    sides = (x.shape[1], channels) if first == "ConvTranspose" else (channels, x.shape[1])
    x = b.node(first, [x, b.const(b.weights(*sides, *[1] * space, dtype=dtype)), *bias])[0]
    if b.chance(0.5):
        shift = [b.const(b.weights(channels, dtype=dtype)) for _ in range(3)]
        spread = b.const((np.abs(b.weights(channels)) + 0.5).astype(dtype))
        x = b.node("BatchNormalization", [x, *shift, spread], epsilon=0.01)[0]
    before = x
    for _ in range(b.between(0, 2)):
        x = b.node(
            b.choose(["Relu", "Relu", "LeakyRelu", "Elu", "Abs", "Sigmoid", *["HardSwish"] * (b.opset >= 14)]), [x]
        )[0]
    kernel, outs = b.choose([1, 2, 3]), b.between(1, 4)
    sides = (channels, outs) if second == "ConvTranspose" else (outs, channels)
    options = {"strides": [b.choose([1, 1, 2])] * space, "dilations": [b.choose([1, 1, 2])] * space}
    pads = [b.between(0, kernel - 1) for _ in range(2 * space)]
    y = b.node(second, [x, b.const(b.weights(*sides, *[kernel] * space, dtype=dtype))], pads=pads, **options)[0]
    if b.chance(0.3):
        again = b.choose([before, x])
        b.node("Conv", [again, b.const(b.weights(2, channels, *[1] * space, dtype=dtype))])
        b.current = y
    b.channels_first = True


# ---------------------------------------------------------------- einsum and recurrent layers


def einsum(b: Builder) -> None:
    """A product by letters: with a matrix, with a packed weight, or of two values."""
    if b.opset < 12:
        raise Unfit("opset 12 brings it")
    x = b.pick(least=2, most=4)
    letters = "abcd"[: x.rank]
    over = b.between(0, x.rank - 1) if b.chance(0.3) else x.rank - 1
    form = b.rng.random()
    if form < 0.75:
        own = [("o", b.between(1, 6)), ("p", b.between(1, 3))][: 2 if b.chance(0.25) else 1]
        kept = [c for c in letters if c != letters[over]]
        inside = [letters[over], *(c for c, _ in own)]
        sizes = {letters[over]: x.shape[over], **dict(own)}
        if b.chance(0.15) and x.rank > 2:  # a weight for each position of a shared axis
            shared = b.choose([c for c in kept if c != letters[0]])
            inside.append(shared)
            sizes[shared] = x.shape[letters.index(shared)]
        order = [inside[i] for i in b.rng.permutation(len(inside))]
        weight = b.const(b.weights(*(sizes[c] for c in order), scale=0.6))
        result = [*kept, *(c for c, _ in own)]
        if b.chance(0.3):
            result = [result[i] for i in b.rng.permutation(len(result))]
        sides, operands = [letters, "".join(order)], [x, weight]
        if b.chance(0.3):
            sides, operands = sides[::-1], operands[::-1]
        equation = f"{','.join(sides)}->{''.join(result)}"
        if b.chance(0.2) and over == x.rank - 1 and len(own) == 1 and len(order) == 2:
            equation, operands = f"...{letters[over]},{''.join(order)}->...o", [x, weight]
        b.node("Einsum", operands, equation=equation)
        return
    y = b.pick(same=x)
    left, right = letters, letters[:-2] + "z" + letters[-1]
    b.node("Einsum", [x, y], equation=f"{left},{right}->{letters[:-2]}{letters[-2]}z")


def recurrent(op: str, gates: int) -> Maker:
    def make(b: Builder) -> None:
        x = b.pick(least=2, most=4)
        if x.rank != 3:
            x = b.node("Reshape", [x, b.ints(0, -1, x.shape[-1])])[0]
        if b.chance(0.7):
            x = _active(b, _linear(b, x, b.between(2, 6)))
        steps, samples, units = x.shape
        hidden = b.choose([1, 2, 3, 4, 5, 6])
        directions = 2 if b.chance(0.3) else 1
        attrs: dict[str, Any] = {"hidden_size": hidden}
        if directions == 2 or b.chance(0.3):
            attrs["direction"] = "bidirectional" if directions == 2 else b.choose(["forward", "reverse"])
        if op == "GRU" and b.chance(0.6):
            attrs["linear_before_reset"] = 1
        if b.opset >= 14 and b.chance(0.05):
            attrs["layout"] = 1
        if b.chance(0.15):
            usual = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}[op]
            attrs["activations"] = [*usual[:-1], b.choose(["Relu", "Softsign", "Sigmoid"])] * directions
        if b.chance(0.1):
            attrs["clip"] = 1.5

        def held(*shape: int) -> Held:
            return b.const(b.weights(*shape, scale=0.5, dtype=x.array.dtype))

        operands: list[Held | None] = [
            x,
            held(directions, gates * hidden, units),
            held(directions, gates * hidden, hidden),
        ]
        operands.append(held(directions, 2 * gates * hidden) if b.chance(0.7) else None)
        ends = b.rng.integers(1, steps + 1, size=samples).astype(np.int32) if steps and b.chance(0.12) else None
        operands.append(None if ends is None else b.const(ends, plain=True))
        operands.append(_state(b, x, directions, hidden) if b.chance(0.3) else None)
        if op == "LSTM":
            operands.append(held(directions, samples, hidden) if b.chance(0.2) else None)
            operands.append(held(directions, 3 * hidden) if b.chance(0.2) else None)
        while operands[-1] is None:
            operands.pop()
        results = b.node(
            op,
            operands,
            outputs=b.choose([1, 1, 2, 2, 3] if op == "LSTM" else [1, 2]),
            unnamed=(0,) if b.chance(0.15) else (),
            **attrs,
        )
        b.current = b.choose(results[:2])

    return make


def _state(b: Builder, x: Held, directions: int, hidden: int) -> Held:
    """What a recurrent layer begins with: stored, or made of the mean over the steps."""
    if b.chance(0.5):
        return b.const(b.weights(directions, x.shape[1], hidden, scale=0.5, dtype=x.array.dtype))
    mean = b.node(
        "ReduceMean", [x, *([b.ints(0)] if b.opset >= 18 else [])], axes=[0] if b.opset < 18 else None, keepdims=1
    )[0]
    state = b.node(b.choose(["Tanh", "Relu", "Identity"]), [_linear(b, mean, hidden)])[0]
    return b.node("Concat", [state] * directions, axis=0)[0] if directions > 1 else state


# ---------------------------------------------------------------- integers


def _step(b: Builder, x: Held) -> float:
    """A scale that holds what the value has, so that little is cut off."""
    most = float(np.abs(x.array.astype(np.float64)).max()) if x.array.size else 1.0
    return float(np.float32(max(most, 0.1) / b.choose([60, 100, 127])))


def _quantised(b: Builder, x: Held) -> tuple[Held, Held, Held]:
    """What a value is on a grid, and the grid: integers, scale and zero point."""
    if x.array.dtype != np.float32 or b.opset < 10:
        raise Unfit("quantised models are of float32")
    signed = b.signed = b.chance(0.5) if b.signed is None else b.signed
    zero = np.asarray(b.choose([0, 0, 3, -5]) if signed else b.choose([128, 120, 0]), np.int8 if signed else np.uint8)
    scale, point = b.const(np.asarray(_step(b, x), np.float32)), b.const(zero, plain=True)
    return b.node("QuantizeLinear", [x, scale, point])[0], scale, point


def _qdq(b: Builder, x: Held) -> Held:
    numbers, scale, point = _quantised(b, x)
    return b.node("DequantizeLinear", [numbers, scale, point])[0]


def _stored(b: Builder, array: Any, axis: int) -> tuple[Held, Held, Held]:
    """A weight as integers: one scale, or one for each output."""
    several = b.opset >= 13 and b.chance(0.5)
    others = tuple(i for i in range(array.ndim) if i != axis)
    most = np.abs(array).max(axis=others) if several else np.abs(array).max()
    scale = (np.maximum(most, 0.05) / 127).astype(np.float32)
    shape = [1] * array.ndim
    shape[axis] = -1
    numbers = np.round(array / (scale.reshape(shape) if several else scale)).astype(np.int8)
    zero = np.zeros(scale.shape, np.int8)
    return b.const(numbers, plain=True), b.const(scale, plain=True), b.const(zero, plain=True)


def _unstored(b: Builder, array: Any, axis: int) -> Held:
    numbers, scale, zero = _stored(b, array, axis)
    return b.node("DequantizeLinear", [numbers, scale, zero], axis=axis if scale.rank else None)[0]


def qdq_linear(b: Builder) -> None:
    """linear, activation, quantised; then a linear op with a weight of integers."""
    x = b.pick(least=2, most=3)
    if x.array.dtype != np.float32:
        raise Unfit("quantised models are of float32")
    x = _active(b, _linear(b, x, b.between(2, 8)))
    x = _qdq(b, x) if b.chance(0.8) else x
    weight = b.weights(x.shape[-1], b.between(1, 6))
    y = b.node("MatMul", [x, _unstored(b, weight, 1)])[0]
    if b.chance(0.5):
        b.node("Add", [y, b.const(b.weights(y.shape[-1]))])
    if b.chance(0.4):
        _qdq(b, b.current or y)


def qdq_conv(b: Builder) -> None:
    """The same of convolutions, with a bias of int32 now and then."""
    x = b.pick(least=4, most=4)
    if x.array.dtype != np.float32:
        raise Unfit("quantised models are of float32")
    channels, kernel = b.between(2, 6), b.choose([1, 3])
    x = b.node("Conv", [x, b.const(b.weights(channels, x.shape[1], 1, 1))])[0]
    numbers, scale, point = _quantised(b, _active(b, x))
    x = b.node("DequantizeLinear", [numbers, scale, point])[0]
    pads, width = [kernel // 2 if b.chance(0.6) else 0] * 4, b.between(1, 5)
    stored, grid, zero = _stored(b, b.weights(width, channels, kernel, kernel), 0)
    axis = 0 if grid.rank else None
    operands = [x, b.node("DequantizeLinear", [stored, grid, zero], axis=axis)[0]]
    if b.chance(0.6):
        whole = b.const(b.rng.integers(-500, 500, size=width).astype(np.int32), plain=True)
        both = np.broadcast_to(scale.array * grid.array, width if grid.rank else ()).astype(np.float32)
        operands.append(b.node("DequantizeLinear", [whole, b.const(both, plain=True)], axis=axis)[0])
    y = b.node("Conv", operands, pads=pads)[0]
    if b.chance(0.4):
        _qdq(b, y)
    b.channels_first = True


def q_operator(b: Builder) -> None:
    """QLinearMatMul or QLinearConv between float ops."""
    by_window = b.chance(0.5)
    x = b.pick(least=4, most=4) if by_window else b.pick(least=2, most=3)
    if x.array.dtype != np.float32:
        raise Unfit("quantised models are of float32")
    if by_window:
        x = b.node("Conv", [x, b.const(b.weights(b.between(2, 6), x.shape[1], 1, 1))])[0]
    else:
        x = _linear(b, x, b.between(2, 6))
    numbers, scale, point = _quantised(b, _active(b, x))
    width = b.between(1, 5)
    shape = (width, x.shape[1], 3, 3) if by_window else (x.shape[-1], width)
    stored, grid, zero = _stored(b, b.weights(*shape), 0 if by_window else 1)
    out, bottom = (
        b.const(np.asarray(0.05, np.float32), plain=True),
        b.const(np.asarray(0, point.array.dtype), plain=True),
    )
    operands: list[Held | None] = [numbers, scale, point, stored, grid, zero, out, bottom]
    if by_window:
        if b.chance(0.6):
            operands.append(b.const(b.rng.integers(-500, 500, size=width).astype(np.int32), plain=True))
        result = b.node("QLinearConv", operands, pads=[1] * 4)[0]
    else:
        result = b.node("QLinearMatMul", operands)[0]
    b.node("DequantizeLinear", [result, out, bottom])
    b.channels_first = by_window


def n_bits(b: Builder) -> None:
    """linear, activation, and a linear op whose weights of 4 or 8 bits share scales in blocks of 16."""
    x = b.pick(least=2, most=3)
    if x.array.dtype != np.float32:
        raise Unfit("of float32")
    units, width, bits = b.choose([16, 32, 32, 48, 40]), b.between(1, 4), b.choose([4, 4, 4, 8])
    x = _active(b, _linear(b, x, units))
    blocks = -(-units // 16)
    packed = b.rng.integers(0, 256, size=(width, blocks, 16 * bits // 8)).astype(np.uint8)
    scales = (np.abs(b.rng.normal(size=(width, blocks))) * 0.3 / 2**bits + 0.001).astype(np.float32)
    flat = b.chance(0.5)
    operands: list[Held | None] = [
        x, b.const(packed, plain=True), b.const(scales.reshape(-1) if flat else scales, plain=True)
    ]  # fmt: skip
    if b.chance(0.5):
        points = b.rng.integers(0, 256, size=(width, -(-blocks * bits // 8))).astype(np.uint8)
        operands.append(b.const(points.reshape(-1) if flat else points, plain=True))
    if b.chance(0.3):
        operands += [None] * (5 - len(operands))
        operands.append(b.const(b.weights(width)))
    b.node("MatMulNBits", operands, domain=MICROSOFT, K=units, N=width, bits=bits, block_size=16)


def dynamic_integers(b: Builder) -> None:
    """DynamicQuantizeLinear and MatMulInteger, which are left whole."""
    x = b.pick(least=2, most=3)
    if x.array.dtype != np.float32 or b.opset < 11:
        raise Unfit("quantised models are of float32")
    numbers, scale, zero = b.node("DynamicQuantizeLinear", [_active(b, _linear(b, x, b.between(2, 5)))], outputs=3)
    weight = b.const(b.rng.integers(-90, 90, size=(numbers.shape[-1], b.between(1, 4))).astype(np.int8), plain=True)
    whole = b.node("MatMulInteger", [numbers, weight, zero], wild=True)[0]
    step = b.const(np.asarray(0.01, np.float32))
    wide = b.node("Cast", [whole], to=TensorProto.FLOAT, wild=True)[0]
    b.node("Mul", [wide, b.node("Mul", [scale, step])[0]])


LAYERS: dict[str, Maker] = {
    "normed": normed, "normed2": normed, "stream": stream, "stream2": stream, "grouped_norm": grouped_norm,
    "padded": padded, "padded2": padded,
    "Einsum": einsum, "Einsum2": einsum,
    "LSTM": recurrent("LSTM", 4), "GRU": recurrent("GRU", 3), "RNN": recurrent("RNN", 1),
    "qdq_linear": qdq_linear, "qdq_conv": qdq_conv, "q_operator": q_operator, "n_bits": n_bits,
    "dynamic_integers": dynamic_integers,
}  # fmt: skip
