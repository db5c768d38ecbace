"""Constants and affine maps through a convolution: into its bias, into an added plane, or past it.

    y = conv(x; W) + b,  x_S := c    ->  y = conv(x_K; W_K) + (b + Σ W_S c)        without padding: the sum over the kernel
                                     ->  y = conv(x_K; W_K) + b + plane            with zero padding

With zero padding, a convolution sees zeros beyond the border instead of c. There `W_S c` is not one number per channel, so it is
added as a plane. The plane is stored if it has no more numbers than the columns W_S that it replaces, so that no model grows. If it
has more, or a dynamic size, it is computed from a plane of ones. onnxruntime computes a plane of a fixed size once, when it loads
the model. If every input of a group is known, its outputs are known: the constants go past it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from cmrc.ir.axes import count_by_group, members
from cmrc.ir.graph import Array, Node, Tensor, Value, apply, attributes, literal, take
from cmrc.ir.ops.affine import ConvAttrs, conv_pads
from cmrc.ir.tensors import constant, evaluate_op, quantised
from cmrc.passes.rewriting.absorb import (
    Facts,
    Known,
    Mix,
    add_after,
    add_tensors,
    bare,
    bias_of,
    conv_columns,
    is_better_multiplied,
    left_of,
    mixed_columns,
    position_free,
    removed_by,
    sink,
    sources_of,
    whole_bias,
)
from cmrc.passes.rewriting.carrier import Carrier, find_carrier, hold, with_part
from cmrc.passes.rewriting.integers import rounding_needed
from cmrc.passes.rewriting.rewriter import (
    NOTHING_TO_ADD,
    Declined,
    Rewritten,
    RuleOutcome,
    Sweep,
    complement,
    folded,
    past,
)

IN_FLOATS = "; that needs more than integers: here, only constants that are quantised to 0 can be folded"


def absorb_into_conv(sweep: Sweep, node: Node, facts: Facts) -> RuleOutcome:
    """Channels: into bias, border plane and weight. If every input of a group is known, the constants go past it."""
    attrs = attributes(node, ConvAttrs)
    if set(facts) != {0} or isinstance(node.inputs[1], str):
        return Declined("its weight is computed at run time")
    if len(node.inputs) > 2 and isinstance(node.inputs[2], str):
        return Declined("its bias is computed at run time")
    fact, axis, groups = facts[0], attrs["axis"], attrs["groups"]
    if fact.axis != axis:
        return Declined("it mixes positions along the replaced axis")
    channels = int(sweep.shape(fact.source)[axis])
    if groups == 1 and len(fact.units) < channels:
        return fold_into_conv(sweep, node, fact.source, fact.units, fact.full())
    per, outs = channels // groups, int(node.output.shape[axis]) // groups
    counts = per - count_by_group(fact.units, groups, per)
    if counts.min() == counts.max() > 0:
        return fold_into_conv(sweep, node, fact.source, fact.units, fact.full())
    gone = np.flatnonzero(counts == 0)
    if np.any(counts % per):
        return Declined("its groups would keep different numbers of channels")
    rows = members(gone, outs)
    if _makes_border(node, fact):
        spatial = sweep.shape(fact.source)[axis + 1 :]
        fixed = all(isinstance(n, int) for n in spatial)
        if not fixed and not position_free(fact.slab, axis):
            return Declined("the constants differ by position, and the number of positions is not fixed")
        if position_free(fact.slab, axis) and not (fixed and _fits_in_weight(node, [int(n) for n in spatial])):
            return plane_of_groups(sweep, node, facts, gone, per, outs)
    return sink(sweep, node, facts, axis, rows, _groups_of_constants(sweep, node, fact, gone, per, outs))


def _makes_border(node: Node, fact: Known) -> bool:
    """Whether a convolution makes these constants differ by position."""
    free = position_free(fact.slab, attributes(node, ConvAttrs)["axis"])
    return not free or (bool(fact.slab.any()) and has_border(node))


def _fits_in_weight(node: Node, spatial: Sequence[int]) -> bool:
    """Whether the plane of an output channel has no more numbers than its part of the weight."""
    weight = node.inputs[1]
    assert isinstance(weight, Tensor)
    return math.prod(conv_sizes(node, spatial)) <= math.prod(weight.shape[1:])


def _groups_of_constants(sweep: Sweep, node: Node, fact: Known, gone: Array, per: int, outs: int) -> Array:
    """The outputs of groups whose inputs are all known."""
    axis, attrs = attributes(node, ConvAttrs)["axis"], node.attrs
    weight, bias = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
    assert isinstance(weight, Tensor) and not isinstance(bias, str)
    rows, columns = members(gone, outs), members(gone, per)
    slab = fact.at(columns)
    small = constant(take(weight, 0, columns if attrs.get("transposed") else rows))
    shift = None if bias is None else constant(take(bias, 0, rows))
    spatial = sweep.shape(fact.source)[axis + 1 :]
    attrs = {**attrs, "groups": len(gone)}
    if position_free(slab, axis) and not slab.any():
        base = np.zeros(len(rows)) if shift is None else shift
        return base.reshape([-1 if i == axis else 1 for i in range(len(spatial) + axis + 1)])
    if position_free(slab, axis) and not has_border(node):
        size: Sequence[int] = [d * (k - 1) + 1 for k, d in zip(small.shape[2:], attrs["dilation"], strict=True)]
        attrs["stride"] = (1,) * len(size)
    else:
        size = [int(n) for n in spatial]
    full = np.broadcast_to(slab, (*slab.shape[: axis + 1], *size))
    return evaluate_op("conv", attrs, full, small, shift)


def conv_sizes(node: Node, spatial: Sequence[int]) -> tuple[int, ...]:
    """The spatial size of a convolution's result."""
    weight = node.inputs[1]
    assert isinstance(weight, Tensor)
    a, kernel = attributes(node, ConvAttrs), weight.shape[2:]
    sizes = []
    extra = a.get("output_padding", (0,) * len(kernel))
    pads = conv_pads(a, spatial, kernel)
    for n, k, s, d, (lo, hi), more in zip(spatial, kernel, a["stride"], a["dilation"], pads, extra, strict=True):
        reach = d * (k - 1) + 1
        sizes.append((n - 1) * s - lo - hi + reach + more if a.get("transposed") else (n + lo + hi - reach) // s + 1)
    return tuple(sizes)


def has_border(node: Node) -> bool:
    """Whether the result of a constant plane is not a constant plane."""
    attrs = attributes(node, ConvAttrs)
    pad = attrs["pad"]
    return bool(attrs.get("transposed")) or isinstance(pad, str) or any(lo or hi for lo, hi in pad)


def fold_into_conv(
    sweep: Sweep, node: Node, x: str, units: Sequence[int], slab: Array, mix: Mix | None = None
) -> RuleOutcome:
    """y = conv(x; W) + b with channels of x replaced: see the module's docstring."""
    attrs, weight, bias = attributes(node, ConvAttrs), node.inputs[1], bias_of(node)
    assert isinstance(weight, Tensor)
    axis = attrs["axis"]
    if isinstance(bias, str):
        return Declined("its bias is computed at run time")
    by_position = not position_free(slab, axis)
    if by_position and slab.any() and not all(isinstance(n, int) for n in sweep.values[x].shape[axis + 1 :]):
        return Declined("the constants differ by position, and the number of positions is not fixed")
    keep = left_of(units, int(sweep.values[x].shape[axis]), mix)
    w_in, groups = (0, 1) if attrs.get("transposed") else (1, attrs["groups"])
    integers = quantised(weight)
    if integers is not None and (problem := rounding_needed(integers, w_in, keep, mixed=mix is not None)):
        return Declined(problem)
    mixed = mixed_columns(weight, w_in, units, mix, groups=groups)
    if slab.any() and not by_position and has_border(node) and keep.ordered:
        carrier = find_carrier(sweep, node, x, units, len(keep))
        if carrier is not None:
            return _carry(sweep, node, x, units, slab, mixed, carrier)
    columns = conv_columns(mixed, node, keep)
    smaller = node.with_inputs((sweep.select(x, axis, keep), columns, bias))
    if not slab.any():
        sweep.emit(smaller)
        return NOTHING_TO_ADD
    if by_position:
        return _add_buffer_to_conv(sweep, node, smaller, x, units, slab)
    values, outs = np.broadcast_to(slab.reshape(-1), len(units)), int(node.output.shape[axis])
    if has_border(node):
        bundle = kernel_of_constants(node, units, values, outs)
        folding = _add_plane(sweep, node, smaller, x, bundle, removed_by(weight, smaller))
        return folding if integers is None else replace(folding, detail=f"{folding.detail}{IN_FLOATS}")

    def add_up(of: Node, some: Array) -> Tensor:
        return _over_the_kernel(kernel_of_constants(of, units, some, outs), outs)

    return _add_to_bias_of_conv(sweep, node, smaller, x, values, add_up)


def _add_buffer_to_conv(
    sweep: Sweep, node: Node, smaller: Node, x: str, units: Sequence[int], slab: Array
) -> Rewritten:
    """Constants that differ by position: convolve them by themselves, once."""
    axis, weight, before = attributes(node, ConvAttrs)["axis"], node.inputs[1], sweep.values[x].shape
    assert isinstance(weight, Tensor)
    spatial = tuple(int(n) for n in before[axis + 1 :])
    full = np.zeros((*slab.shape[:axis], int(before[axis]), *spatial))
    full[(slice(None),) * axis + (list(units),)] = slab
    shape = (*slab.shape[:axis], int(node.output.shape[axis]), *conv_sizes(node, spatial))
    conv, some = attributes(node, ConvAttrs), np.take(full, units, axis=axis)
    columns = take(weight, 0 if conv.get("transposed") else 1, units) if conv["groups"] == 1 else weight
    if conv["groups"] == 1 and is_better_multiplied(math.prod(shape), some, columns, smaller, weight):
        known = Value(sweep.fresh(node.name, "known"), shape, node.output.dtype)
        sweep.emit(Node("conv", (literal(some), columns, None), (known,), node.attrs, path=node.path))
        add_after(sweep, smaller, known.name)
        return folded("constants that differ by position into a convolution of their own")
    add_after(sweep, smaller, apply("conv", (literal(full), weight), node.attrs, shape, weight.dtype))
    return folded(f"constants that differ by position into an added {list(shape)} buffer")


def _over_the_kernel(bundle: Tensor, outs: int) -> Tensor:
    """One number per output: the sum over the kernel."""
    kernel = bundle.shape[2:]
    if math.prod(kernel) > 1:
        over = tuple(range(2, 2 + len(kernel)))
        bundle = apply("along", (bundle,), {"fn": "sum", "axes": over, "drop": True}, (outs, 1), bundle.dtype)
    return apply("reshape", (bundle,), {"shape": (outs,)}, (outs,), bundle.dtype)


def _add_to_bias_of_conv(
    sweep: Sweep, node: Node, smaller: Node, x: str, values: Array, add_up: Callable[[Node, Array], Tensor]
) -> Rewritten:
    """Without padding, every window sees all constants: b += Σ over the kernel."""
    bias, weight = bias_of(node), node.inputs[1]
    assert not isinstance(bias, str) and isinstance(weight, Tensor)
    whole = whole_bias(sweep, node, x, values, outputs=0, add_up=add_up)
    if whole is not None:
        sweep.emit(smaller.with_inputs((*smaller.inputs[:2], whole)))
        return folded("constants into the bias, as whole numbers")
    total = add_tensors(bias, add_up(node, values), dtype=weight.dtype)
    sweep.emit(smaller.with_inputs((*smaller.inputs[:2], total)))
    return folded("constants into the bias")


def _carry(
    sweep: Sweep, node: Node, x: str, units: Sequence[int], slab: Array, mixed: Tensor, carrier: Carrier
) -> Rewritten:
    """With zero padding, one of the replaced channels stays and brings the constants of all."""
    conv = attributes(node, ConvAttrs)
    axis, w_in = conv["axis"], 0 if conv.get("transposed") else 1
    values = np.broadcast_to(slab.reshape(-1), len(units)) / carrier.number
    column = kernel_of_constants(node, units, values, int(node.output.shape[axis]))
    keep = complement([unit for unit in units if unit != carrier.unit], int(sweep.values[x].shape[axis]))
    carrying = with_part(mixed, w_in, carrier.unit, column)
    hold(sweep, carrier)
    sweep.emit(node.with_inputs((sweep.select(x, axis, keep), conv_columns(carrying, node, keep), bias_of(node))))
    return folded(f"constants into channel {carrier.unit}, which carries them, exact at the zero-padded border")


def _add_plane(sweep: Sweep, node: Node, smaller: Node, x: str, bundle: Tensor, removed: int) -> Rewritten:
    """With zero padding, windows at the border see less: a plane, stored if it is small, otherwise computed from ones."""
    axis, weight, out = attributes(node, ConvAttrs)["axis"], node.inputs[1], node.output
    assert isinstance(weight, Tensor)
    attrs = {**node.attrs, "groups": 1}
    lead, outs, spatial = (1,) * axis, int(out.shape[axis]), sweep.values[x].shape[axis + 1 :]
    if all(isinstance(n, int) for n in spatial):
        sizes = tuple(int(n) for n in spatial)
        shape = (*lead, outs, *conv_sizes(node, sizes))
        if math.prod(shape) <= removed:
            ones = literal(np.ones((*lead, 1, *sizes)))
            add_after(sweep, smaller, apply("conv", (ones, bundle), attrs, shape, weight.dtype))
            return folded(f"constants into an added {list(shape)} buffer, exact at the zero-padded border")
    # A batch of one is enough: the plane is the same for every sample.
    plane = plane_of_ones(sweep, node, x)
    border = Value(sweep.fresh(node.name, "border"), (*lead, outs, *out.shape[axis + 1 :]), out.dtype)
    sweep.emit(Node("conv", (plane, bundle, None), (border,), attrs, path=node.path))
    add_after(sweep, smaller, border.name)
    return folded("constants into a run-time plane, exact at the zero-padded border of any size")


def plane_of_ones(sweep: Sweep, node: Node, x: str) -> str:
    """Ones of the spatial size of x, as a batch of one. The size is read where it first appears, so that x itself may be removed."""
    axis, shape = attributes(node, ConvAttrs)["axis"], sweep.values[x].shape
    earliest = x
    source: str | None = x
    while source is not None:
        earliest = source
        maker = sweep.producers.get(source)
        operands = () if maker is None else maker.values()
        source = next(
            (o for o in operands if len(s := sweep.shape(o)) == len(shape) and s[axis + 1 :] == shape[axis + 1 :]), None
        )
    plane = Value(sweep.fresh(x, "plane"), (*(1,) * (axis + 1), *shape[axis + 1 :]), node.output.dtype)
    sweep.emit(Node("plane", (earliest,), (plane,), {"axis": axis}, path=node.path))
    return plane.name


def kernel_of_constants(node: Node, units: Sequence[int], values: Array, outs: int) -> Tensor:
    """Σ_s W_s c_s: the kernel that makes of a plane of ones what the constant channels contribute; it has one input channel."""
    conv = attributes(node, ConvAttrs)
    weight, groups, transposed = node.inputs[1], conv["groups"], bool(conv.get("transposed"))
    assert isinstance(weight, Tensor)
    kernel = weight.shape[2:]
    if transposed and groups > 1:
        per_in = weight.shape[0] // groups
        seen = np.zeros((groups, 1, weight.shape[1], *kernel))
        w = constant(weight)
        for unit, c in zip(units, values, strict=True):
            seen[unit // per_in, 0] += c * w[unit]
        return literal(seen.reshape(1, outs, *kernel))
    attrs = {"axis": 0 if transposed else 1, "units": tuple(units), "groups": 1 if transposed else groups}
    flat = apply("weigh_columns", (weight, literal(values)), attrs, (outs, *kernel), weight.dtype)
    shape = (1, outs, *kernel) if transposed else (outs, 1, *kernel)
    return apply("reshape", (flat,), {"shape": shape}, shape, weight.dtype)


def plane_of_groups(sweep: Sweep, node: Node, facts: Facts, gone: Array, per: int, outs: int) -> Rewritten:
    """Groups whose inputs are all constant, with zero padding and at any size: convolve a plane of ones."""
    conv = attributes(node, ConvAttrs)
    fact, axis = facts[0], conv["axis"]
    x, weight, bias = (*node.inputs, None)[:3]
    assert isinstance(weight, Tensor) and not isinstance(bias, str)
    rows, inputs = members(gone, outs), members(gone, per)
    small = replace(node, inputs=(x, take(weight, 0, inputs if conv.get("transposed") else rows), bias))
    small = small.with_attrs(groups=len(gone))
    bundle = kernel_of_constants(small, range(len(inputs)), fact.at(inputs).reshape(-1), len(rows))
    plane = plane_of_ones(sweep, node, fact.source)
    shape = (*((1,) * axis), len(rows), *node.output.shape[axis + 1 :])
    known = Value(sweep.fresh(node.name, "known"), shape, node.output.dtype)
    shift = None if bias is None else take(bias, 0, rows)
    attrs = {**node.attrs, "groups": 1}
    sweep.emit(Node("conv", (plane, bundle, shift), (known,), attrs, path=node.path))
    sweep.emit(bare(node, facts))
    sweep.put_do(node.output, axis, rows, known.name, sources_of(facts))
    return past("as a value computed at run time")
