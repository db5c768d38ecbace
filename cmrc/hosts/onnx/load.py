"""Loading an ONNX file, and whether what it holds is a sound model: asked once, before anything is made of it.

A file may say anything. Versions that nobody knows, values that nobody makes, attributes of another type than the op has, and
data that are not there, too short, or outside the model's folder are refused here, with the node and the way out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import onnx
import onnx_ir

from cmrc.errors import TraceError
from cmrc.hosts.onnx.nodes import is_sorted, with_inner

CHECK = "see what onnx.checker.check_model(model) says, and export the model again"
SORT = "see what onnx.checker.check_model(model) says; onnx_ir.passes.common.TopologicalSortPass sorts nodes"
BESIDE = "put the data file into the folder of the model, and let the model name it by a path inside that folder"


def require_sound(model: onnx_ir.Model) -> None:
    """Raise a TraceError that names what is wrong."""
    graphs = [*model.graphs()]
    _require_text(model, graphs)
    _require_known_versions(model)
    _require_made_values(model.graph)
    if not is_sorted(model.graph):
        raise TraceError("the model cannot be read: its nodes are out of order", fix=SORT)
    for graph in graphs:
        for node in graph:
            _require_declared(node, model.opset_imports.get(node.domain, 0))
    for name, op, tensor in _tensors(graphs):
        _require_data(name, op, tensor)


def label(node: onnx_ir.Node) -> str:
    """What to call a node in an error."""
    return node.name or next((value.name for value in node.outputs if value.name), "")


def _require_text(model: onnx_ir.Model, graphs: Sequence[onnx_ir.Graph]) -> None:
    """Names are text: protobuf hands out bytes where a file holds other than UTF-8."""
    for name in _names(model, graphs):
        if name is not None and not isinstance(name, str):
            raise TraceError(f"the model has a name that is not text: {name!r}", fix=CHECK)


def _names(model: onnx_ir.Model, graphs: Sequence[onnx_ir.Graph]) -> Iterator[object]:
    yield from model.opset_imports
    yield from itertools.chain.from_iterable(model.metadata_props.items())
    for graph in graphs:
        yield from itertools.chain.from_iterable(graph.metadata_props.items())
        for value in (*graph.inputs, *graph.outputs, *graph.initializers.values()):
            yield from _names_of_value(value)
        for node in graph:
            yield from (node.name, node.op_type, node.domain, node.overload)
            yield from node.attributes.data
            if node.metadata_props:
                yield from itertools.chain.from_iterable(node.metadata_props.items())
            for value in node.outputs:
                yield from _names_of_value(value)


def _names_of_value(value: onnx_ir.Value) -> Iterator[object]:
    yield value.name
    if value.shape is not None:
        yield from (dim.value for dim in value.shape if isinstance(dim, onnx_ir.SymbolicDim))


def _require_known_versions(model: onnx_ir.Model) -> None:
    newest = onnx.defs.onnx_opset_version()
    if model.ir_version > onnx.IR_VERSION:
        reason = (
            f"the model has IR version {model.ir_version}, and the installed onnx knows those up to {onnx.IR_VERSION}"
        )
        raise TraceError(reason, fix="pip install -U onnx, or export the model again")
    for domain, version in model.opset_imports.items():
        if not 0 <= version < 2**31:
            raise TraceError(f"the model has opset {version} of the domain {domain!r}", fix=CHECK)
    opset = model.opset_imports.get("", 0)
    if opset > newest:
        reason = f"the model has opset {opset}, and the installed onnx knows those up to {newest}"
        raise TraceError(reason, fix="pip install -U onnx, or export the model again")


# ---------------------------------------------------------------- values


def _require_made_values(graph: onnx_ir.Graph) -> None:
    """Whatever is read or returned is made by a node, or is an input or an initializer."""
    for node in graph:
        for reader in with_inner(node):
            for value in reader.inputs:
                if value is not None and value.name and not _is_made(value):
                    reason = f"it reads {value.name!r}, which no node, input or initializer gives"
                    raise TraceError(reason, node=label(reader), op=reader.op_type, fix=CHECK)
    for value in graph.outputs:
        if not _is_made(value):
            raise TraceError("no node, input or initializer gives it", node=value.name or "", op="output", fix=CHECK)


def _is_made(value: onnx_ir.Value) -> bool:
    return value.producer() is not None or value.is_graph_input() or value.is_initializer()


# ---------------------------------------------------------------- attributes


class Declared(NamedTuple):
    """What onnx declares of an op: how many inputs and outputs, and the types of its attributes."""

    inputs: tuple[int, int]
    outputs: tuple[int, int]
    attributes: dict[str, onnx_ir.AttributeType]
    required: frozenset[str]


@cache
def _declared(domain: str, op: str, opset: int) -> Declared | None:
    try:
        schema = onnx.defs.get_schema(op, opset, domain)
    except onnx.defs.SchemaError:
        return None
    attributes = schema.attributes  # made anew at each look
    return Declared(
        (schema.min_input, schema.max_input),
        (schema.min_output, schema.max_output),
        {name: onnx_ir.AttributeType[str(each.type).rpartition(".")[2]] for name, each in attributes.items()},
        frozenset(name for name, each in attributes.items() if each.required),
    )


def _require_declared(node: onnx_ir.Node, opset: int) -> None:
    """The attributes and the number of inputs are those of the op, where onnx knows it."""
    declared = _declared(node.domain, node.op_type, opset)
    if declared is None:
        return
    count = len(node.inputs)
    while count and node.inputs[count - 1] is None:
        count -= 1
    least, most = declared.inputs
    if not least <= count <= most:
        takes = str(least) if least == most else f"{least} to {most}" if most < 2**31 - 1 else f"at least {least}"
        raise TraceError(f"it has {count} inputs, the op takes {takes}", node=label(node), op=node.op_type, fix=CHECK)
    fewest, largest = declared.outputs
    if not fewest <= len(node.outputs) <= largest:
        raise TraceError(
            f"it has {len(node.outputs)} outputs, and the op does not", node=label(node), op=node.op_type, fix=CHECK
        )
    given = node.attributes.data
    if not given.keys() >= declared.required:
        missing = min(declared.required - given.keys())
        raise TraceError(f"its attribute {missing!r} is missing", node=label(node), op=node.op_type, fix=CHECK)
    for name, attribute in given.items():
        kind = declared.attributes.get(name)
        if kind is not None and attribute.type != kind and not attribute.is_ref():
            reason = f"its attribute {name!r} is of type {attribute.type.name}, the op has {kind.name}"
            raise TraceError(reason, node=label(node), op=node.op_type, fix=CHECK)


# ---------------------------------------------------------------- data


def _tensors(graphs: Sequence[onnx_ir.Graph]) -> Iterator[tuple[str, str, onnx_ir.TensorProtocol]]:
    """Every tensor, with the name and kind of what holds it."""
    for graph in graphs:
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield value.name or "", "initializer", value.const_value
        for node in graph:
            for attribute in node.attributes.data.values():
                if attribute.type == onnx_ir.AttributeType.TENSOR and not attribute.is_ref():
                    yield label(node), node.op_type, attribute.value  # as_tensor() fails on one without a type


def _require_data(name: str, op: str, tensor: onnx_ir.TensorProtocol) -> None:
    """The data have as many bytes as the shape asks for, and lie where the model may read."""
    if tensor.dtype == onnx_ir.DataType.UNDEFINED:
        raise TraceError("its type of numbers is not given", node=name, op=op, fix=CHECK)
    if any(not isinstance(n, int) or n < 0 for n in tensor.shape):
        raise TraceError(f"its shape is {list(tensor.shape)}", node=name, op=op, fix=CHECK)
    if isinstance(tensor, onnx_ir.ExternalTensor):
        _require_external(name, op, tensor)
    elif isinstance(tensor, onnx_ir.TensorProtoTensor):
        problem = _stored_problem(tensor)
        if problem:
            raise TraceError(problem, node=name, op=op, fix=CHECK)


def _stored_problem(tensor: onnx_ir.TensorProtoTensor) -> str:
    """What is wrong with data that lie in the model itself, or nothing."""
    proto = tensor.raw
    if proto.HasField("raw_data"):
        size, needed = len(proto.raw_data), tensor.nbytes
        shape = [*proto.dims]
        return "" if size == needed else f"it has {size} bytes of data, its shape {shape} needs {needed}"
    try:
        tensor.numpy()
    except Exception:  # numpy and onnx_ir report data that do not fit in many ways
        return f"its data do not fit its shape {[*proto.dims]}"
    return ""


def _require_external(name: str, op: str, tensor: onnx_ir.ExternalTensor) -> None:
    location, folder = str(tensor.location), Path(tensor.base_dir or ".")
    file = folder / location
    needed, offset = tensor.nbytes, tensor.offset or 0
    if Path(location).is_absolute() or not file.resolve().is_relative_to(folder.resolve()):
        problem = f"its external data file {location} lies outside the folder of the model"
    elif not file.is_file():
        problem = f"its external data file {file} does not exist"
    elif file.stat().st_nlink > 1:
        problem = f"its external data file {file} has several hard links, which onnx does not read"
    elif offset < 0:
        problem = f"its external data start at {offset} bytes in {file}"
    elif tensor.length is not None and tensor.length != needed:
        problem = (
            f"it has {tensor.length} bytes of external data, its shape {list(tensor.shape.numpy())} needs {needed}"
        )
    elif file.stat().st_size < offset + needed:
        problem = f"its external data file {file} is cut off: {file.stat().st_size} bytes, {offset + needed} are needed"
    else:
        return
    raise TraceError(problem, node=name, op=op, fix=BESIDE)


def defaults(model: onnx_ir.Model) -> dict[str, onnx_ir.Value]:
    """The initializers that are defaults, by name. Before IR version 4 every initializer had to be an input."""
    if model.ir_version < 4:
        return {}
    return {name: value for name, value in model.graph.initializers.items() if value.is_graph_input()}


def reason(name: str) -> str:
    """Why a node that reads a default is left whole."""
    return (
        f"{name!r} is an input of the model with a default, which a caller may replace; "
        "onnx_ir.passes.common.RemoveInitializersFromInputsPass makes it a parameter"
    )


def load(path: Path) -> onnx_ir.Model:
    """The model in a file. Weights in external files stay there until they are used."""
    if not path.is_file():
        what = "it is a folder" if path.is_dir() else "there is no such file"
        raise TraceError(f"cannot read {path}: {what}", fix="give the path of an .onnx file")
    fix = "export or download it again; an .onnx file is a serialised ModelProto"
    try:
        model = onnx_ir.load(path.absolute(), format="protobuf")  # its data is found wherever the process goes later
    except Exception as error:  # protobuf's DecodeError, or whatever a broken file sets off inside onnx_ir
        broken = type(error).__name__ == "DecodeError"
        why = "it is not an ONNX model, or it is cut off" if broken else last_line(error)
        raise TraceError(f"cannot read {path}: {why}", fix=fix) from error
    if not model.graph.outputs or not model.opset_imports:
        raise TraceError(f"cannot read {path}: it is not an ONNX model, or it is cut off", fix=fix)
    require_sound(model)
    return model


def causes(error: BaseException) -> list[BaseException]:
    """The error, what caused it, and so on to the first."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    return chain


def last_line(error: BaseException) -> str:
    """The innermost cause of an error, in a line."""
    first = causes(error)[-1]
    lines = str(first).strip().splitlines()
    return lines[-1] if lines else type(first).__name__
