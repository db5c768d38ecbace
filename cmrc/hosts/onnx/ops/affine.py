"""MatMul, Gemm and the convolutions, in every form that opsets gave them; and the windows that pooling shares with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cmrc.errors import TraceError
from cmrc.hosts.onnx.nodes import label
from cmrc.hosts.onnx.ops.row import LeftWhole, Slot, Step, View, broadcast
from cmrc.ir.graph import Dim, Marks, Tensor, apply
from cmrc.ir.ops.functions import windows_in_ceil_mode

TAKES_BIAS = Marks(takes_bias=True)

# ---------------------------------------------------------------- affine ops


def read_matmul(view: View) -> Step:
    left, right = view.shape(0), view.shape(1)
    known = [not isinstance(o, str) for o in view.operands]
    if not any(known):
        if min(len(left), len(right)) < 2:
            raise LeftWhole("it contracts a vector that is computed at run time")
        batch = broadcast(left[:-2], right[:-2])
        return Step("matmul", (0, 1), {}, view.out([*batch, left[-2], right[-1]]))
    x, w = (1, 0) if known[0] else (0, 1)
    if len(view.shape(w)) < 2 or (len(view.shape(w)) > 2 and len(view.shape(x)) < 2):
        raise LeftWhole("one of its operands is a vector")
    if len(view.shape(w)) > 2:  # a matrix for each expert
        batch = broadcast(left[:-2], right[:-2])
        return Step("matmul", (0, 1), {}, view.out([*batch, left[-2], right[-1]]))
    shape = view.shape(x)
    axis = max(len(shape) - 2, 0) if x == 1 else len(shape) - 1
    w_in, w_out = (0, 1) if x == 0 else (1, 0)
    return _linear(view, (x, w), {"axis": axis, "w_in": w_in, "w_out": w_out})


def read_einsum(view: View) -> list[Step] | Step:
    """Two operands, each letter once in each, one letter contracted: transposes and a product. With a matrix, a linear map."""
    left, right, result = _letters(view)
    shared = [c for c in left if c in right]
    over = [c for c in shared if c not in result]
    batch = [c for c in shared if c in result]
    mine, theirs = ([c for c in side if c not in shared] for side in (left, right))
    plain = all(len(set(part)) == len(part) for part in (left, right, result))
    if not plain or len(over) != 1 or set(result) != {*batch, *mine, *theirs}:
        raise LeftWhole("it is not a product of two operands that contracts one letter")
    pairs = [(view.shape(0)[left.index(c)], view.shape(1)[right.index(c)]) for c in shared]
    if any(1 in pair and pair[0] != pair[1] for pair in pairs):
        raise LeftWhole("a letter of size 1 is broadcast to another size")
    known = [not isinstance(o, str) for o in view.operands]
    if any(known) and not batch:
        x, w = (1, 0) if known[0] else (0, 1)
        return _read_as_linear(view, x, w, (left, right)[x], (left, right)[w], over[0], result)
    sizes, others = (dict(zip(side, view.shape(i), strict=True)) for i, side in enumerate((left, right)))
    if any(sizes[c] != others[c] for c in shared):
        raise LeftWhole("a letter has different sizes in its operands")
    sizes |= others
    if not mine or not theirs or (len(mine) > 1 and len(theirs) > 1):
        raise LeftWhole("both operands have several letters that the other does not have, or one has none")
    for first in (0, 1):  # which of them the product begins with: a constant is read as it stands
        own = (mine, theirs)[first], (theirs, mine)[first]
        begins = [*own[0][:-1], *batch, own[0][-1], *over]
        ends = [*own[1][:-1], *batch, *over, own[1][-1]]
        letters = {first: (list((left, right)[first]), begins), 1 - first: (list((left, right)[1 - first]), ends)}
        if all(not known[i] or letters[i][0] == letters[i][1] for i in (0, 1)):
            break
    else:
        raise LeftWhole("its constant operand would have to be transposed")
    steps: list[Step] = []
    slots: dict[int, Slot] = {0: 0, 1: 1}
    for i in (0, 1):
        if letters[i][0] != letters[i][1]:
            steps.append(_turned_to(i, *letters[i], sizes, ("left", "right")[i]))
            slots[i] = steps[-1].key
    order = [*own[0][:-1], *own[1][:-1], *batch, own[0][-1], own[1][-1]]
    key = "product" if order != list(result) else ""
    product = Step("matmul", (slots[first], slots[1 - first]), {}, tuple(sizes[c] for c in order), key=key)
    return [*steps, product, *([_turned_to("product", order, result, sizes, "")] if key else [])]


def _letters(view: View) -> tuple[list[str], list[str], list[str]]:
    """The letters of both operands and of the result; an ellipsis is written out, by numbers."""
    inputs, arrow, result = str(view.attr("equation", "")).replace(" ", "").partition("->")
    sides = inputs.split(",")
    if not arrow or len(sides) != 2 or len(view.operands) != 2:
        raise LeftWhole("it does not have two operands, or does not name its result")
    more = [len(view.shape(i)) - len(side.replace("...", "")) for i, side in enumerate(sides)]
    written = [_written_out(side, n) for side, n in zip(sides, more, strict=True)]
    if any(len(side) != len(view.shape(i)) for i, side in enumerate(written)):
        raise LeftWhole("its letters do not match the axes of its operands")
    return written[0], written[1], _written_out(result, max(more))


def _written_out(letters: str, axes: int) -> list[str]:
    before, dots, after = letters.partition("...")
    return [*before, *(str(i) for i in range(axes if dots else 0)), *after]


def _turned_to(slot: Slot, letters: Sequence[str], order: Sequence[str], sizes: Mapping[str, Dim], key: str) -> Step:
    perm = tuple(list(letters).index(c) for c in order)
    return Step("transpose", (slot,), {"perm": perm}, tuple(sizes[c] for c in order), key=key)


def _read_as_linear(
    view: View, x: int, w: int, read: Sequence[str], weight: Sequence[str], over: str, result: Sequence[str]
) -> list[Step] | Step:
    """A matrix takes the place of one letter by another."""
    if len(weight) != 2:
        raise LeftWhole("its constant operand is not a matrix")
    w_in = list(weight).index(over)
    order = [weight[1 - w_in] if c == over else c for c in read]
    step = _linear(view, (x, w), {"axis": list(read).index(over), "w_in": w_in, "w_out": 1 - w_in})
    if order == list(result):
        return step
    sizes = dict(zip(order, step.shape, strict=True))
    return [replace(step, key="product"), _turned_to("product", order, result, sizes, "")]


def read_gemm(view: View) -> Step:
    if view.attr("transA", 0):
        raise LeftWhole("it transposes its input")
    weight = view.tensor(1, "matrix B")
    if not isinstance(view.operand(0), str):
        raise LeftWhole("its input A is a constant")
    w_in, w_out = (1, 0) if view.attr("transB", 0) else (0, 1)
    attrs: dict[str, Any] = {"axis": 1, "w_in": w_in, "w_out": w_out}
    attrs |= {"alpha": float(view.attr("alpha", 1.0)), "beta": float(view.attr("beta", 1.0))}
    tensors: dict[int, Tensor] = {}
    if view.operand(2) is not None:
        bias = view.tensor(2, "bias C")
        outs = weight.shape[w_out]
        if len(bias.shape) == 2 and bias.shape[0] == 1:
            tensors[2] = bias = apply("reshape", (bias,), {"shape": bias.shape[1:]}, bias.shape[1:], bias.dtype)
        if bias.shape not in ((outs,), (1,), ()) or attrs["beta"] == 0.0:
            raise LeftWhole(f"its bias of shape {list(bias.shape)} is not one number per output")
    step = _linear(view, (0, 1, 2), attrs)
    return Step(step.op, step.slots, step.attrs, step.shape, tensors=tensors, marks=TAKES_BIAS)


def _linear(view: View, slots: tuple[int, ...], attrs: dict[str, Any]) -> Step:
    axis, weight = attrs["axis"], view.tensor(slots[1], "weight")
    shape = view.fitted(slots[0], axis, weight.shape[attrs["w_in"]])
    if not shape or shape[axis] != weight.shape[attrs["w_in"]]:
        raise LeftWhole(
            f"its weight takes {weight.shape[attrs['w_in']]} units, but the size of its input is not known to match"
        )
    return Step("linear", slots, attrs, (*shape[:axis], weight.shape[attrs["w_out"]], *shape[axis + 1 :]))


def read_conv(view: View, weight: Tensor | None = None) -> Step:
    """A convolution; `weight` is given where it is not the second input as it stands."""
    return _conv(view, weight, transposed=False)


def read_conv_transpose(view: View) -> Step:
    return _conv(view, None, transposed=True)


def _conv(view: View, given: Tensor | None, *, transposed: bool) -> Step:
    weight = view.tensor(1, "weight") if given is None else given
    if not isinstance(view.operand(0), str):
        raise LeftWhole("its input is a constant")
    if given is None and view.operand(2) is not None:
        view.tensor(2, "bias")
    rank = len(weight.shape) - 2
    groups = view.attr("group", 1)
    ins, outs = weight.shape[1] * groups, weight.shape[0]
    if transposed:
        ins, outs = weight.shape[0], weight.shape[1] * groups
    shape = view.fitted(0, 1, ins)
    if len(shape) != rank + 2 or shape[1] != ins:
        raise LeftWhole(f"its weight takes {ins} channels, but the size of its input is not known to match")
    attrs: dict[str, Any] = {
        "axis": 1,
        "groups": groups,
        "stride": tuple(view.attr("strides", (1,) * rank)),
        "pad": padding(view, rank),
        "dilation": tuple(view.attr("dilations", (1,) * rank)),
    }
    if transposed:
        if isinstance(attrs["pad"], str) and any(view.attr("output_padding", ())):
            raise disagreement(
                view,
                "it has automatic padding and output_padding: onnx's shape inference adds the latter, onnxruntime does not",
                "leave output_padding out, or write the padding as numbers",
            )
        if isinstance(attrs["pad"], str) or view.attr("output_shape", None) is not None:
            raise LeftWhole("its padding follows from the size of its result")
        attrs |= {"transposed": True, "output_padding": tuple(view.attr("output_padding", (0,) * rank))}
    if not transposed:
        require_whole_windows(shape[2:], weight.shape[2:], attrs)
    spatial = [size_after(shape[2 + i], weight.shape[2 + i], attrs, i) for i in range(rank)]
    return Step("conv", (0, 1, 2), attrs, view.out([shape[0], outs, *spatial]), marks=TAKES_BIAS)


def require_whole_windows(sizes: Sequence[Dim], kernel: Sequence[int], attrs: Mapping[str, Any]) -> None:
    """A window that does not fit even once: what comes out then differs from runtime to runtime."""
    if isinstance(attrs["pad"], str):
        return
    for size, length, pad, dilation in zip(sizes, kernel, attrs["pad"], attrs["dilation"], strict=True):
        if isinstance(size, int) and size + sum(pad) < dilation * (length - 1) + 1:
            raise LeftWhole(f"its window of {length} is larger than its input of {size}, padding included")


def size_after(size: Dim, kernel: int, attrs: Mapping[str, Any], i: int) -> Dim | None:
    """The size of a spatial axis after a convolution or pooling; a symbol where it stays the same."""
    pad, stride = attrs["pad"], int(attrs["stride"][i])
    reach = int(attrs["dilation"][i]) * (kernel - 1) + 1
    if isinstance(pad, str):
        return -(-size // stride) if isinstance(size, int) else size if stride == 1 else None
    around = int(sum(pad[i]))
    if attrs.get("transposed"):
        extra = int(attrs["output_padding"][i])
        return (size - 1) * stride - around + reach + extra if isinstance(size, int) else None
    if isinstance(size, int):
        if attrs.get("ceil"):
            return windows_in_ceil_mode(size, pad[i], reach, stride)
        return (size + around - reach) // stride + 1
    return size if around == reach - 1 and stride == 1 else None


def disagreement(view: View, reason: str, fix: str) -> TraceError:
    """A node whose size onnx and onnxruntime see differently: whatever is computed with one of them is wrong or cannot be loaded."""
    return TraceError(reason, node=label(view.node), op=view.node.op_type, fix=fix)


def padding(view: View, rank: int) -> str | tuple[tuple[int, int], ...]:
    auto = view.attr("auto_pad", "NOTSET")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        return auto.lower()
    pads = view.attr("pads", (0,) * (2 * rank)) if auto == "NOTSET" else (0,) * (2 * rank)
    return tuple(zip(pads[:rank], pads[rank:], strict=True))


# ---------------------------------------------------------------- pointwise ops


# ---------------------------------------------------------------- ops along axes
