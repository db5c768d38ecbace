"""A changed mechanism graph, written into a clone of the ONNX model it was read from.

    same as read       the node is not touched: name, attributes, metadata, inputs
    changed            its inputs are rewired, changed tensors become initializers, its row's writer does the rest
    without an origin  the compiler put it in: `onnx_insert.py` writes it, the node is named `cmrc.<value>`
    gone               the node is removed, and with it what only it used

A changed tensor is a new initializer that is computed when the model is saved or run; the old one, which others may
share, is never edited. The new one takes the old one's name where nobody uses the old one any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import onnx_ir

from cmrc.errors import HostError
from cmrc.hosts.onnx.insert import INSERTED, insert_like
from cmrc.hosts.onnx.ops.patch import WRITERS, rewire, write_fused, write_target
from cmrc.hosts.onnx.ops.table import ROWS
from cmrc.hosts.onnx.read import Reading, row_name, subgraphs
from cmrc.ir.graph import Apply, Array, Graph, Leaf, Literal, Node, Operand, Shape, Tensor, Value
from cmrc.ir.ops import apply, materialise, numpy_dtype
from cmrc.passes.rewriting.fused import differs

Hosts = dict[onnx_ir.Node, list[Node]]
ANNOTATION = "cmrc.do"
INSERTED_KEY = "cmrc.inserted"


def build(model: onnx_ir.Model, reading: Reading, graph: Graph) -> onnx_ir.Model:
    """A clone of `model` that computes `graph`, an edited form of `reading.graph`."""
    return Patch(model.clone(), reading, graph).run()


def data_type(dtype: str) -> onnx_ir.DataType:
    return onnx_ir.DataType.from_numpy(numpy_dtype(dtype))


@dataclass(frozen=True, slots=True)
class Made:
    """A new initializer, and the one that it replaces where it is a form of it."""

    value: onnx_ir.Value
    replaces: str


@dataclass(slots=True)
class Patch:
    """The clone under work. `values` finds an ONNX value by the IR's name for it; new nodes go after `cursor`."""

    model: onnx_ir.Model
    reading: Reading
    edited: Graph
    values: dict[str, onnx_ir.Value] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)
    """The shape of every value as it will be; `was` as it was read."""
    was: dict[str, Shape] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    makers: dict[str, Node] = field(default_factory=dict)
    gone: set[onnx_ir.Node] = field(default_factory=set)
    taken: set[str] = field(default_factory=set)
    made: dict[tuple[Tensor, str], Made] = field(default_factory=dict)
    cursor: onnx_ir.Node | None = None
    reason: str = ""

    @property
    def graph(self) -> onnx_ir.Graph:
        return self.model.graph

    @property
    def opset(self) -> int:
        return self.model.opset_imports.get("", 0)

    def run(self) -> onnx_ir.Model:
        self.values = dict(onnx_ir.convenience.create_value_mapping(self.graph, include_subgraphs=False))
        self.taken = set(onnx_ir.convenience.create_value_mapping(self.graph))
        self.taken.update(node.name or "" for node in self.graph.all_nodes())
        original, edited = self.reading.graph.values(), self.edited.values()
        self.shapes = {name: value.shape for name, value in edited.items()}
        self.was = {name: value.shape for name, value in original.items()}
        self.dtypes = {name: value.dtype for name, value in (*original.items(), *edited.items())}
        used = {value for value in self._all_values() if value.uses()}
        drop_annotations(self.model)
        self.makers = {value.name: node for node in self.edited.nodes for value in node.outputs}
        read_as = self._hosts(self.reading.graph.nodes)
        now = self._hosts(self.edited.nodes)
        last = {members[-1].name: host for host, members in now.items()}
        apart = self._separated(now, read_as)
        for node in self.edited.nodes:
            if not node.origin:
                self._insert(node)
            elif node.name in apart:
                self._write_apart(node, apart[node.name])
            elif (host := last.get(node.name)) is not None:
                if now[host] != read_as[host]:
                    self.reason = node.label
                    self.cursor = host
                    self._write(host, now[host], read_as[host])
                self.cursor = host if host.graph is not None else self.cursor
        self._redirect_outputs()
        self._retarget()
        self._fix_sizes()
        self._update_shapes()
        if not is_sorted(self.graph):
            self.graph.sort()
        self.gone.update(host for host in read_as if host not in now)
        self._remove(used)
        self._rename_made()
        return self.model

    def _all_values(self) -> list[onnx_ir.Value]:
        made = [value for node in self.graph for value in node.outputs]
        return [*self.graph.initializers.values(), *made]

    def _hosts(self, nodes: Sequence[Node]) -> Hosts:
        """The IR nodes that each ONNX node is read as."""
        found: Hosts = {}
        for node in nodes:
            name = self.reading.inside.get(node.name, node.name)
            host = self.values[name].producer() if node.origin else None
            if host is not None:
                found.setdefault(host, []).append(node)
        return found

    def _write(self, host: onnx_ir.Node, nodes: list[Node], before: list[Node]) -> None:
        is_fused = any("inside" in node.attrs for node in before)
        if is_fused:
            write_fused(self, host, nodes, before)
        row = ROWS.get(row_name(host))
        writer = WRITERS.get(row.write) if row is not None and nodes[0].op != "opaque" else None
        if writer is not None:
            writer(self, host, nodes, before)
        elif not is_fused:
            rewire(self, host, nodes[0], before[0])

    def _separated(self, now: Hosts, read_as: Hosts) -> dict[str, onnx_ir.Node]:
        """The parts of fused nodes in whose middle something stands now: each becomes a node."""
        found: dict[str, onnx_ir.Node] = {}
        for host, members in now.items():
            before = read_as[host]
            if any("separable" in node.attrs for node in before) and differs(before, {n.name: n for n in members}):
                found.update((node.name, host) for node in members)
        return found

    def _write_apart(self, node: Node, host: onnx_ir.Node) -> None:
        self.reason = f"{node.kind} of {node.label}"
        if node.name in self.reading.inside:
            INSERTED[node.op](self, node)
            return
        self.cursor = self.cursor if self.cursor is not None else host
        old = self.values[node.name]
        alone = replace(node, outputs=(replace(node.output, name=self.fresh(f"{node.name}.apart")),))
        INSERTED[node.op](self, alone)
        new = self.values.pop(alone.name)
        self.values[node.name] = old
        self.replace_value(node.name, new)
        self.retire(host)

    def _insert(self, node: Node) -> None:
        insert = insert_like if node.attrs.get("like") else INSERTED.get(node.op)
        if insert is None:
            raise HostError(f"no way to put in a new {node.kind} node", node=node.label, op=node.kind)
        self.reason = f"{node.kind} {'for ' + node.path if node.path else ''}".strip()
        insert(self, node)

    # ------------------------------------------------------------ what the writers use

    def fresh(self, base: str) -> str:
        """A name that no value and no node has."""
        name, count = base, 0
        while name in self.taken:
            count += 1
            name = f"{base}{count}"
        self.taken.add(name)
        return name

    def value(self, operand: Operand, dtype: str) -> onnx_ir.Value | None:
        """The ONNX value of an operand; a tensor is an initializer of that dtype."""
        if operand is None:
            return None
        if isinstance(operand, str):
            return self.values[operand]
        return self.initializer(operand, dtype=dtype)

    def initializer(self, tensor: Tensor, *, dtype: str = "", base: str = "") -> onnx_ir.Value:
        """A tensor as an initializer: the old one where it is a whole parameter, else a new one, made once."""
        dtype = dtype or tensor.dtype
        if isinstance(tensor, Leaf) and tensor.dtype == dtype and tensor.name in self.values:
            return self.values[tensor.name]
        if tensor.dtype != dtype:
            if isinstance(tensor, Apply):
                tensor = replace(tensor, dtype=dtype)
            else:
                tensor = apply("pointwise", (tensor,), {"fn": "cast", "dtype": dtype}, tensor.shape, dtype)
        key = tensor, dtype
        if key not in self.made:
            origin = base or parameter(tensor)
            name = self._numbered(origin) if origin else self.fresh("cmrc.constant")
            self.made[key] = Made(self._register(name, tensor), origin)
        return self.made[key].value

    def array(self, array: Array, base: str = "") -> onnx_ir.Value:
        return self.initializer(Literal(array), base=base)

    def _numbered(self, origin: str) -> str:
        count = 1
        while f"{origin}.cmrc{count}" in self.taken:
            count += 1
        self.taken.add(f"{origin}.cmrc{count}")
        return f"{origin}.cmrc{count}"

    def _register(self, name: str, tensor: Tensor) -> onnx_ir.Value:
        kind, shape = data_type(tensor.dtype), onnx_ir.Shape(tensor.shape)
        held: onnx_ir.TensorProtocol
        if isinstance(tensor, Literal):
            held = onnx_ir.tensor(tensor.array, dtype=kind, name=name)
        else:
            held = onnx_ir.LazyTensor(lambda: onnx_ir.Tensor(materialise(tensor), dtype=kind), kind, shape, name=name)
        value = onnx_ir.Value(name=name, type=onnx_ir.TensorType(kind), shape=shape, const_value=held)
        self.graph.register_initializer(value)
        if self.model.ir_version < 4:  # there every initializer is an input as well
            self.graph.inputs.append(value)
        return value

    def insert(
        self,
        op: str,
        inputs: Sequence[onnx_ir.Value | None],
        made: Value | str,
        attributes: Sequence[onnx_ir.Attr] = (),
        *,
        domain: str = "",
        among: tuple[int, int] = (0, 1),
    ) -> onnx_ir.Value:
        """A new node after the cursor; `made` is the IR value it gives (output i of n), or a name to base one on."""
        name = made.name if isinstance(made, Value) else self.fresh(made)
        output = onnx_ir.Value(name=name)
        outputs = [output if i == among[0] else onnx_ir.Value(name=self.fresh(f"{name}.{i}")) for i in range(among[1])]
        if isinstance(made, Value):
            self.values[name] = output
            self.taken.add(name)
            if made.dtype != "unknown":
                output.type = onnx_ir.TensorType(data_type(made.dtype))
            output.shape = onnx_ir.Shape([None if isinstance(d, str) and d.startswith("?") else d for d in made.shape])
        metadata = {INSERTED_KEY: self.reason or op}
        node = onnx_ir.Node(
            domain, op, inputs, attributes, outputs=outputs, name=self.fresh(f"cmrc.{name}"), metadata_props=metadata
        )
        if self.cursor is not None:
            self.graph.insert_after(self.cursor, node)
        elif len(self.graph):
            self.graph.insert_before(self.graph[0], node)
        else:
            self.graph.append(node)
        self.cursor = node
        return output

    def replace_value(self, name: str, new: onnx_ir.Value) -> None:
        """Let everyone read `new`, which takes over the name, type and notes of the value."""
        old = self.values[name]
        new.type, new.shape, new.doc_string = old.type, old.shape, old.doc_string
        new.metadata_props.update(old.metadata_props)
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        old.name, new.name = None, name
        self.values[name] = new

    def bias_name(self, node: Node, what: str = "bias") -> str:
        """What to call a new parameter of an affine node: after its module, its weight, or its value."""
        weight = node.inputs[1] if len(node.inputs) > 1 else None
        return f"{node.path or (parameter(weight) if isinstance(weight, Tensor) else '') or node.name}.{what}"

    def retire(self, host: onnx_ir.Node) -> None:
        """Other nodes stand for this one now."""
        self.gone.add(host)

    # ------------------------------------------------------------ the end of the work

    def _redirect_outputs(self) -> None:
        """Outputs keep their declared names: what is returned now takes the name over."""
        for i, (old, new) in enumerate(zip(self.reading.graph.outputs, self.edited.outputs, strict=True)):
            if old == new:
                continue
            declared, returned = self.graph.outputs[i], self.values[new]
            if returned.is_graph_input() or returned.is_initializer() or returned.is_graph_output():
                self.reason = "output"
                returned = self.insert("Identity", [returned], f"{old}.copy")
            self.graph.outputs[i] = returned
            declared.name = self.fresh(f"{old}.inner")
            returned.name, returned.type, returned.shape = old, declared.type, declared.shape
            declared.shape = None if declared.shape is None else declared.shape.copy()

    def _fix_sizes(self) -> None:
        """Sizes that were read from a value which is smaller now, or gone, stay what they were."""
        for fixed in self.reading.sizes.fixed:
            if self._has_kept(fixed.source, fixed.dims):
                continue
            value = self.values[fixed.value]
            if value.is_graph_output():
                reason = f"the model returns sizes of %{fixed.source}, which changes"
                raise HostError(reason, node=fixed.value, op="Shape")
            value.replace_all_uses_with(self.array(fixed.tensor.array, base=""))

    def _retarget(self) -> None:
        """A Reshape to sizes of a value that changed is told its sizes, whether or not it changed itself."""
        for target in self.reading.sizes.targets:
            node = self.makers.get(target.value)
            host = self.values[target.value].producer()
            if node is None or host is None or self._has_kept(target.source, range(len(self.was[target.source]))):
                continue
            computed = host.inputs[1]
            if computed is not None and not computed.is_initializer() and computed.name in self.was:
                write_target(self, host, node)

    def _has_kept(self, name: str, dims: Iterable[int]) -> bool:
        now = self.shapes.get(name)
        return now is not None and all(now[d] == self.was[name][d] for d in dims)

    def _update_shapes(self) -> None:
        """Declared shapes follow the IR where it changed; a stale one makes onnxruntime refuse the model."""
        for name, shape in self.shapes.items():
            if name in self.reading.inside:
                continue
            value = self.values[name]
            was = self.was.get(name, shape)
            if value.shape is not None and was != shape:
                dims = zip(value.shape, was, shape, strict=True)
                value.shape = onnx_ir.Shape([new if old != new else declared for declared, old, new in dims])

    def _remove(self, used: set[onnx_ir.Value]) -> None:
        """Nodes that left the graph, and nodes and initializers that lost their last reader."""
        for node in reversed(list(self.graph)):
            dead = node in self.gone or any(value in used for value in node.outputs)
            if dead and not any(value.uses() or value.is_graph_output() for value in node.outputs):
                for inner_graph in subgraphs(node):
                    for inner in onnx_ir.traversal.RecursiveGraphIterator(inner_graph):
                        inner.resize_inputs(0)
                self.graph.remove(node, safe=True)
            elif node in self.gone:
                reason = "it was dropped and is still read: a fault of cmrc"
                raise HostError(reason, node=node.name or "", op=node.op_type)
        for name, value in list(self.graph.initializers.items()):
            if value in used and not value.uses() and not value.is_graph_output():
                if value.is_graph_input():
                    self.graph.inputs.remove(value)
                del self.graph.initializers[name]

    def _rename_made(self) -> None:
        """A new initializer takes the name of the parameter that it is the only form of, once that is gone."""
        forms = Counter(made.replaces for made in self.made.values())
        left = {value.name for value in self._all_values()}
        for made in self.made.values():
            name = made.replaces
            free = name not in left and (name in self.values or name not in self.taken)
            if name and free and forms[name] == 1:
                made.value.name = name


