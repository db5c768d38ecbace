"""A lowered model is what a person would have written small: onnxruntime is left with the same ops on the same sizes."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import cmrc


class Gate(nn.Module):
    """silu(g) · u of one fused projection."""

    def forward(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up


class GatedMLP(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate_up, self.gate, self.down = nn.Linear(12, 2 * hidden, bias=False), Gate(), nn.Linear(hidden, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.gate(self.gate_up(x)))


class Block(nn.Module):
    """A pre-norm transformer block with fused qkv."""

    def __init__(self, hidden: int, width: int = 12, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.act, self.fc2 = nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        heads = self.qkv(self.norm1(x)).reshape(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        x = x + self.proj(mixed)
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))


def mlp(hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(12, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 5))


def convnet(hidden: int, padding: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, hidden, 3, padding=padding, bias=False), nn.BatchNorm2d(hidden), nn.ReLU(),
        nn.Conv2d(hidden, 2 * hidden, 3, padding=padding, bias=False), nn.BatchNorm2d(2 * hidden), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * hidden, 5),
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """`make(width)` builds the model; half of the units of every site are replaced."""

    make: Callable[[int], nn.Module]
    sites: tuple[str, ...]
    shape: tuple[int, ...]
    constant: float = 0.3

    def build(self, hidden: int, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = self.make(hidden)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.running_mean)
                nn.init.uniform_(module.running_var, 0.5, 1.5)
        return model.eval()

    def inputs(self, batch: int) -> torch.Tensor:
        return torch.randn(batch, *self.shape, generator=torch.Generator().manual_seed(batch))


CASES = {
    "mlp": Case(mlp, ("1", "3"), (12,)),
    "conv-bn-relu, valid": Case(lambda hidden: convnet(hidden, 0), ("2", "5"), (3, 10, 10)),
    "conv-bn-relu, zero padding": Case(lambda hidden: convnet(hidden, 1), ("2", "5"), (3, 10, 10), constant=0.0),
    "transformer block": Case(Block, ("act",), (5, 12)),
    "gated mlp, fused gate_up": Case(GatedMLP, ("gate",), (5, 12)),
}


def export(model: nn.Module, case: Case, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shapes = ({0: torch.export.Dim("batch")},)
        torch.onnx.export(
            model, (case.inputs(2),), path, dynamo=True, verbose=False, dynamic_shapes=shapes, external_data=False
        )
    return path


def histogram(path: Path) -> tuple[Counter[str], Counter[tuple[int, ...]]]:
    """The ops after onnxruntime's extended optimisations, and the shapes of the weights that they read."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(path.with_suffix(".optimised.onnx"))
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    graph = onnx.load(path.with_suffix(".optimised.onnx")).graph
    weights = [weight for weight in graph.initializer if weight.data_type == onnx.TensorProto.FLOAT]
    return Counter(node.op_type for node in graph.node), Counter(tuple(weight.dims) for weight in weights)


def half(program: cmrc.Program, case: Case) -> cmrc.Plan:
    plan = cmrc.Plan(program)
    draw = np.random.default_rng(7)
    for name in case.sites:
        (site,) = program.find(name)
        units = np.sort(draw.permutation(site.units)[: site.units // 2])
        plan.do(name, units=units, constant=case.constant * draw.uniform(0.5, 1.5, len(units)))
    return plan


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("host", ["fx", "onnx"])
def test_lowered_has_the_ops_of_the_native_small_model(case: Case, host: str, tmp_path: Path) -> None:
    wide = case.build(16, seed=0)
    if host == "fx":
        program = cmrc.trace(wide, (case.inputs(2),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    else:
        program = cmrc.trace(export(wide, case, tmp_path / "wide.onnx"))
    assert program.host.kind == host
    lowered = cmrc.lower(program, half(program, case))
    assert lowered.check([case.inputs(3).numpy()]).holds
    lowered.save(tmp_path / "lowered.onnx")
    native = histogram(export(case.build(8, seed=1), case, tmp_path / "native.onnx"))
    assert histogram(tmp_path / "lowered.onnx") == native
