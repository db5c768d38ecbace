"""constant_fold: a `do(units := constants)` sinks along the data flow until an affine op absorbs it.

    %d = do(%a, c) {units=S}                      %s = select(%a) {keep=K}
    %y = linear(%d, W, b)                   ->    %y = linear(%s, W[:,K], b + W[:,S]·c)

    %d = do(%h, c) {units=S}                      %r = relu(%h)
    %r = relu(%d)                           ->    %d = do(%r, relu(c)) {units=S}

One forward sweep, one rule per op. A rule computes the constants of the result by calling the evaluator (`ir/ops/`) on the
constants of the operands, so an op has one meaning. If a rule declines, the do stays in front of that op and the reason is
noted; other readers of the same value are not affected. Condition: constants are finite (0 · x is assumed to be 0).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from cmrc.ir.axes import compress, join, laid_out, move, move_slab, spread
from cmrc.ir.evaluate import keeps_numbers
from cmrc.ir.graph import Array, Graph, Node, Operand, Tensor, attributes, literal, take
from cmrc.ir.ops.affine import DoAttrs, LinearAttrs, SelectAttrs, slab_of
from cmrc.ir.ops.functions import ALONG, AlongAttrs, PointwiseAttrs
from cmrc.ir.ops.layout import ConcatAttrs, TransposeAttrs
from cmrc.ir.tensors import constant, evaluate_op
from cmrc.passes.rewriting import runtime
from cmrc.passes.rewriting.absorb import (
    NOT_FINITE,
    Facts,
    Known,
    add_behind_batch_norm,
    bare,
    emit_with_tensors,
    fold_into_linear,
    fold_into_mean,
    fold_into_weights,
    known_of,
    merge_addends,
    sink,
    sources_of,
)
from cmrc.passes.rewriting.contract import sink_through_attention, sink_through_matmul, zero_units
from cmrc.passes.rewriting.convolution import absorb_into_conv
from cmrc.passes.rewriting.norms import fold_into_group_norm, fold_into_norm
from cmrc.passes.rewriting.rewriter import (
    JOINED,
    PAST,
    UNREAD,
    Declined,
    Log,
    Pass,
    RuleOutcome,
    Sinking,
    Sweep,
    combines_nothing,
    is_constant_do,
    operand_axis,
    others_give_shape,
    parameter_axis,
    past,
    result_axis,
    sink_all,
    varies_beside,
)

Rule = Callable[[Sweep, Node, Facts], RuleOutcome]


CONSTANT_OUTPUT = "every unit of this output is constant, so nothing would be left of the model"
# ---------------------------------------------------------------- rules


def sink_through_pointwise(sweep: Sweep, node: Node, facts: Facts) -> RuleOutcome:
    """f(x_S := a, y_S := b) -> do(f(x, y), S := f(a, b)); 0 · y is 0 for any y; a fully known operand becomes a tensor."""
    axes = {result_axis(node, i, sweep.shape(fact.source), fact.axis) for i, fact in facts.items()}
    if len(axes) > 1:
        return Declined("its operands are replaced along different axes")
    axis = axes.pop()
    if any(sweep.shape(fact.source)[fact.axis] != node.output.shape[axis] for fact in facts.values()):
        return Declined("the replaced axis is broadcast here")
    unknown = [str(o) for i, o in enumerate(node.inputs) if isinstance(o, str) and i not in facts]
    units = facts[min(facts)].units
    if 0 in facts and keeps_numbers(node, {str(node.inputs[0]): sweep.values[facts[0].source].dtype}):
        # in float64: the weights are rounded once, at the end
        return sink(sweep, node, facts, axis, units, facts[0].slab)
    if not unknown and all(fact.units is units or fact.units == units for fact in facts.values()):
        return sink(sweep, node, facts, axis, units, _evaluate_pointwise(node, facts, axis, units))
    if _is_product_with_zeros(node, facts, axis):
        return sink(sweep, node, facts, axis, units, _zeros(node, axis, len(units)))
    return _sink_in_part(sweep, node, facts, axis, unknown)


def _is_product_with_zeros(node: Node, facts: Facts, axis: int) -> bool:
    """A common case, as in a gate: one factor is 0 in some units."""
    fact = facts[min(facts)]
    some = len(fact.units) != node.output.shape[axis]
    return attributes(node, PointwiseAttrs)["fn"] == "mul" and len(facts) == 1 and some and not fact.slab.any()


def _zeros(node: Node, axis: int, count: int) -> Array:
    return np.zeros([count if i == axis else 1 for i in range(len(node.output.shape))])


def _sink_in_part(sweep: Sweep, node: Node, facts: Facts, axis: int, unknown: Sequence[str]) -> RuleOutcome:
    """Operands that are replaced in different units, or meet operands that still vary.

    After the op, a unit is known if all operands are known there, or if a factor is 0 there. An operand that is known
    completely becomes a tensor. The rest of the others stays in front of the op.
    """
    whole = _known_altogether(sweep, node, facts, axis, unknown)
    part = [fact for i, fact in facts.items() if i not in whole]
    agreed = set.intersection(*(set(fact.units) for fact in part)) if part and not unknown else set[int]()
    zeros = set[int]()
    if attributes(node, PointwiseAttrs)["fn"] == "mul":
        zeros = set.union(*(zero_units(fact) for fact in facts.values())) - agreed
    if not agreed and not zeros and not whole:
        return _still_varies(facts, unknown)
    slab = _evaluate_pointwise(node, facts, axis, sorted(agreed)) if agreed else _zeros(node, axis, 0)
    if not np.isfinite(slab).all():
        return Declined(NOT_FINITE)
    inputs = list(node.inputs)
    for i, fact in facts.items():
        inputs[i] = _rest_of_operand(sweep, node, i, fact, agreed | zeros, i in whole)
    if not agreed and not zeros:
        return emit_with_tensors(sweep, node, inputs)
    sweep.emit(node.with_inputs(inputs))
    nothing = np.zeros([len(zeros) if i == axis else n for i, n in enumerate(slab.shape)])
    slab = np.concatenate([slab, nothing], axis=axis)
    sweep.put_do(node.output, axis, [*sorted(agreed), *sorted(zeros)], compress(slab, axis), sources_of(facts))
    return PAST if all(inputs[i] == fact.source for i, fact in facts.items()) else past("in part")


def _known_altogether(sweep: Sweep, node: Node, facts: Facts, axis: int, unknown: Sequence[str]) -> list[int]:
    """The operands in which every unit is replaced, unless then the whole result would be known or would lose its shape."""
    whole = [i for i, fact in facts.items() if len(fact.units) == node.output.shape[axis]]
    if len(whole) == len(facts) and not unknown:
        return []
    return [i for i in whole if others_give_shape(sweep, node, i, facts[i].full().shape)]


def _still_varies(facts: Facts, unknown: Sequence[str]) -> Declined:
    if not unknown:
        return Declined("its operands are replaced in different units")
    return varies_beside(facts[min(facts)].source, unknown[0])


def _rest_of_operand(sweep: Sweep, node: Node, position: int, fact: Known, gone: set[int], whole: bool) -> Operand:
    """What is left of a replaced operand when some units are replaced after the op: itself, a tensor, or a smaller do."""
    left = [u for u in fact.units if u not in gone]
    if not left:
        return fact.source
    value = sweep.values[fact.source]
    if whole:
        return literal(fact.at(range(len(fact.units))), "float64" if "float" in value.dtype else value.dtype)
    if len(left) == len(fact.units):
        name = str(node.inputs[position])
    else:
        name = sweep.do(value, fact.axis, left, fact.at(left), fact.sources)
    sweep.log.reasons[name, node.name] = "these units are replaced in one operand only"
    return name


def _evaluate_pointwise(node: Node, facts: Facts, axis: int, units: Sequence[int]) -> Array:
    arrays: list[Array | None] = []
    rank = len(node.output.shape)
    for i, operand in enumerate(node.inputs):
        if i in facts:
            slab = facts[i].at(units)
            arrays.append(slab)
        elif operand is None or isinstance(operand, str):
            arrays.append(None)
        else:
            local = operand_axis(node, i, operand.shape, axis)
            arrays.append(constant(operand if local is None else take(operand, local, units)))
    slab = evaluate_op("pointwise", {**node.attrs, "rank": rank}, *arrays)
    if slab.ndim < rank:
        slab = slab.reshape((1,) * (rank - slab.ndim) + slab.shape)
    return spread(slab, axis, len(units))


def sink_along_other_axes(sweep: Sweep, node: Node, facts: Facts) -> RuleOutcome:
    """f over other axes: do(x, S := c) -> do(f(x), S := f(c)). Across the units, a mean, a sum or a norm absorbs it."""
    if set(facts) != {0}:
        return Declined("one of its parameters is replaced")
    attrs, fact = attributes(node, AlongAttrs), facts[0]
    fn, axes = attrs["fn"], attrs["axes"]
    if fact.axis in axes:
        return _fold_across_units(sweep, node, fact)
    if combines_nothing(sweep, node, fact.source):
        return Declined("it combines an axis of size 0")
    axis = fact.axis - sum(a < fact.axis for a in axes) if attrs.get("drop") else fact.axis
    slab = fact.full()
    flat = all(slab.shape[a] == 1 for a in axes)
    same_pad = fn == "pad" and bool(np.all(slab == attrs.get("value")))
    stays_zero = ALONG[fn].linear and not attrs.get("value") and not slab.any()
    if flat and (ALONG[fn].maps_constants_to_themselves(node.attrs) or same_pad or stays_zero):
        result = slab.squeeze(axis=axes) if attrs.get("drop") else slab
        return sink(sweep, node, facts, axis, fact.units, result)
    if ALONG[fn].meaning is None:
        return Declined(f"what {fn} does to a constant is not known")
    if not (flat and fn in ("layer_norm", "instance_norm", "rms_norm")):
        everywhere = laid_out(slab, sweep.shape(fact.source), axes, attrs.get("times", ()))
        if isinstance(everywhere, str):
            return Declined(f"the constant {everywhere}")
        slab = everywhere
    if any(isinstance(operand, str) for operand in node.inputs[1:]):
        return Declined("one of its parameters is computed at run time")
    result = evaluate_op("along", node.attrs, slab, *_parameters_at(node, fact, slab.ndim))
    return sink(sweep, node, facts, axis, fact.units, result)


def _fold_across_units(sweep: Sweep, node: Node, fact: Known) -> RuleOutcome:
    """The op combines the units with each other."""
    attrs = attributes(node, AlongAttrs)
    fn, whole = attrs["fn"], len(fact.units) == sweep.shape(fact.source)[fact.axis]
    if fn == "tile":
        return Declined("it repeats the units")
    if fn == "group_norm":
        return fold_into_group_norm(sweep, node, fact)
    if fn in ("layer_norm", "rms_norm") and len(attrs["axes"]) == 1 and not whole:
        return fold_into_norm(sweep, node, fact)
    if fn not in ("mean", "sum") or len(attrs["axes"]) > 1 or whole:
        return Declined("it mixes the units with each other")
    return fold_into_mean(sweep, node, fact.source, fact.axis, fact.units, fact.full())


def _parameters_at(node: Node, fact: Known, rank: int) -> list[Array | None]:
    """The op's parameters; if they run along the units, only those of the replaced units."""
    arrays: list[Array | None] = []
    for i, operand in enumerate(node.inputs[1:], start=1):
        assert not isinstance(operand, str)
        local = None if operand is None else parameter_axis(node, i, operand.shape, fact.axis, rank)
        arrays.append(
            None if operand is None else constant(operand if local is None else take(operand, local, fact.units))
        )
    return arrays


