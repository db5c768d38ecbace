"""The ONNX host: rows, identity, literal do's, lowering against clamping, saving, errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from cmrc.errors import CmrcError, FileError, HostError, TraceError
from cmrc.hosts.onnx.host import OnnxHost
from cmrc.ir.graph import Array, Graph, Node, Tensor, Value, literal
from cmrc.ir.ops import ALONG, MEANINGS, POINTWISE, materialise
from cmrc.ir.verify import verify_graph
from cmrc.passes import pipeline as passes
from cmrc.program.plan import Plan
from cmrc.program.program import trace

TOLERANCE = 1e-5  # of the output's scale: float32 sums in another order
MOVED = 1000 * TOLERANCE  # what a do must change for a comparison to mean anything
Shape = Sequence[int | str | None]


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Array:
    return (np.random.default_rng([seed, *shape]).normal(size=shape) * scale).astype(np.float32)


def model(
    nodes: str, inputs: dict[str, Shape], outputs: str, *, opset: int = 17, ir_version: int = 8, **arrays: Any
) -> onnx.ModelProto:
    """A model from lines of ONNX text; `arrays` are its initializers, the shapes of its outputs are inferred."""
    lines = [line.strip() for line in nodes.strip().splitlines()]
    graph = helper.make_graph(
        [parser.parse_node(line) for line in lines if line],
        "main",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs.split()],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)
    inferred = onnx.shape_inference.infer_shapes(made).graph.output
    del made.graph.output[:]
    made.graph.output.extend(inferred)
    return made


def put_do(
    graph: Graph, name: str, axis: int, units: Sequence[int], constants: Any, parents: Any = None, weight: Any = None
) -> Graph:
    """The graph with units of a value replaced for everyone who reads it."""
    value = graph.values()[name]
    new = Value(f"{name}.do", value.shape, value.dtype)
    slab = np.asarray(constants, dtype=np.float64)
    if slab.ndim < len(value.shape):
        slab = slab.reshape([-1 if i == axis else 1 for i in range(len(value.shape))])
    inputs: tuple[Any, ...] = (name, literal(slab))
    attrs: dict[str, Any] = {"axis": axis, "units": tuple(units), "sources": (0,)}
    if weight is not None:
        inputs, attrs["parents"] = (*inputs, literal(weight)), tuple(parents)
    do = Node("do", inputs, (new,), attrs)
    nodes = [do] if name in {v.name for v in graph.inputs} else []
    for node in graph.nodes:
        nodes.append(replace(node, inputs=tuple(new.name if o == name else o for o in node.inputs)))
        if name in {v.name for v in node.outputs}:
            nodes.append(do)
    edited = Graph(graph.inputs, tuple(nodes), tuple(new.name if o == name else o for o in graph.outputs))
    verify_graph(edited)
    return edited


def compare(
    host: OnnxHost, feeds: Sequence[Array], edited: Graph, *, residue: bool = False, moved: float = MOVED
) -> OnnxHost:
    """Lowered and clamped agree under onnxruntime, and the do matters."""
    clamped = host.build(edited)
    result = passes.run(edited)
    lowered = host.build(result.graph)
    full, expected, got = host.run(feeds), clamped.run(feeds), lowered.run(feeds)
    for a, b, c in zip(full, expected, got, strict=True):
        assert b.shape == c.shape == a.shape
        assert b.dtype == c.dtype == a.dtype
        scale = max(float(np.abs(b).max()), 1e-6)
        assert float(np.abs(b - c).max()) <= TOLERANCE * scale
        assert float(np.abs(a - b).max()) >= moved * scale
    assert bool(result.residue) == residue, [(r.node.name, r.stopped_at, r.reason) for r in result.residue]
    onnx.checker.check_model(onnx_ir.to_proto(lowered.model))
    assert lowered.graph.outputs == host.graph.outputs
    return lowered


def lower(
    host: OnnxHost, feeds: Sequence[Array], name: str, axis: int, units: Sequence[int], constants: Any, **more: Any
) -> OnnxHost:
    options = {key: more.pop(key) for key in ("residue", "moved") if key in more}
    return compare(host, feeds, put_do(host.graph, name, axis, units, constants, **more), **options)


def nodes_of(host: OnnxHost) -> list[str]:
    return [node.op_type for node in host.model.graph]


def sizes_of(host: OnnxHost) -> dict[str, list[int]]:
    return {name: list(value.shape.numpy()) for name, value in host.model.graph.initializers.items()}  # type: ignore[union-attr]


# ---------------------------------------------------------------- reading: every row means what onnxruntime does

W, B = random(8, 4, 1, 1, seed=1), random(8, seed=2)
CHANNELS = {
    "w": random(8, seed=3),
    "b": random(8, seed=4),
    "mean": random(8, seed=5),
    "var": random(8, seed=6) ** 2 + 0.5,
}
INTS = {f"i{n}".replace("-", "m"): np.asarray(n, dtype=np.int64) for n in (-1, 0, 1, 2, 3)}


def ints(*values: int) -> Array:
    return np.asarray(values, dtype=np.int64)


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
row("GroupNormalization", "z = GroupNormalization<num_groups=2>(h, w, b)", opset=21, sinks=False,
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


@pytest.mark.parametrize("key", ROWS)
def test_a_row_means_what_onnxruntime_computes(key: str) -> None:
    """Every IR node, evaluated on the values that onnxruntime gave it, gives the value that onnxruntime gave."""
    proto, feeds = row_model(key)
    host = OnnxHost.from_model(proto)
    verify_graph(host.graph)
    assert not [node.name for node in host.graph.nodes if node.op == "opaque"]
    names = list(host.graph.values())
    values = dict(zip(names, host.run(feeds, taps=names)[len(host.graph.outputs) :], strict=True))
    for node in host.graph.nodes:
        assert node.output.shape == values[node.name].shape
        assert node.output.dtype == values[node.name].dtype.name
        if node.attrs.get("fn") and node.attrs["fn"] not in (POINTWISE if node.op == "pointwise" else ALONG):
            continue
        attrs = {**node.attrs, "shape": node.output.shape}
        attrs = {k: v for k, v in attrs.items() if k != "shape"} if node.op == "pointwise" else attrs
        operands = [
            None if o is None else _float(values[o]) if isinstance(o, str) else _float(materialise(o))
            for o in node.inputs
        ]
        got = MEANINGS[node.op](attrs, *operands)
        np.testing.assert_allclose(got, values[node.name], rtol=2e-5, atol=2e-5, err_msg=node.name)


def _float(array: Array) -> Array:
    return array if array.dtype.kind in "biu" else array.astype(np.float64)


@pytest.mark.parametrize("key", ROWS)
def test_lowering_past_a_row_equals_clamping(key: str) -> None:
    proto, feeds = row_model(key)
    moved = 0.0 if key in ("Sign", "logic", "Floor", "Ceil", "Round") else MOVED
    units, constants = ((1, 4), (0.6, -0.8)) if "grouped" not in key else ((1, 3, 4, 5), (0.6, -0.8, 0.5, 0.3))
    host = OnnxHost.from_model(proto)
    lowered = lower(host, feeds, "h", 1, units, constants, residue=not ROWS[key][3], moved=moved)
    if ROWS[key][3]:
        assert sizes_of(lowered)["W"][0] <= 8 - len(units)


@pytest.mark.parametrize("key", ROWS)
def test_an_affine_do_past_a_row_equals_clamping(key: str) -> None:
    proto, feeds = row_model(key)
    host = OnnxHost.from_model(proto)
    edited = put_do(host.graph, "h", 1, (1, 4), (0.6, -0.8), parents=(0, 7), weight=random(2, 2))
    clamped, lowered = host.build(edited), host.build(passes.run(edited).graph)
    expected, got = clamped.run(feeds)[0], lowered.run(feeds)[0]
    assert np.abs(expected - got).max() <= TOLERANCE * max(1e-6, np.abs(expected).max())


# ---------------------------------------------------------------- reading: names, sizes, what is opaque


def test_an_unknown_op_is_opaque_and_says_why() -> None:
    made = model(
        """
        a = Relu(x)
        v, i = TopK<axis=1>(a, k)
        b = MatMul(v, three)
        t = Unique(b)
        y = Add(t, t)
        """,
        {"x": ("N", 8)}, "y", k=ints(4), three=random(4),
    )  # fmt: skip
    kinds = {
        node.name: (node.op, node.kind, node.attrs.get("why", "")) for node in OnnxHost.from_model(made).graph.nodes
    }
    assert kinds["v"] == ("opaque", "TopK", "")
    assert kinds["b"] == ("opaque", "MatMul", "one of its operands is a vector")
    assert kinds["t"] == ("opaque", "Unique", "")
    assert kinds["y"][0] == "pointwise"


def test_unknown_rank_makes_readers_opaque() -> None:
    made = model("a = Relu(x)\ny = Add(a, a)", {"x": (2, 3)}, "y")
    made.graph.input[0].type.tensor_type.ClearField("shape")
    made.graph.output[0].type.tensor_type.ClearField("shape")
    graph = OnnxHost.from_model(made).graph
    verify_graph(graph)
    assert [node.op for node in graph.nodes] == ["opaque", "opaque"]
    assert graph.nodes[0].attrs["why"] == "it reads a value whose number of axes is not known"


def test_constants_in_every_form_are_tensors() -> None:
    made = model(
        """
        w = Transpose<perm=[1,0]>(stored)
        s = Constant<value_ints=[0,2,4]>()
        alias = Identity(bias)
        h = MatMul(x, w)
        a = Add(h, alias)
        y = Reshape(a, s)
        """,
        {"x": ("N", 5)}, "y", stored=random(8, 5), bias=random(8),
    )  # fmt: skip
    host = OnnxHost.from_model(made)
    assert [(node.op, node.output.shape) for node in host.graph.nodes] == [
        ("linear", ("N", 8)), ("pointwise", ("N", 8)), ("reshape", ("N", 2, 4)),
    ]  # fmt: skip
    assert isinstance(host.graph.nodes[0].inputs[1], Tensor)
    assert set(host.graph.leaves()) == {"stored", "bias"}
    lowered = compare_relu_like(host, "x")
    assert "Transpose" not in nodes_of(lowered)


def compare_relu_like(host: OnnxHost, name: str) -> OnnxHost:
    """Replace units of an input, which nothing can shrink: the weight is folded all the same, a Slice stays."""
    return lower(host, [random(3, 5)], name, 1, (1, 2), (2.0, -3.0), residue=True)


def test_names_follow_scopes_of_the_exporter() -> None:
    made = model("h = Relu(x)\na = Tanh(h)\nb = Relu(a)\ny = Tanh(b)", {"x": ("N", 5)}, "y")
    for node, scopes in zip(made.graph.node, ("net.act", "net.act", "net.act", "net"), strict=True):
        parts = scopes.split(".")
        stack = ["", *(".".join(parts[: i + 1]) for i in range(len(parts))), f"fx_{node.output[0]}"]
        node.metadata_props.append(onnx.StringStringEntryProto(key="pkg.torch.onnx.name_scopes", value=str(stack)))
    made.graph.node[1].metadata_props[0].value = "['', 'net', 'fx_a']"
    host = OnnxHost.from_model(made)
    assert host.graph.nodes[0].path == "net.act"
    assert host.names["net.act"] == ["h", "b"]
    assert (host.names["net.act@0"], host.names["net.act@1"], host.names["net"]) == (["h"], ["b"], ["y"])


def test_names_follow_node_names_of_the_old_exporter() -> None:
    made = model("h = Relu(x)\ny = Tanh(h)", {"x": ("N", 5)}, "y")
    made.graph.node[0].name, made.graph.node[1].name = "/blocks.0/mlp/act/Relu", "Tanh_7"
    host = OnnxHost.from_model(made)
    assert [(node.origin, node.path) for node in host.graph.nodes] == [
        ("/blocks.0/mlp/act/Relu", "blocks.0.mlp.act"), ("Tanh_7", ""),
    ]  # fmt: skip
    assert host.names["blocks.0.mlp"] == host.names["/blocks.0/mlp/act/Relu"] == ["h"]


def test_values_that_subgraphs_read_are_seen_and_rewired() -> None:
    branch = helper.make_graph(
        [helper.make_node("Neg", ["a"], ["n"])],
        "then",
        [],
        [helper.make_tensor_value_info("n", TensorProto.FLOAT, None)],
    )
    other = helper.make_graph(
        [helper.make_node("Identity", ["a"], ["m"])],
        "else",
        [],
        [helper.make_tensor_value_info("m", TensorProto.FLOAT, None)],
    )
    graph = helper.make_graph(
        [
            helper.make_node("Relu", ["x"], ["a"]),
            helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
            helper.make_node("Cast", ["s"], ["c"], to=TensorProto.BOOL),
            helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=other),
        ],
        "main",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 4])],
    )
    host = OnnxHost.from_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    assert host.graph.nodes[-1].inputs == ("c", "a")
    clamped = host.build(put_do(host.graph, "a", 1, [2], [0.5]))
    np.testing.assert_array_equal(clamped.run([np.ones((3, 4), np.float32)])[0][:, 2], np.full(3, -0.5, np.float32))


def test_sizes_read_from_the_model_itself() -> None:
    """Fixed sizes become tensors, and stay what they were when the value that they came from shrinks."""
    made = model(
        """
        h = MatMul(x, w1)
        a = Relu(h)
        s = Shape(a)
        n = Gather(s, zero)
        c = Gather(s, two)
        n1 = Unsqueeze(n, at)
        c1 = Unsqueeze(c, at)
        to = Concat<axis=0>(n1, four, c1)
        b = MatMul(a, w2)
        y = Expand(b, to)
        """,
        {"x": ("N", 1, 5)}, "y", w1=random(5, 8), w2=random(8, 8), zero=np.int64(0), two=np.int64(2), at=ints(0), four=ints(4),
    )  # fmt: skip
    host = OnnxHost.from_model(made)
    shapes = [node for node in host.graph.nodes if node.kind == "Shape"]
    assert [node.attrs["shape_only"] for node in shapes] == [(0,)]
    assert host.graph.values()["y"].shape[1:] == (4, 8)
    lowered = lower(host, [random(3, 1, 5)], "a", 2, (0, 5), (1.5, 2.5))
    assert sizes_of(lowered)["w1"] == [5, 6]


@pytest.mark.parametrize(
    "lines",
    [
        "s = Shape(a)\nt = Slice(s, zero, two)\nto = Concat<axis=0>(t, rest)\nb = Reshape(a, to)\nz = Unsqueeze(b, last)",
        "s = Shape(a)\nt = Slice(s, zero, two)\nto = Concat<axis=0>(t, hw)\nz = Resize(a, , , to)",
        "s = Shape(a)\nn = Gather(s, i0)\nc = Gather(s, i1)\nn1 = Unsqueeze(n, zero)\nc1 = Unsqueeze(c, zero)\n"
        "to = Concat<axis=0>(n1, c1, rest)\nb = Reshape(a, to)\nz = Unsqueeze(b, last)",
    ],
)
def test_sizes_that_shape_the_value_itself_let_it_shrink(lines: str) -> None:
    """What torch writes for flatten(2) and for interpolate(size): the units' own axis is read, and the shape follows."""
    made = model(
        f"h = Conv(x, W, B)\na = Relu(h)\n{lines}\ny = Conv(z, L)", {"x": ("N", 4, 6, 6)}, "y",
        W=W, B=B, L=random(3, 8, 1, 1), zero=ints(0), two=ints(2), rest=ints(-1), hw=ints(9, 12), last=ints(3),
        i0=np.int64(0), i1=np.int64(1),
    )  # fmt: skip
    lowered = lower(OnnxHost.from_model(made), [random(2, 4, 6, 6)], "a", 1, (1, 4), (0.6, 1.8))
    assert sizes_of(lowered)["W"] == [6, 4, 1, 1]


