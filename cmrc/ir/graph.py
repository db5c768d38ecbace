"""The mechanism graph: what each host node does to axes and units, and nothing else.

    %h = linear(%x, @fc1.weight, @fc1.bias) {axis=1, w_in=1, w_out=0}   ; fc1
    %a = pointwise(%h) {fn='relu'}                                      ; act
    %d = do(%a, [0.1, 0.4]) {axis=1, units={3,7}}                       ; plan do[0]
    %y = linear(%d, @fc2.weight, @fc2.bias) {...}                       ; fc2

A `Graph` is a list of `Node`s in topological order. An operand is the name of a value (`str`), a `Tensor` that is
known before the program runs, or `None` for an optional operand that is absent. A `Tensor` is a host parameter
(`Leaf`), an array (`ArrayLiteral`), or an op of this same IR applied to tensors (`Apply`): folding builds an `Apply`, and
nothing is computed or copied until a host asks for it. Dimensions are integers, or strings if they are dynamic.

The ops (`ir/ops/` says what each means):

    linear      contract one axis with a matrix        conv        convolution, plain or transposed
    pointwise   element by element, with broadcasting  along       acts over some axes, alike and apart on the others
    reshape transpose concat expand                    matmul      contract two values
    select      some positions of an axis              embedding   rows of a table
    do          replace units of an axis               plane       ones of the spatial size of a value
    turn        units in another basis, by blocks      opaque      anything else
    attention   scaled dot products, head by head
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache, cached_property
from typing import Any, NamedTuple, Protocol, Self, TypeAlias, TypeGuard, TypeVar

import ml_dtypes
import numpy as np

Dim: TypeAlias = int | str
Shape: TypeAlias = tuple[Dim, ...]
Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


Record = TypeVar("Record")


def quickly_made(record: type[Record]) -> type[Record]:
    """Give a frozen dataclass with slots an `__init__` that takes half of the time: a lowering makes thousands of nodes and values.

    `dataclass(frozen=True)` writes every field through `object.__setattr__`. Here an object belongs to a twin class while it is
    filled, with the same slots and not frozen. Then it gets its own class.
    """
    cls: Any = record
    twin = type(cls.__name__, (), {"__slots__": cls.__slots__})
    names: dict[str, Any] = {
        "become": object.__dict__["__class__"].__set__,
        "twin": twin,
        "cls": cls,
        "absent": MISSING,
    }
    parameters, lines = ["self"], ["become(self, twin)"]
    for each in fields(cls):
        name = each.name
        if each.default_factory is not MISSING:
            names[f"make_{name}"] = each.default_factory
            parameters.append(f"{name}=absent")
            lines.append(f"self.{name} = make_{name}() if {name} is absent else {name}")
            continue
        if each.default is not MISSING:
            names[f"default_{name}"] = each.default
        parameters.append(name if each.default is MISSING else f"{name}=default_{name}")
        lines.append(f"self.{name} = {name}")
    body = "\n    ".join([*lines, "self.__class__ = cls"])
    exec(f"def __init__({', '.join(parameters)}):\n    {body}", names)  # as `dataclass` does it
    initialise: Callable[..., None] = names["__init__"]
    initialise.__qualname__, initialise.__annotations__ = f"{cls.__qualname__}.__init__", cls.__init__.__annotations__
    cls.__init__ = initialise
    return record


class Index(tuple[int, ...]):
    """Positions of an axis with their array, which is made once for all tensors that it indexes."""

    @cached_property
    def array(self) -> Array:
        return np.array(self, dtype=np.int64)

    @cached_property
    def span(self) -> tuple[int, int]:
        """The smallest and the largest."""
        return min(self), max(self)

    @classmethod
    def of(cls, positions: Iterable[int]) -> Index:
        return positions if isinstance(positions, Index) else cls(positions)

    @classmethod
    def from_array(cls, array: Array) -> Self:
        index = cls(array.tolist())
        index.array = array
        return index


class Keep(Index):
    """Positions of an axis that are read, in ascending order. With a period, of every run of that many positions: an axis
    of size `3*N` that merges N samples with 3 heads is read in heads {0, 2} of each sample. A few are not `ordered`."""

    period: int = 0
    ordered: bool = True

    def __new__(cls, index: Iterable[int], period: int = 0, *, ordered: bool = True) -> Keep:
        if type(index) is cls and index.period == period and index.ordered is ordered:
            return index
        keep = super().__new__(cls, index)
        if period:
            keep.period = period
        if not ordered:
            keep.ordered = ordered
        return keep


def period_of(keep: Sequence[int]) -> int:
    return keep.period if isinstance(keep, Keep) else 0


def is_whole(keep: Sequence[int], size: Dim) -> bool:
    """Whether positions are all of an axis, in order."""
    return len(keep) == size and tuple(keep) == tuple(range(len(keep)))


@quickly_made
@dataclass(frozen=True, slots=True)
class Value:
    """A named result. `shape` has integers, and strings for dynamic sizes."""

    name: str
    shape: Shape
    dtype: str = "float32"


@quickly_made
@dataclass(frozen=True, slots=True)
class Leaf:
    """A parameter of the host, by name. `load` returns its array, without a copy if the host can."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    load: Callable[[], Array] = field(compare=False, repr=False)
    parts: tuple[Leaf, ...] = field(default=(), compare=False, repr=False)
    """The parameters that the host stores, if it computes this one from them."""


