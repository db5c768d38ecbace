"""The mechanism graph as text, and back: `parse(to_text(g), leaves=g.leaves()) == g`.

    graph(%x: float32[N,64]) -> (%y)
    %h = linear(%x, @fc1.weight: float32[96,64], _) {axis=1, w_in=1, w_out=0} : float32[N,96]   ; fc1 <- linear_3
    %d = do(%h, [0.1, 0.4]) {axis=1, units={3,7}} : float32[N,96]
    %s = select(%d) {axis=1, keep={0:3,4:7}} : float32[N,6]

    %n = opaque(%x) {| host_op='Shape', shape_only=(0,)} : int64[1]

`%` is a value, `@` a host parameter, `_` an operand that is absent, `; path <- origin` where the node comes from.
In braces are the attributes of the op and, after `|`, what the compiler notes about the node (`Marks`).
Index tuples are lists of positions and ranges in their own order: `{0:3,5}` is (0, 1, 2, 5). A tensor expression is
written as applied: `select(@w: float32[8,4]){axis=0, keep={1,2}}: float32[2,4]`. Short arrays are written in place,
as float64 unless their type follows; long ones are called `#0` and listed at the end, in base64. Names that are not plain
words are quoted.
"""

from __future__ import annotations

import ast
import base64
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn, TypeVar

import numpy as np

from cmrc.errors import TextError
from cmrc.ir.graph import (
    NO_MARKS,
    Apply,
    Array,
    ArrayLiteral,
    Dim,
    Graph,
    Leaf,
    Marks,
    Node,
    Operand,
    Recurrence,
    Shape,
    Tensor,
    Value,
    numpy_dtype,
)

WORD = re.compile(r"[\w.+\-*/$]+(?:::[\w.+\-*/$]+)*")
TOKEN = re.compile(rf"\s*(?:(->|<-)|('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|({WORD.pattern})|([^\s\w]))")
INDEX_ATTRS = {"units", "parents", "keep"}  # tuples of positions, printed as ranges
INLINE = 16  # entries of the largest array that is written in place
MARKS = {mark.name: mark.default for mark in fields(Marks)}
CONSTANTS = {"True": True, "False": False, "None": None}

Item = TypeVar("Item")


# ---------------------------------------------------------------- printing


def to_text(graph: Graph, *, data: bool = True) -> str:
    """The whole graph. Without `data` long arrays are named but not listed: for people, who do not read base64."""
    printer = _Printer()
    inputs = ", ".join(f"%{_name(v.name)}: {_type(v.dtype, v.shape)}" for v in graph.inputs)
    lines = [f"graph({inputs}) -> ({', '.join('%' + _name(name) for name in graph.outputs)})"]
    lines += [printer.node(node) for node in graph.nodes]
    if data:
        lines += [
            f"#{i} = {_type(a.dtype, a.shape)} '{base64.b64encode(a.array.tobytes()).decode()}'"
            for i, a in enumerate(printer.listed)
        ]
    return "\n".join(lines) + "\n"


def _name(name: str) -> str:
    return name if WORD.fullmatch(name) else repr(name)


def _dim(dim: Dim) -> str:
    return str(dim) if isinstance(dim, int) or (WORD.fullmatch(dim) and not _is_int(dim)) else repr(dim)


def _type(dtype: str, shape: Shape) -> str:
    return f"{dtype}[{','.join(map(_dim, shape))}]"


def _is_int(word: str) -> bool:
    return re.fullmatch(r"-?\d+", word) is not None


def _index(index: Sequence[int]) -> str:
    """(0, 1, 2, 5) as {0:3,5}."""
    parts, i = [], 0
    while i < len(index):
        stop = i + 1
        while stop < len(index) and index[stop] == index[stop - 1] + 1:
            stop += 1
        if stop - i >= 3:
            parts.append(f"{index[i]}:{index[i] + stop - i}")
        else:
            parts += [str(k) for k in index[i:stop]]
        i = stop
    return "{" + ",".join(parts) + "}"


