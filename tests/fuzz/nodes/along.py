"""Makers of ops along axes: reductions, pools, norms, padding, and gathers along one axis."""

from __future__ import annotations

import numpy as np

from tests.fuzz.builder import Builder, Held, Unfit
from tests.fuzz.nodes.maker import Maker
from tests.fuzz.nodes.windows import windows


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
        kernel, attrs = windows(b, x, dilations=dilations)
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


def rms_norm(b: Builder) -> None:
    x = b.pick(least=1)
    b.node("RMSNormalization", [x, b.const(b.weights(x.shape[-1]))], epsilon=0.01)


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
