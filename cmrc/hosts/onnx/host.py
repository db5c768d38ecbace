"""The ONNX host: an `onnx_ir.Model`, read, patched, run under onnxruntime, and saved.

host = OnnxHost.load("model.onnx")   or OnnxHost.from_model(onnx.ModelProto | onnx_ir.Model)
host.graph                          the mechanism graph                       read.py, ops (the table)
host.build(graph)                   a clone that computes an edited graph     write.py
host.run([x], taps=["relu"])        outputs, then the tapped values           session.py
host.save("small.onnx")             whole or not at all                       save.py
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import onnx
import onnx_ir

from cmrc.errors import HostError, TraceError, last_line
from cmrc.hosts.onnx import gradients
from cmrc.hosts.onnx.load import SORT, load, prepare, require_sound
from cmrc.hosts.onnx.nodes import annotate, details, read_annotations
from cmrc.hosts.onnx.ops.row import ModelReading
from cmrc.hosts.onnx.read import read
from cmrc.hosts.onnx.save import bytes_on_disk, save, with_initializers
from cmrc.hosts.onnx.session import OnnxPiece, Sessions, extract
from cmrc.hosts.onnx.shapes import contradiction
from cmrc.hosts.onnx.write import build
from cmrc.hosts.protocols import Derivatives, DerivativesRequest, Host, Learner, Metadata, Runner
from cmrc.ir.graph import Array, Graph
from cmrc.ir.tensors import within_last_bits

CPU = ("CPUExecutionProvider",)


class OnnxHost:
    """A model in ONNX. Immutable: `build` and `annotate` give another host that shares the unchanged tensors."""

    kind = "onnx"

    def __init__(
        self,
        model: onnx_ir.Model,
        *,
        providers: Sequence[str] = CPU,
        source: onnx_ir.Model | None = None,
        path: Path | None = None,
    ) -> None:
        """`source` is the model that this one was made from, `path` the file that was loaded."""
        self.model = model
        self.path = path
        self.providers = tuple(providers)
        self._source = source if source is not None else model  # keeps what is memory-mapped in sight of `save`

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        providers: Sequence[str] = CPU,
        assume: Mapping[str, Any] | None = None,
    ) -> Self:
        """A host for a file. Weights in external files stay there until they are used. `assume` fixes inputs by name."""
        return cls(prepare(load(Path(path)), assume), providers=providers, path=Path(path).absolute())

    @classmethod
    def from_model(
        cls,
        model: onnx.ModelProto | onnx_ir.Model,
        *,
        providers: Sequence[str] = CPU,
        assume: Mapping[str, Any] | None = None,
    ) -> Self:
        """A host for a model in memory, which is not changed."""
        try:
            own = onnx_ir.from_proto(model) if isinstance(model, onnx.ModelProto) else model.clone()
        except Exception as error:  # onnx_ir reports a graph out of order, or an odd field, in many ways
            raise TraceError(f"the model cannot be read: {last_line(error)}", fix=SORT) from error
        require_sound(own)
        return cls(prepare(own, assume), providers=providers)

    @cached_property
    def _sessions(self) -> Sessions:
        return Sessions(self.model, self.providers)

    @cached_property
    def _inside(self) -> frozenset[str]:
        """The values inside bodies."""
        return frozenset(value.name for node in self.graph.nodes if node.marks.body for value in node.outputs)

    @cached_property
    def _shown(self) -> dict[tuple[str, ...], OnnxPiece]:
        return {}

    @cached_property
    def _reading(self) -> ModelReading:
        return read(self.model)

    @property
    def graph(self) -> Graph:
        return self._reading.graph

    @property
    def metadata(self) -> Mapping[str, str]:
        return dict(self.model.metadata_props)

    @property
    def names(self) -> Mapping[str, Sequence[str]]:
        return self._reading.names

    @property
    def inputs(self) -> Sequence[str]:
        return [value.name or "" for value in self.model.graph.inputs if not value.is_initializer()]

    def contradiction(self) -> str:
        """What onnx finds wrong with the model that was loaded, in a line."""
        return contradiction(self._source)

    def details(self) -> Mapping[str, str]:
        """What each node is besides its operands, by its origin in the IR."""
        return details(self.model)

    def build(self, graph: Graph) -> Self:
        """A clone of this host that computes `graph`, an edited form of `self.graph`."""
        return self._another(build(self.model, self._reading, graph))

    def run(self, inputs: Sequence[Any] | Mapping[str, Any], taps: Sequence[str] = ()) -> list[Array]:
        """The outputs for one batch, then the tapped values; of a value inside a loop those of every run, one behind the other."""
        inside = tuple(dict.fromkeys(tap for tap in taps if tap in self._inside)) if taps else ()
        if not inside:
            return self._sessions.run(inputs, taps)
        if inside not in self._shown:
            self._shown[inside] = self.extract(self.inputs, inside)
        shown = self._shown[inside].run(self.bind(inputs))
        seen = iter(self._sessions.run(inputs, [tap for tap in taps if tap not in shown]))
        outputs = [next(seen) for _ in self.model.graph.outputs]
        return [*outputs, *(shown[tap] if tap in shown else next(seen) for tap in taps)]

    def bind(self, inputs: Sequence[Any] | Mapping[str, Any]) -> dict[str, Array]:
        """The inputs by name."""
        return self._sessions.feeds(inputs)

    def extract(self, inputs: Sequence[str], outputs: Sequence[str], *, beyond: Collection[str] = ()) -> OnnxPiece:
        """The part of the model between named values, for a session of its own."""
        return extract(self.model, self.graph.values(), inputs, outputs, beyond, self.providers)

    def differentiate(self, request: DerivativesRequest) -> list[Derivatives]:
        """The derivatives of a loss by inner values, for one batch, by the IR in torch."""
        return gradients.differentiate(self, self._reading, request)

    def runner(self) -> Runner:
        return self.run

    def learner(self, trained: Collection[str]) -> Learner:
        """The model in training, by the IR in torch; its parameters come back by `with_parameters`."""
        return gradients.learner(self, self._reading, trained)

    def with_parameters(self, arrays: Mapping[str, Array]) -> Self:
        """A clone with other numbers in these initializers, in the types that they have."""
        return self._another(with_initializers(self.model, arrays))

    def with_sizes(self, shapes: Mapping[str, Sequence[int]]) -> Self:
        """A clone whose inputs have these shapes, apart from the first axis; all others follow from them."""
        model = self.model.clone()
        for value in model.graph.inputs:
            shape = shapes.get(value.name or "", ())
            if value.shape is not None and len(value.shape) == len(shape):
                value.shape = onnx_ir.Shape([*value.shape[:1], *map(int, shape[1:])])
        for node in model.graph.all_nodes():
            for value in node.outputs:
                value.shape = None  # what was declared may speak of dynamic sizes
        return self._another(model)

    def unequal_stored(self, other: Host) -> tuple[str, ...] | None:
        """The initializers that hold other numbers than those of another host, beyond a few last bits."""
        if not isinstance(other, OnnxHost):
            return None
        mine, theirs = ({n: v.const_value for n, v in h.model.graph.initializers.items()} for h in (self, other))
        if mine.keys() != theirs.keys():
            return None
        unequal = []
        for name, tensor in mine.items():
            like = theirs[name]
            if tensor is None or like is None or (tensor.dtype, tensor.shape) != (like.dtype, like.shape):
                return None
            if not within_last_bits(tensor.numpy(), like.numpy()):
                unequal.append(name)
        return tuple(unequal)

    def annotations(self) -> list[dict[str, Any]]:
        """The do's recorded in the model, in the plan's order."""
        return read_annotations(self.model)

    def annotate(self, entries: Sequence[tuple[str, dict[str, Any]]]) -> Self:
        """A clone with these do's, and no others, recorded on the nodes that make the values."""
        return self._another(annotate(self.model, entries))

    def save(
        self,
        path: str | os.PathLike[str],
        metadata: Metadata = dict,
        *,
        overwrite: bool = False,
        output_names: Sequence[str] | None = None,
    ) -> tuple[int, int] | None:
        """Write the model, with entries added to its metadata (asked for while weights are written), whole or not at all.

        The file that the model was loaded from is replaced only with `overwrite`. Its bytes and those of the new one are
        returned, if there is such a file.
        """
        if output_names is not None:
            raise HostError(
                "an ONNX model keeps the names of its outputs, since callers use them",
                fix="leave the names as they are",
            )
        alive = self.model, self._source
        before = bytes_on_disk(self.path, self._source) if self.path is not None and self.path.is_file() else None
        after = save(self.model, Path(path), metadata, alive=alive, source=self.path, overwrite=overwrite)
        return None if before is None else (before, after)

    def _another(self, model: onnx_ir.Model) -> Self:
        return type(self)(model, providers=self.providers, source=self._source, path=self.path)
