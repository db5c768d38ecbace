"""Which units are coupled with which, and why: what is replaced together, or does not fold at all.

    s1 = s0 + branch(s0)        unit 3 of s1 is constant only if unit 3 of s0 and of the branch are
    y  = concat(a, b)           unit 70 of y is unit 6 of b, where a has 64
    y  = act(gate) * up         unit 3 of y is made of unit 3 of both

Every op that makes units (linear, conv, embedding) starts a *strand*: a value, an axis, and an identity for each position of
it. Ops that keep units apart (activations, batch norm, pooling, depthwise convolutions, layout) carry the identities on;
ops that combine two values unit by unit make them one. What hangs together is a group: the connected parts of the graph of
strands that hold at least one such op.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cmrc.errors import DoError, DoShapeError, GraphError
from cmrc.ir.axes import segments
from cmrc.ir.graph import Array, Node, Shape
from cmrc.passes import pipeline as passes
from cmrc.passes.rewriting.rewriter import operand_axis
from cmrc.program.plan import Do

if TYPE_CHECKING:
    import networkx as nx

    from cmrc.program.program import Program

Strand = tuple[str, int]  # a value and the axis of its units
# Functions of two values after which a unit is 0 where it is 0 in both, and c where it is c in one and 0 in the other.
SUMS = {"add", "sub", "rsub"}


@dataclass(frozen=True, slots=True)
class Writer:
    """A site whose units enter a group: unit `units[i]` of the site is unit `places[i]` of the group."""

    site: str
    value: str
    op: str
    axis: int
    units: tuple[int, ...]
    places: tuple[int, ...]

    def at(self, places: Sequence[int]) -> tuple[list[int], list[int]]:
        """The site's own units that are these units of the group, and which of them each is."""
        wanted = {place: i for i, place in enumerate(places)}
        found = [(u, wanted[p]) for u, p in zip(self.units, self.places, strict=True) if p in wanted]
        return [u for u, _ in found], [i for _, i in found]


@dataclass(frozen=True, slots=True)
class Group:
    """Units that are replaced together. `reasons` are the nodes that couple them; `folds` is the outcome of a dry run."""

    name: str
    units: int
    writers: tuple[Writer, ...]
    readers: tuple[str, ...]
    reasons: tuple[str, ...]
    probe: tuple[int, ...] = (0,)  # units that a dry run replaces: one, or one of each group of a convolution
    products: tuple[str, ...] = ()  # those of the reasons after which one constant does not say what a writer becomes
    folds: str = ""

    def to_json(self) -> dict[str, Any]:
        writers = [
            {"site": w.site, "value": w.value, "op": w.op, "axis": w.axis, "units": runs(w.units),
             "places": runs(w.places)} for w in self.writers
        ]  # fmt: skip
        return {"name": self.name, "units": self.units, "writers": writers, "readers": list(self.readers),
                "reasons": list(self.reasons), "folds": self.folds}  # fmt: skip

    def __str__(self) -> str:
        """For people: what enters, who reads, why they hang together, and what becomes of a replaced unit."""
        lines = [f"{self.name}: {self.units} units"]
        for w in self.writers:
            own, places = runs(w.units), runs(w.places)
            lines.append(
                f"  written by {w.site} ({w.op}): its units {own}" + (f" as {places}" if own != places else "")
            )
        lines += [f"  read by {', '.join(self.readers)}"] if self.readers else []
        lines += [f"  coupled by {', '.join(self.reasons)}"]
        return "\n".join([*lines, *([f"  a replaced unit {self.folds}"] if self.folds else [])])


def runs(index: Sequence[int]) -> str:
    """`0:8,0:8,12` for positions in any order, as slices of one step."""
    ends = [i for i in range(1, len(index)) if index[i] != index[i - 1] + 1]
    parts = [index[a:b] for a, b in zip([0, *ends], [*ends, len(index)], strict=True)]
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}:{p[-1] + 1}" for p in parts)


# ---------------------------------------------------------------- identities of units


