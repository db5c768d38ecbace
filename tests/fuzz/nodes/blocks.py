"""Makers of blocks of several ops, of fused ops, of control flow, and of ops that the compiler does not know."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from tests.fuzz.builder import Builder, Held, Unfit, onnx_type
from tests.fuzz.nodes.maker import MICROSOFT, Maker


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
