"""Drawn mutants that no test notices because nothing is wrong with them: each with the reason."""

from __future__ import annotations

EXPLAINED: dict[str, str] = {
    "affine_fold._scaled: 1 -> 2 (7)": "numpy takes any negative size of a reshape as the one to work out: -2 means what -1 means",
    "onnx.attention.read_attention: 0 -> 1 (9)": (
        "it asks for the number of axes of the queries, then of the keys: Attention takes both with three axes or both with four"
    ),
    "onnx.table: 7 -> 8": "a model older than opset 9 is converted before it is read, so that none of opset 7 is read",
}
