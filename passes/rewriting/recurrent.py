"""Hidden units of an LSTM, GRU or RNN, replaced inside the recurrence: at every step, and in the initial state.

    gates_t = W x_t + b_W + R h_{t-1} + b_R          do(h[S] := c) at every t, the initial state included
                                              ->    b_R += R[:,S] c,  R[:,S] := 0,  and a do on what the op returns
                                              ->    no unit of S anywhere: rows of W, R and the biases, columns of R, states

    affine: h[S] := B h[P] + β                ->    R[:,P] += R[:,S] B,  b_R += R[:,S] β,  R[:,S] := 0

What the recurrence reads of h is R h; all else in it is unit by unit (a cell state, a peephole, the old state that a GRU keeps),
so unit j touches the others through its column of R alone. A `do` at the value that the op *returns* is another intervention:
there the gates go on reading the unit, which must still be computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cmrc.ir.axes import narrowed
from cmrc.ir.graph import Array, Do, Keep, Node, Operand, Recurrence, Tensor, Value, apply, literal, take
from cmrc.ir.ops.layout import HIDDEN_UNITS
from cmrc.ir.recurrence import hidden_matrix, hidden_size, is_joined, recurrence_of, returned_state
from cmrc.ir.tensors import constant, quantised
from cmrc.passes.rewriting.absorb import add_tensors, mixed_columns
from cmrc.passes.rewriting.rewriter import Declined, Rise

Problem = tuple[str, str]
"""Why a replacement inside a recurrence is not exact, and the way out."""


# ---------------------------------------------------------------- the intervention


def _by_direction(node: Node, units: Sequence[int]) -> list[list[tuple[int, int]]]:
    """For each cell its own units, with the places where they stand among `units`."""
    hidden, cells, joined = hidden_size(node), len(recurrence_of(node).cells), is_joined(node, returned_state(node))
    return [
        [(u % hidden, i) for i, u in enumerate(units) if not joined or u // hidden == direction]
        for direction in range(cells)
    ]


def why_not_held(node: Node, do: Do) -> Problem | None:
    """Why a replacement of hidden units is not exact in the weights; None where it is."""
    recurrence, returned = recurrence_of(node), returned_state(node)
    weights = [node.inputs[i] for cell in recurrence.cells for i in cell if i >= 0]
    if any(isinstance(w, str) for w in weights) or not isinstance(hidden_matrix(node), Tensor):
        return "its weights are computed at run time", "replace units that it reads, or that its readers make"
    if any(isinstance(w, Tensor) and quantised(w) is not None for w in weights):
        return "its weights are quantised, and would have to be rounded again", "lower the float model, then quantise"
    if not all(value.shape for value in node.outputs):
        return "the shape of what it returns is not known", "run shape inference on the model first"
    if do.axis != len(returned.shape) - 1:
        return "its hidden units lie along the last axis", f"leave axis out, or give axis={len(returned.shape) - 1}"
    if do.constant.size != len(do.units):
        return (
            "a hidden unit is one number at every step, and these constants differ by position",
            "give one constant per unit",
        )
    shares = _by_direction(node, do.units)
    if any(len(share) == hidden_size(node) for share in shares):
        return "no hidden unit would be left", "keep one unit of each direction"
    if do.weight is not None and is_joined(node, returned):
        own = np.equal.outer(np.array(do.units) // hidden_size(node), np.array(do.parents) // hidden_size(node))
        if np.any(do.weight[~own]):
            return (
                "one direction would read the other, which runs the other way",
                "rebuild a unit from units of its own direction",
            )
    return _why_not_folded(node, do, shares)


def _why_not_folded(node: Node, do: Do, shares: Sequence[Sequence[tuple[int, int]]]) -> Problem | None:
    """Where only 0, or only constants, are exact."""
    recurrence, moved = recurrence_of(node), bool(np.any(do.constant))
    free = "the constant 0 is exact here"
    if recurrence.resets_state and (moved or do.weight is not None):
        return (
            "its reset gate multiplies the hidden state before R reads it (linear_before_reset=0): R (r * h) weighs a constant "
            "by a gate that varies",
            free,
        )
    if moved and any(cell[3] < 0 for cell in recurrence.cells):
        return "it has no bias that could take R c in", free
    if moved and recurrence.ragged:
        return "its sequences may end early, and what it returns behind their end is 0 (sequence_lens)", free
    joined = is_joined(node, returned_state(node))
    if joined and set(recurrence.results) & {"last", "cell"}:
        units = [sorted(unit for unit, _ in share) for share in shares]
        if do.weight is not None:
            return "its last state lays both directions along another axis", "replace by constants"
        if units[0] != units[1]:
            return "its last state has the same units of both directions", "replace the same units of both directions"
    return None


def hold(node: Node, do: Do) -> tuple[Node, list[Do]]:
    """The op whose weights read the replacement, and the do's on what it returns."""
    recurrence, inputs = recurrence_of(node), list(node.inputs)
    shares = zip(_by_direction(node, do.units), _by_direction(node, do.parents), strict=True)
    for (_, matrix, _, bias), (share, parents) in zip(recurrence.cells, shares, strict=True):
        if not share:
            continue
        weight = inputs[matrix]
        assert isinstance(weight, Tensor)
        units, places = [u for u, _ in share], [i for _, i in share]
        values = do.constant.reshape(-1)[places]
        if values.any():
            inputs[bias] = _with_sums(recurrence, inputs[bias], weight, units, values)
        mixed = weight
        if do.weight is not None and parents:
            mix = literal(do.weight[np.ix_(places, [j for _, j in parents])])
            mixed = mixed_columns(weight, len(weight.shape) - 1, units, ([p for p, _ in parents], mix))
        inputs[matrix] = _without_columns(mixed, units)
    return node.with_inputs(inputs), [_at_result(node, do, value, kind) for value, kind in zip(node.outputs, recurrence.results, strict=True)
                  if kind != "cell"]  # fmt: skip


