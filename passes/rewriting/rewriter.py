"""What the rules of the sinking and rising passes share: what arrives, what they may answer, the record of a pipeline, and the
walks down and up.

A rule is `(walk, node, arriving) -> Rewritten | Declined`. `walk` is a sweep down or up the graph; `arriving` is what has
reached this node: constants, an affine relation, or a selection. A rule decides first and emits afterwards, so a rule that
declines has changed nothing. An op without a rule stops everything. `apply_rule` and `sink_all` run them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Generic, Protocol, TypeVar

from cmrc.ir.axes import complement as remaining
from cmrc.ir.axes import move, narrowed, resized
from cmrc.ir.graph import (
    Array,
    Graph,
    Index,
    Keep,
    Marks,
    Node,
    Operand,
    Shape,
    Value,
    attributes,
    is_whole,
    literal,
    period_of,
    quickly_made,
    take,
)
from cmrc.ir.ops.functions import AlongAttrs
from cmrc.ir.spec import FunctionAttrs


class Movement(Enum):
    """What a rule did with what arrived."""

    PAST = "it went on behind the node"
    UNREAD = "nothing of it is read here"
    JOINED = "it became one with the next do"
    FOLDED = "it became part of a parameter or an added number"
    TAKEN = "the node took it in, and nothing had to be added"
    NARROWED = "the node makes fewer units"
    COPIES = "the node only copies what is left: its readers read its operand"
    DROPPED = "nobody reads the node"


@quickly_made
@dataclass(frozen=True, slots=True)
class Declined:
    """The rule cannot rewrite the node, for this reason."""

    reason: str


@quickly_made
@dataclass(frozen=True, slots=True)
class Rewritten:
    """The rule rewrote the node. `detail` is for people; a rising rule returns the `node` that replaces it."""

    movement: Movement
    detail: str = ""
    node: Node | None = None


RuleOutcome = Rewritten | Declined

PAST = Rewritten(Movement.PAST, "past")
UNREAD = Rewritten(Movement.UNREAD, "past, none of the units is read here")
JOINED = Rewritten(Movement.JOINED, "joined with the next do")
DROPPED = Rewritten(Movement.DROPPED, "dropped, nobody reads it")
NOTHING_TO_ADD = Rewritten(Movement.TAKEN, "nothing to add, the constants are 0")


def past(detail: str) -> Rewritten:
    return Rewritten(Movement.PAST, f"past, {detail}")


def folded(detail: str) -> Rewritten:
    return Rewritten(Movement.FOLDED, detail)


def taken(detail: str) -> Rewritten:
    return Rewritten(Movement.TAKEN, detail)


@quickly_made
@dataclass(frozen=True, slots=True)
class Action:
    """One movement that happened: by which pass, at which node, for which entries of the plan."""

    rule: str
    at: Node
    movement: Movement
    detail: str
    sources: tuple[int, ...] = ()

    @property
    def ends_here(self) -> bool:
        """Whether the node absorbed the replacement, instead of passing it on."""
        return self.movement in (Movement.FOLDED, Movement.TAKEN)

    @property
    def node(self) -> str:
        return self.at.label

    @property
    def op(self) -> str:
        return self.at.kind


@dataclass(slots=True)
class Log:
    """What a pipeline did, and why something stopped: reasons by (value, reader)."""

    actions: list[Action] = field(default_factory=list)
    reasons: dict[tuple[str, str], str] = field(default_factory=dict)
    # Nodes that nobody needed before the first pass: they belong to the host, and stay with what they read.
    idle: frozenset[str] | None = None

    def did(self, rule: str, node: Node, outcome: Rewritten, sources: Sequence[int] = ()) -> None:
        self.actions.append(Action(rule, node, outcome.movement, outcome.detail, tuple(sources)))


@dataclass(slots=True)
class Sweep:
    """A forward walk that emits a new list of nodes and redirects later uses of a value to another."""

    graph: Graph
    log: Log
    emitted: list[Node] = field(default_factory=list)
    producers: dict[str, Node] = field(default_factory=dict)
    redirected: dict[str, str] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    selects: dict[tuple[str, int, tuple[int, ...]], str] = field(default_factory=dict)
    changed: bool = False
    _count: Iterable[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.values = self.graph.values()

    def arrive(self, node: Node) -> Node | None:
        """The node with its operands redirected to what they have become.

        None if it reads only values of the model itself: there is nothing to move, and it is emitted unchanged.
        """
        inserted = False
        for operand in node.inputs:
            if isinstance(operand, str):
                if operand in self.redirected:
                    return node.with_inputs([self.redirected.get(o, o) if type(o) is str else o for o in node.inputs])
                maker = self.producers.get(operand)
                inserted = inserted or (maker is not None and (not maker.origin or maker.op == "do"))
        if inserted:
            return node
        self.emit(node)
        return None

    def emissions(self) -> int:
        return len(self.emitted)

    def emit(self, node: Node) -> None:
        self.emitted.append(node)
        for value in node.outputs:
            self.producers[value.name] = node
            self.values[value.name] = value

    def fresh(self, base: str, tag: str) -> str:
        """A name that is still free."""
        name = f"{base}.{tag}"
        while name in self.values:
            name = f"{base}.{tag}{next(iter(self._count))}"
        return name

    def shape(self, operand: Operand) -> Shape:
        if isinstance(operand, str):
            return self.values[operand].shape
        assert operand is not None
        return operand.shape

    def do(self, value: Value, axis: int, units: Sequence[int], slab: Array | str, sources: Sequence[int]) -> str:
        """The name of the value in which units are replaced by constants, or by another value."""
        output = Value(self.fresh(value.name, "do"), value.shape, value.dtype)
        operand = slab if isinstance(slab, str) else literal(slab)
        attrs, marks = {"axis": axis, "units": Index.of(units)}, Marks(sources=tuple(sources))
        self.emit(Node("do", (value.name, operand), (output,), attrs, marks=marks))
        return output.name

    def put_do(self, value: Value, axis: int, units: Sequence[int], slab: Array | str, sources: Sequence[int]) -> None:
        """Replace units of a value for all its later readers."""
        self.redirected[value.name] = self.do(value, axis, units, slab, sources)

    def select(self, name: str, axis: int, keep: Sequence[int]) -> str:
        """The name of a value that holds only these positions; made once, then shared."""
        value = self.values[name]
        if is_whole(keep, value.shape[axis]):
            return name
        keep = Index.of(keep)
        selected = self.selects.get((name, axis, keep))
        if selected is None:
            selected = self.selects[name, axis, keep] = self.fresh(name, "select")
            output = Value(selected, resized(value.shape, axis, len(keep)), value.dtype)
            self.emit(Node("select", (name,), (output,), {"axis": axis, "keep": keep}))
        return selected

    def finish(self) -> Graph:
        outputs = tuple(self.redirected.get(name, name) for name in self.graph.outputs)
        return Graph(self.graph.inputs, drop_unused_moves(self.emitted, outputs), outputs)


@dataclass
class Rise:
    """A backward walk: later nodes are settled, `uses` says who reads a value, `select` asks for part of an operand."""

    graph: Graph
    log: Log
    settled: dict[str, Node] = field(default_factory=dict)  # in reverse order
    uses: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    values: dict[str, Value] = field(default_factory=dict)
    selected: set[str] = field(default_factory=set)  # what a select reads
    # Values that disappeared, what replaces them, and the settled nodes that still name them, which are rewired in the end.
    renamed: dict[str, str] = field(default_factory=dict)
    rewired: set[str] = field(default_factory=set)
    pending: list[Node] = field(default_factory=list)
    # Values that a dropped node read: they may let selects of the host rise.
    lost_readers: set[str] = field(default_factory=set)
    moves: dict[tuple[Shape, Shape, int, Keep, int], tuple[int, Keep] | str] = field(default_factory=dict)
    changed: bool = False
    _count: Callable[[], int] = field(default_factory=lambda: itertools.count().__next__)

    def __post_init__(self) -> None:
        self.values = self.graph.values()

    def shape(self, operand: Operand) -> Shape:
        return self.values[operand].shape if isinstance(operand, str) else operand.shape if operand is not None else ()

    def select(self, operand: Operand, axis: int, keep: Sequence[int]) -> Operand:
        """Part of an operand: a smaller tensor, or a select before this node, which continues to rise."""
        period = period_of(keep)
        if operand is None or is_whole(keep, period or self.shape(operand)[axis]):
            return operand
        if not isinstance(operand, str):
            return take(operand, axis, keep)
        keep = keep if isinstance(keep, Keep) else Keep(keep)
        attrs = {"axis": axis, "keep": keep, "period": period} if period else {"axis": axis, "keep": keep}
        for select in self.pending:  # one node asked for it twice
            if select.inputs[0] == operand and select.attrs == attrs:
                return select.name
        value = self.values[operand]
        name = f"{operand}.select"
        while name in self.values:
            name = f"{operand}.select{self._count()}"
        output = self.values[name] = Value(name, narrowed(value.shape, axis, keep), value.dtype)
        self.pending.append(Node("select", (operand,), (output,), attrs))
        return name

    def move(self, before: Shape, after: Shape, axis: int, keep: Keep) -> tuple[int, Keep] | str:
        """Where positions go in a reshape (axes.py); the same for queries, keys and values."""
        key = (before, after, axis, keep, keep.period)
        if key not in self.moves:
            moved = move(before, after, axis, keep, keep.period)
            self.moves[key] = moved if isinstance(moved, str) else (moved.axis, Keep(moved.index, moved.period))
        return self.moves[key]

    def emissions(self) -> int:
        return len(self.settled)

    def settle(self, node: Node) -> None:
        name = node.name
        self.settled[name] = node
        for value in node.outputs:
            self.values[value.name] = value
        for operand in node.inputs:
            if isinstance(operand, str):
                users = self.uses[operand]
                if not users or users[-1] != name:  # read twice by one node
                    users.append(name)
        if node.op == "select" and isinstance(operand := node.inputs[0], str):
            self.selected.add(operand)

    def rename(self, name: str, now: str) -> list[str]:
        """Let the readers of a value read another one instead; returns these readers."""
        users = self.uses.pop(name, [])
        self.renamed[name] = now
        self.rewired.update(users)
        return users

    def final_name(self, name: str) -> str:
        while name in self.renamed:
            name = self.renamed[name]
        return name

    def result(self) -> Graph:
        for name in self.rewired.intersection(self.settled):  # some were dropped later
            node = self.settled[name]
            self.settled[name] = node.with_inputs(
                [self.final_name(operand) if isinstance(operand, str) else operand for operand in node.inputs]
            )
        outputs = tuple(self.final_name(name) for name in self.graph.outputs)
        return Graph(self.graph.inputs, tuple(reversed(self.settled.values())), outputs)


@quickly_made
@dataclass(frozen=True, slots=True)
class Selection:
    """What arrives: these readers need only these positions of an axis."""

    axis: int
    keep: Keep
    readers: tuple[Node, ...] = ()


def shrunk(node: Node, inputs: Sequence[Operand], axis: int, keep: Keep, **attrs: object) -> Rewritten:
    """The same op on smaller operands, computing only these positions."""
    before = node.output
    output = Value(before.name, narrowed(before.shape, axis, keep), before.dtype)
    changed = {**node.attrs, **attrs} if attrs else node.attrs
    smaller = Node(node.op, tuple(inputs), (output,), changed, node.origin, node.path, node.marks)
    return Rewritten(Movement.NARROWED, f"{before.shape[axis]} -> {len(keep)} along axis {axis}", smaller)


def as_copy(node: Node, operand: Operand, axis: int, keep: Keep) -> Rewritten:
    """The rest of the node is a copy of its operand, which its readers can read instead."""
    return replace(shrunk(node, (operand,), axis, keep), movement=Movement.COPIES)


def drop_unused_moves(nodes: Sequence[Node], outputs: Sequence[str]) -> tuple[Node, ...]:
    """The nodes without do's and selects (and what was inserted for them) that nobody reads any more."""
    used = set(outputs)
    kept: list[Node] = []
    for node in reversed(nodes):
        if node.origin or node.name in used or node.op == "opaque":
            kept.append(node)
            used.update(node.values())
    return tuple(reversed(kept))


