"""The evaluator against torch: convolutions of every kind, and pools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from ir.against_torch import agree, as_tensor, normal

from cmrc.ir.tensors import evaluate_op

Draw = Callable[[st.SearchStrategy[Any]], Any]


@st.composite
def convolutions(draw: Draw) -> dict[str, Any]:
    rank, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    several = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(rank))  # noqa: E731
    return {
        "rank": rank, "groups": groups, "ins": groups * draw(st.integers(1, 2)), "outs": groups * draw(st.integers(1, 2)),
        "kernel": several(1, 3), "stride": several(1, 3), "dilation": several(1, 2), "padding": several(0, 2),
        "size": several(1, 6), "more": several(0, 2), "bias": draw(st.booleans()), "batched": draw(st.booleans()),
    }  # fmt: skip


def attributes(c: dict[str, Any], **more: Any) -> dict[str, Any]:
    names = ("stride", "dilation", "groups")
    pad = tuple((p, p) for p in c["padding"])
    return {"axis": int(c["batched"]), "pad": pad, **{name: c[name] for name in names}, **more}


@given(convolutions())
def test_convolution(c: dict[str, Any]) -> None:
    reach = [d * (k - 1) + 1 for d, k in zip(c["dilation"], c["kernel"], strict=True)]
    assume(all(n + 2 * p >= r for n, p, r in zip(c["size"], c["padding"], reach, strict=True)))
    x = normal(*((2,) if c["batched"] else ()), c["ins"], *c["size"])
    w, b = (
        normal(c["outs"], c["ins"] // c["groups"], *c["kernel"], seed=1),
        normal(c["outs"], seed=2) if c["bias"] else None,
    )
    ours = evaluate_op("conv", attributes(c), x, w, b)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[c["rank"] - 1]
    theirs = convolve(*map(as_tensor, (x, w, b)), c["stride"], c["padding"], c["dilation"], c["groups"])
    agree(ours, theirs)


@given(convolutions())
def test_transposed_convolution(c: dict[str, Any]) -> None:
    assume(all(m < max(s, d) for m, s, d in zip(c["more"], c["stride"], c["dilation"], strict=True)))
    parts = zip(c["size"], c["stride"], c["padding"], c["dilation"], c["kernel"], c["more"], strict=True)
    assume(all((n - 1) * s - 2 * p + d * (k - 1) + m + 1 > 0 for n, s, p, d, k, m in parts))
    x = normal(*((2,) if c["batched"] else ()), c["ins"], *c["size"])
    w, b = (
        normal(c["ins"], c["outs"] // c["groups"], *c["kernel"], seed=1),
        normal(c["outs"], seed=2) if c["bias"] else None,
    )
    ours = evaluate_op("conv", attributes(c, transposed=True, output_padding=c["more"]), x, w, b)
    convolve = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[c["rank"] - 1]
    theirs = convolve(*map(as_tensor, (x, w, b)), c["stride"], c["padding"], c["more"], c["groups"], c["dilation"])
    agree(ours, theirs)


@pytest.mark.parametrize("size", [5, 6, 7, 8])
@pytest.mark.parametrize(("pad", "before"), [("same_upper", False), ("same_lower", True)])
@pytest.mark.parametrize(("kernel", "stride", "dilation"), [(3, 2, 1), (2, 1, 1), (4, 3, 1), (3, 1, 2)])
def test_same_padding_depends_on_the_size(
    size: int, pad: str, before: bool, kernel: int, stride: int, dilation: int
) -> None:
    x, w = normal(1, 2, size), normal(3, 2, kernel, seed=1)
    attrs = {"axis": 1, "stride": (stride,), "pad": pad, "dilation": (dilation,), "groups": 1}
    total = max(0, (-(-size // stride) - 1) * stride + dilation * (kernel - 1) + 1 - size)
    small, large = total // 2, total - total // 2
    padded = F.pad(torch.from_numpy(x), (large, small) if before else (small, large))
    ours = evaluate_op("conv", attrs, x, w)
    assert ours.shape[2] == -(-size // stride)
    agree(ours, F.conv1d(padded, torch.from_numpy(w), stride=stride, dilation=dilation))


@pytest.mark.parametrize(("kernel", "stride", "extra"), [(3, 2, 0), (4, 2, 0), (5, 3, 1), (2, 2, 0), (3, 1, 0)])
def test_same_padding_of_a_transposed_convolution(kernel: int, stride: int, extra: int) -> None:
    attrs = {"axis": 1, "stride": (stride,), "pad": "same_upper", "dilation": (1,), "groups": 1, "transposed": True,
             "output_padding": (extra,)}  # fmt: skip
    ours = evaluate_op("conv", attrs, normal(1, 2, 4), normal(2, 3, kernel, seed=1))
    assert ours.shape == (1, 3, 4 * stride)


# ---------------------------------------------------------------- pools


@given(
    st.integers(1, 2),
    st.lists(st.tuples(st.integers(1, 7), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2), st.integers(1, 2)),
             min_size=2, max_size=2),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 3]),
)  # fmt: skip
def test_pools(rank: int, sizes: list[tuple[int, ...]], ceil: bool, include_pad: bool, divisor: int | None) -> None:
    size, kernel, stride, pad, dilation = (tuple(column[:rank]) for column in zip(*sizes, strict=True))
    assume(all(2 * p <= k for p, k in zip(pad, kernel, strict=True)))
    x = normal(2, 3, *size)
    pads = tuple((p, p) for p in pad)
    common = {"axes": tuple(range(2, 2 + rank)), "kernel": kernel, "stride": stride, "pad": pads, "ceil": ceil}
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    if all(n + 2 * p >= r for n, p, r in zip(size, pad, reach, strict=True)):
        ours = evaluate_op("along", {"fn": "max_pool", "dilation": dilation, **common}, x)
        pool: Any = (F.max_pool1d, F.max_pool2d)[rank - 1]
        agree(ours, pool(torch.from_numpy(x), kernel, stride, pad, dilation, ceil))
    assume(all(n + 2 * p >= k for n, p, k in zip(size, pad, kernel, strict=True)))
    divisor = divisor if rank == 2 else None
    ours = evaluate_op("along", {"fn": "avg_pool", "include_pad": include_pad, "divisor": divisor, **common}, x)
    if rank == 1:
        agree(ours, F.avg_pool1d(torch.from_numpy(x), kernel, stride, pad, ceil, include_pad))
    else:
        agree(ours, F.avg_pool2d(torch.from_numpy(x), kernel, stride, pad, ceil, include_pad, divisor))
