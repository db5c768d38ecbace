"""The rows of the ONNX table for ops that move elements without computing any: indexing, layout, constants from constants."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cmrc.hosts.onnx.ops.row import LARGEST, LeftWhole, Step, View, broadcast, kept, times
from cmrc.ir.axes import product
from cmrc.ir.graph import ArrayLiteral, Dim, Shape, Tensor, apply

# ---------------------------------------------------------------- indexing


def read_gather(view: View) -> Step:
    data, index = view.operand(0), view.operand(1)
    axis = view.axis(view.attr("axis", 0))
    shape = view.shape(0)
    if not isinstance(data, str) and (isinstance(index, str) or len(view.shape(1)) > 1):
        if len(shape) < 2 or axis != 0:
            raise LeftWhole("it indexes a constant that is not a table of rows")
        return Step("embedding", (1, 0), {}, view.out([*view.shape(1), *shape[1:]]))
    positions = view.constant(1, "index")
    size = shape[axis]
    if positions is None or positions.ndim > 1:
        raise LeftWhole("its index has more than one axis")
    if positions.ndim == 0:
        at = int(positions) + (size if int(positions) < 0 and isinstance(size, int) else 0)
        attrs = {"fn": "pick", "axes": (axis,), "index": at, "drop": True}
        return Step("along", (0,), attrs, kept(view, (axis,), drop=True))
    if not isinstance(size, int):
        return Step("along", (0,), {"fn": "slice", "axes": (axis,)}, kept(view, (axis,)))
    return select(view, axis, [int(i) % size for i in positions])


def gathered(view: View) -> list[tuple[Shape | None, str]]:
    """What a Gather that stays whole gives: the index in place of the axis."""
    data, index = view.shapes[:2]
    if data is None or index is None:
        return [(view.inferred[0], "unknown")]
    axis = view.axis(view.attr("axis", 0))
    return [((*data[:axis], *index, *data[axis + 1 :]), "unknown")]


def counted(view: View) -> list[tuple[Shape | None, str]]:
    """`Range(0, n, 1)`, of a size that the model reads from itself, has n entries."""
    start, limit, step = view.contents
    known = start == (0,) and step == (1,) and limit is not None
    return [(limit if known else view.inferred[0], "unknown")]


def read_gather_nd(view: View) -> Step | list[Step]:
    """Rows of a table, by index tuples of one number: how torch exports table[ids]. Or fixed positions of the first axes."""
    shape, ids = view.shape(0), view.shape(1)
    if view.attr("batch_dims", 0) or not ids or not isinstance(ids[-1], int) or ids[-1] >= len(shape):
        raise LeftWhole("it indexes single numbers, or different positions for every sample")
    if isinstance(view.operand(0), str):
        return _picked_positions(view, shape[: ids[-1]], shape[ids[-1] :])
    if not isinstance(view.operand(1), str) or ids[-1] != 1:
        raise LeftWhole("it indexes a constant along several axes at once, or by a constant")
    return Step("embedding", (1, 0), {"tuples": True}, view.out([*ids[:-1], *shape[1:]]))


def _picked_positions(view: View, first: Shape, rest: Shape) -> list[Step]:
    """The first axes as one, positions of that, and their arrangement: how torch exports some adaptive pooling."""
    places = view.tensor(1, "index").shape[:-1]
    joined = times(first)
    if joined is None:
        raise LeftWhole("it indexes axes whose sizes are not known")
    return [
        Step("reshape", (0,), {}, (joined, *rest), key="joined"),
        Step("along", ("joined",), {"fn": "gather", "axes": (0,)}, (math.prod(places), *rest), key="picked"),
        Step("reshape", ("picked",), {}, view.out([*places, *rest])),
    ]


def read_gather_elements(view: View) -> Step:
    """x[i, index[i, j]], where index and x agree along the other axes."""
    shape, index, axis = view.shape(0), view.shape(1), view.axis(view.attr("axis", 0))
    if any(n != m for d, (n, m) in enumerate(zip(shape, index, strict=True)) if d != axis):
        raise LeftWhole("its index leaves out positions of other axes")
    return Step("along", (0, 1), {"fn": "gather_elements", "axes": (axis,)}, view.out(index))


def read_tile(view: View) -> Step:
    shape, repeats = view.shape(), view.contents[1]
    if repeats is None:
        raise LeftWhole("its number of repeats is computed in a way that cmrc does not follow")
    axes = tuple(d for d, n in enumerate(repeats) if n != 1)
    if not all(isinstance(shape[d], int) for d in axes):
        raise LeftWhole("it repeats an axis whose size is known only at run time")
    computed = [times(pair) for pair in zip(shape, repeats, strict=True)]
    return Step("along", (0,), {"fn": "tile", "axes": axes, "times": repeats}, view.out(computed))


def select(view: View, axis: int, keep: Sequence[int], output: int = 0) -> Step:
    shape = view.shape()
    if not keep:
        raise LeftWhole("it selects nothing")
    attrs = {"axis": axis, "keep": tuple(keep)}
    return Step("select", (0,), attrs, (*shape[:axis], len(keep), *shape[axis + 1 :]), output)


TO_THE_END = 10**9  # no axis is as long; exporters write this, or the largest number of a type


def read_slice(view: View) -> Step:
    shape = view.shape()
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    if view.opset < 10:
        starts, ends, axes = view.attr("starts", ()), view.attr("ends", ()), view.ints(3, "axes", "axes", since=10)
        steps: tuple[int, ...] | None = None
    else:
        axes, steps = view.ints(3, "axes", "axes", since=10), view.ints(4, "steps", "steps", since=10)
        if isinstance(view.operand(1), str) or isinstance(view.operand(2), str):
            if axes is None:
                raise LeftWhole("its bounds are computed at run time")
            over = tuple(view.axis(a) for a in axes)
            return Step("along", (0,), {"fn": "slice", "axes": over}, kept(view, over))
        starts = view.ints(1, "starts", "bounds", since=10) or ()
        ends = view.ints(2, "ends", "bounds", since=10) or ()
    axes = tuple(range(len(starts))) if axes is None else axes
    cut: dict[int, range | None] = {}
    for a, start, end, step in zip(axes, starts, ends, steps or (1,) * len(starts), strict=True):
        axis, size = view.axis(a), shape[view.axis(a)]
        if isinstance(size, int):
            part = range(size)[start:end:step]
            if part != range(size):
                cut[axis] = part
        elif not (start == 0 and end >= TO_THE_END and step == 1):
            cut[axis] = None
    if not cut:
        return Step("pointwise", (0,), {"fn": "identity"}, view.out(shape))
    axis, part_or_none = next(iter(cut.items()))
    if len(cut) == 1 and part_or_none is not None:
        return select(view, axis, part_or_none)
    computed = view.out(
        [len(p) if (p := cut.get(i)) is not None else None if i in cut else n for i, n in enumerate(shape)]
    )
    # Inference may say that a dynamic size stays what it was.
    out = tuple(view.unknown() if i in cut and n == shape[i] else n for i, n in enumerate(computed))
    return Step("along", (0,), {"fn": "slice", "axes": tuple(cut)}, out)


def read_split(view: View) -> list[Step]:
    shape, parts = view.shape(), len(view.node.outputs)
    axis = view.axis(view.attr("axis", 0))
    size = shape[axis]
    if isinstance(view.operand(1), str) or not isinstance(size, int):
        steps = []
        for i, inferred in enumerate(view.inferred):
            part = inferred[axis] if inferred is not None and len(inferred) == len(shape) else view.unknown()
            out = (*shape[:axis], part, *shape[axis + 1 :])
            steps.append(Step("along", (0,), {"fn": "slice", "axes": (axis,)}, out, i))
        return steps
    sizes = view.ints(1, "split", "sizes", since=13)
    if sizes is None:
        each = -(-size // parts)
        sizes = tuple(min(each, size - i * each) for i in range(parts))
    starts = np.cumsum((0, *sizes)).tolist()
    read = [i for i in range(parts) if view.used[i]] or range(parts)  # a part that nobody reads needs no units
    return [select(view, axis, range(starts[i], starts[i + 1]), i) for i in read]


# ---------------------------------------------------------------- layout


def read_reshape(view: View) -> Step:
    shape = view.shape()
    entries = _target(view)
    if entries is None:
        return Step("reshape", (0,), {}, view.inferred_shape())
    dims: list[Dim | None] = []
    for i, n in enumerate(entries):
        copied = n == 0 and not view.attr("allowzero", 0)
        if copied and i >= len(shape):
            raise LeftWhole("its shape copies an axis that its input does not have")
        dims.append(shape[i] if copied else None if n == -1 else n)
    others = [d for d in dims if d is not None]
    return _reshape(view, [times(shape, others) if d is None else d for d in dims])


def _reshape(view: View, computed: Sequence[Dim | None]) -> Step:
    """The same elements in another shape. Where inference got the input's wrong, the two do not agree."""
    before, after = product(view.shape()), product(shape := view.out(computed))
    if before[0] != after[0] and before[1] == after[1]:
        raise LeftWhole(f"{list(view.shape())}, which shape inference gives for its input, cannot become {list(shape)}")
    return Step("reshape", (0,), {}, shape)


