"""Puts do's into a graph, runs basis_fold, constant_fold, affine_fold and dead_subgraph until nothing moves, and reports what stayed, and why.

The graph is verified before and after every pass. Every step preserves the meaning by itself, so every prefix of the
pipeline is a correct program.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from cmrc.ir.graph import (
    Array,
    Do,
    Graph,
    Index,
    Marks,
    Node,
    Operand,
    Value,
    as_dtype,
    attributes,
    fused_groups,
    literal,
    torn_apart,
)
from cmrc.ir.ops.affine import SelectAttrs
from cmrc.ir.ops.functions import AlongAttrs
from cmrc.ir.recurrence import HIDDEN, hidden_states
from cmrc.ir.taken_whole import reason_inside, taken_whole
from cmrc.ir.verify import verify_graph
from cmrc.passes import affine_fold, basis_fold, constant_fold, dead_subgraph
from cmrc.passes.dead_subgraph import idle_nodes
from cmrc.passes.rewriting.recurrent import hold
from cmrc.passes.rewriting.rewriter import Action, Log
from cmrc.passes.rewriting.spelled import put_together, spelled_norms

PIPELINE = (basis_fold.PASS, constant_fold.PASS, affine_fold.PASS, dead_subgraph.PASS)
# A safety bound that no model reaches: rules move do's down and selects up, so two or three rounds are enough.
ROUNDS = 64
WEIGHS = ("linear", "conv", "matmul", "attention")  # ops that cost less if they compute fewer positions


@dataclass(frozen=True, slots=True)
class Residue:
    """A do or select that stayed: where it is, which node stopped it, and why."""

    node: Node
    stopped_at: str
    stopped_op: str
    reason: str
    sources: tuple[int, ...]


@dataclass(slots=True)
class Result:
    """The graph after the passes, what they did, what stayed, and the seconds that each took."""

    graph: Graph
    actions: list[Action]
    residue: list[Residue]
    seconds: dict[str, float] = field(default_factory=dict)
    shared: list[Node] = field(
        default_factory=list
    )  # selects that stay since several readers share what no weight made


def unwatched(name: str, graph: Graph) -> None:
    """The default of `watch`: nobody looks at the graph between the passes."""


def run(graph: Graph, *, since: Graph | None = None, watch: Callable[[str, Graph], None] = unwatched) -> Result:
    """Run the pipeline until nothing moves any more. `watch` sees the graph after every pass that runs (`--print-passes`).

    `since` is a verified graph from which this one was made; shared nodes are not checked again.
    If something would stay in the middle of a fused node, that node is treated as one op, and the pipeline starts again.
    """
    result = _pipeline(graph, since, watch)
    result = _with_norms_together(graph, result, since, watch) or result
    while origins := torn_apart(graph, result.graph):
        groups = fused_groups(result.graph)
        stayed = [(residue.node, residue.reason) for residue in result.residue]
        graph = taken_whole(graph, {o: reason_inside(groups.get(o, []), stayed) for o in origins})
        again = _pipeline(graph, since, watch)
        again.seconds = {name: spent + result.seconds[name] for name, spent in again.seconds.items()}
        result = again
    return result


def _with_norms_together(
    graph: Graph, first: Result, since: Graph | None, watch: Callable[[str, Graph], None]
) -> Result | None:
    """Run again, with each spelled-out norm that stopped something as one op; None if that helps nowhere."""
    if not first.residue:
        return None
    every, useless = list(spelled_norms(graph)), set[str]()
    result, chosen = first, set[str]()
    while more := {norm.last for norm in every if _stops(result, norm.members)} - chosen - useless:
        chosen |= more
        result = _pipeline(put_together(graph, [norm for norm in every if norm.last in chosen]), since, watch)
        left = {(node.name, node.output.shape) for node in result.graph.nodes if node.op == "along"}
        useless |= {norm.last for norm in every if norm.last in chosen and (norm.node.name, norm.shape) in left}
        if chosen & useless:  # those stay as the model has them
            chosen -= useless
            result = _pipeline(put_together(graph, [norm for norm in every if norm.last in chosen]), since, watch)
    if not chosen:
        return None
    result.seconds = {name: spent + first.seconds[name] for name, spent in result.seconds.items()}
    return result


def _stops(result: Result, members: Collection[str]) -> bool:
    """Whether something was stopped by one of these nodes."""
    stopped = {residue.node.name for residue in result.residue}
    return any(node.name in members and not stopped.isdisjoint(node.values()) for node in result.graph.nodes)


def _pipeline(graph: Graph, since: Graph | None, watch: Callable[[str, Graph], None]) -> Result:
    log, seconds = Log(idle=idle_nodes(graph)), dict.fromkeys((rewrite.name for rewrite in PIPELINE), 0.0)
    verify_graph(graph, since=since)
    for _ in range(ROUNDS):
        moved = False
        for rewrite in PIPELINE:
            name, after_others = rewrite.name, moved and rewrite is dead_subgraph.PASS  # what they left unread
            if not after_others and not any(map(rewrite.moves, graph.nodes)):
                continue
            start, before = time.perf_counter(), graph
            graph, changed = rewrite.run(graph, log)
            if changed:
                verify_graph(graph, since=before)
            seconds[name] += time.perf_counter() - start
            moved = moved or changed
            watch(name, graph)
        if not moved:
            break
    left = any(node.op in ("do", "select") and not node.origin for node in graph.nodes)
    shared = shared_by_readers(graph) if left else []
    return Result(graph, log.actions, find_residue(graph, log, shared) if left else [], seconds, shared)


def sink(graph: Graph, *, since: Graph | None = None) -> Graph:
    """The do's moved into weights where they can be, and every value left whole: no select rises."""
    log = Log(idle=idle_nodes(graph))
    for rewrite in PIPELINE[:-1]:
        if any(map(rewrite.moves, graph.nodes)):
            graph, _ = rewrite.run(graph, log)
    verify_graph(graph, since=since)
    return graph


