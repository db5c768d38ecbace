"""Arrays for the evaluator, compared with torch."""

from __future__ import annotations

import numpy as np
import torch
from tolerances import EXACT_F64, distance


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, 1.0, shape)


def agree(actual: np.ndarray, expected: torch.Tensor) -> None:
    assert distance(actual, expected.numpy()) <= EXACT_F64


def as_tensor(array: np.ndarray | None) -> torch.Tensor | None:
    return None if array is None else torch.from_numpy(array)