def _attrs(attrs: Mapping[str, Any], marks: Marks = NO_MARKS) -> str:
    inside = [", ".join(f"{key}={_attr(value, key in INDEX_ATTRS)}" for key, value in attrs.items())]
    if marks is not NO_MARKS:
        noted = {key: getattr(marks, key) for key, usual in MARKS.items() if getattr(marks, key) != usual}
        inside += ["|", ", ".join(f"{key}={_attr(value)}" for key, value in noted.items())] if noted else []
    return "{" + " ".join(filter(None, inside)) + "}"


def _attr(value: Any, index: bool = False) -> str:
    if isinstance(value, tuple) and index and all(isinstance(v, (int, np.integer)) for v in value):
        return _index([int(v) for v in value])
    if isinstance(value, (tuple, list)):
        inside = ", ".join(_attr(v, index) for v in value)
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' if len(value) == 1 else ''})"
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    return f"!{str(value)!r}"  # for people only: parse refuses it


class _Printer:
    def __init__(self) -> None:
        self.listed: list[ArrayLiteral] = []

    def node(self, node: Node) -> str:
        names = ", ".join(f"%{_name(v.name)}" for v in node.outputs)
        types = ", ".join(_type(v.dtype, v.shape) for v in node.outputs)
        attrs = f" {_attrs(node.attrs, node.marks)}" if node.attrs or node.marks != NO_MARKS else ""
        line = f"{names} = {node.op}({', '.join(map(self.operand, node.inputs))}){attrs} : {types}"
        path, origin = (_name(text) if text else "" for text in (node.path, node.origin))
        where = f"{path} <- {origin}".strip() if origin else path
        return f"{line}   ; {where}" if where else line

    def operand(self, operand: Operand) -> str:
        if operand is None:
            return "_"
        return f"%{_name(operand)}" if isinstance(operand, str) else self.tensor(operand)

    def tensor(self, tensor: Tensor) -> str:
        kind = _type(tensor.dtype, tensor.shape)
        if isinstance(tensor, Leaf):
            return f"@{_name(tensor.name)}: {kind}"
        if isinstance(tensor, ArrayLiteral):
            return self.literal(tensor, kind)
        return f"{tensor.op}({', '.join(map(self.tensor, tensor.inputs))}){_attrs(tensor.attrs)}: {kind}"

    def literal(self, literal: ArrayLiteral, kind: str) -> str:
        array = literal.array
        if array.size > INLINE or array.dtype.kind == "c":
            if literal not in self.listed:
                self.listed.append(literal)
            return f"#{self.listed.index(literal)}: {kind}"
        number = array.tolist() if array.dtype.kind in "biu" else array.astype(np.float64).tolist()
        plain = array.dtype == np.float64 and array.size > 0
        return repr(number) if plain else f"{number!r}: {kind}"


# ---------------------------------------------------------------- parsing


def parse(text: str, leaves: Mapping[str, Leaf] | None = None) -> Graph:
    """The graph of a text. Parameters are taken from `leaves`; a missing one raises an error when it is loaded."""
    data: dict[str, ArrayLiteral] = {}
    statements: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("#"):
            parser = _Parser(line, number)
            data.update([parser.data()])
        elif line.strip() and not line.lstrip().startswith(";"):
            statements.append((number, line))
    if not statements:
        raise TextError("there is no graph here", at="line 1")
    (number, line), *rest = statements
    inputs, outputs = _Parser(line, number).header()
    nodes = [_Parser(line, number, data, leaves or {}).node() for number, line in rest]
    return Graph(inputs, tuple(nodes), outputs)


