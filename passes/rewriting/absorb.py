"""An affine op takes in what replaced units send it, and keeps only the columns of the rest.

    y = W x + b,  x_S := c           ->  y = W_K x_K + (b + W_S c)
    y = W x + b,  x_S := B x_P + β   ->  y = (W_K + [W_S B]_P) x_K + (b + W_S β)

A convolution with zero padding sees zeros, not c, beyond the border. There `W_S c` is not one number per channel, so it is
added as a plane. It is stored where it has no more numbers than the columns W_S that it stands for, so that no model grows.
Where it has more, or a size known only at run time, it is computed from a plane of ones. onnxruntime computes one of a fixed
size once, when it loads the model.

Folding is linear algebra in float64, cast once to the parameter's dtype: equal to the clamped model up to rounding.

What a fold adds to a value is added where that is best: into a parameter that is added anyway, or behind the batch norm that
follows. Neither adds an op; the second lets runtimes join a convolution and its batch norm.

    %s = add(%y, v)                               %z = add(%y, p + v)
    %z = add(%s, p)                         ->

    %s = add(%y, v)                               %b = batch_norm(%y, γ, β, μ, σ²)
    %z = batch_norm(%s, γ, β, μ, σ²)        ->    %z = add(%b, v · γ/√(σ²+ε))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from cmrc.ir.axes import spread
from cmrc.ir.evaluate import apply, constant, take
from cmrc.ir.graph import NO_MARKS, Array, Marks, Node, Operand, Tensor, Value, attributes, literal
from cmrc.ir.ops.affine import ConvAttrs, LinearAttrs, conv_pads
from cmrc.ir.ops.functions import AlongAttrs, PointwiseAttrs
from cmrc.passes.rewriting.integers import integer_bias, rounding_needed
from cmrc.passes.rewriting.rewriter import (
    NOTHING_TO_ADD,
    Declined,
    Rewritten,
    RuleOutcome,
    Sweep,
    complement,
    folded,
    resized,
    taken,
)

Mix = tuple[Sequence[int], Tensor]  # the parents, and the matrix B that rebuilds the replaced units from them
ADDEND = Marks(addend=True)  # a sum that constant_fold merges with the next


def position_free(slab: Array, axis: int) -> bool:
    """Whether the constants are one number per unit, the same at every position of the other axes."""
    return bool(slab.size == slab.shape[axis])


def add_tensors(first: Tensor | None, second: Tensor, scale: float = 1.0, dtype: str = "") -> Tensor:
    """first + scale * second, as a tensor expression."""
    dtype = dtype or (first or second).dtype
    if first is None:
        first = literal(np.zeros(()))
    shape = np.broadcast_shapes(first.shape, second.shape)
    return apply("pointwise", (first, second), {"fn": "add", "alpha": scale, "rank": len(shape)}, shape, dtype)


def add_after(sweep: Sweep, node: Node, addend: Tensor | str) -> None:
    """Emit `node`, then `node + addend`, and let everyone read the sum."""
    sweep.emit(node)
    out = node.output
    if 0 in out.shape:  # nothing to add to, and onnxruntime cannot fuse such a sum with its MatMul
        return
    total = Value(sweep.fresh(out.name, "bias"), out.shape, out.dtype)
    marks = NO_MARKS if isinstance(addend, str) else ADDEND
    sweep.emit(Node("pointwise", (out.name, addend), (total,), {"fn": "add"}, path=node.path, marks=marks))
    sweep.redirected[out.name] = total.name


def fold_into_linear(
    sweep: Sweep, node: Node, x: str, units: Sequence[int], slab: Array, mix: Mix | None = None
) -> RuleOutcome:
    """y = W x + b with units of x replaced: see the module."""
    attrs, weight = attributes(node, LinearAttrs), node.inputs[1]
    assert isinstance(weight, Tensor)
    keep = complement(units, weight.shape[attrs["w_in"]])
    problem = rounding_needed(weight, attrs["w_in"], keep, mixed=mix is not None)
    if problem:
        return Declined(problem)
    columns = take(mixed_columns(weight, attrs["w_in"], units, mix), attrs["w_in"], keep)
    smaller = node.with_inputs((sweep.select(x, attrs["axis"], keep), columns, bias_of(node)))
    if not slab.any():
        sweep.emit(smaller)
        return NOTHING_TO_ADD
    if position_free(slab, attrs["axis"]):
        return _add_to_linear(sweep, node, smaller, x, units, slab)
    return _add_buffer_to_linear(sweep, node, smaller, units, slab)


def bias_of(node: Node) -> Operand:
    return node.inputs[2] if len(node.inputs) > 2 else None


def mixed_columns(weight: Tensor, axis: int, units: Sequence[int], mix: Mix | None, **grouping: int) -> Tensor:
    """W_P += W_S · B: the columns of the parents take over what the replaced units sent."""
    if mix is None:
        return weight
    parents, matrix = mix
    attrs = {"axis": axis, "units": tuple(units), "parents": tuple(parents), **grouping}
    return apply("fold_columns", (weight, matrix), attrs, weight.shape, weight.dtype)


def _add_to_linear(sweep: Sweep, node: Node, smaller: Node, x: str, units: Sequence[int], slab: Array) -> Rewritten:
    """b += W_S c, in the bias where the host's op has a place for one, else in an op behind it."""
    attrs, weight, bias = attributes(node, LinearAttrs), node.inputs[1], bias_of(node)
    assert isinstance(weight, Tensor)
    outs, alpha, beta = weight.shape[attrs["w_out"]], attrs.get("alpha", 1.0), attrs.get("beta", 1.0)

    def add_up(of: Node, values: Array) -> Tensor:
        columns = {"axis": attrs["w_in"], "units": tuple(units)}
        return apply("weigh_columns", (of.inputs[1], literal(values)), columns, (outs,), weight.dtype)  # type: ignore[arg-type]

    values = np.broadcast_to(slab.reshape(-1), len(units))
    vector = add_up(node, values)
    if node.marks.takes_bias and not isinstance(bias, str) and beta:
        whole = integer_bias(sweep, node, x, values, outputs=attrs["w_out"], add_up=add_up)
        if whole is not None:
            sweep.emit(smaller.with_inputs((*smaller.inputs[:2], whole)))
            return folded("constants into the bias, as whole numbers")
        total = add_tensors(bias, vector, alpha / beta, weight.dtype)
        sweep.emit(smaller.with_inputs((*smaller.inputs[:2], total)))
        return folded("constants into the bias")
    trailing = len(node.output.shape) - attrs["axis"] - 1
    if trailing:
        shape = (outs, *([1] * trailing))
        vector = apply("reshape", (vector,), {"shape": shape}, shape, vector.dtype)
    add_after(sweep, smaller, add_tensors(None, vector, alpha, weight.dtype) if alpha != 1.0 else vector)
    return folded("constants into a bias")


