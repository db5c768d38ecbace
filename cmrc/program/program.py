"""A traced model: its host, its IR, its sites, and the plan that is written on it, if one is."""

from __future__ import annotations

import difflib
import fnmatch
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from cmrc.errors import GraphError, SiteError, TraceError
from cmrc.hosts.protocols import Host
from cmrc.ir.axes import Index, move, segments
from cmrc.ir.cost import Cost, cost
from cmrc.ir.fingerprint import Fingerprint, fingerprint
from cmrc.ir.graph import Array, Graph, Node, Shape, Value, literal
from cmrc.ir.ops import as_dtype
from cmrc.ir.verify import verify_graph
from cmrc.passes import pipeline as passes
from cmrc.program.groups import Group, describe, find_groups
from cmrc.program.plan import Do, Plan, pack_text, unpack_text


@dataclass(frozen=True, slots=True)
class Site:
    """A value and the axis whose positions are its units. `folds` says what becomes of a replaced unit here."""

    name: str
    value: str
    op: str
    axis: int
    shape: Shape
    consumers: tuple[str, ...] = ()
    folds: str = ""

    @property
    def units(self) -> int:
        return int(self.shape[self.axis])


@dataclass(eq=False, repr=False)
class Program:
    """What `cmrc.trace` returns. `args` and `options` are those of the trace, for tracing the same module again."""

    host: Host
    args: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Program({self.host.kind}, {len(self.graph.nodes)} nodes, {len(self.axes)} sites)"

    @property
    def graph(self) -> Graph:
        return self.host.graph

    @cached_property
    def verified(self) -> Graph:
        """The IR, checked once: what is made of it is checked only where it differs."""
        verify_graph(self.graph)
        return self.graph

    @cached_property
    def fingerprint(self) -> Fingerprint:
        return fingerprint(self.graph)

    @cached_property
    def values(self) -> dict[str, Value]:
        return self.graph.values()

    @cached_property
    def inside(self) -> frozenset[str]:
        """Values that the fused node which makes them goes on to read: they cannot be replaced."""
        return frozenset(node.name for node in self.graph.nodes if "inside" in node.attrs)

    @cached_property
    def producers(self) -> dict[str, Node]:
        return {value.name: node for node in self.graph.nodes for value in node.outputs}

    @cached_property
    def consumers(self) -> dict[str, list[Node]]:
        return self.graph.consumers()

    @cached_property
    def axes(self) -> dict[str, int]:
        return unit_axes(self.graph)

    @cached_property
    def _titles(self) -> dict[str, str]:
        """The name that reports use for a value: the innermost module that returns it, else its own."""
        best: dict[str, str] = {}
        for alias, found in self.host.names.items():
            if len(found) != 1:
                continue
            value = found[0]
            module = alias != value and "/" not in alias and alias == self._path(value, alias)
            if module and len(alias) > len(best.get(value, "")):
                best[value] = alias
        return best

    def _path(self, value: str, alias: str) -> str:
        node = self.producers.get(value)
        path = node.path if node is not None else ""
        return alias if path and (alias == path or alias.rpartition("@")[0] == path) else ""

    def title(self, value: str) -> str:
        return self._titles.get(value, value)

    @cached_property
    def _cost(self) -> Cost:
        return cost(self.graph)

    def cost(self, sizes: Mapping[str, int] | None = None) -> Cost:
        return cost(self.graph, sizes) if sizes else self._cost

    # ------------------------------------------------------------ sites

    def sites(self, pattern: str = "*", *, folds: bool = True) -> list[Site]:
        """Every site in the order of the graph. `folds=False` leaves out how each folds, which takes a dry run each."""
        wanted = None if pattern == "*" else {site.value for site in self.find(pattern)}
        found = []
        for name in self.values:
            if name in self.axes and name not in self.inside and (wanted is None or name in wanted):
                found.append(self._site(name))
        return [self.describe(site) for site in found] if folds else found

    def describe(self, site: Site) -> Site:
        """The same site with how it folds: a dry run."""
        return replace(site, folds=describe_folds(self.graph, site.value, site.axis))

    def _site(self, value: str, *, axis: int | None = None, name: str = "") -> Site:
        node = self.producers.get(value)
        consumers = tuple(dict.fromkeys(reader.label for reader in self.consumers[value]))
        if value in self.graph.outputs:
            consumers = (*consumers, "output")
        place = self.axes.get(value, 0) if axis is None else axis
        op = node.kind if node else "input"
        return Site(name or self.title(value), value, op, place, self.values[value].shape, consumers)

    def find(self, pattern: str, *, at: str = "") -> list[Site]:
        """The sites that a name or a glob means. A name that means none or several is an error."""
        names = self.host.names
        if pattern in names:
            found = list(dict.fromkeys(names[pattern]))
            if len(found) > 1:
                calls = [f"{pattern}@{i}" for i in range(len(found))]
                raise SiteError(
                    f"{pattern!r} is called {len(found)} times, each call is its own site",
                    at=at,
                    fix=f"name one: {', '.join(calls)}",
                )
        elif any(c in pattern for c in "*?["):
            hits = [alias for alias in names if fnmatch.fnmatchcase(alias, pattern)]
            found = list(dict.fromkeys(value for alias in hits for value in names[alias] if value in self.axes))
            order = {name: i for i, name in enumerate(self.values)}
            found.sort(key=order.__getitem__)
        else:
            found = []
        if not found:
            near = difflib.get_close_matches(pattern, list(names), n=5, cutoff=0.5)
            fix = f"near matches: {', '.join(near)}" if near else "`cmrc inspect` or program.sites() lists the names"
            within = [f"{node.label} ({node.kind})" for node in self.graph.nodes if node.attrs.get("bodies")]
            inside = f"; what lies inside the bodies of {', '.join(within)} is no site" if within else ""
            raise SiteError(f"no site is called {pattern!r}{inside}", at=at, fix=fix)
        single = len(found) == 1 and pattern in names
        return [self.site_of(value, None, pattern if single else "", at=at) for value in found]

    def site_of(self, value: str, axis: int | None, name: str = "", *, at: str = "") -> Site:
        """The site at a value, by its own name."""
        known = self.values.get(value)
        if value in self.inside:
            maker = self.producers[value]
            op = str(maker.attrs["inside"])
            raise SiteError(
                f"the node goes on to read {value!r} itself, so that it cannot be replaced",
                node=maker.label,
                op=op,
                at=at,
                fix=f"name a value before or after it, or trace the model as it was before {op} was fused",
            )
        if known is None:
            near = difflib.get_close_matches(value, list(self.values), n=5, cutoff=0.5)
            raise SiteError(
                f"the model has no value {value!r}", at=at, fix=f"near matches: {', '.join(near)}" if near else ""
            )
        if axis is None and value not in self.axes:
            axis = len(known.shape) - 1
        if not known.shape or not known.dtype.startswith(("float", "bfloat")):
            node = self.producers.get(value)
            raise SiteError(
                f"is {known.dtype} of shape {list(known.shape)}, it has no units",
                node=name or value,
                op=node.kind if node else "input",
                at=at,
                fix="name a floating-point value with at least one axis",
            )
        return self._site(value, axis=axis, name=name)

    # ------------------------------------------------------------ groups

    @cached_property
    def _groups(self) -> list[Group]:
        return find_groups(self)

    def groups(self, pattern: str = "*", *, folds: bool = True) -> list[Group]:
        """What is coupled with what, and why: residual streams, concatenations, products, convolutions in groups.

        `folds=False` leaves out what becomes of a replaced unit, which takes a dry run each.
        """
        found = [group for group in self._groups if fnmatch.fnmatchcase(group.name, pattern)]
        return [replace(group, folds=describe(self, group)) for group in found] if folds else found

    def group(self, name: str, *, at: str = "") -> Group:
        """The group of this name, or the one that the site of this name writes."""
        found = [group for group in self._groups if group.name == name]
        sites = self.host.names.get(name, ())
        found = found or [g for g in self._groups if any(w.value in sites or w.site == name for w in g.writers)]
        if len(found) == 1:
            return found[0]
        names = [group.name for group in self._groups]
        if found:
            listed = ", ".join(group.name for group in found)
            raise SiteError(f"{name!r} writes {len(found)} groups", at=at, fix=f"name one: {listed}")
        near = difflib.get_close_matches(name, names, n=5, cutoff=0.5) or names[:5]
        fix = f"there are: {', '.join(near)}" if near else "nothing is coupled here: plan.do replaces units of a site"
        raise SiteError(f"no group is called {name!r}", at=at, fix=fix)

    # ------------------------------------------------------------ plans

    def annotate(self, plan: Plan) -> Program:
        """A copy of the model with the do's written on its nodes. Saved and traced again, it still carries them."""
        self.require(plan)
        entries = [(entry.value, entry.to_json(pack_text)) for entry in plan.entries]
        return Program(self.host.annotate(entries), self.args, self.options)

    @cached_property
    def plan(self) -> Plan | None:
        """The plan that is written on the model, if there is one."""
        entries = self.host.annotations()
        if not entries:
            return None
        dos = [Do.from_json(entry, unpack_text, f"annotation: do[{i}]") for i, entry in enumerate(entries)]
        plan = Plan(self, dos, source="annotation")
        plan.check(self)
        return plan

    def require(self, plan: Plan) -> None:
        """Check that a plan is for this model and fits it."""
        if plan.fingerprint is not None and plan.fingerprint is not self.__dict__.get("fingerprint"):
            plan.fingerprint.require(self.fingerprint, plan.source)
        if plan.program is not self:
            plan.check(self)

    def with_dos(self, plan: Plan) -> Graph:
        """The IR with the plan's do nodes in place: the literal meaning of the plan."""
        return put_dos(self.graph, plan.entries)

    def clamped(self, plan: Plan) -> Host:
        """The model with its units literally replaced at run time: the reference for every lowering."""
        return self.host.build(self.with_dos(plan))

    @cached_property
    def _literal(self) -> Host:
        return self.host if self.plan is None else self.clamped(self.plan)

    def run(self, inputs: Sequence[Any] | Mapping[str, Any], taps: Sequence[str] = ()) -> list[Array]:
        """Run the model; an annotated one literally, with its units replaced."""
        return self._literal.run(inputs, taps)

    def save(self, path: str | Path) -> None:
        """Write the model, with its annotations, as ONNX."""
        self.host.save(Path(path), {})


