"""Forms of fused ops and of Einsum: which are left whole, and which are products."""

from __future__ import annotations

import numpy as np
import pytest
from hosts.onnx.fused import (
    FFN,
    FFN_LEFT,
    HEADS,
    OUT,
    PROJECTIONS,
    SIZE,
    SOME,
    WIDTH,
    Case,
    heads,
    model,
    proved,
    random,
    sizes,
    stopped,
    tokens,
)

import cmrc
from cmrc.ir.graph import Array

FORMS: dict[str, tuple[str, str, dict[str, Array]]] = {
    # the reason, the node, its parameters
    "batch": ("it transposes the batch", "a = com.microsoft.FusedMatMul<transBatchA=1>(q, k)", {}),
    "constant left": ("its left operand is a constant", "a = com.microsoft.FusedMatMul(w, q)", {"w": random(5, 5)}),
    "three axes": (
        "its constant operand is not a matrix of a size that is known to match", "a = com.microsoft.FusedMatMul(q, w)",
        {"w": random(2, WIDTH, 4)},
    ),
    "activation": ("its activation is 'Gelu'", 'a = com.microsoft.FusedGemm<activation="Gelu">(z, w)', {"w": random(5, 4)}),
    "parameters": (
        "its activation 'LeakyRelu' has no parameters", 'a = com.microsoft.FusedGemm<activation="LeakyRelu">(z, w)',
        {"w": random(5, 4)},
    ),
    "mean of a skip norm": (
        "its other outputs are read too", "n, a = com.microsoft.SkipLayerNormalization(q, k, w)", {"w": random(WIDTH)},
    ),
    "scores": (
        "it outputs or caps its scores, or has lengths of its keys as an input",
        "a = Attention<q_num_heads=4, kv_num_heads=4, softcap=1.0>(q, k, v)", {},
    ),
    "odd heads": (
        "the number of its heads or their size is not known", "a = Attention<q_num_heads=3, kv_num_heads=4>(q, k, v)", {},
    ),
    "uneven heads": (
        "the number of its heads or their size is not known", "a = Attention<q_num_heads=2, kv_num_heads=4>(q, k, v)", {},
    ),
    "packed into one": (
        "its queries, keys and values are packed into one input", "a = com.microsoft.MultiHeadAttention<num_heads=4>(q)", {},
    ),
    "cache": (
        "it has a cache, or outputs its scores",
        "a, b, c = com.microsoft.MultiHeadAttention<num_heads=4>(q, k, v)\nd = Relu(b)", {},
    ),
    "lengths": (
        "its mask counts keys from both ends, or has an axis of heads",
        "a = com.microsoft.MultiHeadAttention<num_heads=4>(q, k, v, , w)", {"w": np.array([3, 4, 0, 0], dtype=np.int32)},
    ),
    "rotary inside": (
        "it has a cache, or rotary positions", "a = com.microsoft.Attention<num_heads=4, do_rotary=1>(q, w)",
        {"w": random(WIDTH, 3 * WIDTH)},
    ),
    "weight": (
        "its weight is not known to match", "a = com.microsoft.Attention<num_heads=4>(q, w)", {"w": random(3, 3 * WIDTH)},
    ),
    "bias at run time": (
        "its bias is computed at run time", "a = com.microsoft.Attention<num_heads=4>(q, w, z)",
        {"w": random(WIDTH, 3 * WIDTH)},
    ),
    "weight at run time": ("its weight is computed at run time", "a = com.microsoft.Attention<num_heads=4>(q, k)", {}),
    "sizes": (
        "the number of its heads or their size is not known",
        "a = com.microsoft.Attention<num_heads=4, qkv_hidden_sizes=[1,2,3]>(q, w)", {"w": random(WIDTH, 3 * WIDTH)},
    ),
    "scores of grouped queries": (
        "it outputs its scores",
        "a, b, c, d = com.microsoft.GroupQueryAttention<num_heads=4, kv_num_heads=4>(q, k, v, , , l, w)\ne = Relu(d)",
        {"w": np.array(5, dtype=np.int32)},
    ),
    "packed grouped queries": (
        "the number of its heads or their size is not known",
        "a = com.microsoft.GroupQueryAttention<num_heads=5, kv_num_heads=4>(q, , , , , l, w)",
        {"w": np.array(5, dtype=np.int32)},
    ),
    "rotary heads": (
        "the number of its heads or their size is not known", "a = RotaryEmbedding<num_heads=3>(q, c, s)",
        {"c": random(2, 5, 8), "s": random(2, 5, 8)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_a_form_that_is_left_whole_says_why(name: str) -> None:
    reason, text, arrays = FORMS[name]
    values = {"q": (5, WIDTH), "k": (5, WIDTH), "v": (5, WIDTH), "z": (5,)}
    feeds = {key: random(2, *shape) for key, shape in values.items()} | {"l": np.zeros(2, dtype=np.int32)}
    program = cmrc.trace(model(Case(text, "a", [], arrays, lambda n: feeds, {}, outputs="a", opset=23)))
    node = next(node for node in program.graph.nodes if "a" in {value.name for value in node.outputs})
    assert (node.op, node.marks.why) == ("opaque", reason)


# ---------------------------------------------------------------- Einsum

SPLIT = {"split": np.array([0, 0, HEADS, SIZE]), "joined": np.array([0, 0, WIDTH])}
ATTENTION = """q0 = MatMul(x, wq)
k0 = MatMul(x, wk)
v0 = MatMul(x, wv)
q = Reshape(q0, split)
k = Reshape(k0, split)
v = Reshape(v0, split)
scores = Einsum<equation="{scores}">(q, k)
p = Softmax(scores)
h = Einsum<equation="{values}">(p, v)
j = Reshape(h, joined)
y = MatMul(j, o)"""


@pytest.mark.parametrize(
    ("scores", "values"),
    [("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd"), (" b q h d , b k h d -> b h q k ", "b h q k, b k h d -> b q h d")],
)
def test_heads_leave_an_attention_of_einsums(scores: str, values: str) -> None:
    nodes = ATTENTION.format(scores=scores, values=values)
    case = Case(nodes, "j", heads(1, 3), {**PROJECTIONS, **OUT, **SPLIT}, tokens(5, WIDTH), {})
    lowered = proved(case)
    left = sizes(lowered)
    assert left["wq"] == left["wk"] == left["wv"] == (WIDTH, WIDTH // 2)
    assert [n.op_type for n in lowered.host.model.graph].count("Einsum") == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("equation", ["btd,df->btf", "...d,df->...f", "btd,df->tbf"])
def test_a_product_with_a_matrix_is_a_linear_map(equation: str) -> None:
    nodes = f"""h = Einsum<equation="btd,df->btf">(x, up)
    a = Relu(h)
    y = Einsum<equation="{equation}">(a, down)"""
    case = Case(nodes, "a", SOME, FFN, tokens(5, WIDTH), FFN_LEFT)
    if equation.endswith("tbf"):  # what is added would stand between the product and the transpose
        lowered, _ = stopped(case)
    else:
        lowered = proved(case)
        assert sizes(lowered).items() >= FFN_LEFT.items()
    assert lowered.graph.outputs == ("y",) or lowered.graph.outputs == ("y.bias",)


@pytest.mark.parametrize(
    ("equation", "reason"),
    [
        ("btd,bsd->bts", ""),
        ("btd,bsd->ts", "it is not a product of two operands that contracts one letter"),
        ("btd,bsd->btsd", "it is not a product of two operands that contracts one letter"),
        ("btd,bsd", "it does not have two operands, or does not name its result"),
    ],
)
def test_what_an_einsum_must_be(equation: str, reason: str) -> None:
    nodes = f"""d = MatMul(x, wq)
    e = MatMul(x, wk)
    y = Einsum<equation="{equation}">(d, e)"""
    case = Case(nodes, "d", SOME, PROJECTIONS, tokens(5, WIDTH), {})
    program = cmrc.trace(model(case))
    assert {node.marks.why for node in program.graph.nodes if node.origin == "y"} == {reason}
