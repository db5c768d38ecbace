"""Changed weights are made one at a time, when they are written: memory does not grow with the model."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import cmrc
from cmrc.ir import tensors
from cmrc.ir.graph import Array, Tensor

WIDTH, INNER, LAYERS = 128, 2048, 12
LARGEST = 4 * WIDTH * INNER  # bytes of a weight that changes
SMALL = 1 << 20  # bytes for everything else


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FFNs one after the other, with their weights in a file beside the model."""
    random = np.random.default_rng(0)
    nodes, weights, x = [], [], "x"
    for i in range(LAYERS):
        for part, shape in (("up", (WIDTH, INNER)), ("down", (INNER, WIDTH))):
            weight = random.standard_normal(shape, dtype=np.float32) * np.float32(shape[0] ** -0.5)
            weights.append(numpy_helper.from_array(weight, f"{part}{i}.weight"))
        nodes.append(helper.make_node("MatMul", [x, f"up{i}.weight"], [f"up{i}"]))
        nodes.append(helper.make_node("Tanh", [f"up{i}"], [f"act{i}"]))
        nodes.append(helper.make_node("MatMul", [f"act{i}", f"down{i}.weight"], [f"down{i}"]))
        x = f"down{i}"
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", WIDTH]) for name in ("x", x)]
    graph = helper.make_graph(nodes, "stack", ends[:1], ends[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = tmp_path_factory.mktemp("stack") / "stack.onnx"
    onnx.save(model, path, save_as_external_data=True, location="stack.onnx.data")
    return path


def lowered(path: Path) -> cmrc.Lowered:
    program = cmrc.trace(path)
    plan = cmrc.Plan(program).do("act*", units=range(0, INNER, 4), constant=0.25)
    return cmrc.lower(program, plan)


def test_from_file_to_file_takes_no_more_than_twice_the_largest_weight(stack: Path, tmp_path: Path) -> None:
    lowered(stack).save(tmp_path / "warm.onnx")  # what is imported and cached at the first time
    gc.collect()
    tracemalloc.start()
    try:
        lowered(stack).save(tmp_path / "small.onnx")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 2 * LAYERS * LARGEST > 7 * (2 * LARGEST + SMALL)  # all that changes would not fit
    assert peak <= 2 * LARGEST + SMALL


def test_a_changed_weight_is_made_when_it_is_written_and_then_let_go(
    stack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: set[int] = set()
    most: list[int] = []

    def watched(tensor: Tensor) -> Array:
        array = np.array(materialise(tensor))
        if array.nbytes > SMALL // 2:
            alive.add(id(array))
            weakref.finalize(array, alive.discard, id(array))
            most.append(len(alive))
        return array

    materialise = tensors.materialise
    monkeypatch.setattr(tensors, "materialise", watched)
    result = lowered(stack)
    assert not most
    result.save(tmp_path / "small.onnx")
    assert most == [1] * (2 * LAYERS)


def test_weights_that_were_read_are_not_kept_mapped(stack: Path) -> None:
    program = cmrc.trace(stack)
    assert program.fingerprint.weights
    leaf = program.graph.leaves()["up0.weight"]
    reference = weakref.ref(leaf.load())
    gc.collect()
    assert reference() is None
