"""Writing an ONNX model: one rename decides whether the old model or the new one is there.

Everything is first written to a staging folder beside the target and checked there. Weights that lie in a file of their own
get a name by their content, `model.0123456789abcdef.onnx.data`, which no other weights have. That file is put in place first;
the rename of the model that refers to it comes last. What only the replaced model used is removed afterwards.

A weight is folded, hashed and written in one go. What the metadata say of the source's weights is found out meanwhile, by another
thread that reads them in the same order, so that each comes from the disk once.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import onnx_ir

from cmrc.errors import CmrcError, FileError, HostError, causes
from cmrc.files import fill, is_mentioned, locked, publish, require_writable, staging, target, writing
from cmrc.hosts.onnx.nodes import dtype_name, values_of
from cmrc.hosts.protocols import Metadata
from cmrc.ir.graph import Array, as_dtype

LARGEST = 1_800_000_000  # bytes in one file: protobuf ends at 2 GiB
APART = 256  # bytes up to which a weight stays in the model's own file


def tensors(model: onnx_ir.Model) -> list[onnx_ir.TensorProtocol]:
    """The initializers of the main graph."""
    values = [value.const_value for value in model.graph.initializers.values()]
    return [tensor for tensor in values if tensor is not None]


def is_large(model: onnx_ir.Model) -> bool:
    """Whether the model must have its weights in a second file."""
    every = tensors(model)
    external = any(isinstance(tensor, onnx_ir.ExternalTensor) for tensor in every)
    return external or sum(tensor.nbytes for tensor in every) > LARGEST


def is_external(model: onnx_ir.Model) -> bool:
    return any(isinstance(tensor, onnx_ir.ExternalTensor) for tensor in tensors(model))


def bytes_on_disk(path: Path, model: onnx_ir.Model) -> int:
    """Bytes of a model's file, and of the files that hold its weights."""
    beside = {Path(tensor.path) for tensor in tensors(model) if isinstance(tensor, onnx_ir.ExternalTensor)}
    return sum(file.stat().st_size for file in (path, *beside))


def with_initializers(model: onnx_ir.Model, arrays: Mapping[str, Array]) -> onnx_ir.Model:
    """A clone with other numbers in these initializers and Constant nodes, each in the type that it has."""
    clone = model.clone()
    values = values_of(clone.graph)
    for name, array in arrays.items():
        value = values[name]
        before = value.const_value if value.is_initializer() else onnx_ir.convenience.get_const_tensor(value)
        assert before is not None, name
        tensor = onnx_ir.tensor(as_dtype(array, dtype_name(before.dtype)), dtype=before.dtype, name=before.name)
        value.const_value = tensor
        node = value.producer()
        if node is not None:
            node.attributes["value"] = onnx_ir.AttrTensor("value", tensor)
    return clone


def save(
    model: onnx_ir.Model,
    path: Path,
    metadata: Metadata,
    *,
    alive: Sequence[onnx_ir.Model],
    source: Path | None = None,
    overwrite: bool = False,
) -> int:
    """Write `model` with metadata added, and return its bytes; `alive` are the models whose external tensors may still be read, the source last.

    `source` is the file that the model was loaded from, which only `overwrite` lets go.
    """
    require_writable(path)
    if source is not None and not overwrite and path.exists() and source.exists() and path.samefile(source):
        raise FileError(
            f"cannot write {path}: the model was loaded from it, and would be overwritten",
            fix="write to another file, or overwrite it with overwrite=True",
        )
    place = target(path)
    external = any(is_external(each) for each in alive) or is_large(model)
    with writing(path), staging(place.parent) as folder:
        staged, data = folder / place.name, None
        with own_errors():
            if external:
                data = _save_external(model, staged, metadata)
            else:
                _save_whole(_described(model, metadata()), staged)
        if data is not None and place.parent.resolve() != path.parent.resolve():
            raise FileError(
                f"cannot write {path}: it is a link into another folder, and the model stores its weights in a file beside it",
                fix=f"write to {place}",
            )
        _check(staged, alive[-1])
        written = sum(file.stat().st_size for file in (staged, data) if file is not None)
        with locked(place.parent):
            _put(staged, data, place, alive)
    return written


def _save_whole(model: onnx_ir.Model, path: Path) -> None:
    """In one file. onnx_ir also declares type and shape of every weight, which the weight itself says: that is left out."""
    proto = onnx_ir.to_proto(model)
    weights = {tensor.name for tensor in proto.graph.initializer}
    declared = [value for value in proto.graph.value_info if value.name not in weights]
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(declared)
    path.write_bytes(proto.SerializeToString())


def _save_external(model: onnx_ir.Model, path: Path, metadata: Metadata) -> Path | None:
    """With the weights in a file of their own, which is returned; `None` where all of them are small."""
    tensors_before = {value: value.const_value for graph in model.graphs() for value in graph.initializers.values()}
    large = [(value, tensor) for value, tensor in tensors_before.items() if tensor is not None and _is_apart(tensor)]
    sizes = [tensor.nbytes for _, tensor in large]
    with ThreadPoolExecutor(1) as pool:
        described = pool.submit(metadata)
        data = path.with_name("weights")
        digest = fill(data, sizes, lambda index: _bytes(large[index][1])) if large else b""
        known = described.result()
    if large:
        data = data.rename(data.with_name(f"{path.stem}.{digest.hex()[:16]}.onnx.data"))
    try:
        start = 0
        for value, tensor in large:
            size, shape, name = tensor.nbytes, onnx_ir.Shape(tensor.shape.numpy()), tensor.name or ""
            value.const_value = onnx_ir.ExternalTensor(
                data.name, start, size, tensor.dtype, shape=shape, name=name, base_dir=path.parent
            )
            start += size
        for value, small in tensors_before.items():
            if value.const_value is small and isinstance(small, onnx_ir.ExternalTensor):
                value.const_value = onnx_ir.Tensor(small.numpy().copy(), dtype=small.dtype, name=small.name)
        path.write_bytes(onnx_ir.to_proto(_described(model, known)).SerializeToString())
    finally:
        for value, before in tensors_before.items():
            value.const_value = before
    return data if large else None


