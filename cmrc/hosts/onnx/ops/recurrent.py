"""LSTM, GRU and RNN: opaque ops whose operands, results and attributes stand where ONNX says."""

from __future__ import annotations

import onnx_ir

from cmrc.ir.graph import RESULTS_OF_RECURRENCE, Node, Recurrence, Tensor

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


def write_hidden_size(onnx_node: onnx_ir.Node, node: Node) -> None:
    """As many as the hidden state has now."""
    weight = node.inputs[HIDDEN_WEIGHT]
    if "hidden_size" in onnx_node.attributes and isinstance(weight, Tensor):
        onnx_node.attributes["hidden_size"] = onnx_ir.AttrInt64("hidden_size", weight.shape[-1])
