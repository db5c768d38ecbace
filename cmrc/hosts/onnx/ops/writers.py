"""The writers of the ONNX table: what changes in a node besides its inputs when a value shrinks.

A writer gets the ONNX node, the IR nodes that it stands for now (one, or one per part of a Split), and those it was
read as. The target shapes of Reshape, Expand and Resize are constants, or sizes that the model computes, which change with a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir

from cmrc.errors import HostError
from cmrc.hosts.onnx.patch import ModelPatch, rewire, set_inputs
from cmrc.ir.axes import product
from cmrc.ir.graph import Dim, Node, Operand, Shape, Tensor, apply, attributes
from cmrc.ir.ops.affine import ConvAttrs, SelectAttrs
from cmrc.ir.ops.attention import AttentionAttrs
from cmrc.ir.ops.functions import AlongAttrs
from cmrc.ir.spec import AxisAttrs, FunctionAttrs
from cmrc.ir.tensors import materialise, quantised

NodeWriter = Callable[[ModelPatch, onnx_ir.Node, list[Node], list[Node]], None]


def write_conv(patch: ModelPatch, onnx_node: onnx_ir.Node, nodes: list[Node], before: list[Node]) -> None:
    rewire(patch, onnx_node, nodes[0], before[0])
    if attributes(nodes[0], ConvAttrs)["groups"] != attributes(before[0], ConvAttrs)["groups"]:
        onnx_node.attributes["group"] = onnx_ir.AttrInt64("group", attributes(nodes[0], ConvAttrs)["groups"])


def write_norm(patch: ModelPatch, onnx_node: onnx_ir.Node, nodes: list[Node], before: list[Node]) -> None:
    """A norm over fewer units, by itself or behind a sum in one node."""
    if len(before) == 1:
        rewire(patch, onnx_node, nodes[0], before[0])
    now, was = (
        next(node for node in some if attributes(node, FunctionAttrs).get("fn") == "rms_norm")
        for some in (nodes, before)
    )
    if attributes(now, AlongAttrs)["eps"] != attributes(was, AlongAttrs)["eps"]:
        onnx_node.attributes["epsilon"] = onnx_ir.AttrFloat32("epsilon", attributes(now, AlongAttrs)["eps"])


def write_groups(patch: ModelPatch, onnx_node: onnx_ir.Node, nodes: list[Node], before: list[Node]) -> None:
    """A group norm of fewer groups."""
    rewire(patch, onnx_node, nodes[0], before[0])
    _set_ints(onnx_node, num_groups=attributes(nodes[0], AlongAttrs)["groups"])


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
        onnx_node.attributes["scale"] = onnx_ir.AttrFloat32("scale", attributes(attention, AttentionAttrs)["scale"])
    if len(nodes) == 1:
        return rewire(patch, onnx_node, nodes[0], before[0])
    if attention is None:
        return _set_ints(onnx_node, num_heads=parts["apart"].output.shape[2])
    heads, served = attention.output.shape[1], patch.shape_of(attention.inputs[1])[1]
    _set_ints(onnx_node, num_heads=heads, q_num_heads=heads, kv_num_heads=served)
    if "qkv" in parts:
        sizes = [len(attributes(parts[f"{key}.part"], SelectAttrs)["keep"]) for key in "qkv"]
        if "qkv_hidden_sizes" in onnx_node.attributes or len(set(sizes)) > 1:
            onnx_node.attributes["qkv_hidden_sizes"] = onnx_ir.AttrInt64s("qkv_hidden_sizes", sizes)
    if "q.shifted" in parts:
        _write_joint_bias(patch, onnx_node, [parts[f"{key}.shifted"].inputs[1] for key in "qkv"])
    return None


def _set_ints(onnx_node: onnx_ir.Node, **values: Dim) -> None:
    """Set those integer attributes of the node that have changed."""
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


def write_shape(patch: ModelPatch, onnx_node: onnx_ir.Node, nodes: list[Node], before: list[Node]) -> None:
    """Reshape and Expand: the sizes that changed, in a private copy of the target shape."""
    node, was = nodes[0], before[0]
    old_x = onnx_node.inputs[0]
    rewire(patch, onnx_node, node, was)
    changed = [i for i, (a, b) in enumerate(zip(was.output.shape, node.output.shape, strict=True)) if a != b]
    if onnx_node.op_type == "Expand":
        changed = _scale_target(patch, onnx_node, node, was, changed)
    target = onnx_node.inputs[1]
    if not changed or target is None or old_x is None:
        return
    x = patch.shape_of(node.inputs[0])
    tensor = patch.reading.tensors.get(target.name or "")
    if tensor is not None:
        entries = [int(n) for n in materialise(tensor)]
        onnx_node.replace_input_with(
            1, _target_value(patch, _changed_entries(onnx_node, entries, node, x, changed), target)
        )
        return
    pieces = _changed_pieces(patch, target, node.output.shape, changed)
    if pieces is not None:
        maker = target.producer()
        assert maker is not None
        patch.move_to(maker)
        joined = patch.insert("Concat", pieces, f"{target.name}.cmrc", [onnx_ir.AttrInt64("axis", 0)])
        onnx_node.replace_input_with(1, joined)
        return
    write_target(patch, onnx_node, node)


def _scale_target(
    patch: ModelPatch, onnx_node: onnx_ir.Node, node: Node, was: Node, changed: Sequence[int]
) -> list[int]:
    """An Expand to sizes that merge samples with units, of which there are fewer now; the other changed axes are left."""
    merged = [axis for axis in changed if isinstance(node.output.shape[axis], str)]
    target, maker = onnx_node.inputs[1], None if onnx_node.inputs[1] is None else onnx_node.inputs[1].producer()
    if not merged or target is None or maker is None:
        return list(changed)
    ratios = np.ones((2, len(node.output.shape)), dtype=np.int64)
    for axis in merged:
        ratios[:, axis] = [product((shape[axis],))[0] for shape in (was.output.shape, node.output.shape)]
    patch.move_to(maker)
    samples = patch.insert("Div", [target, patch.array(ratios[0])], f"{node.name}.samples")
    onnx_node.replace_input_with(1, patch.insert("Mul", [samples, patch.array(ratios[1])], f"{node.name}.sizes"))
    return [axis for axis in changed if axis not in merged]


def write_target(patch: ModelPatch, onnx_node: onnx_ir.Node, node: Node) -> None:
    """A new target shape, from the shape in the IR."""
    target = onnx_node.inputs[1]
    assert target is not None
    entries = _entries_of(onnx_node, node, patch.shape_of(node.inputs[0]))
    if entries.count(-1) <= (1 if onnx_node.op_type == "Reshape" else 0):
        onnx_node.replace_input_with(1, _target_value(patch, entries, target))
        return
    pieces = [_size(patch, size) for size in node.output.shape]
    if None in pieces:
        raise HostError(
            f"its target shape is computed at run time in a way that cannot be changed to {list(node.output.shape)}",
            node=node.label,
            op=onnx_node.op_type,
            fix="give the target shape as a constant, or as a Concat of sizes",
        )
    joined = patch.insert("Concat", pieces, f"{target.name}.cmrc", [onnx_ir.AttrInt64("axis", 0)])
    onnx_node.replace_input_with(1, joined)


def _size(patch: ModelPatch, size: Dim) -> onnx_ir.Value | None:
    """A size of a target shape: a number, or that of an input of the model which has the same symbol."""
    if isinstance(size, int):
        return patch.array(np.asarray([size]))
    for given in patch.reading.graph.inputs:
        if size in given.shape:
            sizes = patch.insert("Shape", [patch.values[given.name]], f"{given.name}.shape")
            place = patch.array(np.asarray([given.shape.index(size)]))
            return patch.insert("Gather", [sizes, place], f"{given.name}.size")
    return None


def _target_value(patch: ModelPatch, entries: Sequence[int], old: onnx_ir.Value) -> onnx_ir.Value:
    return patch.array(np.asarray(entries, dtype=np.int64), base=old.name or "")


def _changed_entries(
    onnx_node: onnx_ir.Node, entries: list[int], node: Node, x: Shape, changed: Sequence[int]
) -> list[int]:
    shape = node.output.shape
    lead = len(shape) - len(entries)
    copies = _copies_zeros(onnx_node)
    for axis in changed:
        i = axis - lead
        if onnx_node.op_type == "Expand":
            if i >= 0 and entries[i] != 1:
                entries[i] = _entry(shape[axis])
        elif entries[i] != -1 and not (entries[i] == 0 and copies and x[i] == shape[axis]):
            entries[i] = _entry(shape[axis])
    if onnx_node.op_type == "Reshape" and copies:  # an axis that stays, copied from one that does not
        for i, size in enumerate(shape):
            if entries[i] == 0 and isinstance(size, int) and x[i] != size:
                entries[i] = size
    return entries


def _copies_zeros(reshape: onnx_ir.Node) -> bool:
    """Whether a 0 in the target of a Reshape means the size that its input has there."""
    return "allowzero" not in reshape.attributes or not reshape.attributes["allowzero"].as_int()


def _entry(size: Dim) -> int:
    """A size of a target shape; one that merges samples with units is left for the runtime to work out."""
    return size if isinstance(size, int) else -1


def _changed_pieces(
    patch: ModelPatch, target: onnx_ir.Value, shape: Shape, changed: Sequence[int]
) -> list[onnx_ir.Value | None] | None:
    """A target made by a Concat, with the pieces of the changed sizes replaced; `None` where it is made otherwise."""
    maker = target.producer()
    if maker is None or maker.op_type != "Concat":
        return None
    pieces: list[onnx_ir.Value | None] = []
    start = 0
    for piece in maker.inputs:
        name = "" if piece is None else piece.name or ""
        tensor = patch.reading.tensors.get(name)
        size = tensor.shape if tensor is not None else patch.was.get(name, ())
        if len(size) != 1 or not isinstance(size[0], int):
            return None
        here = [axis for axis in changed if start <= axis < start + size[0]]
        if here and tensor is None and size[0] != 1:
            return None
        if here:
            entries = [0] if tensor is None else [int(n) for n in materialise(tensor)]
            for axis in here:
                entries[axis - start] = _entry(shape[axis])
            pieces.append(patch.array(np.asarray(entries, dtype=np.int64), base=name))
        else:
            pieces.append(piece)
        start += size[0]
    return pieces if start == len(shape) else None


def _entries_of(onnx_node: onnx_ir.Node, node: Node, x: Shape) -> list[int]:
    """A target made anew: sizes that are fixed, 0 for one that is copied, -1 for one that is left."""
    entries: list[int] = []
    lead = len(node.output.shape) - len(x)
    for i, size in enumerate(node.output.shape):
        if isinstance(size, int):
            entries.append(size)
        elif onnx_node.op_type == "Expand" and i >= lead and x[i - lead] == size:
            entries.append(1)
        elif onnx_node.op_type == "Reshape" and i < len(x) and x[i] == size and _copies_zeros(onnx_node):
            entries.append(0)
        else:
            entries.append(-1)
    return entries


def write_resize(patch: ModelPatch, onnx_node: onnx_ir.Node, nodes: list[Node], before: list[Node]) -> None:
    """Sizes that name the units' axis as well."""
    node, was = nodes[0], before[0]
    rewire(patch, onnx_node, node, was)
    sizes = onnx_node.inputs[3] if len(onnx_node.inputs) > 3 else None
    rank = len(node.output.shape)
    axes = onnx_node.attributes.get("axes")
    named = range(rank) if axes is None else [a % rank for a in axes.as_ints()]
    if sizes is None or all(node.output.shape[axis] == was.output.shape[axis] for axis in named):
        return
    tensor = patch.reading.tensors.get(sizes.name or "")
    if tensor is None:
        _write_run_time_sizes(patch, onnx_node, node, sizes)
        return
    if not tensor.shape[0]:
        return
    entries = [int(n) for n in materialise(tensor)]
    for i, axis in enumerate(named):
        if node.output.shape[axis] != was.output.shape[axis]:
            entries[i] = int(node.output.shape[axis])
    onnx_node.replace_input_with(3, _target_value(patch, entries, sizes))


