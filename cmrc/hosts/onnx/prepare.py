"""What is done to an ONNX model before it is read, and changes nothing that it computes.

old opset     converted by onnx.version_converter; a warning says so
functions     those that the model brings are put in place of their calls
assumptions   an input that always has the same value becomes a constant (`cmrc assume`)
If            one whose condition is known then is the branch that it takes
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir
from onnx_ir.passes.common import InlinePass

from cmrc.errors import InputError, TraceError
from cmrc.hosts.onnx.constants import Constants
from cmrc.hosts.onnx.load import last_line

OLDEST_OPSET, MODERN_OPSET = 9, 17


def prepare(model: onnx_ir.Model, assume: Mapping[str, Any] | None = None) -> onnx_ir.Model:
    """The model as it is read; it may be changed in place. `assume` has values for inputs, by name."""
    model = _converted(model)
    if model.functions:
        InlinePass()(model)
    for name, value in (assume or {}).items():
        _fix_input(model.graph, name, value)
    if any(node.op_type == "If" for node in model.graph):
        while (known := _first_known_branch(model)) is not None:
            _take_branch(model.graph, *known)
    return model


def _converted(model: onnx_ir.Model) -> onnx_ir.Model:
    opset = model.opset_imports.get("", 0)
    if not 0 < opset < OLDEST_OPSET:
        return model
    try:
        proto = onnx.version_converter.convert_version(onnx_ir.to_proto(model), MODERN_OPSET)
    except Exception as error:  # the converter has its own words for each op that it does not know
        raise TraceError(
            f"the model has opset {opset}, and onnx.version_converter cannot bring it to {MODERN_OPSET}: {last_line(error)}",
            fix="export the model again with a newer opset",
        ) from error
    warnings.warn(f"the model has opset {opset}: onnx.version_converter has made it {MODERN_OPSET}", stacklevel=4)
    return onnx_ir.from_proto(proto)


# ---------------------------------------------------------------- assumptions


def _fix_input(graph: onnx_ir.Graph, name: str, given: Any) -> None:
    value = next((value for value in graph.inputs if value.name == name), None)
    if value is None:
        names = ", ".join(each.name or "" for each in graph.inputs)
        raise InputError(f"the model has no input {name!r} that could be assumed", fix=f"its inputs are {names}")
    dtype = (value.dtype or onnx_ir.DataType.FLOAT).numpy()
    try:
        array = np.asarray(given).astype(dtype)
    except (TypeError, ValueError) as error:
        raise InputError(f"the input {name!r} is {dtype.name}, and {given!r} is not", fix="give a number") from error
    rank = None if value.shape is None else len(value.shape)
    if rank is not None and array.ndim != rank:
        if array.size != 1:
            raise InputError(f"the input {name!r} has {rank} axes, and {given!r} has {array.ndim}")
        array = array.reshape((1,) * rank)
    graph.inputs.remove(value)
    value.const_value = onnx_ir.tensor(array, name=name)
    value.shape = onnx_ir.Shape(array.shape)
    graph.register_initializer(value)


# ---------------------------------------------------------------- branches


def _first_known_branch(model: onnx_ir.Model) -> tuple[onnx_ir.Node, onnx_ir.Graph] | None:
    """The first If whose condition depends on no input, and the branch that it takes."""
    graph = model.graph
    fixed = {name for name, value in graph.initializers.items() if not value.is_graph_input()}
    constants = Constants(model, dict.fromkeys(fixed, ()))
    for node in graph:
        if node.op_type == "Constant":
            constants.sources.update((value.name or "", ()) for value in node.outputs)
        condition = node.inputs[0].name if node.op_type == "If" and node.inputs[0] is not None else ""
        if condition and condition in constants.sources:
            leaf = constants.leaf(condition, None, "unknown") if condition not in fixed else None
            tensor = graph.initializers[condition].const_value if condition in fixed else None
            taken = leaf.load() if leaf is not None else None if tensor is None else tensor.numpy()
            if taken is not None:
                name = "then_branch" if bool(np.asarray(taken).reshape(())) else "else_branch"
                return node, node.attributes[name].as_graph()
        constants.covers(node)
    return None


def _take_branch(graph: onnx_ir.Graph, node: onnx_ir.Node, body: onnx_ir.Graph) -> None:
    """The nodes of a branch in place of the If; its results are copies under the names of the If's own."""
    returned = list(body.outputs)
    body.outputs.clear()
    inner_nodes, taken = list(body), _names(graph)
    for value in (*body.initializers.values(), *(value for inner in inner_nodes for value in inner.outputs)):
        if value.name in taken:
            value.name = f"{node.name or node.outputs[0].name}.{value.name}"
    for value in list(body.initializers.values()):
        del body.initializers[value.name or ""]
        graph.register_initializer(value)
    body.remove(inner_nodes)
    graph.insert_before(node, inner_nodes)
    for old, new in zip(node.outputs, returned, strict=True):
        copy = onnx_ir.Node("", "Identity", [new], outputs=[onnx_ir.Value(type=old.type, shape=old.shape)])
        graph.insert_before(node, copy)
        name, old.name = old.name, None
        old.replace_all_uses_with(copy.outputs[0], replace_graph_outputs=True)
        copy.outputs[0].name = name
    graph.remove(node, safe=True)


def _names(graph: onnx_ir.Graph) -> set[str | None]:
    results = (value.name for node in graph for value in node.outputs)
    return {*results, *(value.name for value in (*graph.inputs, *graph.initializers.values()))} - {None, ""}
