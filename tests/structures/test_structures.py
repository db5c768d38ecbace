"""What is supported where: every row of the table in docs/structures.md, asked of a small model through both hosts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from differential.models import chain, randomise, to_onnx
from tolerances import EXACT_F32, MOVES
from torch import nn

import cmrc
from cmrc.errors import GrowthError

ROWS, STEPS = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)), torch.randn(2, 4, 6)
IDS = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(1))


class Experts(nn.Module):
    """A mixture of feed-forward networks, a module each, weighed by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 3)
        self.experts = nn.ModuleList(chain(up=nn.Linear(6, 8), act=nn.GELU(), down=nn.Linear(8, 6)) for _ in range(3))
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(self.gate(x), -1)
        return self.head(sum(weights[:, i, None] * expert(x) for i, expert in enumerate(self.experts)))  # type: ignore[arg-type]


class Stacked(nn.Module):
    """The same with one weight [experts, in, out] for all, by one product."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.act, self.head = nn.Linear(6, 3), nn.SiLU(), nn.Linear(6, 4)
        self.up, self.down = nn.Parameter(torch.randn(3, 6, 8)), nn.Parameter(torch.randn(3, 8, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(self.gate(x), -1)
        result = torch.matmul(self.act(torch.matmul(x, self.up)), self.down)
        return self.head((weights.t()[:, :, None] * result).sum(0))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.inner, self.act = nn.Linear(6, 8), nn.ReLU()
        self.rnn, self.head = kind(8, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.act(self.inner(x)))[0])


class Tied(nn.Module):
    """The embedding and the head of a language model share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.mix, self.act, self.head = (
            nn.Embedding(11, 6),
            nn.Linear(6, 6),
            nn.GELU(),
            nn.Linear(6, 11, bias=False),
        )
        self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.act(self.mix(self.emb(ids))))


def language_model() -> nn.Module:
    return chain(emb=nn.Embedding(11, 6), mix=nn.Linear(6, 8), act=nn.GELU(), head=nn.Linear(8, 11))


@dataclass(frozen=True)
class Supported:
    """A row: the structure, what is asked, what comes of it; and a model with the request that proves it."""

    structure: str
    request: str
    outcome: str
    make: Callable[[], nn.Module]
    x: torch.Tensor
    do: dict[str, Any]
    site: str = ""
    stops: str = ""  # a part of the reason where it is declined
    gone: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        return f"| {self.structure} | {self.request} | {self.outcome} |"


TWO = {"units": [1, 4], "constant": [0.7, -1.2]}
TABLE = [
    Supported("mixture of experts, a module each", "hidden units of an expert", "exact", Experts, ROWS, TWO, "experts.1.act"),
    Supported("mixture of experts, a module each", "a whole expert", "exact: its parameters go, its gate weighs a constant", Experts, ROWS,
              {"units": "all", "constant": 0.3}, "experts.1", gone=("experts.1",)),
    Supported("mixture of experts, stacked weights", "the same hidden units of every expert, other constants in each", "exact: one added buffer", Stacked,
              ROWS, {"units": [1, 4], "constant": np.linspace(-1, 1, 6).reshape(3, 1, 2), "axis": 2}, "act"),
    Supported("embedding", "columns", "exact: the table loses them", language_model, IDS, TWO, "emb"),
    Supported("embedding tied to the head", "columns of the embedding", "exact with growth=\"allow\": the weights come apart; refused otherwise", Tied, IDS, TWO, "emb"),
    Supported("LM head, classifier", "rows: units of an output", "declined: an output keeps its units", language_model, IDS, TWO, "head",
              stops="it is an output of the model"),
    Supported("LSTM", "units that it reads", "exact: the gates of its first layer lose columns", lambda: Recurrent(nn.LSTM), STEPS, TWO, "act"),
    Supported("LSTM", "hidden units, at every step: the site `rnn:hidden`", "exact: rows of all its weights and columns of R go", lambda: Recurrent(nn.LSTM),
              STEPS, TWO, "rnn:hidden"),
    Supported("LSTM", "what it returns, while its gates go on reading the units", "declined: they must still be computed", lambda: Recurrent(nn.LSTM),
              STEPS, TWO, "rnn", stops="its gates read every hidden unit at the next step"),
    Supported("GRU, RNN", "units that they read", "exact, likewise", lambda: Recurrent(nn.GRU), STEPS, TWO, "act"),
    Supported("GRU, RNN", "hidden units, at every step", "exact, likewise", lambda: Recurrent(nn.GRU), STEPS, TWO, "rnn:hidden"),
]  # fmt: skip


def test_the_page_lists_what_is_proved_here() -> None:
    page = (Path(__file__).parents[2] / "docs" / "structures.md").read_text(encoding="utf-8")
    table = ["| structure | request | outcome |", "|---|---|---|", *(row.line for row in TABLE)]
    assert "\n".join(table) in page


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.structure}: {row.request}")
def test_row(row: Supported) -> None:
    torch.manual_seed(0)
    exported = torch.export.export(randomise(row.make()).eval(), (row.x,))
    for host in ("fx", "onnx"):
        program = cmrc.trace(exported if host == "fx" else to_onnx(exported))
        site = row.site
        if site == "rnn":  # its first result, which has no module of its own
            site = str(
                next(
                    node.inputs[0]
                    for node in program.graph.nodes
                    if node.path == "head" and node.op in ("linear", "matmul")
                )
            )
            maker = program.producers[site]
            site = site if maker.op == "opaque" else str(maker.inputs[0])
        plan = cmrc.Plan(program).do(site, **row.do)
        if row.stops:
            with pytest.raises(cmrc.CmrcError) as error:
                cmrc.lower(program, plan)
            assert row.stops in str(error.value).lower()
            continue
        if "growth" in row.outcome and host == "fx":  # the exporter has stored it twice
            with pytest.raises(GrowthError):
                cmrc.lower(program, plan)
        lowered = cmrc.lower(program, plan, growth="allow" if "growth" in row.outcome else "error")
        check = lowered.check((row.x,) if host == "fx" else [row.x.numpy()])
        assert check.error <= EXACT_F32
        assert check.moved >= MOVES * EXACT_F32
        assert lowered.report.after.macs <= lowered.report.before.macs
        assert lowered.report.sites[0].units_after in (
            0,
            lowered.report.sites[0].units_before - len(plan.entries[0].units),
        )
        left = lowered.host.state if host == "fx" else lowered.host.model.graph.initializers  # type: ignore[attr-defined]
        assert not [name for name in left if row.gone and name.startswith(row.gone)]
        if "come apart" in row.outcome and host == "fx":
            assert lowered.report.untied
