"""A norm across units of which some are constant: its statistics follow from the units that stay.

Of n units those in S are c, with mean c̄ and sum of squared deviations D. Let μ and σ² be mean and variance over all n units:

    μ = (Σ_K x + Σ_S c) / n        n·σ² = Σ_K (x − μ)² + |S|·(c̄ − μ)² + D

So a layer norm is an RMS norm over the centred units that stay and one or two additional numbers, the *carriers*:

    z = [x_K − μ,  √|S|·(c̄ − μ),  √D]        n·σ² = Σ z²        y_K = γ_K z_K / √(σ² + ε) + β_K

The results for S still vary, but they are an affine function of the two carriers after the norm, g = z_carrier / √(σ² + ε):

    y_s = γ_s·(g₁ / √|S| + (c_s − c̄) / √D · g₂) + β_s

so an affine do expresses them, and readers absorb it: their columns of S become two. The second carrier is needed only if the
constants differ. An RMS norm needs one carrier, √(Σ c²), and none for zeros, which stay 0.

Over w instead of n units, ε and the square of the weight are n/w times as large.

A group norm likewise. Whole groups of constants become constants, and whole groups that nobody reads go. Where a group keeps some
units, mean and variance follow from those and from known numbers (`ir/ops/group_norm.py`), and the results for S are affine in two
numbers for each group, that stand as units of their own:

    y_s = γ_s·((c̄_g − μ_g)·r_g + (c_s − c̄_g)·r_g) + β_s        r_g = 1 / √(σ²_g + ε)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cmrc.ir.axes import count_by_group, resized
from cmrc.ir.graph import Array, Marks, Node, Operand, Tensor, Value, apply, attributes, literal, take
from cmrc.ir.ops.functions import AlongAttrs
from cmrc.ir.tensors import constant
from cmrc.passes.rewriting.absorb import Known, sink
from cmrc.passes.rewriting.rewriter import (
    Declined,
    Rise,
    RuleOutcome,
    Selection,
    Sweep,
    complement,
    parameter_axis,
    past,
    shrunk,
    taken,
)

HALF = ("float16", "bfloat16")  # runtimes compute norms of these types in float32


def fold_into_norm(sweep: Sweep, node: Node, fact: Known) -> RuleOutcome:
    """See the module's docstring."""
    attrs, axis = attributes(node, AlongAttrs), fact.axis
    if any(isinstance(operand, str) for operand in node.inputs[1:]):
        return Declined("one of its parameters is computed at run time")
    slab = fact.full()
    if slab.size != len(fact.units):
        return Declined(
            "the constants differ by position, so two numbers cannot represent them in a norm across the units"
        )
    constants = slab.reshape(-1)
    if attrs["fn"] == "rms_norm" and not constants.any():
        return _leave_out(sweep, node, fact)
    keep = complement(fact.units, int(node.output.shape[axis]))
    kept = sweep.select(fact.source, axis, keep)
    if attrs["fn"] == "rms_norm":
        root = math.sqrt(float(np.square(constants).sum()))
        rebuilt = (constants / root)[:, None]
        z = _padded(sweep, node, kept, axis, root)
    else:
        z, rebuilt = _centred(sweep, node, kept, axis, constants)
    _normalise(sweep, node, z, fact, keep, rebuilt)
    return past(f"as an affine function of {rebuilt.shape[1]} numbers beside the units that stay")


def _centred(sweep: Sweep, node: Node, kept: str, axis: int, constants: Array) -> tuple[str, Array]:
    """[x_K − μ, carriers], and what rebuilds c_s − μ from the carriers."""
    before, size = sweep.values[kept], int(node.output.shape[axis])
    count, centre = len(constants), float(constants.mean())
    deviations = constants - centre
    spread = math.sqrt(float(np.square(deviations).sum()))
    share, shift = (size - count) / size, float(constants.sum()) / size  # μ = share · mean(x_K) + shift
    root = math.sqrt(count)
    carriers = [(-root * share, root * (centre - shift)), (0.0, spread)][: 2 if spread else 1]
    rebuilt = np.stack([np.full(count, 1 / root), deviations / (spread or 1.0)], axis=1)[:, : len(carriers)]
    dtype = "float32" if before.dtype in HALF else before.dtype
    if dtype != before.dtype:
        wide = replace(before, dtype=dtype)
        kept = _emit(sweep, node, "pointwise", (kept,), wide, "wide", {"fn": "cast", "dtype": dtype})
        before = sweep.values[kept]
    one = Value("", resized(before.shape, axis, 1), dtype)
    mean = _emit(sweep, node, "along", (kept,), one, "mean", {"fn": "mean", "axes": (axis,)})
    mu = _affine(sweep, node, mean, literal(share), literal(shift), one, "mu")
    centred = _emit(sweep, node, "pointwise", (kept, mu), before, "centred", {"fn": "sub"})
    scale, offset = (_along(np.asarray(part), axis, len(before.shape)) for part in zip(*carriers, strict=True))
    some = replace(one, shape=resized(before.shape, axis, len(carriers)))
    carried = _affine(sweep, node, mean, scale, offset, some, "carried")
    both = replace(one, shape=resized(before.shape, axis, size - count + len(carriers)))
    return _emit(sweep, node, "concat", (centred, carried), both, "joined", {"axis": axis}), rebuilt


