"""A site is named by the module that makes it, and by the layer that reads it."""

from __future__ import annotations

import pytest
import torch
from tolerances import EXACT_F32
from torch import nn

import cmrc


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Gated(), Gated()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.fixture(scope="module", params=["torch", "onnx"])
def program(request: pytest.FixtureRequest) -> cmrc.Program:
    torch.manual_seed(0)
    traced = cmrc.trace(Blocks().eval(), (torch.randn(2, 6),))
    return traced if request.param == "torch" else cmrc.trace(traced.host.to_onnx())  # type: ignore[attr-defined]


def test_a_gated_layer_is_named_by_its_reader(program: cmrc.Program) -> None:
    names = [site.name for site in program.sites() if site.op == "mul" and "mul" in site.value]
    assert names == ["layers.0.down:input", "layers.1.down:input"]
    assert [site.value for site in program.find("layers.1.down:input")] == ["mul_1"]


def test_globs_match_readers(program: cmrc.Program) -> None:
    assert [site.value for site in program.find("layers.*.down:input")] == ["mul", "mul_1"]
    assert [site.value for site in program.find("layers.*.down")] == [
        site.value for site in program.sites() if site.name in ("layers.0.down", "layers.1.down")
    ]


def test_a_plan_names_a_reader(program: cmrc.Program) -> None:
    plan = cmrc.Plan(program).do("layers.*.down:input", units=[1, 4], constant=0.3)
    lowered = cmrc.lower(program, plan)
    assert (
        lowered.check((torch.randn(2, 6).numpy(),) if program.host.kind == "onnx" else (torch.randn(2, 6),)).error
        <= EXACT_F32
    )
    assert [entry.site for entry in plan.entries] == ["layers.0.down:input", "layers.1.down:input"]


def test_a_layer_that_reads_several_values_asks_which() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.relu(self.up(x))) + self.down(torch.tanh(self.up(x)))

    traced = cmrc.trace(Twice().eval(), (torch.randn(2, 6),))
    with pytest.raises(cmrc.CmrcError, match="name one: down:input@0, down:input@1"):
        traced.find("down:input")
    assert [site.value for site in traced.find("down:input@1")] == ["tanh"]


class Attending(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x).transpose(1, 2).flatten(2)


def test_the_first_of_numbered_values_is_named_by_its_module_too() -> None:
    """An exporter calls the heads of the first layer by the op alone, and numbers those of the next."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.out = Attending(), Attending(), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.first(x) + self.second(x + 1))

    traced = cmrc.trace(Two().eval(), (torch.randn(2, 2, 5, 4),))
    program = cmrc.trace(traced.host.to_onnx())  # type: ignore[attr-defined]
    heads = [value for value in program.values if value.startswith("scaled_dot_product_attention")]
    assert len(heads) == 2
    assert [program.title(value).partition("/")[0] for value in heads] == ["first", "second"]
