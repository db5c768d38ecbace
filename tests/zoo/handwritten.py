"""Architectures that people write themselves: residual nets with padded shortcuts, U-Nets, a detector's backbone and neck,
torch's own transformer modules, a recurrent classifier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from models import add, image, tokens
from torch import nn
from torch.nn import functional as F


def conv_bn(ins: int, outs: int, kernel: int = 3, stride: int = 1, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(ins, outs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outs), act(inplace=True)
    )


# ---------------------------------------------------------------- residual nets for CIFAR


class Basic(nn.Module):
    """Two convolutions; where the stream narrows, the shortcut skips pixels and pads channels with zeros."""

    def __init__(self, ins: int, outs: int, stride: int) -> None:
        super().__init__()
        self.grown, self.stride = outs - ins, stride
        self.first = conv_bn(ins, outs, stride=stride)
        self.second, self.norm = nn.Conv2d(outs, outs, 3, padding=1, bias=False), nn.BatchNorm2d(outs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.second(self.first(x)))
        if self.grown:
            x = F.pad(
                x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.grown // 2, self.grown - self.grown // 2)
            )
        return F.relu(x + y)


class CifarResNet(nn.Module):
    def __init__(self, depth: int, width: int = 16) -> None:
        super().__init__()
        blocks, ins = [], width
        for stage in range(3):
            for i in range((depth - 2) // 6):
                outs = width << stage
                blocks.append(Basic(ins, outs, 2 if stage and not i else 1))
                ins = outs
        self.stem, self.blocks, self.head = conv_bn(3, width), nn.Sequential(*blocks), nn.Linear(ins, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return result


# ---------------------------------------------------------------- U-Nets


class UNet(nn.Module):
    """Down and up again, with the way down joined in: up by transposed convolutions, or by resizing to the other's size."""

    def __init__(self, width: int = 8, *, resized: bool = False) -> None:
        super().__init__()
        sizes = [width << i for i in range(3)]
        pairs = zip([3, *sizes[:-1]], sizes, strict=True)
        self.down = nn.ModuleList(nn.Sequential(conv_bn(i, o), conv_bn(o, o)) for i, o in pairs)
        self.rise = nn.ModuleList(
            nn.Conv2d(2 * n, n, 1) if resized else nn.ConvTranspose2d(2 * n, n, 2, 2) for n in sizes[-2::-1]
        )
        self.up = nn.ModuleList(nn.Sequential(conv_bn(2 * n, n), conv_bn(n, n)) for n in sizes[-2::-1])
        self.head, self.resized = nn.Conv2d(width, 2, 1), resized

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skipped = []
        for i, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if i else x)
            skipped.append(x)
        skipped.pop()
        for rise, block in zip(self.rise, self.up, strict=True):
            other = skipped.pop()
            x = rise(x)
            if self.resized:
                x = F.interpolate(x, size=other.shape[2:], mode="bilinear", align_corners=False)
            x = block(torch.cat([other, x], 1))
        result: torch.Tensor = self.head(x)
        return result


# ---------------------------------------------------------------- a detector: CSP blocks, pooled pyramid, neck, heads


