"""The nodes of an ONNX model: their names, the graphs inside them, the do's recorded on them, and their part of a fingerprint."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import onnx
import onnx_ir

from cmrc.errors import HostError, TraceError
from cmrc.ir.graph import Graph, numpy_dtype
from cmrc.strict_json import parse_records

# ---------------------------------------------------------------- names

# A user may call a value by its name, by its node, or by the module of the model that it came from. A module path names what the
# module returns. A module that was called several times returns several values: its path names them all, `path@0`, `path@1`, ...
# one each.

Kind = onnx_ir.AttributeType
SCOPES = "pkg.torch.onnx.name_scopes"
QUOTED = re.compile(r"'([^']*)'")  # the entries of a list of names, as Python prints it


def module_path(node: onnx_ir.Node) -> str:
    """`blocks.0.mlp.fc1`, from what torch's exporters leave: the scopes in the metadata, or a name like a path."""
    text = node.metadata_props.get(SCOPES)
    if text is not None:
        scopes = QUOTED.findall(text)
        return str(scopes[-2]) if len(scopes) > 1 else ""
    name = node.name or ""
    return ".".join(name.split("/")[1:-1]) if name.startswith("/") else ""


def unique_origins(graph: onnx_ir.Graph) -> dict[onnx_ir.Node, tuple[str, str]]:
    """A name of its own for every node (its output where it has none), and its module path."""
    nodes = [(node, place) for place, each in placed(graph) for node in each]
    counts = Counter(node.name for node, _ in nodes)
    origins = {}
    for node, place in nodes:
        stand_in, path = next((v.name for v in node.outputs if v.name), ""), module_path(node)
        origins[node] = (node.name if node.name and counts[node.name] == 1 else stand_in, path and place + path)
    return origins


def name_values(graph: Graph, origins: Mapping[onnx_ir.Node, tuple[str, str]]) -> dict[str, list[str]]:
    """Every alias to the values it names."""
    hidden = {node.name for node in graph.nodes if node.marks.inside}
    names: dict[str, list[str]] = {name: [name] for name in graph.values() if name not in hidden}

    def add(alias: str, values: Iterable[str]) -> None:
        listed = names.setdefault(alias, [])
        listed.extend(value for value in values if value not in listed)

    outputs: dict[onnx_ir.Node, list[str]] = {}
    for node in origins:
        named = [v.name for v in node.outputs if v.name in names]
        if named:
            outputs[node] = [name for name in named if name]
            add(node.name or "", outputs[node])
    names.pop("", None)
    members: dict[str, list[onnx_ir.Node]] = {}
    for node in outputs:
        place, separator, module = origins[node][1].rpartition("/")
        parts = module.split(".")
        for depth in range(1, len(parts) + 1):
            members.setdefault(place + separator + ".".join(parts[:depth]), []).append(node)
    members.pop("", None)
    for path, nodes in members.items():
        calls = _calls(nodes)
        for i, call in enumerate(calls):
            returned = _returned(call, outputs)
            add(path, returned)
            if len(calls) > 1:
                add(f"{path}@{i}", returned)
    return names


def _calls(nodes: Sequence[onnx_ir.Node]) -> list[list[onnx_ir.Node]]:
    """Parts of a module that exchange no values and do the same ops are separate calls of it."""
    group: dict[onnx_ir.Node, onnx_ir.Node] = {node: node for node in nodes}

    def root(node: onnx_ir.Node) -> onnx_ir.Node:
        while group[node] is not node:
            group[node] = group[group[node]]
            node = group[node]
        return node

    for node in nodes:
        for value in node.inputs:
            maker = None if value is None else value.producer()
            if maker in group and maker is not None:
                group[root(node)] = root(maker)
    calls: dict[onnx_ir.Node, list[onnx_ir.Node]] = {}
    for node in nodes:
        calls.setdefault(root(node), []).append(node)
    kinds = {tuple(sorted(node.op_type for node in call)) for call in calls.values()}
    return list(calls.values()) if len(kinds) == 1 else [list(nodes)]


def _returned(call: Sequence[onnx_ir.Node], outputs: dict[onnx_ir.Node, list[str]]) -> list[str]:
    """The outputs of the last node of a call that anything outside reads."""
    inside = set(call)
    for node in reversed(call):
        left = [
            value.name or ""
            for value in node.outputs
            if value.name in outputs[node]
            and (value.is_graph_output() or any(use.node not in inside for use in value.uses()))
        ]
        if left:
            return left
    return outputs[call[-1]]


# ---------------------------------------------------------------- bodies

# If, Loop and Scan have graphs inside, which may read values of the graph around them, and which are read like it. A body of any other
# op stays as it is.

HOLDERS = ("If", "Loop", "Scan")
SHORT = {"then_branch": "then", "else_branch": "else"}


def subgraphs(node: onnx_ir.Node) -> list[onnx_ir.Graph]:
    """The bodies of one node."""
    return [body for _, body in _named(node)]


def _named(node: onnx_ir.Node) -> Iterator[tuple[str, onnx_ir.Graph]]:
    every = [attr for attr in node.attributes.data.values() if attr.type in (Kind.GRAPH, Kind.GRAPHS)]
    # then before else, in whatever order the file has them
    for attr in sorted(every, key=lambda attr: attr.name, reverse=True):
        if attr.type == Kind.GRAPH:
            yield SHORT.get(attr.name, attr.name), attr.as_graph()
        else:
            yield from ((f"{attr.name}{i}", body) for i, body in enumerate(attr.as_graphs()))


def is_open(node: onnx_ir.Node) -> bool:
    """Whether its bodies are read."""
    return node.op_type in HOLDERS and not node.domain


def open_bodies(node: onnx_ir.Node) -> list[onnx_ir.Graph]:
    return subgraphs(node) if is_open(node) else []


def placed(graph: onnx_ir.Graph, around: str = "") -> Iterator[tuple[str, onnx_ir.Graph]]:
    """A graph and every body that is read inside it, each with its place: `loop/body/`, nothing for the graph itself."""
    yield around, graph
    for node in graph:
        for kind, body in _named(node) if is_open(node) else ():
            stem = (node.name or next((v.name for v in node.outputs if v.name), "")).removeprefix(around).lstrip("/")
            yield from placed(body, f"{around}{stem}/{kind}/")


def graphs_of(graph: onnx_ir.Graph) -> Iterator[onnx_ir.Graph]:
    return (each for _, each in placed(graph))


def nodes_of(graph: onnx_ir.Graph) -> Iterator[onnx_ir.Node]:
    """The nodes of a graph and of every body that is read inside it."""
    for each in graphs_of(graph):
        yield from each


def values_of(graph: onnx_ir.Graph) -> dict[str, onnx_ir.Value]:
    """The values of a graph, and of every body that is read inside it, by name."""
    values = {value.name: value for each in graphs_of(graph) for value in own_values(each)}
    return {name: value for name, value in values.items() if name}


def own_values(graph: onnx_ir.Graph) -> Iterator[onnx_ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def computed_values(graph: onnx_ir.Graph) -> Iterator[onnx_ir.Value]:
    yield from graph.inputs
    for node in graph:
        yield from node.outputs


def inner_nodes(node: onnx_ir.Node) -> Iterator[onnx_ir.Node]:
    """Every node inside the bodies of a node, however deep."""
    for body in subgraphs(node):
        yield from onnx_ir.traversal.RecursiveGraphIterator(body)


def with_inner(node: onnx_ir.Node) -> tuple[onnx_ir.Node, ...]:
    """A node and all that are inside it."""
    return (node, *inner_nodes(node)) if subgraphs(node) else (node,)


def names_inside(node: onnx_ir.Node) -> Iterator[str]:
    """The names of a node, of the nodes inside it, and of their values."""
    yield node.name or ""
    for body in subgraphs(node):
        yield from onnx_ir.convenience.create_value_mapping(body)
        yield from (inner.name or "" for inner in onnx_ir.traversal.RecursiveGraphIterator(body))


def captured_by(node: onnx_ir.Node) -> list[str]:
    """The values that the bodies of a node read from around it, each once."""
    bodies = subgraphs(node)
    if not bodies:
        return []
    inner = [*inner_nodes(node)]
    read = [value for each in inner for value in each.inputs if value is not None]
    returned = [value for body in bodies for value in body.outputs]
    returned += [value for each in inner for body in subgraphs(each) for value in body.outputs]
    own = {*bodies, *(body for each in inner for body in subgraphs(each))}
    return list(dict.fromkeys(value.name for value in (*read, *returned) if value.name and value.graph not in own))


def is_sorted(graph: onnx_ir.Graph) -> bool:
    """Whether every node stands behind those that it reads from."""
    seen: set[onnx_ir.Node] = set()
    for node in graph:
        bodies = subgraphs(node)
        for reader in (node, *inner_nodes(node)) if bodies else (node,):
            for value in reader.inputs:
                maker = None if value is None else value.producer()
                if maker is not None and maker not in seen and maker.graph is graph:
                    return False
        seen.add(node)
        if bodies and not all(map(is_sorted, bodies)):
            return False
    return True


def tensor_of(constant: onnx_ir.Node) -> onnx_ir.TensorProtocol | None:
    """What a Constant makes. onnx_ir says it too, and holds every tensor against a protocol: a tenth of the time of a trace."""
    value = constant.attributes.get("value")
    if value is not None and len(constant.attributes) == 1 and value.type == Kind.TENSOR and not value.is_ref():
        tensor: onnx_ir.TensorProtocol = value.value
        return tensor
    return onnx_ir.convenience.get_const_tensor(constant.outputs[0])


# ---------------------------------------------------------------- annotations

# A plan that is written on a model: the do's are metadata of the nodes that make the replaced values.

ANNOTATION = "cmrc.do"
Entry = dict[str, Any]


def read_annotations(model: onnx_ir.Model) -> list[Entry]:
    """The do's recorded in the model, in the plan's order."""
    recorded: list[tuple[int, Entry]] = []
    owners: list[onnx_ir.Model | onnx_ir.Node] = [model, *nodes_of(model.graph)]
    for owner in owners:
        text = owner.metadata_props.get(ANNOTATION)
        if text is None:
            continue
        try:
            recorded.extend(parse_records(text, fields=3))
        except ValueError as error:
            where = owner.name or "" if isinstance(owner, onnx_ir.Node) else ""
            problem = f"the {ANNOTATION} metadata cannot be read: {error}"
            raise TraceError(problem, node=where, fix="remove it") from error
    return [entry for _, entry in sorted(recorded, key=lambda item: item[0])]


def annotate(model: onnx_ir.Model, entries: Sequence[tuple[str, Entry]]) -> onnx_ir.Model:
    """A clone with these do's, and no others, recorded on the nodes that make the values."""
    clone = model.clone()
    drop_annotations(clone)
    values = values_of(clone.graph)
    for order, (name, entry) in enumerate(entries):
        if name not in values:
            raise HostError("the model has no such value to annotate", node=name, fix="see `cmrc inspect`")
        owner = values[name].producer() or clone
        recorded = json.loads(owner.metadata_props.get(ANNOTATION, "[]"))
        owner.metadata_props[ANNOTATION] = json.dumps([*recorded, [order, name, entry]])
    return clone


def drop_annotations(model: onnx_ir.Model) -> None:
    """Remove every recorded do."""
    for node in nodes_of(model.graph):
        node.metadata_props.pop(ANNOTATION, None)
    model.metadata_props.pop(ANNOTATION, None)


# ---------------------------------------------------------------- details

# What every node is besides its operands, in one line each: the op, the version of its definition, its attributes, and those
# bodies that are not read. Names inside such a body are replaced by numbers, because exporters make them up; documentation and metadata are left out.


def details(model: onnx_ir.Model) -> dict[str, str]:
    """By the origin of the node in the IR."""
    versions = model.opset_imports
    return {name: repr(_node(node, versions)) for node, (name, _) in unique_origins(model.graph).items()}


def _node(node: onnx_ir.Node, versions: dict[str, int]) -> tuple[Any, ...]:
    version = _since(node.domain, node.op_type, versions.get(node.domain, 0))
    apart = {a.name for a in node.attributes.values() if a.type == Kind.GRAPH} if is_open(node) else ()
    attributes = sorted((a.name, _attribute(a, versions)) for a in node.attributes.values() if a.name not in apart)
    attributes += [("body", repr((len(body.inputs), len(body.outputs)))) for body in open_bodies(node)]
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
        return _tensor(attribute.value)  # as_tensor() holds every tensor against a protocol, which takes long
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
    for value in own_values(graph):
        numbers.setdefault(value, len(numbers))

    def called(value: onnx_ir.Value | None) -> str:
        return "" if value is None else f"%{numbers[value]}" if value in numbers else str(value.name)

    parameters = [_tensor(v.const_value) for v in graph.initializers.values() if v.const_value is not None]
    lines = [
        (_node(node, versions), [called(v) for v in node.inputs], [called(v) for v in node.outputs]) for node in graph
    ]
    return repr((len(graph.inputs), parameters, lines, [called(value) for value in graph.outputs]))


CHECK = "see what onnx.checker.check_model(model) says, and export the model again"


def label(node: onnx_ir.Node) -> str:
    """What to call a node in an error."""
    return node.name or next((value.name for value in node.outputs if value.name), "")


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


def dtype_name(dtype: onnx_ir.DataType | None) -> str:
    """The name of the type in numpy and ml_dtypes."""
    if dtype is None or dtype == onnx_ir.DataType.UNDEFINED:
        return "unknown"
    return dtype.numpy().name


def data_type(dtype: str) -> onnx_ir.DataType:
    """What ONNX calls a dtype of the IR."""
    return onnx_ir.DataType.from_numpy(numpy_dtype(dtype))
