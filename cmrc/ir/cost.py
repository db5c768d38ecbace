"""What a graph costs: parameters, bytes, multiply-accumulates. Dynamic sizes count as given, or as 1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cmrc.ir.axes import product
from cmrc.ir.graph import Apply, ArrayLiteral, Graph, Leaf, Node, Shape, Tensor, leaves_of, numpy_dtype
from cmrc.ir.ops import OPS
from cmrc.ir.tensors import quantised


@dataclass(frozen=True, slots=True)
class Cost:
    """Stored numbers, stored bytes, and multiply-accumulates of one run."""

    parameters: int
    bytes: int
    macs: int


def stored_bytes(shape: Shape, dtype: str) -> int:
    """The bytes of a tensor in a file, which stores two integers of four bits in a byte."""
    bits = 4 if dtype in ("int4", "uint4") else 8 * int(numpy_dtype(dtype).itemsize)
    return -(-math.prod(int(n) for n in shape) * bits // 8)


def elements(shape: Shape, sizes: Mapping[str, int]) -> int:
    number, symbols = product(shape)
    return number * math.prod(int(pow(sizes.get(symbol, 1), power)) for symbol, power in symbols.items())


def macs(node: Node, shapes: Mapping[str, Shape], sizes: Mapping[str, int]) -> int:
    """Multiply-accumulates of one node, as its op's spec counts them."""
    work = OPS[node.op].work
    if work is None:
        return 0
    operands = [None if o is None else shapes[o] if isinstance(o, str) else o.shape for o in node.inputs]
    return sum(elements(shape, sizes) for shape in work(node, operands))


def cost(graph: Graph, sizes: Mapping[str, int] | None = None, *, since: Graph | None = None) -> Cost:
    """The cost of a graph. A parameter that several nodes share counts once.

    If the same node has an expression over parameters in `since`, the host's own graph, nodes of the host compute it: then the
    parameters count, as they are stored. Any other expression is stored as one tensor.
    """
    sizes = sizes or {}
    shapes = {name: value.shape for name, value in graph.values().items()}
    once = computed_once(graph)
    total = sum(macs(node, shapes, sizes) for node in graph.nodes if node.name not in once)
    tensors = [stored for of_node in stored_by_node(graph, since=since).values() for stored in of_node]
    count = sum(math.prod(tensor.shape) for tensor, _ in tensors)
    return Cost(count, sum(stored_bytes(tensor.shape, dtype) for tensor, dtype in tensors), total)


def stored_by_node(graph: Graph, *, since: Graph | None = None) -> dict[str, list[tuple[Tensor, str]]]:
    """The tensors that a file stores for each node, with their dtypes. A shared tensor is listed for the first of its nodes."""
    there = since.nodes if since is not None else ()
    own = {(node.name, operand) for node in there for operand in node.inputs if isinstance(operand, Apply)}
    seen: set[Tensor | str] = set()
    by_node: dict[str, list[tuple[Tensor, str]]] = {}
    for node in graph.nodes:
        mine = by_node.setdefault(node.name, [])
        for operand in node.inputs:
            if isinstance(operand, Leaf) or (isinstance(operand, Apply) and (node.name, operand) in own):
                parts: list[Tensor] = [part for leaf in leaves_of(operand) for part in leaf.parts or (leaf,)]
            elif isinstance(operand, Tensor) and operand.shape:
                parts = stored_parts(operand)
            else:
                continue
            for part in parts:
                key = part.name if isinstance(part, Leaf) else part
                if key not in seen:
                    seen.add(key)
                    mine.append((part, part.dtype if isinstance(part, Leaf) else _stored_as(part, node)))
    return by_node


def _stored_as(tensor: Tensor, node: Node) -> str:
    """The dtype of a tensor in a file: numbers that the compiler adds have the dtype of the node that reads them."""
    dtype = node.output.dtype
    return dtype if isinstance(tensor, ArrayLiteral) and "float" in dtype else tensor.dtype


def stored_parts(tensor: Tensor) -> list[Tensor]:
    """What a file stores for a tensor: integers, scales and zero points if it is quantised; one number if it is the same everywhere."""
    parts = quantised(tensor)
    if parts is not None:
        given = (
            parts.zero if parts.zero is not None and any(leaves_of(parts.zero)) else None
        )  # not the default of an op
        read = (part for part in (parts.numbers, parts.scale, given) if part is not None)
        return [part for part in read if part.shape or isinstance(part, Leaf)]
    if isinstance(tensor, Apply) and tensor.op == "expand" and math.prod(tensor.inputs[0].shape) == 1:
        return list(tensor.inputs)
    return [tensor]


def computed_once(graph: Graph) -> set[str]:
    """The nodes that do not depend on the model's inputs: onnxruntime computes them when it loads the model, torch once per batch."""
    once: set[str] = set()
    for node in graph.nodes:
        if node.op == "plane":  # it reads only a size
            constant = all(isinstance(n, int) for n in node.output.shape)
        else:
            constant = node.op != "opaque" and all(name in once for name in node.values())
        if constant:
            once.update(output.name for output in node.outputs)
    return once
