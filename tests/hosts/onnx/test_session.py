"""Running under onnxruntime: providers, and inputs and taps that do not fit."""

from __future__ import annotations

import numpy as np
import pytest
from hosts.onnx.lowering import (
    mlp,
    random,
)

from cmrc.errors import HostError
from cmrc.hosts.onnx.host import OnnxHost


def test_a_provider_that_is_not_there_is_an_error() -> None:
    host = OnnxHost.from_model(mlp().model, providers=("NoSuchExecutionProvider",))
    with pytest.raises(HostError, match="onnxruntime cannot run on NoSuchExecutionProvider here"):
        host.run([random(4, 5)])
    both = OnnxHost.from_model(mlp().model, providers=("NoSuchExecutionProvider", "CPUExecutionProvider"))
    assert both.run([random(4, 5)])[0].shape == (4, 3)


def test_wrong_inputs_and_taps() -> None:
    host = mlp()
    with pytest.raises(HostError, match="2 inputs were given, the model takes 1: x"):
        host.run([random(4, 5), random(4, 5)])
    with pytest.raises(HostError, match="input x is missing; the model has no input z"):
        host.run({"z": random(4, 5)})
    with pytest.raises(HostError, match="no such value to tap"):
        host.run([random(4, 5)], taps=["zebra"])
    with pytest.raises(HostError) as caught:
        host.run([random(4, 6)])
    assert "onnxruntime failed on inputs x float32[4, 6]: " in caught.value.reason
    assert "index: 1 Got: 6 Expected: 5" in caught.value.reason
    assert caught.value.fix == "the model takes x tensor(float)[N, 5]"
    x = random(4, 5)
    np.testing.assert_array_equal(host.run({"x": x}, taps=["x", "y"])[1], x)
