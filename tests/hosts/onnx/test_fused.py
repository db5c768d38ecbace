"""Fused ops on the ONNX host: what goes through them, what they look like afterwards, and where they stay whole."""

from __future__ import annotations

import numpy as np
import pytest
from hosts.onnx.fused import (
    FFN,
    FFN_LEFT,
    HEADS,
    LENGTHS,
    OUT,
    PROJECT,
    PROJECTIONS,
    SCALES,
    SERVED,
    SIZE,
    SOME,
    TABLES,
    WIDTH,
    Case,
    Inputs,
    heads,
    mask,
    model,
    proved,
    random,
    sizes,
    stopped,
    tokens,
)
from tolerances import EXACT_F32, MOVES

import cmrc
from cmrc.hosts.onnx.ops.table import ROWS
from cmrc.ir.evaluate import evaluate

CASES: dict[str, Case] = {
    "BiasGelu": Case(
        "h = MatMul(x, up)\na = com.microsoft.BiasGelu(h, b)\ny = MatMul(a, down)",
        "a", SOME, {**FFN, "b": random(48)}, tokens(5, WIDTH), {**FFN_LEFT, "b": (40,)},
    ),
    "BiasGelu, before": Case(
        "h = MatMul(x, up)\na = com.microsoft.BiasGelu(h, b)\ny = MatMul(a, down)",
        "h", SOME, {**FFN, "b": random(48)}, tokens(5, WIDTH), {**FFN_LEFT, "b": (40,)},
    ),
    "FastGelu": Case(
        "h = MatMul(x, up)\na = com.microsoft.FastGelu(h, b)\ny = MatMul(a, down)",
        "a", SOME, {**FFN, "b": random(48)}, tokens(5, WIDTH), {**FFN_LEFT, "b": (40,)},
    ),
    "FastGelu, no bias": Case(
        "h = MatMul(x, up)\na = com.microsoft.FastGelu(h)\ny = MatMul(a, down)",
        "a", SOME, FFN, tokens(5, WIDTH), FFN_LEFT,
    ),
    "QuickGelu": Case(
        "h = MatMul(x, up)\na = com.microsoft.QuickGelu(h)\ny = MatMul(a, down)",
        "a", SOME, FFN, tokens(5, WIDTH), FFN_LEFT,
    ),
    "Gelu": Case(
        "h = MatMul(x, up)\na = com.microsoft.Gelu(h)\ny = MatMul(a, down)",
        "a", SOME, FFN, tokens(5, WIDTH), FFN_LEFT,
    ),
    "FusedMatMul": Case(
        "h = com.microsoft.FusedMatMul<alpha=0.5>(x, up)\na = Relu(h)\ny = com.microsoft.FusedMatMul<alpha=3.0, transB=1>(a, d)",
        "a", SOME, {"up": FFN["up"], "d": FFN["down"].T.copy()}, tokens(5, WIDTH),
        {"up": (WIDTH, 40), "d": (WIDTH, 40)},
    ),
    "FusedMatMul, transA": Case(
        "h = com.microsoft.FusedMatMul<transA=1>(x, up)\na = Relu(h)\ny = MatMul(a, down)",
        "a", SOME, FFN, tokens(WIDTH, 5), FFN_LEFT,
    ),
    "FusedMatMul of values": Case(
        PROJECT + """
        q4 = Reshape(q, apart)
        k4 = Reshape(k, apart)
        v4 = Reshape(v, apart)
        qt = Transpose<perm=[0,2,1,3]>(q4)
        kt = Transpose<perm=[0,2,1,3]>(k4)
        vt = Transpose<perm=[0,2,1,3]>(v4)
        s = com.microsoft.FusedMatMul<alpha=0.3, transB=1>(qt, kt)
        p = Softmax<axis=-1>(s)
        c = MatMul(p, vt)
        ct = Transpose<perm=[0,2,1,3]>(c)
        m = Reshape(ct, merged)
        y = MatMul(m, o)""".strip(),
        "m", heads(1, 2), {**PROJECTIONS, **OUT, "apart": np.array([0, 0, HEADS, SIZE]), "merged": np.array([0, 0, WIDTH])},
        tokens(5, WIDTH), {"wq": (WIDTH, 2 * SIZE), "wk": (WIDTH, 2 * SIZE), "wv": (WIDTH, 2 * SIZE), "o": (2 * SIZE, WIDTH)},
    ),
    "FusedGemm": Case(
        'h = com.microsoft.FusedGemm<activation="LeakyRelu", activation_alpha=0.2>(x, up, b)\ny = Gemm(h, down)',
        "h", SOME, {**FFN, "b": random(48)}, tokens(WIDTH), {**FFN_LEFT, "b": (40,)},
    ),
    "FusedConv": Case(
        'h = com.microsoft.FusedConv<activation="HardSigmoid", activation_params=[0.3, 0.4], kernel_shape=[1,1]>(x, w, b)\n'
        'g = com.microsoft.FusedConv<activation="Relu", kernel_shape=[1,1]>(h, u, c)\ny = Conv(g, u)',
        "h", [0, 5], {"w": random(8, 4, 1, 1), "b": random(8), "u": random(8, 8, 1, 1, seed=2), "c": random(8, seed=3)},
        tokens(4, 6, 6), {"w": (6, 4, 1, 1), "b": (6,), "u": (8, 8, 1, 1), "u.cmrc1": (8, 6, 1, 1), "c": (8,)},
    ),
    "FusedConv, depthwise": Case(
        'h = Conv(x, w)\nd = com.microsoft.FusedConv<activation="Clip", activation_params=[0.0, 6.0], group=8, '
        "kernel_shape=[3,3]>(h, k, b)\ny = Conv(d, u)",
        "d", [0, 5], {"w": random(8, 4, 1, 1), "k": random(8, 1, 3, 3), "b": random(8), "u": random(8, 8, 1, 1, seed=2)},
        tokens(4, 6, 6), {"w": (6, 4, 1, 1), "k": (6, 1, 3, 3), "b": (6,), "u": (8, 6, 1, 1)}, {"group": 6},
    ),
    "FusedConv, added": Case(
        'h = Conv(x, w)\ng = Conv(x, v)\ns = com.microsoft.FusedConv<activation="Relu", kernel_shape=[1,1]>(g, u, b, h)\n'
        "y = Conv(s, u)",
        "s", [0, 5],
        {"w": random(8, 4, 1, 1), "v": random(8, 4, 1, 1, seed=1), "u": random(8, 8, 1, 1, seed=2), "b": random(8)},
        tokens(4, 6, 6),
        {"w": (6, 4, 1, 1), "v": (8, 4, 1, 1), "u.cmrc1": (6, 8, 1, 1), "u.cmrc2": (8, 6, 1, 1), "b": (6,)},
    ),
    "SkipLayerNormalization": Case(
        """h = MatMul(x, up)
        a = com.microsoft.BiasGelu(h, b)
        d = MatMul(a, down)
        n, "", "", s = com.microsoft.SkipLayerNormalization<epsilon=0.00001>(d, x, gamma, beta, c)
        y = Add(n, s)""",
        "a", SOME, {**FFN, **SCALES, "b": random(48), "c": random(WIDTH, seed=6)}, tokens(5, WIDTH),
        {**FFN_LEFT, "b": (40,), "c": (WIDTH,), "gamma": (WIDTH,), "beta": (WIDTH,)},
    ),
    "SkipLayerNormalization, no bias": Case(
        """h = MatMul(x, up)
        a = Relu(h)
        d = MatMul(a, down)
        y = com.microsoft.SkipLayerNormalization(d, x, gamma)""",
        "a", SOME, {**FFN, "gamma": SCALES["gamma"]}, tokens(5, WIDTH),
        {**FFN_LEFT, "gamma": (WIDTH,), "down.bias": (WIDTH,)},
    ),
    "SkipSimplifiedLayerNormalization": Case(
        """h = MatMul(x, up)
        a = Relu(h)
        d = MatMul(a, down)
        n, "", "", s = com.microsoft.SkipSimplifiedLayerNormalization(d, x, gamma, c)
        y = Add(n, s)""",
        "a", SOME, {**FFN, "gamma": SCALES["gamma"], "c": random(WIDTH, seed=6)}, tokens(5, WIDTH),
        {**FFN_LEFT, "gamma": (WIDTH,), "c": (WIDTH,)},
    ),
    "SimplifiedLayerNormalization": Case(
        """n = SimplifiedLayerNormalization<axis=-1, epsilon=0.00001>(x, gamma)
        h = MatMul(n, up)
        a = Relu(h)
        y = MatMul(a, down)""",
        "a", SOME, {**FFN, "gamma": SCALES["gamma"]}, tokens(5, WIDTH), {**FFN_LEFT, "gamma": (WIDTH,)},
    ),
    "Attention, 3-D": Case(
        PROJECT + "a = Attention<q_num_heads=4, kv_num_heads=4, is_causal=1>(q, k, v)\ny = MatMul(a, o)",
        "a", heads(1, 2), {**PROJECTIONS, **OUT}, tokens(5, WIDTH),
        {"wq": (WIDTH, 2 * SIZE), "wk": (WIDTH, 2 * SIZE), "wv": (WIDTH, 2 * SIZE), "o": (2 * SIZE, WIDTH)},
        {"q_num_heads": 2, "kv_num_heads": 2}, opset=23,
    ),
    "Attention, 3-D, units of a value": Case(
        PROJECT + "a = Attention<q_num_heads=4, kv_num_heads=4>(q, k, v)\ny = MatMul(a, o)",
        "a", [head * SIZE + i for head in range(HEADS) for i in (1, 5)], {**PROJECTIONS, **OUT}, tokens(5, WIDTH),
        {"wq": (WIDTH, WIDTH), "wk": (WIDTH, WIDTH), "wv": (WIDTH, WIDTH - 8), "o": (WIDTH - 8, WIDTH)},
        {"q_num_heads": 4, "kv_num_heads": 4}, opset=23,
    ),
    "Attention, 3-D, grouped, with a mask": Case(
        PROJECT + "a = Attention<q_num_heads=4, kv_num_heads=2>(q, k, v, mask)\ny = MatMul(a, o)",
        "a", heads(2, 3), {**PROJECTIONS, **SERVED, **OUT, "mask": random(1, HEADS, 5, 5, scale=2.0)}, tokens(5, WIDTH),
        {"wq": (WIDTH, 2 * SIZE), "wk": (WIDTH, SIZE), "wv": (WIDTH, SIZE), "o": (2 * SIZE, WIDTH), "mask": (1, 2, 5, 5)},
        {"q_num_heads": 2, "kv_num_heads": 1}, opset=23,
    ),
    "Attention, 3-D, with a cache": Case(
        PROJECT + "a, pk, pv = Attention<q_num_heads=4, kv_num_heads=2, is_causal=1>(q, k, v, , kp, vp)\ny = MatMul(a, o)",
        "a", heads(0, 3), {**PROJECTIONS, **SERVED, **OUT},
        tokens(5, WIDTH, kp=lambda n: random(n, 2, 3, SIZE, seed=n), vp=lambda n: random(n, 2, 3, SIZE, seed=n + 7)),
        {"wq": (WIDTH, 2 * SIZE), "wk": (WIDTH, 2 * SIZE), "wv": (WIDTH, 2 * SIZE), "o": (2 * SIZE, WIDTH)},
        {"q_num_heads": 2, "kv_num_heads": 2}, outputs="y pk pv", opset=23,
    ),
    "RotaryEmbedding": Case(
        PROJECT + """
        qr = RotaryEmbedding<num_heads=4>(q, cos, sin, at)
        kr = RotaryEmbedding<num_heads=4>(k, cos, sin, at)
        a = Attention<q_num_heads=4, kv_num_heads=4>(qr, kr, v)
        y = MatMul(a, o)""".strip(),
        "a", heads(0), {**PROJECTIONS, **OUT, **TABLES}, tokens(5, WIDTH, at=lambda n: np.tile(np.arange(5), (n, 1))),
        {"wq": (WIDTH, 3 * SIZE), "wk": (WIDTH, 3 * SIZE), "wv": (WIDTH, 3 * SIZE), "o": (3 * SIZE, WIDTH)}, {"num_heads": 3, "q_num_heads": 3},
        opset=23, evaluated=False,
    ),
    "RotaryEmbedding, com.microsoft": Case(
        PROJECT + """
        qr = com.microsoft.RotaryEmbedding(q, at, cos, sin)
        kr = com.microsoft.RotaryEmbedding(k, at, cos, sin)
        a = com.microsoft.MultiHeadAttention<num_heads=4>(qr, kr, v)
        y = MatMul(a, o)""".strip(),
        "a", heads(0), {**PROJECTIONS, **OUT, **TABLES, "at": np.zeros(1, dtype=np.int64)}, tokens(5, WIDTH),
        {"wq": (WIDTH, 3 * SIZE), "wk": (WIDTH, 3 * SIZE), "wv": (WIDTH, 3 * SIZE), "o": (3 * SIZE, WIDTH)}, {"num_heads": 3}, evaluated=False,
    ),
    "MultiHeadAttention": Case(
        PROJECT + "a = com.microsoft.MultiHeadAttention<num_heads=4, unidirectional=1>(q, k, v, b)\ny = MatMul(a, o)",
        "a", heads(1, 2), {**PROJECTIONS, **OUT, "b": random(3 * WIDTH)}, tokens(5, WIDTH),
        {"wq": (WIDTH, 2 * SIZE), "wk": (WIDTH, 2 * SIZE), "wv": (WIDTH, 2 * SIZE), "o": (2 * SIZE, WIDTH), "b": (6 * SIZE,)}, {"num_heads": 2},
    ),
    "MultiHeadAttention, masks": Case(
        PROJECT + "a = com.microsoft.MultiHeadAttention<num_heads=4, scale=0.2>(q, k, v, , m, s)\ny = MatMul(a, o)",
        "a", heads(0, 3), {**PROJECTIONS, **OUT, "s": random(1, HEADS, 5, 5, scale=2.0)}, tokens(5, WIDTH, m=mask),
        {"wq": (WIDTH, 2 * SIZE), "wk": (WIDTH, 2 * SIZE), "wv": (WIDTH, 2 * SIZE), "o": (2 * SIZE, WIDTH), "s": (1, 2, 5, 5)}, {"num_heads": 2},
    ),
    "Attention, com.microsoft": Case(
        "a = com.microsoft.Attention<num_heads=4>(x, w, b, m)\ny = MatMul(a, o)",
        "a", heads(1, 2), {"w": random(WIDTH, 3 * WIDTH), "b": random(3 * WIDTH), **OUT}, tokens(5, WIDTH, m=mask),
        {"w": (WIDTH, 6 * SIZE), "b": (6 * SIZE,), "o": (2 * SIZE, WIDTH)}, {"num_heads": 2},
    ),
    "Attention, com.microsoft, lengths": Case(
        "a = com.microsoft.Attention<num_heads=4>(x, w, b, m)\ny = MatMul(a, o)",
        "a", heads(1, 2), {"w": random(WIDTH, 3 * WIDTH), "b": random(3 * WIDTH), **OUT},
        tokens(5, WIDTH, m=lambda n: (3 + np.arange(n) % 3).astype(np.int32)),
        {"w": (WIDTH, 6 * SIZE), "b": (6 * SIZE,), "o": (2 * SIZE, WIDTH)}, {"num_heads": 2},
    ),
    "Attention, com.microsoft, units of a value": Case(
        "a = com.microsoft.Attention<num_heads=4, unidirectional=1>(x, w, b)\ny = MatMul(a, o)",
        "a", [head * SIZE + i for head in range(HEADS) for i in (1, 5)],
        {"w": random(WIDTH, 3 * WIDTH), "b": random(3 * WIDTH), **OUT}, tokens(5, WIDTH),
        {"w": (WIDTH, 3 * WIDTH - 8), "b": (3 * WIDTH - 8,), "o": (WIDTH - 8, WIDTH)}, {"num_heads": 4, "qkv_hidden_sizes": [WIDTH, WIDTH, WIDTH - 8]},
    ),
    "GroupQueryAttention": Case(
        PROJECT + """
        a, pk, pv = com.microsoft.GroupQueryAttention<num_heads=4, kv_num_heads=2, do_rotary=1>(q, k, v, , , seqlens, total, cos, sin)
        y = MatMul(a, o)""".strip(),
        "a", heads(0, 1), {**PROJECTIONS, **SERVED, **OUT, **TABLES, "total": np.array(5, dtype=np.int32)},
        tokens(5, WIDTH, **LENGTHS),
        {"wq": (WIDTH, 2 * SIZE), "wk": (WIDTH, SIZE), "wv": (WIDTH, SIZE), "o": (2 * SIZE, WIDTH)}, {"num_heads": 2, "kv_num_heads": 1},
        evaluated=False,
    ),
    "GroupQueryAttention, packed": Case(
        """
        qkv = MatMul(x, w)
        a, pk, pv = com.microsoft.GroupQueryAttention<num_heads=4, kv_num_heads=2>(qkv, , , , , seqlens, total)
        y = MatMul(a, o)""",
        "a", heads(1, 2), {"w": random(WIDTH, 8 * SIZE), **OUT, "total": np.array(5, dtype=np.int32)},
        tokens(5, WIDTH, **LENGTHS), {"w": (WIDTH, 6 * SIZE), "o": (2 * SIZE, WIDTH)}, {"num_heads": 2, "kv_num_heads": 2},
        evaluated=False,
    ),
    "GroupQueryAttention, with a cache": Case(
        PROJECT + """
        a, pk, pv = com.microsoft.GroupQueryAttention<num_heads=4, kv_num_heads=2>(q, k, v, kp, vp, seqlens, total)
        y = MatMul(a, o)""".strip(),
        "a", heads(1, 2), {**PROJECTIONS, **SERVED, **OUT, "total": np.array(8, dtype=np.int32)},
        tokens(
            1, WIDTH, kp=lambda n: random(n, 2, 7, SIZE, seed=n), vp=lambda n: random(n, 2, 7, SIZE, seed=n + 7),
            seqlens=lambda n: np.full((n,), 7, dtype=np.int32),
        ),
        {"wq": (WIDTH, 2 * SIZE), "wk": (WIDTH, 2 * SIZE), "wv": (WIDTH, 2 * SIZE), "o": (2 * SIZE, WIDTH)},
        {"num_heads": 2, "kv_num_heads": 2}, outputs="y pk pv", evaluated=False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_replacements_fold_through_fused_ops(name: str) -> None:
    case = CASES[name]
    lowered = proved(case)
    widths = sizes(lowered)
    assert {key: widths.get(key) for key in case.left} == case.left
    ops = {node.op_type for node in lowered.host.model.graph}  # type: ignore[attr-defined]
    assert {node.op_type for node in cmrc.trace(model(case)).host.model.graph} <= ops  # type: ignore[attr-defined]
    written = {
        attribute: node.attributes[attribute].value
        for node in lowered.host.model.graph  # type: ignore[attr-defined]
        for attribute in case.attributes
        if attribute in node.attributes
    }
    assert {key: list(v) if isinstance(v, (list, tuple)) else v for key, v in written.items()} == case.attributes


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.evaluated])
def test_the_steps_of_a_fused_op_mean_what_onnxruntime_does(name: str) -> None:
    case = CASES[name]
    program = cmrc.trace(model(case))
    feeds = case.inputs(2)
    values = evaluate(program.graph, feeds)
    for output, value in zip(program.graph.outputs, program.host.run(feeds), strict=True):
        np.testing.assert_allclose(values[output], value, rtol=0, atol=3e-5 * float(np.abs(value).max()))


