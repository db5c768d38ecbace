"""`check` lets a right result pass with room, and notices most single entries that are off by a thousandth (the record has the share)."""

from __future__ import annotations

from pathlib import Path

from tests.numerics.tolerance import measure

DIGITS = Path(__file__).parent.parent.parent / "examples" / "digits.onnx"


def test_one_wrong_entry_of_a_fold_is_noticed() -> None:
    measured = measure(DIGITS, cases=20)
    assert measured.right < 0.5
    assert sum(ratio > 1 for ratio in measured.wrong) >= 10
