"""The table: what every ONNX op is in the IR, one row per op. Another op is another row.

Most rows are data, read as `row.py` says. Those that need a few lines of their own are in `affine.py`, `pointwise.py`, `along.py`,
`layout.py`, `attention.py`, `fused.py` and `quantised.py`; `writers.py` has the writers of ops whose attributes or shape constants change when a value shrinks. A row without a writer changes only in its inputs.
"""

from __future__ import annotations

from collections.abc import Callable

from cmrc.hosts.onnx.ops import affine, along, attention, fused, layout, quantised
from cmrc.hosts.onnx.ops.pointwise import read_batch_norm, read_cast, read_clip, read_dropout
from cmrc.hosts.onnx.ops.row import (
    Row,
    View,
    along_axis,
    arg_reduction,
    named,
    norm,
    over_spatial,
    pointwise,
    reduction,
    variadic,
)
from cmrc.ir.graph import Shape, Tensor

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
    "MatMul": Row(affine.read_matmul),
    "Einsum": Row(affine.read_einsum),
    "Gemm": Row(affine.read_gemm),
    "Conv": Row(affine.read_conv, write="conv"),
    "ConvTranspose": Row(affine.read_conv_transpose, write="conv"),
    "Attention": Row(attention.read_attention, write="heads"),
    "RotaryEmbedding": Row(lambda view: attention.read_rotary(view, 3, (1, 2)), write="heads"),
    # pointwise, one operand
    "Abs": pointwise("abs"),
    "Atan": pointwise("atan"),
    "BatchNormalization": Row(read_batch_norm),
    "Cast": Row(read_cast),
    "Ceil": pointwise("ceil"),
    "Celu": pointwise("celu", alpha=1.0),
    "Clip": Row(read_clip),
    "Cos": pointwise("cos"),
    "Dropout": Row(read_dropout),
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
    "AveragePool": Row(lambda view: along.read_pool(view, "avg_pool")),
    "CumSum": Row(along.read_cumsum),
    "GlobalAveragePool": over_spatial("mean"),
    "GlobalLpPool": over_spatial("lp_pool"),
    "GlobalMaxPool": over_spatial("amax"),
    "GroupNormalization": norm("group_norm", along.all_but_batch, 2, per_channel=True),
    "Hardmax": Row(lambda view: along.read_softmax(view, "hardmax")),
    "InstanceNormalization": norm("instance_norm", along.spatial, 2, per_channel=True),
    "LayerNormalization": norm("layer_norm", along.from_axis, 2),
    "LogSoftmax": Row(lambda view: along.read_softmax(view, "log_softmax")),
    "LpNormalization": along_axis("lp_normalize", -1),
    "LpPool": Row(lambda view: along.read_pool(view, "lp_pool")),
    "MaxPool": Row(lambda view: along.read_pool(view, "max_pool")),
    "Pad": Row(along.read_pad),
    "RMSNormalization": norm("rms_norm", along.from_axis, 1, write="norm"),
    "SimplifiedLayerNormalization": norm("rms_norm", along.from_axis, 1, write="norm"),
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
    "Resize": Row(along.read_resize, write="resize"),
    "Softmax": Row(lambda view: along.read_softmax(view, "softmax")),
    "Upsample": Row(along.read_resize),
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
    "com.microsoft::SkipLayerNormalization": Row(lambda view: fused.read_skip_norm(view, "layer_norm", 4), separable=7),
    "com.microsoft::SkipSimplifiedLayerNormalization": Row(
        lambda view: fused.read_skip_norm(view, "rms_norm", 3), write="norm", separable=7
    ),
}
