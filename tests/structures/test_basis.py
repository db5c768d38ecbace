"""Units in another basis, head by head: keys, queries and values of attention, against a literal change of basis in torch."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from nets import exported
from tolerances import EXACT_F32, MOVES, distance
from torch import nn

import cmrc

SIZE, LENGTH = 6, 5
Change = tuple[str, torch.Tensor, list[int], float]  # which value, its matrices, the units of each head, their constant


class Attention(nn.Module):
    """Projections apart or packed, with fewer key-value heads if asked; a fused op or plain products.

    `change` replaces units in another basis, as one would write it in torch.
    """

    def __init__(self, form: str, heads: int = 4, served: int = 4) -> None:
        super().__init__()
        self.form, self.heads, self.served, self.change = form, heads, served, None
        width, narrow = SIZE * heads, SIZE * served
        if form == "packed":
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.q, self.k, self.v = (
                nn.Linear(width, width),
                nn.Linear(width, narrow, bias=False),
                nn.Linear(width, narrow),
            )
        self.proj = nn.Linear(width, width)

    def changed(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if self.change is None or self.change[0] != name:
            return x
        _, basis, units, constant = self.change
        turned = torch.einsum("hij,nthj->nthi", basis.to(x), x.unflatten(-1, (-1, SIZE)))
        turned[..., units] = constant
        return torch.einsum("hij,nthj->nthi", torch.linalg.inv(basis).to(x), turned).flatten(-2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch = x.shape[0]
        q, k, v = self.qkv(x).chunk(3, -1) if self.form == "packed" else (self.q(x), self.k(x), self.v(x))
        q, k, v = (self.changed(name, value) for name, value in (("q", q), ("k", k), ("v", v)))
        q = q.view(batch, LENGTH, self.heads, SIZE).transpose(1, 2)
        k, v = (t.view(batch, LENGTH, self.served, SIZE).transpose(1, 2) for t in (k, v))
        each = self.heads // self.served
        if self.form == "merged":  # as older models do: samples and heads on one axis
            q, k, v = (t.reshape(batch * self.heads, LENGTH, SIZE) for t in (q, k, v))
            y = torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)) / 2.0, dim=-1), v)
            y = y.view(batch, self.heads, LENGTH, SIZE)
        elif self.form == "products":
            k, v = (t[:, :, None].expand(-1, -1, each, -1, -1).reshape(batch, self.heads, LENGTH, SIZE) for t in (k, v))
            y = torch.softmax((q * 0.5) @ (k * 0.7).transpose(-1, -2), dim=-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, enable_gqa=each > 1)
        return self.proj(y.transpose(1, 2).reshape(batch, LENGTH, self.heads * SIZE))


FORMS = {
    "separate": ("separate", 4, 4),
    "packed": ("packed", 4, 4),
    "products": ("products", 4, 4),
    "merged": ("merged", 4, 4),
    "grouped": ("separate", 4, 2),
    "grouped products": ("products", 4, 2),
}


def made(form: str) -> Attention:
    torch.manual_seed(0)
    return Attention(*FORMS[form]).eval()


@cache
def traced(form: str, host: str) -> cmrc.Program:
    program = cmrc.trace(
        made(form), (torch.randn(2, LENGTH, SIZE * 4),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)
    )
    return program if host == "fx" else exported(program)


def site_of(program: cmrc.Program, form: str, name: str) -> str:
    """The projection's name; of a packed one, the part of it."""
    if form != "packed":
        return name
    parts = [node.name for node in program.graph.nodes if node.op == "select" and node.output.shape[-1] == SIZE * 4]
    return parts["qkv".index(name)]


def bases(heads: int, seed: int = 0) -> np.ndarray:
    """Matrices with condition number 3 that share no direction."""
    rng = np.random.default_rng(seed)
    turns = np.linalg.qr(rng.normal(size=(2, heads, SIZE, SIZE)))[0]
    return turns[0] * np.linspace(1, 3, SIZE)[:, None] @ turns[1]


CASES = [
    (form, name)
    for form in FORMS
    for name in "qkv"
    if (form, name) not in (("grouped", "q"), ("grouped products", "q"))
]


@pytest.mark.parametrize("host", ["fx", "onnx"])
@pytest.mark.parametrize(("form", "name"), CASES, ids=[" ".join(case) for case in CASES])
def test_units_in_another_basis_are_cut(host: str, form: str, name: str, tmp_path: Path) -> None:
    program = traced(form, host)
    heads = FORMS[form][2] if name in "kv" else 4
    constant, units = (0.4 if name == "v" else 0.0), [0, 2, 5]
    basis = bases(heads)
    cut = [SIZE * head + unit for head in range(heads) for unit in units]
    plan = cmrc.Plan(program).do(site_of(program, form, name), units=cut, constant=constant, basis=basis)
    plan.save(tmp_path / "plan.json")
    lowered = cmrc.lower(program, cmrc.Plan.load(tmp_path / "plan.json"))
    reference = made(form).double()
    reference.change = (name, torch.from_numpy(basis), units, constant)
    plain = made(form).double()
    for batch in (2, 3):
        x = torch.randn(batch, LENGTH, SIZE * 4, generator=torch.Generator().manual_seed(batch))
        with torch.no_grad():
            expected, before = reference(x.double()).numpy(), plain(x.double()).numpy()
        assert distance(lowered.host.run((x,))[0], expected) <= EXACT_F32
        assert distance(lowered.clamped.run((x,))[0], expected) <= EXACT_F32  # what `check` compares with
        assert distance(before, expected) >= MOVES * EXACT_F32
        assert lowered.check((x,)).holds
    assert lowered.report.after.macs < lowered.report.before.macs
    assert {"turn", "do"}.isdisjoint(node.op for node in lowered.graph.nodes)
    if host == "onnx":
        lowered.save(tmp_path / "small.onnx")
        assert distance(cmrc.trace(tmp_path / "small.onnx").run((x,))[0], expected) <= EXACT_F32


@pytest.mark.parametrize("host", ["fx", "onnx"])
def test_keys_and_values_are_cut_in_one_plan(host: str) -> None:
    program = traced("packed", host)
    plan = cmrc.Plan(program)
    for name, seed in (("k", 1), ("v", 2)):
        cut = [SIZE * head + unit for head in range(4) for unit in (1, 4)]
        plan.do(site_of(program, "packed", name), units=cut, constant=0.0, basis=bases(4, seed))
    lowered = cmrc.lower(program, plan)
    assert lowered.check((torch.randn(3, LENGTH, SIZE * 4),)).holds
    (packed,) = [node for node in lowered.graph.nodes if node.op == "linear" and node.label.startswith("qkv")]
    assert packed.output.shape[-1] == 3 * 4 * (SIZE - 2)
