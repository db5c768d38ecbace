"""A Hugging Face checkpoint folder as a model: `cmrc lower FOLDER plan.json -o SMALLER`.

    config.json ────> the architecture, without numbers ──> torch.export ──> IR
    *.safetensors ──> tensors over the mapped files          passes          │
                                                                             ▼
    OUT/*.safetensors <── one tensor after the other: copied, or folded and written      OUT/config.json with the new widths

No weight is in memory before it is read, and a folded one only while it is written. The new folder is traced again before it
gets its name: it must run the lowered graph, node by node. If no config can express the widths, a loader that opens such a
folder (`modeling_cmrc.py`) is written into it.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.export import Dim, ExportedProgram

from cmrc.errors import HostError, TraceError, last_line
from cmrc.files import fill, new_folder
from cmrc.hosts.autograd.arrays import to_numpy, torch_dtype
from cmrc.hosts.fx import modeling_cmrc
from cmrc.hosts.fx.details import details
from cmrc.hosts.fx.host import FxHost, Patched
from cmrc.hosts.fx.lifted import LiftedProgram, lift, refreshed
from cmrc.hosts.fx.load import Shapes, express
from cmrc.hosts.fx.module import make_template
from cmrc.hosts.fx.read import LiftedReading
from cmrc.hosts.fx.write import Written
from cmrc.hosts.protocols import Metadata
from cmrc.ir.graph import Array, Graph, Leaf, Node, Operand, Tensor
from cmrc.ir.tensors import fold

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
DTYPES = {  # names in a safetensors header
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
ROWS = Dim("batch", min=1, max=2**16)
LONGEST = 2**16  # tokens, where the config does not say
SEQUENCE = 16  # tokens of the example that a text model is traced with; batch and length stay dynamic


def is_checkpoint(path: Path) -> bool:
    return path.is_dir() and (path / CONFIG).is_file()


def trace_checkpoint(
    folder: Path, args: tuple[Any, ...], options: Mapping[str, Any]
) -> tuple[FxHost, tuple[Any, ...], dict[str, Any]]:
    """Read a folder. Without example inputs, those that suit the kind of model are used; they are returned too."""
    model = _opened(folder)
    if not args and not options.get("kwargs"):
        options = {**options, **example_inputs(model, folder)}
    return CheckpointHost(_lifted(model, folder, args, options), folder, args, options), args, dict(options)


def _opened(folder: Path) -> torch.nn.Module:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise TraceError(
            f"{folder} has no safetensors files",
            fix="save the model with model.save_pretrained(folder), which writes them",
        )
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise TraceError("a checkpoint folder needs transformers", fix="pip install 'transformers>=5'") from error
    if "quantization_config" in json.loads((folder / CONFIG).read_text(encoding="utf-8")):
        raise TraceError(f"{folder} holds quantised weights", fix="reduce the model first, then quantise the result")
    try:
        model: Any = modeling_cmrc.load(folder)
    except Exception as error:  # transformers and safetensors raise many errors for a broken folder
        first, last = (str(error).strip() or type(error).__name__).splitlines()[0], last_line(error)
        reason = first if last in first else f"{first} ({last})"
        raise TraceError(f"{folder} cannot be opened: {reason}", fix="make from_pretrained(folder) work") from error
    model.config.use_cache = False  # keys and values for later calls are not outputs
    return model  # type: ignore[no-any-return]


def example_inputs(model: Any, folder: Path) -> dict[str, Any]:
    """Options for torch.export: what the model takes by keyword, and which axes are dynamic."""
    config, kwargs = model.config, {}
    name = str(getattr(model, "main_input_name", ""))
    if name == "input_ids":
        kwargs["input_ids"] = torch.zeros((2, SEQUENCE), dtype=torch.int64)
        if not type(model).__name__.endswith("ForCausalLM"):
            kwargs["attention_mask"] = torch.ones((2, SEQUENCE), dtype=torch.int64)
        longest = int(getattr(config, "max_position_embeddings", 0) or LONGEST)
        axes: dict[int, Any] = {
            0: ROWS,
            1: Dim("tokens", min=2, max=max(longest - 2, SEQUENCE)),
        }  # all inputs share them
    elif name == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        kwargs[name] = torch.zeros((2, getattr(config, "num_channels", 3), config.image_size, config.image_size))
        axes = {0: ROWS}
    else:
        raise TraceError(
            f"there is no example input for {type(model).__name__} ({folder})",
            fix="give one: cmrc.trace(folder, (x,)), or load the model and trace that",
        )
    return {"kwargs": kwargs, "dynamic_shapes": dict.fromkeys(kwargs, axes)}


def _lifted(model: torch.nn.Module, folder: Path, args: tuple[Any, ...], options: Mapping[str, Any]) -> LiftedProgram:
    try:
        exported: ExportedProgram = torch.export.export(model, args, **options)
    except Exception as error:
        raise TraceError(
            f"torch.export cannot trace {type(model).__name__} of {folder}: {str(error).strip().splitlines()[0]}",
            fix="give example inputs: cmrc.trace(folder, (x,), dynamic_shapes=...)",
        ) from error
    return lift(exported, in_eval_mode=True, owned=True)


class CheckpointHost(FxHost):
    """A folder's model. It computes from the mapped files; `build` folds nothing before a number is needed."""

    def __init__(self, program: LiftedProgram, folder: Path, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        super().__init__(Patched(program, make_template(program)))
        self.folder, self.args, self.options = folder, args, options

    def exported(self) -> None:
        """None: the weights stay in their files."""

    def build(self, graph: Graph) -> LoweredCheckpoint:
        """A program with memory for the new weights, which are not computed; that memory is never touched."""
        return LoweredCheckpoint(self, graph, self.write(graph, fold=_room))


class LoweredCheckpoint(FxHost):
    """A lowered checkpoint. It is written tensor by tensor; if a number is needed before, all new weights are folded."""

    def __init__(self, origin: CheckpointHost, graph: Graph, written: Written) -> None:
        super().__init__(lambda: origin.patched(graph), stale=True)
        self._origin, self._written = origin, written

    @property
    def untied(self) -> tuple[str, ...]:
        return self._written.untied

    def save(
        self,
        path: Path,
        metadata: Metadata = dict,
        *,
        overwrite: bool = False,
        output_names: Sequence[str] | None = None,
    ) -> None:
        """Write a folder, or ONNX if the path ends so."""
        if path.suffix.lower() == ".onnx":
            super().save(path, metadata, overwrite=overwrite, output_names=output_names)
            return
        if self._module is not None:
            raise HostError(
                "lowered.module was made from this checkpoint, and may have been trained since",
                fix="save the module by load_into and save_pretrained, or write ONNX",
            )
        with new_folder(path) as folder:
            _Writing(self._origin, self._written).write(folder, metadata())


def _room(expression: Tensor, dtype: str, *, name: str, node: Node | None = None) -> torch.Tensor:
    return torch.empty(expression.shape, dtype=torch_dtype(dtype))


class _Writing:
    """A folder that is being written."""

    def __init__(self, origin: CheckpointHost, written: Written) -> None:
        self.origin, self.written = origin, written
        self.source = origin.folder
        self.stored = modeling_cmrc.tensors(self.source)
        self.tensors = {name: tensor for tensors in self.stored.values() for name, tensor in tensors.items()}
        self.shapes: Shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        self.shapes |= {name: expression.shape for name, expression in written.expressions.items()}
        self.zeros: dict[str, tuple[torch.Size, torch.dtype]] = {}  # biases that the new config adds

    def write(self, folder: Path, metadata: Mapping[str, str]) -> None:
        for path in sorted(self.source.iterdir()):
            if path.is_file() and path.suffix != ".safetensors" and path.name not in (CONFIG, INDEX):
                shutil.copy2(path, folder / path.name)
        where = self._places()
        misfits = self._write_config(folder)
        if misfits:
            shutil.copyfile(modeling_cmrc.__file__, folder / "modeling_cmrc.py")
        self._write_tensors(folder, where, metadata)
        self._require_same_graph(folder)
        if misfits:
            name = misfits[0]
            warnings.warn(
                f"config.json cannot express the new widths: {name} is {list(self.shapes[name])} now. from_pretrained will refuse "
                "the folder; load it with modeling_cmrc.py, which is in it. Keep the same number of units in every layer to avoid this",
                stacklevel=4,
            )

    def _places(self) -> dict[str, str]:
        """The file of every tensor: as in the checkpoint; a new bias goes into the file of its weight."""
        where = {name: file for file, tensors in self.stored.items() for name in tensors}
        for name in self.written.expressions:
            if name not in where:
                where[name] = self._place_of_bias(name, where)
        return where

    def _place_of_bias(self, name: str, where: Mapping[str, str]) -> str:
        sibling = f"{name.rpartition('.')[0]}.weight"
        if not name.endswith(".bias") or sibling not in where:
            raise HostError(
                f"the lowered graph has a new tensor {name}, which the model's code does not read",
                fix="write ONNX: -o small.onnx",
            )
        return where[sibling]

    def _write_config(self, folder: Path) -> list[str]:
        """config.json with the new widths if it can express them, otherwise unchanged; and the tensors that do not fit."""
        model = modeling_cmrc.build(self.source)
        pairs = {
            (was, now)
            for name, tensor in self.tensors.items()
            for was, now in zip(tensor.shape, self.shapes[name], strict=False)
            if was != now
        }
        changes, misfits = express(type(model), model.config, self.shapes, pairs)
        text = (self.source / CONFIG).read_text(encoding="utf-8")
        if changes and not misfits:
            changed = {**json.loads(text), **changes}
            (folder / CONFIG).write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")
            try:
                known = modeling_cmrc.build(folder).state_dict()
            except Exception:  # the config's own rules, such as a hidden size that is not a multiple of the heads
                misfits = [name for name, tensor in self.tensors.items() if tuple(tensor.shape) != self.shapes[name]]
            else:
                before, dtype = model.state_dict(), next(iter(self.tensors.values())).dtype
                extra = [name for name in known if name not in self.shapes and name not in before]
                self.zeros = {name: (known[name].shape, dtype) for name in extra if name.endswith(".bias")}
                return []
        (folder / CONFIG).write_text(text, encoding="utf-8")
        return misfits

    # ------------------------------------------------------------ tensors

    def _write_tensors(self, folder: Path, where: dict[str, str], metadata: Mapping[str, str]) -> None:
        where |= {name: self._place_of_bias(name, where) for name in self.zeros}
        files: dict[str, list[str]] = {}
        for name, file in sorted(where.items()):
            files.setdefault(file, []).append(name)
        for file, names in files.items():
            self._write_file(folder / file, names, metadata)
        if (self.source / INDEX).is_file():
            index = {
                "metadata": {"total_size": sum(map(self._bytes, where))},
                "weight_map": dict(sorted(where.items())),
            }
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _kind(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        if name in self.zeros:
            shape, dtype = self.zeros[name]
            return tuple(shape), dtype
        if name in self.written.expressions:
            return self.shapes[name], self.written.program.state[name].dtype
        return self.shapes[name], self.tensors[name].dtype

    def _bytes(self, name: str) -> int:
        shape, dtype = self._kind(name)
        return torch.Size(shape).numel() * dtype.itemsize

    def _write_file(self, path: Path, names: list[str], metadata: Mapping[str, str]) -> None:
        """Write a safetensors file with never more than two tensors in memory: lengths are known beforehand."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
        start = 0
        for name in names:
            shape, dtype = self._kind(name)
            end = start + self._bytes(name)
            header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
            start = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        head = len(text).to_bytes(8, "little") + text
        fill(path, [self._bytes(name) for name in names], lambda index: self._data(names[index]), head=head)

    def _data(self, name: str) -> memoryview:
        return np.ascontiguousarray(self._array(name)).reshape(-1).view(np.uint8).data

    def _array(self, name: str) -> Array:
        shape, dtype = self._kind(name)
        if name in self.zeros:
            return to_numpy(torch.zeros(shape, dtype=dtype))
        expression = self.written.expressions.get(name)
        if expression is None:
            return to_numpy(self.tensors[name])
        return fold(expression, str(dtype).removeprefix("torch."), name=name)

    # ------------------------------------------------------------ the proof

    def _require_same_graph(self, folder: Path) -> None:
        """Require that the folder, opened and traced like the first one, runs the lowered graph."""
        traced = _lifted(_opened(folder), folder, self.origin.args, self.origin.options)
        wanted = refreshed(self.written.program)
        problem = next(_differences(wanted, traced, set(self.zeros)), "")
        if problem:
            raise HostError(
                f"the model's own code does not compute the lowered graph: {problem}", fix="write ONNX: -o small.onnx"
            )


def _differences(wanted: LiftedProgram, traced: LiftedProgram, zeros: set[str]) -> Iterator[str]:
    """The first difference between two programs in nodes, sizes, arguments or names of parameters."""
    one, other = LiftedReading(wanted).graph, LiftedReading(traced).graph
    if len(one.nodes) != len(other.nodes):
        yield f"it has {len(other.nodes)} nodes, not {len(one.nodes)}"
        return
    calls = details(wanted), details(traced)

    def operand(given: Operand) -> Any:
        if isinstance(given, Leaf):
            return None if given.name in zeros else (given.name, given.shape)
        return given

    def sizes(node: Node) -> list[Any]:
        return [[n if isinstance(n, int) else "?" for n in value.shape] for value in node.outputs]

    for mine, theirs in zip(one.nodes, other.nodes, strict=True):
        added = any(isinstance(given, Leaf) and given.name in zeros for given in theirs.inputs)
        inputs = [[operand(given) for given in node.inputs] for node in (mine, theirs)]
        for side in inputs:
            while side and side[-1] is None:
                side.pop()
        same = mine.op == theirs.op and inputs[0] == inputs[1] and sizes(mine) == sizes(theirs)
        if same and not added:
            same = calls[0].get(mine.origin) == calls[1].get(theirs.origin)
        if not same:
            yield f"{mine.label} ({mine.kind}) reads or computes other sizes there"