def sink_through_reshape(sweep: Sweep, node: Node, facts: Facts) -> RuleOutcome:
    """Follow the units to where they go (axes.py)."""
    fact = facts[0]
    before, after = sweep.shape(fact.source), node.output.shape
    moved = move(before, after, fact.axis, fact.units)
    if isinstance(moved, str) or moved.period:
        return Declined(moved if isinstance(moved, str) else "it merges the units with a size known only at run time")
    units = sorted(fact.units)
    slab = move_slab(before, after, fact.axis, units, moved, fact.at(units))
    if isinstance(slab, str):
        return Declined(slab)
    return sink(sweep, node, facts, moved.axis, moved.index, slab)


def sink_through_transpose(sweep: Sweep, node: Node, facts: Facts) -> RuleOutcome:
    """transpose(do(x)) -> do(transpose(x)), the axis permuted."""
    fact, perm = facts[0], attributes(node, TransposeAttrs)["perm"]
    return sink(sweep, node, facts, perm.index(fact.axis), fact.units, np.transpose(fact.full(), perm))


def sink_through_expand(sweep: Sweep, node: Node, facts: Facts) -> RuleOutcome:
    """expand(do(x)) -> do(expand(x)) where the units' own axis is not the one expanded."""
    fact = facts[0]
    lead = len(node.output.shape) - len(sweep.shape(fact.source))
    if node.output.shape[fact.axis + lead] != sweep.shape(fact.source)[fact.axis]:
        return Declined("it repeats the units")
    return sink(sweep, node, facts, fact.axis + lead, fact.units, fact.full().reshape((1,) * lead + fact.full().shape))


