"""Write an edited IR into a copy of the lifted torch graph: rewired arguments, new parameters, patched sizes.

Nodes that the IR left alone are left alone. Parameters that change keep their names; where several uses of one
parameter became different, the use that did not change keeps the name and the others get private copies. Where nothing but
parameters changed, there is no copy: the result shares the graph (and the code made from it) with the model.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from cmrc.errors import HostError
from cmrc.hosts import clamp
from cmrc.hosts.fx.clean import copy_graph
from cmrc.hosts.fx.host import LIFTED, SHAPED, FxHost, add_with_owners, from_numpy
from cmrc.hosts.fx.ops import GROUPS, SIZES, Arguments, arguments, opname, parameters
from cmrc.ir.axes import product
from cmrc.ir.graph import Apply, Graph, Leaf, Literal, Node, Operand, Tensor, Value, leaves_of
from cmrc.ir.ops import materialise

aten = torch.ops.aten
CONVOLUTIONS = {
    (1, False): aten.conv1d.default,
    (2, False): aten.conv2d.default,
    (3, False): aten.conv3d.default,
    (1, True): aten.conv_transpose1d.default,
    (2, True): aten.conv_transpose2d.input,
    (3, True): aten.conv_transpose3d.input,
}


@dataclass(frozen=True, slots=True)
class Scaled:
    """A size that merges samples, of a number known at run time, with units: of these there are fewer now."""

    size: fx.Node
    old: int
    new: int


def write(host: FxHost, graph: Graph) -> FxHost:
    """A host that computes `graph`."""
    return Writer(host, graph).result()


def is_range(index: Sequence[int]) -> bool:
    return tuple(index) == tuple(range(index[0], index[0] + len(index)))


@dataclass(eq=False)
class Writer:
    """One patch. `made` maps every IR value to the fx node that computes it."""

    host: FxHost
    graph: Graph
    lifted: fx.Graph = field(default_factory=fx.Graph)
    made: dict[str, fx.Node] = field(default_factory=dict)
    old: dict[str, Node] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)  # of the graph that is patched
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    specs: list[InputSpec] = field(default_factory=list)
    placeholders: dict[str, fx.Node] = field(default_factory=dict)  # by parameter
    forms: dict[str, Tensor] = field(default_factory=dict)  # what a parameter that changed holds under its old name
    tensors: dict[Tensor, list[str]] = field(default_factory=dict)  # the names of new parameters, by what they hold
    untied: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.old = {node.name: node for node in self.host.graph.nodes}
        self.state = dict(self.host.state)

    def result(self) -> FxHost:
        changed: list[tuple[Node, Node]] = []
        inserted = False
        for node in self.graph.nodes:
            before = self.old.get(node.name)
            if before is None and node.origin:
                raise HostError("is not a node of the graph that is patched", node=node.label, op=node.kind)
            if before is not None and before is not node:
                changed.append((before, node))
            inserted = inserted or not node.origin
        self._replace_parameters([node for _, node in changed])
        patched = [(before, node) for before, node in changed if self._differs(before, node)]
        if not patched and not inserted and self._is_same_graph():
            return replace(self.host, state=self.state, stale=True)
        self._copy_graph()
        if inserted:
            self._insert_all()
        for before, node in patched:
            self._patch(before, node)
        self._patch_parts()
        self._patch_outputs()
        self._drop_unread()
        custom = [n for n in self.lifted.nodes if (n.meta.get("custom") or {}).get("cmrc.do")]
        for node in custom:
            node.meta["custom"] = {k: v for k, v in node.meta["custom"].items() if k != "cmrc.do"}
        specs, untied = tuple(self.specs), tuple(self.untied)
        return replace(
            self.host, lifted=self.lifted, specs=specs, state=self.state, stale=True, untied=untied, template=None
        )

    @cached_property
    def _own(self) -> dict[str, fx.Node]:
        """The nodes of the graph that is patched."""
        return {node.name: node for node in self.host.lifted.nodes}

    def _differs(self, before: Node, node: Node) -> bool:
        """Whether a node of the torch graph must change: not where it only reads the same parameters, in a new form."""
        if before.attrs is not node.attrs and before.attrs != node.attrs:
            return True
        if len(before.inputs) != len(node.inputs) or before.op != node.op:
            return True
        for was, now in zip(before.inputs, node.inputs, strict=True):
            held = self.forms.get(was.name, was) if isinstance(was, Leaf) else was
            if now is not held and now != held:
                return True
        resized = node.op in SHAPED and node.output.shape != before.output.shape
        return resized and _new_sizes(before, node, self._own[node.origin]) is not None

    def _is_same_graph(self) -> bool:
        """Whether nothing but parameters changed, given that no node did."""
        same = len(self.graph.nodes) == len(self.old) and self.graph.outputs == self.host.graph.outputs
        return same and not self.untied and not self.host.annotations()

    def _copy_graph(self) -> None:
        self.lifted = copy_graph(self.host.lifted)
        self.made = {node.name: node for node in self.lifted.nodes}
        self.values = self.host.graph.values()
        self.specs = list(self.host.specs)
        lifted = {spec.target: spec.arg.name for spec in self.specs if spec.kind in LIFTED}
        self.placeholders = {target: self.made[name] for target, name in lifted.items() if target is not None}

    # ------------------------------------------------------------ parameters

    @cached_property
    def taken(self) -> set[str]:
        """The names of tensors, and of the modules that hold them."""
        return set(self.host._read.taken)

    def _replace_parameters(self, changed: Sequence[Node]) -> None:
        """Give each changed parameter its new tensor under the old name, where all its uses agree on it."""
        forms: dict[str, list[Tensor]] = {}
        for node in changed:
            for operand in node.inputs:
                if operand is None or isinstance(operand, (str, Literal)):
                    continue
                named: list[tuple[str, Tensor]] = [(self._named(operand), operand)]
                if self._is_computed(operand):  # its nodes go on reading the parameters as they are
                    named = [(leaf.name, leaf) for leaf in leaves_of(operand)]
                for name, form in named:
                    if name and form not in forms.setdefault(name, []):
                        forms[name].append(form)
        self._add_unchanged_uses(forms)
        for output in self.host.lifted.output_node().all_input_nodes:
            for leaf in leaves_of(self.host._read.leaves[output.name]) if output.name in self.host._read.leaves else ():
                forms.setdefault(leaf.name, []).append(leaf)
        owners = self.host._read.owners
        tied: dict[str, tuple[Tensor, torch.Tensor]] = {}
        for name, found in forms.items():
            if len(found) > 1:
                self.untied.append(f"{name}: its {len(found)} uses became different")
            if any(isinstance(form, Leaf) for form in found):
                continue  # somebody reads it unchanged, and keeps the name
            form, owner = found[0], owners.get(name)
            plain = form if owner is None else _renamed(form, name, owner)
            if owner in tied and tied[owner][0] == plain:
                tensor = tied[owner][1]
            else:
                tensor = self._tensor(form, like=self.host.state[name])
            if owner is not None:
                tied.setdefault(owner, (plain, tensor))
            self.state[name], self.forms[name] = tensor, form
        for name, owner in owners.items():
            if self.state[owner] is not self.state[name]:
                self.untied.append(f"{name} and {owner} became different")

    def _add_unchanged_uses(self, forms: Mapping[str, list[Tensor]]) -> None:
        """Nodes that stayed as they are read their parameters as they were."""
        now, users = {node.name: node for node in self.graph.nodes}, self.host._read.users
        for name, found in forms.items():
            for node, leaf in users.get(name, ()):
                if now.get(node.name) is node and leaf not in found:
                    found.append(leaf)

    def _is_computed(self, operand: Tensor) -> bool:
        """Whether nodes of the model compute this from parameters alone."""
        computed = self.host._read.computed
        return bool(computed) and operand in computed

    def _named(self, operand: Tensor) -> str:
        """The parameter that an expression is a form of: the bias of `bias + W c`, the weight of `W_P += W_S B`."""
        while isinstance(operand, Apply) and not self._is_computed(operand):
            operand = operand.inputs[0]
        return operand.name if isinstance(operand, Leaf) else ""

    def _tensor(self, expression: Tensor, like: torch.Tensor) -> torch.Tensor:
        made = from_numpy(materialise(expression))
        kept = made.dtype == like.dtype or not made.dtype.is_floating_point
        if not kept or like.device.type != "cpu":
            made = made.to(like.device, made.dtype if kept else like.dtype)
        if not isinstance(like, torch.nn.Parameter):
            return made
        return torch.nn.Parameter(made, requires_grad=like.requires_grad)

    def _constant(self, tensor: torch.Tensor, base: str, *, parameter: bool = False) -> fx.Node:
        """A new parameter or buffer as an input of the lifted graph."""
        name, count = base, 0
        while name in self.taken:
            count += 1
            name = f"{base}_{count}"
        add_with_owners(self.taken, name)
        kind = InputKind.PARAMETER if parameter else InputKind.BUFFER
        self.state[name] = torch.nn.Parameter(tensor) if parameter and tensor.dtype.is_floating_point else tensor
        first = next(iter(self.lifted.nodes))
        with self.lifted.inserting_before(first):
            node = self.lifted.placeholder(("p_" if parameter else "b_") + name.replace(".", "_"))
            node.target = node.name  # a module may be called anything; the name is unique, and an identifier
        persistent = None if parameter else True
        self.specs.insert(0, InputSpec(kind, TensorArgument(node.name), name, persistent))
        self.placeholders[name] = node
        return node

    def _operand(self, operand: Operand, node: Node, position: int, dtype: torch.dtype) -> Any:
        """The fx argument for an IR operand."""
        if operand is None:
            return None
        if isinstance(operand, str):
            return self.made[operand]
        if isinstance(operand, Leaf):
            return self.placeholders[operand.name]
        if isinstance(operand, Literal) and operand.array.ndim == 0 and node.origin:
            return operand.array.item()
        own = self._named(operand)
        holders = self.tensors.get(operand, ())
        for name in (own, *holders) if self.forms.get(own) == operand else holders:
            if self.state[name].dtype == dtype or not dtype.is_floating_point:
                return self.placeholders[name]
        there = self.made.get(self.host._read.computed.get(operand, ""))
        if there is not None and node.origin and there < self.made[node.origin]:
            return there
        tensor = from_numpy(materialise(operand))
        if tensor.dtype != dtype and tensor.dtype.is_floating_point:
            tensor = tensor.to(dtype)
        role = {1: "weight", 2: "bias"}.get(position) if node.op in ("linear", "conv") else None
        one_axis = sum(n > 1 for n in tensor.shape) <= 1
        if role is None:
            role = "bias" if node.marks.addend and one_axis else "offset"
        base = f"{node.path}.{role}" if node.path else f"{node.name.replace('.', '_')}_{role}"
        trained = role != "offset"
        if role == "offset" and not node.marks.addend:
            base = own or base
            trained = any(isinstance(self.host.state[leaf.name], torch.nn.Parameter) for leaf in leaves_of(operand))
        made = self._constant(tensor, base, parameter=trained)
        self.tensors.setdefault(operand, []).append(next(reversed(self.placeholders)))
        return made

    # ------------------------------------------------------------ nodes of the model

    def _patch(self, before: Node, node: Node) -> None:
        if node.name in self.host.parts or node.op == "opaque":
            if node.op == "opaque":
                self._reread(before, node)
            return
        target = self.made[node.name]
        read = self.host.reads[node.name]
        values = arguments(target)
        dtype = _dtype(node.output.dtype)
        changed = False
        if node.op == "concat":
            operands = [self._operand(o, node, i, dtype) for i, o in enumerate(node.inputs)]
            values[0], changed = operands, True
        else:
            for i, position in enumerate(read.args):
                now = node.inputs[i] if i < len(node.inputs) else None
                was = before.inputs[i] if i < len(before.inputs) else None
                if now == was:
                    continue
                assert isinstance(position, int)
                operand = self._operand(now, node, i, self._dtype_of(was, dtype))
                held = values[position]
                if isinstance(held, fx.Node) and held.name in self.host._read.through and isinstance(now, Tensor):
                    if held.args[0] is operand:
                        continue
                    turn: Any = held.target
                    with self.lifted.inserting_before(target):
                        operand = self.lifted.call_function(turn, (operand, *held.args[1:]))
                if values[position] is not operand:
                    values[position], changed = operand, True
        changed = self._patch_attributes(before, node, target, values) or changed
        if changed:
            _set_arguments(target, values)

    def _dtype_of(self, was: Operand, dtype: torch.dtype) -> torch.dtype:
        """What an operand must be: that of the operand it replaces, unless that was a number or nothing."""
        if isinstance(was, str):
            return _dtype(self.values[was].dtype)
        return _dtype(was.dtype) if was is not None and was.shape else dtype

    def _reread(self, before: Node, node: Node) -> None:
        """New operands for an op that is not understood. Its results may be several: its own node is its origin."""
        target = next(n for n in self.lifted.nodes if n.name == node.origin)
        for was, now in zip(before.inputs, node.inputs, strict=True):
            if was != now:
                target.replace_input_with(self.made[str(was)], self.made[str(now)])

    def _patch_attributes(self, before: Node, node: Node, target: fx.Node, values: list[Any]) -> bool:
        """Numbers that the exporter baked in: sizes of views, groups of convolutions, bounds of slices."""
        if node.op in SHAPED and node.output.shape != before.output.shape:
            sizes = _new_sizes(before, node, target)
            if sizes is not None:
                made = [self._scaled(target, n) if isinstance(n, Scaled) else n for n in sizes]
                values[SIZES[opname(target)]] = made
            return sizes is not None
        if node.attrs.get("fn") == "rms_norm" and node.attrs["eps"] != before.attrs["eps"]:
            values[1], values[3] = [int(node.output.shape[-1])], node.attrs["eps"]
            return True
        if node.op == "attention" and node.marks.narrowed:
            values[6] = node.attrs["scale"]  # torch would take it from the width that is left
            return True
        if node.op == "conv" and node.attrs["groups"] != before.attrs["groups"]:
            position = GROUPS[opname(target)]
            values[position] = node.attrs["groups"]
            return True
        if node.op == "select" and node.attrs["keep"] != before.attrs["keep"]:
            self._take(target, values[0], node.attrs["axis"], node.attrs["keep"])
            values[:] = list(target.args)
            return True
        return False

    def _scaled(self, target: fx.Node, size: Scaled) -> fx.Node:
        with self.lifted.inserting_before(target):
            samples = self.lifted.call_function(operator.floordiv, (size.size, size.old))
            return self.lifted.call_function(operator.mul, (samples, size.new))

    def _take(self, target: fx.Node, x: fx.Node, axis: int, keep: Sequence[int]) -> None:
        """Turn a node into a slice, or an index_select where the positions are no range."""
        if is_range(keep):
            target.target, target.args = aten.slice.Tensor, (x, axis, keep[0], keep[-1] + 1)
        else:
            index = self._constant(torch.tensor(keep), f"{x.name.replace('.', '_')}_keep")
            target.target, target.args = aten.index_select.default, (x, axis, index)
        target.kwargs = {}

    def _patch_parts(self) -> None:
        """Results of split and unbind: the op stays where its parts still are its parts, else each becomes a slice."""
        groups: dict[str, list[Node]] = {}
        for node in self.graph.nodes:
            if node.name in self.host.parts:
                groups.setdefault(self.host.parts[node.name], []).append(node)
        for source, parts in groups.items():
            if all(part == self.old[part.name] for part in parts):
                continue
            split = self.made[source]
            everyone = [name for name, owner in self.host.parts.items() if owner == source]
            inputs = {part.inputs[0] for part in parts if isinstance(part.inputs[0], str)}
            whole = len(parts) == len(everyone) and len(inputs) == 1
            if parts[0].op == "along" and (whole or parts[0].attrs["fn"] != "pick"):
                self._share_out(split, parts)
                continue
            if whole and self._still_splits(split, parts):
                continue
            for part in parts:
                self._stand_alone(part)

    def _share_out(self, split: fx.Node, parts: Sequence[Node]) -> None:
        """One op for all parts that read the same value."""
        made: dict[str, fx.Node] = {}
        for part in parts:
            source, getitem = str(part.inputs[0]), self.made[part.name]
            if source not in made:
                with self.lifted.inserting_before(getitem):
                    made[source] = self.lifted.node_copy(split) if made else split
                made[source].update_arg(0, self.made[source])
            getitem.update_arg(0, made[source])

    def _still_splits(self, split: fx.Node, parts: Sequence[Node]) -> bool:
        order = sorted(parts, key=lambda p: int(str(self.made[p.name].args[1])))
        flat = [k for part in order for k in part.attrs["keep"]]
        x = self.made[str(order[0].inputs[0])]
        size = self.graph.values()[str(order[0].inputs[0])].shape[order[0].attrs["axis"]]
        if flat != list(range(int(size))):
            return False
        sizes = [len(part.attrs["keep"]) for part in order]
        if opname(split) == "chunk" and len(set(sizes)) == 1:
            split.update_arg(0, x)
        else:
            split.target, split.kwargs = aten.split_with_sizes.default, {}
            split.args = (x, sizes, order[0].attrs["axis"])
        return True

    def _stand_alone(self, part: Node) -> None:
        target, x = self.made[part.name], self.made[str(part.inputs[0])]
        if part.op == "along":
            target.target, target.args = aten.select.int, (x, part.attrs["axes"][0], part.attrs["index"])
        else:
            self._take(target, x, part.attrs["axis"], part.attrs["keep"])

    def _patch_outputs(self) -> None:
        """Other nodes as outputs. One that was inserted takes over the name: outputs are called by it in ONNX."""
        output = self.lifted.output_node()
        for was, now in dict(zip(self.host.graph.outputs, self.graph.outputs, strict=True)).items():
            old, new = self.made[was], self.made[now]
            if old is new:
                continue
            output.replace_input_with(old, new)
            if new.name not in self.values:
                old.name, new.name = f"{was}_before", was

    # ------------------------------------------------------------ nodes that the passes insert

    def _insert_all(self) -> None:
        """Each inserted node right behind the nodes of the model that come before it."""
        cursor = [node for node in self.lifted.nodes if node.op == "placeholder"][-1]
        for node in self.graph.nodes:
            cursor = max(cursor, self.made[node.outputs[-1].name]) if node.origin else self._insert(node, cursor)

    def _insert(self, node: Node, cursor: fx.Node) -> fx.Node:
        """Emit an inserted node after `cursor`; returns the last node emitted."""
        with self.lifted.inserting_after(cursor):
            made = self._emit(node)
        for value, result in zip(node.outputs, (made,), strict=True):
            self.made[value.name] = result
        return made

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.lifted.call_function(target, args, kwargs)
        self.lifted.inserting_after(node)
        return node

    def _emit(self, node: Node) -> fx.Node:
        dtype = _dtype(node.output.dtype)
        if node.op == "do":
            return self._emit_do(node, dtype)
        if node.op == "select":
            x = self.made[str(node.inputs[0])]
            made = self._call(aten.slice.Tensor, x)
            self._take(made, x, node.attrs["axis"], node.attrs["keep"])
            return made
        if node.op == "plane":
            x = self.made[str(node.inputs[0])]
            axis, rank = node.attrs["axis"], len(node.output.shape)
            known = node.output.shape
            sizes = [
                known[d] if isinstance(known[d], int) else self._call(aten.sym_size.int, x, d)
                for d in range(axis + 1, rank)
            ]
            device = next(iter(self.state.values())).device
            return self._call(aten.ones.default, [*([1] * (axis + 1)), *sizes], dtype=dtype, device=device)
        if node.marks.like:
            return self._emit_like(node, dtype)
        if node.op == "pointwise" and node.attrs["fn"] == "mul" and isinstance(factor := node.inputs[1], Literal):
            return self._call(aten.mul.Scalar, self.made[str(node.inputs[0])], factor.array.item())
        operands = [self._operand(o, node, i, dtype) for i, o in enumerate(node.inputs)]
        if node.op == "pointwise" and node.attrs["fn"] == "add":
            return self._call(aten.add.Tensor, *operands)
        if node.op == "conv":
            a = node.attrs
            rank, transposed = len(a["stride"]), bool(a.get("transposed"))
            target = CONVOLUTIONS[rank, transposed]
            pad = list(a["pad"])
            x = operands[0]
            if any(lo != hi for lo, hi in pad):
                flat = [p for lo, hi in reversed(pad) for p in (lo, hi)]
                x, pad = self._call(aten.constant_pad_nd.default, x, flat), [(0, 0)] * rank
            head = (x, *(*operands, None)[1:3], list(a["stride"]), [lo for lo, _ in pad])
            if transposed:
                return self._call(target, *head, list(a["output_padding"]), 1, list(a["dilation"]))
            return self._call(target, *head, list(a["dilation"]), 1)
        raise HostError(f"the torch host cannot insert {node.kind}", node=node.label, op=node.op)

    def _emit_like(self, node: Node, dtype: torch.dtype) -> fx.Node:
        """A copy of a node of the model on other operands."""
        model = self.made[node.marks.like]
        if node.op == "reshape":  # the copy has a batch of one, which the model's own sizes do not say
            sizes = [n if isinstance(n, int) else -1 for n in node.output.shape]
            return self._call(aten.reshape.default, self.made[str(node.inputs[0])], sizes)
        values = arguments(model)
        for position, i in zip(self.host.reads[model.name].args, range(len(node.inputs)), strict=False):
            given = node.inputs[i]
            if isinstance(position, tuple):  # an entry of a list
                entries = list(values[position[0]])
                entries[position[1]] = self._operand(given, node, i, dtype)
                values[position[0]] = entries
            else:
                values[position] = self._operand(given, node, i, dtype)
        if node.op == "conv":
            values[GROUPS[opname(model)]] = node.attrs["groups"]
        copied = self._call(model.target, *model.args, **model.kwargs)
        _set_arguments(copied, values)
        return copied

    def _emit_do(self, node: Node, dtype: torch.dtype) -> fx.Node:
        """The literal meaning: where(mask, constants, x), or the parents' affine function copied into place."""
        x, axis, units = self.made[str(node.inputs[0])], node.attrs["axis"], node.attrs["units"]
        rank = len(node.output.shape)
        base = node.name.replace(".", "_")
        value = node.inputs[1]
        if isinstance(value, str):
            return self._emit_runtime_do(node, x, self.made[value], base)
        if len(node.inputs) == 2:
            constants = self._constant(torch.from_numpy(clamp.constants(node)).to(dtype), f"{base}_value")
            mask = self._constant(torch.from_numpy(clamp.mask(node)), f"{base}_mask")
            return self._call(aten.where.self, mask, constants, x)
        weight = node.inputs[2]
        assert isinstance(weight, Tensor)
        mix = torch.from_numpy(np.array(materialise(weight), dtype=np.float64)).to(dtype)
        rows, columns = mix.shape
        repeat = len(units) // rows
        parents = self._constant(torch.tensor(node.attrs["parents"]), f"{base}_parents")
        where = self._constant(torch.tensor(units), f"{base}_units")
        seen = self._call(aten.transpose.int, self._call(aten.index_select.default, x, axis, parents), axis, rank - 1)
        held = self._constant(mix, f"{base}_weight")
        if repeat == 1:
            rebuilt = self._call(aten.linear.default, seen, held)
        else:
            blocks = self._call(aten.unflatten.int, seen, -1, [columns, repeat])
            mixed = self._call(aten.linear.default, self._call(aten.transpose.int, blocks, -1, -2), held)
            rebuilt = self._call(aten.flatten.using_ints, self._call(aten.transpose.int, mixed, -1, -2), -2, -1)
        rebuilt = self._call(aten.transpose.int, rebuilt, axis, rank - 1)
        offset = self._constant(torch.from_numpy(np.array(clamp.slab(node))).to(dtype), f"{base}_bias")
        return self._call(aten.index_copy.default, x, axis, where, self._call(aten.add.Tensor, rebuilt, offset))

    def _emit_runtime_do(self, node: Node, x: fx.Node, value: fx.Node, base: str) -> fx.Node:
        """where(mask, value, x), the value's positions spread over the axis."""
        held = self._constant(torch.from_numpy(clamp.mask(node)), f"{base}_mask")
        index = self._constant(torch.from_numpy(clamp.places(node)), f"{base}_places")
        spread = self._call(aten.index_select.default, value, node.attrs["axis"], index)
        return self._call(aten.where.self, held, spread, x)

    # ------------------------------------------------------------ clean-up

    def _drop_unread(self) -> None:
        """Nodes that the passes dropped, and the parameters that nobody reads any more."""
        unread_before = {n.name for n in self.host.lifted.nodes if not n.users}
        dropped = set(self.old) - {node.name for node in self.graph.nodes}
        for node in reversed(list(self.lifted.nodes)):
            if node.users:
                continue
            idle = node.name in unread_before or node.op in ("output", "placeholder") or node.is_impure()
            if node.name in dropped or not idle:
                self.lifted.erase_node(node)
        gone = {t for t, n in self.placeholders.items() if not n.users and n.name not in unread_before}
        if not gone:
            return
        # With the last of what a module reads goes what it only keeps: the counter of a batch norm.
        left = {target.rpartition(".")[0] for target, node in self.placeholders.items() if node.users}
        owners = {target.rpartition(".")[0] for target in gone} - left
        gone.update(t for t, n in self.placeholders.items() if not n.users and t.rpartition(".")[0] in owners)
        for target in gone:
            self.lifted.erase_node(self.placeholders[target])
        self.specs = [s for s in self.specs if not (s.kind in LIFTED and s.target in gone)]
        self.state = {n: t for n, t in self.state.items() if n not in gone}


