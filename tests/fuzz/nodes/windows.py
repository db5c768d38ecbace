"""The windows of convolutions and pools."""

from __future__ import annotations

from typing import Any

from tests.fuzz.builder import Builder, Held


def windows(b: Builder, x: Held, *, dilations: bool = True) -> tuple[list[int], dict[str, Any]]:
    """A kernel with strides, padding and dilation: larger than its input now and then."""
    rank = x.rank - 2
    kernel = [b.choose([1, 1, 2, 3, 3, 5, n or 1, n + 1]) for n in x.shape[2:]]
    attrs: dict[str, Any] = {}
    if b.chance(0.35):
        attrs["strides"] = [b.choose([1, 2, 3]) for _ in range(rank)]
    if dilations and b.chance(0.2):
        attrs["dilations"] = [b.choose([1, 2, 3]) for _ in range(rank)]
    if b.chance(0.12):
        attrs["auto_pad"] = b.choose(["SAME_UPPER", "SAME_LOWER", "VALID", "NOTSET"])
    elif b.chance(0.55):
        reach = [(k - 1) * d + 1 for k, d in zip(kernel, attrs.get("dilations", [1] * rank), strict=True)]
        if b.chance(0.5):
            pads = [r // 2 for r in reach]
            attrs["pads"] = pads + pads
        else:
            attrs["pads"] = [b.between(0, 2) for _ in range(2 * rank)]
    return kernel, attrs
