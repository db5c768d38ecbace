"""Networks whose causal structure is known, because they were written down by hand or trained on a known circuit."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

BATCH = torch.export.Dim("batch", min=2, max=65536)


def linear(weight: list[list[float]] | np.ndarray, bias: list[float] | np.ndarray) -> nn.Linear:
    weight, bias = (
        torch.tensor(np.asarray(weight), dtype=torch.float32),
        torch.tensor(np.asarray(bias), dtype=torch.float32),
    )
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    return layer


class Equality(nn.Module):
    """(a == b) == (c == d) for whole numbers: classes "different" and "equal".

    At `act2`, units 0 and 1 hold a ≠ b (as u0 − u1), units 2 and 3 hold c ≠ d; unit 4 is always 1, unit 5 is 2·u0 + 1, and u0 is
    read through it alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = linear([[1, -1, 0, 0], [-1, 1, 0, 0], [0, 0, 1, -1], [0, 0, -1, 1]], [0, 0, 0, 0])
        rows = [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0], [2, 2, 0, 0]]
        self.layer2 = linear(rows, [0, -1, 0, -1, 1, 1])
        self.layer3 = linear([[0, -1, 1, -1, 0.5, 0.5], [0, -1, 1, -1, 0.5, 0.5]], [-1, -2])
        self.head = linear([[1, -2], [-1, 2]], [-0.5, 0.5])
        self.act1, self.act2, self.act3 = nn.ReLU(), nn.ReLU(), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.act3(self.layer3(self.act2(self.layer2(self.act1(self.layer1(x)))))))

    @staticmethod
    def inputs(rows: int, seed: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        x = rng.integers(0, 4, size=(rows, 4))
        same = rng.random((2, rows)) < 0.5
        x[same[0], 1], x[same[1], 3] = x[same[0], 0], x[same[1], 2]
        return x.astype(np.float32)


class Counting(nn.Module):
    """How many 1s are in the sequence, asked at every place: attention that looks everywhere alike.

    The residual stream: TOKEN (one-hot, 3), PLACE (one-hot, 6), SHARE (the share of 1s, written by the attention).
    """

    LENGTH = 6
    TOKEN, PLACE, SHARE = [0, 1, 2], [3, 4, 5, 6, 7, 8], [9]

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 10)
        self.embed.weight = nn.Parameter(torch.eye(3, 10), requires_grad=False)
        places = torch.zeros(6, 10)
        places[range(6), self.PLACE] = 1
        self.register_buffer("places", places)
        value = np.zeros((10, 10))
        value[9, 1] = 1  # SHARE reads the token 1
        self.value = linear(value, np.zeros(10))
        self.residual = linear(np.eye(10), np.zeros(10))
        counts = np.arange(7)
        read = np.zeros((7, 10))
        read[:, 9] = 2 * counts * self.LENGTH
        self.unembed = linear(read, -(counts**2))  # the nearest whole number: 2kc − k² is largest at k = c

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens) + self.places
        weights = torch.softmax(torch.zeros_like(h[..., 0])[:, None, :].expand(-1, 6, 6), dim=-1)
        return self.unembed(self.residual(h + weights @ self.value(h)))


class Reversing(nn.Module):
    """The sequence backwards: each place attends to its mirror image.

    The residual stream: TOKEN (one-hot, 4), PLACE (one-hot, 5), MIRROR (what the attention copies, 4).
    """

    LENGTH = 5
    TOKEN, PLACE, MIRROR = list(range(4)), list(range(4, 9)), list(range(9, 13))

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 13)
        self.embed.weight = nn.Parameter(torch.eye(4, 13), requires_grad=False)
        places = torch.zeros(5, 13)
        places[range(5), self.PLACE] = 1
        self.register_buffer("places", places)
        query, key, value = np.zeros((5, 13)), np.zeros((5, 13)), np.zeros((13, 13))
        query[range(5), self.PLACE[::-1]] = 100
        key[range(5), self.PLACE] = 1
        value[self.MIRROR, self.TOKEN] = 1
        self.query, self.key, self.value = (linear(w, np.zeros(len(w))) for w in (query, key, value))
        self.stream = linear(np.eye(13), np.zeros(13))
        read = np.zeros((4, 13))
        read[range(4), self.MIRROR] = 1
        self.unembed = linear(read, np.zeros(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.stream(self.embed(tokens) + self.places)
        weights = torch.softmax(self.query(h) @ self.key(h).transpose(1, 2), dim=-1)
        return self.unembed(h + weights @ self.value(h))


def circuit() -> tuple[np.ndarray, np.ndarray]:
    """All inputs of XOR(AND(x1, x2), OR(x3, x4)) with four idle bits, and its answers."""
    bits = ((np.arange(256)[:, None] >> np.arange(8)) & 1).astype(np.float32)
    answers = (bits[:, 0] * bits[:, 1]).astype(int) ^ np.maximum(bits[:, 2], bits[:, 3]).astype(int)
    return bits, answers.astype(np.int64)


def trained_circuit(seed: int, steps: int = 200) -> nn.Sequential:
    """8-64-64-2, trained on all inputs; module 3 is the penultimate activation."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    x, y = map(torch.from_numpy, circuit())
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    return model.eval()
