"""`cmrc.trace`: read a model of either framework into a Program."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cmrc.errors import TraceError
from cmrc.program.program import Program


def trace(model: Any, args: tuple[Any, ...] = (), **options: Any) -> Program:
    """Read a model into a Program (which is returned as it is).

    The model is a path to an ONNX file, an onnx.ModelProto or an onnx_ir.Model; or an nn.Module with example inputs
    (and torch.export's options, such as `dynamic_shapes`), or an ExportedProgram; or a folder that `save_pretrained`
    wrote, whose weights stay in their files until somebody reads them. Inputs of an ONNX model that always have the same
    value are given as `assume={"sr": 16000}`: they are constants then, and what depends on them alone is decided.
    """
    if isinstance(model, Program):
        return model
    if isinstance(model, (str, Path)) and Path(model).is_dir():
        return _trace_folder(Path(model), args, options)
    module = type(model).__module__.split(".")[0]
    if isinstance(model, (str, Path)) or module in ("onnx", "onnx_ir"):
        from cmrc.hosts.onnx.host import OnnxHost

        assume = options.get("assume")
        if isinstance(model, (str, Path)):
            return Program(OnnxHost.load(model, assume=assume))
        return Program(OnnxHost.from_model(model, assume=assume))
    if "torch" in sys.modules:  # somebody who holds a torch model has imported torch
        from cmrc.hosts.fx.host import is_torch_model
        from cmrc.hosts.fx.host import trace as trace_torch

        if is_torch_model(model):
            return Program(trace_torch(model, args, options), args, options)
    raise TraceError(
        f"cannot trace a {type(model).__name__}",
        fix="give a path to an ONNX file, an onnx(_ir) model, an nn.Module with example inputs, or an ExportedProgram",
    )


def _trace_folder(folder: Path, args: tuple[Any, ...], options: dict[str, Any]) -> Program:
    if not (folder / "config.json").is_file():
        raise TraceError(
            f"{folder} is a folder without a config.json",
            fix="give an ONNX file, or a folder that save_pretrained wrote",
        )
    if find_spec("torch") is None:
        raise TraceError("a checkpoint folder needs torch", fix="pip install 'cmrc[torch]' transformers")
    from cmrc.hosts.fx.checkpoint import trace_checkpoint

    return Program(*trace_checkpoint(folder, args, options))
