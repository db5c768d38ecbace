"""Graphs for tests: a builder to write one by hand, and do's put into it.

    net = Net(seed=0)
    x = net.input("N", 4)
    net.output(net.linear(net.pointwise("relu", net.linear(x, 6)), 3))
    graph = with_do(net.graph(), Do("relu_1", axis=1, units=(0, 2), value=[0.5, 1.0]))

Parameters are float32 and drawn from the seed; sizes known only at run time are strings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from cmrc.ir.graph import Array, Dim, Graph, Leaf, Marks, Node, Operand, Shape, Value, literal
from cmrc.passes.rewriting.convolution import conv_sizes

MARKS = [mark.name for mark in fields(Marks)]  # keywords of `Net.node` that are marks, not attributes


class Net:
    """Writes a graph node by node, infers shapes, and gives parameters random values (float32, drawn from one seed)."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.inputs: list[Value] = []
        self.nodes: list[Node] = []
        self.outputs: list[str] = []
        self.values: dict[str, Value] = {}
        self.counts: dict[str, int] = {}

    def graph(self) -> Graph:
        return Graph(tuple(self.inputs), tuple(self.nodes), tuple(self.outputs))

    def shape(self, operand: Operand) -> Shape:
        assert operand is not None
        return self.values[operand].shape if isinstance(operand, str) else operand.shape

    def input(self, *shape: Dim, name: str = "x", dtype: str = "float32") -> str:
        self.values[name] = Value(name, shape, dtype)
        self.inputs.append(self.values[name])
        return name

    def output(self, *names: str) -> None:
        self.outputs += names

    def fresh(self, base: str) -> str:
        self.counts[base] = self.counts.get(base, 0) + 1
        return f"{base}_{self.counts[base]}"

    def leaf(self, *shape: int, scale: float = 1.0, low: float | None = None, name: str = "w") -> Leaf:
        """A parameter: normal with this scale, or uniform above `low`."""
        drawn = self.random.normal(0.0, scale, shape) if low is None else low + self.random.random(shape)
        array = np.asarray(drawn, np.float32)
        return Leaf(self.fresh(name), shape, "float32", lambda: array)

    def node(
        self, op: str, inputs: Sequence[Operand], shape: Shape, name: str = "", value_dtype: str = "", **attrs: Any
    ) -> str:
        name = self.fresh(name or op)
        value = Value(name, tuple(shape), value_dtype or "float32")
        self.values[name] = value
        marks = Marks(**{key: attrs.pop(key) for key in MARKS if key in attrs})
        self.nodes.append(Node(op, tuple(inputs), (value,), attrs, origin=name, marks=marks))
        return name

    # ------------------------------------------------------------ ops

    def insert(self, op: str, inputs: Sequence[Operand], shape: Shape, **attrs: Any) -> str:
        """A node that a pass would have put in: it has no origin in a host."""
        name = self.node(op, inputs, shape, **attrs)
        self.nodes[-1] = replace(self.nodes[-1], origin="")
        return name

    def cut(self, x: str, axis: int, keep: Sequence[int]) -> str:
        """A select that a pass would have put in."""
        shape = list(self.shape(x))
        shape[axis] = len(keep)
        return self.insert("select", (x,), tuple(shape), axis=axis, keep=tuple(keep))

    def linear(self, x: str, outs: int, *, axis: int = -1, weight: Leaf | None = None, bias: Leaf | bool | str = True,
               turned: bool = False, **attrs: Any) -> str:  # fmt: skip
        shape = self.shape(x)
        axis %= len(shape)
        ins = int(shape[axis])
        w = weight or self.leaf(*((ins, outs) if turned else (outs, ins)), scale=ins**-0.5)
        b = self.leaf(outs, scale=0.5, name="b") if bias is True else bias or None
        attrs = {"axis": axis, "w_in": int(not turned), "w_out": int(turned), "takes_bias": True, **attrs}
        return self.node("linear", (x, w, b), (*shape[:axis], outs, *shape[axis + 1 :]), **attrs)

    def conv(self, x: str, outs: int, kernel: Sequence[int], *, stride: Sequence[int] = (), dilation: Sequence[int] = (),
             pad: Sequence[tuple[int, int]] | str = (), groups: int = 1, transposed: bool = False, bias: bool = True,
             output_padding: Sequence[int] = (), axis: int = 1) -> str:  # fmt: skip
        shape, rank = self.shape(x), len(kernel)
        ins = int(shape[axis])
        sides = (ins, outs // groups) if transposed else (outs, ins // groups)
        w = self.leaf(*sides, *kernel, scale=(ins // groups * math.prod(kernel)) ** -0.5)
        b = self.leaf(outs, scale=0.5, name="b") if bias else None
        attrs: dict[str, Any] = {
            "axis": axis,
            "stride": tuple(stride) or (1,) * rank,
            "pad": pad if isinstance(pad, str) else tuple(pad) or ((0, 0),) * rank,
            "dilation": tuple(dilation) or (1,) * rank,
            "groups": groups,
            "takes_bias": True,
        }
        if transposed:
            attrs |= {"transposed": True, "output_padding": tuple(output_padding) or (0,) * rank}
        spatial: Shape = shape[axis + 1 :]
        conv_node = Node("conv", (x, w, b), (Value("", shape),), attrs)
        out: Shape
        if all(isinstance(n, int) for n in spatial):
            out = conv_sizes(conv_node, [int(n) for n in spatial])
        else:
            tag = self.fresh("size")
            out = tuple(
                n if not transposed and attrs["stride"][i] == 1 and not isinstance(pad, str) and sum(attrs["pad"][i]) == attrs["dilation"][i] * (kernel[i] - 1)
                else f"{tag}_{i}" for i, n in enumerate(spatial)
            )  # fmt: skip
        return self.node("conv", (x, w, b), (*shape[:axis], outs, *out), **attrs)

    def pointwise(self, fn: str, *operands: Operand, **attrs: Any) -> str:
        shape: Shape = ()
        for operand, dims in zip(operands, attrs.get("align") or (None,) * len(operands), strict=True):
            if operand is not None and dims is None:
                both = broadcast(shape, self.shape(operand))
                assert both is not None
                shape = both
        return self.node("pointwise", operands, shape, name=fn, fn=fn, **attrs)

    def batch_norm(self, x: str, *, axis: int = 1) -> str:
        channels = int(self.shape(x)[axis])
        names = ("gamma", "beta", "mean", "var")
        weight, bias, mean = (self.leaf(channels, name=name) for name in names[:3])
        var = self.leaf(channels, low=0.5, name="var")
        return self.pointwise("batch_norm", x, weight, bias, mean, var, eps=1e-5, align=(None, *((axis,),) * 4))

    def along(
        self, fn: str, x: str, axes: Sequence[int], *parameters: Operand, shape: Shape | None = None, **attrs: Any
    ) -> str:
        """An op along axes; the shape is worked out for reductions and kept otherwise, unless it is given."""
        before = self.shape(x)
        if shape is None:
            shape = before
            if fn in ("mean", "sum", "amax", "amin", "prod", "pick"):
                drop = attrs.get("drop", False)
                shape = tuple(1 if i in axes else n for i, n in enumerate(before) if not (drop and i in axes))
        return self.node("along", (x, *parameters), shape, name=fn, fn=fn, axes=tuple(axes), **attrs)

    def pool(
        self,
        fn: str,
        x: str,
        kernel: Sequence[int],
        stride: Sequence[int],
        pad: Sequence[tuple[int, int]],
        **attrs: Any,
    ) -> str:
        shape, rank = self.shape(x), len(kernel)
        spatial = shape[-rank:]
        out: list[Dim] = []
        for i, n in enumerate(spatial):
            if not isinstance(n, int):
                out.append(self.fresh("size"))
                continue
            reach = attrs.get("dilation", (1,) * rank)[i] * (kernel[i] - 1) + 1
            room = n + sum(pad[i]) - reach
            count = room // stride[i] + 1
            if attrs.get("ceil"):
                count = -(-room // stride[i]) + 1
                count -= (count - 1) * stride[i] >= n + pad[i][0]
            out.append(count)
        axes = range(len(shape) - rank, len(shape))
        attrs = {"kernel": tuple(kernel), "stride": tuple(stride), "pad": tuple(pad), **attrs}
        return self.along(fn, x, axes, shape=(*shape[:-rank], *out), **attrs)

    def reshape(self, x: str, *shape: Dim) -> str:
        return self.node("reshape", (x,), shape)

    def transpose(self, x: str, *perm: int) -> str:
        return self.node("transpose", (x,), tuple(self.shape(x)[p] for p in perm), perm=tuple(perm))

    def expand(self, x: str, *shape: Dim) -> str:
        return self.node("expand", (x,), shape)

    def concat(self, *parts: Operand, axis: int) -> str:
        shape = list(self.shape(parts[0]))
        shape[axis] = sum(int(self.shape(part)[axis]) for part in parts)
        return self.node("concat", parts, tuple(shape), axis=axis)

    def select(self, x: str, axis: int, keep: Sequence[int]) -> str:
        shape = list(self.shape(x))
        shape[axis] = len(keep)
        return self.node("select", (x,), tuple(shape), axis=axis, keep=tuple(keep))

    def matmul(self, x: str, y: str) -> str:
        a, b = self.shape(x), self.shape(y)
        lead = broadcast(a[:-2], b[:-2])
        assert lead is not None
        return self.node("matmul", (x, y), (*lead, a[-2], b[-1]))

    def embedding(self, ids: str, rows: int, *columns: int) -> str:
        return self.node("embedding", (ids, self.leaf(rows, *columns, name="table")), (*self.shape(ids), *columns))


def broadcast(first: Shape, second: Shape) -> Shape | None:
    """The shape of two operands together, or nothing where they do not fit."""
    rank = max(len(first), len(second))
    a, b = ((1,) * (rank - len(s)) + tuple(s) for s in (first, second))
    if any(m != n and 1 not in (m, n) for m, n in zip(a, b, strict=True)):
        return None
    return tuple(n if m == 1 else m for m, n in zip(a, b, strict=True))


# ---------------------------------------------------------------- replacements


@dataclass(frozen=True)
class Do:
    """units := value, or units := weight · parents + value, of a named value along an axis."""

    site: str
    axis: int
    units: tuple[int, ...]
    value: Any
    parents: tuple[int, ...] = ()
    weight: Any = None


def with_do(graph: Graph, *dos: Do) -> Graph:
    """The graph with replacements right after the values that they name, in order: a later one sees the earlier."""
    for i, do in enumerate(dos):
        value = graph.values()[do.site]
        replaced = Value(f"{do.site}.do_{i}", value.shape, value.dtype)
        tensors = [literal(do.value)] if do.weight is None else [literal(do.value), literal(do.weight)]
        attrs: dict[str, Any] = {"axis": do.axis, "units": tuple(do.units)}
        if do.weight is not None:
            attrs["parents"] = tuple(do.parents)
        earlier = [n.name for n in graph.nodes if n.op == "do" and n.name.startswith(f"{do.site}.do_")]
        source = earlier[-1] if earlier else do.site
        node = Node("do", (source, *tensors), (replaced,), attrs, marks=Marks(sources=(i,)))
        nodes: list[Node] = []
        if source in {v.name for v in graph.inputs}:
            nodes.append(node)
        for n in graph.nodes:
            nodes.append(replace(n, inputs=tuple(replaced.name if o == source else o for o in n.inputs)))
            if n.name == source:
                nodes.append(node)
        outputs = tuple(replaced.name if name == source else name for name in graph.outputs)
        graph = Graph(graph.inputs, tuple(nodes), outputs)
    return graph


def batch(graph: Graph, seed: int = 0, **sizes: int) -> dict[str, Array]:
    """Inputs: normal, or small integers. Sizes known only at run time are 3, unless they are given."""
    random = np.random.default_rng(seed)
    arrays: dict[str, Array] = {}
    for value in graph.inputs:
        shape = [n if isinstance(n, int) else sizes.get(n, 3) for n in value.shape]
        integers = value.dtype.startswith("int")
        arrays[value.name] = random.integers(0, 5, shape) if integers else random.normal(0.0, 1.0, shape)
    return arrays
