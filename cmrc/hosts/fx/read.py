"""The lifted torch graph read into the IR, op by op, by the rows in `ops/`."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.utils import _pytree as pytree

from cmrc.hosts.autograd.arrays import to_numpy
from cmrc.hosts.fx.annotations import read_annotations
from cmrc.hosts.fx.lifted import LiftedProgram
from cmrc.hosts.fx.memory import TensorReader
from cmrc.hosts.fx.ops.affine import FACTORS, TURNS
from cmrc.hosts.fx.ops.row import Barrier, Position, Read
from cmrc.hosts.fx.ops.table import ROWS
from cmrc.hosts.fx.schema import Arguments, opname, shape_of
from cmrc.ir.graph import (
    RESULTS_OF_RECURRENCE,
    Array,
    ArrayLiteral,
    Graph,
    Leaf,
    Marks,
    Node,
    Operand,
    Recurrence,
    Tensor,
    Value,
    apply,
    leaves_of,
)
from cmrc.ir.ops import OPS

COMPUTED = {"reshape", "transpose", "expand", "concat", "select"}  # besides `pointwise` and `along` functions
SHAPED = {"reshape", "expand"}


class LiftedReading:
    """One walk over a lifted graph: the IR, the names of its values, and how each node was read."""

    def __init__(self, program: LiftedProgram) -> None:
        self.program = program
        self.tensor_names = program.tensor_names()
        self.turned = {n.name for n in program.graph.nodes if self._only_turns_a_weight(n)}
        self.stay: set[str] = set()  # what depends on no input and is a value all the same
        while not self._walk():
            pass
        self.graph = Graph(tuple(self.inputs), tuple(self.nodes), tuple(self.outputs))
        self.names = module_names(program.graph, set(self.graph.values()))
        # What every patch asks of the model.
        self.users, self.owners, self.taken = self._users(), self._owners(), self._taken()

    def _walk(self) -> bool:
        """Read every node. False where one takes no parameter, and reads what torch would have to compute: that must stay."""
        self.reads: dict[str, Read] = {}
        self.parts: dict[str, str] = {}  # a getitem of a split or unbind, to that node
        self.nodes: list[Node] = []
        self.inputs: list[Value] = []
        self.outputs: list[str] = []
        self.leaves: dict[str, Tensor] = {}  # parameters by placeholder, and what is computed from them alone by node
        self.computed: dict[Tensor, str] = {}  # the latter, to their nodes
        self.sources: dict[str, tuple[Leaf, ...]] = {}  # by node that only torch can compute: from which parameters
        known = len(self.stay)
        for node in self.program.graph.nodes:
            self._visit(node)
        return len(self.stay) == known

    @cached_property
    def by_name(self) -> Mapping[str, Node]:
        """The nodes of the IR by name."""
        return {node.name: node for node in self.graph.nodes}

    @cached_property
    def unread(self) -> frozenset[str]:
        """The nodes of the torch graph that nobody reads."""
        return frozenset(node.name for node in self.program.graph.nodes if not node.users)

    @cached_property
    def annotated(self) -> bool:
        """Whether the torch graph has do's written on its nodes."""
        return bool(read_annotations(self.program.graph))

    @cached_property
    def calls(self) -> dict[str, fx.Node]:
        """The nodes of the torch graph by name."""
        return {node.name: node for node in self.program.graph.nodes}

    def _users(self) -> dict[str, list[tuple[Node, Leaf]]]:
        """The nodes that read each parameter, or what is computed from it, by the parameter's name."""
        users: dict[str, list[tuple[Node, Leaf]]] = {}
        for node in self.graph.nodes:
            for operand in node.inputs:
                if isinstance(operand, Tensor):
                    for leaf in self.parameters_of(operand):
                        users.setdefault(leaf.name, []).append((node, leaf))
        return users

    def parameters_of(self, tensor: Tensor) -> list[Leaf]:
        """The parameters of the model that a tensor is made of."""
        return [leaf for each in leaves_of(tensor) for leaf in self.sources.get(each.name, (each,))]

    def _owners(self) -> dict[str, str]:
        """Tied parameters, one tensor under several names: the first name of each."""
        names: dict[int, list[str]] = {}
        for name, tensor in self.program.state.items():
            names.setdefault(id(tensor), []).append(name)
        return {name: several[0] for several in names.values() if len(several) > 1 for name in several}

    def _taken(self) -> frozenset[str]:
        """The names of tensors, and of the modules that hold them."""
        taken: set[str] = set()
        for name in (*self.program.state, *self.program.exported.state_dict):
            add_with_owners(taken, name)
        return frozenset(taken)

    # ------------------------------------------------------------ the walk

    def _only_turns_a_weight(self, node: fx.Node) -> bool:
        """w.t() read only as the weight of a product: the product is linear in w itself."""
        if opname(node) not in TURNS or len(shape_of(node)) != 2:
            return False
        source = node.args[0]
        of_parameter = isinstance(source, fx.Node) and source.name in self.tensor_names
        return of_parameter and all(
            opname(u) in FACTORS and node in [u.args[i] for i in FACTORS[opname(u)]] for u in node.users
        )

    def _visit(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self._placeholder(node)
        elif node.op == "output":
            flat = [n for n in pytree.tree_leaves(node.args[0]) if isinstance(n, fx.Node)]
            self.outputs = [n.name for n in flat if n.name not in self.leaves]
        elif node.op == "call_function" and node.name not in self.turned:
            self._call(node)

    def _placeholder(self, node: fx.Node) -> None:
        name = self.tensor_names.get(node.name)
        if name is not None:
            tensor = self.program.state[name]
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.leaves[node.name] = Leaf(name, tuple(tensor.shape), dtype, TensorReader(tensor))
        elif isinstance(node.meta.get("val"), torch.Tensor):
            self.inputs.append(_value(node))

    def _operand(self, argument: Any) -> Operand:
        if isinstance(argument, fx.Node):  # a get_attr is a subgraph that a higher-order op runs
            return None if argument.op == "get_attr" else self.leaves.get(argument.name) or argument.name
        if isinstance(argument, (bool, int, float)):
            return ArrayLiteral(np.asarray(argument))
        return None

    def _call(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            self._getitem(node)
            return
        row = ROWS.get(node.target)
        arguments = Arguments(node)
        known = node.name not in self.stay and self._reads_parameters_only(node)
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
            if _fits(operands, read) and (not known or read.op == "embedding"):
                marks = read.marks if read.op != "opaque" else replace(read.marks, host_op=opname(node))
                self.reads[node.name] = read
                self.nodes.append(Node(read.op, operands, (_value(node),), read.attrs, node.name, path_of(node), marks))
                return
            if not known:
                read_whole = {leaf.name for o in operands if isinstance(o, Tensor) for leaf in leaves_of(o)}
                self.stay |= read_whole & self.sources.keys()
        if known:
            self._compute_by_torch(node)
        else:
            self._opaque(node, read if isinstance(read, Barrier) else Barrier(""))

    def _reads_parameters_only(self, node: fx.Node) -> bool:
        """Whether a node gives tensors of fixed shapes, and depends on no input."""
        reads, value = node.all_input_nodes, node.meta.get("val")
        results = value if isinstance(value, (tuple, list)) else (value,)
        return (
            bool(reads)
            and all(n.name in self.leaves for n in reads)
            and all(isinstance(r, torch.Tensor) and all(isinstance(n, int) for n in r.shape) for r in results)
            and isinstance(node.target, torch._ops.OpOverload)
            and torch.Tag.nondeterministic_seeded not in node.target.tags
            and not node.is_impure()
        )

    def _compute_by_torch(self, node: fx.Node) -> None:
        """What is made of parameters by an op without a meaning here, like the σ of a spectral norm: torch computes it, once."""
        sources = [leaf for n in node.all_input_nodes for leaf in self._sources(n)]
        self.sources[node.name] = tuple(dict.fromkeys(sources))
        if not isinstance(node.meta["val"], torch.Tensor):
            return  # its results are read one by one
        value = _value(node)
        shape, load = tuple(int(n) for n in value.shape), cache(partial(self._run, node))
        leaf = Leaf(node.name, shape, value.dtype, load, self.sources[node.name])
        self.leaves[node.name] = leaf
        self.computed.setdefault(leaf, node.name)

    def _sources(self, node: fx.Node) -> Sequence[Leaf]:
        tensor = self.leaves.get(node.name)
        return self.sources[node.name] if tensor is None else self.parameters_of(tensor)

    def _run(self, node: fx.Node) -> Array:
        with torch.no_grad():
            return to_numpy(self._evaluated(node).detach())

    def _evaluated(self, node: fx.Node) -> torch.Tensor:
        name = self.tensor_names.get(node.name)
        if name is not None:
            return self.program.state[name]
        assert callable(node.target)
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._evaluated)
        result: torch.Tensor = node.target(*args, **kwargs)
        return result

    def _compute(self, node: fx.Node, op: str, operands: Sequence[Operand], attrs: Mapping[str, Any]) -> bool:
        """A node that reads parameters only is a tensor, not a value: `1 + w`, a weight that is normalised."""
        shape = shape_of(node)
        tensors = [o for o in operands if not isinstance(o, str) and o is not None]
        known = len(tensors) == len(operands) and all(isinstance(n, int) for n in shape)
        function = OPS[op].functions.get(attrs.get("fn", ""))
        meant = op in COMPUTED or (function is not None and function.meaning is not None)
        if not (known and meant):
            return False
        attrs = {**attrs, "shape": shape} if op in SHAPED else attrs
        tensor = apply(op, tensors, attrs, [int(n) for n in shape], _value(node).dtype)
        if node.name not in self.leaves:
            self.leaves[node.name] = tensor
            self.computed.setdefault(tensor, node.name)
        return True

    def _at(self, arguments: Arguments, position: Position) -> Any:
        value = arguments[position[0]][position[1]] if isinstance(position, tuple) else arguments[position]
        return value.args[0] if isinstance(value, fx.Node) and value.name in self.turned else value

    def _linear_if_weighted(self, a: Arguments) -> Read | None:
        """x @ w and w @ x with a parameter w, turned by a transpose or not."""
        for weight, x in ((1, 0), (0, 1)):
            source = self._at(a, weight)
            other = self._at(a, x)
            if not (isinstance(source, fx.Node) and source.name in self.leaves) or len(shape_of(source)) != 2:
                continue
            if isinstance(other, fx.Node) and other.name in self.leaves:
                return None
            turned = a[weight].name in self.turned
            rank = a.rank(x)
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
        if source.name in self.sources:
            return self._compute_by_torch(node)
        if read is None or read.parts is None:
            return None  # one of the results of an opaque node, which lists them
        operand, attrs = self._operand(source.args[0]), read.parts[index]
        if self._compute(node, read.op, (operand,), attrs):
            return None
        self.parts[node.name] = source.name
        self.reads[node.name] = Read(read.op, (0,), attrs)
        self.nodes.append(Node(read.op, (operand,), (_value(node),), attrs, node.name, path_of(source)))
        return None

    def _opaque(self, node: fx.Node, barrier: Barrier) -> None:
        reads = [(n, o) for n, o in ((n, self._operand(n)) for n in node.all_input_nodes) if o is not None]
        inputs, places = tuple(o for _, o in reads), {n: i for i, (n, _) in enumerate(reads)}
        weighed = tuple((places[weight], -1 if bias is None else places[bias]) for weight, bias in barrier.weighed)
        value = node.meta.get("val")
        parts = [user for user in node.users if user.target is operator.getitem]
        recurrence = None
        if isinstance(value, (tuple, list)):
            outputs = tuple(_value(part) for part in parts)
            if not outputs:
                return
            if barrier.cells:
                recurrence = _recurrence(barrier, places, parts)
        else:
            if not inputs and not isinstance(value, torch.Tensor):
                return  # arithmetic on sizes
            outputs = (_value(node),)
        host_op = opname(node) or str(node.target)
        marks = Marks(host_op=host_op, why=barrier.why, effect=node.is_impure(), weighed=weighed, recurrence=recurrence)
        self.nodes.append(Node("opaque", inputs, outputs, {}, node.name, path_of(node), marks))


def _fits(operands: Sequence[Operand], read: Read) -> bool:
    """Whether the operands are of a kind that the op takes: an affine op's weight must be a parameter."""
    if read.op in ("linear", "conv"):
        x, weight, bias = (*operands, None)[:3]
        given = isinstance(x, str) or (read.op == "linear" and x is not None)
        return given and isinstance(weight, Tensor) and not isinstance(bias, str)
    if read.op == "embedding":
        return operands[0] is not None and isinstance(operands[1], Tensor)
    return any(isinstance(o, str) for o in operands) or read.op in COMPUTED | {"pointwise"}


def _recurrence(barrier: Barrier, places: Mapping[fx.Node, int], parts: Sequence[fx.Node]) -> Recurrence | None:
    """Where its operands stand; None where one is not among them."""
    if not all(n is None or n in places for cell in barrier.cells for n in cell):
        return None
    weight, hidden = (shape_of(n) for n in barrier.cells[0][:2])
    cells = tuple(tuple(-1 if n is None else places[n] for n in cell) for cell in barrier.cells)
    states = tuple(dict.fromkeys(places[n] for n in barrier.states if n in places))
    results = tuple(RESULTS_OF_RECURRENCE[int(str(part.args[1]))] for part in parts)
    return Recurrence(int(weight[0]) // int(hidden[1]), cells, results, states)  # type: ignore[arg-type]


def _value(node: fx.Node) -> Value:
    value = node.meta.get("val")
    dtype = str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else "int64"
    return Value(node.name, shape_of(node), dtype)


def add_with_owners(names: set[str], name: str) -> None:
    """Add a.b.c, a.b and a, except those that are there."""
    while name and name not in names:
        names.add(name)
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
        results = list(calls.values())
        names[path] = results
        if len(results) > 1:
            names.update({f"{path}@{i}": [name] for i, name in enumerate(results)})
    return names
