"""Try do's on the part of a model that they can reach, and report how they end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cmrc.errors import GraphError
from cmrc.ir.graph import Do, Graph, Node, attributes
from cmrc.ir.ops import OPS
from cmrc.ir.ops.affine import ConvAttrs
from cmrc.ir.recurrence import HIDDEN, first_units, hidden_states, initial_states
from cmrc.passes import pipeline as passes
from cmrc.passes.dead_subgraph import idle_nodes
from cmrc.passes.pipeline import put_dos
from cmrc.passes.rewriting.idle import without_sizes
from cmrc.passes.rewriting.recurrent import why_not_held
from cmrc.passes.rewriting.rewriter import Movement
from cmrc.program.groups import Group, expand
from cmrc.program.sites import Ending, GroupFolding, Outcome, SiteFolding


def dry_run(around: Graph, entries: Sequence[Do]) -> Outcome:
    """How these do's end, within a neighbourhood of their values."""
    try:
        result = passes.run(put_dos(around, entries))
    except GraphError as error:
        return Outcome(Ending.STOPS, reason=error.reason)
    if result.residue:
        first = result.residue[0]
        return Outcome(Ending.STOPS, node=first.stopped_at, op=first.stopped_op, reason=first.reason)
    ends = dict.fromkeys(action.node for action in result.actions if action.movement is Movement.FOLDED)
    return Outcome(Ending.FOLDS, into=tuple(ends))


def try_site(graph: Graph, value: str, axis: int) -> SiteFolding:
    """Replace one unit of a site by a constant, and by an affine function of another."""
    around = neighbourhood(graph, [value])
    known = around.values()
    units: tuple[int, ...] = (0,)
    node: Node | None = None
    if value in known:
        size = known[value].shape[axis]
    else:
        node, state = hidden_states(graph)[value]
        size, units = state.shape[axis], first_units(node)
    if not isinstance(size, int) or size < 2 * len(units):
        single = Outcome(Ending.SINGLE_UNIT)
        return SiteFolding(single, single)
    given, parents = np.full(len(units), 0.37), tuple(unit + 1 for unit in units)
    constant = Do("probe", value, axis, units, given)
    affine = Do("probe", value, axis, units, given, parents, 0.5 * np.eye(len(units)))
    if node is not None:
        return SiteFolding(*(_try_hidden(around, node, do) for do in (constant, affine)))
    return SiteFolding(dry_run(around, [constant]), dry_run(around, [affine]))


def _try_hidden(around: Graph, node: Node, do: Do) -> Outcome:
    """Inside a recurrence, what its weights cannot say stops at once."""
    problem = why_not_held(node, do)
    return (
        dry_run(around, [do])
        if problem is None
        else Outcome(Ending.STOPS, node=node.label, op=node.kind, reason=problem[0])
    )


def try_dos(graph: Graph, entries: Sequence[Do], *, earlier: Sequence[Do] = ()) -> Outcome:
    """How these do's end by themselves; if they stop, whether they fold together with those before them."""
    alone = dry_run(neighbourhood(graph, [entry.value for entry in entries]), entries)
    if alone.folds or not earlier:
        return alone
    every = [*earlier, *entries]
    beside = dry_run(neighbourhood(graph, [entry.value for entry in every]), every)
    return beside if beside.folds else alone


def try_group(graph: Graph, group: Group) -> GroupFolding:
    """Replace one unit of the group, by a constant and by 0, in a dry run."""
    if group.units <= len(group.probe):
        single = Outcome(Ending.SINGLE_UNIT)
        return GroupFolding(single, single)
    constant = _try_constant(graph, group, 0.0 if group.products else 0.37)  # one constant means nothing for a product
    zero = constant if constant.folds or group.products else _try_constant(graph, group, 0.0)
    return GroupFolding(constant, zero)


def _try_constant(graph: Graph, group: Group, value: float) -> Outcome:
    shares = expand(group, group.probe, value, {})
    return try_dos(graph, [Do(w.site, w.value, w.axis, tuple(own), np.asarray(given)) for w, own, given in shares])


def neighbourhood(graph: Graph, values: Sequence[str]) -> Graph:
    """The nodes that do's at these values, and the selects they leave, can reach."""
    producers, consumers = graph.makers, graph.readers
    wanted: dict[str, Node] = {}
    hidden = hidden_states(graph) if any(name.endswith(HIDDEN) for name in values) else {}
    recurrent = [hidden[name][0] for name in values if name in hidden]
    values = [name for name in values if name not in hidden] + [v.name for node in recurrent for v in node.outputs]
    down, up, seen_up = list(values), list(values), set[str]()
    up += [state for node in recurrent for state in initial_states(node)]
    seen_down: set[str] = set()
    while down:
        name = down.pop()
        if name in seen_down:
            continue
        seen_down.add(name)
        for reader in consumers[name]:
            wanted[reader.name] = reader
            up.extend(o for o in reader.values() if o != name)
            grouped = reader.op == "conv" and attributes(reader, ConvAttrs)["groups"] > 1
            if OPS[reader.op].passes or grouped:
                down.extend(v.name for v in reader.outputs)
    while up:
        name = up.pop()
        if name in seen_up or name not in producers:
            continue
        seen_up.add(name)
        node = producers[name]
        wanted[node.name] = node
        grouped = node.op == "conv" and attributes(node, ConvAttrs)["groups"] > 1
        if OPS[node.op].passes or grouped:
            up.extend(node.values())
        if name not in seen_down:  # the other readers are the reason why a select stops here
            wanted.update({reader.name: reader for reader in consumers[name]})
    nodes = tuple(node for node in graph.nodes if node.name in wanted)
    computed = {v.name for node in nodes for v in node.outputs}
    every = graph.values()
    # A value that a node outside reads counts as an output, unless the do cannot reach it.
    read = dict.fromkeys(o for node in nodes for o in node.values() if o not in computed)
    inside = {node.name for node in nodes}
    unread = {n for n in computed if not any(consumers[v.name] for v in producers[n].outputs)}
    idle = idle_nodes(graph)
    idle = idle and without_sizes(graph, idle)
    if idle.isdisjoint(values):  # then idle nodes go where they are in the way
        unread -= idle
        inside |= idle
    ends = [n for n in computed if n in graph.outputs or n in unread or any(r.name not in inside for r in consumers[n])]
    return Graph(tuple(every[n] for n in read), nodes, tuple(n for n in every if n in set(ends)))
