"""A linear op absorbs what replaced units send it, and keeps only the columns of the others. `convolution.py` does the same for convolutions.

    y = W x + b,  x_S := c           ->  y = W_K x_K + (b + W_S c)
    y = W x + b,  x_S := B x_P + β   ->  y = (W_K + [W_S B]_P) x_K + (b + W_S β)

Folding is linear algebra in float64, cast once to the parameter's dtype: equal to the clamped model up to rounding.

What a fold adds to a value is added at the best place: to a parameter that is added anyway, or after the batch norm that
follows. Neither adds an op; the second lets runtimes fuse a convolution with its batch norm.

    %s = add(%y, v)                               %z = add(%y, p + v)
    %z = add(%s, p)                         ->

    %s = add(%y, v)                               %b = batch_norm(%y, γ, β, μ, σ²)
    %z = batch_norm(%s, γ, β, μ, σ²)        ->    %z = add(%b, v · γ/√(σ²+ε))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cmrc.ir.axes import compress, resized, spread
from cmrc.ir.graph import (
    NO_MARKS,
    Array,
    Index,
    Keep,
    Marks,
    Node,
    Operand,
    Tensor,
    Value,
    apply,
    attributes,
    literal,
    quickly_made,
    take,
)
from cmrc.ir.ops.affine import ConvAttrs, DoAttrs, LinearAttrs, slab_of
from cmrc.ir.ops.functions import AlongAttrs, PointwiseAttrs
from cmrc.ir.spec import AxisAttrs
from cmrc.ir.tensors import constant, quantised
from cmrc.passes.rewriting.integers import integer_bias, rounding_needed
from cmrc.passes.rewriting.rewriter import (
    NOTHING_TO_ADD,
    PAST,
    Declined,
    Rewritten,
    RuleOutcome,
    Sweep,
    complement,
    folded,
    taken,
)

Mix = tuple[Sequence[int], Tensor]  # the parents, and the matrix B that rebuilds the replaced units from them
ADDEND = Marks(addend=True)  # a sum that constant_fold merges with the next


# ---------------------------------------------------------------- constants that arrive

NOTHING = np.zeros(())
NOT_FINITE = "its result for these constants is infinite or not a number"


@quickly_made
@dataclass(frozen=True, slots=True)
class Known:
    """Units of an axis and their constants: an array that broadcasts over the other axes, or the name of a value (`runtime`)."""

    source: str
    axis: int
    units: Index
    slab: Array
    sources: tuple[int, ...]
    runtime: str = ""

    def at(self, units: Sequence[int]) -> Array:
        if units is self.units or tuple(units) == self.units:
            return self.full()
        return self.full().take(self.positions(units), axis=self.axis)

    def positions(self, units: Sequence[int]) -> list[int]:
        where = {unit: i for i, unit in enumerate(self.units)}
        return [where[u] for u in units]

    def full(self) -> Array:
        return spread(self.slab, self.axis, len(self.units))


Facts = dict[int, Known]


def known_of(node: Node) -> Known:
    """The units and constants of a constant do."""
    source, value = node.inputs[:2]
    assert isinstance(source, str) and value is not None
    rank, attrs = len(node.output.shape), attributes(node, DoAttrs)
    units, sources = Index.of(attrs["units"]), node.marks.sources
    if isinstance(value, str):
        return Known(source, attrs["axis"], units, NOTHING, sources, value)
    assert isinstance(value, Tensor)
    return Known(source, attrs["axis"], units, slab_of(constant(value), attrs["axis"], rank), sources)


def bare(node: Node, facts: Facts) -> Node:
    """The node with its operands as they were before the do's."""
    return node.with_inputs([facts[i].source if i in facts else o for i, o in enumerate(node.inputs)])


def sources_of(facts: Facts) -> tuple[int, ...]:
    first, *others = facts.values()
    return tuple(sorted({*first.sources, *(s for fact in others for s in fact.sources)})) if others else first.sources


def sink(sweep: Sweep, node: Node, facts: Facts, axis: int, units: Sequence[int], slab: Array) -> RuleOutcome:
    """Emit the op on its operands as they were, followed by a do with what its units become."""
    if not np.isfinite(slab).all():
        return Declined(NOT_FINITE)
    sweep.emit(bare(node, facts))
    sweep.put_do(node.output, axis, units, compress(slab, axis), sources_of(facts))
    return PAST


