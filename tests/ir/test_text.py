"""The text form: what it looks like, that it reads back exactly, and every complaint of the parser."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cmrc.errors import TextError
from cmrc.ir.graph import Apply, ArrayLiteral, Graph, Leaf, Marks, Node, Operand, Value, literal
from cmrc.ir.text import parse, to_text


def leaf(name: str, *shape: int, dtype: str = "float32") -> Leaf:
    return Leaf(name, shape, dtype, lambda: np.ones(shape, dtype))


def one(operand: Operand, **attrs: Any) -> Graph:
    """A graph of one node that holds an operand and attributes."""
    node = Node("opaque", ("x", operand), (Value("y", ("N", 3)),), attrs, origin="host_y")
    return Graph((Value("x", ("N", 3)),), (node,), ("y",))


def round_trip(graph: Graph) -> Graph:
    again = parse(to_text(graph), leaves=graph.leaves())
    assert again == graph
    return again


def test_reads_like_the_docstring() -> None:
    w, b = leaf("fc1.weight", 8, 4), leaf("fc1.bias", 8)
    keep = (0, 1, 2, 4, 5, 6)
    second = Apply("select", (leaf("fc2.weight", 3, 8),), {"axis": 1, "keep": keep}, (3, 6), "float32")
    nodes = (
        Node("linear", ("x", w, b), (Value("h", ("N", 8)),), {"axis": 1, "w_in": 1, "w_out": 0}, "linear_3", "fc1"),
        Node("pointwise", ("h",), (Value("a", ("N", 8)),), {"fn": "relu"}, path="act"),
        Node(
            "do",
            ("a", literal([0.1, 0.4])),
            (Value("d", ("N", 8)),),
            {"axis": 1, "units": (3, 7)},
            marks=Marks(sources=(0,)),
        ),
        Node("select", ("d",), (Value("s", ("N", 6)),), {"axis": 1, "keep": keep}),
        Node("linear", ("s", second, None), (Value("y", ("N", 3)),), {"axis": 1, "w_in": 1, "w_out": 0}, "linear_4"),
    )
    graph = Graph((Value("x", ("N", 4)),), nodes, ("y",))
    assert (
        to_text(graph)
        == """\
