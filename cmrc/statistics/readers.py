"""The ops that read a site's units, and their weights: W of the next affine ops, with a column for each unit.

    %a = relu(%h);  %s = reshape(%a);  %y = linear(%s, W)        readers(%a) = [W as [out, units]]

Found by sending two arrays through the ops between: the number of the column each element holds, and the factor it was
scaled by. Ops that move elements are run by their own meaning; affine functions scale; a nonlinear function in between
is passed over, which makes W a surrogate there (`exact` says so).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from scipy.linalg import block_diag

from cmrc.errors import ObjectiveError
from cmrc.ir.axes import product
from cmrc.ir.graph import Array, Node, Shape, Tensor, attributes
from cmrc.ir.ops.affine import ConvAttrs, LinearAttrs
from cmrc.ir.ops.functions import ALONG, POINTWISE, AlongAttrs, PointwiseAttrs
from cmrc.ir.ops.layout import ConcatAttrs
from cmrc.ir.recurrence import is_joined, recurrence_of, returned_state
from cmrc.ir.spec import AxisAttrs
from cmrc.ir.tensors import constant, evaluate_op
from cmrc.program.sites import Sites
from cmrc.statistics.columns import Columns

MOVES = {"reshape", "transpose", "select", "expand"}
NONE = -1.0  # the number of no column


@dataclass(frozen=True, slots=True, eq=False)
class Reader:
    """An affine op that reads the columns: its weights as [outputs, columns], one per kernel position."""

    node: Node
    weight: Array
    exact: bool  # whether nothing but movement and affine functions lies between


@dataclass(frozen=True, slots=True, eq=False)
class _Reached:
    column: Array
    scale: Array
    exact: bool


@dataclass(frozen=True, slots=True, eq=False)
class Elements:
    """A value in which every column of a site is one unit of an axis: where affine maps between columns can be put."""

    value: str
    axis: int
    unit: Array  # of each column


def elements(program: Sites, columns: Columns) -> Elements | None:
    """The site itself where its units are numbers; of heads, what the next op reads once they lie side by side in one axis.

        %a = attention(...)  [batch, heads, tokens, vector];  %s = reshape(transpose(%a))  [batch, tokens, heads · vector]

    None where somebody else reads the heads on the way, or they never lie side by side.
    """
    if columns.features == 1:
        return Elements(columns.value, columns.axis, np.arange(columns.units))
    if columns.slots > 1:
        return None
    name, shapes = columns.value, {name: _smallest(value.shape) for name, value in program.values.items()}
    number = _numbers(columns, shapes[name])
    while True:
        axis_and_units = _one_axis(number, columns.count)
        if axis_and_units is not None and name not in program.inside:
            return Elements(name, *axis_and_units)
        reading = program.consumers[name]
        if len(reading) != 1 or reading[0].op not in ("transpose", "reshape") or name in program.graph.outputs:
            return None
        name = reading[0].name
        attrs = {**reading[0].attrs, "shape": shapes[name]} if reading[0].op == "reshape" else reading[0].attrs
        number = np.asarray(evaluate_op(reading[0].op, attrs, number))


def _one_axis(number: Array, count: int) -> tuple[int, Array] | None:
    """The axis along which every column has exactly one position, everywhere the same, and the position of each column."""
    for axis, size in enumerate(number.shape):
        rows = np.moveaxis(number, axis, -1).reshape(-1, size)
        if size == count and (rows == rows[0]).all() and len(np.unique(rows[0])) == count:
            return axis, np.argsort(rows[0])
    return None


def readers(program: Sites, columns: Columns) -> list[Reader]:
    """Every affine op that the units reach."""
    graph = program.graph
    shapes = {name: _smallest(value.shape) for name, value in graph.values().items()}
    reading: list[Reader] = []
    name = columns.value
    if name in program.hidden_states:  # the recurrence reads it, and whoever reads what the op returns
        node, _ = program.hidden_states[name]
        reading.append(Reader(node, hidden_weights(node), True))
        name = program.tapped(name) or node.name
    shape = shapes[name]
    reached = {name: _Reached(_numbers(columns, shape), np.ones(shape), True)}
    for node in graph.nodes:
        if not any(name in reached for name in node.values()):
            continue
        if node.op in ("linear", "conv"):
            reading.extend(_read(node, reached, columns))
            continue
        passed = _pass(node, reached, shapes)
        if passed is not None:
            reached[node.name] = passed
    return reading


def hidden_weights(node: Node) -> Array:
    """The weights by which a recurrence reads its own hidden units, [gates, units]."""
    matrices = [constant(m) for cell in recurrence_of(node).cells if isinstance(m := node.inputs[cell[1]], Tensor)]
    flat = [matrix.reshape(-1, matrix.shape[-1]).astype(np.float64) for matrix in matrices]
    return np.asarray(block_diag(*flat) if is_joined(node, returned_state(node)) else np.concatenate(flat))


def outgoing(program: Sites, columns: Columns) -> Array:
    """The weights of all readers, one above the other: [outputs, columns]."""
    reading = readers(program, columns)
    if not reading:
        raise ObjectiveError(
            "no affine op reads its units",
            node=columns.name,
            fix='choose a site before a linear or conv op, or an objective that needs no weights ("variance", "task")',
        )
    return reading[0].weight if len(reading) == 1 else np.concatenate([reader.weight for reader in reading])


def beside(program: Sites, columns: Columns) -> Columns | None:
    """In a residual block, the value that the result of the next op is added to; None elsewhere.

    That op is linear, or a convolution of single positions; a bias, batch norm and idle dropout may stand between it and the sum.
    """
    place = elements(program, columns)
    reading = [] if place is None else program.consumers[place.value]
    if (
        place is None
        or len(reading) != 1
        or reading[0].inputs[0] != place.value
        or not _reads_each_position(reading[0])
    ):
        return None
    result = _norm_behind(program, reading[0]) or reading[0]
    name, added = _only_reader(program, result.name)
    if added is None or attributes(added, PointwiseAttrs)["fn"] != "add":
        return None
    others = [other for other in added.values() if other != name]
    if len(others) != 1 or program.values[others[0]].shape != result.output.shape:
        return None
    axis = attributes(reading[0], AxisAttrs)["axis"]
    return Columns(
        program.title(others[0]), others[0], axis, int(result.output.shape[axis]), positions=columns.positions
    )


def joining(program: Sites, columns: Columns) -> Array:
    """The weights by which columns reach the value `beside` them: those of the reader, times what batch norm makes of its results."""
    weight, place = outgoing(program, columns), elements(program, columns)
    assert place is not None
    norm = _norm_behind(program, program.consumers[place.value][0])
    return weight if norm is None else weight * norm_scale(norm)[:, None]


def _reads_each_position(node: Node) -> bool:
    """Whether an output is made from the inputs at its own position alone."""
    if node.op == "linear":
        return True
    if node.op != "conv" or not isinstance(node.inputs[1], Tensor):
        return False
    attrs = attributes(node, ConvAttrs)
    single = all(size == 1 for size in (*node.inputs[1].shape[2:], *attrs["stride"], attrs["groups"]))
    padded = isinstance(attrs["pad"], str) or any(any(pad) for pad in attrs["pad"])
    return single and not padded and not attrs.get("transposed")


def _norm_behind(program: Sites, node: Node) -> Node | None:
    """The batch norm that alone reads a result, if its numbers are known."""
    name, norm = _only_reader(program, node.name)
    if norm is None or norm.inputs[0] != name:
        return None
    known = not any(isinstance(operand, str) for operand in norm.inputs[1:])
    return norm if known and attributes(norm, PointwiseAttrs)["fn"] == "batch_norm" else None


def _only_reader(program: Sites, name: str) -> tuple[str, Node | None]:
    """The pointwise op that alone reads a value, and what it reads it as: behind idle dropout and a bias it has another name."""
    reading = program.consumers[name]
    if len(reading) != 1 or reading[0].op != "pointwise":
        return name, None
    fn = attributes(reading[0], PointwiseAttrs)["fn"]
    if fn == "identity" or (fn == "add" and reading[0].values() == [name]):
        return _only_reader(program, reading[0].name)
    return name, reading[0]


def norm_scale(norm: Node) -> Array:
    """By what a batch norm multiplies each channel."""
    weight, variance = norm.inputs[1], norm.inputs[4]
    assert isinstance(variance, Tensor)
    scale = 1.0 / np.sqrt(constant(variance) + attributes(norm, PointwiseAttrs)["eps"])
    return np.asarray(scale * constant(weight) if isinstance(weight, Tensor) else scale)


def _output_axis(node: Node) -> int:
    """The axis of a weight along which the outputs lie."""
    if node.op == "linear":
        return attributes(node, LinearAttrs)["w_out"]
    return 1 if attributes(node, ConvAttrs).get("transposed") else 0


def incoming(program: Sites, columns: Columns) -> Array:
    """The weights that make the units, [units, inputs]: of the nearest affine op before the site."""
    producers = program.producers
    name, axis = columns.value, columns.axis
    while name in producers:
        node = producers[name]
        if node.op in ("linear", "conv"):
            weight = node.inputs[1]
            assert isinstance(weight, Tensor)
            rows = np.moveaxis(constant(weight), _output_axis(node), 0)
            if len(rows) == columns.units and attributes(node, AxisAttrs)["axis"] == axis:
                return rows.reshape(len(rows), -1).astype(np.float64)
            break
        known = [operand for operand in node.values() if program.axes.get(operand) == axis]
        if node.op not in ("pointwise", "along") or not known:
            break
        name = known[0]
    raise ObjectiveError(
        "no affine op before it makes its units one by one",
        node=columns.name,
        fix='use an objective other than "magnitude", or a site after a linear or conv op',
    )


def closed_form(program: Sites, columns: Columns) -> Array | None:
    """W where the site is the operand of the op that makes the model's first output, so that logits are W a + b."""
    reading = readers(program, columns)
    direct = len(reading) == 1 and reading[0].node.op == "linear" and reading[0].node.inputs[0] == columns.value
    if not direct or reading[0].node.name != program.graph.outputs[0] or columns.slots > 1:
        return None
    return reading[0].weight


