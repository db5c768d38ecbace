"""Running a graph in numpy: sizes known only at run time, checks of every shape, and what it cannot run."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import Net

from cmrc.errors import CmrcError, GraphError
from cmrc.ir.evaluate import evaluate
from cmrc.ir.graph import Graph, Marks, Node, Value


def test_sizes_of_run_time_come_from_the_inputs_and_from_what_was_computed() -> None:
    net = Net()
    x = net.input("N", 2, "H", "W")
    y = net.conv(x, 3, (2, 2))  # its size is a symbol of its own
    flat = net.reshape(y, "N", 3, f"{net.shape(y)[2]}*{net.shape(y)[3]}")
    net.output(
        net.expand(net.reshape(flat, 1, "N", "3*" + str(net.shape(flat)[2])), 2, "N", "3*" + str(net.shape(flat)[2]))
    )
    values = evaluate(net.graph(), {x: np.zeros((2, 2, 4, 5), np.float32)})
    assert values[flat].shape == (2, 3, 12)
    assert values[net.outputs[0]].shape == (2, 2, 36)
    assert values[x].dtype == np.float64


def test_a_size_that_nothing_tells_is_worked_out() -> None:
    net = Net()
    x = net.input("N", 6)
    net.output(net.reshape(x, "unknown", 3), net.expand(net.reshape(x, "other", 1, 2), "other", 4, 2))
    values = evaluate(net.graph(), {x: np.zeros((2, 6))})
    assert [values[name].shape for name in net.outputs] == [(4, 3), (6, 4, 2)]


def test_integers_stay_integers() -> None:
    net = Net()
    ids = net.input("N", name="ids", dtype="int64")
    net.output(net.embedding(ids, 4, 2))
    values = evaluate(net.graph(), {ids: np.asarray([3, 0])})
    assert values[ids].dtype == np.int64
    assert values[net.outputs[0]].shape == (2, 2)


def test_a_result_of_another_shape_is_a_fault_of_the_graph() -> None:
    node = Node("pointwise", ("x",), (Value("y", ("N", 4)),), {"fn": "relu"}, path="act")
    graph = Graph((Value("x", ("N", 3)),), (node,), ("y",))
    with pytest.raises(GraphError) as error:
        evaluate(graph, {"x": np.zeros((2, 3))})
    assert error.value.reason == "came out with shape (2, 3), declared ('N', 4) where {'N': 2}"
    assert (error.value.node, error.value.op) == ("act", "relu")
    with pytest.raises(GraphError, match=r"%x \(input\): came out with shape \(2,\)"):
        evaluate(graph, {"x": np.zeros(2)})


def test_what_only_a_host_can_run() -> None:
    node = Node("opaque", ("x",), (Value("y", (2,)),), origin="sort_1", marks=Marks(host_op="sort"))
    with pytest.raises(CmrcError) as error:
        evaluate(Graph((Value("x", (2,)),), (node,), ("y",)), {"x": np.zeros(2)})
    assert str(error.value) == "error: %sort_1 (sort): it has no meaning of its own: only its host can run it"


@pytest.mark.parametrize(
    ("before", "after", "rounds"),
    [("float32", "float32", False), ("float16", "float32", False), ("float32", "float16", True), ("float16", "bfloat16", True)],
)  # fmt: skip
def test_a_cast_rounds_only_to_a_type_that_holds_less(before: str, after: str, rounds: bool) -> None:
    node = Node("pointwise", ("x",), (Value("y", (1,), after),), {"fn": "cast", "dtype": after})
    third = np.asarray([1 / 3])
    values = evaluate(Graph((Value("x", (1,), before),), (node,), ("y",)), {"x": third})
    assert (values["y"] != third).any() == rounds