def _add_buffer_to_linear(sweep: Sweep, node: Node, smaller: Node, units: Sequence[int], slab: Array) -> Rewritten:
    """Constants that differ by position: W_S c is a tensor with those positions."""
    attrs, weight = attributes(node, LinearAttrs), node.inputs[1]
    assert isinstance(weight, Tensor)
    axis, w_in, w_out = attrs["axis"], attrs["w_in"], attrs["w_out"]
    values = spread(slab, axis, len(units))
    shape = tuple(int(n) for n in resized(values.shape, axis, weight.shape[w_out]))
    product = {"axis": axis, "w_in": w_in, "w_out": w_out, "alpha": attrs.get("alpha", 1.0)}
    addend = apply("linear", (literal(values), take(weight, w_in, units)), product, shape, weight.dtype)
    add_after(sweep, smaller, addend)
    return folded(f"constants that differ by position into an added {list(shape)} buffer")


def fold_into_mean(sweep: Sweep, node: Node, x: str, axis: int, units: Sequence[int], slab: Array) -> Rewritten:
    """mean(x) over C units of which those in S are c -> mean(x_K) · |K| / C + Σ c / C; a sum likewise, without the factor."""
    attrs = attributes(node, AlongAttrs)
    size, out = int(sweep.values[x].shape[axis]), node.output
    keep = complement(units, size)
    mean = attrs["fn"] == "mean"
    sweep.emit(node.with_inputs((sweep.select(x, axis, keep), *node.inputs[1:])))
    if mean:
        scaled = Value(sweep.fresh(out.name, "scaled"), out.shape, out.dtype)
        sweep.emit(Node("pointwise", (out.name, literal(len(keep) / size)), (scaled,), {"fn": "mul"}, path=node.path))
        sweep.redirected[out.name], out = scaled.name, scaled
    if not slab.any():
        return NOTHING_TO_ADD
    added = slab.sum(axis=axis, keepdims=not attrs.get("drop")) / (size if mean else 1)
    total = Value(sweep.fresh(out.name, "bias"), out.shape, out.dtype)
    addend = add_tensors(None, literal(added), dtype=out.dtype)
    sweep.emit(Node("pointwise", (out.name, addend), (total,), {"fn": "add"}, path=node.path, marks=ADDEND))
    sweep.redirected[node.output.name] = total.name
    return folded("constants into an added number")