def _without_columns(weight: Tensor, units: Sequence[int]) -> Tensor:
    mask = np.ones(weight.shape[-1])
    mask[list(units)] = 0.0
    attrs = {"fn": "mul", "rank": len(weight.shape)}
    return apply("pointwise", (weight, literal(mask)), attrs, weight.shape, weight.dtype)


def _with_sums(recurrence: Recurrence, bias: Operand, weight: Tensor, units: Sequence[int], values: Array) -> Tensor:
    """b_R + R[:,S] c; of a stacked op behind b_W."""
    assert not isinstance(bias, str)
    attrs = {"axis": len(weight.shape) - 1, "units": tuple(units)}
    sums = apply("weigh_columns", (weight, literal(values)), attrs, weight.shape[:-1], weight.dtype)
    if recurrence.stacked:
        directions, rows = sums.shape
        sums = apply("concat", (literal(np.zeros(sums.shape)), sums), {"axis": 1}, (directions, 2 * rows), weight.dtype)
    return add_tensors(bias, sums, dtype=weight.dtype)


def _at_result(node: Node, do: Do, value: Value, kind: str) -> Do:
    """The replacement at one result. The last state of joined directions has them along an axis of its own."""
    axis, returned = len(value.shape) - 1, returned_state(node)
    if kind == "every" or not is_joined(node, returned):
        return replace(do, value=value.name, axis=axis, constant=do.constant.reshape(-1))
    shares = _by_direction(node, do.units)
    units = [unit for unit, _ in shares[0]]
    flat = do.constant.reshape(-1)
    rows = [[flat[dict(share)[unit]] for unit in units] for share in shares]
    return replace(do, value=value.name, axis=axis, units=tuple(units), constant=np.array(rows)[:, None, :])


# ---------------------------------------------------------------- fewer hidden units


@dataclass(frozen=True, slots=True)
class Narrowed:
    """A recurrent op of fewer hidden units, and what each result that is read keeps of its last axis."""

    node: Node
    keeps: dict[str, Keep]


