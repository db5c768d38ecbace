"""The inputs of an ONNX node whose operands in the IR are others now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import onnx_ir

from cmrc.errors import HostError
from cmrc.hosts.onnx.bodies import inner_nodes
from cmrc.hosts.onnx.patch import ModelPatch
from cmrc.ir.graph import Node, Operand
from cmrc.passes.rewriting.fused import outer_values


def rewire(patch: ModelPatch, onnx_node: onnx_ir.Node, node: Node, before: Node, *, but: Collection[int] = ()) -> None:
    """Operands that differ from what was read: other values, changed tensors, a bias that was not there; `but` these."""
    slots = patch.reading.slots[before.name]
    for i, operand in enumerate(node.inputs):
        old = before.inputs[i] if i < len(before.inputs) else None
        if operand == old or (i < len(slots) and slots[i] in but):
            continue
        if i >= len(slots):
            _rewire_captured(patch, onnx_node, old, operand)
            continue
        slot = slots[i]
        if isinstance(slot, str):
            raise HostError(f"nothing can be put inside it, before {node.name}", node=node.label, op=onnx_node.op_type)
        if slot >= len(onnx_node.inputs):
            onnx_node.resize_inputs(slot + 1)
        if old is None:
            tensor = None if isinstance(operand, str) else operand
            base = patch.bias_name(node)
            value = None if tensor is None else patch.initializer(tensor, dtype=node.output.dtype, base=base)
        else:
            value = patch.value(operand, patch.dtype_of(old))
        onnx_node.replace_input_with(slot, value)


def rewire_fused(patch: ModelPatch, onnx_node: onnx_ir.Node, nodes: list[Node], before: list[Node]) -> None:
    """A node that is read as several: each part's operands; or, taken as a whole, the values that it reads."""
    if nodes[0].op == "opaque":
        for old, new in zip(outer_values(before), nodes[0].values(), strict=True):
            for slot, value in enumerate(onnx_node.inputs):
                if old != new and value is not None and value.name == old:
                    onnx_node.replace_input_with(slot, patch.values[new])
        return
    if [node.name for node in nodes] != [node.name for node in before]:
        raise HostError("only a part of it is left", node=nodes[0].label, op=onnx_node.op_type)
    read = Counter(slot for node in before for slot in patch.reading.slots[node.name] if isinstance(slot, int))
    tensors = {
        s for n in before for s, o in zip(patch.reading.slots[n.name], n.inputs, strict=False) if not isinstance(o, str)
    }
    shared = [slot for slot, count in read.items() if count > 1 and slot in tensors]
    for node, was in zip(nodes, before, strict=True):
        # A parameter of which several parts read a share is its writer's.
        rewire(patch, onnx_node, node, was, but=shared)


def _rewire_captured(patch: ModelPatch, onnx_node: onnx_ir.Node, old: Operand, new: Operand) -> None:
    """A value that the bodies of a node read from the main graph."""
    if not isinstance(old, str):
        return
    was, value = patch.values[old], patch.value(new, patch.dtypes[old])
    for inner in inner_nodes(onnx_node):
        for i, read in enumerate(inner.inputs):
            if read is was:
                inner.replace_input_with(i, value)


def set_inputs(onnx_node: onnx_ir.Node, values: Sequence[onnx_ir.Value | None]) -> None:
    """These inputs, and no others."""
    onnx_node.resize_inputs(len(values))
    for i, value in enumerate(values):
        onnx_node.replace_input_with(i, value)
