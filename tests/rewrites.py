"""Small graphs, one a rewrite: the golden tests print them before and after, the mutation tests break the rules on them.

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


# ---------------------------------------------------------------- constant_fold


def linear() -> Graph:
    net, h = vector()
    net.linear(h, 2)
    return done(net, Do(h, 1, (2, 0), *TWO))


def linear_without_bias() -> Graph:
    net, h = vector()
    net.linear(h, 2, bias=False, takes_bias=False)
    return done(net, Do(h, 1, (2, 0), *TWO))


def linear_with_factors() -> Graph:
    net, h = vector()
    net.linear(h, 2, alpha=0.5, beta=2.0, turned=True)
    return done(net, Do(h, 1, (2, 0), *TWO))


def linear_with_a_bias_of_run_time() -> Graph:
    net, h = vector()
    bias = net.along("mean", net.linear(h, 2), (0,), drop=True)
    net.linear(h, 2, bias=bias)
    return done(net, Do(h, 1, (2, 0), *TWO))


def linear_by_position() -> Graph:
    net, h = sequence()
    net.linear(h, 2)
    return done(net, Do(h, 2, (1,), np.arange(3.0).reshape(1, 3, 1)))


def linear_altogether() -> Graph:
    net, h = vector()
    net.pointwise("add", net.linear(h, 2), net.linear("x", 2))
    return done(net, Do(h, 1, (3, 1, 0, 2), [0.1, 0.2, 0.3, 0.4]))


def linear_along_another_axis() -> Graph:
    net, h = sequence()
    net.linear(net.linear(h, 2, axis=1), 2, axis=2)
    return done(net, Do(h, 2, (1, 2), *TWO))


def linear_shared() -> Graph:
    """One weight, two uses: only one of them is folded."""
    net, h = vector()
    w = net.leaf(4, 4)
    net.pointwise(
        "add", net.linear(h, 4, weight=w, bias=False), net.linear(net.linear("x", 4), 4, weight=w, bias=False)
    )
    return done(net, Do(h, 1, (2,), [0.5]))


def conv() -> Graph:
    net, h = image()
    net.conv(h, 2, (3, 2), stride=(2, 1))
    return done(net, Do(h, 1, (2, 0), *TWO))


def conv_padded() -> Graph:
    net, h = image()
    net.conv(h, 2, (3, 3), pad=((1, 1), (1, 1)), bias=False)
    return done(net, Do(h, 1, (2, 0), *TWO))


def conv_padded_at_any_size() -> Graph:
    net, h = image(height="H", width="W")
    net.conv(h, 2, (3, 3), pad=((1, 1), (1, 1)))
    return done(net, Do(h, 1, (2, 0), *TWO))


def conv_padded_before_batch_norm() -> Graph:
    """The plane is added behind the batch norm, scaled as it scales."""
    net, h = image()
    net.batch_norm(net.conv(h, 2, (3, 3), pad=((1, 1), (1, 1)), bias=False))
    return done(net, Do(h, 1, (2, 0), *TWO))


def conv_padded_before_batch_norm_at_any_size() -> Graph:
    net, h = image(height="H", width="W")
    net.batch_norm(net.conv(h, 2, (3, 3), pad=((1, 1), (1, 1))))
    return done(net, Do(h, 1, (2, 0), *TWO))


def conv_padded_of_a_large_size() -> Graph:
    """A stored plane would be much larger than the weight."""
    net, h = image(height=40, width=70)
    net.conv(h, 2, (3, 3), pad=((1, 1), (1, 1)))
    return done(net, Do(h, 1, (2, 0), *TWO))


def conv_padded_by_zero() -> Graph:
    net, h = image()
    net.conv(h, 2, (3, 3), pad=((1, 1), (1, 1)))
    return done(net, Do(h, 1, (2, 0), 0.0))


def conv_by_position() -> Graph:
    net, h = image()
    net.conv(h, 2, (3, 3), pad=((1, 1), (1, 1)))
    return done(net, Do(h, 1, (2,), np.arange(20.0).reshape(1, 1, 5, 4)))


def conv_transposed() -> Graph:
    net, h = image()
    net.conv(h, 2, (3, 3), stride=(2, 2), pad=((1, 0), (1, 1)), transposed=True, output_padding=(1, 0))
    return done(net, Do(h, 1, (2, 0), *TWO))


def conv_transposed_in_groups() -> Graph:
    net, h = image()
    net.conv(h, 4, (2, 2), groups=2, transposed=True)
    return done(net, Do(h, 1, (3, 0), *TWO))


def conv_in_groups() -> Graph:
    net, h = image(6)
    net.conv(h, 4, (3, 3), pad=((1, 0), (0, 1)), groups=2)
    return done(net, Do(h, 1, (4, 0), *TWO))


def conv_depthwise() -> Graph:
    net, h = image()
    net.conv(net.conv(h, 4, (3, 3), groups=4), 2, (1, 1))
    return done(net, Do(h, 1, (2, 0), *TWO))


def conv_depthwise_padded() -> Graph:
    net, h = image(height=4, width=3)
    net.conv(net.conv(h, 4, (3, 3), pad=((1, 1), (1, 1)), groups=4), 2, (1, 1))
    return done(net, Do(h, 1, (2,), [0.5]))


def conv_depthwise_padded_at_any_size() -> Graph:
    net, h = image(height="H", width="W")
    wide = net.conv(h, 4, (3, 3), pad=((1, 1), (1, 1)), groups=4)
    net.conv(net.pointwise("relu", net.batch_norm(wide)), 2, (1, 1))
    return done(net, Do(h, 1, (2, 0), *TWO))


def pointwise() -> Graph:
    net, h = vector()
    net.linear(net.pointwise("gelu", h), 2)
    return done(net, Do(h, 1, (2, 0), *TWO))


def pointwise_batch_norm() -> Graph:
    net, h = image()
    net.conv(net.pointwise("relu", net.batch_norm(h)), 2, (1, 1))
    return done(net, Do(h, 1, (2, 0), *TWO))


def pointwise_residual() -> Graph:
    """Both summands are replaced in unit 2; unit 0 in one only."""
    net, h = vector()
    other = net.linear("x", 4)
    net.linear(net.pointwise("add", h, other), 2)
    return done(net, Do(h, 1, (2, 0), *TWO), Do(other, 1, (2,), [0.25]))


def pointwise_gate() -> Graph:
    """0 · y is 0 whatever y: the gate closes two units, and a third is constant in one factor only."""
    net, h = vector()
    net.linear(net.pointwise("mul", net.pointwise("silu", h), net.linear("x", 4)), 2)
    return done(net, Do(h, 1, (2, 0, 1), [0.0, 0.0, 0.5]))


def pointwise_beside_zero() -> Graph:
    """x + 0 is x, and so is x - 0."""
    net, h = vector()
    other = net.linear("x", 4)
    net.linear(net.pointwise("sub", net.pointwise("add", h, other), h), 2)
    return done(net, Do(h, 1, (0, 1, 2, 3), 0.0))


def pointwise_minus_from_zero() -> Graph:
    """0 - x is not x, and neither is 0 + 2x."""
    net, h = vector()
    other = net.linear("x", 4)
    turned = net.pointwise("sub", h, other)
    net.linear(net.pointwise("add", h, turned, alpha=2.0), 2)
    return done(net, Do(h, 1, (0, 1, 2, 3), 0.0))


def pointwise_disjoint_zeros() -> Graph:
    """One factor is 0 in two units, the other is replaced in two others."""
    net, h = vector()
    other = net.linear("x", 4)
    net.linear(net.pointwise("mul", h, other), 2)
    return done(net, Do(h, 1, (2, 0), 0.0), Do(other, 1, (1, 3), [0.5, 2.0]))


def pointwise_known_operand() -> Graph:
    net, h = vector()
    net.linear(net.pointwise("mul", h, net.linear("x", 4)), 2)
    return done(net, Do(h, 1, (0, 1, 2, 3), [0.5, 1.0, -1.0, 2.0]))


def pointwise_aligned() -> Graph:
    """One slope for all channels: nothing to take units of."""
    net, h = image()
    net.conv(net.pointwise("prelu", h, net.leaf(1), align=(None, (1,))), 2, (1, 1))
    return done(net, Do(h, 1, (2, 0), *TWO))


def along_mean() -> Graph:
    net, h = image(height="H", width="W")
    net.linear(net.along("mean", h, (2, 3), drop=True), 2)
    return done(net, Do(h, 1, (2, 0), *TWO))


def along_sum() -> Graph:
    net, h = image()
    net.linear(net.along("sum", h, (2, 3), drop=True), 2)
    return done(net, Do(h, 1, (2, 0), *TWO))


def along_padded_pool() -> Graph:
    net, h = image(height=4, width=4)
    pooled = net.pool("avg_pool", h, (3, 3), (2, 2), ((1, 1), (1, 1)), ceil=False, include_pad=True, divisor=None)
    net.conv(pooled, 2, (1, 1))
    return done(net, Do(h, 1, (2,), [0.5]))


def gathered(net: Net, h: str) -> str:
    """Three positions of the last axis, others at every place."""
    places = literal(np.arange(60).reshape(1, 4, 5, 3) ** 2 % 4, "int64")
    index = net.node("expand", (places,), ("N", 4, 5, 3), value_dtype="int64")
    return net.along("gather_elements", h, (3,), index, shape=("N", 4, 5, 3))


def along_norm_of_zeros() -> Graph:
    """An RMS norm recovers units of 0 from those that stay: their share of all enters its number and its weight."""
    net, h = vector()
    net.linear(net.along("rms_norm", h, (1,), net.leaf(4), eps=0.1), 2)
    return done(net, Do(h, 1, (2, 0), [0.0, 0.0]))


def along_norm_of_zeros_without_weight() -> Graph:
    net, h = vector()
    net.linear(net.along("rms_norm", h, (1,), None, eps=0.1), 2)
    return done(net, Do(h, 1, (1,), [0.0]))


def along_gather() -> Graph:
    """Wherever the index points, a constant unit is the constant."""
    net, h = image()
    net.linear(net.along("mean", gathered(net, h), (2, 3), drop=True), 2)
    return done(net, Do(h, 1, (2, 0), *TWO))


def along_repeats() -> Graph:
    net, h = image()
    tiled = net.along("tile", h, (3,), shape=("N", 4, 5, 8), times=(1, 1, 1, 2))
    net.linear(net.along("mean", tiled, (2, 3), drop=True), 2)
    return done(net, Do(h, 1, (2, 0), np.linspace(-1.0, 1.0, 8).reshape(1, 2, 1, 4)))


def along_norm() -> Graph:
    """A norm over other axes: of a constant only its shift is left."""
    net, h = image(height="H", width="W")
    norm = net.along("instance_norm", h, (2, 3), net.leaf(4), net.leaf(4), eps=1e-5, align=(None, (1,), (1,)))
    net.conv(norm, 2, (1, 1))
    return done(net, Do(h, 1, (2, 0), *TWO))


def reshape() -> Graph:
    net, h = image(height=2, width=2)
    net.linear(net.reshape(h, "N", 16), 2)
    return done(net, Do(h, 1, (2, 0), *TWO))


def reshape_to_heads() -> Graph:
    net, h = sequence(6)
    split = net.reshape(h, "N", 3, 3, 2)
    net.linear(net.reshape(split, "N", 3, 6), 2)
    return done(net, Do(h, 2, (3, 2), *TWO))


def transpose() -> Graph:
    net, h = image()
    net.linear(net.transpose(h, 0, 2, 3, 1), 2)
    return done(net, Do(h, 1, (2, 0), *TWO))


def expand() -> Graph:
    net, h = vector()
    net.linear(net.expand(net.reshape(h, "N", 1, 4), "N", 3, 4), 2)
    return done(net, Do(h, 1, (2, 0), *TWO))


def concat() -> Graph:
    net, h = vector()
    net.linear(net.concat(net.linear("x", 2), h, axis=1), 2)
    return done(net, Do(h, 1, (2, 0), *TWO))


def concat_along_another_axis() -> Graph:
    net, h = sequence()
    other = net.linear("x", 4)
    net.linear(net.concat(h, other, axis=1), 2)
    return done(net, Do(h, 2, (2, 0), *TWO), Do(other, 2, (0, 2), [0.25, 0.75]))


def select() -> Graph:
    net, h = vector()
    net.linear(net.select(h, 1, (1, 2, 2)), 2)
    return done(net, Do(h, 1, (2, 0), *TWO))


def select_misses_the_units() -> Graph:
    net, h = vector()
    net.linear(net.select(h, 1, (1, 3)), 2)
    return done(net, Do(h, 1, (2, 0), *TWO))


def do() -> Graph:
    net, h = vector()
    net.linear(h, 2)
    return done(net, Do(h, 1, (2, 0), *TWO), Do(h, 1, (0, 1), [0.25, 0.75]))


def do_before_an_affine_one() -> Graph:
    net, h = vector()
    net.linear(h, 2)
    return done(net, Do(h, 1, (0,), [0.5]), Do(h, 1, (2,), [0.1], (1, 3), [[0.5, -1.0]]))


def do_of_parents() -> Graph:
    """A parent of the affine do is constant: it joins the bias. Where all are, the do is constant."""
    net, h = vector()
    net.linear(h, 2)
    return done(
        net, Do(h, 1, (1,), [0.5]), Do(h, 1, (2,), [0.1], (1, 3), [[0.5, -1.0]]), Do(h, 1, (0,), 0.0, (1,), [[2.0]])
    )


def linear_in_front_without_bias() -> Graph:
    net, h = image()
    net.linear(h, 2, axis=1, bias=False, takes_bias=False)
    return done(net, Do(h, 1, (2, 0), *TWO))


def conv_depthwise_by_zero() -> Graph:
    net, h = image(height="H", width="W")
    net.conv(net.conv(h, 4, (3, 3), pad=((1, 1), (1, 1)), groups=4), 2, (1, 1))
    return done(net, Do(h, 1, (2, 0), 0.0))


def pointwise_known_altogether() -> Graph:
    """Both summands are constant in every unit: the sum is."""
    net, h = vector(2)
    other = net.linear("x", 2)
    net.linear(net.concat(net.pointwise("add", h, other), other, axis=1), 2)
    return done(net, Do(h, 1, (1, 0), *TWO), Do(other, 1, (0, 1), [0.25, 0.75]))


def concat_of_equal_constants() -> Graph:
    net, h = sequence(steps="T")
    other = net.linear("x", 4)
    net.linear(net.node("concat", (h, other), ("N", "2*T", 4), axis=1), 2)
    return done(net, Do(h, 2, (2, 0), *TWO), Do(other, 2, (0, 2), [-1.0, 0.5]))


def select_along_another_axis() -> Graph:
    net, h = sequence()
    net.linear(net.select(h, 1, (0, 2)), 2)
    return done(net, Do(h, 2, (1,), np.arange(3.0).reshape(1, 3, 1)))


def experts(*columns: int) -> tuple[Net, str]:
    """Weights that each sample looks up in a table."""
    net = Net()
    return net, net.embedding(net.input("N", name="ids", dtype="int64"), 5, *columns)


def matmul_of_looked_up_weights() -> Graph:
    net, rows = experts(5, 4)
    h = net.linear(net.input("N", 6), 4)
    net.matmul(rows, net.reshape(h, "N", 4, 1))
    return done(net, Do(h, 1, (2, 0), *TWO))


def matmul_with_looked_up_weights_behind() -> Graph:
    net, rows = experts(4, 5)
    h = net.linear(net.input("N", 3, 6), 4)
    net.matmul(h, rows)
    return done(net, Do(h, 2, (2, 0), *TWO))


def plane() -> Graph:
    net, h = image(height="H", width="W")
    ones = net.insert("plane", (h,), (1, 1, "H", "W"), axis=1)
    net.pointwise("add", net.conv(h, 2, (1, 1)), ones)
    return done(net, Do(h, 1, (2, 0), *TWO))


def along_the_units() -> Graph:
    """The mean square of units of which two are 0: an RMS norm, spelled out, of those that are left."""
    net, h = vector()
    scale = net.pointwise(
        "rsqrt", net.pointwise("add", net.along("mean", net.pointwise("square", h), (1,)), literal(0.1))
    )
    net.linear(net.pointwise("mul", h, scale), 2)
    return done(net, Do(h, 1, (2, 0), 0.0))


def along_the_units_by_constants() -> Graph:
    net, h = sequence()
    net.linear(net.along("mean", h, (2,), drop=True), 2)
    return done(net, Do(h, 2, (2, 0), *TWO))


def along_the_units_as_a_sum() -> Graph:
    net, h = sequence()
    net.along("sum", h, (2,))
    return done(net, Do(h, 2, (1,), np.arange(3.0).reshape(1, 3, 1)))


def three_heads(net: Net, shared: int = 2) -> tuple[str, str, str]:
    """Queries, keys and values of two heads with three units; with `shared` = 1 one key-value head serves both."""
    return tuple(
        net.transpose(net.reshape(net.linear("x", count * 3), "N", 3, count, 3), 0, 2, 1, 3)
        for count in (2, shared, shared)
    )  # type: ignore[return-value]


def attend(net: Net, *operands: Operand, **attrs: object) -> str:
    """Attention, and a linear map of what every head found."""
    made = net.node("attention", operands, net.shape(operands[0]), scale=0.7, **attrs)
    shape = net.shape(made)
    return net.linear(net.reshape(net.transpose(made, 0, 2, 1, 3), "N", shape[2], int(shape[1]) * int(shape[3])), 2)


def attention_values() -> Graph:
    """The rows of softmax sum to 1: a constant value unit is that constant behind it."""
    net, _ = sequence()
    q, k, v = three_heads(net)
    attend(net, q, k, v, causal=True)
    return done(net, Do(v, 3, (2, 0), *TWO))


def attention_values_of_shared_heads() -> Graph:
    net, _ = sequence()
    q, k, v = three_heads(net, shared=1)
    attend(net, q, k, v, literal([[1, 0, 0], [1, 1, 0], [0, 1, 1]], "bool"))
    return done(net, Do(v, 1, (0,), np.array([0.5, -1.0, 0.25]).reshape(1, 1, 1, 3)))


def attention_queries() -> Graph:
    """What is 0 in the queries adds nothing to the scores."""
    net, _ = sequence()
    q, k, v = three_heads(net)
    attend(net, q, k, v)
    return done(net, Do(q, 3, (1,), 0.0))


def attention_keys() -> Graph:
    """What is the same for every key does not change the softmax over keys."""
    net, _ = sequence()
    q, k, v = three_heads(net)
    attend(net, q, k, v, net.leaf(3, 3))
    return done(net, Do(k, 3, (2, 0), *TWO))


def matmul() -> Graph:
    """What is 0 in the left rows meets nothing in the right ones."""
    net, _ = sequence()
    q, k, _ = three_heads(net)
    net.matmul(q, net.transpose(k, 0, 1, 3, 2))
    return done(net, Do(q, 3, (1,), 0.0))


def matmul_of_a_softmax() -> Graph:
    net, _ = sequence()
    q, k, v = three_heads(net)
    weights = net.along("softmax", net.matmul(q, net.transpose(k, 0, 1, 3, 2)), (3,))
    net.linear(net.matmul(net.pointwise("identity", weights), v), 2)
    return done(net, Do(v, 3, (2, 0), *TWO))


def matmul_of_zero_rows() -> Graph:
    net, _ = sequence()
    q, k, _ = three_heads(net)
    net.linear(net.matmul(q, net.transpose(k, 0, 1, 3, 2)), 2, axis=1)
    return done(net, Do(q, 1, (1,), 0.0))


def matmul_of_stacked_weights() -> Graph:
    """Every expert has its own weight: the constants of its units become its own bias."""
    net = Net()
    h = net.node("matmul", (net.input(2, "N", 3), net.leaf(2, 3, 4)), (2, "N", 4))
    net.node("matmul", (net.pointwise("relu", h), net.leaf(2, 4, 2)), (2, "N", 2))
    return done(net, Do(h, 2, (2, 0), *TWO))


def matmul_of_a_weight_in_front() -> Graph:
    net = Net()
    h = net.node("matmul", (net.leaf(2, 4, 3), net.input(2, 3, "N")), (2, 4, "N"))
    net.node("matmul", (net.leaf(2, 2, 4), h), (2, 2, "N"))
    return done(net, Do(h, 1, (2, 0), *TWO))


CONSTANT: dict[str, Example] = {
    "linear": linear,
    "linear-without-bias": linear_without_bias,
    "linear-in-front-without-bias": linear_in_front_without_bias,
    "linear-with-factors": linear_with_factors,
    "linear-with-a-bias-of-run-time": linear_with_a_bias_of_run_time,
    "linear-by-position": linear_by_position,
    "linear-altogether": linear_altogether,
    "linear-along-another-axis": linear_along_another_axis,
    "linear-shared": linear_shared,
    "conv": conv,
    "conv-padded": conv_padded,
    "conv-padded-at-any-size": conv_padded_at_any_size,
    "conv-padded-before-batch-norm": conv_padded_before_batch_norm,
    "conv-padded-before-batch-norm-at-any-size": conv_padded_before_batch_norm_at_any_size,
    "conv-padded-of-a-large-size": conv_padded_of_a_large_size,
    "conv-padded-by-zero": conv_padded_by_zero,
    "conv-by-position": conv_by_position,
    "conv-transposed": conv_transposed,
    "conv-transposed-in-groups": conv_transposed_in_groups,
    "conv-in-groups": conv_in_groups,
    "conv-depthwise": conv_depthwise,
    "conv-depthwise-by-zero": conv_depthwise_by_zero,
    "conv-depthwise-padded": conv_depthwise_padded,
    "conv-depthwise-padded-at-any-size": conv_depthwise_padded_at_any_size,
    "pointwise": pointwise,
    "pointwise-batch-norm": pointwise_batch_norm,
    "pointwise-residual": pointwise_residual,
    "pointwise-gate": pointwise_gate,
    "pointwise-beside-zero": pointwise_beside_zero,
    "pointwise-minus-from-zero": pointwise_minus_from_zero,
    "pointwise-disjoint-zeros": pointwise_disjoint_zeros,
    "pointwise-known-operand": pointwise_known_operand,
    "pointwise-known-altogether": pointwise_known_altogether,
    "pointwise-aligned": pointwise_aligned,
    "along-mean": along_mean,
    "along-sum": along_sum,
    "along-padded-pool": along_padded_pool,
    "along-norm": along_norm,
    "along-norm-of-zeros": along_norm_of_zeros,
    "along-norm-of-zeros-without-weight": along_norm_of_zeros_without_weight,
    "along-gather": along_gather,
    "along-repeats": along_repeats,
    "reshape": reshape,
    "reshape-to-heads": reshape_to_heads,
    "transpose": transpose,
    "expand": expand,
    "concat": concat,
    "concat-along-another-axis": concat_along_another_axis,
    "concat-of-equal-constants": concat_of_equal_constants,
    "select": select,
    "select-along-another-axis": select_along_another_axis,
    "select-misses-the-units": select_misses_the_units,
    "along-the-units": along_the_units,
    "along-the-units-by-constants": along_the_units_by_constants,
    "along-the-units-as-a-sum": along_the_units_as_a_sum,
    "attention": attention_values,
    "attention-values-of-shared-heads": attention_values_of_shared_heads,
    "attention-queries": attention_queries,
    "attention-keys": attention_keys,
    "matmul": matmul,
    "matmul-of-a-softmax": matmul_of_a_softmax,
    "matmul-of-zero-rows": matmul_of_zero_rows,
    "matmul-of-stacked-weights": matmul_of_stacked_weights,
    "matmul-of-a-weight-in-front": matmul_of_a_weight_in_front,
    "do": do,
    "do-before-an-affine-one": do_before_an_affine_one,
    "do-of-parents": do_of_parents,
    "matmul-of-looked-up-weights": matmul_of_looked_up_weights,
    "matmul-with-looked-up-weights-behind": matmul_with_looked_up_weights_behind,
    "plane": plane,
}


# ---------------------------------------------------------------- constant_fold, with constants of run time


def known_at_run_time(channels: int = 4, height: int | str = "H", width: int | str = "W") -> tuple[Net, str]:
    """A padded depthwise convolution of any size: its replaced channels are a plane of run time."""
    net, h = image(channels, height, width)
    return net, net.conv(h, channels, (3, 3), pad=((1, 1), (1, 1)), groups=channels)


def at_run_time(net: Net, *more: Do) -> Graph:
    return done(net, Do("conv_1", 1, (2, 0), *TWO), *more)


def run_time_linear() -> Graph:
    net, h = known_at_run_time()
    net.linear(h, 2, axis=1, alpha=0.5)
    return at_run_time(net)


def run_time_linear_altogether() -> Graph:
    net, h = known_at_run_time(2)
    net.pointwise("add", net.linear(h, 2, axis=1), net.conv("x", 2, (1, 1)))
    return done(net, Do("conv_1", 1, (1, 0), *TWO))


def run_time_conv() -> Graph:
    net, h = known_at_run_time()
    net.conv(h, 2, (3, 3), pad=((1, 1), (0, 0)), stride=(1, 2))
    return at_run_time(net)


def run_time_conv_transposed() -> Graph:
    net, h = known_at_run_time()
    net.conv(h, 2, (2, 2), stride=(2, 2), transposed=True)
    return at_run_time(net)


def run_time_conv_in_groups() -> Graph:
    """Both inputs of the first group are known: so are its outputs."""
    net, h = known_at_run_time()
    net.conv(net.conv(h, 4, (2, 2), groups=2), 2, (1, 1))
    return done(net, Do("conv_1", 1, (1, 0), *TWO))


def run_time_pointwise() -> Graph:
    """A plane of run time and numbers, in the same units, and a slope for each channel."""
    net, h = known_at_run_time()
    other = net.conv("x", 4, (1, 1))
    net.conv(net.pointwise("prelu", net.pointwise("add", h, other), net.leaf(4), align=(None, (1,))), 2, (1, 1))
    return at_run_time(net, Do(other, 1, (2, 0), [0.25, 0.75]))


def run_time_pointwise_without_scale() -> Graph:
    net, h = known_at_run_time()
    mean, var = net.leaf(4), net.leaf(4, low=0.5)
    net.conv(net.pointwise("batch_norm", h, None, None, mean, var, eps=1e-5, align=(None, *((1,),) * 4)), 2, (1, 1))
    return at_run_time(net)


def run_time_pointwise_altogether() -> Graph:
    """Every unit of one summand is known: the value takes its place."""
    net, h = known_at_run_time(2)
    net.conv(net.pointwise("add", net.conv("x", 2, (1, 1)), h), 2, (1, 1))
    return done(net, Do("conv_1", 1, (1, 0), *TWO))


def run_time_concat() -> Graph:
    net, h = known_at_run_time()
    net.conv(net.concat(net.conv("x", 3, (1, 1)), h, axis=1), 2, (1, 1))
    return at_run_time(net)


def run_time_along() -> Graph:
    net, h = known_at_run_time()
    net.linear(net.along("amax", h, (2, 3), drop=True), 2)
    return at_run_time(net)


def run_time_along_norm() -> Graph:
    net, h = known_at_run_time()
    norm = net.along("instance_norm", h, (2, 3), net.leaf(4), net.leaf(1), eps=1e-5, align=(None, (1,), (1,)))
    net.conv(norm, 2, (1, 1))
    return at_run_time(net)


def run_time_reshape() -> Graph:
    net, h = known_at_run_time()
    net.linear(net.reshape(h, "N", 4, "H*W"), 2, axis=1)
    return at_run_time(net)


def run_time_transpose() -> Graph:
    net, h = known_at_run_time()
    net.linear(net.transpose(h, 0, 2, 3, 1), 2)
    return at_run_time(net)


def run_time_select() -> Graph:
    net, h = known_at_run_time()
    net.conv(net.select(h, 1, (1, 2)), 2, (1, 1))
    return at_run_time(net)


def run_time_select_misses_the_units() -> Graph:
    net, h = known_at_run_time()
    net.conv(net.select(h, 1, (1, 3)), 2, (1, 1))
    return at_run_time(net)


def run_time_select_along_another_axis() -> Graph:
    net, h = known_at_run_time(width=4)
    net.conv(net.select(h, 3, (0, 2)), 2, (1, 1))
    return at_run_time(net)


def run_time_plane() -> Graph:
    net, h = known_at_run_time()
    ones = net.insert("plane", (h,), (1, 1, "H", "W"), axis=1)
    net.pointwise("add", net.conv(h, 2, (1, 1)), ones)
    return at_run_time(net)


RUN_TIME: dict[str, Example] = {
    "linear": run_time_linear,
    "linear-altogether": run_time_linear_altogether,
    "conv": run_time_conv,
    "conv-transposed": run_time_conv_transposed,
    "conv-in-groups": run_time_conv_in_groups,
    "pointwise": run_time_pointwise,
    "pointwise-without-scale": run_time_pointwise_without_scale,
    "pointwise-altogether": run_time_pointwise_altogether,
    "concat": run_time_concat,
    "along": run_time_along,
    "along-norm": run_time_along_norm,
    "reshape": run_time_reshape,
    "transpose": run_time_transpose,
    "select": run_time_select,
    "select-misses-the-units": run_time_select_misses_the_units,
    "select-along-another-axis": run_time_select_along_another_axis,
    "plane": run_time_plane,
}


# ---------------------------------------------------------------- affine_fold


def affine(net: Net, site: str, axis: int = 1) -> Graph:
    """units 2 and 0 rebuilt from 1 and 3, with a constant part."""
    return done(net, Do(site, axis, (2, 0), *TWO, **MIX))


def affine_linear() -> Graph:
    net, h = vector()
    net.linear(h, 2)
    return affine(net, h)


def affine_linear_shared() -> Graph:
    net, h = vector()
    w = net.leaf(4, 4)
    net.pointwise(
        "add", net.linear(h, 4, weight=w, bias=False), net.linear(net.linear("x", 4), 4, weight=w, bias=False)
    )
    return affine(net, h)


def affine_conv() -> Graph:
    net, h = image()
    net.conv(h, 2, (3, 2), pad=((1, 0), (0, 1)))
    return affine(net, h)


def affine_conv_at_any_size() -> Graph:
    net, h = image(height="H", width="W")
    net.conv(h, 2, (3, 3), pad=((1, 1), (1, 1)))
    return affine(net, h)


def affine_conv_transposed() -> Graph:
    net, h = image()
    net.conv(h, 2, (2, 2), stride=(2, 2), transposed=True)
    return affine(net, h)


def affine_conv_in_groups() -> Graph:
    net, h = image(6)
    net.conv(h, 4, (3, 3), pad=((1, 0), (0, 1)), groups=2)
    return done(net, Do(h, 1, (4, 0), [0.5, -1.0], (3, 1), [[2.0, 0.0], [0.0, -0.5]]))


def affine_pointwise() -> Graph:
    net, h = image()
    net.conv(net.batch_norm(h), 2, (1, 1))
    return affine(net, h)


def affine_pointwise_identity() -> Graph:
    net, h = vector()
    net.linear(net.pointwise("cast", h, dtype="float64"), 2)
    return affine(net, h)


def affine_pointwise_scale_of_a_block() -> Graph:
    net, h = image(height=2, width=1)
    net.linear(net.pointwise("add", net.pointwise("mul", net.reshape(h, "N", 8), literal(1.5)), net.leaf(8)), 2)
    return affine(net, h)


def affine_along() -> Graph:
    net, h = image(height="H", width="W")
    net.linear(net.along("mean", h, (2, 3), drop=True), 2)
    return affine(net, h)


def affine_along_padded_pool() -> Graph:
    net, h = image(height=4, width=2)
    pooled = net.pool("avg_pool", h, (3, 1), (2, 1), ((1, 1), (0, 0)), ceil=False, include_pad=True, divisor=None)
    net.conv(pooled, 2, (1, 1))
    return affine(net, h)


def affine_reshape() -> Graph:
    net, h = image(height=2, width=1)
    net.linear(net.reshape(h, "N", 8), 2)
    return affine(net, h)


def affine_transpose() -> Graph:
    net, h = image()
    net.linear(net.transpose(h, 0, 2, 3, 1), 2)
    return affine(net, h)


def affine_concat() -> Graph:
    net, h = vector()
    net.linear(net.concat(net.linear("x", 2), h, h, axis=1), 2)
    return affine(net, h)


def affine_select() -> Graph:
    net, h = vector(6)
    net.linear(net.select(h, 1, (1, 2, 3, 5)), 2)
    return affine(net, h)


def affine_select_along_another_axis() -> Graph:
    net, h = sequence()
    net.linear(net.select(h, 1, (0, 2)), 2)
    return done(net, Do(h, 2, (2, 0), np.arange(6.0).reshape(1, 3, 2), **MIX))


def affine_select_leaves_constants() -> Graph:
    net, h = vector()
    net.linear(net.select(h, 1, (0, 2)), 2)
    return done(net, Do(h, 1, (2, 0), [0.5, -1.0], (3,), [[0.0], [0.0]]))


def affine_select_misses_the_units() -> Graph:
    net, h = vector()
    net.linear(net.select(h, 1, (1, 3)), 2)
    return affine(net, h)


def affine_do() -> Graph:
    net, h = vector(6)
    net.linear(h, 2)
    return done(net, Do(h, 1, (2, 0), *TWO, **MIX), Do(h, 1, (4,), [0.25], (3, 5), [[1.0, -2.0]]))


def affine_do_replaced_again() -> Graph:
    net, h = vector()
    net.linear(h, 2)
    return done(net, Do(h, 1, (2,), [0.5], (1, 3), [[0.5, -1.0]]), Do(h, 1, (2, 0), *TWO, **MIX))


def affine_plane() -> Graph:
    net, h = image(height="H", width="W")
    ones = net.insert("plane", (h,), (1, 1, "H", "W"), axis=1)
    net.pointwise("add", net.conv(h, 2, (1, 1)), ones)
    return affine(net, h)


AFFINE: dict[str, Example] = {
    "linear": affine_linear,
    "linear-shared": affine_linear_shared,
    "conv": affine_conv,
    "conv-at-any-size": affine_conv_at_any_size,
    "conv-transposed": affine_conv_transposed,
    "conv-in-groups": affine_conv_in_groups,
    "pointwise": affine_pointwise,
    "pointwise-identity": affine_pointwise_identity,
    "pointwise-scale-of-a-block": affine_pointwise_scale_of_a_block,
    "along": affine_along,
    "along-padded-pool": affine_along_padded_pool,
    "reshape": affine_reshape,
    "transpose": affine_transpose,
    "concat": affine_concat,
    "select": affine_select,
    "select-along-another-axis": affine_select_along_another_axis,
    "select-leaves-constants": affine_select_leaves_constants,
    "select-misses-the-units": affine_select_misses_the_units,
    "do": affine_do,
    "do-replaced-again": affine_do_replaced_again,
    "plane": affine_plane,
}


# ---------------------------------------------------------------- dead_subgraph


def read(net: Net, x: str, keep: tuple[int, ...], axis: int = 1) -> Graph:
    """Only some positions of a value are read, by an op that is not affine in them."""
    net.pointwise("relu", net.cut(x, axis, keep))
    return done(net)


def dead_linear() -> Graph:
    net, h = vector()
    return read(net, h, (1, 3))


def dead_linear_along_another_axis() -> Graph:
    net, h = sequence()
    return read(net, h, (0, 2), axis=1)


def dead_conv() -> Graph:
    net, h = image()
    return read(net, net.conv(h, 4, (3, 3)), (1, 3))


def dead_conv_of_fewer_samples() -> Graph:
    net = Net()
    return read(net, net.conv(net.conv(net.input(3, 2, 5, 4), 4, (1, 1)), 2, (2, 2)), (0, 2), axis=0)


def dead_conv_depthwise() -> Graph:
    net, h = image()
    return read(net, net.conv(h, 4, (3, 3), groups=4), (1, 3))


def dead_conv_in_groups() -> Graph:
    """Three groups of two outputs: one group goes with its inputs, the others keep one output each."""
    net, h = image(6)
    return read(net, net.conv(h, 6, (3, 3), groups=3), (1, 4))


def dead_conv_transposed() -> Graph:
    net, h = image()
    return read(net, net.conv(h, 4, (2, 2), transposed=True), (1, 3))


def dead_conv_transposed_in_groups() -> Graph:
    net, h = image()
    return read(net, net.conv(h, 4, (2, 2), groups=2, transposed=True), (2, 3))


def dead_pointwise() -> Graph:
    """To every operand that has the axis; the broadcast gate stays."""
    net, h = vector()
    gate = net.pointwise("sigmoid", net.linear("x", 1))
    return read(net, net.pointwise("mul", net.pointwise("add", h, net.leaf(4)), gate), (1, 3))


def dead_pointwise_of_one_value_twice() -> Graph:
    net, h = vector()
    return read(net, net.pointwise("mul", h, h), (1, 3))


def dead_pointwise_batch_norm() -> Graph:
    net, h = image()
    return read(net, net.batch_norm(h), (1, 3))


def dead_along() -> Graph:
    net, h = image()
    return read(net, net.along("mean", h, (2, 3), drop=True), (1, 3))


def dead_along_norm() -> Graph:
    net, h = image()
    norm = net.along("instance_norm", h, (2, 3), net.leaf(4), net.leaf(1), eps=1e-5, align=(None, (1,), (1,)))
    return read(net, norm, (1, 3))


def dead_along_gather() -> Graph:
    """The index loses the same positions as the value that it picks from."""
    net, h = image()
    return read(net, gathered(net, h), (1, 3))


def dead_along_repeats() -> Graph:
    """Every sample gets the same three heads: the same of every repeat."""
    net = Net()
    table = net.transpose(net.reshape(net.linear(net.input(5, 2), 6), 5, 3, 2), 1, 0, 2)
    samples = net.input("N", 3, 5, 2, name="samples")
    tiled = net.along("tile", table, (0,), shape=("3*N", 5, 2), times=("N", 1, 1))
    return read(net, net.pointwise("add", net.reshape(tiled, "N", 3, 5, 2), samples), (0, 2))


def dead_reshape() -> Graph:
    net, h = image(height=2, width=2)
    return read(net, net.reshape(h, "N", 16), (4, 5, 6, 7, 12, 13, 14, 15))


def dead_reshape_to_merged_samples() -> Graph:
    """Samples and heads in one axis: the same heads of every sample."""
    net, h = sequence(6)
    heads = net.transpose(net.reshape(h, "N", 3, 3, 2), 0, 2, 1, 3)
    merged = net.pointwise("gelu", net.reshape(heads, "3*N", 3, 2))
    return read(net, net.reshape(merged, "N", 3, 3, 2), (0, 2))


def dead_transpose() -> Graph:
    net, h = image()
    return read(net, net.transpose(h, 0, 2, 3, 1), (1, 3), axis=3)


def dead_expand() -> Graph:
    net, h = vector()
    return read(net, net.expand(net.reshape(h, "N", 1, 4), "N", 3, 4), (1, 3), axis=2)


def dead_expand_of_one() -> Graph:
    net, h = vector()
    return read(net, net.expand(net.reshape(h, "N", 1, 4), "N", 3, 4), (0, 2), axis=1)


def dead_expand_to_merged_samples() -> Graph:
    """One position becomes three heads of every sample, of which two are read."""
    net, h = vector()
    one = net.along("mean", h, (0,))
    spread = net.pointwise("relu", net.reshape(net.expand(one, "3*N", 4), "N", 3, 4))
    net.pointwise("add", net.cut(spread, 1, (0, 2)), net.linear(net.reshape("x", "N", 1, 3), 4))
    return done(net)


def dead_expand_in_different_copies() -> Graph:
    """Copies are alike: two readers of different ones read the same."""
    net, h = vector()
    copies = net.expand(net.reshape(h, "N", 1, 4), "N", 3, 4)
    a, b = net.pointwise("relu", net.cut(copies, 1, (0, 2))), net.pointwise("tanh", net.cut(copies, 1, (1, 2)))
    net.pointwise("add", a, b)
    return done(net)


def dead_concat() -> Graph:
    net, h = vector()
    return read(net, net.concat(net.linear("x", 2), h, net.linear("x", 3), axis=1), (1, 4, 5))


def dead_concat_of_one_part() -> Graph:
    net, h = vector()
    return read(net, net.concat(net.linear("x", 2), h, axis=1), (3, 4))


def dead_concat_along_another_axis() -> Graph:
    net, h = sequence()
    return read(net, net.concat(h, net.linear("x", 4), axis=1), (1, 3), axis=2)


def dead_select() -> Graph:
    net, h = vector(6)
    return read(net, net.select(h, 1, (5, 3, 1)), (0, 2))


def dead_select_that_spreads() -> Graph:
    """Units that were laid out with repeats, of which just those that were there are read."""
    net, h = vector()
    return read(net, net.cut(h, 1, (0, 0, 1, 2, 0, 3)), (1, 2, 3, 5))


def dead_select_along_another_axis() -> Graph:
    net, h = sequence()
    return read(net, net.select(h, 1, (0, 2)), (1, 3), axis=2)


def dead_do() -> Graph:
    """A do that stays, before a softmax, shrinks with its value."""
    net, h = vector()
    value = net.insert("do", (h, literal([0.5, -1.0])), ("N", 4), axis=1, units=(2, 0), sources=(0,))
    return read(net, value, (1, 2))


def dead_do_along_another_axis() -> Graph:
    net, h = sequence()
    value = net.insert(
        "do", (h, literal(np.arange(4.0).reshape(1, 1, 4))), ("N", 3, 4), axis=1, units=(2,), sources=(0,)
    )
    return read(net, value, (1, 2), axis=2)


def dead_do_of_nothing_read() -> Graph:
    net, h = vector()
    value = net.insert("do", (h, literal([0.5, -1.0])), ("N", 4), axis=1, units=(2, 0), sources=(0,))
    return read(net, value, (1, 3))


def dead_do_affine() -> Graph:
    net, h = vector()
    tensors = (literal([0.5, -1.0]), literal([[0.5], [-1.0]]))
    value = net.insert("do", (h, *tensors), ("N", 4), axis=1, units=(2, 0), parents=(3,), sources=(0,))
    return read(net, value, (1, 2, 3))


def heads(net: Net, count: int) -> str:
    return net.transpose(net.reshape(net.linear("x", count * 2), "N", 3, count, 2), 0, 2, 1, 3)


def dead_matmul() -> Graph:
    net, _ = sequence()
    return read(net, net.matmul(heads(net, 3), net.transpose(heads(net, 3), 0, 1, 3, 2)), (0, 2))


def dead_matmul_rows() -> Graph:
    net, _ = sequence()
    return read(net, net.matmul(heads(net, 1), net.transpose(heads(net, 1), 0, 1, 3, 2)), (0, 2), axis=2)


def dead_matmul_columns() -> Graph:
    net, _ = sequence()
    return read(net, net.matmul(heads(net, 1), net.transpose(heads(net, 1), 0, 1, 3, 2)), (0, 2), axis=3)


def dead_attention() -> Graph:
    net, _ = sequence()
    q, k, v = heads(net, 3), heads(net, 3), heads(net, 3)
    return read(net, net.node("attention", (q, k, v), net.shape(q), scale=0.7, causal=True), (0, 2))


def dead_attention_units() -> Graph:
    net, _ = sequence()
    q, k, v = heads(net, 2), heads(net, 2), heads(net, 2)
    return read(net, net.node("attention", (q, k, v), net.shape(q), scale=0.7), (1,), axis=3)


def dead_attention_queries() -> Graph:
    net, _ = sequence()
    q, k, v = heads(net, 2), heads(net, 2), heads(net, 2)
    return read(net, net.node("attention", (q, k, v, net.leaf(3, 3)), net.shape(q), scale=0.7), (0, 2), axis=2)


def dead_attention_with_shared_heads() -> Graph:
    """Four query heads on two key-value heads: the first pair goes."""
    net, _ = sequence()
    q, k, v = heads(net, 4), heads(net, 2), heads(net, 2)
    return read(net, net.node("attention", (q, k, v, net.leaf(4, 1, 1)), net.shape(q), scale=0.7), (2, 3))


def dead_reshape_of_copies() -> Graph:
    """Two key-value heads, each copied for three query heads: the second and third of one, the first and last of the other."""
    net, _ = sequence()
    k = net.reshape(heads(net, 2), "N", 2, 1, 3, 2)
    return read(net, net.reshape(net.expand(k, "N", 2, 3, 3, 2), "N", 6, 3, 2), (1, 2, 3, 5))


def dead_embedding() -> Graph:
    net = Net()
    return read(net, net.embedding(net.input("N", 3, name="ids", dtype="int64"), 5, 4), (1, 3), axis=2)


def dead_embedding_positions() -> Graph:
    net = Net()
    return read(net, net.embedding(net.input("N", 3, name="ids", dtype="int64"), 5, 4), (0, 2), axis=1)


def dead_embedding_of_rows_with_axes() -> Graph:
    net, rows = experts(5, 4)
    return read(net, rows, (0, 2, 3), axis=1)


def dead_readers_need_different_parts() -> Graph:
    """What is made is what any reader needs; each selects from that."""
    net, h = vector(6)
    a, b = net.pointwise("relu", net.cut(h, 1, (1, 3))), net.pointwise("tanh", net.cut(h, 1, (3, 4)))
    net.pointwise("add", a, b)
    return done(net)


def dead_reader_of_a_size() -> Graph:
    """A plane reads only the spatial size: it does not keep the channels alive."""
    net, h = image(height="H", width="W")
    ones = net.insert("plane", (h,), (1, 1, "H", "W"), axis=1)
    net.pointwise("add", net.cut(h, 1, (1, 3)), ones)
    return done(net)


def dead_nodes() -> Graph:
    """A branch that nothing reads any more."""
    net, h = vector()
    branch = net.linear(net.pointwise("relu", net.linear("x", 5)), 2)
    joined = net.concat(branch, h, axis=1)
    return read(net, joined, (2, 3, 4, 5))


DEAD: dict[str, Example] = {
    "linear": dead_linear,
    "linear-along-another-axis": dead_linear_along_another_axis,
    "linear-readers-need-different-parts": dead_readers_need_different_parts,
    "conv": dead_conv,
    "conv-depthwise": dead_conv_depthwise,
    "conv-of-fewer-samples": dead_conv_of_fewer_samples,
    "conv-in-groups": dead_conv_in_groups,
    "conv-transposed": dead_conv_transposed,
    "conv-transposed-in-groups": dead_conv_transposed_in_groups,
    "conv-reader-of-a-size": dead_reader_of_a_size,
    "pointwise": dead_pointwise,
    "pointwise-of-one-value-twice": dead_pointwise_of_one_value_twice,
    "pointwise-batch-norm": dead_pointwise_batch_norm,
    "along": dead_along,
    "along-norm": dead_along_norm,
    "along-gather": dead_along_gather,
    "along-repeats": dead_along_repeats,
    "reshape": dead_reshape,
    "reshape-to-merged-samples": dead_reshape_to_merged_samples,
    "transpose": dead_transpose,
    "expand": dead_expand,
    "expand-of-one": dead_expand_of_one,
    "expand-to-merged-samples": dead_expand_to_merged_samples,
    "expand-in-different-copies": dead_expand_in_different_copies,
    "concat": dead_concat,
    "concat-of-one-part": dead_concat_of_one_part,
    "concat-along-another-axis": dead_concat_along_another_axis,
    "concat-dead-branch": dead_nodes,
    "select": dead_select,
    "select-that-spreads": dead_select_that_spreads,
    "select-along-another-axis": dead_select_along_another_axis,
    "do": dead_do,
    "do-along-another-axis": dead_do_along_another_axis,
    "do-of-nothing-read": dead_do_of_nothing_read,
    "do-affine": dead_do_affine,
    "matmul": dead_matmul,
    "matmul-rows": dead_matmul_rows,
    "matmul-columns": dead_matmul_columns,
    "reshape-of-copies": dead_reshape_of_copies,
    "attention": dead_attention,
    "attention-units": dead_attention_units,
    "attention-queries": dead_attention_queries,
    "attention-with-shared-heads": dead_attention_with_shared_heads,
    "embedding": dead_embedding,
    "embedding-positions": dead_embedding_positions,
    "embedding-of-rows-with-axes": dead_embedding_of_rows_with_axes,
}
