"""Where the units of a linear op lie in the values that are made of it: which unit is at which position, affine in the positions.

    [N, T, 12·32]                 unit = u                 the result of the linear op: u along the last axis
    [N, T, 12, 32]                unit = 32 h + u          reshape
    [N, 12, T, 32]                unit = 32 h + u          transpose
    [12·N, T, 32], [N, 32, T]     the same, or a part      reshape, select

An axis is a list of factors `(size, step)`, the slowest first; a factor with step 0 is no part of the units. Blocks of `size` units
(the units of a head) stay whole: a walk ends where they would be cut, mixed, or treated one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cmrc.ir.axes import product, segments
from cmrc.ir.graph import Array, Dim, Graph, Node, Shape, Tensor, attributes
from cmrc.ir.ops.affine import SelectAttrs
from cmrc.ir.ops.functions import AlongAttrs
from cmrc.ir.ops.layout import TransposeAttrs
from cmrc.ir.spec import FunctionAttrs
from cmrc.passes.rewriting.rewriter import operand_axis, result_axis

Factor = tuple[Dim, int]
Axis = tuple[Factor, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """unit = first + Σ step · position, over the factors of all axes."""

    first: int
    axes: tuple[Axis, ...]

    @classmethod
    def of(cls, shape: Shape, axis: int) -> Layout:
        """The units lie along one axis, in order."""
        return cls(0, tuple(joined([(size, int(i == axis))]) for i, size in enumerate(shape)))

    def along(self) -> list[int]:
        """The axes along which the unit changes."""
        return [i for i, axis in enumerate(self.axes) if any(step for _, step in axis)]

    def finely_along(self, size: int) -> list[int]:
        """The axes along which the unit changes within a block."""
        return [i for i, axis in enumerate(self.axes) if any(0 < step < size for _, step in axis)]

    def units(self) -> Array:
        """Every unit that is there."""
        units = np.array([self.first])
        for axis in self.along():
            units = np.add.outer(units, offsets(self.axes[axis])).reshape(-1)
        return np.unique(units)


def joined(factors: Sequence[Factor]) -> Axis:
    """The same axis with as few factors as possible."""
    result: list[Factor] = []
    for size, step in factors:
        if size == 1:
            continue
        if result and isinstance(size, int) and isinstance(result[-1][0], int) and result[-1][1] == step * size:
            result[-1] = (result[-1][0] * size, step)
        else:
            result.append((size, step))
    return tuple(result)


def offsets(axis: Axis) -> Array:
    """What each position of the axis adds to the unit; positions along a factor of a dynamic size add nothing."""
    units = np.zeros(1, dtype=np.int64)
    for size, step in axis:
        if isinstance(size, int):
            units = np.add.outer(units, step * np.arange(size)).reshape(-1)
    return units


def split(factors: Sequence[Factor], sizes: Sequence[Dim]) -> list[Axis] | None:
    """The factors laid over axes of these sizes; None if they do not fit."""
    rest, axes = list(factors), list[Axis]()
    for i, wanted in enumerate(sizes):
        if i == len(sizes) - 1:
            if product([size for size, _ in rest]) != product([wanted]):
                return None
            axes.append(joined(rest))
            break
        taken: list[Factor] = []
        left: Dim = wanted
        while left != 1:
            if not rest:
                return None
            (size, step), *rest = rest
            if size == left:
                left = 1
            elif not isinstance(size, int) or not isinstance(left, int):
                return None
            elif left % size == 0:
                left //= size
            elif size % left == 0:
                rest.insert(0, (size // left, step))
                size, step, left = left, step * (size // left), 1
            else:
                return None
            taken.append((size, step))
        axes.append(joined(taken))
    return axes


# ---------------------------------------------------------------- one op


@dataclass(frozen=True, slots=True)
class Reached:
    """A node that reads a value of this layout as its operand `position`. Blocks have `size` units."""

    node: Node
    position: int
    layout: Layout
    shapes: Mapping[str, Shape]
    size: int

    def shape(self, position: int) -> Shape:
        operand = self.node.inputs[position]
        return self.shapes[operand] if isinstance(operand, str) else () if operand is None else operand.shape


def through_reshape(step: Reached) -> Layout | None:
    before, after = step.shape(0), step.node.output.shape
    axes: list[Axis] = []
    for part in segments(before, after):
        factors = [factor for i in range(*part.before) for factor in step.layout.axes[i]]
        laid = split(factors, after[slice(*part.after)])
        if laid is None:
            return None
        axes += laid
    return Layout(step.layout.first, tuple(axes)) if len(axes) == len(after) else None


def through_transpose(step: Reached) -> Layout:
    perm = attributes(step.node, TransposeAttrs)["perm"]
    return Layout(step.layout.first, tuple(step.layout.axes[i] for i in perm))


def through_select(step: Reached) -> Layout | None:
    """Positions in a row, or at equal distances; along other axes any."""
    attrs = attributes(step.node, SelectAttrs)
    axis = attrs["axis"]
    if axis not in step.layout.along():
        return _with_axis(step.layout, axis, joined([(step.node.output.shape[axis], 0)]), 0)
    if attrs.get("period") or not all(isinstance(size, int) for size, _ in step.layout.axes[axis]):
        return None
    kept = offsets(step.layout.axes[axis])[list(attrs["keep"])]
    steps = np.unique(np.diff(kept))
    if len(steps) > 1 or (len(steps) and steps[0] < 0):
        return None
    return _with_axis(step.layout, axis, joined([(len(kept), int(steps[0]) if len(steps) else 0)]), int(kept[0]))


def _with_axis(layout: Layout, axis: int, factors: Axis, first: int) -> Layout:
    return Layout(layout.first + first, (*layout.axes[:axis], factors, *layout.axes[axis + 1 :]))


def through_expand(step: Reached) -> Layout:
    after, before = step.node.output.shape, step.shape(0)
    lead = len(after) - len(before)
    axes = [
        step.layout.axes[i - lead] if i >= lead and before[i - lead] == size else joined([(size, 0)])
        for i, size in enumerate(after)
    ]
    return Layout(step.layout.first, tuple(axes))


def through_pick(step: Reached) -> Layout | None:
    """One position of an axis."""
    attrs = attributes(step.node, AlongAttrs)
    index = attrs.get("index")
    if attrs["fn"] != "pick" or len(attrs["axes"]) != 1 or not isinstance(index, int):
        return None
    axis = attrs["axes"][0]
    sizes = [size for size, _ in step.layout.axes[axis]]
    if axis in step.layout.along() and not all(isinstance(size, int) for size in sizes):
        return None
    first = int(offsets(step.layout.axes[axis])[index]) if axis in step.layout.along() else 0
    picked = _with_axis(step.layout, axis, (), first)
    if not attrs.get("drop"):
        return picked
    return replace(picked, axes=(*picked.axes[:axis], *picked.axes[axis + 1 :]))


def through_pointwise(step: Reached) -> Layout | None:
    """All units of a block times the same number, or plus a parameter, which `added` finds."""
    fn, node = attributes(step.node, FunctionAttrs)["fn"], step.node
    own = step.shape(step.position)
    if fn == "identity":
        return step.layout
    scales = fn == "mul" or (fn == "div" and step.position == 0)
    others = [i for i in range(len(node.inputs)) if i != step.position]
    fine = [result_axis(node, step.position, own, axis) for axis in step.layout.finely_along(step.size)]
    alike = all(operand_axis(node, i, step.shape(i), axis) is None for i in others for axis in fine)
    if not (scales and alike) and not is_addition(step):
        return None
    axes: list[Axis] = [joined([(size, 0)]) for size in node.output.shape]
    for axis, factors in enumerate(step.layout.axes):
        place = result_axis(node, step.position, own, axis)
        if own[axis] == node.output.shape[place]:
            axes[place] = factors
    return Layout(step.layout.first, tuple(axes))


def is_addition(step: Reached) -> bool:
    """Whether a parameter is added to the value, or taken from it."""
    fn = attributes(step.node, FunctionAttrs).get("fn")
    if step.node.op != "pointwise" or not (fn == "add" or (fn == "sub" and step.position == 0)):
        return False
    return isinstance(step.node.inputs[1 - step.position], Tensor) and not attributes(step.node, FunctionAttrs).get(
        "align"
    )


def through_matmul(step: Reached) -> Layout | None:
    """Rows of the left operand, columns of the right one, and batches; not what is contracted."""
    rank, own = len(step.node.output.shape), len(step.shape(step.position))
    if own < 2 or contracted(step) in step.layout.along():
        return None
    free = own - 2 if step.position == 0 else own - 1
    return _in_product(step, free, rank - 2 if step.position == 0 else rank - 1, own - 2)


def through_attention(step: Reached) -> Layout | None:
    """Units and heads of the values."""
    rank = len(step.node.output.shape)
    if step.position != 2 or rank - 2 in step.layout.along():
        return None
    return _in_product(step, rank - 1, rank - 1, rank - 2)


def _in_product(step: Reached, free: int, place: int, batches: int) -> Layout | None:
    """The layout of a product: the free axis of the operand goes to `place`, and a batch of 1 is used for all."""
    out, own = step.node.output.shape, step.shape(step.position)
    axes: list[Axis] = [joined([(size, 0)]) for size in out]
    axes[place] = step.layout.axes[free]
    for axis in range(batches):
        there = len(out) - len(own) + axis
        if own[axis] == out[there]:
            axes[there] = step.layout.axes[axis]
        elif axis in step.layout.along():  # a head of the values serves several heads of queries, one after the other
            whole, part = out[there], own[axis]
            if not isinstance(whole, int) or not isinstance(part, int) or whole % part:
                return None
            axes[there] = joined([*step.layout.axes[axis], (whole // part, 0)])
    return Layout(step.layout.first, tuple(axes))


def contracted(step: Reached) -> int:
    """The axis of an operand of a product of two values over which the product sums."""
    rank = len(step.shape(step.position))
    return rank - 2 if step.node.op == "matmul" and step.position == 1 else rank - 1


THROUGH: dict[str, Callable[[Reached], Layout | None]] = {
    "reshape": through_reshape,
    "transpose": through_transpose,
    "select": through_select,
    "expand": through_expand,
    "along": through_pick,
    "pointwise": through_pointwise,
    "matmul": through_matmul,
    "attention": through_attention,
}


# ---------------------------------------------------------------- a walk


def walk(graph: Graph, value: str, layout: Layout, size: int) -> Iterator[tuple[Reached, bool]]:
    """Every node that reads the value or what is made of it, and whether the walk goes on behind it."""
    shapes = {name: known.shape for name, known in graph.by_name.items()}
    waiting = [(value, layout)]
    while waiting:
        name, known = waiting.pop()
        for node in graph.readers[name]:
            if node.marks.shape_only is not None:
                continue
            for position in [i for i, operand in enumerate(node.inputs) if operand == name]:
                step = Reached(node, position, known, shapes, size)
                rule = THROUGH.get(node.op)
                twice = node.values().count(name) > 1
                behind = None if rule is None or twice or len(node.outputs) > 1 else rule(step)
                yield step, behind is not None
                if behind is not None:
                    waiting.append((node.name, behind))
