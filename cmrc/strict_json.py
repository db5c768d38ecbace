"""JSON that means one thing only: for documents that somebody else wrote."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

DEEPEST = 64  # levels of lists and objects
STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
BRACKET = re.compile(r"[][{}]")
LARGE = re.compile(r"[eE]\+?\d{3}|\d{200}")  # what may be a number too large for a float


def parse_json(data: bytes | str) -> Any:
    """A JSON document by the letter of the standard; ValueError says what is wrong with any other.

    Python's own reader takes the last of two equal keys, NaN and Infinity, text that cannot be written again, and lists
    so deep that whoever walks them fails.
    """
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data.encode("utf-8").decode("utf-8")
        bare = STRING.sub("", text) if "\\" in text else "".join(text.split('"')[::2])
        _require_shallow(bare)
        document = json.loads(text, object_pairs_hook=_distinct, parse_constant=_refuse_constant)
        if LARGE.search(bare) or "\\u" in text:  # perhaps infinite, or half of a surrogate pair
            json.dumps(document, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise ValueError(f"it is not UTF-8: {error.reason}") from error
    except RecursionError as error:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep") from error
    return document


def parse_records(text: Any, *, fields: int) -> list[tuple[int, dict[str, Any]]]:
    """The orders and entries of [[order, ..., entry], ...], each of so many fields: how hosts record a plan on a model."""
    records = parse_json(text) if isinstance(text, str) else text
    for record in records if isinstance(records, list) else [records]:
        whole = isinstance(record, list) and len(record) == fields
        if not whole or type(record[0]) is not int or not isinstance(record[-1], dict):
            raise ValueError("a record is not the number of a do and the do")
    return [(record[0], record[-1]) for record in records]


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return document


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a number of JSON")


def _require_shallow(bare: str) -> None:
    """Counted in the text without its strings: it has far fewer brackets than numbers."""
    depth = 0
    for bracket in BRACKET.findall(bare):
        depth += 1 if bracket in "[{" else -1
        if depth > DEEPEST:
            raise RecursionError
