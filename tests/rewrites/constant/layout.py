"""Constants through ops that lay numbers out anew: reshape, transpose, expand, concat, select, and the plane of a mask."""

from __future__ import annotations

import numpy as np
from graphs import Do, Net
from rewrites.start import TWO, Example, done, image, sequence, vector

from cmrc.ir.graph import Graph


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


def concat_of_equal_constants() -> Graph:
    net, h = sequence(steps="T")
    other = net.linear("x", 4)
    net.linear(net.node("concat", (h, other), ("N", "2*T", 4), axis=1), 2)
    return done(net, Do(h, 2, (2, 0), *TWO), Do(other, 2, (0, 2), [-1.0, 0.5]))


def select_along_another_axis() -> Graph:
    net, h = sequence()
    net.linear(net.select(h, 1, (0, 2)), 2)
    return done(net, Do(h, 2, (1,), np.arange(3.0).reshape(1, 3, 1)))


def plane() -> Graph:
    net, h = image(height="H", width="W")
    ones = net.insert("plane", (h,), (1, 1, "H", "W"), axis=1)
    net.pointwise("add", net.conv(h, 2, (1, 1)), ones)
    return done(net, Do(h, 1, (2, 0), *TWO))


LAYOUT: dict[str, Example] = {
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
    "plane": plane,
}