@quickly_made
@dataclass(frozen=True, slots=True, eq=False)
class ArrayLiteral:
    """An array in the graph itself."""

    array: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def dtype(self) -> str:
        return self.array.dtype.name

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ArrayLiteral)
            and self.array.dtype == other.array.dtype
            and np.array_equal(self.array, other.array, equal_nan=self.array.dtype.kind == "f")
        )

    def __hash__(self) -> int:
        return hash((self.array.shape, self.array.dtype))


@quickly_made
@dataclass(frozen=True, slots=True)
class Apply:
    """An op of the IR applied to tensors: a folded parameter, computed when a host materialises it."""

    op: str
    inputs: tuple[Tensor, ...]
    attrs: Mapping[str, Any]
    shape: tuple[int, ...]
    dtype: str

    def __hash__(self) -> int:
        """A hash of what distinguishes expressions: the parameters in it, and the ops applied to them."""
        return hash((self.op, self.inputs, self.shape))


Tensor: TypeAlias = Leaf | ArrayLiteral | Apply
Operand: TypeAlias = str | Tensor | None


CONSTANT = "Constant"  # an opaque op without operands that outputs a tensor of the model


RESULTS_OF_RECURRENCE = ("every", "last", "cell")  # of an LSTM; a GRU and an RNN give the first two


class Recurrence(NamedTuple):
    """Where an opaque LSTM, GRU or RNN has its hidden units. Every weight has `gates` blocks of rows, with a row per unit in each.

    A cell is one direction: its operands W, R, b_W and b_R; -1 where there is no place for a bias. A `stacked` op has the directions
    along the first axis of its operands, and both biases in one, one behind the other.
    """

    gates: int
    cells: tuple[tuple[int, int, int, int], ...]
    results: tuple[str, ...]  # of each output: the hidden state at "every" step, at the "last", or the "cell" state
    states: tuple[int, ...] = ()  # the operands that hold initial states
    stacked: bool = False
    peepholes: int = -1
    resets_state: bool = False  # a gate multiplies the hidden state before R reads it (linear_before_reset=0)
    ragged: bool = False  # sequences may end early: what is behind their end is 0


@quickly_made
@dataclass(frozen=True, slots=True)
class Marks:
    """What hosts and passes note about a node. Nothing here changes what the node computes."""

    # by a host, when it reads a model
    host_op: str = ""  # what the host calls an opaque op
    why: str = ""  # why the host left it opaque
    body: str = ""  # the op inside whose body it is (If, Loop, Scan), by that op's first result: see ir/bodies.py
    effect: bool = False  # it does more than compute its results
    shape_only: tuple[int, ...] | None = None  # it reads only these sizes of its operand, none of its numbers
    shapes: tuple[str, ...] = ()  # the values that alone take their shape from it
    takes_bias: bool = False  # the host's op has a place for a bias
    # An opaque op that reads its first operand along the last axis, only through these weights: pairs of operands, weight and
    # bias (-1: it has no place for one). A weight of three axes has one matrix per direction, and a bias twice as long.
    weighed: tuple[tuple[int, int], ...] = ()
    recurrence: Recurrence | None = None
    square: bool = False  # attention whose values must be as wide as its queries
    inside: str = ""  # the fused host op of which this node is a step, if the node's value stays inside it
    shown: bool = False  # a value inside a fused op that other nodes read as well
    separable: bool = False  # the host can write this fused op as separate nodes
    # by a pass, when it rewrites
    sources: tuple[int, ...] = ()  # the do's of the plan that this do comes from
    like: str = ""  # an inserted node that the host writes like this node of its own
    addend: bool = False  # an inserted sum that may be merged with the next
    touched: bool = False  # a select of the host whose positions have changed
    narrowed: bool = False  # attention that compares fewer units: its scale must be written out


