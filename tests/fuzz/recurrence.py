"""A recurrent layer with its hidden units literally replaced: the layer itself runs one step at a time, and the state is overwritten between.

For each direction, Scan carries the state through the steps:

    h = clamp(initial state)
    for each x_t:    h, c = op([x_t]; W, R, B, h, c, P);    h = clamp(h);    every[t] = h

Where sequences may end early (sequence_lens), the state stays as it is behind their end, and 0 is returned there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

X, LENGTHS, STATE, CELL = 0, 4, 5, 6
Clamp = Callable[[str, str, str], Sequence[onnx.NodeProto]]  # the state that is read, the replaced one, and a tag


@dataclass
class Unrolled:
    """The nodes that stand for one recurrent layer; arrays that they need join the graph."""

    node: onnx.NodeProto
    graph: onnx.GraphProto
    opset: int
    dtype: np.dtype[Any]
    clamp: Clamp
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    count: int = 0

    def write(self) -> list[onnx.NodeProto]:
        kind = self._attribute("direction", b"forward").decode()
        backwards = {"bidirectional": [False, True], "reverse": [True]}.get(kind, [False])
        results = [self._direction(number, back) for number, back in enumerate(backwards)]
        for place, name in enumerate(self.node.output):
            if name:
                parts = [states[place] for states in results]
                self.nodes.append(helper.make_node("Concat", parts, [name], axis=0 if place else 1))
        return self.nodes

    def _direction(self, number: int, backwards: bool) -> tuple[str, ...]:
        """Every state, the last one, and the last cell state."""
        x, wide = self.node.input[X], self.node.op_type == "LSTM"
        lengths = self._operand(LENGTHS)
        own = {
            place: self._add("Gather", [name, self._hold([number])], axis=0)
            for place, name in enumerate(self.node.input)
            if name and place not in (X, LENGTHS)
        }
        start = self._name("start")
        self.nodes += self.clamp(own.get(STATE) or self._zeros(), start, start)
        states = [start, *([own.get(CELL) or self._zeros()] if wide else [])]
        if lengths:
            steps = self._add("Gather", [self._add("Shape", [x]), self._hold([0])], axis=0)
            states.append(self._add("Sub", [steps, self._hold([1])]) if backwards else self._hold([0]))
        body = self._body(number, own, wide, lengths, backwards)
        results = [self._name(f"final{i}") for i in range(len(states))] + [self._name("every")]
        flags = {"scan_input_directions": [int(backwards)], "scan_output_directions": [int(backwards)]}
        self.nodes.append(helper.make_node("Scan", [*states, x], results, body=body, num_scan_inputs=1, **flags))
        return results[-1], results[0], results[1]

    def _body(self, number: int, own: dict[int, str], wide: bool, lengths: str, backwards: bool) -> onnx.GraphProto:
        outer, self.nodes = self.nodes, []
        names = ["h", *(["c"] if wide else []), *(["t"] if lengths else [])]
        given = {name: self._name(f"{name}_in") for name in [*names, "x"]}
        step = onnx.NodeProto()
        step.CopyFrom(self.node)
        step.ClearField("attribute")
        for attribute in self.node.attribute:
            if attribute.name.startswith("activation"):  # of each direction, one behind the other
                values, each = helper.get_attribute_value(attribute), {"LSTM": 3, "GRU": 2, "RNN": 1}[self.node.op_type]
                step.attribute.append(
                    helper.make_attribute(attribute.name, values[number * each : (number + 1) * each])
                )
            elif attribute.name != "direction":
                step.attribute.append(attribute)
        axes = {"axes": [0]} if self.opset < 13 else {}
        operands = {**own, X: self._add("Unsqueeze", [given["x"], *([] if axes else [self._hold([0])])], **axes)}
        operands |= {STATE: given["h"], **({CELL: given["c"]} if wide else {})}
        step.ClearField("input")
        step.input.extend(operands.get(place, "") for place in range(max(operands) + 1))
        computed, replaced = self._name("computed"), self._name("replaced")
        del step.output[:]
        step.output.extend(["", computed, *([self._name("cell")] if wide else [])])
        self.nodes.append(step)
        self.nodes += self.clamp(computed, replaced, computed)
        after, returned = [replaced, *step.output[2:]], replaced
        if lengths:
            now = self._add("Less", [given["t"], self._add("Cast", [lengths], to=onnx.TensorProto.INT64)])
            running = self._add("Reshape", [now, self._hold([1, -1, 1])])
            after = [self._add("Where", [running, new, given[name]]) for name, new in zip(names, after, strict=False)]
            nothing = self._add("Sub", [replaced, replaced])
            returned = self._add("Where", [running, replaced, nothing])
            after.append(self._add("Sub" if backwards else "Add", [given["t"], self._hold([1])]))
        written = [self._add("Identity", [name]) for name in [*after, returned]]
        kinds = {"t": onnx.TensorProto.INT64}
        usual = helper.np_dtype_to_tensor_dtype(self.dtype)
        info = helper.make_tensor_value_info
        body = helper.make_graph(
            self.nodes, "step", [info(given[name], kinds.get(name, usual), None) for name in [*names, "x"]],
            [info(name, kinds.get(kind, usual), None) for name, kind in zip(written, [*names, "h"], strict=True)],
        )  # fmt: skip
        self.nodes = outer
        return body

    def _zeros(self) -> str:
        """The state before the first step, for as many samples as there are."""
        samples = self._add("Gather", [self._add("Shape", [self.node.input[X]]), self._hold([1])], axis=0)
        shape = self._add("Concat", [self._hold([1]), samples, self._hold([self._attribute("hidden_size", 0)])], axis=0)
        return self._add("ConstantOfShape", [shape], value=numpy_helper.from_array(np.zeros(1, self.dtype)))

    def _operand(self, place: int) -> str:
        return str(self.node.input[place]) if place < len(self.node.input) else ""

    def _attribute(self, name: str, usual: Any) -> Any:
        return next((helper.get_attribute_value(a) for a in self.node.attribute if a.name == name), usual)

    def _name(self, hint: str) -> str:
        self.count += 1
        return f"clamp.{hint}.{self.node.output[0] or self.node.output[1]}.{self.count}"

    def _hold(self, numbers: Sequence[int]) -> str:
        name = self._name("index")
        self.graph.initializer.append(numpy_helper.from_array(np.array(numbers, np.int64), name))
        return name

    def _add(self, op: str, operands: Sequence[str], **attrs: Any) -> str:
        name = self._name(op.lower())
        self.nodes.append(helper.make_node(op, list(operands), [name], **attrs))
        return name
