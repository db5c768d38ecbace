"""The models that are measured, each with the small model that a person would have written instead.

A `Case` names the sites, how many units each keeps, and builds the wide model and the native small one of those widths.
Weights are random and seeded. Norms have random scales, shifts and statistics, so that nothing folds away by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import cmrc

SEED = 20240607


class MLP(nn.Module):
    """784-512-512-10 by default."""

    def __init__(self, widths: Sequence[int] = (784, 512, 512, 10)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.acts = nn.ModuleList(nn.ReLU() for _ in widths[2:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, act in zip(self.layers, self.acts, strict=False):
            x = act(layer(x))
        return self.layers[-1](x)


class ConvNet(nn.Module):
    """conv-bn-relu stages, from the second on each at half the resolution, then the mean and a classifier."""

    def __init__(self, channels: Sequence[int] = (32, 64, 64, 128), classes: int = 10) -> None:
        super().__init__()
        widths = [3, *channels]
        pairs = list(pairwise(widths))
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, 3, stride=1 if i == 0 else 2, padding=1, bias=False) for i, (a, b) in enumerate(pairs)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b in pairs)
        self.acts = nn.ModuleList(nn.ReLU() for _ in pairs)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv, norm, act in zip(self.convs, self.norms, self.acts, strict=True):
            x = act(norm(conv(x)))
        return self.head(x.mean((2, 3)))


class Attention(nn.Module):
    """Self-attention with one projection for query, key and value."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        heads = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return self.proj(mixed.transpose(1, 2).reshape(batch, tokens, width))