@pytest.mark.parametrize("op", ["SkipLayerNormalization", "SkipSimplifiedLayerNormalization"])
def test_the_default_epsilon_of_a_fused_norm(op: str) -> None:
    """Of numbers so small that epsilon decides what they become."""
    feeds: Inputs = {name: 1e-3 * random(2, 3, 8, seed=seed) for name, seed in (("x", 1), ("z", 2))}
    case = Case(f"y = com.microsoft.{op}(x, z, gamma)", "", (), {"gamma": random(8)}, lambda _: feeds, {})
    program = cmrc.trace(model(case))
    expected = program.host.run(feeds)[0]
    np.testing.assert_allclose(evaluate(program.graph, feeds)["y"], expected, atol=3e-5 * float(np.abs(expected).max()))


def test_every_fused_row_has_a_case() -> None:
    used = {
        f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        for case in CASES.values()
        for node in model(case).graph.node
    }
    elsewhere = {"QuantizeLinear", "DequantizeLinear", "MatMulNBits", "MatMulIntegerToFloat", "DynamicQuantizeMatMul"}
    ours = {name for name in ROWS if name.startswith("com.microsoft::")}
    ours -= {f"com.microsoft::{op}" for op in elsewhere}  # test_quantised.py has their cases
    assert ours | {"Attention", "RotaryEmbedding", "SimplifiedLayerNormalization"} <= used


