"""LSTM, GRU and RNN: opaque ops whose operands, results and attributes stand where ONNX says."""

from __future__ import annotations

import onnx_ir

from cmrc.hosts.onnx.ops.row import View
from cmrc.ir.graph import RESULTS_OF_RECURRENCE, Node, Recurrence, Shape, Tensor

RECURRENT = {"GRU": 3, "LSTM": 4, "RNN": 1}  # the gates of each
# the inputs of all three, as far as they go
X, WEIGHT, HIDDEN_WEIGHT, BIAS, LENGTHS, STATE, CELL_STATE, PEEPHOLES = range(8)


def recurrence(node: onnx_ir.Node) -> Recurrence:
    """Where its hidden units are: the directions lie along the first axis of every operand."""

    def given(*slots: int) -> tuple[int, ...]:
        return tuple(slot for slot in slots if slot < len(node.inputs) and node.inputs[slot] is not None)

    after = node.attributes.get("linear_before_reset")
    return Recurrence(
        RECURRENT[node.op_type],
        ((WEIGHT, HIDDEN_WEIGHT, BIAS, BIAS),),
        tuple(kind for kind, value in zip(RESULTS_OF_RECURRENCE, node.outputs, strict=False) if value.name),
        states=given(STATE, CELL_STATE),
        stacked=True,
        peepholes=PEEPHOLES if given(PEEPHOLES) else -1,
        resets_state=node.op_type == "GRU" and (after is None or not after.as_int()),
        ragged=bool(given(LENGTHS)),
    )


def returned(view: View) -> list[tuple[Shape | None, str]]:
    """Every state [steps, directions, samples, units], and the last ones: what operands imply, and shape inference may not know."""
    x, matrix, every = view.shapes[X], view.shapes[HIDDEN_WEIGHT], view.inferred[0]
    if matrix is None or view.attr("layout", 0):
        return [(shape, "unknown") for shape in view.inferred]
    directions, _, units = matrix
    if x is not None:
        every = (x[0], directions, x[1], units)
    elif every is not None:
        every = (every[0], directions, every[2], units)
    last = [None if shape is None else (directions, shape[1], units) for shape in view.inferred[1:]]
    if every is not None:
        last = [every[1:] for _ in last]
    return [(shape, "unknown") for shape in (every, *last)]


def write_hidden_size(onnx_node: onnx_ir.Node, node: Node) -> None:
    """As many as the hidden state has now."""
    weight = node.inputs[HIDDEN_WEIGHT]
    if "hidden_size" in onnx_node.attributes and isinstance(weight, Tensor):
        onnx_node.attributes["hidden_size"] = onnx_ir.AttrInt64("hidden_size", weight.shape[-1])