def shared_by_readers(graph: Graph) -> list[Node]:
    """Selects of a value of which each reader reads another part, and which was computed without weights: the slopes of ALiBi, a
    table of positions, a mask. Computing less of it would save nothing, so each reader selects its part at run time."""
    consumers = graph.readers
    real = {v.name for v in graph.values().values() if v.dtype.startswith(("float", "bfloat"))}
    free = {value.name for value in graph.inputs} - real
    for node in graph.nodes:
        read = () if node.marks.shape_only is not None else node.values()
        unknown = node.op == "opaque" and not real.isdisjoint(read)
        if node.op not in WEIGHS and not unknown and all(operand in free for operand in read):
            free.update(value.name for value in node.outputs)
    staying = []
    for node in graph.nodes:
        if (
            node.op == "select"
            and not node.origin
            and (source := node.inputs[0]) in free
            and source not in graph.outputs
        ):
            readers = consumers[str(source)]
            if len({reader.name for reader in readers}) > 1 and all(reader.op == "select" for reader in readers):
                staying.append(node)
    return staying


def find_residue(graph: Graph, log: Log, shared: Sequence[Node] = ()) -> list[Residue]:
    """The do's and selects that are left, each with the reason that was noted when it stopped."""
    stays = {node.name for node in shared}
    residue: list[Residue] = []
    consumers, producers = graph.readers, graph.makers
    for node in graph.nodes:
        if node.op == "do":
            readers = [(r.name, r.label, r.kind) for r in consumers[node.name]]
            readers += [("output", "output", "output")] if node.name in graph.outputs else []
            for name, label, kind in readers:
                reason = log.reasons.get((node.name, name), "nothing absorbs it")
                residue.append(Residue(node, label, kind, reason, node.marks.sources))
        elif node.op == "select" and not node.origin and node.name not in stays:
            source = node.inputs[0]
            assert isinstance(source, str)
            maker = producers.get(source)
            label, kind = (maker.label, maker.kind) if maker else (source, "input")
            reason = log.reasons.get((source, node.name)) or _unselected(graph, maker, consumers[source], node)
            residue.append(Residue(node, label, kind, reason, ()))
    return residue


def _unselected(graph: Graph, maker: Node | None, readers: list[Node], select: Node) -> str:
    if maker is not None and len(maker.outputs) > 1:
        return maker.marks.why or f"{maker.kind} makes all of its units at once"
    others = [r.label for r in readers if r.op != "select"]
    if select.inputs[0] in graph.outputs:
        return "the whole value is an output of the model"
    if others:
        read = f"the whole value is also read by {', '.join(sorted(set(others)))}"
        taken = _taken_over(graph, str(select.inputs[0]), attributes(select, SelectAttrs)["axis"])
        return f"{read}: the {taken.kind} over all of its units needs each of them" if taken is not None else read
    return "readers need different parts of it"


