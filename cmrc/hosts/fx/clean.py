"""The exported graph, cleaned before it is read: no run-time checks, no in-place ops, compound ops spelled out.

relu_(x)      ->   relu(x), which later readers of x read instead
lstm(x)       ->   lstm(lstm(x)), if it has two layers
glu(x)        ->   a, b = halves of x;  a * sigmoid(b)
stack(x, y)   ->   cat(unsqueeze(x), unsqueeze(y))
weight_norm   ->   v * (g / |v|)
einsum        ->   transposes and a product, if it contracts letters of two operands
repeat_interleave -> unsqueeze, expand, flatten
table[:, ids] ->   rows of the turned table, turned back
baddbmm       ->   add(x, bmm(a, b))
copy(x, y)    ->   y, expanded to the size of x
slice_scatter ->   cat(the part before, the new part, the part after)
zeros(n)      ->   full(n, 0)
squeeze(x)    ->   squeeze(x, its axes of size 1)
"""

from __future__ import annotations

import copy
import operator
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from cmrc.errors import TraceError
from cmrc.hosts.fx.ops.pointwise import TRAINING_FLAGS
from cmrc.hosts.fx.schema import Arguments, opname, parameters, positions

aten = torch.ops.aten
CHECKS_ONLY = re.compile("_assert_tensor_metadata|_assert_scalar|sym_constrain_range|_assert_async")
NO_ATTRIBUTES: Mapping[str, str] = MappingProxyType({})
DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout")
# Ops whose result may share the memory of their operand.
ALIASES = {"view", "reshape", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "t", "alias",
           "flatten", "unflatten", "narrow", "movedim", "detach", "contiguous", "to", "dropout", "feature_dropout",
           "alpha_dropout", "split", "split_with_sizes", "chunk", "unbind", "getitem"}  # fmt: skip