def _is_apart(tensor: onnx_ir.TensorProtocol) -> bool:
    return tensor.dtype != onnx_ir.DataType.STRING and tensor.nbytes > APART


def _bytes(tensor: onnx_ir.TensorProtocol) -> memoryview:
    """The bytes of a tensor as a file holds them, without a copy where that is possible."""
    if isinstance(tensor, onnx_ir.ExternalTensor):
        with open(tensor.path, "rb") as file:
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return content[(start := tensor.offset or 0) : start + tensor.nbytes]
    if tensor.dtype.bitwidth < 8 or sys.byteorder != "little":
        return memoryview(tensor.tobytes())
    return np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8).data


def _described(model: onnx_ir.Model, metadata: Mapping[str, str]) -> onnx_ir.Model:
    """The same graph with metadata of its own: the metadata of the model in memory do not change."""
    return onnx_ir.Model(
        model.graph,
        ir_version=model.ir_version,
        producer_name=model.producer_name,
        producer_version=model.producer_version,
        domain=model.domain,
        model_version=model.model_version,
        doc_string=model.doc_string,
        functions=list(model.functions.values()),
        metadata_props={**model.metadata_props, **metadata},
        device_configurations=model.device_configurations,
    )


# ---------------------------------------------------------------- the data file


def _locations(graph: onnx.GraphProto) -> Iterator[onnx.StringStringEntryProto]:
    """Where the external initializers of a graph, and of the graphs inside its nodes, say that their data lie."""
    for tensor in graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            yield from (entry for entry in tensor.external_data if entry.key == "location")
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _locations(inner)


def _put(staged: Path, data: Path | None, path: Path, alive: Sequence[onnx_ir.Model]) -> None:
    """The data file, then the model; afterwards nothing stays of what only the model before it used."""
    files = _data_files(path)
    try:
        if data is not None:
            publish(data, path.with_name(data.name))
        publish(staged, path)
    finally:  # whichever of the two models is there now
        _remove_unused(files | _left_by_saves(path), alive)


def _data_files(path: Path) -> set[Path]:
    """The data files beside a model that have its name; none where the model cannot be read."""
    beside = [name for name in os.listdir(path.parent) if name.startswith(f"{path.stem}.") and name != path.name]
    if not beside or not path.is_file():
        return set()
    try:
        names = {entry.value for entry in _locations(onnx.load(path, load_external_data=False).graph)}
    except Exception:  # whatever lies there is no model: it refers to nothing
        return set()
    return {path.with_name(name) for name in names if name.startswith(f"{path.stem}.") and name == Path(name).name}


def _left_by_saves(path: Path) -> set[Path]:
    """Data files that bear the name of this model."""
    pattern = re.compile(re.escape(path.stem) + r"(\.[0-9a-f]{16})?\.onnx\.data")
    return {path.with_name(name) for name in os.listdir(path.parent) if pattern.fullmatch(name)}


def _remove_unused(files: set[Path], alive: Sequence[onnx_ir.Model]) -> None:
    """Remove data files that no file in the folder mentions; what this process still reads from, once it no longer does."""
    for file in files:
        with contextlib.suppress(OSError):  # the model is saved: a leftover is no reason to report a failure
            if not file.is_file() or file.is_symlink() or is_mentioned(file):
                continue
            if any(_reads(model, file) for model in alive):
                weakref.finalize(alive[-1], _remove_later, file)
            else:
                file.unlink()


def _remove_later(file: Path) -> None:
    with contextlib.suppress(OSError), locked(file.parent):
        _remove_unused({file}, ())


def _reads(model: onnx_ir.Model, data: Path) -> bool:
    files = {Path(tensor.path) for tensor in tensors(model) if isinstance(tensor, onnx_ir.ExternalTensor)}
    return any(file.exists() and file.samefile(data) for file in files)


# ---------------------------------------------------------------- whether it is valid


def _check(path: Path, source: onnx_ir.Model) -> None:
    """onnx's own checker; a model that it refused from the start is not blamed on the result."""
    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        if _refused(source):
            return
        raise HostError(f"the model would not be valid ONNX: {str(error).strip().splitlines()[0]}") from error


def _refused(model: onnx_ir.Model) -> bool:
    with tempfile.TemporaryDirectory(prefix="cmrc-") as temporary:
        path = Path(temporary) / "model.onnx"
        onnx_ir.save(model, path, external_data="model.onnx.data" if is_large(model) else None)
        try:
            onnx.checker.check_model(str(path))
        except onnx.checker.ValidationError:
            return True
    return False


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """A fold that is refused while onnx_ir writes a model is reported as that, not as a failure to write."""
    try:
        yield
    except Exception as error:
        own = next((cause for cause in causes(error) if isinstance(cause, CmrcError)), None)
        if own is None or own is error:
            raise
        raise own from None
