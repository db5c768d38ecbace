"""The inputs of an ONNX node whose operands in the IR are others now.

Positions of an axis (Gather, Slice, Split) are written as the op that says them most simply.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir

from cmrc.errors import HostError
from cmrc.hosts.onnx.bodies import inner_nodes
from cmrc.hosts.onnx.patch import ModelPatch
from cmrc.ir.graph import Node, Operand, outer_values


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


def write_select(patch: ModelPatch, onnx_node: onnx_ir.Node, nodes: list[Node], before: list[Node]) -> None:
    """Gather, Slice, Split: the node stays where only its input is another; else it is written anew."""
    if len(onnx_node.outputs) > 1:
        return _write_split(patch, onnx_node, nodes, before)
    node, was = nodes[0], before[0]
    if node.op != "select" or _same_positions(patch, node, was):
        return rewire(patch, onnx_node, node, was)
    op, inputs, attributes = selection(patch, node)
    onnx_node.op_type = op
    onnx_node.attributes.clear()
    onnx_node.attributes.update({attribute.name: attribute for attribute in attributes})
    set_inputs(onnx_node, inputs)
    return None


def _same_positions(patch: ModelPatch, node: Node, before: Node) -> bool:
    x, old, axis = str(node.inputs[0]), str(before.inputs[0]), node.attrs["axis"]
    same_size = patch.shapes[x][axis] == patch.was[old][axis]
    return same_size and bool(axis == before.attrs["axis"] and node.attrs["keep"] == before.attrs["keep"])


def _write_split(patch: ModelPatch, onnx_node: onnx_ir.Node, nodes: list[Node], before: list[Node]) -> None:
    """A Split with other sizes where the parts still make up the whole, in order; else one selection per part."""
    source = str(nodes[0].inputs[0])
    together = all(node.inputs[0] == source for node in nodes)
    if any(node.op != "select" for node in nodes):
        if not together or len(nodes) < len(before):
            reason = "its parts, of sizes known only at run time, now read different values"
            raise HostError(reason, node=nodes[0].label, op="Split")
        return rewire(patch, onnx_node, nodes[0], before[0])
    positions = [k for node in nodes for k in node.attrs["keep"]]
    whole = positions == list(range(int(patch.shapes[source][nodes[0].attrs["axis"]])))
    if together and whole and len(nodes) == len(onnx_node.outputs):
        _set_sizes(patch, onnx_node, patch.values[source], [len(node.attrs["keep"]) for node in nodes])
        return None
    if together and whole and len(nodes) > 1:
        _shorter_split(patch, onnx_node, nodes, patch.values[source])
        return None
    for node in nodes:
        op, inputs, attributes = selection(patch, node)
        patch.replace_value(node.name, patch.insert(op, inputs, f"{node.name}.part", attributes))
    patch.retire(onnx_node)
    return None


def _set_sizes(patch: ModelPatch, onnx_node: onnx_ir.Node, x: onnx_ir.Value, sizes: Sequence[int]) -> None:
    onnx_node.attributes.pop("num_outputs", None)
    if patch.opset < 13:
        onnx_node.attributes["split"] = onnx_ir.AttrInt64s("split", list(sizes))
        set_inputs(onnx_node, [x])
    else:
        base = (
            onnx_node.inputs[1].name
            if len(onnx_node.inputs) > 1 and onnx_node.inputs[1] is not None
            else f"{onnx_node.name}.sizes"
        )
        set_inputs(onnx_node, [x, patch.array(np.asarray(sizes, dtype=np.int64), base=base or "")])


def _shorter_split(patch: ModelPatch, onnx_node: onnx_ir.Node, nodes: list[Node], x: onnx_ir.Value) -> None:
    """Some parts are gone: another Split, with the name and the notes of the old one."""
    outputs = [onnx_ir.Value() for _ in nodes]
    new = onnx_ir.Node(
        "", "Split", [x, *onnx_node.inputs[1:]], onnx_node.attributes.values(), outputs=outputs, doc_string=onnx_node.doc_string,
        metadata_props=dict(onnx_node.metadata_props),
    )  # fmt: skip
    _set_sizes(patch, new, x, [len(node.attrs["keep"]) for node in nodes])
    patch.graph.insert_after(onnx_node, new)
    for node, output in zip(nodes, outputs, strict=True):
        patch.replace_value(node.name, output)
    new.name = onnx_node.name
    patch.retire(onnx_node)
    patch.cursor = new


Selection = tuple[str, list[onnx_ir.Value | None], list[onnx_ir.Attr]]


def selection(patch: ModelPatch, node: Node) -> Selection:
    """The op, inputs and attributes of a select: Slice where the positions are evenly spaced, else Gather."""
    source, axis, keep = str(node.inputs[0]), node.attrs["axis"], node.attrs["keep"]
    x = patch.values[source]
    if list(keep) == list(range(int(patch.shapes[source][axis]))):
        return "Identity", [x], []
    step = keep[1] - keep[0] if len(keep) > 1 else 1
    regular = step > 0 and list(keep) == list(range(keep[0], keep[-1] + 1, step))
    if regular and patch.opset >= 10:
        bounds = [patch.array(np.asarray([n], dtype=np.int64)) for n in (keep[0], keep[-1] + 1, axis, step)]
        return "Slice", [x, *bounds[: 3 if step == 1 else 4]], []
    if regular and step == 1:
        named = {"starts": [keep[0]], "ends": [keep[-1] + 1], "axes": [axis]}
        return "Slice", [x], [onnx_ir.AttrInt64s(name, values) for name, values in named.items()]
    return "Gather", [x, patch.array(np.asarray(keep, dtype=np.int64))], [onnx_ir.AttrInt64("axis", axis)]
