"""The rows of the ONNX table that need a few lines: what these ops do to axes, in every form that opsets gave them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir

from cmrc.hosts.onnx_view import Opaque, Step, View, broadcast, kept, times
from cmrc.ir import Dim, Tensor
from cmrc.ops import apply, conv_pads, materialise

# ---------------------------------------------------------------- affine ops


def read_matmul(view: View) -> Step:
    left, right = view.shape(0), view.shape(1)
    known = [not isinstance(o, str) for o in view.operands]
    if not any(known):
        if min(len(left), len(right)) < 2:
            raise Opaque("it contracts a vector that is computed at run time")
        batch = broadcast(left[:-2], right[:-2])
        return Step("matmul", (0, 1), {}, view.out([*batch, left[-2], right[-1]]))
    x, w = (1, 0) if known[0] else (0, 1)
    if len(view.shape(w)) != 2:
        raise Opaque(f"its constant operand has {len(view.shape(w))} axes, not 2")
    shape = view.shape(x)
    axis = max(len(shape) - 2, 0) if x == 1 else len(shape) - 1
    w_in, w_out = (0, 1) if x == 0 else (1, 0)
    return _linear(view, (x, w), {"axis": axis, "w_in": w_in, "w_out": w_out})


def read_gemm(view: View) -> Step:
    if view.attr("transA", 0):
        raise Opaque("it transposes its input")
    weight = view.tensor(1, "matrix B")
    if not isinstance(view.operand(0), str):
        raise Opaque("its input A is a constant")
    w_in, w_out = (1, 0) if view.attr("transB", 0) else (0, 1)
    attrs: dict[str, Any] = {"axis": 1, "w_in": w_in, "w_out": w_out, "takes_bias": True}
    attrs |= {"alpha": float(view.attr("alpha", 1.0)), "beta": float(view.attr("beta", 1.0))}
    tensors: dict[int, Tensor] = {}
    if view.operand(2) is not None:
        bias = view.tensor(2, "bias C")
        outs = weight.shape[w_out]
        if len(bias.shape) == 2 and bias.shape[0] == 1:
            tensors[2] = bias = apply("reshape", (bias,), {"shape": bias.shape[1:]}, bias.shape[1:], bias.dtype)
        if bias.shape not in ((outs,), (1,), ()) or attrs["beta"] == 0.0:
            raise Opaque(f"its bias of shape {list(bias.shape)} is not one number an output")
    step = _linear(view, (0, 1, 2), attrs)
    return Step(step.op, step.slots, step.attrs, step.shape, tensors=tensors)


def _linear(view: View, slots: tuple[int, ...], attrs: dict[str, Any]) -> Step:
    shape, weight = view.shape(slots[0]), view.tensor(slots[1], "weight")
    axis = attrs["axis"]
    if not shape or shape[axis] != weight.shape[attrs["w_in"]]:
        raise Opaque(f"its weight takes {weight.shape[attrs['w_in']]} units, the size of its input is not known to fit")
    return Step("linear", slots, attrs, (*shape[:axis], weight.shape[attrs["w_out"]], *shape[axis + 1 :]))


def read_conv(view: View) -> Step:
    return _conv(view, transposed=False)


def read_conv_transpose(view: View) -> Step:
    return _conv(view, transposed=True)


def _conv(view: View, *, transposed: bool) -> Step:
    shape, weight = view.shape(0), view.tensor(1, "weight")
    if not isinstance(view.operand(0), str):
        raise Opaque("its input is a constant")
    if view.operand(2) is not None:
        view.tensor(2, "bias")
    rank = len(weight.shape) - 2
    groups = view.attr("group", 1)
    ins, outs = weight.shape[1] * groups, weight.shape[0]
    if transposed:
        ins, outs = weight.shape[0], weight.shape[1] * groups
    if len(shape) != rank + 2 or shape[1] != ins:
        raise Opaque(f"its weight takes {ins} channels and the size of its input is not known to fit")
    attrs: dict[str, Any] = {
        "axis": 1,
        "groups": groups,
        "stride": tuple(view.attr("strides", (1,) * rank)),
        "pad": _padding(view, rank),
        "dilation": tuple(view.attr("dilations", (1,) * rank)),
        "takes_bias": True,
    }
    if transposed:
        if isinstance(attrs["pad"], str) or view.attr("output_shape", None) is not None:
            raise Opaque("its padding follows from the size of its result")
        attrs |= {"transposed": True, "output_padding": tuple(view.attr("output_padding", (0,) * rank))}
    spatial: list[Dim | None] = [None] * rank
    if not transposed:
        spatial = [_unpadded(shape[2 + i], weight.shape[2 + i], attrs, i) for i in range(rank)]
    return Step("conv", (0, 1, 2), attrs, view.out([shape[0], outs, *spatial]))


def _unpadded(size: Dim, kernel: int, attrs: Mapping[str, Any], i: int) -> Dim | None:
    """A symbolic size that the convolution leaves as it is."""
    same = isinstance(attrs["pad"], str) or sum(attrs["pad"][i]) == attrs["dilation"][i] * (kernel - 1)
    return size if same and attrs["stride"][i] == 1 else None


def _padding(view: View, rank: int) -> str | tuple[tuple[int, int], ...]:
    auto = view.attr("auto_pad", "NOTSET")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        return auto.lower()
    pads = view.attr("pads", (0,) * (2 * rank)) if auto == "NOTSET" else (0,) * (2 * rank)
    return tuple(zip(pads[:rank], pads[rank:], strict=True))


# ---------------------------------------------------------------- pointwise ops


def read_clip(view: View) -> Step:
    attrs: dict[str, Any] = {"fn": "clip"}
    if view.opset >= 11:
        return Step("pointwise", (0, 1, 2), attrs, view.out(view.shape()))
    for name in ("min", "max"):
        if name in view.node.attributes:
            attrs[name] = float(view.attr(name, 0.0))
    return Step("pointwise", (0,), attrs, view.out(view.shape()))


def read_cast(view: View) -> Step:
    dtype = onnx_ir.DataType(view.attr("to", 1))
    if dtype == onnx_ir.DataType.STRING:
        raise Opaque("it casts to text")
    return Step("pointwise", (0,), {"fn": "cast", "dtype": dtype.numpy().name}, view.out(view.shape()))


def read_dropout(view: View) -> Step:
    view.first_output_only()
    training = view.constant(2, "training mode") if view.opset >= 12 else None
    if training is not None and bool(training):
        raise Opaque("it drops units in training mode")
    return Step("pointwise", (0,), {"fn": "identity"}, view.out(view.shape()))


def read_batch_norm(view: View) -> Step:
    view.first_output_only()
    if view.attr("training_mode", 0):
        raise Opaque("it normalises by the batch, in training mode")
    for slot, what in enumerate(("scale", "bias", "mean", "variance"), start=1):
        view.tensor(slot, what)
    attrs = {"fn": "batch_norm", "eps": float(view.attr("epsilon", 1e-5)), "align": (None, (1,), (1,), (1,), (1,))}
    return Step("pointwise", (0, 1, 2, 3, 4), attrs, view.out(view.shape()))


# ---------------------------------------------------------------- ops along axes


def read_pool(view: View, fn: str) -> Step:
    view.first_output_only()
    shape = view.shape()
    rank = len(shape) - 2
    axes = tuple(range(2, rank + 2))
    attrs: dict[str, Any] = {
        "fn": fn,
        "axes": axes,
        "kernel": tuple(view.attr("kernel_shape", ())),
        "stride": tuple(view.attr("strides", (1,) * rank)),
        "dilation": tuple(view.attr("dilations", (1,) * rank)),
        "pad": _padding(view, rank),
        "ceil": bool(view.attr("ceil_mode", 0)),
    }
    sizes = [n for n in shape[2:] if isinstance(n, int)]
    if len(sizes) == rank:
        attrs["pad"] = conv_pads(attrs, sizes, attrs["kernel"])
    if fn == "avg_pool":
        attrs["include_pad"] = bool(view.attr("count_include_pad", 0))
    return Step("along", (0,), attrs, kept(view, axes))


def read_softmax(view: View, fn: str) -> Step:
    rank = len(view.shape())
    axis = view.axis(view.attr("axis", -1 if view.opset >= 13 else 1))
    axes = (axis,) if view.opset >= 13 else tuple(range(axis, rank))  # before 13 the axes from `axis` on are one
    return Step("along", (0,), {"fn": fn, "axes": axes}, view.out(view.shape()))


def read_resize(view: View) -> Step:
    shape, out = view.shape(), view.inferred_shape()
    if view.attr("coordinate_transformation_mode", "") == "tf_crop_and_resize":
        raise Opaque("it crops by a region that it reads")
    scales = _scales(view)
    if scales is not None:
        axes = tuple(i for i, scale in enumerate(scales) if scale != 1.0)
    else:
        axes = tuple(i for i, (a, b) in enumerate(zip(shape, out, strict=True)) if a != b or i >= 2)
    return Step("along", (0,), {"fn": "resize", "axes": axes}, kept(view, axes))


def _scales(view: View) -> list[float] | None:
    if view.opset < 9:
        return None
    slot = 1 if view.node.op_type == "Upsample" or view.opset < 11 else 2
    found = view.operand(slot)
    if found is None or isinstance(found, str) or not materialise(found).size:
        return None
    scales = [float(s) for s in materialise(found)]
    named = view.attr("axes", None)
    if named is None:
        return scales
    full = [1.0] * len(view.shape())
    for axis, scale in zip(named, scales, strict=True):
        full[view.axis(axis)] = scale
    return full


def read_pad(view: View) -> Step:
    rank = len(view.shape())
    pads = view.ints(1, "pads", "padding", since=11)
    if pads is None:
        raise Opaque("it has no padding")
    named = view.ints(3, "axes", "axes", since=18) if view.opset >= 18 else None
    over = [view.axis(a) for a in named] if named is not None else list(range(rank))
    full = [(0, 0)] * rank
    for i, axis in enumerate(over):
        full[axis] = (pads[i], pads[len(over) + i])
    axes = tuple(i for i, pad in enumerate(full) if pad != (0, 0))
    out = kept(view, axes)
    if view.attr("mode", "constant") != "constant":
        return Step("along", (0,), {"fn": "pad_edge", "axes": axes}, out)
    if any(n < 0 for pair in full for n in pair):
        return Step("along", (0,), {"fn": "crop", "axes": axes}, out)
    value = view.constant(2, "padding value") if view.opset >= 11 else np.asarray(view.attr("value", 0.0))
    fill = 0.0 if value is None else float(value.reshape(()))
    return Step("along", (0,), {"fn": "pad", "axes": axes, "pads": tuple(full), "value": fill}, out)


# ---------------------------------------------------------------- indexing


def read_gather(view: View) -> Step:
    data, index = view.operand(0), view.operand(1)
    axis = view.axis(view.attr("axis", 0))
    shape = view.shape(0)
    if not isinstance(data, str) and isinstance(index, str):
        if len(shape) != 2 or axis != 0:
            raise Opaque("it picks from a constant that is not a table of rows")
        return Step("embedding", (1, 0), {}, view.out([*view.shape(1), shape[1]]))
    found = view.constant(1, "index")
    size = shape[axis]
    if found is None or found.ndim > 1:
        raise Opaque("its index has several axes")
    if found.ndim == 0:
        at = int(found) + (size if int(found) < 0 and isinstance(size, int) else 0)
        attrs = {"fn": "pick", "axes": (axis,), "index": at, "drop": True}
        return Step("along", (0,), attrs, kept(view, (axis,), drop=True))
    if not isinstance(size, int):
        return Step("along", (0,), {"fn": "slice", "axes": (axis,)}, kept(view, (axis,)))
    return select(view, axis, [int(i) % size for i in found])


def select(view: View, axis: int, keep: Sequence[int], output: int = 0) -> Step:
    shape = view.shape()
    if not keep:
        raise Opaque("it selects nothing")
    attrs = {"axis": axis, "keep": tuple(keep)}
    return Step("select", (0,), attrs, (*shape[:axis], len(keep), *shape[axis + 1 :]), output)


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
                raise Opaque("its bounds are computed at run time")
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
        elif not (start == 0 and end >= 2**31 - 1 and step == 1):
            cut[axis] = None
    if not cut:
        return Step("pointwise", (0,), {"fn": "identity"}, view.out(shape))
    axis, part_or_none = next(iter(cut.items()))
    if len(cut) == 1 and part_or_none is not None:
        return select(view, axis, part_or_none)
    computed = [None if i in cut else n for i, n in enumerate(shape)]
    computed = [len(p) if (p := cut.get(i)) is not None else n for i, n in enumerate(computed)]
    return Step("along", (0,), {"fn": "slice", "axes": tuple(cut)}, view.out(computed))


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
    return [select(view, axis, range(starts[i], starts[i + 1]), i) for i in range(parts)]


# ---------------------------------------------------------------- layout


def read_reshape(view: View) -> Step:
    shape = view.shape()
    target = view.operand(1)
    if target is None or isinstance(target, str):
        return Step("reshape", (0,), {}, view.inferred_shape())
    entries = [int(n) for n in materialise(target)]
    dims: list[Dim | None] = []
    for i, n in enumerate(entries):
        copied = n == 0 and not view.attr("allowzero", 0)
        if copied and i >= len(shape):
            raise Opaque("its shape copies an axis that its input does not have")
        dims.append(shape[i] if copied else None if n == -1 else n)
    others = [d for d in dims if d is not None]
    return Step("reshape", (0,), {}, view.out([times(shape, others) if d is None else d for d in dims]))


def read_flatten(view: View) -> Step:
    shape = view.shape()
    axis = view.attr("axis", 1)
    axis = axis + len(shape) if axis < 0 else axis
    return Step("reshape", (0,), {}, view.out([times(shape[:axis]), times(shape[axis:])]))


def read_squeeze(view: View) -> Step:
    shape = view.shape()
    axes = view.ints(1, "axes", "axes", since=13)
    if axes is None and not all(isinstance(n, int) for n in shape):
        raise Opaque("which axes it drops is known only at run time")
    gone = {i for i, n in enumerate(shape) if n == 1} if axes is None else {view.axis(a) for a in axes}
    return Step("reshape", (0,), {}, view.out([n for i, n in enumerate(shape) if i not in gone]))


def read_unsqueeze(view: View) -> Step:
    axes = view.ints(1, "axes", "axes", since=13) or ()
    rank = len(view.shape()) + len(axes)
    new = {a % rank for a in axes}
    old = iter(view.shape())
    return Step("reshape", (0,), {}, view.out([1 if i in new else next(old) for i in range(rank)]))


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
            dims.append(known[0] if known else sizes[0])
    return Step("concat", tuple(range(len(shapes))), {"axis": axis}, view.out(dims))


def read_expand(view: View) -> Step:
    target = view.operand(1)
    if target is None or isinstance(target, str):
        return Step("expand", (0,), {}, view.inferred_shape())
    return Step("expand", (0,), {}, view.out(broadcast(view.shape(), tuple(int(n) for n in materialise(target)))))
