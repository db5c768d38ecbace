"""Constants through ops along other axes, or along their own: means, pools, norms, padding, gathers."""

from __future__ import annotations

import numpy as np
from graphs import Do
from rewrites.start import TWO, Example, done, gathered, image, sequence, vector

from cmrc.ir.graph import Graph, literal


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


def along_group_norm() -> Graph:
    """One unit of the first group is left beside two numbers that stand for the others; the second group is whole."""
    net, h = image(channels=6)
    norm = net.along("group_norm", h, (1, 2, 3), net.leaf(6), net.leaf(6), eps=0.1, groups=2, align=(None, (1,), (1,)))
    net.conv(norm, 2, (1, 1))
    return done(net, Do(h, 1, (2, 0), *TWO))


def along_group_norm_of_whole_groups() -> Graph:
    """What a norm makes of a group of constants is constant."""
    net, h = image(channels=4)
    norm = net.along("group_norm", h, (1, 2, 3), net.leaf(4), None, eps=0.1, groups=2, align=(None, (1,), None))
    net.conv(net.pointwise("relu", norm), 2, (1, 1))
    return done(net, Do(h, 1, (3, 2), *TWO))


ALONG: dict[str, Example] = {
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
    "along-group-norm": along_group_norm,
    "along-group-norm-of-whole-groups": along_group_norm_of_whole_groups,
    "along-gather": along_gather,
    "along-repeats": along_repeats,
    "along-the-units": along_the_units,
    "along-the-units-by-constants": along_the_units_by_constants,
    "along-the-units-as-a-sum": along_the_units_as_a_sum,
}
