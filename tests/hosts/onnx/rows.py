"""One small model for each row of the ONNX host's table of ops: the op under test stands between two convolutions."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from hosts.onnx.lowering import (
    ints,
    model,
    random,
)
from onnx import TensorProto, helper

from cmrc.hosts.onnx.host import OnnxHost
from cmrc.ir.graph import Array

W, B = random(8, 4, 1, 1, seed=1), random(8, seed=2)
CHANNELS = {
    "w": random(8, seed=3),
    "b": random(8, seed=4),
    "mean": random(8, seed=5),
    "var": random(8, seed=6) ** 2 + 0.5,
}
INTS = {f"i{n}".replace("-", "m"): np.asarray(n, dtype=np.int64) for n in (-1, 0, 1, 2, 3)}
ROWS: dict[str, tuple[str, dict[str, Any], int, bool]] = {}


def row(key: str, text: str, *, opset: int = 17, sinks: bool = True, **arrays: Any) -> None:
    ROWS[key] = (text, arrays, opset, sinks)


for op in [
    "Abs",
    "Ceil",
    "Celu",
    "Cos",
    "Elu",
    "Erf",
    "Exp",
    "Floor",
    "HardSigmoid",
    "HardSwish",
    "Identity",
    "LeakyRelu",
    "Neg",
    "Relu",
    "Round",
    "Selu",
    "Sigmoid",
    "Sign",
    "Sin",
    "Softplus",
    "Softsign",
    "Tanh",
    "ThresholdedRelu",
    "Dropout",
]:
    row(op, f"z = {op}(h)")
row("Mish", "z = Mish(h)", opset=18)
row("Swish", "z = Swish<alpha=1.5>(h)", opset=24)
row("Gelu", "z = Gelu(h)", opset=20)
row("Gelu tanh", 'z = Gelu<approximate="tanh">(h)', opset=20)
row("Shrink", "z = Shrink<lambd=0.3, bias=0.1>(h)")
row("Elu options", "z = Elu<alpha=0.3>(h)")
row("HardSigmoid options", "z = HardSigmoid<alpha=0.4, beta=0.1>(h)")
row("Sqrt of Abs", "a = Abs(h)\nz = Sqrt(a)")
row("Log of Exp", "a = Exp(h)\nz = Log(a)")
row("Reciprocal", "a = Exp(h)\nz = Reciprocal(a)")
row("Clip", "z = Clip(h, low, high)", low=np.float32(-0.5), high=np.float32(0.7))
row("Clip one side", "z = Clip(h, , high)", high=np.float32(0.7))
row("Clip attributes", "z = Clip<min=-0.5, max=0.7>(h)", opset=9)
row("PRelu", "z = PRelu(h, slope)", slope=random(8, 1, 1))
row("Add", "z = Add(h, c)", c=random(8, 1, 1))
row("Sub reversed", "z = Sub(c, h)", c=random(1, 8, 1, 1))
row("Mul scalar", "z = Mul(h, c)", c=np.float32(1.7))
row("Div by position", "z = Div(h, c)", c=random(6) ** 2 + 1)
row("Pow", "z = Pow(h, c)", c=np.float32(2.0))
row("Min", "z = Min(h, c)", c=random(8, 1, 1))
row("Max", "z = Max(h, c)", c=random(8, 1, 1))
row("Sum", "z = Sum(h, c)", c=random(8, 1, 1))
row("Mod", "z = Mod<fmod=1>(h, c)", c=np.float32(0.35))
row("x Sigmoid(x)", "a = Sigmoid(h)\nz = Mul(h, a)")
row("erf gelu", "a = Div(h, r)\nb = Erf(a)\nc = Add(b, one)\nd = Mul(h, c)\nz = Mul(d, half)",
    r=np.float32(2**0.5), one=np.float32(1), half=np.float32(0.5))  # fmt: skip
row("Where", "m = Greater(h, zero)\nz = Where(m, h, c)", zero=np.float32(0), c=random(8, 1, 1))
row("logic", "m = Less(h, one)\nn = GreaterOrEqual(h, zero)\no = And(m, n)\np = Not(o)\nq = Or(p, m)\nz = Cast<to=1>(q)",
    zero=np.float32(0), one=np.float32(1))  # fmt: skip
row("IsNaN", "m = IsNaN(h)\nz = Where(m, c, h)", c=np.float32(0))
row("IsInf", "m = IsInf(h)\nz = Where(m, c, h)", c=np.float32(0))
row("Range", "r = Range(i0, i3, i1)\nz = Gather<axis=1>(h, r)", **INTS)
row("Cast", "a = Cast<to=11>(h)\nz = Cast<to=1>(a)")
row("BatchNormalization", "z = BatchNormalization<epsilon=0.01>(h, w, b, mean, var)", **CHANNELS)
row("BatchNormalization 9", "z = BatchNormalization(h, w, b, mean, var)", opset=9, **CHANNELS)
row("ReduceMean", "a = ReduceMean<axes=[2,3]>(h)\nz = Add(a, h)")
row("ReduceMean 18", "z = ReduceMean(h, axes)", opset=18, axes=ints(-1, 2))
row("ReduceSum", "z = ReduceSum(h, axes)", axes=ints(3))
row("ReduceSum 9", "z = ReduceSum<axes=[3]>(h)", opset=9)
row("ReduceMax", "z = ReduceMax<axes=[3]>(h)")
row("ReduceMin", "z = ReduceMin<axes=[3]>(h)")
row("ReduceProd", "z = ReduceProd<axes=[3]>(h)")
row("ReduceL2", "z = ReduceL2<axes=[3]>(h)", sinks=False)
row("ReduceMean dropped", "a = ReduceMean<axes=[2,3], keepdims=0>(h)\nz = Unsqueeze(a, axes)", axes=ints(2, 3))
row("GlobalAveragePool", "z = GlobalAveragePool(h)")
row("GlobalMaxPool", "z = GlobalMaxPool(h)")
row("MaxPool", "z = MaxPool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>(h)")
row("MaxPool ceil", "z = MaxPool<kernel_shape=[3,3], strides=[2,2], ceil_mode=1>(h)")
row("MaxPool same", 'z = MaxPool<kernel_shape=[3,3], strides=[2,2], auto_pad="SAME_UPPER">(h)')
row("AveragePool", "z = AveragePool<kernel_shape=[3,3], pads=[1,1,1,1]>(h)")
row("AveragePool padded", "z = AveragePool<kernel_shape=[3,3], pads=[1,1,1,1], count_include_pad=1>(h)")
row("AveragePool same", 'z = AveragePool<kernel_shape=[2,2], auto_pad="SAME_LOWER">(h)')
row("LpPool", "z = LpPool<kernel_shape=[2,2]>(h)", sinks=False)
row("Softmax", "z = Softmax<axis=-1>(h)")
row("Softmax across", "z = Softmax<axis=1>(h)", sinks=False)
row("Softmax 11", "z = Softmax<axis=2>(h)", opset=11)
row("LogSoftmax", "z = LogSoftmax<axis=3>(h)", sinks=False)
row("LayerNormalization", "z = LayerNormalization<axis=2>(h, g, s)", g=random(6, 6), s=random(6, 6))
row("RMSNormalization", "z = RMSNormalization<axis=-1>(h, g)", opset=23, g=random(6))
row("InstanceNormalization", "z = InstanceNormalization(h, w, b)", w=CHANNELS["w"], b=CHANNELS["b"])
row("GroupNormalization", "z = GroupNormalization<num_groups=2>(h, w, b)", opset=21,
    w=CHANNELS["w"], b=CHANNELS["b"])  # fmt: skip
row("LpNormalization", "z = LpNormalization<axis=3>(h)", sinks=False)
row("Resize scales", "z = Resize(h, , scales)", scales=np.asarray([1, 1, 2, 2], np.float32))
row("Resize sizes", 'z = Resize<mode="linear">(h, , , sizes)', sizes=ints(2, 8, 9, 12))
row("Resize axes", "z = Resize<axes=[2,3]>(h, , , sizes)", opset=18, sizes=ints(9, 12))
row("Upsample", "z = Upsample(h, scales)", opset=9, scales=np.asarray([1, 1, 2, 2], np.float32))
row("Pad", "z = Pad(h, pads)", pads=ints(0, 0, 1, 0, 0, 0, 2, 1))
row("Pad value", "z = Pad(h, pads, value)", pads=ints(0, 0, 1, 0, 0, 0, 2, 1), value=np.float32(0.4))
row("Pad axes", "z = Pad(h, pads, , axes)", opset=18, pads=ints(1, 2), axes=ints(3))
row("Pad attributes", "z = Pad<pads=[0,0,1,0,0,0,2,1]>(h)", opset=9)
row("Pad reflect", 'z = Pad<mode="reflect">(h, pads)', pads=ints(0, 0, 1, 0, 0, 0, 2, 1))
row("Pad channels", "z = Pad(h, pads)", sinks=False, pads=ints(0, 1, 0, 0, 0, 1, 0, 0))
row("CumSum", "z = CumSum(h, i3)", sinks=False, **INTS)
row("ArgMax", "a = ArgMax<axis=3>(h)\nz = Cast<to=1>(a)", sinks=False)
row("Gather one", "a = Gather<axis=3>(h, im1)\nz = Unsqueeze(a, axes)", axes=ints(3), **INTS)
row("Gather some", "z = Gather<axis=1>(h, at)", at=ints(6, 1, -1, 3))
row("Gather positions", "z = Gather<axis=2>(h, at)", at=ints(4, 0, 1))
row(
    "GatherElements",
    "z = GatherElements<axis=2>(h, at)",
    at=np.random.default_rng(0).integers(0, 6, (2, 8, 3, 6)),
)
row("Tile", "z = Tile(h, times)", times=ints(1, 1, 2, 3))
row("Slice channels", "z = Slice(h, from, to, over)", **{"from": ints(1), "to": ints(-1), "over": ints(1)})
row(
    "Slice steps",
    "z = Slice(h, from, to, over, by)",
    **{"from": ints(-1), "to": ints(-100), "over": ints(1), "by": ints(-2)},
)
row("Slice positions", "z = Slice(h, from, to, over)", **{"from": ints(1, 0), "to": ints(5, 2), "over": ints(2, 3)})
row("Slice nothing", "z = Slice(h, from, to, over)", **{"from": ints(0), "to": ints(2**62), "over": ints(1)})
row("Slice attributes", "z = Slice<starts=[1], ends=[100], axes=[1]>(h)", opset=9)
row("Split", "a, b = Split<axis=1>(h, parts)\nz = Concat<axis=1>(b, a)", parts=ints(3, 5))
row("Split 11", "a, b = Split<axis=1>(h)\nz = Mul(a, b)", opset=11, sinks=False)
row("Split 18", "a, b, c = Split<axis=1, num_outputs=3>(h)\nz = Concat<axis=1>(c, a)", opset=18)
row("Split positions", "a, b = Split<axis=2>(h)\nz = Concat<axis=2>(b, a)")
row(
    "Reshape to blocks",
    "a = Reshape(h, to)\nb = Relu(a)\nz = Reshape(b, back)",
    to=ints(0, 4, 2, -1),
    back=ints(0, 8, 6, 6),
    sinks=False,
)
row("Reshape flat", "a = Reshape(h, to)\nz = Unsqueeze(a, axes)", to=ints(2, -1), axes=ints(2, 3))
row("Flatten", "a = Flatten(h)\nz = Unsqueeze(a, axes)", axes=ints(2, 3))
row("Squeeze", "a = Unsqueeze(h, axes)\nz = Squeeze(a, axes)", axes=ints(0))
row("Unsqueeze 11", "a = Unsqueeze<axes=[0]>(h)\nz = Squeeze<axes=[0]>(a)", opset=11)
row("Transpose", "a = Transpose<perm=[0,2,3,1]>(h)\nb = Relu(a)\nz = Transpose<perm=[0,3,1,2]>(b)")
row("Expand", "a = ReduceMean<axes=[3]>(h)\nz = Expand(a, to)", to=ints(2, 8, 6, 6))
row("Expand ones", "a = ReduceMean<axes=[3]>(h)\nz = Expand(a, to)", to=ints(1, 1, 5))
row("Concat", "a = Relu(h)\nz = Concat<axis=1>(a, h, c)", c=random(2, 3, 6, 6))
row("Concat positions", "a = Relu(h)\nz = Concat<axis=2>(a, h)")
row("Conv", "z = Conv<pads=[1,1,1,1]>(h, k, s)", k=random(5, 8, 3, 3), s=random(5))
row("Conv strided", "z = Conv<strides=[2,1], dilations=[1,2], pads=[0,1,2,3]>(h, k)", k=random(5, 8, 3, 2))
row("Conv same", 'z = Conv<auto_pad="SAME_UPPER", strides=[2,2]>(h, k)', k=random(5, 8, 3, 3))
row("Conv same lower", 'z = Conv<auto_pad="SAME_LOWER">(h, k)', k=random(5, 8, 2, 2))
row("Conv depthwise", "z = Conv<group=8, pads=[1,1,1,1]>(h, k, s)", k=random(8, 1, 3, 3), s=random(8))
row("Conv doubled", "z = Conv<group=8>(h, k)", k=random(16, 1, 2, 2))
row("Conv grouped", "z = Conv<group=2, pads=[1,1,1,1]>(h, k, s)", k=random(6, 4, 3, 3), s=random(6))
row(
    "ConvTranspose",
    "z = ConvTranspose<strides=[2,2], pads=[1,0,0,1], output_padding=[1,0]>(h, k, s)",
    k=random(8, 5, 3, 3),
    s=random(5),
)
row("ConvTranspose grouped", "z = ConvTranspose<group=4>(h, k)", k=random(8, 3, 2, 2), sinks=False)
row("MatMul left", "z = MatMul(k, h)", k=random(4, 6))
row("MatMul right", "z = MatMul(h, k)", k=random(6, 4))
row("unused constants", "z = Add(h, c)\nv = Constant<value_float=1.0>()", c=random(8, 1, 1))


def row_model(key: str) -> tuple[onnx.ModelProto, list[Array]]:
    """x -> Conv -> the op under test -> Conv, so that units of %h have an affine op before and after."""
    text, arrays, opset, _ = ROWS[key]
    start = model(f"h = Conv(x, W, B)\n{text}", {"x": (2, 4, 6, 6)}, "z", opset=opset, W=W, B=B, **arrays)
    shape = OnnxHost.from_model(start).graph.values()["z"].shape
    last = random(3, int(shape[1]), 1, 1, seed=9)
    text = f"h = Conv(x, W, B)\n{text}\ny = Conv(z, L)"
    whole = model(text, {"x": (2, 4, 6, 6)}, "y", opset=opset, W=W, B=B, L=last, **arrays)
    if not whole.graph.output[0].type.tensor_type.HasField("shape"):  # onnx infers nothing past a GroupNormalization
        whole.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, (2, 3, *shape[2:])))
    return whole, [random(2, 4, 6, 6, seed=7)]