def logits_of(program: Sites, columns: Columns) -> tuple[Array, Array] | None:
    """W and b where the model's first output is W a + b, with its classes along the last axis."""
    weight = closed_form(program, columns)
    if weight is None:
        return None
    node = program.producers[program.graph.outputs[0]]
    if attributes(node, AxisAttrs)["axis"] != len(node.output.shape) - 1:
        return None
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    added = np.zeros(len(weight)) if bias is None else constant(bias) if isinstance(bias, Tensor) else None
    return None if added is None else (weight, np.broadcast_to(added.astype(np.float64), len(weight)))


def _smallest(shape: Shape) -> tuple[int, ...]:
    """The shape where every size known only at run time is 1."""
    return tuple(product([dim])[0] for dim in shape)


def _numbers(columns: Columns, shape: tuple[int, ...]) -> Array:
    """At each element of the value the number of its column."""
    each = np.arange(columns.units * columns.features // columns.slots, dtype=np.float64).reshape(columns.units, -1)
    spread = [1] * len(shape)
    spread[columns.axis] = columns.units
    if each.shape[1] > 1:
        spread[-1] = each.shape[1]
    return np.broadcast_to(each.reshape(spread), shape)


def _read(node: Node, reached: Mapping[str, _Reached], columns: Columns) -> Iterator[Reader]:
    x, weight = node.inputs[0], node.inputs[1]
    if not isinstance(x, str) or x not in reached:
        return
    assert isinstance(weight, Tensor)
    axis = attributes(node, AxisAttrs)["axis"]
    source = reached[x]
    number, scale = (np.moveaxis(a, axis, -1).reshape(-1, a.shape[axis]) for a in (source.column, source.scale))
    if not (number == number[0]).all():
        return  # it reads across positions, not units
    matrix = constant(weight).astype(np.float64)
    if node.op == "linear":
        attrs = attributes(node, LinearAttrs)
        wide = np.moveaxis(matrix, attrs["w_in"], -1)[None] * attrs.get("alpha", 1.0)
    else:
        wide = _conv_columns(node, matrix)
    if (scale[0] != 1).any():
        wide = wide * scale[0]
    count = columns.units * columns.features // columns.slots
    # A unit may fill several inputs of the op (a flattened plane): each place has its own rows.
    mine = np.flatnonzero(number[0] >= 0)
    mine = mine[np.argsort(number[0][mine], kind="stable")]
    unit = number[0][mine].astype(np.int64)
    filled = np.bincount(unit, minlength=count)
    if not len(mine):
        return
    taken = np.full((filled.max(), count), -1)
    taken[np.arange(len(mine)) - (np.cumsum(filled) - filled)[unit], unit] = mine
    rows = [np.where(place >= 0, wide[..., place], 0.0).reshape(-1, count) for place in taken]
    matrix = rows[0] if len(rows) == 1 else np.concatenate(rows)
    yield Reader(node, matrix if columns.slots == 1 else np.repeat(matrix, columns.slots, axis=1), source.exact)


def _conv_columns(node: Node, weight: Array) -> Array:
    """A kernel as [groups and kernel positions, outputs, inputs]; a group reads its own inputs."""
    attrs = attributes(node, ConvAttrs)
    groups = attrs["groups"]
    if attrs.get("transposed"):  # [in, out / groups, ...]
        parts = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1).transpose(0, 3, 2, 1)
    else:  # [out, in / groups, ...]
        parts = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1).transpose(0, 3, 1, 2)
    inside = parts.shape[-1]
    wide = np.zeros((groups, *parts.shape[1:3], groups * inside))
    for g in range(groups):
        wide[g, :, :, g * inside : (g + 1) * inside] = parts[g]
    return wide.reshape(-1, parts.shape[2], groups * inside)


