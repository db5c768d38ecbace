"""Everything that only moves elements: reshape, transpose, concat, split, slice."""

from __future__ import annotations

from collections.abc import Callable

import torch
from differential.cases_pooling import IMAGE, around
from differential.models import affine, case, chain, const, net, step
from torch import nn

# ---------------------------------------------------------------- moving elements


def moved(function: Callable[..., torch.Tensor], ins: int = 8, hidden: int = 8) -> Callable[[], nn.Module]:
    """fc1, relu, a change of layout, fc2."""
    return lambda: chain(a=nn.Linear(6, hidden), act=nn.ReLU(), move=step(function), b=nn.Linear(ins, 4))


TOKENS = ("n", 3, 6)
case("flatten_tokens", moved(lambda x: x.flatten(1), 24), TOKENS, const("act", [1, 4]))
case("flatten_tokens_affine", moved(lambda x: x.flatten(1), 24), TOKENS, affine("act", [1, 4], [0, 2]))
case("reshape_tokens", moved(lambda x: x.reshape(x.shape[0], -1), 24), TOKENS, const("act", [1, 4]))
case(
    "merge_batch",
    moved(lambda x: x.reshape(-1, 8)),
    ("n", "t", 6),
    const("act", [1, 4], left=5),
    affine("act", [2], [0], left=5),
)
case(
    "squeeze_unsqueeze",
    moved(lambda x: x.unsqueeze(2).unsqueeze(-1).squeeze(-1).squeeze(2)),
    ("n", "t", 6),
    const("act", [1, 4], left=5),
    affine("act", [2], [0], left=5),
)
case(
    "positions_in_blocks",
    moved(lambda x: x.reshape(x.shape[0], 2, 24).transpose(1, 2).flatten(1), 48),
    ("n", 6, 6),
    const("act", [1, 4]),
)
case("unflatten", moved(lambda x: x.unflatten(-1, (2, 4)).flatten(2)), TOKENS, const("act", [4, 5, 6, 7]))
case(
    "heads",
    moved(lambda x: x.view(x.shape[0], 3, 4, 2).transpose(1, 2).transpose(1, 2).reshape(x.shape[0], 3, 8)),
    TOKENS,
    const("act", [2, 3, 6, 7]),
)
case(
    "heads_affine",
    moved(lambda x: x.view(x.shape[0], 3, 4, 2).flatten(2)),
    TOKENS,
    affine("act", [1, 4], [0, 2]),
    hosts=("fx",),
    stops="it splits the units over several axes",
)
case(
    "split_a_head",
    moved(lambda x: x.view(x.shape[0], 3, 4, 2).flatten(2)),
    TOKENS,
    const("act", [2, 4]),
    hosts=("fx",),
    stops="the units do not fill whole positions of any axis",
)
case(
    "transpose_linear",
    lambda: chain(a=nn.Linear(6, 8), act=nn.ReLU(), t=step(lambda x: x.transpose(1, 2)), b=nn.Conv1d(8, 4, 1)),
    ("n", "t", 6),
    const("act", [1, 4], left=5),
    affine("act", [2], [0], left=5),
)
case(
    "permute_conv_linear",
    lambda: chain(a=nn.Conv2d(3, 6, 3), act=nn.ReLU(), p=step(lambda x: x.permute(0, 2, 3, 1)), b=nn.Linear(6, 4)),
    IMAGE,
    const("act", [1, 4], left=3),
    affine("act", [2], [0], left=3),
)
case(
    "flatten_permute",
    lambda: chain(
        a=nn.Conv2d(3, 6, 3), act=nn.ReLU(), p=step(lambda x: x.flatten(2).transpose(1, 2)), b=nn.Linear(6, 4)
    ),
    ("n", 3, 6, 5),
    const("act", [1, 4], left=3),
    affine("act", [2], [0], left=3),
    save=True,
)
case(
    "movedim",
    lambda: chain(a=nn.Conv2d(3, 6, 3), act=nn.ReLU(), p=step(lambda x: x.movedim(1, -1)), b=nn.Linear(6, 4)),
    IMAGE,
    const("act", [1, 4]),
)
case(
    "replaced_token",
    lambda: chain(
        first=nn.Conv1d(3, 5, 1),
        a=nn.Linear(6, 8),
        act=nn.ReLU(),
        t=step(lambda x: x.transpose(1, 2)),
        mix=nn.Linear(5, 4),
    ),
    ("n", 3, 6),
    const("act", [1, 4], axis=1),
)
case("flip_roll", lambda: around(step(lambda x: x.flip(2).roll(1, 3))), ("n", 3, 6, 5), const("act", [1, 4]))
case(
    "first_token",
    moved(lambda x: x[:, 0]),
    ("n", "t", 6),
    const("act", [1, 4], left=5),
    affine("act", [2], [0], left=5),
)
case("every_other_token", moved(lambda x: x[:, ::2]), ("n", 4, 6), const("act", [1, 4]))
case(
    "expand",
    lambda: net(
        lambda m, x: m.b(m.act(m.a(x)).unsqueeze(1).expand(-1, 3, -1)),
        a=nn.Linear(6, 8),
        act=nn.ReLU(),
        b=nn.Linear(8, 4),
    ),
    ("n", 6),
    const("act", [1, 4]),
)
case(
    "positions_by_a_table",
    lambda: net(
        lambda m, x: m.b(m.act(m.a(x))[:, m.places]),
        a=nn.Linear(6, 8),
        act=nn.ReLU(),
        b=nn.Linear(8, 4),
        places=torch.tensor([2, -3, 2]),
    ),
    TOKENS,
    const("act", [1, 4]),
    hosts=("fx",),
)
case(
    "index_select",
    lambda: net(
        lambda m, x: m.b(m.act(m.a(x)).index_select(1, torch.arange(2))),
        a=nn.Linear(6, 8),
        act=nn.ReLU(),
        b=nn.Linear(8, 4),
    ),
    TOKENS,
    const("act", [1, 4]),
    hosts=("fx",),
)
case(
    "gather",
    lambda: net(
        lambda m, x: m.b(m.act(m.a(x)).gather(1, m.index.expand(x.shape[0], -1, 8))),
        a=nn.Linear(6, 8),
        act=nn.ReLU(),
        b=nn.Linear(8, 4),
        index=torch.tensor([[[2], [0]]]),
    ),
    TOKENS,
    const("act", [1, 4]),
)
case("repeat", moved(lambda x: x.repeat(1, 3, 1)), TOKENS, const("act", [1, 4]))
case(
    "repeat_units",
    moved(lambda x: x.repeat(1, 1, 2), 16),
    TOKENS,
    const("act", [1, 4]),
    hosts=("fx",),
    stops="it repeats the units",
)


