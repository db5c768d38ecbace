"""The rewrites of constant_fold, by constants known before the model runs."""

from __future__ import annotations

import numpy as np
from graphs import Do, Net
from rewrites.start import TWO, Example, attend, done, experts, gathered, image, sequence, three_heads, vector

from cmrc.ir.graph import Graph, literal


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
    net, h = image(height=4)
    net.conv(h, 2, (3, 3), pad=((1, 1), (1, 1)), bias=False)
    return done(net, Do(h, 1, (2, 0), *TWO))


def conv_padded_at_any_size() -> Graph:
    net, h = image(height="H", width="W")
    net.conv(h, 2, (3, 3), pad=((1, 1), (1, 1)))
    return done(net, Do(h, 1, (2, 0), *TWO))


def conv_padded_before_batch_norm() -> Graph:
    """The plane is added behind the batch norm, scaled as it scales."""
    net, h = image(height=4)
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
    return done(net, Do(h, 1, (2, 1), *TWO))


def conv_in_groups() -> Graph:
    net, h = image(6, height=4)
    net.conv(h, 4, (3, 3), pad=((1, 0), (0, 1)), groups=2)
    return done(net, Do(h, 1, (4, 0), *TWO))


def conv_depthwise() -> Graph:
    net, h = image()
    net.conv(net.conv(h, 4, (3, 3), groups=4), 2, (1, 1))
    return done(net, Do(h, 1, (2, 0), *TWO))


def conv_depthwise_padded() -> Graph:
    """A plane that has fewer numbers than the kernel."""
    net, h = image(height=2, width=4)
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


def along_norm_of_zeros() -> Graph:
    """An RMS norm recovers units of 0 from those that stay: their share of all enters its number and its weight."""
    net, h = vector()
    net.linear(net.along("rms_norm", h, (1,), net.leaf(4), eps=0.1), 2)
    return done(net, Do(h, 1, (2, 0), [0.0, 0.0]))


def along_norm_of_zeros_without_weight() -> Graph:
    net, h = vector()
    net.linear(net.along("rms_norm", h, (1,), None, eps=0.1), 2)
    return done(net, Do(h, 1, (1,), [0.0]))


def along_norm_of_constants() -> Graph:
    """Behind an RMS norm constants still vary with its scale: one number more tells it to the readers."""
    net, h = vector()
    net.linear(net.along("rms_norm", h, (1,), net.leaf(4), eps=0.1), 2)
    return done(net, Do(h, 1, (2, 0), *TWO))


def along_layer_norm() -> Graph:
    """The statistics of all units follow from those of the two that stay; two numbers more tell readers of the others."""
    net, h = vector()
    net.linear(net.along("layer_norm", h, (1,), net.leaf(4), net.leaf(4), eps=0.1), 2)
    return done(net, Do(h, 1, (2, 0), *TWO))


def along_layer_norm_of_equal_constants() -> Graph:
    """One number is enough."""
    net, h = sequence(4)
    net.linear(net.along("layer_norm", h, (2,), eps=0.1), 2)
    return done(net, Do(h, 2, (2, 0), [0.5, 0.5]))


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


def linear_with_a_factor_and_no_place_for_a_bias() -> Graph:
    net, h = vector()
    net.linear(h, 2, alpha=0.5, bias=False, takes_bias=False)
    return done(net, Do(h, 1, (2, 0), *TWO))


def conv_padded_to_the_same_size() -> Graph:
    net, h = image(height=4)
    net.conv(h, 2, (3, 2), pad="same_upper")
    return done(net, Do(h, 1, (2, 0), *TWO))


def conv_transposed_before_batch_norm_at_any_size() -> Graph:
    """The kernel of a transposed convolution has its outputs along axis 1."""
    net, h = image(height="H", width="W")
    net.batch_norm(net.conv(h, 2, (3, 3), transposed=True))
    return done(net, Do(h, 1, (2, 0), *TWO))


def pointwise_gate_by_position() -> Graph:
    """One unit is 0 at every position, the other at one of them: only the first closes the gate."""
    net, h = sequence()
    net.linear(net.pointwise("mul", h, net.linear("x", 4)), 2)
    return done(net, Do(h, 2, (2, 0), [[[0.0, 0.0], [0.0, 0.5], [0.0, 1.0]]]))