def _write_run_time_sizes(patch: ModelPatch, onnx_node: onnx_ir.Node, node: Node, sizes: onnx_ir.Value) -> None:
    """Sizes that are computed: the leading ones from the value that is resized now, the others as they are."""
    if "axes" in onnx_node.attributes or min(attributes(node, AlongAttrs)["axes"]) < 2:
        raise HostError("its sizes are computed at run time and name the units' axis", node=node.label, op="Resize")
    shape = patch.insert("Shape", [onnx_node.inputs[0]], f"{node.name}.shape")
    zero, two, end = (patch.array(np.asarray([n], dtype=np.int64)) for n in (0, 2, len(node.output.shape)))
    lead = patch.insert("Slice", [shape, zero, two], f"{node.name}.lead")
    rest = patch.insert("Slice", [sizes, two, end], f"{node.name}.rest")
    joined = patch.insert("Concat", [lead, rest], f"{node.name}.sizes", [onnx_ir.AttrInt64("axis", 0)])
    onnx_node.replace_input_with(3, joined)


# ---------------------------------------------------------------- positions of an axis, by the op that says them most simply


def write_select(patch: ModelPatch, onnx_node: onnx_ir.Node, nodes: list[Node], before: list[Node]) -> None:
    """Gather, Slice, Split: the node stays where only its input is another; else it is written anew."""
    if len(onnx_node.outputs) > 1:
        return _write_split(patch, onnx_node, nodes, before)
    node, was = nodes[0], before[0]
    if node.op != "select" or _same_positions(patch, node, was):
        return rewire(patch, onnx_node, node, was)
    op, inputs, given = selection(patch, node)
    onnx_node.op_type = op
    onnx_node.attributes.clear()
    onnx_node.attributes.update({attribute.name: attribute for attribute in given})
    set_inputs(onnx_node, inputs)
    return None


