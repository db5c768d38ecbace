"""What a test asks of a graph: its outputs, how far they are from others, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tolerances import distance

from cmrc.ir.evaluate import evaluate
from cmrc.ir.graph import Array, Graph, Tensor, leaves_of


def outputs_of(graph: Graph, inputs: Mapping[str, Array]) -> list[Array]:
    with np.errstate(all="ignore"):
        values = evaluate(graph, inputs)
    return [values[name] for name in graph.outputs]


def gap(actual: Sequence[Array], expected: Sequence[Array]) -> float:
    """The largest distance between two lists of outputs."""
    return max((distance(a, e) for a, e in zip(actual, expected, strict=True)), default=0.0)


@dataclass(frozen=True)
class Cost:
    """Multiply-accumulates for one batch, and stored elements, counted at each use (a fold unties a shared parameter)."""

    macs: int
    parameters: int


def cost(graph: Graph, inputs: Mapping[str, Array]) -> Cost:
    """Border and bias buffers that a fold adds (`addend`) and constants that replace values are stored besides: not counted."""
    values = evaluate(graph, inputs)
    macs = parameters = 0
    for node in graph.nodes:
        computed = values[node.name]
        if node.op in ("linear", "conv"):
            weight = node.inputs[1]
            assert isinstance(weight, Tensor)
            if node.op == "linear":
                per = weight.shape[node.attrs["w_in"]]
            elif node.attrs.get("transposed"):
                x = values[str(node.inputs[0])]
                macs += x.size * math.prod(weight.shape[1:]) - computed.size
                per = 1
            else:
                per = math.prod(weight.shape[1:])
            macs += computed.size * per
        elif node.op == "matmul":
            macs += computed.size * values[str(node.inputs[0])].shape[-1]
        if node.op != "do" and not node.marks.addend:
            tensors = (o for o in node.inputs if isinstance(o, Tensor) and any(leaves_of(o)))
            parameters += sum(math.prod(t.shape) for t in tensors)
    return Cost(macs, parameters)
