"""Run a mechanism graph in numpy and float64, by the meanings of `meanings.py`: for tests and for looking inside.

A size known only at run time takes its number from the inputs and from what has been computed. Every result is checked
against its declared shape.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cmrc.errors import CmrcError, GraphError
from cmrc.ir.axes import product
from cmrc.ir.graph import Array, Dim, Graph, Node, Operand, Value
from cmrc.ir.ops import OPS
from cmrc.ir.tensors import constant, evaluate_op


def evaluate(graph: Graph, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Every value of the graph by name."""
    values: dict[str, Array] = {}
    sizes: dict[str, int] = {}

    def define(node: Node | None, value: Value, array: Array) -> None:
        fits = len(value.shape) == array.ndim
        for dim, size in zip(value.shape, array.shape, strict=False):
            declared = _size(dim, sizes)
            fits = fits and declared in (None, size)
            if isinstance(dim, str) and declared is None:
                sizes[dim] = size
        if not fits:
            label, kind = (node.label, node.kind) if node else (value.name, "input")
            raise GraphError(label, kind, f"came out with shape {array.shape}, declared {value.shape} where {sizes}")
        values[value.name] = array

    def read(operand: Operand) -> Array | None:
        return values[operand] if isinstance(operand, str) else None if operand is None else constant(operand)

    for value in graph.inputs:
        array = np.asarray(inputs[value.name])
        define(None, value, array if array.dtype.kind in "biu" else array.astype(np.float64))
    for node in graph.nodes:
        if OPS[node.op].meaning is None:
            raise CmrcError("it has no meaning of its own: only its host can run it", node=node.label, op=node.kind)
        operands = [read(operand) for operand in node.inputs]
        attrs = node.attrs
        if OPS[node.op].sized:
            attrs = {**attrs, "shape": _target(node, operands[0], sizes)}
        elif attrs.get("fn") == "tile":
            attrs = {**attrs, "times": tuple(_size(dim, sizes) for dim in attrs["times"])}
        define(node, node.output, np.asarray(evaluate_op(node.op, attrs, *operands)))
    return values


def _size(dim: Dim, sizes: Mapping[str, int]) -> int | None:
    """The number behind a size, if everything in it is known."""
    number, symbols = product([dim])
    if any(symbol not in sizes for symbol in symbols):
        return None
    return number * int(np.prod([sizes[symbol] ** power for symbol, power in symbols.items()], dtype=np.int64))


def _target(node: Node, x: Array | None, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape to make; a size not known yet is worked out by a reshape, and the operand's own in expand."""
    assert x is not None
    shape = [_size(dim, sizes) for dim in node.output.shape]
    if node.op == "reshape":
        return tuple(-1 if n is None else n for n in shape)
    own = (*(1,) * (len(shape) - x.ndim), *x.shape)
    return tuple(own[i] if n is None else n for i, n in enumerate(shape))
