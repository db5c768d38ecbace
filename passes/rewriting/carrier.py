"""Constants under zero padding, carried by a channel that stays: its weights become 0, and its bias a number that arrives unchanged.

    %h = conv(%x, W, b)                           %h = conv(%x, W with W[s] := 0, b with b[s] := 1)
    %a = relu(%h)                           ->    %a = relu(%h)                                           a_s = 1 everywhere
    %d = do(%a, c) {units=S}                      %k = select(%a) {keep=K ∪ {s}}
    %y = conv(%d, V, e)                           %y = conv(%k, V[:, K ∪ {s}] with V[:, s] := Σ_S V_S c, e)

Beyond the border the channel is zero like any other, so the sums are exact there, and nothing is added behind the convolution. The
price is one channel. It costs no time where the channels that stay and the carrier fill a block of the hardware, and only there it
is taken. The number is one that every op between leaves as it is (1 for a ReLU), so that it arrives without a rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cmrc.ir.graph import Array, Graph, Node, Tensor, Value, apply, as_dtype, attributes, literal, take
from cmrc.ir.ops.affine import ConvAttrs
from cmrc.ir.tensors import constant, evaluate_op, is_computable, quantised
from cmrc.passes.rewriting.rewriter import Sweep

BLOCK = 4  # onnxruntime fills its blocks of 8 or 16 channels from any multiple of 4
NUMBERS = (1.0, 4.0)  # powers of two: 1 passes a ReLU, 4 also a hard swish


@dataclass(frozen=True, slots=True)
class Carrier:
    """A channel that can hold a number, and the node that gives it: a convolution, or the batch norm behind it."""

    unit: int
    number: float
    conv: Node
    norm: Node | None


def find_carrier(sweep: Sweep, reader: Node, x: str, units: Sequence[int], left: int) -> Carrier | None:
    """One of the units of x, replaced for the convolution that reads it, that can carry their constants."""
    conv, weight = attributes(reader, ConvAttrs), reader.inputs[1]
    assert isinstance(weight, Tensor)
    if (left + 1) % BLOCK or len(units) < 2 or conv["groups"] > 1 or quantised(weight) is not None:
        return None
    between = _nodes_between(sweep, x, conv["axis"])
    if between is None or not _reads_alone(sweep.graph, between[0].name, reader):
        return None
    norm = between[1] if len(between) > 1 and _is_norm(between[1]) else None
    functions = between[1 if norm is None else 2 :]
    if norm is None and not _bias_fits(between[0], left, len(units)):
        return None
    for number in NUMBERS:
        arrives = _arrives(functions, sweep.values[x], conv["axis"], number)
        unit = next((unit for unit in units if arrives[unit]), None)
        if unit is not None:
            return Carrier(unit, number, between[0], norm)
    return None


def _nodes_between(sweep: Sweep, x: str, axis: int) -> list[Node] | None:
    """The convolution that makes the channels of x, and the functions of one value behind it."""
    between: list[Node] = []
    maker = sweep.producers.get(x)
    while maker is not None and maker.op == "pointwise" and not maker.marks.inside:
        between.append(maker)
        values = maker.values()
        if len(values) != 1 or sweep.shape(values[0]) != maker.output.shape:
            return None
        maker = sweep.producers.get(values[0])
    if maker is None or maker.op != "conv" or maker.marks.inside or not maker.origin:
        return None
    attrs, tensors = attributes(maker, ConvAttrs), maker.inputs[1:]
    if attrs["groups"] > 1 or attrs["axis"] != axis or any(isinstance(tensor, str) for tensor in tensors):
        return None
    weight = tensors[0]
    return None if not isinstance(weight, Tensor) or quantised(weight) is not None else [maker, *reversed(between)]


def _reads_alone(graph: Graph, name: str, last: Node) -> bool:
    """Whether each value from this one on is read by one node, up to `last`."""
    while True:
        readers = graph.readers[name]
        if len(readers) != 1 or name in graph.outputs:
            return False
        if readers[0].name == last.name:
            return True
        name = readers[0].name


def _is_norm(node: Node) -> bool:
    """Whether a node is a batch norm with a scale and a shift."""
    return node.kind == "batch_norm" and all(isinstance(tensor, Tensor) for tensor in node.inputs[1:3])


def _bias_fits(conv: Node, left: int, gone: int) -> bool:
    """Whether there is a bias, or the rows that go have at least as many numbers as the one that comes."""
    weight = conv.inputs[1]
    assert isinstance(weight, Tensor)
    row = math.prod(weight.shape) // int(conv.output.shape[attributes(conv, ConvAttrs)["axis"]])
    return _bias(conv) is not None or left + 1 <= (gone - 1) * row


def _bias(conv: Node) -> Tensor | None:
    bias = conv.inputs[2] if len(conv.inputs) > 2 else None
    assert not isinstance(bias, str)
    return bias


def _arrives(functions: Sequence[Node], value: Value, axis: int, number: float) -> Array:
    """For each unit: whether each function leaves the number as it is."""
    units = int(value.shape[axis])
    arrives = np.ones(units, bool)
    there = np.full([units if i == axis else 1 for i in range(len(value.shape))], number)
    others = tuple(i for i in range(there.ndim) if i != axis)
    for node in functions:
        if not is_computable(node):
            return np.zeros(units, bool)
        with np.errstate(all="ignore"):
            result = evaluate_op("pointwise", node.attrs, *(_operand(operand, there) for operand in node.inputs))
        arrives &= (result == number).all(axis=others)
    return arrives


def _operand(operand: Tensor | str | None, there: Array) -> Array | None:
    return there if isinstance(operand, str) else None if operand is None else constant(operand)


def hold(sweep: Sweep, carrier: Carrier) -> None:
    """Let the channel be its number everywhere."""
    conv, norm = carrier.conv, carrier.norm
    weight, bias = conv.inputs[1], _bias(conv)
    assert isinstance(weight, Tensor)
    rows = 1 if attributes(conv, ConvAttrs).get("transposed") else 0
    weight = _with_one(weight, rows, carrier.unit, 0.0)
    if norm is None:
        bias = bias or literal(as_dtype(np.zeros(weight.shape[rows]), weight.dtype), weight.dtype)
        bias = _with_one(bias, 0, carrier.unit, carrier.number)
    _amend(sweep, conv.with_inputs((conv.inputs[0], weight, bias)))
    if norm is not None:
        scale, shift = norm.inputs[1:3]
        assert isinstance(scale, Tensor) and isinstance(shift, Tensor)
        scale, shift = _with_one(scale, 0, carrier.unit, 0.0), _with_one(shift, 0, carrier.unit, carrier.number)
        _amend(sweep, norm.with_inputs((norm.inputs[0], scale, shift, *norm.inputs[3:])))


def _amend(sweep: Sweep, node: Node) -> None:
    """Put a node in the place of the one that computed the same value."""
    place = sweep.emitted.index(sweep.producers[node.name])
    sweep.emitted[place] = sweep.producers[node.name] = node


def _with_one(tensor: Tensor, axis: int, at: int, number: float) -> Tensor:
    """The tensor with one position of an axis filled with a number."""
    filled = np.full([1 if i == axis else n for i, n in enumerate(tensor.shape)], number)
    return with_part(tensor, axis, at, literal(as_dtype(filled, tensor.dtype), tensor.dtype))


def with_part(tensor: Tensor, axis: int, at: int, part: Tensor) -> Tensor:
    """The tensor with one position of an axis replaced."""
    size = tensor.shape[axis]
    longer = (*tensor.shape[:axis], size + 1, *tensor.shape[axis + 1 :])
    both = apply("concat", (tensor, part), {"axis": axis}, longer, tensor.dtype)
    return take(both, axis, [size if i == at else i for i in range(size)])