def parameter(tensor: Tensor) -> str:
    """The parameter that a tensor is an edited form of: what was selected from, folded into, added to, or scaled."""
    if isinstance(tensor, Leaf):
        return tensor.name
    if not isinstance(tensor, Apply):
        return ""
    first = tensor.inputs[0]
    edits = tensor.op in ("select", "select_in_groups", "fold_columns") or tensor.attrs.get("fn") in (
        "add",
        "mul",
        "cast",
    )
    flattens = tensor.op == "reshape" and len(tensor.shape) == 1 and first.shape[-1:] == tensor.shape
    return parameter(first) if edits or flattens else ""


def is_sorted(graph: onnx_ir.Graph) -> bool:
    seen: set[onnx_ir.Node] = set()
    for node in graph:
        inner = (v for g in subgraphs(node) for n in onnx_ir.traversal.RecursiveGraphIterator(g) for v in n.inputs)
        for value in (*node.inputs, *inner):
            maker = None if value is None else value.producer()
            if maker is not None and maker.graph is graph and maker not in seen:
                return False
        seen.add(node)
    return True


def drop_annotations(model: onnx_ir.Model) -> None:
    for node in model.graph:
        node.metadata_props.pop(ANNOTATION, None)
    model.metadata_props.pop(ANNOTATION, None)
