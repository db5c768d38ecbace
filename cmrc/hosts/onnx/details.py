"""What every ONNX node is besides its operands, in one line each: for the fingerprint.

The op, the version of its definition, its attributes, and the bodies of If, Loop and Scan. Names inside a body are replaced by
numbers, because exporters make them up; documentation and metadata are left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import onnx
import onnx_ir

from cmrc.hosts.onnx.names import unique_origins

Kind = onnx_ir.AttributeType


def details(model: onnx_ir.Model) -> dict[str, str]:
    """By the origin of the node in the IR."""
    versions = model.opset_imports
    return {name: repr(_node(node, versions)) for node, (name, _) in unique_origins(model.graph).items()}


def _node(node: onnx_ir.Node, versions: dict[str, int]) -> tuple[Any, ...]:
    version = _since(node.domain, node.op_type, versions.get(node.domain, 0))
    attributes = sorted((a.name, _attribute(a, versions)) for a in node.attributes.values())
    return node.domain, node.op_type, version, attributes


@cache
def _since(domain: str, op: str, opset: int) -> int:
    """The opset that an op is defined by: many opsets share a definition."""
    try:
        return int(onnx.defs.get_schema(op, opset, domain).since_version)
    except onnx.defs.SchemaError:
        return opset


def _attribute(attribute: onnx_ir.Attr, versions: dict[str, int]) -> str:
    if attribute.is_ref():
        return f"ref {attribute.ref_attr_name}"
    if attribute.type == Kind.TENSOR:
        return _tensor(attribute.as_tensor())
    if attribute.type == Kind.TENSORS:
        return repr([_tensor(tensor) for tensor in attribute.as_tensors()])
    if attribute.type == Kind.GRAPH:
        return _body(attribute.as_graph(), versions)
    if attribute.type == Kind.GRAPHS:
        return repr([_body(graph, versions) for graph in attribute.as_graphs()])
    return repr(attribute.value)


def _tensor(tensor: onnx_ir.TensorProtocol) -> str:
    if tensor.dtype == onnx_ir.DataType.STRING:
        content = repr(tensor.numpy().tolist()).encode()
    else:
        content = tensor.tobytes()
    return f"{tensor.dtype.name}{list(tensor.shape)}:{hashlib.sha256(content).hexdigest()[:16]}"


def _body(graph: onnx_ir.Graph, versions: dict[str, int]) -> str:
    """A graph inside a node. Values of its own are numbered; those of the graphs around it keep their names."""
    numbers: dict[onnx_ir.Value, int] = {}
    for value in _own_values(graph):
        numbers.setdefault(value, len(numbers))

    def called(value: onnx_ir.Value | None) -> str:
        return "" if value is None else f"%{numbers[value]}" if value in numbers else str(value.name)

    parameters = [_tensor(v.const_value) for v in graph.initializers.values() if v.const_value is not None]
    lines = [
        (_node(node, versions), [called(v) for v in node.inputs], [called(v) for v in node.outputs]) for node in graph
    ]
    return repr((len(graph.inputs), parameters, lines, [called(value) for value in graph.outputs]))


def _own_values(graph: onnx_ir.Graph) -> Iterator[onnx_ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs
