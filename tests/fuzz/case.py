"""A case as JSON that a person can read: one node per line, numbers as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from tests.fuzz.builder import onnx_type
from tests.fuzz.graphs import Feed
from tests.fuzz.judge import Case
from tests.fuzz.plans import Request
from tests.fuzz.session import BFLOAT16

LISTED = ("nodes", "requests")


def to_json(case: Case) -> dict[str, Any]:
    return {
        "opsets": {entry.domain: entry.version for entry in case.model.opset_import},
        "ir_version": case.model.ir_version,
        "residue": case.residue,
        "seed": case.seed,
        "feeds": {
            name: {"shape": feed.shape, "dtype": feed.dtype, "declared": feed.declared, "below": feed.below}
            for name, feed in case.feeds.items()
        },
        "requests": [
            {
                "site": r.site, "axis": r.axis, "units": r.units, "constant": r.constant, "parents": r.parents,
                "weight": r.weight, "group": r.group,
            }
            for r in case.requests
        ],
        **_graph_to_json(case.model.graph),
    }  # fmt: skip


def from_json(entry: dict[str, Any]) -> Case:
    imports = [helper.make_opsetid(domain, version) for domain, version in entry["opsets"].items()]
    model = helper.make_model(_graph(entry), opset_imports=imports, ir_version=entry["ir_version"])
    feeds = {
        name: Feed(tuple(f["shape"]), f["dtype"], tuple(f["declared"]), f["below"])
        for name, f in entry["feeds"].items()
    }
    requests = [
        Request(r["site"], r["axis"], tuple(r["units"]), r["constant"], tuple(r["parents"]), r["weight"], r["group"])
        for r in entry["requests"]
    ]
    return Case(model, feeds, requests, entry["residue"], entry["seed"])


def save(case: Case, path: Path, **more: Any) -> None:
    entry = {**more, **to_json(case)}
    lines = []
    for key, value in entry.items():
        if key in LISTED and value:
            inner = ",\n  ".join(json.dumps(one) for one in value)
            lines.append(f"{json.dumps(key)}: [\n  {inner}\n ]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    path.write_text("{\n " + ",\n ".join(lines) + "\n}\n")


def load(path: Path) -> Case:
    return from_json(json.loads(path.read_text()))


# ---------------------------------------------------------------- the pieces of a model


def _graph_to_json(graph: onnx.GraphProto) -> dict[str, Any]:
    return {
        "name": graph.name,
        "inputs": [_value_to_json(value) for value in graph.input],
        "outputs": [_value_to_json(value) for value in graph.output],
        "values": [_value_to_json(value) for value in graph.value_info],
        "constants": {tensor.name: _tensor_to_json(tensor) for tensor in graph.initializer},
        "nodes": [_node_to_json(node) for node in graph.node],
    }


def _graph(entry: dict[str, Any]) -> onnx.GraphProto:
    return helper.make_graph(
        [_node(node) for node in entry["nodes"]],
        entry["name"],
        [_value(value) for value in entry["inputs"]],
        [_value(value) for value in entry["outputs"]],
        [_tensor(tensor, name) for name, tensor in entry["constants"].items()],
        value_info=[_value(value) for value in entry["values"]],
    )


def _value_to_json(value: onnx.ValueInfoProto) -> list[Any]:
    if not value.HasField("type"):
        return [value.name, 0, None]
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return [value.name, tensor.elem_type, None]
    dims = [d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in tensor.shape.dim]
    return [value.name, tensor.elem_type, dims]


def _value(entry: list[Any]) -> onnx.ValueInfoProto:
    name, kind, dims = entry
    return helper.make_tensor_value_info(name, kind, dims) if kind else onnx.ValueInfoProto(name=name)


def _tensor_to_json(tensor: onnx.TensorProto) -> dict[str, Any]:
    array = numpy_helper.to_array(tensor)
    wide = array.astype(np.float64) if tensor.data_type == TensorProto.BFLOAT16 else array
    return {"type": tensor.data_type, "shape": list(array.shape), "numbers": wide.reshape(-1).tolist()}


def _tensor(entry: dict[str, Any], name: str) -> onnx.TensorProto:
    dtype = BFLOAT16 if entry["type"] == TensorProto.BFLOAT16 else helper.tensor_dtype_to_np_dtype(entry["type"])
    array = np.array(entry["numbers"]).astype(dtype).reshape(entry["shape"])
    assert onnx_type(array.dtype) == entry["type"]
    return numpy_helper.from_array(array, name)


def _node_to_json(node: onnx.NodeProto) -> dict[str, Any]:
    entry: dict[str, Any] = {"op": node.op_type, "in": list(node.input), "out": list(node.output)}
    if node.domain:
        entry["domain"] = node.domain
    if node.name:
        entry["name"] = node.name
    attrs: dict[str, Any] = {}
    for attribute in node.attribute:
        if attribute.type == AttributeProto.TENSOR:
            attrs[attribute.name] = {"tensor": _tensor_to_json(attribute.t)}
        elif attribute.type == AttributeProto.GRAPH:
            attrs[attribute.name] = {"graph": _graph_to_json(attribute.g)}
        else:
            attrs[attribute.name] = _plain(helper.get_attribute_value(attribute))
    if attrs:
        entry["attrs"] = attrs
    return entry


def _plain(value: Any) -> Any:
    """Numbers, texts, and lists of either."""
    if isinstance(value, bytes):
        return value.decode()
    return [_plain(one) for one in value] if hasattr(value, "__len__") else value


def _node(entry: dict[str, Any]) -> onnx.NodeProto:
    attrs = dict(entry.get("attrs", {}))
    for name, value in attrs.items():
        if isinstance(value, dict):
            attrs[name] = _tensor(value["tensor"], entry["out"][0]) if "tensor" in value else _graph(value["graph"])
    return helper.make_node(
        entry["op"], entry["in"], entry["out"], name=entry.get("name"), domain=entry.get("domain"), **attrs
    )
