"""Running an ONNX model under onnxruntime, with any of its values tapped.

The model given to onnxruntime is a clone with the tapped values as further outputs. onnxruntime returns no bfloat16
arrays, so such outputs are cast to float32 there and back here, which is exact.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir

from cmrc.errors import CmrcError, HostError
from cmrc.hosts.onnx.nodes import captured_by, data_type, defaults
from cmrc.hosts.onnx.save import is_large, own_errors
from cmrc.ir.graph import Array, Value

KEPT = 4  # sessions that a host keeps, one for every set of taps
LENT = "cmrc.tap."


class Sessions:
    """The sessions of one model, started when they are asked for."""

    def __init__(self, model: onnx_ir.Model, providers: Sequence[str]) -> None:
        self.model = model
        self.providers = tuple(providers)
        self._open: dict[tuple[str, ...], Any] = {}

    def run(self, inputs: Sequence[Any] | Mapping[str, Any], taps: Sequence[str]) -> list[Array]:
        feeds = self.feeds(inputs)
        outputs = [value.name or "" for value in self.model.graph.outputs]
        wanted = [*outputs, *taps]
        extra = tuple(sorted({tap for tap in taps if tap not in outputs and tap not in feeds}))
        session, halves = self._session(extra)
        names = [f"{LENT}{name}" if name in halves else name for name in wanted if name not in feeds]
        arrays = iter(_run(session, feeds, names))
        results: list[Array] = []
        for name in wanted:
            array = np.asarray(feeds[name]) if name in feeds else np.asarray(next(arrays))
            results.append(array.astype(ml_dtypes.bfloat16) if name in halves and name not in feeds else array)
        return results

    def feeds(self, inputs: Sequence[Any] | Mapping[str, Any]) -> dict[str, Array]:
        declared = {v.name or "": v for v in self.model.graph.inputs if not v.is_initializer()}
        if isinstance(inputs, Mapping):
            given = dict(inputs)
        else:
            if len(inputs) != len(declared):
                takes = f"the model takes {len(declared)}: {', '.join(declared)}"
                raise HostError(f"{len(inputs)} inputs were given, {takes}")
            given = dict(zip(declared, inputs, strict=True))
        missing = sorted(set(declared) - set(given))
        odd = sorted(set(given) - set(declared) - set(defaults(self.model)))
        if missing or odd:
            said = [f"input {', '.join(missing)} is missing"] if missing else []
            said += [f"the model has no input {', '.join(odd)}"] if odd else []
            raise HostError("; ".join(said), fix=f"give its inputs: {', '.join(declared)}")
        return {name: np.asarray(array) for name, array in given.items()}

    def _session(self, taps: tuple[str, ...]) -> tuple[Any, set[str]]:
        if taps not in self._open:
            while len(self._open) >= KEPT:
                del self._open[next(iter(self._open))]
            self._open[taps] = self._make(taps)
        session: tuple[Any, set[str]] = self._open[taps]
        return session

    def _make(self, taps: tuple[str, ...]) -> tuple[Any, set[str]]:
        try:
            import onnxruntime
        except ImportError as error:
            raise HostError("onnxruntime is not installed", fix="pip install 'cmrc[cpu]' or 'cmrc[gpu]'") from error
        model = self.model.clone()
        values = onnx_ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
        for name in taps:
            if name not in values:
                raise HostError("the model has no such value to tap", node=name, fix="see `cmrc inspect`")
            model.graph.outputs.append(values[name])
        halves = _return_halves_as_floats(model.graph)
        try:
            with own_errors():
                session = _start(onnxruntime, model, self.providers)
        except CmrcError:
            raise
        except Exception as error:  # onnxruntime has a class for each status
            raise HostError(f"onnxruntime refuses the model: {str(error).strip().splitlines()[-1]}") from error
        if not set(self.providers) & set(session.get_providers()):  # it falls back without an error
            raise HostError(
                f"onnxruntime cannot run on {' or '.join(self.providers)} here",
                fix="pip install 'cmrc[gpu]' with a CUDA version that matches, or add CPUExecutionProvider to the providers",
            )
        return session, halves


def _start(onnxruntime: Any, model: onnx_ir.Model, providers: Sequence[str]) -> Any:
    """A session; a model that does not fit in one message goes through a file."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised, and reported in our own words
    # A model cut at many sites is as many sessions; threads of one that spin for more work starve the others.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(prefix="cmrc-") as folder:
        warnings.simplefilter("ignore")  # a provider that is not there: asked of the session itself
        if not is_large(model):
            whole = onnx_ir.to_proto(model).SerializeToString()
            return onnxruntime.InferenceSession(whole, options, providers=list(providers))
        path = Path(folder) / "model.onnx"
        onnx_ir.save(model, path, external_data="model.onnx.data")
        return onnxruntime.InferenceSession(str(path), options, providers=list(providers))


