"""A lowered torch model as ONNX: the original is exported once for each program, and every plan is lowered on the ONNX side.

    program ── torch.onnx.export, once ──> ONNX program ── the plan's do's, by the names of their values ──> lower ──> file
                                                                              │
                        the lowered torch model, on random inputs  <──── the same?

The exporter takes nine tenths of saving. It keeps the names of values, but may merge or fold some of them. So the result is compared
with the lowered torch model. Where a value has no counterpart, something does not fold, or the two differ, there is no result, and the
lowered model is exported itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cmrc.errors import CmrcError
from cmrc.hosts.inputs import random_batches
from cmrc.hosts.protocols import Host
from cmrc.ir.graph import Array, Do

UNITS = 256  # unit roundoffs by which two runtimes may differ, relative to the largest number of an output
SHARE = 1e-3  # of what the replacement itself does: one in a wrong place does far more


def carried(entries: Sequence[Do], torch: Host, onnx: Host) -> list[Do]:
    """The entries for the values of the same names in the export, where those have the same types and sizes."""
    return [_carried(entry, torch, onnx) for entry in entries]


def _carried(entry: Do, torch: Host, onnx: Host) -> Do:
    was, now = (host.graph.values().get(entry.value) for host in (torch, onnx))
    if was is None or now is None or was.dtype != now.dtype or _sizes(was.shape) != _sizes(now.shape):
        raise CmrcError("the export has no such value", node=entry.value)
    return replace(entry, site=entry.value)


def _sizes(shape: Sequence[int | str]) -> list[int | None]:
    return [n if isinstance(n, int) else None for n in shape]


def agree(original: Host, lowered: Host, exported: Host) -> bool:
    """Whether both lowered models compute the same, much closer than the replacement moved the outputs."""
    (batch,) = random_batches(original, count=1)
    given = list(batch.values())
    before, wanted, got = (host.run(given) for host in (original, lowered, exported))
    return len(wanted) == len(got) and all(map(_close, before, wanted, got))


def _close(before: Array, wanted: Array, other: Array) -> bool:
    if wanted.dtype != other.dtype or wanted.shape != other.shape:
        return False
    if wanted.dtype.kind in "biu" or not wanted.size:
        return np.array_equal(wanted, other)
    was, want, got = (array.astype(np.float64) for array in (before, wanted, other))
    if was.shape != want.shape or not np.isfinite(want).all():
        return False
    rounding = UNITS * float(np.finfo(wanted.dtype).eps) / 2 * float(np.abs(want).max())
    return float(np.abs(got - want).max()) <= max(rounding, SHARE * float(np.abs(was - want).max()))
