"""Quantised models: sites that nobody named, and constants where only 0 stays among the integers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hosts.onnx.lowering import model, random
from hosts.onnx.quantisation import quantised

import cmrc
from cmrc.planning.ranking import only_zero_is_free
from cmrc.statistics.calibrate import choose

NODES = """h = Conv(x, w1, b1)
a = Relu(h)
p = MaxPool<kernel_shape=[2,2], strides=[2,2]>(a)
g = Conv<pads=[1,1,1,1]>(p, w2)
r = Relu(g)
q = GlobalAveragePool(r)
f = Flatten(q)
y = Gemm(f, w3, b3)"""
BATCHES = [{"x": random(8, 3, 10, 10, seed=i)} for i in range(3)]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> cmrc.Program:
    arrays = {
        "w1": random(16, 3, 3, 3, scale=0.3), "b1": random(16), "w2": random(16, 16, 3, 3, seed=2, scale=0.2),
        "w3": random(16, 5, seed=4), "b3": random(5, seed=5),
    }  # fmt: skip
    plain: onnx.ModelProto = model(NODES, {"x": ("N", 3, 10, 10)}, "y", **arrays)
    return cmrc.trace(quantised(plain, BATCHES, tmp_path_factory.mktemp("borders")))


def test_a_value_that_is_only_rounded_on_the_way_counts_once(program: cmrc.Program) -> None:
    assert [site.name for site in choose(program, "*")] == ["p", "f"]


def test_only_in_front_of_a_padded_convolution_of_integers(program: cmrc.Program) -> None:
    assert [only_zero_is_free(program, program.find(name)[0]) for name in ("a", "p", "r", "q")] == [
        True,
        True,
        False,
        False,
    ]


def test_a_default_plan_takes_what_is_free(program: cmrc.Program) -> None:
    plan = cmrc.plan(program, data=BATCHES, keep=0.5)
    constants = {entry.site: entry.constant for entry in plan.entries}
    assert not np.any(constants["p"])
    assert np.any(constants["f"])
    folded = [str(action) for action in cmrc.lower(program, plan).result.actions]
    assert not any("plane" in text or "buffer" in text for text in folded)


def test_who_asks_for_means_gets_means(program: cmrc.Program) -> None:
    plan = cmrc.plan(program, data=BATCHES, keep=0.5, preset="reconstruction")
    assert np.any(next(entry.constant for entry in plan.entries if entry.site == "p"))
    report_text = str(cmrc.lower(program, plan).report)
    assert "that needs more than integers: here, only constants that are quantised to 0 can be folded" in report_text


def test_reduce_takes_constants_of_a_quantised_model(program: cmrc.Program, tmp_path: Path) -> None:
    program.save(tmp_path / "whole.onnx")
    rows = np.concatenate([random(64, 3, 10, 10, seed=9)])
    reduction = cmrc.reduce(tmp_path / "whole.onnx", {"x": rows}, agreement=0.5, measured=True, timed=False)
    assert reduction.lowered.report.after.parameters < reduction.lowered.report.before.parameters
