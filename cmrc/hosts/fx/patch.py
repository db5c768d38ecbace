"""Nodes of the model that a pass changed, written into the torch graph: one function per kind of change.

That includes numbers that the exporter wrote into arguments: sizes of views, groups of convolutions, bounds of slices.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from cmrc.hosts.autograd.arrays import torch_dtype
from cmrc.hosts.fx.draft import Draft
from cmrc.hosts.fx.ops.row import Read
from cmrc.hosts.fx.schema import Arguments, Call, opname
from cmrc.ir.axes import product
from cmrc.ir.graph import Graph, Node, Operand, Tensor, attributes
from cmrc.ir.ops.affine import ConvAttrs, SelectAttrs
from cmrc.ir.ops.attention import AttentionAttrs
from cmrc.ir.ops.functions import AlongAttrs
from cmrc.ir.spec import AxisAttrs, FunctionAttrs

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Scaled:
    """A dynamic size that merges samples with units, now that there are fewer units."""

    size: fx.Node
    old: int
    new: int


def patch_node(draft: Draft, before: Node, node: Node) -> None:
    """New operands and attributes for a node that the IR understands (`patch_parts` for results of a split)."""
    if node.op == "opaque":
        _reread_opaque(draft, before, node)
    elif node.name not in draft.reading.parts:
        call = Call(draft.nodes[node.name])
        if node.op == "concat":
            _reread_concat(draft, node, call)
        else:
            _reread(draft, before, node, call)
        patch = ATTRIBUTES.get(node.op)
        if patch is not None:
            patch(draft, before, node, call)
        if call.changed:
            call.write()


# ---------------------------------------------------------------- operands


def _reread_opaque(draft: Draft, before: Node, node: Node) -> None:
    """New operands for an opaque op. It may have several results: its own node is its origin."""
    target = next(n for n in draft.lifted.nodes if n.name == node.origin)
    dtype = torch_dtype(node.output.dtype)
    sources = [read for read in target.all_input_nodes if read.op != "get_attr"]  # equal tensors may be several nodes
    for i, (was, now, old) in enumerate(zip(before.inputs, node.inputs, sources, strict=True)):
        if was != now and (new := draft.operand(now, node, i, dtype)) is not old:
            target.replace_input_with(old, new)


def _reread_concat(draft: Draft, node: Node, call: Call) -> None:
    dtype = torch_dtype(node.output.dtype)
    call["tensors"] = [draft.operand(o, node, i, dtype) for i, o in enumerate(node.inputs)]


def _reread(draft: Draft, before: Node, node: Node, call: Call) -> None:
    dtype = torch_dtype(node.output.dtype)
    for i, position in enumerate(draft.reading.reads[node.name].args):
        now = node.inputs[i] if i < len(node.inputs) else None
        was = before.inputs[i] if i < len(before.inputs) else None
        if now == was:
            continue
        assert isinstance(position, int)
        operand = draft.operand(now, node, i, draft.dtype_of(was, dtype))
        operand = _turned(draft, call, position, now, operand)
        if call[position] is not operand:
            call[position] = operand


def _turned(draft: Draft, call: Call, position: int, now: Operand, operand: Any) -> Any:
    """The weight itself, if a product reads it through a transpose."""
    turn = call[position]
    if not (isinstance(turn, fx.Node) and turn.name in draft.reading.turned and isinstance(now, Tensor)):
        return operand
    if turn.args[0] is operand:
        return turn
    target: Any = turn.target
    with draft.lifted.inserting_before(call.node):
        return draft.lifted.call_function(target, (operand, *turn.args[1:]))


# ---------------------------------------------------------------- attributes


def _patch_sizes(draft: Draft, before: Node, node: Node, call: Call) -> None:
    read = draft.reading.reads[node.name]
    sizes = new_sizes(before, node, read, call)
    if sizes is not None:
        call[read.sizes] = [_scale(draft, call.node, n) if isinstance(n, Scaled) else n for n in sizes]


def new_sizes(before: Node, node: Node, read: Read, arguments: Arguments) -> list[Any] | None:
    """The sizes of a view or expand for another shape; None if they already express it, by -1."""
    if not read.sizes or node.output.shape == before.output.shape:
        return None
    present = list(arguments[read.sizes])
    sizes = list(present)
    for i, size in enumerate(sizes):
        new, old = node.output.shape[i + read.first], before.output.shape[i + read.first]
        if isinstance(size, int) and size != -1 and size != new:
            sizes[i] = new
        elif isinstance(size, fx.Node) and new != old:  # samples merged with units: a view infers one such size
            known = {d: node.output.shape[d + read.first] for d, n in enumerate(sizes) if type(n) is int and n == -1}
            if node.op == "expand" or not all(isinstance(n, int) for n in known.values()):
                sizes[i] = Scaled(size, product((old,))[0], product((new,))[0])
            else:
                sizes[i] = -1
                for d, n in known.items():
                    sizes[d] = n
    return sizes if sizes != present else None


def _scale(draft: Draft, target: fx.Node, size: Scaled) -> fx.Node:
    with draft.lifted.inserting_before(target):
        samples = draft.lifted.call_function(operator.floordiv, (size.size, size.old))
        return draft.lifted.call_function(operator.mul, (samples, size.new))


def _patch_norm(_: Draft, before: Node, node: Node, call: Call) -> None:
    now, was = attributes(node, AlongAttrs), attributes(before, AlongAttrs)
    if now["fn"] == "rms_norm" and now["eps"] != was["eps"]:
        call["normalized_shape"] = [int(node.output.shape[-1])]
        call["eps"] = now["eps"]
    elif now["fn"] == "group_norm" and now["groups"] != was["groups"]:
        call["num_groups"] = now["groups"]


def _patch_scale(_: Draft, before: Node, node: Node, call: Call) -> None:
    if node.marks.narrowed:
        call["scale"] = attributes(node, AttentionAttrs)["scale"]  # torch would compute it from the remaining width


def _patch_groups(_: Draft, before: Node, node: Node, call: Call) -> None:
    if attributes(node, ConvAttrs)["groups"] != attributes(before, ConvAttrs)["groups"]:
        call["groups"] = attributes(node, ConvAttrs)["groups"]


def _patch_positions(draft: Draft, before: Node, node: Node, call: Call) -> None:
    """A slice of other positions. It may become an index_select, so it is written here."""
    if attributes(node, SelectAttrs)["keep"] != attributes(before, SelectAttrs)["keep"]:
        draft.take(call.node, call[0], attributes(node, AxisAttrs)["axis"], attributes(node, SelectAttrs)["keep"])
        call.changed = False


AttributePatch: TypeAlias = Callable[[Draft, Node, Node, Call], None]
ATTRIBUTES: dict[str, AttributePatch] = {
    "reshape": _patch_sizes,
    "expand": _patch_sizes,
    "along": _patch_norm,
    "attention": _patch_scale,
    "conv": _patch_groups,
    "select": _patch_positions,
}


# ---------------------------------------------------------------- results of split and unbind


def patch_parts(draft: Draft, graph: Graph) -> None:
    """The op stays if it can still make its parts; otherwise each part becomes a slice."""
    before, sources = draft.reading.by_name, draft.reading.parts
    groups: dict[str, list[Node]] = {}
    for node in graph.nodes if sources else ():
        if node.name in sources:
            groups.setdefault(sources[node.name], []).append(node)
    for source, parts in groups.items():
        if all(part == before[part.name] for part in parts):
            continue
        split = draft.nodes[source]
        everyone = [name for name, owner in draft.reading.parts.items() if owner == source]
        inputs = {part.inputs[0] for part in parts if isinstance(part.inputs[0], str)}
        whole = len(parts) == len(everyone) and len(inputs) == 1
        if parts[0].op == "along" and (whole or attributes(parts[0], FunctionAttrs)["fn"] != "pick"):
            _share_out(draft, split, parts)
        elif not (whole and _still_splits(draft, graph, split, parts)):
            for part in parts:
                _stand_alone(draft, part)


def _share_out(draft: Draft, split: fx.Node, parts: Sequence[Node]) -> None:
    """One op for all parts that read the same value."""
    calls: dict[str, fx.Node] = {}
    for part in parts:
        source, getitem = str(part.inputs[0]), draft.nodes[part.name]
        if source not in calls:
            with draft.lifted.inserting_before(getitem):
                calls[source] = draft.lifted.node_copy(split) if calls else split
            calls[source].update_arg(0, draft.nodes[source])
        getitem.update_arg(0, calls[source])


def _still_splits(draft: Draft, graph: Graph, split: fx.Node, parts: Sequence[Node]) -> bool:
    order = sorted(parts, key=lambda p: int(str(draft.nodes[p.name].args[1])))
    source, axis = str(order[0].inputs[0]), attributes(order[0], AxisAttrs)["axis"]
    flat = [k for part in order for k in attributes(part, SelectAttrs)["keep"]]
    if flat != list(range(int(graph.values()[source].shape[axis]))):
        return False
    x, sizes = draft.nodes[source], [len(attributes(part, SelectAttrs)["keep"]) for part in order]
    if opname(split) == "chunk" and len(set(sizes)) == 1 and len(sizes) == split.args[1]:
        split.update_arg(0, x)
    else:
        split.target, split.kwargs = aten.split_with_sizes.default, {}
        split.args = (x, sizes, axis)
    return True


def _stand_alone(draft: Draft, part: Node) -> None:
    target, x = draft.nodes[part.name], draft.nodes[str(part.inputs[0])]
    if part.op == "along":
        target.target, target.args = (
            aten.select.int,
            (x, attributes(part, AlongAttrs)["axes"][0], attributes(part, AlongAttrs)["index"]),
        )
    else:
        draft.take(target, x, attributes(part, AxisAttrs)["axis"], attributes(part, SelectAttrs)["keep"])
