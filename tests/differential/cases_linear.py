"""Linear maps in all the ways that people write them, chains of them, and parameters that several places share."""

from __future__ import annotations

import numpy as np
import torch
from differential.models import Ask, Input, affine, case, chain, const, net
from torch import nn


def mlp(bias: bool = True, act: type[nn.Module] = nn.ReLU) -> nn.Module:
    return chain(fc1=nn.Linear(6, 8, bias=bias), act=act(), fc2=nn.Linear(8, 4, bias=bias))


case("mlp", mlp, ("n", 6), const("act", [1, 4]), dynamic=("", "n"), save=True)
case("mlp_no_bias", lambda: mlp(bias=False), ("n", 6), const("act", [1, 4]), dynamic=("", "n"), save=True)
case("mlp_zeros", mlp, ("n", 6), const("act", [0, 7], 0.0))
case("mlp_one_for_all", mlp, ("n", 6), const("act", [0, 3, 7], 0.9))
case("mlp_unsorted_units", mlp, ("n", 6), const("act", [6, 0, 3]))
case("mlp_tokens", mlp, ("n", "t", 6), const("act", [1, 4]), dynamic=("", "nt"), save=True)
case("mlp_no_batch", mlp, (6,), const("act", [1, 4]))
case("mlp_four_axes", lambda: mlp(bias=False), ("n", 2, "t", 6), const("act", [1, 4]))
case("mlp_preactivation", mlp, ("n", 6), const("fc1", [2, 5]))
case("mlp_both_sides", mlp, ("n", 6), const("fc1", [2, 5], left=5), const("act", [0], left=5))
case("mlp_affine", mlp, ("n", 6), affine("act", [1, 4], [0, 2, 7]), dynamic=("", "n"), save=True)
case("mlp_affine_tokens", lambda: mlp(bias=False), ("n", "t", 6), affine("act", [6], [0, 2]))
case("mlp_affine_no_bias_term", mlp, ("n", 6), affine("act", [1, 4], [0, 2], 0.0))
case("mlp_constant_and_affine", mlp, ("n", 6), const("act", [0], left=5), affine("act", [1, 4], [2, 7], left=5))
case("mlp_two_affines", mlp, ("n", 6), affine("act", [0], [3], left=5), affine("act", [1, 4], [2, 3], left=5))
case(
    "deep_mlp",
    lambda: chain(
        a=nn.Linear(6, 8),
        f=nn.GELU(),
        b=nn.Linear(8, 7),
        g=nn.Tanh(),
        c=nn.Linear(7, 9),
        h=nn.SiLU(),
        d=nn.Linear(9, 4),
    ),
    ("n", 6),
    const("f", [1, 6]),
    const("b", [0], left=4),
    affine("g", [2, 3], [1, 5], left=4),
    const("h", [8, 0]),
)
case(
    "linear_chain",
    lambda: chain(a=nn.Linear(6, 8), b=nn.Linear(8, 7), c=nn.Linear(7, 4)),
    ("n", 6),
    const("a", [1, 2]),
    affine("b", [3], [0, 5]),
)
case(
    "everything_constant",
    mlp,
    ("n", 6),
    Ask("act", "all", 0.7),
    stops="every unit of this output is constant, so nothing would be left of the model",
)
case("slab_tokens", mlp, ("n", 3, 6), const("act", [1, 4], np.linspace(-2, 2, 6).reshape(1, 3, 2)))

# ---------------------------------------------------------------- ways to write a product

