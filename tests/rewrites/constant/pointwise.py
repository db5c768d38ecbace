"""Constants through ops on each number by itself: activations, sums, gates."""

from __future__ import annotations

from graphs import Do
from rewrites.start import TWO, Example, done, image, sequence, vector

from cmrc.ir.graph import Graph


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


def pointwise_known_altogether() -> Graph:
    """Both summands are constant in every unit: the sum is."""
    net, h = vector(2)
    other = net.linear("x", 2)
    net.linear(net.concat(net.pointwise("add", h, other), other, axis=1), 2)
    return done(net, Do(h, 1, (1, 0), *TWO), Do(other, 1, (0, 1), [0.25, 0.75]))


POINTWISE: dict[str, Example] = {
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
}
