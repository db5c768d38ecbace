"""Sizes that a model computes from its own values: followed, fixed, and patched when the value shrinks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hosts.onnx.lowering import (
    ints,
    lower,
    model,
    random,
    sizes_of,
)
from hosts.onnx.rows import B, W

from cmrc.hosts.onnx.host import OnnxHost


def test_sizes_read_from_the_model_itself() -> None:
    """Fixed sizes become tensors, and stay what they were when the value that they came from shrinks."""
    proto = model(
        """
        h = MatMul(x, w1)
        a = Relu(h)
        s = Shape(a)
        n = Gather(s, zero)
        c = Gather(s, two)
        n1 = Unsqueeze(n, at)
        c1 = Unsqueeze(c, at)
        to = Concat<axis=0>(n1, four, c1)
        b = MatMul(a, w2)
        y = Expand(b, to)
        """,
        {"x": ("N", 1, 5)}, "y", w1=random(5, 8), w2=random(8, 8), zero=np.int64(0), two=np.int64(2), at=ints(0), four=ints(4),
    )  # fmt: skip
    host = OnnxHost.from_model(proto)
    shapes = [node for node in host.graph.nodes if node.kind == "Shape"]
    assert [node.marks.shape_only for node in shapes] == [(0,)]
    assert host.graph.values()["y"].shape[1:] == (4, 8)
    lowered = lower(host, [random(3, 1, 5)], "a", 2, (0, 5), (1.5, 2.5))
    assert sizes_of(lowered)["w1"] == [5, 6]


def test_zeros_of_the_size_of_a_value_hold_none_of_its_units() -> None:
    """What torch writes for zeros_like: the value is read for its shape alone, and the target is put together anew."""
    proto = model(
        """
        h = MatMul(x, w1)
        first = Slice(h, zero, one, one)
        s = Shape(first)
        z = Expand(nought, s)
        c = Concat<axis=1>(z, h)
        a = Relu(c)
        y = MatMul(a, w2)
        """,
        {"x": ("N", 2, 5)}, "y", w1=random(5, 8), w2=random(8, 3), zero=ints(0), one=ints(1), nought=np.float32(0),
    )  # fmt: skip
    lowered = lower(OnnxHost.from_model(proto), [random(3, 2, 5)], "a", 2, (0, 5), (1.5, 2.5))
    assert sizes_of(lowered)["w1"] == [5, 6]


@pytest.mark.parametrize(
    "lines",
    [
        "s = Shape(a)\nt = Slice(s, zero, two)\nto = Concat<axis=0>(t, rest)\nb = Reshape(a, to)\nz = Unsqueeze(b, last)",
        "s = Shape(a)\nt = Slice(s, zero, two)\nto = Concat<axis=0>(t, hw)\nz = Resize(a, , , to)",
        "s = Shape(a)\nn = Gather(s, i0)\nc = Gather(s, i1)\nn1 = Unsqueeze(n, zero)\nc1 = Unsqueeze(c, zero)\n"
        "to = Concat<axis=0>(n1, c1, rest)\nb = Reshape(a, to)\nz = Unsqueeze(b, last)",
    ],
)
def test_sizes_that_shape_the_value_itself_let_it_shrink(lines: str) -> None:
    """What torch writes for flatten(2) and for interpolate(size): the units' own axis is read, and the shape follows."""
    proto = model(
        f"h = Conv(x, W, B)\na = Relu(h)\n{lines}\ny = Conv(z, L)", {"x": ("N", 4, 6, 6)}, "y",
        W=W, B=B, L=random(3, 8, 1, 1), zero=ints(0), two=ints(2), rest=ints(-1), hw=ints(9, 12), last=ints(3),
        i0=np.int64(0), i1=np.int64(1),
    )  # fmt: skip
    lowered = lower(OnnxHost.from_model(proto), [random(2, 4, 6, 6)], "a", 1, (1, 4), (0.6, 1.8))
    assert sizes_of(lowered)["W"] == [6, 4, 1, 1]


def test_a_computed_target_is_followed_through_where_and_equal() -> None:
    proto = model(
        """
        s = Shape(x)
        n = Gather(s, i0)
        n1 = Unsqueeze(n, zero)
        to = Concat<axis=0>(n1, minus, eight)
        ones = ConstantOfShape<value=int64[1]{1}>(three)
        negative = Mul(ones, minus)
        free = Equal(to, negative)
        at = Where(free, ones, to)
        y = Expand(token, at)
        """,
        {"x": ("N", 5)}, "y", i0=np.int64(0), zero=ints(0), minus=ints(-1), eight=ints(8), three=ints(3),
        token=random(1, 1, 8),
    )  # fmt: skip
    assert OnnxHost.from_model(proto).graph.values()["y"].shape == ("N", 1, 8)


@pytest.mark.parametrize(("op", "size"), [("Mul", "2*N"), ("Add", None)], ids=["a product is known", "a sum is not"])
def test_a_target_computed_from_a_dynamic_size(op: str, size: str | None) -> None:
    """A size has a name as a product of others; for a sum there is none."""
    lines = f"s = Shape(x)\nn = Gather(s, i0)\nm = {op}(n, two)\nto = Concat<axis=0>(m, four)\ny = Expand(row, to)"
    proto = model(lines, {"x": ("N", 8)}, "y", i0=ints(0), two=ints(2), four=ints(4), row=random(1, 4))
    rows, columns = OnnxHost.from_model(proto).graph.values()["y"].shape
    assert columns == 4
    assert rows == size if size else rows not in ("N", "2*N")


@pytest.mark.parametrize("computed", [False, True])
def test_reshapes_with_baked_sizes_are_patched(computed: bool) -> None:
    """Heads: (N, T, H*D) -> (N, T, H, D) -> (N, T, H*D); two of four heads go."""
    lines = """
        h = MatMul(x, w1)
        r = Reshape(h, heads)
        t = Transpose<perm=[0,2,1,3]>(r)
        a = Relu(t)
        u = Transpose<perm=[0,2,1,3]>(a)
        f = Reshape(u, flat)
        y = MatMul(f, w2)
    """
    arrays: dict[str, Any] = {"w1": random(5, 8), "w2": random(8, 3)}
    if computed:
        lines = (
            "s = Shape(x)\nn = Slice(s, i0, i1)\nheads = Concat<axis=0>(n, seven, four2)\nflat = Concat<axis=0>(n, seven8)\n"
            + lines
        )
        arrays |= {"i0": ints(0), "i1": ints(1), "seven": ints(7), "four2": ints(4, 2), "seven8": ints(7, 8)}
    else:
        arrays |= {"heads": ints(-1, 7, 4, 2), "flat": ints(0, 7, 8)}
    host = OnnxHost.from_model(model(lines, {"x": ("N", 7, 5)}, "y", **arrays))
    lowered = lower(host, [random(4, 7, 5)], "a", 1, (0, 2), (0.5, 1.5))
    assert sizes_of(lowered)["w1"] == [5, 4]
    assert sizes_of(lowered)["w2"] == [4, 3]
