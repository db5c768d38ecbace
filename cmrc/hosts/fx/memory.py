"""Torch tensors as numpy arrays and back, bfloat16 included."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

from cmrc.ir.graph import Array

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def to_numpy(tensor: torch.Tensor) -> Array:
    """The tensor's own memory as an array where numpy has the dtype; bfloat16 through ml_dtypes."""
    if tensor.dtype == torch.bfloat16:
        return tensor.detach().contiguous().view(torch.int16).numpy(force=True).view(BFLOAT16)
    return tensor.numpy(force=True)


def from_numpy(array: Array) -> torch.Tensor:
    array = np.ascontiguousarray(array)
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
