"""The table: what every ONNX op is in the IR, one row per op. Another op is another row.

Most rows are data; `rows.py`, `layout.py`, `fused.py` and `attention.py` have those that need a few lines, `writers.py` the
writers of ops whose attributes or shape constants change when a value shrinks. A row without a writer changes only in its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import onnx_ir

from cmrc.hosts.onnx.ops import attention, fused, layout, quantised, rows
from cmrc.hosts.onnx.ops.view import LeftWhole, Step, View, broadcast, kept
from cmrc.ir.graph import Shape, Tensor

Reader = Callable[[View], "Step | list[Step]"]


@dataclass(frozen=True, slots=True)
class Row:
    """How to read an op, and which kind of writing it needs besides its inputs (a key of `writers.WRITERS`).

    A fused op is `separable` from the opset on that has an op for each of its steps, which `insert.py` writes. Its inputs
    `own` are written by its writer alone.
    """

    read: Reader
    write: str = ""
    separable: int | None = None
    own: tuple[int, ...] = ()


def row_name(node: onnx_ir.Node) -> str:
    """What the tables call the op of a node."""
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type


def pointwise(fn: str, arity: int = 1, **options: float) -> Row:
    """Element by element; `options` are the ONNX attributes that the function takes, with their defaults."""

    def read(view: View) -> Step:
        if len([o for o in view.operands if o is not None]) != arity:
            raise LeftWhole(f"it has {len(view.operands)} inputs, not {arity}")
        attrs: dict[str, Any] = {"fn": fn}
        attrs |= {name: float(view.attr(name, default)) for name, default in options.items()}
        slots = tuple(range(arity))
        return Step("pointwise", slots, attrs, view.out(broadcast(*(view.shape(i) for i in slots))))

    return Row(read)


def variadic(fn: str) -> Row:
    """One input is a copy, two are the function; more are left whole."""
    two = pointwise(fn, 2).read

    def read(view: View) -> Step | list[Step]:
        if len(view.operands) == 1:
            return Step("pointwise", (0,), {"fn": "identity"}, view.out(view.shape()))
        return two(view)

    return Row(read)


def named(attribute: str, default: Any, **functions: str) -> Row:
    """A function of one operand that an attribute names."""

    def read(view: View) -> Step:
        fn = functions.get(f"is_{view.attr(attribute, default)}")
        if fn is None:
            raise LeftWhole(f"its {attribute} is {view.attr(attribute, default)!r}")
        slots = tuple(range(len(view.operands)))
        return Step("pointwise", slots, {"fn": fn}, view.out(broadcast(*(view.shape(i) for i in slots))))

    return Row(read)


def reduction(fn: str, *, axes_input_since: int = 18) -> Row:
    """Over the axes that an attribute or, since some opset, an input names; over all by default."""

    def read(view: View) -> Step:
        axes = view.ints(1, "axes", "axes", since=axes_input_since)
        if not axes and view.attr("noop_with_empty_axes", 0):
            return Step("pointwise", (0,), {"fn": "identity"}, view.out(view.shape()))
        over = tuple(sorted(view.axis(a) for a in axes)) if axes else tuple(range(len(view.shape())))
        if view.attr("keepdims", 1):
            computed = [1 if i in over else n for i, n in enumerate(view.shape())]
            return Step("along", (0,), {"fn": fn, "axes": over}, view.out(computed))
        return Step("along", (0,), {"fn": fn, "axes": over, "drop": True}, kept(view, over, drop=True))

    return Row(read)


def arg_reduction(fn: str) -> Row:
    def read(view: View) -> Step:
        axis = view.axis(view.attr("axis", 0))
        drop = not view.attr("keepdims", 1)
        computed = [1 if i == axis else n for i, n in enumerate(view.shape()) if i != axis or not drop]
        return Step("along", (0,), {"fn": fn, "axes": (axis,), "drop": drop}, view.out(computed))

    return Row(read)


def over_spatial(fn: str) -> Row:
    """To one number per channel."""

    def read(view: View) -> Step:
        axes = tuple(range(2, len(view.shape())))
        return Step("along", (0,), {"fn": fn, "axes": axes}, view.out([*view.shape()[:2], *(1 for _ in axes)]))

    return Row(read)


def along_axis(fn: str, default: int) -> Row:
    """Along one axis that an attribute names."""

    def read(view: View) -> Step:
        axis = view.axis(view.attr("axis", default))
        return Step("along", (0,), {"fn": fn, "axes": (axis,)}, view.out(view.shape()))

    return Row(read)


def norm(
    fn: str, axes: Callable[[View], tuple[int, ...]], parameters: int, *, per_channel: bool = False, write: str = ""
) -> Row:
    """A normalisation over `axes`, then scale and shift by parameters."""

    def read(view: View) -> Step:
        view.first_output_only()
        attrs: dict[str, Any] = {"fn": fn, "axes": axes(view), "eps": float(view.attr("epsilon", 1e-5))}
        if per_channel:
            attrs["align"] = (None, *((1,),) * parameters)
        return Step("along", tuple(range(parameters + 1)), attrs, view.out(view.shape()))

    return Row(read, write)


def _from_axis(view: View) -> tuple[int, ...]:
    return tuple(range(view.axis(view.attr("axis", -1)), len(view.shape())))


def _spatial(view: View) -> tuple[int, ...]:
    return tuple(range(2, len(view.shape())))


def _all_but_batch(view: View) -> tuple[int, ...]:
    return tuple(range(1, len(view.shape())))


def _cumsum(view: View) -> Step:
    position = view.constant(1, "axis")
    if position is None:
        raise LeftWhole("it has no axis")
    return Step(
        "along", (0,), {"fn": "cumsum", "axes": (view.axis(int(position.reshape(()))),)}, view.out(view.shape())
    )


EVALUATED: dict[str, Callable[[View], Tensor]] = {
    # constants that are made from constants
    "ConstantOfShape": layout.filled,
    "Range": layout.counted_up,
}

OPAQUE: dict[str, Callable[[View], list[tuple[Shape | None, str]]]] = {
    # the shapes and dtypes of ops that stay whole, where they say more than shape inference finds
    "Gather": layout.gathered,
    "GatherElements": lambda view: [(view.shapes[1], "unknown")],
    "Range": layout.counted,
    "com.microsoft::EmbedLayerNormalization": fused.embedded,
}

ROWS: dict[str, Row] = {
    # affine, and attention
    "MatMul": Row(rows.read_matmul),
    "Gemm": Row(rows.read_gemm),
    "Conv": Row(rows.read_conv, write="conv"),
    "ConvTranspose": Row(rows.read_conv_transpose, write="conv"),
    "Attention": Row(attention.read_attention, write="heads"),
    "RotaryEmbedding": Row(lambda view: attention.read_rotary(view, 3, (1, 2)), write="heads"),
    # pointwise, one operand
    "Abs": pointwise("abs"),
    "BatchNormalization": Row(rows.read_batch_norm),
    "Cast": Row(rows.read_cast),
    "Ceil": pointwise("ceil"),
    "Celu": pointwise("celu", alpha=1.0),
    "Clip": Row(rows.read_clip),
    "Cos": pointwise("cos"),
    "Dropout": Row(rows.read_dropout),
    "Elu": pointwise("elu", alpha=1.0),
    "Erf": pointwise("erf"),
    "Exp": pointwise("exp"),
    "Floor": pointwise("floor"),
    "Gelu": named("approximate", "none", is_none="gelu", is_tanh="gelu_tanh"),
    "HardSigmoid": pointwise("hard_sigmoid", alpha=0.2, beta=0.5),
    "HardSwish": pointwise("hard_swish", alpha=1 / 6),  # no attribute of its own: that of the HardSigmoid inside
    "Identity": pointwise("identity"),
    "IsInf": named("detect_negative", 1, is_1="isinf"),
    "IsNaN": pointwise("isnan"),
    "LeakyRelu": pointwise("leaky_relu", alpha=0.01),
    "Log": pointwise("log"),
    "Mish": pointwise("mish"),
    "Neg": pointwise("neg"),
    "Not": pointwise("not"),
    "Reciprocal": pointwise("reciprocal"),
    "Relu": pointwise("relu"),
    "Round": pointwise("round"),
    "Selu": pointwise("selu", alpha=1.67326319217681884765625, gamma=1.05070102214813232421875),
    "Shrink": pointwise("shrink", lambd=0.5, bias=0.0),
    "Sigmoid": pointwise("sigmoid"),
    "Sign": pointwise("sign"),
    "Sin": pointwise("sin"),
    "Softplus": pointwise("softplus"),
    "Softsign": pointwise("softsign"),
    "Sqrt": pointwise("sqrt"),
    "Swish": pointwise("quick_gelu", alpha=1.0),
    "Tanh": pointwise("tanh"),
    "ThresholdedRelu": pointwise("thresholded_relu", alpha=1.0),
    # pointwise, several operands
    "Add": pointwise("add", 2),
    "And": pointwise("and", 2),
    "Div": pointwise("div", 2),
    "Equal": pointwise("equal", 2),
    "Greater": pointwise("greater", 2),
    "GreaterOrEqual": pointwise("greater_equal", 2),
    "Less": pointwise("less", 2),
    "LessOrEqual": pointwise("less_equal", 2),
    "Max": variadic("max"),
    "Min": variadic("min"),
    "Mod": named("fmod", 0, is_1="fmod"),
    "Mul": pointwise("mul", 2),
    "Or": pointwise("or", 2),
    "PRelu": pointwise("prelu", 2),
    "Pow": pointwise("pow", 2),
    "Sub": pointwise("sub", 2),
    "Sum": variadic("add"),
    "Where": pointwise("where", 3),
    # along axes
    "ArgMax": arg_reduction("argmax"),
    "ArgMin": arg_reduction("argmin"),
    "AveragePool": Row(lambda view: rows.read_pool(view, "avg_pool")),
    "CumSum": Row(_cumsum),
    "GlobalAveragePool": over_spatial("mean"),
    "GlobalLpPool": over_spatial("lp_pool"),
    "GlobalMaxPool": over_spatial("amax"),
    "GroupNormalization": norm("group_norm", _all_but_batch, 2, per_channel=True),
    "Hardmax": Row(lambda view: rows.read_softmax(view, "hardmax")),
    "InstanceNormalization": norm("instance_norm", _spatial, 2, per_channel=True),
    "LayerNormalization": norm("layer_norm", _from_axis, 2),
    "LogSoftmax": Row(lambda view: rows.read_softmax(view, "log_softmax")),
    "LpNormalization": along_axis("lp_normalize", -1),
    "LpPool": Row(lambda view: rows.read_pool(view, "lp_pool")),
    "MaxPool": Row(lambda view: rows.read_pool(view, "max_pool")),
    "Pad": Row(rows.read_pad),
    "RMSNormalization": norm("rms_norm", _from_axis, 1, write="norm"),
    "SimplifiedLayerNormalization": norm("rms_norm", _from_axis, 1, write="norm"),
    "ReduceL1": reduction("l1"),
    "ReduceL2": reduction("l2"),
    "ReduceLogSum": reduction("log_sum"),
    "ReduceLogSumExp": reduction("log_sum_exp"),
    "ReduceMax": reduction("amax"),
    "ReduceMean": reduction("mean"),
    "ReduceMin": reduction("amin"),
    "ReduceProd": reduction("prod"),
    "ReduceSum": reduction("sum", axes_input_since=13),
    "ReduceSumSquare": reduction("sum_square"),
    "Resize": Row(rows.read_resize, write="resize"),
    "Softmax": Row(lambda view: rows.read_softmax(view, "softmax")),
    "Upsample": Row(rows.read_resize),
    # indexing
    "Gather": Row(layout.read_gather, write="select"),
    "GatherElements": Row(layout.read_gather_elements),
    "GatherND": Row(layout.read_gather_nd),
    "Slice": Row(layout.read_slice, write="select"),
    "Split": Row(layout.read_split, write="select"),
    # layout
    "Concat": Row(layout.read_concat, write="concat"),
    "Expand": Row(layout.read_expand, write="shape"),
    "Flatten": Row(layout.read_flatten),
    "Reshape": Row(layout.read_reshape, write="shape"),
    "Squeeze": Row(layout.read_squeeze, write="squeeze"),
    "Tile": Row(layout.read_tile),
    "Transpose": Row(layout.read_transpose),
    "Unsqueeze": Row(layout.read_unsqueeze),
    # small integers
    "ConvInteger": Row(quantised.leave_integers),
    "DequantizeLinear": Row(quantised.read_dequantize),
    "DynamicQuantizeLinear": Row(quantised.leave_dynamic),
    "MatMulInteger": Row(quantised.leave_integers),
    "QLinearConv": Row(quantised.read_q_linear_conv, write="integers", own=(3, 8)),
    "QLinearMatMul": Row(quantised.read_q_linear_matmul, write="integers", own=(3,)),
    "QuantizeLinear": Row(quantised.read_quantize),
    "com.microsoft::DequantizeLinear": Row(quantised.read_dequantize),
    "com.microsoft::DynamicQuantizeMatMul": Row(quantised.leave_dynamic),
    "com.microsoft::MatMulIntegerToFloat": Row(quantised.leave_integers),
    "com.microsoft::MatMulNBits": Row(quantised.read_matmul_n_bits, write="blocks"),
    "com.microsoft::QuantizeLinear": Row(quantised.read_quantize),
    # onnxruntime's own
    "com.microsoft::Attention": Row(attention.read_packed_attention, write="heads"),
    "com.microsoft::BiasGelu": Row(lambda view: fused.read_bias_gelu(view, "gelu")),
    "com.microsoft::FastGelu": Row(lambda view: fused.read_bias_gelu(view, "gelu_tanh")),
    "com.microsoft::FusedConv": Row(fused.read_fused_conv, write="conv", separable=7),
    "com.microsoft::FusedGemm": Row(fused.read_fused_gemm),
    "com.microsoft::FusedMatMul": Row(fused.read_fused_matmul),
    "com.microsoft::Gelu": pointwise("gelu"),
    "com.microsoft::GroupQueryAttention": Row(attention.read_grouped_attention, write="heads"),
    "com.microsoft::MultiHeadAttention": Row(attention.read_multi_head_attention, write="heads"),
    "com.microsoft::QuickGelu": pointwise("quick_gelu", alpha=1.702),
    "com.microsoft::RotaryEmbedding": Row(lambda view: attention.read_rotary(view, 1, (2, 3)), write="heads"),
    "com.microsoft::SkipLayerNormalization": Row(
        lambda view: fused.read_skip_norm(view, "layer_norm", 4), separable=17
    ),
    "com.microsoft::SkipSimplifiedLayerNormalization": Row(
        lambda view: fused.read_skip_norm(view, "rms_norm", 3), write="norm", separable=23
    ),
}
