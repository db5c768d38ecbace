"""Ops along axes, in every form that opsets gave them: pooling, softmax, resizing, padding, normalisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from cmrc.hosts.onnx.ops.affine import disagreement, padding, require_whole_windows, size_after
from cmrc.hosts.onnx.ops.row import LeftWhole, Step, View, kept
from cmrc.ir.graph import Dim
from cmrc.ir.ops.affine import ConvAttrs, conv_pads
from cmrc.ir.ops.functions import windows_in_ceil_mode
from cmrc.ir.tensors import materialise


def _require_agreement(view: View, sizes: Sequence[Dim], attrs: Mapping[str, Any]) -> None:
    """In ceil mode: that onnx and onnxruntime count the same windows. A sum with the result could not be loaded otherwise."""
    for size, length, pad, dilation, stride in zip(
        sizes, attrs["kernel"], attrs["pad"], attrs["dilation"], attrs["stride"], strict=True
    ):
        reach = dilation * (length - 1) + 1
        if not isinstance(size, int):
            continue
        if windows_in_ceil_mode(size, pad, reach, stride) != -(-(size + sum(pad) - reach) // stride) + 1:
            raise disagreement(
                view,
                "its last window would start in the padding: onnx's shape inference counts that window, onnxruntime does not",
                "leave ceil_mode out, or pad less at the end",
            )


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
        "pad": padding(view, rank),
        "ceil": bool(view.attr("ceil_mode", 0)),
    }
    sizes = [n for n in shape[2:] if isinstance(n, int)]
    if len(sizes) == rank:
        attrs["pad"] = conv_pads(cast(ConvAttrs, attrs), sizes, attrs["kernel"])
    require_whole_windows(shape[2:], attrs["kernel"], attrs)
    if attrs["ceil"] and not isinstance(attrs["pad"], str):
        _require_agreement(view, shape[2:], attrs)
    if fn == "avg_pool":
        # Without padding there is none to count. Before opset 19 onnxruntime also counts what a window lacks at a dynamic size.
        padded = isinstance(attrs["pad"], str) or any(pad != (0, 0) for pad in attrs["pad"])
        lacking = view.opset < 19 and len(sizes) < rank
        attrs["include_pad"] = bool(view.attr("count_include_pad", 0)) and (padded or lacking)
    spatial = [size_after(n, k, attrs, i) for i, (n, k) in enumerate(zip(shape[2:], attrs["kernel"], strict=True))]
    return Step("along", (0,), attrs, view.out([*shape[:2], *spatial]))


def read_softmax(view: View, fn: str) -> Step:
    rank = len(view.shape())
    axis = view.axis(view.attr("axis", -1 if view.opset >= 13 else 1))
    axes = (axis,) if view.opset >= 13 else tuple(range(axis, rank))  # before 13 the axes from `axis` on are one
    return Step("along", (0,), {"fn": fn, "axes": axes}, view.out(view.shape()))


def read_resize(view: View) -> Step:
    shape = view.shape()
    if view.attr("coordinate_transformation_mode", "") == "tf_crop_and_resize":
        raise LeftWhole("it crops by a region that is computed at run time")
    parameters = [value for value in view.node.inputs[1:] if value is not None]
    if any(value.is_graph_input() and not value.is_initializer() for value in parameters):
        raise LeftWhole("its scales or sizes are computed at run time")
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


def from_axis(view: View) -> tuple[int, ...]:
    return tuple(range(view.axis(view.attr("axis", -1)), len(view.shape())))


def spatial(view: View) -> tuple[int, ...]:
    return tuple(range(2, len(view.shape())))


def all_but_batch(view: View) -> tuple[int, ...]:
    return tuple(range(1, len(view.shape())))


def read_group_norm(view: View) -> Step:
    if view.opset < 21:
        raise LeftWhole("before opset 21 its scale and bias have one number for each group")
    view.first_output_only()
    attrs = {
        "eps": float(view.attr("epsilon", 1e-5)),
        "groups": view.attr("num_groups", 1),
        "align": (None, (1,), (1,)),
    }
    return Step("along", (0, 1, 2), {"fn": "group_norm", "axes": all_but_batch(view), **attrs}, view.out(view.shape()))


def read_cumsum(view: View) -> Step:
    position = view.constant(1, "axis")
    if position is None:
        raise LeftWhole("it has no axis")
    return Step(
        "along", (0,), {"fn": "cumsum", "axes": (view.axis(int(position.reshape(()))),)}, view.out(view.shape())
    )