def position_free(slab: Array, axis: int) -> bool:
    """Whether each unit has one constant, the same at every position of the other axes."""
    return bool(slab.size == slab.shape[axis])


def add_tensors(first: Tensor | None, second: Tensor, scale: float = 1.0, dtype: str = "") -> Tensor:
    """first + scale * second, as a tensor expression."""
    dtype = dtype or (first or second).dtype
    if first is None:
        first = literal(np.zeros(()))
    shape = np.broadcast_shapes(first.shape, second.shape)
    return apply("pointwise", (first, second), {"fn": "add", "alpha": scale, "rank": len(shape)}, shape, dtype)


def add_after(sweep: Sweep, node: Node, addend: Tensor | str) -> None:
    """Emit `node`, then `node + addend`, and let all readers read the sum."""
    sweep.emit(node)
    out = node.output
    if 0 in out.shape:  # there is no bias to add to, and onnxruntime cannot fuse such a sum with its MatMul
        return
    total = Value(sweep.fresh(out.name, "bias"), out.shape, out.dtype)
    marks = NO_MARKS if isinstance(addend, str) else ADDEND
    sweep.emit(Node("pointwise", (out.name, addend), (total,), {"fn": "add"}, path=node.path, marks=marks))
    sweep.redirected[out.name] = total.name


def fold_into_linear(
    sweep: Sweep, node: Node, x: str, units: Sequence[int], slab: Array, mix: Mix | None = None
) -> RuleOutcome:
    """y = W x + b with units of x replaced: see the module's docstring."""
    attrs, weight = attributes(node, LinearAttrs), node.inputs[1]
    assert isinstance(weight, Tensor)
    keep = left_of(units, weight.shape[attrs["w_in"]], mix)
    integers = quantised(weight)
    if integers is not None and (problem := rounding_needed(integers, attrs["w_in"], keep, mixed=mix is not None)):
        return Declined(problem)
    columns = take(mixed_columns(weight, attrs["w_in"], units, mix), attrs["w_in"], keep)
    smaller = node.with_inputs((sweep.select(x, attrs["axis"], keep), columns, bias_of(node)))
    if not slab.any():
        sweep.emit(smaller)
        return NOTHING_TO_ADD
    if position_free(slab, attrs["axis"]):
        return _add_to_linear(sweep, node, smaller, x, units, slab)
    return _add_buffer_to_linear(sweep, node, smaller, units, slab)


def removed_by(weight: Tensor, smaller: Node) -> int:
    """How many numbers of a weight a smaller node does not need."""
    columns = smaller.inputs[1]
    assert isinstance(columns, Tensor)
    return math.prod(weight.shape) - math.prod(columns.shape)


MULTIPLIED = ("float32", "float64")  # every runtime can multiply these


def is_better_multiplied(added: int, values: Array, columns: Tensor, smaller: Node, weight: Tensor) -> bool:
    """Whether the sum that constants by position add has more numbers than the columns that it replaces, and its factors have fewer.

    Then the file holds the factors: onnxruntime multiplies them when it loads the model, torch once per batch. A stored sum
    may still go into an existing bias.
    """
    if smaller.output.dtype not in MULTIPLIED or quantised(weight) is not None:
        return False
    bias = int(smaller.output.shape[attributes(smaller, AxisAttrs)["axis"]])
    return values.size + math.prod(columns.shape) + bias <= added and added > removed_by(weight, smaller)


