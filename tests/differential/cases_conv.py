"""Convolutions: strides, dilations, padding and its borders, groups, transposed ones, batch norm between them."""

from __future__ import annotations

import numpy as np
import torch
from differential.models import Ask, affine, case, chain, const, net
from torch import nn


def two_convs(**options: object) -> nn.Module:
    """A convolution, and one with options that reads it."""
    return chain(a=nn.Conv2d(3, 6, 3), act=nn.ReLU(), b=nn.Conv2d(6, 4, **{"kernel_size": 3, **options}))  # type: ignore[arg-type]


case("conv2d", two_convs, ("n", 3, "h", "w"), const("act", [1, 4]), dynamic=("", "n", "hnw"), save=True)
case("conv2d_no_bias", lambda: two_convs(bias=False), ("n", 3, "h", "w"), const("act", [1, 4]))
case("conv2d_affine", two_convs, ("n", 3, "h", "w"), affine("act", [1, 4], [0, 2]), save=True)
case("conv2d_no_batch", lambda: two_convs(padding=1), (3, 6, 5), const("act", [1, 4]))
case("conv2d_stride", lambda: two_convs(stride=2, kernel_size=2), ("n", 3, "h", "w"), const("act", [1, 4]))
case("conv2d_dilation", lambda: two_convs(dilation=2, kernel_size=2), ("n", 3, "h", "w"), const("act", [1, 4]))
case(
    "conv2d_padding",
    lambda: two_convs(padding=1),
    ("n", 3, "h", "w"),
    const("act", [1, 4]),
    dynamic=("", "n", "hnw"),
    save=True,
)
case("conv2d_padding_zeros", lambda: two_convs(padding=1), ("n", 3, "h", "w"), const("act", [1, 4], 0.0))
case(
    "conv2d_padding_affine",
    lambda: two_convs(padding=1),
    ("n", 3, "h", "w"),
    affine("act", [1, 4], [0, 2]),
    dynamic=("n", "hnw"),
)
case(
    "conv2d_everything",
    lambda: two_convs(kernel_size=(3, 2), stride=(1, 2), padding=(2, 1), dilation=(2, 1)),
    ("n", 3, "h", "w"),
    const("act", [1, 4]),
    dynamic=("", "n", "hnw"),
)
case(
    "conv2d_same",
    lambda: two_convs(padding="same"),
    ("n", 3, "h", "w"),
    const("act", [1, 4]),
    dynamic=("", "hnw"),
    save=True,
)
case(
    "conv2d_same_even",
    lambda: two_convs(padding="same", kernel_size=(2, 4)),
    ("n", 3, "h", "w"),
    const("act", [1, 4]),
    dynamic=("", "hnw"),
)
case(
    "conv2d_same_dilated",
    lambda: two_convs(padding="same", kernel_size=(3, 2), dilation=(2, 3)),
    ("n", 3, "h", "w"),
    affine("act", [1], [3]),
)
case("conv2d_valid", lambda: two_convs(padding="valid"), ("n", 3, "h", "w"), const("act", [1, 4]))
case("conv2d_reflect", lambda: two_convs(padding=1, padding_mode="reflect"), ("n", 3, "h", "w"), const("act", [1, 4]))
case("conv2d_circular", lambda: two_convs(padding=1, padding_mode="circular"), ("n", 3, 6, 5), const("act", [1, 4]))
case("conv2d_1x1_padded", lambda: two_convs(kernel_size=1, padding=1), ("n", 3, "h", "w"), const("act", [1, 4]))
case("conv2d_slab", two_convs, ("n", 3, 6, 5), const("act", [1, 4], np.linspace(-2, 2, 24).reshape(1, 2, 4, 3)))
case(
    "conv2d_slab_padding",
    lambda: two_convs(padding=1, stride=2),
    ("n", 3, 6, 5),
    const("act", [1, 4], np.linspace(-2, 2, 24).reshape(1, 2, 4, 3)),
)
case(
    "conv2d_row_slab",
    lambda: two_convs(padding=1),
    ("n", 3, 6, 5),
    const("act", [1, 4], np.linspace(-2, 2, 8).reshape(1, 2, 4, 1)),
)
case(
    "conv2d_all",
    lambda: two_convs(padding=1),
    ("n", 3, 6, 5),
    Ask("act", "all", 0.7),
    stops="every unit of this output is constant, so nothing would be left of the model",
)
case("conv2d_preactivation", lambda: two_convs(padding=1), ("n", 3, "h", "w"), const("a", [0, 3]), dynamic=("", "hnw"))

