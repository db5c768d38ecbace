"""One maker of random nodes for each op of docs/ops.md, by what it is to a replacement. Odd attributes are the point."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from tests.fuzz.builder import Builder, Held, Unfit, onnx_type
from tests.fuzz.session import BFLOAT16

Maker = Callable[[Builder], Any]
MICROSOFT = "com.microsoft"


def _sum_shape(builder: Builder, operand: Held) -> list[int]:
    """A shape that broadcasts against a value: some axes one, leading ones sometimes left out."""
    shape = [n if builder.chance(0.6) else 1 for n in operand.shape]
    return shape[builder.between(0, operand.rank) :] if builder.chance(0.3) else shape


# ---------------------------------------------------------------- affine


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


def _windows(b: Builder, x: Held, *, dilations: bool = True) -> tuple[list[int], dict[str, Any]]:
    """A kernel with strides, padding and dilation: larger than its input now and then."""
    rank = x.rank - 2
    kernel = [b.choose([1, 1, 2, 3, 3, 5, n or 1, n + 1]) for n in x.shape[2:]]
    attrs: dict[str, Any] = {}
    if b.chance(0.35):
        attrs["strides"] = [b.choose([1, 2, 3]) for _ in range(rank)]
    if dilations and b.chance(0.2):
        attrs["dilations"] = [b.choose([1, 2, 3]) for _ in range(rank)]
    if b.chance(0.12):
        attrs["auto_pad"] = b.choose(["SAME_UPPER", "SAME_LOWER", "VALID", "NOTSET"])
    elif b.chance(0.55):
        reach = [(k - 1) * d + 1 for k, d in zip(kernel, attrs.get("dilations", [1] * rank), strict=True)]
        if b.chance(0.5):
            pads = [r // 2 for r in reach]
            attrs["pads"] = pads + pads
        else:
            attrs["pads"] = [b.between(0, 2) for _ in range(2 * rank)]
    return kernel, attrs


def conv(b: Builder) -> None:
    x = b.pick(least=3, most=5)
    channels = x.shape[1]
    if not channels:
        raise Unfit("no channels")
    groups = b.choose([1, 1, 1, channels, *(g for g in range(1, channels + 1) if channels % g == 0)])
    each = b.choose([1, 2, 3]) if groups > 1 else b.between(1, 6)
    kernel, attrs = _windows(b, x)
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
    kernel, attrs = _windows(b, x)
    if b.chance(0.2):
        attrs["output_padding"] = [b.between(0, 1) for _ in kernel]
    operands = [x, b.const(b.weights(channels, each, *kernel))]
    if b.chance(0.6):
        operands.append(b.const(b.weights(groups * each)))
    b.node("ConvTranspose", operands, group=groups if groups > 1 else None, **attrs)
    b.channels_first = True


def batch_norm(b: Builder) -> None:
    x = b.pick(least=2, most=5)
    channels = x.shape[1]
    statistics = [b.weights(channels), b.weights(channels), b.weights(channels)]
    variance = np.abs(b.weights(channels)) + np.asarray(0.3, b.dtype)
    b.node("BatchNormalization", [x, *(b.const(s) for s in statistics), b.const(variance.astype(b.dtype))])


# ---------------------------------------------------------------- one operand

SMOOTH: dict[str, Callable[[Builder], dict[str, Any]]] = {
    **{
        op: lambda b: {}
        for op in [
            "Relu",
            "Relu",
            "Relu",
            "Sigmoid",
            "Tanh",
            "Abs",
            "Neg",
            "Identity",
            "Erf",
            "Exp",
            "Floor",
            "Ceil",
            "Round",
            "Sign",
            "Sin",
            "Cos",
            "Softplus",
            "Softsign",
            "Mish",
            "HardSwish",
            "Identity",
        ]
    },
    "LeakyRelu": lambda b: {"alpha": float(b.choose([0.1, 0.0, -0.5, 1.0]))},
    "Elu": lambda b: {"alpha": float(b.choose([1.0, 0.5]))},
    "Celu": lambda b: {"alpha": float(b.choose([1.0, 0.5]))},
    "Selu": lambda b: {},
    "HardSigmoid": lambda b: {"alpha": 0.3, "beta": 0.4} if b.chance(0.5) else {},
    "Shrink": lambda b: {"lambd": 0.4, "bias": float(b.choose([0.0, 0.3]))},
    "ThresholdedRelu": lambda b: {"alpha": float(b.choose([0.2, 1.0]))},
    "Gelu": lambda b: {"approximate": b.choose(["none", "tanh"])},
    "Swish": lambda b: {"alpha": float(b.choose([1.0, 0.7]))},
}


def unary(op: str) -> Maker:
    def make(b: Builder) -> None:
        x = b.pick()
        if op in ("Gelu", "Shrink") and x.array.dtype == np.float64:
            raise Unfit("onnxruntime's own is good to float32 only")
        b.node(op, [x], **SMOOTH[op](b))

    return make


def guarded(op: str) -> Maker:
    """Log, Sqrt, Reciprocal: of something positive."""

    def make(b: Builder) -> None:
        positive = b.node(b.choose(["Abs", "Exp", "Softplus", "Sigmoid"]), [b.pick()])[0]
        raised = b.node("Add", [positive, b.const(np.asarray(0.5, positive.array.dtype))])[0]
        b.node(op, [raised])

    return make


def cast(b: Builder) -> None:
    x = b.pick()
    kinds = [TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16, TensorProto.INT32]
    to = b.choose(kinds if b.opset >= 13 else [kind for kind in kinds if kind != TensorProto.BFLOAT16])
    narrow = b.node("Cast", [x], to=to)[0]
    if narrow.array.dtype != x.array.dtype and b.chance(0.9):
        b.node("Cast", [narrow], to=onnx_type(x.array.dtype))


def clip(b: Builder) -> None:
    x = b.pick()
    low, high = (np.asarray(v, x.array.dtype) for v in (-0.6, 0.9))
    if b.opset < 11:
        b.node("Clip", [x], min=-0.6, max=0.9 if b.chance(0.7) else None)
    else:
        lower = b.const(low) if b.chance(0.8) else None
        b.node("Clip", [x, lower, b.const(high) if b.chance(0.8) or lower is None else None])


def dropout(b: Builder) -> None:
    x = b.pick()
    if b.opset < 12:
        b.node("Dropout", [x], ratio=0.5)
    else:
        b.node("Dropout", [x, b.const(np.asarray(0.5, np.float32))] if b.chance(0.5) else [x])


def prelu(b: Builder) -> None:
    x = b.pick(least=1)
    b.node("PRelu", [x, b.const(b.weights(*_sum_shape(b, x)))])


def not_(b: Builder) -> None:
    x = b.pick()
    mask = b.node("Less", [x, b.const(np.asarray(0.1, x.array.dtype))])[0]
    turned = b.node("Not", [mask])[0]
    b.node("Cast", [turned], to=onnx_type(x.array.dtype))


def tests(b: Builder) -> None:
    """IsNaN and IsInf, and what they choose."""
    x = b.pick()
    mask = b.node(b.choose(["IsNaN", "IsInf"]), [x])[0]
    b.node("Where", [mask, b.const(np.asarray(0.5, x.array.dtype)), x])


# ---------------------------------------------------------------- several operands

ARITHMETIC = ["Add", "Add", "Add", "Mul", "Mul", "Sub", "Div", "Max", "Min", "Pow", "Sum", "Mod"]
COMPARE = ["Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"]


def binary(op: str) -> Maker:
    def make(b: Builder) -> None:
        x = b.pick()
        other = b.rng.random()
        y: Held
        if other < 0.5 or op in ("Pow", "Mod"):
            array = b.weights(*_sum_shape(b, x), dtype=x.array.dtype)
            if op == "Div":
                array = (np.sign(array.astype(np.float64)) * (np.abs(array.astype(np.float64)) + 0.5)).astype(
                    array.dtype
                )
                array = np.where(array == 0, np.asarray(1, array.dtype), array).astype(x.array.dtype)
            if op == "Pow":
                array = np.asarray(b.choose([2, 1, 3, 0, 0.5, -1]), x.array.dtype)
                if float(array) in (0.5, -1.0):
                    x = b.node("Add", [b.node("Abs", [x])[0], b.const(np.asarray(0.5, x.array.dtype))])[0]
            y = b.const(array)
        elif other < 0.85:
            y = b.pick(same=x)
        else:
            alike = [v for v in b.values.values() if v.floating and v.array.dtype == x.array.dtype]
            y = b.choose(alike)
            try:
                np.broadcast_shapes(x.shape, y.shape)
            except ValueError as error:
                raise Unfit("no broadcast") from error
        if op == "Div" and not y.constant:
            y = b.node("Add", [b.node("Exp", [y])[0], b.const(np.asarray(0.5, x.array.dtype))])[0]
        if op in ("Max", "Min", "Sum") and b.chance(0.4):
            b.node(op, [x, y, b.const(b.weights(*_sum_shape(b, x), dtype=x.array.dtype))])
            return
        operands = [y, x] if op not in ("Pow", "Mod", "Div") and b.chance(0.3) else [x, y]
        b.node(op, operands, fmod=1 if op == "Mod" else None)

    return make


def compare(b: Builder) -> None:
    """Comparisons, logic, and Where over them."""
    x = b.pick()
    y = b.const(b.weights(*_sum_shape(b, x), dtype=x.array.dtype)) if b.chance(0.6) else b.pick(same=x)
    mask = b.node(b.choose(COMPARE), [x, y])[0]
    if b.chance(0.3):
        mask = b.node(b.choose(["And", "Or"]), [mask, b.node("Greater", [y, x])[0]])[0]
    if b.chance(0.5):
        b.node("Where", [mask, x, y])
    else:
        b.node("Cast", [mask], to=onnx_type(x.array.dtype))


def where(b: Builder) -> None:
    x = b.pick(least=1)
    mask = b.const(b.rng.random(_sum_shape(b, x)) < 0.5)
    b.node("Where", [mask, x, b.const(b.weights(*_sum_shape(b, x), dtype=x.array.dtype))])


def gated(b: Builder) -> None:
    """x · sigmoid(x), or of two projections: a gate."""
    x = b.pick(least=2)
    gate = b.node("Sigmoid", [x])[0]
    b.node("Mul", [x, gate])


def squeeze_excite(b: Builder) -> None:
    x = b.pick(least=4, most=4)
    channels = x.shape[1]
    pooled = b.node("GlobalAveragePool", [x])[0]
    inner = b.between(1, 4)
    low = b.node("Conv", [pooled, b.const(b.weights(inner, channels, 1, 1))])[0]
    high = b.node("Conv", [b.node("Relu", [low])[0], b.const(b.weights(channels, inner, 1, 1))])[0]
    b.node("Mul", [x, b.node(b.choose(["Sigmoid", "HardSigmoid"]), [high])[0]])


def residual(b: Builder) -> None:
    x = b.pick(least=2, most=3)
    units, inner = x.shape[-1], b.between(1, 7)
    low = b.node("MatMul", [x, b.const(b.weights(units, inner))])[0]
    active = b.node(b.choose(["Relu", "Tanh", "Sigmoid"]), [low])[0]
    high = b.node("MatMul", [active, b.const(b.weights(inner, units))])[0]
    b.node("Add", [x, high] if b.chance(0.5) else [high, x])


def residual_conv(b: Builder) -> None:
    x = b.pick(least=4, most=4)
    channels, inner = x.shape[1], b.between(1, 5)
    kernel = b.choose([1, 3])
    pads = [kernel // 2] * 4
    low = b.node("Conv", [x, b.const(b.weights(inner, channels, kernel, kernel))], pads=pads)[0]
    active = b.node(b.choose(["Relu", "Tanh", "Sigmoid"]), [low])[0]
    high = b.node("Conv", [active, b.const(b.weights(channels, inner, kernel, kernel))], pads=pads)[0]
    b.node("Add", [x, high])


# ---------------------------------------------------------------- along axes


def reduce(op: str) -> Maker:
    def make(b: Builder) -> None:
        x = b.pick(least=1, most=5)
        if op in ("ReduceLogSum", "ReduceLogSumExp", "ReduceL2"):
            x = b.node("Add", [b.node("Abs", [x])[0], b.const(np.asarray(0.5, x.array.dtype))])[0]
        axes = sorted({b.axis(x) for _ in range(b.between(1, 2))})
        if len({a % x.rank for a in axes}) < len(axes):
            raise Unfit("an axis twice")
        keep = None if b.chance(0.3) else b.between(0, 1)
        everything = b.chance(0.05)
        if b.opset >= (13 if op == "ReduceSum" else 18):
            b.node(op, [x] if everything else [x, b.ints(*axes)], keepdims=keep)
        else:
            b.node(op, [x], axes=None if everything else axes, keepdims=keep)

    return make


def arg(op: str) -> Maker:
    def make(b: Builder) -> None:
        x = b.pick(least=1)
        b.node(op, [x], axis=b.axis(x), keepdims=b.between(0, 1))

    return make


def softmax(op: str) -> Maker:
    def make(b: Builder) -> None:
        x = b.pick(least=1)
        b.node(op, [x], axis=b.axis(x) if b.chance(0.8) else None)

    return make


def cumsum(b: Builder) -> None:
    x = b.pick(least=1)
    axis = b.const(np.asarray(b.axis(x), np.int64), plain=True)
    b.node("CumSum", [x, axis], exclusive=b.between(0, 1), reverse=b.between(0, 1))


def lp_norm(b: Builder) -> None:
    x = b.pick(least=1)
    b.node("LpNormalization", [x], axis=b.axis(x), p=b.between(1, 2))


def pool(op: str) -> Maker:
    def make(b: Builder) -> None:
        x = b.pick(least=3, most=5)
        dilations = (op == "MaxPool" and b.opset >= 10) or (
            op != "MaxPool" and b.opset >= (19 if op == "AveragePool" else 18)
        )
        kernel, attrs = _windows(b, x, dilations=dilations)
        if "auto_pad" not in attrs and b.chance(0.25) and (b.opset >= 10 if op != "LpPool" else b.opset >= 18):
            attrs["ceil_mode"] = 1
        if op == "AveragePool" and b.chance(0.4):
            attrs["count_include_pad"] = 1
        outputs = 2 if op == "MaxPool" and b.chance(0.03) else 1
        b.node(op, [x], kernel_shape=kernel, outputs=outputs, **attrs)

    return make


def global_pool(op: str) -> Maker:
    return lambda b: b.node(op, [b.pick(least=3, most=5)])


def instance_norm(b: Builder) -> None:
    x = b.pick(least=3, most=4)
    b.node("InstanceNormalization", [x, *(b.const(b.weights(x.shape[1])) for _ in range(2))], epsilon=0.01)


def layer_norm(op: str) -> Maker:
    def make(b: Builder) -> None:
        x = b.pick(least=1)
        axis = b.axis(x)
        over = x.shape[axis % x.rank :]
        if op == "SimplifiedLayerNormalization":
            over, axis = x.shape[-1:], -1
        operands: list[Held | None] = [x, b.const(b.weights(*over))]
        if op == "LayerNormalization" and b.chance(0.6):
            operands.append(b.const(b.weights(*over)))
        b.node(op, operands, axis=axis, epsilon=0.01)

    return make


def group_norm(b: Builder) -> None:
    x = b.pick(least=3, most=4)
    channels = x.shape[1]
    groups = b.choose([g for g in range(1, channels + 1) if channels % g == 0])
    size = channels if b.opset >= 21 else groups
    operands = [x, b.const(b.weights(size)), b.const(b.weights(size))]
    b.node("GroupNormalization", operands, num_groups=groups, epsilon=0.01)


def pad(b: Builder) -> None:
    x = b.pick(least=1, most=5)
    amounts = [b.choose([0, 0, 1, 2, -1 if b.chance(0.2) else 0]) for _ in range(2 * x.rank)]
    mode = b.choose(["constant", "constant", "reflect", "edge", None])
    if b.opset < 11:
        b.node("Pad", [x], pads=amounts, mode=mode, value=0.7 if b.chance(0.4) else None)
        return
    operands: list[Held | None] = [x, b.ints(*amounts)]
    fill = b.const(np.asarray(0.7, x.array.dtype)) if b.chance(0.4) else None
    if b.opset >= 18 and b.chance(0.3):
        axis = b.axis(x)
        operands = [x, b.ints(*amounts[:2]), fill, b.ints(axis)]
    elif fill is not None:
        operands.append(fill)
    b.node("Pad", operands, mode=mode)


def resize(b: Builder) -> None:
    x = b.pick(least=3, most=4)
    scales = [1.0, 1.0, *(b.choose([1.0, 2.0, 0.5, 1.5]) for _ in range(x.rank - 2))]
    scales_value = b.const(np.array(scales, np.float32), plain=True)
    mode = b.choose(["nearest", "linear"])
    if b.opset == 9:
        b.node("Upsample", [x, b.const(np.maximum(np.array(scales, np.float32), 1), plain=True)], mode=mode)
    elif b.opset == 10:
        b.node("Resize", [x, scales_value], mode=mode)
    elif b.chance(0.6):
        b.node(
            "Resize",
            [x, b.const(np.zeros(0, np.float32), plain=True) if b.opset < 13 else None, scales_value],
            mode=mode,
        )
    else:
        sizes = b.ints(*x.shape[:2], *(b.between(1, 5) for _ in range(x.rank - 2)))
        empty = b.const(np.zeros(0, np.float32), plain=True)
        transform = b.choose(["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"])
        operands = [x, empty, empty, sizes] if b.opset < 13 else [x, None, None, sizes]
        b.node("Resize", operands, mode=mode, coordinate_transformation_mode=transform)


def tile(b: Builder) -> None:
    x = b.pick(least=1, most=4)
    b.node("Tile", [x, b.ints(*(b.choose([1, 1, 2, 3]) for _ in range(x.rank)))])


# ---------------------------------------------------------------- layout


def transpose(b: Builder) -> None:
    x = b.pick(least=1)
    b.node("Transpose", [x], perm=None if b.chance(0.1) else [int(p) for p in b.rng.permutation(x.rank)])


def reshape(b: Builder) -> None:
    """Merge neighbours, split an axis, or anything of the same size; with 0 and -1 as they come."""
    x = b.pick()
    shape = list(x.shape)
    form = b.rng.random()
    if form < 0.4 and x.rank >= 2:
        at = b.between(0, x.rank - 2)
        shape[at : at + 2] = [shape[at] * shape[at + 1]]
    elif form < 0.8 and x.rank >= 1:
        at = b.between(0, x.rank - 1)
        factors = [n for n in range(1, shape[at] + 1) if shape[at] % n == 0] or [1]
        factor = b.choose(factors)
        shape[at : at + 1] = [factor, shape[at] // factor]
    elif form < 0.9:
        shape = [x.array.size]
    else:
        shape = list(b.rng.permutation(shape)) if shape else [1]
    target = [int(n) for n in shape]
    whole = b.chance(0.25)
    if target and not whole and 0 not in target and b.chance(0.8):
        target[b.between(0, len(target) - 1)] = -1
    for i in range(min(len(target), x.rank)):
        if not whole and target[i] == x.shape[i] and b.chance(0.4):
            target[i] = 0
    b.node("Reshape", [x, b.ints(*target)])


def computed_reshape(b: Builder) -> None:
    """The target is made from Shape, as exporters do it."""
    x = b.pick(least=2, most=5)
    sizes = b.node("Shape", [x])[0]
    first = b.node("Gather", [sizes, b.ints(0)], axis=0)[0]
    target = b.node("Concat", [first, b.ints(-1)] if b.chance(0.6) else [first, b.ints(x.shape[1], -1)], axis=0)[0]
    b.node("Reshape", [x, target])


def flatten(b: Builder) -> None:
    x = b.pick(least=1)
    b.node("Flatten", [x], axis=b.between(-x.rank if b.opset >= 11 else 0, x.rank) if b.chance(0.6) else None)


def squeeze(b: Builder) -> None:
    x = b.pick(least=1)
    ones = [i for i, n in enumerate(x.shape) if n == 1]
    if not ones:
        raise Unfit("nothing to squeeze")
    axes = sorted({b.choose(ones) for _ in range(2)})
    axes = [a - x.rank if b.opset >= 11 and b.chance(0.3) else a for a in axes]
    if b.chance(0.15):
        b.node("Squeeze", [x])
    elif b.opset >= 13:
        b.node("Squeeze", [x, b.ints(*axes)])
    else:
        b.node("Squeeze", [x], axes=axes)


def unsqueeze(b: Builder) -> None:
    x = b.pick(most=4)
    axes = [b.between(-x.rank - 1 if b.opset >= 11 else 0, x.rank)]
    if b.opset >= 13:
        b.node("Unsqueeze", [x, b.ints(*axes)])
    else:
        b.node("Unsqueeze", [x], axes=axes)


def concat(b: Builder) -> None:
    x = b.pick(least=1)
    axis = b.axis(x)
    fitting = [
        v
        for v in b.values.values()
        if v.rank == x.rank
        and v.array.dtype == x.array.dtype
        and all(n == m for i, (n, m) in enumerate(zip(v.shape, x.shape, strict=True)) if i != axis % x.rank)
    ]
    parts = [x, *(b.choose(fitting) for _ in range(b.between(0, 2)))]
    if b.chance(0.3):
        shape = [b.between(1, 3) if i == axis % x.rank else n for i, n in enumerate(x.shape)]
        parts.append(b.const(b.weights(*shape, dtype=x.array.dtype)))
    b.node("Concat", [parts[i] for i in b.rng.permutation(len(parts))], axis=axis)


def split(b: Builder) -> None:
    x = b.pick(least=1)
    axis = b.axis(x)
    size = x.shape[axis % x.rank]
    if size < 2:
        raise Unfit("nothing to split")
    cuts = sorted({0, size, *(b.between(1, size - 1) for _ in range(b.between(1, 2)))})
    sizes = [high - low for low, high in itertools.pairwise(cuts)]
    if b.chance(0.05):
        sizes.append(0)
    uneven = b.chance(0.6)
    if not uneven:
        sizes = [size // 2] * 2 if size % 2 == 0 else [size]
    operands, attrs = [x], {"axis": axis}
    if uneven and b.opset >= 13:
        operands.append(b.ints(*sizes))
    elif uneven:
        attrs["split"] = sizes
    elif b.opset >= 18:
        attrs["num_outputs"] = len(sizes)
    parts = b.node("Split", operands, outputs=len(sizes), **attrs)
    b.current = b.choose(parts)
    if b.chance(0.3) and len({p.shape for p in parts}) == 1 and len(parts) > 1:
        b.node("Mul", [parts[0], b.node("Sigmoid", [parts[1]])[0]])


def slice_(b: Builder) -> None:
    x = b.pick(least=1)
    axes = sorted({b.axis(x) for _ in range(b.choose([1, 1, 2]))})
    if len({a % x.rank for a in axes}) < len(axes):
        raise Unfit("an axis twice")
    starts, ends, steps = [], [], []
    for axis in axes:
        size = x.shape[axis % x.rank]
        low = b.between(0, max(size - 1, 0))
        backwards = b.opset >= 10 and b.chance(0.1)
        starts.append(-1 if backwards else low - size if b.chance(0.2) else low)
        ends.append(-size - 5 if backwards else b.choose([size, 2**31 - 1, 2**62, low + 1, -1]))
        steps.append(-1 if backwards else b.choose([1, 1, 2]))
    if b.opset < 10:
        b.node("Slice", [x], starts=starts, ends=ends, axes=axes)
    else:
        some = [b.ints(*starts), b.ints(*ends), b.ints(*axes)]
        b.node("Slice", [x, *some, b.ints(*steps)] if b.chance(0.6) or -1 in steps else [x, *some])


def expand(b: Builder) -> None:
    x = b.pick(most=4)
    target = [b.choose([n, 1, 2, 3]) if n == 1 else b.choose([n, 1]) for n in x.shape]
    if b.chance(0.2):
        target = [2, *target]
    if target:
        b.node("Expand", [x, b.ints(*target)])


def gather(b: Builder) -> None:
    x = b.pick(least=1)
    axis = b.axis(x)
    size = x.shape[axis % x.rank]
    if not size:
        raise Unfit("nothing to gather")
    low = -size if b.opset >= 11 else 0
    shape = b.choose([(), (1,), (2,), (size,), (2, 2)])
    index = b.const(b.rng.integers(low, size, size=shape).astype(np.int64), plain=True)
    if b.chance(0.3) and shape == (size,):
        index = b.const(b.rng.permutation(size).astype(np.int64), plain=True)
    b.node("Gather", [x, index], axis=axis)


def embedding(b: Builder) -> None:
    """Rows of a table, by ids that are an input."""
    ids = [v for v in b.values.values() if v.array.dtype == np.int64 and v.name in b.inputs]
    if not ids:
        raise Unfit("no ids")
    chosen = b.choose(ids)
    table = b.const(b.weights(7, b.between(1, 6), dtype=b.dtype))
    if b.chance(0.15) and b.opset >= 12:
        tuples = b.node(
            "Unsqueeze", [chosen, b.ints(-1)] if b.opset >= 13 else [chosen], axes=[-1] if b.opset < 13 else None
        )[0]
        b.node("GatherND", [table, tuples])
    else:
        b.node("Gather", [table, chosen])


def gather_elements(b: Builder) -> None:
    x = b.pick(least=1)
    axis = b.axis(x)
    size = x.shape[axis % x.rank]
    if not size:
        raise Unfit("nothing to gather")
    shape = [b.between(1, 3) if i == axis % x.rank else n for i, n in enumerate(x.shape)]
    b.node("GatherElements", [x, b.const(b.rng.integers(0, size, size=shape).astype(np.int64), plain=True)], axis=axis)


def gather_nd(b: Builder) -> None:
    x = b.pick(least=2)
    if not x.shape[0]:
        raise Unfit("nothing to gather")
    index = b.rng.integers(0, x.shape[0], size=(b.between(1, 3), 1)).astype(np.int64)
    b.node("GatherND", [x, b.const(index, plain=True)])


# ---------------------------------------------------------------- attention, fused and control flow


def plain_attention(b: Builder) -> None:
    """Projections, heads, softmax(q kᵀ) v and a projection: as exporters spell it."""
    x = b.pick(least=3, most=3)
    units = x.shape[-1]
    heads, each = b.between(1, 3), b.between(1, 3)
    inner = heads * each

    def headed(perm: list[int]) -> Held:
        flat = b.node("MatMul", [x, b.const(b.weights(units, inner))])[0]
        if b.chance(0.5):
            flat = b.node("Add", [flat, b.const(b.weights(inner))])[0]
        split_up = b.node("Reshape", [flat, b.ints(0, 0, heads, each if b.chance(0.5) else -1)])[0]
        return b.node("Transpose", [split_up], perm=perm)[0]

    q, k, v = headed([0, 2, 1, 3]), headed([0, 2, 3, 1]), headed([0, 2, 1, 3])
    scores = b.node("Mul", [b.node("MatMul", [q, k])[0], b.const(np.asarray(0.5, x.array.dtype))])[0]
    mixed = b.node("MatMul", [b.node("Softmax", [scores], axis=-1 if b.opset >= 11 else 3)[0], v])[0]
    back = b.node("Transpose", [mixed], perm=[0, 2, 1, 3])[0]
    merged = b.node("Reshape", [back, b.ints(0, 0, inner if b.chance(0.5) else -1)])[0]
    b.node("MatMul", [merged, b.const(b.weights(inner, b.between(1, 6)))])


def attention(b: Builder) -> None:
    """The op of opset 23."""
    x = b.pick(least=3, most=3)
    units = x.shape[-1]
    heads, each = b.between(1, 3), b.between(1, 3)
    served = b.choose([h for h in (1, 2, 3) if heads % h == 0])
    q, k, v = (
        b.node("MatMul", [x, b.const(b.weights(units, width))])[0]
        for width in (heads * each, served * each, served * each)
    )
    attrs = {"q_num_heads": heads, "kv_num_heads": served, "is_causal": b.between(0, 1)}
    b.node("Attention", [q, k, v], scale=0.5 if b.chance(0.3) else None, **attrs)
    b.node("MatMul", [b.current, b.const(b.weights(heads * each, b.between(1, 6)))])


def rotary(b: Builder) -> None:
    x = b.pick(least=4, most=4)
    samples, _, length, each = x.shape
    if each % 2:
        raise Unfit("odd")
    cache = [b.const(b.weights(samples, length, each // 2)) for _ in range(2)]
    b.node("RotaryEmbedding", [x, *cache])


def rms_norm(b: Builder) -> None:
    x = b.pick(least=1)
    b.node("RMSNormalization", [x, b.const(b.weights(x.shape[-1]))], epsilon=0.01)


def fused(op: str) -> Maker:
    def make(b: Builder) -> None:
        x = b.pick(least=2)
        units = x.shape[-1]
        if op in ("Gelu", "QuickGelu"):
            b.node(op, [x], domain=MICROSOFT, alpha=1.702 if op == "QuickGelu" else None)
        elif op in ("BiasGelu", "FastGelu"):
            if op == "FastGelu" and x.array.dtype == np.float64:
                raise Unfit("onnxruntime's own is good to float32 only")
            b.node(op, [x, b.const(b.weights(units))], domain=MICROSOFT)
        elif op == "FusedMatMul":
            width, trans = b.between(1, 6), b.between(0, 1)
            weight = b.const(b.weights(*((width, units) if trans else (units, width))))
            b.node(op, [x, weight], domain=MICROSOFT, transB=trans, alpha=float(b.choose([1.0, 0.5])))
        elif op == "FusedGemm":
            width = b.between(1, 6)
            operands = [x, b.const(b.weights(units, width)), b.const(b.weights(width))]
            b.node(op, operands, domain=MICROSOFT, activation=b.choose(["Relu", "Sigmoid", "Tanh"]))
        elif op == "FusedConv":
            if x.rank < 3:
                raise Unfit("no window")
            weight = b.const(b.weights(b.between(1, 5), x.shape[1], *([3] * (x.rank - 2))))
            pads = [1] * (2 * (x.rank - 2))
            b.node(op, [x, weight], domain=MICROSOFT, activation="Relu", pads=pads, kernel_shape=[3] * (x.rank - 2))
        elif op in ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"):
            gamma = [b.const(b.weights(units))]
            beta = [b.const(b.weights(units))] if op == "SkipLayerNormalization" else []
            b.node(op, [x, b.pick(same=x), *gamma, *beta], domain=MICROSOFT, epsilon=0.01)
        elif op == "MultiHeadAttention":
            heads, each = b.between(1, 3), b.between(1, 3)
            q, k, v = (b.node("MatMul", [x, b.const(b.weights(units, heads * each))])[0] for _ in range(3))
            b.node(op, [q, k, v], domain=MICROSOFT, num_heads=heads)
            b.node("MatMul", [b.current, b.const(b.weights(heads * each, b.between(1, 6)))])
        elif op == "GroupQueryAttention":
            if x.rank != 3:
                raise Unfit("no sequence")
            samples, length, _ = x.shape
            served, shares, each = b.between(1, 2), b.between(1, 2), 8
            widths = (served * shares * each, served * each, served * each)
            q, k, v = (b.node("MatMul", [x, b.const(b.weights(units, width))])[0] for width in widths)
            lengths = b.const(np.full(samples, length - 1, np.int32), plain=True)
            total = b.const(np.asarray(length, np.int32), plain=True)
            attrs = {"num_heads": served * shares, "kv_num_heads": served}
            b.node(op, [q, k, v, None, None, lengths, total], outputs=3, domain=MICROSOFT, **attrs)
            b.node("MatMul", [b.current, b.const(b.weights(widths[0], b.between(1, 6)))])
        elif op == "RotaryEmbedding":
            if x.rank != 4 or x.shape[3] % 2:
                raise Unfit("no heads")
            samples, _, length, each = x.shape
            places = b.const(np.tile(np.arange(length, dtype=np.int64), (samples, 1)), plain=True)
            b.node(op, [x, places, *(b.const(b.weights(length, each // 2)) for _ in range(2))], domain=MICROSOFT)
        elif op == "Attention":
            heads, each = b.between(1, 3), b.between(1, 3)
            inner = heads * each
            operands = [x, b.const(b.weights(units, 3 * inner)), b.const(b.weights(3 * inner))]
            b.node(op, operands, domain=MICROSOFT, num_heads=heads)
            b.node("MatMul", [b.current, b.const(b.weights(inner, b.between(1, 6)))])

    return make


def conditional(b: Builder) -> None:
    """If, whose branches capture values of the graph."""
    x = b.pick()
    kind = onnx_type(x.array.dtype)
    other = b.pick(same=x)
    then_name, else_name = b.fresh("then"), b.fresh("else")
    out = [
        helper.make_tensor_value_info(n, kind, list(x.shape) if b.chance(0.3) else None) for n in (then_name, else_name)
    ]
    then = helper.make_graph([helper.make_node("Relu", [x.name], [then_name])], "then", [], out[:1])
    orelse = helper.make_graph([helper.make_node("Add", [x.name, other.name], [else_name])], "else", [], out[1:])
    condition = b.const(np.asarray(b.chance(0.5)), plain=True)
    b.node("If", [condition], captured=[x, other], then_branch=then, else_branch=orelse)


def loop(b: Builder) -> None:
    """Loop that adds a captured value to what it carries."""
    x, added = b.pick(), None
    added = b.pick(same=x)
    kind = onnx_type(x.array.dtype)
    names = {n: b.fresh(n) for n in ("trip", "goes", "carried", "stays", "grown")}
    infos = {
        "trip": helper.make_tensor_value_info(names["trip"], TensorProto.INT64, []),
        "goes": helper.make_tensor_value_info(names["goes"], TensorProto.BOOL, []),
        "carried": helper.make_tensor_value_info(names["carried"], kind, None),
        "stays": helper.make_tensor_value_info(names["stays"], TensorProto.BOOL, []),
        "grown": helper.make_tensor_value_info(names["grown"], kind, None),
    }
    body = helper.make_graph(
        [
            helper.make_node("Identity", [names["goes"]], [names["stays"]]),
            helper.make_node("Add", [names["carried"], added.name], [names["grown"]]),
        ],
        "body",
        [infos["trip"], infos["goes"], infos["carried"]],
        [infos["stays"], infos["grown"]],
    )
    trips, condition = b.const(np.asarray(2, np.int64), plain=True), b.const(np.asarray(True), plain=True)
    b.node("Loop", [trips, condition, x], captured=[added], body=body)


def unknown(b: Builder) -> None:
    """Ops that the compiler has no row for."""
    x = b.pick(least=1)
    op = b.choose(["TopK", "MeanVarianceNormalization", "Trilu", "Size", "NonZero", "DepthToSpace", "EyeLike"])
    if op == "TopK" and b.opset >= 10:
        b.node("TopK", [x, b.ints(1)], outputs=2, axis=b.axis(x))
    elif op == "DepthToSpace":
        b.node(op, [x], blocksize=2)
    else:
        b.node(op, [x])


AFFINE: dict[str, Maker] = {"matmul": matmul, "gemm": gemm, "conv": conv, "conv_transpose": conv_transpose}
POINTWISE: dict[str, Maker] = {
    **{op: unary(op) for op in SMOOTH},
    **{op: guarded(op) for op in ("Log", "Sqrt", "Reciprocal")},
    **{op: binary(op) for op in ARITHMETIC},
    "Cast": cast, "Clip": clip, "Dropout": dropout, "PRelu": prelu, "Not": not_, "tests": tests, "compare": compare,
    "Where": where, "gated": gated, "batch_norm": batch_norm,
}  # fmt: skip
ALONG: dict[str, Maker] = {
    **{
        op: reduce(op)
        for op in ["ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare"]
    },
    **{op: pool(op) for op in ("AveragePool", "MaxPool", "LpPool")},
    **{op: global_pool(op) for op in ("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")},
    **{op: softmax(op) for op in ("Softmax", "LogSoftmax", "Hardmax")},
    **{op: arg(op) for op in ("ArgMax", "ArgMin")},
    "CumSum": cumsum, "LpNormalization": lp_norm, "InstanceNormalization": instance_norm, "GroupNormalization": group_norm,
    "LayerNormalization": layer_norm("LayerNormalization"), "RMSNormalization": rms_norm,
    "SimplifiedLayerNormalization": layer_norm("SimplifiedLayerNormalization"), "Pad": pad, "Resize": resize, "Tile": tile,
    "GatherElements": gather_elements, "GatherND": gather_nd,
}  # fmt: skip
LAYOUT: dict[str, Maker] = {
    "Transpose": transpose, "Reshape": reshape, "Reshape2": reshape, "computed_reshape": computed_reshape, "Flatten": flatten,
    "Squeeze": squeeze, "Unsqueeze": unsqueeze, "Concat": concat, "Split": split, "Slice": slice_, "Expand": expand,
    "Gather": gather,
}  # fmt: skip
FUSED = (
    "Gelu", "QuickGelu", "BiasGelu", "FastGelu", "FusedMatMul", "FusedGemm", "FusedConv", "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization", "MultiHeadAttention", "Attention", "GroupQueryAttention", "RotaryEmbedding",
)  # fmt: skip
BLOCKS: dict[str, Maker] = {
    "residual": residual, "residual_conv": residual_conv, "squeeze_excite": squeeze_excite,
    "plain_attention": plain_attention, "attention": attention, "embedding": embedding, "rotary": rotary,
    **{f"fused {op}": fused(op) for op in FUSED},
    "If": conditional, "Loop": loop, "unknown": unknown,
}  # fmt: skip