def _new_sizes(before: Node, node: Node, target: fx.Node) -> list[Any] | None:
    """The sizes of a view or expand for another shape; None where they say it already, by -1."""
    position = SIZES.get(opname(target))
    if position is None:
        return None
    told = list(arguments(target)[position])
    sizes = list(told)
    offset = Arguments(target).dims(1)[0] if position == 2 else 0
    for i, size in enumerate(sizes):
        new, old = node.output.shape[i + offset], before.output.shape[i + offset]
        if isinstance(size, int) and size != -1 and size != new:
            sizes[i] = new
        elif isinstance(size, fx.Node) and new != old:  # samples merged with units: a view works it out
            sizes[i] = Scaled(size, product((old,))[0], product((new,))[0]) if node.op == "expand" else -1
    return sizes if sizes != told else None


def _renamed(tensor: Tensor, old: str, new: str) -> Tensor:
    """The same expression over another parameter."""
    if isinstance(tensor, Leaf):
        return replace(tensor, name=new) if tensor.name == old else tensor
    if isinstance(tensor, Literal):
        return tensor
    return replace(tensor, inputs=tuple(_renamed(t, old, new) for t in tensor.inputs))


def _set_arguments(target: fx.Node, values: Iterable[Any]) -> None:
    """Write arguments back: positional as far as the schema allows, the rest by keyword."""
    values, known = list(values), parameters(target.target)
    split = next((i for i, p in enumerate(known) if p.by_keyword), len(known))
    target.args = tuple(values[:split])
    target.kwargs = {p.name: v for p, v in zip(known[split:], values[split:], strict=True)
                     if p.name in target.kwargs or v != p.default}  # fmt: skip


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