def _return_halves_as_floats(graph: onnx_ir.Graph) -> set[str]:
    halves = set()
    for i, value in enumerate(graph.outputs):
        if value.dtype == onnx_ir.DataType.BFLOAT16:
            name = value.name or ""
            to = [onnx_ir.AttrInt64("to", onnx_ir.DataType.FLOAT)]
            output = onnx_ir.Value(
                name=f"{LENT}{name}", type=onnx_ir.TensorType(onnx_ir.DataType.FLOAT), shape=value.shape
            )
            graph.append(onnx_ir.Node("", "Cast", [value], to, outputs=[output], name=f"{LENT}{name}"))
            graph.outputs[i] = output
            halves.add(name)
    return halves


def _run(session: Any, feeds: Mapping[str, Array], names: Sequence[str]) -> list[Any]:
    import onnxruntime

    odd = {name: array for name, array in feeds.items() if array.dtype.name in ("bfloat16",)}
    try:
        if not odd:
            return list(session.run(list(names), dict(feeds)))
        kind = onnx_ir.DataType.BFLOAT16.value
        lent = {
            name: onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), kind)
            if name in odd
            else onnxruntime.OrtValue.ortvalue_from_numpy(array)
            for name, array in feeds.items()
        }
        return [value.numpy() for value in session.run_with_ort_values(list(names), lent)]
    except Exception as error:  # onnxruntime has a class for each status
        given = ", ".join(f"{name} {dtype_of(array)}" for name, array in feeds.items())
        why = " ".join(str(error).split()).removesuffix(" Please fix either the inputs/outputs or the model.")
        takes = ", ".join(f"{v.name} {v.type}[{', '.join(map(str, v.shape))}]" for v in session.get_inputs())
        raise HostError(f"onnxruntime failed on inputs {given}: {why}", fix=f"the model takes {takes}") from error


def dtype_of(array: Array) -> str:
    return f"{array.dtype.name}{list(array.shape)}"


@dataclass(frozen=True, slots=True, eq=False)
class OnnxPiece:
    """`inputs` are the values it reads; of `sizes` it reads the shape alone. Of `repeated` outputs there is one for each run of a body."""

    inputs: tuple[str, ...]
    sizes: tuple[str, ...]
    outputs: tuple[str, ...]
    sessions: Sessions
    repeated: frozenset[str] = frozenset()

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        given = {name: feeds[name] for name in (*self.inputs, *self.sizes)}
        arrays = dict(zip(self.outputs, self.sessions.run(given, ()), strict=True))
        for name in self.repeated:  # the runs one behind the other along the first axis
            runs = arrays[name]
            arrays[name] = runs.reshape(-1, *runs.shape[2:])
        return arrays


def extract(
    model: onnx_ir.Model,
    values: Mapping[str, Value],
    inputs: Sequence[str],
    outputs: Sequence[str],
    beyond: Collection[str],
    providers: Sequence[str],
) -> OnnxPiece:
    """The nodes between named values. A size of a value beyond the cut is read from a stand-in of its shape."""
    own = onnx_ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
    shown, repeated = dict[str, str](), frozenset[str]()
    inner = [name for name in outputs if name not in own]
    if inner:
        from cmrc.hosts.onnx.bodies import runs_often, show

        model = model.clone()
        repeated = frozenset(name for name in inner if runs_often(model.graph, name))
        shown = show(model.graph, {name: values[name] for name in inner})
        own = onnx_ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
    wanted = [shown.get(name, name) for name in outputs]
    given, needed, sizes = set(inputs), set[str](), dict[str, None]()
    waiting = list(wanted)
    while waiting:
        name = waiting.pop()
        if name in needed:
            continue
        needed.add(name)
        value = own[name]
        node = value.producer()
        if name in given or value.is_initializer():
            continue
        if node is None:
            raise HostError("is read on both sides of the cut", node=name, op="input")
        read = [v.name for v in node.inputs if v is not None and v.name] + captured_by(node)
        if node.op_type in ("Shape", "Size") and not node.domain and read[0] in beyond and read[0] not in given:
            sizes[read[0]] = None
        else:
            waiting.extend(read)
    used = tuple(name for name in inputs if name in needed)
    graph = onnx_ir.convenience.extract(model.graph, [*used, *sizes], wanted)
    for value in (*graph.inputs, *graph.outputs):
        known = values.get(value.name or "")
        if known is not None and value.dtype is None:
            value.dtype = data_type(known.dtype)
        if known is not None and value.shape is None and known.shape:
            value.shape = onnx_ir.Shape(known.shape)
    piece = onnx_ir.Model(graph, ir_version=model.ir_version, functions=list(model.functions.values()))
    return OnnxPiece(used, tuple(sizes), tuple(outputs), Sessions(piece, providers), repeated)