# ---------------------------------------------------------------- where something would stay inside


def test_a_replaced_query_stays_in_front_of_the_attention() -> None:
    lowered, reason = stopped(CASES["MultiHeadAttention"], ("q", heads(1)))
    assert "%a (MultiHeadAttention)" in reason
    assert "queries or keys are replaced along an axis that is not their units'" in reason
    assert [node.op for node in lowered.graph.nodes if node.origin == "a"] == ["opaque"]


SKIPS = {
    "layer norm": "n = com.microsoft.SkipLayerNormalization(d, x, gamma, beta, c)\ny = MatMul(n, up)",
    "layer norm and sum": """n, "", "", s = com.microsoft.SkipLayerNormalization(d, x, gamma, beta, c)
    y = Add(n, s)""",
    "root mean square and sum": """n, "", "", s = com.microsoft.SkipSimplifiedLayerNormalization(d, x, gamma, c)
    y = Add(n, s)""",
}


def skip(name: str, *, opset: int = 23) -> Case:
    nodes = f"h = MatMul(x, up)\na = Relu(h)\nd = MatMul(a, down)\n{SKIPS[name]}"
    arrays = {**FFN, **SCALES, "c": random(WIDTH, seed=6)}
    return Case(nodes, "a", range(48), arrays, tokens(5, WIDTH), {}, opset=opset)


