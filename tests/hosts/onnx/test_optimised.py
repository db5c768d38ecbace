"""Models that were optimised offline by onnxruntime's own tools: FFN units and heads, against the clamped model."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from tolerances import EXACT_F32, MOVES

import cmrc
from cmrc.ir.graph import Array

pytest.importorskip("transformers", reason="transformers builds the models: pip install transformers")

HEADS, SIZE = 4, 8
# The fused ops that the tools make of each, which the result must still have.
MODELS: dict[str, dict[str, int]] = {
    "bert-attention": {"Attention": 2, "SkipLayerNormalization": 4, "BiasGelu": 2, "EmbedLayerNormalization": 1},
    "bert-multi-head": {"MultiHeadAttention": 2, "SkipLayerNormalization": 4, "BiasGelu": 2, "EmbedLayerNormalization": 1},
    "bert-session": {"FusedMatMul": 2, "BiasGelu": 2},
    "gpt2-optimizer": {"SkipLayerNormalization": 4, "FastGelu": 2},
    "llama-optimizer": {"SkipSimplifiedLayerNormalization": 4},
    "llama-session": {"FusedMatMul": 2, "QuickGelu": 2},
    "vit-session": {"FusedMatMul": 2, "BiasGelu": 2, "SkipLayerNormalization": 1},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("optimised")
    script = Path(__file__).with_name("optimised.py")
    done = subprocess.run([sys.executable, str(script), str(target)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return target


def feeds(program: cmrc.Program, batch: int) -> Mapping[str, Array]:
    random = np.random.default_rng(batch)
    if len(program.graph.inputs) == 1:
        return {"pixel_values": random.normal(size=(batch, 3, 16, 16)).astype(np.float32)}
    mask = np.arange(7) < 7 - np.arange(batch)[:, None] % 3
    return {"input_ids": random.integers(0, 50, (batch, 7)), "attention_mask": mask.astype(np.int64)}


def fused_ops(model: onnx.ModelProto) -> dict[str, int]:
    return dict(Counter(node.op_type for node in model.graph.node if node.domain))


def inner_sites(program: cmrc.Program) -> list[cmrc.Site]:
    """What the second projection of every FFN reads."""
    inner = []
    for node in program.graph.nodes:
        x = node.inputs[0] if node.op == "linear" else None
        if isinstance(x, str) and program.values[x].shape[-1] == 48:
            inner.append(program.site_of(x, len(program.values[x].shape) - 1))
    return inner


def head_sites(program: cmrc.Program) -> Iterator[tuple[cmrc.Site, int]]:
    """The results of attention, by heads, and how many units a head has there."""
    fused = {node.origin for node in program.graph.nodes if node.op == "attention"}
    for node in program.graph.nodes:
        if node.origin in fused and not node.marks.inside:
            yield program.site_of(node.name, 2), SIZE
        elif node.op == "matmul" and len(node.output.shape) == 4:
            maker = program.producers[str(node.inputs[0])]
            if maker.kind in ("softmax", "where"):
                yield program.site_of(node.name, 1), 1


def put_units(plan: cmrc.Plan, program: cmrc.Program) -> None:
    random, sites = np.random.default_rng(0), inner_sites(program)
    assert len(sites) == 2
    for site in sites:
        plan.do(site.value, units=range(0, 48, 2), constant=random.normal(size=24), axis=site.axis)


def put_heads(plan: cmrc.Plan, program: cmrc.Program) -> None:
    random, sites = np.random.default_rng(1), list(head_sites(program))
    assert len(sites) == 2
    for site, each in sites:
        units = [head * each + i for head in (2, 3) for i in range(each)]  # two that share a key-value head
        plan.do(site.value, units=units, constant=random.normal(size=len(units)), axis=site.axis)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("what", ["units", "heads", "both"])
def test_replacements_fold_in_a_model_that_was_optimised(folder: Path, name: str, what: str, tmp_path: Path) -> None:
    path = folder / f"{name}.onnx"
    assert MODELS[name].items() <= fused_ops(onnx.load(path)).items()
    program = cmrc.trace(path)
    plan = cmrc.Plan(program)
    if what != "heads":
        put_units(plan, program)
    if what != "units":
        put_heads(plan, program)
    lowered = cmrc.lower(program, plan)
    for batch in (2, 3):
        check = lowered.check(feeds(program, batch))
        assert check.error <= EXACT_F32
        assert check.moved >= MOVES * EXACT_F32
    lowered.save(tmp_path / "small.onnx")
    assert fused_ops(onnx.load(tmp_path / "small.onnx")) == fused_ops(onnx.load(path))
    inner = [node.inputs[0] for node in lowered.graph.nodes if node.op == "linear"]
    widths = [lowered.graph.values()[str(x)].shape[-1] for x in inner if isinstance(x, str)]
    assert widths.count(48) == (2 if what == "heads" else 0)
    assert widths.count(24) == (0 if what == "heads" else 2)
    again = cmrc.trace(tmp_path / "small.onnx")
    expected, outputs = lowered.host.run(feeds(program, 2)), again.run(feeds(program, 2))
    np.testing.assert_array_equal(outputs[0], expected[0])
