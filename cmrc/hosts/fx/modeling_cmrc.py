"""Load a checkpoint folder whose layers may have other widths than config.json says.

    from modeling_cmrc import load
    model = load("folder")

The model is built without numbers and takes the shapes of the tensors in the files. A tensor lies in its mapped file until somebody
reads it, so that a model larger than the memory can be opened. cmrc opens checkpoints this way, and writes this file beside
one whose widths `from_pretrained` cannot express. It needs torch, transformers and safetensors, and nothing of cmrc.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def load(folder: str | Path) -> torch.nn.Module:
    """The model of a folder, in eval mode."""
    model = build(folder)
    for stored in tensors(folder).values():
        for name, tensor in stored.items():
            put(model, name, tensor)
    finish(model)
    return model.eval()


def build(folder: str | Path) -> torch.nn.Module:
    """The architecture that config.json names, without numbers."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    kind = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    if kind is None:
        raise ValueError(f"transformers has no class {config.architectures}, which config.json names")
    with torch.device("meta"):
        model: torch.nn.Module = kind(config)
    return model


def tensors(folder: str | Path) -> dict[str, dict[str, torch.Tensor]]:
    """For each safetensors file of the folder its tensors by name, over the mapped file."""
    from safetensors import safe_open

    opened: dict[str, dict[str, torch.Tensor]] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            opened[path.name] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return opened


def put(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Set a parameter or buffer, whatever its shape was."""
    path, _, last = name.rpartition(".")
    owner = model.get_submodule(path)
    if last in owner._buffers:
        owner._buffers[last] = tensor
        return
    owner.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))
    if isinstance(owner, torch.nn.Linear) and last == "weight":
        owner.out_features, owner.in_features = tensor.shape


def finish(model: Any) -> None:
    """Tie what the architecture ties, and compute the buffers that no file has (positions, frequencies)."""
    model.tie_weights()
    for module in model.modules():
        if any(buffer is not None and buffer.is_meta for buffer in module._buffers.values()):
            module.to_empty(device="cpu", recurse=False)
            model._init_weights(module)
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise ValueError(f"no file has the parameter {missing[0]}")