# ---------------------------------------------------------------- a channel that carries the constants of a padded convolution


def carrying(
    act: nn.Module | None = None,
    *,
    norm: bool = False,
    bias: bool = True,
    first: nn.Module | None = None,
    **options: object,
) -> nn.Module:
    """Of six channels three stay; with the one that carries the constants they are a block of 4."""
    front = first or nn.Conv2d(3, 6, 3, padding=1, bias=bias)
    second = nn.Conv2d(6, 4, **{"kernel_size": 3, "padding": 1, "bias": bias, **options})  # type: ignore[arg-type]
    between = {"bn": nn.BatchNorm2d(6)} if norm else {}
    behind = {"bn2": nn.BatchNorm2d(4)} if norm else {}
    return chain(a=front, **between, act=act or nn.ReLU(), b=second, **behind)


THREE = [0, 2, 5]
CARRIED = {
    "relu": carrying,
    "bias": lambda: carrying(nn.ReLU6(), bias=False),
    "norm": lambda: carrying(norm=True, bias=False),
    "norm_and_bias": lambda: carrying(nn.LeakyReLU(), norm=True),
    "hard_swish": lambda: carrying(nn.Hardswish()),
    "prelu": lambda: carrying(nn.PReLU(6)),
    "stride": lambda: carrying(stride=2, dilation=(2, 1), padding=(2, 1), kernel_size=(3, 2)),
    "same": lambda: carrying(padding="same", kernel_size=(2, 4)),
    "transposed": lambda: chain(
        a=nn.ConvTranspose2d(3, 6, 3), act=nn.ELU(), b=nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1)
    ),
}
for name, make in CARRIED.items():
    case(
        f"carrier_{name}",
        make,
        ("n", 3, "h", "w"),
        const("act", THREE, left=4),
        dynamic=("", "hnw"),
        save=name in ("relu", "norm"),
    )
case(
    "carrier_affine",
    lambda: carrying(norm=True, bias=False),
    ("n", 3, "h", "w"),
    affine("act", THREE, [1, 4], left=4),
    dynamic=("", "hnw"),
    save=True,
)
case("carrier_half", carrying, ("n", 3, "h", "w"), const("act", THREE, left=4), dtype=torch.float16)
case(
    "carriers_one_after_the_other",
    lambda: chain(
        a=nn.Conv2d(3, 6, 3), act=nn.ReLU(), b=nn.Conv2d(6, 8, 3, padding=1, bias=False), bn=nn.BatchNorm2d(8),
        act2=nn.ReLU(), c=nn.Conv2d(8, 4, 3, padding=1),
    ),
    ("n", 3, "h", "w"),
    const("act", THREE, left=4),
    const("act2", [0, 1, 2, 4, 7], left=4),
    dynamic=("", "hnw"),
)  # fmt: skip
NOT_CARRIED = {
    "silu": lambda: carrying(nn.SiLU()),  # no number passes it without a rounding
    "depthwise": lambda: carrying(first=nn.Sequential(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, groups=6))),
    "pooled": lambda: carrying(nn.Sequential(nn.ReLU(), nn.AvgPool2d(2))),
    "read_twice": lambda: net(
        lambda m, x: (lambda h: m.b(h) + m.c(h))(m.act(m.a(x))),
        a=nn.Conv2d(3, 6, 3), act=nn.ReLU(), b=nn.Conv2d(6, 4, 3, padding=1), c=nn.Conv2d(6, 4, 1),
    ),
}  # fmt: skip
for name, make in NOT_CARRIED.items():
    case(f"no_carrier_{name}", make, ("n", 3, "h", "w"), const("act", THREE), dynamic=("", "hnw"))
case(
    "no_carrier_grouped",
    lambda: grouped(padding=1),
    ("n", 3, "h", "w"),
    const("act", [0, 1, 4, 7]),
)
case(
    "no_carrier_residual",
    lambda: net(
        lambda m, x: m.b(m.act(m.a(x) + m.c(x))),
        a=nn.Conv2d(3, 6, 3), c=nn.Conv2d(3, 6, 3), act=nn.ReLU(), b=nn.Conv2d(6, 4, 3, padding=1),
    ),
    ("n", 3, "h", "w"),
    const("act", THREE),
)  # fmt: skip

