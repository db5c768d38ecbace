"""Loading an ONNX file, and checking once, before anything else, that it holds a sound model.

A file may say anything. Versions that nobody knows, values that nobody makes, attributes of another type than the op has, and
data that are not there, too short, or outside the model's folder are refused here, with the node and the way out.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir
from onnx_ir.passes.common import InlinePass

from cmrc.errors import CmrcError, InputError, TraceError, last_line
from cmrc.hosts.onnx.bodies import lift, name_apart
from cmrc.hosts.onnx.nodes import CHECK, is_open, is_sorted, label, subgraphs, with_inner
from cmrc.hosts.onnx.session import extract
from cmrc.ir.graph import Array, Leaf, Shape

SORT = "see what onnx.checker.check_model(model) says; onnx_ir.passes.common.TopologicalSortPass sorts nodes"
TEXT = {str, type(None)}
Graphs = Mapping[onnx_ir.Graph, Sequence[onnx_ir.Node]]  # a graph with its nodes, listed once
Files = dict[tuple[str, str], int | str]  # by name and folder of a data file: its size, or what is wrong with it
BESIDE = "put the data file into the folder of the model, and let the model name it by a path inside that folder"


def require_sound(model: onnx_ir.Model) -> None:
    """Raise a TraceError that names what is wrong."""
    graphs = {graph: [*graph] for graph in model.graphs()}
    _require_text(model, graphs)
    _require_known_versions(model)
    _require_made_values(model.graph, graphs[model.graph])
    if not is_sorted(model.graph):
        raise TraceError("the model cannot be read: its nodes are out of order", fix=SORT)
    for nodes in graphs.values():
        for node in nodes:
            _require_declared(node, model.opset_imports.get(node.domain, 0))
    files: Files = {}
    for name, op, tensor in _tensors(graphs):
        _require_data(name, op, tensor, files)


def _require_text(model: onnx_ir.Model, graphs: Graphs) -> None:
    """Names are text: protobuf returns bytes where a file holds something other than UTF-8."""
    if TEXT.issuperset(map(type, _names(model, graphs))):
        return
    name = next(name for name in _names(model, graphs) if type(name) not in TEXT)
    raise TraceError(f"the model has a name that is not text: {name!r}", fix=CHECK)


def _names(model: onnx_ir.Model, graphs: Graphs) -> Iterator[object]:
    yield from model.opset_imports
    yield from itertools.chain.from_iterable(model.metadata_props.items())
    for graph, nodes in graphs.items():
        yield from itertools.chain.from_iterable(graph.metadata_props.items())
        for value in (*graph.inputs, *graph.outputs, *graph.initializers.values()):
            yield from _names_of_value(value)
        for node in nodes:
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


def _require_made_values(graph: onnx_ir.Graph, nodes: Sequence[onnx_ir.Node]) -> None:
    """Whatever is read or returned is made by a node, or is an input or an initializer."""
    for node in nodes:
        for reader in with_inner(node):
            for value in reader.inputs:
                if value is not None and value.name and not _is_made(value):
                    reason = f"it reads {value.name!r}, but no node, input or initializer has that name"
                    raise TraceError(reason, node=label(reader), op=reader.op_type, fix=CHECK)
    for value in graph.outputs:
        if not _is_made(value):
            raise TraceError(
                "no node, input or initializer has that name", node=value.name or "", op="output", fix=CHECK
            )


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
        raise TraceError(
            f"it has {count} inputs, but the op takes {takes}", node=label(node), op=node.op_type, fix=CHECK
        )
    fewest, largest = declared.outputs
    if not fewest <= len(node.outputs) <= largest:
        raise TraceError(
            f"it has {len(node.outputs)} outputs, which the op does not allow",
            node=label(node),
            op=node.op_type,
            fix=CHECK,
        )
    given = node.attributes.data
    if not given.keys() >= declared.required:
        missing = min(declared.required - given.keys())
        raise TraceError(f"its attribute {missing!r} is missing", node=label(node), op=node.op_type, fix=CHECK)
    for name, attribute in given.items():
        kind = declared.attributes.get(name)
        if kind is not None and attribute.type != kind and not attribute.is_ref():
            reason = f"its attribute {name!r} is of type {attribute.type.name}, but the op has {kind.name}"
            raise TraceError(reason, node=label(node), op=node.op_type, fix=CHECK)


# ---------------------------------------------------------------- data


def _tensors(graphs: Graphs) -> Iterator[tuple[str, str, onnx_ir.TensorProtocol]]:
    """Every tensor, with the name and kind of what holds it."""
    for graph, nodes in graphs.items():
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield value.name or "", "initializer", value.const_value
        for node in nodes:
            for attribute in node.attributes.data.values():
                if attribute.type == onnx_ir.AttributeType.TENSOR and not attribute.is_ref():
                    yield label(node), node.op_type, attribute.value  # as_tensor() fails on one without a type


def _require_data(name: str, op: str, tensor: onnx_ir.TensorProtocol, files: Files) -> None:
    """The data have as many bytes as the shape asks for, and lie where the model may read."""
    try:
        untyped = tensor.dtype == onnx_ir.DataType.UNDEFINED
    except ValueError as error:  # a number that stands for no type
        raise TraceError(last_line(error), node=name, op=op, fix=CHECK) from error
    if untyped:
        raise TraceError("its data type is not given", node=name, op=op, fix=CHECK)
    if any(not isinstance(n, int) or n < 0 for n in tensor.shape):
        raise TraceError(f"its shape is {list(tensor.shape)}", node=name, op=op, fix=CHECK)
    if isinstance(tensor, onnx_ir.ExternalTensor):
        _require_external(name, op, tensor, files)
    elif isinstance(tensor, onnx_ir.TensorProtoTensor):
        problem = _stored_problem(tensor)
        if problem:
            raise TraceError(problem, node=name, op=op, fix=CHECK)


def _stored_problem(tensor: onnx_ir.TensorProtoTensor) -> str:
    """What is wrong with data that lie in the model itself, or nothing."""
    proto = tensor.raw
    if proto.HasField("raw_data"):
        size, needed = len(proto.raw_data), tensor.nbytes
        return "" if size == needed else f"it has {size} bytes of data, but its shape {[*proto.dims]} needs {needed}"
    try:
        tensor.numpy()
    except Exception:  # numpy and onnx_ir report data that do not fit in many ways
        return f"its data do not match its shape {[*proto.dims]}"
    return ""


def _require_external(name: str, op: str, tensor: onnx_ir.ExternalTensor, files: Files) -> None:
    where = (str(tensor.location), str(tensor.base_dir or "."))
    if where not in files:  # most tensors are in the same one
        files[where] = _size_of(*where)
    size, file = files[where], Path(where[1], where[0])
    needed, offset = tensor.nbytes, tensor.offset or 0
    if isinstance(size, str):
        problem = size
    elif offset < 0:
        problem = f"its external data start at {offset} bytes in {file}"
    elif tensor.length is not None and tensor.length != needed:
        problem = (
            f"it has {tensor.length} bytes of external data, but its shape {list(tensor.shape.numpy())} needs {needed}"
        )
    elif size < offset + needed:
        problem = f"its external data file {file} is cut off: {size} bytes, {offset + needed} are needed"
    else:
        return
    raise TraceError(problem, node=name, op=op, fix=BESIDE)


def _size_of(location: str, base: str) -> int | str:
    """The bytes of a data file, or why it may not be read."""
    folder = Path(base)
    file = folder / location
    if Path(location).is_absolute() or not file.resolve().is_relative_to(folder.resolve()):
        return f"its external data file {location} is outside the model's folder"
    if not file.is_file():
        return f"its external data file {file} does not exist"
    if file.stat().st_nlink > 1:
        return f"its external data file {file} has several hard links, and onnx does not read such files"
    return file.stat().st_size


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


# ---------------------------------------------------------------- what is known before the model runs


DOMAINS = ("", "ai.onnx", "com.microsoft")


DRAWS = {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}


@dataclass(slots=True)
class Constants:
    """The values that depend on no input of a model; nodes are shown to it in their order."""

    model: onnx_ir.Model
    sources: dict[str, tuple[Leaf, ...]] = field(default_factory=dict)  # the parameters that each is made of, by name

    def covers(self, node: onnx_ir.Node) -> bool:
        """Whether all that a node reads is known before the model runs. Its results are, from here on."""
        read = [value.name for value in node.inputs if value is not None and value.name]
        known = (
            all(name in self.sources for name in read)
            and bool(node.inputs)
            and node.domain in DOMAINS
            and node.op_type not in DRAWS
            and not subgraphs(node)
        )
        if known:
            parts = tuple(dict.fromkeys(leaf for name in read for leaf in self.sources[name]))
            self.sources.update((value.name, parts) for value in node.outputs if value.name)
        return known

    def leaf(self, name: str, shape: Shape | None, dtype: str) -> Leaf | None:
        """A value as a parameter. Where its shape is not known it is computed at once; `None` where onnxruntime cannot."""
        load = cache(partial(_compute, self.model, name))
        sizes = tuple(n for n in shape or () if isinstance(n, int))
        if shape is not None and len(sizes) == len(shape) and dtype != "unknown":
            return Leaf(name, sizes, dtype, load, self.sources[name])
        try:
            array = load()
        except CmrcError:
            return None
        return Leaf(name, tuple(array.shape), array.dtype.name, load, self.sources[name])


def _compute(model: onnx_ir.Model, name: str) -> Array:
    if name not in onnx_ir.convenience.create_value_mapping(model.graph, include_subgraphs=False):
        model = model.clone()
        lift(model.graph, name)
    (array,) = extract(model, {}, [], [name], (), ["CPUExecutionProvider"]).run({}).values()
    return np.asarray(array)


# ---------------------------------------------------------------- before the model is read


OLDEST_OPSET, MODERN_OPSET = 9, 17


def prepare(model: onnx_ir.Model, assume: Mapping[str, Any] | None = None) -> onnx_ir.Model:
    """The model as it is read; it may be changed in place. `assume` has values for inputs, by name."""
    model = _converted(model)
    if model.functions:
        try:
            InlinePass()(model)
        except ValueError as error:
            raise TraceError(f"its functions cannot be put in place: {last_line(error)}", fix=CHECK) from error
    for name, value in (assume or {}).items():
        _fix_input(model.graph, name, value)
    if any(node.op_type == "If" for node in model.graph):
        while (known := _first_known_branch(model)) is not None:
            _take_branch(model.graph, *known)
    if any(map(is_open, model.graph)):
        name_apart(model.graph)
    return model


def _converted(model: onnx_ir.Model) -> onnx_ir.Model:
    opset = model.opset_imports.get("", 0)
    if not 0 < opset < OLDEST_OPSET:
        return model
    try:
        proto = onnx.version_converter.convert_version(onnx_ir.to_proto(model), MODERN_OPSET)
    except Exception as error:  # the converter has its own words for each op that it does not know
        raise TraceError(
            f"the model has opset {opset}, and onnx.version_converter cannot convert it to {MODERN_OPSET}: {last_line(error)}",
            fix="export the model again with a newer opset",
        ) from error
    warnings.warn(f"the model has opset {opset}: onnx.version_converter converted it to {MODERN_OPSET}", stacklevel=4)
    return onnx_ir.from_proto(proto)


def _fix_input(graph: onnx_ir.Graph, name: str, given: Any) -> None:
    value = next((value for value in graph.inputs if value.name == name), None)
    if value is None:
        names = ", ".join(each.name or "" for each in graph.inputs)
        raise InputError(f"the model has no input {name!r} whose value could be assumed", fix=f"its inputs are {names}")
    dtype = (value.dtype or onnx_ir.DataType.FLOAT).numpy()
    try:
        array = np.asarray(given).astype(dtype)
    except (TypeError, ValueError) as error:
        raise InputError(f"the input {name!r} is {dtype.name}, and {given!r} is not", fix="give a number") from error
    rank = None if value.shape is None else len(value.shape)
    if value.shape is not None and array.ndim != rank:
        if array.size != 1:
            raise InputError(f"the input {name!r} has {rank} axes, and {given!r} has {array.ndim}")
        array = np.full([size if isinstance(size, int) else 1 for size in value.shape], array.item(), dtype)
    graph.inputs.remove(value)
    value.const_value = onnx_ir.tensor(array, name=name)
    value.shape = onnx_ir.Shape(array.shape)
    graph.register_initializer(value)


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
    inner_nodes, taken = list(body), _value_names(graph)
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


def _value_names(graph: onnx_ir.Graph) -> set[str | None]:
    results = (value.name for node in graph for value in node.outputs)
    return {*results, *(value.name for value in (*graph.inputs, *graph.initializers.values()))} - {None, ""}
