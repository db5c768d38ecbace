"""basis_fold: a replacement in another basis becomes a plain one, since the weights around it are turned.

    %k = linear(%x, W, b)                         %k = linear(%x, T·W, T·b)
    %t = turn(%k, T)                              %d = do(%k, c)
    %d = do(%t, c)                          ->    %s = matmul(%q, %dᵀ)            with %q = linear(%x, T⁻ᵀ·V, T⁻ᵀ·a)
    %b = turn(%d, T⁻¹)
    %s = matmul(%q, %bᵀ)                          (or the linear op that reads the result: U·T⁻¹)

T has a matrix for each block of units, for each head of attention. It goes into the linear op that makes the value. T⁻¹ goes on: to
the other operand of a product that sums over the units (q·T⁻¹k = T⁻ᵀq·k), and through attention's sum over keys to the linear op that
reads the result. Both ends have to be weights, and nothing in between may treat the units of a block one by one (a norm, an
activation, rotary positions), nor may anything else read them. Otherwise all stays as it is, with the reason.

Exact: T⁻¹·T is 1. In floating point, weights are turned in float64 and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np

from cmrc.ir.graph import Array, Graph, Node, Operand, Tensor, apply, attributes, literal
from cmrc.ir.ops.affine import LinearAttrs, TurnAttrs, is_turn
from cmrc.ir.tensors import constant, quantised
from cmrc.passes.rewriting.layouts import Axis, Layout, Reached, contracted, is_addition, offsets, walk
from cmrc.passes.rewriting.rewriter import Log, Pass, folded, operand_axis

Matrices = Mapping[int, Array]  # by block


class Unfoldable(Exception):
    """The basis does not go into weights, for this reason."""


@dataclass(slots=True)
class Turned:
    """The nodes whose weights are turned, as they are then."""

    graph: Graph
    size: int  # units in a block
    nodes: dict[str, Node] = field(default_factory=dict)

    def now(self, node: Node) -> Node:
        return self.nodes.get(node.name, node)

    def tensor(self, tensor: Tensor, axis: int, blocks: Matrices) -> Tensor:
        """A weight or bias with these blocks of an axis turned."""
        count = tensor.shape[axis] // self.size
        stacked = np.tile(np.eye(self.size), (count, 1, 1))
        for block, matrix in blocks.items():
            stacked[block] = matrix
        return apply("turn", (tensor, literal(stacked)), {"axis": axis}, tensor.shape, tensor.dtype)

    def write(self, node: Node, position: int, axis: int, blocks: Matrices) -> None:
        now = self.now(node)
        inputs = list(now.inputs)
        operand = inputs[position]
        assert operand is not None and not isinstance(operand, str)
        inputs[position] = self.tensor(operand, axis, blocks)
        self.nodes[node.name] = now.with_inputs(inputs)

    # ------------------------------------------------------------ the maker of the units

    def maker(self, name: str) -> Node:
        """The linear op that makes these units."""
        while (node := self.graph.makers.get(name)) is not None:
            values = node.values()
            if node.op == "linear":
                break
            if len(values) != 1 or node.op in ("do", "turn", "opaque"):
                raise Unfoldable(f"{said(node)} makes its units, and has no weights that could be turned")
            name = values[0]
        if node is None:
            raise Unfoldable(f"%{name} is an input of the model, and no weights make it")
        weights = [operand for operand in node.inputs[1:] if operand is not None]
        if any(isinstance(operand, str) for operand in weights):
            raise Unfoldable(f"{said(node)} has weights that are computed at run time")
        require_floats(node)
        if int(node.output.shape[attributes(node, LinearAttrs)["axis"]]) % self.size:
            raise Unfoldable(f"{said(node)} does not make whole blocks of {self.size} units")
        return node

    def reached(self, maker: Node, node: Node, position: int) -> Reached:
        """How the units of a linear op reach an operand of a node."""
        start = Layout.of(maker.output.shape, attributes(maker, LinearAttrs)["axis"])
        steps = [step for step, goes_on in walk(self.graph, maker.name, start, self.size) if not goes_on]
        there = [step for step in steps if step.node is node and step.position == position]
        if len(there) != 1:
            raise Unfoldable(f"{said(steps[0].node)} treats its units one by one")
        return there[0]

    def turn_maker(self, maker: Node, blocks: Matrices, reader: Reached) -> None:
        """Turn these blocks of what a linear op makes. Nobody but the reader may see them."""
        attrs = attributes(maker, LinearAttrs)
        self.turn_on_the_way(maker.name, Layout.of(maker.output.shape, attrs["axis"]), blocks, reader)
        self.write(maker, 1, attrs["w_out"], blocks)
        if len(maker.inputs) > 2 and maker.inputs[2] is not None:
            bias = self.now(maker).inputs[2]
            assert isinstance(bias, Tensor)
            width = maker.output.shape[attrs["axis"]]
            assert isinstance(width, int)
            if bias.shape != (width,):
                bias = apply("expand", (bias,), {"shape": (width,)}, (width,), bias.dtype)
                inputs: list[Operand] = [*self.now(maker).inputs]
                inputs[2] = bias
                self.nodes[maker.name] = self.now(maker).with_inputs(inputs)
            self.write(maker, 2, 0, blocks)

    def turn_on_the_way(self, value: str, layout: Layout, blocks: Matrices, reader: Reached) -> None:
        """Turn what is added to these blocks on their way to the reader."""
        for step, goes_on in self.readers(value, layout, blocks):
            if goes_on and is_addition(step):
                self.turn_addend(step, blocks)
            elif not goes_on and (step.node is not reader.node or step.position != reader.position):
                raise Unfoldable(f"{said(step.node)} reads these units, too")

    def readers(self, value: str, layout: Layout, blocks: Matrices) -> Iterator[tuple[Reached, bool]]:
        """Who reads these blocks, and whether they go on behind it."""
        for step, goes_on in walk(self.graph, value, layout, self.size):
            if blocks.keys().isdisjoint((step.layout.units() // self.size).tolist()):
                continue
            if goes_on and step.node.name in self.graph.outputs:
                raise Unfoldable(f"{said(step.node)} is an output of the model")
            yield step, goes_on

    def turn_addend(self, step: Reached, blocks: Matrices) -> None:
        """T(x + b) = Tx + Tb."""
        node, position = step.node, 1 - step.position
        axes = step.layout.along()
        addend = self.now(node).inputs[position]
        assert isinstance(addend, Tensor)
        if len(axes) != 1 or len(step.shape(step.position)) != len(node.output.shape):
            raise Unfoldable(f"{said(node)} adds numbers to it where its blocks lie along several axes")
        (axis,) = axes
        here = self.along(step.layout, axis, node)
        require_floats(node)
        local = operand_axis(node, position, addend.shape, axis)
        if local is None:
            shape = np.broadcast_shapes(
                addend.shape, (len(here) * self.size, *(1,) * (len(node.output.shape) - 1 - axis))
            )
            addend = apply("expand", (addend,), {"shape": shape}, shape, addend.dtype)
            local = axis - len(node.output.shape) + len(shape)
            inputs = list(self.now(node).inputs)
            inputs[position] = addend
            self.nodes[node.name] = self.now(node).with_inputs(inputs)
        self.write(node, position, local, {i: blocks[b] for i, b in enumerate(here) if b in blocks})

    def along(self, layout: Layout, axis: int, node: Node) -> list[int]:
        """The block at each `size` positions of an axis that holds whole blocks."""
        units = layout.first + offsets(layout.axes[axis])
        apart = units.reshape(-1, self.size) if len(units) % self.size == 0 else units[:, None]
        if not np.array_equal(apart, apart[:, :1] + np.arange(self.size)) or (apart[:, 0] % self.size).any():
            raise Unfoldable(f"{said(node)} reads its blocks in parts, or in another order")
        return [int(block) for block in apart[:, 0] // self.size]

    # ------------------------------------------------------------ where the way ends

    def turn_back(self, value: str, layout: Layout, blocks: Matrices) -> None:
        """T⁻¹ in everything that reads the value."""
        ends = []
        for step, goes_on in self.readers(value, layout, blocks):
            if goes_on and is_addition(step):
                self.turn_addend(step, blocks)
            elif not goes_on:
                ends.append(step)
        for step in ends:
            product = step.node.op == "matmul" or (step.node.op == "attention" and step.position < 2)
            if step.node.op == "linear" and step.position == 0:
                self.turn_reader(step, blocks)
            elif product and contracted(step) in step.layout.along():
                self.turn_other(step, blocks)
            else:
                raise Unfoldable(f"{said(step.node)} treats its units one by one")

    def turn_reader(self, step: Reached, blocks: Matrices) -> None:
        """U (T⁻¹ x) = (U T⁻¹) x."""
        attrs, weight = attributes(step.node, LinearAttrs), step.node.inputs[1]
        if not isinstance(weight, Tensor):
            raise Unfoldable(f"{said(step.node)} has weights that are computed at run time")
        require_floats(step.node)
        if step.layout.along() != [attrs["axis"]]:
            raise Unfoldable(f"{said(step.node)} reads its blocks along several axes")
        here = self.along(step.layout, attrs["axis"], step.node)
        self.write(step.node, 1, attrs["w_in"], {i: np.linalg.inv(blocks[b]).T for i, b in enumerate(here)})

    def turn_other(self, step: Reached, blocks: Matrices) -> None:
        """q · T⁻¹ k = T⁻ᵀ q · k."""
        node, position = step.node, 1 - step.position
        operand = node.inputs[position]
        if not isinstance(operand, str):
            raise Unfoldable(f"{said(node)} multiplies it with a parameter")
        maker = self.maker(operand)
        other = self.reached(maker, node, position)
        partners = self.partners(step, other)
        back = {own: np.linalg.inv(blocks[block]).T for own, block in partners.items()}
        self.turn_maker(maker, back, other)

    def partners(self, step: Reached, other: Reached) -> dict[int, int]:
        """For each block of the other operand, the block of ours with which it is multiplied."""
        axes = []
        for one in (step, other):
            inner, rank = contracted(one), len(one.layout.axes)
            if self.along(Layout(0, one.layout.axes), inner, step.node) != [0]:
                raise Unfoldable(f"{said(step.node)} sums over more than the units of a block")
            row = 2 * rank - 3 - inner
            if row in one.layout.along():
                raise Unfoldable(f"{said(step.node)} has its blocks along the rows of the product")
            axes.append([one.layout.axes[i] for i in range(rank - 2)][::-1])
        pairs = np.array([[step.layout.first, other.layout.first]])
        for i, (ours, theirs) in enumerate(zip_longest(*axes, fillvalue=())):
            pair = paired(ours, theirs, shared=step.node.op == "attention" and i == 0)
            if pair is None:
                raise Unfoldable(f"{said(step.node)} pairs its blocks in a way that is not followed")
            pairs = (pairs[:, None] + pair).reshape(-1, 2)
        partners: dict[int, int] = {}
        for block, own in (pairs // self.size).tolist():
            if partners.setdefault(own, block) != block:
                raise Unfoldable(f"{said(step.node)} multiplies one block with several that have bases of their own")
        return partners


def paired(ours: Axis, theirs: Axis, *, shared: bool) -> Array | None:
    """The units of both operands at each position of a batch axis; None if that is not known. `shared`: a head may serve several."""
    a, b = (units if units.any() else units[:1] for units in (offsets(ours), offsets(theirs)))
    if len(a) > 1 and len(b) > 1:
        sizes = [[size for size, _ in axis] for axis in (ours, theirs)]
        if any(isinstance(size, str) for axis in sizes for size in axis) and sizes[0] != sizes[1]:
            return None
        if len(a) != len(b) and shared:
            a, b = (np.repeat(units, max(len(a), len(b)) // len(units)) for units in (a, b))
        if len(a) != len(b):
            return None
    return np.stack(np.broadcast_arrays(a, b), axis=1)


def require_floats(node: Node) -> None:
    if any(quantised(operand) is not None for operand in node.inputs if isinstance(operand, Tensor)):
        raise Unfoldable(f"{said(node)} has weights that are stored as integers")


def said(node: Node) -> str:
    return f"%{node.label} ({node.kind})"


# ---------------------------------------------------------------- the pass


def fold_one(graph: Graph, turn: Node, do: Node, back: Node) -> Graph:
    """The graph without the two turns, its weights turned."""
    axis, operand = attributes(turn, TurnAttrs)["axis"], turn.inputs[1]
    assert isinstance(operand, Tensor)
    basis = constant(operand)
    if back.name in graph.outputs:
        raise Unfoldable("the value is an output of the model")
    turned = Turned(graph, basis.shape[1])
    maker = turned.maker(str(turn.inputs[0]))
    step = turned.reached(maker, turn, 0)
    if step.layout.along() != [axis]:
        raise Unfoldable(f"{said(maker)} has its blocks along several axes here")
    turned.turn_maker(maker, dict(zip(turned.along(step.layout, axis, turn), basis, strict=True)), step)
    turned.turn_back(back.name, Layout.of(back.output.shape, axis), dict(enumerate(basis)))
    nodes = []
    for node in graph.nodes:
        if node is do:
            nodes.append(node.with_inputs((turn.inputs[0], *node.inputs[1:])))
        elif node is not turn and node is not back:
            now = turned.now(node)
            read = back.name in now.values()
            nodes.append(now.with_inputs(do.name if o == back.name else o for o in now.inputs) if read else now)
    return Graph(graph.inputs, tuple(nodes), graph.outputs)


def run(graph: Graph, log: Log) -> tuple[Graph, bool]:
    """Fold every basis that goes into weights. One that does not is noted, and stays."""
    changed = False
    while turn := next((node for node in graph.nodes if is_turn(node)), None):
        (do,) = graph.readers[turn.name]
        (back,) = graph.readers[do.name]
        try:
            graph = fold_one(graph, turn, do, back)
        except Unfoldable as problem:
            why = f"its basis does not go into weights: {problem}"
            noted = {node.name: node.with_marks(why=why) for node in (turn, back)}
            graph = Graph(graph.inputs, tuple(noted.get(node.name, node) for node in graph.nodes), graph.outputs)
        else:
            log.did("basis_fold", turn, folded("its basis into the weights around it"), turn.marks.sources)
            changed = True
    return graph, changed


PASS = Pass("basis_fold", run, moves=is_turn)