case(
    "conv1d",
    lambda: chain(a=nn.Conv1d(3, 6, 3, padding=1), act=nn.GELU(), b=nn.Conv1d(6, 4, 3, 2, 1)),
    ("n", 3, "h"),
    const("act", [1, 4]),
    dynamic=("n", "hn"),
)
case(
    "conv1d_affine",
    lambda: chain(a=nn.Conv1d(3, 6, 3, padding=1), act=nn.GELU(), b=nn.Conv1d(6, 4, 2)),
    ("n", 3, "h"),
    affine("act", [1, 4], [0, 5]),
)
case(
    "conv1d_same",
    lambda: chain(a=nn.Conv1d(3, 6, 3), act=nn.GELU(), b=nn.Conv1d(6, 4, 4, padding="same")),
    ("n", 3, "h"),
    const("act", [1, 4]),
)
case(
    "conv3d",
    lambda: chain(a=nn.Conv3d(2, 6, 2), act=nn.ReLU(), b=nn.Conv3d(6, 3, (2, 3, 1), (1, 2, 1), (1, 0, 1))),
    ("n", 2, "d", "h", "w"),
    const("act", [1, 4]),
    dynamic=("n", "dhnw"),
)
case(
    "conv3d_carried",
    lambda: chain(a=nn.Conv3d(2, 5, 2), act=nn.ReLU(), b=nn.Conv3d(5, 3, (2, 3, 1), (1, 2, 1), (1, 0, 1))),
    ("n", 2, "d", "h", "w"),
    const("act", [1, 4], left=4),
    dynamic=("n", "dhnw"),
)
case(
    "conv3d_affine",
    lambda: chain(a=nn.Conv3d(2, 5, 2), act=nn.ReLU(), b=nn.Conv3d(5, 3, 2, padding=1)),
    ("n", 2, "d", "h", "w"),
    affine("act", [1], [0, 4]),
)

# ---------------------------------------------------------------- transposed

case(
    "deconv2d",
    lambda: chain(a=nn.Conv2d(3, 6, 3), act=nn.ReLU(), b=nn.ConvTranspose2d(6, 4, 3)),
    ("n", 3, "h", "w"),
    const("act", [1, 4]),
    dynamic=("n", "hnw"),
    save=True,
)
case(
    "deconv2d_everything",
    lambda: chain(
        a=nn.Conv2d(3, 6, 3),
        act=nn.ReLU(),
        b=nn.ConvTranspose2d(6, 4, (3, 2), (2, 3), (1, 0), (1, 2), dilation=(2, 1), bias=False),
    ),
    ("n", 3, "h", "w"),
    const("act", [1, 4]),
    dynamic=("n", "hnw"),
)
case(
    "deconv2d_affine",
    lambda: chain(a=nn.Conv2d(3, 6, 3), act=nn.ReLU(), b=nn.ConvTranspose2d(6, 4, 3, 2, 1, 1)),
    ("n", 3, "h", "w"),
    affine("act", [1, 4], [0, 2]),
)
case(
    "deconv2d_grouped",
    lambda: chain(a=nn.Conv2d(3, 6, 3), act=nn.ReLU(), b=nn.ConvTranspose2d(6, 4, 3, 2, 1, groups=2)),
    ("n", 3, "h", "w"),
    const("act", [1, 4]),
)
case(
    "deconv1d",
    lambda: chain(a=nn.ConvTranspose1d(3, 6, 3, 2), act=nn.ReLU(), b=nn.ConvTranspose1d(6, 4, 4, 2, 1)),
    ("n", 3, "h"),
    const("act", [1, 4]),
    dynamic=("n", "hn"),
)
case(
    "deconv3d",
    lambda: chain(a=nn.ConvTranspose3d(2, 6, 2), act=nn.ReLU(), b=nn.ConvTranspose3d(6, 3, 2, (2, 1, 1), (0, 1, 0))),
    ("n", 2, "d", "h", "w"),
    const("act", [1, 4]),
    dynamic=("n", "dhnw"),
)
case(
    "deconv3d_carried",
    lambda: chain(a=nn.ConvTranspose3d(2, 5, 2), act=nn.ReLU(), b=nn.ConvTranspose3d(5, 3, 2, (2, 1, 1), (0, 1, 0))),
    ("n", 2, "d", "h", "w"),
    const("act", [1, 4], left=4),
    dynamic=("n", "dhnw"),
)
case(
    "deconv2d_producer",
    lambda: chain(a=nn.ConvTranspose2d(3, 6, 3, 2, 1, 1), act=nn.ReLU(), b=nn.Conv2d(6, 4, 3)),
    ("n", 3, "h", "w"),
    const("act", [1, 4]),
)

# ---------------------------------------------------------------- groups