class Bottleneck(nn.Module):
    def __init__(self, width: int, *, shortcut: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(conv_bn(width, width, act=nn.SiLU), conv_bn(width, width, act=nn.SiLU))
        self.shortcut = shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.body(x)
        return x + y if self.shortcut else y


class CrossStage(nn.Module):
    """Split the channels in two, work on one half step by step, and join every step."""

    def __init__(self, ins: int, outs: int, depth: int = 2, *, shortcut: bool = True) -> None:
        super().__init__()
        half = outs // 2
        self.enter = conv_bn(ins, 2 * half, 1, act=nn.SiLU)
        self.steps = nn.ModuleList(Bottleneck(half, shortcut=shortcut) for _ in range(depth))
        self.leave = conv_bn((2 + depth) * half, outs, 1, act=nn.SiLU)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = list(self.enter(x).chunk(2, 1))
        for step in self.steps:
            parts.append(step(parts[-1]))
        result: torch.Tensor = self.leave(torch.cat(parts, 1))
        return result


class PooledPyramid(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter, self.leave = conv_bn(width, width // 2, 1, act=nn.SiLU), conv_bn(2 * width, width, 1, act=nn.SiLU)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [self.enter(x)]
        for _ in range(3):
            parts.append(F.max_pool2d(parts[-1], 5, 1, 2))
        result: torch.Tensor = self.leave(torch.cat(parts, 1))
        return result


class Detector(nn.Module):
    def __init__(self, width: int = 8, classes: int = 3) -> None:
        super().__init__()
        a, b, c = (width << i for i in range(3))
        self.stem = nn.Sequential(conv_bn(3, a, stride=2, act=nn.SiLU), CrossStage(a, a))
        self.middle = nn.Sequential(conv_bn(a, b, stride=2, act=nn.SiLU), CrossStage(b, b))
        self.deep = nn.Sequential(conv_bn(b, c, stride=2, act=nn.SiLU), CrossStage(c, c), PooledPyramid(c))
        self.grow = nn.Upsample(scale_factor=2, mode="nearest")
        self.up_middle, self.up_fine = CrossStage(b + c, b, shortcut=False), CrossStage(a + b, a, shortcut=False)
        self.shrink = conv_bn(a, a, stride=2, act=nn.SiLU)
        self.down_middle = CrossStage(a + b, b, shortcut=False)
        self.heads = nn.ModuleList(
            nn.Sequential(conv_bn(n, n, act=nn.SiLU), nn.Conv2d(n, 4 + classes, 1)) for n in (a, b)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine = self.stem(x)
        middle = self.middle(fine)
        deep = self.deep(middle)
        middle = self.up_middle(torch.cat([self.grow(deep), middle], 1))
        fine = self.up_fine(torch.cat([self.grow(middle), fine], 1))
        middle = self.down_middle(torch.cat([self.shrink(fine), middle], 1))
        results = [head(value).flatten(2) for head, value in zip(self.heads, (fine, middle), strict=True)]
        boxes, scores = torch.cat(results, 2).split((4, 3), 1)
        return torch.cat([boxes, scores.sigmoid()], 1)


# ---------------------------------------------------------------- torch's own transformer modules


class Seq2Seq(nn.Module):
    """nn.Transformer between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 24)
        self.body = nn.Transformer(24, 6, 2, 2, 32, batch_first=True)
        self.head = nn.Linear(24, 64)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        result: torch.Tensor = self.head(
            self.body(self.table(source), self.table(target), tgt_mask=mask, tgt_is_causal=True)
        )
        return result


class AttentionEncoder(nn.Module):
    """nn.MultiheadAttention and an FFN, norms first, sequence first."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 24)
        self.norms = nn.ModuleList(nn.LayerNorm(24) for _ in range(2 * depth))
        self.attention = nn.ModuleList(nn.MultiheadAttention(24, 6) for _ in range(depth))
        self.ffn = nn.ModuleList(nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 24)) for _ in range(depth))
        self.head = nn.Linear(24, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids).transpose(0, 1)
        for i, (attend, ffn) in enumerate(zip(self.attention, self.ffn, strict=True)):
            y = self.norms[2 * i](x)
            x = x + attend(y, y, y, need_weights=False)[0]
            x = x + ffn(self.norms[2 * i + 1](x))
        result: torch.Tensor = self.head(x.mean(0))
        return result


class Recurrent(nn.Module):
    """A recurrent net under an MLP: what recurs is one opaque op, the units of the MLP fold."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 16)
        self.body = kind(16, 24, 2, batch_first=True, bidirectional=True)
        self.head = nn.Sequential(nn.Linear(48, 32), nn.GELU(), nn.Linear(32, 5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.body(self.table(ids))[0][:, -1])
        return result


# ---------------------------------------------------------------- entries


@dataclass(frozen=True)
class Built:
    """A module from its class and options."""

    build: Callable[..., nn.Module]
    options: tuple[tuple[str, Any], ...]

    def __call__(self) -> nn.Module:
        return self.build(**dict(self.options))


def handwritten(
    name: str, build: Callable[..., nn.Module], inputs: Any, dynamic: tuple[int, ...] = (0,), **options: Any
) -> None:
    add(name, "hand-written", Built(build, tuple(options.items())), inputs, dynamic=dynamic)


handwritten("resnet20", CifarResNet, image(), depth=20)
handwritten("resnet56", CifarResNet, image(16), depth=56)
handwritten("unet", UNet, image())
handwritten("unet_any_size", UNet, image(), (0, 2, 3), resized=True)
handwritten("detector", Detector, image())
handwritten("nn_transformer", Seq2Seq, tokens(target=5))
handwritten("nn_attention", AttentionEncoder, tokens())
handwritten("lstm", Recurrent, tokens(), kind=nn.LSTM)
handwritten("gru", Recurrent, tokens(), kind=nn.GRU)
