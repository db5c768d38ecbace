"""Run a whole mechanism graph in numpy and float64, by the meanings in `ops/`.

Dynamic sizes get their numbers from the inputs and from what was computed. Every result is checked against its declared
shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cmrc.errors import CmrcError, GraphError
from cmrc.ir.axes import product
from cmrc.ir.graph import (
    Array,
    Dim,
    Graph,
    Node,
    Operand,
    Value,
)
from cmrc.ir.ops import OPS
from cmrc.ir.tensors import constant, evaluate_op


def evaluate(
    graph: Graph, inputs: Mapping[str, Array], *, given: Mapping[str, Array] | None = None
) -> dict[str, Array]:
    """Every value of the graph by name; a value that is `given` is used as it is if its shape fits."""
    values: dict[str, Array] = {}
    sizes: dict[str, int] = {}
    dtypes = {name: value.dtype for name, value in graph.values().items()}

    def define(node: Node | None, value: Value, array: Array) -> None:
        if not learn_sizes(value, array.shape, sizes):
            label, kind = (node.label, node.kind) if node else (value.name, "input")
            raise GraphError(label, kind, f"came out with shape {array.shape}, declared {value.shape} where {sizes}")
        # A cast rounds, and what follows it is computed in float64 again.
        values[value.name] = array if array.dtype.kind in "biu" else array.astype(np.float64, copy=False)

    def read(operand: Operand) -> Array | None:
        return values[operand] if isinstance(operand, str) else None if operand is None else constant(operand)

    for value in graph.inputs:
        define(None, value, np.asarray(inputs[value.name]))
    for node in graph.nodes:
        if OPS[node.op].meaning is None:
            raise CmrcError("it has no meaning of its own: only its host can run it", node=node.label, op=node.kind)
        operands = [read(operand) for operand in node.inputs]
        first = operands[0]
        attrs = sized_attributes(node, () if first is None else first.shape, sizes)
        as_it_is = first is not None and keeps_numbers(node, dtypes)
        array = first if as_it_is else np.asarray(evaluate_op(node.op, attrs, *operands))
        assert array is not None
        known = None if given is None else given.get(node.name)
        define(node, node.output, known if known is not None and known.shape == array.shape else array)
    return values


EXACTLY = {  # what every type of float holds without rounding
    "float64": ("float64", "float32", "float16", "bfloat16"),
    "float32": ("float32", "float16", "bfloat16"),
    "float16": ("float16",),
    "bfloat16": ("bfloat16",),
}


def keeps_numbers(node: Node, dtypes: Mapping[str, str]) -> bool:
    """Whether it casts floats to their own type or to a wider one: in float64, that rounds nothing."""
    source = node.inputs[0] if node.inputs else None
    if node.op != "pointwise" or node.attrs["fn"] != "cast" or not isinstance(source, str):
        return False
    return dtypes[source] in EXACTLY.get(node.output.dtype, ())


def learn_sizes(value: Value, shape: Sequence[int], sizes: dict[str, int]) -> bool:
    """Note the dynamic sizes of a value; returns whether its shape is the declared one."""
    fits = len(value.shape) == len(shape)
    for dim, size in zip(value.shape, shape, strict=False):
        declared = known_size(dim, sizes)
        fits = fits and declared in (None, size)
        if isinstance(dim, str) and declared is None:
            sizes[dim] = size
    return fits


def sized_attributes(node: Node, shape: Sequence[int], sizes: Mapping[str, int]) -> Mapping[str, Any]:
    """The attributes of a node whose first operand has this shape, with numbers for the dynamic sizes."""
    if OPS[node.op].sized:
        return {**node.attrs, "shape": _target(node, shape, sizes)}
    if node.attrs.get("fn") == "tile":
        return {**node.attrs, "times": tuple(known_size(dim, sizes) for dim in node.attrs["times"])}
    return node.attrs


def known_size(dim: Dim, sizes: Mapping[str, int]) -> int | None:
    """The number of a size, if everything in it is known."""
    number, symbols = product([dim])
    if any(symbol not in sizes for symbol in symbols):
        return None
    return number * int(np.prod([sizes[symbol] ** power for symbol, power in symbols.items()], dtype=np.int64))


def _target(node: Node, x: Sequence[int], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape to compute. A reshape infers a size that is not known yet; expand takes it from its operand."""
    shape = [known_size(dim, sizes) for dim in node.output.shape]
    if node.op == "reshape":
        return tuple(-1 if n is None else n for n in shape)
    own = (*(1,) * (len(shape) - len(x)), *x)
    return tuple(own[i] if n is None else n for i, n in enumerate(shape))
