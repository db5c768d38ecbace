"""Folds that overflow the precision of the model are refused, and nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hosts.onnx.lowering import model, random
from onnx import TensorProto, numpy_helper

import cmrc
from cmrc.errors import HostError

FIX = "\n  fix: replace the units by smaller numbers, leave out units with large weights, or lower the model in a wider type"


def net(scale: float, dtype: Any) -> onnx.ModelProto:
    weights = {"w": random(5, 8), "v": np.full((8, 6), scale, dtype=np.float32)}
    proto = model("h = MatMul(x, w)\na = Relu(h)\ny = MatMul(a, v)", {"x": ("N", 5)}, "y", **weights)
    if dtype == np.float16:
        for value in (*proto.graph.input, *proto.graph.output):
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
        for tensor in proto.graph.initializer:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(dtype), tensor.name))
    return proto


def test_a_bias_in_float16_is_refused_when_the_model_is_lowered() -> None:
    program = cmrc.trace(net(300.0, np.float16))
    with pytest.raises(HostError) as error:
        cmrc.lower(program, cmrc.Plan(program).do("a", units=[0, 1], constant=200.0))
    assert str(error.value) == (
        f"host: the fold makes v.bias[0] 1.2e+05, which is infinite in float16 (its largest number is 6.55e+04){FIX}"
    )


@pytest.mark.parametrize("limit", [None, 10], ids=["one file", "external data"])
def test_a_bias_in_float32_is_refused_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    program = cmrc.trace(net(30.0, np.float32))
    lowered = cmrc.lower(program, cmrc.Plan(program).do("a", units=[0, 1], constant=1e38))
    if limit is not None:
        monkeypatch.setattr("cmrc.hosts.onnx.save.LARGEST", limit)
    text = f"host: the fold makes v.bias[0] 6e+39, which is infinite in float32 (its largest number is 3.4e+38){FIX}"
    for ask in (lambda: lowered.save(tmp_path / "m.onnx"), lambda: lowered.check([random(4, 5)])):
        with pytest.raises(HostError) as error:
            ask()
        assert str(error.value) == text
    assert list(tmp_path.iterdir()) == []
