"""Over positions: pooling, resizing, padding, norms, dropout, softmax."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from differential.models import affine, case, chain, const, net, step
from torch import nn


def around(middle: nn.Module, wide: int = 4, kernel: int = 1, act: nn.Module | None = None) -> nn.Module:
    """A convolution, something over its positions, a convolution."""
    return chain(a=nn.Conv2d(3, 6, 3), act=act or nn.ReLU(), middle=middle, b=nn.Conv2d(6, wide, kernel))


IMAGE = ("n", 3, "h", "w")

# ---------------------------------------------------------------- pooling

POOLS: dict[str, tuple[Callable[[], nn.Module], bool]] = {  # with whether it is linear
    "max_pool": (lambda: nn.MaxPool2d(2), False),
    "max_pool_padded": (lambda: nn.MaxPool2d(3, 2, 1), False),
    "max_pool_ceil": (lambda: nn.MaxPool2d((2, 3), (2, 1), (1, 1), ceil_mode=True), False),
    "max_pool_dilated": (lambda: nn.MaxPool2d(2, 1, dilation=2), False),
    "avg_pool": (lambda: nn.AvgPool2d(2, 1), True),
    "avg_pool_ceil": (lambda: nn.AvgPool2d(3, 2, ceil_mode=True), True),
    "avg_pool_uncounted": (lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), True),
    "adaptive_avg_one": (lambda: nn.AdaptiveAvgPool2d(1), True),
    "global_mean": (lambda: step(lambda x: x.mean((2, 3), keepdim=True)), True),
    "global_max": (lambda: step(lambda x: torch.amax(x, dim=(-2, -1), keepdim=True)), False),
}
for _name, (_make, _linear) in POOLS.items():
    case(
        _name,
        lambda make=_make: around(make()),
        IMAGE,
        const("act", [1, 4]),
        dynamic=("n", "hnw") if _name in ("max_pool", "avg_pool_uncounted") else ("hnw",),
    )
    if _linear:
        case(f"{_name}_affine", lambda make=_make: around(make()), IMAGE, affine("act", [1, 4], [0, 2]), dynamic=("n",))
# Here the constants become different near the border: the size must be known.
for _name, _make in {
    "avg_pool_counted": lambda: nn.AvgPool2d(3, 2, 1),
    "avg_pool_counted_ceil": lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True),
    "sum_over_positions": lambda: step(lambda x: x.sum((2, 3), keepdim=True)),
}.items():  # fmt: skip
    case(_name, lambda make=_make: around(make()), ("n", 3, 6, 5), const("act", [1, 4]))
    case(f"{_name}_affine", lambda make=_make: around(make()), ("n", 3, 6, 5), affine("act", [1, 4], [0, 2]))
# torch.onnx.export loses the divisor.
case(
    "avg_pool_divisor",
    lambda: around(nn.AvgPool2d(2, divisor_override=3)),
    ("n", 3, 6, 5),
    const("act", [1, 4], left=3),
    affine("act", [2], [0, 3], left=3),
    hosts=("fx",),
)
case(
    "avg_pool_counted_any_size",
    lambda: around(nn.AvgPool2d(3, 2, 1)),
    IMAGE,
    const("act", [1, 4]),
    dynamic=("hnw",),
    stops="the constant would differ by position",
)
# Zeros stay zeros beside the zeros of the padding, and nowhere else.
case(
    "avg_pool_counted_zeros",
    lambda: around(nn.AvgPool2d(3, 2, 1)),
    IMAGE,
    const("act", [1, 4], [0.0, 0.0]),
    dynamic=("hnw",),
)
case(
    "zeros_beside_a_padded_number",
    lambda: around(nn.ConstantPad2d(1, 0.7)),
    ("n", 3, 6, 5),
    const("act", [1, 4], [0.0, 0.0]),
)
case("adaptive_avg", lambda: around(nn.AdaptiveAvgPool2d((2, 1))), ("n", 3, 6, 5), const("act", [1, 4]))
case("adaptive_avg_affine", lambda: around(nn.AdaptiveAvgPool2d((2, 3))), ("n", 3, 6, 5), affine("act", [1, 4], [0, 2]))
case(  # windows that overlap: ONNX has them as positions that GatherND picks
    "adaptive_avg_overlapping",
    lambda: around(nn.AdaptiveAvgPool2d((3, 2))),
    ("n", 3, 6, 7),
    const("act", [1, 4], [0.5, -1.0], left=3),
    affine("act", [2], [0], left=3),
)
case("adaptive_avg_larger", lambda: around(nn.AdaptiveAvgPool2d(5)), ("n", 3, 4, 4), const("act", [1, 4]))


def _response(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Each channel times its norm over positions, relative to the mean of all channels' norms."""
    h = m.act(m.a(x))
    norm = m.norm(h)
    result: torch.Tensor = m.b(m.mul(h, norm / (norm.mean(1, keepdim=True) + 0.1)))
    return result


