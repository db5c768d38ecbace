"""The reference: the model with its units literally replaced. It shares no code with the compiler.

For ONNX a ModelProto is edited with onnx.helper: behind the value v of a do stand

    constants   Where(mask, constants, v)
    affine      Where(mask, Transpose(MatMul(Transpose(Gather(v, parents)), weightᵀ)) + bias, v)

and everybody who read v, subgraphs and outputs included, reads that. A value that is an output keeps its name there.
Hidden units of a recurrent layer are replaced at every step (recurrence.py), before anything else is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, helper, numpy_helper

from tests.fuzz.recurrence import Unrolled
from tests.fuzz.session import Array

HIDDEN = ":hidden"  # behind the name of what a recurrent layer returns: its own state


@dataclass(frozen=True, slots=True, eq=False)
class Replacement:
    """What a do means, in plain arrays. `constant` broadcasts against the units' slab; with parents it is the bias."""

    value: str
    axis: int
    units: tuple[int, ...]
    constant: Array
    parents: tuple[int, ...] = ()
    weight: Array | None = None

    def slab(self, rank: int) -> Array:
        if self.constant.ndim == rank and self.constant.ndim != 1:
            return self.constant
        shape = [1] * rank
        shape[self.axis] = len(self.units)
        return np.broadcast_to(self.constant, len(self.units)).reshape(shape)


def clamp(
    model: onnx.ModelProto, replacements: Sequence[Replacement], arrays: Mapping[str, tuple[int, np.dtype[Any], int]]
) -> onnx.ModelProto:
    """A copy of the model with the units replaced. `arrays` has rank, dtype and size along the axis of each value."""
    clamped = onnx.ModelProto()
    clamped.CopyFrom(model)
    graph = clamped.graph
    for one in [one for one in replacements if one.value.endswith(HIDDEN)]:
        _unroll(one, graph, clamped.opset_import[0].version, *arrays[one.value][1:])
    for number, one in enumerate(replacements):
        if one.value.endswith(HIDDEN):
            continue
        rank, dtype, size = arrays[one.value]
        before = f"{one.value}.before{number}"
        place = next((i for i, node in enumerate(graph.node) if one.value in node.output), None)
        if place is not None:  # the maker writes another name, the clamp writes the value's own
            node = graph.node[place]
            for i, name in enumerate(node.output):
                if name == one.value:
                    node.output[i] = before
            now = one.value
        else:
            before, now = one.value, f"{one.value}.after{number}"
            for node in graph.node:
                _rename(node, one.value, now)
            for output in graph.output:  # an input that is an output: the input keeps the name
                output.name = now if output.name == one.value else output.name
            place = -1
        del graph.value_info[:]
        for i, node in enumerate(_nodes(one, before, now, rank, dtype, size, graph, str(number))):
            graph.node.insert(place + 1 + i, node)
    return clamped


def _unroll(one: Replacement, graph: onnx.GraphProto, opset: int, dtype: np.dtype[Any], size: int) -> None:
    """The layer step by step, with its hidden units replaced before and behind every step."""
    name = one.value.removesuffix(HIDDEN)
    place = next(i for i, node in enumerate(graph.node) if name in node.output)
    numbers = np.broadcast_to(one.constant.reshape(-1), len(one.units))
    state = Replacement(one.value, 2, one.units, numbers, one.parents, one.weight)  # [direction, sample, unit]

    def replaced(before: str, now: str, tag: str) -> list[onnx.NodeProto]:
        return list(_nodes(state, before, now, 3, dtype, size, graph, tag))

    nodes = Unrolled(graph.node[place], graph, opset, dtype, replaced).write()
    del graph.value_info[:]
    del graph.node[place]
    for i, node in enumerate(nodes):
        graph.node.insert(place + i, node)


def _nodes(
    one: Replacement, before: str, now: str, rank: int, dtype: np.dtype[Any], size: int, graph: Any, tag: str
) -> Iterator[onnx.NodeProto]:
    place = (slice(None),) * one.axis + (list(one.units),)

    def hold(name: str, array: Array) -> str:
        graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array), f"clamp.{name}.{tag}"))
        return f"clamp.{name}.{tag}"

    slab = one.slab(rank)
    full = np.zeros([size if i == one.axis else n for i, n in enumerate(slab.shape)])
    full[place] = slab
    mask = np.zeros([size if i == one.axis else 1 for i in range(rank)], dtype=bool)
    mask[place] = True
    if one.weight is None:
        yield helper.make_node("Where", [hold("mask", mask), hold("values", full.astype(dtype)), before], [now])
        return
    matrix = np.zeros((len(one.parents), size))
    matrix[:, list(one.units)] = np.asarray(one.weight).T
    perm = [*(i for i in range(rank) if i != one.axis), one.axis]
    back = [int(i) for i in np.argsort(perm)]
    names = [f"clamp.{step}.{tag}" for step in ("parents", "last", "mixed", "back", "sum")]
    parents = hold("index", np.array(one.parents, dtype=np.int64))
    yield helper.make_node("Gather", [before, parents], names[:1], axis=one.axis)
    yield helper.make_node("Transpose", names[:1], names[1:2], perm=perm)
    yield helper.make_node("MatMul", [names[1], hold("matrix", matrix.astype(dtype))], names[2:3])
    yield helper.make_node("Transpose", names[2:3], names[3:4], perm=back)
    yield helper.make_node("Add", [names[3], hold("bias", full.astype(dtype))], names[4:])
    yield helper.make_node("Where", [hold("mask", mask), names[4], before], [now])


def _rename(node: onnx.NodeProto, old: str, new: str) -> None:
    """What a node reads, in the bodies of its subgraphs too."""
    for i, name in enumerate(node.input):
        if name == old:
            node.input[i] = new
    for attribute in node.attribute:
        bodies = [attribute.g] if attribute.type == AttributeProto.GRAPH else list(attribute.graphs)
        for body in bodies:
            for inner in body.node:
                _rename(inner, old, new)
