"""Weights that an ONNX model computes from constants are parameters: they fold, and stay as they are where nothing changes."""

from __future__ import annotations

import numpy as np
import pytest
from hosts.onnx.lowering import ints, lower, model, nodes_of, random, sizes_of

import cmrc
from cmrc.errors import DoError
from cmrc.hosts.onnx.host import OnnxHost

STANDARDISED = """
mean = ReduceMean<axes=[1,2,3], keepdims=1>(w1)
centred = Sub(w1, mean)
square = Mul(centred, centred)
variance = ReduceMean<axes=[1,2,3], keepdims=1>(square)
deviation = Sqrt(variance)
weight = Div(centred, deviation)
"""
WEIGHTS = {
    "standardised": (STANDARDISED, random(8, 4, 3, 3)),
    "normalised": (
        "norm = ReduceL2<axes=[1,2,3], keepdims=1>(w1)\ndirection = Div(w1, norm)\nweight = Mul(direction, gain)",
        random(8, 4, 3, 3),
    ),
    "transposed": ("weight = Transpose<perm=[1,0,2,3]>(w1)", random(4, 8, 3, 3)),
    "reshaped": ("weight = Reshape(w1, shape)", random(8, 36)),
    "in halves": ("half = Slice(w1, zeros, fours, zeros)\nweight = Concat<axis=0>(half, half)", random(8, 4, 3, 3)),
    "a product": ("flat = MatMul(left, w1)\nweight = Reshape(flat, shape)", random(6, 36)),
}


def convolutions(lines: str, w1: np.ndarray) -> OnnxHost:
    arrays = {
        "gain": random(8, 1, 1, 1, seed=3), "shape": ints(8, 4, 3, 3), "zeros": ints(0), "fours": ints(4),
        "left": random(8, 6, seed=5), "w2": random(5, 8, 1, 1, seed=2), "b1": random(8, seed=4),
    }  # fmt: skip
    text = f"{lines}\nh = Conv(x, weight, b1)\na = Relu(h)\ny = Conv(a, w2)"
    return OnnxHost.from_model(model(text, {"x": ("N", 4, 6, 6)}, "y", w1=w1, **arrays))


@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_weight_that_is_made_of_constants_folds(kind: str) -> None:
    host = convolutions(*WEIGHTS[kind])
    lowered = lower(host, [random(2, 4, 6, 6, seed=7)], "a", 1, [0, 3, 5], [0.4, -0.3, 0.8])
    assert {(5, 5, 1, 1), (5, 4, 3, 3)} <= {tuple(size) for size in sizes_of(lowered).values()}
    assert nodes_of(lowered) == ["Conv", "Relu", "Conv"]


def test_an_unchanged_weight_stays_an_expression() -> None:
    lines, w1 = WEIGHTS["standardised"]
    host = convolutions(f"{lines}\nz = Conv(x, w1)", w1)
    lowered = lower(host, [random(2, 4, 6, 6, seed=7)], "y", 1, [1], [0.3], residue=True)
    assert nodes_of(lowered)[: len(nodes_of(host))] == nodes_of(host)


def test_a_filled_weight_is_not_stored() -> None:
    """As in the models that ship with onnx."""
    lines = "w1 = ConstantOfShape<value=float[1] {0.01}>(s1)\nh = MatMul(x, w1)\na = Add(h, b)\ny = MatMul(a, w2)"
    arrays = {"s1": ints(100, 80), "b": random(80), "w2": random(80, 3)}
    host = OnnxHost.from_model(model(lines, {"x": ("N", 100)}, "y", **arrays))
    lowered = lower(host, [random(2, 100)], "a", 1, [0, 9], [0.4, -0.3])
    assert nodes_of(lowered).count("ConstantOfShape") == 1
    assert all(np.prod(size) < 300 for size in sizes_of(lowered).values())
    assert lowered.graph.values()["a"].shape == ("N", 78)


def test_random_numbers_are_not_constants() -> None:
    lines = "w1 = RandomNormalLike(like)\nh = MatMul(x, w1)\na = Relu(h)\ny = MatMul(a, w2)"
    host = OnnxHost.from_model(model(lines, {"x": ("N", 4)}, "y", like=random(4, 6), w2=random(6, 3)))
    assert [node.op for node in host.graph.nodes] == ["opaque", "matmul", "pointwise", "linear"]


def test_a_weight_that_is_returned_is_no_place_for_a_replacement() -> None:
    """Its reader has it as a weight: a replacement would reach the output alone."""
    graph = model("w1 = Neg(v1)\nh = MatMul(x, w1)", {"x": ("N", 4)}, "h w1", v1=random(4, 6))
    plan = cmrc.Plan(cmrc.trace(graph))
    with pytest.raises(DoError, match="is a constant that the model returns: its readers use it as a weight"):
        plan.do("w1", units=[1], constant=0.0, axis=1)
    assert len(plan.do("h", units=[1], constant=0.0)) == 1