@dataclass(slots=True)
class _Parser:
    """One line: its remaining tokens, and what its names mean."""

    line: str
    number: int
    arrays: Mapping[str, ArrayLiteral] = field(default_factory=dict)
    leaves: Mapping[str, Leaf] = field(default_factory=dict)
    tokens: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = [next(filter(None, match.groups())) for match in self._scan()]
        self.tokens.reverse()  # the next one last, to pop

    def _scan(self) -> Iterator[re.Match[str]]:
        at, line = 0, self.line.rstrip()
        while at < len(line):
            match = TOKEN.match(line, at)
            assert match is not None  # any character that is not space is a token
            at = match.end()
            yield match

    # ------------------------------------------------------------ tokens

    def fail(self, reason: str) -> NoReturn:
        raise TextError(reason, at=f"line {self.number}: {self.line.strip()}")

    def next(self) -> str:
        return self.tokens[-1] if self.tokens else ""

    def take(self, wanted: str = "") -> str:
        if not self.tokens or (wanted and self.tokens[-1] != wanted):
            instead = f"'{self.next()}'" if self.tokens else "the end of the line"
            self.fail(f"expected {repr(wanted) if wanted else 'more'}, found {instead}")
        return self.tokens.pop()

    def accept(self, token: str) -> bool:
        if self.next() != token:
            return False
        self.tokens.pop()
        return True

    def items(self, item: Callable[[], Item], stop: str) -> list[Item]:
        """Items and commas up to `stop`; a comma may end them."""
        items: list[Item] = []
        while not self.accept(stop):
            items.append(item())
            if self.next() != stop:
                self.take(",")
        return items

    def word(self) -> str:
        token = self.take()
        if token[0] in "'\"":
            if len(token) < 2 or token[-1] != token[0]:
                self.fail("a quote is not closed")
            return str(ast.literal_eval(token))
        if not WORD.fullmatch(token):
            self.fail(f"expected a name, found '{token}'")
        return token

    # ------------------------------------------------------------ statements

    def header(self) -> tuple[tuple[Value, ...], tuple[str, ...]]:
        self.take("graph")
        self.take("(")
        inputs = self.items(self.typed_value, ")")
        self.take("->")
        self.take("(")
        outputs = self.items(self.value_name, ")")
        self.end()
        return tuple(inputs), tuple(outputs)

    def data(self) -> tuple[str, ArrayLiteral]:
        self.take("#")
        name = self.take()
        self.take("=")
        dtype, shape = self.fixed_type()
        try:
            array = np.frombuffer(base64.b64decode(self.word(), validate=True), self.dtype(dtype)).reshape(shape)
        except ValueError as error:
            self.fail(f"the data of #{name} is not {_type(dtype, shape)}: {error}")
        self.end()
        return name, ArrayLiteral(array)

    def node(self) -> Node:
        names = [self.value_name()]
        while self.accept(","):
            names.append(self.value_name())
        self.take("=")
        op = self.word()
        self.take("(")
        inputs = self.items(self.operand, ")")
        attrs, marks = self.attrs_and_marks() if self.next() == "{" else ({}, NO_MARKS)
        self.take(":")
        types = [self.type()]
        while self.accept(","):
            types.append(self.type())
        if len(types) != len(names):
            self.fail(f"{len(names)} results, but {len(types)} types")
        outputs = tuple(Value(name, shape, dtype) for name, (dtype, shape) in zip(names, types, strict=True))
        path = origin = ""
        if self.accept(";"):
            path = self.word() if self.next() != "<-" else ""
            origin = self.word() if self.accept("<-") else ""
        self.end()
        return Node(op, tuple(inputs), outputs, attrs, origin, path, marks)

    def end(self) -> None:
        if self.tokens:
            self.fail(f"expected the end of the line, found '{self.next()}'")

    # ------------------------------------------------------------ parts

    def value_name(self) -> str:
        self.take("%")
        return self.word()

    def typed_value(self) -> Value:
        name = self.value_name()
        self.take(":")
        dtype, shape = self.type()
        return Value(name, shape, dtype)

    def type(self) -> tuple[str, Shape]:
        dtype = self.word()
        self.take("[")
        return dtype, tuple(self.items(self.dim, "]"))

    def dim(self) -> Dim:
        bare = self.next()[:1] not in "'\""
        word = self.word()
        return int(word) if bare and _is_int(word) else word

    def fixed_type(self) -> tuple[str, tuple[int, ...]]:
        dtype, shape = self.type()
        if not all(isinstance(n, int) for n in shape):
            self.fail("the sizes of a tensor are numbers")
        return dtype, tuple(int(n) for n in shape)

    def dtype(self, name: str) -> np.dtype[Any]:
        try:
            return numpy_dtype(name)
        except TypeError:
            self.fail(f"'{name}' is not a dtype")

    def operand(self) -> Operand:
        if self.accept("_"):
            return None
        return self.value_name() if self.next() == "%" else self.tensor()

    def tensor(self) -> Tensor:
        if self.accept("@"):
            return self.leaf()
        if self.accept("#"):
            name = self.take()
            self.take(":")
            self.fixed_type()
            if name not in self.arrays:
                self.fail(f"the array #{name} is not listed (it was printed without data)")
            return self.arrays[name]
        if len(self.tokens) > 1 and self.tokens[-2] == "(":
            op = self.word()
            self.take("(")
            inputs = self.items(self.tensor, ")")
            attrs = self.attrs()
            self.take(":")
            dtype, shape = self.fixed_type()
            return Apply(op, tuple(inputs), attrs, shape, dtype)
        return ArrayLiteral(self.array())

    def leaf(self) -> Leaf:
        name = self.word()
        self.take(":")
        dtype, shape = self.fixed_type()
        known = self.leaves.get(name)
        if known is None:
            return Leaf(name, shape, dtype, _absent(name))
        if (known.dtype, known.shape) != (dtype, shape):
            self.fail(f"@{name} is {_type(known.dtype, known.shape)}, not {_type(dtype, shape)}")
        return known

    def array(self) -> Array:
        number = self.number_or_list()
        dtype, shape = self.fixed_type() if self.accept(":") else ("float64", None)
        try:
            exact = self.dtype(dtype)
            array = np.asarray(number, exact if exact.kind in "biu" else np.float64).astype(exact)
            return array if shape is None else array.reshape(shape)
        except (ValueError, TypeError) as error:
            self.fail(f"not an array: {error}")

    def number_or_list(self) -> Any:
        return self.items(self.number_or_list, "]") if self.accept("[") else self.constant()

    def constant(self) -> Any:
        word = self.word()
        if word in CONSTANTS:
            return CONSTANTS[word]
        try:
            return int(word) if _is_int(word) else float(word)
        except ValueError:
            self.fail(f"'{word}' is not a number")

    def attrs(self) -> dict[str, Any]:
        self.take("{")
        return dict(self.items(self.attr, "}"))

    def attrs_and_marks(self) -> tuple[dict[str, Any], Marks]:
        self.take("{")
        attrs: dict[str, Any] = {}
        while self.next() not in ("}", "|"):
            attrs.update([self.attr()])
            if self.next() not in ("}", "|"):
                self.take(",")
        if self.accept("}"):
            return attrs, NO_MARKS
        self.take("|")
        noted = dict(self.items(self.attr, "}"))
        if unknown := [key for key in noted if key not in MARKS]:
            self.fail(f"'{unknown[0]}' is not a mark")
        if "recurrence" in noted:
            noted["recurrence"] = Recurrence(*noted["recurrence"])
        return attrs, Marks(**noted)

    def attr(self) -> tuple[str, Any]:
        key = self.word()
        self.take("=")
        return key, self.attr_value()

    def attr_value(self) -> Any:
        token = self.next()
        if token == "!":
            self.fail("this attribute was printed for people and cannot be read back")
        if self.accept("("):
            return tuple(self.items(self.attr_value, ")"))
        if self.accept("["):
            return self.items(self.attr_value, "]")
        if self.accept("{"):
            return tuple(k for part in self.items(self.positions, "}") for k in part)
        return self.word() if token[:1] in "'\"" else self.constant()

    def positions(self) -> Sequence[int]:
        start = self.position()
        return range(start, self.position()) if self.accept(":") else (start,)

    def position(self) -> int:
        word = self.word()
        if not _is_int(word):
            self.fail(f"'{word}' is not a position")
        return int(word)


def _absent(name: str) -> Callable[[], Array]:
    def load() -> Array:
        raise TextError(f"@{name} has no data, the text only names it", fix="give parse the parameters: leaves=...")

    return load
