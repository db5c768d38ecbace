"""How close is equal: the only numbers that the tests compare by."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# Largest difference over the largest entry of the reference (at least 1).
EXACT_F64 = 1e-10  # the same real number by another order of float64 operations
EXACT_F32 = 1e-5  # the same, in float32
EXACT_F16 = 4e-3  # in float16, whose numbers lie 1e-3 apart
EXACT_BF16 = 3e-2  # in bfloat16, whose numbers lie 8e-3 apart
EXACT = {"float64": EXACT_F64, "float32": EXACT_F32, "float16": EXACT_F16, "bfloat16": EXACT_BF16}
# Of the difference between two outputs near 1 in float32, and of what comes from it (KL, D2, margins): rounding costs it digits.
DIFFERENCE_F32 = {"rtol": 1e-4, "atol": 1e-8}
ACROSS_F32 = 2e-5  # the same in float32 by the kernels of another runtime
# A replacement counts as seen when it moves the output by this many tolerances: less could pass for rounding.
MOVES = 1000
MOVES_HALF = 10  # in 16 bits no replacement can move it by more than some tens of them


def distance(actual: npt.ArrayLike, expected: npt.ArrayLike) -> float:
    """The largest difference over the scale of what was expected; infinite where the shapes differ."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if actual.shape != expected.shape:
        return np.inf
    differ = actual != expected  # equal infinities are equal
    if not differ.any():
        return 0.0
    gap = np.abs(actual[differ] - expected[differ]).max() / max(1.0, np.abs(expected).max())
    return float(gap) if np.isfinite(gap) else np.inf
