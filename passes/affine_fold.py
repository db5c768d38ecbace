"""affine_fold: a `do(units := B · parents + β)` sinks through linear ops until an affine op absorbs it.

    %d = do(%a, β, B) {units=S, parents=P}        %s = select(%a) {keep=K}
    %y = linear(%d, W, b)                   ->    %y = linear(%s, W[:,K] with W[:,P] += W[:,S]·B, b + W[:,S]·β)

    %d = do(%h, β, B) {units=S, parents=P}        %n = batch_norm(%h)
    %n = batch_norm(%d)                     ->    %d = do(%n, β', B') {units=S, parents=P}

The relation holds between values before a scaling `a·x + d`; after it `B' = a_S B / a_P` and `β' = a_S β + d_S − B' d_P`,
so a parent whose scale is 0 cannot carry it. A nonlinear op stops it: f(B x) is not an affine function of f(x).
One forward sweep, one rule per op; absorbing is shared with constant_fold (absorb.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cmrc.ir.axes import blocks, compress, count_by_group, laid_out, spread
from cmrc.ir.graph import Array, Graph, Marks, Node, Tensor, Value, attributes, literal, take
from cmrc.ir.ops.affine import ConvAttrs, DoAttrs, LinearAttrs, SelectAttrs, slab_of
from cmrc.ir.ops.functions import ALONG, POINTWISE, AlongAttrs, PointwiseAttrs
from cmrc.ir.ops.layout import ConcatAttrs, TransposeAttrs
from cmrc.ir.tensors import constant, evaluate_op
from cmrc.passes.rewriting.absorb import fold_into_linear, fold_into_weights
from cmrc.passes.rewriting.convolution import fold_into_conv
from cmrc.passes.rewriting.rewriter import (
    JOINED,
    PAST,
    UNREAD,
    Declined,
    Log,
    Movement,
    Pass,
    Rewritten,
    RuleOutcome,
    Sinking,
    Sweep,
    combines_nothing,
    folded,
    is_affine_do,
    operand_axis,
    past,
    result_axis,
    sink_all,
)

# Relative to the parents' largest scale: dividing by less would lose the precision of the result.
SMALLEST_SCALE = 1e-6
# How much larger than the unit itself the numbers may be that cancel after a shift: their rounding errors do not cancel.
LARGEST_LOSS = 32.0


@dataclass(frozen=True, slots=True)
class Relation:
    """units := weight · parents + slab, along an axis. Each row of the weight serves `repeat` units in a row."""

    source: str
    axis: int
    units: tuple[int, ...]
    parents: tuple[int, ...]
    slab: Array
    weight: Array
    sources: tuple[int, ...]
    position: int = 0  # the operand of the node at which it has arrived
    alone: bool = True  # whether no other operand of that node is replaced this way

    @property
    def repeat(self) -> int:
        return len(self.units) // int(self.weight.shape[0])


Rule = Callable[[Sweep, Node, Relation], RuleOutcome]


def relation_of(node: Node) -> Relation:
    source, value, weight = node.inputs
    assert isinstance(source, str) and isinstance(value, Tensor) and isinstance(weight, Tensor)
    rank, attrs = len(node.output.shape), node.attrs
    slab = slab_of(constant(value), attrs["axis"], rank)
    slab = spread(slab, attrs["axis"], len(attrs["units"]))
    units, parents = tuple(attrs["units"]), tuple(attrs["parents"])
    return Relation(source, attrs["axis"], units, parents, slab, constant(weight), node.marks.sources)


def _sink(sweep: Sweep, node: Node, position: int, relation: Relation) -> Rewritten:
    inputs = tuple(relation.source if i == position else o for i, o in enumerate(node.inputs))
    sweep.emit(node.with_inputs(inputs))
    _put(sweep, node.output, relation)
    return PAST


def _put(sweep: Sweep, value: Value, relation: Relation) -> None:
    output = Value(sweep.fresh(value.name, "do"), value.shape, value.dtype)
    attrs = {"axis": relation.axis, "units": relation.units, "parents": relation.parents}
    tensors = (literal(compress(relation.slab, relation.axis)), literal(relation.weight))
    sweep.emit(Node("do", (value.name, *tensors), (output,), attrs, marks=Marks(sources=relation.sources)))
    sweep.redirected[value.name] = output.name


# ---------------------------------------------------------------- rules


def absorb_into_linear(sweep: Sweep, node: Node, relation: Relation) -> RuleOutcome:
    """W_P += W_S · B, b += W_S · β."""
    if isinstance(node.inputs[1], str) or relation.position != 0:
        return Declined("its weight is computed at run time")
    if relation.axis != attributes(node, LinearAttrs)["axis"]:
        return Declined("it acts along a different axis than the replacement")
    mix = (relation.parents, literal(relation.weight))
    outcome = fold_into_linear(sweep, node, relation.source, relation.units, relation.slab, mix)
    return outcome if isinstance(outcome, Declined) else _with_weight(outcome)


def absorb_into_conv(sweep: Sweep, node: Node, relation: Relation) -> RuleOutcome:
    """As `absorb_into_linear`, at every kernel position. Units and parents must be in the same group."""
    attrs = attributes(node, ConvAttrs)
    if isinstance(node.inputs[1], str) or relation.position != 0:
        return Declined("its weight is computed at run time")
    if relation.axis != attrs["axis"]:
        return Declined("it mixes positions along the replaced axis")
    groups = attrs["groups"]
    channels = int(sweep.shape(relation.source)[relation.axis])
    per = channels // groups
    if groups > 1:
        if attrs.get("transposed"):
            return Declined("a grouped transposed convolution cannot rebuild channels")
        if relation.repeat != 1:
            return Declined("a grouped convolution cannot rebuild blocks of channels")
        unit_group, parent_group = np.asarray(relation.units) // per, np.asarray(relation.parents) // per
        if np.any(relation.weight[unit_group[:, None] != parent_group[None, :]]):
            return Declined("a unit and its parents are in different groups")
        counts = count_by_group(relation.units, groups, per)
        if counts.min() != counts.max():
            return Declined("its groups would keep different numbers of channels")
    mix = (relation.parents, literal(relation.weight))
    outcome = fold_into_conv(sweep, node, relation.source, relation.units, relation.slab, mix)
    return outcome if isinstance(outcome, Declined) else _with_weight(outcome)


def _with_weight(outcome: Rewritten) -> Rewritten:
    return folded(f"{outcome.detail}, affine into the weight")


def sink_through_pointwise(sweep: Sweep, node: Node, relation: Relation) -> RuleOutcome:
    """f(x) = a·x + d with known a and d: x_S = B x_P + β becomes y_S = (a_S B / a_P) y_P + a_S β + d_S - (a_S B / a_P) d_P."""
    position, fn = relation.position, attributes(node, PointwiseAttrs)["fn"]
    if position not in POINTWISE[fn].affine_in:
        return Declined("it is not an affine function of the replaced units")
    if any(isinstance(o, str) for i, o in enumerate(node.inputs) if i != position):
        return Declined("its other operand is not a constant")
    if fn == "cast" and not attributes(node, PointwiseAttrs).get("dtype", "").startswith(("float", "bfloat")):
        return Declined("it is not an affine function of the replaced units")
    axis = result_axis(node, position, sweep.shape(relation.source), relation.axis)
    if node.output.shape[axis] != sweep.shape(relation.source)[relation.axis]:
        return Declined("the replaced axis is broadcast here")
    if fn in ("identity", "cast"):
        return _sink(sweep, node, position, relation)
    of_units = _scale_and_shift(node, position, axis, relation.units)
    of_parents = _scale_and_shift(node, position, axis, relation.parents)
    if of_units is None or of_parents is None:
        return Declined("its other operand differs by position")
    usual = _usual_sizes(node, axis, relation.parents)
    scaled = _scaled(relation, of_units, of_parents, usual, axis, len(node.output.shape))
    return scaled if isinstance(scaled, Declined) else _sink(sweep, node, position, scaled)


def _scale_and_shift(node: Node, position: int, axis: int, units: Sequence[int]) -> tuple[Array, Array] | None:
    """a and d of f(x) = a·x + d for some units, from f(0) and f(1); `None` if they differ by position."""
    rank = len(node.output.shape)
    operands: list[Array | None] = []
    for i, operand in enumerate(node.inputs):
        if i == position or operand is None or isinstance(operand, str):
            operands.append(None)
            continue
        local = operand_axis(node, i, operand.shape, axis)
        operands.append(constant(operand if local is None else take(operand, local, units)))
    results = []
    for probe in (0.0, 1.0):
        operands[position] = np.full((1,) * rank, probe)
        result = evaluate_op("pointwise", {**node.attrs, "rank": rank}, *operands)
        result = result.reshape((1,) * (rank - result.ndim) + result.shape)
        if any(n != 1 for i, n in enumerate(result.shape) if i != axis):
            return None
        results.append(np.broadcast_to(result.reshape(-1), len(units)))
    return results[1] - results[0], results[0]


def _usual_sizes(node: Node, axis: int, units: Sequence[int]) -> Array:
    """How large the arriving numbers are: a batch norm knows it; otherwise 1 is assumed."""
    if attributes(node, PointwiseAttrs)["fn"] != "batch_norm":
        return np.ones(len(units))
    sizes = np.zeros(len(units))
    for i, grown in ((3, np.abs), (4, np.sqrt)):
        operand = node.inputs[i]
        assert isinstance(operand, Tensor)  # otherwise its scale would be unknown
        local = operand_axis(node, i, operand.shape, axis)
        sizes += grown(constant(operand if local is None else take(operand, local, units)).reshape(-1))
    return sizes


def _scaled(
    relation: Relation,
    of_units: tuple[Array, Array],
    of_parents: tuple[Array, Array],
    usual: Array,
    axis: int,
    rank: int,
) -> Relation | Declined:
    """The relation between the results when units and parents are scaled and shifted: the formula of the rule."""
    (a_s, d_s), (a_p, d_p) = of_units, of_parents
    rows, columns = relation.weight.shape
    if not all(np.all(np.isfinite(part)) for part in (a_s, d_s, a_p, d_p)):
        return Declined("it scales or shifts the units without bound")
    if relation.repeat > 1:
        blocks_s, blocks_p = a_s.reshape(rows, -1), a_p.reshape(columns, -1)
        if np.any(blocks_s != blocks_s[:, :1]) or np.any(blocks_p != blocks_p[:, :1]):
            return Declined("it scales the positions within a unit's block differently")
        a_s, a_p = blocks_s[:, 0], blocks_p[:, 0]
    used = np.any(relation.weight != 0, axis=0)
    if np.any(np.abs(a_p[used]) <= SMALLEST_SCALE * np.abs(np.concatenate([a_p, a_s])).max()):
        return Declined("it scales a parent by (almost) 0")
    weight = a_s[:, None] * relation.weight / np.where(used, a_p, 1.0)[None, :]
    lost = np.einsum("sp,pr->sr", weight, d_p.reshape(columns, -1)).reshape(-1)
    cancelled = np.abs(weight) @ np.abs(d_p.reshape(columns, -1)).max(axis=1)
    itself = np.abs(a_s) * (np.abs(relation.weight) @ usual.reshape(columns, -1).max(axis=1))
    itself += np.abs(d_s).reshape(rows, -1).max(axis=1)
    if np.any(cancelled > LARGEST_LOSS * itself):
        return Declined("after its shift, the units would be small differences of large numbers")
    along = [len(relation.units) if i == axis else 1 for i in range(rank)]
    scale = np.repeat(a_s, relation.repeat).reshape(along)
    slab = scale * relation.slab.reshape((1,) * (rank - relation.slab.ndim) + relation.slab.shape)
    return replace(relation, axis=axis, slab=slab + (d_s - lost).reshape(along), weight=weight)


def sink_along_other_axes(sweep: Sweep, node: Node, relation: Relation) -> RuleOutcome:
    """A linear f over other axes that treats all units alike: B stays, and β goes through f as a constant."""
    fn, axes, attrs = attributes(node, AlongAttrs)["fn"], tuple(attributes(node, AlongAttrs)["axes"]), node.attrs
    if relation.axis in axes:
        return Declined("it mixes the units with each other")
    if not ALONG[fn].linear or (fn == "pad" and attrs["value"] != 0):
        return Declined("it is not an affine function of the replaced units")
    if combines_nothing(sweep, node, relation.source):
        return Declined("it combines an axis of size 0")
    axis = relation.axis - sum(a < relation.axis for a in axes) if attrs.get("drop") else relation.axis
    slab = compress(relation.slab, relation.axis)
    if not np.any(slab) or (ALONG[fn].maps_constants_to_themselves(attrs) and all(slab.shape[a] == 1 for a in axes)):
        result = slab.squeeze(axis=axes) if attrs.get("drop") else slab
    elif ALONG[fn].meaning is None:
        return Declined("its constant part differs by position")
    else:
        everywhere = laid_out(slab, sweep.shape(relation.source), axes)
        if isinstance(everywhere, str):
            return Declined(f"its constant part {everywhere}")
        result = compress(evaluate_op("along", attrs, everywhere), axis)
    return _sink(sweep, node, 0, replace(relation, axis=axis, slab=result))


def sink_through_reshape(sweep: Sweep, node: Node, relation: Relation) -> RuleOutcome:
    """A unit that becomes a block keeps its relation, position by position."""
    before, after = sweep.shape(relation.source), node.output.shape
    units = blocks(before, after, relation.axis, relation.units)
    parents = blocks(before, after, relation.axis, relation.parents)
    if isinstance(units, str) or isinstance(parents, str):
        return Declined(units if isinstance(units, str) else str(parents))
    axis, places = units
    slab = relation.slab
    if any(n != 1 for i, n in enumerate(slab.shape) if i != relation.axis):
        return Declined("its constant part differs by position")
    spread = [1] * len(after)
    spread[axis] = places.size
    result = np.repeat(slab.reshape(-1), places.shape[1]).reshape(spread)
    where = tuple(int(i) for i in places.reshape(-1))
    origin = tuple(int(i) for i in parents[1].reshape(-1))
    return _sink(sweep, node, 0, replace(relation, axis=axis, units=where, parents=origin, slab=result))


def sink_through_transpose(sweep: Sweep, node: Node, relation: Relation) -> RuleOutcome:
    perm = attributes(node, TransposeAttrs)["perm"]
    return _sink(
        sweep, node, 0, replace(relation, axis=perm.index(relation.axis), slab=np.transpose(relation.slab, perm))
    )


def sink_through_concat(sweep: Sweep, node: Node, relation: Relation) -> RuleOutcome:
    """Along the units, positions shift. One replaced part at a time; the next sweep handles the next one."""
    position = relation.position
    if relation.axis != attributes(node, ConcatAttrs)["axis"]:
        return Declined("the concatenation is along another axis")
    sizes = [sweep.shape(operand)[relation.axis] for operand in node.inputs]
    if not all(isinstance(n, int) for n in sizes):
        return Declined("the size of a part is known only at run time")
    offset = sum(int(n) for n in sizes[:position])
    shifted = replace(
        relation, units=tuple(u + offset for u in relation.units), parents=tuple(p + offset for p in relation.parents)
    )
    return _sink(sweep, node, position, shifted)


def sink_through_select(sweep: Sweep, node: Node, relation: Relation) -> RuleOutcome:
    """Units that are not read disappear; the parents of the others must be read too."""
    attrs = attributes(node, SelectAttrs)
    axis, keep = attrs["axis"], attrs["keep"]
    if axis != relation.axis:
        slab = relation.slab
        slab = slab if slab.shape[axis] == 1 else np.take(slab, keep, axis=axis)
        return _sink(sweep, node, 0, replace(relation, slab=slab))
    where = {u: i for i, u in enumerate(keep)}
    blocks_of_units = [relation.units[i : i + relation.repeat] for i in range(0, len(relation.units), relation.repeat)]
    rows = [r for r, block in enumerate(blocks_of_units) if any(u in where for u in block)]
    units = [u for r in rows for u in blocks_of_units[r]]
    if not rows:
        sweep.emit(node.with_inputs((relation.source,)))
        return UNREAD
    used = np.flatnonzero(np.any(relation.weight[rows] != 0, axis=0))
    parents = [relation.parents[p * relation.repeat + k] for p in used for k in range(relation.repeat)]
    if any(u not in where for u in units) or any(p not in where for p in parents):
        return Declined("it drops parents from which the units are rebuilt")
    if sum(k in set(units) for k in keep) > len(units):
        return Declined("it repeats the units")
    chosen = [r * relation.repeat + k for r in rows for k in range(relation.repeat)]
    if not parents:
        sweep.emit(node.with_inputs((relation.source,)))
        sweep.put_do(
            node.output, axis, [where[u] for u in units], np.take(relation.slab, chosen, axis=axis), relation.sources
        )
        return past("its remaining part is constant")
    reduced = replace(
        relation,
        units=tuple(where[u] for u in units),
        parents=tuple(where[p] for p in parents),
        weight=relation.weight[rows][:, used],
        slab=np.take(relation.slab, chosen, axis=axis),
    )
    return _sink(sweep, node, 0, reduced)


def sink_through_do(sweep: Sweep, node: Node, relation: Relation) -> RuleOutcome:
    """The later do wins if both name a unit. Two affine do's become one if no unit of one is a parent in the other."""
    attrs = attributes(node, DoAttrs)
    if attrs["axis"] != relation.axis:
        return Declined("there is already a replacement along another axis here")
    here = set(attrs["units"])
    if set(attrs.get("parents", ())) & set(relation.units):
        return Declined("the parents of an affine replacement are themselves replaced")
    if here >= set(relation.units):
        sweep.emit(node.with_inputs((relation.source, *node.inputs[1:])))
        return Rewritten(Movement.UNREAD, "past, all of its units are replaced again")
    if not is_affine_do(node):  # that one goes first, or they would swap places forever
        return Declined("there is already a replacement by constants here")
    if here & (set(relation.units) | set(relation.parents)):
        return Declined("there is already a replacement of the same units here")
    return _join(sweep, node, relation)


