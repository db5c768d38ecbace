"""Folded parameters are finite in the model's own precision, or refused."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from differential.models import chain
from torch import nn

import cmrc
from cmrc.errors import HostError
from cmrc.ir.graph import ArrayLiteral, Leaf, Tensor, apply, literal
from cmrc.ir.tensors import Quantised, constant, fold


def leaf(array: object, dtype: str = "float16") -> Leaf:
    stored = np.asarray(array, dtype)
    return Leaf("w", stored.shape, dtype, lambda: stored)


def add(a: Tensor, b: Tensor, dtype: str = "float16") -> Tensor:
    return apply("pointwise", (a, b), {"fn": "add"}, a.shape, dtype)


def test_a_sum_that_overflows_is_refused() -> None:
    with pytest.raises(HostError) as error:
        fold(add(leaf([1.0, 6e4]), leaf([1.0, 6e4])), "float16", name="fc.bias")
    assert str(error.value) == (
        "host: the fold makes fc.bias[1] 1.2e+05, which is infinite in float16 (its largest number is 6.55e+04)\n"
        "  fix: replace the units by smaller numbers, leave out units with large weights, or lower the model in a wider type"
    )


def test_a_sum_that_fits_a_wider_type_is_not() -> None:
    folded = fold(add(leaf([1.0, 6e4]), leaf([1.0, 6e4]), "float32"), "float32", name="fc.bias")
    assert folded.tolist() == [2.0, 120000.0]


def test_float64_may_overflow_too() -> None:
    large = leaf([1e308], "float64")
    with pytest.raises(HostError, match=r"makes b\[0\] inf, which is infinite in float64"):
        fold(add(large, large, "float64"), "float64", name="b")


def test_bfloat16_has_the_range_of_float32() -> None:
    with pytest.raises(HostError, match="infinite in bfloat16"):
        fold(add(leaf([3e38], "float32"), leaf([3e38], "float32"), "bfloat16"), "bfloat16", name="b")
    assert fold(leaf([3e38], "float32"), "bfloat16", name="b").dtype == ml_dtypes.bfloat16


def test_what_is_infinite_in_the_model_stays_so() -> None:
    """A mask of minus infinity, shifted."""
    folded = fold(add(leaf([-np.inf, 0.0]), leaf([1.0, 1.0])), "float16", name="mask")
    assert folded.tolist() == [-np.inf, 1.0]


def test_an_array_of_the_graph_is_copied() -> None:
    array = np.ones(3, np.float32)
    folded = fold(ArrayLiteral(array), "float32", name="b")
    folded[:] = 2
    assert array.tolist() == [1, 1, 1]


@pytest.mark.parametrize("bias", [True, False])
def test_a_bias_in_half_precision(bias: bool) -> None:
    """W c = 70000 goes beyond float16, although the clamped model, which adds −68000 to it, is finite."""
    model = chain(fc1=nn.Linear(2, 3), act=nn.ReLU(), fc2=nn.Linear(3, 2, bias=bias)).half().eval()
    with torch.no_grad():
        model.fc2.weight.copy_(torch.tensor([[700.0, 0, -680.0], [1, 1, 1]]))  # type: ignore[union-attr, operator]
    program = cmrc.trace(model, (torch.ones(1, 2).half(),))
    with pytest.raises(HostError) as error:
        cmrc.lower(program, cmrc.Plan(program).do("act", units=[0], constant=100.0))
    assert "fc2.bias[0] 7e+04, which is infinite in float16" in str(error.value)
    small = cmrc.lower(program, cmrc.Plan(program).do("act", units=[0], constant=90.0))
    assert torch.isfinite(small.module.get_parameter("fc2.bias")).all()


@pytest.mark.parametrize("axis", [0, 1, 2, None])
def test_a_quantised_tensor_that_is_turned_keeps_its_scales(axis: int | None) -> None:
    rng = np.random.default_rng(0)
    numbers, perm = rng.integers(-9, 9, size=(2, 3, 4)), (2, 0, 1)
    count = () if axis is None else (numbers.shape[axis],)
    scale, zero = literal(rng.uniform(1, 2, size=count)), literal(rng.integers(-3, 3, size=count), "int8")
    plain = Quantised(literal(numbers, "int8"), scale, zero, axis)
    turned = plain.turned(perm)
    assert turned is not None
    np.testing.assert_array_equal(constant(turned.tensor()), constant(plain.tensor()).transpose(perm))