case(
    "matmul",
    lambda: net(
        lambda m, x: m.act(x @ m.w1) @ m.w2 + m.b,
        act=nn.ReLU(),
        w1=torch.empty(6, 8),
        w2=torch.empty(8, 4),
        b=torch.empty(4),
    ),
    ("n", 6),
    const("act", [1, 4]),
    dynamic=("", "n"),
    save=True,
)
case(
    "matmul_no_bias",
    lambda: net(lambda m, x: m.act(x @ m.w1) @ m.w2, act=nn.ReLU(), w1=torch.empty(6, 8), w2=torch.empty(8, 4)),
    ("n", "t", 6),
    const("act", [1, 4]),
)
case(
    "matmul_affine",
    lambda: net(
        lambda m, x: m.act(x @ m.w1) @ m.w2 + m.b,
        act=nn.ReLU(),
        w1=torch.empty(6, 8),
        w2=torch.empty(8, 4),
        b=torch.empty(4),
    ),
    ("n", "t", 6),
    affine("act", [1, 4], [0, 2]),
)
case(
    "matmul_turned",
    lambda: net(
        lambda m, x: m.act(x @ m.w1.t()) @ m.w2.t() + m.b,
        act=nn.ReLU(),
        w1=torch.empty(8, 6),
        w2=torch.empty(4, 8),
        b=torch.empty(4),
    ),
    ("n", 6),
    const("act", [1, 4]),
    save=True,
)
case(
    "matmul_turned_tokens",
    lambda: net(
        lambda m, x: m.act(x @ m.w1.transpose(0, 1) + m.b1) @ m.w2.permute(1, 0),
        act=nn.GELU(), w1=torch.empty(8, 6), w2=torch.empty(4, 8), b1=torch.empty(8),
    ),
    ("n", "t", 6),
    const("act", [1, 4]),
)  # fmt: skip
case(
    "matmul_from_the_left",
    lambda: net(lambda m, x: m.w2 @ m.act(m.w1 @ x), act=nn.ReLU(), w1=torch.empty(8, 6), w2=torch.empty(4, 8)),
    ("n", 6, 5),
    const("act", [1, 4], axis=1),
)
case(
    "addmm",
    lambda: net(
        lambda m, x: torch.addmm(m.b2, m.act(torch.addmm(m.b1, x, m.w1)), m.w2),
        act=nn.ReLU(), w1=torch.empty(6, 8), w2=torch.empty(8, 4), b1=torch.empty(8), b2=torch.empty(4),
    ),
    ("n", 6),
    const("act", [1, 4]),
    dynamic=("", "n"),
    save=True,
)  # fmt: skip


