"""The arrays that a do needs if it remains in the model at run time: both hosts clamp by `where(mask, constants, x)`, and turn by a matrix."""

from __future__ import annotations

import numpy as np

from cmrc.ir.axes import spread
from cmrc.ir.graph import Array, Node, Tensor, attributes
from cmrc.ir.ops.affine import DoAttrs, slab_of
from cmrc.ir.spec import AxisAttrs
from cmrc.ir.tensors import constant


def _spread(node: Node, slab: Array) -> Array:
    """A slab of the units spread over the whole axis, with zeros in between."""
    axis = attributes(node, AxisAttrs)["axis"]
    full = np.zeros([int(node.output.shape[axis]) if i == axis else n for i, n in enumerate(slab.shape)], slab.dtype)
    full[(slice(None),) * axis + (list(attributes(node, DoAttrs)["units"]),)] = slab
    return full


def slab(node: Node) -> Array:
    """The constants of the units, with all axes of the value."""
    value, axis = node.inputs[1], attributes(node, AxisAttrs)["axis"]
    assert isinstance(value, Tensor)
    constants_of_units = slab_of(constant(value), axis, len(node.output.shape))
    return spread(constants_of_units, axis, len(attributes(node, DoAttrs)["units"]))


def constants(node: Node) -> Array:
    """The constants at their places along the axis."""
    return _spread(node, slab(node))


def mask(node: Node) -> Array:
    """Where the units are."""
    shape = [
        len(attributes(node, DoAttrs)["units"]) if i == attributes(node, AxisAttrs)["axis"] else 1
        for i in range(len(node.output.shape))
    ]
    return _spread(node, np.ones(shape, dtype=bool))


def places(node: Node) -> Array:
    """The index of the unit at each position of the axis; 0 if there is none."""
    index = np.zeros(int(node.output.shape[attributes(node, AxisAttrs)["axis"]]), dtype=np.int64)
    index[list(attributes(node, DoAttrs)["units"])] = np.arange(len(attributes(node, DoAttrs)["units"]))
    return index


def matrix(node: Node) -> Array:
    """The matrix of a turn, its blocks on the diagonal: units times this."""
    operand = node.inputs[1]
    assert isinstance(operand, Tensor)
    blocks = constant(operand)
    count, size, _ = blocks.shape
    full = np.zeros((count, size, count, size))
    full[np.arange(count), :, np.arange(count)] = blocks.swapaxes(1, 2)
    return full.reshape(count * size, count * size)
