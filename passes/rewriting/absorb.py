"""An affine op takes in what replaced units send it, and keeps only the columns of the rest.

    y = W x + b,  x_S := c           ->  y = W_K x_K + (b + W_S c)
    y = W x + b,  x_S := B x_P + β   ->  y = (W_K + [W_S B]_P) x_K + (b + W_S β)

A convolution with zero padding sees zeros, not c, beyond the border. There `W_S c` is not one number a channel, so it is
added as a plane: stored where the spatial size is known, computed from a plane of ones at run time where it is not.

Folding is linear algebra in float64, cast once to the parameter's dtype: equal to the clamped model up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cmrc.ir.axes import spread
from cmrc.ir.graph import NO_MARKS, Array, Marks, Node, Tensor, Value, literal
from cmrc.ir.meanings import conv_pads
from cmrc.ir.tensors import apply, constant, take
from cmrc.passes.rewriting.rewriter import Declined, Sweep, complement, resized

# A plane of a fixed size is stored, unless it holds more than so many times the numbers of the weight it comes from, which would make
# the model larger: then it is made from ones when the model runs. onnxruntime does that once, when it loads the model.
STORED = 1
ADDEND = Marks(addend=True)  # a sum that constant_fold merges with the next


def position_free(slab: Array, axis: int) -> bool:
    """Whether the constants are one number a unit, the same at every position of the other axes."""
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
    total = Value(sweep.fresh(out.name, "bias"), out.shape, out.dtype)
    marks = NO_MARKS if isinstance(addend, str) else ADDEND
    sweep.emit(Node("pointwise", (out.name, addend), (total,), {"fn": "add"}, path=node.path, marks=marks))
    sweep.redirected[out.name] = total.name


def fold_into_linear(
    sweep: Sweep, node: Node, x: str, units: Sequence[int], slab: Array, mix: tuple[Sequence[int], Tensor] | None = None
) -> str:
    """y = W x + b with units of x replaced: see the module. Returns what happened, for the report."""
    axis, w_in = node.attrs["axis"], node.attrs["w_in"]
    weight, bias = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
    assert isinstance(weight, Tensor)
    keep = complement(units, weight.shape[w_in])
    if mix is not None:
        attrs = {"axis": w_in, "units": tuple(units), "parents": tuple(mix[0])}
        folded = apply("fold_columns", (weight, mix[1]), attrs, weight.shape, weight.dtype)
    else:
        folded = weight
    smaller = node.with_inputs((sweep.select(x, axis, keep), take(folded, w_in, keep), bias))
    if not slab.any():
        sweep.emit(smaller)
        return "nothing to add, the constants are 0"
    outs, alpha = weight.shape[node.attrs["w_out"]], node.attrs.get("alpha", 1.0)
    if position_free(slab, axis):
        values = np.broadcast_to(slab.reshape(-1), len(units))
        attrs = {"axis": w_in, "units": tuple(units)}
        vector = apply("weigh_columns", (weight, literal(values)), attrs, (outs,), weight.dtype)
        beta = node.attrs.get("beta", 1.0)
        if node.marks.takes_bias and not isinstance(bias, str) and beta:
            summed = add_tensors(bias, vector, alpha / beta, weight.dtype)
            sweep.emit(smaller.with_inputs((*smaller.inputs[:2], summed)))
            return "constants into the bias"
        trailing = len(node.output.shape) - axis - 1
        if trailing:
            shape = (outs, *([1] * trailing))
            vector = apply("reshape", (vector,), {"shape": shape}, shape, vector.dtype)
        add_after(sweep, smaller, add_tensors(None, vector, alpha, weight.dtype) if alpha != 1.0 else vector)
        return "constants into a bias"
    values = spread(slab, axis, len(units))
    attrs = {"axis": axis, "w_in": w_in, "w_out": node.attrs["w_out"], "alpha": alpha}
    shape = tuple(int(n) for n in resized(values.shape, axis, outs))
    addend = apply("linear", (literal(values), take(weight, w_in, units)), attrs, shape, weight.dtype)
    add_after(sweep, smaller, addend)
    return f"constants that differ by position into an added {list(shape)} buffer"


def fold_into_mean(sweep: Sweep, node: Node, x: str, axis: int, units: Sequence[int], slab: Array) -> str:
    """mean(x) over C units of which those in S are c -> mean(x_K) · |K| / C + Σ c / C; a sum likewise, without the factor."""
    size, out = int(sweep.values[x].shape[axis]), node.output
    keep = complement(units, size)
    mean = node.attrs["fn"] == "mean"
    sweep.emit(node.with_inputs((sweep.select(x, axis, keep), *node.inputs[1:])))
    if mean:
        scaled = Value(sweep.fresh(out.name, "scaled"), out.shape, out.dtype)
        sweep.emit(Node("pointwise", (out.name, literal(len(keep) / size)), (scaled,), {"fn": "mul"}, path=node.path))
        sweep.redirected[out.name], out = scaled.name, scaled
    if not slab.any():
        return "nothing to add, the constants are 0"
    added = slab.sum(axis=axis, keepdims=not node.attrs.get("drop")) / (size if mean else 1)
    total = Value(sweep.fresh(out.name, "bias"), out.shape, out.dtype)
    addend = add_tensors(None, literal(added), dtype=out.dtype)
    sweep.emit(Node("pointwise", (out.name, addend), (total,), {"fn": "add"}, path=node.path, marks=ADDEND))
    sweep.redirected[node.output.name] = total.name
    return "constants into an added number"


def leave_out_of_norm(sweep: Sweep, node: Node, x: str, axis: int, units: Sequence[int], sources: Sequence[int]) -> str:
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
    attrs = {**node.attrs, "eps": node.attrs["eps"] * share}
    sweep.emit(replace(node, inputs=(sweep.select(x, axis, keep), scale), outputs=(smaller,), attrs=attrs))
    places = {unit: i for i, unit in enumerate(keep)}
    spread = Value(sweep.fresh(out.name, "spread"), out.shape, out.dtype)
    index = tuple(places.get(unit, 0) for unit in range(size))
    sweep.emit(Node("select", (out.name,), (spread,), {"axis": axis, "keep": index}))
    nothing = np.zeros([len(units) if d == axis else 1 for d in range(len(out.shape))])
    sweep.redirected[out.name] = sweep.do(spread, axis, units, nothing, sources)
    return "left out, the constants are 0"


def fold_into_rows(
    sweep: Sweep, node: Node, rows: Node, x: str, x_axis: int, axis: int, units: Sequence[int], slab: Array
) -> str:
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
    return "constants into a table of sums"


def conv_shape(node: Node, spatial: Sequence[int]) -> tuple[int, ...]:
    """The spatial size of a convolution's result."""
    weight = node.inputs[1]
    assert isinstance(weight, Tensor)
    a, kernel = node.attrs, weight.shape[2:]
    found = []
    extra = a.get("output_padding", (0,) * len(kernel))
    pads = conv_pads(a, spatial, kernel)
    for n, k, s, d, (lo, hi), more in zip(spatial, kernel, a["stride"], a["dilation"], pads, extra, strict=True):
        reach = d * (k - 1) + 1
        found.append((n - 1) * s - lo - hi + reach + more if a.get("transposed") else (n + lo + hi - reach) // s + 1)
    return tuple(found)


def has_border(node: Node) -> bool:
    """Whether a constant plane comes out as anything but a constant plane."""
    pad = node.attrs["pad"]
    return bool(node.attrs.get("transposed")) or isinstance(pad, str) or any(lo or hi for lo, hi in pad)


def fold_into_conv(
    sweep: Sweep, node: Node, x: str, units: Sequence[int], slab: Array, mix: tuple[Sequence[int], Tensor] | None = None
) -> Declined | str:
    """y = conv(x; W) + b with channels of x replaced: see the module. Returns what happened, for the report."""
    axis, groups = node.attrs["axis"], node.attrs["groups"]
    weight, bias = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
    assert isinstance(weight, Tensor)
    if isinstance(bias, str):
        return Declined("its bias is computed at run time")
    spatial_dims = sweep.values[x].shape[axis + 1 :]
    if not position_free(slab, axis) and slab.any() and not all(isinstance(n, int) for n in spatial_dims):
        return Declined("the constants differ by position, and the number of positions is not fixed")
    transposed = bool(node.attrs.get("transposed"))
    w_in = 0 if transposed else 1
    channels = int(sweep.values[x].shape[axis])
    keep = complement(units, channels)
    folded = weight
    if mix is not None:
        attrs = {"axis": w_in, "units": tuple(units), "parents": tuple(mix[0]), "groups": 1 if transposed else groups}
        folded = apply("fold_columns", (weight, mix[1]), attrs, weight.shape, weight.dtype)
    smaller = node.with_inputs((sweep.select(x, axis, keep), conv_columns(folded, node, keep), bias))
    if not slab.any():
        sweep.emit(smaller)
        return "nothing to add, the constants are 0"
    outs, kernel = int(node.output.shape[axis]), weight.shape[2:]
    if not position_free(slab, axis):
        spatial = tuple(int(n) for n in spatial_dims)
        full = np.zeros((*slab.shape[:axis], channels, *spatial))
        full[(slice(None),) * axis + (list(units),)] = slab
        shape = (*slab.shape[:axis], outs, *conv_shape(node, spatial))
        addend = apply("conv", (literal(full), weight), pure_conv(node), shape, weight.dtype)
        add_after(sweep, smaller, addend)
        return f"constants that differ by position into an added {list(shape)} buffer"
    bundle = kernel_of_constants(node, units, np.broadcast_to(slab.reshape(-1), len(units)), outs)
    if not has_border(node):
        if math.prod(kernel) > 1:
            over = tuple(range(2, 2 + len(kernel)))
            bundle = apply("along", (bundle,), {"fn": "sum", "axes": over, "drop": True}, (outs, 1), weight.dtype)
        vector = apply("reshape", (bundle,), {"shape": (outs,)}, (outs,), weight.dtype)
        sweep.emit(smaller.with_inputs((*smaller.inputs[:2], add_tensors(bias, vector, dtype=weight.dtype))))
        return "constants into the bias"
    lead = (1,) * axis
    plain = {**pure_conv(node), "groups": 1}
    fixed = all(isinstance(n, int) for n in spatial_dims)
    spatial = tuple(int(n) for n in spatial_dims) if fixed else ()
    shape = (*lead, outs, *conv_shape(node, spatial)) if fixed else ()
    if fixed and math.prod(shape) <= STORED * math.prod(weight.shape):
        ones = literal(np.ones((*lead, 1, *spatial)))
        add_after(sweep, smaller, apply("conv", (ones, bundle), plain, shape, weight.dtype))
        return f"constants into an added {list(shape)} buffer, exact at the zero-padded border"
    # A batch of one suffices: the plane is the same for every sample.
    plane = plane_of_ones(sweep, node, x)
    border = Value(sweep.fresh(node.name, "border"), (*lead, outs, *node.output.shape[axis + 1 :]), node.output.dtype)
    sweep.emit(Node("conv", (plane, bundle, None), (border,), plain, path=node.path))
    add_after(sweep, smaller, border.name)
    return "constants into a run-time plane, exact at the zero-padded border of any size"


def plane_of_ones(sweep: Sweep, node: Node, x: str) -> str:
    """Ones of the spatial size of x, a batch of one. The size is read where it first appears, so that x itself may go."""
    axis, shape = node.attrs["axis"], sweep.values[x].shape
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
    weight, groups, transposed = node.inputs[1], node.attrs["groups"], bool(node.attrs.get("transposed"))
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


def pure_conv(node: Node) -> dict[str, object]:
    names = ("axis", "stride", "pad", "dilation", "groups", "transposed", "output_padding")
    return {name: node.attrs[name] for name in names if name in node.attrs}


def conv_columns(weight: Tensor, node: Node, keep: Sequence[int]) -> Tensor:
    """The weight for the input channels that stay. In a grouped convolution every group keeps equally many."""
    groups = node.attrs["groups"]
    if node.attrs.get("transposed"):
        return take(weight, 0, keep)
    if groups == 1:
        return take(weight, 1, keep)
    per = weight.shape[1]
    local = np.asarray(keep).reshape(groups, -1) % per
    shape = (weight.shape[0], local.shape[1], *weight.shape[2:])
    attrs = {"keep": tuple(map(tuple, local.tolist()))}
    return apply("select_in_groups", (weight,), attrs, shape, weight.dtype)