def copy_graph(graph: fx.Graph, attributes: Mapping[str, str] = NO_ATTRIBUTES) -> fx.Graph:
    """A copy with the same names. torch's own copy renames nodes that have the name of a builtin, and takes three times as long.

    Adds nodes like `fx.Graph.create_node`, but without its search of every argument for raw symbols, and with given names.
    An input that is named in `attributes` is read as this attribute of the module instead.
    """
    copied = fx.Graph(tracer_cls=graph._tracer_cls)
    copied._codegen = copy.deepcopy(graph._codegen)
    nodes: dict[fx.Node, fx.Node] = {}
    alike: defaultdict[tuple[str, int], list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        op, target = node.op, node.target
        args = fx.map_arg(node.args, nodes.__getitem__) if node.args else ()
        kwargs = fx.map_arg(node.kwargs, nodes.__getitem__) if node.kwargs else {}
        if op == "placeholder" and node.name in attributes:
            op, target, args = "get_attr", attributes[node.name], ()
        new = nodes[node] = fx.Node(copied, node.name, op, target, args, kwargs, node.type)
        new.meta.update(node.meta)
        copied._insert(new)
        alike[op, id(target) if op == "call_function" else 0].append(new)
    copied._len = len(nodes)
    names, table = copied._graph_namespace, copied._find_nodes_lookup_table
    names._obj_to_name.update((node, node.name) for node in nodes.values())
    names._used_names.update(names._obj_to_name.values())
    for several in alike.values():  # torch hashes a target in Python, so once for all its calls
        table.table[table._key(several[0])].update(dict.fromkeys(several))
    return copied


def with_plain_layouts(graph: fx.Graph) -> fx.Graph:
    """A copy for torch's exporter, which turns reshapes into views before it replaces attention by ops with other strides."""
    copied = copy_graph(graph)
    for node in list(copied.nodes):
        if opname(node) == "scaled_dot_product_attention":
            with copied.inserting_after(node):
                plain = copied.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
            plain.meta = copy.copy(node.meta)
            node.replace_all_uses_with(plain, delete_user_cb=lambda user, plain=plain: user is not plain)
    return copied


def clean(graph: fx.Graph, *, in_eval_mode: bool) -> fx.Graph:
    """A cleaned copy. What trains although the model was traced in eval mode trains in every mode."""
    copied = copy_graph(graph)
    for node in list(copied.nodes):
        name = opname(node)
        if name in TRAINING_FLAGS and (
            in_eval_mode or (name == "batch_norm" and Arguments(node)["running_mean"] is None)
        ):
            _fix_flag(node, TRAINING_FLAGS[name])
        if node.op == "call_module" or (node.op == "call_function" and CHECKS_ONLY.search(str(node.target))):
            copied.erase_node(node)
        elif isinstance(node.target, torch._ops.OpOverload) and name.endswith("_") and not name.endswith("__"):
            _make_functional(node, name)
        elif node.target in SPELLED:
            SPELLED[node.target](Arguments(node))
    for node in reversed(list(copied.nodes)):
        if node.target is operator.getitem and not node.users:
            copied.erase_node(node)
    return copied


def without_dropout(graph: fx.Graph) -> fx.Graph:
    """A copy in which readers of an idle dropout read its operand: both are the same memory, which torch does not declare."""
    copied = copy_graph(graph)
    for node in list(copied.nodes):
        if opname(node) in DROPOUTS and not Arguments(node)[TRAINING_FLAGS[opname(node)]]:
            node.replace_all_uses_with(node.args[0])
            copied.erase_node(node)
    return copied


def _fix_flag(node: fx.Node, flag: str) -> None:
    """Set a flag by keyword, so that `LoweredModule.train` does not change it."""
    place = positions(node.target)[flag]
    if len(node.args) > place and node.args[place]:
        names = [parameter.name for parameter in parameters(node.target)]
        node.kwargs = {**dict(zip(names[place:], node.args[place:], strict=False)), **node.kwargs}
        node.args = node.args[:place]


# ---------------------------------------------------------------- in place


def _make_functional(node: fx.Node, name: str) -> None:
    target, changed = node.target, node.args[0]
    assert isinstance(target, torch._ops.OpOverload)
    if not target._schema.is_mutable:
        return
    plain = getattr(getattr(aten, name[:-1], None), target._overloadname, None)
    order = {other: i for i, other in enumerate(node.graph.nodes)}

    def is_read_later(other: fx.Node) -> bool:
        return any(order[user] > order[node] and user is not node for user in other.users)

    if (
        plain is None
        or not isinstance(changed, fx.Node)
        or any(other.op == "placeholder" for other in _same_memory(changed))
        or any(is_read_later(other) for other in _same_memory(changed) if other not in (changed, node))
    ):
        raise TraceError(
            "it changes in place a value whose memory others share",
            node=node.name,
            op=name,
            fix="use the variant of the op without the trailing underscore, or inplace=False",
        )
    node.target = plain
    for reader in [user for user in changed.users if order[user] > order[node]]:
        reader.replace_input_with(changed, node)


def _same_memory(node: fx.Node) -> Iterator[fx.Node]:
    """The values that share memory with this one, including itself."""
    root = node
    while _may_alias(root) and isinstance(root.args[0], fx.Node):
        root = root.args[0]
    waiting = [root]
    while waiting:
        alias = waiting.pop()
        yield alias
        waiting.extend(user for user in alias.users if _may_alias(user) and user.args[0] is alias)


def _may_alias(node: fx.Node) -> bool:
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return opname(node.args[0]) in ALIASES
    return opname(node) in ALIASES


# ---------------------------------------------------------------- compound ops


def _call(before: fx.Node, target: Any, *args: Any) -> fx.Node:
    """A call that belongs to the same module as `before`, with the shape of its result."""
    with before.graph.inserting_before(before):
        call = before.graph.call_function(target, args)
    call.meta = {k: v for k, v in before.meta.items() if k in ("nn_module_stack", "stack_trace", "torch_fn")}
    values = map_arg(args, lambda n: n.meta["val"])
    value = before.meta["val"]
    with (value[0] if isinstance(value, tuple) else value).fake_mode:
        call.meta["val"] = target(*values)
    return call


def _become(node: fx.Node, target: Any, *args: Any) -> None:
    node.target, node.args, node.kwargs = target, args, {}


def _spell_glu(a: Arguments) -> None:
    x, axis = a["self"], a.axis("dim")
    size = a.shape(0)[axis]
    if not isinstance(size, int):
        return
    first = _call(a.node, aten.slice.Tensor, x, axis, 0, size // 2)
    second = _call(a.node, aten.slice.Tensor, x, axis, size // 2, size)
    _become(a.node, aten.mul.Tensor, first, _call(a.node, aten.sigmoid.default, second))


def _spell_stack(a: Arguments) -> None:
    axis = int(a["dim"]) % len(a.out_shape())
    _become(a.node, aten.cat.default, [_call(a.node, aten.unsqueeze.default, x, axis) for x in a["tensors"]], axis)


def _spell_squeeze(a: Arguments) -> None:
    """Name the axes that it drops, because later other axes may have a single unit too."""
    shape, named = a.shape(0), a.node.args[1:] or tuple(a.node.kwargs.values())
    asked: Any = named[0] if named else range(len(shape))
    axes = [int(i) % len(shape) for i in (asked if isinstance(asked, Iterable) else (asked,))] if shape else []
    _become(a.node, aten.squeeze.dims, a["self"], [i for i in axes if shape[i] == 1])


def _spell_weight_norm(a: Arguments) -> None:
    v, g = a["v"], a["g"]
    axes = [d for d in range(a.rank()) if d != int(a["dim"]) % a.rank()]
    squares = _call(a.node, aten.sum.dim_IntList, _call(a.node, aten.square.default, v), axes, True)
    _become(a.node, aten.mul.Tensor, v, _call(a.node, aten.div.Tensor, g, _call(a.node, aten.sqrt.default, squares)))


def _spell_einsum(a: Arguments) -> None:
    """Two operands with each letter once: transposed so that the letters are batch, own, contracted; then a product."""
    operands, letters = list(a["tensors"]), str(a["equation"]).replace(" ", "")
    if len(operands) != 2 or "->" not in letters or "." in letters:
        return
    inputs, _, result = letters.partition("->")
    left, _, right = inputs.partition(",")
    shared = [c for c in left if c in right]
    batch = [c for c in shared if c in result]
    over = [c for c in shared if c not in result]
    mine, theirs = ([c for c in side if c not in shared] for side in (left, right))
    plain = all(len(set(part)) == len(part) for part in (left, right, result))
    if not plain or not over or not theirs or set(result) != {*batch, *mine, *theirs}:
        return
    sizes = dict(zip(right, operands[1].meta["val"].shape, strict=True))
    if len(theirs) > 1 and not all(isinstance(sizes[c], int) for c in theirs):
        return
    lead, rows = (mine[:-1], mine[-1:]) if batch else ([], mine)  # the second operand is the same along those that lead
    first = _turned_to(a.node, operands[0], left, [*lead, *batch, *rows, *over])
    second = _turned_to(a.node, operands[1], right, [*batch, *over, *theirs])
    if len(over) > 1:
        first = _call(a.node, aten.flatten.using_ints, first, -len(over), -1)
        second = _call(a.node, aten.flatten.using_ints, second, len(batch), len(batch) + len(over) - 1)
    if len(theirs) > 1:
        second = _call(a.node, aten.flatten.using_ints, second, -len(theirs), -1)
    order = [*lead, *batch, *rows, *theirs]
    if not mine:
        first = _call(a.node, aten.unsqueeze.default, first, len(batch))
    product = _call(a.node, aten.matmul.default, first, second)
    if not mine:
        product = _call(a.node, aten.squeeze.dims, product, [len(batch)])
    if len(theirs) > 1:
        product = _call(a.node, aten.unflatten.int, product, -1, [int(sizes[c]) for c in theirs])
    _become(a.node, aten.permute.default, product, [order.index(c) for c in result])


def _spell_index(a: Arguments) -> None:
    """Rows of a table that lie along a later axis, as of biases by head: turned, looked up, and turned back."""
    x, (*before, index) = a["self"], a["indices"]
    if x.op != "placeholder" or not before or any(before) or index is None or index.meta["val"].dtype == torch.bool:
        return
    place, places = len(before), index.meta["val"].dim()
    if places < 2:
        return
    turned = _call(a.node, aten.permute.default, x, [place, *(d for d in range(a.rank()) if d != place)])
    rows = _call(a.node, aten.index.Tensor, turned, [index])
    rest = range(places, places + a.rank() - 1)
    _become(a.node, aten.permute.default, rows, [*rest[:place], *range(places), *rest[place:]])


def _spell_repeat(a: Arguments) -> None:
    """Each position so many times in a row."""
    times = a["repeats"]
    if not isinstance(times, int) or a["dim"] is None:
        return
    axis = int(a["dim"]) % a.rank()
    rows = _call(a.node, aten.unsqueeze.default, a["self"], axis + 1)
    copies = _call(a.node, aten.expand.default, rows, [times if d == axis + 1 else -1 for d in range(a.rank() + 1)])
    _become(a.node, aten.flatten.using_ints, copies, axis, axis + 1)


def _turned_to(node: fx.Node, x: fx.Node, letters: str, order: list[str]) -> fx.Node:
    perm = [letters.index(c) for c in order]
    return x if perm == sorted(perm) else _call(node, aten.permute.default, x, perm)


def _spell_baddbmm(a: Arguments) -> None:
    product = _call(a.node, aten.bmm.default, a["batch1"], a["batch2"])
    if a["alpha"] != 1:
        product = _call(a.node, aten.mul.Scalar, product, a["alpha"])
    first = a["self"] if a["beta"] == 1 else _call(a.node, aten.mul.Scalar, a["self"], a["beta"])
    _become(a.node, aten.add.Tensor, first, product)


def _spell_copy(a: Arguments) -> None:
    """Read the copied values themselves: torch has no gradient for the copy."""
    seen, copied = a["self"], a["src"]
    dtype = seen.meta["val"].dtype
    if copied.meta["val"].dtype != dtype:
        copied = _call(a.node, aten.to.dtype, copied, dtype)
    same = copied.meta["val"].shape == seen.meta["val"].shape
    _become(a.node, *((aten.clone.default, copied) if same else (aten.expand_as.default, copied, seen)))
    _erase_unread(seen)


def _spell_slice_scatter(a: Arguments) -> None:
    """The part before the slice, the new part, and the part after it."""
    axis = int(a["dim"]) % a.rank()
    size, put = a.shape(0)[axis], a["src"]
    start, end = (0 if a["start"] is None else a["start"]), (size if a["end"] is None else a["end"])
    if a["step"] != 1 or not all(isinstance(n, int) for n in (size, start, end)):
        return
    first, last, _ = slice(start, end).indices(int(size))
    seen = a["self"]
    kept = [*_part(a.node, seen, axis, 0, first), put, *_part(a.node, seen, axis, last, int(size))]
    _become(a.node, aten.cat.default, kept, axis)
    _erase_unread(seen)


def _part(node: fx.Node, x: fx.Node, axis: int, start: int, end: int) -> list[fx.Node]:
    """These positions of a value; of a concatenation, the parts at these positions."""
    if start >= end:
        return []
    if x.target is aten.cat.default and len(x.args) > 1 and x.args[1] == axis:
        pieces: Any = x.args[0]
        offset, parts = 0, list[fx.Node]()
        for piece in pieces:
            size = piece.meta["val"].shape[axis]
            if not isinstance(size, int):
                break
            parts += _part(node, piece, axis, max(start - offset, 0), min(end - offset, size))
            offset += size
        else:
            return parts
    whole = start == 0 and end == x.meta["val"].shape[axis]
    return [x if whole else _call(node, aten.slice.Tensor, x, axis, start, end)]


def _erase_unread(*nodes: fx.Node) -> None:
    """Remove values that were read only for their memory, and what only they read."""
    for node in nodes:
        if node.op == "call_function" and not node.users and not node._erased:
            operands = node.all_input_nodes
            node.graph.erase_node(node)
            _erase_unread(*operands)


def _spell_filled(a: Arguments) -> None:
    a.node.args = (a["size"], 0.0 if opname(a.node) == "zeros" else 1.0)
    a.node.target = aten.full.default


def _spell_layers(a: Arguments) -> None:
    """Layers of a recurrent op, each an op of its own: every one has its hidden state. The op itself becomes the last."""
    layers, directions, weights, node = int(a["num_layers"]), 1 + bool(a["bidirectional"]), a["params"], a.node
    if layers == 1:
        return
    each, several = len(weights) // layers, isinstance(a["hx"], (list, tuple))
    every, *last = node.meta["val"]
    with every.fake_mode:
        given = (every, *(state[:directions] for state in last))

    def operands(layer: int, x: Any) -> tuple[Any, ...]:
        first, end = layer * directions, (layer + 1) * directions
        begun = [_part(node, h, 0, first, end)[0] for h in (a["hx"] if several else [a["hx"]])]
        own = list(weights[layer * each : (layer + 1) * each])
        rest = (own, a["has_biases"], 1, 0.0, a["train"], a["bidirectional"], a["batch_first"])
        return (x, begun if several else begun[0], *rest)

    x, earlier = a["input"], list[list[fx.Node]]()
    for layer in range(layers - 1):
        read = operands(layer, x)
        with node.graph.inserting_before(node):
            call = node.graph.call_function(node.target, read)  # type: ignore[arg-type]
        call.meta = {**node.meta, "val": given}
        x, *ends = (_call(node, operator.getitem, call, i) for i in range(len(given)))
        earlier.append(ends)
        if a["dropout"]:
            x = _call(node, aten.dropout.default, x, a["dropout"], a["train"])
    node.args, node.kwargs, node.meta["val"] = operands(layers - 1, x), {}, given
    for part in [user for user in node.users if user.users and user.args[1] != 0]:
        result = int(str(part.args[1]))
        states = [*(ends[result - 1] for ends in earlier), _call(part, operator.getitem, node, result)]
        for reader in [user for user in part.users if user.target is aten.select.int and user.args[1] == 0]:
            layer, direction = divmod(int(str(reader.args[2])) % (layers * directions), directions)
            reader.args = (states[layer], 0, direction)
        if part.users:
            _become(part, aten.cat.default, states, 0)


SPELLED = {
    aten.zeros.default: _spell_filled,
    aten.ones.default: _spell_filled,
    aten.baddbmm.default: _spell_baddbmm,
    aten.copy.default: _spell_copy,
    aten.einsum.default: _spell_einsum,
    aten.glu.default: _spell_glu,
    aten.gru.input: _spell_layers,
    aten.index.Tensor: _spell_index,
    aten.lstm.input: _spell_layers,
    aten.repeat_interleave.self_int: _spell_repeat,
    aten.rnn_relu.input: _spell_layers,
    aten.rnn_tanh.input: _spell_layers,
    aten.squeeze.default: _spell_squeeze,
    aten.squeeze.dim: _spell_squeeze,
    aten.squeeze.dims: _spell_squeeze,
    aten.slice_scatter.default: _spell_slice_scatter,
    aten.stack.default: _spell_stack,
    aten._weight_norm.default: _spell_weight_norm,
}