@pytest.mark.parametrize("name", SKIPS)
def test_a_branch_that_became_a_constant_leaves_an_addition_before_the_norm(name: str) -> None:
    lowered = proved(skip(name), constant=random(48, seed=9))
    ops = [node.op_type for node in lowered.host.model.graph]  # type: ignore[attr-defined]
    assert "down" not in sizes(lowered)
    assert not [op for op in ops if op.startswith("Skip")]
    norm = "RMSNormalization" if "root" in name else "LayerNormalization"
    assert ops == (["Add", norm, "Add"] if "sum" in name else ["Add", norm, "MatMul"])


@pytest.mark.parametrize("name", SKIPS)
def test_before_its_norm_was_an_op_it_is_spelled_out(name: str) -> None:
    lowered = proved(skip(name, opset=16), constant=random(48, seed=9))
    ops = [node.op_type for node in lowered.host.model.graph]  # type: ignore[attr-defined]
    centred = [] if "root" in name else ["ReduceMean", "Sub"]
    spelled = ["Add", *centred, "Mul", "ReduceMean", "Add", "Sqrt", "Div", "Mul", *([] if "root" in name else ["Add"])]
    assert ops == [*spelled, "Add" if "sum" in name else "MatMul"]


@pytest.mark.parametrize("op", ["SkipLayerNormalization", "SkipSimplifiedLayerNormalization"])
@pytest.mark.parametrize("opset", [16, 17, 23])
def test_units_of_both_sides_of_a_skip_norm_leave_it(op: str, opset: int) -> None:
    parameters = "gamma" if "Simplified" in op else "gamma, beta"
    nodes = f"""d = MatMul(x, wq)
    e = MatMul(x, wk)
    n, "", "", s = com.microsoft.{op}<epsilon=0.3>(d, e, {parameters})
    p = MatMul(n, o)
    q = MatMul(s, o)
    y = Add(p, q)"""
    case = Case(nodes, "d", SOME, {**PROJECTIONS, **OUT, **SCALES}, tokens(5, WIDTH), {}, opset=opset)
    program = cmrc.trace(model(case))
    plan = cmrc.Plan(program).do("d", units=SOME, constant=random(8, seed=9)).do("e", units=SOME, constant=0.3)
    lowered = cmrc.lower(program, plan, growth="allow")  # one weight is read twice
    for batch in (2, 3):
        check = lowered.check(case.inputs(batch))
        assert check.error <= EXACT_F32
        assert check.moved >= MOVES * EXACT_F32
    left = WIDTH - len(SOME)
    carriers = 1 if "Simplified" in op else 2
    assert sizes(lowered)["wq"] == sizes(lowered)["wk"] == (WIDTH, left)
    assert {(left, WIDTH), (left + carriers, WIDTH)} <= set(sizes(lowered).values())


