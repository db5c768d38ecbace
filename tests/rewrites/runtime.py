"""The rewrites of constant_fold, by constants known only at run time."""

from __future__ import annotations

from graphs import Do, Net
from rewrites.start import TWO, Example, done, image

from cmrc.ir.graph import Graph


def known_at_run_time(channels: int = 4, height: int | str = "H", width: int | str = "W") -> tuple[Net, str]:
    """A padded depthwise convolution of any size: its replaced channels are a plane known only at run time."""
    net, h = image(channels, height, width)
    return net, net.conv(h, channels, (3, 3), pad=((1, 1), (1, 1)), groups=channels)


def at_run_time(net: Net, *more: Do) -> Graph:
    return done(net, Do("conv_1", 1, (2, 0), *TWO), *more)


def run_time_linear() -> Graph:
    net, h = known_at_run_time()
    net.linear(h, 2, axis=1, alpha=0.5)
    return at_run_time(net)


def run_time_linear_in_another_order() -> Graph:
    """The value known at run time has its units in the order in which a select takes them."""
    net, h = known_at_run_time()
    net.linear(net.select(h, 1, (2, 1, 0)), 2, axis=1)
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
    """A plane known only at run time and numbers, in the same units, and a slope for each channel."""
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
    "linear-in-another-order": run_time_linear_in_another_order,
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
