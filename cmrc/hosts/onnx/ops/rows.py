"""The rows of the ONNX table that need a few lines: what these ops do to axes, in every form that opsets gave them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import onnx_ir

from cmrc.errors import TraceError
from cmrc.hosts.onnx.load import label
from cmrc.hosts.onnx.ops.view import LeftWhole, Step, View, broadcast, kept
from cmrc.ir.evaluate import apply, materialise
from cmrc.ir.graph import Dim, Marks, Tensor
from cmrc.ir.ops.affine import ConvAttrs, conv_pads
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
            f"its weight takes {weight.shape[attrs['w_in']]} units, the size of its input is not known to fit"
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
        raise LeftWhole(f"its weight takes {ins} channels and the size of its input is not known to fit")
    attrs: dict[str, Any] = {
        "axis": 1,
        "groups": groups,
        "stride": tuple(view.attr("strides", (1,) * rank)),
        "pad": _padding(view, rank),
        "dilation": tuple(view.attr("dilations", (1,) * rank)),
    }
    if transposed:
        if isinstance(attrs["pad"], str) and any(view.attr("output_padding", ())):
            raise _disagreement(
                view,
                "it has automatic padding and output_padding: onnx's shape inference adds the latter, onnxruntime does not",
                "leave output_padding out, or write the padding as numbers",
            )
        if isinstance(attrs["pad"], str) or view.attr("output_shape", None) is not None:
            raise LeftWhole("its padding follows from the size of its result")
        attrs |= {"transposed": True, "output_padding": tuple(view.attr("output_padding", (0,) * rank))}
    if not transposed:
        _require_whole_windows(shape[2:], weight.shape[2:], attrs)
    spatial = [_size_after(shape[2 + i], weight.shape[2 + i], attrs, i) for i in range(rank)]
    return Step("conv", (0, 1, 2), attrs, view.out([shape[0], outs, *spatial]), marks=TAKES_BIAS)


def _require_whole_windows(sizes: Sequence[Dim], kernel: Sequence[int], attrs: Mapping[str, Any]) -> None:
    """A window that does not fit even once: what comes out then differs from runtime to runtime."""
    if isinstance(attrs["pad"], str):
        return
    for size, length, pad, dilation in zip(sizes, kernel, attrs["pad"], attrs["dilation"], strict=True):
        if isinstance(size, int) and size + sum(pad) < dilation * (length - 1) + 1:
            raise LeftWhole(f"its window of {length} is larger than its input of {size}, padding included")


def _size_after(size: Dim, kernel: int, attrs: Mapping[str, Any], i: int) -> Dim | None:
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


def _require_agreement(view: View, sizes: Sequence[Dim], attrs: Mapping[str, Any]) -> None:
    """In ceil mode: that onnx and onnxruntime count the same windows. A sum with the result could not be loaded otherwise."""
    for size, length, pad, dilation, stride in zip(
        sizes, attrs["kernel"], attrs["pad"], attrs["dilation"], attrs["stride"], strict=True
    ):
        reach = dilation * (length - 1) + 1
        if not isinstance(size, int):
            continue
        if windows_in_ceil_mode(size, pad, reach, stride) != -(-(size + sum(pad) - reach) // stride) + 1:
            raise _disagreement(
                view,
                "its last window would start in the padding: onnx's shape inference counts that window, onnxruntime does not",
                "leave ceil_mode out, or pad less at the end",
            )


def _disagreement(view: View, reason: str, fix: str) -> TraceError:
    """A node whose size onnx and onnxruntime see differently: whatever is computed with one of them is wrong or cannot be loaded."""
    return TraceError(reason, node=label(view.node), op=view.node.op_type, fix=fix)


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
        raise LeftWhole("it casts to text")
    return Step("pointwise", (0,), {"fn": "cast", "dtype": dtype.numpy().name}, view.out(view.shape()))


def read_dropout(view: View) -> Step:
    view.first_output_only()
    training = view.constant(2, "training mode") if view.opset >= 12 else None
    if training is not None and bool(training):
        raise LeftWhole("it drops units in training mode")
    return Step("pointwise", (0,), {"fn": "identity"}, view.out(view.shape()))


def read_batch_norm(view: View) -> Step:
    view.first_output_only()
    if view.attr("training_mode", 0):
        raise LeftWhole("it normalises by the batch, in training mode")
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
        attrs["pad"] = conv_pads(cast(ConvAttrs, attrs), sizes, attrs["kernel"])
    _require_whole_windows(shape[2:], attrs["kernel"], attrs)
    if attrs["ceil"] and not isinstance(attrs["pad"], str):
        _require_agreement(view, shape[2:], attrs)
    if fn == "avg_pool":
        attrs["include_pad"] = bool(view.attr("count_include_pad", 0))
    spatial = [_size_after(n, k, attrs, i) for i, (n, k) in enumerate(zip(shape[2:], attrs["kernel"], strict=True))]
    return Step("along", (0,), attrs, view.out([*shape[:2], *spatial]))


def read_softmax(view: View, fn: str) -> Step:
    rank = len(view.shape())
    axis = view.axis(view.attr("axis", -1 if view.opset >= 13 else 1))
    axes = (axis,) if view.opset >= 13 else tuple(range(axis, rank))  # before 13 the axes from `axis` on are one
    return Step("along", (0,), {"fn": fn, "axes": axes}, view.out(view.shape()))


def read_resize(view: View) -> Step:
    shape = view.shape()
    if view.attr("coordinate_transformation_mode", "") == "tf_crop_and_resize":
        raise LeftWhole("it crops by a region that it reads")
    parameters = [value for value in view.node.inputs[1:] if value is not None]
    if any(value.is_graph_input() and not value.is_initializer() for value in parameters):
        raise LeftWhole("its scales or sizes are an input of the model")
    scales, sizes = _scales(view), view.contents[3] if len(view.contents) > 3 and view.opset >= 11 else None
    if scales is not None:
        axes = tuple(i for i, scale in enumerate(scales) if scale != 1.0)
        return Step("along", (0,), {"fn": "resize", "axes": axes}, kept(view, axes))
    out = list(view.inferred[0] or (None,) * len(shape))
    named = [view.axis(a) for a in view.attr("axes", tuple(range(len(shape))))]
    for i, axis in enumerate(named):
        out[axis] = sizes[i] if sizes is not None else out[axis]
    axes = tuple(i for i, (a, b) in enumerate(zip(shape, out, strict=True)) if i in named and (a != b or i >= 2))
    return Step(
        "along",
        (0,),
        {"fn": "resize", "axes": axes},
        view.out([out[i] if i in axes else n for i, n in enumerate(shape)]),
    )


def _scales(view: View) -> list[float] | None:
    if view.opset < 9:
        return None
    slot = 1 if view.node.op_type == "Upsample" or view.opset < 11 else 2
    operand = view.operand(slot)
    if operand is None or isinstance(operand, str) or not materialise(operand).size:
        return None
    scales = [float(s) for s in materialise(operand)]
    named = view.attr("axes", None)
    if named is None:
        return scales
    full = [1.0] * len(view.shape())
    for axis, scale in zip(named, scales, strict=True):
        full[view.axis(axis)] = scale
    return full


def read_pad(view: View) -> Step:
    shape, rank = view.shape(), len(view.shape())
    pads = view.ints(1, "pads", "padding", since=11)
    if pads is None:
        raise LeftWhole("it has no padding")
    named = view.ints(3, "axes", "axes", since=18) if view.opset >= 18 else None
    over = [view.axis(a) for a in named] if named is not None else list(range(rank))
    full = [(0, 0)] * rank
    for i, axis in enumerate(over):
        full[axis] = (pads[i], pads[len(over) + i])
    axes = tuple(i for i, pad in enumerate(full) if pad != (0, 0))
    out = view.out(
        [n if i not in axes else n + sum(full[i]) if isinstance(n, int) else None for i, n in enumerate(shape)]
    )
    if view.attr("mode", "constant") != "constant":
        return Step("along", (0,), {"fn": "pad_edge", "axes": axes}, out)
    if any(n < 0 for pair in full for n in pair):
        only = all(n <= 0 for pair in full for n in pair)
        return Step("along", (0,), {"fn": "slice" if only else "crop", "axes": axes}, out)
    value = view.constant(2, "padding value") if view.opset >= 11 else np.asarray(view.attr("value", 0.0))
    fill = 0.0 if value is None else float(value.reshape(()))
    return Step("along", (0,), {"fn": "pad", "axes": axes, "pads": tuple(full), "value": fill}, out)
