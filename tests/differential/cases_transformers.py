"""Transformers and mixers: attention, streams, norms, and what the heads of several layers share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from differential.cases_blocks import gated
from differential.models import Ask, Input, affine, case, chain, const, net, step
from torch import nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, c = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, c))


class TransformerBlock(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(width), Attention(width, 2), nn.LayerNorm(width)
        self.mlp = chain(
            fc1=nn.Linear(width, hidden), act=nn.GELU(), drop=nn.Dropout(0.1), fc2=nn.Linear(hidden, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def transformer() -> nn.Module:
    return chain(
        emb=nn.Embedding(11, 8),
        b0=TransformerBlock(8, 12),
        b1=TransformerBlock(8, 12),
        norm=nn.LayerNorm(8),
        head=nn.Linear(8, 11, bias=False),
    )


case(
    "transformer",
    transformer,
    [Input(("n", "t"), ids=11)],
    const("b0.mlp.act", [1, 4, 9]),
    affine("b1.mlp.act", [0, 7], [2, 5, 11]),
    dynamic=("", "nt"),
    save=True,
)


def _one_key_head(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    n, t, _ = x.shape
    q = m.q(x).view(n, t, 4, 3).transpose(1, 2)
    k, v = m.kv(x).view(n, t, 2, 1, 3).permute(2, 0, 3, 1, 4).unbind(0)
    return m.o(m.heads(F.scaled_dot_product_attention(q, k, v)).transpose(1, 2).reshape(n, t, 12))


case(
    "attention_of_one_key_head",  # which torch broadcasts
    lambda: net(
        _one_key_head, q=nn.Linear(6, 12), kv=nn.Linear(6, 6), heads=step(lambda y: y * 1.0), o=nn.Linear(12, 4)
    ),
    ("n", 5, 6),
    Ask("heads", [1, 3], 0.7, axis=1, left=2),
    hosts=("fx",),
)
case("transformer_whole_mlp", transformer, [Input(("n", "t"), ids=11)], Ask("b0.mlp.fc2", "all", 0.3, left=0))
case(
    "transformer_stream",
    transformer,
    [Input(("n", "t"), ids=11)],
    const("b0", [1]),
    stops="is replaced in these units",
)
case(
    "transformer_streams",  # every writer loses rows, every reader behind a norm columns
    transformer,
    [Input(("n", "t"), ids=11)],
    *(const(site, [1, 3, 6], c) for site, c in (("emb", [0.6, -0.5, 1.3]), ("b0.attn.proj", 0.4), ("b0.mlp.fc2", [0.3, 0.9, -0.8]),
                                              ("b1.attn.proj", [-0.2, 0.5, 0.1]), ("b1.mlp.fc2", 0.7))),
    dynamic=("", "nt"),
    save=True,
)  # fmt: skip
case(
    "transformer_encoder_layer",
    lambda: chain(a=nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, norm_first=True), b=nn.Linear(8, 3)),
    ("n", 4, 8),
    const("a.linear1", [1, 4, 9]),
)


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.token_mlp = chain(fc1=nn.Linear(tokens, 7), act=nn.GELU(), fc2=nn.Linear(7, tokens))
        self.channel_mlp = chain(fc1=nn.Linear(width, 9), act=nn.GELU(), fc2=nn.Linear(9, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.token_mlp(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel_mlp(self.norm2(x))


case(
    "mixer",
    lambda: chain(block=MixerBlock(5, 6), head=nn.Linear(6, 4)),
    ("n", 5, 6),
    const("block.token_mlp.act", [1, 4]),
    affine("block.channel_mlp.act", [0, 8], [2, 3]),
)
case("norm_over_other_axes", lambda: chain(a=nn.Linear(6, 8), act=nn.ReLU(), t=step(lambda x: x.transpose(1, 2)), norm=nn.LayerNorm(3), u=step(lambda x: x.transpose(1, 2)), b=nn.Linear(8, 4)),
     ("n", 3, 6), const("act", [1, 4]))  # fmt: skip
case("norm_over_other_axes_output", lambda: chain(a=nn.Linear(6, 8), t=step(lambda x: x.transpose(1, 2)), norm=nn.LayerNorm(3), u=step(lambda x: x.transpose(1, 2)), b=nn.Linear(8, 4)),
     ("n", 3, 6), const("u", [1, 4]))  # fmt: skip
case("convnext", lambda: net(lambda m, x: x + m.pw2(m.act(m.pw1(m.norm(m.dw(x).permute(0, 2, 3, 1))))).permute(0, 3, 1, 2), dw=nn.Conv2d(6, 6, 3, padding=1, groups=6), norm=nn.LayerNorm(6),
                               pw1=nn.Linear(6, 10), act=nn.GELU(), pw2=nn.Linear(10, 6)), ("n", 6, "h", "w"), const("act", [1, 4]))  # fmt: skip

case(
    "norm_and_units_behind_its_reshape",  # the norm's own numbers stand between those of its units
    lambda: chain(
        a=nn.Linear(6, 8), norm=nn.RMSNorm(8), u=step(lambda x: x[:, None]), b=nn.Linear(8, 4), act=nn.Tanh()
    ),
    ("n", 6),
    const("a", [2, 3, 5, 6]),
    const("u", [3, 5], left=5),
)


class LlamaBlock(nn.Module):
    """RMS norm, attention with two heads for one key, and a gated MLP."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (
            nn.Linear(width, n, bias=False) for n in (width, width // 2, width // 2, width)
        )
        self.mlp = gated(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, c = x.shape
        y = self.norm1(x)
        q, k, v = (p(y).view(n, t, -1, c // 4).transpose(1, 2) for p in (self.q, self.k, self.v))
        k, v = (h[:, :, None].expand(n, 2, 2, t, c // 4).reshape(n, 4, t, c // 4) for h in (k, v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, t, c))
        return x + self.mlp(self.norm2(x))


case("llama", lambda: chain(emb=nn.Embedding(11, 8), b0=LlamaBlock(8, 12), b1=LlamaBlock(8, 12), norm=nn.RMSNorm(8), head=nn.Linear(8, 11, bias=False)), [Input(("n", "t"), ids=11)],
     const("b0.mlp.mul", [1, 4, 9]), affine("b1.mlp.mul", [0, 7], [2, 5, 11]), dynamic=("nt",))  # fmt: skip


def normed(norm: nn.Module) -> nn.Module:
    return chain(a=nn.Linear(6, 8), act=nn.SiLU(), norm=norm, b=nn.Linear(8, 4))


case("rms_norm_zero", lambda: normed(nn.RMSNorm(8)), ("n", "t", 6), const("act", [1, 4, 5], 0.0), save=True)
case(
    "rms_norm_zero_without_weight",
    lambda: normed(nn.RMSNorm(8, eps=0.2, elementwise_affine=False)),
    ("n", 6),
    const("act", [1, 4], 0.0),
)
case(  # behind the norm the units are laid out anew
    "rms_norm_zero_stays",
    lambda: chain(a=nn.Linear(6, 8), act=nn.SiLU(), norm=nn.RMSNorm(8), mix=nn.Softmax(-1), b=nn.Linear(8, 4)),
    ("n", 6),
    const("act", [1, 4], 0.0),
    stops="it mixes the units with each other",
)
case("rms_norm_constant", lambda: normed(nn.RMSNorm(8)), ("n", "t", 6), const("act", [1, 4, 5]), save=True)

# ---------------------------------------------------------------- what the heads of several layers share


class Sloped(nn.Module):
    """Attention whose scores get a bias for each head that grows with distance, made once for all layers (ALiBi)."""

    def __init__(self, heads: int = 4, width: int = 3) -> None:
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(heads * width, 3 * heads * width)
        self.out, self.mix = nn.Linear(heads * width, heads * width), step(torch.matmul)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        scores = torch.softmax(q @ k.transpose(-1, -2) + bias, -1)
        attended: torch.Tensor = self.out(self.mix(scores, v).transpose(1, 2).flatten(2))
        return attended


def _sloped(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    places = torch.arange(x.shape[1], device=x.device)
    bias = m.slopes * (places - places[:, None]).to(x.dtype)
    return m.b(m.a(x, bias), bias)


case(
    "heads_that_share_slopes",  # each layer loses others of them: the slopes are read in part, at run time
    lambda: net(_sloped, a=Sloped(), b=Sloped(), slopes=torch.rand(4, 1, 1)),
    ("n", "t", 12),
    const("a.mix", [0, 2]),
    const("b.mix", [1]),
    dynamic=("", "nt"),
    save=True,
)


def _relative(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = m.act(m.fc(x)).unflatten(-1, (3, 4))
    turned = torch.einsum("bthc,hkc->bthk", y, m.table)
    return m.out(torch.einsum("bthk,hkd->bthd", turned, m.mix).flatten(2))


case(
    "einsum_with_a_batch_letter_and_two_of_its_own",
    lambda: net(_relative, fc=nn.Linear(6, 12), act=nn.ReLU(), table=torch.rand(3, 5, 4), mix=torch.rand(3, 5, 2), out=nn.Linear(6, 4)),
    ("n", "t", 6),
    const("act", [0, 1, 2, 3], 0.0),
    dynamic=("", "nt"),
    shrinks=True,
)  # fmt: skip


def _joined(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    heads = m.act(torch.einsum("bti,hci->bthc", x, m.apart))
    return m.out(torch.einsum("bthc,hco->bto", heads, m.joined))


case(  # onnxruntime's Einsum stays one op, which cannot lose part of two joined letters
    "einsum_over_two_letters",
    lambda: net(_joined, apart=torch.rand(3, 4, 6), act=nn.ReLU(), joined=torch.rand(3, 4, 5), out=nn.Linear(5, 4)),
    ("n", "t", 6),
    const("act", [1], axis=2),
    dynamic=("", "nt"),
    hosts=("fx",),
)


def _repeated(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    shared = m.act(m.fc(x)).unflatten(-1, (3, 4)).repeat_interleave(2, dim=2)
    return m.out((shared * m.scale).flatten(2))


case(
    "repeat_interleave",
    lambda: net(_repeated, fc=nn.Linear(6, 12), act=nn.ReLU(), scale=torch.rand(6, 4), out=nn.Linear(24, 4)),
    ("n", "t", 6),
    const("act", [4, 5, 6, 7], 0.0),
    dynamic=("", "nt"),
)
