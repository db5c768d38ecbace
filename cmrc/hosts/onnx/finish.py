"""The end of writing a model: its outputs, the sizes it reads from itself, its shapes, and what nobody reads any more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

import onnx_ir

from cmrc.errors import HostError
from cmrc.hosts.onnx.bodies import inner_nodes, is_sorted
from cmrc.hosts.onnx.defaults import defaults
from cmrc.hosts.onnx.ops.targets import write_target
from cmrc.hosts.onnx.patch import ModelPatch


def finish(patch: ModelPatch, used: Collection[onnx_ir.Value]) -> None:
    """Leave the model consistent; of what lost its last reader, only what was `used` before is removed."""
    _redirect_outputs(patch)
    _write_targets(patch)
    _fix_sizes(patch)
    _update_shapes(patch)
    if not is_sorted(patch.graph):
        patch.graph.sort()
    _remove_nodes(patch, used)
    _remove_initializers(patch, used)
    _rename_initializers(patch)


def _redirect_outputs(patch: ModelPatch) -> None:
    """Outputs keep their declared names: what is returned now takes the name over."""
    for i, (old, new) in enumerate(zip(patch.reading.graph.outputs, patch.edited.outputs, strict=True)):
        if old == new:
            continue
        declared, returned = patch.graph.outputs[i], patch.values[new]
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
        if value.shape is not None and was != shape:
            dims = zip(value.shape, was, shape, strict=True)
            value.shape = onnx_ir.Shape([new if old != new else declared for declared, old, new in dims])


def _remove_nodes(patch: ModelPatch, used: Collection[onnx_ir.Value]) -> None:
    """Nodes that others stand for, and nodes that lost their last reader."""
    for node in reversed(list(patch.graph)):
        dead = node in patch.retired or any(value in used for value in node.outputs)
        if dead and not any(value.uses() or value.is_graph_output() for value in node.outputs):
            for inner in list(inner_nodes(node)):
                inner.resize_inputs(0)
            patch.graph.remove(node, safe=True)
        elif node in patch.retired:
            reason = "it was dropped and is still read: a fault of cmrc"
            raise HostError(reason, node=node.name or "", op=node.op_type)


def _remove_initializers(patch: ModelPatch, used: Collection[onnx_ir.Value]) -> None:
    kept = defaults(patch.model)
    for name, value in list(patch.graph.initializers.items()):
        if name not in kept and value in used and not value.uses() and not value.is_graph_output():
            if value.is_graph_input():
                patch.graph.inputs.remove(value)
            del patch.graph.initializers[name]


def _rename_initializers(patch: ModelPatch) -> None:
    """A new initializer takes the name of the parameter that it is the only form of, once that is gone."""
    forms = Counter(new.replaces for new in patch.initializers.values())
    left = {value.name for value in patch.all_values()}
    for new in patch.initializers.values():
        name = new.replaces
        free = name not in left and (name in patch.values or name not in patch.taken)
        if name and free and forms[name] == 1:
            new.value.name = name
