"""A small network with all that `.train()` changes, lowered and clamped."""

from __future__ import annotations

import copy
from typing import Any

import torch
from differential.models import chain
from tolerances import EXACT_F32, distance
from torch import nn

import cmrc

BATCH = torch.export.Dim("n", min=1, max=64)


def network() -> nn.Module:
    """What `.train()` changes, and what it does not, on both sides of the site `act`."""
    return chain(
        conv1=nn.Conv2d(3, 6, 3), bn1=nn.BatchNorm2d(6), act=nn.ReLU(inplace=True), drop1=nn.Dropout2d(0.4),
        conv2=nn.Conv2d(6, 5, 1), bn2=nn.BatchNorm2d(5), act2=nn.ReLU(), pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(),
        drop2=nn.Dropout(0.3), head=nn.Linear(5, 4),
    )  # fmt: skip


def images(count: int = 4, seed: int = 5) -> torch.Tensor:
    return torch.randn(count, 3, 6, 5, generator=torch.Generator().manual_seed(seed))


def lower(
    model: nn.Module, args: tuple[Any, ...], site: str, units: list[int], constant: Any, **options: Any
) -> cmrc.Lowered:
    program = cmrc.trace(model, args, **options)
    return cmrc.lower(program, cmrc.Plan(program).do(site, units=units, constant=constant))


def clamped(model: nn.Module, site: str, units: list[int], constant: list[float]) -> nn.Module:
    """A copy of the model whose forward overwrites the units."""
    copied = copy.deepcopy(model)

    def overwrite(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[:, units] = torch.tensor(constant).reshape(-1, *[1] * (output.ndim - 2))
        return output

    copied.get_submodule(site).register_forward_hook(overwrite)
    return copied


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = EXACT_F32) -> bool:
    return distance(actual.detach().numpy(), expected.detach().numpy()) <= tolerance
