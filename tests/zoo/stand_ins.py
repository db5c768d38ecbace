"""Stand-ins for ops that hide numbers: a rectifier whose unit happens to be off, a maximum of other positions, a norm's statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from cmrc.hosts.fx.schema import opname

RECTIFIERS = {"relu", "relu6", "hardtanh", "hardswish", "hardsigmoid"}


def let_through(module: fx.GraphModule) -> None:
    """Put them into a module, so that every number that can have an effect has a gradient."""
    for node in module.graph.nodes:
        name = opname(node)
        if name in RECTIFIERS:
            node.target, node.args, node.kwargs = torch.nn.functional.leaky_relu, (node.args[0], 0.1), {}
        elif name in STAND_INS:
            node.target = STAND_INS[name]
    module.recompile()


def pooled(
    x: torch.Tensor, kernel: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil: bool = False
) -> torch.Tensor:
    """The mean of what max pooling looks at, by the same arguments."""
    assert dilation in (1, [1, 1])
    return torch.nn.functional.avg_pool2d(x, kernel, stride or kernel, padding, ceil)


def scaled(
    x: torch.Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn: Any = None
) -> Any:
    """A factor for each unit, as in a norm by squares alone: a unit of 0 hides its own, as it is hidden by folding its constant."""
    over = tuple(range(-len(shape), 0))
    factor = torch.rsqrt(x.square().mean(over, True) + eps)
    shift = 1.0 if bias is None else 1.0 + 0.1 * bias
    return carrying(x * factor * shift * (1.0 if weight is None else weight), x, factor)


def scaled_by_group(
    x: torch.Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn: Any = None
) -> Any:
    """The same for each group of a group norm."""
    rows = x.reshape(x.shape[0], groups, x.shape[1] // groups, -1)
    factor = torch.rsqrt(rows.square().mean((2, 3), True) + eps)
    placed = [None if p is None else p.reshape(1, groups, -1, 1) for p in (weight, bias)]
    normal = (
        rows * factor * (1.0 if placed[0] is None else placed[0]) * (1.0 if placed[1] is None else 1 + 0.1 * placed[1])
    )
    turned = (part.permute(0, 3, 1, 2) for part in (normal, rows, factor.expand(-1, -1, -1, rows.shape[3])))
    return torch.stack(
        [carrying(*parts) for parts in zip(*(part.unbind(2) for part in turned), strict=True)], 2
    ).permute(0, 2, 3, 1).reshape(x.shape)  # fmt: skip


def carrying(normal: torch.Tensor, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """With what is left of constants behind a norm across them: one number, and a second where they differ, in units of their own."""
    silent = (x == 0).flatten(0, -2).all(0).nonzero().flatten()
    if len(silent) in (0, x.shape[-1]):
        return normal
    places = torch.zeros(x.shape[-1]).index_fill(0, silent[:2], 1.0)
    return normal + places * factor


def normalised(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """A factor that depends on what a batch norm in eval mode depends on: it hides what a unit of 0 behind it hides, where the
    norm would make some other constant of it, which folds as well."""
    weight, bias, mean, variance = (None if t is None else t.reshape(-1, *[1] * (x.dim() - 2)) for t in rest[:4])
    shift = 1.0 - 0.1 * mean if bias is None else 1.0 + 0.1 * (bias - mean)
    return x * torch.rsqrt(variance + rest[6]) * shift * (1.0 if weight is None else weight)


STAND_INS = {
    "max_pool2d": pooled,
    "layer_norm": scaled,
    "group_norm": scaled_by_group,
    "batch_norm": normalised,  # torch's has no gradient for its statistics
}
