"""The clone of an ONNX model that is being changed, what those who change it may do to it, and its nodes with other operands.

A changed tensor is a new initializer that is computed when the model is saved or run; the old one, which others may
share, is never edited. The new one takes the old one's name where nobody uses the old one any more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import onnx_ir

from cmrc.errors import HostError
from cmrc.hosts.onnx.nodes import data_type, graphs_of, inner_nodes, names_inside, open_bodies, values_of
from cmrc.hosts.onnx.ops.row import LARGEST, ModelReading
from cmrc.ir.graph import (
    Apply,
    Array,
    ArrayLiteral,
    Graph,
    Leaf,
    Node,
    Operand,
    Shape,
    Tensor,
    Value,
    apply,
    as_dtype,
    attributes,
    outer_values,
)
from cmrc.ir.spec import FunctionAttrs
from cmrc.ir.tensors import Quantised, fold, materialise, quantised

INSERTED_KEY = "cmrc.inserted"


@dataclass(frozen=True, slots=True)
class NewInitializer:
    """A new initializer, and the name of the one that it replaces where it is a form of it."""

    value: onnx_ir.Value
    replaces: str


@dataclass(slots=True)
class ModelPatch:
    """The clone under work. `values` finds an ONNX value by the IR's name for it; new nodes go after the last that was reached."""

    model: onnx_ir.Model
    reading: ModelReading
    edited: Graph
    values: dict[str, onnx_ir.Value]
    taken: set[str]
    """The names of all values and nodes, those inside bodies too."""
    shapes: dict[str, Shape]
    """The shape of every value as it will be."""
    was: dict[str, Shape]
    """The shape of every value as it was read."""
    dtypes: dict[str, str]
    makers: dict[str, Node]
    """The IR node that makes each value."""
    retired: set[onnx_ir.Node] = field(default_factory=set)
    """Nodes that other nodes have replaced."""
    initializers: dict[tuple[Tensor, str], NewInitializer] = field(default_factory=dict)
    dequantised: dict[Tensor, onnx_ir.Value] = field(default_factory=dict)
    graphs: tuple[onnx_ir.Graph, ...] = ()
    """The graph and its bodies, each behind the one that it is in."""
    cursors: dict[onnx_ir.Graph, onnx_ir.Node] = field(default_factory=dict)
    """In each graph the node behind which new ones go."""
    reason: str = ""

    @classmethod
    def start(cls, model: onnx_ir.Model, reading: ModelReading, edited: Graph) -> Self:
        """A patch of `model`, which is changed, from `reading.graph` to `edited`."""
        before, after = reading.graph.values(), edited.values()
        values = values_of(model.graph)
        return cls(
            model,
            reading,
            edited,
            values=values,
            taken={*values, *(name for node in model.graph for name in names_inside(node))},
            shapes={name: value.shape for name, value in after.items()},
            was={name: value.shape for name, value in before.items()},
            dtypes={name: value.dtype for name, value in (*before.items(), *after.items())},
            makers={value.name: node for node in edited.nodes for value in node.outputs},
            graphs=tuple(graphs_of(model.graph)),
        )

    @property
    def graph(self) -> onnx_ir.Graph:
        return self.model.graph

    @property
    def opset(self) -> int:
        return self.model.opset_imports.get("", 0)

    def all_values(self) -> list[onnx_ir.Value]:
        """The initializers and what the nodes make."""
        computed = [value for graph in self.graphs for node in graph for value in node.outputs]
        return [*(value for graph in self.graphs for value in graph.initializers.values()), *computed]

    def fresh(self, base: str) -> str:
        """A name that no value and no node has."""
        name, count = base, 0
        while name in self.taken:
            count += 1
            name = f"{base}{count}"
        self.taken.add(name)
        return name

    # ------------------------------------------------------------ operands

    def shape_of(self, operand: Operand) -> Shape:
        """The shape of an operand as it will be."""
        if isinstance(operand, str):
            return self.shapes[operand]
        return () if operand is None else operand.shape

    def dtype_of(self, operand: Operand) -> str:
        if isinstance(operand, str):
            return self.dtypes[operand]
        return operand.dtype if operand is not None else ""

    def value(self, operand: Operand, dtype: str) -> onnx_ir.Value | None:
        """The ONNX value of an operand; a tensor is an initializer of that dtype."""
        if operand is None:
            return None
        if isinstance(operand, str):
            return self.values[operand]
        return self.initializer(operand, dtype=dtype)

    def initializer(self, tensor: Tensor, *, dtype: str = "", base: str = "") -> onnx_ir.Value:
        """A tensor as an initializer: the old one where it is a whole parameter, else one new one for all its uses."""
        dtype = dtype or tensor.dtype
        if isinstance(tensor, Leaf) and tensor.dtype == dtype and tensor.name in self.values:
            return self.values[tensor.name]
        if tensor.dtype != dtype:
            if isinstance(tensor, Apply):
                tensor = replace(tensor, dtype=dtype)
            else:
                tensor = apply("pointwise", (tensor,), {"fn": "cast", "dtype": dtype}, tensor.shape, dtype)
        key = tensor, dtype
        if isinstance(tensor, Apply) and _is_filled(tensor):
            return self._filled(tensor)
        parts = quantised(tensor)
        if parts is not None:
            return self._dequantised(tensor, parts)
        if key not in self.initializers:
            origin = base or parameter(tensor)
            name = self._numbered(origin) if origin else self.fresh("cmrc.constant")
            self.initializers[key] = NewInitializer(self._register(name, tensor, origin or name), origin)
        return self.initializers[key].value

    def _filled(self, tensor: Apply) -> onnx_ir.Value:
        """A tensor of one number repeated: computed when the model is loaded, as the model's own are."""
        sizes = self.array(np.asarray(tensor.shape, dtype=np.int64))
        number = onnx_ir.tensor(as_dtype(materialise(tensor.inputs[0]), tensor.dtype).reshape(1))
        return self.insert("ConstantOfShape", [sizes], "cmrc.filled", [onnx_ir.AttrTensor("value", number)])

    def _dequantised(self, tensor: Tensor, parts: Quantised) -> onnx_ir.Value:
        """A quantised weight keeps its integers: a DequantizeLinear of those that stay, as runtimes look for it."""
        value = self.dequantised.get(tensor)
        if value is None:
            operands = [parts.numbers, parts.scale, *([] if parts.zero is None else [parts.zero])]
            attributes = [] if parts.axis is None else [onnx_ir.AttrInt64("axis", parts.axis)]
            if parts.block:
                attributes.append(onnx_ir.AttrInt64("block_size", parts.block))
            inputs = [self.initializer(part) for part in operands]
            value = self.insert("DequantizeLinear", inputs, f"{inputs[0].name}.dequantised", attributes)
            value.type, value.shape = onnx_ir.TensorType(data_type(parts.scale.dtype)), onnx_ir.Shape(tensor.shape)
            self.dequantised[tensor] = value
        return value

    def array(self, array: Array, base: str = "") -> onnx_ir.Value:
        return self.initializer(ArrayLiteral(array), base=base)

    def _numbered(self, origin: str) -> str:
        count = 1
        while f"{origin}.cmrc{count}" in self.taken:
            count += 1
        self.taken.add(f"{origin}.cmrc{count}")
        return f"{origin}.cmrc{count}"

    def _register(self, name: str, tensor: Tensor, known_as: str) -> onnx_ir.Value:
        """A new initializer, computed when it is needed; a vector in float16, which overflows soonest, at once."""
        kind, shape = data_type(tensor.dtype), onnx_ir.Shape(tensor.shape)
        content: onnx_ir.TensorProtocol
        if isinstance(tensor, ArrayLiteral):
            content = onnx_ir.Tensor(tensor.array, dtype=kind, name=name)
        elif tensor.dtype == "float16" and len(tensor.shape) <= 1:
            content = onnx_ir.Tensor(fold(tensor, tensor.dtype, name=known_as), dtype=kind, name=name)
        else:
            content = onnx_ir.LazyTensor(
                lambda: onnx_ir.Tensor(fold(tensor, tensor.dtype, name=known_as), dtype=kind), kind, shape, name=name
            )
        value = onnx_ir.Value(name=name, type=onnx_ir.TensorType(kind), shape=shape, const_value=content)
        self.graph.register_initializer(value)
        if self.model.ir_version < 4:  # there every initializer is an input as well
            self.graph.inputs.append(value)
        return value

    def bias_name(self, node: Node, what: str = "bias") -> str:
        """The name of a new parameter of an affine node: after its module, its weight, or its value."""
        weight = node.inputs[1] if len(node.inputs) > 1 else None
        return f"{node.path or (parameter(weight) if isinstance(weight, Tensor) else '') or node.name}.{what}"

    # ------------------------------------------------------------ nodes

    def insert(
        self,
        op: str,
        inputs: Sequence[onnx_ir.Value | None],
        output: Value | str,
        attributes: Sequence[onnx_ir.Attr] = (),
        *,
        domain: str = "",
        among: tuple[int, int] = (0, 1),
    ) -> onnx_ir.Value:
        """A new node after the cursor; `output` is the IR value it gives (output i of n), or a name to base one on."""
        name = output.name if isinstance(output, Value) else self.fresh(output)
        result = onnx_ir.Value(name=name)
        outputs = [result if i == among[0] else onnx_ir.Value(name=self.fresh(f"{name}.{i}")) for i in range(among[1])]
        if isinstance(output, Value):
            self.values[name] = result
            self.taken.add(name)
            if output.dtype != "unknown":
                result.type = onnx_ir.TensorType(data_type(output.dtype))
            dims = [None if isinstance(d, str) and d.startswith("?") else d for d in output.shape]
            result.shape = onnx_ir.Shape(dims)
        metadata = {INSERTED_KEY: self.reason or op}
        node = onnx_ir.Node(
            domain, op, inputs, attributes, outputs=outputs, name=self.fresh(f"cmrc.{name}"), metadata_props=metadata
        )
        self._place(node, self._home(inputs))
        return result

    def _home(self, inputs: Sequence[onnx_ir.Value | None]) -> onnx_ir.Graph:
        """The innermost graph that these values are in: whoever reads the result is in it too."""
        if len(self.graphs) == 1:
            return self.graph
        return max(
            (v.graph for v in inputs if v is not None and v.graph is not None),
            key=self.graphs.index,
            default=self.graph,
        )

    def _place(self, node: onnx_ir.Node, graph: onnx_ir.Graph) -> None:
        cursor = self.cursors.get(graph)
        if cursor is not None:
            graph.insert_after(cursor, node)
        elif len(graph):
            graph.insert_before(graph[0], node)
        else:
            graph.append(node)
        self.cursors[graph] = node

    def move_to(self, node: onnx_ir.Node) -> None:
        """New nodes of the same graph go after this one."""
        if node.graph is not None:
            self.cursors[node.graph] = node

    def copy_into(self, graph: onnx_ir.Graph, value: onnx_ir.Value) -> onnx_ir.Value:
        """A copy of a value, in this graph."""
        output = onnx_ir.Value(name=self.fresh(f"{value.name}.copy"), type=value.type, shape=value.shape)
        self._place(
            onnx_ir.Node("", "Identity", [value], outputs=[output], name=self.fresh(f"cmrc.{value.name}.copy")), graph
        )
        return output

    def replace_value(self, name: str, new: onnx_ir.Value) -> None:
        """Make every reader of the value read `new`, which takes over its name, type and notes."""
        old = self.values[name]
        new.type, new.shape, new.doc_string = old.type, old.shape, old.doc_string
        new.metadata_props.update(old.metadata_props)
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        old.name, new.name = None, name
        self.values[name] = new

    def retire(self, onnx_node: onnx_ir.Node) -> None:
        """Note that other nodes have replaced this one."""
        self.retired.add(onnx_node)