def sink_through_concat(sweep: Sweep, node: Node, facts: Facts) -> RuleOutcome:
    """Along the units, positions shift. Along another axis, every part must be known in the same units."""
    along = attributes(node, ConcatAttrs)["axis"]
    axes = {fact.axis for fact in facts.values()}
    if len(axes) > 1:
        return Declined("its operands are replaced along different axes")
    axis = axes.pop()
    if axis == along:
        units: list[int] = []
        slabs, offset = [], 0
        for i, operand in enumerate(node.inputs):
            if i in facts:
                units += [offset + u for u in facts[i].units]
                slabs.append(facts[i].full())
            size = sweep.shape(operand)[along]
            if not isinstance(size, int):
                return Declined("the size of a part is known only at run time")
            offset += size
        return sink(sweep, node, facts, axis, units, join(slabs, axis))
    tensors = {i: o for i, o in enumerate(node.inputs) if o is not None and not isinstance(o, str)}
    if len(facts) + len(tensors) < len(node.inputs):
        return Declined("another part of the concatenation is not replaced")
    common = sorted(set.intersection(*(set(f.units) for f in facts.values())))
    if len(common) < max(len(f.units) for f in facts.values()):
        return Declined("the parts are replaced in different units")
    slabs, sizes = [], []
    for i, operand in enumerate(node.inputs):
        slabs.append(facts[i].at(common) if i in facts else constant(take(tensors[i], axis, common)))
        sizes.append(sweep.shape(operand)[along])
    if all(s.shape[along] == 1 for s in slabs) and all(np.array_equal(s, slabs[0]) for s in slabs):
        return sink(sweep, node, facts, axis, common, slabs[0])
    if not all(isinstance(n, int) for n in sizes):
        return Declined("the constants differ between parts whose sizes are known only at run time")
    full = [spread(slab, along, int(n)) for slab, n in zip(slabs, sizes, strict=True)]
    return sink(sweep, node, facts, axis, common, join(full, along))


