"""Ops that replacements cannot pass, or only just: recurrent layers, sorting, custom ops, looked-up weights, values written in place."""

from __future__ import annotations

import torch
from differential.models import affine, case, const, net
from torch import nn


@torch.library.custom_op("differential::scrambled", mutates_args=())
def scrambled(x: torch.Tensor) -> torch.Tensor:
    return x.flip(-1) * 1.5


scrambled.register_fake(torch.empty_like)


def recurrent(rnn: nn.Module) -> nn.Module:
    return net(lambda m, x: m.b(m.rnn(m.act(m.a(x)))[0]), rnn=rnn, a=nn.Linear(6, 8), act=nn.ReLU(), b=nn.Linear(5, 4))


case(
    "lstm_beside",
    lambda: net(
        lambda m, x: m.b(m.act(m.a(m.rnn(x)[0]))),
        rnn=nn.LSTM(6, 5, batch_first=True),
        a=nn.Linear(5, 8),
        act=nn.ReLU(),
        b=nn.Linear(8, 4),
    ),
    ("n", 4, 6),
    const("act", [1, 4]),
)
case(
    "lstm_in_the_way",
    lambda: recurrent(nn.LSTM(8, 5, batch_first=True)),
    ("n", 4, 6),
    const("act", [1, 4]),
    save=True,
)


both_ways = {"batch_first": True, "num_layers": 2}
case("gru_in_the_way", lambda: recurrent(nn.GRU(8, 5, **both_ways)), ("n", 4, 6), affine("act", [1, 4], [0, 2]))
case("rnn_in_the_way", lambda: recurrent(nn.RNN(8, 5)), (4, "n", 6), const("act", [1, 4, 6]))


def _both_ways(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    outputs, (last, _) = m.rnn(m.act(m.a(x)))
    return m.b(torch.cat([outputs[:, -1], last[0]], -1))


case(
    "lstm_both_ways",
    lambda: net(
        _both_ways,
        rnn=nn.LSTM(8, 5, batch_first=True, bidirectional=True),
        a=nn.Linear(6, 8),
        act=nn.ReLU(),
        b=nn.Linear(15, 4),
    ),
    ("n", 4, 6),
    const("act", [1, 4]),
)
case("lstm_without_bias_zero", lambda: recurrent(nn.LSTM(8, 5, bias=False)), (4, "n", 6), const("act", [1, 4], 0.0))
case(
    "lstm_without_bias",
    lambda: recurrent(nn.LSTM(8, 5, bias=False)),
    (4, "n", 6),
    const("act", [1, 4]),
    hosts=("fx",),
    stops="it has no bias that could absorb the constants",
)
case(
    "sort_beside",
    lambda: net(
        lambda m, x: m.b(m.act(m.a(x))) + torch.sort(m.c(x), dim=-1)[0],
        a=nn.Linear(6, 8),
        act=nn.ReLU(),
        b=nn.Linear(8, 4),
        c=nn.Linear(6, 4),
    ),
    ("n", 6),
    const("act", [1, 4]),
)
case(
    "sort_in_the_way",
    lambda: net(
        lambda m, x: m.b(torch.sort(m.act(m.a(x)), dim=-1)[0]), a=nn.Linear(6, 8), act=nn.ReLU(), b=nn.Linear(8, 4)
    ),
    ("n", 6),
    const("act", [1, 4]),
    hosts=("fx",),
    stops="sort is not an op that replacements can pass",
)
case(
    "custom_op_beside",
    lambda: net(
        lambda m, x: m.b(m.act(m.a(x))) + scrambled(m.c(x)),
        a=nn.Linear(6, 8),
        act=nn.ReLU(),
        b=nn.Linear(8, 4),
        c=nn.Linear(6, 4),
    ),
    ("n", 6),
    const("act", [1, 4]),
    hosts=("fx",),
)
case(
    "custom_op_in_the_way",
    lambda: net(lambda m, x: m.b(scrambled(m.act(m.a(x)))), a=nn.Linear(6, 8), act=nn.ReLU(), b=nn.Linear(8, 4)),
    ("n", 6),
    const("act", [1, 4]),
    hosts=("fx",),
    stops="scrambled is not an op that replacements can pass",
)


def _experts(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Each sample's weights are looked up by what a router says; the first product has them on the left, the second on the right."""
    chosen = m.router(x).argmax(-1)
    hidden = m.act(torch.bmm(m.up[chosen], x.unsqueeze(-1)).squeeze(-1))
    return torch.bmm(hidden.unsqueeze(1), m.down[chosen]).squeeze(1)


def experts() -> nn.Module:
    return net(_experts, router=nn.Linear(6, 3), act=nn.ReLU(), up=torch.empty(3, 8, 6), down=torch.empty(3, 8, 4))


case("experts", experts, ("n", 6), const("act", [1, 4], left=6), save=True)
case("experts_zero", experts, ("n", 6), const("act", [1, 4], 0.0, left=6))
case("experts_affine", experts, ("n", 6), affine("act", [1], [4]), stops="matmul")
case(
    "position_bias_of_zeros",
    lambda: net(
        lambda m, x: m.b((m.act(m.a(x)).reshape(-1, 4, 2) + torch.zeros(1, 4, 2)).reshape(-1, 8)),
        a=nn.Linear(6, 8),
        act=nn.ReLU(),
        b=nn.Linear(8, 4),
    ),
    ("n", 6),
    const("act", [2, 3]),
)
case(
    "top_k_after",
    lambda: net(lambda m, x: torch.topk(m.b(m.act(m.a(x))), 2)[0], a=nn.Linear(6, 8), act=nn.ReLU(), b=nn.Linear(8, 4)),
    ("n", 6),
    const("act", [1, 4]),
)


def _scan(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A scan of heads: it begins with zeros of the size of what it adds up, and nobody reads its last state."""
    added = m.a(x).unflatten(-1, (4, 2))
    states = torch.cumsum(torch.cat([torch.zeros_like(added[:, :1]), added], 1), 1)
    before, _ = states[:, :-1], states[:, -1]
    return m.b(m.act(before.flatten(2)))


case(
    "scan_of_heads",
    lambda: net(_scan, a=nn.Linear(6, 8), act=nn.ReLU(), b=nn.Linear(8, 4)),
    ("n", 5, 6),
    const("act", [1, 3, 5, 7], axis=2),
    save=True,
)


def _written(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    left, right = m.act(m.a(x)), m.b(x)
    joined = x.new_empty(*x.shape[:-1], 8)
    joined[..., :5] = left
    joined[..., 5:] = right
    return m.out(joined)


case(
    "parts_written_in_place",
    lambda: net(_written, a=nn.Linear(6, 5), act=nn.ReLU(), b=nn.Linear(6, 3), out=nn.Linear(8, 4)),
    ("n", 6),
    const("act", [1, 4]),
    hosts=("fx",),
    dynamic=("", "n"),
)
