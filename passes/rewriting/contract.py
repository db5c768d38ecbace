"""Constants in a product of two values, or in attention. Part of constant_fold.

    softmax(q kᵀ · s) v
    q_u := 0              q kᵀ is the same without unit u of both
    k_u := c, every key   q kᵀ changes by q_u·c, by the same for every key of a row, so softmax does not change
    v_u := c, every key   the rows of softmax sum to 1, so the result's unit u is c

    x y,  x_u := 0        the same without column u of x and row u of y; zeros elsewhere stay 0
    x W,  x_u := c        x_K W_K + c W_u, where W is a parameter (the stacked weights of experts)
    x T[i],  x_u := c     x_K T_K[i] + (c T_u)[i], where each sample looks its weights up in a table

A row that a mask hides completely does not sum to 1: if that can happen, only 0 passes. The scale of attention is a number
of the op; it does not follow the remaining width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cmrc.ir.axes import count_by_group, segments
from cmrc.ir.graph import Array, Node, Operand, Tensor, apply, attributes, literal, take
from cmrc.ir.ops.attention import AttentionAttrs
from cmrc.ir.ops.functions import AlongAttrs
from cmrc.ir.tensors import constant
from cmrc.passes.rewriting.absorb import Facts, Known, add_after, fold_into_rows, position_free, sink
from cmrc.passes.rewriting.rewriter import (
    NOTHING_TO_ADD,
    Declined,
    Rise,
    RuleOutcome,
    Selection,
    Sweep,
    complement,
    folded,
    operand_axis,
    shrunk,
    taken,
)


def zero_units(fact: Known) -> set[int]:
    """The units that are 0 at every position."""
    others = tuple(axis for axis in range(fact.slab.ndim) if axis != fact.axis)
    zero = np.broadcast_to(~fact.slab.any(axis=others), len(fact.units))
    return set(np.asarray(fact.units)[zero].tolist())


def sink_through_attention(sweep: Sweep, node: Node, facts: Facts) -> RuleOutcome:
    """Constant value units pass, because rows of softmax sum to 1. Query units that are 0, and constant key units, drop out of the scores."""
    if max(facts) > 2:
        return Declined("its mask is replaced")
    if 0 in facts or 1 in facts:
        return drop_from_scores(sweep, node, {i: fact for i, fact in facts.items() if i < 2})
    fact, rank = facts[2], len(node.output.shape)
    slab = fact.full()
    if fact.axis == rank - 2:
        return Declined("it mixes positions along the replaced axis")
    if slab.any():
        if slab.shape[rank - 2] != 1:
            return Declined("the constants differ by position, and attention mixes positions")
        if not every_query_sees(node):
            return Declined("its mask may hide every key from a query, and then the result is not the constant")
    slab = slab[..., :1, :]
    axis, units, heads = fact.axis, list(fact.units), rank - 3
    each = (
        int(node.output.shape[heads]) // int(sweep.shape(fact.source)[heads])
        if heads >= 0 and _shares(sweep, node)
        else 1
    )
    if each > 1 and (axis == heads or slab.shape[heads] > 1):  # a key-value head serves several consecutive query heads
        slab = np.repeat(slab, each, axis=heads)
        units = [u * each + i for u in units for i in range(each)] if axis == heads else units
    return sink(sweep, node, facts, axis, units, slab)


def _shares(sweep: Sweep, node: Node) -> bool:
    return sweep.shape(node.inputs[0])[-3] != sweep.shape(node.inputs[1])[-3]


def drop_from_scores(sweep: Sweep, node: Node, facts: Facts) -> RuleOutcome:
    """q kᵀ without the units that are 0 in q, or that are the same for every key in k."""
    last = len(node.output.shape) - 1
    if node.marks.square:
        return Declined("its values have the size of its queries")
    if any(fact.axis != last for fact in facts.values()):
        return Declined("queries or keys are replaced along an axis that is not their units'")
    gone: set[int] = set()
    for position, fact in facts.items():
        gone |= zero_units(fact)
        if position == 1 and fact.slab.shape[last - 1] == 1:
            gone |= set(fact.units)
    for position, fact in facts.items():
        if not set(fact.units) <= gone:
            what = (
                "a query unit that is constant, and not 0," if position == 0 else "a key unit that differs by position"
            )
            return Declined(f"{what} still affects the weights of the keys")
    inputs = list(node.inputs)
    keep = complement(sorted(gone), int(sweep.shape(inputs[0])[last]))
    if not keep:
        return Declined("no unit would be left to compare queries with keys")
    for position in (0, 1):
        source = facts[position].source if position in facts else inputs[position]
        assert isinstance(source, str)
        inputs[position] = sweep.select(source, last, keep)
    sweep.emit(node.with_inputs(inputs).with_marks(narrowed=True))  # hosts then write the scale explicitly
    return taken("absorbed: the scores are the same without these units")


def every_query_sees(node: Node) -> bool:
    """Whether every query sees a key: without a mask, with a causal one (it sees itself), or with a known one that leaves each a key."""
    masks = [mask for mask in node.inputs[3:] if mask is not None]
    if not masks:
        return True
    causal = attributes(node, AttentionAttrs).get("causal")
    if len(masks) > 1 or isinstance(masks[0], str) or node.inputs[3] is None or causal:
        return False
    known = constant(masks[0])
    return bool((known if known.dtype == bool else np.isfinite(known)).any(axis=-1).all())


# ---------------------------------------------------------------- products


def sink_through_matmul(sweep: Sweep, node: Node, facts: Facts) -> RuleOutcome:
    """Contracted units that are 0 leave both operands; if the other operand is a parameter, constants become a sum. Elsewhere, 0 stays 0."""
    shapes = [sweep.shape(operand) for operand in node.inputs]
    if min(len(shape) for shape in shapes) < 2:
        return Declined("one of its operands is a vector")
    inner = (len(shapes[0]) - 1, len(shapes[1]) - 2)
    if any(fact.axis == inner[i] for i, fact in facts.items()):
        contracted = {i: fact for i, fact in facts.items() if fact.axis == inner[i]}
        return _contract(sweep, node, contracted, inner)
    if len(facts) > 1:
        return Declined("both of its operands are replaced")
    (position, fact), rank = next(iter(facts.items())), len(node.output.shape)
    axis, slab = fact.axis + rank - len(shapes[position]), fact.full()
    if node.output.shape[axis] != shapes[position][fact.axis]:
        return Declined("the replaced axis is broadcast here")
    if slab.any():
        if position == 0 or not averages(sweep, node.inputs[0]):
            return Declined("it adds up constants with weights known only at run time")
        if slab.shape[inner[1]] != 1:
            return Declined("the constants differ by position, and the product mixes positions")
    slab = slab.sum(axis=inner[position], keepdims=True)  # one position; or zeros, which may be absent
    return sink(sweep, node, facts, axis, fact.units, slab.reshape((1,) * (rank - slab.ndim) + slab.shape))


def averages(sweep: Sweep, name: Operand) -> bool:
    """Whether the rows of a value sum to 1: it is a softmax along its last axis, or a copy of one."""
    maker = sweep.producers.get(name) if isinstance(name, str) else None
    while maker is not None and maker.op == "pointwise" and maker.kind in ("identity", "cast"):
        maker = sweep.producers.get(str(maker.inputs[0]))
    return (
        maker is not None
        and maker.kind == "softmax"
        and tuple(attributes(maker, AlongAttrs)["axes"]) == (len(maker.output.shape) - 1,)
    )


def _looked_up(sweep: Sweep, name: Operand, position: int) -> Node | None:
    """The node that looks up weights in a table for each sample, if the operand is one and the contraction is inside its rows."""
    maker = sweep.producers.get(name) if isinstance(name, str) else None
    if maker is None or maker.op != "embedding" or not isinstance(maker.inputs[1], Tensor):
        return None
    return maker if len(maker.inputs[1].shape) - (1 if position == 0 else 2) >= 1 else None


def _contract(sweep: Sweep, node: Node, facts: Facts, inner: tuple[int, int]) -> RuleOutcome:
    """Leave out the zeros; a constant that meets a parameter becomes a sum."""
    if not all(isinstance(sweep.shape(node.inputs[i])[inner[i]], int) for i in (0, 1)):
        return Declined("the other operand has a dynamic size along the contracted axis")
    gone = sorted(set.union(*(zero_units(fact) for fact in facts.values())))
    (position, fact), *others = facts.items()
    weight = node.inputs[1 - position]
    addend: Tensor | None = None
    if any(not set(f.units) <= set(gone) for f in facts.values()):
        rows = None if others else _looked_up(sweep, weight, 1 - position)
        some = len(fact.units) < int(sweep.shape(fact.source)[fact.axis])
        if rows is not None and some and position_free(fact.slab, fact.axis):
            units = sorted(fact.units)
            return fold_into_rows(sweep, node, rows, fact.source, fact.axis, inner[1 - position], units, fact.at(units))
        if others or not isinstance(weight, Tensor):
            return Declined("it contracts constants with values known only at run time")
        gone = sorted(fact.units)
        addend = _product(node, position, fact.at(gone), take(weight, inner[1 - position], gone))
    keep = complement(gone, int(sweep.shape(node.inputs[0])[inner[0]]))
    if not keep:
        return Declined("no unit would be left to contract")
    inputs: list[Operand] = list(node.inputs)
    for i in (0, 1):
        operand = facts[i].source if i in facts else inputs[i]
        assert operand is not None
        inputs[i] = sweep.select(operand, inner[i], keep) if isinstance(operand, str) else take(operand, inner[i], keep)
    smaller = node.with_inputs(inputs)
    if addend is None:
        sweep.emit(smaller)
        return NOTHING_TO_ADD
    add_after(sweep, smaller, addend)
    return folded("constants into an added buffer")


def _product(node: Node, position: int, slab: Array, weight: Tensor) -> Tensor:
    """What constant units add: their product with their part of the parameter."""
    operands: Sequence[Tensor] = (literal(slab), weight) if position == 0 else (weight, literal(slab))
    lead = np.broadcast_shapes(operands[0].shape[:-2], operands[1].shape[:-2])
    shape = (*lead, operands[0].shape[-2], operands[1].shape[-1])
    return apply("matmul", tuple(operands), {}, shape, node.output.dtype)


# ---------------------------------------------------------------- rising


SHARED = "query heads that share a key-value head must go together, or equally many in every such group"


def rise_to_copies(rise: Rise, node: Node, wanted: Selection) -> RuleOutcome | None:
    """(N, G, 1) expanded to (N, G, r) and merged to (N, G·r): copies are equal, so any n of each kept group are right."""
    axis, keep = wanted.axis, wanted.keep
    x = node.inputs[0]
    maker = rise.graph.makers.get(str(x))
    if maker is None or maker.op != "expand" or keep.period:
        return None
    before, source = rise.shape(x), rise.shape(maker.inputs[0])
    segment = next(s for s in segments(before, node.output.shape) if s.after[0] <= axis < s.after[1])
    wide = [d for d in range(*segment.before) if before[d] != 1]
    lead = len(before) - len(source)
    if len(wide) != 2 or wide[1] < lead or source[wide[1] - lead] != 1:
        return None
    group, copy = wide
    served = before[group]
    if not isinstance(served, int):
        return None
    groups = shared_heads(keep, int(node.output.shape[axis]), served)
    if groups is None:
        return Declined(SHARED)
    some = rise.select(x, copy, range(len(keep) // len(groups)))
    return shrunk(node, (rise.select(some, group, groups),), axis, keep)


def rise_through_matmul(rise: Rise, node: Node, wanted: Selection) -> RuleOutcome:
    """Rows come from the left operand, columns from the right, batch axes from both."""
    axis, keep = wanted.axis, wanted.keep
    left, right = node.inputs
    rank = len(node.output.shape)
    if min(len(rise.shape(left)), len(rise.shape(right))) < 2:
        return Declined("one of its operands is a vector")
    if axis == rank - 2:
        return shrunk(node, (rise.select(left, len(rise.shape(left)) - 2, keep), right), axis, keep)
    if axis == rank - 1:
        return shrunk(node, (left, rise.select(right, len(rise.shape(right)) - 1, keep)), axis, keep)
    inputs = []
    for operand in (left, right):
        local = axis - (rank - len(rise.shape(operand)))
        inputs.append(operand if local < 0 or rise.shape(operand)[local] == 1 else rise.select(operand, local, keep))
    return shrunk(node, inputs, axis, keep)


def rise_through_attention(rise: Rise, node: Node, wanted: Selection) -> RuleOutcome:
    """Value units come from v, queries from q, heads from all. A key-value head may serve several query heads."""
    axis, keep = wanted.axis, wanted.keep
    q, k, v, *masks = node.inputs
    rank = len(node.output.shape)
    if axis == rank - 1:
        if node.marks.square:
            return Declined("its values have the size of its queries")
        return shrunk(node, (q, k, rise.select(v, axis, keep), *masks), axis, keep)
    if axis == rank - 2 and attributes(node, AttentionAttrs).get("causal"):
        return Declined("it counts positions from the first query")
    for i, mask in enumerate(masks):
        local = None if mask is None else operand_axis(node, i + 3, rise.shape(mask), axis)
        masks[i] = mask if local is None else rise.select(mask, local, keep)
    if axis == rank - 2:
        return shrunk(node, (rise.select(q, axis, keep), k, v, *masks), axis, keep)
    heads, served = rise.shape(q)[axis], rise.shape(k)[axis]
    if heads == served:
        return shrunk(node, [*(rise.select(x, axis, keep) for x in (q, k, v)), *masks], axis, keep)
    groups = shared_heads(keep, int(heads), int(served))
    if groups is None:
        return Declined(SHARED)
    shared = (rise.select(k, axis, groups), rise.select(v, axis, groups))
    return shrunk(node, (rise.select(q, axis, keep), *shared, *masks), axis, keep)


def shared_heads(keep: Sequence[int], heads: int, served: int) -> list[int] | None:
    """The key-value heads that the kept query heads need, if all of them serve equally many."""
    counts = count_by_group(keep, served, heads // served)
    groups = np.flatnonzero(counts)
    return [int(g) for g in groups] if len(set(counts[groups].tolist())) == 1 and list(keep) == sorted(keep) else None
