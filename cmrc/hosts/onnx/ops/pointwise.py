"""Ops element by element whose rows need a few lines."""

from __future__ import annotations

from typing import Any

import onnx_ir

from cmrc.hosts.onnx.ops.row import LeftWhole, Step, View


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
