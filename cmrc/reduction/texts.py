"""Texts as rows of tokens, by the tokenizer of a Hugging Face folder.

    notes.txt            a text per paragraph where blank lines part them, else per line
    a folder of .txt     the texts of every file
    reviews.jsonl        one JSON object per line: its `text`, and its `label` if it has one

The name of an input says what it takes: token numbers, attention mask, token types, positions. A longer text is cut. For a
model without a mask, as language models often are, the texts are joined and cut into windows, so that nothing is padded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cmrc.errors import InputError
from cmrc.ir.graph import Array, Value, numpy_dtype

SUFFIXES = (".txt", ".jsonl")
LENGTH = 128  # tokens, unless the model or the user says otherwise
KEYS = ("text", "sentence", "content", "input", "prompt", "question")
LABELS = ("label", "labels")
FILES = "give a .txt file, a folder of them, or a .jsonl file with a `text` in every line"


@dataclass(frozen=True, slots=True)
class Texts:
    """How texts are read: the folder with the tokenizer, and how many tokens a text has at most."""

    tokenizer: Path | None = None
    length: int | None = None


@dataclass(frozen=True, slots=True)
class TextRows:
    """All texts as arrays by input name, and which input tells real tokens from padding."""

    arrays: dict[str, Array]
    mask: str | None
    what: str
    remarks: tuple[str, ...]


def is_text(path: Path) -> bool:
    if path.is_file():
        return path.suffix.lower() in SUFFIXES
    return path.is_dir() and not any(path.glob("*.np[yz]")) and any(_files(path))


def read_texts(path: Path, inputs: Sequence[Value], asked: Texts) -> TextRows:
    """Every text under a path, tokenized for a model with these inputs."""
    if asked.tokenizer is None:
        raise InputError(
            "texts need the tokenizer of the model",
            at=str(path),
            fix="name the folder that holds its tokenizer.json: tokenizer=",
        )
    roles = {value.name: _role(value, inputs) for value in inputs}
    for value in inputs:
        if len(value.shape) != 2 or value.dtype not in ("int64", "int32"):
            raise InputError(
                f"texts are for inputs of tokens, [samples, tokens]; input {value.name!r} is {value.dtype} {list(value.shape)}",
                at=str(path),
                fix="give arrays (.npz), or a loader: script.py:loader",
            )
    labelled = [pair for file in ([path] if path.is_file() else _files(path)) for pair in _texts(file)]
    if not labelled:
        raise InputError("there is no text in it", at=str(path), fix=FILES)
    tokenizer = _tokenizer(asked.tokenizer)
    fixed = {int(n) for value in inputs for n in value.shape[1:] if isinstance(n, int)}
    length = min([*fixed, asked.length or LENGTH])
    mask = next((name for name, role in roles.items() if role == "mask"), None)
    remarks = []
    if mask is None:
        numbers = _windows(tokenizer, [text for text, _ in labelled], length, path)
    else:
        tokenizer.enable_truncation(length)
        tokenizer.enable_padding(length=max(fixed, default=None), **_padding_of(tokenizer, asked.tokenizer))
        encoded = tokenizer.encode_batch([text for text, _ in labelled])
        parts = [(each.ids, each.attention_mask, each.type_ids) for each in encoded]
        numbers = {
            role: np.array(part) for role, part in zip(("ids", "mask", "types"), zip(*parts, strict=True), strict=True)
        }
        if cut := sum(bool(each.overflowing) for each in encoded):
            remarks.append(
                f"{cut} of {len(labelled)} texts are longer than {length} tokens, and are cut: say length= for more"
            )
    numbers["positions"] = np.broadcast_to(np.arange(numbers["ids"].shape[1]), numbers["ids"].shape)
    arrays = {value.name: numbers[roles[value.name]].astype(numpy_dtype(value.dtype)) for value in inputs}
    labels = [label for _, label in labelled]
    if mask is not None and all(isinstance(label, int) for label in labels):
        arrays["labels"] = np.array(labels)
    of = f"{len(labelled)} texts" if mask else f"{len(numbers['ids'])} windows"
    what = f"{of} of {path.name}, {numbers['ids'].shape[1]} tokens"
    return TextRows(arrays, mask, what, tuple(remarks))


def _role(value: Value, inputs: Sequence[Value]) -> str:
    name = value.name.lower()
    for word, role in (("mask", "mask"), ("type", "types"), ("segment", "types"), ("position", "positions")):
        if word in name:
            return role
    if "ids" in name or "token" in name or len(inputs) == 1:
        return "ids"
    raise InputError(
        f"input {value.name!r} is none that a tokenizer gives (token numbers, mask, token types, positions)",
        fix="give arrays (.npz), or a loader: script.py:loader",
    )


def _windows(tokenizer: Any, texts: Sequence[str], length: int, path: Path) -> dict[str, Array]:
    """All texts one after the other, in windows without padding."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    stream = np.concatenate([each.ids for each in tokenizer.encode_batch(list(texts))])
    count = len(stream) // length
    if count < 2:
        raise InputError(
            f"{len(stream)} tokens do not fill two windows of {length}",
            at=str(path),
            fix="give more text, or a smaller length=",
        )
    ids = stream[: count * length].reshape(count, length)
    return {"ids": ids, "types": np.zeros_like(ids)}