def leave_out_of_norm(
    sweep: Sweep, node: Node, x: str, axis: int, units: Sequence[int], sources: Sequence[int]
) -> Rewritten:
    """x / √(mean x² + ε) · w with x_S = 0: over the k of n units that stay, ε and w² are n/k times as large; S stays 0.

    What the norm made of n units is laid out of those k again, for the readers that take in that S is 0.
    """
    out, weight = node.output, (*node.inputs, None)[1]
    size = int(out.shape[axis])
    keep = complement(units, size)
    share = size / len(keep)
    assert not isinstance(weight, str)
    scale: Tensor = literal(np.full(len(keep), math.sqrt(share)))
    if weight is not None:
        some = take(weight, len(weight.shape) - 1, keep)
        scale = apply("pointwise", (some, scale), {"fn": "mul"}, some.shape, weight.dtype)
    smaller = replace(out, shape=resized(out.shape, axis, len(keep)))
    attrs = {**node.attrs, "eps": attributes(node, AlongAttrs)["eps"] * share}
    sweep.emit(replace(node, inputs=(sweep.select(x, axis, keep), scale), outputs=(smaller,), attrs=attrs))
    places = {unit: i for i, unit in enumerate(keep)}
    spread = Value(sweep.fresh(out.name, "spread"), out.shape, out.dtype)
    index = tuple(places.get(unit, 0) for unit in range(size))
    sweep.emit(Node("select", (out.name,), (spread,), {"axis": axis, "keep": index}))
    nothing = np.zeros([len(units) if d == axis else 1 for d in range(len(out.shape))])
    sweep.redirected[out.name] = sweep.do(spread, axis, units, nothing, sources)
    return taken("left out, the constants are 0")


def fold_into_rows(
    sweep: Sweep, node: Node, rows: Node, x: str, x_axis: int, axis: int, units: Sequence[int], slab: Array
) -> Rewritten:
    """table[ids] x with units of x := c is table_K[ids] x_K + (table_S c)[ids]: the sums are a table of their own."""
    ids, table = rows.inputs
    assert isinstance(table, Tensor)
    keep = complement(units, int(rows.output.shape[axis]))
    parts = {rows.name: sweep.select(rows.name, axis, keep), x: sweep.select(x, x_axis, keep)}
    looked_up_first = node.inputs[0] == rows.name
    order = (rows.name, x) if looked_up_first else (x, rows.name)
    smaller = node.with_inputs(parts[name] for name in order)
    column = axis - len(rows.output.shape) + len(table.shape)
    attrs = {"axis": column, "units": tuple(units)}
    values = literal(np.broadcast_to(slab.reshape(-1), len(units)))
    sizes = [1 if i == column else n for i, n in enumerate(table.shape)]
    flat = tuple(n for i, n in enumerate(table.shape) if i != column)
    sums = apply("weigh_columns", (table, values), attrs, flat, table.dtype)
    sums = apply("reshape", (sums,), {"shape": tuple(sizes)}, tuple(sizes), table.dtype)
    added = Value(sweep.fresh(node.name, "sums"), resized(rows.output.shape, axis, 1), rows.output.dtype)
    sweep.emit(Node("embedding", (ids, sums), (added,), rows.attrs, path=node.path, marks=Marks(like=rows.name)))
    add_after(sweep, smaller, added.name)
    return folded("constants into a table of sums")


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
    """Whether a constant plane comes out as anything but a constant plane."""
    attrs = attributes(node, ConvAttrs)
    pad = attrs["pad"]
    return bool(attrs.get("transposed")) or isinstance(pad, str) or any(lo or hi for lo, hi in pad)


def fold_into_conv(
    sweep: Sweep, node: Node, x: str, units: Sequence[int], slab: Array, mix: Mix | None = None
) -> RuleOutcome:
    """y = conv(x; W) + b with channels of x replaced: see the module."""
    attrs, weight, bias = attributes(node, ConvAttrs), node.inputs[1], bias_of(node)
    assert isinstance(weight, Tensor)
    axis = attrs["axis"]
    if isinstance(bias, str):
        return Declined("its bias is computed at run time")
    by_position = not position_free(slab, axis)
    if by_position and slab.any() and not all(isinstance(n, int) for n in sweep.values[x].shape[axis + 1 :]):
        return Declined("the constants differ by position, and the number of positions is not fixed")
    keep = complement(units, int(sweep.values[x].shape[axis]))
    w_in, groups = (0, 1) if attrs.get("transposed") else (1, attrs["groups"])
    problem = rounding_needed(weight, w_in, keep, mixed=mix is not None)
    if problem:
        return Declined(problem)
    columns = conv_columns(mixed_columns(weight, w_in, units, mix, groups=groups), node, keep)
    smaller = node.with_inputs((sweep.select(x, axis, keep), columns, bias))
    if not slab.any():
        sweep.emit(smaller)
        return NOTHING_TO_ADD
    if by_position:
        return _add_buffer_to_conv(sweep, node, smaller, x, units, slab)
    values, outs = np.broadcast_to(slab.reshape(-1), len(units)), int(node.output.shape[axis])
    if has_border(node):
        bundle = kernel_of_constants(node, units, values, outs)
        return _add_plane(sweep, node, smaller, x, bundle, removed_by(weight, smaller))

    def add_up(of: Node, some: Array) -> Tensor:
        return _over_the_kernel(kernel_of_constants(of, units, some, outs), outs)

    return _add_to_bias_of_conv(sweep, node, smaller, x, values, add_up)