class Conv1D(nn.Module):
    """GPT-2's linear layer: a product of views."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.outs = outs
        self.weight = nn.Parameter(torch.empty(ins, outs))
        self.bias = nn.Parameter(torch.empty(outs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = (*x.size()[:-1], self.outs)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size)


case(
    "hf_conv1d",
    lambda: chain(fc1=Conv1D(6, 8), act=nn.GELU(), fc2=Conv1D(8, 4)),
    ("n", "t", 6),
    const("act", [1, 4]),
    dynamic=("", "nt"),
    save=True,
)
case(
    "hf_conv1d_affine",
    lambda: chain(fc1=Conv1D(6, 8), act=nn.GELU(), fc2=Conv1D(8, 4)),
    ("n", "t", 6),
    affine("act", [1, 4], [0, 2]),
)

# ---------------------------------------------------------------- readers and sharing

case(
    "two_readers",
    lambda: net(
        lambda m, x: (m.a(m.act(m.fc1(x))), m.b(m.act(m.fc1(1.0 - x)))),
        fc1=nn.Linear(6, 8),
        act=nn.ReLU(),
        a=nn.Linear(8, 4),
        b=nn.Linear(8, 3),
    ),
    ("n", 6),
    const("act@0", [1, 4]),
    const("act@1", [1, 4]),
)


def _one_site_two_readers(m: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = m.act(m.fc1(x))
    return m.a(h), m.b(h)


case(
    "one_site_two_readers",
    lambda: net(_one_site_two_readers, fc1=nn.Linear(6, 8), act=nn.ReLU(), a=nn.Linear(8, 4), b=nn.Linear(8, 3)),
    ("n", 6),
    const("act", [1, 4]),
    dynamic=("", "n"),
    save=True,
)
case(
    "one_site_two_readers_affine",
    lambda: net(
        _one_site_two_readers, fc1=nn.Linear(6, 8), act=nn.ReLU(), a=nn.Linear(8, 4), b=nn.Linear(8, 3, bias=False)
    ),
    ("n", 6),
    affine("act", [1, 4], [3, 0]),
)


def _also_an_output(m: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = m.act(m.fc1(x))
    return h, m.fc2(h)


case(
    "also_an_output",
    lambda: net(_also_an_output, fc1=nn.Linear(6, 8), act=nn.ReLU(), fc2=nn.Linear(8, 4)),
    ("n", 6),
    const("act", [1, 4]),
    stops="it is an output of the model",
)
case("the_output", mlp, ("n", 6), const("fc2", [1]), stops="it is an output of the model")


def tie(module: nn.Module, first: str, second: str) -> nn.Module:
    """Let two modules share a weight."""
    module.get_submodule(second).weight = module.get_submodule(first).weight  # type: ignore[assignment]
    return module


case(
    "tied_twins",  # the shared weight is read as it is by one, without a column by the other
    lambda: tie(
        net(
            lambda m, x: m.a(x) + m.b(m.act(m.c(x))),
            a=nn.Linear(6, 4),
            b=nn.Linear(6, 4),
            act=nn.ReLU(),
            c=nn.Linear(6, 6),
        ),
        "a",
        "b",
    ),
    ("n", 6),
    const("act", [1, 4]),
    shrinks=False,
)
case(
    "tied_embedding",
    lambda: tie(net(lambda m, i: m.head(m.out(m.act(m.up(m.emb(i)))) + m.emb(i)), emb=nn.Embedding(9, 6), up=nn.Linear(6, 8),
                    act=nn.GELU(), out=nn.Linear(8, 6), head=nn.Linear(6, 9, bias=False)), "emb", "head"),
    [Input(("n", "t"), ids=9)],
    const("act", [1, 4]),
    save=True,
)  # fmt: skip
case(
    "tied_embedding_separated",
    lambda: tie(
        net(
            lambda m, i: m.head(m.act(m.emb(i))),
            emb=nn.Embedding(9, 6),
            act=nn.Tanh(),
            head=nn.Linear(6, 9, bias=False),
        ),
        "emb",
        "head",
    ),
    [Input(("n", "t"), ids=9)],
    const("act", [1, 4]),
    shrinks=False,
)
case(
    "embedding_ffn",
    lambda: chain(emb=nn.Embedding(9, 6), up=nn.Linear(6, 8), act=nn.GELU(), out=nn.Linear(8, 4)),
    [Input(("n", "t"), ids=9)],
    const("act", [1, 4]),
    const("emb", [0, 3]),
)


def _called_twice(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return m.fc2(m.act(m.fc1(m.fc0(m.act(m.fc1(x))))))


case(
    "module_called_twice",
    lambda: net(_called_twice, fc0=nn.Linear(8, 6), fc1=nn.Linear(6, 8), act=nn.ReLU(), fc2=nn.Linear(8, 4)),
    ("n", 6),
    const("act@1", [1, 4]),
    shrinks=False,
)
case(
    "module_called_twice_alike",
    lambda: net(_called_twice, fc0=nn.Linear(8, 6), fc1=nn.Linear(6, 8), act=nn.ReLU(), fc2=nn.Linear(8, 4)),
    ("n", 6),
    const("act@0", [1, 4]),
    const("act@1", [1, 4], 0.4),
)
case(
    "shared_bias",  # exporters store equal tensors once
    lambda: net(lambda m, x: m.c(m.g(m.b(m.f(m.a(x) + m.shift) + m.shift))), a=nn.Linear(6, 6), f=nn.ReLU(), b=nn.Linear(6, 6), g=nn.ReLU(),
                c=nn.Linear(6, 4), shift=torch.empty(6)),
    ("n", 6),
    const("g", [1, 4]),
)  # fmt: skip

# ---------------------------------------------------------------- other precisions

for _dtype in (torch.float64, torch.float16, torch.bfloat16):
    _name = str(_dtype).removeprefix("torch.")
    _hosts = ("fx",) if _dtype == torch.bfloat16 else ("fx", "onnx")  # onnxruntime has no bfloat16 kernels on the CPU
    case(f"mlp_{_name}", mlp, ("n", 6), const("act", [1, 4]), dtype=_dtype, hosts=_hosts)
    case(
        f"mlp_affine_{_name}",
        lambda: mlp(bias=False),
        ("n", "t", 6),
        affine("act", [1, 4], [0, 2]),
        dtype=_dtype,
        hosts=_hosts,
    )
case(
    "mixed_precision",
    lambda: net(
        lambda m, x: m.fc2(m.act(m.fc1(x)).double()), fc1=nn.Linear(6, 8), act=nn.ReLU(), fc2=nn.Linear(8, 4).double()
    ),
    ("n", 6),
    const("act", [1, 4]),
    hosts=("fx",),
)