def put_dos(graph: Graph, entries: Sequence[Do]) -> Graph:
    """Insert a do node for each entry behind the value it names; everyone who read the value reads the last do."""
    by_value: dict[str, list[tuple[int, Do]]] = {}
    for i, entry in enumerate(entries):
        by_value.setdefault(entry.value, []).append((i, entry))
    renamed: dict[str, str] = {}
    nodes: list[Node] = []

    def chain(value: Value) -> None:
        name = value.name
        for i, entry in by_value[value.name]:
            output = Value(f"{value.name}.do{i}", value.shape, value.dtype)
            slab = entry.constant
            if slab.ndim == 1:
                slab = slab.reshape((1,) * entry.axis + slab.shape + (1,) * (len(value.shape) - entry.axis - 1))
            slab = as_dtype(slab, value.dtype)  # the model holds the constant in its own precision
            attrs: dict[str, Any] = {"axis": entry.axis, "units": Index.of(entry.units), "sources": (i,)}
            inputs: tuple[Any, ...] = (name, literal(slab))
            if entry.weight is not None:
                attrs["parents"] = entry.parents
                inputs = (*inputs, literal(entry.weight))
            nodes.append(Node("do", inputs, (output,), attrs, path=entry.site))
            name = output.name
        renamed[value.name] = name

    for value in graph.inputs:
        if value.name in by_value:
            chain(value)
    for node in graph.nodes:
        if not renamed.keys().isdisjoint(node.values()):
            node = node.with_inputs([renamed.get(o, o) if isinstance(o, str) else o for o in node.inputs])
        nodes.append(node)
        for value in node.outputs:
            if value.name in by_value:
                chain(value)
    return Graph(graph.inputs, tuple(nodes), tuple(renamed.get(name, name) for name in graph.outputs))


