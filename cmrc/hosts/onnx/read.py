"""An ONNX model as a mechanism graph.

Initializers, Constant nodes and what is computed from them alone are tensors; every other node is one IR node (a Split is one
per part, a fused op one for each thing it does). The bodies of If, Loop and Scan are read in front of them (`ir/bodies.py`). Sizes that the model reads from itself (`Shape`) are tensors too where they are fixed:
`write.py` keeps them at their value when the value that they were read from shrinks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import onnx_ir

from cmrc.errors import CmrcError, TraceError
from cmrc.hosts.onnx.load import Constants
from cmrc.hosts.onnx.nodes import (
    CHECK,
    captured_by,
    defaults,
    dtype_name,
    name_values,
    open_bodies,
    reason,
    subgraphs,
    tensor_of,
    unique_origins,
)
from cmrc.hosts.onnx.ops.recurrent import RECURRENT, recurrence
from cmrc.hosts.onnx.ops.row import LeftWhole, ModelReading, Row, Step, View, contents_of, row_name, times
from cmrc.hosts.onnx.ops.table import EVALUATED, OPAQUE, ROWS
from cmrc.hosts.onnx.shapes import Sizes, infer, shaped_alone, symbols
from cmrc.ir.axes import product
from cmrc.ir.graph import (
    CONSTANT,
    NO_MARKS,
    Apply,
    Array,
    ArrayLiteral,
    Dim,
    Graph,
    Leaf,
    Marks,
    Node,
    Operand,
    Shape,
    Tensor,
    Value,
    attributes,
)
from cmrc.ir.ops.functions import PointwiseAttrs
from cmrc.ir.ops.layout import HIDDEN_UNITS
from cmrc.ir.spec import AxisAttrs, FunctionAttrs
from cmrc.ir.tensors import materialise

FOLDED = {"pointwise", "reshape", "transpose", "concat", "select", "expand"}


def read(model: onnx_ir.Model) -> ModelReading:
    """Read a model; it is not changed."""
    return _Reader(model).read()


@dataclass(slots=True)
class _Reader:
    model: onnx_ir.Model
    opset: int = 0
    symbols: Iterator[str] = field(default_factory=symbols)
    known: dict[str, tuple[Shape | None, str]] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    shapes: dict[str, Shape | None] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    slots: dict[str, tuple[int | str, ...]] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    inside: dict[str, str] = field(default_factory=dict)
    origins: Mapping[onnx_ir.Node, tuple[str, str]] = field(default_factory=dict)
    bound: dict[str, int] = field(default_factory=dict)
    open_shapes: list[tuple[int, onnx_ir.Value, str, tuple[int, ...]]] = field(default_factory=list)
    defaults: Mapping[str, onnx_ir.Value] = field(default_factory=dict)
    contents: dict[str, tuple[Dim, ...]] = field(default_factory=dict)
    sizes: Sizes = field(init=False)
    constants: Constants = field(init=False)

    def read(self) -> ModelReading:
        graph = self.model.graph
        self.opset = self.model.opset_imports.get("", 0)
        if not self.opset:
            raise TraceError("the model names no opset of the standard ops", fix=CHECK)
        self.known = infer(self.model, self.symbols)
        self.sizes = Sizes(self.opset, self.tensors, self.shapes)
        self.defaults = defaults(self.model)
        self.constants = Constants(self.model)
        self._add_stored(graph)
        inputs = []
        for value in graph.inputs:
            name = value.name or ""
            if name not in self.tensors and name not in self.defaults:
                inputs.append(self._value(name, self.known[name][0]))
        self.origins = unique_origins(graph)
        self._read_nodes(graph)
        for value in graph.outputs:
            if value.name in self.tensors:
                self._constant_output(value)
        if self.bound:
            self._apply_bounds()
            inputs = [replace(value, shape=self._bound(value.shape) or ()) for value in inputs]
        self._settle_shapes()
        outputs = tuple(value.name or "" for value in graph.outputs)
        ir_graph = Graph(tuple(inputs), tuple(self.nodes), outputs)
        return ModelReading(
            ir_graph, name_values(ir_graph, self.origins), self.slots, self.rows, self.sizes, self.tensors, self.inside
        )

    def _add_stored(self, graph: onnx_ir.Graph) -> None:
        """What a graph, or a body, holds as tensors."""
        for name, value in graph.initializers.items():
            if name in self.defaults:
                self._add_default(name, value)
            else:
                self._add_leaf(name, value.const_value)
        for node in graph:
            if node.op_type == "Constant" and not node.domain:
                self._add_leaf(node.outputs[0].name or "", tensor_of(node))

    def _read_nodes(self, graph: onnx_ir.Graph) -> None:
        for node in graph:
            if any(output.name not in self.tensors for output in node.outputs):
                self._read_whole(node, *self.origins[node])

    def _read_body(self, body: onnx_ir.Graph, view: View, origin: str, path: str) -> None:
        """The nodes of a body, in front of the node that holds it; first what the body is given in each run."""
        first, name = len(self.nodes), next(value.name or "" for value in view.node.outputs if value.name)
        if body.inputs:
            given = tuple(operand for operand in view.operands if isinstance(operand, str))
            outputs = tuple(
                self._value(value.name or "", *self.known.get(value.name or "", (None, "unknown")))
                for value in body.inputs
            )
            marks = Marks(
                host_op=f"{view.node.op_type} body", why=f"a {view.node.op_type} gives it to its body anew in every run"
            )
            self.nodes.append(Node("opaque", given, outputs, {}, origin, path, marks))
            self.slots[outputs[0].name] = tuple(range(len(given)))
        self._add_stored(body)
        self._read_nodes(body)
        self.nodes[first:] = [node if node.marks.body else node.with_marks(body=name) for node in self.nodes[first:]]

    def _read_whole(self, node: onnx_ir.Node, origin: str, path: str) -> None:
        """A node, and the sizes that its outputs hold."""
        try:
            view = self._view(node)
            self._read_node(view, origin, path)
            for output, content in zip(node.outputs, contents_of(view), strict=False):
                if content is not None:
                    self.contents[output.name or ""] = content
        except CmrcError:
            raise
        except Exception as error:  # a malformed node can go wrong in any row, in any way
            problem = f"it cannot be read: {type(error).__name__}: {error}"
            raise TraceError(problem, node=origin, op=node.op_type, fix=CHECK) from error

    def _add_default(self, name: str, value: onnx_ir.Value) -> None:
        """A value that is known only at run time, whose default is a tensor."""
        self._add_leaf(name, value.const_value)
        self.constants.sources.pop(name, None)
        tensor = self.tensors.pop(name)
        output = self._value(name, self.known[name][0], tensor.dtype)
        self.nodes.append(Node("opaque", (tensor,), (output,), origin=name, marks=Marks(host_op="default")))

    def _add_leaf(self, name: str, tensor: onnx_ir.TensorProtocol | None) -> None:
        if tensor is not None and tensor.dtype != onnx_ir.DataType.STRING:
            shape = tuple(tensor.shape.numpy())
            load = partial(_mapped, tensor) if isinstance(tensor, onnx_ir.ExternalTensor) else tensor.numpy
            leaf = Leaf(name, shape, dtype_name(tensor.dtype), load)
            self.tensors[name], self.constants.sources[name] = leaf, (leaf,)

    def _value(self, name: str, shape: Shape | None, like: str = "unknown") -> Value:
        dtype = self.known.get(name, (None, "unknown"))[1]
        self.shapes[name], self.dtypes[name] = shape, dtype if dtype != "unknown" else like
        return Value(name, () if shape is None else shape, self.dtypes[name])

    # ------------------------------------------------------------ one node

    def _view(self, node: onnx_ir.Node) -> View:
        operands: list[Operand] = []
        shapes: list[Shape | None] = []
        for value in node.inputs:
            name = None if value is None else value.name or ""
            operand = None if not name else self.tensors.get(name, name)
            operands.append(operand)
            if isinstance(operand, str):
                shapes.append(self._bound(self.shapes.get(operand)))
            else:
                shapes.append(None if operand is None else operand.shape)
        return View(
            node=node,
            opset=self.opset,
            operands=tuple(operands),
            shapes=tuple(shapes),
            inferred=tuple(self.known.get(v.name or "", (None, ""))[0] for v in node.outputs),
            contents=tuple(self._contents(operand) for operand in operands),
            used=tuple(bool(v.uses()) or v.is_graph_output() for v in node.outputs),
            unknown=lambda: next(self.symbols),
            bind=self.bound.__setitem__,
        )

    def _bound(self, shape: Shape | None) -> Shape | None:
        """A shape with the sizes that have become known since."""
        if not self.bound or shape is None or not any(isinstance(n, str) for n in shape):
            return shape
        return tuple(_size(n, self.bound) if isinstance(n, str) else n for n in shape)

    def _apply_bounds(self) -> None:
        """Put the sizes that became known on the way into everything that was read before."""
        for name, shape in self.shapes.items():
            self.shapes[name] = self._bound(shape)
        for i, node in enumerate(self.nodes):
            outputs = tuple(replace(value, shape=self._bound(value.shape) or ()) for value in node.outputs)
            if outputs != node.outputs:
                self.nodes[i] = replace(node, outputs=outputs)
        joined = {name: size for node in self.nodes if node.op == "concat" for name, size in self._joined(node)}
        if joined:  # what is concatenated is known now, and with it the sum
            self.bound.update(joined)
            self._apply_bounds()

    def _joined(self, node: Node) -> Iterator[tuple[str, int]]:
        """The size that a concatenation was given a symbol for, where all its parts have known sizes."""
        axis = attributes(node, AxisAttrs)["axis"]
        total = node.output.shape[axis]
        shapes = [self.shapes.get(o) if isinstance(o, str) else o.shape for o in node.inputs if o is not None]
        sizes = [shape[axis] for shape in shapes if shape is not None]
        known = [n for n in sizes if isinstance(n, int)]
        if isinstance(total, str) and total not in self.bound and "*" not in total and len(known) == len(node.inputs):
            yield total, sum(known)

    def _contents(self, operand: Operand) -> tuple[Dim, ...] | None:
        """The entries of a small operand of integers."""
        if isinstance(operand, str):
            return self.contents.get(operand)
        if operand is None or not operand.dtype.startswith("int") or len(operand.shape) > 1 or sum(operand.shape) > 16:
            return None
        return tuple(int(n) for n in materialise(operand).reshape(-1))

    def _read_node(self, view: View, origin: str, path: str) -> None:
        node = view.node
        if node.op_type in ("Shape", "Size") and not node.domain:
            return self._read_sizes(view, origin, path)
        row = ROWS.get(row_name(node))
        known = self.constants.covers(node)
        try:
            if self.sizes.fix_picked(node):
                return None
            if not node.domain and node.op_type in EVALUATED:
                return self._evaluate(view)
            for operand in view.operands:
                if isinstance(operand, str) and operand in self.defaults:
                    raise LeftWhole(reason(operand))
            if row is None or subgraphs(node):
                raise LeftWhole("")
            if any(isinstance(o, str) and self.shapes.get(o) is None for o in view.operands):
                raise LeftWhole("it reads a value of unknown rank")
            steps = row.read(view)
        except LeftWhole as left:
            if known and self._add_computed(node):
                return None
            return self._opaque(view, origin, path, Marks(why=left.reason))
        if (
            known
            and isinstance(steps, list)
            and not all(step.op in FOLDED for step in steps)
            and self._add_computed(node)
        ):
            return None
        inner: dict[str, str] = {}
        if isinstance(steps, list) and row.separable is not None and self.opset >= row.separable:
            steps = [replace(step, marks=replace(step.marks, separable=True)) for step in steps]
        for step in steps if isinstance(steps, list) else [steps]:
            self._emit(view, step, row, origin, path, inner)
        return None

    def _evaluate(self, view: View) -> None:
        """A constant that is made from constants."""
        if any(isinstance(operand, str) for operand in view.operands):
            raise LeftWhole("")
        self.tensors[view.node.outputs[0].name or ""] = EVALUATED[view.node.op_type](view)

    def _emit(self, view: View, step: Step, row: Row, origin: str, path: str, inner: dict[str, str]) -> None:
        """One IR node; `inner` are the values inside the ONNX node so far, by their keys."""
        name = view.node.outputs[step.output].name or "" if step.output < len(view.node.outputs) else ""
        marks = step.marks
        if step.key:
            shown = bool(name and step.output)
            marks = replace(marks, inside=view.node.op_type, shown=shown)
            if not shown:
                last = view.node.outputs[0].name or ""
                name = f"{last}::{step.key}"
                self.inside[name] = last
            inner[step.key] = name
        if not name or name in self.tensors:  # a part of a Split of sizes may be known
            return
        operands = tuple(
            self.tensors.get(inner[slot], inner[slot])
            if isinstance(slot, str)
            else step.tensors.get(slot, view.operand(slot))
            for slot in step.slots
        )
        first = operands[1 if attributes(step, FunctionAttrs).get("fn") == "where" else 0]  # not the condition
        like = self.dtypes.get(first, "unknown") if isinstance(first, str) else first.dtype if first else "unknown"
        value = self._value(name, step.shape, attributes(step, PointwiseAttrs).get("dtype", like))
        if all(not isinstance(o, str) for o in operands):
            folded = _fold(step, [o for o in operands if o is not None and not isinstance(o, str)], value)
            if folded is not None:
                self.tensors[name] = folded
                return
            computable = not step.key and step.op != "embedding" and name in self.constants.sources
            if computable and self._add_computed(view.node):
                return
        self.slots[name], self.rows[name] = step.slots, row
        self.nodes.append(Node(step.op, operands, (value,), step.attrs, origin, path, marks))

    def _add_computed(self, node: onnx_ir.Node) -> bool:
        """The results of a node that reads parameters only, as parameters."""
        for name in [value.name for value in node.outputs if value.name]:
            leaf = self.constants.leaf(name, *self.known.get(name, (None, "unknown")))
            if leaf is None:
                return False
            self.tensors[name] = leaf
        return True

    def _opaque(self, view: View, origin: str, path: str, marks: Marks = NO_MARKS) -> None:
        bodies = open_bodies(view.node)
        for body in bodies:
            self._read_body(body, view, origin, path)
        returned = [value.name or "" for body in bodies for value in body.outputs]
        captured = [self.tensors.get(name, name) for name in returned or captured_by(view.node)]
        recurrent = view.node.op_type in RECURRENT and not view.node.domain
        operands, like = view.operands, "unknown"
        if recurrent:  # a bias that is left out may come
            operands += (None,) * (4 - len(operands))
            # the sequence and the weights are all of one type
            like = next((kind for o in operands[:3] if (kind := self._dtype_of(o)) != like), like)
            marks = replace(marks, why=marks.why or HIDDEN_UNITS, weighed=((1, 3),), recurrence=recurrence(view.node))
        known = OPAQUE.get(row_name(view.node))
        described = [(shape, like) for shape in view.inferred] if known is None else known(view)
        outputs = [
            self._value(value.name, shape, like if dtype == "unknown" else dtype)
            for value, (shape, dtype) in zip(view.node.outputs, described, strict=False)
            if value.name
        ]
        self.slots[outputs[0].name] = tuple(range(len(operands)))
        inputs = (*operands, *captured)
        marks = replace(marks, host_op=view.node.op_type)
        self.nodes.append(Node("opaque", inputs, tuple(outputs), {}, origin, path, marks))

    def _dtype_of(self, operand: Operand) -> str:
        if isinstance(operand, str):
            return self.dtypes.get(operand, "unknown")
        return "unknown" if operand is None else operand.dtype

    def _constant_output(self, value: onnx_ir.Value) -> None:
        """The model returns a constant: an IR output must be a value."""
        name = value.name or ""
        tensor = self.tensors[name]
        output = self._value(name, tensor.shape, tensor.dtype)
        self.nodes.append(Node("opaque", (tensor,), (output,), origin=name, marks=Marks(host_op=CONSTANT)))

    # ------------------------------------------------------------ sizes that the model reads from itself

    def _read_sizes(self, view: View, origin: str, path: str) -> None:
        """Shape and Size: a tensor where all sizes are fixed, else an op that reads sizes and no values."""
        operand, shape = view.operand(0), view.shapes[0]
        if shape is None or operand is None:
            return self._opaque(view, origin, path)
        output = view.node.outputs[0]
        dims = tuple(range(len(shape)))[view.attr("start", 0) : view.attr("end", len(shape))]
        if view.node.op_type == "Shape":
            if not isinstance(operand, str) or all(isinstance(shape[d], int) for d in dims):
                return self.sizes.fix(output.name or "", operand, shape, dims)
            self.sizes.follow(output, operand, dims)
            self.open_shapes.append((len(self.nodes), output, operand, dims))
        return self._opaque(view, origin, path, Marks(shape_only=dims))

    def _settle_shapes(self) -> None:
        """Now that all readers are known: which sizes a Shape really reads. One that reads none has no operand."""
        for at, output, source, dims in self.open_shapes:
            needed, node = self.sizes.needed(output, source, dims), self.nodes[at]
            if needed:
                self.nodes[at] = node.with_marks(shape_only=needed, shapes=shaped_alone(output))
            else:
                self.nodes[at] = replace(node, inputs=(), marks=Marks(host_op="Shape", body=node.marks.body))
                self.slots[node.name] = ()


def _size(size: str, bound: Mapping[str, int]) -> Dim:
    """A size, a symbol or a product of them, with the symbols that are known."""
    number, symbols = product((size,))
    if not any(symbol in bound for symbol in symbols):
        return size
    bound_size = times([number, *(bound.get(symbol, symbol) for symbol in symbols.elements())])
    return size if bound_size is None else bound_size


def _mapped(tensor: onnx_ir.ExternalTensor) -> Array:
    """A weight in its file, mapped only while somebody holds the array: a tensor that was read once stays in memory."""
    return onnx_ir.ExternalTensor(
        tensor.location, tensor.offset, tensor.length, tensor.dtype, shape=tensor.shape, name=tensor.name or "",
        base_dir=tensor.base_dir,
    ).numpy()  # fmt: skip


def _fold(step: Step, operands: Sequence[Tensor], value: Value) -> Tensor | None:
    """The step as a tensor, where the evaluator knows it exactly; integers only move, or are added and compared."""
    fn = attributes(step, FunctionAttrs).get("fn", "")
    if fn == "identity":
        return operands[0]
    shape = tuple(n for n in value.shape if isinstance(n, int))
    if len(shape) != len(value.shape) or value.dtype == "unknown":
        return None
    if step.op not in FOLDED and fn != "pick":
        return None
    if step.op == "pointwise" and len(operands) != len(step.slots):
        return None
    whole = value.dtype.startswith(("int", "uint"))
    if whole and fn == "div":
        quotient = np.true_divide(*(materialise(o) for o in operands))
        return ArrayLiteral(np.trunc(quotient).astype(value.dtype))
    if whole and fn in ("pow", "fmod", "batch_norm", "round"):
        return None
    attrs = {**step.attrs, "shape": shape} if step.op in ("reshape", "expand") else dict(step.attrs)
    return Apply(step.op, tuple(operands), attrs, shape, value.dtype)
