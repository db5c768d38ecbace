"""Constants that a linear op absorbs."""

from __future__ import annotations

import numpy as np
from graphs import Do
from rewrites.start import TWO, Example, done, image, sequence, vector

from cmrc.ir.graph import Graph


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


def linear_with_a_factor_and_no_place_for_a_bias() -> Graph:
    net, h = vector()
    net.linear(h, 2, alpha=0.5, bias=False, takes_bias=False)
    return done(net, Do(h, 1, (2, 0), *TWO))


def linear_in_front_without_bias() -> Graph:
    net, h = image()
    net.linear(h, 2, axis=1, bias=False, takes_bias=False)
    return done(net, Do(h, 1, (2, 0), *TWO))


LINEAR: dict[str, Example] = {
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
}
