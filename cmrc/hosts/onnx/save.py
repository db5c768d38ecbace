"""Writing an ONNX model, whole or not at all.

Everything is first written to a folder of its own beside the target, checked there, and then renamed: the data file,
then the model. Where the data file's name is that of a file which this process still reads weights from, the new data
gets a name of its own, and the old file stays.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
import onnx_ir

from cmrc.errors import FileError, HostError
from cmrc.files import require_writable, target

LARGEST = 1_800_000_000  # bytes in one file: protobuf ends at 2 GiB


def tensors(model: onnx_ir.Model) -> list[onnx_ir.TensorProtocol]:
    found = [value.const_value for value in model.graph.initializers.values()]
    return [tensor for tensor in found if tensor is not None]


def is_large(model: onnx_ir.Model) -> bool:
    """Whether the model must have its weights in a second file."""
    return is_external(model) or sum(tensor.nbytes for tensor in tensors(model)) > LARGEST


def is_external(model: onnx_ir.Model) -> bool:
    return any(isinstance(tensor, onnx_ir.ExternalTensor) for tensor in tensors(model))


def save(model: onnx_ir.Model, path: Path, metadata: Mapping[str, str], *, alive: Sequence[onnx_ir.Model]) -> None:
    """Write `model` with `metadata` added; `alive` are the models whose external tensors may still be read."""
    require_writable(path)
    path = target(path)
    folder, data = path.parent, None
    if is_large(model) or any(is_external(each) for each in alive):
        data = f"{path.stem}.onnx.data"
        if (folder / data).exists() and any(_reads(other, folder / data) for other in (*alive, model)):
            data = f"{path.stem}.{uuid.uuid4().hex[:8]}.onnx.data"
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".cmrc-") as temporary:
            written = Path(temporary) / path.name
            onnx_ir.save(_described(model, metadata), written, format="protobuf", external_data=data)
            _check(written, alive[-1])
            held = None if data is None else Path(temporary) / data
            if data is not None and held is not None and held.exists() and held.stat().st_size:
                os.replace(held, folder / data)
            os.replace(written, path)
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror or error}") from error


def _described(model: onnx_ir.Model, metadata: Mapping[str, str]) -> onnx_ir.Model:
    """The same graph under metadata of its own: what the model in memory says of itself stays as it is."""
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


def _reads(model: onnx_ir.Model, data: Path) -> bool:
    files = {Path(tensor.path) for tensor in tensors(model) if isinstance(tensor, onnx_ir.ExternalTensor)}
    return any(file.exists() and file.samefile(data) for file in files)


def _check(path: Path, source: onnx_ir.Model) -> None:
    """onnx's own checker; a model that it refused from the start is not held against the result."""
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
