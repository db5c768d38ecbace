"""What a do that stays in a model needs at run time, as arrays: both hosts clamp by `where(mask, constants, x)`."""

from __future__ import annotations

import numpy as np

from cmrc.ir.axes import spread
from cmrc.ir.graph import Array, Node, Tensor
from cmrc.ir.ops.affine import slab_of
from cmrc.ir.tensors import constant


def _spread(node: Node, slab: Array) -> Array:
    """A slab of the units put in its place along the whole axis, with nothing in between."""
    axis = node.attrs["axis"]
    full = np.zeros([int(node.output.shape[axis]) if i == axis else n for i, n in enumerate(slab.shape)], slab.dtype)
    full[(slice(None),) * axis + (list(node.attrs["units"]),)] = slab
    return full


def slab(node: Node) -> Array:
    """The constants of the units, with all axes of the value."""
    value, axis = node.inputs[1], node.attrs["axis"]
    assert isinstance(value, Tensor)
    constants_of_units = slab_of(constant(value), axis, len(node.output.shape))
    return spread(constants_of_units, axis, len(node.attrs["units"]))


def constants(node: Node) -> Array:
    """The constants at their places along the axis."""
    return _spread(node, slab(node))


def mask(node: Node) -> Array:
    """Where the units are."""
    shape = [len(node.attrs["units"]) if i == node.attrs["axis"] else 1 for i in range(len(node.output.shape))]
    return _spread(node, np.ones(shape, dtype=bool))


def places(node: Node) -> Array:
    """Which of the units stands at each position of the axis; 0 where none does."""
    index = np.zeros(int(node.output.shape[node.attrs["axis"]]), dtype=np.int64)
    index[list(node.attrs["units"])] = np.arange(len(node.attrs["units"]))
    return index
