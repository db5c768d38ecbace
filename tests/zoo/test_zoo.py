"""Architectures as their libraries build them: half of the inner units and a third of the heads in one plan, through both hosts."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import quantised
from asking import HOSTS, Subject, ask
from models import ENTRIES, entries

REPRESENTATIVE = (
    "vit", "swin", "mobilenet_v2", "detr", "bert", "albert", "t5", "whisper", "gpt2", "llama", "phi3", "mixtral",
)  # fmt: skip


@pytest.fixture(scope="module", params=REPRESENTATIVE)
def subject(request: pytest.FixtureRequest) -> Subject:
    entry = ENTRIES[request.param]
    if entry.skip:
        pytest.skip(entry.skip)
    return Subject.of(entry)


@pytest.mark.parametrize("host", HOSTS)
def test_inner_units_and_heads_fold_exactly(subject: Subject, host: str, tmp_path: Path) -> None:
    outcome = ask(subject, host, "both", tmp_path)
    assert (outcome.verdict, outcome.detail) == ("exact", "")
    assert outcome.units > 0
    assert outcome.parameters[1] < outcome.parameters[0]


@pytest.mark.parametrize("host", HOSTS)
def test_sites_that_fold_are_named_by_a_module(subject: Subject, host: str) -> None:
    """By the one that makes the units, a value inside it (path/value), or the layer that reads them (path:input). A sum keeps its
    own name: no other site does, and at most one in twenty (in a small model, one)."""
    assert isinstance(subject.built, torch.nn.Module)
    modules = dict(subject.built.named_modules())
    sites = [site for site in subject.on(host).sites() if site.folding and site.folding.constant.folds]
    others = [site for site in sites if re.split("[:/@]", site.name)[0] not in modules]
    assert {site.op for site in others} <= {"add"}
    assert sites
    assert len(others) <= max(1, len(sites) // 20), [site.name for site in others]


@pytest.mark.parametrize("name", ["convnext_int8", "resnet20_int8"])
def test_inner_units_of_quantised_models_fold(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One to the same bits, and one whose planes under zero padding are floats."""
    entry = entries()[name]
    if entry.skip:
        pytest.skip(entry.skip)
    monkeypatch.setattr(quantised, "CACHE", tmp_path)
    outcome = ask(Subject.of(entry), "ONNX", "inner units", tmp_path)
    assert (outcome.verdict, outcome.detail) == ("exact", "")
    assert outcome.parameters[1] < outcome.parameters[0]
    assert (outcome.error == 0) or name == "resnet20_int8"
