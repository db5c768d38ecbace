"""A model with a head of some outputs, and inputs for it."""

from __future__ import annotations

import numpy as np
import torch
from known import BATCH
from torch import nn

import cmrc


def outputs_of(width: int, *, two: bool = False) -> cmrc.Program:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.act, self.head = nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, width)

        def forward(self, x: torch.Tensor) -> object:
            y = self.head(self.act(self.first(x)))
            return (y, y[:, :1]) if two else y

    torch.manual_seed(0)
    return cmrc.trace(Head(), (torch.zeros(2, 3),), dynamic_shapes=({0: BATCH},))


INPUT = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