@pytest.mark.parametrize("opset", [17, 23])
def test_both_sides_of_a_skip_norm_at_zero_leave_it(opset: int) -> None:
    """Whether the node stays whole or comes apart: fewer units, and another epsilon."""
    nodes = """d = MatMul(x, wq)
    e = MatMul(x, wk)
    n = com.microsoft.SkipSimplifiedLayerNormalization<epsilon=0.3>(d, e, gamma)
    y = MatMul(n, o)"""
    arrays = {**PROJECTIONS, **OUT, "gamma": SCALES["gamma"]}
    case = Case(nodes, "d", SOME, arrays, tokens(5, WIDTH), {}, opset=opset)
    program = cmrc.trace(model(case))
    plan = cmrc.Plan(program).do("d", units=SOME, constant=0.0).do("e", units=SOME, constant=0.0)
    lowered = cmrc.lower(program, plan)
    for batch in (2, 3):
        check = lowered.check(case.inputs(batch))
        assert check.error <= EXACT_F32
        assert check.moved >= MOVES * EXACT_F32
    left = sizes(lowered)
    assert left["wq"] == left["wk"] == (WIDTH, WIDTH - len(SOME))
    assert left["gamma"] == (WIDTH - len(SOME),)


def test_part_of_a_head_is_gathered_behind_the_attention() -> None:
    case = CASES["Attention, 3-D"]
    _, reason = stopped(case, ("a", [0, 1, 2]))
    assert "the units do not fill whole positions of any axis of ['N', 5, 4, 16]" in reason