def _pass(node: Node, reached: Mapping[str, _Reached], shapes: Mapping[str, tuple[int, ...]]) -> _Reached | None:
    operands = [(i, name) for i, name in enumerate(node.inputs) if isinstance(name, str)]
    mine = [(i, reached[name]) for i, name in operands if name in reached]
    shape = shapes[node.name]
    if node.op == "concat":
        numbers, scales = [], []
        for _, name in operands:
            blank = _Reached(np.full(shapes[name], NONE), np.ones(shapes[name]), True)
            numbers.append(reached.get(name, blank).column)
            scales.append(reached.get(name, blank).scale)
        axis = attributes(node, ConcatAttrs)["axis"]
        exact = all(source.exact for _, source in mine)
        return _Reached(np.concatenate(numbers, axis), np.concatenate(scales, axis), exact)
    place, source = mine[0]
    if node.op in MOVES:
        attrs = {**node.attrs, "shape": shape} if node.op in ("reshape", "expand") else node.attrs
        number, scale = (np.asarray(evaluate_op(node.op, attrs, array)) for array in (source.column, source.scale))
        return _Reached(number, scale, source.exact)
    if node.op == "pointwise":
        others = [o for i, o in enumerate(node.inputs) if i != place]
        fixed = all(o is None or isinstance(o, Tensor) for o in others)
        number = np.broadcast_to(source.column, shape)
        fn = attributes(node, PointwiseAttrs)["fn"]
        if fixed and place in POINTWISE[fn].affine_in:
            filled = [constant(o) if isinstance(o, Tensor) else None for o in node.inputs]
            ends = []
            for x in (source.scale, np.zeros_like(source.scale)):
                filled[place] = x
                ends.append(np.asarray(evaluate_op("pointwise", node.attrs, *filled), dtype=np.float64))
            return _Reached(number, np.broadcast_to(ends[0] - ends[1], shape), source.exact)
        return _Reached(number, np.broadcast_to(source.scale, shape), source.exact and fn == "add")
    if node.op == "along":
        along = attributes(node, AlongAttrs)
        axes = along["axes"]
        first = tuple(slice(0, 1) if d in axes else slice(None) for d in range(source.column.ndim))
        number, scale = source.column[first], source.scale[first]
        if not (source.column == number).all():
            return None  # it acts across the units
        if along.get("drop"):
            number, scale = (np.squeeze(a, axes) for a in (number, scale))
        linear = ALONG[along["fn"]].linear
        return _Reached(np.broadcast_to(number, shape), np.broadcast_to(scale, shape), source.exact and linear)
    return None