def _same_positions(patch: ModelPatch, node: Node, before: Node) -> bool:
    x, old, axis = str(node.inputs[0]), str(before.inputs[0]), attributes(node, AxisAttrs)["axis"]
    same_size = patch.shapes[x][axis] == patch.was[old][axis]
    return same_size and bool(
        axis == attributes(before, AxisAttrs)["axis"]
        and attributes(node, SelectAttrs)["keep"] == attributes(before, SelectAttrs)["keep"]
    )


def _write_split(patch: ModelPatch, onnx_node: onnx_ir.Node, nodes: list[Node], before: list[Node]) -> None:
    """A Split with other sizes where the parts still make up the whole, in order; else one selection per part."""
    source = str(nodes[0].inputs[0])
    together = all(node.inputs[0] == source for node in nodes)
    if any(node.op != "select" for node in nodes):
        if not together or len(nodes) < len(before):
            reason = "its parts, of sizes known only at run time, now read different values"
            raise HostError(reason, node=nodes[0].label, op="Split")
        return rewire(patch, onnx_node, nodes[0], before[0])
    positions = [k for node in nodes for k in attributes(node, SelectAttrs)["keep"]]
    whole = positions == list(range(int(patch.shapes[source][attributes(nodes[0], AxisAttrs)["axis"]])))
    if together and whole and len(nodes) == len(onnx_node.outputs):
        _set_sizes(
            patch, onnx_node, patch.values[source], [len(attributes(node, SelectAttrs)["keep"]) for node in nodes]
        )
        return None
    if together and whole and len(nodes) > 1:
        _shorter_split(patch, onnx_node, nodes, patch.values[source])
        return None
    for node in nodes:
        op, inputs, given = selection(patch, node)
        patch.replace_value(node.name, patch.insert(op, inputs, f"{node.name}.part", given))
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
    """Some parts are gone: a new Split, with the name and the notes of the old one."""
    outputs = [onnx_ir.Value() for _ in nodes]
    new = onnx_ir.Node(
        "", "Split", [x, *onnx_node.inputs[1:]], onnx_node.attributes.values(), outputs=outputs, doc_string=onnx_node.doc_string,
        metadata_props=dict(onnx_node.metadata_props),
    )  # fmt: skip
    _set_sizes(patch, new, x, [len(attributes(node, SelectAttrs)["keep"]) for node in nodes])
    assert onnx_node.graph is not None
    onnx_node.graph.insert_after(onnx_node, new)
    for node, output in zip(nodes, outputs, strict=True):
        patch.replace_value(node.name, output)
    new.name = onnx_node.name
    patch.retire(onnx_node)
    patch.move_to(new)