def separable(padding: int = 1, multiplier: int = 1, bias: bool = True) -> nn.Module:
    """pointwise, depthwise, pointwise."""
    wide = 6 * multiplier
    return chain(
        a=nn.Conv2d(3, 6, 1),
        f=nn.ReLU6(),
        dw=nn.Conv2d(6, wide, 3, padding=padding, groups=6, bias=bias),
        g=nn.ReLU6(),
        b=nn.Conv2d(wide, 4, 1),
    )


case("depthwise", separable, ("n", 3, 6, 5), const("f", [1, 4]), dynamic=("", "n"), save=True)
case("depthwise_valid", lambda: separable(padding=0), ("n", 3, "h", "w"), const("f", [1, 4]))
case("depthwise_zeros", separable, ("n", 3, "h", "w"), const("f", [1, 4], 0.0))
case("depthwise_output", separable, ("n", 3, "h", "w"), const("g", [1, 4]))
case("depthwise_output_affine", lambda: separable(bias=False), ("n", 3, "h", "w"), affine("g", [1, 4], [0, 2]))
case(
    "depthwise_multiplier",
    lambda: separable(multiplier=2),
    ("n", 3, 6, 5),
    const("f", [1, 4], left=3),
    const("g", [2, 3, 8, 9, 0, 1], left=6),
)
case("depthwise_border_of_any_size", separable, ("n", 3, "h", "w"), const("f", [1, 4]))
case(
    "depthwise_affine",
    separable,
    ("n", 3, "h", "w"),
    affine("f", [1], [2]),
    stops="a unit and its parents are in different groups",
)


def grouped(groups: int = 2, **options: object) -> nn.Module:
    return chain(
        a=nn.Conv2d(3, 8, 3),
        act=nn.ReLU(),
        b=nn.Conv2d(8, 6, 3, groups=groups, **options),
        g=nn.ReLU(),
        c=nn.Conv2d(6, 4, 1),
    )  # type: ignore[arg-type]


case("grouped_equal_counts", grouped, ("n", 3, "h", "w"), const("act", [1, 6]), save=True)
case(
    "grouped_equal_counts_padding",
    lambda: grouped(padding=1),
    ("n", 3, "h", "w"),
    const("act", [1, 3, 6, 7]),
    dynamic=("n", "hnw"),
)
case("grouped_whole_group", lambda: grouped(padding=1), ("n", 3, 6, 5), const("act", [4, 5, 6, 7]))
case(
    "grouped_affine",
    lambda: grouped(padding=1),
    ("n", 3, "h", "w"),
    affine("act", [1], [0, 2], left=6),
    affine("act", [6], [4], left=6),
)
case(
    "grouped_unequal",
    grouped,
    ("n", 3, "h", "w"),
    const("act", [1, 2, 6]),
    stops="its groups would keep different numbers of channels",
)
case("grouped_outputs", grouped, ("n", 3, "h", "w"), const("g", [1, 3]))
case("grouped_whole_outputs", grouped, ("n", 3, "h", "w"), const("g", [0, 1, 2]))

# ---------------------------------------------------------------- batch norm

