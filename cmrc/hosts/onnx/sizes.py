"""Sizes that an ONNX model reads from itself, by Shape, and what becomes of them when a value shrinks.

fixed      the size is known: a tensor, which stays what it was (`FixedSize`)
target     it ends in the target shape of a Reshape: that is written anew when it changes (`ReshapeTarget`)
otherwise  the Shape node needs that axis as it is: an `opaque` op with `shape_only`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir

from cmrc.ir.graph import ArrayLiteral, Operand, Shape, Tensor
from cmrc.ir.tensors import materialise

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
    """A Reshape whose target shape is computed from sizes of a value."""

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
        shape = self.shapes[source]
        wanted: set[int] = set()
        for use in value.uses():
            parts = self._parts(use.node, use.idx, dims)
            open_parts = [
                (output, part)
                for output, part in parts
                if shape is None or not all(isinstance(shape[d], int) for d in part)
            ]
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
        """The Reshapes that sizes end in, where they end nowhere else and the target can be written anew."""
        data, output = node.inputs[0], node.outputs[0]
        if node.domain or (output.is_graph_output() and node.op_type != "Reshape"):
            return None
        if node.op_type == "Resize":  # its sizes follow the value that it resizes
            return [] if slot == 3 and data is not None and data.name == source else None
        if node.op_type == "Reshape":
            shape = self.shapes.get(output.name or "")
            own = self.shapes.get(data.name or "") if data is not None else None
            return [output.name or ""] if slot == 1 and shape is not None and _can_write(shape, own or ()) else None
        if not (node.op_type == "Concat" or (node.op_type in MOVES and slot == 0)):
            return None
        reshapes: list[str] = []
        for use in output.uses():
            inner = self._targets(use.node, use.idx, source)
            if inner is None:
                return None
            reshapes += inner
        return reshapes


def _can_write(shape: Shape, own: Shape) -> bool:
    """A constant target holds one size that is worked out (-1); more where they are copied from the input (0)."""
    unknown = [i for i, n in enumerate(shape) if isinstance(n, str)]
    return len(unknown) <= 1 or sum(i >= len(own) or own[i] != shape[i] for i in unknown) <= 1
