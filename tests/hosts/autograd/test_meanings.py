"""The IR in torch against its definition in numpy: every op and every function, nothing missing, nothing extra."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tolerances import EXACT_F64, distance

from cmrc.hosts.autograd import functions, meanings
from cmrc.ir.ops import OPS
from cmrc.ir.ops.functions import ALONG, POINTWISE
from cmrc.ir.tensors import evaluate_op

CASES = 8
POSITIVE = {"log", "log1p", "sqrt", "rsqrt", "pow"}
LOGICAL = {"not", "and", "or"}
# What a function is tried with; a function that is not here has no options.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "cast": [{"dtype": "float32"}, {"dtype": "int64"}, {"dtype": "bool"}],
    "quantize": [{"dtype": "int8"}, {"dtype": "uint8"}],
    "dequantize": [{"dtype": "float32"}, {"dtype": "float32", "axis": 1, "block": 2}],
    "leaky_relu": [{}, {"alpha": 0.3}],
    "elu": [{}, {"alpha": 0.7, "gamma": 1.3, "input_scale": 2.0}],
    "celu": [{}, {"alpha": 0.7}],
    "selu": [{}, {"alpha": 1.1, "gamma": 0.9}],
    "quick_gelu": [{}, {"alpha": 1.1}],
    "softplus": [{}, {"beta": 2.0, "threshold": 1.0}],
    "hard_sigmoid": [{}, {"alpha": 0.4, "beta": 0.3}],
    "hard_swish": [{}, {"alpha": 0.4}],
    "threshold": [{"threshold": 0.2, "value": -0.3}],
    "thresholded_relu": [{}, {"alpha": 0.3}],
    "shrink": [{}, {"lambd": 0.3, "bias": 0.1}],
    "clip": [{}, {"min": -0.4}, {"max": 0.6}, {"min": -0.4, "max": 0.6}],
    "batch_norm": [{"eps": 1e-3}],
    **{name: [{}, {"alpha": -0.7}] for name in ("add", "sub", "rsub")},
    "addcmul": [{}, {"value": 0.4}],
    "fill": [{"value": 0.0}, {"value": 0.7}],
}
OPERANDS = {
    "where": 3, "addcmul": 3, "batch_norm": 5, "prelu": 2, "quantize": 3, "dequantize": 3,
    **dict.fromkeys(("add", "sub", "rsub", "mul", "div", "pow", "min", "max", "fmod", "equal", "not_equal", "greater",
                     "greater_equal", "less", "less_equal", "and", "or"), 2),
}  # fmt: skip


def agree(op: str, attrs: dict[str, Any], *operands: np.ndarray | None) -> None:
    """The same number, shape and kind; then that a gradient passes where the result has one."""
    expected = np.asarray(evaluate_op(op, attrs, *operands))
    tensors = [None if o is None else torch.from_numpy(np.array(o)) for o in operands]
    computed = meanings.MEANINGS[op](attrs, *tensors)
    assert distance(computed.numpy(), expected) <= EXACT_F64, (op, attrs)
    assert (computed.dtype in (torch.float32, torch.float64)) == (expected.dtype.kind == "f"), (op, attrs)


def test_every_op_and_function_with_a_meaning_has_one_in_torch() -> None:
    assert meanings.MEANINGS.keys() == {name for name, op in OPS.items() if op.meaning is not None}
    assert functions.POINTWISE.keys() == {name for name, f in POINTWISE.items() if f.meaning is not None}
    assert functions.ALONG.keys() == {name for name, f in ALONG.items() if f.meaning is not None}


@pytest.mark.parametrize("fn", POINTWISE)
def test_pointwise(fn: str) -> None:
    spec = POINTWISE[fn]
    tried = OPTIONS.get(fn, [{}])
    assert {name for options in tried for name in options} == {*spec.needs, *spec.options}, "an option is not tried"
    for seed in range(CASES):
        rng = np.random.default_rng(seed)
        for options in tried:
            operands: list[Any] = [rng.normal(0, 1.5, (3, 4)) for _ in range(OPERANDS.get(fn, 1))]
            if fn in POSITIVE:
                operands[0] = np.abs(operands[0]) + 0.1
            if fn in LOGICAL:
                operands = [operand > 0 for operand in operands]
            if fn == "where":
                operands[0] = operands[0] > 0
            if fn in ("quantize", "dequantize"):
                blocks = 2 if "block" in options else 4
                operands[1] = np.abs(operands[1][:, :blocks]) + 0.02
                operands[2] = None if seed == 1 else rng.integers(0, 5, (3, blocks))
            if fn == "batch_norm":
                operands[4] = np.abs(operands[4])
                operands[1] = None if seed == 1 else operands[1]
                operands[2] = None if seed == 2 else operands[2]
            if fn in ("equal", "not_equal", "greater_equal", "isinf", "isnan"):
                operands[0][0, 0] = np.inf if fn == "isinf" else np.nan if fn == "isnan" else operands[1][0, 0]
            if fn == "clip" and seed == 3:
                operands = [operands[0], np.array(-0.5), None]
            agree("pointwise", {"fn": fn, **options}, *operands)


def test_pointwise_aligns_its_operands() -> None:
    x, per_channel, scalar = np.random.default_rng(0).normal(size=(2, 3, 4, 5)), np.arange(3.0), np.array(0.5)
    agree("pointwise", {"fn": "mul", "align": (None, (1,))}, x, per_channel)
    agree("pointwise", {"fn": "add", "rank": 3}, np.ones((4, 5)), scalar)


POOL = {"kernel": (3, 2), "stride": (2, 1), "pad": ((1, 0), (0, 1)), "axes": (2, 3)}
POOLS = [{}, {"ceil": True}, {"dilation": (1, 2)}, {"dilation": (2, 1), "ceil": True}]
AVERAGES = [*POOLS, {"include_pad": True}, {"include_pad": True, "ceil": True}, {"divisor": 5}]
REDUCTIONS = [{"axes": (1,)}, {"axes": (0, 2), "drop": True}, {"axes": (2,), "drop": False}]
NORMS = [{"axes": (2,), "eps": 1e-5}, {"axes": (1, 2), "eps": 0.1}, {"axes": (1,), "eps": 1e-3}]
KNOWN = {"counts": (2, 4), "known": (1, 2), "centres": (0.5, -0.3), "squares": (0.0, 0.6)}
ALONGS: dict[str, tuple[tuple[int, ...], list[dict[str, Any]]]] = {
    **dict.fromkeys(("mean", "sum", "amax", "amin", "prod"), ((2, 3, 4), REDUCTIONS)),
    "max_pool": ((2, 3, 7, 6), [{**POOL, **more} for more in POOLS]),
    "avg_pool": ((2, 3, 7, 6), [{**POOL, **more} for more in AVERAGES]),
    "softmax": ((2, 3, 4), [{"axes": (1,)}, {"axes": (1, 2)}]),
    **dict.fromkeys(("layer_norm", "instance_norm", "rms_norm"), ((2, 3, 4), NORMS)),
    "group_norm": ((2, 6, 4), [{"axes": (1, 2), "eps": 1e-3, "groups": groups} for groups in (1, 3)]),
    "known_group_norm": ((2, 6, 4), [{"axes": (1, 2), "eps": 1e-3, **KNOWN}, {"axes": (1, 2), "eps": 0.1, **KNOWN, "counts": (3, 3)}]),
    "pick": ((2, 3, 4), [{"axes": (1,), "index": 2}, {"axes": (2,), "index": -1, "drop": True}]),
    "gather_elements": ((2, 3, 4), [{"axes": (1,)}]),
    "take": ((2, 3, 4), [{"axes": (2,)}]),
    "tile": ((2, 3), [{"axes": (0, 1), "times": (2, 3)}]),
    "pad": ((2, 3), [{"axes": (0, 1), "pads": ((1, 0), (2, 1)), "value": 0.5}, {"axes": (1,), "pads": ((0, 0), (0, -1)), "value": 0.0}]),
}  # fmt: skip


@pytest.mark.parametrize("fn", [name for name, function in ALONG.items() if function.meaning is not None])
def test_along(fn: str) -> None:
    shape, tried = ALONGS[fn]
    if fn == "pad":
        tried = tried[:1]  # numpy pads, it does not cut
    for seed in range(CASES):
        rng = np.random.default_rng(seed)
        for options in tried:
            x = rng.normal(0, 1.5, shape)
            more: list[np.ndarray] = []
            if fn.endswith("norm") and seed:
                size = {"group_norm": 6, "known_group_norm": 6 + 3}.get(fn, shape[2])
                weight, bias = rng.normal(size=size), rng.normal(size=size)
                more = [weight] if fn == "rms_norm" else [weight, bias]
            if fn == "gather_elements":
                more = [rng.integers(0, 3, (2, 5, 4))]
            if fn == "take":
                more = [rng.integers(0, 4, 5)]
            axis = 1 if "group" in fn else 2
            align = (
                {"align": (None, *((axis,) for _ in more))} if (fn.endswith("norm") or fn == "take") and more else {}
            )
            agree("along", {"fn": fn, **options, **align}, x, *more)


def convolutions() -> list[tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]]:
    plain = {"axis": 1, "stride": (2, 1), "pad": ((1, 0), (1, 2)), "dilation": (1, 2), "groups": 1}
    return [
        (plain, (2, 4, 7, 8), (6, 4, 3, 2)),
        ({**plain, "groups": 2}, (2, 4, 7, 8), (6, 2, 3, 2)),
        ({**plain, "groups": 4}, (2, 4, 7, 8), (8, 1, 3, 2)),
        ({**plain, "axis": 0}, (4, 7, 8), (6, 4, 3, 2)),
        ({**plain, "pad": "same_upper"}, (2, 4, 7, 8), (6, 4, 3, 2)),
        ({**plain, "pad": "same_lower"}, (2, 4, 7, 8), (6, 4, 3, 2)),
        ({"axis": 1, "stride": (2,), "pad": ((1, 1),), "dilation": (1,), "groups": 1}, (2, 4, 9), (3, 4, 3)),
        ({"axis": 1, "stride": (1, 2, 1), "pad": ((1, 1),) * 3, "dilation": (1,) * 3, "groups": 2}, (1, 4, 5, 5, 5), (4, 2, 3, 3, 3)),
        ({**plain, "transposed": True}, (2, 4, 5, 6), (4, 3, 3, 2)),
        ({**plain, "transposed": True, "groups": 2, "output_padding": (1, 1)}, (2, 4, 5, 6), (4, 3, 3, 2)),
        ({**plain, "transposed": True, "pad": "same_upper", "dilation": (1, 1), "axis": 0}, (4, 5, 6), (4, 3, 3, 2)),
    ]  # fmt: skip


def test_convolutions() -> None:
    rng = np.random.default_rng(0)
    for attrs, x, weight in convolutions():
        outs = weight[1] * attrs["groups"] if attrs.get("transposed") else weight[0]
        for bias in (None, rng.normal(size=outs)):
            agree("conv", attrs, rng.normal(size=x), rng.normal(size=weight), bias)


def test_linear() -> None:
    rng = np.random.default_rng(0)
    for axis, w_in, scale in [(2, 1, {}), (1, 0, {}), (0, 1, {"alpha": 0.5}), (2, 0, {"alpha": 2.0, "beta": 0.3})]:
        weight = rng.normal(size=(4, 6) if w_in == 0 else (6, 4))
        attrs = {"axis": axis, "w_in": w_in, "w_out": 1 - w_in, **scale}
        x = rng.normal(size=[4 if i == axis else 3 for i in range(3)])
        for bias in (None, rng.normal(size=6), rng.normal(size=(1, 6)), rng.normal(size=1)):
            agree("linear", attrs, x, weight, bias)


def test_attention() -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(2, 4, 5, 8)), rng.normal(size=(2, 4, 6, 8)), rng.normal(size=(2, 4, 6, 3))
    few_k, few_v = rng.normal(size=(2, 2, 6, 8)), rng.normal(size=(2, 2, 6, 3))
    mask, seen = rng.normal(size=(5, 6)), rng.normal(size=(2, 1, 5, 6)) > -1
    agree("attention", {"scale": 0.3}, q, k, v)
    agree("attention", {"scale": 0.3, "causal": True}, q, k, v)
    agree("attention", {"scale": 0.3, "causal": True, "past": True}, q, few_k, few_v)
    agree("attention", {"scale": 0.3}, q, k, v, mask)
    agree("attention", {"scale": 0.3}, q, k, v, seen)
    there = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    padding = {"scale": 0.3, "padding": -100.0}
    agree("attention", {**padding, "align": (None, None, None, None, (0, 3))}, q, k, v, None, there)
    agree("attention", {**padding, "align": (None, None, None, None, (0,))}, q, k, v, None, np.array([4, 6]))


def test_layout_and_what_folding_makes() -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(2, 6, 4)), rng.normal(size=(3, 6, 2))
    agree("matmul", {}, x, rng.normal(size=(4, 5)))
    agree("reshape", {"shape": (2, -1)}, x)
    agree("transpose", {"perm": (2, 0, 1)}, x)
    agree("concat", {"axis": 1}, x, x[:, :2])
    agree("expand", {"shape": (3, 2, 6, 4)}, x)
    agree("select", {"axis": 1, "keep": (4, 0, 1)}, x)
    agree("select", {"axis": 1, "keep": (2, 0), "period": 3}, x)
    agree("embedding", {}, np.array([[0, 2], [1, 1]]), rng.normal(size=(3, 5)))
    agree("embedding", {"tuples": True}, np.array([[[0], [2]]]), rng.normal(size=(3, 5)))
    agree("plane", {"axis": 1}, x)
    agree("do", {"axis": 1, "units": (5, 0)}, x, np.array([0.1, 0.2]))
    agree("do", {"axis": 1, "units": (5, 0)}, x, rng.normal(size=(1, 2, 4)))
    agree("do", {"axis": 1, "units": (5, 0), "parents": (1, 2, 3)}, x, np.array([0.1, 0.2]), rng.normal(size=(2, 3)))
    agree("do", {"axis": 1, "units": (0, 1, 2, 3), "parents": (4, 5)}, x, np.array(0.1), rng.normal(size=(2, 1)))
    agree("turn", {"axis": 1}, x, rng.normal(size=(2, 3, 3)))
    agree("turn", {"axis": 1}, x, rng.normal(size=(1, 6, 6)))
    agree("fold_columns", {"axis": 1, "units": (0, 5), "parents": (1, 2, 3)}, weight, rng.normal(size=(2, 3)))
    agree("fold_columns", {"axis": 1, "units": (0, 1, 4, 5), "parents": (2, 3)}, weight, rng.normal(size=(2, 1)))
    grouped = rng.normal(size=(4, 3, 2))
    agree(
        "fold_columns",
        {"axis": 1, "units": (0, 4), "parents": (1, 3, 5), "groups": 2},
        grouped,
        rng.normal(size=(2, 3)),
    )
    agree("weigh_columns", {"axis": 1, "units": (0, 5)}, weight, rng.normal(size=2))
    agree("weigh_columns", {"axis": 1, "units": (0, 5)}, weight, rng.normal(size=(2, 4)))
    agree("weigh_columns", {"axis": 1, "units": (0, 2, 4), "groups": 2}, grouped, rng.normal(size=3))
    agree("select_in_groups", {"keep": ((0, 2), (1, 2))}, grouped)


# Where the derivative jumps, or is zero, a difference quotient says nothing.
STEPS = {"sign", "floor", "ceil", "round", "cast", "fmod", "quantize", "fill"}


@pytest.mark.parametrize("fn", [fn for fn in POINTWISE if fn not in STEPS and fn not in LOGICAL])
def test_gradients_are_those_of_the_numpy_meaning(fn: str) -> None:
    options, count = OPTIONS.get(fn, [{}])[0 if fn == "dequantize" else -1], OPERANDS.get(fn, 1)
    rng = np.random.default_rng(1)
    operands = [np.abs(rng.normal(0, 1, 20)) + 0.15 for _ in range(count)]
    if np.asarray(evaluate_op("pointwise", {"fn": fn, **options}, *operands)).dtype.kind != "f":
        return
    at = 1 if fn == "where" else 0
    tensors = [torch.from_numpy(o).requires_grad_(i == at) for i, o in enumerate(operands)]
    meanings.MEANINGS["pointwise"]({"fn": fn, **options}, *tensors).sum().backward()
    step, moved = 1e-6, [list(operands), list(operands)]
    moved[0][at], moved[1][at] = operands[at] + step, operands[at] - step
    high, low = (np.asarray(evaluate_op("pointwise", {"fn": fn, **options}, *each)) for each in moved)
    gradient = tensors[at].grad
    assert gradient is not None
    assert distance(gradient.numpy(), (high - low) / (2 * step)) < 1e-7


def test_the_gradient_of_rounding_to_a_grid_is_that_of_the_line() -> None:
    x = torch.tensor([0.33, 1.2, 900.0], dtype=torch.float64, requires_grad=True)
    meanings.MEANINGS["pointwise"]({"fn": "quantize", "dtype": "int8"}, x, torch.tensor(0.5).double()).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0, 0.0]  # beyond the grid there is none
