"""`check` lets a right result pass with room, and sees every single entry of a file that is off by a thousandth."""

from __future__ import annotations

from pathlib import Path

from tests.numerics.tolerance import measure

DIGITS = Path(__file__).parent.parent.parent / "examples" / "digits.onnx"


def test_one_wrong_entry_of_a_fold_is_noticed() -> None:
    measured = measure(DIGITS, cases=20)
    assert measured.right < 0.5
    assert sum(ratio > 1 for ratio in measured.wrong) >= 10
    assert measured.in_file == 20
    assert measured.right_in_file
