"""Attention heads as units: constants that are a number, a vector a head, or different by position; grouped queries."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tolerances import EXACT_F32, MOVES
from torch import nn

import cmrc


class Attention(nn.Module):
    """Packed or separate projections, fused or eager products, and fewer key-value heads if asked."""

    def __init__(
        self, *, heads: int = 6, served: int = 6, packed: bool = False, eager: bool = False, merged: bool = False
    ) -> None:
        super().__init__()
        self.merged = merged
        self.heads, self.served, self.packed, self.eager = heads, served, packed, eager
        width = 4 * heads
        if packed:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, 4 * served), nn.Linear(width, 4 * served)
        self.out, self.proj = nn.Identity(), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        if self.packed:
            q, k, v = self.qkv(x).reshape(batch, length, 3, self.heads, 4).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            q = self.q(x).view(batch, length, self.heads, 4).transpose(1, 2)
            k, v = (p(x).view(batch, length, self.served, 4).transpose(1, 2) for p in (self.k, self.v))
        if self.merged:  # as older models do: samples and heads on one axis
            q, k, v = (t.reshape(batch * self.heads, length, 4) for t in (q, k, v))
            y = torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)) / 2.0, dim=-1), v)
            y = y.view(batch, self.heads, length, 4)
        elif self.eager:
            each = self.heads // self.served
            k, v = (t[:, :, None].expand(-1, -1, each, -1, -1).reshape(batch, self.heads, length, 4) for t in (k, v))
            y = torch.softmax(q @ k.transpose(-1, -2) / 2.0, dim=-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.heads != self.served)
        return self.proj(self.out(y.transpose(1, 2).reshape(batch, length, width)))


X = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0))
FORMS = {
    "separate": {},
    "packed": {"packed": True},
    "eager": {"eager": True},
    "merged": {"merged": True},
    "grouped": {"served": 3},
    "grouped, eager": {"served": 3, "eager": True},
}


def traced(**form: object) -> tuple[cmrc.Program, str]:
    torch.manual_seed(0)
    program = cmrc.trace(Attention(**form), (X,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))  # type: ignore[arg-type]
    merged = [node.name for node in program.graph.nodes if node.op == "reshape" and node.output.shape[-2:] == (5, 4)]
    products = [s.value for s in program.sites(folds=False) if s.op in ("attention", "matmul") and s.shape[-1] == 4]
    return program, merged[-1] if form.get("merged") else products[-1]


def proved(program: cmrc.Program, plan: cmrc.Plan) -> cmrc.Lowered:
    lowered = cmrc.lower(program, plan)
    for batch in (2, 3):
        check = lowered.check((torch.randn(batch, 5, 24),))
        assert check.error <= EXACT_F32
        assert check.moved >= MOVES * EXACT_F32
    return lowered


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("constant", ["zero", "number", "vector", "by position"])
def test_heads_fold_into_the_output_projection(form: str, constant: str) -> None:
    program, site = traced(**FORMS[form])
    rng = np.random.default_rng(0)
    values = {
        "zero": 0.0,
        "number": [0.5, -1.0],
        "vector": rng.normal(size=(2, 4)),
        "by position": rng.normal(size=(1, 2, 5, 4)),
    }
    lowered = proved(program, cmrc.Plan(program).do(site, units=[2, 3], constant=values[constant], axis=1))
    served = lowered.program.graph.leaves()
    state = lowered.host.state  # type: ignore[attr-defined]
    assert lowered.report.sites[0].units_after == 4
    assert state["proj.weight"].shape == (24, 16)
    if "packed" in form:
        assert state["qkv.weight"].shape == (48, 24)
    else:
        assert state["q.weight"].shape == (16, 24)
        assert state["k.weight"].shape[0] == served["k.weight"].shape[0] * 2 // 3


def test_equally_many_query_heads_of_every_group_leave_the_keys_alone() -> None:
    program, site = traced(served=3)
    lowered = proved(program, cmrc.Plan(program).do(site, units=[0, 3, 4], constant=0.3))
    state = lowered.host.state  # type: ignore[attr-defined]
    assert state["q.weight"].shape == (12, 24)
    assert state["k.weight"].shape == (12, 24)


def test_other_query_heads_are_declined_with_the_reason() -> None:
    program, site = traced(served=3)
    with pytest.raises(cmrc.CmrcError) as error:
        cmrc.lower(program, cmrc.Plan(program).do(site, units=[0], constant=0.3))
    assert "query heads that share a key-value head go together, or equally many of every such group" in str(
        error.value
    )


class TorchAttention(nn.Module):
    """nn.MultiheadAttention holds samples and heads on one axis, `view(length, batch * heads, 4)`, and takes them apart again."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(24, 6, batch_first=True), nn.Linear(24, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0])


def test_heads_of_torchs_own_module_fold() -> None:
    torch.manual_seed(0)
    program = cmrc.trace(TorchAttention().eval(), (X,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    site = next(node.name for node in program.graph.nodes if node.op == "attention")
    values = np.random.default_rng(0).normal(size=(2, 4))
    lowered = proved(program, cmrc.Plan(program).do(site, units=[1, 4], constant=values))
    state = lowered.host.state  # type: ignore[attr-defined]
    assert state["attention.in_proj_weight"].shape == (48, 24)
    assert state["attention.out_proj.weight"].shape == (24, 16)
