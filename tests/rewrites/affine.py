"""The rewrites of affine_fold."""

from __future__ import annotations

import numpy as np
from graphs import Do, Net
from rewrites.start import MIX, TWO, Example, done, image, sequence, vector

from cmrc.ir.graph import Graph, literal


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
    net, h = image(height=4)
    net.conv(h, 2, (3, 2), pad=((1, 0), (0, 1)))
    return affine(net, h)


def affine_conv_at_any_size() -> Graph:
    net, h = image(height="H", width="W")
    net.conv(h, 2, (3, 3), pad=((1, 1), (1, 1)))
    return affine(net, h)


def affine_conv_with_a_carrier() -> Graph:
    """Three of six units stay; what they do not rebuild comes through a fourth that is 1 everywhere."""
    net, h = image(6, height="H", width="W")
    net.conv(h, 2, (3, 3), pad=((1, 1), (1, 1)))
    return done(net, Do(h, 1, (4, 0, 2), [0.5, -1.0, 2.0], (3, 1), [[2.0, 0.0], [0.0, -0.5], [1.0, 1.0]]))


def affine_conv_transposed() -> Graph:
    net, h = image()
    net.conv(h, 2, (2, 2), stride=(2, 2), transposed=True)
    return affine(net, h)


def affine_conv_in_groups() -> Graph:
    net, h = image(6, height=4)
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
    "conv-with-a-carrier": affine_conv_with_a_carrier,
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
