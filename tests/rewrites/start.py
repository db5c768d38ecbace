"""What the small graphs of the golden tests begin with. There is one graph per rewrite, in a module per pass.

The golden tests print them before and after, the mutation tests break the rules on them.

A name is the op whose rule acts, then what is special: `conv-padded`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from graphs import Do, Net, with_do

from cmrc.ir.graph import Graph, Operand, literal

Example = Callable[[], Graph]


def done(net: Net, *dos: Do, output: str = "") -> Graph:
    """The net's last value is its output; the replacements go in."""
    net.output(output or net.nodes[-1].name)
    return with_do(net.graph(), *dos)


TWO = ([0.5, -1.0],)
MIX = {"parents": (1, 3), "weight": [[0.5, -1.0], [2.0, 0.0]]}


def vector(units: int = 4) -> tuple[Net, str]:
    """A linear layer on a batch of any size."""
    net = Net()
    return net, net.linear(net.input("N", 3), units)


def image(channels: int = 4, height: int | str = 5, width: int | str = 4) -> tuple[Net, str]:
    """A 1x1 convolution on a batch of images."""
    net = Net()
    return net, net.conv(net.input("N", 2, height, width), channels, (1, 1))


def sequence(units: int = 4, steps: int | str = 3) -> tuple[Net, str]:
    net = Net()
    return net, net.linear(net.input("N", steps, 2), units)


def gathered(net: Net, h: str) -> str:
    """Three positions of the last axis, others at every place."""
    places = literal(np.arange(60).reshape(1, 4, 5, 3) ** 2 % 4, "int64")
    index = net.node("expand", (places,), ("N", 4, 5, 3), value_dtype="int64")
    return net.along("gather_elements", h, (3,), index, shape=("N", 4, 5, 3))


def experts(*columns: int) -> tuple[Net, str]:
    """Weights that each sample looks up in a table."""
    net = Net()
    return net, net.embedding(net.input("N", name="ids", dtype="int64"), 5, *columns)


def three_heads(net: Net, shared: int = 2) -> tuple[str, str, str]:
    """Queries, keys and values of two heads with three units; with `shared` = 1 one key-value head serves both."""
    return tuple(
        net.transpose(net.reshape(net.linear("x", count * 3), "N", 3, count, 3), 0, 2, 1, 3)
        for count in (2, shared, shared)
    )  # type: ignore[return-value]


def attend(net: Net, *operands: Operand, **attrs: object) -> str:
    """Attention, and a linear map of what every head found."""
    attended = net.node("attention", operands, net.shape(operands[0]), scale=0.7, **attrs)
    shape = net.shape(attended)
    return net.linear(net.reshape(net.transpose(attended, 0, 2, 1, 3), "N", shape[2], int(shape[1]) * int(shape[3])), 2)
