"""Compound and in-place ops of torch, spelled out: einsum, baddbmm, writes into a part of a tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tolerances import EXACT_F32, MOVES
from torch import nn

import cmrc


class Net(nn.Module):
    def __init__(self, middle: Callable[[Net, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.weight = nn.Parameter(torch.randn(8, 5))
        self.middle = middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.middle(self, torch.relu(self.up(x)))


def contracted(net: Net, a: torch.Tensor) -> torch.Tensor:
    return torch.einsum("btd,de->bte", a, net.weight)


def turned(net: Net, a: torch.Tensor) -> torch.Tensor:
    return torch.einsum("btd,de->ebt", a, net.weight)


def scores(net: Net, a: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bqd,bkd->bqk", net.down(a), net.down(torch.tanh(a)))


def added(net: Net, a: torch.Tensor) -> torch.Tensor:
    b = net.down(a)
    return torch.baddbmm(b @ b.mT, b, b.mT, beta=0.5, alpha=2.0)


def written(net: Net, a: torch.Tensor) -> torch.Tensor:
    """A write into a part of a tensor that is read again as a whole."""
    buffer = torch.zeros(a.shape[0], a.shape[1], 12)
    buffer[..., :6] = net.down(a)
    buffer[..., 6:].copy_(net.down(torch.tanh(a)))
    return buffer * 2


CASES = {f.__name__: f for f in (contracted, turned, scores, added, written)}


@pytest.mark.parametrize("kind", CASES)
def test_units_fold_through_it(kind: str) -> None:
    net, x = Net(CASES[kind]).eval(), torch.randn(2, 4, 6)
    program = cmrc.trace(net, (x,))
    lowered = cmrc.lower(program, cmrc.Plan(program).do("relu", units=[0, 5], constant=[0.4, 0.9]))
    check = lowered.check((x,))
    assert check.error <= EXACT_F32
    assert check.moved >= MOVES * EXACT_F32
    assert lowered.module.up.weight.shape == (6, 6)


def test_a_model_that_changes_its_parameters_as_it_runs_is_refused() -> None:
    class Rescaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.fc.weight.div_(2.0)
            scaled = torch.relu(self.fc(x))
            scaled[..., 1:3] = scaled[..., :2]
            return scaled

    with pytest.raises(cmrc.CmrcError, match="the model changes its parameters while it runs"):
        cmrc.trace(Rescaled().eval(), (torch.randn(2, 4),))


class Biased(nn.Module):
    """A bias for each head and distance, as LeViT's: the table lies behind the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)
        self.biases = nn.Parameter(torch.randn(4, 5))
        self.register_buffer("places", torch.arange(9).reshape(3, 3) % 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.a(x).unflatten(-1, (4, 2)).transpose(1, 2)
        mixed = (heads @ heads.mT + self.biases[:, self.places]).softmax(-1) @ heads
        return self.b(self.act(mixed.transpose(1, 2).flatten(2)))


def test_a_table_of_biases_loses_the_heads_that_go() -> None:
    """The table itself, not what was looked up in it, which has more numbers."""
    module, x = Biased().eval(), torch.randn(2, 3, 6)
    program = cmrc.trace(module, (x,))
    lowered = cmrc.lower(program, cmrc.Plan(program).do("act", units=[2, 3, 6, 7], constant=0.4))
    assert lowered.check((x,)).holds
    numbers = {tuple(p.shape) for p in lowered.module.parameters()}
    assert {(4, 6), (3, 4)} <= numbers
    assert sum(p.numel() for p in lowered.module.parameters()) == 28 + 15 + 10