Selection = tuple[str, list[onnx_ir.Value | None], list[onnx_ir.Attr]]


def selection(patch: ModelPatch, node: Node) -> Selection:
    """The op, inputs and attributes of a select: Slice where the positions are evenly spaced, else Gather."""
    source, axis = str(node.inputs[0]), attributes(node, AxisAttrs)["axis"]
    keep = list(attributes(node, SelectAttrs)["keep"])
    x = patch.values[source]
    if keep == list(range(int(patch.shapes[source][axis]))):
        return "Identity", [x], []
    step = keep[1] - keep[0] if len(keep) > 1 else 1
    regular = step > 0 and keep == list(range(keep[0], keep[-1] + 1, step))
    if regular and patch.opset >= 10:
        bounds = [patch.array(np.asarray([n], dtype=np.int64)) for n in (keep[0], keep[-1] + 1, axis, step)]
        return "Slice", [x, *bounds[: 3 if step == 1 else 4]], []
    if regular and step == 1:
        named = {"starts": [keep[0]], "ends": [keep[-1] + 1], "axes": [axis]}
        return "Slice", [x], [onnx_ir.AttrInt64s(name, values) for name, values in named.items()]
    return "Gather", [x, patch.array(np.asarray(keep, dtype=np.int64))], [onnx_ir.AttrInt64("axis", axis)]


