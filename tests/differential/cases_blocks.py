"""The blocks that networks are made of: residual, gated, squeeze-excite, transformer, mixer, and strangers beside them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from differential.models import Ask, Input, affine, case, chain, const, net, step
from torch import nn

# ---------------------------------------------------------------- residual


class Block(nn.Module):
    """conv-bn-relu-conv-bn, plus the input, relu."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1, self.act1 = (
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        )
        self.conv2, self.bn2, self.act2 = (
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act2(self.bn2(self.conv2(self.act1(self.bn1(self.conv1(x))))) + x)


def resnet() -> nn.Module:
    return chain(
        stem=nn.Conv2d(3, 6, 3, padding=1),
        act=nn.ReLU(),
        b1=Block(6),
        b2=Block(6),
        pool=nn.AdaptiveAvgPool2d(1),
        flat=nn.Flatten(),
        head=nn.Linear(6, 4),
    )


case(
    "resnet",
    resnet,
    ("n", 3, "h", "w"),
    const("b1.act1", [0, 3]),
    affine("b2.act1", [1], [2, 5]),
    dynamic=("", "hnw"),
    save=True,
)
case("resnet_stream", resnet, ("n", 3, "h", "w"), const("b1", [0]), stops="is replaced in these units")


def _residual(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return m.out(m.add(m.a(x), m.c(m.act(m.b(x)))))


def residual() -> nn.Module:
    return net(
        _residual,
        a=nn.Linear(6, 5),
        b=nn.Linear(6, 8),
        act=nn.ReLU(),
        c=nn.Linear(8, 5),
        add=step(torch.add),
        out=nn.Linear(5, 4),
    )


case("residual_sum", residual, ("n", 6), const("add", [1, 3]))
case(
    "residual_all_summands",
    residual,
    ("n", 6),
    const("a", [1, 3]),
    const("c", [1, 3], [0.4, -0.9]),
    dynamic=("", "n"),
    save=True,
)
case("residual_one_summand", residual, ("n", 6), const("a", [1, 3]), stops="is replaced in these units")
case("residual_whole_branch", residual, ("n", 6), Ask("c", "all", [0.5, -0.7, 0.9, 1.1, -1.3], left=0), save=True)
case("residual_whole_hidden", residual, ("n", 6), Ask("act", "all", 0.6, left=0))
case("residual_affine", residual, ("n", 6), affine("a", [1], [3]), stops="its other operand is not a constant")


def _bottleneck_residual(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = m.stem(x)
    return m.head(y + m.conv2(m.act(m.conv1(y))))


case(
    "residual_conv_whole_branch",  # the block becomes a bias
    lambda: net(
        _bottleneck_residual,
        stem=nn.Conv2d(3, 5, 1),
        conv1=nn.Conv2d(5, 7, 3, padding=1),
        act=nn.ReLU(),
        conv2=nn.Conv2d(7, 5, 3, padding=1),
        head=nn.Conv2d(5, 4, 1),
    ),
    ("n", 3, "h", "w"),
    Ask("conv2", "all", [0.5, -0.7, 0.9, 1.1, -1.3], left=0),
)
case("linear_of_pair_sum", lambda: net(lambda m, x, y: m.c(m.f(m.a(x) + m.b(y))), a=nn.Linear(6, 8), b=nn.Linear(5, 8), f=nn.ReLU(), c=nn.Linear(8, 4)),
     [Input(("n", 6)), Input(("n", 5))], const("f", [1, 4]))  # fmt: skip


def _compared(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    h, limit = m.a(x), m.b(x)
    return m.out(torch.where(h > limit, h, 0.3 * h) + torch.where(limit > 0.4, h, -h))


case(
    "compared_with_constants",  # the constants become operands of comparisons and conditions
    lambda: net(_compared, a=nn.Linear(6, 5), b=nn.Linear(6, 5), out=nn.Linear(5, 4)),
    ("n", 6),
    Ask("b", "all", [0.5, -0.7, 0.3, 1.1, -1.3], left=0),
)

# ---------------------------------------------------------------- gates


def _gated(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return m.down(m.mul(m.act(m.gate(x)), m.up(x)))


def gated(width: int = 6, hidden: int = 8, act: nn.Module | None = None) -> nn.Module:
    gate, up, down = (
        nn.Linear(width, hidden, bias=False),
        nn.Linear(width, hidden, bias=False),
        nn.Linear(hidden, width, bias=False),
    )
    return net(_gated, gate=gate, act=act or nn.SiLU(), up=up, mul=step(torch.mul), down=down)


case("gated_product", gated, ("n", "t", 6), const("mul", [1, 4]), dynamic=("", "nt"), save=True)
case("gated_product_affine", lambda: gated(act=nn.GELU()), ("n", "t", 6), affine("mul", [1, 4], [0, 2]))
case("gated_closed_gate", gated, ("n", "t", 6), const("act", [1, 4], 0.0))
case("gated_closed_before", gated, ("n", "t", 6), const("gate", [1, 4], 0.0))
case("gated_closed_up", gated, ("n", "t", 6), const("up", [1, 4], 0.0))
case("gated_both", gated, ("n", "t", 6), const("act", [1, 4]), const("up", [1, 4], [0.8, 1.7]))
case("gated_gate_only", gated, ("n", "t", 6), const("act", [1, 4]), stops="is replaced in these units")


def _fused_gate(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    gate, up = m.gate_up(x).chunk(2, dim=-1)
    return m.down(m.mul(up, m.act(gate)))


case("fused_gate", lambda: net(_fused_gate, gate_up=nn.Linear(6, 16, bias=False), act=nn.SiLU(), mul=step(torch.mul), down=nn.Linear(8, 6, bias=False)),
     ("n", "t", 6), const("mul", [1, 4]), dynamic=("", "nt"), save=True)  # fmt: skip
case("fused_gate_affine", lambda: net(_fused_gate, gate_up=nn.Linear(6, 16, bias=False), act=nn.SiLU(), mul=step(torch.mul), down=nn.Linear(8, 6, bias=False)),
     ("n", "t", 6), affine("mul", [1, 4], [0, 2]))  # fmt: skip
case("fused_gate_closed", lambda: net(_fused_gate, gate_up=nn.Linear(6, 16, bias=False), act=nn.SiLU(), mul=step(torch.mul), down=nn.Linear(8, 6, bias=False)),
     ("n", "t", 6), const("act", [1, 4], 0.0))  # fmt: skip

# ---------------------------------------------------------------- whole networks


class UNet(nn.Module):
    """What the way down finds is read by the next step down and, beside what comes up, by the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.f, self.down = nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        self.b, self.bn, self.g = nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.up, self.c, self.h, self.out = (
            nn.ConvTranspose2d(8, 5, 2, 2),
            nn.Conv2d(11, 7, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(7, 2, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.f(self.a(x))
        return self.out(self.h(self.c(torch.cat([skip, self.up(self.g(self.bn(self.b(self.down(skip)))))], dim=1))))


case(
    "unet",
    UNet,
    ("n", 3, 8, 6),
    const("f", [0, 3]),
    affine("g", [1, 6], [2, 5]),
    const("up", [2]),
    const("h", [4, 6]),
    dynamic=("", "n"),
    save=True,
)


class InvertedResidual(nn.Module):
    """MobileNetV3's block: wider, depthwise, squeeze-excite, narrower, plus the input."""

    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.expand = chain(
            conv=nn.Conv2d(width, wide, 1, bias=False), bn=nn.BatchNorm2d(wide), act=nn.Hardswish(inplace=True)
        )
        self.depthwise = chain(
            conv=nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False),
            bn=nn.BatchNorm2d(wide),
            act=nn.Hardswish(inplace=True),
        )
        self.se = SqueezeExcite(wide)
        self.project = chain(conv=nn.Conv2d(wide, width, 1, bias=False), bn=nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.project(self.se(self.depthwise(self.expand(x))))


case("mobile_net", lambda: chain(stem=nn.Conv2d(3, 4, 3, 2, 1), b0=InvertedResidual(4, 8), b1=InvertedResidual(4, 10), head=nn.Conv2d(4, 3, 1)), ("n", 3, "h", "w"),
     const("b0.depthwise.act", [1, 5], 0.0), const("b1.depthwise.act", [0, 7]), const("b1.se.mul", [0, 7], [0.4, -0.7]), const("b1.se.act", [1]))  # fmt: skip


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

# ---------------------------------------------------------------- squeeze and excite


class SqueezeExcite(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.pool, self.down, self.act = nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, 3, 1), nn.ReLU()
        self.up, self.gate, self.mul = nn.Conv2d(3, width, 1), nn.Sigmoid(), step(torch.mul)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mul(x, self.gate(self.up(self.act(self.down(self.pool(x))))))


def squeeze_excite() -> nn.Module:
    return chain(a=nn.Conv2d(3, 6, 3), f=nn.SiLU(), se=SqueezeExcite(6), b=nn.Conv2d(6, 4, 1))


case("squeeze_excite_zero", squeeze_excite, ("n", 3, "h", "w"), const("f", [1, 4], 0.0), dynamic=("", "hnw"), save=True)
case(
    "squeeze_excite_both", squeeze_excite, ("n", 3, "h", "w"), const("f", [1, 4]), const("se.mul", [1, 4], [0.6, -0.8])
)
case("squeeze_excite_inner", squeeze_excite, ("n", 3, "h", "w"), const("se.act", [1]))
case("squeeze_excite_input", squeeze_excite, ("n", 3, "h", "w"), const("f", [1, 4]), stops="is replaced in these units")
case(
    "squeeze_excite_product",
    squeeze_excite,
    ("n", 3, "h", "w"),
    const("se", [1, 4]),
    stops="the whole value is also read by",
)

# ---------------------------------------------------------------- transformers


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

# ---------------------------------------------------------------- strangers


@torch.library.custom_op("differential::scrambled", mutates_args=())
def scrambled(x: torch.Tensor) -> torch.Tensor:
    return x.flip(-1) * 1.5


scrambled.register_fake(torch.empty_like)

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
    lambda: net(
        lambda m, x: m.b(m.rnn(m.act(m.a(x)))[0]),
        rnn=nn.LSTM(8, 5, batch_first=True),
        a=nn.Linear(6, 8),
        act=nn.ReLU(),
        b=nn.Linear(5, 4),
    ),
    ("n", 4, 6),
    const("act", [1, 4]),
    save=True,
)


def recurrent(rnn: nn.Module) -> nn.Module:
    return net(lambda m, x: m.b(m.rnn(m.act(m.a(x)))[0]), rnn=rnn, a=nn.Linear(6, 8), act=nn.ReLU(), b=nn.Linear(5, 4))


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
