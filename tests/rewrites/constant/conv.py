"""Constants that a convolution absorbs: plain, padded, transposed, in groups, depthwise."""

from __future__ import annotations

import numpy as np
from graphs import Do, Net
from rewrites.start import TWO, Example, done, image

from cmrc.ir.graph import Graph


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


def conv_padded_with_a_carrier() -> Graph:
    """Three channels stay, and a fourth is 1 everywhere: a block of 4."""
    net, h = image(6, height=4)
    net.conv(net.pointwise("relu", h), 2, (3, 3), pad=((1, 1), (1, 1)))
    return done(net, Do("relu_1", 1, (4, 0, 2), [0.5, -1.0, 2.0]))


def conv_padded_with_a_carrier_behind_batch_norm() -> Graph:
    """A hard swish leaves 4 as it is, and not 1."""
    net = Net()
    h = net.pointwise("hard_swish", net.batch_norm(net.conv(net.input("N", 2, "H", "W"), 6, (1, 1), bias=False)))
    net.conv(h, 2, (3, 3), pad=((1, 1), (1, 1)), bias=False)
    return done(net, Do(h, 1, (5, 1, 2), [0.5, -1.0, 2.0]))


def conv_transposed_with_a_carrier() -> Graph:
    net = Net()
    h = net.conv(net.input("N", 2, "H", "W"), 5, (2, 2), transposed=True, bias=False)
    net.conv(h, 2, (3, 3), stride=(2, 2), transposed=True)
    return done(net, Do(h, 1, (1, 0), *TWO))


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


def conv_padded_to_the_same_size() -> Graph:
    net, h = image(height=4)
    net.conv(h, 2, (3, 2), pad="same_upper")
    return done(net, Do(h, 1, (2, 0), *TWO))


def conv_transposed_before_batch_norm_at_any_size() -> Graph:
    """The kernel of a transposed convolution has its outputs along axis 1."""
    net, h = image(height="H", width="W")
    net.batch_norm(net.conv(h, 2, (3, 3), transposed=True))
    return done(net, Do(h, 1, (2, 0), *TWO))


def conv_depthwise_by_zero() -> Graph:
    net, h = image(height="H", width="W")
    net.conv(net.conv(h, 4, (3, 3), pad=((1, 1), (1, 1)), groups=4), 2, (1, 1))
    return done(net, Do(h, 1, (2, 0), 0.0))


CONV: dict[str, Example] = {
    "conv": conv,
    "conv-padded": conv_padded,
    "conv-padded-at-any-size": conv_padded_at_any_size,
    "conv-padded-before-batch-norm": conv_padded_before_batch_norm,
    "conv-padded-before-batch-norm-at-any-size": conv_padded_before_batch_norm_at_any_size,
    "conv-padded-of-a-large-size": conv_padded_of_a_large_size,
    "conv-padded-by-zero": conv_padded_by_zero,
    "conv-padded-to-the-same-size": conv_padded_to_the_same_size,
    "conv-padded-with-a-carrier": conv_padded_with_a_carrier,
    "conv-padded-with-a-carrier-behind-batch-norm": conv_padded_with_a_carrier_behind_batch_norm,
    "conv-by-position": conv_by_position,
    "conv-transposed": conv_transposed,
    "conv-transposed-before-batch-norm-at-any-size": conv_transposed_before_batch_norm_at_any_size,
    "conv-transposed-with-a-carrier": conv_transposed_with_a_carrier,
    "conv-transposed-in-groups": conv_transposed_in_groups,
    "conv-in-groups": conv_in_groups,
    "conv-depthwise": conv_depthwise,
    "conv-depthwise-by-zero": conv_depthwise_by_zero,
    "conv-depthwise-padded": conv_depthwise_padded,
    "conv-depthwise-padded-at-any-size": conv_depthwise_padded_at_any_size,
}