def read_flatten(view: View) -> Step:
    shape = view.shape()
    axis = view.attr("axis", 1)
    axis = axis + len(shape) if axis < 0 else axis
    return _reshape(view, [times(shape[:axis]), times(shape[axis:])])


def read_squeeze(view: View) -> Step:
    shape = view.shape()
    axes = view.ints(1, "axes", "axes", since=13)
    if axes is None and not all(isinstance(n, int) for n in shape):
        raise LeftWhole("which axes it drops is known only at run time")
    gone = {i for i, n in enumerate(shape) if n == 1} if axes is None else {view.axis(a) for a in axes}
    return _reshape(view, [n for i, n in enumerate(shape) if i not in gone])


def read_unsqueeze(view: View) -> Step:
    axes = view.ints(1, "axes", "axes", since=13) or ()
    rank = len(view.shape()) + len(axes)
    new = {a % rank for a in axes}
    old = iter(view.shape())
    return _reshape(view, [1 if i in new else next(old) for i in range(rank)])


def read_transpose(view: View) -> Step:
    shape = view.shape()
    perm = tuple(view.attr("perm", tuple(reversed(range(len(shape))))))
    return Step("transpose", (0,), {"perm": perm}, tuple(shape[p] for p in perm))


def read_concat(view: View) -> Step:
    shapes = [view.shape(i) for i in range(len(view.operands))]
    axis = view.axis(view.attr("axis", 1))
    dims: list[Dim | None] = []
    for i in range(len(shapes[0])):
        sizes = [s[i] for s in shapes]
        known = [n for n in sizes if isinstance(n, int)]
        if i == axis:
            dims.append(sum(known) if len(known) == len(sizes) else None)
        else:
            if 0 in known and any(sizes):  # onnxruntime leaves such an operand out
                raise LeftWhole("one of its operands has no elements")
            for named in sizes if known else ():  # the others must have that size, too
                if isinstance(named, str) and "*" not in named:
                    view.bind(named, known[0])
            dims.append(known[0] if known else sizes[0])
    return Step("concat", tuple(range(len(shapes))), {"axis": axis}, view.out(dims))


