"""A changed mechanism graph, written into a clone of the ONNX model it was read from.

same as read       the node is not touched: name, attributes, metadata, inputs
changed            its inputs are rewired, changed tensors become initializers, its row's writer does the rest
without an origin  the compiler put it in: `insert.py` writes it, the node is named `cmrc.<value>`
gone               the node is removed, and with it what only it used (`finish.py`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx_ir

from cmrc.errors import HostError
from cmrc.hosts.onnx.annotations import drop_annotations
from cmrc.hosts.onnx.finish import finish
from cmrc.hosts.onnx.insert import INSERTED, insert_like
from cmrc.hosts.onnx.ops.rewire import rewire, rewire_fused
from cmrc.hosts.onnx.ops.table import ROWS, row_name
from cmrc.hosts.onnx.ops.writers import WRITERS
from cmrc.hosts.onnx.patch import ModelPatch
from cmrc.hosts.onnx.read import ModelReading
from cmrc.ir.graph import Graph, Node
from cmrc.passes.rewriting.fused import differs

ReadAs = dict[onnx_ir.Node, list[Node]]
"""The IR nodes that each ONNX node is read as."""


def build(model: onnx_ir.Model, reading: ModelReading, graph: Graph) -> onnx_ir.Model:
    """A clone of `model` that computes `graph`, an edited form of `reading.graph`."""
    patch = ModelPatch.start(model.clone(), reading, graph)
    used = {value for value in patch.all_values() if value.uses()}
    drop_annotations(patch.model)
    before, now = _read_as(patch, reading.graph.nodes), _read_as(patch, graph.nodes)
    _write_nodes(patch, before, now)
    patch.retired.update(onnx_node for onnx_node in before if onnx_node not in now)
    finish(patch, used)
    return patch.model


def _read_as(patch: ModelPatch, nodes: Sequence[Node]) -> ReadAs:
    grouped: ReadAs = {}
    for node in nodes:
        name = patch.reading.inside.get(node.name, node.name)
        onnx_node = patch.values[name].producer() if node.origin else None
        if onnx_node is not None:
            grouped.setdefault(onnx_node, []).append(node)
    return grouped


def _write_nodes(patch: ModelPatch, before: ReadAs, now: ReadAs) -> None:
    last = {members[-1].name: onnx_node for onnx_node, members in now.items()}
    apart = _separated(before, now)
    for node in patch.edited.nodes:
        if not node.origin:
            _insert(patch, node)
        elif node.name in apart:
            _write_apart(patch, node, apart[node.name])
        elif (onnx_node := last.get(node.name)) is not None:
            if now[onnx_node] != before[onnx_node]:
                patch.reason = node.label
                patch.cursor = onnx_node
                _write_changed(patch, onnx_node, now[onnx_node], before[onnx_node])
            patch.cursor = onnx_node if onnx_node.graph is not None else patch.cursor


def _insert(patch: ModelPatch, node: Node) -> None:
    insert = insert_like if node.marks.like else INSERTED.get(node.op)
    if insert is None:
        raise HostError(f"no way to put in a new {node.kind} node", node=node.label, op=node.kind)
    patch.reason = f"{node.kind} {'for ' + node.path if node.path else ''}".strip()
    insert(patch, node)


def _write_changed(patch: ModelPatch, onnx_node: onnx_ir.Node, nodes: list[Node], before: list[Node]) -> None:
    is_fused = any(node.marks.inside for node in before)
    if is_fused:
        rewire_fused(patch, onnx_node, nodes, before)
    row = ROWS.get(row_name(onnx_node))
    writer = WRITERS.get(row.write) if row is not None and nodes[0].op != "opaque" else None
    if writer is not None:
        writer(patch, onnx_node, nodes, before)
    elif not is_fused:
        rewire(patch, onnx_node, nodes[0], before[0])


def _separated(before: ReadAs, now: ReadAs) -> dict[str, onnx_ir.Node]:
    """The parts of fused nodes in whose middle something stands now: each becomes a node."""
    apart: dict[str, onnx_ir.Node] = {}
    for onnx_node, members in now.items():
        parts = before[onnx_node]
        if any(node.marks.separable for node in parts) and differs(parts, {n.name: n for n in members}):
            apart.update((node.name, onnx_node) for node in members)
    return apart


def _write_apart(patch: ModelPatch, node: Node, onnx_node: onnx_ir.Node) -> None:
    patch.reason = f"{node.kind} of {node.label}"
    if node.name in patch.reading.inside:
        INSERTED[node.op](patch, node)
        return
    patch.cursor = patch.cursor if patch.cursor is not None else onnx_node
    old = patch.values[node.name]
    alone = replace(node, outputs=(replace(node.output, name=patch.fresh(f"{node.name}.apart")),))
    INSERTED[node.op](patch, alone)
    new = patch.values.pop(alone.name)
    patch.values[node.name] = old
    patch.replace_value(node.name, new)
    patch.retire(onnx_node)
