"""A plan that is written on an ONNX model: the do's are metadata of the nodes that make the replaced values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import onnx_ir

from cmrc.errors import HostError, TraceError
from cmrc.strict_json import parse_records

ANNOTATION = "cmrc.do"
Entry = dict[str, Any]


def read_annotations(model: onnx_ir.Model) -> list[Entry]:
    """The do's recorded in the model, in the plan's order."""
    recorded: list[tuple[int, Entry]] = []
    for owner in (model, *model.graph):
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
    values = onnx_ir.convenience.create_value_mapping(clone.graph, include_subgraphs=False)
    for order, (name, entry) in enumerate(entries):
        if name not in values:
            raise HostError("the model has no such value to annotate", node=name, fix="see `cmrc inspect`")
        owner = values[name].producer() or clone
        recorded = json.loads(owner.metadata_props.get(ANNOTATION, "[]"))
        owner.metadata_props[ANNOTATION] = json.dumps([*recorded, [order, name, entry]])
    return clone


def drop_annotations(model: onnx_ir.Model) -> None:
    """Remove every recorded do."""
    for node in model.graph:
        node.metadata_props.pop(ANNOTATION, None)
    model.metadata_props.pop(ANNOTATION, None)
