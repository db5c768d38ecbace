"""The small network of these tests, and its lowered form."""

from __future__ import annotations

import pytest
from differential.models import randomise
from hosts.fx.small_network import BATCH, images, lower, network
from torch import nn

import cmrc


@pytest.fixture
def model() -> nn.Module:
    return randomise(network()).eval()


@pytest.fixture
def lowered(model: nn.Module) -> cmrc.Lowered:
    return lower(model, (images(),), "act", [1, 4], [0.7, 1.9], dynamic_shapes=({0: BATCH},))