def _join(sweep: Sweep, node: Node, relation: Relation) -> RuleOutcome:
    """Two affine do's become one: block rows, the union of the parents."""
    other = relation_of(node)
    if other.repeat != 1 or relation.repeat != 1:
        return Declined("there is already an affine replacement of blocks here")
    parents = tuple(dict.fromkeys((*relation.parents, *other.parents)))
    weight = np.zeros((len(relation.units) + len(other.units), len(parents)))
    column = {p: i for i, p in enumerate(parents)}
    weight[: len(relation.units), [column[p] for p in relation.parents]] = relation.weight
    weight[len(relation.units) :, [column[p] for p in other.parents]] = other.weight
    shape = [max(a, b) for a, b in zip(relation.slab.shape, other.slab.shape, strict=True)]
    parts = []
    for slab, count in ((relation.slab, len(relation.units)), (other.slab, len(other.units))):
        parts.append(np.broadcast_to(slab, [count if i == relation.axis else n for i, n in enumerate(shape)]))
    joined = Relation(
        relation.source,
        relation.axis,
        (*relation.units, *other.units),
        parents,
        np.concatenate(parts, axis=relation.axis),
        weight,
        tuple(sorted({*relation.sources, *other.sources})),
    )
    attrs = {**node.attrs, "units": joined.units, "parents": joined.parents}
    tensors = (literal(compress(joined.slab, joined.axis)), literal(joined.weight))
    marks = replace(node.marks, sources=joined.sources)
    sweep.emit(replace(node, inputs=(joined.source, *tensors), attrs=attrs, marks=marks))
    return JOINED


