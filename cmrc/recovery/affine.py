"""The affine ops of a lowered model that the original has as well: their weights as matrices, and which rows they make of what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cmrc.ir.graph import Array, Graph, Leaf, Node, Operand, Tensor, attributes, leaves_of
from cmrc.ir.ops.affine import ConvAttrs, LinearAttrs, conv_pads
from cmrc.ir.ops.arrays import windows
from cmrc.ir.ops.functions import PointwiseAttrs
from cmrc.ir.spec import AxisAttrs
from cmrc.ir.tensors import constant
from cmrc.statistics.readers import norm_scale


@dataclass(frozen=True, slots=True, eq=False)
class AddedTo:
    """What the result of an op is added to: `sum` = scale · y + shift + `other`."""

    sum: str
    other: str


@dataclass(frozen=True, slots=True, eq=False)
class Refit:
    """An affine op of the lowered model, which the original has as well."""

    node: Node
    weight: Leaf
    own: Tensor | None  # its bias
    bias: Leaf | None  # where a constant can be added: there, in the sum with a vector or the batch norm behind it
    kept: Array  # which of the original's outputs it has
    scale: Array | None  # by which batch norm multiplies its outputs
    in_norm: bool  # whether the constant goes there
    stream: AddedTo | None

    @property
    def x(self) -> str:
        return str(self.node.inputs[0])

    @property
    def axis(self) -> int:
        return attributes(self.node, AxisAttrs)["axis"]

    def taught(self) -> tuple[str, ...]:
        """The values of the original that it is fitted to."""
        return (self.node.name,) if self.stream is None else (self.node.name, self.stream.other)

    # ------------------------------------------------------------ numbers

    def matrix(self, weight: Array) -> Array:
        """The weight as [groups, inputs of an output, outputs of a group]."""
        if self.node.op == "linear":
            attrs = attributes(self.node, LinearAttrs)
            return np.asarray(np.moveaxis(weight, (attrs["w_in"], attrs["w_out"]), (0, 1))[None])
        return weight.reshape(self.groups, weight.shape[0] // self.groups, -1).swapaxes(1, 2)

    def stored(self, matrix: Array) -> Array:
        """A matrix as the host stores it."""
        if self.node.op == "linear":
            attrs = attributes(self.node, LinearAttrs)
            return np.moveaxis(matrix[0], (0, 1), (attrs["w_in"], attrs["w_out"]))
        return matrix.swapaxes(1, 2).reshape(self.weight.shape)

    def inputs_at(self, x: Array, places: Array, shape: Sequence[int]) -> Array:
        """What the outputs at some places of a result of this shape are made from: [places, groups, inputs]."""
        if self.node.op == "linear":
            rows = np.moveaxis(x, self.axis, -1)
            return rows.reshape(-1, rows.shape[-1])[places][:, None]
        attrs = attributes(self.node, ConvAttrs)
        kernel = self.weight.shape[2:]
        pads = conv_pads(attrs, x.shape[2:], kernel)
        seen = windows(x, kernel, attrs["stride"], pads, attrs["dilation"], 0.0)
        row, *positions = np.unravel_index(places, (shape[0], *shape[2:]))
        channels_last = np.moveaxis(seen, 1, 1 + len(positions))  # one index takes a place with all its channels
        return np.asarray(channels_last[(row, *positions)].reshape(len(places), self.groups, -1))

    def outputs_at(self, y: Array, places: Array) -> Array:
        rows = np.moveaxis(y, self.axis, -1)
        return rows.reshape(-1, rows.shape[-1])[places].astype(np.float64)

    def answer(self, x: Array, matrix: Array) -> Array:
        """What the op makes of these inputs: [places, outputs]."""
        y = (x.swapaxes(0, 1) @ matrix).swapaxes(0, 1).reshape(len(x), -1)
        return y if self.own is None else y + constant(self.own)

    def grouped(self, outputs: Array) -> Array:
        return outputs.reshape(len(outputs), self.groups, -1)

    def shifted(self, bias: Array, shift: Array) -> Array:
        """The bias with which this is added to the op's outputs."""
        return bias + shift.reshape(-1) * (self.scale if self.in_norm and self.scale is not None else 1.0)

    @property
    def groups(self) -> int:
        return int(attributes(self.node, ConvAttrs)["groups"]) if self.node.op == "conv" else 1

    def rows(self, each: int, least: int) -> int:
        """How many rows to fit on: so many for each input of an output."""
        return max(least, each * int(self.matrix(np.empty(self.weight.shape)).shape[1]))


def refits(original: Graph, small: Graph, chosen: Collection[str]) -> list[Refit]:
    """The affine ops that can be fitted: of parameters that nobody else reads, and with outputs that the original has."""
    theirs = {node.name: node for node in original.nodes}
    users = Counter(leaf.name for node in small.nodes for operand in node.inputs for leaf in _leaves(operand))
    free = {name for name in chosen if users[name] == 1}
    consumers = small.readers
    refits = []
    for node in small.nodes:
        before = theirs.get(node.name)
        if before is None or before.op != node.op or not _is_plain(node):
            continue
        kept = _kept(before, node)
        weight, bias = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
        if kept is None or not isinstance(weight, Leaf) or weight.name not in free or isinstance(bias, str):
            continue
        behind = _behind(consumers, node)
        place = behind.place if behind.place is not None and behind.place.name in free else None
        stream = _stream(original, small, behind.node)
        refits.append(Refit(node, weight, bias, place, kept, behind.scale, behind.in_norm, stream))
    return refits


