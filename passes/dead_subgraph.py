"""dead_subgraph: a `select` rises against the data flow until an affine op absorbs it by dropping rows.

    %h = linear(%x, W, b)                         %h = linear(%x, W[K,:], b[K])
    %a = relu(%h)                           ->    %a = relu(%h)
    %s = select(%a) {keep=K}                      %y = linear(%a, ...)
    %y = linear(%s, ...)

One backward sweep, one rule per op. If every reader of a value needs only some positions, only those are computed; readers that
need fewer select from what is left. What nobody reads is dropped. Only bytes are moved, no new numbers arise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from cmrc.ir.axes import count_by_group, members, narrowed, segments
from cmrc.ir.graph import Graph, Keep, Node, Shape, Tensor, attributes, is_whole, take
from cmrc.ir.ops.affine import ConvAttrs, LinearAttrs, SelectAttrs
from cmrc.ir.ops.functions import AlongAttrs
from cmrc.ir.ops.layout import ConcatAttrs, PlaneAttrs, TransposeAttrs
from cmrc.ir.recurrence import hidden_size
from cmrc.ir.tensors import quantised
from cmrc.passes.rewriting.contract import rise_through_attention, rise_through_matmul, rise_to_copies
from cmrc.passes.rewriting.idle import drop_idle_readers, idle_and_whole, without_sizes
from cmrc.passes.rewriting.integers import blocks_cut
from cmrc.passes.rewriting.norms import rise_through_group_norm
from cmrc.passes.rewriting.recurrent import narrow
from cmrc.passes.rewriting.rewriter import (
    DROPPED,
    Declined,
    Log,
    Movement,
    Pass,
    Rewritten,
    Rise,
    RuleOutcome,
    Selection,
    apply_rule,
    as_copy,
    operand_axis,
    parameter_axis,
    shrunk,
)

# ---------------------------------------------------------------- rules


def drop_rows_of_linear(rise: Rise, node: Node, wanted: Selection) -> RuleOutcome:
    """select(W x + b, K) -> W[K] x + b[K]; along another axis it rises to x."""
    attrs = attributes(node, LinearAttrs)
    axis, keep = wanted.axis, wanted.keep
    x, weight, bias = (*node.inputs, None)[:3]
    if axis != attrs["axis"]:
        return shrunk(node, (rise.select(x, axis, keep), weight, bias), axis, keep)
    if isinstance(weight, str) or isinstance(bias, str) or weight is None:
        return Declined("its weight is computed at run time")
    integers = quantised(weight)
    if integers is not None and (problem := blocks_cut(integers, attrs["w_out"], keep)):
        return Declined(problem)
    if bias is not None and bias.shape and bias.shape[-1] != 1:
        bias = take(bias, len(bias.shape) - 1, keep)
    return shrunk(node, (x, take(weight, attrs["w_out"], keep), bias), axis, keep)


def drop_rows_of_conv(rise: Rise, node: Node, wanted: Selection) -> RuleOutcome:
    """Output channels. In a grouped convolution whole groups go with their inputs; the others keep equally many outputs."""
    axis, keep = wanted.axis, wanted.keep
    x, weight, bias = (*node.inputs, None)[:3]
    attrs, groups = node.attrs, attributes(node, ConvAttrs)["groups"]
    if axis > attrs["axis"]:
        return Declined("it mixes positions along this axis")
    if axis < attrs["axis"]:
        return shrunk(node, (rise.select(x, axis, keep), weight, bias), axis, keep)
    if not isinstance(weight, Tensor) or isinstance(bias, str):
        return Declined("its weight is computed at run time")
    bias = None if bias is None else take(bias, 0, keep)
    if groups == 1:
        weight = take(weight, 1 if attrs.get("transposed") else 0, keep)
        return shrunk(node, (x, weight, bias), axis, keep)
    outs = int(node.output.shape[axis]) // groups
    ins = int(rise.shape(x)[axis]) // groups
    counts = count_by_group(keep, groups, outs)
    left = counts.nonzero()[0]
    if counts[left].min() != counts.max():
        return Declined("its groups would keep different numbers of outputs")
    inputs = members(left, ins)
    if attrs.get("transposed"):
        if counts[left[0]] != outs:
            return Declined("a grouped transposed convolution can only lose whole groups")
        weight = take(weight, 0, inputs)
    else:
        weight = take(weight, 0, keep)
    return shrunk(node, (rise.select(x, axis, inputs), weight, bias), axis, keep, groups=len(left))


def rise_through_pointwise(rise: Rise, node: Node, wanted: Selection) -> RuleOutcome:
    """To every operand that has the axis; a broadcast operand stays."""
    axis, keep = wanted.axis, wanted.keep
    inputs = []
    for i, operand in enumerate(node.inputs):
        local = None if operand is None else operand_axis(node, i, rise.shape(operand), axis)
        inputs.append(operand if local is None else rise.select(operand, local, keep))
    return shrunk(node, inputs, axis, keep)


def rise_along_other_axes(rise: Rise, node: Node, wanted: Selection) -> RuleOutcome:
    """An axis that the op does not touch rises; parameters that run along it are sliced."""
    attrs = attributes(node, AlongAttrs)
    axis, keep = wanted.axis, wanted.keep
    axes, x = attrs["axes"], node.inputs[0]
    shape = rise.shape(x)
    source = axis
    if attrs.get("drop"):
        source = [d for d in range(len(shape)) if d not in axes][axis]
    if source in axes and attrs["fn"] in WITHIN:
        return WITHIN[attrs["fn"]](rise, node, wanted)
    if source in axes:
        return Declined("it mixes the units with each other")
    inputs = [rise.select(x, source, keep)]
    for i, operand in enumerate(node.inputs[1:], start=1):
        local = None if operand is None else parameter_axis(node, i, rise.shape(operand), source, len(shape))
        inputs.append(operand if local is None else rise.select(operand, local, keep))
    return shrunk(node, inputs, axis, keep)


def _rise_to_repeated(rise: Rise, node: Node, wanted: Selection) -> RuleOutcome:
    """x, repeated along an axis a number of times known only at run time: the same positions of every repeat."""
    axis, keep = wanted.axis, wanted.keep
    x = node.inputs[0]
    each, period = int(rise.shape(x)[axis]), keep.period or int(node.output.shape[axis])
    read = np.isin(np.arange(period), keep)
    runs = np.tile(read, each // period) if each % period == 0 else read
    repeats = runs.reshape(-1, each) if runs.size % each == 0 else runs[None]
    if repeats.shape[1] != each or not np.all(repeats == repeats[0]):
        return Declined("its readers need different positions of its repeats")
    return shrunk(node, (rise.select(x, axis, np.flatnonzero(repeats[0]).tolist()),), axis, keep)


WITHIN = {"tile": _rise_to_repeated, "group_norm": rise_through_group_norm}  # along the axes that they act over


def rise_through_reshape(rise: Rise, node: Node, wanted: Selection) -> RuleOutcome:
    """Backwards through the map that a do goes through forwards (axes.py)."""
    axis, keep = wanted.axis, wanted.keep
    x = node.inputs[0]
    if not keep.ordered:  # only where the axis stays the one it is (raise_select)
        same = _same_axis(rise.shape(x), node.output.shape, axis)
        assert same is not None
        return shrunk(node, (rise.select(x, same, keep),), axis, keep)
    moved = rise.move(node.output.shape, rise.shape(x), axis, keep)
    if isinstance(moved, str):
        return rise_to_copies(rise, node, wanted) or Declined(moved)
    return shrunk(node, (rise.select(x, *moved),), axis, keep)


def _same_axis(before: Shape, after: Shape, axis: int) -> int | None:
    """The axis that a reshape makes this one of, where it only adds or drops axes of size 1 beside it."""
    for segment in segments(before, after):
        wide = [i for i in range(*segment.before) if before[i] != 1]
        if segment.after[0] <= axis < segment.after[1] and len(wide) == 1:
            alone = all(after[i] == 1 for i in range(*segment.after) if i != axis)
            return wide[0] if alone else None
    return None


def rise_through_transpose(rise: Rise, node: Node, wanted: Selection) -> RuleOutcome:
    axis, keep = wanted.axis, wanted.keep
    return shrunk(
        node, (rise.select(node.inputs[0], attributes(node, TransposeAttrs)["perm"][axis], keep),), axis, keep
    )


def rise_through_expand(rise: Rise, node: Node, wanted: Selection) -> RuleOutcome:
    """An axis that was expanded from size 1 is expanded to fewer positions."""
    axis, keep = wanted.axis, wanted.keep
    x = node.inputs[0]
    local = axis - (len(node.output.shape) - len(rise.shape(x)))
    operand = x if _is_copied(rise, node, axis) else rise.select(x, local, keep)
    return shrunk(node, (operand,), axis, keep)


def rise_through_concat(rise: Rise, node: Node, wanted: Selection) -> RuleOutcome:
    """Along the concatenated axis, each part gets its share; a part that nobody reads is dropped."""
    axis, keep = wanted.axis, wanted.keep
    if axis != attributes(node, ConcatAttrs)["axis"]:
        return shrunk(node, [rise.select(o, axis, keep) for o in node.inputs], axis, keep)
    if keep.period:
        return Declined("it joins samples")
    inputs, offset = [], 0
    for operand in node.inputs:
        size = rise.shape(operand)[axis]
        if not isinstance(size, int):
            return Declined("one of its parts has a dynamic size")
        share = [k - offset for k in keep if offset <= k < offset + size]
        if share:
            inputs.append(rise.select(operand, axis, share))
        offset += size
    shape = narrowed(node.output.shape, axis, keep)
    alone = len(inputs) == 1 and isinstance(inputs[0], str) and rise.shape(inputs[0]) == shape
    return as_copy(node, inputs[0], axis, keep) if alone else shrunk(node, inputs, axis, keep)


def rise_through_select(rise: Rise, node: Node, wanted: Selection) -> RuleOutcome:
    """select(select(x, J), K) -> select(x, J[K]); on different axes they swap places."""
    attrs = attributes(node, SelectAttrs)
    axis, keep = wanted.axis, wanted.keep
    if axis == attrs["axis"] and keep.period:
        return Declined("it splits the samples")
    if axis != attrs["axis"]:
        if not node.origin and axis > attrs["axis"]:  # one order only, or two selects would swap places forever
            return Declined("there is already a select along another axis here")
        return shrunk(node, (rise.select(node.inputs[0], axis, keep),), axis, keep)
    rest = tuple(attrs["keep"][k] for k in keep)
    if not node.origin and is_whole(rest, rise.shape(node.inputs[0])[axis]):
        return as_copy(node, node.inputs[0], axis, keep)
    return shrunk(node.with_attrs(keep=rest).with_marks(touched=True), node.inputs, axis, keep)


def rise_through_do(rise: Rise, node: Node, wanted: Selection) -> RuleOutcome:
    """A do that stays in the graph shrinks with its value, if nothing that it needs is lost."""
    axis, keep = wanted.axis, wanted.keep
    x, attrs = node.inputs[0], node.attrs
    value, *weights = node.inputs[1:]
    seen = rise.shape(value)
    if attrs["axis"] != axis:
        if len(seen) == len(node.output.shape) and seen[axis] != 1:
            value = rise.select(value, axis, keep)
        return shrunk(node, (rise.select(x, axis, keep), value, *weights), axis, keep)
    where = {u: i for i, u in enumerate(keep)}
    left = [i for i, u in enumerate(attrs["units"]) if u in where]
    parents = attrs.get("parents", ())
    if left and any(p not in where for p in parents):
        return Declined("an affine replacement reads units that are dropped here")
    if (
        not left
    ):  # no replaced unit is read: the do is a plain copy of what stays, and its readers can read that directly
        return as_copy(node, rise.select(x, axis, keep), axis, keep)
    if weights and len(attrs["units"]) != rise.shape(weights[0])[0]:
        return Declined("an affine replacement of blocks stays here")
    along = axis if len(seen) == len(node.output.shape) else 0
    if seen and seen[along] != 1:
        value = rise.select(value, along, left)
    weights = [rise.select(weight, 0, left) for weight in weights]
    changes: dict[str, object] = {"units": tuple(where[attrs["units"][i]] for i in left)}
    if parents:
        changes["parents"] = tuple(where[p] for p in parents)
    return shrunk(node, (rise.select(x, axis, keep), value, *weights), axis, keep, **changes)


def drop_columns_of_table(rise: Rise, node: Node, wanted: Selection) -> RuleOutcome:
    """The axes of a table after its rows; the first axes are those of the indices."""
    axis, keep = wanted.axis, wanted.keep
    ids, table = node.inputs
    column = axis - len(node.output.shape) + len(rise.shape(table))
    if column < 1:
        return shrunk(node, (rise.select(ids, axis, keep), table), axis, keep)
    return shrunk(node, (ids, rise.select(table, column, keep)), axis, keep)


def stop(rise: Rise, node: Node, wanted: Selection) -> RuleOutcome:
    return Declined(node.marks.why or f"{node.kind} makes all of its units at once")


RULES: dict[str, Callable[[Rise, Node, Selection], RuleOutcome]] = {
    "linear": drop_rows_of_linear,
    "conv": drop_rows_of_conv,
    "pointwise": rise_through_pointwise,
    "along": rise_along_other_axes,
    "reshape": rise_through_reshape,
    "transpose": rise_through_transpose,
    "expand": rise_through_expand,
    "concat": rise_through_concat,
    "select": rise_through_select,
    "do": rise_through_do,
    "matmul": rise_through_matmul,
    "attention": rise_through_attention,
    "embedding": drop_columns_of_table,
}


def needed(rise: Rise, node: Node, idle: Collection[str] = ()) -> Selection | None:
    """The part of a node that its readers need; `None` if they need all of it or if nothing is new. Idle nodes need nothing."""
    name = node.name
    if len(node.outputs) != 1 or name in rise.graph.outputs:
        return None
    readers = [rise.settled[reader] for reader in rise.uses[name] if reader not in idle]
    selects = [r for r in readers if r.op == "select"]
    if not selects:
        return None
    if len(selects) < len(readers) and any(r.op != "select" and not _reads_other_sizes(r, selects) for r in readers):
        return None
    if name not in rise.lost_readers and not [r for r in selects if not r.origin or r.marks.touched]:
        return None
    first, *others = [attributes(select, SelectAttrs) for select in selects]
    axis, period = first["axis"], first.get("period", 0)
    if [other for other in others if other["axis"] != axis or other.get("period", 0) != period]:
        return None
    if node.op == "expand" and _is_copied(rise, node, axis):
        selects = [_of_first_copies(rise, select) for select in selects]
        readers = [rise.settled[reader.name] for reader in readers]
    keep = _union([attributes(select, SelectAttrs)["keep"] for select in selects], period)
    whole = len(keep) == (period or node.output.shape[axis]) and keep.ordered
    return None if whole else Selection(axis, keep, tuple(readers))


def _union(parts: Sequence[Sequence[int]], period: int) -> Keep:
    first = parts[0]
    if type(first) is Keep and first.period == period and all(part is first or part == first for part in parts[1:]):
        return first
    return Keep(sorted(set().union(*parts)), period)


def _is_copied(rise: Rise, node: Node, axis: int) -> bool:
    """Whether an expand makes this axis: then all its positions are equal."""
    local = axis - (len(node.output.shape) - len(rise.shape(node.inputs[0])))
    return local < 0 or rise.shape(node.inputs[0])[local] == 1


def _of_first_copies(rise: Rise, select: Node) -> Node:
    """Copies are equal: a reader of some of them may read the first ones, and share those with other readers."""
    if not select.origin:
        rise.settled[select.name] = select.with_attrs(keep=tuple(range(len(attributes(select, SelectAttrs)["keep"]))))
    return rise.settled[select.name]


def _reads_other_sizes(reader: Node, selects: Sequence[Node]) -> bool:
    """An op that reads the size of another axis needs nothing of this one."""
    if reader.op == "plane":
        return all(
            attributes(select, SelectAttrs)["axis"] <= attributes(reader, PlaneAttrs)["axis"] for select in selects
        )
    sizes = reader.marks.shape_only
    return sizes is not None and all(attributes(select, SelectAttrs)["axis"] not in sizes for select in selects)


def settle_readers(rise: Rise, name: str, keep: Keep, readers: Sequence[Node]) -> None:
    """Readers select from what is left: a select of all of it disappears, the others get new indices."""
    users: list[str] = []
    for reader in readers:
        if reader.op != "select":
            users.append(reader.name)
        elif not reader.origin and (
            attributes(reader, SelectAttrs)["keep"] is keep or attributes(reader, SelectAttrs)["keep"] == keep
        ):
            del rise.settled[reader.name]
            users += rise.rename(reader.name, name)
        else:
            users.append(reader.name)
            period = {"period": len(keep)} if keep.period else {}
            where = {k: i for i, k in enumerate(keep)}
            places = [where[k] for k in attributes(reader, SelectAttrs)["keep"]]
            again = Keep(places, ordered=places == sorted(places))  # what a norm gives may be read in another order
            rise.settled[reader.name] = reader.with_attrs(keep=again, **period).with_marks(touched=True)
    rise.uses[name] = list(dict.fromkeys(users))


def run(graph: Graph, log: Log) -> tuple[Graph, bool]:
    """Raise every select as far as possible, and drop what nobody reads any more."""
    rise = Rise(graph, log)
    idle = idle_nodes(graph) if log.idle is None else log.idle
    idle = idle and idle_and_whole(graph, idle, idle_nodes(graph))
    loose = idle and without_sizes(graph, idle)
    uses, outputs, stack = rise.uses, graph.outputs, list(graph.nodes)
    while stack:
        node = stack.pop()
        name = node.name
        alive = uses[name] or name in outputs or any(uses[v.name] or v.name in outputs for v in node.outputs[1:])
        if not alive and name not in idle and not node.marks.effect:
            rise.changed = rise.changed or bool(node.origin)
            if node.origin:
                rise.lost_readers.update(node.values())
                log.did("dead_subgraph", node, DROPPED)
            continue
        if node.marks.recurrence is not None and any(value.name in rise.selected for value in node.outputs):
            stack += narrow_recurrence(rise, node, log)
            continue
        wanted = needed(rise, node, loose) if name in rise.selected else None
        outcome = None
        if wanted is not None:
            places = [(name, reader.name) for reader in wanted.readers]
            outcome = apply_rule(rise, raise_select, node, wanted, places)
        if wanted is None or outcome is None or outcome.node is None:
            rise.pending.clear()
            rise.settle(node)
            continue
        if node.op != "select" or outcome.movement is Movement.COPIES:
            log.did("dead_subgraph", node, outcome)
        if loose:
            drop_idle_readers(rise, name, loose)
        settle_readers(rise, name, wanted.keep, wanted.readers)
        if outcome.movement is Movement.COPIES:
            _replace_by_operand(rise, outcome.node)
        else:
            rise.settle(outcome.node)
        stack += rise.pending
        rise.pending.clear()
    for value in graph.inputs:
        for user in uses[value.name]:
            if rise.settled[user].op == "select":
                log.reasons.setdefault((value.name, user), "it is an input of the model")
    return rise.result(), rise.changed


def narrow_recurrence(rise: Rise, node: Node, log: Log) -> list[Node]:
    """Settle a recurrent op without the hidden units that nobody reads, and return the selects that it left in front of itself."""
    needed: dict[str, Sequence[int] | None] = {}
    places: list[tuple[str, str]] = []
    for value in node.outputs:
        readers = [rise.settled[reader] for reader in rise.uses[value.name]]
        last, size = len(value.shape) - 1, value.shape[-1] if value.shape else 0
        parts = [attributes(r, SelectAttrs) for r in readers if r.op == "select"]
        places += [(value.name, r.name) for r in readers if r.op == "select"]
        whole = value.name in rise.graph.outputs or len(parts) < len(readers)
        if whole or any(part["axis"] != last or part.get("period") for part in parts):
            needed[value.name] = range(size) if isinstance(size, int) else ()  # `narrow` declines where it is not known
        else:
            needed[value.name] = _union([part["keep"] for part in parts], 0) if parts else None
    outcome = narrow(rise, node, needed)
    if isinstance(outcome, Declined):
        log.reasons.update(dict.fromkeys(places, outcome.reason))
        rise.pending.clear()
        rise.settle(node)
        return []
    rise.changed = True
    detail = f"{hidden_size(node)} -> {hidden_size(outcome.node)} hidden units"
    log.did("dead_subgraph", node, Rewritten(Movement.NARROWED, detail))
    for name, keep in outcome.keeps.items():
        settle_readers(rise, name, keep, [rise.settled[reader] for reader in rise.uses[name]])
    rise.settle(outcome.node)
    pending = list(rise.pending)
    rise.pending.clear()
    return pending


def raise_select(rise: Rise, node: Node, wanted: Selection) -> RuleOutcome:
    """What the op's rule answers. Declined if it would select from an operand of dynamic size, because that may be broadcast."""
    if not wanted.keep.ordered and not _keeps_any_order(rise, node, wanted):
        return Declined("its readers want the units in another order")
    outcome = RULES.get(node.op, stop)(rise, node, wanted)
    for select in rise.pending:
        size = rise.shape(select.inputs[0])[attributes(select, SelectAttrs)["axis"]]
        if not isinstance(size, int) and "period" not in select.attrs:
            return Declined(
                f"the size of axis {attributes(select, SelectAttrs)['axis']} of its operand is dynamic ({size})"
            )
    return outcome


