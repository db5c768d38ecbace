"""Models from torch's exporter: sites by module path, and heads that go whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hosts.onnx.lowering import (
    MOVED,
    lower,
    random,
    sizes_of,
)

from cmrc.hosts.onnx.host import OnnxHost


def test_a_model_from_torch_lowers_by_module_path(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch import nn

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.act, self.fc2 = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)
            self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

        def forward(self, x: Any) -> Any:
            return self.head(self.norm(x + self.fc2(self.act(self.fc1(x)))))

    torch.manual_seed(0)
    batch = torch.export.Dim("batch")
    program = torch.onnx.export(
        Block().eval(), (torch.randn(2, 5, 8),), dynamo=True, dynamic_shapes=({0: batch},), verbose=False
    )
    program.save(tmp_path / "block.onnx")
    host = OnnxHost.load(tmp_path / "block.onnx")
    (name,) = host.names["act"]
    assert host.graph.values()[name].shape == ("batch", 5, 16)
    assert {node.path for node in host.graph.nodes} >= {"fc1", "act", "fc2", "norm", "head"}
    lowered = lower(host, [random(3, 5, 8)], name, 2, (1, 5, 9), (0.6, -0.2, 1.0), moved=MOVED / 10)
    assert not [node for node in lowered.model.graph if "cmrc.inserted" in node.metadata_props]


def test_heads_of_an_exported_attention_go_whole(tmp_path: Path) -> None:
    """torch writes attention with samples and heads merged into one axis, by sizes that it reads from the keys."""
    torch = pytest.importorskip("torch")
    from torch import nn

    class Attention(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: Any) -> Any:
            q, k, v = (f(x).view(x.shape[0], x.shape[1], 4, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            return self.out(mixed.transpose(1, 2).reshape(x.shape[0], x.shape[1], 16))

    torch.manual_seed(0)
    batch = torch.export.Dim("batch")
    program = torch.onnx.export(
        Attention().eval(), (torch.randn(2, 5, 16),), dynamo=True, dynamic_shapes=({0: batch},), verbose=False
    )
    program.save(tmp_path / "attention.onnx")
    host = OnnxHost.load(tmp_path / "attention.onnx")
    mixed = next(node.name for node in host.graph.nodes if node.name.startswith("scaled_dot_product"))
    lowered = lower(host, [random(3, 5, 16)], mixed, 1, (1, 2), (0.6, -0.2))
    weights = [size for size in sizes_of(lowered).values() if sorted(size) == [8, 16]]
    assert len(weights) == 4
    assert not [node for node in lowered.model.graph if "cmrc.inserted" in node.metadata_props]
