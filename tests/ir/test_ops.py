"""The evaluator against torch: convolutions of every kind, pools, activations, norms, attention."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ir.against_torch import agree, as_tensor, normal
from tolerances import EXACT_F64, distance

from cmrc.errors import GraphError
from cmrc.ir.graph import Apply, ArrayLiteral, Graph, Leaf, Node, Value, apply, literal, take
from cmrc.ir.ops import OPS, affine, attention, functions, layout
from cmrc.ir.ops.functions import ALONG, POINTWISE
from cmrc.ir.tensors import constant, evaluate_op, materialise
from cmrc.ir.verify import verify_graph

# ---------------------------------------------------------------- element by element

ACTIVATIONS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "abs": ({}, torch.abs),
    "atan": ({}, torch.atan),
    "ceil": ({}, torch.ceil),
    "celu": ({"alpha": 1.3}, lambda x: F.celu(x, 1.3)),
    "clip": ({"min": -0.5, "max": 0.8}, lambda x: torch.clamp(x, -0.5, 0.8)),
    "cos": ({}, torch.cos),
    "elu": ({"alpha": 0.7}, lambda x: F.elu(x, 0.7)),
    "erf": ({}, torch.erf),
    "exp": ({}, torch.exp),
    "expm1": ({}, torch.expm1),
    "floor": ({}, torch.floor),
    "gelu": ({}, F.gelu),
    "gelu_tanh": ({}, lambda x: F.gelu(x, approximate="tanh")),
    "hard_sigmoid": ({}, F.hardsigmoid),
    "hard_swish": ({}, F.hardswish),
    "identity": ({}, lambda x: x),
    "isinf": ({}, torch.isinf),
    "isnan": ({}, torch.isnan),
    "leaky_relu": ({"alpha": 0.2}, lambda x: F.leaky_relu(x, 0.2)),
    "log": ({}, torch.log),
    "log1p": ({}, torch.log1p),
    "log_sigmoid": ({}, F.logsigmoid),
    "mish": ({}, F.mish),
    "neg": ({}, torch.neg),
    "not": ({}, torch.logical_not),
    "quick_gelu": ({}, lambda x: x * torch.sigmoid(1.702 * x)),
    "reciprocal": ({}, torch.reciprocal),
    "relu": ({}, F.relu),
    "round": ({}, torch.round),
    "rsqrt": ({}, torch.rsqrt),
    "selu": ({}, F.selu),
    "shrink": ({"lambd": 0.4, "bias": 0.4}, lambda x: F.softshrink(x, 0.4)),
    "sigmoid": ({}, torch.sigmoid),
    "sign": ({}, torch.sign),
    "silu": ({}, F.silu),
    "sin": ({}, torch.sin),
    "softplus": ({"beta": 2.0, "threshold": 3.0}, lambda x: F.softplus(x, 2.0, 3.0)),
    "softsign": ({}, F.softsign),
    "sqrt": ({}, torch.sqrt),
    "fill": ({"value": 0.3}, lambda x: torch.full_like(x, 0.3)),
    "square": ({}, torch.square),
    "tanh": ({}, torch.tanh),
    "threshold": ({"threshold": 0.1, "value": 0.3}, lambda x: F.threshold(x, 0.1, 0.3)),
    "thresholded_relu": ({"alpha": 0.5}, lambda x: torch.where(x > 0.5, x, 0.0)),
    "cast": ({"dtype": "float32"}, lambda x: x.float()),
}
POSITIVE = {"log", "log1p", "sqrt", "rsqrt"}
PAIRS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "add": ({"alpha": 0.5}, lambda x, y: torch.add(x, y, alpha=0.5)),
    "sub": ({"alpha": 0.5}, lambda x, y: torch.sub(x, y, alpha=0.5)),
    "rsub": ({"alpha": 0.5}, lambda x, y: torch.rsub(x, y, alpha=0.5)),
    "mul": ({}, torch.mul),
    "div": ({}, torch.div),
    "pow": ({}, lambda x, y: torch.pow(torch.abs(x), y)),
    "min": ({}, torch.minimum),
    "max": ({}, torch.maximum),
    "fmod": ({}, torch.fmod),
    "prelu": ({}, lambda x, y: torch.where(x >= 0, x, y * x)),
    "equal": ({}, torch.eq),
    "not_equal": ({}, torch.ne),
    "greater": ({}, torch.gt),
    "greater_equal": ({}, torch.ge),
    "less": ({}, torch.lt),
    "less_equal": ({}, torch.le),
    "and": ({}, torch.logical_and),
    "or": ({}, torch.logical_or),
}


@pytest.mark.parametrize("fn", sorted(ACTIVATIONS))
def test_activation(fn: str) -> None:
    options, theirs = ACTIVATIONS[fn]
    x = np.linspace(-4.0, 4.0, 41)
    x = np.abs(x) + 0.1 if fn in POSITIVE else x
    with np.errstate(divide="ignore"):
        ours = evaluate_op("pointwise", {"fn": fn, **options}, x)
    finite = np.isfinite(ours)
    agree(np.asarray(ours, np.float64)[finite], theirs(torch.from_numpy(x))[torch.from_numpy(finite)].double())


@pytest.mark.parametrize("fn", sorted(PAIRS))
def test_pair(fn: str) -> None:
    options, theirs = PAIRS[fn]
    x, y = np.round(normal(4, 3, 2), 1), np.round(normal(3, 1, seed=1), 1) + 0.05 * (fn in ("div", "fmod"))
    x = np.abs(x) if fn == "pow" else x
    agree(
        evaluate_op("pointwise", {"fn": fn, **options}, x, y), theirs(torch.from_numpy(x), torch.from_numpy(y)).double()
    )


def test_every_function_is_compared() -> None:
    others = {"where", "batch_norm", "addcmul", "quantize", "dequantize"}
    assert set(POINTWISE) == set(ACTIVATIONS) | set(PAIRS) | others


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_quantize_and_dequantize(dtype: str) -> None:
    x, scale = normal(4, 3).astype(np.float32), np.asarray([0.01, 0.02, 0.005], np.float32)
    zero = np.asarray([3, 0, 100], dtype)
    low, high = (-128, 127) if dtype == "int8" else (0, 255)
    rounded = torch.fake_quantize_per_channel_affine(
        torch.from_numpy(x), torch.from_numpy(scale), torch.from_numpy(zero.astype(np.int32)), 1, low, high
    )
    align = (None, (1,), (1,))
    numbers = evaluate_op("pointwise", {"fn": "quantize", "dtype": dtype, "align": align}, x, scale, zero)
    back = evaluate_op("pointwise", {"fn": "dequantize", "dtype": "float32", "align": align}, numbers, scale, zero)
    assert low <= numbers.min() < numbers.max() <= high
    np.testing.assert_allclose(back, rounded.numpy(), rtol=1e-6)
    blocks = {"fn": "dequantize", "dtype": "float32", "axis": 0, "block": 2}
    wide = np.asarray([[0.1, 0.2, 0.3], [1.0, 2.0, 3.0]])
    np.testing.assert_allclose(evaluate_op("pointwise", blocks, numbers, wide), numbers * np.repeat(wide, 2, axis=0))


def test_where_and_clip_by_operands() -> None:
    x, y, low = normal(4, 3), normal(4, 3, seed=1), np.asarray([-0.1, 0.0, 0.1])
    agree(evaluate_op("pointwise", {"fn": "where"}, x > y, x, y), torch.from_numpy(np.maximum(x, y)))
    agree(evaluate_op("pointwise", {"fn": "clip"}, x, low, None), torch.from_numpy(np.maximum(x, low)))
    tensors = [torch.from_numpy(a) for a in (low, x, y)]
    agree(evaluate_op("pointwise", {"fn": "addcmul", "value": 0.6}, low, x, y), torch.addcmul(*tensors, value=0.6))


def test_batch_norm() -> None:
    x, (w, b, mean), var = normal(2, 3, 4, 5), normal(3, 3, seed=1), np.abs(normal(3, seed=2)) + 0.1
    attrs = {"fn": "batch_norm", "eps": 1e-3, "align": (None, (1,), (1,), (1,), (1,))}
    ours = evaluate_op("pointwise", attrs, x, w, b, mean, var)
    agree(ours, F.batch_norm(*map(torch.from_numpy, (x, mean, var, w, b)), eps=1e-3))
    bare = evaluate_op("pointwise", attrs, x, None, None, mean, var)
    agree(bare, F.batch_norm(*map(torch.from_numpy, (x, mean, var)), eps=1e-3))


# ---------------------------------------------------------------- along axes


def test_norms() -> None:
    x, w, b = normal(2, 3, 4, 5), normal(4, 5, seed=1), normal(4, 5, seed=2)
    tx, tw, tb = map(torch.from_numpy, (x, w, b))
    last = {"axes": (2, 3), "eps": 1e-3}
    agree(evaluate_op("along", {"fn": "layer_norm", **last}, x, w, b), F.layer_norm(tx, (4, 5), tw, tb, 1e-3))
    agree(evaluate_op("along", {"fn": "layer_norm", **last}, x), F.layer_norm(tx, (4, 5), eps=1e-3))
    agree(evaluate_op("along", {"fn": "rms_norm", **last}, x, w), F.rms_norm(tx, (4, 5), tw, 1e-3))
    w, b = normal(3, seed=1), normal(3, seed=2)
    aligned = {"fn": "instance_norm", "align": (None, (1,), (1,)), **last}
    agree(
        evaluate_op("along", aligned, x, w, b),
        F.instance_norm(tx, weight=torch.from_numpy(w), bias=torch.from_numpy(b), eps=1e-3),
    )


def test_group_norms() -> None:
    """One of all units, and one of those that are left of them: two units of the first group and one of the last are constant."""
    x, w, b = normal(2, 6, 4, 5), normal(6, seed=1), normal(6, seed=2)
    x[:, 1], x[:, 2], x[:, 4] = 0.7, -0.2, 1.5
    attrs, align = {"axes": (1, 2, 3), "eps": 1e-3}, {"align": (None, (1,), (1,))}
    whole, tensors = {"fn": "group_norm", "groups": 2, **attrs}, [torch.from_numpy(array) for array in (x, w, b)]
    agree(evaluate_op("along", {**whole, **align}, x, w, b), F.group_norm(tensors[0], 2, *tensors[1:], 1e-3))
    bare = F.group_norm(tensors[0], 2, eps=1e-3)
    agree(evaluate_op("along", whole, x), bare)
    about = {"counts": (1, 2), "known": (2, 1), "centres": (0.25, 1.5), "squares": (0.405, 0.0)}
    left = evaluate_op("along", {"fn": "known_group_norm", **attrs, **about}, x[:, [0, 3, 5]])
    agree(left[:, :3], bare[:, [0, 3, 5]])
    agree(left[:, 3] + 0.45 * left[:, 5], bare[:, 1])
    agree(left[:, 3] - 0.45 * left[:, 5], bare[:, 2])
    agree(left[:, 4], bare[:, 4])


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize(
    ("fn", "theirs"), [("mean", torch.mean), ("sum", torch.sum), ("amax", torch.amax), ("amin", torch.amin)]
)
def test_reductions(fn: str, theirs: Callable[..., torch.Tensor], drop: bool) -> None:
    x = normal(2, 3, 4)
    ours = evaluate_op("along", {"fn": fn, "axes": (0, 2), "drop": drop}, x)
    agree(ours, theirs(torch.from_numpy(x), dim=(0, 2), keepdim=not drop))


def test_other_functions_along_axes() -> None:
    x = normal(2, 3, 4)
    tx = torch.from_numpy(x)
    agree(evaluate_op("along", {"fn": "prod", "axes": (1,)}, x), torch.prod(tx, 1, keepdim=True))
    agree(evaluate_op("along", {"fn": "softmax", "axes": (1,)}, x), torch.softmax(tx, 1))
    agree(evaluate_op("along", {"fn": "pick", "axes": (1,), "drop": True, "index": 2}, x), tx[:, 2])
    agree(evaluate_op("along", {"fn": "tile", "axes": (0, 2), "times": (3, 1, 2)}, x), tx.repeat(3, 1, 2))
    index = np.random.default_rng(0).integers(0, 4, (2, 3, 5))
    gathered = torch.gather(tx, 2, torch.from_numpy(index))
    agree(evaluate_op("along", {"fn": "gather_elements", "axes": (2,)}, x, index), gathered)
    places = np.asarray([3, 0, 3])
    taken = evaluate_op("along", {"fn": "take", "axes": (2,), "align": (None, (2,))}, x, places)
    agree(taken, tx.index_select(2, torch.from_numpy(places)))
    padded = {"fn": "pad", "axes": (2,), "pads": ((0, 0), (0, 0), (1, 2)), "value": 0.5}
    agree(evaluate_op("along", padded, x), F.pad(tx, (1, 2), value=0.5))


def test_every_function_along_axes_is_compared() -> None:
    assert {name for name, function in ALONG.items() if function.meaning} == {"mean", "sum", "amax", "amin", "prod", "max_pool", "avg_pool", "softmax", "layer_norm",
                          "instance_norm", "rms_norm", "group_norm", "known_group_norm", "pick", "pad", "take", "tile", "gather_elements"}  # fmt: skip


# ---------------------------------------------------------------- the rest


def test_linear_along_any_axis() -> None:
    x, w, b = normal(2, 3, 4), normal(3, 5, seed=1), normal(5, seed=2)
    ours = evaluate_op("linear", {"axis": 1, "w_in": 0, "w_out": 1, "alpha": 0.5, "beta": 2.0}, x, w, b)
    theirs = (
        0.5 * torch.einsum("ncl,co->nol", torch.from_numpy(x), torch.from_numpy(w)) + 2.0 * torch.from_numpy(b)[:, None]
    )
    agree(ours, theirs)


@pytest.mark.parametrize(("causal", "masked"), [(False, "no"), (True, "no"), (False, "bias"), (False, "bool")])
def test_attention(causal: bool, masked: str) -> None:
    q, k, v = normal(2, 4, 3, 5), normal(2, 2, 3, 5, seed=1), normal(2, 2, 3, 6, seed=2)
    bias = normal(4, 3, 3, seed=3)
    mask = {"no": None, "bias": bias, "bool": (bias > 0) | np.eye(3, dtype=bool)}[masked]
    ours = evaluate_op("attention", {"scale": 0.3, "causal": causal}, q, k, v, mask)
    theirs = F.scaled_dot_product_attention(*map(as_tensor, (q, k, v)), attn_mask=as_tensor(mask), is_causal=causal, scale=0.3,
                                            enable_gqa=True)  # fmt: skip
    agree(ours, theirs)


def test_embedding_matmul_and_layout() -> None:
    table, ids, x, y = normal(5, 3), np.asarray([[0, 4], [2, 2]]), normal(2, 3, 4), normal(2, 4, 5, seed=1)
    agree(evaluate_op("embedding", {}, ids, table), F.embedding(torch.from_numpy(ids), torch.from_numpy(table)))
    agree(evaluate_op("matmul", {}, x, y), torch.from_numpy(x) @ torch.from_numpy(y))
    agree(evaluate_op("transpose", {"perm": (2, 0, 1)}, x), torch.from_numpy(x).permute(2, 0, 1))
    agree(evaluate_op("reshape", {"shape": (6, -1)}, x), torch.from_numpy(x).reshape(6, -1))
    agree(evaluate_op("concat", {"axis": 1}, x, x), torch.cat([torch.from_numpy(x)] * 2, 1))
    agree(evaluate_op("expand", {"shape": (4, 2, 3, 4)}, x), torch.from_numpy(x).expand(4, 2, 3, 4))
    agree(evaluate_op("select", {"axis": 1, "keep": (2, 0)}, x), torch.from_numpy(x)[:, [2, 0]])
    assert evaluate_op("plane", {"axis": 1}, x).shape == (1, 1, 4)
    assert evaluate_op("plane", {"axis": 0}, x).shape == (1, 3, 4)


@pytest.mark.parametrize("value", [0.5, [0.5, 0.6], [[[0.5], [0.6]]]])
def test_do_takes_one_number_or_one_a_unit_or_a_slab(value: Any) -> None:
    x = normal(2, 3, 4)
    y = evaluate_op("do", {"axis": 1, "units": (2, 0)}, x, np.asarray(value))
    expected = x.copy()
    expected[:, [2, 0]] = np.broadcast_to(np.asarray(value).reshape(-1, 1), (2, 1))
    assert np.array_equal(y, expected)


def test_affine_do_of_blocks() -> None:
    """Two units rebuilt from two parents, each a block of three positions."""
    x, mix = normal(2, 12), normal(2, 2, seed=1)
    y = evaluate_op(
        "do", {"axis": 1, "units": tuple(range(6)), "parents": tuple(range(6, 12))}, x, np.asarray(0.5), mix
    )
    rebuilt = np.einsum("sp,npr->nsr", mix, x[:, 6:].reshape(2, 2, 3)) + 0.5
    assert distance(y, np.concatenate([rebuilt.reshape(2, 6), x[:, 6:]], axis=1)) <= EXACT_F64


# ---------------------------------------------------------------- tensors


def test_materialise_keeps_the_dtype_and_moves_bytes_exactly() -> None:
    stored = np.asarray([[1, 2, 3], [4, 5, 6]], np.int64)
    leaf = Leaf("w", (2, 3), "int64", lambda: stored)
    taken = materialise(take(leaf, 1, (2, 0)))
    assert taken.dtype == np.int64
    assert taken.tolist() == [[3, 1], [6, 4]]
    assert take(leaf, 1, (0, 1, 2)) is leaf


def test_arithmetic_runs_in_float64_and_is_cast_once() -> None:
    stored = np.asarray([1.0, 2.0**-30], np.float32)
    leaf = Leaf("w", (2,), "float32", lambda: stored)
    one = apply("pointwise", (leaf, literal([1.0, 1.0])), {"fn": "add", "rank": 1}, (2,), "float32")
    back = apply("pointwise", (one, literal([1.0, 1.0])), {"fn": "sub", "rank": 1}, (2,), "float32")
    assert constant(back).tolist() == [1.0, 2.0**-30]  # a float32 sum in between would have lost it
    assert materialise(back).dtype == np.float32


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_narrow_dtypes(dtype: str) -> None:
    product = materialise(
        Apply("pointwise", (literal([1.0, 0.3]), literal(1.0)), {"fn": "mul", "rank": 1}, (2,), dtype)
    )
    assert product.dtype.name == dtype
    assert constant(ArrayLiteral(product)).dtype == np.float64


BROKEN = [
    (Node("linear", ("x", literal(normal(3, 4))), (Value("y", (2, 3)),), {"axis": 1, "w_in": 1, "w_out": 0}), [(2, 5), (3, 4)],
     "axis 1 has 5 units, the weight takes 4"),
    (Node("linear", ("x", literal(normal(3, 4)), literal(normal(2))), (Value("y", (2, 3)),), {"axis": 1, "w_in": 1, "w_out": 0}),
     [(2, 4), (3, 4), (2,)], "the bias has shape (2,) for 3 outputs"),
    (Node("linear", ("x", literal(normal(3, 4))), (Value("y", (2, 4)),), {"axis": 1, "w_in": 1, "w_out": 0}), [(2, 4), (3, 4)],
     "the result has shape (2, 4)"),
    (Node("conv", ("x", literal(normal(4, 2, 3))), (Value("y", (1, 4, 3)),), {"axis": 1, "groups": 2}), [(1, 3, 5), (4, 2, 3)],
     "the input has 3 channels, the weight takes 4"),
    (Node("conv", ("x", literal(normal(4, 2, 3))), (Value("y", (1, 3, 3)),), {"axis": 1, "groups": 2}), [(1, 4, 5), (4, 2, 3)],
     "the result has 3 channels, not 4"),
    (Node("pointwise", ("x", "y"), (Value("z", (2, 3)),), {"fn": "add"}), [(2, 3), (4,)],
     "an operand of shape (4,) does not fit the result (2, 3)"),
    (Node("concat", ("x", "y"), (Value("z", (2, 5)),), {"axis": 1}), [(2, 2), (2, 2)], "[2, 2] do not add up to 5"),
    (Node("select", ("x",), (Value("y", (2, 1)),), {"axis": 1, "keep": (3,)}), [(2, 3)], "positions out of 0..3"),
    (Node("do", ("x", literal(0.0)), (Value("y", (2, 3)),), {"axis": 1, "units": (3,)}), [(2, 3), ()], "units out of 0..3"),
    (Node("transpose", ("x",), (Value("y", (2, 3)),), {"perm": (1, 0)}), [(2, 3)], "the result does not have that permutation of axes"),
    (Node("transpose", ("x",), (Value("y", (3, 3)),), {"perm": (1, 1)}), [(3, 3)], "(1, 1) is not an order of 2 axes"),
    (Node("reshape", ("x",), (Value("y", (5,)),)), [(2, 3)], "(2, 3) cannot become (5,)"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("node", "shapes", "problem"), BROKEN, ids=[f"{n.op}-{i}" for i, (n, _, _) in enumerate(BROKEN)]
)
def test_checks_name_the_problem(node: Node, shapes: list[Any], problem: str) -> None:
    assert OPS[node.op].shape(node, shapes) == problem


# ---------------------------------------------------------------- specs

KINDS = {
    name: kind
    for family in (affine, attention, functions, layout)
    for name, kind in vars(family).items()
    if name.endswith("Attrs") and isinstance(kind, type)
}


def test_every_op_is_declared_once_and_whole() -> None:
    for name, op in OPS.items():
        assert op.attributes in KINDS.values(), name
        assert (op.meaning is None) == (name == "opaque"), name
        assert op.shape is not None or name in ("fold_columns", "weigh_columns", "select_in_groups"), name
        assert all(not p.repeated for p in op.operands[:-1]), name
        for part in (op.meaning, op.shape, op.work):
            assert part is None or part.__name__.startswith(f"{name}_") or name == "opaque", (
                name
            )  # found under the name of the op
    shaped = [op.shape for op in OPS.values() if op.shape is not None]
    assert len(set(shaped)) == len(shaped)  # no rule serves two ops
    assert {op.attributes for op in OPS.values()} == set(KINDS.values())


@pytest.mark.parametrize("op", ["pointwise", "along"])
def test_every_option_of_a_function_is_declared_and_taken(op: str) -> None:
    spec = OPS[op]
    for name, function in spec.functions.items():
        assert {*function.needs, *function.options} <= set(spec.classes), name
        assert not set(function.needs) & set(function.options), name
        if op == "pointwise" and function.meaning is not None and not isinstance(function.meaning, np.ufunc):
            signature = inspect.signature(function.meaning).parameters.values()
            named = {p.name for p in signature if p.kind is p.KEYWORD_ONLY or p.default not in (None, p.empty)}
            assert named == {*function.needs, *function.options}, name
            required = {p.name for p in signature if p.kind is p.KEYWORD_ONLY and p.default is p.empty}
            assert required == set(function.needs), name
        if op == "pointwise":
            assert function.affine_in == affine_operands(name), name


def affine_operands(fn: str) -> tuple[int, ...]:
    """The operands in which a function is affine, found by trying it on points of a line."""
    function = OPS["pointwise"].functions[fn]
    assert function.meaning is not None
    if fn == "cast":
        return (0,)
    count = {"where": 3, "batch_norm": 5, "addcmul": 3, "quantize": 2, "dequantize": 2}.get(fn, 2 if fn in PAIRS else 1)
    options: dict[str, Any] = {"eps": 0.1, "threshold": 0.3, "value": 0.7, "dtype": "int8"}
    chosen = {name: options.get(name, 0.5) for name in function.needs} | ({"min": -0.5} if fn == "clip" else {})
    base = [np.float64(0.83 - 0.11 * i) for i in range(count)]
    affine = []
    for i in range(count):
        line = np.linspace(-7.6, 7.6, 41) if fn not in ("pow", "log", "sqrt") else np.linspace(0.2, 3.0, 41)
        with np.errstate(all="ignore"):
            out = np.asarray(function.meaning(*[line if j == i else b for j, b in enumerate(base)], **chosen))
        straight = out.dtype.kind == "f" and np.allclose(out, np.interp(line, line[[0, -1]], out[[0, -1]]), atol=1e-12)
        if straight and (fn not in ("batch_norm", "prelu") or i == 0):  # the others are parameters
            affine.append(i)
    return tuple(affine)


def test_what_a_spec_does_not_declare_is_refused() -> None:
    attrs = {"axis": 1, "w_in": 1, "w_out": 0}
    weight = literal(normal(3, 4))
    for node, problem in [
        (Node("linear", ("x", weight), (Value("y", (2, 3)),), {**attrs, "touched": True}), "has an attribute 'touched'"),
        (Node("linear", ("x", weight), (Value("y", (2, 3)),), {"axis": 1, "w_in": 1}), "has no attribute 'w_out'"),
        (Node("linear", ("x", weight), (Value("y", (2, 3)),), {**attrs, "axis": "1"}), "its attribute 'axis' is '1'"),
        (Node("linear", ("x",), (Value("y", (2, 3)),), attrs), "has no operand 'weight'"),
        (Node("linear", ("x", weight, None, None), (Value("y", (2, 3)),), attrs), "has 4 operands, 3 are declared"),
        (Node("do", (weight, literal(0.0)), (Value("y", (3, 4)),), {"axis": 1, "units": (0,)}), "its operand 'x' is a tensor"),
        (Node("pointwise", ("x",), (Value("y", (2, 4)),), {"fn": "frobnicate"}), "there is no function 'frobnicate'"),
        (Node("pointwise", ("x",), (Value("y", (2, 4)),), {"fn": "relu", "alpha": 0.1}), "that 'relu' does not take"),
        (Node("along", ("x",), (Value("y", (2, 4)),), {"fn": "layer_norm", "axes": (1,)}), "has no attribute 'eps'"),
        (Node("along", ("x",), (Value("y", (2, 4)),), {"fn": "mean", "axes": (1,)}), "axis 1 is reduced"),
        (Node("along", ("x",), (Value("y", (2, 4)),), {"fn": "softmax", "axes": (2,)}), "acts over axes (2,)"),
        (Node("expand", ("x",), (Value("y", (2, 5)),)), "(2, 4) cannot be expanded to (2, 5)"),
        (Node("matmul", ("x", weight), (Value("y", (2, 4)),)), "(2, 4) and (3, 4) do not fit"),
        (Node("embedding", ("x", weight), (Value("y", (2, 4)),)), "the result has shape (2, 4)"),
        (Node("plane", ("x",), (Value("y", (2, 4)),), {"axis": 0}), "the result has shape (2, 4)"),
        (Node("fold_columns", ("x", weight), (Value("y", (2, 4)),)), "is not an op of the IR"),
    ]:  # fmt: skip
        with pytest.raises(GraphError) as error:
            verify_graph(Graph((Value("x", (2, 4)),), (node,), ("y",)))
        assert problem in str(error.value)