def unit_axes(graph: Graph) -> dict[str, int]:
    """The axis along which a value's units lie: where the last affine op put them, followed through the ops between."""
    axes: dict[str, int] = {}
    shapes = {name: value.shape for name, value in graph.values().items()}
    tables = {node.name for node in graph.nodes if node.op == "embedding"}
    for node in graph.nodes:
        out = node.output
        if not out.dtype.startswith(("float", "bfloat")) or not out.shape:
            continue
        axis = _unit_axis(node, shapes, axes, tables)
        if axis is not None and isinstance(out.shape[axis], int):
            axes[out.name] = axis
    return axes


def _unit_axis(node: Node, shapes: Mapping[str, Shape], axes: Mapping[str, int], tables: Collection[str]) -> int | None:
    if node.op in ("linear", "conv"):
        return int(node.attrs["axis"])
    if node.op == "embedding":
        return len(node.output.shape) - 1
    if node.op == "matmul" and (node.inputs[0] in tables) != (node.inputs[1] in tables):  # weights looked up in a table
        return len(node.output.shape) - (2 if node.inputs[0] in tables else 1)
    if node.op == "attention" or (node.op == "matmul" and len(node.output.shape) > 3):  # its heads
        return max(len(node.output.shape) - 3, 0)
    known = [(o, axes[o]) for o in node.values() if o in axes]
    if not known or node.op in ("opaque", "matmul"):
        return None
    name, axis = known[0]
    if node.op == "transpose":
        return int(node.attrs["perm"].index(axis))
    if node.op in ("pointwise", "expand"):
        return axis + len(node.output.shape) - len(shapes[name])
    if node.op == "along" and node.attrs.get("drop"):
        return None if axis in node.attrs["axes"] else axis - sum(a < axis for a in node.attrs["axes"])
    if node.op == "reshape":
        moved = move(shapes[name], node.output.shape, axis, (0,))
        if not isinstance(moved, str):
            return moved.axis
        for segment in segments(shapes[name], node.output.shape):
            if segment.before[0] <= axis < segment.before[1]:
                wide = [i for i in range(*segment.after) if node.output.shape[i] != 1]
                return wide[0] if wide else (segment.after[0] if segment.after[0] < segment.after[1] else None)
        return None
    return axis


