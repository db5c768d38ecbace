"""The page says what the records say, there is an answer to every question, and a model that dies is one too."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import matrix
import page
from models import Entry, entries


def test_the_page_is_not_stale() -> None:
    assert page.PAGE.read_text() == page.text(), "run: bash tests/zoo/run.sh --page"


def test_the_page_names_every_model_that_has_not_answered_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "entries", lambda: {name: entries()[name] for name in ("vit", "gpt2")})
    answers = [{"host": host, "request": request} for host, request in page.asks(entries()["vit"])]
    text = page.missing([{"model": "vit", "answers": answers[1:]}])
    assert text == ["* vit: torch inner units", "* gpt2: anything"]
    assert page.missing([{"model": "vit", "answers": answers}]) == ["* gpt2: anything"]


def test_every_model_has_answered_everything() -> None:
    """A model that cannot be built here says so, and may have no record."""
    text = page.missing(page.documents())
    assert [line for line in text if not entries()[line.split(":")[0].removeprefix("* ")].skip] == []


def test_no_answer_is_a_failure() -> None:
    failed = [
        (model["model"], answer["host"], answer["request"], answer["detail"])
        for model in page.documents()
        for answer in model["answers"]
        if answer["verdict"] == "fails"
    ]
    assert failed == []


def test_every_decline_says_why_nothing_exact_exists() -> None:
    declined = [
        (model["model"], answer["detail"])
        for model in page.documents()
        for answer in model["answers"]
        if answer["verdict"] == "declined"
    ]
    assert [one for one in declined if not any(words in one[1] for words in page.WHY)] == []


def test_no_record_is_left_of_a_model_that_went() -> None:
    assert {path.stem for path in page.RECORDS.glob("*.json")} <= set(entries())


def test_a_process_that_dies_or_stalls_is_an_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(
        "import json, sys, time\n"
        "for ask in sys.argv[3:]:\n"
        "    host, request = ask.split('/')\n"
        "    if request == 'heads': sys.exit('out of luck')\n"
        "    if host == 'ONNX': time.sleep(60)\n"
        "    print('@answer ' + json.dumps({'host': host, 'request': request, 'verdict': 'exact', 'detail': ''}), flush=True)\n"
    )
    monkeypatch.setattr(matrix, "__file__", str(script))
    wanted = [("torch", "inner units"), ("torch", "heads"), ("torch", "both"), ("ONNX", "both")]
    rows = [(r["host"], r["request"], r["verdict"], r["detail"]) for r in matrix.answers("any", wanted, timeout=3.0)]
    assert rows == [
        ("torch", "inner units", "exact", ""),
        ("torch", "heads", "fails", "the process ended with 1: out of luck"),
        ("torch", "both", "exact", ""),
        ("ONNX", "both", "fails", "no answer in 3 s"),
    ]


def test_records_keep_their_order_and_replace_each_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(matrix, "RECORDS", tmp_path)
    entry = Entry("any", "hand-written", dict, dict)  # type: ignore[arg-type]
    first: dict[str, Any] = {"host": "ONNX", "request": "heads", "verdict": "fails", "detail": ""}
    matrix.write(entry, {("ONNX", "heads"): first, ("torch", "both"): {**first, "host": "torch", "request": "both"}})
    assert list(matrix.read("any")) == [("torch", "both"), ("ONNX", "heads")]
    matrix.write(entry, {**matrix.read("any"), ("ONNX", "heads"): {**first, "verdict": "exact"}})
    assert matrix.read("any")["ONNX", "heads"]["verdict"] == "exact"
