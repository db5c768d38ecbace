"""Windows that a kernel sees of the trailing axes of an array: for pooling and convolution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from cmrc.ir.graph import Array


def windows(
    x: Array,
    kernel: Sequence[int],
    stride: Sequence[int],
    pads: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    fill: float,
) -> Array:
    rank = len(kernel)
    lead = x.ndim - rank
    x = np.pad(x, [(0, 0)] * lead + [(max(lo, 0), max(hi, 0)) for lo, hi in pads], constant_values=fill)
    inner = [slice(max(-lo, 0), x.shape[lead + i] - max(-hi, 0)) for i, (lo, hi) in enumerate(pads)]
    x = x[tuple([slice(None)] * lead + inner)]
    reach = tuple(d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True))
    views = sliding_window_view(x, reach, axis=tuple(range(lead, x.ndim)))
    steps = [slice(None)] * lead + [slice(None, None, s) for s in stride] + [slice(None, None, d) for d in dilation]
    return np.asarray(views[tuple(steps)])
