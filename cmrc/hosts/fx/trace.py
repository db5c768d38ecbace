"""An nn.Module or ExportedProgram into a host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.export import ExportedProgram

from cmrc.errors import TraceError
from cmrc.hosts.fx.host import FxHost


def is_torch_model(model: object) -> bool:
    return isinstance(model, (torch.nn.Module, ExportedProgram))


def trace(model: torch.nn.Module | ExportedProgram, args: Any, options: Mapping[str, Any]) -> FxHost:
    """Export the model in eval mode (its own mode is put back) and take the graph over."""
    if isinstance(model, ExportedProgram):
        return FxHost.from_exported(model)
    if not isinstance(args, tuple) or not (args or options.get("kwargs")):
        problem = "there are no example inputs" if not args else "the example inputs are not a tuple"
        fix = "give them as a tuple: cmrc.trace(model, (x,)), or lower(..., args=(x,))"
        raise TraceError(f"{problem} for {type(model).__name__}", fix=fix)
    was_training = {name: module.training for name, module in model.named_modules()}
    model.eval()
    try:
        exported = torch.export.export(model, args, **options)
    except Exception as error:
        raise TraceError(
            f"torch.export cannot trace {type(model).__name__}: {str(error).strip().splitlines()[0]}",
            fix="make `torch.export.export(model, args)` work, or export the model to ONNX and trace that file",
        ) from error
    finally:
        for name, module in model.named_modules():
            module.training = was_training[name]
    return FxHost.from_exported(exported, in_eval_mode=True)