def complement(units: Sequence[int], size: int) -> Keep:
    return Keep.from_array(remaining(units, size))


def is_constant_do(node: Node | None) -> bool:
    return node is not None and node.op == "do" and len(node.inputs) == 2


def is_affine_do(node: Node | None) -> bool:
    return node is not None and node.op == "do" and len(node.inputs) == 3


def operand_axis(node: Node, position: int, shape: Shape, axis: int) -> int | None:
    """The axis of a pointwise operand that corresponds to `axis` of the result; `None` if it broadcasts."""
    align, out = attributes(node, FunctionAttrs).get("align"), node.output.shape
    dims = align[position] if align else None
    if dims is None:
        local = axis - (len(out) - len(shape))
    else:
        local = int(dims.index(axis)) if axis in dims else -1
    return local if local >= 0 and (shape[local] != 1 or out[axis] == 1) else None


def parameter_axis(node: Node, position: int, shape: Shape, axis: int, rank: int) -> int | None:
    """The axis of a parameter of an `along` op that corresponds to `axis` of its input; `None` if it broadcasts."""
    align = attributes(node, FunctionAttrs).get("align")
    dims = align[position] if align else None
    if dims is None:
        dims = tuple(range(rank - len(shape), rank))
    return int(dims.index(axis)) if axis in dims and shape[dims.index(axis)] != 1 else None


