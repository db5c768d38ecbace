"""The ONNX host: an `onnx_ir.Model`, read, patched, run under onnxruntime, and saved.

host = OnnxHost.load("model.onnx")   or OnnxHost.from_model(onnx.ModelProto | onnx_ir.Model)
host.graph                          the mechanism graph                       read.py, ops (the table)
host.build(graph)                   a clone that computes an edited graph     write.py
host.run([x], taps=["relu"])        outputs, then the tapped values           session.py
host.save("small.onnx", {})         whole or not at all                       save.py
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import onnx
import onnx_ir

from cmrc.errors import TraceError
from cmrc.hosts.onnx.annotations import annotate, read_annotations
from cmrc.hosts.onnx.bodies import is_sorted
from cmrc.hosts.onnx.piece import OnnxPiece, extract
from cmrc.hosts.onnx.read import ModelReading, read
from cmrc.hosts.onnx.save import save
from cmrc.hosts.onnx.session import Sessions
from cmrc.hosts.onnx.write import build
from cmrc.ir.graph import Array, Graph

CPU = ("CPUExecutionProvider",)

SORT = "see what onnx.checker.check_model(model) says; onnx_ir.passes.common.TopologicalSortPass sorts nodes"


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
        self._sessions = Sessions(model, self.providers)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, providers: Sequence[str] = CPU) -> Self:
        """A host for a file. Weights in external files stay there until they are used."""
        own = _load(Path(path))
        if not is_sorted(own.graph):
            raise TraceError(f"cannot read {path}: its nodes are out of order", fix=SORT)
        return cls(own, providers=providers, path=Path(path).absolute())

    @classmethod
    def from_model(cls, model: onnx.ModelProto | onnx_ir.Model, *, providers: Sequence[str] = CPU) -> Self:
        """A host for a model in memory, which is not changed."""
        try:
            own = onnx_ir.from_proto(model) if isinstance(model, onnx.ModelProto) else model.clone()
            if not is_sorted(own.graph):
                raise ValueError("its nodes are out of order")
        except Exception as error:  # onnx_ir reports a graph out of order, or an odd field, in many ways
            raise TraceError(f"the model cannot be read: {_last_line(error)}", fix=SORT) from error
        return cls(own, providers=providers)

    @cached_property
    def _reading(self) -> ModelReading:
        return read(self.model)

    @property
    def graph(self) -> Graph:
        return self._reading.graph

    @property
    def names(self) -> Mapping[str, Sequence[str]]:
        return self._reading.names

    @property
    def inputs(self) -> Sequence[str]:
        return [value.name or "" for value in self.model.graph.inputs if not value.is_initializer()]

    def build(self, graph: Graph) -> Self:
        """A clone of this host that computes `graph`, an edited form of `self.graph`."""
        return self._another(build(self.model, self._reading, graph))

    def run(self, inputs: Sequence[Any] | Mapping[str, Any], taps: Sequence[str] = ()) -> list[Array]:
        """The outputs for one batch, then the tapped values."""
        return self._sessions.run(inputs, taps)

    def bind(self, inputs: Sequence[Any] | Mapping[str, Any]) -> dict[str, Array]:
        """The inputs by name."""
        return self._sessions.feeds(inputs)

    def extract(self, inputs: Sequence[str], outputs: Sequence[str], *, beyond: Collection[str] = ()) -> OnnxPiece:
        """The part of the model between named values, for a session of its own."""
        return extract(self.model, self.graph.values(), inputs, outputs, beyond, self.providers)

    def annotations(self) -> list[dict[str, Any]]:
        """The do's recorded in the model, in the plan's order."""
        return read_annotations(self.model)

    def annotate(self, entries: Sequence[tuple[str, dict[str, Any]]]) -> Self:
        """A clone with these do's, and no others, recorded on the nodes that make the values."""
        return self._another(annotate(self.model, entries))

    def save(self, path: str | os.PathLike[str], metadata: Mapping[str, str], *, overwrite: bool = False) -> None:
        """Write the model, with entries added to its metadata, whole or not at all.

        The file that the model was loaded from is replaced only with `overwrite`.
        """
        alive = self.model, self._source
        save(self.model, Path(path), metadata, alive=alive, source=self.path, overwrite=overwrite)

    def _another(self, model: onnx_ir.Model) -> Self:
        return type(self)(model, providers=self.providers, source=self._source, path=self.path)


def _load(path: Path) -> onnx_ir.Model:
    if not path.is_file():
        what = "it is a folder" if path.is_dir() else "there is no such file"
        raise TraceError(f"cannot read {path}: {what}", fix="give the path of an .onnx file")
    fix = "export or download it again; an .onnx file is a serialised ModelProto"
    try:
        model = onnx_ir.load(path, format="protobuf")
    except Exception as error:  # protobuf's DecodeError, or whatever a broken file sets off inside onnx_ir
        broken = type(error).__name__ == "DecodeError"
        why = "it is not an ONNX model, or it is cut off" if broken else _last_line(error)
        raise TraceError(f"cannot read {path}: {why}", fix=fix) from error
    if not model.graph.outputs or not model.opset_imports:
        raise TraceError(f"cannot read {path}: it is not an ONNX model, or it is cut off", fix=fix)
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, onnx_ir.ExternalTensor):
            file, end = Path(tensor.path), (tensor.offset or 0) + tensor.nbytes
            size = file.stat().st_size if file.is_file() else -1
            if size < end:
                problem = "does not exist" if size < 0 else f"is cut off: {size} bytes, {end} are needed"
                raise TraceError(
                    f"its external data file {file} {problem}", node=value.name or "", op="initializer",
                    fix="put the data file beside the model",
                )  # fmt: skip
    return model


def _last_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
