"""Small networks for the tests of calibration, scores and plans: float64, seeded, on both hosts."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import torch
from torch import nn

import cmrc

Array = np.ndarray


class Net(nn.Module):
    """fc, act, ..., fc on vectors."""

    def __init__(self, widths: tuple[int, ...] = (5, 7, 6, 4), act: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.acts = nn.ModuleList(act() for _ in widths[2:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, act in zip(self.layers, self.acts, strict=False):
            x = act(layer(x))
        return self.layers[-1](x)


class Tokens(nn.Module):
    """A transformer block with two heads over tokens, then a classifier on the first."""

    def __init__(self, width: int = 6, heads: int = 2, tokens: int = 3) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.fc1, self.act, self.fc2 = nn.Linear(width, 8), nn.GELU(), nn.Linear(8, width)
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, _ = x.shape
        q, k, v = self.qkv(x).reshape(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(mixed.transpose(1, 2).reshape(n, t, self.width))
        x = x + self.fc2(self.act(self.fc1(self.norm(x))))
        return self.head(x[:, 0])


class Convs(nn.Module):
    """conv, batch norm, relu, conv, relu, flatten, fc."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.conv1, self.bn, self.act1 = nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()
        self.conv2, self.act2 = nn.Conv2d(6, 5, 3, stride=2, padding=1), nn.ReLU()
        self.head = nn.Linear(5 * (size // 2) ** 2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act2(self.conv2(self.act1(self.bn(self.conv1(x)))))
        return self.head(x.flatten(1))


class Branches(nn.Module):
    """A residual stream with two blocks, the second of which has two branches side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 8), nn.Linear(5, 7), nn.Linear(5, 6)
        self.back_a, self.back_b, self.back_c = nn.Linear(8, 5), nn.Linear(7, 5), nn.Linear(6, 5)
        self.act_a, self.act_b, self.act_c = nn.Tanh(), nn.Tanh(), nn.Tanh()
        self.early, self.act_early, self.back_early = nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5)
        self.head = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.back_a(self.act_a(self.a(x)))
        y = y + self.back_b(self.act_b(self.b(y))) + self.back_c(self.act_c(self.c(y)))
        return self.head(y + self.back_early(self.act_early(self.early(x))))


def seeded(model: nn.Module, seed: int = 0, scale: float = 1.0) -> nn.Module:
    """Random weights at which nothing is dead or the identity, in float64."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double().eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not tensor.is_floating_point():
                continue
            drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            fan = max(tensor[0].numel(), 1) if tensor.ndim > 1 else 4
            tensor.copy_(drawn.abs() + 0.5 if "var" in name else scale * drawn / fan**0.5)
    return model


def traced(model: nn.Module, *shape: int) -> cmrc.Program:
    """On the torch host, with a batch of any size."""
    example = torch.zeros(2, *shape, dtype=next(model.parameters()).dtype)
    return cmrc.trace(model, (example,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=4096)},))


def exported(program: cmrc.Program) -> cmrc.Program:
    """The same model on the ONNX host."""
    path = Path(mkdtemp()) / "model.onnx"
    program.save(path)
    return cmrc.trace(path)


@cache
def mlp(widths: tuple[int, ...] = (5, 7, 6, 4), act: type[nn.Module] = nn.ReLU, seed: int = 0) -> cmrc.Program:
    return traced(seeded(Net(widths, act), seed), widths[0])


def data(count: int, *shape: int, seed: int = 1, classes: int = 4) -> tuple[Array, Array]:
    """Inputs with a mean that is not zero, and labels."""
    rng = np.random.default_rng(seed)
    return rng.normal(0.3, 1.0, (count, *shape)), rng.integers(0, classes, count)


def activations(program: cmrc.Program, x: Array, site: str) -> Array:
    """The values at a site, as the model computes them."""
    return program.run([x], [program.find(site)[0].value])[-1]
