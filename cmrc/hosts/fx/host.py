"""The torch host: `torch.export`'s graph, whose parameters are inputs ("lifted"), read into the IR by `fx_ops.py`.

trace    nn.Module -> ExportedProgram -> a cleaned copy of its graph (no guards, no in-place ops)
build    a patched copy of that graph with new parameters (fx_write.py)
module   a plain, trainable fx.GraphModule under the original parameter names
save     ONNX by torch.onnx.export, which is handed the program that is already there
"""

from __future__ import annotations

import copy
import json
import operator
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, TensorArgument
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils import _pytree as pytree

from cmrc.errors import HostError, TraceError
from cmrc.hosts.fx.clean import clean, copy_graph, with_plain_layouts
from cmrc.hosts.fx.module import LoweredModule, argument_names, flat_codegen
from cmrc.hosts.fx.ops import FACTORS, ROWS, TURNS, Arguments, Opaque, Read, opname, shape_of
from cmrc.hosts.protocols import Host
from cmrc.ir.graph import Array, Graph, Leaf, Literal, Marks, Node, Operand, Tensor, Value, leaves_of
from cmrc.ir.ops import ALONG, POINTWISE, apply

if TYPE_CHECKING:
    from cmrc.hosts.fx.piece import FxPiece
    from cmrc.statistics.batches import Batch
    from cmrc.statistics.calibrate import Options
    from cmrc.statistics.curvature import Derivatives
    from cmrc.statistics.stats import Columns

aten = torch.ops.aten
COMPUTED = {"reshape", "transpose", "expand", "concat", "select"}  # besides `pointwise` and `along` functions
SHAPED = {"reshape", "expand"}
LIFTED = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def is_torch_model(model: object) -> bool:
    return isinstance(model, (torch.nn.Module, ExportedProgram))


def trace(model: torch.nn.Module | ExportedProgram, args: Any, options: Mapping[str, Any]) -> FxHost:
    """Export the model in eval mode (its own mode is put back) and take the graph over."""
    if isinstance(model, ExportedProgram):
        return FxHost.from_exported(model)
    if not isinstance(args, tuple) or not (args or options.get("kwargs")):
        told = "there are no example inputs" if not args else "the example inputs are not a tuple"
        fix = "give them as a tuple: cmrc.trace(model, (x,)), or lower(..., args=(x,))"
        raise TraceError(f"{told} for {type(model).__name__}", fix=fix)
    was_training = {name: module.training for name, module in model.named_modules()}
    model.eval()
    try:
        exported = torch.export.export(model, args, **options)
    except Exception as error:
        raise TraceError(
            f"torch.export cannot trace {type(model).__name__}: {str(error).strip().splitlines()[0]}",
            fix="make `torch.export.export(model, args)` work, or export the model to ONNX and trace that file",
        ) from error
    finally:
        for name, module in model.named_modules():
            module.training = was_training[name]
    return FxHost.from_exported(exported, in_eval_mode=True)


