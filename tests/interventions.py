"""Small models for interventions, each traced by both hosts, and the same interventions done with torch's hooks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import cmrc

BATCH = torch.export.Dim("batch", min=2, max=4096)


class Residual(nn.Module):
    """Values go around each of its sites."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second, self.act2 = nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.ReLU()
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        a = self.act(h)
        return self.head(self.act2(self.second(a)) * torch.tanh(h) + a)


class Layers(nn.Module):
    """Every site folds; a branch goes around all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second, self.act2 = nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.ReLU()
        self.head, self.side = nn.Linear(8, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.act2(self.second(self.act(self.first(x))))) + 0.3 * self.side(x)


class Views(nn.Module):
    """Its second site is a view of a value that is read beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8)
        self.fold, self.head = nn.Unflatten(1, (2, 4)), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.second(self.act(self.first(x)))
        return self.head(self.fold(h).flatten(1) * h)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(2, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU()
        self.conv2, self.head = nn.Conv2d(5, 4, 3), nn.Linear(16, 3)
        self.norm.running_mean.normal_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv2(self.act(self.norm(self.conv(x)))).flatten(1))


class Attention(nn.Module):
    """A block of attention with a causal mask: sizes are read, constants are made, heads are units."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(11, 8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.act, self.down, self.head = nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8), nn.Linear(8, 5)
        self.mixed = nn.Identity()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows, length = tokens.shape
        h = self.embed(tokens) + torch.arange(length)[None, :, None] / 7
        q, k, v = (p.view(rows, length, 2, 4).transpose(1, 2) for p in self.qkv(h).chunk(3, dim=-1))
        scores = (q @ k.transpose(-1, -2)).masked_fill(torch.triu(torch.ones(length, length), 1) > 0, -1e9)
        mixed = self.mixed(torch.softmax(scores, -1) @ v)
        h = h + self.out(mixed.transpose(1, 2).reshape(rows, length, 8))
        return self.head(h + self.down(self.act(self.up(h))))


class SequenceFirst(nn.Module):
    """The batch is the second axis of what lies in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.head = nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.act(self.first(x.transpose(0, 1)))).sum(0)


class Windows(nn.Module):
    """Several rows for every input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.head = nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        h = self.act(self.first(x.reshape(rows * 3, 2, 4)))
        return self.head(h).reshape(rows, 12)


def floats(*shape: int) -> Callable[[int, int], torch.Tensor]:
    return lambda rows, seed: torch.randn(rows, *shape, generator=torch.Generator().manual_seed(seed))


def tokens(rows: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 11, (rows, 5), generator=torch.Generator().manual_seed(seed))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], torch.Tensor]]] = {
    "residual": (Residual, floats(6)),
    "layers": (Layers, floats(6)),
    "views": (Views, floats(6)),
    "images": (Images, floats(2, 4, 4)),
    "attention": (Attention, tokens),
    "sequence-first": (SequenceFirst, floats(3, 4)),
    "windows": (Windows, floats(6, 4)),
}


def make(name: str, *, seed: int = 0) -> tuple[nn.Module, Callable[[int, int], torch.Tensor]]:
    torch.manual_seed(seed)
    build, draw = MODELS[name]
    return build().eval(), draw


def traced(model: nn.Module, example: torch.Tensor, host: str, *, dynamic: bool = True) -> cmrc.Program:
    options: dict[str, Any] = {"dynamic_shapes": ({0: BATCH},)} if dynamic else {}
    program = cmrc.trace(model, (example,), **options)
    if host == "fx":
        return program
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        program.save(path)
        return cmrc.trace(path)


def hooked(model: nn.Module, x: torch.Tensor, edits: dict[str, Callable[[torch.Tensor], torch.Tensor]]) -> np.ndarray:
    """The model run whole, the outputs of modules edited on the way."""
    handles = [
        model.get_submodule(name).register_forward_hook(lambda _, __, out, edit=edit: edit(out))
        for name, edit in edits.items()
    ]
    try:
        with torch.no_grad():
            return np.asarray(model(x))
    finally:
        for handle in handles:
            handle.remove()


def seen(model: nn.Module, x: torch.Tensor, name: str) -> torch.Tensor:
    tensors: list[torch.Tensor] = []
    hooked(model, x, {name: lambda out: tensors.append(out.clone()) or out})
    return tensors[0]