case(
    "conv_bn_relu_conv",
    lambda: chain(
        a=nn.Conv2d(3, 6, 3, bias=False), bn=nn.BatchNorm2d(6), act=nn.ReLU(), b=nn.Conv2d(6, 4, 3, padding=1)
    ),
    ("n", 3, "h", "w"),
    const("act", [1, 4]),
    dynamic=("", "hnw"),
    save=True,
)
case(
    "conv_bn_conv",
    lambda: chain(a=nn.Conv2d(3, 6, 3), bn=nn.BatchNorm2d(6), b=nn.Conv2d(6, 4, 3, bias=False), bn2=nn.BatchNorm2d(4)),
    ("n", 3, "h", "w"),
    const("bn", [1, 4]),
)
case(
    "padded_conv_before_bn",
    lambda: chain(
        a=nn.Conv2d(3, 6, 3),
        act=nn.ReLU(),
        b=nn.Conv2d(6, 4, 3, padding=1, bias=False),
        bn=nn.BatchNorm2d(4),
        last=nn.ReLU(),
    ),
    ("n", 3, "h", "w"),
    const("act", [1, 4]),
    dynamic=("", "hnw"),
    save=True,
)
case(
    "padded_conv_before_bn_without_scale",
    lambda: chain(
        a=nn.Conv2d(3, 6, 3), act=nn.ReLU(), b=nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1),
        bn=nn.BatchNorm2d(4, affine=False), c=nn.Conv2d(4, 3, 1),
    ),
    ("n", 3, "h", "w"),
    const("act", [1, 4]),
    const("bn", [2]),
    dynamic=("", "hnw"),
)  # fmt: skip
case(
    "padded_conv_of_a_large_size",
    lambda: chain(a=nn.Conv2d(3, 6, 3), act=nn.ReLU(), b=nn.Conv2d(6, 4, 3, padding=1), last=nn.Tanh()),
    ("n", 3, 62, 64),
    const("act", [1, 4]),
    save=True,
)
case(
    "before_bn",
    lambda: chain(a=nn.Conv2d(3, 6, 3), act=nn.ReLU(), bn=nn.BatchNorm2d(6), b=nn.Conv2d(6, 4, 3, padding=1)),
    ("n", 3, "h", "w"),
    const("act", [1, 4]),
    dynamic=("", "hnw"),
)
case(
    "before_bn_affine",
    lambda: chain(a=nn.Conv2d(3, 6, 3), act=nn.ReLU(), bn=nn.BatchNorm2d(6), b=nn.Conv2d(6, 4, 3, padding=1)),
    ("n", 3, "h", "w"),
    affine("act", [1, 4], [0, 2]),
    dynamic=("", "hnw"),
    save=True,
)
case(
    "preactivation_bn",
    lambda: chain(a=nn.Conv2d(3, 6, 3), bn=nn.BatchNorm2d(6, affine=False), act=nn.ReLU(), b=nn.Conv2d(6, 4, 1)),
    ("n", 3, "h", "w"),
    const("act", [1, 4]),
)
case(
    "batch_norm_rows",
    lambda: chain(a=nn.Linear(6, 8), bn=nn.BatchNorm1d(8), act=nn.ReLU(), b=nn.Linear(8, 4)),
    ("n", 6),
    const("act", [1, 4]),
)
case(
    "batch_norm_rows_affine",
    lambda: chain(a=nn.Linear(6, 8), act=nn.ReLU(), bn=nn.BatchNorm1d(8), b=nn.Linear(8, 4)),
    ("n", 6),
    affine("act", [1, 4], [0, 2]),
)
case(
    "batch_norm_sequence",
    lambda: chain(a=nn.Conv1d(3, 6, 3), act=nn.ReLU(), bn=nn.BatchNorm1d(6), b=nn.Conv1d(6, 4, 3)),
    ("n", 3, "h"),
    const("act", [1, 4]),
)

# ---------------------------------------------------------------- to a linear layer, other precisions

case(
    "conv_flatten_linear",
    lambda: chain(a=nn.Conv2d(3, 6, 3), act=nn.ReLU(), flat=nn.Flatten(), b=nn.Linear(6 * 4 * 3, 4)),
    ("n", 3, 6, 5),
    const("act", [1, 4]),
    dynamic=("", "n"),
    save=True,
)
case(
    "conv_flatten_linear_affine",
    lambda: chain(a=nn.Conv2d(3, 6, 3), act=nn.ReLU(), flat=nn.Flatten(), b=nn.Linear(6 * 4 * 3, 4)),
    ("n", 3, 6, 5),
    affine("act", [1, 4], [0, 2]),
    save=True,
)
case(
    "conv_flatten_slab",
    lambda: chain(a=nn.Conv2d(3, 6, 3), act=nn.ReLU(), flat=nn.Flatten(), b=nn.Linear(6 * 4 * 3, 4)),
    ("n", 3, 6, 5),
    const("act", [1, 4], np.linspace(-2, 2, 24).reshape(1, 2, 4, 3)),
)
for _dtype in (torch.float64, torch.float16, torch.bfloat16):
    _name = str(_dtype).removeprefix("torch.")
    case(f"conv_bn_{_name}", lambda: chain(a=nn.Conv2d(3, 6, 3), act=nn.ReLU(), bn=nn.BatchNorm2d(6), b=nn.Conv2d(6, 4, 3, padding=1)),
         ("n", 3, "h", "w"), const("act", [1, 4]), dtype=_dtype, hosts=("fx",))  # fmt: skip


def _conv_by_hand(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.convolution(m.act(m.a(x)), m.w, m.b, [1, 2], [1, 0], [1, 1], False, [0, 0], 1)


case(
    "convolution_function",
    lambda: net(_conv_by_hand, a=nn.Conv2d(3, 6, 3), act=nn.ReLU(), w=torch.empty(4, 6, 3, 2), b=torch.empty(4)),
    ("n", 3, "h", "w"),
    const("act", [1, 4]),
)