# ---------------------------------------------------------------- integers


def write_integers(patch: ModelPatch, onnx_node: onnx_ir.Node, nodes: list[Node], before: list[Node]) -> None:
    """QLinearConv and QLinearMatMul: weight, scale, zero point and bias are inputs of their own."""
    now, was = (next(node for node in some if node.op in ("conv", "linear")) for some in (nodes, before))
    for slot, position in ((3, 1), (8, 2)):
        operand, old = ((*node.inputs, None)[position] for node in (now, was))
        parts = quantised(operand) if isinstance(operand, Tensor) else None
        if operand == old or parts is None:
            continue
        if slot >= len(onnx_node.inputs):
            onnx_node.resize_inputs(slot + 1)
        for i, piece in enumerate((parts.numbers, parts.scale, parts.zero) if slot == 3 else (parts.numbers,)):
            onnx_node.replace_input_with(slot + i, None if piece is None else patch.initializer(piece))
    if now.op == "conv" and attributes(now, ConvAttrs)["groups"] != attributes(was, ConvAttrs)["groups"]:
        onnx_node.attributes["group"] = onnx_ir.AttrInt64("group", attributes(now, ConvAttrs)["groups"])


def write_blocks(patch: ModelPatch, onnx_node: onnx_ir.Node, nodes: list[Node], before: list[Node]) -> None:
    """MatMulNBits: integers packed into bytes, with the scales and zero points of whole blocks."""
    rewire(patch, onnx_node, nodes[0], before[0], but=(1,))
    weight = nodes[0].inputs[1]
    if weight == before[0].inputs[1]:
        return
    parts = quantised(weight) if isinstance(weight, Tensor) else None
    if parts is None:
        raise HostError("its weights cannot be laid out in blocks again", node=nodes[0].label, op=onnx_node.op_type)
    bits = onnx_node.attributes["bits"].as_int() if "bits" in onnx_node.attributes else 4
    (outs, ins), blocks = parts.numbers.shape, parts.scale.shape[1]
    names = [value.name if value is not None else "" for value in onnx_node.inputs]
    packed = packed_numbers(parts.numbers, bits, parts.block, blocks)
    onnx_node.replace_input_with(1, patch.initializer(packed, base=names[1] or ""))
    flat = (
        onnx_node.inputs[2] is not None
        and onnx_node.inputs[2].shape is not None
        and len(onnx_node.inputs[2].shape) == 1
    )
    onnx_node.replace_input_with(2, patch.initializer(_flattened(parts.scale, flat), base=names[2] or ""))
    if len(names) > 3 and names[3] and parts.zero is not None:
        zero = parts.zero if not parts.zero.dtype.startswith("uint") else packed_zeros(parts.zero, bits)
        onnx_node.replace_input_with(3, patch.initializer(_flattened(zero, flat), base=names[3] or ""))
    _set_ints(onnx_node, N=outs, K=ins)


