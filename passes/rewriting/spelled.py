"""Norms that a model spells out in several ops, put together into one op of the IR.

    %m = mean(%x)                                       %y = layer_norm(%x, γ, β)
    %d = sub(%x, %m)
    %v = mean(square(%d))
    %y = add(mul(div(%d, sqrt(add(%v, ε))), γ), β)  ->

The rules look at one op at a time, and none of these ops can absorb constants across the units by itself: only together do they
have a known result. So the pipeline first runs without this, and again if something stopped at such a norm. A norm for which
that did not help stays as it is in the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from cmrc.ir.graph import Graph, Node, Operand, Shape, Tensor, apply, attributes
from cmrc.ir.ops.functions import AlongAttrs, PointwiseAttrs
from cmrc.ir.tensors import constant


@dataclass(frozen=True, slots=True)
class SpelledNorm:
    """The nodes of a norm by name, the last of them, and the one node that they are equal to."""

    members: frozenset[str]
    last: str
    node: Node

    @property
    def shape(self) -> Shape:
        return self.node.output.shape


def spelled_norms(graph: Graph) -> Iterator[SpelledNorm]:
    """Every layer norm and RMS norm over one axis, and every group norm, that is spelled out."""
    producers, readers = graph.makers, graph.readers
    for node in graph.nodes:
        norm = _match(node, producers) or _match_groups(node, producers)
        if norm is not None:
            yield _with_parameters(graph, norm, readers)


def put_together(graph: Graph, norms: Collection[SpelledNorm]) -> Graph:
    """The graph with one node for each of these norms; nodes that only they read are removed."""
    renamed = {norm.last: norm.node.name for norm in norms}
    by_last = {norm.last: norm.node for norm in norms}
    nodes: list[Node] = []
    for node in graph.nodes:
        if not renamed.keys().isdisjoint(node.values()):
            node = node.with_inputs([renamed.get(o, o) if isinstance(o, str) else o for o in node.inputs])
        nodes.append(node)
        if node.name in by_last:
            whole = by_last[node.name]
            inputs = [renamed.get(o, o) if isinstance(o, str) else o for o in whole.inputs]
            nodes.append(whole.with_inputs(inputs))
    outputs = tuple(renamed.get(name, name) for name in graph.outputs)
    members = set().union(*(norm.members for norm in norms))
    used = set(outputs)
    kept: list[Node] = []
    gone: set[str] = set()
    for node in reversed(nodes):
        if node.name in members and node.name not in used:
            gone.add(node.name)
            continue
        if node.marks.shapes and gone.issuperset(node.marks.shapes):
            continue
        used.update(node.values())
        kept.append(node)
    return Graph(graph.inputs, tuple(reversed(kept)), outputs)


def _match(node: Node, producers: Mapping[str, Node]) -> SpelledNorm | None:
    """x · rsqrt(mean(x²) + ε), or x / sqrt(...); of x − mean(x) it is a layer norm."""
    scaled = _scaled(node, producers)
    if scaled is None:
        return None
    x, variance, members = scaled
    shifted = _maker(producers, variance, "add")
    eps, mean_square = _number_and_value(shifted)
    mean = producers.get(mean_square) if isinstance(mean_square, str) else None
    if shifted is None or eps is None or mean is None or not _is_mean(mean):
        return None
    square = producers.get(str(mean.inputs[0]))
    if square is None or _squared(square) != x:
        return None
    axis = attributes(mean, AlongAttrs)["axes"][0]
    members = [*members, shifted, mean, square, node]
    kind, source = "rms_norm", x
    centred = _maker(producers, x, "sub")
    if centred is not None and isinstance(centred.inputs[0], str) and isinstance(centred.inputs[1], str):
        centre = producers.get(centred.inputs[1])
        same = centre is not None and _is_mean(centre) and centre.inputs[0] == centred.inputs[0]
        if centre is not None and same and attributes(centre, AlongAttrs)["axes"] == (axis,):
            kind, source = "layer_norm", centred.inputs[0]
            members += [centred, centre]
    if not isinstance(node.output.shape[axis], int):
        return None
    attrs = {"fn": kind, "axes": (axis,), "eps": eps}
    whole = Node("along", (source,), (replace(node.output, name=f"{node.name}::norm"),), attrs, path=node.path)
    return SpelledNorm(frozenset(member.name for member in members), node.name, whole)


def _match_groups(node: Node, producers: Mapping[str, Node]) -> SpelledNorm | None:
    """[batch, units, ...] -> [batch, groups, rest], an instance norm without parameters, and back: what torch exports."""
    norm = producers.get(str(node.inputs[0])) if node.op == "reshape" else None
    if norm is None or norm.op != "along" or attributes(norm, AlongAttrs)["fn"] != "instance_norm":
        return None
    apart, shape = producers.get(str(norm.inputs[0])), node.output.shape
    neutral = all(
        isinstance(o, Tensor) and bool(np.all(constant(o) == n))
        for o, n in zip(norm.inputs[1:], (1.0, 0.0), strict=False)
    )
    if apart is None or apart.op != "reshape" or not isinstance(apart.inputs[0], str) or not neutral:
        return None
    source, rows = producers.get(apart.inputs[0]), apart.output.shape
    before = source.output.shape if source is not None else ()
    if before != shape or len(rows) != 3 or rows[0] != shape[0] or attributes(norm, AlongAttrs)["axes"] != (2,):
        return None
    units, groups = shape[1], rows[1]
    if not isinstance(units, int) or not isinstance(groups, int) or units % groups:
        return None
    axes, eps = tuple(range(1, len(shape))), attributes(norm, AlongAttrs)["eps"]
    attrs = {"fn": "group_norm", "axes": axes, "eps": eps, "groups": groups}
    output = replace(node.output, name=f"{node.name}::norm")
    whole = Node("along", (apart.inputs[0],), (output,), attrs, path=node.path)
    return SpelledNorm(frozenset(member.name for member in (apart, norm, node)), node.name, whole)


def _scaled(node: Node, producers: Mapping[str, Node]) -> tuple[str, Operand, list[Node]] | None:
    """x, v and the nodes between, of x / √v."""
    if node.op != "pointwise" or len(node.inputs) != 2 or attributes(node, PointwiseAttrs).get("align"):
        return None
    fn = attributes(node, PointwiseAttrs)["fn"]
    if fn == "div" and isinstance(node.inputs[0], str):
        root = _maker(producers, node.inputs[1], "sqrt")
        return None if root is None else (node.inputs[0], root.inputs[0], [root])
    if fn != "mul":
        return None
    for x, factor in (node.inputs, node.inputs[::-1]):
        inverse = _maker(producers, factor, "rsqrt")
        if isinstance(x, str) and inverse is not None:
            return x, inverse.inputs[0], [inverse]
        inverse = _maker(producers, factor, "reciprocal") or _maker(producers, factor, "div")
        if isinstance(x, str) and inverse is not None:
            one = attributes(inverse, PointwiseAttrs)["fn"] == "reciprocal" or _number(inverse.inputs[0]) == 1.0
            root = _maker(producers, inverse.inputs[-1], "sqrt")
            if one and root is not None:
                return x, root.inputs[0], [inverse, root]
    return None


def _maker(producers: Mapping[str, Node], operand: Operand, fn: str) -> Node | None:
    """The pointwise node of this function that computes an operand."""
    node = producers.get(operand) if isinstance(operand, str) else None
    return (
        node if node is not None and node.op == "pointwise" and attributes(node, PointwiseAttrs)["fn"] == fn else None
    )


def _is_mean(node: Node) -> bool:
    attrs = attributes(node, AlongAttrs)
    return node.op == "along" and attrs["fn"] == "mean" and len(attrs["axes"]) == 1 and not attrs.get("drop")


def _squared(node: Node) -> Operand:
    """x of x², however it is written."""
    if node.op != "pointwise":
        return None
    fn = attributes(node, PointwiseAttrs)["fn"]
    if fn == "square" or (fn == "pow" and _number(node.inputs[1]) == 2.0):
        return node.inputs[0]
    return node.inputs[0] if fn == "mul" and node.inputs[0] == node.inputs[1] else None


def _number(operand: Operand) -> float | None:
    if not isinstance(operand, Tensor) or any(n != 1 for n in operand.shape):
        return None
    return float(constant(operand).reshape(()))


def _number_and_value(node: Node | None) -> tuple[float | None, Operand]:
    """The number and the value of a sum of the two."""
    if node is None or attributes(node, PointwiseAttrs).get("alpha", 1.0) != 1.0:
        return None, None
    first, second = node.inputs
    number = _number(second)
    return (number, first) if number is not None else (_number(first), second)


def _with_parameters(graph: Graph, norm: SpelledNorm, readers: Mapping[str, list[Node]]) -> SpelledNorm:
    """With the weight, and then the bias, if nobody else reads the value before them."""
    attrs, rank = attributes(norm.node, AlongAttrs), len(norm.node.output.shape)
    axis = attrs["axes"][0]
    parameters: list[Tensor] = []
    for fn in ("mul", "add"):
        if fn == "add" and attrs["fn"] == "rms_norm":
            break
        following = readers[norm.last]
        step = following[0] if len(following) == 1 and norm.last not in graph.outputs else None
        vector = None if step is None else _vector(step, fn, norm.last, axis, rank)
        if step is None or vector is None:
            break
        parameters.append(vector)
        output = replace(step.output, name=f"{step.name}::norm")
        whole = replace(norm.node, outputs=(output,), path=step.path or norm.node.path)
        norm = SpelledNorm(norm.members | {step.name}, step.name, whole)
    whole = replace(norm.node, inputs=(norm.node.inputs[0], *parameters))
    if parameters and axis != rank - 1:
        whole = whole.with_attrs(align=(None, *((axis,),) * len(parameters)))
    return replace(norm, node=whole)


def _vector(node: Node, fn: str, x: str, axis: int, rank: int) -> Tensor | None:
    """The parameter of x · w or x + w along an axis, as a vector."""
    attrs = attributes(node, PointwiseAttrs)
    if node.op != "pointwise" or attrs["fn"] != fn or attrs.get("align") or attrs.get("alpha", 1.0) != 1.0:
        return None
    other = node.inputs[1] if node.inputs[0] == x else node.inputs[0]
    size = node.output.shape[axis]
    if not isinstance(other, Tensor) or len(other.shape) > rank:
        return None
    local = axis - (rank - len(other.shape))
    if local < 0 or any(n != (size if d == local else 1) for d, n in enumerate(other.shape)):
        return None
    return other if len(other.shape) == 1 else apply("reshape", (other,), {"shape": (size,)}, (int(size),), other.dtype)
