"""A changed mechanism graph, written into a clone of the ONNX model it was read from.

same as read       the node is not touched: name, attributes, metadata, inputs
changed            its inputs are rewired, changed tensors become initializers, its row's writer does the rest
without an origin  the compiler put it in: `insert.py` writes it, the node is named `cmrc.<value>`
gone               the node is removed, and with it what only it used (`finish`)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import onnx_ir

from cmrc.errors import HostError
from cmrc.hosts.onnx.insert import INSERTED, insert_like
from cmrc.hosts.onnx.nodes import defaults, drop_annotations, graphs_of, inner_nodes, is_sorted, open_bodies
from cmrc.hosts.onnx.ops.recurrent import write_hidden_size
from cmrc.hosts.onnx.ops.row import ModelReading
from cmrc.hosts.onnx.ops.writers import WRITERS, write_target
from cmrc.hosts.onnx.patch import ModelPatch, rewire, rewire_fused
from cmrc.ir.graph import Graph, Node, differs_inside

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
                patch.move_to(onnx_node)
                _write_changed(patch, onnx_node, now[onnx_node], before[onnx_node])
            patch.move_to(onnx_node)


def _insert(patch: ModelPatch, node: Node) -> None:
    insert = insert_like if node.marks.like else INSERTED.get(node.op)
    if insert is None:
        raise HostError(f"cannot insert a new {node.kind} node", node=node.label, op=node.kind)
    patch.reason = f"{node.kind} {'for ' + node.path if node.path else ''}".strip()
    insert(patch, node)


def _write_changed(patch: ModelPatch, onnx_node: onnx_ir.Node, nodes: list[Node], before: list[Node]) -> None:
    is_fused = any(node.marks.inside for node in before)
    row = patch.reading.rows.get(before[0].name)
    if is_fused:
        rewire_fused(patch, onnx_node, nodes, before, but=() if row is None else row.own)
    writer = WRITERS.get(row.write) if row is not None and nodes[0].op != "opaque" else None
    if writer is not None:
        writer(patch, onnx_node, nodes, before)
    elif not is_fused:
        rewire(patch, onnx_node, nodes[0], before[0])
        if nodes[0].marks.recurrence is not None:
            write_hidden_size(onnx_node, nodes[0])


def _separated(before: ReadAs, now: ReadAs) -> dict[str, onnx_ir.Node]:
    """The parts of fused nodes inside which something changed: each part becomes a node."""
    apart: dict[str, onnx_ir.Node] = {}
    for onnx_node, members in now.items():
        parts = before[onnx_node]
        whole = members[0].op == "opaque"  # nothing in it moves
        if (
            not whole
            and any(node.marks.separable for node in parts)
            and differs_inside(parts, {n.name: n for n in members})
        ):
            apart.update((node.name, onnx_node) for node in members)
    return apart


def _write_apart(patch: ModelPatch, node: Node, onnx_node: onnx_ir.Node) -> None:
    patch.reason = f"{node.kind} of {node.label}"
    patch.retire(onnx_node)
    if node.name in patch.reading.inside:
        INSERTED[node.op](patch, node)
        return
    if onnx_node.graph not in patch.cursors:
        patch.move_to(onnx_node)
    old = patch.values[node.name]
    alone = replace(node, outputs=(replace(node.output, name=patch.fresh(f"{node.name}.apart")),))
    INSERTED[node.op](patch, alone)
    new = patch.values.pop(alone.name)
    patch.values[node.name] = old
    patch.replace_value(node.name, new)


def finish(patch: ModelPatch, used: Collection[onnx_ir.Value]) -> None:
    """Make the model consistent. Of what has no reader, only what was `used` before is removed."""
    _redirect_outputs(patch)
    _write_targets(patch)
    _fix_sizes(patch)
    _update_shapes(patch)
    if not is_sorted(patch.graph):
        patch.graph.sort()
    _remove_nodes(patch, used, patch.graph)
    _remove_initializers(patch, used)
    _rename_initializers(patch)


def _redirect_outputs(patch: ModelPatch) -> None:
    """Outputs keep their declared names: what is returned now takes the name over."""
    for i, (old, new) in enumerate(zip(patch.reading.graph.outputs, patch.edited.outputs, strict=True)):
        if old == new:
            continue
        declared, returned = patch.graph.outputs[i], patch.values[new]
        if declared.is_graph_input():
            raise HostError(
                "it is both an input and an output of the model: a replaced output would need another name",
                node=old,
                op="input",
                fix="leave that site out, or choose another",
            )
        if returned.is_graph_input() or returned.is_initializer() or returned.is_graph_output():
            patch.reason = "output"
            returned = patch.insert("Identity", [returned], f"{old}.copy")
        patch.graph.outputs[i] = returned
        declared.name = patch.fresh(f"{old}.inner")
        returned.name, returned.type, returned.shape = old, declared.type, declared.shape
        declared.shape = None if declared.shape is None else declared.shape.copy()


def _write_targets(patch: ModelPatch) -> None:
    """A Reshape to sizes of a value that changed gets the new sizes, whether or not it changed itself."""
    for target in patch.reading.sizes.targets:
        node = patch.makers.get(target.value)
        onnx_node = patch.values[target.value].producer()
        every = range(len(patch.was[target.source]))
        if node is None or onnx_node is None or _keeps(patch, target.source, every):
            continue
        computed = onnx_node.inputs[1]
        if computed is not None and not computed.is_initializer() and computed.name in patch.was:
            write_target(patch, onnx_node, node)


def _fix_sizes(patch: ModelPatch) -> None:
    """Sizes that were read from a value which is smaller now, or gone, stay what they were."""
    for fixed in patch.reading.sizes.fixed:
        if _keeps(patch, fixed.source, fixed.dims):
            continue
        value = patch.values[fixed.value]
        if value.is_graph_output():
            reason = f"the model returns sizes of %{fixed.source}, which changes"
            raise HostError(reason, node=fixed.value, op="Shape")
        value.replace_all_uses_with(patch.array(fixed.tensor.array, base=""))


def _keeps(patch: ModelPatch, name: str, dims: Iterable[int]) -> bool:
    """Whether a value still has these sizes."""
    now = patch.shapes.get(name)
    return now is not None and all(now[d] == patch.was[name][d] for d in dims)


def _update_shapes(patch: ModelPatch) -> None:
    """Declared shapes follow the IR where it changed; a stale one makes onnxruntime refuse the model."""
    for name, shape in patch.shapes.items():
        if name in patch.reading.inside:
            continue
        value = patch.values[name]
        was = patch.was.get(name, shape)
        if value.shape is not None and was != shape and len(value.shape) != len(shape):  # it was declared wrongly
            value.shape = onnx_ir.Shape(shape)
        elif value.shape is not None and was != shape:
            dims = zip(value.shape, was, shape, strict=True)
            value.shape = onnx_ir.Shape([new if old != new else declared for declared, old, new in dims])


def _remove_nodes(patch: ModelPatch, used: Collection[onnx_ir.Value], graph: onnx_ir.Graph) -> None:
    """Nodes that other nodes have replaced or that lost their last reader, and what had no reader before and reads one that was replaced."""
    behind: set[onnx_ir.Value | None] = (
        set()
    )  # a Shape that nobody reads may read what is dropped: it is no operand in the IR
    for node in graph:
        if node in patch.retired or not behind.isdisjoint(node.inputs):
            behind.update(node.outputs)
    for node in reversed(list(graph)):
        dead = node in patch.retired or any(value in used or value in behind for value in node.outputs)
        if dead and not any(value.uses() or value.is_graph_output() for value in node.outputs):
            for inner in list(inner_nodes(node)):
                inner.resize_inputs(0)
            graph.remove(node, safe=True)
        elif node in patch.retired:
            reason = "it was dropped but is still read: a fault of cmrc"
            raise HostError(reason, node=node.name or "", op=node.op_type)
        else:
            for body in open_bodies(node):
                _remove_nodes(patch, used, body)


def _remove_initializers(patch: ModelPatch, used: Collection[onnx_ir.Value]) -> None:
    kept = defaults(patch.model)
    for graph in graphs_of(patch.graph):
        for name, value in list(graph.initializers.items()):
            if name not in kept and value in used and not value.uses() and not value.is_graph_output():
                if value.is_graph_input():
                    graph.inputs.remove(value)
                del graph.initializers[name]


def _rename_initializers(patch: ModelPatch) -> None:
    """A new initializer takes the name of the parameter that it is the only form of, once that is gone."""
    forms = Counter(new.replaces for new in patch.initializers.values())
    left = {value.name for value in patch.all_values()}
    for new in patch.initializers.values():
        name = new.replaces
        free = name not in left and (name in patch.values or name not in patch.taken)
        if name and free and forms[name] == 1:
            new.value.name = name
