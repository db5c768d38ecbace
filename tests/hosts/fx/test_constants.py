"""Weights that a torch module computes from its parameters are parameters, whatever computes them."""

from __future__ import annotations

import pytest
import torch
from tolerances import EXACT_F32, MOVES
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import cmrc


class Standardised(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        deviation, mean = torch.std_mean(self.weight, dim=(1, 2, 3), keepdim=True)
        weight = (self.weight - mean) / (deviation + 1e-5)
        return nn.functional.conv2d(x, weight, self.bias)


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight @ weight.T @ weight


class Rotated(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, torch.linalg.qr(self.weight)[0], self.bias)


def small(first: nn.Module, last: nn.Module, shape: tuple[int, ...]) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    for module in (first, last):
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.4)
    return nn.Sequential(first, nn.ReLU(), last).eval(), torch.randn(3, *shape)


def spectral(module: nn.Module) -> nn.Module:
    return parametrizations.spectral_norm(module)


def weighted(module: nn.Module) -> nn.Module:
    return parametrizations.weight_norm(module)


def symmetric(module: nn.Module) -> nn.Module:
    parametrize.register_parametrization(module, "weight", Symmetric())
    return module


MODELS = {
    "standardised": lambda: small(Standardised(4, 8, 3), nn.Conv2d(8, 3, 1), (4, 6, 6)),
    "spectral norm": lambda: small(spectral(nn.Linear(6, 8)), spectral(nn.Linear(8, 3)), (6,)),
    "weight norm": lambda: small(weighted(nn.Linear(6, 8)), weighted(nn.Linear(8, 3)), (6,)),
    "parametrisation": lambda: small(symmetric(nn.Linear(6, 8)), symmetric(nn.Linear(8, 3)), (6,)),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_weight_that_is_made_of_parameters_folds(kind: str) -> None:
    net, x = MODELS[kind]()
    program = cmrc.trace(net, (x,))
    lowered = cmrc.lower(program, cmrc.Plan(program).do("1", units=[0, 5], constant=[0.4, 0.9]))
    check = lowered.check((x,))
    assert check.error <= EXACT_F32
    assert check.moved >= MOVES * EXACT_F32
    assert lowered.host.graph.values()[lowered.host.names["0"][0]].shape[1] == 6
    numbers = sum(parameter.numel() for parameter in lowered.module.parameters())
    assert numbers < sum(parameter.numel() for parameter in net.parameters())


def test_a_parameter_that_is_also_read_as_it_is_stays() -> None:
    """The same weight, read through a spectral norm and as it is: each use folds by itself."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scaled = self.up.weight / torch.linalg.matrix_norm(self.up.weight, 2)
            return self.down(torch.relu(self.up(x))) + self.down(torch.relu(nn.functional.linear(x, scaled)))

    torch.manual_seed(0)
    x = torch.randn(3, 6)
    program = cmrc.trace(Twice().eval(), (x,))
    plan = cmrc.Plan(program).do("relu", units=[0, 5], constant=[0.4, 0.9])
    lowered = cmrc.lower(program, plan, growth="allow")
    assert lowered.check((x,)).error <= EXACT_F32