NO_MARKS = Marks()


@quickly_made
@dataclass(frozen=True, slots=True)
class Node:
    """One step. `origin` names the host's node (empty if inserted), `path` the user's module if it is known.

    `attrs` are what the op means (`ir/ops/` declares them), `marks` what the compiler notes about the node.
    """

    op: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Value, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    origin: str = ""
    path: str = ""
    marks: Marks = NO_MARKS

    @property
    def name(self) -> str:
        return self.outputs[0].name

    @property
    def output(self) -> Value:
        return self.outputs[0]

    @property
    def label(self) -> str:
        """The name in reports and errors: the user's module path, otherwise the host's node, otherwise the value's name."""
        return self.path or self.origin or self.name

    @property
    def kind(self) -> str:
        """The usual name of the op: `pointwise` and `along` are named by their function."""
        return str(self.attrs.get("fn") or self.marks.host_op or self.op)

    def values(self) -> list[str]:
        """The operands that are values of the graph."""
        return [operand for operand in self.inputs if type(operand) is str]

    def with_attrs(self, **changes: Any) -> Node:
        return Node(self.op, self.inputs, self.outputs, {**self.attrs, **changes}, self.origin, self.path, self.marks)

    def with_marks(self, **changes: Any) -> Node:
        return replace(self, marks=replace(self.marks, **changes))

    def with_inputs(self, inputs: Iterable[Operand]) -> Node:
        return Node(self.op, tuple(inputs), self.outputs, self.attrs, self.origin, self.path, self.marks)


def apply(op: str, inputs: Sequence[Tensor], attrs: Mapping[str, Any], shape: Sequence[int], dtype: str) -> Tensor:
    """A tensor that is `op` of tensors."""
    return Apply(op, tuple(inputs), dict(attrs), tuple(shape), dtype)


def take(tensor: Tensor, axis: int, keep: Sequence[int]) -> Tensor:
    """Positions of an axis of a tensor; all of them are the tensor itself."""
    if is_whole(keep, tensor.shape[axis]):
        return tensor
    shape = (*tensor.shape[:axis], len(keep), *tensor.shape[axis + 1 :])
    if isinstance(tensor, Apply) and tensor.op == "expand":
        local = axis - len(tensor.shape) + len(tensor.inputs[0].shape)
        if local < 0 or tensor.inputs[0].shape[local] == 1:  # copies: fewer of them
            return Apply("expand", tensor.inputs, {"shape": shape}, shape, tensor.dtype)
    if isinstance(tensor, Apply) and tensor.op == "select" and _is_one_number(tensor.inputs[0]):
        return Apply("expand", tensor.inputs[0].inputs, {"shape": shape}, shape, tensor.dtype)
    return Apply("select", (tensor,), {"axis": axis, "keep": Index.of(keep)}, shape, tensor.dtype)


def _is_one_number(tensor: Tensor) -> TypeGuard[Apply]:
    """Whether a tensor is copies of one number, such as a state of zeros."""
    return isinstance(tensor, Apply) and tensor.op == "expand" and all(n == 1 for n in tensor.inputs[0].shape)


Kind = TypeVar("Kind")


class HasAttributes(Protocol):
    """Anything with attributes: a node, a tensor expression, or what a host reads as one."""

    @property
    def attrs(self) -> Mapping[str, Any]: ...


def attributes(node: HasAttributes, kind: type[Kind]) -> Kind:
    """The attributes of a node, typed as those of its op."""
    return node.attrs  # type: ignore[return-value]  # a call of `cast` would cost more than the rest