class FFN(nn.Module):
    """fc1, GELU, fc2."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width, eps=1e-6), Attention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width, eps=1e-6), FFN(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class DeiT(nn.Module):
    """DeiT-Tiny-like: 12 blocks, 192 wide, 3 heads, patches of 16, 224 px, 100 classes; an FFN width for each block."""

    def __init__(
        self,
        hidden: Sequence[int] = (768,) * 12,
        *,
        width: int = 192,
        heads: int = 3,
        size: int = 224,
        patch: int = 16,
        classes: int = 100,
    ) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.zeros(1, (size // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList(Block(width, heads, inner) for inner in hidden)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def randomise(model: nn.Module, seed: int = SEED) -> nn.Module:
    """Seeded weights at which no unit is dead, no norm is the identity, and signals keep their scale."""
    generator = torch.Generator().manual_seed(seed)

    def draw(tensor: torch.Tensor, mean: float, deviation: float) -> None:
        tensor.copy_(mean + deviation * torch.randn(tensor.shape, generator=generator))

    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                draw(module.weight, 0.0, (1.4 / module.weight[0].numel()) ** 0.5)
                if module.bias is not None:
                    draw(module.bias, 0.0, 0.1)
            elif isinstance(module, (nn.LayerNorm, nn.BatchNorm2d)):
                draw(module.weight, 1.0, 0.1)
                draw(module.bias, 0.0, 0.1)
            if isinstance(module, nn.BatchNorm2d):
                draw(module.running_mean, 0.0, 0.2)
                module.running_var.copy_(0.5 + torch.rand(module.running_var.shape, generator=generator))
            if isinstance(module, DeiT):
                draw(module.token, 0.0, 0.5)
                draw(module.position, 0.0, 0.5)
    return model.eval()


@dataclass(frozen=True)
class Case:
    """A wide model, the sites to shrink, and the small model of the widths that are left."""

    name: str
    sites: tuple[str, ...]
    widths: tuple[int, ...]
    shape: tuple[int, ...]
    make: Callable[[Sequence[int]], nn.Module]
    constants: str = "random"  # or "zero"
    extra: str = ""  # an op that exactness needs and the native small model has not
    tokens: int = 0  # inputs are so many token ids, and a mask where `masked`
    masked: bool = False
    carried: tuple[
        str, ...
    ] = ()  # sites at which one unit fewer stays, and a channel that carries the constants of the others
    hosts: tuple[str, ...] = (
        "torch",
        "onnx",
    )  # by which it is lowered: the sites have no names of their own in some files

    @property
    def keep(self) -> tuple[int, ...]:
        return tuple(width // 2 for width in self.widths)

    def original(self) -> nn.Module:
        return randomise(self.make(self.widths))

    def native(self) -> nn.Module:
        """What a person would write for these widths, with weights of its own."""
        return randomise(self.make(self.keep), SEED + 1)

    def inputs(self, batch: int, seed: int = SEED) -> torch.Tensor:
        return torch.randn(batch, *self.shape, generator=torch.Generator().manual_seed(seed))

    def arguments(self, batch: int) -> tuple[torch.Tensor, ...]:
        """Everything that the model takes."""
        if not self.tokens:
            return (self.inputs(batch),)
        ids = torch.randint(0, 1000, (batch, self.tokens), generator=torch.Generator().manual_seed(SEED))
        return (ids, torch.ones_like(ids)) if self.masked else (ids,)

    def units(self) -> list[np.ndarray]:
        """Half of the units of every site, drawn at random, in ascending order."""
        draw = np.random.default_rng(SEED)
        kept = [keep - (site in self.carried) for site, keep in zip(self.sites, self.keep, strict=True)]
        return [np.sort(draw.permutation(width)[keep:]) for width, keep in zip(self.widths, kept, strict=True)]

    def replacements(self) -> list[np.ndarray]:
        """One constant for each replaced unit of each site."""
        draw = np.random.default_rng(SEED + 1)
        scale = 0.0 if self.constants == "zero" else 0.2
        return [draw.normal(scale, scale, len(units)) for units in self.units()]

    def plan(self, program: cmrc.Program, sites: Sequence[str] | None = None) -> cmrc.Plan:
        """The plan for a traced program; `sites` are their names there where they differ."""
        plan = cmrc.Plan(program)
        for site, units, constants in zip(sites or self.sites, self.units(), self.replacements(), strict=True):
            plan.do(site, units=units, constant=constants)
        return plan


def deit(blocks: int = 12, **sizes: int) -> Case:
    hidden = 4 * sizes.get("width", 192)
    return Case(
        "DeiT-Tiny-like",
        tuple(f"blocks.{i}.mlp.act" for i in range(blocks)),
        (hidden,) * blocks,
        (3, sizes.get("size", 224), sizes.get("size", 224)),
        lambda widths: DeiT(widths, **sizes),
    )


def mlp(hidden: Sequence[int] = (512, 512)) -> Case:
    sites = tuple(f"acts.{i}" for i in range(len(hidden)))
    return Case("MLP", sites, tuple(hidden), (784,), lambda widths: MLP((784, *widths, 10)))


def convnet(channels: Sequence[int] = (32, 64, 64, 128), *, size: int = 32, constants: str = "zero") -> Case:
    """With constants other than zero, a zero-padded convolution needs one more addition, of its border-exact map."""
    sites = tuple(f"acts.{i}" for i in range(len(channels)))
    name = "ConvNet" if constants == "zero" else "ConvNet, constants under zero padding"
    extra = "" if constants == "zero" else "Add"
    return Case(name, sites, tuple(channels), (3, size, size), ConvNet, constants, extra)


def padded() -> list[Case]:
    """Constants under zero padding, at two sizes: added as planes, and carried by a channel where the files are as wide."""
    cases = []
    for channels, size in (((32, 64, 64, 128), 32), ((64, 128, 128, 256), 56)):
        case = convnet(channels, size=size, constants="random")
        wide = f"{'-'.join(str(n // 2) for n in channels)} channels, {size}x{size}"
        cases.append(replace(case, name=f"added planes, {wide}"))
        cases.append(replace(case, name=f"carried, {wide}", extra="", carried=case.sites[:-1]))
    return cases


def resnet56() -> Case:
    """The inner channels of every block: 16, 32 or 64."""
    from benchmarks.trained import ResNet

    widths = tuple(width for width in (16, 32, 64) for _ in range(9))
    sites = tuple(f"blocks.{i}.act" for i in range(27))
    return Case("ResNet-56", sites, widths, (3, 32, 32), lambda inner: ResNet(blocks=9, inner=inner), "zero")


def efficientnet() -> Case:
    """EfficientNet-Lite0's own code; a native small one expands by 3 instead of 6."""
    from benchmarks.weights import efficientnet_module

    wide = efficientnet_module()
    inner = [block._project_conv.in_channels for block in list(wide._blocks)[1:]]
    return Case(
        "EfficientNet-Lite0",
        tuple(f"_blocks.{i}._swish@1" for i in range(1, 16)),
        tuple(inner),
        (3, 224, 224),
        lambda widths: efficientnet_module(expansion=6 if widths[0] == inner[0] else 3),
        hosts=("torch",),
    )


def minilm() -> Case:
    """MiniLM-L6's shape; 64 tokens."""
    from benchmarks.weights import minilm_module

    sites = tuple(f"encoder.encoder.layer.{i}.intermediate.intermediate_act_fn" for i in range(6))
    return Case("MiniLM-L6", sites, (1536,) * 6, (), lambda widths: minilm_module(widths[0]), tokens=64, masked=True)


def smollm(layers: int = 3) -> Case:
    """SmolLM2's shape, but for its depth; 64 tokens. A gate at zero closes its unit."""
    from benchmarks.weights import smollm_module

    sites = tuple(f"model.model.layers.{i}.mlp.act_fn" for i in range(layers))
    name = f"SmolLM2-135M, {layers} of 30 layers"
    return Case(name, sites, (1536,) * layers, (), lambda widths: smollm_module(widths[0], layers), "zero", tokens=64)


def cases(*, quick: bool = False) -> list[Case]:
    """Every case that latency is measured on."""
    if quick:
        return [mlp(), convnet(constants="random"), deit(2, size=64)]
    small = [mlp(), convnet(), convnet(constants="random"), resnet56(), deit()]
    return [*small, minilm(), efficientnet(), smollm()]
