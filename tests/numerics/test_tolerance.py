"""`check` lets a right result pass with room, and sees every single entry of a file that is off by a thousandth."""

from __future__ import annotations

from pathlib import Path

from cmrc.program.check import FOLDED
from tests.numerics.tolerance import measure

DIGITS = Path(__file__).parent.parent.parent / "examples" / "digits.onnx"


def test_one_wrong_entry_of_a_fold_is_noticed() -> None:
    measured = measure(DIGITS, cases=20)
    assert measured.right < 0.5
    assert sum(ratio > 1 for ratio in measured.wrong) >= 10
    assert measured.in_file == 20
    assert measured.right_in_file
    assert measured.right_in_float64 is not None
    assert measured.right_in_float64 < 1e-14
    assert sum(apart > FOLDED for apart in measured.in_float64) >= 15  # the others are of units that are off there