def fold_into_weights(
    sweep: Sweep, node: Node, x: str, axis: int, units: Sequence[int], slab: Array, mix: Mix | None = None
) -> RuleOutcome:
    """A host op that reads x only through weights, like the gates of a recurrent op: columns go, and W_S c is added to their biases."""
    shape = sweep.values[x].shape
    if axis != len(shape) - 1:
        return Declined("it mixes positions along the replaced axis")
    if not position_free(slab, axis):
        return Declined("the constants differ by position, but its bias is the same at every step")
    keep = left_of(units, int(shape[axis]), mix)
    if not keep:
        return Declined("nothing of its input would be left")
    inputs = [*node.inputs, *[None] * (1 + max(max(pair) for pair in node.marks.weighed) - len(node.inputs))]
    values = np.broadcast_to(slab.reshape(-1), len(units))
    for position, place in node.marks.weighed:
        weight, bias = inputs[position], inputs[place] if place >= 0 else None
        if not isinstance(weight, Tensor) or isinstance(bias, str):
            return Declined("its weight is computed at run time")
        if place < 0 and slab.any():
            return Declined("it has no bias that could absorb the constants")
        last = len(weight.shape) - 1
        inputs[position] = take(mixed_columns(weight, last, units, mix), last, keep)
        if slab.any():
            inputs[place] = add_tensors(bias, _sums_of_gates(weight, units, values), dtype=weight.dtype)
    inputs[0] = sweep.select(x, axis, keep)
    while inputs[-1] is None:
        inputs.pop()
    sweep.emit(node.with_inputs(inputs))
    return folded("constants into the bias") if slab.any() else NOTHING_TO_ADD


def _sums_of_gates(weight: Tensor, units: Sequence[int], values: Array) -> Tensor:
    """W_S c. With one matrix per direction, zeros follow for the bias of the hidden state."""
    attrs = {"axis": len(weight.shape) - 1, "units": tuple(units)}
    sums = apply("weigh_columns", (weight, literal(values)), attrs, weight.shape[:-1], weight.dtype)
    if len(weight.shape) == 2:
        return sums
    directions, rows = sums.shape
    nothing = literal(np.zeros(sums.shape))
    return apply("concat", (sums, nothing), {"axis": 1}, (directions, 2 * rows), weight.dtype)


def bias_of(node: Node) -> Operand:
    return node.inputs[2] if len(node.inputs) > 2 else None


def left_of(units: Sequence[int], size: int, mix: Mix | None) -> Keep:
    """The units that stay, then the replaced ones from which others are rebuilt: a norm puts its own numbers there."""
    keep = complement(units, size)
    replaced = set(units) if mix is not None else set[int]()
    carriers = [p for p in mix[0] if p in replaced] if mix is not None else []
    return Keep((*keep, *carriers), ordered=False) if carriers else keep


def conv_columns(weight: Tensor, node: Node, keep: Sequence[int]) -> Tensor:
    """The weight for the input channels that stay. In a grouped convolution, every group keeps the same number."""
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


