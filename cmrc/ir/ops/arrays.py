"""What the meanings of several ops do to arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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


def softmax(x: Array, attrs: Mapping[str, Any]) -> Array:
    axes = tuple(attrs["axes"])
    shifted = np.exp(x - x.max(axis=axes, keepdims=True, initial=-np.inf))  # of no elements, too
    return np.asarray(shifted / shifted.sum(axis=axes, keepdims=True))