@dataclass(eq=False, repr=False)
class FxHost:
    """A lifted graph, what its inputs are, and the tensors behind them."""

    exported: ExportedProgram
    lifted: fx.Graph
    specs: tuple[InputSpec, ...]
    state: dict[str, torch.Tensor]
    stale: bool = False  # whether shapes in the nodes' meta are those of the graph before a patch
    untied: tuple[str, ...] = ()
    template: fx.GraphModule | None = None  # the graph's code, shared by all that differ in parameters only
    kind: str = field(default="fx", init=False)

    @classmethod
    def from_exported(cls, exported: ExportedProgram, *, in_eval_mode: bool = False) -> FxHost:
        signature = exported.graph_signature
        if any(spec.kind == OutputKind.BUFFER_MUTATION for spec in signature.output_specs):
            raise TraceError("the model changes its buffers while it runs", fix="trace the model in eval mode")
        state: dict[str, torch.Tensor] = {}
        for spec in signature.input_specs:
            if spec.kind in LIFTED and spec.target is not None:
                found = exported.state_dict.get(spec.target)
                state[spec.target] = exported.constants[spec.target] if found is None else found
        host = cls(exported, clean(exported.graph, in_eval_mode=in_eval_mode), tuple(signature.input_specs), state)
        host.template = host._make_template()
        return host

    # ------------------------------------------------------------ reading

    @cached_property
    def _read(self) -> Reading:
        if self.stale:
            self.refresh()
        return Reading(self)

    @property
    def graph(self) -> Graph:
        return self._read.graph

    @property
    def names(self) -> Mapping[str, Sequence[str]]:
        return self._read.names

    @property
    def reads(self) -> dict[str, Read]:
        return self._read.reads

    @property
    def parts(self) -> dict[str, str]:
        return self._read.parts

    def refresh(self) -> None:
        """Bring the shapes in the nodes' meta up to date with the parameters, in a graph of one's own."""
        self.lifted = copy_graph(self.lifted)
        holder = fx.GraphModule(self.exported.graph_module, self.lifted)
        inputs = [node for node in self.lifted.nodes if node.op == "placeholder"]
        mode = next(n.meta["val"].fake_mode for n in self.lifted.nodes if hasattr(n.meta.get("val"), "fake_mode"))
        targets = {spec.arg.name: spec.target for spec in self.specs}
        with mode:
            for node in inputs:
                tensor = self.state.get(str(targets[node.name]))
                if tensor is not None and ("val" not in node.meta or node.meta["val"].shape != tensor.shape):
                    node.meta["val"] = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        with enable_python_dispatcher():  # torch's C++ for some ops takes no symbolic sizes
            FakeTensorProp(holder, mode).propagate_dont_convert_inputs(*(node.meta.get("val") for node in inputs))
        self.stale = False

    # ------------------------------------------------------------ writing

    def build(self, graph: Graph) -> FxHost:
        from cmrc.hosts.fx.write import write

        return write(self, graph)

    def annotate(self, entries: Sequence[tuple[str, dict[str, Any]]]) -> FxHost:
        """Plan entries into `node.meta["custom"]`, the only meta that survives re-export and torch.export.save."""
        copied = copy_graph(self.lifted)
        nodes = {node.name: node for node in copied.nodes}
        for node in copied.nodes:
            custom = node.meta.get("custom")
            if custom and "cmrc.do" in custom:
                node.meta["custom"] = {k: v for k, v in custom.items() if k != "cmrc.do"}
        for order, (name, entry) in enumerate(entries):
            node = nodes[name]
            custom = dict(node.meta.get("custom") or {})
            custom["cmrc.do"] = json.dumps([*json.loads(custom.get("cmrc.do", "[]")), [order, entry]])
            node.meta["custom"] = custom
        return replace(self, lifted=copied)

    def annotations(self) -> list[dict[str, Any]]:
        found: list[tuple[int, dict[str, Any]]] = []
        for node in self.lifted.nodes:
            told = (node.meta.get("custom") or {}).get("cmrc.do")
            for order, entry in json.loads(told) if told else ():
                found.append((order, entry if "site" in entry else {**entry, "site": node.name}))
        return [entry for _, entry in sorted(found, key=lambda pair: pair[0])]

    def module(self) -> LoweredModule:
        """A plain GraphModule: parameters as attributes under their own names, the model's own call signature."""
        if self.template is None:
            self.template = self._make_template()
        return LoweredModule.assemble(self.template, self.state)

    def _make_template(self) -> fx.GraphModule:
        """The graph with its parameters read as attributes instead of inputs, and the code for it."""
        graph = fx.Graph()
        kinds = {spec.arg.name: spec for spec in self.specs}
        mapping: dict[fx.Node, fx.Node] = {}
        subgraphs: dict[str, Any] = {}
        for node in self.lifted.nodes:
            spec = kinds.get(node.name)
            if node.op == "placeholder" and spec is not None and spec.kind in LIFTED:
                assert spec.target is not None
                mapping[node] = graph.create_node("get_attr", spec.target, name=node.name)
                mapping[node].meta = copy.copy(node.meta)
            else:
                if node.op == "get_attr":
                    subgraphs[node.target] = operator.attrgetter(node.target)(self.exported.graph_module)
                mapping[node] = graph.node_copy(node, lambda n: mapping[n])
        graph.set_codegen(flat_codegen(self.exported))
        return LoweredModule.template(graph, self.state, subgraphs)

    def to_exported(self) -> ExportedProgram:
        """An ExportedProgram of this graph, without tracing again."""
        if self.stale:
            self.refresh()
        signature = copy.copy(self.exported.graph_signature)
        signature.input_specs = list(self.specs)
        outputs = zip(signature.output_specs, pytree.tree_leaves(self.lifted.output_node().args[0]), strict=False)
        signature.output_specs = [
            replace(spec, arg=TensorArgument(made.name)) if isinstance(spec.arg, TensorArgument) else spec
            for spec, made in outputs
        ]
        stateless = {s.target for s in self.specs if s.kind == InputKind.CONSTANT_TENSOR or s.persistent is False}
        parameters = {n: t for n, t in self.state.items() if n not in stateless}
        constants = {n: t for n, t in self.state.items() if n in stateless}
        holder = fx.GraphModule(self.exported.graph_module, self.lifted)
        return ExportedProgram(
            root=holder,
            graph=self.lifted,
            graph_signature=signature,
            state_dict=parameters,
            range_constraints=self.exported.range_constraints,
            module_call_graph=copy.deepcopy(self.exported.module_call_graph),
            example_inputs=self.exported.example_inputs,
            constants={**{k: v for k, v in self.exported.constants.items() if k not in self.state}, **constants},
        )

    def save(self, path: Path, metadata: Mapping[str, str], *, overwrite: bool = False) -> None:
        from cmrc.hosts.onnx.host import OnnxHost

        host = OnnxHost.from_model(self.to_onnx())
        entries = [_carried(entry, host) for entry in self.annotations()]
        (host.annotate(entries) if entries else host).save(path, metadata, overwrite=overwrite)

    def to_onnx(self) -> Any:
        """The program as an onnx_ir model, by torch's own exporter."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            laid_out = replace(self, lifted=with_plain_layouts(self.lifted))
            program = torch.onnx.export(laid_out.to_exported(), dynamo=True, verbose=False)
        assert program is not None
        return program.model

    # ------------------------------------------------------------ running

    @cached_property
    def _runner(self) -> LoweredModule:
        module = self.module()
        module.eval()
        return module

    def run(self, inputs: Sequence[Any] | Mapping[str, Any], taps: Sequence[str] = ()) -> list[Array]:
        args = self._bind(inputs)
        seen: dict[str, Any] = {}
        with torch.no_grad():
            outputs = _run_with_taps(self._runner, args, seen, taps) if taps else self._runner(*args)
        flat = [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor)]
        return [to_numpy(t) for t in (*flat, *(seen[name] for name in taps))]

    def bind(self, inputs: Sequence[Any] | Mapping[str, Any]) -> dict[str, Array]:
        """The tensors among the arguments, by the names of the graph's inputs."""
        flat = pytree.tree_leaves(self._bind(inputs))
        names = [spec.arg.name for spec in self.specs if spec.kind == InputKind.USER_INPUT]
        tensors = {value.name for value in self.graph.inputs}
        return {name: to_numpy(t) for name, t in zip(names, flat, strict=True) if name in tensors}

    def extract(self, inputs: Sequence[str], outputs: Sequence[str], *, beyond: Collection[str] = ()) -> FxPiece:
        from cmrc.hosts.fx.piece import extract

        return extract(self, inputs, outputs, beyond)

    @property
    def inputs(self) -> Sequence[str]:
        """The arguments of the model's forward in order, those that the trace gave by keyword last."""
        return [name for group in argument_names(self.exported) for name in group]

    def differentiate(
        self, batch: Batch, columns: Sequence[Columns], options: Options, number: int, factors: bool
    ) -> list[Derivatives]:
        """The derivatives of a loss by inner values, for one batch."""
        from cmrc.hosts.fx.gradient import differentiate

        return differentiate(self, batch, columns, options, number, factors)

    def _bind(self, inputs: Sequence[Any] | Mapping[str, Any]) -> list[Any]:
        names = list(self.inputs)
        fits = set(inputs) == set(names) if isinstance(inputs, Mapping) else len(inputs) == len(names)
        if not fits:
            given = f"{', '.join(map(str, inputs))}" if isinstance(inputs, Mapping) else f"{len(inputs)} in order"
            told = f"the model takes the inputs {', '.join(names)}; given are {given}"
            raise HostError(told, fix="give each of them once")
        ordered = [inputs[name] for name in names] if isinstance(inputs, Mapping) else list(inputs)
        device = next((tensor.device for tensor in self.state.values()), None)
        return [pytree.tree_map(lambda leaf: _as_tensor(leaf, device), value) for value in ordered]


