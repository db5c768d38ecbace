"""The config of a transformers model, brought up to date with its new widths.

`save_pretrained` writes the config beside the weights, and `from_pretrained` builds the model from it. Where one attribute
can express the new widths (`intermediate_size`, if every layer kept as many units), it is set; where none can, a warning
says so at once, and not an error at the next load. Nothing of transformers is imported.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch

Shapes: TypeAlias = dict[str, tuple[int, ...]]
DERIVED = ("n_inner", "ffn_dim", "intermediate_size")  # None here means "as wide as the architecture says"


def update_configs(model: torch.nn.Module, before: Mapping[str, torch.Size]) -> Iterator[tuple[Any, str, Any]]:
    """Set the attributes that express the new shapes; gives what each config had before: (config, attribute, value).

    `before` has the shapes of the parameters that were replaced, under their new owner's names.
    """
    seen: list[Any] = []
    for path, module in model.named_modules():
        config = vars(module).get("config")
        if config is None or not hasattr(module, "save_pretrained") or any(config is other for other in seen):
            continue
        seen.append(config)
        start = f"{path}." if path else ""
        old = {name.removeprefix(start): tuple(shape) for name, shape in before.items() if name.startswith(start)}
        now = _shapes(module)
        pairs = {
            (was, size)
            for name, shape in old.items()
            for was, size in zip(shape, now.get(name, shape), strict=False)
            if was != size
        }
        if pairs:
            yield from _update(module, config, now, pairs)


def _update(
    module: torch.nn.Module, config: Any, now: Shapes, pairs: set[tuple[int, int]]
) -> Iterator[tuple[Any, str, Any]]:
    """Attribute by attribute: one is kept if the model that the config makes then has more of the shapes."""
    best, trial = _misfits(module, config, now), copy.deepcopy(config)
    changes: dict[str, Any] = {}
    for name, value in _candidates(config, pairs):
        if not best:
            break
        kept = getattr(trial, name)
        setattr(trial, name, value)
        misfits = _misfits(module, trial, now)
        if len(misfits) < len(best):
            best, changes[name] = misfits, value
        else:
            setattr(trial, name, kept)
    if best:
        name = best[0]
        warnings.warn(
            f"no attribute of {type(config).__name__} can express the new widths: {name} is {list(now[name])} now. "
            "from_pretrained will refuse what save_pretrained writes. Keep as many units in every layer, or store the "
            "module itself (torch.save), lowered.module, or ONNX by lowered.save",
            stacklevel=5,
        )
        return
    for name, value in changes.items():
        yield config, name, getattr(config, name)
        setattr(config, name, value)


def _candidates(config: Any, pairs: set[tuple[int, int]]) -> Iterator[tuple[str, int]]:
    """Attributes that were such a size, or a number of heads in it, with what they would be."""
    for name, value in config.to_dict().items():
        if not hasattr(config, name) or isinstance(value, bool):
            continue
        for old, new in sorted(pairs):
            if value == old or (value is None and name in DERIVED):
                yield name, new
            elif isinstance(value, int) and "head" in name and value > 0 and old % value == 0:
                width = old // value
                if new % width == 0:
                    yield name, new // width


def _shapes(module: torch.nn.Module) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def _misfits(module: torch.nn.Module, config: Any, now: Shapes) -> list[str]:
    """The tensors that a model of this config would have in another shape, or not at all."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            theirs = _shapes(type(module)(copy.deepcopy(config)))
    except Exception:  # whatever an architecture says to widths that do not fit together
        return sorted(now)
    return [name for name in now if theirs.get(name) != now[name]]