def _taken_over(graph: Graph, name: str, axis: int) -> Node | None:
    """The node that reduces all units along this axis (a mean, say) in a norm that reads the value."""
    consumers, waiting, shape = graph.readers, [name], graph.values()[name].shape
    while waiting:
        for reader in consumers[waiting.pop()]:
            if reader.op == "along" and axis in attributes(reader, AlongAttrs)["axes"]:
                return reader
            alone = reader.op == "pointwise" and len(set(reader.values())) == 1  # a square, a cast
            if alone and reader.output.shape == shape:
                waiting.append(reader.name)
    return None


def _hold(graph: Graph, by_value: dict[str, list[tuple[int, Do]]]) -> dict[str, Node]:
    """The recurrent ops that read a replacement of their own hidden state. The do's on what they return join `by_value`."""
    if not any(name.endswith(HIDDEN) for name in by_value):
        return {}
    reading: dict[str, Node] = {}
    for name, (node, _) in hidden_states(graph).items():
        for i, entry in by_value.pop(name, ()):
            node, results = hold(node, entry)
            reading[node.name] = node
            for do in results:
                by_value[do.value] = sorted([*by_value.get(do.value, ()), (i, do)], key=lambda numbered: numbered[0])
    return reading


def put_dos(graph: Graph, entries: Sequence[Do]) -> Graph:
    """Insert a do node for each entry after the value that it names; all readers of the value read the last do instead.

    A do in a basis stands between two turns: into the basis, and back. A hidden state of a recurrent op is replaced in its weights (recurrent.py), and in what it returns.
    """
    by_value: dict[str, list[tuple[int, Do]]] = {}
    for i, entry in enumerate(entries):
        by_value.setdefault(entry.value, []).append((i, entry))
    reading = _hold(graph, by_value)
    renamed: dict[str, str] = {}
    nodes: list[Node] = []

    def turn(value: Value, name: str, tag: str, entry: Do, i: int, blocks: Array) -> str:
        output = Value(f"{value.name}.{tag}{i}", value.shape, value.dtype)
        attrs, marks = {"axis": entry.axis}, Marks(sources=(i,))
        nodes.append(Node("turn", (name, literal(blocks)), (output,), attrs, path=entry.site, marks=marks))
        return output.name

    def chain(value: Value) -> None:
        name = value.name
        for i, entry in by_value[value.name]:
            output = Value(f"{value.name}.do{i}", value.shape, value.dtype)
            if entry.basis is not None:
                name = turn(value, name, "turned", entry, i, entry.basis)
            slab = entry.constant
            if slab.ndim == 1:
                slab = slab.reshape((1,) * entry.axis + slab.shape + (1,) * (len(value.shape) - entry.axis - 1))
            slab = as_dtype(slab, value.dtype)  # the model holds the constant in its own precision
            attrs: dict[str, object] = {"axis": entry.axis, "units": Index.of(entry.units)}
            inputs: tuple[Operand, ...] = (name, literal(slab))
            if entry.weight is not None:
                attrs["parents"] = entry.parents
                inputs = (*inputs, literal(entry.weight))
            nodes.append(Node("do", inputs, (output,), attrs, path=entry.site, marks=Marks(sources=(i,))))
            name = output.name
            if entry.basis is not None:
                name = turn(value, name, "back", entry, i, np.linalg.inv(entry.basis))
        renamed[value.name] = name

    for value in graph.inputs:
        if value.name in by_value:
            chain(value)
    for node in graph.nodes:
        node = reading.get(node.name, node)
        for operand in node.inputs:
            if type(operand) is str and operand in renamed:
                node = node.with_inputs([renamed.get(o, o) if type(o) is str else o for o in node.inputs])
                break
        nodes.append(node)
        for value in node.outputs:
            if value.name in by_value:
                chain(value)
    return Graph(graph.inputs, tuple(nodes), tuple(renamed.get(name, name) for name in graph.outputs))
