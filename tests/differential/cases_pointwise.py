"""Every activation, and arithmetic with numbers and parameters that broadcast."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from differential.models import affine, case, chain, const, net, step
from torch import nn

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu_inplace": lambda: nn.ReLU(inplace=True),
    "relu6": nn.ReLU6,
    "leaky_relu": lambda: nn.LeakyReLU(0.2),
    "leaky_relu_inplace": lambda: nn.LeakyReLU(0.2, inplace=True),
    "elu": lambda: nn.ELU(0.7),
    "celu": lambda: nn.CELU(1.3),
    "selu": nn.SELU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU("tanh"),
    "silu": nn.SiLU,
    "silu_inplace": lambda: nn.SiLU(inplace=True),
    "hardswish": nn.Hardswish,
    "hardsigmoid": nn.Hardsigmoid,
    "hardtanh": lambda: nn.Hardtanh(-0.5, 1.5),
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "softplus": lambda: nn.Softplus(1.5, 10),
    "mish": nn.Mish,
    "prelu": nn.PReLU,
    "prelu_channels": lambda: nn.PReLU(8),
    "log_sigmoid": nn.LogSigmoid,
    "softsign": nn.Softsign,
    "softshrink": lambda: nn.Softshrink(0.4),
    "hardshrink": lambda: nn.Hardshrink(0.4),
    "tanhshrink": nn.Tanhshrink,
    "threshold": lambda: nn.Threshold(0.3, -0.4),
    "clamp": lambda: step(lambda x: x.clamp(-0.8, 1.1)),
    "clamp_min": lambda: step(lambda x: torch.clamp(x, min=-0.3)),
    "exp": lambda: step(torch.exp),
    "square": lambda: step(torch.square),
    "power": lambda: step(lambda x: x**3),
    "absolute": lambda: step(torch.abs),
    "sine": lambda: step(torch.sin),
    "arc_tangent": lambda: step(torch.atan),
    "swish_by_hand": lambda: step(lambda x: x * torch.sigmoid(x)),
    "erf_gelu_by_hand": lambda: step(lambda x: x * 0.5 * (1.0 + torch.erf(x / 2.0**0.5))),
    "tanh_gelu_by_hand": lambda: step(
        lambda x: 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0))))
    ),
    "quick_gelu_by_hand": lambda: step(lambda x: x * torch.sigmoid(1.702 * x)),
    "hardswish_by_hand": lambda: step(lambda x: x * F.relu6(x + 3.0) / 6.0),
    "mish_by_hand": lambda: step(lambda x: x * torch.tanh(F.softplus(x))),
    "squared_relu": lambda: step(lambda x: torch.square(F.relu(x))),
    "largest_of_two": lambda: step(lambda x: torch.max(0.3 * x, x) - torch.min(x, 0.2 * x)),
    "maximum": lambda: step(lambda x: torch.maximum(0.3 * x, x)),
}
for _name, _make in ACTIVATIONS.items():
    case(
        f"act_{_name}",
        lambda make=_make: chain(fc1=nn.Linear(6, 8), act=make(), fc2=nn.Linear(8, 4)),
        ("n", 6),
        const("fc1", [0, 5], [1.4, -0.6], left=5),
        const("act", [2], [0.8], left=5),
    )
case(
    "prelu_conv",
    lambda: chain(a=nn.Conv2d(3, 6, 3), act=nn.PReLU(6), b=nn.Conv2d(6, 4, 3)),
    ("n", 3, "h", "w"),
    const("a", [0, 5], [-1.4, -0.9]),
)
case(
    "prelu_one_conv",
    lambda: chain(a=nn.Conv2d(3, 6, 3), act=nn.PReLU(1), b=nn.Conv2d(6, 4, 3)),
    ("n", 3, "h", "w"),
    const("a", [0, 5], [-1.4, -0.9]),
)
case(
    "relu_inplace_conv",
    lambda: chain(a=nn.Conv2d(3, 6, 3), bn=nn.BatchNorm2d(6), act=nn.ReLU(inplace=True), b=nn.Conv2d(6, 4, 3)),
    ("n", 3, "h", "w"),
    const("act", [0, 5]),
)
case("glu", lambda: chain(a=nn.Linear(6, 8), act=nn.GLU(), b=nn.Linear(4, 3)), ("n", 6), const("act", [1, 2]))


# ---------------------------------------------------------------- arithmetic


def between(function: Callable[..., torch.Tensor], **parameters: torch.Tensor) -> Callable[[], nn.Module]:
    """fc1, tanh, some arithmetic on its units, fc2."""
    return lambda: net(
        lambda m, x: m.fc2(function(m, m.act(m.fc1(x)))),
        fc1=nn.Linear(6, 8),
        act=nn.Tanh(),
        fc2=nn.Linear(8, 4),
        **parameters,
    )


def vector(*shape: int) -> torch.Tensor:
    return torch.empty(shape)


LINEAR_STEPS: dict[str, Callable[[], nn.Module]] = {
    "scale": between(lambda m, x: x * 2.5),
    "shift": between(lambda m, x: x + 0.7),
    "scale_shift": between(lambda m, x: 0.3 - x * 2.0),
    "divide": between(lambda m, x: x / 0.7),
    "negate": between(lambda m, x: -x),
    "add_alpha": between(lambda m, x: torch.add(x, m.v, alpha=0.6), v=vector(8)),
    "sub_alpha": between(lambda m, x: torch.sub(m.v, x, alpha=0.6), v=vector(8)),
    "rsub": between(lambda m, x: torch.rsub(x, 1.5, alpha=0.5)),
    "vector_scale": between(lambda m, x: x * m.v, v=vector(8)),
    "vector_shift": between(lambda m, x: m.v + x, v=vector(8)),
    "vector_divide": between(lambda m, x: x / m.v, v=vector(8)),
    "row_scale_shift": between(lambda m, x: x * m.v + m.u, v=vector(1, 8), u=vector(1, 8)),
    "one_number": between(lambda m, x: x * m.v + m.u, v=vector(1), u=vector(1)),
    "scalar_parameter": between(lambda m, x: x * m.v - m.u, v=vector(), u=vector()),
    "scaled_twice": between(lambda m, x: (x * m.v) * m.u, v=vector(8), u=vector(8)),
}
for _name, _make in LINEAR_STEPS.items():
    # A parameter that the case randomises may be small, so the constants are large enough to be seen.
    case(f"{_name}", _make, ("n", 6), const("act", [0, 5], left=5), affine("act", [2], [1, 6], left=5))
case("vector_maximum", between(lambda m, x: torch.maximum(x, m.v), v=vector(8)), ("n", 6), const("act", [0, 5]))
case(
    "vector_where",
    between(lambda m, x: torch.where(m.mask, x, m.v), v=vector(8), mask=torch.arange(8) % 3 > 0),
    ("n", 6),
    const("act", [0, 5]),
)
case(
    "masked_by_number",
    between(lambda m, x: torch.where(x > 0, x, -0.5) + torch.where(x > 0.5, 0.25, x)),
    ("n", 6),
    const("act", [0, 5]),
)
case(
    "addcmul",
    between(lambda m, x: torch.addcmul(m.shift, m.scale, x, value=0.6), shift=vector(8), scale=vector(8)),
    ("n", 6),
    const("act", [0, 5]),
)
case(
    "addcmul_affine",
    between(lambda m, x: torch.addcmul(m.shift, m.scale, x), shift=vector(8), scale=vector(8)),
    ("n", 6),
    affine("act", [0, 5], [1, 2]),
)
case(
    "masked_fill",
    between(lambda m, x: x.masked_fill(m.mask, 0.7), mask=torch.arange(8) % 3 > 0),
    ("n", 6),
    const("act", [0, 5]),
)
case("masked", between(lambda m, x: torch.where(x > 0, x, m.v * x), v=vector(8)), ("n", 6), const("act", [0, 5]))
case(
    "channel_scale",
    lambda: net(lambda m, x: m.b(m.act(m.a(x)) * m.gamma + m.beta), a=nn.Conv2d(3, 6, 3), act=nn.ReLU(), b=nn.Conv2d(6, 4, 3, padding=1),
                gamma=vector(6, 1, 1), beta=vector(1, 6, 1, 1)),
    ("n", 3, "h", "w"),
    const("act", [0, 5], left=3),
    affine("act", [2], [1, 3], left=3),
)  # fmt: skip
case(
    "layer_scale",
    lambda: net(
        lambda m, x: x + m.gamma * m.fc2(m.act(m.fc1(x))),
        fc1=nn.Linear(6, 8),
        act=nn.GELU(),
        fc2=nn.Linear(8, 6),
        gamma=vector(6),
    ),
    ("n", "t", 6),
    const("act", [0, 5]),
)
case(
    "position_parameter",  # a parameter that differs by position makes the constants differ by position
    lambda: net(
        lambda m, x: m.b(m.act(m.a(x)) + m.p), a=nn.Linear(6, 8), act=nn.ReLU(), b=nn.Linear(8, 4), p=vector(3, 8)
    ),
    ("n", 3, 6),
    const("act", [0, 5]),
)
case(
    "position_parameter_affine",
    lambda: net(
        lambda m, x: m.b(m.act(m.a(x)) + m.p), a=nn.Linear(6, 8), act=nn.ReLU(), b=nn.Linear(8, 4), p=vector(3, 8)
    ),
    ("n", 3, 6),
    affine("act", [0, 5], [1, 2]),
    stops="its other operand differs by position",
)
case(
    "affine_before_relu",
    lambda: chain(a=nn.Linear(6, 8), act=nn.ReLU(), b=nn.Linear(8, 4)),
    ("n", 6),
    affine("a", [0, 5], [1, 2]),
    stops="it is not an affine function of the replaced units",
)
