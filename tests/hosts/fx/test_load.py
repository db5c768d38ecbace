"""`load_into` a transformers model, `save_pretrained`, `from_pretrained`: the same outputs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tolerances import EXACT_F32, distance
from torch import nn

import cmrc
from cmrc.errors import HostError

transformers = pytest.importorskip("transformers", reason="transformers is an extra of the benchmarks")
IDS = torch.tensor([[1, 4, 8, 3], [0, 2, 5, 7]])
BERT = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32, "vocab_size": 16}
GPT2 = {"n_embd": 24, "n_layer": 2, "n_head": 3, "vocab_size": 16, "use_cache": False}
LLAMA = {**BERT, "num_key_value_heads": 3, "head_dim": 8, "use_cache": False}
VIT = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32, "image_size": 8,
       "patch_size": 4}  # fmt: skip

# The class, its settings, the attribute of the width, and the number that replaces units.
CASES: dict[str, tuple[str, dict[str, Any], str, float]] = {
    "bert": ("Bert", BERT, "intermediate_size", 0.3),
    "gpt2": ("GPT2", GPT2, "n_inner", 0.3),
    "llama": ("Llama", LLAMA, "intermediate_size", 0.0),  # its linears have no bias to fold into
    "vit": ("ViT", VIT, "intermediate_size", 0.3),
}


class Hidden(nn.Module):
    """The last hidden state alone: torch.export takes no output classes with caches."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.model(x, return_dict=True)[0]
        return result


def build(kind: str, settings: dict[str, Any]) -> Hidden:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**settings, attn_implementation="eager")
    return Hidden(getattr(transformers, f"{kind}Model")(config)).eval()


def inputs(kind: str) -> torch.Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)) if kind == "ViT" else IDS


def ffn_sites(program: cmrc.Program, settings: dict[str, Any]) -> list[str]:
    """The hidden units of the two feed-forward nets: what the second linear of each reads."""
    width = settings.get("intermediate_size", 4 * settings.get("n_embd", 0))
    linears = [n for n in program.graph.nodes if n.op == "linear" and n.inputs[1].shape[n.attrs["w_in"]] == width]  # type: ignore[union-attr]
    return [str(node.inputs[0]) for node in linears]


def cut(model: Hidden, kind: str, settings: dict[str, Any], units: list[list[int]], constant: float) -> cmrc.Lowered:
    x = inputs(kind)
    program = cmrc.trace(model, (x,))
    plan = cmrc.Plan(program)
    for site, which in zip(ffn_sites(program, settings), units, strict=True):
        plan.do(site, units=which, constant=constant)
    return cmrc.lower(program, plan)


@pytest.mark.parametrize("name", CASES)
def test_a_width_that_the_config_can_express(name: str, tmp_path: Path) -> None:
    kind, settings, attribute, constant = CASES[name]
    model = build(kind, settings)
    lowered = cut(model, kind, settings, [[1, 4, 9, 30], [0, 2, 5, 6]], constant)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowered.load_into(model)
    width = settings.get("intermediate_size", 96) - 4
    assert getattr(model.model.config, attribute) == width
    model.model.save_pretrained(tmp_path)
    again = Hidden(getattr(transformers, f"{kind}Model").from_pretrained(tmp_path, attn_implementation="eager")).eval()
    x = inputs(kind)
    assert distance(again(x).detach().numpy(), lowered.module(x).detach().numpy()) <= EXACT_F32


def test_another_model_of_the_same_config_keeps_its_widths(tmp_path: Path) -> None:
    """transformers does not copy the config that a model is made from."""
    kind, settings, attribute, constant = CASES["bert"]
    model = build(kind, settings)
    twin = transformers.BertModel(model.model.config)
    lowered = cut(model, kind, settings, [[1, 4], [0, 2]], constant)
    lowered.load_into(model)
    assert getattr(twin.config, attribute) == settings[attribute]
    assert all(m.config is model.model.config for m in model.model.modules() if hasattr(m, "config"))
    twin.save_pretrained(tmp_path)
    assert transformers.BertModel.from_pretrained(tmp_path).config.to_dict()[attribute] == settings[attribute]


def test_widths_that_differ_by_layer_are_warned_of() -> None:
    kind, settings, attribute, constant = CASES["bert"]
    model = build(kind, settings)
    lowered = cut(model, kind, settings, [[1, 4], [0, 2, 5]], constant)
    with pytest.warns(UserWarning, match="BertConfig") as caught:
        lowered.load_into(model)
    assert str(caught[0].message) == (
        "no attribute of BertConfig can express the new widths: encoder.layer.0.intermediate.dense.weight is [30, 24] now. "
        "from_pretrained will refuse what save_pretrained writes. Keep the same number of units in every layer, or store the module "
        "itself (torch.save), lowered.module, or ONNX by lowered.save"
    )
    assert getattr(model.model.config, attribute) == 32
    assert torch.equal(model(IDS), lowered.module(IDS))


class Baked(nn.Module):
    """Divides by a width that it reads from a layer each time: the traced graph has the old number."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x))) / self.fc2.in_features


def test_a_module_that_computes_something_else_is_refused_and_put_back() -> None:
    torch.manual_seed(0)
    model, x = Baked().eval(), torch.randn(4, 6)
    program = cmrc.trace(model, (x,))
    lowered = cmrc.lower(program, cmrc.Plan(program).do("act", units=[1, 4], constant=0.3))
    before, parameters = model(x), dict(model.named_parameters())
    with pytest.raises(HostError) as error:
        lowered.load_into(model)
    assert str(error.value) == (
        "host: the module does not compute what the lowered graph computes\n  fix: use lowered.module"
    )
    assert torch.equal(model(x), before)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert (model.fc1.out_features, model.fc2.in_features) == (8, 8)
