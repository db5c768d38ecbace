"""Texts through a tokenizer: files, roles of inputs, padding that does not count, and clear errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokens import make_tokenizer

from cmrc.errors import InputError
from cmrc.ir.graph import Value
from cmrc.reduction.samples import Reading, Samples, read_samples
from cmrc.reduction.texts import Texts

pytest.importorskip("tokenizers", reason="tokenizers is not installed: cmrc[text]")

BERT = tuple(Value(name, ("batch", "sequence"), "int64") for name in ("input_ids", "attention_mask", "token_type_ids"))


def read(path: Path, inputs: tuple[Value, ...] = BERT, length: int | None = None) -> Samples:
    return read_samples(path, inputs, Reading(texts=Texts(make_tokenizer(path.parent / "tokenizer"), length)))


def rows(samples: Samples) -> dict[str, np.ndarray]:
    return samples.take(np.arange(len(samples)))


def test_lines_become_padded_tokens_with_their_mask(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Call me Ishmael\n\nthe whale\n")
    samples = read(tmp_path / "a.txt")
    taken = rows(samples)
    assert taken["input_ids"].tolist() == [[2, 4, 5, 6, 3], [2, 7, 8, 3, 0]]
    assert taken["attention_mask"].tolist() == [[1] * 5, [1, 1, 1, 1, 0]]
    assert taken["token_type_ids"].tolist() == [[0] * 5] * 2
    assert taken["input_ids"].dtype == np.int64
    assert (samples.mask, samples.what, samples.remarks) == ("attention_mask", "2 texts of a.txt, 5 tokens", ())


def test_paragraphs_lines_folders_and_json(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("call\nme\n\nishmael")  # two paragraphs
    (folder / "b.txt").write_text("the\nwhale\n")  # two lines
    (folder / "c.jsonl").write_text('{"text": "whale"}\n\n"me"\n')
    samples = read(folder)
    assert rows(samples)["attention_mask"].sum(1).tolist() == [4, 3, 3, 3, 3, 3]
    (tmp_path / "l.jsonl").write_text('{"sentence": "the whale", "label": 1}\n{"sentence": "me", "label": 0}\n')
    assert rows(read(tmp_path / "l.jsonl"))["labels"].tolist() == [1, 0]


def test_long_texts_are_cut_and_fixed_lengths_are_filled(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the whale the whale the whale\nme\n")
    cut = read(tmp_path / "a.txt", length=4)
    assert rows(cut)["input_ids"].tolist() == [[2, 7, 8, 3], [2, 5, 3, 0]]
    assert cut.remarks == ("1 of 2 texts are longer than 4 tokens, and are cut: say length= for more",)
    filled = read(tmp_path / "a.txt", tuple(Value(v.name, ("n", 9), "int32") for v in BERT))
    assert rows(filled)["input_ids"].shape == (2, 9)
    assert rows(filled)["input_ids"].dtype == np.int32


def test_without_a_mask_nothing_is_padded(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the whale the whale\nme\n")
    samples = read(tmp_path / "a.txt", (Value("ids", ("n", "t"), "int64"),), length=4)
    assert rows(samples)["ids"].tolist() == [[2, 7, 8, 7], [8, 3, 2, 5]]
    assert (samples.mask, samples.what) == (None, "2 windows of a.txt, 4 tokens")


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.txt", "\n", "input: there is no text in it\n  at a.txt\n  fix: give a .txt file, a folder of them, or a .jsonl file with a "
         "`text` in every line"),
        ("a.jsonl", '{"text": "me"}\n{"body": "me"}', 'input: line 2 has no text\n  at a.jsonl\n  fix: name it one of text, sentence, '
         'content, input, prompt, question: {"text": "..."}'),
        ("a.jsonl", "me", "input: line 1 is not JSON: Expecting value\n  at a.jsonl\n  fix: write one object per line"),
    ],
)  # fmt: skip
def test_texts_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(content)
    with pytest.raises(InputError) as caught:
        read(Path(name))
    assert str(caught.value) == text


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("me\nthe whale\n")
    errors = {}
    for what, texts, inputs in (
        ("none", Texts(), BERT),
        ("empty", Texts(Path("nowhere")), BERT),
        ("pixels", Texts(Path("nowhere")), (Value("x", ("n", 3, 8, 8), "float32"),)),
        ("state", Texts(Path("nowhere")), (*BERT, Value("state", ("n", 4), "int64"))),
    ):
        with pytest.raises(InputError) as caught:
            read_samples(Path("a.txt"), inputs, Reading(texts=texts))
        errors[what] = str(caught.value)
    assert errors["none"] == (
        "input: texts need the tokenizer of the model\n  at a.txt\n"
        "  fix: name the folder that holds its tokenizer.json: tokenizer="
    )
    assert errors["empty"].startswith(
        "input: there is no tokenizer.json\n  at nowhere\n  fix: name the folder of a fast"
    )
    assert errors["pixels"].startswith(
        "input: texts are for inputs of tokens, [samples, tokens]; input 'x' is float32 "
    )
    assert errors["state"].startswith("input: input 'state' is none that a tokenizer gives (token numbers, mask, ")
