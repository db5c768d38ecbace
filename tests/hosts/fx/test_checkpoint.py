"""Checkpoint folders: traced where they lie, lowered tensor by tensor, and loaded again by transformers."""

from __future__ import annotations

import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tolerances import EXACT_F32, distance

import cmrc
from cmrc.errors import FileError, HostError, TraceError
from cmrc.hosts.fx import checkpoint

TOKENS = torch.arange(18).reshape(2, 9) * 7 % 64
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("checkpoints") / "llama"
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=4, tie_word_embeddings=False)
    model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder, max_shard_size="10KB")
    (folder / "notes.txt").write_text("beside the weights")
    return folder


def products(program: cmrc.Program) -> list[str]:
    """The sites that a gated FFN's last layer reads."""
    return [site.name for site in program.sites() if site.name.endswith("down_proj:input")]


def outputs(model: Any, ids: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(model(ids)[0])


def saved(lowered: cmrc.Lowered, folder: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lowered.save(folder)
    return [str(warning.message) for warning in caught]


def test_a_traced_folder_computes_what_from_pretrained_does(llama: Path) -> None:
    program = cmrc.trace(llama)
    wanted = outputs(transformers.AutoModelForCausalLM.from_pretrained(llama), TOKENS)
    assert distance(program.host.run([TOKENS])[0], wanted) < EXACT_F32


@pytest.mark.parametrize("constant", [0.0, 0.7])
def test_equal_widths_go_into_the_config(llama: Path, tmp_path: Path, constant: float) -> None:
    """Llama has no biases: a constant needs one, and the config can say so."""
    program = cmrc.trace(llama)
    plan = cmrc.Plan(program)
    for site, first in zip(products(program), (3, 7), strict=True):
        plan.do(site, units=range(first, first + 8), constant=constant)
    lowered = cmrc.lower(program, plan)
    assert not saved(lowered, tmp_path / "small")
    small = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert small.config.intermediate_size == 16
    assert small.config.mlp_bias == (constant != 0)
    assert distance(outputs(small, TOKENS), lowered.clamped.run([TOKENS])[0]) < EXACT_F32
    assert distance(outputs(small, TOKENS), program.host.run([TOKENS])[0]) > 0.01
    assert (tmp_path / "small/notes.txt").read_text() == "beside the weights"
    shards = sorted(path.name for path in llama.glob("*.safetensors"))
    assert sorted(path.name for path in (tmp_path / "small").glob("*.safetensors")) == shards
    assert len(shards) > 1


def without_heads(program: cmrc.Program, units: list[int]) -> cmrc.Lowered:
    plan = cmrc.Plan(program)
    for site in [s.value for s in program.sites() if s.value.startswith("scaled_dot_product_attention")]:
        plan.do(site, units=units, constant=0.0)
    return cmrc.lower(program, plan)


def test_heads_go_into_the_config(llama: Path, tmp_path: Path) -> None:
    lowered = without_heads(cmrc.trace(llama), [1, 2])
    assert not saved(lowered, tmp_path / "small")
    small = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert (small.config.num_attention_heads, small.config.num_key_value_heads) == (2, 2)
    assert distance(outputs(small, TOKENS), lowered.clamped.run([TOKENS])[0]) < EXACT_F32


def test_a_config_that_transformers_refuses_is_not_written(llama: Path, tmp_path: Path) -> None:
    """Its Llama wants a hidden size that is a multiple of the heads, and 16 is none of 3."""
    lowered = without_heads(cmrc.trace(llama), [1])
    assert len(saved(lowered, tmp_path / "small")) == 1
    small = cmrc.trace(tmp_path / "small")
    assert distance(small.host.run([TOKENS])[0], lowered.clamped.run([TOKENS])[0]) < EXACT_F32


def test_other_widths_in_every_layer_come_with_a_loader(llama: Path, tmp_path: Path) -> None:
    program = cmrc.trace(llama)
    plan = cmrc.Plan(program)
    for site, count in zip(products(program), (4, 9), strict=True):
        plan.do(site, units=range(count), constant=0.2)
    lowered = cmrc.lower(program, plan)
    (message,) = saved(lowered, tmp_path / "small")
    assert message == (
        "config.json cannot express the new widths: model.layers.0.mlp.gate_proj.weight is [20, 16] now. from_pretrained will "
        "refuse the folder; load it with modeling_cmrc.py, which is in it. Keep the same number of units in every layer to avoid this"
    )
    spec = importlib.util.spec_from_file_location("beside_the_weights", tmp_path / "small/modeling_cmrc.py")
    assert spec is not None
    assert spec.loader is not None
    loader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loader)
    small = loader.load(tmp_path / "small")
    assert distance(outputs(small, TOKENS), lowered.clamped.run([TOKENS])[0]) < EXACT_F32
    assert distance(cmrc.trace(tmp_path / "small").host.run([TOKENS])[0], outputs(small, TOKENS)) < EXACT_F32


def test_an_affine_map_in_bfloat16_is_rounded_once(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = transformers.BertModel(transformers.BertConfig(**SIZES, max_position_embeddings=32)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "bert")
    program = cmrc.trace(tmp_path / "bert")
    sites = [s.name for s in program.sites() if s.name.endswith("intermediate.intermediate_act_fn")]
    plan = cmrc.Plan(program)
    weight = np.full((2, 3), 0.25)
    for site in sites:
        plan.do(site, units=[0, 5], affine=cmrc.Affine(parents=[1, 2, 3], weight=weight, bias=np.array([0.1, 0.2])))
    lowered = cmrc.lower(program, plan)
    lowered.save(tmp_path / "small")
    small = transformers.BertModel.from_pretrained(tmp_path / "small")
    assert small.config.intermediate_size == 22
    folded = lowered.module.state_dict()
    for name, tensor in small.state_dict().items():
        if not name.startswith("pooler"):  # which has no tokens to read in the graph's first output
            assert torch.equal(tensor, folded[name]), name


def test_what_the_code_of_the_model_cannot_run_is_refused(llama: Path, tmp_path: Path) -> None:
    program = cmrc.trace(llama)
    plan = cmrc.Plan(program).do(products(program)[0], units=range(SIZES["intermediate_size"]), constant=0.3)
    with pytest.raises(HostError, match=r"fix: write ONNX: -o small\.onnx"):
        cmrc.lower(program, plan).save(tmp_path / "small")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_not_overwritten(llama: Path, tmp_path: Path) -> None:
    program = cmrc.trace(llama)
    lowered = cmrc.lower(program, cmrc.Plan(program).do(products(program)[0], units=[1], constant=0.0))
    before = {path.name: path.read_bytes() for path in llama.iterdir()}
    with pytest.raises(FileError, match="it exists already\n  fix: give the name of a new folder"):
        lowered.save(llama)
    assert {path.name: path.read_bytes() for path in llama.iterdir()} == before


def test_the_innermost_cause_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers hides why it cannot import a model behind words of its own."""

    def load(folder: Path) -> Any:
        try:
            raise RuntimeError("operator torchvision::nms does not exist")
        except RuntimeError as error:
            raise ImportError("Could not import module 'BertModel'.\nSet the logging verbosity") from error

    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "model.safetensors").write_text("")
    monkeypatch.setattr(checkpoint.modeling_cmrc, "load", load)
    with pytest.raises(TraceError) as caught:
        cmrc.trace(tmp_path)
    assert caught.value.reason.endswith(
        "cannot be opened: Could not import module 'BertModel'. (operator torchvision::nms does not exist)"
    )


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no config.json"),
        ({"config.json": {}}, "has no safetensors files"),
        ({"config.json": {"quantization_config": {}}, "model.safetensors": {}}, "holds quantised weights"),
        ({"config.json": {"model_type": "llama"}, "model.safetensors": {}}, "cannot be opened"),
    ],
)
def test_other_folders_are_refused(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(TraceError, match=message):
        cmrc.trace(tmp_path)