def _leaves(operand: Operand) -> list[Leaf]:
    return [] if operand is None or isinstance(operand, str) else list(leaves_of(operand))


def _is_plain(node: Node) -> bool:
    if node.op not in ("linear", "conv") or node.marks.inside or not isinstance(node.inputs[0], str):
        return False
    if node.op == "linear":
        attrs = attributes(node, LinearAttrs)
        return attrs.get("alpha", 1.0) == 1.0 and attrs.get("beta", 1.0) == 1.0
    return attributes(node, AxisAttrs)["axis"] == 1 and not attributes(node, ConvAttrs).get("transposed")


@dataclass(frozen=True, slots=True, eq=False)
class _Behind:
    """What follows an op: a bias that is added, batch norm, or neither; and where a constant of its outputs can go."""

    node: Node
    place: Leaf | None
    scale: Array | None = None
    in_norm: bool = False


def _behind(consumers: Mapping[str, Sequence[Node]], node: Node) -> _Behind:
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    outs = node.output.shape[attributes(node, AxisAttrs)["axis"]]
    behind = _Behind(node, bias if isinstance(bias, Leaf) and bias.shape == (outs,) else None)
    name, added = _only(consumers, node.name)
    if bias is None and added is not None and attributes(added, PointwiseAttrs)["fn"] == "add":
        known = [operand for operand in added.inputs if isinstance(operand, Leaf)]
        last = attributes(node, AxisAttrs)["axis"] == len(node.output.shape) - 1
        if last and len(known) == 1 and known[0].shape == (outs,) and "align" not in attributes(added, PointwiseAttrs):
            return _Behind(added, known[0])
    if added is not None and attributes(added, PointwiseAttrs)["fn"] == "batch_norm" and added.inputs[0] == name:
        weight, shift, variance = added.inputs[1], added.inputs[2], added.inputs[4]
        if isinstance(variance, Leaf) and (weight is None or isinstance(weight, Leaf)):
            scale = 1.0 / np.sqrt(variance.load().astype(np.float64) + attributes(added, PointwiseAttrs)["eps"])
            scale = scale if weight is None else scale * weight.load()
            scale, in_norm = norm_scale(added), bias is None and isinstance(shift, Leaf)
            return _Behind(added, shift if in_norm and isinstance(shift, Leaf) else behind.place, scale, in_norm)
    return behind


def _only(consumers: Mapping[str, Sequence[Node]], name: str) -> tuple[str, Node | None]:
    """The pointwise op that alone reads a value, and what it reads it as: idle dropout gives values another name."""
    reading = consumers.get(name, ())
    if len(reading) != 1 or reading[0].op != "pointwise":
        return name, None
    if attributes(reading[0], PointwiseAttrs)["fn"] == "identity":
        return _only(consumers, reading[0].name)
    return name, reading[0]


def _stream(original: Graph, small: Graph, node: Node) -> AddedTo | None:
    """The sum that takes a result in, if both models have it and what is added there."""
    name, added = _only(small.readers, node.name)
    if added is None or attributes(added, PointwiseAttrs)["fn"] != "add":
        return None
    others = [other for other in added.values() if other != name]
    theirs, mine = original.values(), small.values()
    if len(others) != 1 or any(value not in theirs for value in (added.name, others[0])):
        return None
    shapes = {graph[value].shape for graph in (theirs, mine) for value in (added.name, others[0])} | {node.output.shape}
    return AddedTo(added.name, others[0]) if len(shapes) == 1 else None


def _kept(before: Node, node: Node) -> Array | None:
    """Which outputs of the original an op still has: all, or those with the same weights."""
    axis = attributes(node, AxisAttrs)["axis"]
    theirs, mine = before.output.shape, node.output.shape
    if len(theirs) != len(mine) or theirs[:axis] != mine[:axis] or theirs[axis + 1 :] != mine[axis + 1 :]:
        return None
    if theirs[axis] == mine[axis]:
        return np.arange(int(mine[axis]))
    first, second = before.inputs[1], node.inputs[1]
    if not isinstance(first, Leaf) or not isinstance(second, Leaf):
        return None
    old, new = (_rows(one, leaf.load()) for one, leaf in ((before, first), (node, second)))
    if old.shape[1] != new.shape[1]:
        return None
    places: dict[bytes, list[int]] = {}
    for i, row in enumerate(old):
        places.setdefault(row.tobytes(), []).append(i)
    matches = [places.get(row.tobytes(), []) for row in new]
    return np.array([each.pop(0) for each in matches]) if all(matches) else None


def _rows(node: Node, weight: Array) -> Array:
    first = attributes(node, LinearAttrs)["w_out"] if node.op == "linear" else 0
    rows = np.moveaxis(weight, first, 0)
    return np.ascontiguousarray(rows.reshape(len(rows), -1))
