"""What is known about the shapes and dtypes of an ONNX model's values before it runs.

onnx's own shape inference does the work, on a clone without its large weights. Sizes that a weight implies (a MatMul
with a [64, 10] matrix reads 64 units) are put in where inference could not know them.

Sizes that a model reads from itself, by Shape, and what becomes of them when a value shrinks:

fixed      the size is known: a tensor, which stays what it was (`FixedSize`)
target     it ends in the target shape of a Reshape: that is written anew when it changes (`ReshapeTarget`)
otherwise  the Shape node needs that axis as it is: an `opaque` op with `shape_only`
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx_ir

from cmrc.hosts.onnx.bodies import Carried, carried_by
from cmrc.hosts.onnx.nodes import (
    HOLDERS,
    computed_values,
    dtype_name,
    graphs_of,
    is_open,
    nodes_of,
    own_values,
    tensor_of,
)
from cmrc.ir.graph import ArrayLiteral, Dim, Operand, Shape, Tensor
from cmrc.ir.tensors import materialise

SMALL = 1024  # bytes: larger constants say nothing about shapes
Known = dict[str, tuple[Shape | None, str]]


def infer(model: onnx_ir.Model, unknown: Iterator[str]) -> Known:
    """Shape (`None` where even the rank is unknown) and dtype by value; unknown sizes get a symbol of their own."""
    declared = [v for each in graphs_of(model.graph) for v in computed_values(each) if v.name]
    if all(_is_declared(value) for value in declared):  # as torch's exporter does: nothing is left to infer
        return {v.name or "": (_dims(v.shape, unknown), dtype_name(v.dtype)) for v in declared}
    clone = _light(model, unknown)
    inferred = _infer_with_bodies(clone)
    implied = list(_implied_sizes(model, inferred))
    if implied:
        values = {v.name: v for each in graphs_of(clone.graph) for v in computed_values(each)}
        for name, axis, size in implied:
            if name in values:
                dims = list(inferred[name].shape or ())
                dims[axis] = size
                inferred[name].shape = onnx_ir.Shape(dims)
                values[name].shape, values[name].type = onnx_ir.Shape(dims), inferred[name].type
        inferred = {**inferred, **_infer_with_bodies(clone)}
    return {name: (_dims(value.shape, unknown), dtype_name(value.dtype)) for name, value in inferred.items()}


def _is_declared(value: onnx_ir.Value) -> bool:
    """Rank and dtype suffice: sizes that are left open are found where the rows work out what their ops give."""
    return value.shape is not None and value.dtype not in (None, onnx_ir.DataType.UNDEFINED)


def _dims(shape: onnx_ir.Shape | None, unknown: Iterator[str]) -> Shape | None:
    if shape is None:
        return None
    return tuple(next(unknown) if (dim := _dim(d)) is None else dim for d in shape)


def _dim(dim: int | onnx_ir.SymbolicDim) -> Dim | None:
    """Some exporters write -1 for a size that they do not know."""
    if isinstance(dim, int):
        return dim if dim >= 0 else None
    return dim.value


def _light(model: onnx_ir.Model, unknown: Iterator[str]) -> onnx_ir.Model:
    """A clone whose large constants are inputs without data, and whose inputs have a symbol for every unknown size."""
    clone = model.clone()
    graph = clone.graph
    for value in graph.inputs:
        if value.shape is not None:
            value.shape = onnx_ir.Shape(_dims(value.shape, unknown) or ())
    for each in clone.graphs():
        for value in (*each.inputs, *(value for node in each for value in node.outputs)):
            if value.shape is not None and any(isinstance(dim, int) and dim < 0 for dim in value.shape):
                value.shape = onnx_ir.Shape(
                    _dims(value.shape, unknown) or ()
                )  # onnx aborts the process on some of them
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or tensor.nbytes > SMALL:
            if tensor is not None:
                value.type, value.shape = onnx_ir.TensorType(tensor.dtype), onnx_ir.Shape(tensor.shape.numpy())
                value.const_value = None
            del graph.initializers[name]
            if not value.is_graph_input():
                graph.inputs.append(value)
    for node in list(graph):
        tensor = tensor_of(node) if node.op_type == "Constant" and not node.domain else None
        if tensor is not None and tensor.nbytes > SMALL and not node.outputs[0].is_graph_output():
            old = node.outputs[0]
            shape = onnx_ir.Shape(tensor.shape.numpy())
            value = onnx_ir.Value(name=old.name, type=onnx_ir.TensorType(tensor.dtype), shape=shape)
            old.replace_all_uses_with(value)
            graph.remove(node, safe=True)
            graph.inputs.append(value)
    return clone


def _infer(clone: onnx_ir.Model) -> dict[str, onnx_ir.Value]:
    proto = onnx_ir.to_proto(clone)
    with contextlib.suppress(onnx.shape_inference.InferenceError):  # the shapes that the model declares remain
        proto = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    described = _described(proto.graph)
    inferred = {info.name: onnx_ir.serde.deserialize_value_info_proto(info, None) for info in described}
    for each in graphs_of(clone.graph):
        for value in own_values(each):
            inferred.setdefault(value.name or "", value)
    return inferred


def _described(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    """What onnx says of a graph, and of the bodies inside it."""
    yield from (*graph.input, *graph.value_info, *graph.output)
    for node in graph.node:
        for attribute in node.attribute if node.op_type in HOLDERS else ():
            if attribute.HasField("g"):
                yield from _described(attribute.g)


def _infer_with_bodies(clone: onnx_ir.Model) -> dict[str, onnx_ir.Value]:
    """With the shapes of what a Loop or Scan hands from one run of its body to the next.

    It begins with the shape of the first run's. Where the body returns the same, it is the shape in every run; a size that differs
    stays open, and so does the rank where that differs or is not known.
    """
    inferred = _infer(clone)
    every = [pair for node in nodes_of(clone.graph) if is_open(node) for pair in carried_by(node)]
    carried = [pair for pair in every if pair.given.shape is None]
    for pair in carried:
        known = inferred.get(pair.first.name or "")
        if known is not None and known.shape is not None:
            pair.given.shape, pair.given.type = onnx_ir.Shape(known.shape), known.type
            inferred = _infer(clone)
    while moved := [pair for pair in carried if not _agree(pair, inferred)]:
        for pair in moved:
            pair.given.shape = _common(pair.given.shape, inferred[pair.returned.name or ""].shape)
        inferred = _infer(clone)
    for first, given, _, result in every:
        known = inferred.get(first.name or "")
        common = None if known is None else _common(given.shape, known.shape)
        if known is not None and common is not None and result is not None and result.shape is None:
            result.shape, result.type = common, known.type
    return _infer(clone) if every else inferred


def _common(one: onnx_ir.Shape | None, other: onnx_ir.Shape | None) -> onnx_ir.Shape | None:
    """The sizes that both have; none where their ranks differ."""
    if one is None or other is None or len(one) != len(other):
        return None
    return onnx_ir.Shape([n if n == m else None for n, m in zip(one, other, strict=True)])


def _agree(pair: Carried, inferred: Mapping[str, onnx_ir.Value]) -> bool:
    """Whether the body returns what it was taken to be given."""
    shape, returned = pair.given.shape, inferred[pair.returned.name or ""].shape
    if shape is None:
        return True
    same = returned is not None and len(returned) == len(shape)
    return same and all(_dim(n) is None or n == m for n, m in zip(shape, returned or (), strict=True))


def contradiction(model: onnx_ir.Model) -> str:
    """What onnx finds wrong with a model, in a line: sizes and types that do not fit, then everything else it checks."""
    try:
        proto = onnx_ir.to_proto(_light(model, symbols()))
        onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True)
        shaped = [value for value in proto.graph.output if value.type.tensor_type.HasField("shape")]
        del proto.graph.output[:]  # the checker wants the shape of an output, which runtimes do not
        proto.graph.output.extend(shaped)
        onnx.checker.check_model(proto)
    except Exception as error:  # onnx_ir and onnx report a broken model in many ways
        while error.__cause__ is not None:
            error = error.__cause__  # type: ignore[assignment]
        return next(iter(str(error).strip().splitlines()), type(error).__name__)
    return ""


def _implied_sizes(model: onnx_ir.Model, inferred: dict[str, onnx_ir.Value]) -> Iterator[tuple[str, int, int]]:
    for node in nodes_of(model.graph):
        if len(node.inputs) < 2 or node.inputs[0] is None or node.inputs[1] is None or node.domain:
            continue
        value, tensor = inferred.get(node.inputs[0].name or ""), node.inputs[1].const_value
        shape = None if value is None else value.shape
        if tensor is None or shape is None or value is None or value.name is None:
            continue
        weight = tensor.shape.numpy()
        if node.op_type == "MatMul" and len(weight) == 2:
            axis, size = len(shape) - 1, weight[0]
        elif node.op_type == "Gemm" and not ("transA" in node.attributes and node.attributes["transA"].as_int()):
            turned = "transB" in node.attributes and node.attributes["transB"].as_int()
            axis, size = 1, weight[1 if turned else 0]
        elif node.op_type == "Conv":
            groups = node.attributes["group"].as_int() if "group" in node.attributes else 1
            axis, size = 1, weight[1] * (groups or 1)  # an attribute that refers to one of a function has no value
        else:
            continue
        if 0 <= axis < len(shape) and not isinstance(shape[axis], int):
            yield value.name, axis, size


def symbols() -> Iterator[str]:
    """Symbols ?0, ?1, ... for unknown sizes, each different from all others."""
    return (f"?{i}" for i in itertools.count())


MOVES = {"Cast", "Gather", "Identity", "Slice", "Squeeze", "Unsqueeze"}


@dataclass(frozen=True, slots=True)
class FixedSize:
    """A value that holds sizes of another value, all of them known: `dims` of `source`."""

    value: str
    source: str
    dims: tuple[int, ...]
    tensor: ArrayLiteral


@dataclass(frozen=True, slots=True)
class ReshapeTarget:
    """A Reshape or Expand whose target shape is computed from sizes of a value."""

    value: str
    source: str


@dataclass(slots=True)
class Sizes:
    """Follows sizes through a graph that is being read; `tensors` and `shapes` are the reader's own."""

    opset: int
    tensors: dict[str, Tensor]
    shapes: Mapping[str, Shape | None]
    fixed: list[FixedSize] = field(default_factory=list)
    targets: list[ReshapeTarget] = field(default_factory=list)
    sources: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)

    def fix(self, name: str, source: Operand, shape: Shape, dims: tuple[int, ...], rank: int = 1) -> None:
        """The value is a tensor."""
        sizes = np.asarray([shape[d] for d in dims], dtype=np.int64)
        tensor = ArrayLiteral(sizes if rank else sizes.reshape(()))
        self.tensors[name] = tensor
        if isinstance(source, str):
            self.fixed.append(FixedSize(name, source, dims, tensor))

    def follow(self, value: onnx_ir.Value, source: str, dims: tuple[int, ...]) -> None:
        """Remember what a value holds, and its casts and what is picked from it with it."""
        self.sources[value.name or ""] = source, dims
        for use in value.uses():
            for output, part in self._parts(use.node, use.idx, dims):
                self.follow(output, source, part)

    def _parts(
        self, node: onnx_ir.Node, slot: int, dims: tuple[int, ...]
    ) -> list[tuple[onnx_ir.Value, tuple[int, ...]]]:
        """What a node that only moves sizes holds in its outputs; nothing where that is not known."""
        if node.domain or slot != 0:
            return []
        if node.op_type in ("Cast", "Identity"):
            return [(node.outputs[0], dims)]
        if node.op_type == "Split" and len(node.outputs) == len(dims):  # one size each
            return [(output, (dim,)) for output, dim in zip(node.outputs, dims, strict=True)]
        picked = self._picked(node, dims)
        return [] if picked is None else [(node.outputs[0], picked)]

    def fix_picked(self, node: onnx_ir.Node) -> bool:
        """A Gather, Slice or Split of a Shape whose sizes are fixed is a tensor."""
        first = node.inputs[0] if node.inputs else None
        source = None if first is None else self.sources.get(first.name or "")
        if source is None:
            return False
        name, dims = source
        picked, shape = self._picked(node, dims), self.shapes.get(name)
        if node.op_type == "Split" and shape is not None and len(node.outputs) == len(dims):
            for output, dim in zip(node.outputs, dims, strict=True):
                if isinstance(shape[dim], int):
                    self.fix(output.name or "", name, shape, (dim,))
            return all(isinstance(shape[dim], int) for dim in dims)
        if picked is None or shape is None or not all(isinstance(shape[d], int) for d in picked):
            return False
        index = node.inputs[1]
        scalar = node.op_type == "Gather" and index is not None and self.tensors[index.name or ""].shape == ()
        self.fix(node.outputs[0].name or "", name, shape, picked, 0 if scalar else 1)
        return True

    def needed(self, value: onnx_ir.Value, source: str, dims: tuple[int, ...]) -> tuple[int, ...]:
        """Which sizes of `source` the readers of its Shape need as they are. Call it when the whole graph is read."""
        wanted: set[int] = set()
        for use in value.uses():
            parts = self._parts(use.node, use.idx, dims)
            # A size may have become known after its reader was read, which then still computes it.
            open_parts = [(output, part) for output, part in parts if output.name not in self.tensors]
            if parts and not open_parts:
                continue
            targets = self._targets(use.node, use.idx, source)
            if targets is not None:
                self.targets.extend(ReshapeTarget(name, source) for name in targets)
            elif not parts:
                return dims
            for output, part in open_parts if targets is None else ():
                wanted.update(self.needed(output, source, part))
        return dims if value.is_graph_output() else tuple(sorted(wanted))

    def _picked(self, node: onnx_ir.Node, dims: tuple[int, ...]) -> tuple[int, ...] | None:
        """The sizes that a Gather or Slice takes from a shape; `None` where that is known only at run time."""
        constants: list[list[int] | None] = []
        for value in node.inputs[1:]:
            tensor = self.tensors.get(value.name or "") if value is not None else None
            constants.append(None if tensor is None else materialise(tensor).reshape(-1).tolist())
        if node.domain or not constants or None in constants:
            return None
        if node.op_type == "Gather":
            wanted = constants[0] or []
            return tuple(dims[i] for i in wanted) if all(-len(dims) <= i < len(dims) for i in wanted) else None
        if node.op_type == "Slice" and self.opset >= 10:
            starts, ends = constants[0] or [0], constants[1] or [0]
            step = (constants[3] or [1])[0] if len(constants) > 3 else 1
            return dims[starts[0] : ends[0] : step]
        return None

    def _targets(self, node: onnx_ir.Node, slot: int, source: str) -> list[str] | None:
        """The Reshapes and Expands that sizes end in, where they end nowhere else and the target can be written anew."""
        data, output = node.inputs[0], node.outputs[0]
        if node.domain or (output.is_graph_output() and node.op_type != "Reshape"):
            return None
        if node.op_type == "Resize":  # its sizes follow the value that it resizes
            return [] if slot == 3 and data is not None and data.name == source else None
        if node.op_type == "Reshape":
            shape = self.shapes.get(output.name or "")
            own = self.shapes.get(data.name or "") if data is not None else None
            return [output.name or ""] if slot == 1 and shape is not None and _can_write(shape, own or ()) else None
        if node.op_type == "Expand":
            return [output.name or ""] if slot == 1 and self._sizes_are_given(node) else None
        if not (node.op_type == "Concat" or (node.op_type in MOVES and slot == 0)):
            return None
        reshapes: list[str] = []
        for use in output.uses():
            inner = self._targets(use.node, use.idx, source)
            if inner is None:
                return None
            reshapes += inner
        return reshapes

    def _sizes_are_given(self, expand: onnx_ir.Node) -> bool:
        """Whether the target of an Expand is the shape of a value, and inputs of the model have the same sizes."""
        target, graph = expand.inputs[1], expand.graph
        if target is None or graph is None or (maker := target.producer()) is None or maker.op_type != "Shape":
            return False
        shape = self.shapes.get(expand.outputs[0].name or "")
        given = {size for value in graph.inputs for size in self.shapes.get(value.name or "") or ()}
        return shape is not None and all(isinstance(size, int) or size in given for size in shape)


def shaped_alone(sizes: onnx_ir.Value) -> tuple[str, ...]:
    """The results of the Reshapes that take these sizes for their target, where nobody else reads them."""
    uses = [] if sizes.is_graph_output() else list(sizes.uses())
    if not all(use.node.op_type == "Reshape" and not use.node.domain and use.idx == 1 for use in uses):
        return ()
    return tuple(use.node.outputs[0].name or "" for use in uses)


def _can_write(shape: Shape, own: Shape) -> bool:
    """A constant target holds one size that is worked out (-1); more where they are copied from the input (0)."""
    unknown = [i for i, n in enumerate(shape) if isinstance(n, str)]
    return len(unknown) <= 1 or sum(i >= len(own) or own[i] != shape[i] for i in unknown) <= 1
