"""Other weights for the same function: units of ReLU networks times s, what reads them over s.

A positive number passes through ReLU, pooling and means. With a batch norm between, s goes into the convolution's weight and
the norm's running mean and shift, so that the norm still divides by the same number.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from benchmarks.trained import Classifier, ResidualBlock, ResNet

Draw = Callable[[int], torch.Tensor]


def log_uniform(factor: float, seed: int) -> Draw:
    """Numbers between 1/factor and factor, uniform in their logarithm."""
    rng = np.random.default_rng(seed)
    return lambda count: torch.from_numpy(np.exp(rng.uniform(-1, 1, count) * np.log(factor))).to(torch.float32)


def unchanged(count: int) -> torch.Tensor:
    return torch.ones(count)


def classifier(model: Classifier, draws: tuple[Draw, Draw]) -> Classifier:
    """Every hidden channel and unit of the network, first, third, ... layer by one draw, those between by the other."""
    copied = copy.deepcopy(model)
    layers = list(copied.features)
    convolutions = [i for i, layer in enumerate(layers) if isinstance(layer, nn.Conv2d)]
    with torch.no_grad():
        for number, (i, behind) in enumerate(zip(convolutions, [*convolutions[1:], None], strict=True)):
            conv, norm = layers[i], layers[i + 1]
            assert isinstance(conv, nn.Conv2d)
            assert isinstance(norm, nn.BatchNorm2d)
            scale = draws[number % 2](conv.out_channels)
            multiply(conv, norm, scale)
            if behind is not None:
                divide(layers[behind], scale)
            else:
                divide(copied.hidden, scale.repeat_interleave(copied.hidden.in_features // len(scale)))
        scale = draws[len(convolutions) % 2](copied.hidden.out_features)
        multiply(copied.hidden, copied.norm, scale)
        divide(copied.head, scale)
    return copied


def resnet(model: ResNet, draws: tuple[Draw, Draw]) -> ResNet:
    """The inner channels of every block, and the channels of the last stage's residual stream, which the classifier reads."""
    inside, stream = draws
    copied = copy.deepcopy(model)
    blocks = [block for block in copied.blocks if isinstance(block, ResidualBlock)]
    last = [i for i, block in enumerate(blocks) if block.conv2.out_channels == copied.head.in_features]
    with torch.no_grad():
        for block in blocks:
            scale = inside(block.conv1.out_channels)
            multiply(block.conv1, block.bn1, scale)
            divide(block.conv2, scale)
        scale = stream(copied.head.in_features)
        for i in last:
            multiply(blocks[i].conv2, blocks[i].bn2, scale)
            if i == last[0]:
                shortcut = blocks[i].shortcut
                assert isinstance(shortcut, nn.Conv2d)
                shortcut.weight.mul_(scale[:, None, None, None])
            else:
                divide(blocks[i].conv1, scale)
        divide(copied.head, scale)
    return copied


def multiply(maker: nn.Module, norm: nn.BatchNorm1d | nn.BatchNorm2d | None, scale: torch.Tensor) -> None:
    """The rows of a linear layer or convolution, one for each unit that it makes, and what follows it."""
    assert isinstance(maker, (nn.Linear, nn.Conv2d))
    with torch.no_grad():
        maker.weight.mul_(scale.reshape(-1, *(1,) * (maker.weight.ndim - 1)))
        if maker.bias is not None:
            maker.bias.mul_(scale)
        if norm is not None:
            assert norm.running_mean is not None
            norm.running_mean.mul_(scale)
            norm.bias.mul_(scale)


def divide(reader: nn.Module, scale: torch.Tensor) -> None:
    """The columns of a linear layer or convolution, one for each unit that it reads."""
    assert isinstance(reader, (nn.Linear, nn.Conv2d))
    with torch.no_grad():
        reader.weight.div_(scale.reshape(1, -1, *(1,) * (reader.weight.ndim - 2)))
