"""Ownership of memory: tensors that share nothing writable with the user's, and arrays that read a tensor in place.

    own(t)        the same numbers, in memory that nobody else can write to
    readable(t)   the same numbers as a read-only array

Neither copies before somebody writes: torch copies on write, by `torch._lazy_clone`. That function is private in torch, so it is
tried on a small tensor first. `clone` is used instead if torch does not have it, and for memory that torch did not allocate
(numpy's, a mapped file, another process's).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
import torch

from cmrc.hosts.autograd.arrays import BFLOAT16, to_numpy
from cmrc.ir.graph import Array


def _address(tensor: torch.Tensor) -> int:
    """The address of the numbers. `data_ptr`, the public way to get it, counts as a write and copies."""
    start = int(torch._C._data_address(tensor))  # type: ignore[attr-defined]
    return start + int(tensor.storage_offset()) * tensor.element_size()


@cache
def copies_on_write() -> bool:
    """Whether this torch shares memory until either side is written to, directly or through numpy."""
    try:
        first = torch.zeros(2)
        second, third = torch._lazy_clone(first), torch._lazy_clone(first)
        shared = _address(first) == _address(second)
        second.add_(1)
        third.numpy()[:] = 2
        apart = first.tolist() == [0, 0] and second.tolist() == [1, 1] and third.tolist() == [2, 2]
        fourth = torch._lazy_clone(first)
        first.add_(3)
        return bool(shared and apart and fourth.tolist() == [0, 0])
    except (AttributeError, RuntimeError):
        return False


def _lazy_clone(tensor: torch.Tensor) -> torch.Tensor | None:
    if tensor.device.type != "cpu" or not copies_on_write():
        return None
    try:
        clone: torch.Tensor = torch._lazy_clone(tensor)
    except RuntimeError:  # not torch's own memory
        return None
    return clone


def own(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in memory that nobody else can write to; a parameter stays one."""
    plain = tensor.detach()
    copied = _lazy_clone(plain)
    copied = plain.clone() if copied is None else copied
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(copied, requires_grad=tensor.requires_grad)
    return copied


def own_all(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`own` of each; one tensor with several names stays one tensor."""
    copies: dict[int, torch.Tensor] = {}
    for tensor in tensors.values():
        if id(tensor) not in copies:
            copies[id(tensor)] = own(tensor)
    return {name: copies[id(tensor)] for name, tensor in tensors.items()}


class _Borrowed:
    """Memory for numpy to read. It holds a clone of its own, so nobody writes to it."""

    def __init__(self, clone: torch.Tensor) -> None:
        size = clone.element_size()
        self.clone = clone
        self.__array_interface__ = {
            "version": 3,
            "data": (_address(clone), True),
            "shape": tuple(clone.shape),
            "strides": None if clone.is_contiguous() else tuple(step * size for step in clone.stride()),
            "typestr": _typestr(clone.dtype),
        }


@cache
def _typestr(dtype: torch.dtype) -> str:
    return str(torch.empty(0, dtype=torch.int16 if dtype == torch.bfloat16 else dtype).numpy().dtype.str)


def readable(tensor: torch.Tensor) -> Array:
    """The same numbers as a read-only array. Later writes to the tensor do not change it."""
    clone = _lazy_clone(tensor.detach()) if tensor.numel() and not tensor.is_conj() else None
    if clone is None:
        array = to_numpy(tensor).view()
        array.flags.writeable = False
        return array
    array = np.asarray(_Borrowed(clone))
    return array.view(BFLOAT16) if clone.dtype == torch.bfloat16 else array


class TensorReader:
    """Each call returns `readable(tensor)` of that moment. The array is made once, as long as nobody writes.

    The array keeps the memory that it reads, and a write to the tensor first moves the tensor to other memory: while the
    tensor's address is the same, its numbers are the same.
    """

    __slots__ = ("_array", "_at", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._array: Array | None = None
        self._at = 0

    def __call__(self) -> Array:
        tensor = self._tensor
        if self._array is None or self._at != _address(tensor):
            array = readable(tensor)
            if not isinstance(array.base, _Borrowed):  # no copy on write here: the numbers may change in place
                return array
            self._array, self._at = array, _address(tensor)
        return self._array