def result_axis(node: Node, position: int, shape: Shape, axis: int) -> int:
    """The axis of the result to which an axis of a pointwise operand corresponds."""
    align = attributes(node, FunctionAttrs).get("align")
    dims = align[position] if align else None
    return axis + len(node.output.shape) - len(shape) if dims is None else int(dims[axis])


def combines_nothing(sweep: Sweep, node: Node, source: str) -> bool:
    """Whether an `along` op computes elements from an axis of size 0: their values depend on the runtime."""
    sizes = [sweep.shape(source)[axis] for axis in attributes(node, AlongAttrs)["axes"]]
    return 0 in sizes and 0 not in node.output.shape


def varies_beside(replaced: str, other: str) -> Declined:
    """Two operands meet unit by unit, and only one of them is replaced."""
    return Declined(
        f"%{replaced} is replaced in these units, %{other} is not: replace both (`cmrc inspect --groups` shows what belongs together)"
    )


def others_give_shape(sweep: Sweep, node: Node, position: int, becomes: Shape) -> bool:
    """Whether the result keeps its shape if this operand becomes one of shape `becomes`, which mostly has one position per axis."""
    own = sweep.shape(node.inputs[position])
    shapes = [(i, sweep.shape(o)) for i, o in enumerate(node.inputs) if o is not None and i != position]
    return all(
        n == 1
        or (local := operand_axis(node, position, own, axis)) is None
        or becomes[local] == own[local]
        or any(operand_axis(node, i, shape, axis) is not None for i, shape in shapes)
        for axis, n in enumerate(node.output.shape)
    )