def read_expand(view: View) -> Step:
    entries = _target(view)
    if entries is None:
        return Step("expand", (0,), {}, view.inferred_shape())
    return Step("expand", (0,), {}, view.out(broadcast(view.shape(), entries)))


def _target(view: View) -> Shape | None:
    """A target shape: its entries, or at least a symbol for each; `None` where not even their number is known."""
    entries = view.contents[1] if len(view.contents) > 1 else None
    if entries is not None:
        return entries
    length = view.shape(1)
    inferred = view.inferred[0]
    if len(length) != 1 or not isinstance(length[0], int) or inferred is not None:
        return None
    return tuple(view.unknown() for _ in range(length[0]))


# ---------------------------------------------------------------- constants made from constants


def filled(view: View) -> Tensor:
    """ConstantOfShape of a shape that is known; a large one is never stored."""
    shape = view.contents[0]
    sizes = tuple(n for n in shape if isinstance(n, int)) if shape is not None else None
    if sizes is None or shape is None or len(sizes) != len(shape):
        raise LeftWhole("")
    value = view.node.attributes.get("value")
    number = np.asarray(np.float32(0) if value is None else value.as_tensor().numpy().reshape(()))
    if math.prod(sizes) <= LARGEST:
        return ArrayLiteral(np.full(sizes, number))
    return apply("expand", (ArrayLiteral(number),), {"shape": sizes}, sizes, number.dtype.name)


def counted_up(view: View) -> Tensor:
    """Range between numbers that are known."""
    start, limit, step = (number(view, slot) for slot in range(3))
    if not step or (limit - start) / step > LARGEST:
        raise LeftWhole("")
    return ArrayLiteral(np.arange(start, limit, step))


def number(view: View, slot: int) -> Any:
    """A scalar that is known."""
    bound = view.constant(slot, "bound")
    if bound is None:
        raise LeftWhole("")
    return bound.reshape(())
