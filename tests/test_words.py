"""What people read is plain English: turns of phrase that made readers stumble do not come back."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EACH = "op|kind|unit|logit|channel|output|part|seed|head|file|node|pass|site|row|command|model|rewrite|host|sample"
SAY_INSTEAD = {
    r"says not": "needs, or does not say",
    r"so often": "how many times",
    rf"(?:one|a) (?!to|at|for|of|in)\w+ an? (?:{EACH})(?! is)": "one x per y",
    r"no good": "invalid",
    r"of run time": "known only at run time, dynamic",
    r"calibrated are": "the file has statistics for",
    r"makes? up for": "corrects for",
    r"of one's own": "its own",
    r"(?:is|are|was|were|be|been) told": "said, reported, given",
}
VAGUE = {"found", "made", "told", "held"}

# Files that keep such phrases; and such names, as keys of plan files, or still to be mended.
STUMBLE = {
    "benchmarks/pretrained.py",  # the text of a record that was measured
    "docs/results.md",
}
NAME_VAGUELY = {
    "cmrc/program/plan.py",
    "cmrc/program/plan_file.py",
    "cmrc/program/plan_schema.py",
}


def tracked(*patterns: str) -> list[str]:
    done = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("this is no git checkout")
    mine = Path(__file__).relative_to(ROOT).as_posix()
    return [name for name in done.stdout.split() if name != mine and (ROOT / name).is_file()]


def prose(name: str) -> str:
    """What a person reads in a file: all of a page, the comments and strings of a module."""
    text = (ROOT / name).read_text(encoding="utf-8")
    if not name.endswith(".py"):
        return text
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    return "\n".join(
        token.string for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type in kinds
    )


def stumbles(text: str) -> list[str]:
    flat = re.sub(r"\s+", " ", text)
    return [
        match[0]
        for pattern in SAY_INSTEAD
        for match in re.finditer(rf"\b{pattern}\b", flat, re.IGNORECASE)
        if " A " not in match[0]
    ]


def mended(now: set[str], listed: set[str]) -> str:
    gone = [f"no longer true, take it off the list: {each}" for each in sorted(listed - now)]
    return "\n".join([*gone, *(f"new: {each}" for each in sorted(now - listed))])


def test_pages_and_docstrings_read_plainly() -> None:
    now = {name: stumbles(prose(name)) for name in tracked("*.py", "*.md")}
    now = {name: phrases for name, phrases in now.items() if phrases}
    assert now.keys() == STUMBLE, f"{mended(set(now), STUMBLE)}\n{now}"


def vague_names(name: str) -> set[str]:
    tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return VAGUE & (names | {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)})


def test_local_names_say_what_they_hold() -> None:
    now = {name for name in tracked("*.py") if vague_names(name)}
    assert now == NAME_VAGUELY, mended(now, NAME_VAGUELY)


@pytest.mark.parametrize("phrase", ["it says not how much", "one rule an op", "a row a kind", "Sizes of\nrun time"])
def test_a_stumble_is_noticed(phrase: str) -> None:
    assert stumbles(phrase)


@pytest.mark.parametrize("phrase", ["one rule per op", "one at a time", "known only at run time", "one of a pair"])
def test_plain_phrases_pass(phrase: str) -> None:
    assert not stumbles(phrase)