# ---------------------------------------------------------------- running rules

Arriving = TypeVar("Arriving")


class Walk(Protocol):
    """A sweep over the graph."""

    log: Log
    changed: bool

    def emissions(self) -> int:
        """How many nodes were emitted so far."""
        ...


WalkType = TypeVar("WalkType", bound=Walk)
Rule = Callable[[WalkType, Node, Arriving], RuleOutcome]


@dataclass(frozen=True, slots=True)
class Pass:
    """A rewrite: `run` returns the new graph and whether anything changed; `moves` says which nodes it can move."""

    name: str
    run: Callable[[Graph, Log], tuple[Graph, bool]]
    moves: Callable[[Node], bool]


def apply_rule(
    walk: WalkType, rule: Rule[WalkType, Arriving], node: Node, arriving: Arriving, places: Sequence[tuple[str, str]]
) -> Rewritten | None:
    """Apply a rule to a node. None if it declines: the reason is noted for these places (value, reader), and nothing is emitted."""
    before = walk.emissions()
    outcome = rule(walk, node, arriving)
    if isinstance(outcome, Declined):
        assert walk.emissions() == before, f"{rule.__name__} emitted, then declined: {outcome.reason}"
        walk.log.reasons.update(dict.fromkeys(places, outcome.reason))
        return None
    walk.changed = True
    return outcome


@dataclass(frozen=True, slots=True)
class Sinking(Generic[Arriving]):
    """A pass that moves the do's of one kind down the graph."""

    name: str
    carries: Callable[[Node | None], bool]  # which do's
    # what they mean together; the do's are given by the position of their operand
    arriving: Callable[[Sweep, Node, Mapping[int, Node]], Arriving]
    rule: Callable[[Node, Arriving], Rule[Sweep, Arriving]]
    # the node as the rule sees it; None if it was emitted already
    prepare: Callable[[Sweep, Node], Node | None] = lambda sweep, node: node
    at_output: Callable[[Node], str] = lambda do: "it is an output of the model"


def sink_all(sinking: Sinking[Arriving], graph: Graph, log: Log) -> tuple[Graph, bool]:
    """One walk in topological order that moves every do as far as possible."""
    sweep = Sweep(graph, log)
    for original in graph.nodes:
        arrived = sweep.arrive(original)
        node = None if arrived is None else sinking.prepare(sweep, arrived)
        if node is None:
            continue
        dos = {
            i: sweep.producers[operand]
            for i, operand in enumerate(node.inputs)
            if isinstance(operand, str) and sinking.carries(sweep.producers.get(operand))
        }
        if not dos:
            sweep.emit(node)
            continue
        arriving = sinking.arriving(sweep, node, dos)
        places = [(str(node.inputs[i]), node.name) for i in dos]
        outcome = apply_rule(sweep, sinking.rule(node, arriving), node, arriving, places)
        if outcome is None:
            sweep.emit(node)
        else:
            log.did(sinking.name, node, outcome, sorted({source for do in dos.values() for source in do.marks.sources}))
    for name in graph.outputs:
        value = sweep.redirected.get(name, name)
        if sinking.carries(sweep.producers.get(value)):
            log.reasons[value, "output"] = sinking.at_output(sweep.producers[value])
    return sweep.finish(), sweep.changed