# Ops that replacements pass: the dry run follows them from a site to where a do is taken in or stops.
PASSING = {"pointwise", "along", "reshape", "transpose", "expand", "concat", "select", "matmul", "attention"}


def describe_folds(graph: Graph, value: str, axis: int) -> str:
    """Replace one unit in a dry run on the neighbourhood of the site, and say how it ends."""
    around = neighbourhood(graph, [value])
    known = around.values()[value]
    if not isinstance(known.shape[axis], int) or int(known.shape[axis]) < 2:
        return "has a single unit"
    told = {}
    for kind in ("constant", "affine"):
        weight = np.array([[0.5]]) if kind == "affine" else None
        parents = (1,) if kind == "affine" else ()
        probe = Do("probe", value, axis, (0,), np.array([0.37]), parents, weight)
        try:
            result = passes.run(put_dos(around, [probe]))
        except GraphError as error:
            told[kind] = f"stops: {error.reason}"
            continue
        if result.residue:
            first = result.residue[0]
            told[kind] = f"stops at {first.stopped_at} ({first.stopped_op}): {first.reason}"
        else:
            ends = dict.fromkeys(a.node for a in result.actions if a.rule != "dead_subgraph" and "into" in a.detail)
            told[kind] = f"folds into {', '.join(ends)}" if ends else "folds"
    if told["constant"] == told["affine"]:
        return told["constant"]
    return f"constant {told['constant']}; affine {told['affine']}"


def neighbourhood(graph: Graph, values: Sequence[str]) -> Graph:
    """The nodes that do's at these values, and the selects they leave, can reach."""
    producers = {v.name: node for node in graph.nodes for v in node.outputs}
    consumers = graph.consumers()
    wanted: dict[str, Node] = {}
    down, up, seen_up = list(values), list(values), set[str]()
    seen_down: set[str] = set()
    while down:
        name = down.pop()
        if name in seen_down:
            continue
        seen_down.add(name)
        for reader in consumers[name]:
            wanted[reader.name] = reader
            up.extend(o for o in reader.values() if o != name)
            grouped = reader.op == "conv" and reader.attrs["groups"] > 1
            if reader.op in PASSING or grouped:
                down.extend(v.name for v in reader.outputs)
    while up:
        name = up.pop()
        if name in seen_up or name not in producers:
            continue
        seen_up.add(name)
        node = producers[name]
        wanted[node.name] = node
        grouped = node.op == "conv" and node.attrs["groups"] > 1
        if node.op in PASSING or grouped:
            up.extend(node.values())
        if name not in seen_down:  # whoever else reads it is why a select stops here
            wanted.update({reader.name: reader for reader in consumers[name]})
    nodes = tuple(node for node in graph.nodes if node.name in wanted)
    made = {v.name for node in nodes for v in node.outputs}
    every = graph.values()
    # A value that somebody outside reads counts as an output, unless it is past the reach of the do.
    read = dict.fromkeys(o for node in nodes for o in node.values() if o not in made)
    inside = {node.name for node in nodes}
    ends = [
        n for n in made if n in graph.outputs or not consumers[n] or any(r.name not in inside for r in consumers[n])
    ]
    return Graph(tuple(every[n] for n in read), nodes, tuple(n for n in every if n in set(ends)))


def trace(model: Any, args: tuple[Any, ...] = (), **options: Any) -> Program:
    """Read a model into a Program (which is returned as it is).

    The model is a path to an ONNX file, an onnx.ModelProto or an onnx_ir.Model; or an nn.Module with example inputs
    (and torch.export's options, such as `dynamic_shapes`), or an ExportedProgram.
    """
    if isinstance(model, Program):
        return model
    module = type(model).__module__.split(".")[0]
    if isinstance(model, (str, Path)) or module in ("onnx", "onnx_ir"):
        from cmrc.hosts.onnx.host import OnnxHost

        return Program(OnnxHost.load(model) if isinstance(model, (str, Path)) else OnnxHost.from_model(model))
    if "torch" in sys.modules:  # somebody who holds a torch model has imported torch
        from cmrc.hosts.fx import host as fx

        if fx.is_torch_model(model):
            return Program(fx.trace(model, args, options), args, options)
    raise TraceError(
        f"cannot trace a {type(model).__name__}",
        fix="give a path to an ONNX file, an onnx(_ir) model, an nn.Module with example inputs, or an ExportedProgram",
    )
