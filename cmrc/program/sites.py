"""What a user can name in a model: values, the axis of their units, who makes and who reads them, and whether
they fold.

A dry run reports that a replaced unit folds, that it stops at a node, or that there is no second unit to keep. Code
decides by `Ending`; people read the text.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from cmrc.errors import SiteError
from cmrc.hosts.protocols import Host
from cmrc.ir.axes import move, segments
from cmrc.ir.graph import Graph, Node, Shape, Value, attributes
from cmrc.ir.ops.functions import AlongAttrs
from cmrc.ir.ops.layout import TransposeAttrs
from cmrc.ir.recurrence import HIDDEN, hidden_states, recurrence_of, returned_state
from cmrc.ir.spec import AxisAttrs, FunctionAttrs

NUMBERED = re.compile(r"_\d+$")  # mul_17, /mlp/Mul_output_0: a name that an exporter numbered


class Ending(Enum):
    """How the dry run of one replacement ends."""

    FOLDS = "folds"
    STOPS = "stops"
    SINGLE_UNIT = "has a single unit"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The ending of one dry run: the nodes that absorb the replacement, or the node that stops it and why."""

    ending: Ending
    into: tuple[str, ...] = ()
    node: str = ""
    op: str = ""
    reason: str = ""

    @property
    def folds(self) -> bool:
        return self.ending is Ending.FOLDS

    def __str__(self) -> str:
        if self.ending is Ending.FOLDS:
            return f"folds into {', '.join(self.into)}" if self.into else "folds"
        if self.ending is Ending.STOPS:
            place = f" at {self.node} ({self.op})" if self.node else ""
            return f"stops{place}: {self.reason}"
        return str(self.ending.value)


@dataclass(frozen=True, slots=True)
class SiteFolding:
    """What becomes of a unit of a site, replaced by a constant and by an affine function of another unit."""

    constant: Outcome
    affine: Outcome

    @property
    def folds(self) -> bool:
        """Whether both kinds of replacement fold."""
        return self.constant.folds and self.affine.folds

    def __str__(self) -> str:
        constant, affine = str(self.constant), str(self.affine)
        return constant if constant == affine else f"constant {constant}; affine {affine}"


@dataclass(frozen=True, slots=True)
class GroupFolding:
    """What becomes of a unit of a group, replaced by a constant and by 0, which passes more nodes."""

    constant: Outcome
    zero: Outcome

    def __str__(self) -> str:
        if self.constant.folds:
            return str(Ending.FOLDS.value)
        return f"folds if it becomes 0; otherwise it {self.constant}" if self.zero.folds else str(self.constant)


@dataclass(frozen=True, slots=True)
class Site:
    """A value and the axis whose positions are its units. `folding` is the result of a dry run, `folds` its text.

    A site may be the hidden state of the op `recurrence`, which reads it itself.
    """

    name: str
    value: str
    op: str
    axis: int
    shape: Shape
    consumers: tuple[str, ...] = ()
    folding: SiteFolding | None = None
    dtype: str = "float32"
    recurrence: Node | None = None

    @property
    def units(self) -> int:
        return int(self.shape[self.axis])

    @property
    def folds(self) -> str:
        """What becomes of a replaced unit here, in words; empty without a dry run."""
        return "" if self.folding is None else str(self.folding)


