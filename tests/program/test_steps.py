"""Quantised models, where the last bit may decide a whole step: what `check` allows there, and what it still sees."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import onnx_ir
import pytest
from hosts.onnx.lowering import model, random
from hosts.onnx.quantisation import quantised
from onnx import numpy_helper

import cmrc
from cmrc.hosts.onnx.host import OnnxHost
from cmrc.ir.graph import Tensor, literal
from cmrc.ir.tensors import constant
from cmrc.program.check import FOLDED_IN_STEPS, Check, check_batches, folded_apart
from cmrc.program.steps import rounded_anew

X = random(8, 3, 16, 16, seed=50)
NODES = "h = Conv(x, w1, b1)\na = Relu(h)\ng = Conv<pads=[1,1,1,1]>(a, w2)\nr = Relu(g)\ny = Conv(r, w3)"


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> cmrc.Lowered:
    """Constants under zero padding: the second convolution becomes one of floats with a plane behind it."""
    arrays = {
        "w1": random(8, 3, 3, 3, scale=0.3), "b1": random(8), "w2": random(12, 8, 3, 3, seed=2, scale=0.2),
        "w3": random(4, 12, 1, 1, seed=3),
    }  # fmt: skip
    plain = model(NODES, {"x": ("N", 3, 16, 16)}, "y", **arrays)
    batches = [{"x": random(4, 3, 16, 16, seed=i)} for i in range(3)]
    program = cmrc.trace(quantised(plain, batches, tmp_path_factory.mktemp("steps")))
    return cmrc.lower(program, cmrc.Plan(program).do("a", units=[0, 3], constant=[0.3, 0.7]))


def with_moved_planes(lowered: cmrc.Lowered, by: float) -> OnnxHost:
    """The lowered file with all its float tensors of more than one number (the plane, or what it is made of) off by a factor."""
    proto = onnx.ModelProto()
    proto.CopyFrom(onnx_ir.to_proto(lowered.host.model))  # type: ignore[attr-defined]
    moved = 0
    for tensor in proto.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT and np.prod(tensor.dims) > 16:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(by), tensor.name))
            moved += 1
    assert moved
    return OnnxHost.from_model(proto)


def checked(lowered: cmrc.Lowered, host: OnnxHost) -> tuple[Check, Check]:
    """Without and with roundings that decide anew."""
    hosts = (lowered.program.host, lowered.clamped, host)
    anew = lambda: rounded_anew(lowered.program, lowered.plan.entries)  # noqa: E731
    return check_batches(*hosts, [(X,)]), check_batches(*hosts, [(X,)], anew=anew)


def test_a_fold_is_compared_in_float64_between_its_roundings(lowered: cmrc.Lowered) -> None:
    check = lowered.check((X,))
    assert check.holds
    assert check.folded is not None
    assert check.folded < 1e-14


def test_a_wrong_fold_shows_before_a_rounding(lowered: cmrc.Lowered) -> None:
    """A plane that is wrong by a hundred-thousandth moves no step of these inputs."""
    nodes = list(lowered.graph.nodes)
    i = next(i for i, node in enumerate(nodes) if node.name == "r.border")
    plane = nodes[i].inputs[1]
    assert isinstance(plane, Tensor)
    wrong = [literal(constant(plane) * (1 + 1e-5)) if o is plane else o for o in nodes[i].inputs]
    graph = replace(lowered.graph, nodes=(*nodes[:i], nodes[i].with_inputs(wrong), *nodes[i + 1 :]))
    apart = folded_apart(lowered.program, lowered.plan.entries, graph, lowered.clamped.bind((X,)))
    assert apart is not None
    assert apart > FOLDED_IN_STEPS


def test_steps_that_rounding_decides_are_allowed(lowered: cmrc.Lowered) -> None:
    strict, check = checked(lowered, with_moved_planes(lowered, 1 + 2.0**-18))
    assert strict.error > 0  # some values lay between two steps
    assert not strict.holds
    assert check.holds
    assert check.error == strict.error


def test_steps_that_it_does_not_decide_are_not(lowered: cmrc.Lowered) -> None:
    _, check = checked(lowered, with_moved_planes(lowered, 1.5))
    assert not check.holds