def _tokenizer(folder: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise InputError("tokenizers is not installed, which reads texts", fix="pip install 'cmrc[text]'") from error
    file = folder / "tokenizer.json" if folder.is_dir() else folder
    if not file.is_file():
        raise InputError(
            "there is no tokenizer.json",
            at=str(folder),
            fix="name the folder of a fast tokenizer; transformers writes one: AutoTokenizer.from_pretrained(...).save_pretrained(folder)",
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises a bare Exception
        raise InputError(f"is no tokenizer that can be read: {error}", at=str(file), fix="save it again") from error
    return tokenizer


def _padding_of(tokenizer: Any, folder: Path) -> dict[str, Any]:
    """The padding token: that of the tokenizer's own file, else that of the settings beside it, else the end of a text."""
    if tokenizer.padding is not None:
        return {name: tokenizer.padding[name] for name in ("direction", "pad_id", "pad_type_id", "pad_token")}
    settings = folder / "tokenizer_config.json"
    said = json.loads(settings.read_text()) if settings.is_file() else {}
    for key in ("pad_token", "eos_token", "unk_token"):
        token = said.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None and tokenizer.token_to_id(token) is not None:
            return {"pad_token": token, "pad_id": tokenizer.token_to_id(token)}
    return {}


def _files(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())


def _texts(file: Path) -> Iterator[tuple[str, int | None]]:
    """The texts of a file, with their labels."""
    try:
        content = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"is not UTF-8: {error.reason}", at=str(file), fix="save it as UTF-8") from error
    if file.suffix.lower() == ".txt":
        paragraphs = [" ".join(part.split()) for part in content.split("\n\n")]
        parts = [part for part in paragraphs if part]
        if len(parts) < 2:
            parts = [line.strip() for line in content.splitlines() if line.strip()]
        yield from ((part, None) for part in parts)
        return
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            yield _text_of(line, file, number)


def _text_of(line: str, file: Path, number: int) -> tuple[str, int | None]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(
            f"line {number} is not JSON: {error.msg}", at=str(file), fix="write one object per line"
        ) from error
    if isinstance(row, str):
        return row, None
    text = next((row[key] for key in KEYS if isinstance(row.get(key), str)), None) if isinstance(row, dict) else None
    if text is None:
        raise InputError(
            f"line {number} has no text", at=str(file), fix=f'name it one of {", ".join(KEYS)}: {{"text": "..."}}'
        )
    label = next((row[key] for key in LABELS if isinstance(row.get(key), int)), None)
    return text, label
