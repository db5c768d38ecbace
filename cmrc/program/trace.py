"""`cmrc.trace`: read a model of either framework into a Program."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from cmrc.errors import TraceError
from cmrc.program.program import Program


def trace(model: Any, args: tuple[Any, ...] = (), **options: Any) -> Program:
    """Read a model into a Program (which is returned as it is).

    The model is a path to an ONNX file, an onnx.ModelProto or an onnx_ir.Model; or an nn.Module with example inputs
    (and torch.export's options, such as `dynamic_shapes`), or an ExportedProgram.
    """
    if isinstance(model, Program):
        return model
    module = type(model).__module__.split(".")[0]
    if isinstance(model, (str, Path)) or module in ("onnx", "onnx_ir"):
        from cmrc.hosts.onnx.host import OnnxHost

        return Program(OnnxHost.load(model) if isinstance(model, (str, Path)) else OnnxHost.from_model(model))
    if "torch" in sys.modules:  # somebody who holds a torch model has imported torch
        from cmrc.hosts.fx.host import is_torch_model
        from cmrc.hosts.fx.host import trace as trace_torch

        if is_torch_model(model):
            return Program(trace_torch(model, args, options), args, options)
    raise TraceError(
        f"cannot trace a {type(model).__name__}",
        fix="give a path to an ONNX file, an onnx(_ir) model, an nn.Module with example inputs, or an ExportedProgram",
    )