def test_a_key_value_head_in_a_cache_that_is_returned_stays() -> None:
    case = CASES["Attention, 3-D, with a cache"]
    lowered, reason = stopped(case, ("a", heads(0, 1)))
    assert "%a (Attention)" in reason
    assert "the whole value is an output of the model" in reason
    assert sizes(lowered)["o"] == (2 * SIZE, WIDTH)
    lowered, reason = stopped(CASES["GroupQueryAttention, with a cache"], ("a", heads(0, 1)))
    assert "the whole value is an output of the model" in reason


def test_units_of_a_value_stay_where_values_must_be_as_wide_as_queries() -> None:
    units = [head * SIZE + i for head in range(HEADS) for i in (1, 5)]
    _, reason = stopped(CASES["GroupQueryAttention"], ("a", units))
    assert "its values have the size of its queries" in reason


def test_a_value_that_its_own_node_reads_on_is_no_site() -> None:
    program = cmrc.trace(model(CASES["SkipLayerNormalization"]))
    assert "s" not in {site.name for site in program.sites(folds=False)}
    with pytest.raises(cmrc.CmrcError) as error:
        program.site_of("s", None)
    assert str(error.value) == (
        "site: %n (SkipLayerNormalization): 's' is inside a fused node, which reads it itself, so it cannot be replaced\n"
        "  fix: name a value before or after it, or trace the model as it was before SkipLayerNormalization was fused"
    )


