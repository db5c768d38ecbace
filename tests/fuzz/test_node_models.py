"""The node tests that ship with onnx, every fortieth here; `python -m tests.fuzz --node-models` takes them all."""

from __future__ import annotations

import warnings

import pytest

from tests.fuzz.node_models import NodeModel, node_models, outcomes

EACH = 40


@pytest.fixture(scope="module")
def models() -> list[NodeModel]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # onnx makes infinities on purpose
        return node_models()


def test_dos_at_every_value_are_equal_or_refused(models: list[NodeModel]) -> None:
    chosen = models[::EACH]
    results = [(name, outcome) for model in chosen for name, outcome in outcomes(model)]
    assert len(results) > len(chosen)
    assert not [f"{name}: {outcome.kind}: {outcome.detail}" for name, outcome in results if outcome.failed]


def test_a_do_on_the_scales_of_a_resize_is_not_lost(models: list[NodeModel]) -> None:
    model = next(m for m in models if m.name == "test_resize_upsample_scales_nearest")
    kinds = {name: outcome.kind for name, outcome in outcomes(model)}
    assert kinds["test_resize_upsample_scales_nearest scales[0]"] == "kept"
