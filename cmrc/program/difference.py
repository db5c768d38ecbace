"""What two plans replace differently."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cmrc.ir.graph import Do
from cmrc.program.plan import Plan
from cmrc.program.plan_entry import to_ranges


def difference(first: Plan, second: Plan) -> list[dict[str, Any]]:
    """By site, what two plans replace differently: which units, and how far the values of common units differ."""
    rows = []
    sites = dict.fromkeys(entry.site for plan in (first, second) for entry in plan.entries)
    for site in sites:
        mine, other = ({u: e for e in plan.entries if e.site == site for u in e.units} for plan in (first, second))
        both = sorted(set(mine) & set(other))
        apart = max((_apart(mine[u], other[u], u) for u in both), default=0.0)
        if set(mine) == set(other) and apart == 0.0:
            continue
        scores = next((plan.scores[site] for plan in (first, second) if site in plan.scores), None)
        units = len(scores) if scores is not None else max([*mine, *other]) + 1
        kept, either = units - len(set(mine) | set(other)), units - len(both)
        rows.append(
            {"site": site, "first": to_ranges(sorted(set(mine) - set(other))),
             "second": to_ranges(sorted(set(other) - set(mine))), "only_first": len(set(mine) - set(other)), "only_second": len(set(other) - set(mine)), "both": len(both),
             "jaccard": kept / either if either else 1.0, "values": apart if np.isfinite(apart) else None}
        )  # fmt: skip
    return rows


def _apart(mine: Do, other: Do, unit: int) -> float:
    """How far the replacements of a unit differ; infinite if they are of different kinds, shapes or bases."""
    parts = []
    for entry in (mine, other):
        place = entry.units.index(unit)
        constant = entry.constant if entry.constant.ndim == 1 else np.moveaxis(entry.constant, entry.axis, 0)
        parts.append((constant[place], entry.parents, None if entry.weight is None else entry.weight[place]))
    (c1, p1, w1), (c2, p2, w2) = parts
    if not np.array_equal(mine.basis, other.basis):  # type: ignore[arg-type]
        return math.inf
    if np.shape(c1) != np.shape(c2) or p1 != p2:
        return math.inf
    gap = float(np.max(np.abs(c1 - c2)))
    return gap if w1 is None or w2 is None else max(gap, float(np.max(np.abs(w1 - w2))))