def _add_buffer_to_conv(
    sweep: Sweep, node: Node, smaller: Node, x: str, units: Sequence[int], slab: Array
) -> Rewritten:
    """Constants that differ by position: convolve them once, alone."""
    axis, weight, before = attributes(node, ConvAttrs)["axis"], node.inputs[1], sweep.values[x].shape
    assert isinstance(weight, Tensor)
    spatial = tuple(int(n) for n in before[axis + 1 :])
    full = np.zeros((*slab.shape[:axis], int(before[axis]), *spatial))
    full[(slice(None),) * axis + (list(units),)] = slab
    shape = (*slab.shape[:axis], int(node.output.shape[axis]), *conv_sizes(node, spatial))
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
    """Without padding every window sees all of the constants: b += Σ over the kernel."""
    bias, weight = bias_of(node), node.inputs[1]
    assert not isinstance(bias, str) and isinstance(weight, Tensor)
    whole = integer_bias(sweep, node, x, values, outputs=0, add_up=add_up)
    if whole is not None:
        sweep.emit(smaller.with_inputs((*smaller.inputs[:2], whole)))
        return folded("constants into the bias, as whole numbers")
    total = add_tensors(bias, add_up(node, values), dtype=weight.dtype)
    sweep.emit(smaller.with_inputs((*smaller.inputs[:2], total)))
    return folded("constants into the bias")


def removed_by(weight: Tensor, smaller: Node) -> int:
    """How many numbers of a weight a smaller node does without."""
    columns = smaller.inputs[1]
    assert isinstance(columns, Tensor)
    return math.prod(weight.shape) - math.prod(columns.shape)


def _add_plane(sweep: Sweep, node: Node, smaller: Node, x: str, bundle: Tensor, removed: int) -> Rewritten:
    """Under zero padding windows at the border see less: a plane, stored where it is small, else made from ones."""
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
    # A batch of one suffices: the plane is the same for every sample.
    plane = plane_of_ones(sweep, node, x)
    border = Value(sweep.fresh(node.name, "border"), (*lead, outs, *out.shape[axis + 1 :]), out.dtype)
    sweep.emit(Node("conv", (plane, bundle, None), (border,), attrs, path=node.path))
    add_after(sweep, smaller, border.name)
    return folded("constants into a run-time plane, exact at the zero-padded border of any size")


def plane_of_ones(sweep: Sweep, node: Node, x: str) -> str:
    """Ones of the spatial size of x, a batch of one. The size is read where it first appears, so that x itself may go."""
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
    """Σ_s W_s c_s: the kernel that a plane of ones must meet to give what constant channels give, one channel in."""
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


def conv_columns(weight: Tensor, node: Node, keep: Sequence[int]) -> Tensor:
    """The weight for the input channels that stay. In a grouped convolution every group keeps equally many."""
    conv = attributes(node, ConvAttrs)
    groups = conv["groups"]
    if conv.get("transposed"):
        return take(weight, 0, keep)
    if groups == 1:
        return take(weight, 1, keep)
    per = weight.shape[1]
    local = np.asarray(keep).reshape(groups, -1) % per
    shape = (weight.shape[0], local.shape[1], *weight.shape[2:])
    attrs = {"keep": tuple(map(tuple, local.tolist()))}
    return apply("select_in_groups", (weight,), attrs, shape, weight.dtype)


def merge_addends(sweep: Sweep, node: Node) -> Node:
    """(y + v) + p -> y + (p + v), where v came from folding and p is a parameter: no extra op at run time."""
    attrs = attributes(node, PointwiseAttrs)
    if node.op != "pointwise" or attrs["fn"] != "add" or attrs.get("alpha", 1.0) != 1.0 or attrs.get("align"):
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
    x = node.inputs[0] if node.op == "pointwise" and attributes(node, PointwiseAttrs)["fn"] == "batch_norm" else None
    total = sweep.producers.get(x) if isinstance(x, str) else None
    if total is None or total.origin or total.op != "pointwise" or attributes(total, PointwiseAttrs)["fn"] != "add":
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
    attrs = {"fn": "batch_norm", "eps": attributes(node, PointwiseAttrs)["eps"]}

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
            inputs=(plane, scale(kernel, 1 if attributes(border_conv, ConvAttrs).get("transposed") else 0), None),
            outputs=(border,),
        )
    )
    return border.name