graph(%x: float32[N,4]) -> (%y)
%h = linear(%x, @fc1.weight: float32[8,4], @fc1.bias: float32[8]) {axis=1, w_in=1, w_out=0} : float32[N,8]   ; fc1 <- linear_3
%a = pointwise(%h) {fn='relu'} : float32[N,8]   ; act
%d = do(%a, [0.1, 0.4]) {axis=1, units={3,7} | sources=(0,)} : float32[N,8]
%s = select(%d) {axis=1, keep={0:3,4:7}} : float32[N,6]
%y = linear(%s, select(@fc2.weight: float32[3,8]){axis=1, keep={0:3,4:7}}: float32[3,6], _) \
{axis=1, w_in=1, w_out=0} : float32[N,3]   ; <- linear_4
"""
    )
    again = round_trip(graph)
    assert again.leaves()["fc1.weight"].load is w.load


def test_comments_and_blank_lines_are_skipped() -> None:
    graph = parse("; a graph\n\n  graph(%x: float32[2]) -> (%x)\n\n; the end\n")
    assert graph == Graph((Value("x", (2,)),), (), ("x",))


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ((), "{}"),
        ((5,), "{5}"),
        ((0, 1), "{0,1}"),
        ((0, 1, 2), "{0:3}"),
        ((7, 3, 4, 5, 5), "{7,3:6,5}"),
        ((2, 1, 0), "{2,1,0}"),
        (tuple(range(100)), "{0:100}"),
    ],
)
def test_index_tuples(index: tuple[int, ...], text: str) -> None:
    graph = one(None, keep=index)
    assert f"{{keep={text}}}" in to_text(graph)
    round_trip(graph)


def test_columns_of_each_group() -> None:
    graph = one(None, keep=((0, 1, 2), (1, 2, 4)))
    assert "{keep=({0:3}, {1,2,4})}" in to_text(graph)
    round_trip(graph)


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.asarray(0.5), "0.5"),
        (np.asarray([[1.0, -0.1], [float("inf"), float("nan")]]), "[[1.0, -0.1], [inf, nan]]"),
        (np.asarray([0.1, 1e-300], np.float32), "[0.10000000149011612, 0.0]: float32[2]"),
        (np.asarray([1, 2**62]), "[1, 4611686018427387904]: int64[2]"),
        (np.asarray(True), "True: bool[]"),
        (np.asarray([1.5, 3.0], ml_dtypes.bfloat16), "[1.5, 3.0]: bfloat16[2]"),
        (np.zeros((0, 3)), "[]: float64[0,3]"),
        (np.zeros((2, 0)), "[[], []]: float64[2,0]"),
        (np.asarray(1 / 3), "0.3333333333333333"),
    ],
)
def test_short_arrays_stand_in_place(array: np.ndarray, text: str) -> None:
    graph = one(ArrayLiteral(array))
    assert f"(%x, {text})" in to_text(graph)
    again = round_trip(graph).nodes[0].inputs[1]
    assert isinstance(again, ArrayLiteral)
    assert again.array.dtype == array.dtype


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "int64", "complex128"])
def test_long_arrays_are_listed_once(dtype: str) -> None:
    array = np.random.default_rng(0).normal(0.0, 9.0, (17, 2)).astype(getattr(ml_dtypes, dtype, None) or dtype)
    nodes = tuple(Node("opaque", (ArrayLiteral(array),), (Value(name, (17, 2)),)) for name in ("a", "b"))
    graph = Graph((), nodes, ("a",))
    text = to_text(graph)
    assert text.count(f"#0: {dtype}[17,2]") == 2
    assert text.count("#0 =") == 1
    round_trip(graph)
    with pytest.raises(TextError, match="the array #0 is not listed"):
        parse(to_text(graph, data=False))


@pytest.mark.parametrize(
    "attrs",
    [
        {"pad": ((0, 1), (1, 0)), "stride": (1,), "none": None, "flag": True, "list": [1, 2.5], "empty": ()},
        {"pad": "same_upper", "why": 'it\'s "quoted"\n', "low": float("-inf"), "n": np.int64(3), "f": np.float32(0.5)},
        {"align": (None, (1,), (0, 2)), "min": -1e-7, "big": 10**20},
        {"nested": ((1, (2, "x")), [])},
    ],
)
def test_attributes(attrs: dict[str, Any]) -> None:
    round_trip(one(None, **attrs))


def test_attributes_that_are_no_data_print_but_do_not_read_back() -> None:
    text = to_text(one(None, odd={"a": 1}))
    assert """{odd=!"{'a': 1}"}""" in text
    with pytest.raises(TextError, match="printed for people"):
        parse(text)


NAMES = st.text(min_size=0, max_size=8) | st.sampled_from(
    ["onnx::Conv_12", "/layer1/Conv_output_0", "12", "a b", "->", "<-", "_", "%x", "x;y", "a::", "'", '"', "\\", "-1", "é", "#0", "\u2028"]
)  # fmt: skip


@given(NAMES, NAMES, NAMES, NAMES, NAMES)
def test_any_name(value: str, parameter: str, path: str, origin: str, dim: str) -> None:
    node = Node("opaque", (value, leaf(parameter, 2)), (Value(f"{value}!", (dim, 2)),), {}, origin, path)
    round_trip(Graph((Value(value, (dim, 2)),), (node,), (value,)))


def test_several_results() -> None:
    node = Node("opaque", ("x",), (Value("a", (2,)), Value("b", (), "int64")), marks=Marks(host_op="topk"))
    graph = Graph((Value("x", (2,)),), (node,), ("a", "b"))
    assert "%a, %b = opaque(%x) {| host_op='topk'} : float32[2], int64[]\n" in to_text(graph)
    round_trip(graph)


def test_parameters_without_data_say_so_when_they_are_loaded() -> None:
    graph = parse(to_text(one(leaf("fc.weight", 2, 3))))
    weight = graph.leaves()["fc.weight"]
    assert (weight.shape, weight.dtype) == ((2, 3), "float32")
    with pytest.raises(TextError) as error:
        weight.load()
    assert str(error.value) == (
        "ir-text: @fc.weight has no data, the text only names it\n  fix: give parse the parameters: leaves=..."
    )


HEAD = "graph(%x: float32[N,3]) -> (%y)\n"
COMPLAINTS = [
    ("", "there is no graph here", "line 1"),
    ("%y = f(%x) : float32[3]", "expected 'graph', found '%'", "line 1: %y = f(%x) : float32[3]"),
    ("graph(%x: float32[N,3] -> (%y)", "expected ',', found '->'", "line 1: graph(%x: float32[N,3] -> (%y)"),
    ("graph() -> (%y) %z", "expected the end of the line, found '%'", "line 1: graph() -> (%y) %z"),
    (HEAD + "%y = f(%x", "expected ',', found the end of the line", "line 2: %y = f(%x"),
    (HEAD + "%y = f(%x) {a=1} float32[3]", "expected ':', found 'float32'", "line 2: %y = f(%x) {a=1} float32[3]"),
    (HEAD + "%y, %z = f(%x) : float32[3]", "2 results, but 1 types", "line 2: %y, %z = f(%x) : float32[3]"),
    (HEAD + "%y = f(%'x) : float32[3]", "a quote is not closed", "line 2: %y = f(%'x) : float32[3]"),
    (HEAD + "%y = f(%(x)) : float32[3]", "expected a name, found '('", "line 2: %y = f(%(x)) : float32[3]"),
    (HEAD + "%y = f(abc) : float32[3]", "'abc' is not a number", "line 2: %y = f(abc) : float32[3]"),
    (HEAD + "%y = f([1.0, [2.0]]) : float32[3]", "not an array: ", "line 2: %y = f([1.0, [2.0]]) : float32[3]"),
    (HEAD + "%y = f([1.0]: float99[1]) : float32[3]", "'float99' is not a dtype", "line 2: %y = f([1.0]: float99[1]) : float32[3]"),
    (HEAD + "%y = f([1.0]: float32[2]) : float32[3]", "not an array: ", "line 2: %y = f([1.0]: float32[2]) : float32[3]"),
    (HEAD + "%y = f(@w: float32[N]) : float32[3]", "the sizes of a tensor are numbers", "line 2: %y = f(@w: float32[N]) : float32[3]"),
    (HEAD + "%y = f(@w: float32[3]) : float32[3]", "@w is float32[2], not float32[3]", "line 2: %y = f(@w: float32[3]) : float32[3]"),
    (HEAD + "%y = f(%x) {keep={a}} : float32[3]", "'a' is not a position", "line 2: %y = f(%x) {keep={a}} : float32[3]"),
    (HEAD + "#0 = float64[2] 'AAAA'", "the data of #0 is not float64[2]: ", "line 2: #0 = float64[2] 'AAAA'"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "reason", "at"), COMPLAINTS)
def test_complaints_name_the_line(text: str, reason: str, at: str) -> None:
    with pytest.raises(TextError) as error:
        parse(text, leaves={"w": leaf("w", 2)})
    assert error.value.reason.startswith(reason)
    assert error.value.at == at
    if not reason.endswith(" "):
        assert error.value.reason == reason
        assert str(error.value) == f"ir-text: {reason}\n  at {at}"