def _is_filled(tensor: Apply) -> bool:
    """Whether a large tensor is one number repeated."""
    return tensor.op == "expand" and math.prod(tensor.inputs[0].shape) == 1 and math.prod(tensor.shape) > LARGEST


def parameter(tensor: Tensor) -> str:
    """The parameter that a tensor is an edited form of: what was selected from, folded into, added to, or scaled."""
    if isinstance(tensor, Leaf):
        return tensor.name
    if not isinstance(tensor, Apply):
        return ""
    first = tensor.inputs[0]
    edits = tensor.op in ("select", "select_in_groups", "fold_columns") or attributes(tensor, FunctionAttrs).get(
        "fn"
    ) in (
        "add",
        "mul",
        "cast",
    )
    flattens = tensor.op == "reshape" and len(tensor.shape) == 1 and first.shape[-1:] == tensor.shape
    return parameter(first) if edits or flattens else ""


# ---------------------------------------------------------------- inputs whose operands in the IR are others now


def rewire(patch: ModelPatch, onnx_node: onnx_ir.Node, node: Node, before: Node, *, but: Collection[int] = ()) -> None:
    """Operands that differ from what was read: other values, changed tensors, a bias that was not there; `but` these."""
    slots = patch.reading.slots[before.name]
    for i, operand in enumerate(node.inputs):
        old = before.inputs[i] if i < len(before.inputs) else None
        if operand == old or (i < len(slots) and slots[i] in but):
            continue
        if i >= len(slots):
            _rewire_captured(patch, onnx_node, i - len(slots), old, operand)
            continue
        slot = slots[i]
        if isinstance(slot, str):
            raise HostError(
                f"nothing can be inserted inside it, before {node.name}", node=node.label, op=onnx_node.op_type
            )
        if slot >= len(onnx_node.inputs):
            onnx_node.resize_inputs(slot + 1)
        if old is None:
            tensor = None if isinstance(operand, str) else operand
            base = patch.bias_name(node)
            value = None if tensor is None else patch.initializer(tensor, dtype=node.output.dtype, base=base)
        else:
            value = patch.value(operand, patch.dtype_of(old))
        onnx_node.replace_input_with(slot, value)


