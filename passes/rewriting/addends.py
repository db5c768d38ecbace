"""Where what a fold adds to a value is best added: into a parameter that is added anyway, or behind the batch norm that follows.

    %s = add(%y, v)                               %z = add(%y, p + v)
    %z = add(%s, p)                         ->

    %s = add(%y, v)                               %b = batch_norm(%y, γ, β, μ, σ²)
    %z = batch_norm(%s, γ, β, μ, σ²)        ->    %z = add(%b, v · γ/√(σ²+ε))

Part of constant_fold. Neither adds an op; the second lets runtimes join a convolution and its batch norm.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cmrc.ir.graph import Node, Operand, Tensor, Value, literal
from cmrc.ir.tensors import apply
from cmrc.passes.rewriting.absorb import add_after, add_tensors
from cmrc.passes.rewriting.rewriter import Sweep


def merge_addends(sweep: Sweep, node: Node) -> Node:
    """(y + v) + p -> y + (p + v), where v came from folding and p is a parameter: no extra op at run time."""
    if (
        node.op != "pointwise"
        or node.attrs["fn"] != "add"
        or node.attrs.get("alpha", 1.0) != 1.0
        or node.attrs.get("align")
    ):
        return node
    for i, operand in enumerate(node.inputs):
        earlier = sweep.producers.get(operand) if isinstance(operand, str) else None
        other = node.inputs[1 - i]
        if earlier is None or not earlier.marks.addend or other is None or isinstance(other, str):
            continue
        y, addend = earlier.inputs
        assert isinstance(y, str) and addend is not None and not isinstance(addend, str)
        if len(node.output.shape) != len(earlier.output.shape):
            continue
        total = add_tensors(other, addend, dtype=other.dtype)
        if node.marks.inside and total.shape != other.shape:  # a fused node takes a parameter of that shape only
            continue
        sweep.changed = True
        return replace(node, inputs=(y, total) if i == 0 else (total, y))
    return node


def add_behind_batch_norm(sweep: Sweep, node: Node) -> bool:
    """bn(conv(x) + p) -> bn(conv(x)) + p·γ/σ, where p came from folding: runtimes join the convolution and its batch norm."""
    x = node.inputs[0] if node.op == "pointwise" and node.attrs["fn"] == "batch_norm" else None
    total = sweep.producers.get(x) if isinstance(x, str) else None
    if total is None or total.origin or total.op != "pointwise" or total.attrs["fn"] != "add":
        return False
    y, addend = total.inputs
    scaled = _scaled_by_batch_norm(sweep, node, addend)
    if scaled is None:
        return False
    add_after(sweep, node.with_inputs((y, *node.inputs[1:])), scaled)
    sweep.changed = True
    return True


def _scaled_by_batch_norm(sweep: Sweep, node: Node, addend: Operand) -> Tensor | str | None:
    """What a batch norm makes of a plane when its shift is left out; of one known only at run time, by scaling the kernel that makes it."""
    weight, _, _, variance = node.inputs[1:]
    if not isinstance(variance, Tensor) or not (weight is None or isinstance(weight, Tensor)):
        return None
    axis, channels = 1, variance.shape[0]
    none, one = literal(np.zeros(channels)), literal(np.ones(channels))
    attrs = {"fn": "batch_norm", "eps": node.attrs["eps"]}

    def scale(tensor: Tensor, along: int) -> Tensor:
        align = (None, *(((along,),) * 4))
        return apply(
            "pointwise",
            (tensor, weight or one, none, none, variance),
            {**attrs, "align": align},
            tensor.shape,
            tensor.dtype,
        )

    if isinstance(addend, Tensor):
        rank = len(node.output.shape)
        return scale(addend, axis) if len(addend.shape) == rank and addend.shape[axis] == channels else None
    border_conv = sweep.producers[addend] if isinstance(addend, str) else None
    if border_conv is None or border_conv.op != "conv" or border_conv.origin or border_conv.marks.like:
        return None
    plane, kernel, _ = border_conv.inputs
    assert isinstance(kernel, Tensor)
    out = border_conv.output
    border = Value(sweep.fresh(node.name, "border"), out.shape, out.dtype)
    sweep.emit(
        replace(
            border_conv,
            inputs=(plane, scale(kernel, 1 if border_conv.attrs.get("transposed") else 0), None),
            outputs=(border,),
        )
    )
    return border.name