def pointwise_sum_with_a_factor() -> Graph:
    """(y + v) + 2p is not y + (p + v)."""
    net, h = vector()
    net.pointwise("add", net.linear(h, 2, bias=False, takes_bias=False), net.leaf(2), alpha=2.0)
    return done(net, Do(h, 1, (2, 0), *TWO))


def along_dropped_positions() -> Graph:
    """The axis in front of the units is dropped: they lie along another one then."""
    net, h = sequence()
    net.linear(net.along("amax", h, (1,), drop=True), 2)
    return done(net, Do(h, 2, (2, 0), *TWO))


def along_padding() -> Graph:
    """Around a constant by another number: a plane. By the same number it would stay that number."""
    net, h = image()
    pads = ((0, 0), (0, 0), (1, 0), (0, 1))
    net.conv(net.along("pad", h, (2, 3), shape=("N", 4, 6, 5), pads=pads, value=0.5), 2, (1, 1))
    return done(net, Do(h, 1, (2, 0), *TWO))


def merged() -> tuple[Net, str]:
    """Two rows of each sample as samples of their own, of four units."""
    net, h = sequence(steps=2)
    return net, net.reshape(h, "2*N", 4)


def reshape_of_samples_merged_before() -> Graph:
    """Every unit stands twice in the row of a sample."""
    net, h = merged()
    net.linear(net.reshape(h, "N", 8), 2)
    return done(net, Do(h, 1, (2, 0), *TWO))


def reshape_of_samples_into_blocks() -> Graph:
    """Two units with different constants become one position of the last axis but one."""
    net, h = merged()
    split = net.reshape(h, "N", 2, 2, 2)
    net.linear(net.reshape(split, "N", 2, 4), 2)
    return done(net, Do(h, 1, (3, 2), *TWO))


def expand_in_front() -> Graph:
    """The axis of the units has another number behind it."""
    net = Net()
    h = net.linear(net.input(3, 2), 4)
    net.linear(net.expand(h, "N", 3, 4), 2)
    return done(net, Do(h, 1, (2, 0), *TWO))


def select_in_another_order() -> Graph:
    net, h = vector()
    net.linear(net.select(h, 1, (2, 1, 0)), 2)
    return done(net, Do(h, 1, (2, 0), *TWO))


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
    "linear-with-a-factor-and-no-place-for-a-bias": linear_with_a_factor_and_no_place_for_a_bias,
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
    "conv-padded-to-the-same-size": conv_padded_to_the_same_size,
    "conv-by-position": conv_by_position,
    "conv-transposed": conv_transposed,
    "conv-transposed-before-batch-norm-at-any-size": conv_transposed_before_batch_norm_at_any_size,
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
    "pointwise-gate-by-position": pointwise_gate_by_position,
    "pointwise-beside-zero": pointwise_beside_zero,
    "pointwise-minus-from-zero": pointwise_minus_from_zero,
    "pointwise-disjoint-zeros": pointwise_disjoint_zeros,
    "pointwise-known-operand": pointwise_known_operand,
    "pointwise-known-altogether": pointwise_known_altogether,
    "pointwise-aligned": pointwise_aligned,
    "pointwise-sum-with-a-factor": pointwise_sum_with_a_factor,
    "along-mean": along_mean,
    "along-dropped-positions": along_dropped_positions,
    "along-sum": along_sum,
    "along-padded-pool": along_padded_pool,
    "along-padding": along_padding,
    "along-norm": along_norm,
    "along-layer-norm": along_layer_norm,
    "along-layer-norm-of-equal-constants": along_layer_norm_of_equal_constants,
    "along-norm-of-constants": along_norm_of_constants,
    "along-norm-of-zeros": along_norm_of_zeros,
    "along-norm-of-zeros-without-weight": along_norm_of_zeros_without_weight,
    "along-gather": along_gather,
    "along-repeats": along_repeats,
    "reshape": reshape,
    "reshape-to-heads": reshape_to_heads,
    "reshape-of-samples-merged-before": reshape_of_samples_merged_before,
    "reshape-of-samples-into-blocks": reshape_of_samples_into_blocks,
    "transpose": transpose,
    "expand": expand,
    "expand-in-front": expand_in_front,
    "concat": concat,
    "concat-along-another-axis": concat_along_another_axis,
    "concat-of-equal-constants": concat_of_equal_constants,
    "select": select,
    "select-in-another-order": select_in_another_order,
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