def _positions_by_head(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Heads merged with samples; scores against a table for each head, repeated for every sample, then picked by distance."""
    n, t, _ = x.shape
    heads = m.act(m.a(x)).view(n, t, 4, 2).transpose(1, 2).reshape(-1, t, 2)
    table = m.b(m.table).view(1, 5, 4, 2).transpose(1, 2).reshape(4, 5, 2).repeat(n, 1, 1)
    index = m.distance.expand(heads.shape[0], -1, -1)
    scores = (heads @ table.transpose(1, 2)).gather(2, index).view(n, 4, t, t)
    result: torch.Tensor = m.c(m.heads(scores).transpose(1, 2).flatten(2))
    return result


case(
    "positions_by_head",
    lambda: net(
        _positions_by_head,
        a=nn.Linear(6, 8),
        act=nn.Tanh(),
        b=nn.Linear(6, 8),
        heads=nn.Softmax(-1),
        c=nn.Linear(12, 4),
        table=torch.randn(1, 5, 6),
        distance=torch.tensor([[[2, 3, 4], [1, 2, 3], [0, 1, 2]]]),
    ),
    TOKENS,
    const("heads", [1, 3], axis=1),
    save=True,
)
case(
    "pixel_shuffle",
    lambda: chain(a=nn.Conv2d(3, 8, 3), act=nn.ReLU(), up=nn.PixelShuffle(2), b=nn.Conv2d(2, 4, 1)),
    ("n", 3, 6, 5),
    const("act", [4, 5, 6, 7]),
    hosts=("fx",),
    stops="pixel_shuffle",
)


def _channel_shuffle(x: torch.Tensor) -> torch.Tensor:
    n, c, h, w = x.shape
    return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


case(
    "channel_shuffle", lambda: around(step(_channel_shuffle)), ("n", 3, 6, 5), const("act", [1, 4])
)  # one of each half: a whole row

# ---------------------------------------------------------------- concat and its parts


def _branches(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return m.b(torch.cat([m.f(m.p(x)), m.q(x), m.g(m.r(x))], dim=1))


def branches() -> nn.Module:
    return net(
        _branches,
        p=nn.Conv2d(3, 4, 1),
        f=nn.ReLU(),
        q=nn.Conv2d(3, 3, 1),
        r=nn.Conv2d(3, 5, 3, padding=1),
        g=nn.Tanh(),
        b=nn.Conv2d(12, 4, 3, padding=1),
    )


case(
    "concat",
    branches,
    ("n", 3, 6, 5),
    const("f", [1]),
    const("q", [0, 2]),
    affine("g", [2, 4], [1, 3]),
    dynamic=("", "n"),
    save=True,
)
# A vector of no numbers stands before values of another rank: what a cache of keys begins as.
case("concat_with_nothing", moved(lambda x: torch.cat([torch.tensor([]), x], 1)), ("n", "t", 6), const("act", [1, 4]))
case("concat_all_of_a_branch", branches, ("n", 3, 6, 5), const("f", [0, 1, 2, 3], left=0))
case("concat_two_affines", branches, ("n", 3, "h", "w"), affine("f", [1], [0, 2]), affine("g", [2, 4], [1, 3]))
case("concat_result", lambda: net(lambda m, x: m.b(m.cat(m.p(x), m.q(x))), p=nn.Linear(6, 4), q=nn.Linear(6, 5), cat=step(lambda x, y: torch.cat([x, y], -1)), b=nn.Linear(9, 3)),
     ("n", 6), const("cat", [1, 5, 6]))  # fmt: skip
case("dense_block", lambda: net(lambda m, x: _dense(m, x), a=nn.Conv2d(3, 4, 3, padding=1), f=nn.ReLU(), b=nn.Conv2d(4, 4, 3, padding=1), g=nn.ReLU(), c=nn.Conv2d(8, 3, 1)),
     ("n", 3, 6, 5), const("f", [1, 2]), affine("g", [3], [0, 1]))  # fmt: skip


def _dense(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = m.f(m.a(x))
    return m.c(torch.cat((y, m.g(m.b(y))), 1))


case("concat_other_axis", lambda: net(lambda m, x: m.b(torch.cat([m.f(m.p(x)), m.g(m.p(x))], 1)), p=nn.Linear(6, 8), f=nn.ReLU(), g=nn.Tanh(), b=nn.Linear(8, 3)),
     ("n", 3, 6), const("f", [1, 4]), const("g", [1, 4], [0.3, 0.2]))  # fmt: skip
case("concat_other_axis_one_only", lambda: net(lambda m, x: m.b(torch.cat([m.f(m.p(x)), m.g(m.p(x))], 1)), p=nn.Linear(6, 8), f=nn.ReLU(), g=nn.Tanh(), b=nn.Linear(8, 3)),
     ("n", 3, 6), const("f", [1, 4]), stops="another part of the concatenation is not replaced")  # fmt: skip
case("class_token", lambda: net(lambda m, x: m.b(m.act(m.a(torch.cat([m.token.expand(x.shape[0], -1, -1), x], 1)))), a=nn.Linear(6, 8), act=nn.GELU(), b=nn.Linear(8, 3), token=torch.empty(1, 1, 6)),
     ("n", "t", 6), const("act", [1, 4]))  # fmt: skip


def parted(split: Callable[[torch.Tensor], tuple[torch.Tensor, ...]], hidden: int = 8) -> Callable[[], nn.Module]:
    """fc1, relu, parts of it into a linear layer each."""

    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        parts = split(m.act(m.a(x)))
        return sum(getattr(m, f"b{i}")(part) for i, part in enumerate(parts))  # type: ignore[return-value]

    sizes = [part.shape[-1] for part in split(torch.zeros(2, hidden))]
    heads = {f"b{i}": nn.Linear(n, 4) for i, n in enumerate(sizes)}
    return lambda: net(forward, a=nn.Linear(6, hidden), act=nn.ReLU(), **heads)


SPLITS = {
    "chunk": lambda x: x.chunk(2, -1),
    "split": lambda x: x.split(3, -1),
    "split_sizes": lambda x: torch.split(x, [2, 5, 1], dim=-1),
    "slices": lambda x: (x[..., :3], x[..., 3:]),
    "overlapping_slices": lambda x: (x[..., :5], x[..., 3:]),
    "narrow": lambda x: (x.narrow(-1, 0, 5), x.narrow(-1, 5, 3)),
    "strided_slices": lambda x: (x[..., ::2], x[..., 1::2]),
}
for _name, _split in SPLITS.items():
    case(_name, parted(_split), ("n", 6), const("act", [1, 4]), save=_name in ("chunk", "split_sizes"))
case("chunk_evenly", parted(lambda x: x.chunk(2, -1)), ("n", 6), const("act", [1, 5]))
case(
    "chunk_affine",
    parted(lambda x: x.chunk(2, -1)),
    ("n", 6),
    affine("act", [1], [0, 2], left=6),
    affine("act", [5], [4, 6], left=6),
)
case(
    "chunk_affine_across",
    parted(lambda x: x.chunk(2, -1)),
    ("n", 6),
    affine("act", [1], [0, 4]),
    stops="it drops parents from which the units are rebuilt",
)
case("split_all_of_a_part", parted(lambda x: x.split([2, 6], -1)), ("n", 6), const("act", [0, 1]))
case(
    "unbind",
    lambda: net(
        lambda m, x: sum(m.b(part) for part in m.act(m.a(x)).unbind(1)),
        a=nn.Linear(6, 8),
        act=nn.ReLU(),
        b=nn.Linear(8, 4),
    ),
    ("n", 3, 6),
    const("act", [1, 4]),
)
case(
    "stack",
    lambda: net(
        lambda m, x: m.b(torch.stack([m.f(m.a(x)), m.g(m.a(x))], 1)),
        a=nn.Linear(6, 8),
        f=nn.ReLU(),
        g=nn.Tanh(),
        b=nn.Linear(8, 4),
    ),
    ("n", 6),
    const("f", [1, 4]),
    const("g", [1, 4], [0.3, -0.6]),
)
