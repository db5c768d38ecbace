"""The writers of the ONNX table: what changes in a node besides its inputs when a value shrinks.

A writer gets the ONNX node, the IR nodes that it stands for now (one, or one per part of a Split), and those it was
read as.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir

from cmrc.hosts.onnx.ops.positions import write_select
from cmrc.hosts.onnx.ops.rewire import rewire, set_inputs
from cmrc.hosts.onnx.ops.targets import write_resize, write_shape
from cmrc.hosts.onnx.patch import ModelPatch
from cmrc.ir.graph import Dim, Node, Operand, Tensor
from cmrc.ir.tensors import apply

NodeWriter = Callable[[ModelPatch, onnx_ir.Node, list[Node], list[Node]], None]


def write_conv(patch: ModelPatch, onnx_node: onnx_ir.Node, nodes: list[Node], before: list[Node]) -> None:
    rewire(patch, onnx_node, nodes[0], before[0])
    if nodes[0].attrs["groups"] != before[0].attrs["groups"]:
        onnx_node.attributes["group"] = onnx_ir.AttrInt64("group", nodes[0].attrs["groups"])


def write_norm(patch: ModelPatch, onnx_node: onnx_ir.Node, nodes: list[Node], before: list[Node]) -> None:
    """A norm over fewer units, by itself or behind a sum in one node."""
    if len(before) == 1:
        rewire(patch, onnx_node, nodes[0], before[0])
    now, was = (next(node for node in some if node.attrs.get("fn") == "rms_norm") for some in (nodes, before))
    if now.attrs["eps"] != was.attrs["eps"]:
        onnx_node.attributes["epsilon"] = onnx_ir.AttrFloat32("epsilon", now.attrs["eps"])


def write_concat(patch: ModelPatch, onnx_node: onnx_ir.Node, nodes: list[Node], before: list[Node]) -> None:
    """Fewer inputs, perhaps; those that were there stay the ONNX values they were."""
    node = nodes[0]
    known = list(zip(before[0].inputs, onnx_node.inputs, strict=True))
    values = []
    for operand in node.inputs:
        same = next((value for old, value in known if old == operand and not isinstance(old, str)), None)
        values.append(same if same is not None else patch.value(operand, node.output.dtype))
    set_inputs(onnx_node, values)


def write_heads(patch: ModelPatch, onnx_node: onnx_ir.Node, nodes: list[Node], before: list[Node]) -> None:
    """The number of heads that are left, and the sizes of what is packed together."""
    parts = {node.name.rpartition("::")[2]: node for node in nodes if node.marks.inside}
    attention = next((node for node in nodes if node.op == "attention"), None)
    if attention is not None and attention.marks.narrowed:  # the default would follow from the width that is left
        onnx_node.attributes["scale"] = onnx_ir.AttrFloat32("scale", attention.attrs["scale"])
    if len(nodes) == 1:
        return rewire(patch, onnx_node, nodes[0], before[0])
    if attention is None:
        return _set_ints(onnx_node, num_heads=parts["apart"].output.shape[2])
    heads, served = attention.output.shape[1], patch.shape_of(attention.inputs[1])[1]
    _set_ints(onnx_node, num_heads=heads, q_num_heads=heads, kv_num_heads=served)
    if "qkv" in parts:
        sizes = [len(parts[f"{key}.part"].attrs["keep"]) for key in "qkv"]
        if "qkv_hidden_sizes" in onnx_node.attributes or len(set(sizes)) > 1:
            onnx_node.attributes["qkv_hidden_sizes"] = onnx_ir.AttrInt64s("qkv_hidden_sizes", sizes)
    if "q.shifted" in parts:
        _write_joint_bias(patch, onnx_node, [parts[f"{key}.shifted"].inputs[1] for key in "qkv"])
    return None


def _set_ints(onnx_node: onnx_ir.Node, **values: Dim) -> None:
    """Attributes that the node has, where they are others now."""
    for name, value in values.items():
        if name in onnx_node.attributes and onnx_node.attributes[name].as_int() != value:
            onnx_node.attributes[name] = onnx_ir.AttrInt64(name, int(value))


def _write_joint_bias(patch: ModelPatch, onnx_node: onnx_ir.Node, biases: Sequence[Operand]) -> None:
    """The bias of queries, keys and values is one input."""
    tensors = [bias for bias in biases if isinstance(bias, Tensor)]
    old, size = onnx_node.inputs[3], sum(tensor.shape[0] for tensor in tensors)
    assert old is not None and old.name is not None
    joint = apply("concat", tensors, {"axis": 0}, (size,), tensors[0].dtype)
    onnx_node.replace_input_with(3, patch.initializer(joint, base=old.name))


def write_squeeze(patch: ModelPatch, onnx_node: onnx_ir.Node, nodes: list[Node], before: list[Node]) -> None:
    """Without axes it drops every one of size 1: name those that it dropped, for others may have a single unit now."""
    rewire(patch, onnx_node, nodes[0], before[0])
    if "axes" in onnx_node.attributes or len(onnx_node.inputs) > 1:
        return
    axes = [i for i, n in enumerate(patch.was[str(before[0].inputs[0])]) if n == 1]
    if patch.opset < 13:
        onnx_node.attributes["axes"] = onnx_ir.AttrInt64s("axes", axes)
    else:
        set_inputs(onnx_node, [onnx_node.inputs[0], patch.array(np.array(axes, dtype=np.int64))])


WRITERS: dict[str, NodeWriter] = {
    "concat": write_concat,
    "conv": write_conv,
    "heads": write_heads,
    "norm": write_norm,
    "resize": write_resize,
    "select": write_select,
    "shape": write_shape,
    "squeeze": write_squeeze,
}
