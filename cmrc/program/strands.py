"""Strands: which position of a value is which unit, followed through the graph.

    s1 = s0 + branch(s0)        unit 3 of s1 is unit 3 of s0 and unit 3 of the branch
    y  = concat(a, b)           unit 70 of y is unit 6 of b, where a has 64
    y  = act(gate) * up         unit 3 of y is made of unit 3 of both

Every op that makes units (linear, conv, embedding) starts a *strand*: a value, one of its axes, and an identity for
each position along it.
Ops that keep units apart (activations, batch norm, pooling, depthwise convolutions, layout) carry the identities on;
ops that combine two values unit by unit make them one. The *weave* is the graph of all strands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from cmrc.ir.axes import segments
from cmrc.ir.graph import Array, Node, Shape, attributes
from cmrc.ir.ops.affine import ConvAttrs, LinearAttrs, SelectAttrs
from cmrc.ir.ops.functions import AlongAttrs
from cmrc.ir.ops.layout import ConcatAttrs, TransposeAttrs
from cmrc.passes.rewriting.rewriter import operand_axis
from cmrc.program.sites import Sites

if TYPE_CHECKING:
    import networkx as nx

Strand = tuple[str, int]  # a value and the axis of its units


@dataclass(slots=True)
class Identities:
    """Disjoint sets of numbers as an array: `parent[i]` is a smaller number of the same set, or i."""

    parent: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def fresh(self, count: int) -> Array:
        start = len(self.parent)
        self.parent = np.concatenate([self.parent, np.arange(start, start + count)])
        return np.arange(start, start + count)

    def find(self, ids: Array) -> Array:
        root: Array = self.parent[ids]
        while np.any(root != self.parent[root]):
            root = self.parent[root]
        self.parent[ids] = root
        return root

    def join(self, first: Array, second: Array) -> None:
        a, b = self.find(first), self.find(second)
        while np.any(a != b):  # again, if a set occurs several times on one side
            np.minimum.at(self.parent, np.maximum(a, b), np.minimum(a, b))  # the smallest of them, or it would not end
            a, b = self.find(first), self.find(second)


def _no_strands() -> nx.DiGraph[Strand]:
    import networkx as nx  # imported here: only groups need it, and it is slow to load

    return nx.DiGraph()


@dataclass(eq=False, slots=True)
class Weave:
    """The strands of a model, connected by its nodes. An edge leads from an operand to a result; `joins` names the node where several meet."""

    sites: Sites
    ids: dict[Strand, Array] = field(default_factory=dict)
    identities: Identities = field(default_factory=Identities)
    strands: nx.DiGraph[Strand] = field(default_factory=_no_strands)
    started: dict[Strand, Node | None] = field(default_factory=dict)
    joins: dict[Strand, Node] = field(default_factory=dict)  # by the strand that the node makes
    balanced: dict[Strand, list[Node]] = field(default_factory=dict)  # read by a convolution in groups

    def shape(self, name: str) -> Shape:
        return self.sites.values[name].shape

    def start(self, strand: Strand, node: Node | None) -> Array:
        if strand not in self.ids:
            size = self.shape(strand[0])[strand[1]]
            assert isinstance(size, int)
            self.ids[strand] = self.identities.fresh(size)
            self.started[strand] = node
            self.strands.add_node(strand)
        return self.ids[strand]

    def carry(self, source: Strand, target: Strand, ids: Array) -> None:
        if target in self.ids:
            self.identities.join(self.ids[target], ids)
        self.ids[target] = ids
        self.strands.add_edge(source, target)

    def meet(self, node: Node, operands: Sequence[Strand], axis: int) -> None:
        """Several values become one, unit by unit. Values that no known op made are taken as they are."""
        target = (node.name, axis)
        distinct = list(dict.fromkeys(operands))
        ids = [self.start(operand, self.sites.producers.get(operand[0])) for operand in distinct]
        first = self.identities.find(ids[0])
        if any(
            np.any(self.identities.find(other) != first) for other in ids[1:]
        ):  # x * sigmoid(x) does not couple two values
            self.joins[target] = node
        for operand, own in zip(distinct, ids, strict=True):
            self.carry(operand, target, own)

    def of(self, name: str) -> Iterator[int]:
        """The axes of a value that are strands."""
        return (axis for axis in range(len(self.shape(name))) if (name, axis) in self.ids)

    def parts(self) -> Iterator[set[Strand]]:
        """The connected strands."""
        import networkx as nx

        yield from nx.weakly_connected_components(self.strands)

    def add(self, node: Node) -> None:
        rule = RULES.get(node.op)
        if rule is None or len(node.outputs) != 1 or not node.output.dtype.startswith(("float", "bfloat", "bool")):
            return
        if node.op in ("pointwise", "concat") or isinstance(node.inputs[0], str):
            rule(self, node)


def _make(weave: Weave, node: Node) -> None:
    """A linear map makes new units along its axis; along the other axes units stay the same."""
    axis = attributes(node, LinearAttrs)["axis"] if node.op == "linear" else len(node.output.shape) - 1
    if isinstance(node.output.shape[axis], int):
        weave.start((node.name, axis), node)
    x = str(node.inputs[0])
    if node.op == "linear":
        for other in weave.of(x):
            if other != axis:
                weave.carry((x, other), (node.name, other), weave.ids[x, other])


def _convolve(weave: Weave, node: Node) -> None:
    """A depthwise convolution carries units on. A grouped one must lose equally many per group, which couples their counts."""
    x, axis, groups = str(node.inputs[0]), attributes(node, ConvAttrs)["axis"], attributes(node, ConvAttrs)["groups"]
    source, target = (x, axis), (node.name, axis)
    known = source in weave.ids
    if known and groups == weave.shape(x)[axis]:
        weave.carry(source, target, np.repeat(weave.ids[source], int(node.output.shape[axis]) // groups))
        return
    weave.start(target, node)
    if 1 < groups < int(weave.shape(x)[axis]):
        weave.balanced.setdefault(target, []).append(node)
        if known:
            weave.balanced.setdefault(source, []).append(node)


def _combine(weave: Weave, node: Node) -> None:
    out = node.output.shape
    for axis, size in enumerate(out):
        if not isinstance(size, int) or size < 2:
            continue
        operands = []
        for i, operand in enumerate(node.inputs):
            local = operand_axis(node, i, weave.shape(operand), axis) if isinstance(operand, str) else None
            if local is not None:
                operands.append((str(operand), local))
        if not all(isinstance(weave.shape(name)[local], int) for name, local in operands):
            continue  # a dynamic size may be this size, or 1 and broadcast
        if any(operand in weave.ids for operand in operands):
            weave.meet(node, operands, axis)


def _act_along(weave: Weave, node: Node) -> None:
    x, axes = str(node.inputs[0]), tuple(attributes(node, AlongAttrs)["axes"])
    for axis in weave.of(x):
        if axis not in axes:
            moved = axis - sum(a < axis for a in axes) if attributes(node, AlongAttrs).get("drop") else axis
            weave.carry((x, axis), (node.name, moved), weave.ids[x, axis])


def _transpose(weave: Weave, node: Node) -> None:
    x = str(node.inputs[0])
    for axis in weave.of(x):
        weave.carry((x, axis), (node.name, attributes(node, TransposeAttrs)["perm"].index(axis)), weave.ids[x, axis])


def _expand(weave: Weave, node: Node) -> None:
    x = str(node.inputs[0])
    lead = len(node.output.shape) - len(weave.shape(x))
    for axis in weave.of(x):
        if node.output.shape[axis + lead] == weave.shape(x)[axis]:
            weave.carry((x, axis), (node.name, axis + lead), weave.ids[x, axis])


def _reshape(weave: Weave, node: Node) -> None:
    """An axis that stays whole is carried; one that is split or merged ends here."""
    x, after = str(node.inputs[0]), node.output.shape
    before = weave.shape(x)
    for axis in weave.of(x):
        for segment in segments(before, after):
            wide = [i for i in range(*segment.after) if after[i] != 1]
            alone = [i for i in range(*segment.before) if before[i] != 1] == [axis]
            if alone and len(wide) == 1 and after[wide[0]] == before[axis]:
                weave.carry((x, axis), (node.name, wide[0]), weave.ids[x, axis])


def _select(weave: Weave, node: Node) -> None:
    x, along = str(node.inputs[0]), attributes(node, SelectAttrs)["axis"]
    for axis in weave.of(x):
        ids = weave.ids[x, axis]
        weave.carry(
            (x, axis), (node.name, axis), ids[list(attributes(node, SelectAttrs)["keep"])] if axis == along else ids
        )


def _concatenate(weave: Weave, node: Node) -> None:
    """Along the units the parts lie side by side; along another axis they are the same units."""
    along, names = attributes(node, ConcatAttrs)["axis"], [o for o in node.inputs if isinstance(o, str)]
    for axis in sorted({axis for name in names for axis in weave.of(name)}):
        if axis != along:
            weave.meet(node, [(name, axis) for name in names], axis)
            continue
        sizes = [
            o.shape[axis] if not isinstance(o, str) else weave.shape(o)[axis] for o in node.inputs if o is not None
        ]
        if not all(isinstance(n, int) for n in sizes):
            continue
        parts = []
        for operand, size in zip(node.inputs, sizes, strict=True):
            if isinstance(operand, str):
                parts.append(weave.start((operand, axis), weave.sites.producers.get(operand)))
            else:
                parts.append(weave.identities.fresh(int(size)))
        for name in dict.fromkeys(names):
            weave.strands.add_edge((name, axis), (node.name, axis))
        weave.ids[node.name, axis] = np.concatenate(parts)
        if len(set(names)) > 1:
            weave.joins[node.name, axis] = node


RULES = {
    "linear": _make,
    "embedding": _make,
    "conv": _convolve,
    "pointwise": _combine,
    "along": _act_along,
    "transpose": _transpose,
    "expand": _expand,
    "reshape": _reshape,
    "select": _select,
    "concat": _concatenate,
}


def weave_strands(sites: Sites) -> Weave:
    """The strands of a whole model."""
    weave = Weave(sites)
    for node in sites.graph.nodes:
        weave.add(node)
    return weave