case(
    "response_norm",
    lambda: net(
        _response,
        a=nn.Conv2d(3, 6, 3),
        act=nn.ReLU(),
        norm=step(lambda x: torch.linalg.vector_norm(x, dim=(2, 3), keepdim=True)),
        mul=step(torch.mul),
        b=nn.Conv2d(6, 4, 1),
    ),
    ("n", 3, 6, 5),
    const("norm", [1, 4], [0.7, 1.9]),
    const("mul", [1, 4]),
)
case("adaptive_max", lambda: around(nn.AdaptiveMaxPool2d((2, 1))), ("n", 3, 6, 5), const("act", [1, 4]))
case(
    "max_pool_1d",
    lambda: chain(a=nn.Conv1d(3, 6, 3), act=nn.ReLU(), pool=nn.MaxPool1d(2), b=nn.Conv1d(6, 4, 1)),
    ("n", 3, 8),
    const("act", [1, 4]),
)
case(
    "avg_pool_1d_affine",
    lambda: chain(a=nn.Conv1d(3, 6, 3), act=nn.ReLU(), pool=nn.AvgPool1d(2), b=nn.Conv1d(6, 4, 1)),
    ("n", 3, "h"),
    affine("act", [1, 4], [0, 2]),
)
case(
    "pool_3d",
    lambda: chain(
        a=nn.Conv3d(2, 5, 2), act=nn.ReLU(), p=nn.MaxPool3d(2, 1), q=nn.AvgPool3d(2, 1), b=nn.Conv3d(5, 3, 1)
    ),
    ("n", 2, 4, 6, 5),
    const("act", [1, 4]),
)
case(
    "pool_flatten_linear",
    lambda: chain(
        a=nn.Conv2d(3, 6, 3), act=nn.ReLU(), pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(1), b=nn.Linear(6, 4)
    ),
    IMAGE,
    const("act", [1, 4], left=3),
    affine("act", [2], [0, 3], left=3),
    dynamic=("", "hnw"),
    save=True,
)
case(
    "mean_squeeze_linear",
    lambda: chain(a=nn.Conv2d(3, 6, 3), act=nn.ReLU(), mean=step(lambda x: x.mean(dim=[2, 3])), b=nn.Linear(6, 4)),
    IMAGE,
    const("act", [1, 4]),
)
case(
    "token_mean",
    lambda: chain(a=nn.Linear(6, 8), act=nn.ReLU(), mean=step(lambda x: x.mean(1)), b=nn.Linear(8, 4)),
    ("n", "t", 6),
    affine("act", [1, 4], [0, 2]),
)
case(
    "slab_through_pooling",
    lambda: around(nn.AvgPool2d(2, 1)),
    ("n", 3, 6, 5),
    const("act", [1, 4], np.linspace(-2, 2, 24).reshape(1, 2, 4, 3)),
)
case(
    "slab_through_max",
    lambda: around(nn.MaxPool2d(2, 1, 1)),
    ("n", 3, 6, 5),
    const("act", [1, 4], np.linspace(-2, 2, 24).reshape(1, 2, 4, 3)),
)

# ---------------------------------------------------------------- resizing, padding, norms over positions

