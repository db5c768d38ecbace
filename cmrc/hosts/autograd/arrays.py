"""Arrays as tensors and back, bfloat16 included."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

from cmrc.ir.graph import Array

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def to_numpy(tensor: torch.Tensor) -> Array:
    """The tensor's memory as an array where numpy has the dtype; bfloat16 through ml_dtypes."""
    if tensor.dtype == torch.bfloat16:
        return tensor.detach().contiguous().view(torch.int16).numpy(force=True).view(BFLOAT16)
    return tensor.numpy(force=True)


def from_numpy(array: Array) -> torch.Tensor:
    """A tensor over the array's memory, or over a copy where that must not be written to."""
    array = np.asarray(array, order="C")
    array = array if array.flags.writeable else array.copy()
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
