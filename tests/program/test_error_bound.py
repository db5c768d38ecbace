"""The error bound that `cmrc.ir.tensors.fold` states, against exact rational arithmetic on the stored numbers."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import cmrc
from cmrc.hosts.onnx.host import OnnxHost

TYPES = {
    "float16": (np.dtype(np.float16), TensorProto.FLOAT16),
    "bfloat16": (np.dtype(ml_dtypes.bfloat16), TensorProto.BFLOAT16),
    "float32": (np.dtype(np.float32), TensorProto.FLOAT),
    "float64": (np.dtype(np.float64), TensorProto.DOUBLE),
}
DOUBLE = Fraction(1, 2**53)  # v: half of the distance between float64 numbers


def bound(exact: Fraction, terms: list[Fraction], dtype: str) -> Fraction:
    """u |p*| + (1 + u) γ Σ|terms| + η, with γ = n v / (1 − n v) for n terms."""
    info: Any = ml_dtypes.finfo(TYPES[dtype][0])
    u, tiny = Fraction(float(info.eps)) / 2, Fraction(float(info.smallest_subnormal)) / 2
    n = len(terms)
    gamma = n * DOUBLE / (1 - n * DOUBLE)
    return u * abs(exact) + (1 + u) * gamma * sum(map(abs, terms)) + tiny


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, spread: float) -> Any:
    """Numbers of the type, of very different sizes."""
    scale = 2.0 ** rng.uniform(-spread, spread, shape)
    return (rng.normal(size=shape) * scale).astype(TYPES[dtype][0])


def exactly(array: Any) -> Any:
    return np.vectorize(Fraction, otypes=[object])(np.asarray(array, dtype=np.float64))


def network(kernel: int, w1: Any, w2: Any, bias: Any, dtype: str) -> onnx.ModelProto:
    """x -> op -> Relu -> op -> y, where an op is a Gemm, or a convolution without padding."""
    kind = TYPES[dtype][1]
    shape = ["N", w1.shape[1]] if kernel == 0 else ["N", w1.shape[1], 9, 9]
    op, options = ("Gemm", {"transB": 1}) if kernel == 0 else ("Conv", {"kernel_shape": [kernel, kernel]})
    first = options if kernel == 0 else {"kernel_shape": [1, 1]}
    nodes = [
        helper.make_node(op, ["x", "w1"], ["h"], **first),
        helper.make_node("Relu", ["h"], ["a"]),
        helper.make_node(op, ["a", "w2", "b"], ["y"], name="last", **options),
    ]
    graph = helper.make_graph(
        nodes,
        "main",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info("y", kind, None)],
        [numpy_helper.from_array(array, name) for name, array in (("w1", w1), ("w2", w2), ("b", bias))],
    )
    return onnx.shape_inference.infer_shapes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    )


def last_weights(lowered: cmrc.Lowered) -> tuple[Any, Any]:
    host = lowered.host
    assert isinstance(host, OnnxHost)
    (node,) = [node for node in host.model.graph if node.name == "last"]
    return tuple(value.const_value.numpy() for value in node.inputs[1:])  # type: ignore[return-value, union-attr]


@pytest.mark.parametrize("dtype", TYPES)
@given(data=st.data())
def test_a_fold_is_within_its_bound(dtype: str, data: st.DataObject) -> None:
    """b' = b + W_S c and b' = b + W_S β, W_P' = W_P + W_S B, at every entry."""
    units, outputs = data.draw(st.integers(2, 24)), data.draw(st.integers(1, 3))
    kernel = data.draw(st.sampled_from([0, 1, 3]))
    affine = data.draw(st.booleans())
    spread = data.draw(st.sampled_from([0.0, 2.0, 4.0 if dtype == "float16" else 20.0]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    replaced = sorted(rng.permutation(units)[: data.draw(st.integers(1, units - 1))].tolist())
    kept = [unit for unit in range(units) if unit not in replaced]
    window = () if kernel == 0 else (kernel, kernel)
    w1 = numbers(rng, (units, 3, *(() if kernel == 0 else (1, 1))), dtype, 0.0)
    w2, bias = numbers(rng, (outputs, units, *window), dtype, spread), numbers(rng, (outputs,), dtype, spread)
    constant = numbers(rng, (len(replaced),), dtype, spread).astype(np.float64)
    program = cmrc.trace(network(kernel, w1, w2, bias, dtype))
    plan, weight = cmrc.Plan(program), np.zeros((len(replaced), len(kept)))
    if affine:
        weight = rng.normal(size=weight.shape)
        plan.do("a", units=replaced, affine=cmrc.Affine(kept, weight, constant))
    else:
        plan.do("a", units=replaced, constant=constant)
    new_weight, new_bias = (exactly(array) for array in last_weights(cmrc.lower(program, plan)))
    w, b, c, map_ = exactly(w2).reshape(outputs, units, -1), exactly(bias), exactly(constant), exactly(weight)
    for o in range(outputs):
        terms = [b[o], *(w[o, unit, k] * c[i] for i, unit in enumerate(replaced) for k in range(w.shape[2]))]
        assert abs(new_bias[o] - sum(terms)) <= bound(sum(terms), terms, dtype)
    new_weight = new_weight.reshape(outputs, len(kept), -1)
    for o, p, k in np.ndindex(*new_weight.shape):
        terms = [w[o, kept[p], k]]
        if affine:
            terms += [w[o, unit, k] * map_[i, p] for i, unit in enumerate(replaced)]
        error = abs(new_weight[o, p, k] - sum(terms))
        assert error <= (bound(sum(terms), terms, dtype) if affine else 0)