def mixed_columns(weight: Tensor, axis: int, units: Sequence[int], mix: Mix | None, **grouping: int) -> Tensor:
    """W_P += W_S · B: the parents' columns take over what the replaced units contributed."""
    if mix is None:
        return weight
    parents, matrix = mix
    replaced = {u: i * matrix.shape[0] // len(units) for i, u in enumerate(units)}
    own = {(replaced[p], i * matrix.shape[1] // len(parents)) for i, p in enumerate(parents) if p in replaced}
    if own:  # a parent that is itself replaced: its own column goes
        array = np.array(constant(matrix))
        array[tuple(np.transpose(sorted(own)))] -= 1.0
        matrix = literal(array)
    attrs = {"axis": axis, "units": tuple(units), "parents": tuple(parents), **grouping}
    return apply("fold_columns", (weight, matrix), attrs, weight.shape, weight.dtype)


def _add_to_linear(sweep: Sweep, node: Node, smaller: Node, x: str, units: Sequence[int], slab: Array) -> Rewritten:
    """b += W_S c: in the bias if the host's op has a place for one, otherwise in an op after it."""
    attrs, weight, bias = attributes(node, LinearAttrs), node.inputs[1], bias_of(node)
    assert isinstance(weight, Tensor)
    outs, alpha, beta = weight.shape[attrs["w_out"]], attrs.get("alpha", 1.0), attrs.get("beta", 1.0)

    def add_up(of: Node, values: Array) -> Tensor:
        columns = {"axis": attrs["w_in"], "units": tuple(units)}
        return apply("weigh_columns", (of.inputs[1], literal(values)), columns, (outs,), weight.dtype)  # type: ignore[arg-type]

    values = np.broadcast_to(slab.reshape(-1), len(units))
    vector = add_up(node, values)
    if node.marks.takes_bias and not isinstance(bias, str) and beta:
        whole = whole_bias(sweep, node, x, values, outputs=attrs["w_out"], add_up=add_up)
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


def whole_bias(
    sweep: Sweep, node: Node, x: str, values: Array, *, outputs: int, add_up: Callable[[Node, Array], Tensor]
) -> Tensor | None:
    """The bias as a sum of whole numbers, if weights and constants are whole numbers on their grids."""
    weight = node.inputs[1]
    integers = quantised(weight) if isinstance(weight, Tensor) else None
    return None if integers is None else integer_bias(sweep, node, x, integers, values, outputs=outputs, add_up=add_up)


def _add_buffer_to_linear(sweep: Sweep, node: Node, smaller: Node, units: Sequence[int], slab: Array) -> Rewritten:
    """Constants that differ by position: W_S c has these positions too."""
    attrs, weight = attributes(node, LinearAttrs), node.inputs[1]
    assert isinstance(weight, Tensor)
    axis, w_in, w_out = attrs["axis"], attrs["w_in"], attrs["w_out"]
    values = spread(slab, axis, len(units))
    shape = tuple(int(n) for n in resized(values.shape, axis, weight.shape[w_out]))
    product = {"axis": axis, "w_in": w_in, "w_out": w_out, "alpha": attrs.get("alpha", 1.0)}
    columns = take(weight, w_in, units)
    if axis == len(shape) - 1 and is_better_multiplied(math.prod(shape), values, columns, smaller, weight):
        known = Value(sweep.fresh(node.name, "known"), shape, node.output.dtype)
        factor = literal(values * attrs.get("alpha", 1.0))
        sweep.emit(Node("linear", (factor, columns, None), (known,), {**product, "alpha": 1.0}, path=node.path))
        add_after(sweep, smaller, known.name)
        return folded("constants that differ by position into a product with the columns that it needs")
    addend = apply("linear", (literal(values), columns), product, shape, weight.dtype)
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


def fold_into_rows(
    sweep: Sweep, node: Node, rows: Node, x: str, x_axis: int, axis: int, units: Sequence[int], slab: Array
) -> Rewritten:
    """table[ids] x with units of x := c is table_K[ids] x_K + (table_S c)[ids]: the sums form another table."""
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


def merge_addends(sweep: Sweep, node: Node) -> Node:
    """(y + v) + p -> y + (p + v), if v came from folding and p is a parameter: no additional op at run time."""
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
        if node.marks.inside and total.shape != other.shape:  # a fused node accepts only a parameter of that shape
            continue
        sweep.changed = True
        return replace(node, inputs=(y, total) if i == 0 else (total, y))
    return node


def add_behind_batch_norm(sweep: Sweep, node: Node) -> bool:
    """bn(conv(x) + p) -> bn(conv(x)) + p·γ/σ, if p came from folding: runtimes fuse the convolution with its batch norm."""
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
    """What a batch norm without its shift makes of a plane. A plane known only at run time is scaled through the kernel that computes it."""
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


def emit_with_tensors(sweep: Sweep, node: Node, inputs: Sequence[Operand]) -> RuleOutcome:
    """The op with tensors for the operands that were known completely; x + 0 is x."""
    kept = _summand_beside_zero(sweep, node, inputs)
    if kept is not None:
        sweep.redirected[node.name] = kept
        return NOTHING_TO_ADD
    sweep.emit(node.with_inputs(inputs))
    return taken("a constant operand")


def _summand_beside_zero(sweep: Sweep, node: Node, inputs: Sequence[Operand]) -> str | None:
    """The x of x + 0, 0 + x and x - 0, if it is the whole result."""
    attrs = attributes(node, PointwiseAttrs)
    for position in {"add": (0, 1), "sub": (0,)}.get(attrs["fn"], ()):
        x, other = inputs[position], inputs[1 - position]
        nothing = isinstance(other, Tensor) and not np.any(constant(other))
        scaled = position == 1 and attrs.get("alpha", 1.0) != 1.0
        if isinstance(x, str) and nothing and not scaled:
            value = sweep.values[x]
            return x if (value.shape, value.dtype) == (node.output.shape, node.output.dtype) else None
    return None