def _run_with_taps(module: fx.GraphModule, args: Sequence[Any], seen: dict[str, Any], taps: Sequence[str]) -> Any:
    class Tapped(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if n.name in taps:
                seen[n.name] = result
            return result

    codegen = module.graph._codegen
    result = Tapped(module).run(*codegen.process_inputs(*args), enable_io_processing=False)
    return codegen.process_outputs(result)


def _carried(entry: dict[str, Any], host: Host) -> tuple[str, dict[str, Any]]:
    """A do of the torch graph for the graph that it was exported to: at the value of the same name."""
    for name in (entry["site"], entry["value"]):
        found = host.names.get(name, ())
        if len(found) == 1:
            return found[0], {**entry, "value": found[0]}
    raise HostError(
        "the exporter left no value of this name",
        node=entry["site"],
        fix="lower the torch program and save that, or export it and annotate the ONNX model",
    )


def _as_tensor(value: Any, device: torch.device | None) -> Any:
    """What the model takes, where its parameters are."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.ascontiguousarray(value))
    return value.to(device) if isinstance(value, torch.Tensor) else value


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def to_numpy(tensor: torch.Tensor) -> Array:
    """The tensor's own memory as an array where numpy has the dtype; bfloat16 through ml_dtypes."""
    if tensor.dtype == torch.bfloat16:
        return tensor.detach().contiguous().view(torch.int16).numpy(force=True).view(BFLOAT16)
    return tensor.numpy(force=True)


def from_numpy(array: Array) -> torch.Tensor:
    array = np.ascontiguousarray(array)
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


class Reading:
    """One walk over a lifted graph: the IR, the names of its values, and how each node was read."""

    def __init__(self, host: FxHost) -> None:
        self.host = host
        self.reads: dict[str, Read] = {}
        self.parts: dict[str, str] = {}  # a getitem of a split or unbind, to that node
        self.nodes: list[Node] = []
        self.inputs: list[Value] = []
        self.outputs: list[str] = []
        self.leaves: dict[str, Tensor] = {}  # parameters by placeholder, and what is computed from them alone by node
        self.computed: dict[Tensor, str] = {}  # the latter, to their nodes
        self.specs = {spec.arg.name: spec for spec in host.specs}
        self.through = {n.name for n in host.lifted.nodes if self._only_turns_a_weight(n)}
        for node in host.lifted.nodes:
            self._visit(node)
        self.graph = Graph(tuple(self.inputs), tuple(self.nodes), tuple(self.outputs))
        self.names = module_names(host.lifted, set(self.graph.values()))
        # What every patch asks of the model.
        self.users, self.owners, self.taken = self._users(), self._owners(), self._taken()

    def _users(self) -> dict[str, list[tuple[Node, Leaf]]]:
        """The nodes that read each parameter, or what is computed from it, by the parameter's name."""
        users: dict[str, list[tuple[Node, Leaf]]] = {}
        for node in self.graph.nodes:
            for operand in node.inputs:
                if isinstance(operand, Tensor):
                    for leaf in leaves_of(operand):
                        users.setdefault(leaf.name, []).append((node, leaf))
        return users

    def _owners(self) -> dict[str, str]:
        """Tied parameters, one tensor under several names: the first name of each."""
        names: dict[int, list[str]] = {}
        for name, tensor in self.host.state.items():
            names.setdefault(id(tensor), []).append(name)
        return {name: several[0] for several in names.values() if len(several) > 1 for name in several}

    def _taken(self) -> frozenset[str]:
        """The names of tensors, and of the modules that hold them."""
        found: set[str] = set()
        for name in (*self.host.state, *self.host.exported.state_dict):
            add_with_owners(found, name)
        return frozenset(found)

    # ------------------------------------------------------------ the walk

    def _only_turns_a_weight(self, node: fx.Node) -> bool:
        """w.t() read only as the weight of a product: the product is linear in w itself."""
        if opname(node) not in TURNS or len(shape_of(node)) != 2:
            return False
        source = node.args[0]
        spec = self.specs.get(source.name) if isinstance(source, fx.Node) else None
        return (
            spec is not None
            and spec.kind in LIFTED
            and all(opname(u) in FACTORS and node in [u.args[i] for i in FACTORS[opname(u)]] for u in node.users)
        )

    def _visit(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self._placeholder(node)
        elif node.op == "output":
            flat = [n for n in pytree.tree_leaves(node.args[0]) if isinstance(n, fx.Node)]
            self.outputs = [n.name for n in flat if n.name not in self.leaves]
        elif node.op == "call_function" and node.name not in self.through:
            self._call(node)

    def _placeholder(self, node: fx.Node) -> None:
        spec, value = self.specs[node.name], node.meta.get("val")
        if spec.kind in LIFTED:
            assert spec.target is not None
            tensor = self.host.state[spec.target]
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.leaves[node.name] = Leaf(spec.target, tuple(tensor.shape), dtype, _loader(tensor))
        elif isinstance(value, torch.Tensor):
            self.inputs.append(_value(node))

    def _operand(self, argument: Any) -> Operand:
        if isinstance(argument, fx.Node):  # a get_attr is a subgraph that a higher-order op runs
            return None if argument.op == "get_attr" else self.leaves.get(argument.name) or argument.name
        if isinstance(argument, (bool, int, float)):
            return Literal(np.asarray(argument))
        return None

    def _call(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            self._getitem(node)
            return
        row: Callable[[Arguments], Read | Opaque | None] | None = ROWS.get(node.target)
        arguments = Arguments(node)
        read = row(arguments) if row is not None else None
        one_tensor = isinstance(node.meta.get("val"), torch.Tensor)
        if isinstance(read, Read) and (one_tensor or read.parts is not None or read.op == "opaque"):
            if read.parts is not None:
                self.reads[node.name] = read
                return
            if read.op == "matmul":
                read = self._linear_if_weighted(arguments) or read
            operands = tuple(self._operand(self._at(arguments, p)) for p in read.args)
            if self._compute(node, read.op, operands, read.attrs):
                return
            if _known(operands, read):
                marks = read.marks if read.op != "opaque" else replace(read.marks, host_op=opname(node))
                self.reads[node.name] = read
                self._emit(node, Node(read.op, operands, (_value(node),), read.attrs, node.name, path_of(node), marks))
                return
        self._opaque(node, read.why if isinstance(read, Opaque) else "")

    def _compute(self, node: fx.Node, op: str, operands: Sequence[Operand], attrs: Mapping[str, Any]) -> bool:
        """A node that reads parameters only is a tensor, not a value: `1 + w`, a weight that is normalised."""
        shape = shape_of(node)
        tensors = [o for o in operands if not isinstance(o, str) and o is not None]
        known = len(tensors) == len(operands) and all(isinstance(n, int) for n in shape)
        meant = op in COMPUTED or attrs.get("fn") in {"pointwise": POINTWISE, "along": ALONG}.get(op, ())
        if not (known and meant):
            return False
        attrs = {**attrs, "shape": shape} if op in SHAPED else attrs
        made = apply(op, tensors, attrs, [int(n) for n in shape], _value(node).dtype)
        if node.name not in self.leaves:
            self.leaves[node.name] = made
            self.computed.setdefault(made, node.name)
        return True

    def _at(self, arguments: Arguments, position: Any) -> Any:
        value = arguments[position[0]][position[1]] if isinstance(position, tuple) else arguments[position]
        return value.args[0] if isinstance(value, fx.Node) and value.name in self.through else value

    def _linear_if_weighted(self, a: Arguments) -> Read | None:
        """x @ w and w @ x with a parameter w, turned by a transpose or not."""
        for weight, x in ((1, 0), (0, 1)):
            source = self._at(a, weight)
            other = self._at(a, x)
            if not (isinstance(source, fx.Node) and source.name in self.leaves) or len(shape_of(source)) != 2:
                continue
            if isinstance(other, fx.Node) and other.name in self.leaves:
                return None
            turned = a[weight].name in self.through
            rank = len(shape_of(a[x]))
            if weight == 1:
                attrs = {"axis": rank - 1, "w_in": int(turned), "w_out": int(not turned)}
            elif rank < 2:
                return None
            else:
                attrs = {"axis": rank - 2, "w_in": int(not turned), "w_out": int(turned)}
            return Read("linear", (x, weight), attrs)
        return None

    def _getitem(self, node: fx.Node) -> None:
        source, index = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(index, int)
        read = self.reads.get(source.name)
        if read is None or read.parts is None:
            return  # one of the results of an opaque node, which lists them
        operand = self._operand(source.args[0])
        if self._compute(node, read.op, (operand,), read.parts[index]):
            return
        self.parts[node.name] = source.name
        self.reads[node.name] = Read(read.op, (0,), read.parts[index])
        self._emit(node, Node(read.op, (operand,), (_value(node),), read.parts[index], node.name, path_of(source)))

    def _opaque(self, node: fx.Node, why: str) -> None:
        inputs = tuple(o for o in (self._operand(n) for n in node.all_input_nodes) if o is not None)
        value = node.meta.get("val")
        if isinstance(value, (tuple, list)):
            outputs = tuple(_value(user) for user in node.users if user.target is operator.getitem)
            if not outputs:
                return
        else:
            if not inputs and not isinstance(value, torch.Tensor):
                return  # arithmetic on sizes
            outputs = (_value(node),)
        marks = Marks(host_op=opname(node) or str(node.target), why=why, effect=node.is_impure())
        self._emit(node, Node("opaque", inputs, outputs, {}, node.name, path_of(node), marks))

    def _emit(self, node: fx.Node, made: Node) -> None:
        self.nodes.append(made)


def _known(operands: Sequence[Operand], read: Read) -> bool:
    """Whether the operands are of a kind that the op takes: an affine op's weight must be a parameter."""
    if read.op in ("linear", "conv"):
        x, weight, bias = (*operands, None)[:3]
        given = isinstance(x, str) or (read.op == "linear" and x is not None)
        return given and isinstance(weight, Tensor) and not isinstance(bias, str)
    if read.op == "embedding":
        return operands[0] is not None and isinstance(operands[1], Tensor)
    return any(isinstance(o, str) for o in operands) or read.op in COMPUTED | {"pointwise"}


def _value(node: fx.Node) -> Value:
    value = node.meta.get("val")
    dtype = str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else "int64"
    return Value(node.name, shape_of(node), dtype)


def _loader(tensor: torch.Tensor) -> Callable[[], Array]:
    return lambda: to_numpy(tensor)


def add_with_owners(found: set[str], name: str) -> None:
    """a.b.c, a.b and a, as far as they are not there."""
    while name and name not in found:
        found.add(name)
        name = name.rpartition(".")[0]


def path_of(node: fx.Node) -> str:
    """The module that the node belongs to, as the user calls it."""
    stack = node.meta.get("nn_module_stack")
    return str(list(stack.values())[-1][0]) if stack else ""


def module_names(graph: fx.Graph, values: set[str]) -> dict[str, list[str]]:
    """Every name of a value: its node, and the module that returns it.

    A module that is called twice names two values, `path@0` and `path@1`.
    """
    last: dict[str, dict[str, str]] = {}
    for node in graph.nodes:
        if node.name not in values or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
            if path:
                last.setdefault(path, {})[key] = node.name
    names: dict[str, list[str]] = {name: [name] for name in values}
    for path, calls in last.items():
        found = list(calls.values())
        names[path] = found
        if len(found) > 1:
            names.update({f"{path}@{i}": [name] for i, name in enumerate(found)})
    return names
