"""Hypothesis strategies that draw graphs with do's at random sites."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from graphs import Do, Net, batch, with_do
from hypothesis import strategies as st
from random_steps import BAG, STEPS, Draw, axis_with_units, sorted_subset

from cmrc.ir.graph import Array, Dim, Graph, Shape
from cmrc.ir.text import to_text


@st.composite
def graphs(draw: Draw, most_steps: int = 9) -> Graph:
    """A graph without replacements, that ends in something affine more often than not."""
    net = Net(draw(st.integers(0, 2**16)))
    size: Callable[[str, int, int], Dim] = lambda symbol, low, high: (  # noqa: E731
        symbol if draw(st.integers(0, 3)) == 0 else draw(st.integers(low, high))
    )
    start = draw(st.sampled_from(["image", "image", "vector", "sequence", "signal", "ids"]))
    lead = "N" if draw(st.booleans()) else 2
    if start == "ids":
        net.embedding(net.input(lead, size("T", 2, 4), name="ids", dtype="int64"), 5, draw(st.integers(2, 6)))
    elif start == "vector":
        net.input(lead, draw(st.integers(2, 6)))
    elif start == "sequence":
        net.input(lead, size("T", 2, 4), draw(st.integers(2, 6)))
    elif start == "signal":
        net.input(lead, draw(st.integers(1, 4)), size("T", 4, 7))
    else:
        net.input(lead, draw(st.integers(1, 4)), size("H", 4, 6), size("W", 4, 6))
    latest = next(reversed(net.values))
    for _ in range(draw(st.integers(2, most_steps))):
        usable = [name for name, value in net.values.items() if value.dtype == "float32"]
        x = latest if draw(st.integers(0, 3)) else draw(st.sampled_from(usable))
        step_made = STEPS[draw(st.sampled_from(BAG))][1](draw, net, x)
        if step_made is not None and _small(net.shape(step_made)):
            latest = step_made
    closing = draw(st.sampled_from(["linear", "conv", "none"]))
    if closing != "none":
        latest = STEPS[closing][1](draw, net, latest) or latest
    net.output(latest)
    if draw(st.integers(0, 4)) == 0:
        net.output(draw(st.sampled_from(list(net.values))))
    return net.graph()


def _small(shape: Shape) -> bool:
    return math.prod(n if isinstance(n, int) else 5 for n in shape) < 3000


@st.composite
def _units(draw: Draw, size: int, full: bool) -> tuple[tuple[int, ...], int]:
    """Units to replace: any, in any order; all; whole blocks; or equally many of every group. And the size of a group."""
    kind = draw(st.sampled_from(["any", "any", "all", "blocks", "groups"]))
    parts = [g for g in range(2, size + 1) if size % g == 0]
    if kind == "all" and full:
        return tuple(draw(st.permutations(range(size)))), size
    if kind in ("blocks", "groups") and parts:
        count = draw(st.sampled_from(parts))
        each = size // count
        if kind == "blocks":
            chosen = sorted_subset(draw, count, 1, count - 1)
            return tuple(b * each + i for b in chosen for i in range(each)), size
        if each > 1:
            left = draw(st.integers(1, each - 1))
            return tuple(g * each + i for g in range(count) for i in sorted_subset(draw, each, left, left)), each
    return tuple(draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=size - 1, unique=True))), size


@st.composite
def dos(
    draw: Draw, graph: Graph, kinds: Sequence[str] = ("zero", "one", "flat", "slab", "affine", "affine")
) -> Do | None:
    """A replacement somewhere in a graph; nothing where no value has an axis of two units or more."""
    floats = [
        v
        for v in graph.values().values()
        if v.dtype == "float32" and any(isinstance(n, int) and n > 1 for n in v.shape)
    ]
    inner = [v for v in floats if v.name not in graph.outputs and v not in graph.inputs]
    if not floats:
        return None
    value = draw(st.sampled_from(inner if inner and draw(st.integers(0, 5)) else floats))
    axis = axis_with_units(draw, value.shape)
    assert axis is not None
    size = int(value.shape[axis])
    kind = draw(st.sampled_from(list(kinds)))
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    units, group = draw(_units(size, full=kind != "affine"))
    count = len(units)
    flat = [count if i == axis else 1 for i in range(len(value.shape))]
    constants: Any = random.normal(0.0, 1.0, flat)
    if kind == "zero":
        constants = np.zeros(flat)
    elif kind == "one":
        constants = float(random.normal())
    elif kind == "slab":
        shape = [
            n if isinstance(n, int) and i != axis and draw(st.booleans()) else flat[i]
            for i, n in enumerate(value.shape)
        ]
        constants = random.normal(0.0, 1.0, shape)
    elif draw(st.booleans()):
        constants = constants.reshape(-1)
    if kind != "affine":
        return Do(value.name, axis, tuple(units), constants)
    rest = [i for i in range(size) if i not in set(units)]
    parents = draw(st.lists(st.sampled_from(rest), min_size=1, unique=True))
    weight = random.normal(0.0, 1.0, (count, len(parents))) * (random.random((count, len(parents))) < 0.8)
    weight *= np.subtract.outer(np.asarray(units) // group, np.asarray(parents) // group) == 0
    constants = constants if draw(st.booleans()) else np.zeros_like(constants)
    return Do(value.name, axis, tuple(units), constants, tuple(parents), weight)


@dataclass(frozen=True)
class Case:
    """A graph, the same graph with replacements, and inputs for both. A failing one prints as text."""

    plain: Graph
    graph: Graph
    inputs: dict[str, Array]

    def __repr__(self) -> str:
        return f"\n{to_text(self.graph, data=False)}{ {name: array.shape for name, array in self.inputs.items()} }"


@st.composite
def cases(draw: Draw, most_steps: int = 9, most_dos: int = 3) -> Case:
    plain = draw(graphs(most_steps))
    entries = [draw(dos(plain)) for _ in range(draw(st.integers(1, most_dos)))]
    sizes = {"N": 2, "T": draw(st.integers(4, 6)), "H": draw(st.integers(4, 6)), "W": draw(st.integers(4, 6))}
    return Case(
        plain,
        with_do(plain, *(do for do in entries if do is not None)),
        batch(plain, draw(st.integers(0, 99)), **sizes),
    )
