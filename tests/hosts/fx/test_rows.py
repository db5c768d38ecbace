"""The rows of the torch host's table: what the IR makes of an op, in numpy, is what torch computes.

Arguments are such that their defaults, their order and their signs matter.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tolerances import ACROSS_F32
from torch import Tensor, nn
from torch.nn import functional as F

import cmrc
from cmrc.ir.evaluate import evaluate

Function = Callable[..., Tensor]
GENERATOR = torch.Generator().manual_seed(0)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


MATRIX, IMAGE, SERIES, TOKENS = random(5, 6), random(2, 4, 6, 7), random(2, 4, 9), random(2, 3, 8)
W, B, KERNEL, TURNED = random(6, 4), random(4), random(4, 2, 3, 2), random(4, 2, 3, 2)
CHANNELS, SHORT = random(4), random(3, 4, 2)
PLACES = torch.arange(30).reshape(5, 6) ** 2 % 6
HEADS, SERVED = random(2, 6, 5, 8), random(2, 3, 5, 8)


def in_place(x: Tensor) -> Tensor:
    """What is read behind an op that works in place is its result."""
    y = x * 2
    y.relu_()
    return y + 1


ROWS: dict[str, tuple[Function, Tensor]] = {
    # affine
    "linear": (lambda x: F.linear(x, W.T, B), MATRIX),
    "addmm": (lambda x: torch.addmm(B, x, W), MATRIX),
    "matmul": (lambda x: x @ W, MATRIX),
    "conv2d": (lambda x: F.conv2d(x, KERNEL, B, stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2), IMAGE),
    "conv2d same": (lambda x: F.conv2d(x, KERNEL, padding="same", groups=2), IMAGE),
    "conv2d valid": (lambda x: F.conv2d(x, KERNEL, padding="valid", groups=2), IMAGE),
    "conv1d": (lambda x: F.conv1d(x, SHORT, stride=2, padding=1), SERIES),
    "conv_transpose2d": (
        lambda x: F.conv_transpose2d(x, TURNED, CHANNELS, stride=(2, 3), padding=1, output_padding=(1, 0), groups=2), IMAGE,
    ),
    "embedding": (lambda x: F.embedding((x.abs() * 2).long().clamp(max=5), W), MATRIX),
    "index": (lambda x: W[(x.abs() * 2).long().clamp(max=5)], MATRIX),
    "attention": (lambda x: F.scaled_dot_product_attention(x, 1 - x, x * 2, is_causal=True), HEADS),
    "attention with a scale": (lambda x: F.scaled_dot_product_attention(x, x * 2, x, scale=0.3), HEADS),
    "attention of shared heads": (lambda x: F.scaled_dot_product_attention(x, SERVED, SERVED * 2, enable_gqa=True), HEADS),
    # element by element
    **{
        name: (getattr(torch, name), MATRIX)
        for name in ("relu", "sigmoid", "tanh", "erf", "exp", "expm1", "abs", "neg", "sin", "cos", "sign", "floor", "ceil",
                     "round", "square", "selu", "reciprocal")
    },
    **{
        name: (lambda x, name=name: getattr(torch, name)(x.abs() + 0.1), MATRIX)
        for name in ("log", "log1p", "sqrt", "rsqrt")
    },
    **{name: (getattr(F, name), MATRIX * 3) for name in ("silu", "mish", "hardswish", "hardsigmoid", "logsigmoid", "relu6")},
    "gelu": (F.gelu, MATRIX),
    "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), MATRIX),
    "add alpha": (lambda x: torch.add(x, CHANNELS[:, None, None], alpha=0.3), IMAGE),
    "sub alpha": (lambda x: torch.sub(x, CHANNELS[:, None, None], alpha=0.3), IMAGE),
    "rsub": (lambda x: torch.rsub(x, CHANNELS[:, None, None], alpha=0.3), IMAGE),
    "addcmul": (lambda x: torch.addcmul(x, x * 2, CHANNELS[:, None, None], value=0.3), IMAGE),
    "div": (lambda x: CHANNELS[:, None, None] / x, IMAGE),
    "pow": (lambda x: x**3, MATRIX),
    "fmod": (lambda x: torch.fmod(x, 0.7), MATRIX),
    "maximum": (lambda x: torch.maximum(x, 0.5 - x), MATRIX),
    "minimum": (lambda x: torch.minimum(x, 0.5 - x), MATRIX),
    "compared": (lambda x: (x > 0.2).float() + 2 * (x <= -0.3).float() + 4 * (x.round() == 1).float(), MATRIX),
    "where": (lambda x: torch.where(x > 0, x * 2, x - 1), MATRIX),
    "masked_fill": (lambda x: x.masked_fill(x > 0.5, -7.0), MATRIX),
    "clamp": (lambda x: x.clamp(-0.5, 0.3), MATRIX),
    "clamp_min": (lambda x: x.clamp_min(-0.5), MATRIX),
    "clamp_max": (lambda x: x.clamp_max(0.3), MATRIX),
    "hardtanh": (lambda x: F.hardtanh(x, -0.4, 0.6), MATRIX),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.2), MATRIX),
    "prelu": (lambda x: F.prelu(x, CHANNELS), IMAGE),
    "elu": (lambda x: F.elu(x, 0.7), MATRIX),
    "celu": (lambda x: F.celu(x, 0.7), MATRIX),
    "softplus": (lambda x: F.softplus(x, 2.0, 1.5), MATRIX),
    "softshrink": (lambda x: F.softshrink(x, 0.3), MATRIX),
    "hardshrink": (lambda x: F.hardshrink(x, 0.3), MATRIX),
    "threshold": (lambda x: F.threshold(x, 0.2, -3.0), MATRIX),
    "cast": (lambda x: (x * 3).to(torch.int64).to(torch.float32), MATRIX),
    "batch_norm": (
        lambda x: F.batch_norm(x, CHANNELS, CHANNELS**2 + 0.5, CHANNELS * 2, CHANNELS - 1, eps=0.1), IMAGE,
    ),
    # along axes
    "mean": (lambda x: x.mean((1, 3)), IMAGE),
    "mean of all": (lambda x: x.mean(), IMAGE),
    "sum": (lambda x: x.sum(-2, keepdim=True), IMAGE),
    "amax": (lambda x: x.amax(2), IMAGE),
    "amin": (lambda x: x.amin((0, 2)), IMAGE),
    "max": (lambda x: x.max(1).values, IMAGE),
    "softmax": (lambda x: x.softmax(1), IMAGE),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), IMAGE),
    "max_pool2d of ceil": (lambda x: F.max_pool2d(x, (2, 3), (2, 2), (1, 0), ceil_mode=True), IMAGE),
    "max_pool2d dilated": (lambda x: F.max_pool2d(x, 2, 1, dilation=(2, 1)), IMAGE),
    "max_pool1d": (lambda x: F.max_pool1d(x, 3), SERIES),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, (2, 3)), IMAGE),
    "avg_pool2d padded": (lambda x: F.avg_pool2d(x, 3, 2, 1), IMAGE),
    "avg_pool2d uncounted": (lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), IMAGE),
    "avg_pool2d divided": (lambda x: F.avg_pool2d(x, 3, 2, divisor_override=5), IMAGE),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 1), IMAGE),
    "layer_norm": (lambda x: F.layer_norm(x, (8,), TOKENS[0, 0], TOKENS[0, 1], 0.1), TOKENS),
    "layer_norm of two axes": (lambda x: F.layer_norm(x, (3, 8), eps=0.1), TOKENS),
    "rms_norm": (lambda x: F.rms_norm(x, (8,), TOKENS[0, 0], 0.1), TOKENS),
    "rms_norm by default": (lambda x: F.rms_norm(x * 1e-3, (8,)), TOKENS),
    "instance_norm": (lambda x: F.instance_norm(x, weight=CHANNELS, bias=CHANNELS * 2, eps=0.1), IMAGE),
    "pad": (lambda x: F.pad(x, (1, 0, 0, 2), value=0.7), IMAGE),
    "pad of channels": (lambda x: F.pad(x, (0, 0, 1, 2, 2, 1)), IMAGE),
    "pick": (lambda x: x.select(1, -2), IMAGE),
    "gather": (lambda x: x.gather(1, PLACES), MATRIX),
    "index_select": (lambda x: x.index_select(3, PLACES[0] % 7), IMAGE),
    "repeat": (lambda x: x.repeat(2, 3), MATRIX),
    "unbind": (lambda x: x.unbind(1)[2], IMAGE),
    # layout
    "view": (lambda x: x.view(2, 2, -1, 7), IMAGE),
    "flatten": (lambda x: x.flatten(1, 2), IMAGE),
    "unflatten": (lambda x: x.unflatten(1, (2, 2)), IMAGE),
    "squeeze": (lambda x: x[:, :1].squeeze(1), IMAGE),
    "unsqueeze": (lambda x: x.unsqueeze(-2), IMAGE),
    "expand": (lambda x: x[:, :1].expand(-1, 3, -1, -1), IMAGE),
    "permute": (lambda x: x.permute(2, 0, -1, 1), IMAGE),
    "transpose": (lambda x: x.transpose(1, -1), IMAGE),
    "swapaxes": (lambda x: x.swapaxes(0, 2), IMAGE),
    "t": (lambda x: x.t(), MATRIX),
    "mT": (lambda x: x.mT, IMAGE),
    "movedim": (lambda x: x.movedim((0, 3), (2, 0)), IMAGE),
    "cat": (lambda x: torch.cat([x, x * 2, x[:, :1]], -3), IMAGE),
    "stack": (lambda x: torch.stack([x, x * 2], -1), MATRIX),
    "slice": (lambda x: x[:, -3:, 1:6:2], IMAGE),
    "narrow": (lambda x: x.narrow(2, 1, 3), IMAGE),
    "split": (lambda x: x.split(3, 2)[1], IMAGE),
    "split, the last": (lambda x: x.split(4, 2)[-1], IMAGE),
    "split to sizes": (lambda x: x.split([1, 4, 2], 3)[1], IMAGE),
    "chunk": (lambda x: x.chunk(3, -1)[1], IMAGE),
    "full": (lambda x: x + torch.full((6, 7), 0.3), IMAGE),
    "zeros_like": (lambda x: x + torch.zeros_like(x), IMAGE),
    "ones_like": (lambda x: x * torch.ones_like(x[:, :1]), IMAGE),
    "full_like": (lambda x: x + torch.full_like(x, 0.3), IMAGE),
    # spelled out
    "glu": (lambda x: F.glu(x, 1), IMAGE),
    "weight_norm": (lambda x: F.linear(x, torch._weight_norm(W.T.contiguous(), CHANNELS[:, None], 0)), MATRIX),
    "zeros and ones": (lambda x: x * torch.zeros(7) + torch.ones(6, 1), IMAGE),
    "in place": (in_place, MATRIX),
    "dropout": (lambda x: F.dropout(x, 0.5, training=False), MATRIX),
}  # fmt: skip


class Around(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize("name", ROWS)
def test_a_row_means_what_torch_computes(name: str) -> None:
    function, x = ROWS[name]
    program = cmrc.trace(Around(function).eval(), (x,))
    assert not [node.kind for node in program.graph.nodes if node.op == "opaque" and not node.marks.shape_only]
    values = evaluate(program.graph, {program.graph.inputs[0].name: x.numpy()})
    (output,) = program.graph.outputs
    expected = function(x).numpy()
    assert values[output].shape == expected.shape
    scale = max(float(np.abs(expected).max()), 1e-6)
    np.testing.assert_allclose(values[output], expected, rtol=0, atol=ACROSS_F32 * scale)


@pytest.mark.parametrize(
    "function",
    [lambda x: torch.addmm(B, x, W, beta=0.5), lambda x: torch.addmm(B, x, W, alpha=2.0), lambda x: torch.sort(x)[0]],
)
def test_a_form_that_has_no_row_is_opaque(function: Function) -> None:
    program = cmrc.trace(Around(function).eval(), (MATRIX,))
    assert program.graph.nodes[0].op == "opaque"


class Projected(nn.Module):
    def __init__(self, function: Function, width: int) -> None:
        super().__init__()
        self.function, self.project = function, nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.project(self.function(x))
        return projected


@pytest.mark.parametrize(
    ("function", "rows", "width"),
    [
        (lambda x: x.view(-1, 5, 2).transpose(1, 2).reshape(2, -1), 5, 5),  # its width is rows // (rows // 5)
        (lambda x: x.view(-1, 5, 5, 2).transpose(1, 3), 25, 5),  # of its rows // 25 torch knows that it is 1
    ],
    ids=["width", "samples"],
)
def test_a_size_that_only_torch_knows_to_fit_leaves_a_linear_op_whole(
    function: Function, rows: int, width: int
) -> None:
    module, x = Projected(function, width).eval(), random(rows, 2)
    exported = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    assert cmrc.trace(exported).graph.nodes[-1].op == "opaque"


def test_what_always_drops_is_a_barrier() -> None:
    (node,) = cmrc.trace(Around(lambda x: F.dropout(x, 0.5, training=True)).eval(), (MATRIX,)).graph.nodes
    assert (node.op, node.marks.why) == ("opaque", "it drops at random: trace the model in eval mode")
