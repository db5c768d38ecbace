"""The bodies of If, Loop and Scan: names of their own, what one run hands to the next, constants inside, and values that are shown.

A body has names of its own, which need not differ from those of another body. Here each value inside gets the place where it
is as the front of its name (`loop/body/relu`), so that one name means one value in the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import onnx_ir

from cmrc.hosts.onnx.nodes import data_type, nodes_of, open_bodies, own_values, placed, subgraphs, values_of
from cmrc.ir.graph import Value


class Carried(NamedTuple):
    """What a Loop or Scan hands from one run of its body to the next: `first` is given to the first run."""

    first: onnx_ir.Value
    given: onnx_ir.Value
    returned: onnx_ir.Value
    result: onnx_ir.Value | None


def carried_by(node: onnx_ir.Node) -> Iterator[Carried]:
    if node.op_type == "If":
        return
    (body,) = subgraphs(node)
    loop = node.op_type == "Loop"
    count = len(body.inputs) - 2 if loop else len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
    for i in range(count):
        first = node.inputs[i + 2 * loop]
        if first is not None:
            result = node.outputs[i] if i < len(node.outputs) else None
            yield Carried(first, body.inputs[i + 2 * loop], body.outputs[i + loop], result)


def name_apart(graph: onnx_ir.Graph) -> None:
    """Give every value inside a body the name of its place and its own: no two values of the model have the same name."""
    taken: set[str] = set()
    for place, body in placed(graph):
        for value in list(own_values(body)):
            if not value.name:
                continue
            name = base = place + value.name.removeprefix(place).lstrip("/") if place else value.name
            count = 0
            while place and name in taken:
                count += 1
                name = f"{base}{count}"
            taken.add(name)
            if name != value.name:
                _rename(value, name)


def _rename(value: onnx_ir.Value, name: str) -> None:
    """Another name for a value. Its tensor keeps its own: it may be the user's."""
    tensor, value.const_value = value.const_value, None
    value.name = name
    if isinstance(tensor, onnx_ir.ExternalTensor):
        value.const_value = onnx_ir.ExternalTensor(
            tensor.location, tensor.offset, tensor.length, tensor.dtype, shape=tensor.shape, name=name, base_dir=tensor.base_dir
        )  # fmt: skip
    elif tensor is not None:
        value.const_value = onnx_ir.LazyTensor(
            lambda: tensor, tensor.dtype, onnx_ir.Shape(tensor.shape.numpy()), name=name
        )


# ---------------------------------------------------------------- values inside a body that depend on no input


def lift(graph: onnx_ir.Graph, name: str) -> None:
    """Move what a value inside a body is computed from, all of it constant, behind the nodes of the graph itself."""
    values = values_of(graph)
    moved: dict[onnx_ir.Node, None] = {}

    def visit(value: onnx_ir.Value) -> None:
        node, home = value.producer(), value.graph
        if node is not None and home is not graph and node not in moved:
            for read in node.inputs:
                if read is not None:
                    visit(read)
            moved[node] = None
        elif node is None and home is not graph and value.is_initializer() and home is not None:
            del home.initializers[value.name or ""]
            graph.register_initializer(value)

    visit(values[name])
    for node in moved:
        assert node.graph is not None
        node.graph.remove(node)
        graph.append(node)


# ---------------------------------------------------------------- values inside a body, shown outside


def show(graph: onnx_ir.Graph, wanted: Mapping[str, Value]) -> dict[str, str]:
    """Make values inside bodies results of the graph's own nodes, and say by what names.

    A branch that is not taken gives an empty value. A Loop or Scan gives one for each run, one behind the other along a new first axis.
    """
    holders = {body: node for node in nodes_of(graph) for body in open_bodies(node)}
    values, shown = values_of(graph), dict[str, str]()
    for name, known in wanted.items():
        value = values[name]
        value.dtype = data_type(known.dtype)
        while value.graph is not graph:
            assert value.graph in holders
            value = _shown_by(holders[value.graph], value, len(known.shape), f"{SHOWN}{len(shown)}.{name}")
        shown[name] = value.name or ""
    return shown


def runs_often(graph: onnx_ir.Graph, name: str) -> bool:
    """Whether a value is made in each run of a Loop or Scan."""
    value = values_of(graph)[name]
    return any(value.graph is body for node in nodes_of(graph) if node.op_type != "If" for body in open_bodies(node))


SHOWN = "cmrc.shown."


def _shown_by(node: onnx_ir.Node, value: onnx_ir.Value, rank: int, name: str) -> onnx_ir.Value:
    """The value as one more result of the node inside which it is."""
    assert value.dtype is not None
    for i, body in enumerate(open_bodies(node)):
        given = onnx_ir.Value(
            name=f"{name}.{i}.{node.name or node.outputs[0].name}", type=onnx_ir.TensorType(value.dtype)
        )
        if value.graph is body:
            maker = onnx_ir.Node("", "Identity", [value], outputs=[given])
        else:
            nothing = onnx_ir.tensor(np.zeros((0,) * rank, value.dtype.numpy()))
            maker = onnx_ir.Node("", "Constant", [], [onnx_ir.AttrTensor("value", nothing)], outputs=[given])
        body.append(maker)
        body.outputs.append(given)
    for attribute in ("scan_output_axes", "scan_output_directions"):
        if attribute in node.attributes:
            node.attributes[attribute] = onnx_ir.AttrInt64s(attribute, [*node.attributes[attribute].as_ints(), 0])
    node.resize_outputs(len(node.outputs) + 1)
    result = node.outputs[-1]
    result.name, result.type = f"{name}.of.{node.name or node.outputs[0].name}", onnx_ir.TensorType(value.dtype)
    return result