@dataclass(slots=True)
class Identities:
    """Disjoint sets of numbers, as arrays: `parent[i]` is a smaller number of the same set, or i."""

    parent: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def fresh(self, count: int) -> Array:
        start = len(self.parent)
        self.parent = np.concatenate([self.parent, np.arange(start, start + count)])
        return np.arange(start, start + count)

    def find(self, ids: Array) -> Array:
        root: Array = self.parent[ids]
        while np.any(root != self.parent[root]):
            root = self.parent[root]
        self.parent[ids] = root
        return root

    def join(self, first: Array, second: Array) -> None:
        a, b = self.find(first), self.find(second)
        while np.any(a != b):  # again where a set stands several times on one side
            self.parent[np.maximum(a, b)] = np.minimum(a, b)
            a, b = self.find(first), self.find(second)


# ---------------------------------------------------------------- the graph of strands


def _no_strands() -> nx.DiGraph[Strand]:
    import networkx as nx  # here, since only groups need it, and it is slow to load

    return nx.DiGraph()


@dataclass(eq=False, slots=True)
class Weave:
    """The strands of a program. An edge leads from an operand to a result; `joins` names the node where several meet."""

    program: Program
    ids: dict[Strand, Array] = field(default_factory=dict)
    identities: Identities = field(default_factory=Identities)
    strands: nx.DiGraph[Strand] = field(default_factory=_no_strands)
    started: dict[Strand, Node | None] = field(default_factory=dict)
    joins: dict[Strand, Node] = field(default_factory=dict)  # by the strand that the node makes
    balanced: dict[Strand, list[Node]] = field(default_factory=dict)  # read by a convolution in groups

    def shape(self, name: str) -> Shape:
        return self.program.values[name].shape

    def start(self, strand: Strand, node: Node | None) -> Array:
        if strand not in self.ids:
            size = self.shape(strand[0])[strand[1]]
            assert isinstance(size, int)
            self.ids[strand] = self.identities.fresh(size)
            self.started[strand] = node
            self.strands.add_node(strand)
        return self.ids[strand]

    def carry(self, source: Strand, target: Strand, ids: Array) -> None:
        if target in self.ids:
            self.identities.join(self.ids[target], ids)
        self.ids[target] = ids
        self.strands.add_edge(source, target)

    def meet(self, node: Node, operands: Sequence[Strand], axis: int) -> None:
        """Several values become one, unit by unit. Those that no known op made are taken as they are."""
        target = (node.name, axis)
        distinct = list(dict.fromkeys(operands))
        ids = [self.start(operand, self.program.producers.get(operand[0])) for operand in distinct]
        first = self.identities.find(ids[0])
        if any(np.any(self.identities.find(other) != first) for other in ids[1:]):  # x * sigmoid(x) is no meeting
            self.joins[target] = node
        for operand, own in zip(distinct, ids, strict=True):
            self.carry(operand, target, own)

    def of(self, name: str) -> Iterator[int]:
        """The axes of a value that are strands."""
        return (axis for axis in range(len(self.shape(name))) if (name, axis) in self.ids)

    def add(self, node: Node) -> None:
        rule = RULES.get(node.op)
        if rule is None or len(node.outputs) != 1 or not node.output.dtype.startswith(("float", "bfloat", "bool")):
            return
        if node.op in ("pointwise", "concat") or isinstance(node.inputs[0], str):
            rule(self, node)


def _make(weave: Weave, node: Node) -> None:
    """A linear map makes its own axis; along the others units stay what they are."""
    axis = node.attrs["axis"] if node.op == "linear" else len(node.output.shape) - 1
    if isinstance(node.output.shape[axis], int):
        weave.start((node.name, axis), node)
    x = str(node.inputs[0])
    if node.op == "linear":
        for other in weave.of(x):
            if other != axis:
                weave.carry((x, other), (node.name, other), weave.ids[x, other])