def test_a_computed_target_is_followed_through_where_and_equal() -> None:
    made = model(
        """
        s = Shape(x)
        n = Gather(s, i0)
        n1 = Unsqueeze(n, zero)
        to = Concat<axis=0>(n1, minus, eight)
        ones = ConstantOfShape<value=int64[1]{1}>(three)
        negative = Mul(ones, minus)
        free = Equal(to, negative)
        at = Where(free, ones, to)
        y = Expand(token, at)
        """,
        {"x": ("N", 5)}, "y", i0=np.int64(0), zero=ints(0), minus=ints(-1), eight=ints(8), three=ints(3),
        token=random(1, 1, 8),
    )  # fmt: skip
    assert OnnxHost.from_model(made).graph.values()["y"].shape == ("N", 1, 8)


def test_attention_is_read_with_its_heads() -> None:
    made = model(
        "z = Attention<is_causal=1, scale=0.3>(q, k, v)\ny = Relu(z)",
        {"q": ("N", 4, 5, 6), "k": ("N", 2, 7, 6), "v": ("N", 2, 7, 3)}, "y", opset=23,
    )  # fmt: skip
    node = OnnxHost.from_model(made).graph.nodes[0]
    assert (node.op, node.output.shape, dict(node.attrs)) == (
        "attention", ("N", 4, 5, 3), {"scale": pytest.approx(0.3), "causal": True},
    )  # fmt: skip
    host = OnnxHost.from_model(made)
    feeds = [random(2, 4, 5, 6), random(2, 2, 7, 6), random(2, 2, 7, 3)]
    try:
        got = host.run(feeds, taps=["z"])[1]
    except HostError:
        pytest.skip("this onnxruntime has no Attention")
    np.testing.assert_allclose(MEANINGS["attention"](node.attrs, *feeds), got, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- identity


def test_building_the_graph_as_read_changes_nothing(tmp_path: Path) -> None:
    for key in ("Split", "Conv grouped", "Reshape flat", "BatchNormalization", "unused constants"):
        proto, _ = row_model(key)
        proto.graph.node[0].metadata_props.append(onnx.StringStringEntryProto(key="mine", value="kept"))
        proto.metadata_props.append(onnx.StringStringEntryProto(key="also", value="kept"))
        before = onnx_ir.to_proto(onnx_ir.from_proto(proto))
        host = OnnxHost.from_model(proto)
        built = host.build(host.graph)
        assert onnx_ir.to_proto(built.model).SerializeToString(deterministic=True) == before.SerializeToString(
            deterministic=True
        )
        for name, value in built.model.graph.initializers.items():
            assert value.const_value is host.model.graph.initializers[name].const_value


def test_the_users_model_is_never_changed() -> None:
    proto, feeds = row_model("Reshape flat")
    mine = onnx_ir.from_proto(proto)
    before = onnx_ir.to_proto(mine).SerializeToString(deterministic=True)
    host = OnnxHost.from_model(mine)
    lower(host, feeds, "h", 1, (1, 4), (0.6, -0.8))
    assert onnx_ir.to_proto(mine).SerializeToString(deterministic=True) == before
    assert onnx_ir.to_proto(host.model).SerializeToString(deterministic=True) == before


def test_untouched_nodes_and_initializers_stay_as_they_were() -> None:
    made = model(
        "h = MatMul(x, w1)\na = Relu(h)\nb = MatMul(a, w2)\nc = Tanh(b)\ny = MatMul(c, w3)",
        {"x": ("N", 5)}, "y", w1=random(5, 8), w2=random(8, 6), w3=random(6, 3),
    )  # fmt: skip
    for i, node in enumerate(made.graph.node):
        node.name = f"node{i}"
        node.metadata_props.append(onnx.StringStringEntryProto(key="mine", value=str(i)))
    host = OnnxHost.from_model(made)
    lowered = lower(host, [random(4, 5)], "a", 1, (1, 4), (0.6, 0.8))
    assert lowered.model.graph.initializers["w3"].const_value is host.model.graph.initializers["w3"].const_value
    kept = [
        (node.name, node.metadata_props) for node in lowered.model.graph if "cmrc.inserted" not in node.metadata_props
    ]
    assert kept == [(f"node{i}", {"mine": str(i)}) for i in range(5)]
    assert sizes_of(lowered) == {"w1": [5, 6], "w2": [6, 6], "w3": [6, 3], "w2.bias": [6]}


# ---------------------------------------------------------------- do's run literally


def mlp(**options: Any) -> OnnxHost:
    return OnnxHost.from_model(
        model(
            "h = Gemm<transB=1>(x, fc1, b1)\na = Relu(h)\ny = Gemm<transB=1>(a, fc2, b2)",
            {"x": ("N", 5)}, "y", fc1=random(8, 5), b1=random(8), fc2=random(3, 8), b2=random(3), **options,
        )
    )  # fmt: skip


def test_a_constant_do_runs_literally() -> None:
    host = mlp()
    x = random(4, 5)
    edited = put_do(host.graph, "a", 1, (6, 2), (0.5, -1.0))
    clamped = host.build(edited)
    before, after = host.run([x], taps=["a"])[1], clamped.run([x], taps=["a.do"])[1]
    before[:, [6, 2]] = 0.5, -1.0
    np.testing.assert_array_equal(after, before)
    where = next(node for node in clamped.model.graph if node.op_type == "Where")
    assert (where.name, where.metadata_props["cmrc.inserted"]) == ("cmrc.a.do", "do")


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_an_affine_do_runs_literally_on_every_axis(axis: int) -> None:
    host = OnnxHost.from_model(model("a = Relu(x)\ny = Neg(a)", {"x": (4, 5, 6, 7)}, "y"))
    weight, constants = random(2, 2), random(2)
    edited = put_do(host.graph, "a", axis, (3, 1), constants, parents=(0, 2), weight=weight)
    x = random(4, 5, 6, 7)
    got = host.build(edited).run([x], taps=["a.do"])[1]
    expected = MEANINGS["do"](edited.nodes[1].attrs, np.maximum(x, 0), edited.nodes[1].inputs[1].array, weight)  # type: ignore[union-attr]
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def test_an_affine_do_of_blocks_runs_literally() -> None:
    """A unit that became a block of three positions: each row of the weight serves three units."""
    host = OnnxHost.from_model(model("a = Relu(x)\ny = Neg(a)", {"x": ("N", 12, 2)}, "y"))
    weight, x = random(1, 2), random(2, 12, 2)
    edited = put_do(host.graph, "a", 1, (3, 4, 5), (0.1, 0.2, 0.3), parents=(0, 1, 2, 9, 10, 11), weight=weight)
    got = host.build(edited).run([x], taps=["a.do"])[1]
    expected = np.maximum(x, 0)
    expected[:, 3:6] = (
        weight[0, 0] * expected[:, :3] + weight[0, 1] * expected[:, 9:] + np.asarray([0.1, 0.2, 0.3])[None, :, None]
    )
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def test_a_select_of_every_run_runs_literally() -> None:
    """Samples and heads merged into one axis: heads 0 and 2 of every sample."""
    host = OnnxHost.from_model(model("r = Reshape(x, to)\ny = Neg(r)", {"x": ("N", 3, 4)}, "y", to=ints(-1, 4)))
    reshape, negate = host.graph.nodes
    assert reshape.output.shape == ("3*N", 4)
    part = Value("part", ("2*N", 4))
    select = Node("select", ("r",), (part,), {"axis": 0, "keep": (0, 2), "period": 3})
    smaller = replace(negate, inputs=("part",), outputs=(replace(negate.output, shape=part.shape),))
    edited = Graph(host.graph.inputs, (reshape, select, smaller), ("y",))
    verify_graph(edited)
    x = random(5, 3, 4)
    np.testing.assert_array_equal(host.build(edited).run([x])[0], -x[:, [0, 2]].reshape(10, 4))


def test_a_do_on_an_input_and_on_an_output() -> None:
    host = mlp()
    x = random(4, 5)
    got = host.build(put_do(host.graph, "x", 1, [2], [9.0])).run([x])[0]
    there = x.copy()
    there[:, 2] = 9.0
    np.testing.assert_allclose(got, host.run([there])[0], rtol=1e-6)
    clamped = host.build(put_do(host.graph, "y", 1, [1], [7.0]))
    assert [value.name for value in clamped.model.graph.outputs] == ["y"]
    assert (clamped.run([x])[0][:, 1] == 7.0).all()


def test_half_precision_do_runs() -> None:
    made = model("a = Relu(x)\ny = Neg(a)", {"x": ("N", 4)}, "y")
    for half in (TensorProto.FLOAT16, TensorProto.BFLOAT16):
        for value in (*made.graph.input, *made.graph.output):
            value.type.tensor_type.elem_type = half
        host = OnnxHost.from_model(made)
        x = np.ones((2, 4), dtype=onnx_ir.DataType(half).numpy())
        try:
            got = host.build(put_do(host.graph, "a", 1, [1], [3.0])).run([x])[0]
        except HostError as error:
            assert "onnxruntime refuses the model" in str(error)  # noqa: PT017
            continue
        assert got.dtype == x.dtype
        assert got.astype(np.float32).tolist() == [[-1, -3, -1, -1]] * 2


# ---------------------------------------------------------------- lowering whole models


def test_mlp_lowers_to_plain_smaller_gemms() -> None:
    lowered = lower(mlp(), [random(4, 5)], "a", 1, (6, 2), (0.5, -1.0))
    assert nodes_of(lowered) == ["Gemm", "Relu", "Gemm"]
    assert sizes_of(lowered) == {"fc1": [6, 5], "b1": [6], "fc2": [3, 6], "b2": [3]}


def test_gemm_without_bias_gains_one() -> None:
    made = model(
        "h = Gemm(x, w1)\na = Tanh(h)\ny = Gemm<alpha=0.5>(a, w2)",
        {"x": ("N", 5)},
        "y",
        w1=random(5, 8),
        w2=random(8, 3),
    )
    lowered = lower(OnnxHost.from_model(made), [random(4, 5)], "a", 1, (6, 2), (0.5, -1.0))
    assert sizes_of(lowered) == {"w1": [5, 6], "w2": [6, 3], "w2.bias": [3]}


def test_gemm_with_a_bias_of_two_axes_and_scales() -> None:
    made = model(
        "h = Gemm<alpha=2.0>(x, w1, b1)\na = Tanh(h)\ny = Gemm<alpha=0.5, beta=3.0>(a, w2, b2)",
        {"x": ("N", 5)}, "y", w1=random(5, 8), b1=random(1, 8), w2=random(8, 3), b2=random(1),
    )  # fmt: skip
    lowered = lower(OnnxHost.from_model(made), [random(4, 5)], "a", 1, (6, 2), (0.5, -1.0))
    assert sizes_of(lowered) == {"w1": [5, 6], "b1": [6], "w2": [6, 3], "b2": [3]}


def test_matmul_and_add_keep_their_ops() -> None:
    made = model(
        "h = MatMul(x, w1)\ng = Add(h, b1)\na = Relu(g)\no = MatMul(a, w2)\ny = Add(b2, o)",
        {"x": ("N", 7, 5)}, "y", w1=random(5, 8), b1=random(8), w2=random(8, 3), b2=random(3),
    )  # fmt: skip
    lowered = lower(OnnxHost.from_model(made), [random(4, 7, 5)], "a", 2, (6, 2), (0.5, -1.0))
    assert nodes_of(lowered) == ["MatMul", "Add", "Relu", "MatMul", "Add"]
    assert sizes_of(lowered) == {"w1": [5, 6], "b1": [6], "w2": [6, 3], "b2": [3]}


@pytest.mark.parametrize("spatial", [(6, 6), ("H", "W")])
@pytest.mark.parametrize("opset", [9, 17])
def test_conv_bn_relu_conv_with_a_border(spatial: Shape, opset: int) -> None:
    made = model(
        "h = Conv<pads=[1,1,1,1]>(x, k1)\nn = BatchNormalization(h, w, b, mean, var)\na = Relu(n)\ny = Conv<pads=[1,1,1,1]>(a, k2, b2)",
        {"x": ("N", 3, *spatial)}, "y", opset=opset, k1=random(8, 3, 3, 3), k2=random(4, 8, 3, 3), b2=random(4), **CHANNELS,
    )  # fmt: skip
    host = OnnxHost.from_model(made)
    lowered = lower(host, [random(2, 3, 6, 6)], "a", 1, (1, 5, 6), (1.5, 0.7, -2.0))
    assert sizes_of(lowered)["k1"] == [5, 3, 3, 3]
    assert ("ConstantOfShape" in nodes_of(lowered)) == (spatial != (6, 6))
    lower(host, [random(2, 3, 6, 6)], "h", 1, (1, 5, 6), (1.5, 0.7, -2.0))
    lower(host, [random(2, 3, 6, 6)], "n", 1, (1, 5), (1.5, 0.7), parents=(0, 2), weight=random(2, 2), residue=True)


@pytest.mark.parametrize("spatial", [(6, 6), ("H", "W")])
def test_depthwise_conv_shrinks_with_its_channels(spatial: Shape) -> None:
    """At a size known only at run time the constant channels are a plane that goes through copies of the nodes."""
    made = model(
        "h = Conv(x, k1)\na = Relu(h)\nd = Conv<group=8, pads=[1,1,1,1]>(a, k2, b2)\ne = Relu(d)\ny = Conv(e, k3)",
        {"x": ("N", 3, *spatial)}, "y", k1=random(8, 3, 1, 1), k2=random(8, 1, 3, 3), b2=random(8), k3=random(4, 8, 1, 1),
    )  # fmt: skip
    lowered = lower(OnnxHost.from_model(made), [random(2, 3, 6, 6)], "a", 1, (1, 5, 6), (1.5, 0.7, 0.2))
    assert sizes_of(lowered)["k2"] == [5, 1, 3, 3]
    groups = [n.attributes["group"].as_int() for n in lowered.model.graph if "group" in n.attributes]
    assert max(groups) == 5


def test_flatten_spreads_a_channel_over_a_block() -> None:
    made = model(
        "h = Conv(x, k1)\na = Relu(h)\nf = Flatten(a)\ny = Gemm<transB=1>(f, w, b)",
        {"x": ("N", 3, 4, 5)}, "y", k1=random(8, 3, 1, 1), w=random(6, 8 * 20), b=random(6),
    )  # fmt: skip
    host = OnnxHost.from_model(made)
    lowered = lower(host, [random(2, 3, 4, 5)], "a", 1, (1, 5), (1.5, 0.7))
    assert sizes_of(lowered)["w"] == [6, 6 * 20]
    lower(host, [random(2, 3, 4, 5)], "a", 1, (1, 5), (1.5, 0.7), parents=(0, 7), weight=random(2, 2))


@pytest.mark.parametrize("opset", [11, 13, 18])
def test_gated_mlp_with_a_split(opset: int) -> None:
    split = "g, u = Split<axis=2>(h)" if opset < 18 else "g, u = Split<axis=2, num_outputs=2>(h)"
    made = model(
        f"h = MatMul(x, w1)\n{split}\ns = Sigmoid(g)\nt = Mul(g, s)\na = Mul(t, u)\ny = MatMul(a, w2)",
        {"x": ("N", 7, 5)}, "y", opset=opset, w1=random(5, 16), w2=random(8, 3),
    )  # fmt: skip
    lowered = lower(OnnxHost.from_model(made), [random(4, 7, 5)], "a", 2, (6, 2), (0.5, -1.0))
    assert sizes_of(lowered)["w1"] == [5, 12]
    assert nodes_of(lowered).count("Split") == 1


def test_a_split_whose_parts_shrink_apart_becomes_slices() -> None:
    made = model(
        "h = MatMul(x, w1)\np, q, r = Split<axis=1>(h, sizes)\na = Relu(q)\nb = MatMul(a, w2)\nc = MatMul(h, w3)\nd = Concat<axis=1>(p, r, b, c)\ny = MatMul(d, w4)",
        {"x": ("N", 5)}, "y", sizes=ints(2, 4, 2), w1=random(5, 8), w2=random(4, 3), w3=random(8, 3), w4=random(10, 2),
    )  # fmt: skip
    lowered = lower(OnnxHost.from_model(made), [random(4, 5)], "a", 1, (0, 3), (0.5, 1.5))
    assert nodes_of(lowered).count("Split") == 0
    made = model(
        "h = MatMul(x, w1)\np, q, r = Split<axis=1>(h, sizes)\na = Relu(q)\nb = MatMul(a, w2)\nd = Concat<axis=1>(p, r)\nc = MatMul(d, w3)\ny = Add(b, c)",
        {"x": ("N", 5)}, "y", sizes=ints(2, 4, 2), w1=random(5, 8), w2=random(4, 3), w3=random(4, 3),
    )  # fmt: skip
    lowered = lower(OnnxHost.from_model(made), [random(4, 5)], "a", 1, (0, 1, 2, 3), (0.5, 1.5, 0.1, 0.2))
    split = next(node for node in lowered.model.graph if node.op_type == "Split")
    assert [value.name for value in split.outputs] == ["p", "r"]
    assert sizes_of(lowered)["w1"] == [5, 4]


def test_a_shared_initializer_is_never_edited() -> None:
    w = random(8, 8)
    made = model(
        "a = MatMul(x, w)\nb = Relu(a)\nc = MatMul(b, w)\nd = Relu(c)\ne = MatMul(d, w)\nf = Add(e, zero)\ny = Add(f, zero)",
        {"x": ("N", 8)}, "y", w=w, zero=random(8, scale=0.1),
    )  # fmt: skip
    host = OnnxHost.from_model(made)
    lowered = lower(host, [random(4, 8)], "d", 1, (3, 4), (0.5, 1.5))
    sizes = sizes_of(lowered)
    assert sizes["w"] == [8, 8]
    assert lowered.model.graph.initializers["w"].const_value is host.model.graph.initializers["w"].const_value
    assert sizes["w.cmrc1"] == [8, 6]
    assert sizes["w.cmrc2"] == [6, 8]


@pytest.mark.parametrize("computed", [False, True])
def test_reshapes_with_baked_sizes_are_patched(computed: bool) -> None:
    """Heads: (N, T, H*D) -> (N, T, H, D) -> (N, T, H*D); two of four heads go."""
    lines = """
        h = MatMul(x, w1)
        r = Reshape(h, heads)
        t = Transpose<perm=[0,2,1,3]>(r)
        a = Relu(t)
        u = Transpose<perm=[0,2,1,3]>(a)
        f = Reshape(u, flat)
        y = MatMul(f, w2)
    """
    arrays: dict[str, Any] = {"w1": random(5, 8), "w2": random(8, 3)}
    if computed:
        lines = (
            "s = Shape(x)\nn = Slice(s, i0, i1)\nheads = Concat<axis=0>(n, seven, four2)\nflat = Concat<axis=0>(n, seven8)\n"
            + lines
        )
        arrays |= {"i0": ints(0), "i1": ints(1), "seven": ints(7), "four2": ints(4, 2), "seven8": ints(7, 8)}
    else:
        arrays |= {"heads": ints(-1, 7, 4, 2), "flat": ints(0, 7, 8)}
    host = OnnxHost.from_model(model(lines, {"x": ("N", 7, 5)}, "y", **arrays))
    lowered = lower(host, [random(4, 7, 5)], "a", 1, (0, 2), (0.5, 1.5))
    assert sizes_of(lowered)["w1"] == [5, 4]
    assert sizes_of(lowered)["w2"] == [4, 3]


def test_an_initializer_that_is_also_an_input() -> None:
    made = model(
        "h = MatMul(x, w1)\na = Relu(h)\ny = MatMul(a, w2)", {"x": ("N", 5)}, "y", w1=random(5, 8), w2=random(8, 3)
    )
    made.ir_version = 3
    for tensor in made.graph.initializer:
        made.graph.input.append(helper.make_tensor_value_info(tensor.name, TensorProto.FLOAT, tensor.dims))
    made.opset_import[0].version = 9
    lowered = lower(OnnxHost.from_model(made), [random(4, 5)], "a", 1, (0, 2), (0.5, 1.5))
    assert {value.name for value in lowered.model.graph.inputs} == {"x", *lowered.model.graph.initializers}


def test_an_embedding_loses_columns() -> None:
    made = model(
        "e = Gather(table, ids)\na = Relu(e)\ny = MatMul(a, w)",
        {"ids": ("N", "T")},
        "y",
        table=random(11, 8),
        w=random(8, 3),
    )
    made.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    lowered = lower(OnnxHost.from_model(made), [np.asarray([[1, 2, 10], [0, 0, 3]])], "a", 2, (0, 2), (0.5, 1.5))
    assert sizes_of(lowered) == {"table": [11, 6], "w": [6, 3], "w.bias": [3]}


# ---------------------------------------------------------------- the exporter


def test_a_model_from_torch_lowers_by_module_path(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch import nn

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.act, self.fc2 = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)
            self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

        def forward(self, x: Any) -> Any:
            return self.head(self.norm(x + self.fc2(self.act(self.fc1(x)))))

    torch.manual_seed(0)
    batch = torch.export.Dim("batch")
    program = torch.onnx.export(
        Block().eval(), (torch.randn(2, 5, 8),), dynamo=True, dynamic_shapes=({0: batch},), verbose=False
    )
    program.save(tmp_path / "block.onnx")
    host = OnnxHost.load(tmp_path / "block.onnx")
    (name,) = host.names["act"]
    assert host.graph.values()[name].shape == ("batch", 5, 16)
    assert {node.path for node in host.graph.nodes} >= {"fc1", "act", "fc2", "norm", "head"}
    lowered = lower(host, [random(3, 5, 8)], name, 2, (1, 5, 9), (0.6, -0.2, 1.0), moved=MOVED / 10)
    assert not [node for node in lowered.model.graph if "cmrc.inserted" in node.metadata_props]


def test_heads_of_an_exported_attention_go_whole(tmp_path: Path) -> None:
    """torch writes attention with samples and heads merged into one axis, by sizes that it reads from the keys."""
    torch = pytest.importorskip("torch")
    from torch import nn

    class Attention(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: Any) -> Any:
            q, k, v = (f(x).view(x.shape[0], x.shape[1], 4, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            return self.out(mixed.transpose(1, 2).reshape(x.shape[0], x.shape[1], 16))

    torch.manual_seed(0)
    batch = torch.export.Dim("batch")
    program = torch.onnx.export(
        Attention().eval(), (torch.randn(2, 5, 16),), dynamo=True, dynamic_shapes=({0: batch},), verbose=False
    )
    program.save(tmp_path / "attention.onnx")
    host = OnnxHost.load(tmp_path / "attention.onnx")
    mixed = next(node.name for node in host.graph.nodes if node.name.startswith("scaled_dot_product"))
    lowered = lower(host, [random(3, 5, 16)], mixed, 1, (1, 2), (0.6, -0.2))
    weights = [size for size in sizes_of(lowered).values() if sorted(size) == [8, 16]]
    assert len(weights) == 4
    assert not [node for node in lowered.model.graph if "cmrc.inserted" in node.metadata_props]


# ---------------------------------------------------------------- annotations


def test_annotations_are_kept_in_order_and_dropped_by_build(tmp_path: Path) -> None:
    host = mlp()
    entries = [("a", {"units": [1], "n": 0}), ("x", {"units": [2], "n": 1}), ("a", {"units": [3], "n": 2})]
    marked = host.annotate(entries)
    assert marked.annotations() == [entry for _, entry in entries]
    assert host.annotations() == []
    relu = next(node for node in marked.model.graph if node.op_type == "Relu")
    assert json.loads(relu.metadata_props["cmrc.do"]) == [[0, "a", entries[0][1]], [2, "a", entries[2][1]]]
    marked.save(tmp_path / "m.onnx", {})
    again = OnnxHost.load(tmp_path / "m.onnx")
    assert again.annotations() == [entry for _, entry in entries]
    assert again.build(again.graph).annotations() == []
    with pytest.raises(HostError, match="no such value to annotate"):
        host.annotate([("nothing", {})])


# ---------------------------------------------------------------- saving


def external(tmp_path: Path) -> Path:
    made = model(
        "h = MatMul(x, w1)\na = Relu(h)\ny = MatMul(a, w2)", {"x": ("N", 50)}, "y", w1=random(50, 80), w2=random(80, 30)
    )
    path = tmp_path / "big.onnx"
    onnx.save(made, path, save_as_external_data=True, location="big.onnx.data", size_threshold=0)
    return path


def test_external_data_stays_external_and_mapped(tmp_path: Path) -> None:
    host = OnnxHost.load(external(tmp_path))
    assert isinstance(host.model.graph.initializers["w1"].const_value, onnx_ir.ExternalTensor)
    lowered = lower(host, [random(4, 50)], "a", 1, (3, 4), (5.0, 15.0))
    target = tmp_path / "small.onnx"
    lowered.save(target, {"cmrc.plan": "text"})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["big.onnx", "big.onnx.data", "small.onnx", "small.onnx.data"]
    again = OnnxHost.load(target)
    assert again.model.metadata_props["cmrc.plan"] == "text"
    np.testing.assert_array_equal(again.run([random(4, 50)])[0], lowered.run([random(4, 50)])[0])


def test_overwriting_the_model_that_is_being_read_is_safe(tmp_path: Path) -> None:
    path = external(tmp_path)
    x = random(4, 50)
    host = OnnxHost.load(path)
    lowered = host.build(passes.run(put_do(host.graph, "a", 1, (3, 4), (5.0, 15.0))).graph)
    expected = OnnxHost.load(path).run([x])[0], OnnxHost.from_model(lowered.model).run([x])[0]
    lowered.save(path, {})
    np.testing.assert_array_equal(OnnxHost.load(path).run([x])[0], expected[1])
    np.testing.assert_array_equal(host.run([x])[0], expected[0])
    lowered.save(path, {})
    np.testing.assert_array_equal(OnnxHost.load(path).run([x])[0], expected[1])


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(b"old")

    def fail(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cmrc.hosts.onnx.save.onnx_ir.save", fail)
    with pytest.raises(FileError, match=r"cannot write .*No space left on device"):
        (host := mlp()).save(path, {"plan": "p"})
    assert "plan" not in host.model.metadata_props
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]
    assert path.read_bytes() == b"old"


def test_saving_writes_metadata_that_the_model_in_memory_never_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = helper.make_function("own", "Twice", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 17)])  # fmt: skip
    made = model("y = MatMul(x, w)", {"x": ("N", 5)}, "y", w=random(5, 8))
    made.opset_import.append(helper.make_opsetid("own", 1))
    made.functions.append(function)
    made.producer_name, made.producer_version, made.domain = "someone", "2", "org.some"
    made.model_version, made.doc_string = 7, "what it is"
    onnx.helper.set_model_props(made, {"own": "1", "source": "before"})
    host, write, seen = OnnxHost.from_model(made), onnx_ir.save, []

    def watch(*args: Any, **options: Any) -> None:
        seen.append(dict(host.model.metadata_props))
        write(*args, **options)

    monkeypatch.setattr("cmrc.hosts.onnx.save.onnx_ir.save", watch)
    host.save(tmp_path / "m.onnx", {"source": "after", "plan": "p"})
    assert [*seen, dict(host.model.metadata_props)] == [{"own": "1", "source": "before"}] * 2
    saved = onnx.load(tmp_path / "m.onnx")
    assert {p.key: p.value for p in saved.metadata_props} == {"own": "1", "source": "after", "plan": "p"}
    for field in ("producer_name", "producer_version", "domain", "model_version", "doc_string", "ir_version"):
        assert getattr(saved, field) == getattr(made, field)
    assert list(saved.functions) == list(made.functions)


def test_a_large_model_runs_and_saves_through_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = mlp()
    expected = host.run([random(4, 5)])[0]
    monkeypatch.setattr("cmrc.hosts.onnx.save.LARGEST", 10)
    again = mlp()
    np.testing.assert_array_equal(again.run([random(4, 5)])[0], expected)
    again.save(tmp_path / "m.onnx", {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx"]  # nothing in it is worth a file of its own
    big = OnnxHost.from_model(model("y = MatMul(x, w)", {"x": ("N", 50)}, "y", w=random(50, 80)))
    big.save(tmp_path / "b.onnx", {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b.onnx", "b.onnx.data", "m.onnx"]
    x = random(4, 50)
    np.testing.assert_array_equal(OnnxHost.load(tmp_path / "b.onnx").run([x])[0], big.run([x])[0])


def test_a_provider_that_is_not_there_is_an_error() -> None:
    host = OnnxHost.from_model(mlp().model, providers=("NoSuchExecutionProvider",))
    with pytest.raises(HostError, match="onnxruntime cannot run on NoSuchExecutionProvider here"):
        host.run([random(4, 5)])
    both = OnnxHost.from_model(mlp().model, providers=("NoSuchExecutionProvider", "CPUExecutionProvider"))
    assert both.run([random(4, 5)])[0].shape == (4, 3)


# ---------------------------------------------------------------- errors


def message(error: pytest.ExceptionInfo[CmrcError], tmp_path: Path) -> str:
    return str(error.value).replace(str(tmp_path), "...")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError) as error:
        OnnxHost.load(tmp_path / "none.onnx")
    assert message(error, tmp_path) == (
        "trace: cannot read .../none.onnx: there is no such file\n  fix: give the path of an .onnx file"
    )


@pytest.mark.parametrize("content", [b"not a model at all", b"", b"\x08\x08\x12"])
def test_a_file_that_is_no_model(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "odd.onnx").write_bytes(content)
    with pytest.raises(
        TraceError, match=r"cannot read .*odd\.onnx: it (is not an ONNX model, or it is cut off|holds no ONNX graph)"
    ):
        OnnxHost.load(tmp_path / "odd.onnx")


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 0.99])
def test_a_truncated_file(tmp_path: Path, share: float) -> None:
    whole = onnx_ir.to_proto(mlp().model).SerializeToString()
    (tmp_path / "cut.onnx").write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(TraceError) as error:
        OnnxHost.load(tmp_path / "cut.onnx")
    assert message(error, tmp_path) == (
        "trace: cannot read .../cut.onnx: it is not an ONNX model, or it is cut off\n"
        "  fix: export or download it again; an .onnx file is a serialised ModelProto"
    )


def test_missing_or_short_external_data(tmp_path: Path) -> None:
    path = external(tmp_path)
    data = tmp_path / "big.onnx.data"
    data.write_bytes(data.read_bytes()[:1000])
    with pytest.raises(TraceError, match=r"external data file .*big\.onnx\.data is cut off: 1000 bytes"):
        OnnxHost.load(path)
    data.unlink()
    with pytest.raises(TraceError, match=r"external data file .*big\.onnx\.data does not exist"):
        OnnxHost.load(path)


def test_an_old_opset() -> None:
    made = model("y = Relu(x)", {"x": (2, 3)}, "y")
    made.opset_import[0].version = 8
    with pytest.raises(TraceError, match="opset 8, cmrc reads opset 9 and later"):
        _ = OnnxHost.from_model(made).graph


def test_nodes_out_of_order() -> None:
    made = model("a = Relu(x)\ny = Neg(a)", {"x": (2, 3)}, "y")
    nodes = list(made.graph.node)
    del made.graph.node[:]
    made.graph.node.extend(reversed(nodes))
    with pytest.raises(TraceError, match="the model cannot be read"):
        OnnxHost.from_model(made)


def test_wrong_inputs_and_taps() -> None:
    host = mlp()
    with pytest.raises(HostError, match="2 inputs were given, the model takes 1: x"):
        host.run([random(4, 5), random(4, 5)])
    with pytest.raises(HostError, match="input x is missing; the model has no input z"):
        host.run({"z": random(4, 5)})
    with pytest.raises(HostError, match="no such value to tap"):
        host.run([random(4, 5)], taps=["zebra"])
    with pytest.raises(HostError) as caught:
        host.run([random(4, 6)])
    assert "onnxruntime failed on inputs x float32[4, 6]: " in caught.value.reason
    assert "index: 1 Got: 6 Expected: 5" in caught.value.reason
    assert caught.value.fix == "the model takes x tensor(float)[N, 5]"
    x = random(4, 5)
    np.testing.assert_array_equal(host.run({"x": x}, taps=["x", "y"])[1], x)


def test_the_path_never_imports_torch(tmp_path: Path) -> None:
    mlp().save(tmp_path / "m.onnx", {})
    script = f"""
import sys
from cmrc.passes import pipeline as passes
from cmrc.hosts.onnx.host import OnnxHost
host = OnnxHost.load({str(tmp_path / "m.onnx")!r})
assert "onnxruntime" not in sys.modules
host.build(passes.run(host.graph).graph).save({str(tmp_path / "n.onnx")!r}, {{}})
import numpy
host.run([numpy.ones((1, 5), numpy.float32)])
assert "torch" not in sys.modules, "torch was imported"
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


def test_the_bodies_of_a_branch_hold_no_sites() -> None:
    """Everything inside `If`, as some exporters write it: said so, and not taken for a misspelt name."""
    body = parser.parse_graph("body () => (float[N] y) { y = Relu(x) }")
    node = helper.make_node("If", ["flag"], ["z"], name="choice", then_branch=body, else_branch=body)
    inputs = [
        helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N"]),
    ]
    output = helper.make_tensor_value_info("z", TensorProto.FLOAT, ["N"])
    graph = helper.make_graph([node], "branch", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    program = trace(model)
    assert program.sites() == []
    with pytest.raises(CmrcError) as error:
        Plan(program).do("relu", units=[0], constant=0.0)
    assert "no site is called 'relu'; what lies inside the bodies of choice (If) is no site" in str(error.value)