for _mode in ("nearest", "bilinear", "bicubic"):
    _corners = {} if _mode == "nearest" else {"align_corners": _mode == "bicubic"}
    case(
        f"upsample_{_mode}",
        lambda mode=_mode, more=_corners: around(nn.Upsample(scale_factor=2, mode=mode, **more)),
        IMAGE,
        const("act", [1, 4]),
    )
    case(
        f"upsample_{_mode}_affine",
        lambda mode=_mode, more=_corners: around(nn.Upsample(size=(7, 4), mode=mode, **more)),
        ("n", 3, 6, 5),
        affine("act", [1, 4], [0, 2]),
    )
case(
    "interpolate_linear",
    lambda: chain(
        a=nn.Conv1d(3, 6, 3), act=nn.ReLU(), up=nn.Upsample(scale_factor=3, mode="linear"), b=nn.Conv1d(6, 4, 1)
    ),
    ("n", 3, "h"),
    const("act", [1, 4]),
    hosts=("fx",),
)
case("zero_pad", lambda: around(nn.ZeroPad2d((1, 0, 2, 1)), kernel=3), ("n", 3, 6, 5), const("act", [1, 4]))
case(
    "zero_pad_affine",
    lambda: around(nn.ZeroPad2d((1, 0, 2, 1)), kernel=3),
    ("n", 3, 6, 5),
    affine("act", [1, 4], [0, 2]),
)
case("zero_pad_zeros", lambda: around(nn.ZeroPad2d((1, 0, 2, 1)), kernel=3), IMAGE, const("act", [1, 4], 0.0))
case("constant_pad", lambda: around(nn.ConstantPad2d(1, 0.9), kernel=3), ("n", 3, 6, 5), const("act", [1, 4]))
case("crop_pad", lambda: around(step(lambda x: F.pad(x, (-1, 0, 0, -1)))), IMAGE, const("act", [1, 4]))
case("reflection_pad", lambda: around(nn.ReflectionPad2d(1), kernel=3), IMAGE, const("act", [1, 4]))
case(
    "replication_pad", lambda: around(nn.ReplicationPad2d((1, 2, 0, 1)), kernel=3), IMAGE, affine("act", [1, 4], [0, 2])
)
case("instance_norm", lambda: around(nn.InstanceNorm2d(6, affine=True)), IMAGE, const("act", [1, 4]))
case(
    "instance_norm_output",
    lambda: around(nn.Sequential(nn.InstanceNorm2d(6, affine=True), nn.ReLU())),
    IMAGE,
    const("middle", [1, 4]),
)
case(
    "instance_norm_affine",
    lambda: around(nn.InstanceNorm2d(6, affine=True)),
    ("n", 3, 6, 5),
    affine("act", [1, 4], [0, 2]),
    stops="it is not an affine function of the replaced units",
)
# Of a group some units, all, or none are constant: means and variances over known numbers and those that are left.
EVERY = [4, 5, 6, 7]  # the second of three groups
for _name, _norm, _ask, _size in (
    ("group_norm", lambda: nn.GroupNorm(3, 12), const("act", [1, 2, 4, 5, 9]), ("h", "w")),
    ("group_norm_equal", lambda: nn.GroupNorm(3, 12), const("act", [1, 2, 4, 5, 9], 0.4), (6, 5)),
    ("group_norm_of_one", lambda: nn.GroupNorm(1, 12, eps=0.1), const("act", [1, 2, 4]), (6, 5)),
    ("group_norm_bare", lambda: nn.GroupNorm(2, 12, affine=False), const("act", [1, 2, 7, 8]), (6, 5)),
    ("group_norm_mixed", lambda: nn.GroupNorm(3, 12), const("act", [*EVERY, 8]), (6, 5)),
):
    case(
        _name,
        lambda norm=_norm: chain(a=nn.Conv2d(3, 12, 3), act=nn.ReLU(), norm=norm(), b=nn.Conv2d(12, 4, 3, padding=1)),
        ("n", 3, *_size),
        _ask,
        dynamic=("", "hnw") if _name == "group_norm" else ("n",),
        save=_name == "group_norm",
    )
case(
    "group_norm_vectors",
    lambda: chain(a=nn.Linear(6, 12), act=nn.ReLU(), norm=nn.GroupNorm(3, 12), b=nn.Linear(12, 4)),
    ("n", 6),
    const("act", [1, 2, 4, 5, 9]),
)


