"""What a graph costs: parameters, bytes, multiply-accumulates. Sizes known only at run time count as given, or as 1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cmrc.ir.axes import product
from cmrc.ir.graph import Graph, Leaf, Node, Shape, Tensor
from cmrc.ir.ops import numpy_dtype


@dataclass(frozen=True, slots=True)
class Cost:
    """Stored numbers, stored bytes, and multiply-accumulates of one run."""

    parameters: int
    bytes: int
    macs: int


def itemsize(dtype: str) -> int:
    return int(numpy_dtype(dtype).itemsize)


def elements(shape: Shape, sizes: Mapping[str, int]) -> int:
    number, symbols = product(shape)
    return number * math.prod(int(pow(sizes.get(symbol, 1), power)) for symbol, power in symbols.items())


def macs(node: Node, shapes: Mapping[str, Shape], sizes: Mapping[str, int]) -> int:
    """Multiply-accumulates of one node: affine ops, products of values, attention; everything else counts nothing."""
    out = elements(node.output.shape, sizes)
    weight = node.inputs[1] if len(node.inputs) > 1 else None
    if node.op == "linear" and isinstance(weight, Tensor):
        return out * int(weight.shape[node.attrs["w_in"]])
    if node.op == "conv" and isinstance(weight, Tensor):
        kernel = math.prod(weight.shape[2:])
        if node.attrs.get(
            "transposed"
        ):  # every input element meets every output channel of its group and kernel position
            x = node.inputs[0]
            assert isinstance(x, str)
            return elements(shapes[x], sizes) * weight.shape[1] * kernel
        return out * weight.shape[1] * kernel
    if node.op == "matmul":
        return out * elements(_shape(node, 0, shapes)[-1:], sizes)
    if node.op == "attention":  # q kᵀ, then the weights times v: whole products, also where a mask is causal
        q, k, v = (_shape(node, i, shapes) for i in range(3))
        return elements((*q, k[-2]), sizes) + elements((*q[:-1], k[-2], v[-1]), sizes)
    return 0


def _shape(node: Node, operand: int, shapes: Mapping[str, Shape]) -> Shape:
    found = node.inputs[operand]
    assert found is not None
    return shapes[found] if isinstance(found, str) else found.shape


def cost(graph: Graph, sizes: Mapping[str, int] | None = None) -> Cost:
    """The cost of a graph. A parameter that several nodes share counts once."""
    sizes = sizes or {}
    shapes = {name: value.shape for name, value in graph.values().items()}
    stored: dict[Tensor, None] = {}
    leaves: dict[str, Leaf] = {}
    total = 0
    for node in graph.nodes:
        total += macs(node, shapes, sizes)
        for operand in node.inputs:
            if isinstance(operand, Leaf):
                leaves[operand.name] = operand
            elif isinstance(operand, Tensor) and operand.shape:
                stored.setdefault(operand)
    tensors = [*leaves.values(), *stored]
    count = sum(math.prod(t.shape) for t in tensors)
    return Cost(count, sum(math.prod(t.shape) * itemsize(t.dtype) for t in tensors), total)
