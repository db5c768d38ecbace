"""Gradients of an ONNX file: those of the torch module that it was exported from; what stops them is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from nets import Convs, Net, Tokens, data, exported, seeded
from onnx import TensorProto, helper, numpy_helper
from tolerances import ACROSS_F32, distance
from torch import nn

import cmrc
from cmrc.errors import HostError, StatsError
from cmrc.hosts.onnx import gradients

NETS = {
    "mlp": (lambda: Net((5, 7, 6, 6, 4), nn.GELU), (5,), "acts.0"),
    "convs": (Convs, (2, 4, 4), "act1"),
    "tokens": (Tokens, (3, 6), "act"),
}


def both(name: str) -> tuple[cmrc.Program, cmrc.Program, np.ndarray, np.ndarray, str]:
    make, shape, site = NETS[name]
    model = seeded(make(), 3).float()  # onnxruntime has few ops in float64
    x, y = np.random.default_rng(0).normal(size=(9, *shape)).astype(np.float32), data(9, 5)[1]
    batch = torch.export.Dim("batch")
    program = cmrc.trace(model, (torch.from_numpy(x),), dynamic_shapes=({0: batch},))
    return program, exported(program), x, y, site


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("loss", ["cross-entropy", "kl", "logit"])
def test_curvature_is_that_of_the_module(name: str, loss: str) -> None:
    program, onnx_program, x, y, site = both(name)
    for curvature in ("auto", "gauss-newton", "monte-carlo"):
        ours = cmrc.calibrate(onnx_program, [(x, y)], sites=site, need="curvature", loss=loss, curvature=curvature)
        theirs = cmrc.calibrate(program, [(x, y)], sites=site, need="curvature", loss=loss, curvature=curvature)
        for key, expected in next(iter(theirs.sites.values())).arrays.items():
            computed = next(iter(ours.sites.values())).arrays[key]
            assert distance(computed, expected) < ACROSS_F32, (curvature, key)


@pytest.mark.parametrize("preset", ["joint-task", "taylor"])
def test_objectives_that_need_gradients_work_on_files(preset: str) -> None:
    program, onnx_program, x, y, site = both("mlp")
    plans = [cmrc.plan(each, data=[(x, y)], preset=preset, sites=[site], keep=0.5) for each in (program, onnx_program)]
    assert plans[0].entries[0].units == plans[1].entries[0].units
    assert len(plans[0].entries[0].units) == 3
    assert distance(plans[1].entries[0].constant, plans[0].entries[0].constant) < ACROSS_F32


def opaque_model() -> onnx.ModelProto:
    """fc, relu, CumSum (which only onnxruntime runs), fc."""
    rng = np.random.default_rng(0)
    arrays = {"w1": rng.normal(size=(5, 6)), "w2": rng.normal(size=(6, 4)), "axis": np.array(1)}
    initializers = [numpy_helper.from_array(a.astype(np.float32 if a.ndim else np.int64), n) for n, a in arrays.items()]
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h"]),
        helper.make_node("Relu", ["h"], ["a"]),
        helper.make_node("Det", ["square"], ["factor"]),
        helper.make_node("CumSum", ["a", "axis"], ["c"]),
        helper.make_node("Mul", ["c", "factor"], ["scaled"]),
        helper.make_node("MatMul", ["scaled", "w2"], ["y"]),
    ]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 5]),
        helper.make_tensor_value_info("square", TensorProto.FLOAT, [2, 2]),
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def test_an_op_that_only_onnxruntime_knows_runs_and_stops_gradients_with_a_word() -> None:
    program = cmrc.trace(opaque_model())
    rng = np.random.default_rng(1)
    batch = {"x": rng.normal(size=(7, 5)).astype(np.float32), "square": np.eye(2, dtype=np.float32) * 2}
    labels = rng.integers(0, 4, 7)
    # Behind it gradients are those of the last product, although the ops before it run elsewhere.
    site = next(s for s in program.sites(folds=False) if s.value == "scaled")
    stats = cmrc.calibrate(
        program, [{**batch, "labels": labels}], sites=[site.name], need="curvature", curvature="full"
    )
    exact = cmrc.calibrate(program, [{**batch, "labels": labels}], sites=[site.name], need="curvature")
    assert distance(stats[site.name].arrays["g"], exact[site.name].arrays["g"]) < 1e-5
    with pytest.raises(StatsError, match=r"gradients stop here: .*onnxruntime runs it") as error:
        cmrc.calibrate(program, [{**batch, "labels": labels}], sites=["a"], need="curvature")
    assert "cumsum" in str(error.value)


def test_without_torch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, onnx_program, x, y, site = both("mlp")
    monkeypatch.setattr(gradients, "find_spec", lambda name: None)
    with pytest.raises(HostError, match="which is not installed") as error:
        cmrc.calibrate(onnx_program, [(x, y)], sites=site, need="curvature")
    assert "pip install 'cmrc[torch]'" in str(error.value)


def test_a_network_that_computes_something_else_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    from cmrc.hosts.autograd.meanings import MEANINGS

    _, onnx_program, x, y, site = both("mlp")
    right = MEANINGS["linear"]
    monkeypatch.setitem(MEANINGS, "linear", lambda *operands: right(*operands) * 1.01)
    with pytest.raises(HostError, match="compute different outputs"):
        cmrc.calibrate(onnx_program, [(x, y)], sites=site, need="curvature")


def test_parameters_are_written_back_in_their_own_type() -> None:
    program = cmrc.trace(opaque_model())
    w = np.zeros((6, 4))
    again = program.host.with_parameters({"w2": w})
    batch = {"x": np.ones((2, 5), np.float32), "square": np.eye(2, dtype=np.float32)}
    assert not again.run(batch)[0].any()
    assert program.host.run(batch)[0].any()
    assert again.graph.leaves()["w2"].dtype == "float32"