def read_shape_only(sweep: Sweep, node: Node, relation: Relation) -> RuleOutcome:
    """An op that reads sizes, not values, does not see the do."""
    inputs = [
        relation.source if isinstance(o, str) and is_affine_do(sweep.producers.get(o)) else o for o in node.inputs
    ]
    sweep.emit(node.with_inputs(inputs))
    return PAST


def stop(sweep: Sweep, node: Node, relation: Relation) -> RuleOutcome:
    if node.marks.shape_only is not None:
        return read_shape_only(sweep, node, relation)
    if node.marks.weighed and relation.position == 0:
        mix = (relation.parents, literal(relation.weight))
        return fold_into_weights(sweep, node, relation.source, relation.axis, relation.units, relation.slab, mix)
    return Declined(node.marks.why or f"{node.kind} is not an op that replacements can pass")


RULES: dict[str, Rule] = {
    "linear": absorb_into_linear,
    "conv": absorb_into_conv,
    "pointwise": sink_through_pointwise,
    "along": sink_along_other_axes,
    "reshape": sink_through_reshape,
    "transpose": sink_through_transpose,
    "concat": sink_through_concat,
    "select": sink_through_select,
    "do": sink_through_do,
    "plane": read_shape_only,
}


def arriving(sweep: Sweep, node: Node, dos: Mapping[int, Node]) -> Relation:
    position, do = next(iter(dos.items()))
    alone = len({other.name for other in dos.values()}) == 1
    return replace(relation_of(do), position=position, alone=alone)


def several(sweep: Sweep, node: Node, relation: Relation) -> RuleOutcome:
    return Declined("several operands are replaced by affine functions")


def rule_for(node: Node, relation: Relation) -> Callable[[Sweep, Node, Relation], RuleOutcome]:
    return several if not relation.alone and node.op != "concat" else RULES.get(node.op, stop)


SINKING = Sinking("affine_fold", is_affine_do, arriving, rule_for)


def run(graph: Graph, log: Log) -> tuple[Graph, bool]:
    """Sink every affine do as far as it goes."""
    return sink_all(SINKING, graph, log)


PASS = Pass("affine_fold", run, moves=is_affine_do)
