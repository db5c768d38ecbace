"""The rows of the ONNX table for ops that do several things at once: what they do, one after the other.

    BiasGelu(x, b)                      add, gelu
    SkipLayerNormalization(x, s, γ, β)  add, layer_norm

The results between are inside the node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cmrc.hosts.onnx.ops.affine import read_conv, read_gemm
from cmrc.hosts.onnx.ops.row import LeftWhole, Slot, Step, View, broadcast
from cmrc.ir.graph import Shape, literal

EXTRA = 1000  # a slot that no input has, for a constant that an attribute gives

# ---------------------------------------------------------------- activations, norms, products

ACTIVATIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    # the function, and what the parameters of an activation mean, in order
    "Relu": ("relu", ()),
    "Sigmoid": ("sigmoid", ()),
    "Tanh": ("tanh", ()),
    "LeakyRelu": ("leaky_relu", ("alpha",)),
    "Clip": ("clip", ("min", "max")),
    "HardSigmoid": ("hard_sigmoid", ("alpha", "beta")),
}


def read_bias_gelu(view: View, fn: str) -> Step | list[Step]:
    """f(x + b); without a bias f(x)."""
    shape = view.out(view.shape())
    if view.operand(1) is None:
        return Step("pointwise", (0,), {"fn": fn}, shape)
    if broadcast(shape, view.shape(1)) != list(shape):  # onnxruntime runs such a model with no samples
        raise LeftWhole("its bias does not have the size of its input")
    return [
        Step("pointwise", (0, 1), {"fn": "add"}, shape, key="sum"),
        Step("pointwise", ("sum",), {"fn": fn}, shape),
    ]


def read_skip_norm(view: View, fn: str, bias: int) -> list[Step]:
    """norm(x + bias + skip), which also gives the sum."""
    if any(view.used[1:3]):
        raise LeftWhole("its other outputs are read too")
    shape, parameters = view.shape(), tuple(range(2, bias))
    for slot in parameters:
        if view.operand(slot) is not None:
            view.tensor(slot, "scale")
    steps, x = [], 0
    total = Step("pointwise", (0, 1), {"fn": "add"}, tuple(view.out(broadcast(shape, view.shape(1)))), 3, key="sum")
    if view.operand(bias) is not None:  # first, so that what a projection before it folds joins it
        steps.append(Step("pointwise", (x, bias), {"fn": "add"}, shape, key="shifted"))
        total = replace(total, slots=("shifted", 1))
    axes = (len(shape) - 1,)
    attrs = {"fn": fn, "axes": axes, "eps": float(view.attr("epsilon", 1e-12))}
    return [*steps, total, Step("along", ("sum", *parameters), attrs, total.shape)]


def _activation(view: View, name: str, parameters: Sequence[float], after: str, shape: Shape) -> Step:
    if name not in ACTIVATIONS:
        raise LeftWhole(f"its activation is {name!r}")
    fn, names = ACTIVATIONS[name]
    if len(parameters) < len(names):
        raise LeftWhole(f"its activation {name!r} has no parameters")
    given = dict(zip(names, (float(p) for p in parameters), strict=False))
    return Step("pointwise", (after,), {"fn": fn, **given}, shape)


def read_fused_conv(view: View) -> list[Step]:
    """activation(conv(x; W) + b + z)."""
    conv = replace(read_conv(view), key="conv")
    steps, last = [conv], "conv"
    if view.operand(3) is not None:
        steps.append(Step("pointwise", ("conv", 3), {"fn": "add"}, conv.shape, key="sum"))
        last = "sum"
    name, parameters = view.attr("activation", ""), view.attr("activation_params", ())
    if not name:
        return [*steps, Step("pointwise", (last,), {"fn": "identity"}, conv.shape)]
    return [*steps, _activation(view, name, parameters, last, conv.shape)]


def read_fused_gemm(view: View) -> list[Step]:
    """activation(gemm(x; W) + b)."""
    gemm = replace(read_gemm(view), key="gemm")
    names = [f"activation_{name}" for name in ("alpha", "beta", "gamma")]
    given = [view.attr(name, 0.0) for name in names if name in view.node.attributes]
    return [gemm, _activation(view, view.attr("activation", ""), given, "gemm", gemm.shape)]


def read_fused_matmul(view: View) -> Step | list[Step]:
    """alpha · A B, either of them transposed before."""
    if view.attr("transBatchA", 0) or view.attr("transBatchB", 0):
        raise LeftWhole("it transposes the batch")
    alpha, turned = float(view.attr("alpha", 1.0)), [bool(view.attr(name, 0)) for name in ("transA", "transB")]
    left, right = view.shape(0), view.shape(1)
    if not isinstance(view.operand(0), str):
        raise LeftWhole("its left operand is a constant")
    steps: list[Step] = []
    slots: list[Slot] = [0, 1]
    if turned[0]:
        steps.append(_turned(0, left, "left"))
        slots[0], left = "left", steps[-1].shape
    if not isinstance(view.operand(1), str):
        if not turned[0] and left and len(right) == 2 and isinstance(right[int(turned[1])], int):
            left = view.fitted(0, len(left) - 1, int(right[int(turned[1])]))
        if len(right) != 2 or not left or left[-1] != right[int(turned[1])]:
            raise LeftWhole("its constant operand is not a matrix of a size that is known to match")
        w_in, w_out = (1, 0) if turned[1] else (0, 1)
        attrs = {"axis": len(left) - 1, "w_in": w_in, "w_out": w_out, "alpha": alpha}
        return [*steps, Step("linear", tuple(slots), attrs, (*left[:-1], right[w_out]))]
    if turned[1]:
        steps.append(_turned(1, right, "right"))
        slots[1], right = "right", steps[-1].shape
    if min(len(left), len(right)) < 2:
        raise LeftWhole("it contracts a vector that is computed at run time")
    shape = view.out([*broadcast(left[:-2], right[:-2]), left[-2], right[-1]])
    if alpha == 1.0:
        return [*steps, Step("matmul", tuple(slots), {}, shape)]
    scale = {EXTRA: literal(alpha)}
    return [
        *steps,
        Step("matmul", tuple(slots), {}, shape, key="product"),
        Step("pointwise", ("product", EXTRA), {"fn": "mul"}, shape, tensors=scale),
    ]


def _turned(slot: Slot, shape: Shape, key: str) -> Step:
    perm = (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)
    return Step("transpose", (slot,), {"perm": perm}, tuple(shape[p] for p in perm), key=key)


def embedded(view: View) -> list[tuple[Shape | None, str]]:
    """EmbedLayerNormalization: tokens as vectors, the number of tokens, the vectors before the norm."""
    ids, table = view.shape(0), view.tensor(2, "table")
    vectors = (*ids, table.shape[-1])
    return [(vectors, table.dtype), (ids[:1], "int32"), (vectors, table.dtype)]
