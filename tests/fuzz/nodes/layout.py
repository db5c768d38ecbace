"""Makers of ops that lay numbers out anew."""

from __future__ import annotations

import itertools

import numpy as np

from tests.fuzz.builder import Builder, Unfit
from tests.fuzz.nodes.maker import Maker


def transpose(b: Builder) -> None:
    x = b.pick(least=1)
    b.node("Transpose", [x], perm=None if b.chance(0.1) else [int(p) for p in b.rng.permutation(x.rank)])


def reshape(b: Builder) -> None:
    """Merge neighbours, split an axis, or anything of the same size; with 0 and -1 as they come."""
    x = b.pick()
    shape = list(x.shape)
    form = b.rng.random()
    if form < 0.4 and x.rank >= 2:
        at = b.between(0, x.rank - 2)
        shape[at : at + 2] = [shape[at] * shape[at + 1]]
    elif form < 0.8 and x.rank >= 1:
        at = b.between(0, x.rank - 1)
        factors = [n for n in range(1, shape[at] + 1) if shape[at] % n == 0] or [1]
        factor = b.choose(factors)
        shape[at : at + 1] = [factor, shape[at] // factor]
    elif form < 0.9:
        shape = [x.array.size]
    else:
        shape = list(b.rng.permutation(shape)) if shape else [1]
    target = [int(n) for n in shape]
    whole = b.chance(0.25)
    if target and not whole and 0 not in target and b.chance(0.8):
        target[b.between(0, len(target) - 1)] = -1
    for i in range(min(len(target), x.rank)):
        if not whole and target[i] == x.shape[i] and b.chance(0.4):
            target[i] = 0
    b.node("Reshape", [x, b.ints(*target)])


def computed_reshape(b: Builder) -> None:
    """The target is made from Shape, as exporters do it."""
    x = b.pick(least=2, most=5)
    sizes = b.node("Shape", [x])[0]
    first = b.node("Gather", [sizes, b.ints(0)], axis=0)[0]
    target = b.node("Concat", [first, b.ints(-1)] if b.chance(0.6) else [first, b.ints(x.shape[1], -1)], axis=0)[0]
    b.node("Reshape", [x, target])


def flatten(b: Builder) -> None:
    x = b.pick(least=1)
    b.node("Flatten", [x], axis=b.between(-x.rank if b.opset >= 11 else 0, x.rank) if b.chance(0.6) else None)


def squeeze(b: Builder) -> None:
    x = b.pick(least=1)
    ones = [i for i, n in enumerate(x.shape) if n == 1]
    if not ones:
        raise Unfit("nothing to squeeze")
    axes = sorted({b.choose(ones) for _ in range(2)})
    axes = [a - x.rank if b.opset >= 11 and b.chance(0.3) else a for a in axes]
    if b.chance(0.15):
        b.node("Squeeze", [x])
    elif b.opset >= 13:
        b.node("Squeeze", [x, b.ints(*axes)])
    else:
        b.node("Squeeze", [x], axes=axes)


def unsqueeze(b: Builder) -> None:
    x = b.pick(most=4)
    axes = [b.between(-x.rank - 1 if b.opset >= 11 else 0, x.rank)]
    if b.opset >= 13:
        b.node("Unsqueeze", [x, b.ints(*axes)])
    else:
        b.node("Unsqueeze", [x], axes=axes)


def concat(b: Builder) -> None:
    x = b.pick(least=1)
    axis = b.axis(x)
    fitting = [
        v
        for v in b.values.values()
        if v.rank == x.rank
        and v.array.dtype == x.array.dtype
        and all(n == m for i, (n, m) in enumerate(zip(v.shape, x.shape, strict=True)) if i != axis % x.rank)
    ]
    parts = [x, *(b.choose(fitting) for _ in range(b.between(0, 2)))]
    if b.chance(0.3):
        shape = [b.between(1, 3) if i == axis % x.rank else n for i, n in enumerate(x.shape)]
        parts.append(b.const(b.weights(*shape, dtype=x.array.dtype)))
    b.node("Concat", [parts[i] for i in b.rng.permutation(len(parts))], axis=axis)


def split(b: Builder) -> None:
    x = b.pick(least=1)
    axis = b.axis(x)
    size = x.shape[axis % x.rank]
    if size < 2:
        raise Unfit("nothing to split")
    cuts = sorted({0, size, *(b.between(1, size - 1) for _ in range(b.between(1, 2)))})
    sizes = [high - low for low, high in itertools.pairwise(cuts)]
    if b.chance(0.05):
        sizes.append(0)
    uneven = b.chance(0.6)
    if not uneven:
        sizes = [size // 2] * 2 if size % 2 == 0 else [size]
    operands, attrs = [x], {"axis": axis}
    if uneven and b.opset >= 13:
        operands.append(b.ints(*sizes))
    elif uneven:
        attrs["split"] = sizes
    elif b.opset >= 18:
        attrs["num_outputs"] = len(sizes)
    parts = b.node("Split", operands, outputs=len(sizes), **attrs)
    b.current = b.choose(parts)
    if b.chance(0.3) and len({p.shape for p in parts}) == 1 and len(parts) > 1:
        b.node("Mul", [parts[0], b.node("Sigmoid", [parts[1]])[0]])


def slice_(b: Builder) -> None:
    x = b.pick(least=1)
    axes = sorted({b.axis(x) for _ in range(b.choose([1, 1, 2]))})
    if len({a % x.rank for a in axes}) < len(axes):
        raise Unfit("an axis twice")
    starts, ends, steps = [], [], []
    for axis in axes:
        size = x.shape[axis % x.rank]
        low = b.between(0, max(size - 1, 0))
        backwards = b.opset >= 10 and b.chance(0.1)
        starts.append(-1 if backwards else low - size if b.chance(0.2) else low)
        ends.append(-size - 5 if backwards else b.choose([size, 2**31 - 1, 2**62, low + 1, -1]))
        steps.append(-1 if backwards else b.choose([1, 1, 2]))
    if b.opset < 10:
        b.node("Slice", [x], starts=starts, ends=ends, axes=axes)
    else:
        some = [b.ints(*starts), b.ints(*ends), b.ints(*axes)]
        b.node("Slice", [x, *some, b.ints(*steps)] if b.chance(0.6) or -1 in steps else [x, *some])


def expand(b: Builder) -> None:
    x = b.pick(most=4)
    target = [b.choose([n, 1, 2, 3]) if n == 1 else b.choose([n, 1]) for n in x.shape]
    if b.chance(0.2):
        target = [2, *target]
    if target:
        b.node("Expand", [x, b.ints(*target)])


def gather(b: Builder) -> None:
    x = b.pick(least=1)
    axis = b.axis(x)
    size = x.shape[axis % x.rank]
    if not size:
        raise Unfit("nothing to gather")
    low = -size if b.opset >= 11 else 0
    shape = b.choose([(), (1,), (2,), (size,), (2, 2)])
    index = b.const(b.rng.integers(low, size, size=shape).astype(np.int64), plain=True)
    if b.chance(0.3) and shape == (size,):
        index = b.const(b.rng.permutation(size).astype(np.int64), plain=True)
    b.node("Gather", [x, index], axis=axis)


LAYOUT: dict[str, Maker] = {
    "Transpose": transpose, "Reshape": reshape, "Reshape2": reshape, "computed_reshape": computed_reshape, "Flatten": flatten,
    "Squeeze": squeeze, "Unsqueeze": unsqueeze, "Concat": concat, "Split": split, "Slice": slice_, "Expand": expand,
    "Gather": gather,
}  # fmt: skip
