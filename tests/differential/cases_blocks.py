"""The blocks that networks are made of: residual, gated, squeeze-excite; and networks of them."""

from __future__ import annotations

import torch
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