def sink_through_select(sweep: Sweep, node: Node, facts: Facts) -> RuleOutcome:
    """select(do(x, S), K) -> do(select(x, K), S in K); nothing left of S, nothing left of the do."""
    attrs = attributes(node, SelectAttrs)
    fact, axis, keep = facts[0], attrs["axis"], attrs["keep"]
    if axis != fact.axis:
        slab = fact.full()
        slab = slab if slab.shape[axis] == 1 else np.take(slab, keep, axis=axis)
        return sink(sweep, node, facts, fact.axis, fact.units, slab)
    known = set(fact.units)
    left = [(i, u) for i, u in enumerate(keep) if u in known]
    if not left:
        sweep.emit(bare(node, facts))
        return UNREAD
    return sink(sweep, node, facts, axis, [i for i, _ in left], fact.at([u for _, u in left]))


def sink_through_do(sweep: Sweep, node: Node, facts: Facts) -> RuleOutcome:
    """do after do on one axis: the later wins if both name a unit; constant parents of an affine do move into its bias."""
    axis = attributes(node, DoAttrs)["axis"]
    if isinstance(node.inputs[1], str):
        return Declined("there is already a replacement by values known only at run time here")
    fact = facts[0]
    if axis != fact.axis:
        return Declined("there is already a replacement along another axis here")
    if is_constant_do(node):
        later = known_of(node.with_inputs((fact.source, *node.inputs[1:])))
        named = set(later.units)
        first = [] if fact.units == later.units else [u for u in fact.units if u not in named]
        attrs = dict(node.attrs)
        marks = replace(node.marks, sources=tuple(sorted({*fact.sources, *later.sources})))
        slab = later.slab
        if first:
            slab = compress(join([fact.at(first), later.full()], axis), axis)
            attrs["units"] = (*first, *later.units)
        sweep.emit(Node("do", (fact.source, literal(slab)), node.outputs, attrs, node.origin, node.path, marks))
        return JOINED
    if set(attributes(node, DoAttrs).get("parents", ())) & set(fact.units):
        return _join_constant_parents(sweep, node, facts)
    later_units = set(attributes(node, DoAttrs)["units"])
    first = [u for u in fact.units if u not in later_units]
    sweep.emit(bare(node, facts))
    if first:
        sweep.put_do(node.output, axis, first, fact.at(first), fact.sources)
    return PAST