def grouped() -> nn.Module:
    """A group norm before an activation: whole groups alone."""
    return chain(a=nn.Conv1d(3, 12, 3), norm=nn.GroupNorm(3, 12), act=nn.SiLU(), b=nn.Conv1d(12, 4, 1))


case("group_norm_whole", grouped, ("n", 3, "t"), const("a", EVERY), dynamic=("", "nt"))
case("group_norm_read_whole", grouped, ("n", 3, "t"), const("act", EVERY), dynamic=("", "nt"))
case(
    "group_norm_in_part", grouped, ("n", 3, 8), const("a", [1, 4]), stops="not an affine function of the replaced units"
)
case("group_norm_read", grouped, ("n", 3, 8), const("act", [1, 4]), stops="only whole groups can go", hosts=("fx",))


def normed(norm: nn.Module) -> nn.Module:
    return chain(a=nn.Linear(6, 8), act=nn.SiLU(), norm=norm, b=nn.Linear(8, 4))


case(
    "layer_norm",
    lambda: normed(nn.LayerNorm(8)),
    ("n", "t", 6),
    const("act", [1, 4, 6]),
    dynamic=("", "nt"),
    save=True,
)
case("layer_norm_equal", lambda: normed(nn.LayerNorm(8, eps=0.1)), ("n", 6), const("act", [0, 3], 0.7))
case("layer_norm_zero", lambda: normed(nn.LayerNorm(8, bias=False)), ("n", 6), const("act", [0, 7], 0.0))
case("layer_norm_all_but_one", lambda: normed(nn.LayerNorm(8)), ("n", 6), const("act", [0, 1, 2, 4, 5, 6, 7]))
case(
    "layer_norm_half",
    lambda: normed(nn.LayerNorm(8, elementwise_affine=False)),
    ("n", 6),
    const("act", [1, 4, 6]),
    dtype=torch.float16,
)
case(
    "layer_norm_of_pixels",  # behind the norm the units go through a layout
    lambda: net(
        lambda m, x: m.b(m.norm(m.act(m.a(x)).flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, (6, 5))),
        a=nn.Conv2d(3, 8, 1),
        act=nn.SiLU(),
        norm=nn.LayerNorm(8),
        b=nn.Conv2d(8, 4, 1),
    ),
    ("n", 3, 6, 5),
    const("act", [1, 4, 6]),
)
case(
    "layer_norm_by_position",
    lambda: net(
        lambda m, x: m.b(m.norm(m.act(m.a(x)) + m.place)),
        a=nn.Linear(6, 8),
        act=nn.SiLU(),
        place=torch.empty(4, 8),
        norm=nn.LayerNorm(8),
        b=nn.Linear(8, 4),
    ),
    ("n", 4, 6),
    const("act", [1, 4, 6]),
    stops="the constants differ by position, so two numbers cannot represent them",
)
case(
    "layer_norm_as_output",
    lambda: chain(a=nn.Linear(6, 8), act=nn.SiLU(), norm=nn.LayerNorm(8)),
    ("n", 6),
    const("act", [1, 4, 6]),
    stops="it is an output of the model",
)
case(
    "dropout",
    lambda: chain(a=nn.Linear(6, 8), act=nn.ReLU(), drop=nn.Dropout(0.4), b=nn.Linear(8, 4)),
    ("n", 6),
    const("act", [1, 4], left=5),
    affine("drop", [2], [0, 3], left=5, onnx_site="act"),
)
case("channel_dropout", lambda: around(nn.Dropout2d(0.3)), IMAGE, const("act", [1, 4]))
case(
    "softmax_over_positions",
    lambda: chain(a=nn.Linear(6, 8), soft=nn.Softmax(1), b=nn.Linear(8, 4)),
    ("n", 4, 6),
    const("a", [1, 4]),
)
case(
    "softmax_over_units",
    lambda: chain(a=nn.Linear(6, 8), soft=nn.Softmax(-1), b=nn.Linear(8, 4)),
    ("n", 4, 6),
    const("a", [1, 4]),
    stops="it mixes the units with each other",
)
