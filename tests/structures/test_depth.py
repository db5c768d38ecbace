"""Tracing and lowering grow linearly with depth: counted in calls, which no busy machine can change."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import cmrc

WIDTH, INNER = 4, 6
DEPTHS = (8, 32)
LINEAR = 1.05  # of the growth in depth, beyond which something is done for each pair of layers


def residual_onnx(depth: int) -> onnx.ModelProto:
    random = np.random.default_rng(0)
    nodes, weights, x = [], [], "x"
    for i in range(depth):
        for part, shape in (("up", (WIDTH, INNER)), ("down", (INNER, WIDTH))):
            weights.append(numpy_helper.from_array(random.normal(size=shape).astype(np.float32), f"{part}{i}.weight"))
        nodes.append(helper.make_node("MatMul", [x, f"up{i}.weight"], [f"up{i}"]))
        nodes.append(helper.make_node("Relu", [f"up{i}"], [f"act{i}"]))
        nodes.append(helper.make_node("MatMul", [f"act{i}", f"down{i}.weight"], [f"down{i}"]))
        nodes.append(helper.make_node("Add", [x, f"down{i}"], [f"sum{i}"]))
        x = f"sum{i}"
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", WIDTH]) for name in ("x", x)]
    graph = helper.make_graph(nodes, "deep", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


class Residual(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, INNER) for _ in range(depth))
        self.act = nn.ModuleList(nn.ReLU() for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(INNER, WIDTH) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, act, down in zip(self.up, self.act, self.down, strict=True):
            x = x + down(act(up(x)))
        return x


def calls(step: Callable[[], object]) -> int:
    """How many functions of Python and of C a step calls."""
    count = 0

    def seen(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        step()
    finally:
        sys.setprofile(before)
    return count


def grows(steps: Callable[[int], dict[str, Callable[[], object]]]) -> None:
    graphs = [steps(depth) for depth in DEPTHS]
    for name in graphs[0]:
        graphs[0][name]()  # what is imported and cached at the first time
        few, many = (calls(each[name]) for each in graphs)
        assert many / few <= LINEAR * DEPTHS[1] / DEPTHS[0], name


def test_the_onnx_host_is_linear_in_depth(tmp_path: Path) -> None:
    def steps(depth: int) -> dict[str, Callable[[], object]]:
        model = residual_onnx(depth)
        program = cmrc.trace(model)
        assert program.fingerprint.weights  # made once
        plan = cmrc.Plan(program).do("act*", units=[1, 2], constant=0.5)
        lowered = cmrc.lower(program, plan)
        return {
            "trace": lambda: cmrc.trace(model).graph,
            "plan": lambda: cmrc.Plan(program).do("act*", units=[1, 2], constant=0.5),
            "lower": lambda: cmrc.lower(program, plan),
            "check": lambda: lowered.program.clamped(plan),
            "save": lambda: lowered.save(tmp_path / "deep.onnx"),
        }

    grows(steps)


@pytest.mark.parametrize("affine", [False, True], ids=["constants", "affine"])
def test_the_torch_host_is_linear_in_depth(affine: bool) -> None:
    def steps(depth: int) -> dict[str, Callable[[], object]]:
        exported = torch.export.export(Residual(depth).eval(), (torch.randn(2, WIDTH),))
        program = cmrc.trace(exported)
        assert program.fingerprint.weights  # made once
        plan = cmrc.Plan(program)
        for i in range(depth):
            if affine:
                plan.do(f"act.{i}", units=[1, 2], affine=cmrc.Affine([0, 3], np.ones((2, 2)), np.ones(2)))
            else:
                plan.do(f"act.{i}", units=[1, 2], constant=0.5)
        return {
            "read": lambda: cmrc.trace(exported).graph,
            "lower": lambda: cmrc.lower(program, plan),
            "module": lambda: cmrc.lower(program, plan).module,
        }

    grows(steps)
