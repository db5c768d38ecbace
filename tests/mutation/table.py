"""All rows."""

from __future__ import annotations

from tests.mutation import (
    in_constant_fold,
    in_fx,
    in_ir,
    in_later,
    in_newest,
    in_onnx,
    in_passes,
    in_planning,
    in_program,
    in_statistics,
    in_verification,
)
from tests.mutation.mutant import Mutant

ROOMS = {
    "ir": in_ir.bug,
    "constant_fold": in_constant_fold.bug,
    "passes": in_passes.bug,
    "onnx": in_onnx.bug,
    "fx": in_fx.bug,
    "program": in_program.bug,
    "statistics": in_statistics.bug,
    "planning": in_planning.bug,
    "verification": in_verification.bug,
    "later": in_later.bug,
    "newest": in_newest.bug,
}
MUTANTS: dict[str, Mutant] = {row.name: row for table in ROOMS.values() for row in table.rows}
