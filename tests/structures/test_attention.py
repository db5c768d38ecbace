"""Attention heads as units: constants that are a number, one vector per head, or different by position; grouped queries."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from differential.models import to_onnx
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
    assert "query heads that share a key-value head must go together, or equally many in every such group" in str(
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


# ---------------------------------------------------------------- units inside heads


def within(heads: int, positions: list[int], start: int = 0) -> list[int]:
    """The same positions of every head, as units of the projection."""
    return [start + head * 4 + i for head in range(heads) for i in positions]


def through_both(module: nn.Module, site: str, **do: object) -> list[cmrc.Lowered]:
    """Lowered on both hosts, each equal to its clamped model and visibly moved."""
    exported = torch.export.export(module.eval(), (X,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    results = []
    for program in (cmrc.trace(exported), cmrc.trace(to_onnx(exported))):
        lowered = cmrc.lower(program, cmrc.Plan(program).do(site, **do))  # type: ignore[arg-type]
        inputs = torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(3))
        check = lowered.check((inputs,) if program.host.kind == "fx" else [inputs.numpy()])
        assert check.error <= EXACT_F32
        assert check.moved >= MOVES * EXACT_F32
        results.append(lowered)
    return results


def shapes(lowered: cmrc.Lowered) -> dict[str, int]:
    state = lowered.host.state  # type: ignore[attr-defined]
    return {name.partition(".")[0]: t.shape[0] for name, t in state.items() if name.endswith("weight")}


INSIDE = {name: form for name, form in FORMS.items() if name != "packed"}


@pytest.mark.parametrize("form", INSIDE, ids=str)
def test_value_units_pass_attention_as_constants(form: str) -> None:
    torch.manual_seed(0)
    served = int(INSIDE[form].get("served", 6))  # type: ignore[call-overload]
    fx, _ = through_both(Attention(**INSIDE[form]), "v", units=within(served, [1, 2]), constant=0.7)  # type: ignore[arg-type]
    assert shapes(fx) == {"q": 24, "k": 4 * served, "v": 2 * served, "proj": 24}
    assert fx.host.state["proj.weight"].shape == (24, 12)  # type: ignore[attr-defined]


@pytest.mark.parametrize("form", INSIDE, ids=str)
def test_query_units_at_zero_leave_queries_and_keys(form: str) -> None:
    """The scale stays that of the full width, although the width shrinks."""
    torch.manual_seed(0)
    served = int(INSIDE[form].get("served", 6))  # type: ignore[call-overload]
    fx, _ = through_both(Attention(**INSIDE[form]), "q", units=within(6, [0, 3]), constant=0.0)  # type: ignore[arg-type]
    assert shapes(fx) == {"q": 12, "k": 2 * served, "v": 4 * served, "proj": 24}


def test_a_constant_key_unit_is_not_seen_by_the_softmax() -> None:
    torch.manual_seed(0)
    program, _ = traced()
    lowered = proved(program, cmrc.Plan(program).do("k", units=within(6, [1]), constant=np.linspace(-2, 2, 6)))
    assert shapes(lowered) == {"q": 18, "k": 18, "v": 24, "proj": 24}


def test_packed_projections_lose_the_same_units_of_queries_keys_and_values() -> None:
    program, _ = traced(packed=True)
    q, k, v = (name for name in program.values if name.startswith("getitem"))
    plan = cmrc.Plan(program).do(q, units=[1], constant=0.0, axis=3).do(k, units=[1], constant=0.4, axis=3)
    assert shapes(proved(program, plan.do(v, units=[1], constant=0.6, axis=3))) == {"qkv": 54, "proj": 24}


INSIDE_REFUSED = {
    "a constant query": (
        {},
        ("q", within(6, [1]), 0.5),
        "%scaled_dot_product_attention (attention): a replacement cannot pass: a query unit that is constant, and not 0, still "
        "affects the weights of the keys",
    ),
    "other units of each head": (
        {},
        ("q", [0, 5], 0.0),
        "%view (reshape): a replacement cannot pass: the units do not fill whole positions of any axis of ['s77', 5, 6, 4]; "
        "a position is units 0 to 3, or units 0, 4, 8, ...",
    ),
    "queries of a packed projection": (
        {"packed": True},
        ("qkv", within(6, [1]), 0.0),
        "%reshape (reshape): a replacement cannot pass: the units do not fill whole positions of any axis of ['s77', 5, 3, 6, 4]; "
        "a position is units 0 to 23, or units 0 to 3, 24 to 27, 48 to 51, or units 0, 4, 8, ...",
    ),
    "other query heads of copied keys": (
        {"served": 3, "eager": True},
        ("", [0], 0.3),
        "%reshape (reshape): a selection cannot pass: query heads that share a key-value head must go together, or equally many in "
        "every such group (and 1 more)",
    ),
}


@pytest.mark.parametrize("name", INSIDE_REFUSED)
def test_what_is_inside_heads_and_refused(name: str) -> None:
    form, (site, units, constant), expected = INSIDE_REFUSED[name]
    program, product = traced(**form)
    with pytest.raises(cmrc.CmrcError) as error:
        cmrc.lower(program, cmrc.Plan(program).do(site or product, units=units, constant=constant))
    assert str(error.value).splitlines()[0] == f"residue: {expected}"


@pytest.mark.parametrize("form", ["grouped", "grouped, eager"])
def test_equally_many_query_heads_of_every_group_by_other_indices(form: str) -> None:
    """Three groups of two: the first head of one, the second of the others."""
    program, site = traced(**FORMS[form])
    lowered = proved(
        program, cmrc.Plan(program).do(site, units=[0, 3, 5], constant=np.arange(12.0).reshape(3, 4), axis=1)
    )
    assert shapes(lowered) == {"q": 12, "k": 12, "v": 12, "proj": 24}


# ---------------------------------------------------------------- rotary positions and masks


class Rotary(nn.Module):
    """Two layers of attention whose queries and keys are turned by the same angles, pair by pair (i, i + 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({n: nn.Linear(24, 24) for n in "qkvo"}) for _ in range(2))
        self.register_buffer("frequency", torch.tensor([0.7, 0.3]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        angle = torch.arange(length, dtype=torch.float32)[:, None] * self.frequency
        cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
        for layer in self.layers:
            q, k, v = (layer[n](x).view(batch, length, 6, 4).transpose(1, 2) for n in "qkv")  # type: ignore[index]
            q, k = (t * cos + torch.cat([-t[..., 2:], t[..., :2]], -1) * sin for t in (q, k))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + layer["o"](y.transpose(1, 2).reshape(batch, length, width))  # type: ignore[index]
        return x


def test_rotary_pairs_leave_together() -> None:
    torch.manual_seed(0)
    program = cmrc.trace(Rotary(), (X,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    plan = cmrc.Plan(program)
    for layer in range(2):
        plan.do(f"layers.{layer}.q", units=within(6, [0, 2]), constant=0.0)
    lowered = proved(program, plan)
    state = lowered.host.state  # type: ignore[attr-defined]
    assert {name: t.shape[0] for name, t in state.items() if name[9:] in ("q.weight", "k.weight")} == {
        f"layers.{i}.{n}.weight": 12 for i in range(2) for n in "qk"
    }
    assert state["frequency"].tolist() == pytest.approx([0.3])


def test_half_a_rotary_pair_is_declined() -> None:
    program = cmrc.trace(Rotary(), (X,))
    with pytest.raises(cmrc.CmrcError) as error:
        cmrc.lower(program, cmrc.Plan(program).do("layers.0.q", units=within(6, [0]), constant=0.0))
    assert "%add (add): a replacement cannot pass: its operands are replaced in different units" in str(error.value)


class Masked(Attention):
    """A mask that is an input: nobody knows whether it hides a whole row."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        q, k, v = (p(x).view(*x.shape[:2], 6, 4).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(self.out(y.transpose(1, 2).reshape(x.shape)))


def test_only_zero_passes_a_mask_of_run_time() -> None:
    torch.manual_seed(0)
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[2] = False  # torch gives 0 there, not the average of the values
    program = cmrc.trace(Masked(), (X, mask))
    zero = cmrc.lower(program, cmrc.Plan(program).do("v", units=within(6, [1, 2]), constant=0.0))
    check = zero.check((X, mask))
    assert check.error <= EXACT_F32
    assert check.moved >= MOVES * EXACT_F32
    with pytest.raises(cmrc.CmrcError) as error:
        cmrc.lower(program, cmrc.Plan(program).do("v", units=within(6, [1, 2]), constant=0.7))
    assert "its mask may hide every key from a query, and then the result is not the constant" in str(error.value)