def idle_nodes(graph: Graph) -> frozenset[str]:
    """The host's own nodes on which no output and no effect depends."""
    needed = set(graph.outputs)
    idle = set()
    for node in reversed(graph.nodes):
        first, *others = node.outputs
        read = first.name in needed or any(value.name in needed for value in others)
        if read or node.marks.effect or not node.origin:
            needed.update(node.values())
        else:
            idle.add(node.name)
    return frozenset(idle)


def _keeps_any_order(rise: Rise, node: Node, wanted: Selection) -> bool:
    """Whether the op's rule also holds for positions that are not in ascending order."""
    if node.op == "reshape":
        return _same_axis(rise.shape(node.inputs[0]), node.output.shape, wanted.axis) is not None
    return node.op in ("pointwise", "transpose", "select") or (
        node.op == "along" and attributes(node, AlongAttrs)["fn"] != "tile"
    )


def _is_on_its_way(node: Node) -> bool:
    return node.op in ("do", "select") and (not node.origin or node.marks.touched)


def _replace_by_operand(rise: Rise, node: Node) -> None:
    """Let the readers of a node that only copies read its operand instead."""
    operand = node.inputs[0]
    assert isinstance(operand, str)
    users = rise.rename(node.name, operand)
    rise.uses[operand] = list(dict.fromkeys([*rise.uses[operand], *users]))
    if any(rise.settled[user].op == "select" for user in users):
        rise.selected.add(operand)


PASS = Pass("dead_subgraph", run, moves=_is_on_its_way)