@dataclass(eq=False, repr=False)
class Sites:
    """The values of a model and the sites among them. `Program` adds what can be done with them."""

    host: Host

    @property
    @abstractmethod
    def graph(self) -> Graph:
        """The IR of the model."""

    @cached_property
    def values(self) -> dict[str, Value]:
        """Every value by name, and the hidden state of every recurrent op."""
        return self.graph.values() | {name: value for name, (_, value) in self.hidden_states.items()}

    @cached_property
    def hidden_states(self) -> dict[str, tuple[Node, Value]]:
        recurrent = any(node.marks.recurrence is not None for node in self.graph.nodes)
        return hidden_states(self.graph) if recurrent else {}

    def why_apart(self, value: str) -> str:
        """Why the model cannot be cut at a value; empty where it can."""
        if value in self.hidden_states:
            return "its recurrence reads it at every step, so the model cannot be cut there"
        maker = self.producers.get(value)
        body = "" if maker is None else maker.marks.body
        while body and self.producers[body].marks.body:
            body = self.producers[body].marks.body
        holder = self.producers.get(body)
        if holder is None:
            return ""
        return f"it is inside {holder.label} ({holder.kind}), which runs as one op, so the model cannot be cut there"

    def tapped(self, value: str) -> str:
        """The value that shows the numbers of a site when the model runs; empty where none does."""
        if value in self.hidden_states:
            node, _ = self.hidden_states[value]
            return returned_state(node).name if "every" in recurrence_of(node).results else ""
        kinds, maker = [], self.producers.get(value)
        while maker is not None and maker.marks.body:
            maker = self.producers[maker.marks.body]
            kinds.append(maker.kind)
        once = all(kind == "If" for kind in kinds[1:])  # how often an inner one runs may differ from run to run
        whole = (
            not kinds or kinds[0] == "If" or self.axes.get(value, 0) > 0
        )  # runs are laid one behind the other along the first axis
        return value if once and whole else ""

    @cached_property
    def inside(self) -> frozenset[str]:
        """Values that the same fused node makes and reads: they cannot be replaced."""
        return frozenset(node.name for node in self.graph.nodes if node.marks.inside)

    @cached_property
    def producers(self) -> dict[str, Node]:
        return {**self.graph.makers, **{name: node for name, (node, _) in self.hidden_states.items()}}

    @cached_property
    def consumers(self) -> dict[str, list[Node]]:
        """Who reads a value. The first to read a hidden state is the op itself."""
        readers = dict(self.graph.readers)
        for name, (node, _) in self.hidden_states.items():
            others = {reader.name: reader for value in node.outputs for reader in readers[value.name]}
            readers[name] = [node, *others.values()]
        return readers

    @cached_property
    def axes(self) -> dict[str, int]:
        """The axis of the units of every site. A quantised value is a site before its rounding, where any constant is allowed."""
        steps = {
            node.name
            for node in self.graph.nodes
            if attributes(node, FunctionAttrs).get("fn") in ("quantize", "dequantize")
        }
        return {name: axis for name, axis in self._unit_axes.items() if name not in steps}

    @cached_property
    def _unit_axes(self) -> dict[str, int]:
        return unit_axes(self.graph)

    @cached_property
    def names(self) -> dict[str, list[str]]:
        """Every name with the values that it means: the host's names, `path:input` for what the layer at `path` reads, `path/value` for a value inside it."""
        names = {name: list(values) for name, values in self.host.names.items()}
        names.update((name, [value]) for name, value in self._inner_names.items() if name not in names)
        read: dict[str, list[str]] = {}
        for node in self.graph.nodes:
            if node.op in ("linear", "conv") and node.path and isinstance(node.inputs[0], str):
                value = self._before_rounding(node.inputs[0])
                if value not in self.inside and value not in read.setdefault(f"{node.path}:input", []):
                    read[f"{node.path}:input"].append(value)
        for name, (node, _) in self.hidden_states.items():
            read.setdefault(f"{node.path or node.origin}{HIDDEN}", []).append(name)
            names.setdefault(name, [name])
        for name, values in read.items():
            names.setdefault(name, values)
            if len(values) > 1:
                names.update({f"{name}@{i}": [value] for i, value in enumerate(values)})
        return names

    def _before_rounding(self, value: str) -> str:
        """The value that a quantised value was rounded from."""
        maker = self.producers.get(value)
        while (
            maker is not None
            and attributes(maker, FunctionAttrs).get("fn") in ("quantize", "dequantize")
            and maker.values()
        ):
            value = maker.values()[0]
            maker = self.producers.get(value)
        return value

    @cached_property
    def _titles(self) -> dict[str, str]:
        """The name that reports use for a value: the innermost module that returns it; if there is none, the layer that reads it."""
        best = self._module_titles()
        for alias, values in self.names.items():
            if HIDDEN in alias and len(values) == 1 and alias != values[0] and values[0] in self.hidden_states:
                best[values[0]] = alias
            if alias.endswith(":input") and len(values) == 1 and self._is_counted_out(values[0]):
                best.setdefault(values[0], alias)
        for name, value in self._inner_names.items():
            best.setdefault(value, name)
        return best

    @cached_property
    def _inner_names(self) -> dict[str, str]:
        """`path/value` for values inside a module whose own name only repeats the op, such as the heads of attention."""
        return {
            f"{maker.path}/{value}": value
            for value, maker in self.producers.items()
            if maker.path and value not in self.host.names.get(maker.path, ()) and self._is_of_exporter(value, maker)
            if value not in self.hidden_states
        }

    def _is_counted_out(self, value: str) -> bool:
        """Whether a name inside a module only repeats the op, and its value has one reader. A sum keeps its name."""
        maker = self.producers.get(value)
        return maker is not None and len(self.consumers[value]) == 1 and self._is_of_exporter(value, maker)

    def _is_of_exporter(self, value: str, maker: Node) -> bool:
        """Whether a value is named by its op and a number, of which the first has none. torch.export gives no other names. A sum
        keeps its name."""
        named_by_op = self.host.kind == "fx" or value == maker.kind or f"{value}_1" in self.producers
        return maker.kind != "add" and (bool(NUMBERED.search(value)) or (bool(maker.path) and named_by_op))

    def _module_titles(self) -> dict[str, str]:
        best: dict[str, str] = {}
        for alias, values in self.host.names.items():
            if len(values) != 1:
                continue
            value = values[0]
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

    def list_sites(self, pattern: str = "*") -> list[Site]:
        """All sites that match the pattern, in the order of the graph."""
        wanted = None if pattern == "*" else {site.value for site in self.find(pattern)}
        return [
            self._site(name)
            for name in self.values
            if (name in self.axes or name in self.hidden_states)
            and name not in self.inside
            and (wanted is None or name in wanted)
        ]

    def _site(self, value: str, *, axis: int | None = None, name: str = "") -> Site:
        node = self.producers.get(value)
        consumers = tuple(dict.fromkeys(reader.label for reader in self.consumers[value]))
        if value in self.graph.outputs:
            consumers = (*consumers, "output")
        op, known = node.kind if node else "input", self.values[value]
        recurrence = node if value in self.hidden_states else None
        if axis is None:
            axis = self.axes.get(value, 0) if recurrence is None else len(known.shape) - 1
        title = name or self.title(value)
        return Site(title, value, op, axis, known.shape, consumers, dtype=known.dtype, recurrence=recurrence)

    def find(self, pattern: str, *, at: str = "") -> list[Site]:
        """The sites that a name or a glob matches. A name that matches none or several is an error."""
        names = self.names
        values = self._values_called(pattern)
        if pattern in names and len(values) > 1:
            calls = [f"{pattern}@{i}" for i in range(len(values))]
            raise SiteError(
                f"{pattern!r} is called {len(values)} times, and each call is a separate site",
                at=at,
                fix=f"name one: {', '.join(calls)}",
            )
        if not values:
            like = self._names_like(pattern)
            inside = [name for name in like if name.endswith(f"/{pattern}")]
            near = inside[:5] or difflib.get_close_matches(pattern, like, n=5, cutoff=0.5)
            fix = f"near matches: {', '.join(near)}" if near else "`cmrc inspect` or program.sites() lists the names"
            raise SiteError(f"no site is called {pattern!r}", at=at, fix=fix)
        single = len(values) == 1 and pattern in names
        return [self.site_of(value, None, pattern if single else "", at=at) for value in values]

    def _is_stored(self, node: Node | None) -> bool:
        return node is not None and attributes(node, FunctionAttrs).get("fn") == "quantize"

    def _names_like(self, pattern: str) -> list[str]:
        """The names that a pattern is compared with. `path:input` is before the layer, so `blocks.*` does not match
        what the first block reads. Nor does it match every value inside a module, only what modules return."""
        outer = [name for name in self.names if "/" in pattern or name not in self._inner_names]
        return [name for name in outer if ":" in pattern or not (name.endswith(":input") or HIDDEN in name)]

    def _values_called(self, pattern: str) -> list[str]:
        """The values of this name; for a glob, those that have units, in the order of the graph."""
        names = self.names
        if pattern in names:
            return list(dict.fromkeys(names[pattern]))
        if not any(c in pattern for c in "*?["):
            return []
        aliases = [alias for alias in self._names_like(pattern) if fnmatch.fnmatchcase(alias, pattern)]
        values = {v for alias in aliases for v in names[alias] if v in self.axes or v in self.hidden_states}
        return [value for value in self.values if value in values]

    def site_of(self, value: str, axis: int | None, name: str = "", *, at: str = "") -> Site:
        """The site at a value, by the value's own name."""
        known = self.values.get(value)
        if value in self.inside:
            maker = self.producers[value]
            op = maker.marks.inside
            raise SiteError(
                f"{value!r} is inside a fused node, which reads it itself, so it cannot be replaced",
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
            axis = self._unit_axes.get(value, len(known.shape) - 1)
        if not known.shape or not known.dtype.startswith(("float", "bfloat")):
            node = self.producers.get(value)
            raise SiteError(
                f"is {known.dtype} of shape {list(known.shape)} and has no units",
                node=name or value,
                op=node.kind if node else "input",
                at=at,
                fix="its units are integers: lower the float model, then quantise"
                if self._is_stored(node)
                else "name a floating-point value with at least one axis",
            )
        return self._site(value, axis=axis, name=name)


def unit_axes(graph: Graph) -> dict[str, int]:
    """The axis of a value's units: where the last affine op put them, followed through the ops in between."""
    axes: dict[str, int] = {}
    shapes, readers = {name: value.shape for name, value in graph.values().items()}, graph.readers
    tables = {node.name for node in graph.nodes if node.op == "embedding"}
    for node in graph.nodes:
        out = node.output
        stored = attributes(node, FunctionAttrs).get("fn") == "quantize"
        if not (stored or out.dtype.startswith(("float", "bfloat"))) or not out.shape:
            continue
        axis = _unit_axis(node, shapes, axes, tables, readers)
        if axis is not None and isinstance(out.shape[axis], int):
            axes[out.name] = axis
    return axes


def _heads(node: Node, shapes: Mapping[str, Shape], readers: Mapping[str, list[Node]]) -> int:
    """The axis of attention's heads: the one that is later merged with the last axis. Otherwise the third from last,
    where every layout with four axes has it."""
    last = len(node.output.shape) - 1
    perm, value = list(range(last + 1)), node
    for _ in range(4):
        reader = next((r for r in readers[value.name] if r.op in ("transpose", "reshape")), None)
        if reader is None or len(readers[value.name]) > 1:
            break
        if reader.op == "transpose":
            perm = [perm[i] for i in attributes(reader, TransposeAttrs)["perm"]]
        else:
            before = shapes[value.name]
            parts = [s for s in segments(before, reader.output.shape) if s.before[0] <= perm.index(last) < s.before[1]]
            beside = [(perm[i], before[i]) for s in parts for i in range(*s.before) if perm[i] != last]
            merged = [axis for axis, size in beside if size != 1] or [axis for axis, _ in beside]  # a single head
            if len(merged) == 1 and isinstance(node.output.shape[merged[0]], int):
                return merged[0]
            break
        value = reader
    return max(last - 2, 0)


def _unit_axis(
    node: Node,
    shapes: Mapping[str, Shape],
    axes: Mapping[str, int],
    tables: Collection[str],
    readers: Mapping[str, list[Node]],
) -> int | None:
    if node.op in ("linear", "conv"):
        return attributes(node, AxisAttrs)["axis"]
    if node.op == "embedding":
        return len(node.output.shape) - 1
    if node.op == "matmul" and (node.inputs[0] in tables) != (node.inputs[1] in tables):  # weights looked up in a table
        return len(node.output.shape) - (2 if node.inputs[0] in tables else 1)
    if node.op == "attention" or (node.op == "matmul" and len(node.output.shape) > 3):
        return _heads(node, shapes, readers)
    known = [(o, axes[o]) for o in node.values() if o in axes]
    if not known or node.op in ("opaque", "matmul"):
        return None
    name, axis = known[0]
    if node.op == "transpose":
        return attributes(node, TransposeAttrs)["perm"].index(axis)
    if node.op in ("pointwise", "expand"):
        return axis + len(node.output.shape) - len(shapes[name])
    if node.op == "along" and attributes(node, AlongAttrs).get("drop"):
        return (
            None
            if axis in attributes(node, AlongAttrs)["axes"]
            else axis - sum(a < axis for a in attributes(node, AlongAttrs)["axes"])
        )
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
