"""Nodes that the passes insert, as calls of aten ops: one function per op of the IR."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import fx

from cmrc.errors import HostError
from cmrc.hosts import clamp
from cmrc.hosts.autograd.arrays import torch_dtype
from cmrc.hosts.fx.draft import Draft
from cmrc.hosts.fx.schema import Call
from cmrc.ir.graph import ArrayLiteral, Graph, Node, Tensor, apply, attributes
from cmrc.ir.ops.affine import ConvAttrs, DoAttrs, LinearAttrs, SelectAttrs
from cmrc.ir.ops.functions import AlongAttrs
from cmrc.ir.ops.group_norm import sums_of
from cmrc.ir.spec import AxisAttrs, FunctionAttrs
from cmrc.ir.tensors import materialise

aten = torch.ops.aten
CONVOLUTIONS = {
    (1, False): aten.conv1d.default,
    (2, False): aten.conv2d.default,
    (3, False): aten.conv3d.default,
    (1, True): aten.conv_transpose1d.default,
    (2, True): aten.conv_transpose2d.input,
    (3, True): aten.conv_transpose3d.input,
}


def insert_nodes(draft: Draft, graph: Graph) -> None:
    """Insert each node right after the nodes of the model that precede it."""
    cursor = [node for node in draft.lifted.nodes if node.op == "placeholder"][-1]
    for node in graph.nodes:
        if node.origin:
            cursor = max(cursor, draft.nodes[node.outputs[-1].name])
            continue
        with draft.lifted.inserting_after(cursor):
            cursor = _emit(draft, node)
        draft.nodes[node.output.name] = cursor


def _emit(draft: Draft, node: Node) -> fx.Node:
    if node.marks.like:
        return _emit_like(draft, node)
    emit = EMITTERS.get(node.op)
    emitted = emit(draft, node) if emit is not None else None
    if emitted is None:
        raise HostError(f"the torch host cannot insert {node.kind}", node=node.label, op=node.op)
    return emitted


def _emit_like(draft: Draft, node: Node) -> fx.Node:
    """A copy of a node of the model on other operands."""
    if node.op == "reshape":  # the copy has a batch of one, unlike the model's own sizes
        sizes = [n if isinstance(n, int) else -1 for n in node.output.shape]
        return draft.call(aten.reshape.default, draft.nodes[str(node.inputs[0])], sizes)
    model, dtype = draft.nodes[node.marks.like], torch_dtype(node.output.dtype)
    call = Call(model)
    for i, (position, given) in enumerate(zip(draft.reading.reads[model.name].args, node.inputs, strict=False)):
        if isinstance(position, int) and isinstance(call[position], int | float) and isinstance(given, ArrayLiteral):
            call[position] = given.array.item()  # it takes a number there, and no tensor
            continue
        operand = draft.operand(given, node, i, dtype)
        if isinstance(position, tuple):  # an entry of a list
            entries = list(call[position[0]])
            entries[position[1]] = operand
            call[position[0]] = entries
        else:
            call[position] = operand
    if node.op == "conv":
        call["groups"] = attributes(node, ConvAttrs)["groups"]
    copied = draft.call(model.target, *model.args, **model.kwargs)
    call.write(copied)
    return copied


def _emit_select(draft: Draft, node: Node) -> fx.Node:
    attrs, x = attributes(node, SelectAttrs), draft.nodes[str(node.inputs[0])]
    axis, period = attrs["axis"], attrs.get("period")
    if period:  # the same positions of every run: the axis is split in two, and joined again
        x = draft.call(aten.unflatten.int, x, axis, [-1, period])
    call = draft.call(aten.slice.Tensor, x)
    draft.take(call, x, axis + bool(period), attrs["keep"])
    return draft.call(aten.flatten.using_ints, call, axis, axis + 1) if period else call


def _emit_plane(draft: Draft, node: Node) -> fx.Node:
    x = draft.nodes[str(node.inputs[0])]
    axis, known = attributes(node, AxisAttrs)["axis"], node.output.shape
    sizes = [
        known[d] if isinstance(known[d], int) else draft.call(aten.sym_size.int, x, d)
        for d in range(axis + 1, len(known))
    ]
    device = draft.reading.program.device
    return draft.call(
        aten.ones.default, [*([1] * (axis + 1)), *sizes], dtype=torch_dtype(node.output.dtype), device=device
    )


POINTWISE = {"add": aten.add.Tensor, "sub": aten.sub.Tensor, "mul": aten.mul.Tensor}


def _emit_pointwise(draft: Draft, node: Node) -> fx.Node | None:
    fn, dtype = attributes(node, FunctionAttrs)["fn"], torch_dtype(node.output.dtype)
    if fn == "cast":
        return draft.call(aten.to.dtype, draft.nodes[str(node.inputs[0])], dtype)
    if fn not in POINTWISE:
        return None
    other = node.inputs[1]
    if fn != "sub" and isinstance(other, ArrayLiteral) and other.array.ndim == 0:
        target = aten.mul.Scalar if fn == "mul" else aten.add.Scalar
        return draft.call(target, draft.nodes[str(node.inputs[0])], other.array.item())
    return draft.call(POINTWISE[fn], *(draft.operand(o, node, i, dtype) for i, o in enumerate(node.inputs)))


def _emit_concat(draft: Draft, node: Node) -> fx.Node:
    dtype = torch_dtype(node.output.dtype)
    return draft.call(
        aten.cat.default,
        [draft.operand(o, node, i, dtype) for i, o in enumerate(node.inputs)],
        attributes(node, AxisAttrs)["axis"],
    )


def _emit_along(draft: Draft, node: Node) -> fx.Node | None:
    x, attrs = draft.nodes[str(node.inputs[0])], node.attrs
    axes = list(attrs["axes"])
    if attrs["fn"] == "mean":
        return draft.call(aten.mean.dim, x, axes, True)
    if attrs["fn"] == "pad":
        flat = [p for pad in reversed(attrs["pads"]) for p in pad]
        return draft.call(aten.constant_pad_nd.default, x, flat, attrs["value"])
    emit = NORMS.get(attrs["fn"])
    return None if emit is None else emit(draft, node, x)


def _emit_rms_norm(draft: Draft, node: Node, x: fx.Node) -> fx.Node:
    """A norm. torch normalises only the last axes; along another axis it is spelled out."""
    axis, rank, eps = (
        attributes(node, AlongAttrs)["axes"][0],
        len(node.output.shape),
        attributes(node, AlongAttrs)["eps"],
    )
    weight = node.inputs[1] if len(node.inputs) > 1 else None
    if axis != rank - 1 and isinstance(weight, Tensor):
        shape = (weight.shape[0], *(1,) * (rank - axis - 1))
        weight = apply("reshape", (weight,), {"shape": shape}, shape, weight.dtype)
    scale = draft.operand(weight, node, 1, torch_dtype(node.output.dtype))
    if axis == rank - 1:
        return draft.call(aten.rms_norm.default, x, [int(node.output.shape[-1])], scale, eps)
    mean = draft.call(aten.mean.dim, draft.call(aten.mul.Tensor, x, x), [axis], True)
    root = draft.call(aten.rsqrt.default, draft.call(aten.add.Scalar, mean, eps))
    normal = draft.call(aten.mul.Tensor, x, root)
    return normal if scale is None else draft.call(aten.mul.Tensor, normal, scale)


def _emit_group_norm(draft: Draft, node: Node, x: fx.Node) -> fx.Node:
    dtype = torch_dtype(node.output.dtype)
    scale, shift = (draft.operand(o, node, i, dtype) for i, o in enumerate((*node.inputs[1:], None, None)[:2], start=1))
    attrs = attributes(node, AlongAttrs)
    return draft.call(aten.group_norm.default, x, attrs["groups"], scale, shift, attrs["eps"])


def _emit_known_group_norm(draft: Draft, node: Node, x: fx.Node) -> fx.Node:
    """A group norm of which some units are known (`ir/ops/group_norm.py`), in float32 at least."""
    declared, base, rank = torch_dtype(node.output.dtype), node.name.replace(".", "_"), len(node.output.shape)
    dtype = declared if declared == torch.float64 else torch.float32
    sums, over = sums_of(attributes(node, AlongAttrs)), list(range(2, rank))
    buffers: dict[str, fx.Node] = {}

    def numbers(array: np.ndarray, name: str) -> fx.Node:
        if name not in buffers:
            tensor = torch.from_numpy(array)
            buffers[name] = draft.constant(tensor.to(dtype) if tensor.is_floating_point() else tensor, f"{base}_{name}")
        return buffers[name]

    def taken(values: fx.Node, places: Sequence[int] | np.ndarray, name: str) -> fx.Node:
        return draft.call(aten.index_select.default, values, 1, numbers(np.asarray(places, np.int64), name))

    def by_unit(values: fx.Node) -> fx.Node:
        spread = values if len(sums.places) == 1 else taken(values, sums.group_of, "groups")
        return draft.call(aten.reshape.default, spread, [-1, len(sums.group_of) if spread is not values else 1, *ones])

    def over_groups(values: fx.Node) -> fx.Node:
        means = draft.call(aten.mean.dim, values, over) if over else values
        means = means if sums.alike else taken(means, sums.places.reshape(-1), "places")
        parts = draft.call(aten.unflatten.int, means, 1, list(sums.places.shape))
        if sums.alike:
            return draft.call(aten.mul.Scalar, draft.call(aten.mean.dim, parts, [2]), float(sums.shares[0, 0]))
        return draft.call(aten.mean.dim, draft.call(aten.mul.Tensor, parts, numbers(sums.shares, "shares")), [2])

    wide, ones = x if dtype == declared else draft.call(aten.to.dtype, x, dtype), [1] * len(over)
    shift, share, more, centre = (numbers(row, name) for row, name in zip(sums.constants, NAMES, strict=True))
    mean = draft.call(aten.add.Tensor, over_groups(wide), shift)
    centred = draft.call(aten.sub.Tensor, wide, by_unit(mean))
    distance = draft.call(aten.sub.Tensor, centre, mean)
    known = draft.call(aten.mul.Tensor, draft.call(aten.mul.Tensor, distance, distance), share)
    squares = over_groups(draft.call(aten.mul.Tensor, centred, centred))
    root = draft.call(
        aten.rsqrt.default, draft.call(aten.add.Tensor, draft.call(aten.add.Tensor, squares, known), more)
    )
    parts = [taken(draft.call(aten.mul.Tensor, distance, root), sums.shifted, "shifted")]
    parts += [taken(root, sums.spread, "spread")] if sums.spread else []
    carriers = draft.call(aten.cat.default, parts, 1) if len(parts) > 1 else parts[0]
    if over:
        flat = draft.call(aten.reshape.default, carriers, [-1, len(sums.shifted) + len(sums.spread), *ones])
        carriers = draft.call(aten.expand.default, flat, [-1, -1, *(draft.call(aten.sym_size.int, x, d) for d in over)])
    normal = draft.call(aten.cat.default, [draft.call(aten.mul.Tensor, centred, by_unit(root)), carriers], 1)
    for target, parameter in zip((aten.mul.Tensor, aten.add.Tensor), node.inputs[1:], strict=False):
        if isinstance(parameter, Tensor):
            shape = (parameter.shape[0], *(1,) * (rank - 2))
            placed = apply("reshape", (parameter,), {"shape": shape}, shape, parameter.dtype)
            normal = draft.call(target, normal, draft.operand(placed, node, 1, dtype))
    return normal if dtype == declared else draft.call(aten.to.dtype, normal, declared)


NAMES = ("shift", "share", "more", "centre")
NORMS: dict[str, Callable[[Draft, Node, fx.Node], fx.Node]] = {
    "rms_norm": _emit_rms_norm,
    "group_norm": _emit_group_norm,
    "known_group_norm": _emit_known_group_norm,
}


def _emit_conv(draft: Draft, node: Node) -> fx.Node:
    a, dtype = node.attrs, torch_dtype(node.output.dtype)
    x, weight, bias = (*(draft.operand(o, node, i, dtype) for i, o in enumerate(node.inputs)), None)[:3]
    rank, transposed, pad = len(a["stride"]), bool(a.get("transposed")), list(a["pad"])
    if any(low != high for low, high in pad):
        flat = [p for low, high in reversed(pad) for p in (low, high)]
        x, pad = draft.call(aten.constant_pad_nd.default, x, flat), [(0, 0)] * rank
    head = (x, weight, bias, list(a["stride"]), [low for low, _ in pad])
    target = CONVOLUTIONS[rank, transposed]
    if transposed:
        return draft.call(target, *head, list(a["output_padding"]), 1, list(a["dilation"]))
    return draft.call(target, *head, list(a["dilation"]), 1)


def _emit_linear(draft: Draft, node: Node) -> fx.Node:
    """A product with a matrix, along the last axis."""
    dtype = torch_dtype(node.output.dtype)
    x, weight = (draft.operand(o, node, i, dtype) for i, o in enumerate(node.inputs[:2]))
    return draft.call(
        aten.matmul.default,
        x,
        weight if not attributes(node, LinearAttrs)["w_in"] else draft.call(aten.t.default, weight),
    )


def _emit_turn(draft: Draft, node: Node) -> fx.Node:
    """A product with the matrix of all blocks, the unit axis last in between."""
    base, dtype, axis = node.name.replace(".", "_"), torch_dtype(node.output.dtype), attributes(node, AxisAttrs)["axis"]
    matrix = draft.constant(torch.from_numpy(clamp.matrix(node)).to(dtype), f"{base}_matrix")
    last = draft.call(aten.transpose.int, draft.nodes[str(node.inputs[0])], axis, -1)
    turned = draft.call(aten.matmul.default, last, matrix)
    return draft.call(aten.transpose.int, turned, axis, -1)


# ---------------------------------------------------------------- a do that stays


def _emit_do(draft: Draft, node: Node) -> fx.Node:
    """The literal meaning: where(mask, constants, x), or the parents' affine function copied into place."""
    if isinstance(node.inputs[1], str):
        return _emit_computed_do(draft, node)
    return _emit_constant_do(draft, node) if len(node.inputs) == 2 else _emit_affine_do(draft, node)