def _join_constant_parents(sweep: Sweep, node: Node, facts: Facts) -> RuleOutcome:
    """B [x_Q; c] + β = B_Q x_Q + (β + B_c c)."""
    do = attributes(node, DoAttrs)
    fact, axis, parents = facts[0], do["axis"], do.get("parents", ())
    value, weight = node.inputs[1:]
    assert isinstance(value, Tensor) and isinstance(weight, Tensor)
    if len(parents) != weight.shape[1]:
        return Declined("the parents of an affine replacement of blocks are themselves replaced")
    constants = set(fact.units)
    known = [i for i, p in enumerate(parents) if p in constants]
    rest = [i for i, p in enumerate(parents) if p not in constants]
    seen = np.moveaxis(fact.at([parents[i] for i in known]), axis, -1)
    added = np.moveaxis(seen @ constant(weight)[:, known].T, -1, axis)
    slab = literal(compress(slab_of(constant(value), axis, len(node.output.shape)) + added, axis))
    attrs = {**node.attrs, "parents": tuple(parents[i] for i in rest)}
    inputs: tuple[Operand, ...] = (node.inputs[0], slab, literal(constant(weight)[:, rest]))
    if not rest:
        del attrs["parents"]
        inputs = inputs[:2]
    return sink_through_do(sweep, replace(node, inputs=inputs, attrs=attrs), facts)


def absorb_into_linear(sweep: Sweep, node: Node, facts: Facts) -> RuleOutcome:
    """Along the contracted axis, into bias and columns. Along another axis, the constants go through the map."""
    attrs = attributes(node, LinearAttrs)
    if set(facts) != {0} or isinstance(node.inputs[1], str):
        return Declined("its weight is computed at run time")
    fact, axis, weight = facts[0], attrs["axis"], node.inputs[1]
    assert isinstance(weight, Tensor)
    ins = weight.shape[attrs["w_in"]]
    if fact.axis == axis and len(fact.units) < ins:
        return fold_into_linear(sweep, node, fact.source, fact.units, fact.full())
    slab = spread(fact.at(range(ins)) if fact.axis == axis else fact.full(), axis, ins)
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if isinstance(bias, str):
        return Declined("its bias is computed at run time")
    result = evaluate_op("linear", node.attrs, slab, constant(weight), None if bias is None else constant(bias))
    units = range(int(node.output.shape[axis])) if fact.axis == axis else fact.units
    return sink(sweep, node, facts, fact.axis, tuple(units), result)


def stop(sweep: Sweep, node: Node, facts: Facts) -> RuleOutcome:
    if node.marks.shape_only is not None:
        return runtime.read_shape_only(sweep, node, facts)
    if node.marks.weighed and set(facts) == {0}:
        fact = facts[0]
        return fold_into_weights(sweep, node, fact.source, fact.axis, fact.units, fact.full())
    return Declined(node.marks.why or f"{node.kind} is not an op that replacements can pass")


RULES: dict[str, Rule] = {
    "linear": absorb_into_linear,
    "conv": absorb_into_conv,
    "pointwise": sink_through_pointwise,
    "along": sink_along_other_axes,
    "reshape": sink_through_reshape,
    "transpose": sink_through_transpose,
    "expand": sink_through_expand,
    "concat": sink_through_concat,
    "select": sink_through_select,
    "do": sink_through_do,
    "matmul": sink_through_matmul,
    "attention": sink_through_attention,
    "plane": runtime.read_shape_only,
}


def facts_of(sweep: Sweep, node: Node, dos: Mapping[int, Node]) -> Facts:
    return {i: known_of(do) for i, do in dos.items()}


def rule_for(node: Node, facts: Facts) -> Rule:
    for fact in facts.values():
        if fact.runtime:
            return carry_value
    return RULES.get(node.op, stop)


def carry_value(sweep: Sweep, node: Node, facts: Facts) -> RuleOutcome:
    """A value of a fixed size can be evaluated to numbers: it continues as numbers if they are few, or if a value cannot pass."""
    rule = runtime.RULES.get(node.op, runtime.stop)
    outcome = None if runtime.is_better_stored(sweep, node, facts) else rule(sweep, node, facts)
    if outcome is not None and not isinstance(outcome, Declined):
        return outcome
    numbers = runtime.as_numbers(sweep, facts)
    if numbers is None:
        return rule(sweep, node, facts) if outcome is None else outcome
    return RULES.get(node.op, stop)(sweep, node, numbers)


def merge_with_addends(sweep: Sweep, node: Node) -> Node | None:
    node = merge_addends(sweep, node)
    return None if add_behind_batch_norm(sweep, node) else node


def at_output(do: Node) -> str:
    attrs = attributes(do, DoAttrs)
    whole = len(attrs["units"]) == do.output.shape[attrs["axis"]]
    return CONSTANT_OUTPUT if whole else "it is an output of the model"


SINKING = Sinking("constant_fold", is_constant_do, facts_of, rule_for, merge_with_addends, at_output)


def run(graph: Graph, log: Log) -> tuple[Graph, bool]:
    """Sink every constant do as far as it goes."""
    return sink_all(SINKING, graph, log)


PASS = Pass("constant_fold", run, moves=lambda node: is_constant_do(node) or node.marks.addend)
