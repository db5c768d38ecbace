"""Loading an ONNX file."""

from __future__ import annotations

from pathlib import Path

import onnx_ir

from cmrc.errors import TraceError
from cmrc.hosts.onnx.causes import last_line
from cmrc.hosts.onnx.sound import require_sound


def load(path: Path) -> onnx_ir.Model:
    """The model in a file. Weights in external files stay there until they are used."""
    if not path.is_file():
        what = "it is a folder" if path.is_dir() else "there is no such file"
        raise TraceError(f"cannot read {path}: {what}", fix="give the path of an .onnx file")
    fix = "export or download it again; an .onnx file is a serialised ModelProto"
    try:
        model = onnx_ir.load(path.absolute(), format="protobuf")  # its data is found wherever the process goes later
    except Exception as error:  # protobuf's DecodeError, or whatever a broken file sets off inside onnx_ir
        broken = type(error).__name__ == "DecodeError"
        why = "it is not an ONNX model, or it is cut off" if broken else last_line(error)
        raise TraceError(f"cannot read {path}: {why}", fix=fix) from error
    if not model.graph.outputs or not model.opset_imports:
        raise TraceError(f"cannot read {path}: it is not an ONNX model, or it is cut off", fix=fix)
    require_sound(model)
    return model