def _emit_constant_do(draft: Draft, node: Node) -> fx.Node:
    base, dtype = node.name.replace(".", "_"), torch_dtype(node.output.dtype)
    constants = draft.constant(torch.from_numpy(clamp.constants(node)).to(dtype), f"{base}_value")
    mask = draft.constant(torch.from_numpy(clamp.mask(node)), f"{base}_mask")
    return draft.call(aten.where.self, mask, constants, draft.nodes[str(node.inputs[0])])


def _emit_computed_do(draft: Draft, node: Node) -> fx.Node:
    """where(mask, value, x), the value's positions spread over the axis."""
    base, value = node.name.replace(".", "_"), draft.nodes[str(node.inputs[1])]
    mask = draft.constant(torch.from_numpy(clamp.mask(node)), f"{base}_mask")
    index = draft.constant(torch.from_numpy(clamp.places(node)), f"{base}_places")
    spread = draft.call(aten.index_select.default, value, attributes(node, AxisAttrs)["axis"], index)
    return draft.call(aten.where.self, mask, spread, draft.nodes[str(node.inputs[0])])


def _emit_affine_do(draft: Draft, node: Node) -> fx.Node:
    """x[units] := x[parents] Bᵀ + β along the axis; each row of a matrix with fewer rows than units serves a block of units."""
    x, axis, units = (
        draft.nodes[str(node.inputs[0])],
        attributes(node, AxisAttrs)["axis"],
        attributes(node, DoAttrs)["units"],
    )
    base, dtype, last = node.name.replace(".", "_"), torch_dtype(node.output.dtype), len(node.output.shape) - 1
    mix = node.inputs[2]
    assert isinstance(mix, Tensor)
    matrix = torch.from_numpy(np.array(materialise(mix), dtype=np.float64)).to(dtype)
    rows, columns = matrix.shape
    repeat = len(units) // rows
    parents = draft.constant(torch.tensor(attributes(node, DoAttrs)["parents"]), f"{base}_parents")
    where = draft.constant(torch.tensor(units), f"{base}_units")
    seen = draft.call(aten.transpose.int, draft.call(aten.index_select.default, x, axis, parents), axis, last)
    weight = draft.constant(matrix, f"{base}_weight")
    if repeat == 1:
        rebuilt = draft.call(aten.linear.default, seen, weight)
    else:
        blocks = draft.call(aten.unflatten.int, seen, -1, [columns, repeat])
        mixed = draft.call(aten.linear.default, draft.call(aten.transpose.int, blocks, -1, -2), weight)
        rebuilt = draft.call(aten.flatten.using_ints, draft.call(aten.transpose.int, mixed, -1, -2), -2, -1)
    rebuilt = draft.call(aten.transpose.int, rebuilt, axis, last)
    offset = draft.constant(torch.from_numpy(np.array(clamp.slab(node))).to(dtype), f"{base}_bias")
    return draft.call(aten.index_copy.default, x, axis, where, draft.call(aten.add.Tensor, rebuilt, offset))


Emit: TypeAlias = Callable[[Draft, Node], fx.Node | None]
EMITTERS: dict[str, Emit] = {
    "do": _emit_do,
    "select": _emit_select,
    "plane": _emit_plane,
    "pointwise": _emit_pointwise,
    "along": _emit_along,
    "concat": _emit_concat,
    "conv": _emit_conv,
    "linear": _emit_linear,
    "turn": _emit_turn,
}
