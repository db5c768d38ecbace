"""Makers of ops that work on each number by itself, of one operand or several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import TensorProto

from tests.fuzz.builder import Builder, Held, Unfit, onnx_type
from tests.fuzz.nodes.maker import Maker


def _sum_shape(builder: Builder, operand: Held) -> list[int]:
    """A shape that broadcasts against a value: some axes one, leading ones sometimes left out."""
    shape = [n if builder.chance(0.6) else 1 for n in operand.shape]
    return shape[builder.between(0, operand.rank) :] if builder.chance(0.3) else shape


def batch_norm(b: Builder) -> None:
    x = b.pick(least=2, most=5)
    channels = x.shape[1]
    statistics = [b.weights(channels), b.weights(channels), b.weights(channels)]
    variance = np.abs(b.weights(channels)) + np.asarray(0.3, b.dtype)
    b.node("BatchNormalization", [x, *(b.const(s) for s in statistics), b.const(variance.astype(b.dtype))])


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


POINTWISE: dict[str, Maker] = {
    **{op: unary(op) for op in SMOOTH},
    **{op: guarded(op) for op in ("Log", "Sqrt", "Reciprocal")},
    **{op: binary(op) for op in ARITHMETIC},
    "Cast": cast, "Clip": clip, "Dropout": dropout, "PRelu": prelu, "Not": not_, "tests": tests, "compare": compare,
    "Where": where, "gated": gated, "batch_norm": batch_norm,
}  # fmt: skip
