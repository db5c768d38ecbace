"""Which units are coupled, and why: they are replaced together, or do not fold at all.

A group is a connected part of the weave of strands (strands.py) that contains at least one op which
combines values unit by unit (a residual sum, a concatenation, a gate), or a convolution in groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cmrc.errors import DoError, DoShapeError
from cmrc.ir.graph import Array, Node, attributes
from cmrc.ir.ops.affine import ConvAttrs
from cmrc.ir.ops.functions import PointwiseAttrs
from cmrc.program.sites import GroupFolding, Sites
from cmrc.program.strands import Strand, Weave, weave_strands

# Functions of two values for which a unit is 0 if it is 0 in both, and c if it is c in one and 0 in the other.
SUMS = {"add", "sub", "rsub"}


@dataclass(frozen=True, slots=True)
class WritingSite:
    """A site whose units belong to a group: unit `units[i]` of the site is unit `places[i]` of the group."""

    site: str
    value: str
    op: str
    axis: int
    units: tuple[int, ...]
    places: tuple[int, ...]

    def at(self, places: Sequence[int]) -> tuple[list[int], list[int]]:
        """The site's own units that are these units of the group, and which of them each is."""
        wanted = {place: i for i, place in enumerate(places)}
        pairs = [(u, wanted[p]) for u, p in zip(self.units, self.places, strict=True) if p in wanted]
        return [u for u, _ in pairs], [i for _, i in pairs]


@dataclass(frozen=True, slots=True)
class Group:
    """Units that are replaced together. `reasons` are the nodes that couple them; `folding` is the result of a dry run."""

    name: str
    units: int
    writers: tuple[WritingSite, ...]
    readers: tuple[str, ...]
    reasons: tuple[str, ...]
    probe: tuple[int, ...] = (0,)  # units that a dry run replaces: one, or one of each group of a convolution
    products: tuple[str, ...] = ()  # those reasons after which one constant does not determine what each writer becomes
    folding: GroupFolding | None = None

    @property
    def folds(self) -> str:
        """What becomes of a replaced unit, in words; empty without a dry run."""
        return "" if self.folding is None else str(self.folding)

    def to_json(self) -> dict[str, Any]:
        writers = [
            {"site": w.site, "value": w.value, "op": w.op, "axis": w.axis, "units": runs(w.units),
             "places": runs(w.places)} for w in self.writers
        ]  # fmt: skip
        return {"name": self.name, "units": self.units, "writers": writers, "readers": list(self.readers),
                "reasons": list(self.reasons), "folds": self.folds}  # fmt: skip

    def __str__(self) -> str:
        """For people: the writers, the readers, why they are coupled, and what becomes of a replaced unit."""
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
    """`0:8,0:8,12` for positions in any order, as slices with a step of 1."""
    ends = [i for i in range(1, len(index)) if index[i] != index[i - 1] + 1]
    parts = [index[a:b] for a, b in zip([0, *ends], [*ends, len(index)], strict=True)]
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}:{p[-1] + 1}" for p in parts)


def find_groups(sites: Sites) -> list[Group]:
    """Every group in the order of the graph, without the dry runs."""
    weave = weave_strands(sites)
    order = {strand: i for i, strand in enumerate(weave.ids)}
    numbered = []
    for part in weave.parts():
        strands = sorted(part, key=order.__getitem__)
        if any(s in weave.joins or s in weave.balanced for s in strands):
            numbered.append((order[strands[0]], _group(weave, strands)))
    # A fused node that writes to a group inside itself cannot be changed to write something else.
    groups = [
        g for _, g in sorted(numbered, key=lambda pair: pair[0]) if not any(w.value in sites.inside for w in g.writers)
    ]
    names = [group.name for group in groups]
    seen: dict[str, int] = {}
    for i, name in enumerate(names):
        if names.count(name) > 1:
            groups[i] = replace(groups[i], name=f"{name}@{seen.setdefault(name, 0)}")
            seen[name] += 1
    return groups


