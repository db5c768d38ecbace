"""A piece of an ONNX graph between two cuts, extracted by onnx_ir and run in a session of its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir

from cmrc.errors import HostError
from cmrc.hosts.onnx.bodies import captured_by
from cmrc.hosts.onnx.session import Sessions
from cmrc.hosts.onnx.shapes import data_type
from cmrc.ir.graph import Array, Value


@dataclass(frozen=True, slots=True, eq=False)
class OnnxPiece:
    """`inputs` are the values it reads; of `sizes` it reads the shape alone."""

    inputs: tuple[str, ...]
    sizes: tuple[str, ...]
    outputs: tuple[str, ...]
    sessions: Sessions

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        given = {name: feeds[name] for name in (*self.inputs, *self.sizes)}
        return dict(zip(self.outputs, self.sessions.run(given, ()), strict=True))


def extract(
    model: onnx_ir.Model,
    values: Mapping[str, Value],
    inputs: Sequence[str],
    outputs: Sequence[str],
    beyond: Collection[str],
    providers: Sequence[str],
) -> OnnxPiece:
    """The nodes between named values. A size of a value beyond the cut is read from a stand-in of its shape."""
    own = onnx_ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
    given, needed, sizes = set(inputs), set[str](), dict[str, None]()
    waiting = list(outputs)
    while waiting:
        name = waiting.pop()
        if name in needed:
            continue
        needed.add(name)
        value = own[name]
        node = value.producer()
        if name in given or value.is_initializer():
            continue
        if node is None:
            raise HostError("is read on both sides of the cut", node=name, op="input")
        read = [v.name for v in node.inputs if v is not None and v.name] + captured_by(node)
        if node.op_type in ("Shape", "Size") and not node.domain and read[0] in beyond and read[0] not in given:
            sizes[read[0]] = None
        else:
            waiting.extend(read)
    used = tuple(name for name in inputs if name in needed)
    graph = onnx_ir.convenience.extract(model.graph, [*used, *sizes], list(outputs))
    for value in (*graph.inputs, *graph.outputs):
        known = values.get(value.name or "")
        if known is not None and value.dtype is None:
            value.dtype = data_type(known.dtype)
        if known is not None and value.shape is None and known.shape:
            value.shape = onnx_ir.Shape(known.shape)
    piece = onnx_ir.Model(graph, ir_version=model.ir_version, functions=list(model.functions.values()))
    return OnnxPiece(used, tuple(sizes), tuple(outputs), Sessions(piece, providers))