def narrow(rise: Rise, node: Node, needed: Mapping[str, Sequence[int] | None]) -> Narrowed | Declined:
    """Without the hidden units that nobody outside reads, and whose columns of R are 0. `needed` has what is read of each result."""
    recurrence, returned = recurrence_of(node), returned_state(node)
    matrices = [matrix for cell in recurrence.cells if isinstance(matrix := node.inputs[cell[1]], Tensor)]
    if len(matrices) < len(recurrence.cells):
        return Declined(HIDDEN_UNITS)
    hidden = matrices[0].shape[-1]
    kept: list[set[int]] = [set() for _ in recurrence.cells]
    for value in node.outputs:
        read = needed[value.name]
        if read is None:
            continue
        for direction, units in enumerate(kept):
            joined = value is returned and is_joined(node, value)
            units |= {u % hidden for u in read if not joined or u // hidden == direction}
    for units, matrix in zip(kept, matrices, strict=True):
        _add_what_is_fed_back(units, constant(matrix), recurrence.gates)
    keeps = [Keep(sorted(units)) for units in kept]
    if all(len(keep) == hidden for keep in keeps):
        return Declined(HIDDEN_UNITS)
    if any(not keep for keep in keeps):
        return Declined("no hidden unit would be left")
    if len({len(keep) for keep in keeps}) > 1:
        counts = " and ".join(str(len(keep)) for keep in keeps)
        return Declined(
            f"its directions would keep different numbers of hidden units ({counts}): replace equally many of each"
        )
    apart = len(set(keeps)) > 1
    results = {
        kind for kind, value in zip(recurrence.results, node.outputs, strict=True) if needed[value.name] is not None
    }
    if apart and results - {"every"}:
        return Declined("its directions would keep different units, and its last state has the same of both")
    inputs = _narrowed_inputs(rise, node, keeps)
    if isinstance(inputs, Declined):
        return inputs
    outputs, chosen = [], {}
    for value in node.outputs:
        joined = value is returned and is_joined(node, value)
        keep = Keep([d * hidden + u for d, each in enumerate(keeps) for u in each]) if joined else keeps[0]
        if needed[value.name] is not None:
            chosen[value.name] = keep
        outputs.append(replace(value, shape=narrowed(value.shape, len(value.shape) - 1, keep)))
    return Narrowed(replace(node, inputs=tuple(inputs), outputs=tuple(outputs)), chosen)


def _add_what_is_fed_back(units: set[int], matrix: Array, gates: int) -> None:
    """The units whose columns of R a unit that stays reads, and so on."""
    by_row = matrix.reshape(-1, gates, *matrix.shape[-1:] * 2)  # directions, gates, units, units that they read
    reads = np.any(by_row != 0, axis=(0, 1))
    while more := {int(u) for u in np.flatnonzero(reads[sorted(units)].any(axis=0))} - units:
        units |= more


def _narrowed_inputs(rise: Rise, node: Node, keeps: Sequence[Keep]) -> list[Operand] | Declined:
    recurrence, inputs, hidden = recurrence_of(node), list(node.inputs), hidden_size(node)
    for place in recurrence.states:
        state = inputs[place]
        if state is not None and len(set(keeps)) > 1 and not _is_one_number(rise, state):
            return Declined("its directions would keep different units of one initial state")
    for cell, keep in zip(recurrence.cells, keeps, strict=True):
        for place in dict.fromkeys(cell):
            operand = inputs[place] if 0 <= place < len(inputs) else None  # a fold leaves out what is not there
            if isinstance(operand, Tensor):
                inputs[place] = _rows(operand, keep, hidden, int(recurrence.stacked))
        weight = inputs[cell[1]]
        assert isinstance(weight, Tensor)
        inputs[cell[1]] = take(weight, len(weight.shape) - 1, keep)
    if recurrence.peepholes >= 0:
        peepholes = inputs[recurrence.peepholes]
        if not isinstance(peepholes, Tensor):
            return Declined("its peepholes are computed at run time")
        inputs[recurrence.peepholes] = _rows(peepholes, keeps[0], hidden, 1)
    for place in recurrence.states:
        state = inputs[place]
        if state is not None:
            inputs[place] = rise.select(state, len(rise.shape(state)) - 1, keeps[0])
    return inputs


def _rows(tensor: Tensor, keep: Sequence[int], hidden: int, axis: int) -> Tensor:
    """The rows of these units in every block."""
    return take(tensor, axis, [start + unit for start in range(0, tensor.shape[axis], hidden) for unit in keep])


def _is_one_number(rise: Rise, operand: Operand) -> bool:
    """Whether a value is one number at every position, such as an initial state of zeros."""
    maker = rise.graph.makers.get(operand) if isinstance(operand, str) else None
    while maker is not None and maker.op in ("select", "transpose", "reshape") and isinstance(maker.inputs[0], str):
        maker = rise.graph.makers.get(maker.inputs[0])
    given = maker.inputs[0] if maker is not None and maker.op == "expand" else None
    return isinstance(given, Tensor) and int(np.prod(given.shape)) == 1