def _group(weave: Weave, strands: Sequence[Strand]) -> Group:
    sites = weave.sites
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
        maker = sites.producers.get(value)
        op = maker.kind if maker else "input"
        writers.append(WritingSite(sites.title(value), value, op, axis, tuple(range(len(places))), places))
    nodes = list(dict.fromkeys(weave.joins[s] for s in strands if s in weave.joins))
    shared = list(dict.fromkeys(n for s in strands for n in weave.balanced.get(s, ())))
    called = {node.name: node.path or sites.title(node.name) for node in (*nodes, *shared)}
    reasons = [f"{node.kind} {called[node.name]}" for node in nodes]
    reasons += [
        f"conv {called[n.name]} in {attributes(n, ConvAttrs)['groups']} groups, which lose equally many" for n in shared
    ]
    products = [
        f"{n.kind} {called[n.name]}"
        for n in nodes
        if n.op == "pointwise" and attributes(n, PointwiseAttrs)["fn"] not in SUMS
    ]
    labels = list(dict.fromkeys(called[node.name] for node in nodes)) or [writers[0].site]
    name = common_path(labels) or f"{labels[0]}..{labels[-1]}"  # from the first to the last node that couples
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
    return tuple(place[root] for root in roots[:: len(roots) // attributes(conv, ConvAttrs)["groups"]].tolist())


def _entry(weave: Weave, strand: Strand, leading: set[Strand], roots: dict[Strand, Array]) -> Strand:
    """From the op that makes units to the value that enters: past what only it feeds (a batch norm, an activation)."""
    sites = weave.sites
    while True:
        after = list(weave.strands.successors(strand))
        if len(after) != 1 or len(sites.consumers[strand[0]]) != 1 or strand[0] in sites.graph.outputs:
            return strand
        following = after[0]
        same = len(roots[following]) == len(roots[strand]) and bool(np.all(roots[following] == roots[strand]))
        if following in weave.joins or following not in leading or not same or strand in weave.balanced:
            return strand
        if following[0] in sites.inside:
            return strand
        strand = following


def _readers(weave: Weave, strand: Strand) -> Iterator[str]:
    """Nodes that absorb the units, or look at all of them: those that do not carry them on."""
    value, _ = strand
    onward = {target for target, _ in weave.strands.successors(strand)}
    for node in weave.sites.consumers[value]:
        if node.name not in onward and node.marks.shape_only is None:
            yield node.label
    if value in weave.sites.graph.outputs:
        yield "output"


def common_path(paths: Sequence[str]) -> str:
    """The innermost module that contains all of these."""
    parts = [path.split(".") for path in paths]
    shared = 0
    while all(len(p) > shared and p[shared] == parts[0][shared] for p in parts):
        shared += 1
    return ".".join(parts[0][:shared])


# ---------------------------------------------------------------- replacing

Share = tuple[WritingSite, list[int], npt.ArrayLike]  # a writer, its own units, and what they become


def expand(
    group: Group, places: Sequence[int], constant: npt.ArrayLike | Mapping[str, npt.ArrayLike], where: dict[str, str]
) -> list[Share]:
    """What each writer becomes. The first writer of a unit gets the constant, the others get 0."""
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
        reason = f"the constants must be one number, or one for each of the {len(places)} units"
        raise DoShapeError(reason, **where, fix="give one constant per replaced unit, or one for all") from error
    if group.products and np.any(values):
        raise DoError(
            f"its writers meet in {group.products[0]}: one constant does not determine what each of them becomes",
            **where,
            fix="give a constant for each writer by name, or replace units of the site behind that node",
        )
    given: set[int] = set()
    entering: list[Share] = []
    for writer, own, which in shares:
        entering.append((writer, own, [0.0 if i in given else float(values[i]) for i in which]))
        given.update(which)
    return entering
