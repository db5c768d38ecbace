"""Constants through attention and products of values."""

from __future__ import annotations

import numpy as np
from graphs import Do, Net
from rewrites.start import TWO, Example, attend, done, experts, sequence, three_heads

from cmrc.ir.graph import Graph, literal


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


ATTENTION: dict[str, Example] = {
    "attention": attention_values,
    "attention-values-of-shared-heads": attention_values_of_shared_heads,
    "attention-queries": attention_queries,
    "attention-keys": attention_keys,
    "matmul": matmul,
    "matmul-of-a-softmax": matmul_of_a_softmax,
    "matmul-of-zero-rows": matmul_of_zero_rows,
    "matmul-of-stacked-weights": matmul_of_stacked_weights,
    "matmul-of-a-weight-in-front": matmul_of_a_weight_in_front,
    "matmul-of-looked-up-weights": matmul_of_looked_up_weights,
    "matmul-with-looked-up-weights-behind": matmul_with_looked_up_weights_behind,
}
