"""What may be folded as whole numbers."""

from __future__ import annotations

import numpy as np
import pytest

from cmrc.ir.graph import literal
from cmrc.passes.rewriting.integers import LARGEST, fits_in_int32, is_nothing, on_grid


def test_numbers_on_a_grid_are_whole_steps_whatever_a_division_makes_of_them() -> None:
    assert 0.3 / 0.1 < 3
    steps = on_grid(np.array([0.3, -0.3, 0.0, 0.7]), 0.1)
    assert steps is not None
    assert steps.tolist() == [3, -3, 0, 7]


@pytest.mark.parametrize("value", [0.25, 0.3001, -0.05])
def test_a_number_between_two_steps_is_on_no_grid(value: float) -> None:
    assert on_grid(np.array([0.3, value]), 0.1) is None


def test_a_sum_that_could_overflow_is_not_folded_as_integers() -> None:
    steps = np.full(4, LARGEST / 4 / 256)
    assert not fits_in_int32(steps, 256)
    assert not fits_in_int32(-steps, 256)
    assert fits_in_int32(steps - 1, 256)


def test_a_zero_point_of_zeros_is_none() -> None:
    assert is_nothing(None)
    assert is_nothing(literal(np.zeros(3), "int8"))
    assert not is_nothing(literal([0, 1], "int8"))