PADDED = "pads=[1,1,1,1], kernel_shape=[3,3]"
CHANNELS = {
    "w": random(8, 4, 3, 3), "b": random(8), "u": random(8, 8, 3, 3, seed=2, scale=0.1), "c": random(8, seed=3),
    "v": random(5, 8, 1, 1),
}  # fmt: skip


@pytest.mark.parametrize(
    "activation",
    ['"Relu"', '"Tanh"', '"Sigmoid"', '"LeakyRelu", activation_params=[0.2]', '"Clip", activation_params=[-0.5, 0.5]',
     '"HardSigmoid", activation_params=[0.3, 0.4]'],
)  # fmt: skip
@pytest.mark.parametrize("size", [6, 0], ids=["fixed", "any size"])
def test_a_fused_convolution_comes_apart_where_a_plane_is_added(activation: str, size: int) -> None:
    """Constants under zero padding add a plane between the convolution and its activation."""
    case = Case(
        f"h = com.microsoft.FusedConv<activation={activation}, {PADDED}>(x, w, b)\n"
        f"g = com.microsoft.FusedConv<activation={activation}, {PADDED}>(h, u, c)\ny = Conv(g, v)",
        "h", [0, 5], CHANNELS, tokens(4, 6, 6), {},
    )  # fmt: skip
    proto = model(case)
    if not size:
        for dim in proto.graph.input[0].type.tensor_type.shape.dim[2:]:
            dim.dim_param = "S"
    program = cmrc.trace(proto)
    lowered = cmrc.lower(program, cmrc.Plan(program).do("h", units=[0, 5], constant=[0.7, -1.2]))
    for x in (random(2, 4, 6, 6), *([] if size else [random(1, 4, 7, 7)])):
        check = lowered.check({"x": x})
        assert check.error <= EXACT_F32
        assert check.moved >= MOVES * EXACT_F32
    ops = [node.op_type for node in lowered.host.model.graph]  # type: ignore[attr-defined]
    assert ops.count("FusedConv") == 1
    assert sizes(lowered)["w"] == (6, 4, 3, 3)
    assert sizes(lowered)["u"] == (8, 6, 3, 3)
    again = cmrc.trace(lowered.host.model)  # type: ignore[attr-defined]
    assert [v.name for v in again.graph.inputs] == ["x"]
    assert again.graph.outputs == ("y",)
