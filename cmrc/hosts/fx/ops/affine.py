"""Rows of ops that mix units by a weight: linear, convolution, attention, embedding."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from cmrc.hosts.fx.ops.row import Barrier, Read, integers, row
from cmrc.hosts.fx.schema import Arguments
from cmrc.ir.graph import Marks
from cmrc.ir.ops.layout import HIDDEN_UNITS

TAKES_BIAS = Marks(takes_bias=True)
# Ops that only turn a matrix, and the arguments of a product that may be one: a product with w.t() is linear in w.
TURNS = ("t", "transpose", "permute")
FACTORS = {"matmul": (1, 0), "mm": (1, 0), "addmm": (2,)}


@row("linear")
def read_linear(a: Arguments) -> Read | None:
    # A size may be an expression that torch knows to be equal, and the IR does not.
    if a.shape(0) != (*a.out_shape()[:-1], *a.shape("weight")[-1:]):
        return None
    return Read("linear", (0, 1, 2), {"axis": a.rank() - 1, "w_in": 1, "w_out": 0}, TAKES_BIAS)


@row("addmm")
def read_addmm(a: Arguments) -> Read | None:
    if a["beta"] != 1 or a["alpha"] != 1:
        return None
    return Read("linear", (1, 2, 0), {"axis": 1, "w_in": 0, "w_out": 1}, TAKES_BIAS)


@row("matmul", "mm", "bmm")
def read_matmul(_: Arguments) -> Read:
    return Read("matmul", (0, 1))


@row("conv1d", "conv2d", "conv3d", "conv1d.padding", "conv2d.padding", "conv3d.padding")
def read_conv(a: Arguments) -> Read | None:
    return _conv(a, transposed=False)


@row("conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input")
def read_conv_transpose(a: Arguments) -> Read | None:
    return _conv(a, transposed=True)


@row("convolution")
def read_convolution(a: Arguments) -> Read | None:
    return _conv(a, transposed=bool(a["transposed"]))


def _conv(a: Arguments, *, transposed: bool) -> Read | None:
    rank = a.rank("weight") - 2
    if rank < 1 or not isinstance(a.shape("weight")[0], int) or not isinstance(a.shape(0)[-rank - 1], int):
        return None
    kernel = [int(k) for k in a.shape("weight")[2:]]
    dilation = integers(a["dilation"], rank)
    attrs: dict[str, Any] = {
        "axis": a.rank() - rank - 1,
        "stride": integers(a["stride"], rank),
        "pad": _pads(a["padding"], kernel, dilation),
        "dilation": dilation,
        "groups": int(a["groups"]),
    }
    if transposed:
        attrs |= {"transposed": True, "output_padding": integers(a["output_padding"], rank)}
    return Read("conv", (0, 1, 2), attrs, TAKES_BIAS)


def _pads(padding: Any, kernel: list[int], dilation: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    return tuple((p, p) for p in ((0,) * len(kernel) if padding == "valid" else integers(padding, len(kernel))))


@row("scaled_dot_product_attention")
def read_attention(a: Arguments) -> Read | Barrier:
    if a["dropout_p"]:
        return Barrier("it drops at random: trace the model in eval mode")
    if a["scale"] is None and not isinstance(a.shape("query")[-1], int):
        return Barrier("its scale follows from a dynamic size")
    scale = float(a["scale"]) if a["scale"] is not None else 1.0 / math.sqrt(int(a.shape("query")[-1]))
    served = {a.shape(name)[-3] for name in ("key", "value")} if a.rank("query") > 2 else set()
    if served and served != {a.shape("query")[-3]} and served != {1} and not a["enable_gqa"]:
        return Barrier("its heads are broadcast")
    return Read("attention", (0, 1, 2, 3), {"scale": scale, "causal": bool(a["is_causal"])})


@row("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input")
def read_recurrent(a: Arguments) -> Barrier:
    """One layer (clean.py takes several apart), with a matrix for x and one for the hidden state per direction."""
    directions, weights, biases = 1 + bool(a["bidirectional"]), a["params"], a["has_biases"]
    each = len(weights) // (directions * a["num_layers"])
    starts = range(0, directions * each, each)
    weighed = tuple((weights[i], weights[i + 2] if biases else None) for i in starts)
    if a["num_layers"] > 1 or each != (4 if biases else 2):  # with a projection of the hidden state
        return Barrier(HIDDEN_UNITS, weighed)
    cells = tuple((*weights[i : i + 2], *(weights[i + 2 : i + 4] if biases else (None, None))) for i in starts)
    states = a["hx"] if isinstance(a["hx"], (list, tuple)) else [a["hx"]]
    return Barrier(HIDDEN_UNITS, weighed, cells, tuple(states))


@row("embedding")
def read_embedding(_: Arguments) -> Read:
    return Read("embedding", (1, 0))


@row("index.Tensor")
def read_index(a: Arguments) -> Read | None:
    """table[ids]: rows of a table, as an embedding takes them; a row may have several axes. x[:, ids]: positions of a later axis."""
    *before, last = indices = a["indices"]
    if before and not any(before) and isinstance(last, fx.Node) and last.meta["val"].dim() == 1:
        axis = len(before)
        turned = {"fn": "take", "axes": (axis,), "align": (None, (axis,))}
        return None if last.meta["val"].dtype == torch.bool else Read("along", (0, (1, axis)), turned)
    if len(indices) != 1 or a.rank() < 2 or not isinstance(indices[0], fx.Node):
        return None
    return None if indices[0].meta["val"].dtype == torch.bool else Read("embedding", ((1, 0), 0))