def _flattened(tensor: Tensor, flat: bool) -> Tensor:
    size = int(np.prod(tensor.shape))
    return apply("reshape", (tensor,), {"shape": (size,)}, (size,), tensor.dtype) if flat else tensor


WRITERS: dict[str, NodeWriter] = {
    "blocks": write_blocks,
    "concat": write_concat,
    "conv": write_conv,
    "heads": write_heads,
    "integers": write_integers,
    "norm": write_norm,
    "groups": write_groups,
    "resize": write_resize,
    "select": write_select,
    "shape": write_shape,
    "squeeze": write_squeeze,
}


def packed_numbers(numbers: Tensor, bits: int, block: int, blocks: int) -> Tensor:
    """Integers of 4 or 8 bits as bytes, block by block, the last one filled up."""
    outs, ins = numbers.shape
    pads = ((0, 0), (0, blocks * block - ins))
    attrs = {"fn": "pad", "axes": (1,), "pads": pads, "value": 0.0}
    full = apply("along", (numbers,), attrs, (outs, blocks * block), "uint8") if pads[1][1] else numbers
    return _in_bytes(full, bits, (outs, blocks, block * bits // 8))


def packed_zeros(zeros: Tensor, bits: int) -> Tensor:
    """Zero points, packed likewise row by row."""
    outs, blocks = zeros.shape
    odd = bits == 4 and blocks % 2
    attrs = {"fn": "pad", "axes": (1,), "pads": ((0, 0), (0, 1)), "value": 0.0}
    full = apply("along", (zeros,), attrs, (outs, blocks + 1), "uint8") if odd else zeros
    return _in_bytes(full, bits, (outs, full.shape[1] * bits // 8))


def _in_bytes(numbers: Tensor, bits: int, shape: tuple[int, ...]) -> Tensor:
    if bits == 4:
        half = (numbers.shape[0], numbers.shape[1] // 2)
        low, high = (
            apply("select", (numbers,), {"axis": 1, "keep": tuple(range(i, numbers.shape[1], 2))}, half, "uint8")
            for i in (0, 1)
        )
        numbers = apply("pointwise", (low, high), {"fn": "add", "alpha": 16.0, "rank": 2}, half, "uint8")
    return apply("reshape", (numbers,), {"shape": shape}, shape, "uint8")
