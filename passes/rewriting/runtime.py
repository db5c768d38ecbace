"""Constants computed at run time: the same for every sample, different by position, and too many to store or of a dynamic size.

    %d = do(%x, c) {units=S}                              %p = plane(%x)              ones, a batch of one
    %y = depthwise(%d, W, b)   padded, of any size  ->    %v = conv(%p, W_S·c, b_S)
                                                          %y = depthwise(%x, W, b)
                                                          %d = do(%y, %v) {units=S}

From there, a do holds a value instead of numbers. Ops are applied to that value, a batch of one, as to the rest, until an
affine op absorbs it: `y = W_K x_K + b + W_S v`. Part of constant_fold.

A value of a fixed size can also be evaluated by the compiler (`as_numbers`). That is done if W_S v has no more numbers than
W_S, and at ops that accept only numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from cmrc.ir.axes import count_by_group, members, resized, segments
from cmrc.ir.graph import Array, Node, Operand, Shape, Tensor, Value, attributes, literal, take
from cmrc.ir.ops import OPS
from cmrc.ir.ops.affine import ConvAttrs, LinearAttrs, SelectAttrs
from cmrc.ir.ops.functions import AlongAttrs
from cmrc.ir.ops.layout import ConcatAttrs, TransposeAttrs
from cmrc.ir.spec import AxisAttrs, FunctionAttrs
from cmrc.ir.tensors import constant, evaluate_op, is_computable
from cmrc.passes.rewriting.absorb import Facts, Known, add_after, bare, conv_columns, sources_of
from cmrc.passes.rewriting.rewriter import (
    PAST,
    UNREAD,
    Declined,
    Rewritten,
    RuleOutcome,
    Sweep,
    complement,
    folded,
    operand_axis,
    others_give_shape,
    parameter_axis,
    past,
    result_axis,
    taken,
    varies_beside,
)

Rule = Callable[[Sweep, Node, Facts], RuleOutcome]


def twin(sweep: Sweep, node: Node, inputs: Sequence[Operand], shape: Shape, **attrs: object) -> str:
    """Emit the same op on other operands; the host writes it as a copy of its own node (`like`)."""
    output = Value(sweep.fresh(node.name, "known"), shape, node.output.dtype)
    sweep.emit(
        Node(
            node.op,
            tuple(inputs),
            (output,),
            {**node.attrs, **attrs},
            path=node.path,
            marks=replace(node.marks, like=node.name),
        )
    )
    return output.name


def sink(sweep: Sweep, node: Node, facts: Facts, axis: int, units: Sequence[int], value: str) -> Rewritten:
    sweep.emit(bare(node, facts))
    sweep.put_do(node.output, axis, units, value, sources_of(facts))
    return past("as a value computed at run time")


def add(sweep: Sweep, smaller: Node, addend: str) -> Rewritten:
    add_after(sweep, smaller, addend)
    return folded("constants computed at run time into an added plane")


# ---------------------------------------------------------------- values of a fixed size


def as_numbers(sweep: Sweep, facts: Facts) -> Facts | None:
    """The same constants with every value evaluated; `None` if a size is known only at run time."""
    numbers: Facts = {}
    for i, fact in facts.items():
        slab = _evaluate(sweep, fact.runtime, {}) if fact.runtime else fact.slab
        if slab is None:
            return None
        numbers[i] = replace(fact, slab=slab, runtime="")
    return numbers


def _evaluate(sweep: Sweep, name: str, known: dict[str, Array | None]) -> Array | None:
    """The numbers of a value that is computed from planes of ones and tensors."""
    if name in known:
        return known[name]
    node, operands = sweep.producers[name], list[Array | None]()
    known[name] = None
    sizes = [n for n in node.output.shape if isinstance(n, int)]
    if len(sizes) < len(node.output.shape) or not is_computable(node):
        return None
    if node.op == "plane":
        known[name] = np.ones(sizes)
        return known[name]
    for operand in node.inputs:
        array = None if operand is None or isinstance(operand, str) else constant(operand)
        if isinstance(operand, str):
            array = _evaluate(sweep, operand, known)
            if array is None:
                return None
        operands.append(array)
    attrs = {**node.attrs, "shape": tuple(sizes)} if OPS[node.op].sized else node.attrs
    known[name] = np.asarray(evaluate_op(node.op, attrs, *operands))
    return known[name]


def is_better_stored(sweep: Sweep, node: Node, facts: Facts) -> bool:
    """Whether what an affine op adds has no more numbers than the columns that it replaces; a fused op cannot be copied."""
    if any(_is_fused_with(sweep, node, fact.source) for fact in facts.values()):
        return True
    fact, weight = facts.get(0), node.inputs[1] if len(node.inputs) > 1 else None
    if fact is None or len(facts) > 1 or node.op not in ("linear", "conv") or not isinstance(weight, Tensor):
        return False
    if fact.axis != attributes(node, AxisAttrs)["axis"] or len(fact.units) == sweep.shape(fact.source)[fact.axis]:
        return False
    if node.op == "linear":
        positions = resized(sweep.shape(fact.runtime), fact.axis, 1)
        each = 1
    else:
        positions = node.output.shape[fact.axis + 1 :]
        each = math.prod(weight.shape[2:])
        if attributes(node, ConvAttrs)["groups"] > 1:
            return False
    fixed = [n for n in positions if isinstance(n, int)]
    return len(fixed) == len(positions) and math.prod(fixed) <= len(fact.units) * each


def _is_fused_with(sweep: Sweep, node: Node, source: str) -> bool:
    maker = sweep.producers.get(source)
    within = maker is not None and bool(maker.marks.inside) and maker.origin == node.origin
    return bool(node.marks.inside) or within


# ---------------------------------------------------------------- rules


def sink_through_pointwise(sweep: Sweep, node: Node, facts: Facts) -> RuleOutcome:
    """f(x_S := v, y_S := b) -> do(f(x, y), S := f(v, b)); f(x := v, y) -> f(v, y)."""
    rank = len(node.output.shape)
    axes = {result_axis(node, i, sweep.shape(fact.source), fact.axis) for i, fact in facts.items()}
    if len(axes) > 1:
        return Declined("its operands are replaced along different axes")
    axis = axes.pop()
    if any(sweep.shape(fact.source)[fact.axis] != node.output.shape[axis] for fact in facts.values()):
        return Declined("the replaced axis is broadcast here")
    unknown = [o for i, o in enumerate(node.inputs) if isinstance(o, str) and i not in facts]
    if unknown and all(
        len(f.units) == node.output.shape[axis]
        and others_give_shape(sweep, node, i, sweep.shape(f.runtime) if f.runtime else f.full().shape)
        for i, f in facts.items()
    ):
        known = {i: part_of(sweep, fact, range(len(fact.units))) for i, fact in facts.items()}
        sweep.emit(node.with_inputs(known.get(i, o) for i, o in enumerate(node.inputs)))
        return taken("a value computed at run time as an operand")
    if unknown:
        return varies_beside(facts[min(facts)].source, unknown[0])
    units = sorted(set.intersection(*(set(f.units) for f in facts.values())))
    if len(units) < max(len(f.units) for f in facts.values()):
        return Declined("its operands are replaced in different units")
    inputs: list[Operand] = []
    for i, operand in enumerate(node.inputs):
        if i in facts:
            inputs.append(part_of(sweep, facts[i], units))
        elif operand is None or isinstance(operand, str):
            inputs.append(operand)
        else:
            local = operand_axis(node, i, operand.shape, axis)
            inputs.append(operand if local is None else take(operand, local, units))
    shape = list(resized(node.output.shape, axis, len(units)))
    for d in range(rank):
        if d != axis and not any(runs_along(node, i, sweep.shape(o), d) for i, o in enumerate(inputs) if o is not None):
            shape[d] = 1
    return sink(sweep, node, facts, axis, units, twin(sweep, node, inputs, tuple(shape)))


def part_of(sweep: Sweep, fact: Known, units: Sequence[int]) -> Operand:
    if fact.runtime:
        return sweep.select(fact.runtime, fact.axis, fact.positions(units))
    return literal(fact.at(units))


def runs_along(node: Node, position: int, shape: Shape, axis: int) -> bool:
    """Whether an operand has more than one position along an axis of the result."""
    align = attributes(node, FunctionAttrs).get("align")
    dims = align[position] if align else None
    local = axis - (len(node.output.shape) - len(shape)) if dims is None else dims.index(axis) if axis in dims else -1
    return local >= 0 and shape[local] != 1


def sink_along_other_axes(sweep: Sweep, node: Node, facts: Facts) -> RuleOutcome:
    """f over other axes acts on the value as it does on the rest."""
    attrs = attributes(node, AlongAttrs)
    if set(facts) != {0}:
        return Declined("one of its parameters is replaced")
    fact, axes = facts[0], tuple(attrs["axes"])
    if fact.axis in axes:
        return Declined("it mixes the units with each other")
    seen = sweep.shape(fact.runtime)
    if any(seen[a] == 1 != sweep.shape(fact.source)[a] for a in axes):
        return Declined("the constant is the same at every position, and the number of positions is not fixed")
    if attrs["fn"] == "resize":
        return Declined("it needs sizes that a batch of one does not have")
    if attrs["fn"] == "pad" and any(lo or hi for lo, hi in attrs.get("pads", ())[:1]):
        return Declined("it pads the batch")
    inputs: list[Operand] = [fact.runtime]
    for i, operand in enumerate(node.inputs[1:], start=1):
        if isinstance(operand, str):
            return Declined("one of its parameters is computed at run time")
        others = [d for d in range(len(seen)) if d != fact.axis and d not in axes and seen[d] == 1]
        if operand is not None and any(runs_along(node, i, operand.shape, d) for d in others):
            return Declined("one of its parameters differs along an axis where the constants are the same")
        local = None if operand is None else parameter_axis(node, i, operand.shape, fact.axis, len(seen))
        inputs.append(operand if operand is None or local is None else take(operand, local, fact.units))
    dropped = bool(attrs.get("drop"))
    kept = [d for d in range(len(seen)) if not (dropped and d in axes)]
    shape = tuple(node.output.shape[i] if d in axes else seen[d] for i, d in enumerate(kept))
    return sink(sweep, node, facts, kept.index(fact.axis), fact.units, twin(sweep, node, inputs, shape))


def sink_through_reshape(sweep: Sweep, node: Node, facts: Facts) -> RuleOutcome:
    """Passes if the units keep an axis of their own, and the value has one position along every axis that is merged or split."""
    fact = facts[0]
    before, after, seen = sweep.shape(fact.source), node.output.shape, sweep.shape(fact.runtime)
    shape, axis = list(after), -1
    for segment in segments(before, after):
        first, last = segment.before
        wide = [i for i in range(*segment.after) if after[i] != 1]
        if first <= fact.axis < last:
            merged = len([i for i in range(first, last) if before[i] != 1]) > 1
            if merged or len(wide) != 1 or after[wide[0]] != before[fact.axis]:
                return Declined("it merges the units with a size known only at run time")
            axis = wide[0]
            shape[axis] = len(fact.units)
        elif all(n == 1 for n in seen[first:last]):
            shape[segment.after[0] : segment.after[1]] = [1] * (segment.after[1] - segment.after[0])
        elif seen[first:last] != before[first:last]:
            return Declined("the constants differ along an axis that is reshaped too")
    if axis < 0 or sum(isinstance(n, str) for n in shape) > 1:
        return Declined("the constants differ along an axis that is reshaped too")
    return sink(sweep, node, facts, axis, fact.units, twin(sweep, node, (fact.runtime,), tuple(shape)))


def sink_through_transpose(sweep: Sweep, node: Node, facts: Facts) -> RuleOutcome:
    """transpose(do(x, v)) -> do(transpose(x), transpose(v))."""
    fact, perm = facts[0], attributes(node, TransposeAttrs)["perm"]
    seen = sweep.shape(fact.runtime)
    value = twin(sweep, node, (fact.runtime,), tuple(seen[p] for p in perm))
    return sink(sweep, node, facts, perm.index(fact.axis), fact.units, value)


def sink_through_select(sweep: Sweep, node: Node, facts: Facts) -> RuleOutcome:
    """select(do(x, v), K) -> do(select(x, K), the part of v that is read)."""
    attrs = attributes(node, SelectAttrs)
    fact, axis, keep = facts[0], attrs["axis"], attrs["keep"]
    if axis != fact.axis:
        seen = sweep.shape(fact.runtime)
        value = fact.runtime if seen[axis] == 1 else sweep.select(fact.runtime, axis, keep)
        return sink(sweep, node, facts, fact.axis, fact.units, value)
    known = set(fact.units)
    left = [(i, u) for i, u in enumerate(keep) if u in known]
    if not left:
        sweep.emit(bare(node, facts))
        return UNREAD
    value = sweep.select(fact.runtime, axis, fact.positions([u for _, u in left]))
    return sink(sweep, node, facts, axis, [i for i, _ in left], value)


def sink_through_concat(sweep: Sweep, node: Node, facts: Facts) -> RuleOutcome:
    """Along the units: positions shift, the value stays as it is."""
    (position, fact), *others = facts.items()
    if others:
        return Declined("several of its parts are replaced, one of them by values known only at run time")
    if fact.axis != attributes(node, ConcatAttrs)["axis"]:
        return Declined("another part of the concatenation is not replaced")
    sizes = [sweep.shape(operand)[fact.axis] for operand in node.inputs[:position]]
    if not all(isinstance(n, int) for n in sizes):
        return Declined("the size of a part is known only at run time")
    offset = sum(int(n) for n in sizes)
    return sink(sweep, node, facts, fact.axis, [offset + u for u in fact.units], fact.runtime)


def absorb_into_linear(sweep: Sweep, node: Node, facts: Facts) -> RuleOutcome:
    """W x with x_S := v -> W_K x_K + W_S v."""
    attrs = attributes(node, LinearAttrs)
    _, weight, bias = (*node.inputs, None)[:3]
    if set(facts) != {0} or isinstance(weight, str) or weight is None:
        return Declined("its weight is computed at run time")
    fact, axis, w_in = facts[0], attrs["axis"], attrs["w_in"]
    if fact.axis != axis:
        return Declined("it acts along a different axis than the replacement")
    outs = weight.shape[attrs["w_out"]]
    shape = resized(sweep.shape(fact.runtime), axis, outs)
    keep = complement(fact.units, weight.shape[w_in])
    order = take(weight, w_in, fact.units)
    if not keep:
        return sink(sweep, node, facts, axis, range(outs), twin(sweep, node, (fact.runtime, order, bias), shape))
    addend = twin(sweep, node, (fact.runtime, order, None), shape)
    smaller = node.with_inputs((sweep.select(fact.source, axis, keep), take(weight, w_in, keep), bias))
    return add(sweep, smaller, addend)


def absorb_into_conv(sweep: Sweep, node: Node, facts: Facts) -> RuleOutcome:
    """Channels: conv(x_K; W_K) + conv(v; W_S). If every input of a group is known, the constants go past it."""
    attrs = attributes(node, ConvAttrs)
    _, weight, bias = (*node.inputs, None)[:3]
    if set(facts) != {0} or not isinstance(weight, Tensor) or isinstance(bias, str):
        return Declined("its weight is computed at run time")
    fact, axis, groups = facts[0], attrs["axis"], attrs["groups"]
    if fact.axis != axis:
        return Declined("it mixes positions along the replaced axis")
    seen, spatial = sweep.shape(fact.runtime), sweep.shape(fact.source)[axis + 1 :]
    if seen[axis + 1 :] != spatial:
        return Declined("the constant is the same at every position, and the number of positions is not fixed")
    channels = int(sweep.shape(fact.source)[axis])
    per, outs = channels // groups, int(node.output.shape[axis]) // groups
    counts = per - count_by_group(fact.units, groups, per)
    transposed = bool(attrs.get("transposed"))
    gone = np.flatnonzero(counts == 0)
    if len(gone) and not np.any(counts % per):
        rows, inputs = members(gone, outs), members(gone, per)
        v = sweep.select(fact.runtime, axis, fact.positions(inputs))
        part = take(weight, 0, inputs if transposed else rows)
        shift = None if bias is None else take(bias, 0, rows)
        shape = (*seen[:axis], len(rows), *node.output.shape[axis + 1 :])
        return sink(sweep, node, facts, axis, rows, twin(sweep, node, (v, part, shift), shape, groups=len(gone)))
    if groups > 1:
        return Declined("its groups would keep different numbers of channels")
    shape = (*seen[:axis], outs, *node.output.shape[axis + 1 :])
    units = sorted(fact.units)
    v = sweep.select(fact.runtime, axis, fact.positions(units))
    addend = twin(sweep, node, (v, conv_columns(weight, node, units), None), shape)
    keep = complement(fact.units, channels)
    smaller = node.with_inputs((sweep.select(fact.source, axis, keep), conv_columns(weight, node, keep), bias))
    return add(sweep, smaller, addend)


def read_shape_only(sweep: Sweep, node: Node, facts: Facts) -> RuleOutcome:
    """An op that reads sizes, not values, does not see the do."""
    sweep.emit(bare(node, facts))
    return PAST


def stop(sweep: Sweep, node: Node, facts: Facts) -> RuleOutcome:
    if node.marks.shape_only is not None:
        return read_shape_only(sweep, node, facts)
    return Declined(f"{node.kind} cannot take constants that exist only at run time")


RULES: dict[str, Rule] = {
    "linear": absorb_into_linear,
    "conv": absorb_into_conv,
    "pointwise": sink_through_pointwise,
    "along": sink_along_other_axes,
    "reshape": sink_through_reshape,
    "transpose": sink_through_transpose,
    "concat": sink_through_concat,
    "select": sink_through_select,
    "plane": read_shape_only,
}
