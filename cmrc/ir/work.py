"""How many multiply-accumulates an op takes: the products of these shapes. Ops without an entry in their spec count as none."""

from __future__ import annotations

from cmrc.ir.attributes import ConvAttrs, LinearAttrs, attributes
from cmrc.ir.graph import Node, Shape
from cmrc.ir.spec import Shapes


def linear(node: Node, shapes: Shapes) -> list[Shape]:
    weight = shapes[1]
    assert weight is not None
    return [(*node.output.shape, weight[attributes(node, LinearAttrs)["w_in"]])]


def conv(node: Node, shapes: Shapes) -> list[Shape]:
    """A transposed one: every input element meets every output channel of its group and kernel position."""
    x, weight = shapes[:2]
    assert x is not None and weight is not None
    many = x if attributes(node, ConvAttrs).get("transposed") else node.output.shape
    return [(*many, *weight[1:])]


def matmul(node: Node, shapes: Shapes) -> list[Shape]:
    x = shapes[0]
    assert x is not None
    return [(*node.output.shape, x[-1])]


def attention(node: Node, shapes: Shapes) -> list[Shape]:
    """q kᵀ, then the weights times v: whole products, also where a mask is causal."""
    q, k, v = shapes[:3]
    assert q is not None and k is not None and v is not None
    return [(*q, k[-2]), (*q[:-1], k[-2], v[-1])]
