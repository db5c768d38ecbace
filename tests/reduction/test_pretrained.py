"""A Hugging Face folder, as `save_pretrained` writes it, goes through `cmrc reduce` with texts and its own tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tokens import make_tokenizer

import cmrc
from cmrc.reduction.measuring import Judge
from cmrc.reduction.samples import Reading, first_rows
from cmrc.reduction.subject import Subject, split_data
from cmrc.reduction.texts import Texts
from cmrc.statistics.batches import SIZE
from cmrc.verification.interpreter import Interpreter

transformers = pytest.importorskip("transformers", reason="transformers is not installed: cmrc[text]")


def make_folder(folder: Path, kind: str) -> Path:
    """A BERT of two thin layers with its tokenizer."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=9, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, num_labels=3,
        max_position_embeddings=40,
    )  # fmt: skip
    getattr(transformers, kind)(config).save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def write_texts(path: Path, count: int = 160) -> Path:
    words = np.array(["call", "me", "ishmael", "the", "whale"])
    draw = np.random.default_rng(0)
    path.write_text("\n".join(" ".join(draw.choice(words, draw.integers(2, 9))) for _ in range(count)))
    return path


def test_a_classifier_of_texts(tmp_path: Path) -> None:
    folder, texts = make_folder(tmp_path / "bert", "BertForSequenceClassification"), write_texts(tmp_path / "a.txt")
    result = cmrc.reduce(folder, texts, frontier=[0.8], pick=0.8, refit=False, timed=False)
    masked = result.recipe["positions"]
    assert set(masked.values()) == {"attention_mask"}
    assert set(masked) == {"gelu", "gelu_1", "transpose_3", "transpose_7"}  # not the pooler, which has no tokens
    assert set(result.to_json()["widths"]) >= {
        f"bert.encoder.layer.{i}.intermediate.intermediate_act_fn" for i in (0, 1)
    }
    assert result.check.holds
    result.save(tmp_path / "small.onnx")
    ids = np.array([[2, 4, 5, 3, 0], [2, 7, 8, 6, 3]])
    mask = (ids > 0).astype(np.int64)
    small = cmrc.trace(tmp_path / "small.onnx")
    assert small.run({"input_ids": ids, "attention_mask": mask})[0].shape == (2, 3)
    assert small.cost().parameters < result.whole.parameters


def test_an_encoder_agrees_where_the_nearest_stays(tmp_path: Path) -> None:
    folder, texts = make_folder(tmp_path / "bert", "BertModel"), write_texts(tmp_path / "a.txt")
    result = cmrc.reduce(folder, texts, frontier=[0.8], pick=0.8, refit=False, timed=False)
    assert any(
        remark.startswith(
            "the output is an embedding: two models agree on a sample if what the small one finds nearest among 120 calibration "
            "samples is as near for the original as its own nearest, up to a cosine of 0."
        )
        for remark in result.remarks
    )
    assert 0.2 < result.measures.quality.agreement.value <= 1
    assert result.recipe["loss"] == "squared-error"
    named = result.to_json()["widths"]
    assert any(name.startswith("encoder.layer.0.attention.self/") for name in named), (
        named
    )  # the heads: not transpose_3


def test_padding_that_is_not_run_changes_nothing(tmp_path: Path) -> None:
    """Texts of about the same length share a batch that ends with the longest: the original answers as it does on padded rows."""
    folder, texts = make_folder(tmp_path / "bert", "BertModel"), write_texts(tmp_path / "a.txt")
    program = cmrc.trace(folder)
    reading = Reading(texts=Texts(folder))
    rows = split_data(program, texts, 0.25, reading, batch=16)
    subject = Subject(program, rows, folder, 0, True)
    judged = subject.rows.judged
    assert judged.is_trimmed
    assert len({batch["input_ids"].shape[1] for batch in judged}) > 1
    judge = Judge(program, judged, others=subject.rows.calibration, reads="embedding")
    everything = judged.all()
    whole = Interpreter(program).run({value.name: everything[value.name] for value in program.graph.inputs})
    for trimmed, padded in zip(judge.outputs, whole, strict=True):
        assert trimmed.shape == padded.shape
        if padded.ndim == 3:
            trimmed, padded = (array[everything["attention_mask"] == 1] for array in (trimmed, padded))
        np.testing.assert_allclose(trimmed, padded, atol=1e-5)
    lowered = cmrc.lower(program, cmrc.Plan(program))
    assert judge.run(lowered) is judge.run(lowered)  # run once


def test_batches_of_long_texts_are_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of any length holds as many values as its texts have tokens: with them counted as one, a batch took gigabytes."""
    folder, texts = make_folder(tmp_path / "bert", "BertModel"), write_texts(tmp_path / "a.txt")
    monkeypatch.setattr("cmrc.reduction.subject.VALUES", 2**21)
    program, batches = cmrc.trace(folder), []
    for length in (8, 32):
        rows = split_data(program, texts, 0.25, Reading(texts=Texts(folder, length)), batch=None)
        subject = Subject(program, rows, folder, 0, True)
        tokens = first_rows(subject.rows.judged, 1)["input_ids"].shape[1]
        batches.append((tokens, subject.rows.judged.batch))
    (few, large), (many, small) = batches
    assert many > few
    assert 1 < small < large < SIZE
    assert large / small == pytest.approx(many / few, rel=0.5)


def test_a_language_model_reads_windows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=9, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    make_tokenizer(tmp_path / "llama")
    texts = write_texts(tmp_path / "a.txt", 400)
    result = cmrc.reduce(tmp_path / "llama", texts, frontier=[0.9], pick=0.9, refit=False, timed=False, length=16)
    assert result.data.what.endswith("windows of a.txt, 16 tokens")
    assert result.check.holds