def _padded(sweep: Sweep, node: Node, kept: str, axis: int, number: float) -> str:
    """[x_K, number]."""
    value = sweep.values[kept]
    longer = replace(value, shape=resized(value.shape, axis, int(value.shape[axis]) + 1))
    pads = tuple((0, int(d == axis)) for d in range(len(value.shape)))
    return _emit(
        sweep, node, "along", (kept,), longer, "joined", {"fn": "pad", "axes": (axis,), "pads": pads, "value": number}
    )


def _normalise(sweep: Sweep, node: Node, z: str, fact: Known, keep: Sequence[int], rebuilt: Array) -> None:
    """The RMS norm of z, laid out over n positions again: the carriers are at the first units of S."""
    out, axis, eps = node.output, fact.axis, attributes(node, AlongAttrs)["eps"]
    count = rebuilt.shape[1]
    width = len(keep) + count
    share = int(out.shape[axis]) / width
    weight, bias = (*node.inputs[1:], None, None)[:2]
    assert not isinstance(weight, str) and not isinstance(bias, str)
    scale = _with_carriers(weight, keep, count, math.sqrt(share))
    narrow = replace(out, shape=resized(out.shape, axis, width), dtype=sweep.values[z].dtype)
    attrs = {**node.attrs, "fn": "rms_norm", "eps": eps * share}
    if "align" in attrs:
        attrs["align"] = (None, (axis,))
    normal = _norm(sweep, node, (z, scale), narrow, attrs)
    if bias is not None:
        offset = _placed(_with_carriers(bias, keep, count, 1.0, fill=0.0), axis, len(out.shape))
        normal = _emit(sweep, node, "pointwise", (normal, offset), narrow, "shifted", {"fn": "add"})
    if narrow.dtype != out.dtype:
        cast = {"fn": "cast", "dtype": out.dtype}
        normal = _emit(sweep, node, "pointwise", (normal,), replace(narrow, dtype=out.dtype), "cast", cast)
    carriers = fact.units[:count]
    places = {unit: i for i, unit in enumerate((*keep, *carriers))}
    spread = _spread(sweep, normal, out, axis, places)
    gamma = 1.0 if weight is None else constant(take(weight, len(weight.shape) - 1, fact.units)).reshape(-1, 1)
    beta = (
        np.zeros(len(fact.units)) if bias is None else constant(take(bias, len(bias.shape) - 1, fact.units)).reshape(-1)
    )
    units = {"axis": axis, "units": fact.units, "parents": tuple(carriers)}
    slab = literal(beta.reshape([-1 if d == axis else 1 for d in range(len(out.shape))]))
    output = Value(sweep.fresh(out.name, "do"), out.shape, out.dtype)
    marks = Marks(sources=fact.sources)
    sweep.emit(Node("do", (spread.name, slab, literal(gamma * rebuilt)), (output,), units, marks=marks))
    sweep.redirected[out.name] = output.name


def _leave_out(sweep: Sweep, node: Node, fact: Known) -> RuleOutcome:
    """x / √(mean x² + ε) · w with x_S = 0: over the k of n units that stay; S stays 0, which the readers absorb."""
    out, axis, weight = node.output, fact.axis, (*node.inputs, None)[1]
    size = int(out.shape[axis])
    keep = complement(fact.units, size)
    share = size / len(keep)
    assert not isinstance(weight, str)
    scale = _with_carriers(weight, keep, 0, math.sqrt(share))
    smaller = replace(out, shape=resized(out.shape, axis, len(keep)))
    attrs = {**node.attrs, "eps": attributes(node, AlongAttrs)["eps"] * share}
    normal = _norm(sweep, node, (sweep.select(fact.source, axis, keep), scale), smaller, attrs)
    spread = _spread(sweep, normal, out, axis, {unit: i for i, unit in enumerate(keep)})
    nothing = np.zeros([len(fact.units) if d == axis else 1 for d in range(len(out.shape))])
    sweep.redirected[out.name] = sweep.do(spread, axis, fact.units, nothing, fact.sources)
    return taken("left out, the constants are 0")


