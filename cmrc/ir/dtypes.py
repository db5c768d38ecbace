"""Dtypes by the names that the IR has for them."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from cmrc.ir.graph import Array


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """numpy's own dtype of this name, or ml_dtypes' (bfloat16)."""
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def as_dtype(array: Array, dtype: str) -> Array:
    return array.astype(numpy_dtype(dtype), copy=False)