@dataclass(frozen=True)
class Graph:
    """A program: inputs, nodes in topological order, names of the outputs."""

    inputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Value]:
        """Every value by name."""
        values = {value.name: value for value in self.inputs}
        for node in self.nodes:
            for value in node.outputs:
                values[value.name] = value
        return values

    def values(self) -> dict[str, Value]:
        """Every value by name, in a dict of the caller's own."""
        return dict(self.by_name)

    def leaves(self) -> dict[str, Leaf]:
        """Every host parameter that the graph still refers to, by name."""
        leaves: dict[str, Leaf] = {}
        for node in self.nodes:
            for operand in node.inputs:
                if type(operand) is Leaf:
                    leaves[operand.name] = operand
                elif type(operand) is Apply:
                    leaves.update((leaf.name, leaf) for leaf in leaves_of(operand))
        return leaves

    @cached_property
    def makers(self) -> Mapping[str, Node]:
        """The node that computes each value; inputs have none."""
        return {value.name: node for node in self.nodes for value in node.outputs}

    @cached_property
    def readers(self) -> Mapping[str, list[Node]]:
        """For every value, the nodes that read it, in order."""
        readers: dict[str, list[Node]] = {name: [] for name in self.by_name}
        for node in self.nodes:
            for name in dict.fromkeys(node.values()):
                readers[name].append(node)
        return readers


@dataclass(frozen=True, slots=True, eq=False)
class Do:
    """One replacement, checked: units of an axis of a value, and what they become. Arrays are float64."""

    site: str
    value: str
    axis: int
    units: tuple[int, ...]
    constant: Array  # the constants; for an affine replacement its bias
    parents: tuple[int, ...] = ()
    weight: Array | None = None
    basis: Array | None = None  # [blocks, size, size]: the units are those of basis · x, block by block


def leaves_of(tensor: Tensor) -> Iterator[Leaf]:
    """The host parameters inside a tensor expression."""
    if isinstance(tensor, Leaf):
        yield tensor
    elif isinstance(tensor, Apply):
        for part in tensor.inputs:
            yield from leaves_of(part)


def literal(array: Any, dtype: str = "float64") -> ArrayLiteral:
    return ArrayLiteral(np.asarray(array, dtype=dtype))


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """numpy's own dtype of this name, or ml_dtypes' (bfloat16)."""
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def as_dtype(array: Array, dtype: str) -> Array:
    return array.astype(numpy_dtype(dtype), copy=False)


# ---------------------------------------------------------------- fused nodes
#
# A node of the host that does several things at once is several nodes here:
#
#     BiasGelu       %y::sum = add(%x, b)  {inside='BiasGelu'}     ; y
#                    %y      = gelu(%y::sum)                       ; y
#
# A value inside such a node exists in no host: nothing can be put in front of it or behind it. The rules do not know that.
# Where they leave something in the middle, the node is taken as a whole, opaque, with what stopped there as the reason,
# and the passes start again. Only a node that its host can write as several (`separable`) comes apart.

Groups = dict[str, list[Node]]


def fused_groups(graph: Graph) -> Groups:
    """The nodes of every host node that is read as several which pass values inside it, by their origin."""
    origins = {node.origin for node in graph.nodes if node.marks.inside}
    groups: Groups = {}
    for node in graph.nodes if origins else ():
        if node.origin in origins:
            groups.setdefault(node.origin, []).append(node)
    return groups


def torn_apart(before: Graph, after: Graph) -> list[str]:
    """The origins of the fused nodes that no single node of the host can stand for any more."""
    groups = fused_groups(before)
    if not groups:
        return []
    left = {node.name: node for node in after.nodes}
    member_of = {node.name: origin for origin, members in groups.items() for node in members}
    torn = {
        origin
        for origin, members in groups.items()
        if not any(m.marks.separable for m in members)
        and any(m.name in left for m in members)
        and differs_inside(members, left)
    }
    for node in after.nodes:
        copied = member_of.get(node.marks.like)
        if copied is not None:
            torn.add(copied)
    return [origin for origin in groups if origin in torn]


def differs_inside(members: Sequence[Node], left: Mapping[str, Node]) -> bool:
    """Whether a part is gone, reads something else inside, or has a tensor where it read a value."""
    own = {value.name for member in members for value in member.outputs}
    for member in members:
        now = left.get(member.name)
        if now is None or now.op != member.op:
            return True
        for i, operand in enumerate(member.inputs):
            seen = now.inputs[i] if i < len(now.inputs) else None
            if operand in own and seen != operand:
                return True
            if isinstance(operand, str) and not isinstance(seen, str):
                return True
    return False


def outer_values(members: Sequence[Node]) -> list[str]:
    """The values that the parts of a fused node read from outside, each once, in order."""
    own = {value.name for member in members for value in member.outputs}
    return list(dict.fromkeys(o for member in members for o in member.values() if o not in own))