# ---------------------------------------------------------------- group norms


def fold_into_group_norm(sweep: Sweep, node: Node, fact: Known) -> RuleOutcome:
    """Constants along its units."""
    attrs, out, axis = attributes(node, AlongAttrs), node.output, fact.axis
    slab = fact.full()
    if axis != 1:
        return Declined("it mixes positions along the replaced axis")
    if any(isinstance(operand, str) for operand in node.inputs[1:]):
        return Declined("one of its parameters is computed at run time")
    if slab.size != len(fact.units):
        return Declined("the constants differ by position, so two numbers cannot represent them in the norm of a group")
    each = int(out.shape[axis]) // attrs["groups"]
    known = _of_groups(np.asarray(fact.units) // each, slab.reshape(-1), attrs["groups"])
    gamma, beta = (_numbers(node, position, fact) for position in (1, 2))
    whole = known.counts == each
    root = np.sqrt(known.squares / each + attrs["eps"])
    settled = np.where(whole[known.of_unit], gamma * known.deviations / root[known.of_unit], 0.0) + beta
    settled = settled.reshape([-1 if d == axis else 1 for d in range(len(out.shape))])
    if whole[known.of_unit].all():
        return sink(sweep, node, {0: fact}, axis, fact.units, settled)
    left = np.flatnonzero(~whole)
    shifted, spread = ([g for g in left if some[g]] for some in (known.counts, known.squares))
    own = [
        [u for u, g in zip(fact.units, known.of_unit, strict=True) if g == group] for group in range(attrs["groups"])
    ]
    carriers = (*(own[g][0] for g in shifted), *(own[g][1] for g in spread))
    keep = complement(fact.units, int(out.shape[axis]))
    numbers = {
        "counts": tuple((each - known.counts[left]).tolist()),
        "known": tuple(known.counts[left].tolist()),
        "centres": tuple(known.centres[left].tolist()),
        "squares": tuple(known.squares[left].tolist()),
    }
    norm = _known_norm(sweep, node, fact, keep, len(carriers), numbers)
    rows = _spread(sweep, norm, out, axis, {unit: i for i, unit in enumerate((*keep, *carriers))})
    factors = [(g, 1.0) for g in shifted] + [(g, known.deviations) for g in spread]
    mix = np.stack([np.where(known.of_unit == g, gamma * factor, 0.0) for g, factor in factors], axis=1)
    output = Value(sweep.fresh(out.name, "do"), out.shape, out.dtype)
    units = {"axis": axis, "units": fact.units, "parents": carriers}
    inputs = (rows.name, literal(settled), literal(mix))
    sweep.emit(Node("do", inputs, (output,), units, marks=Marks(sources=fact.sources)))
    sweep.redirected[out.name] = output.name
    return past(f"as an affine function of {len(carriers)} numbers beside the units that stay")


@dataclass(frozen=True, slots=True)
class _Grouped:
    """The constants by group: how many, their mean, their sum of squared deviations; by unit, its group and its deviation."""

    counts: Array
    centres: Array
    squares: Array
    of_unit: Array
    deviations: Array


def _of_groups(of_unit: Array, values: Array, groups: int) -> _Grouped:
    centres, squares, deviations = np.zeros(groups), np.zeros(groups), np.zeros(len(values))
    for group in np.unique(of_unit):
        here = of_unit == group
        centres[group] = values[here].mean()
        if np.ptp(values[here]):
            deviations[here] = values[here] - centres[group]
            squares[group] = np.square(deviations[here]).sum()
    return _Grouped(np.bincount(of_unit, minlength=groups), centres, squares, of_unit, deviations)


def _known_norm(
    sweep: Sweep, node: Node, fact: Known, keep: Sequence[int], carriers: int, numbers: Mapping[str, object]
) -> str:
    """The norm of the units that stay, and behind them the carriers."""
    attrs, out = attributes(node, AlongAttrs), node.output
    parameters = [
        None if operand is None else _with_carriers(operand, keep, carriers, 1.0, fill=1.0 - i)
        for i, operand in enumerate(node.inputs[1:])
        if not isinstance(operand, str)
    ]
    norm = Value(sweep.fresh(node.name, "norm"), resized(out.shape, fact.axis, len(keep) + carriers), out.dtype)
    about = {"fn": "known_group_norm", "axes": attrs["axes"], "eps": attrs["eps"], **numbers}
    align = {"align": (None, *((1,),) * len(parameters))} if parameters else {}
    inputs = (sweep.select(fact.source, fact.axis, keep), *parameters)
    sweep.emit(Node("along", inputs, (norm,), {**about, **align}, path=node.path))
    return norm.name


def rise_through_group_norm(rise: Rise, node: Node, wanted: Selection) -> RuleOutcome:
    """Whole groups: the others are normalised without them."""
    axis, keep = wanted.axis, wanted.keep
    groups = attributes(node, AlongAttrs)["groups"]
    each = int(node.output.shape[axis]) // groups
    counts = count_by_group(keep, groups, each)
    if axis != 1 or not keep.ordered or not np.isin(counts, (0, each)).all():
        return Declined("the statistics of a group need all of its units: only whole groups can go")
    inputs = [rise.select(node.inputs[0], axis, keep)]
    for i, operand in enumerate(node.inputs[1:], start=1):
        local = None if operand is None else parameter_axis(node, i, rise.shape(operand), axis, len(node.output.shape))
        inputs.append(operand if local is None else rise.select(operand, local, keep))
    return shrunk(node, inputs, axis, keep, groups=int(np.count_nonzero(counts)))


def _numbers(node: Node, position: int, fact: Known) -> Array:
    """A parameter of the replaced units; without one, 1 for the weight and 0 for the bias."""
    operand = node.inputs[position] if position < len(node.inputs) else None
    if not isinstance(operand, Tensor):
        return np.full(len(fact.units), 2.0 - position)
    return constant(take(operand, 0, fact.units)).reshape(-1)


# ---------------------------------------------------------------- what these are made of


def _emit(
    sweep: Sweep, node: Node, op: str, inputs: Sequence[Operand], like: Value, tag: str, attrs: Mapping[str, object]
) -> str:
    """A new node on the way from `node`'s operand to its result."""
    output = replace(like, name=sweep.fresh(node.name, tag))
    sweep.emit(Node(op, tuple(inputs), (output,), attrs, path=node.path))
    return output.name


def _norm(sweep: Sweep, node: Node, inputs: Sequence[Operand], output: Value, attrs: Mapping[str, object]) -> str:
    """An RMS norm: the host's own over fewer units, if the node is one and can represent ε, which ONNX stores as a float32."""
    if node.origin and output.dtype != "float64" and attributes(node, AlongAttrs)["fn"] == "rms_norm":
        sweep.emit(replace(node, inputs=tuple(inputs), outputs=(output,), attrs=attrs))
        return output.name
    return _emit(sweep, node, "along", inputs, output, "norm", attrs)


def _affine(sweep: Sweep, node: Node, x: str, scale: Tensor, offset: Tensor, like: Value, tag: str) -> str:
    """scale · x + offset; an offset of 0 is left out."""
    scaled = _emit(sweep, node, "pointwise", (x, scale), like, f"{tag}.scaled", {"fn": "mul"})
    if not constant(offset).any():
        return scaled
    return _emit(sweep, node, "pointwise", (scaled, offset), like, tag, {"fn": "add"})


def _along(numbers: Array, axis: int, rank: int) -> Tensor:
    return literal(numbers.reshape([-1, *[1] * (rank - axis - 1)]))


def _placed(vector: Tensor, axis: int, rank: int) -> Tensor:
    """A vector along an axis of a value."""
    if axis == rank - 1:
        return vector
    shape = (vector.shape[-1], *[1] * (rank - axis - 1))
    return apply("reshape", (vector,), {"shape": shape}, shape, vector.dtype)


def _with_carriers(
    vector: Tensor | None, keep: Sequence[int], count: int, factor: float, *, fill: float = 1.0
) -> Tensor:
    """A parameter for the units that stay and for the carriers, times a factor."""
    if vector is None:
        return literal(np.full(len(keep) + count, factor * fill))
    some = take(vector, len(vector.shape) - 1, keep)
    if count:
        ones = literal(np.full((*some.shape[:-1], count), fill))
        some = apply(
            "concat", (some, ones), {"axis": len(some.shape) - 1}, (*some.shape[:-1], len(keep) + count), vector.dtype
        )
    if factor == 1.0:
        return some
    return apply(
        "pointwise", (some, literal(np.full(len(keep) + count, factor))), {"fn": "mul"}, some.shape, vector.dtype
    )


def _spread(sweep: Sweep, name: str, out: Value, axis: int, places: dict[int, int]) -> Value:
    """The result of a norm over fewer units, laid out over all of them; at removed units stands any kept one."""
    spread = Value(sweep.fresh(out.name, "spread"), out.shape, out.dtype)
    index = tuple(places.get(unit, 0) for unit in range(int(out.shape[axis])))
    sweep.emit(Node("select", (name,), (spread,), {"axis": axis, "keep": index}))
    return spread