def rewire_fused(
    patch: ModelPatch, onnx_node: onnx_ir.Node, nodes: list[Node], before: list[Node], *, but: Collection[int] = ()
) -> None:
    """A node that is read as several: each part's operands; or, taken as a whole, the values that it reads."""
    if nodes[0].op == "opaque":
        for old, new in zip(outer_values(before), nodes[0].values(), strict=True):
            for slot, value in enumerate(onnx_node.inputs):
                if old != new and value is not None and value.name == old:
                    onnx_node.replace_input_with(slot, patch.values[new])
        return
    if [node.name for node in nodes] != [node.name for node in before]:
        raise HostError("only a part of it remains", node=nodes[0].label, op=onnx_node.op_type)
    read = Counter(slot for node in before for slot in patch.reading.slots[node.name] if isinstance(slot, int))
    tensors = {
        s for n in before for s, o in zip(patch.reading.slots[n.name], n.inputs, strict=False) if not isinstance(o, str)
    }
    shared = [slot for slot, count in read.items() if count > 1 and slot in tensors]
    for node, was in zip(nodes, before, strict=True):
        # A parameter of which several parts read a share is its writer's.
        rewire(patch, onnx_node, node, was, but=(*shared, *but))


def _rewire_captured(patch: ModelPatch, onnx_node: onnx_ir.Node, place: int, old: Operand, new: Operand) -> None:
    """What the bodies of a node return, one behind the other; or what they read from outside, where they are not read."""
    bodies = open_bodies(onnx_node)
    if not isinstance(old, str):
        raise HostError("it has no input for a new parameter: a fault of cmrc", node=patch.reason, op=onnx_node.op_type)
    was, value = patch.values[old], patch.value(new, patch.dtypes[old])
    assert value is not None
    for body in bodies:
        if place < len(body.outputs):
            if value.graph is not body or value.is_graph_input() or value.is_initializer():
                value = patch.copy_into(body, value)
            body.outputs[place] = value
            return
        place -= len(body.outputs)
    for inner in inner_nodes(onnx_node):
        for i, read in enumerate(inner.inputs):
            if read is was:
                inner.replace_input_with(i, value)


def set_inputs(onnx_node: onnx_ir.Node, values: Sequence[onnx_ir.Value | None]) -> None:
    """These inputs, and no others."""
    onnx_node.resize_inputs(len(values))
    for i, value in enumerate(values):
        onnx_node.replace_input_with(i, value)
