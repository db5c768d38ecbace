"""The rewrites of dead_subgraph."""

from __future__ import annotations

import numpy as np
from graphs import Net
from rewrites.start import Example, done, experts, gathered, image, sequence, vector

from cmrc.ir.graph import Graph, literal


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
    """Three groups of two outputs: one group goes with its three inputs, the others keep one output each."""
    net, h = image(9)
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
