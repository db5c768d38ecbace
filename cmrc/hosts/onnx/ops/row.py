"""A row of the ONNX table: what it sees of a node, what it gives back, and the rows that are data alone.

A row sees a `View` of one node and returns a `Step` (a `Split` returns one per part, a fused op what it does one after the
other). It raises `LeftWhole(reason)` where it cannot say what the node does to axes; the node then stays whole, and the reason
is what reports give.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import onnx_ir

from cmrc.errors import TraceError
from cmrc.hosts.onnx.nodes import CHECK, label
from cmrc.hosts.onnx.shapes import Sizes
from cmrc.ir.axes import product
from cmrc.ir.graph import NO_MARKS, Array, Dim, Graph, Marks, Operand, Shape, Tensor, quickly_made
from cmrc.ir.tensors import materialise

LARGEST = 4096  # elements: a larger one stays the node that makes it


T = TypeVar("T")


Slot = int | str


class LeftWhole(Exception):
    """The row cannot read this form of the op, for this reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@quickly_made
@dataclass(frozen=True, slots=True)
class Step:
    """One IR node: its op, which inputs of the ONNX node its operands are (`slots`), and the shape of the result.

    A step of a fused op may have a `key`: later steps of the same node read its result by it, as an entry of `slots`. Such a
    result is inside the node, and at the same time its `output` where the node has that.
    """

    op: str
    slots: tuple[Slot, ...]
    attrs: Mapping[str, Any]
    shape: Shape
    output: int = 0
    tensors: Mapping[int, Tensor] = field(default_factory=dict)
    """Operands that are read in another form than the input has (a bias without its leading axis), by slot."""
    key: str = ""
    marks: Marks = NO_MARKS


@quickly_made
@dataclass(frozen=True, slots=True)
class View:
    """One ONNX node as a row sees it: its inputs as operands, what is known of shapes, its attributes."""

    node: onnx_ir.Node
    opset: int
    operands: tuple[Operand, ...]
    shapes: tuple[Shape | None, ...]
    inferred: tuple[Shape | None, ...]
    """The shapes of the outputs as far as shape inference got."""
    contents: tuple[tuple[Dim, ...] | None, ...]
    """What is in the inputs that hold sizes, as far as that is known before the program runs."""
    used: tuple[bool, ...]
    """Whether anything reads each output."""
    unknown: Callable[[], str]
    """A new symbol for an unknown size."""
    bind: Callable[[str, int], None]
    """Say what a size must be, wherever its symbol stands."""

    def attr(self, name: str, default: T) -> T:
        attribute = self.node.attributes.get(name)
        if attribute is None or attribute.is_ref():
            # A float attribute is a float32, its default in the standard as well.
            return float(np.float32(default)) if isinstance(default, float) else default  # type: ignore[return-value]
        value = attribute.value
        whole = isinstance(default, float) and isinstance(value, int)
        if default is not None and not isinstance(value, type(default)) and not whole:
            reason = f"its attribute {name!r} is of type {attribute.type.name}"
            raise TraceError(reason, node=label(self.node), op=self.node.op_type, fix=CHECK)
        return value  # type: ignore[no-any-return]

    def operand(self, slot: int) -> Operand:
        return self.operands[slot] if slot < len(self.operands) else None

    def shape(self, slot: int = 0) -> Shape:
        shape = self.shapes[slot] if slot < len(self.shapes) else None
        if shape is None:
            raise LeftWhole("it reads a value of unknown rank")
        return shape

    def fitted(self, slot: int, axis: int, size: int) -> Shape:
        """The shape of an input, whose size along an axis a parameter of the op implies."""
        shape = self.shape(slot)
        known = shape[axis] if -len(shape) <= axis < len(shape) else None
        if isinstance(known, str) and "*" not in known:
            self.bind(known, size)
            return tuple(size if n == known else n for n in shape)
        return shape

    def tensor(self, slot: int, what: str) -> Tensor:
        """An input that must be known before the program runs."""
        operand = self.operand(slot)
        if operand is None or isinstance(operand, str):
            raise LeftWhole(f"its {what} is computed at run time" if operand else f"it has no {what}")
        return operand

    def constant(self, slot: int, what: str) -> Array | None:
        """The array of a small parameter; `None` where it is absent."""
        return None if self.operand(slot) is None else materialise(self.tensor(slot, what))

    def ints(self, slot: int, name: str, what: str, *, since: int) -> tuple[int, ...] | None:
        """Integers that are an attribute before opset `since` and an input from it on."""
        if self.opset < since:
            return self.attr(name, None)
        listed = self.constant(slot, what)
        return None if listed is None else tuple(int(i) for i in listed.reshape(-1))

    def axis(self, axis: int, slot: int = 0) -> int:
        rank = len(self.shape(slot))
        if not -rank <= axis < rank:
            raise LeftWhole(f"its axis {axis} is out of range")
        return axis % rank

    def first_output_only(self) -> None:
        if any(self.used[1:]):
            raise LeftWhole("its other outputs are read too")

    def out(self, computed: Sequence[Dim | None]) -> Shape:
        """The shape of the result: as computed, and as inferred where that is less vague."""
        shape = self.inferred[0]
        inferred: Sequence[Dim | None] = shape if shape is not None else ()
        if len(inferred) != len(computed):
            inferred = (None,) * len(computed)
        return tuple(self._clearer(mine, other) for mine, other in zip(computed, inferred, strict=True))

    def _clearer(self, mine: Dim | None, other: Dim | None) -> Dim:
        if isinstance(mine, int) or isinstance(other, int):
            return mine if isinstance(mine, int) else other  # type: ignore[return-value]
        named = [d for d in (mine, other) if d is not None and not d.startswith("?")]
        return named[0] if named else mine or other or self.unknown()

    def inferred_shape(self) -> Shape:
        if self.inferred[0] is None:
            raise LeftWhole("the number of axes of its result is not known")
        return self.inferred[0]


