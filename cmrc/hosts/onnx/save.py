"""Writing an ONNX model: one rename decides whether the old model or the new one is there.

Everything is first written to a staging folder beside the target and checked there. Weights that lie in a file of their own
get a name by their content, `model.0123456789abcdef.onnx.data`, which no other weights have. That file is put in place first;
the rename of the model that refers to it comes last. What only the replaced model used is removed afterwards.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

import onnx
import onnx_ir
import xxhash

from cmrc.errors import CmrcError, FileError, HostError, causes
from cmrc.files import is_mentioned, locked, publish, require_writable, staging, target, writing
from cmrc.hosts.onnx.nodes import dtype_name, values_of
from cmrc.ir.graph import Array, as_dtype

LARGEST = 1_800_000_000  # bytes in one file: protobuf ends at 2 GiB
WORKERS = 4  # threads that write weights: more wait for the disk
MANY = 1 << 28  # bytes of new weights from which on threads are worth their own memory
PIECE = 1 << 28  # bytes of a file that one thread reads
WEIGHTS = "weights"  # what the data file is called until its content is known


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
    metadata: Mapping[str, str],
    *,
    alive: Sequence[onnx_ir.Model],
    source: Path | None = None,
    overwrite: bool = False,
) -> int:
    """Write `model` with `metadata` added, and return its bytes; `alive` are the models whose external tensors may still be read, the source last.

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
        staged = folder / place.name
        described = _described(model, metadata)
        with own_errors():
            if external:
                _save_external(described, staged)
            else:
                _save_whole(described, staged)
        data = _name_by_content(staged, folder / WEIGHTS, place.stem)
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


def _save_external(model: onnx_ir.Model, path: Path) -> None:
    """With the weights in a file of their own; many are folded and written by several threads, at most two of them in memory."""
    external = onnx_ir.ExternalTensor  # is copied from file to file
    sizes = [tensor.nbytes for tensor in tensors(model) if not isinstance(tensor, external)]
    workers = min(os.cpu_count() or 1, WORKERS) if sum(sizes) >= MANY else 1
    largest = max(sizes, default=0) or 1
    onnx_ir.save(
        model, path, format="protobuf", external_data=WEIGHTS, max_workers=workers, max_in_flight_bytes=largest
    )


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


def _name_by_content(staged: Path, weights: Path, stem: str) -> Path | None:
    """Call the data file after what is in it, in the model too; `None` where the model has all its weights itself."""
    if not weights.exists() or not weights.stat().st_size:
        return None
    data = weights.with_name(f"{stem}.{_digest(weights)}.onnx.data")
    weights.rename(data)
    model = onnx.load(staged, load_external_data=False)
    for entry in _locations(model.graph):
        entry.value = data.name
    staged.write_bytes(model.SerializeToString())
    return data


def _digest(path: Path) -> str:
    """The digest of a file's bytes. Where the file has several pieces, threads read them, and it is the digest of their digests."""
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        memoryview(content) as whole,
        ThreadPoolExecutor(WORKERS) as pool,
    ):
        digests = list(pool.map(_digest_of_piece, repeat(whole), range(0, len(whole), PIECE)))
    return (digests[0].hex() if len(digests) == 1 else xxhash.xxh3_128_hexdigest(b"".join(digests)))[:16]


def _digest_of_piece(whole: memoryview, start: int) -> bytes:
    with whole[start : start + PIECE] as piece:
        return xxhash.xxh3_128_digest(piece)


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