def _convolve(weave: Weave, node: Node) -> None:
    """A depthwise convolution carries; in groups it takes equally many of each, which couples their numbers."""
    x, axis, groups = str(node.inputs[0]), node.attrs["axis"], node.attrs["groups"]
    source, target = (x, axis), (node.name, axis)
    known = source in weave.ids
    if known and groups == weave.shape(x)[axis]:
        weave.carry(source, target, np.repeat(weave.ids[source], int(node.output.shape[axis]) // groups))
        return
    weave.start(target, node)
    if 1 < groups < int(weave.shape(x)[axis]):
        weave.balanced.setdefault(target, []).append(node)
        if known:
            weave.balanced.setdefault(source, []).append(node)


def _combine(weave: Weave, node: Node) -> None:
    out = node.output.shape
    for axis, size in enumerate(out):
        if not isinstance(size, int) or size < 2:
            continue
        operands = []
        for i, operand in enumerate(node.inputs):
            local = operand_axis(node, i, weave.shape(operand), axis) if isinstance(operand, str) else None
            if local is not None:
                operands.append((str(operand), local))
        if any(operand in weave.ids for operand in operands):
            weave.meet(node, operands, axis)


def _act_along(weave: Weave, node: Node) -> None:
    x, axes = str(node.inputs[0]), tuple(node.attrs["axes"])
    for axis in weave.of(x):
        if axis not in axes:
            moved = axis - sum(a < axis for a in axes) if node.attrs.get("drop") else axis
            weave.carry((x, axis), (node.name, moved), weave.ids[x, axis])


def _transpose(weave: Weave, node: Node) -> None:
    x = str(node.inputs[0])
    for axis in weave.of(x):
        weave.carry((x, axis), (node.name, node.attrs["perm"].index(axis)), weave.ids[x, axis])


def _expand(weave: Weave, node: Node) -> None:
    x = str(node.inputs[0])
    lead = len(node.output.shape) - len(weave.shape(x))
    for axis in weave.of(x):
        if node.output.shape[axis + lead] == weave.shape(x)[axis]:
            weave.carry((x, axis), (node.name, axis + lead), weave.ids[x, axis])


def _reshape(weave: Weave, node: Node) -> None:
    """An axis that stays whole is carried; one that is split or merged ends here."""
    x, after = str(node.inputs[0]), node.output.shape
    before = weave.shape(x)
    for axis in weave.of(x):
        for segment in segments(before, after):
            wide = [i for i in range(*segment.after) if after[i] != 1]
            alone = [i for i in range(*segment.before) if before[i] != 1] == [axis]
            if alone and len(wide) == 1 and after[wide[0]] == before[axis]:
                weave.carry((x, axis), (node.name, wide[0]), weave.ids[x, axis])


def _select(weave: Weave, node: Node) -> None:
    x, along = str(node.inputs[0]), node.attrs["axis"]
    for axis in weave.of(x):
        ids = weave.ids[x, axis]
        weave.carry((x, axis), (node.name, axis), ids[list(node.attrs["keep"])] if axis == along else ids)


def _concatenate(weave: Weave, node: Node) -> None:
    """Along the units the parts lie side by side; along another axis they are the same units."""
    along, names = node.attrs["axis"], [o for o in node.inputs if isinstance(o, str)]
    for axis in sorted({axis for name in names for axis in weave.of(name)}):
        if axis != along:
            weave.meet(node, [(name, axis) for name in names], axis)
            continue
        sizes = [
            o.shape[axis] if not isinstance(o, str) else weave.shape(o)[axis] for o in node.inputs if o is not None
        ]
        if not all(isinstance(n, int) for n in sizes):
            continue
        parts = []
        for operand, size in zip(node.inputs, sizes, strict=True):
            if isinstance(operand, str):
                parts.append(weave.start((operand, axis), weave.program.producers.get(operand)))
            else:
                parts.append(weave.identities.fresh(int(size)))
        for name in dict.fromkeys(names):
            weave.strands.add_edge((name, axis), (node.name, axis))
        weave.ids[node.name, axis] = np.concatenate(parts)
        if len(set(names)) > 1:
            weave.joins[node.name, axis] = node


RULES = {
    "linear": _make,
    "embedding": _make,
    "conv": _convolve,
    "pointwise": _combine,
    "along": _act_along,
    "transpose": _transpose,
    "expand": _expand,
    "reshape": _reshape,
    "select": _select,
    "concat": _concatenate,
}


# ---------------------------------------------------------------- groups


def find_groups(program: Program) -> list[Group]:
    """Every group in the order of the graph, without the dry runs."""
    import networkx as nx

    weave = Weave(program)
    for node in program.graph.nodes:
        weave.add(node)
    order = {strand: i for i, strand in enumerate(weave.ids)}
    found = []
    for part in nx.weakly_connected_components(weave.strands):
        strands = sorted(part, key=order.__getitem__)
        if any(s in weave.joins or s in weave.balanced for s in strands):
            found.append((order[strands[0]], _group(weave, strands)))
    # A fused node that writes to a group inside itself cannot be told to write anything else.
    groups = [
        g for _, g in sorted(found, key=lambda pair: pair[0]) if not any(w.value in program.inside for w in g.writers)
    ]
    names = [group.name for group in groups]
    seen: dict[str, int] = {}
    for i, name in enumerate(names):
        if names.count(name) > 1:
            groups[i] = replace(groups[i], name=f"{name}@{seen.setdefault(name, 0)}")
            seen[name] += 1
    return groups


def _group(weave: Weave, strands: Sequence[Strand]) -> Group:
    program = weave.program
    roots = {strand: weave.identities.find(weave.ids[strand]) for strand in strands}
    place: dict[int, int] = {}
    for strand in sorted(strands, key=lambda s: -len(roots[s])):  # the widest counts the units
        for root in roots[strand].tolist():
            place.setdefault(root, len(place))
    goals = {s for s in strands if s in weave.joins or s in weave.balanced}
    leading = set(goals)
    for strand in reversed(strands):
        if any(after in leading for after in weave.strands.successors(strand)):
            leading.add(strand)
    writers = []
    for first in (s for s in strands if s in weave.started):
        value, axis = strand = _entry(weave, first, leading, roots)
        places = tuple(place[root] for root in roots[strand].tolist())
        maker = program.producers.get(value)
        op = maker.kind if maker else "input"
        writers.append(Writer(program.title(value), value, op, axis, tuple(range(len(places))), places))
    nodes = list(dict.fromkeys(weave.joins[s] for s in strands if s in weave.joins))
    shared = list(dict.fromkeys(n for s in strands for n in weave.balanced.get(s, ())))
    called = {node.name: node.path or program.title(node.name) for node in (*nodes, *shared)}
    reasons = [f"{node.kind} {called[node.name]}" for node in nodes]
    reasons += [f"conv {called[n.name]} in {n.attrs['groups']} groups, which lose equally many" for n in shared]
    products = [f"{n.kind} {called[n.name]}" for n in nodes if n.op == "pointwise" and n.attrs["fn"] not in SUMS]
    labels = list(dict.fromkeys(called[node.name] for node in nodes)) or [writers[0].site]
    name = common_path(labels) or f"{labels[0]}..{labels[-1]}"  # from the first to the last of those that couple
    readers = dict.fromkeys(label for strand in strands for label in _readers(weave, strand))
    probes = [_one_of_each(roots[s], n, place) for s in strands for n in weave.balanced.get(s, ())]
    return Group(
        name,
        len(place),
        tuple(dict.fromkeys(writers)),
        tuple(readers),
        tuple(dict.fromkeys(reasons)),
        max(probes, key=len, default=(0,)),
        tuple(dict.fromkeys(products)),
    )


def _one_of_each(roots: Array, conv: Node, place: Mapping[int, int]) -> tuple[int, ...]:
    """The first unit of each group of a convolution."""
    return tuple(place[root] for root in roots[:: len(roots) // conv.attrs["groups"]].tolist())


def _entry(weave: Weave, strand: Strand, leading: set[Strand], roots: dict[Strand, Array]) -> Strand:
    """From the op that makes units to the value that enters: past what only it feeds (a batch norm, an activation)."""
    program = weave.program
    while True:
        after = list(weave.strands.successors(strand))
        if len(after) != 1 or len(program.consumers[strand[0]]) != 1 or strand[0] in program.graph.outputs:
            return strand
        following = after[0]
        same = len(roots[following]) == len(roots[strand]) and bool(np.all(roots[following] == roots[strand]))
        if following in weave.joins or following not in leading or not same or strand in weave.balanced:
            return strand
        if following[0] in program.inside:
            return strand
        strand = following


def _readers(weave: Weave, strand: Strand) -> Iterator[str]:
    """Who takes the units in, or looks at all of them: nodes that do not carry them on."""
    value, _ = strand
    onward = {target for target, _ in weave.strands.successors(strand)}
    for node in weave.program.consumers[value]:
        if node.name not in onward and not node.attrs.get("shape_only"):
            yield node.label
    if value in weave.program.graph.outputs:
        yield "output"


def common_path(paths: Sequence[str]) -> str:
    """The module that holds all of these."""
    parts = [path.split(".") for path in paths]
    shared = 0
    while all(len(p) > shared and p[shared] == parts[0][shared] for p in parts):
        shared += 1
    return ".".join(parts[0][:shared])


# ---------------------------------------------------------------- replacing

Share = tuple[Writer, list[int], npt.ArrayLike]  # a writer, its own units, and what they become


def expand(
    group: Group, places: Sequence[int], constant: npt.ArrayLike | Mapping[str, npt.ArrayLike], where: dict[str, str]
) -> list[Share]:
    """What each writer becomes. A constant enters by the first writer of its unit, and nothing (0) by the others."""
    shares = [(writer, *writer.at(places)) for writer in group.writers]
    shares = [share for share in shares if share[1]]
    if isinstance(constant, Mapping):
        names = [writer.site for writer, _, _ in shares]
        wrong = [f"{name!r} writes no such unit" for name in constant if name not in names]
        wrong += [f"there is no constant for {name!r}" for name in names if name not in constant]
        if wrong:
            raise DoError(wrong[0], **where, fix=f"name each of {', '.join(names)}")
        return [(writer, own, constant[writer.site]) for writer, own, _ in shares]
    try:
        values = np.broadcast_to(np.asarray(constant, dtype=np.float64), len(places))
    except (TypeError, ValueError) as error:
        reason = f"the constants are not one number, or one for each of {len(places)} units"
        raise DoShapeError(reason, **where, fix="give one constant per replaced unit, or one for all") from error
    if group.products and np.any(values):
        raise DoError(
            f"its writers meet in {group.products[0]}: one constant does not say what each of them becomes",
            **where,
            fix="give a constant for each writer by name, or replace units of the site behind that node",
        )
    given: set[int] = set()
    found: list[Share] = []
    for writer, own, which in shares:
        found.append((writer, own, [0.0 if i in given else float(values[i]) for i in which]))
        given.update(which)
    return found


def describe(program: Program, group: Group) -> str:
    """How a unit of the group folds: a dry run on its neighbourhood."""
    if group.units <= len(group.probe):
        return "has a single unit"
    told: dict[float, str] = {}
    for value in (0.0,) if group.products else (0.37, 0.0):
        shares = expand(group, group.probe, value, {})
        entries = [Do(w.site, w.value, w.axis, tuple(own), np.asarray(values)) for w, own, values in shares]
        told[value] = dry_run(program, entries) or "folds"
        if told[value] == "folds":
            break
    if len(told) == 1 or told[0.0] != "folds":
        return next(iter(told.values()))
    return f"folds if it becomes 0; otherwise it {told[0.37]}"


def dry_run(program: Program, entries: Sequence[Do], earlier: Sequence[Do] = ()) -> str:
    """What stops these do's, alone and beside those before them; nothing if they fold."""
    from cmrc.program.program import neighbourhood, put_dos

    told = ""
    for asked in (entries, [*earlier, *entries])[: 2 if earlier else 1]:
        around = neighbourhood(program.graph, [entry.value for entry in asked])
        try:
            residue = passes.run(put_dos(around, asked)).residue
        except GraphError as error:
            return f"stops: {error.reason}"
        if not residue:
            return ""
        told = told or f"stops at {residue[0].stopped_at} ({residue[0].stopped_op}): {residue[0].reason}"
    return told