def broadcast(*shapes: Shape) -> list[Dim | None]:
    """numpy's broadcasting; `None` where two symbols meet that may differ."""
    rank = max(len(shape) for shape in shapes)
    dims_out: list[Dim | None] = []
    for axis in range(rank):
        dims = {s[axis - rank + len(s)] for s in shapes if axis - rank + len(s) >= 0} - {1}
        sizes = [d for d in dims if isinstance(d, int)]
        dims_out.append(sizes[0] if sizes else 1 if not dims else dims.pop() if len(dims) == 1 else None)
    return dims_out


def times(dims: Sequence[Dim], divided_by: Sequence[Dim] = ()) -> Dim | None:
    """The product of sizes, as a number or a text like `2*N`; `None` where it does not divide."""
    (number, symbols), (less, fewer) = product(dims), product(divided_by)
    if not less or number % less or not fewer <= symbols:
        return None
    names = sorted((symbols - fewer).elements())
    return "*".join([*([str(number // less)] if number != less else []), *names]) if names else number // less


def kept(view: View, axes: Sequence[int], *, drop: bool = False) -> Shape:
    """The shape of the input with `axes` resized in ways that only inference knows, or gone."""
    shape: Shape = view.shape()
    if drop:
        return view.out([n for i, n in enumerate(shape) if i not in axes])
    return view.out([None if i in axes else n for i, n in enumerate(shape)])


def contents_of(view: View) -> list[tuple[Dim, ...] | None]:
    """What the outputs of a node that moves or multiplies sizes hold, where that is known: `(N, 197, 3*C)`."""
    first = view.contents[0] if view.contents else None
    if view.node.op_type == "Split" and first is not None:
        each = (
            view.contents[1]
            if len(view.contents) > 1
            else (len(first) // len(view.node.outputs),) * len(view.node.outputs)
        )
        ends = np.cumsum([n for n in each or () if isinstance(n, int)]).tolist()
        return [first[start:end] for start, end in pairwise((0, *ends))] if ends and ends[-1] == len(first) else []
    return [_content_of(view)]


def _content_of(view: View) -> tuple[Dim, ...] | None:
    node, first = view.node, view.contents[0] if view.contents else None
    if node.domain:
        return None
    if node.op_type == "Shape" and view.shapes[0] is not None:
        return view.shapes[0][view.attr("start", 0) : view.attr("end", len(view.shapes[0]))]
    if node.op_type == "Concat":
        parts = [part for part in view.contents if part is not None]
        return tuple(dim for part in parts for dim in part) if len(parts) == len(view.contents) else None
    if first is None:
        return None
    if node.op_type in ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze"):
        return first
    if node.op_type in ("Equal", "Where"):
        return _chosen(node.op_type, [part for part in view.contents if part is not None])
    rest = [part for part in view.contents[1:] if part is not None]
    numbers = [[n for n in part if isinstance(n, int)] for part in rest]
    if len(rest) != len(view.contents) - 1 or any(len(n) != len(part) for n, part in zip(numbers, rest, strict=True)):
        numbers = []
    if node.op_type == "Gather" and numbers and all(-len(first) <= i < len(first) for i in numbers[0]):
        return tuple(first[i] for i in numbers[0])
    if node.op_type == "Slice" and len(numbers) >= 2 and all(len(n) == 1 for n in numbers):
        return first[numbers[0][0] : numbers[1][0] : numbers[3][0] if len(numbers) > 3 else 1]
    if node.op_type in ("Mul", "Div") and len(rest) == 1 and len(rest[0]) == len(first) == 1:
        result = times((*first, *rest[0])) if node.op_type == "Mul" else times(first, rest[0])
        return None if result is None else (result,)
    return None


def _chosen(op: str, parts: Sequence[tuple[Dim, ...]]) -> tuple[Dim, ...] | None:
    """`Where(Equal(shape, -1), ones, shape)`, which torch writes before an Expand: a size is never negative."""
    if len(parts) != (2 if op == "Equal" else 3) or len({len(part) for part in parts}) != 1:
        return None
    entries: list[Dim] = []
    for row in zip(*parts, strict=True):
        if op == "Where" and isinstance(row[0], int):
            entries.append(row[1] if row[0] else row[2])
        elif op == "Equal" and all(isinstance(n, int) for n in row):
            entries.append(int(row[0] == row[1]))
        elif op == "Equal" and any(isinstance(n, int) and n < 0 for n in row):
            entries.append(0)
        else:
            return None
    return tuple(entries)


# ---------------------------------------------------------------- rows

Reader = Callable[[View], "Step | list[Step]"]


@dataclass(frozen=True, slots=True)
class Row:
    """How to read an op, and which kind of writing it needs besides its inputs (a key of `writers.WRITERS`).

    A fused op is `separable` from the opset on that has an op for each of its steps, which `insert.py` writes. Its inputs
    `own` are written by its writer alone.
    """

    read: Reader
    write: str = ""
    separable: int | None = None
    own: tuple[int, ...] = ()


def row_name(node: onnx_ir.Node) -> str:
    """The name of a node's op in the tables."""
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type


def pointwise(fn: str, arity: int = 1, **options: float) -> Row:
    """Element by element; `options` are the ONNX attributes that the function takes, with their defaults."""

    def read(view: View) -> Step:
        if len([o for o in view.operands if o is not None]) != arity:
            raise LeftWhole(f"it has {len(view.operands)} inputs, not {arity}")
        attrs: dict[str, Any] = {"fn": fn}
        attrs |= {name: float(view.attr(name, default)) for name, default in options.items()}
        slots = tuple(range(arity))
        return Step("pointwise", slots, attrs, view.out(broadcast(*(view.shape(i) for i in slots))))

    return Row(read)


def variadic(fn: str) -> Row:
    """One input is a copy, two are the function; more are left whole."""
    two = pointwise(fn, 2).read

    def read(view: View) -> Step | list[Step]:
        if len(view.operands) == 1:
            return Step("pointwise", (0,), {"fn": "identity"}, view.out(view.shape()))
        return two(view)

    return Row(read)


def named(attribute: str, default: Any, **functions: str) -> Row:
    """A function of one operand that an attribute names."""

    def read(view: View) -> Step:
        fn = functions.get(f"is_{view.attr(attribute, default)}")
        if fn is None:
            raise LeftWhole(f"its {attribute} is {view.attr(attribute, default)!r}")
        slots = tuple(range(len(view.operands)))
        return Step("pointwise", slots, {"fn": fn}, view.out(broadcast(*(view.shape(i) for i in slots))))

    return Row(read)


def reduction(fn: str, *, axes_input_since: int = 18) -> Row:
    """Over the axes that an attribute or, since some opset, an input names; over all by default."""

    def read(view: View) -> Step:
        axes = view.ints(1, "axes", "axes", since=axes_input_since)
        if not axes and view.attr("noop_with_empty_axes", 0):
            return Step("pointwise", (0,), {"fn": "identity"}, view.out(view.shape()))
        over = tuple(sorted(view.axis(a) for a in axes)) if axes else tuple(range(len(view.shape())))
        if view.attr("keepdims", 1):
            computed = [1 if i in over else n for i, n in enumerate(view.shape())]
            return Step("along", (0,), {"fn": fn, "axes": over}, view.out(computed))
        return Step("along", (0,), {"fn": fn, "axes": over, "drop": True}, kept(view, over, drop=True))

    return Row(read)


def arg_reduction(fn: str) -> Row:
    def read(view: View) -> Step:
        axis = view.axis(view.attr("axis", 0))
        drop = not view.attr("keepdims", 1)
        computed = [1 if i == axis else n for i, n in enumerate(view.shape()) if i != axis or not drop]
        return Step("along", (0,), {"fn": fn, "axes": (axis,), "drop": drop}, view.out(computed))

    return Row(read)


def over_spatial(fn: str) -> Row:
    """To one number per channel."""

    def read(view: View) -> Step:
        axes = tuple(range(2, len(view.shape())))
        return Step("along", (0,), {"fn": fn, "axes": axes}, view.out([*view.shape()[:2], *(1 for _ in axes)]))

    return Row(read)


def along_axis(fn: str, default: int) -> Row:
    """Along one axis that an attribute names."""

    def read(view: View) -> Step:
        axis = view.axis(view.attr("axis", default))
        return Step("along", (0,), {"fn": fn, "axes": (axis,)}, view.out(view.shape()))

    return Row(read)


def norm(
    fn: str, axes: Callable[[View], tuple[int, ...]], parameters: int, *, per_channel: bool = False, write: str = ""
) -> Row:
    """A normalisation over `axes`, then scale and shift by parameters."""

    def read(view: View) -> Step:
        view.first_output_only()
        attrs: dict[str, Any] = {"fn": fn, "axes": axes(view), "eps": float(view.attr("epsilon", 1e-5))}
        if per_channel:
            attrs["align"] = (None, *((1,),) * parameters)
        return Step("along", tuple(range(parameters + 1)), attrs, view.out(view.shape()))

    return Row(read, write)


@dataclass(frozen=True, slots=True)
class ModelReading:
    """The graph, every name of its values, and what a writer must know: which inputs its operands came from."""

    graph: Graph
    names: Mapping[str, Sequence[str]]
    slots: Mapping[str, tuple[int | str, ...]]
    rows: Mapping[str, Row]
    """How each was read, and so how it is written."""
    sizes: Sizes
    tensors: Mapping[str, Tensor]
    inside: Mapping[str, str]
    """Values inside a fused node, which the model does not have, and the node's first output."""
