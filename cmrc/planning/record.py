"""What a plan records about how it was made: `plan.made`, which `cmrc plan show` prints and a plan file holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cmrc.ir.graph import Array
from cmrc.planning.learned import learnable
from cmrc.planning.objectives import decomposition
from cmrc.planning.ranking import Ranked
from cmrc.planning.recipe import AUTO, Recipe
from cmrc.program.program import Program
from cmrc.statistics.site_stats import SiteStats
from cmrc.statistics.stats import Stats


def record_of_plan(
    recipe: Recipe, stats: Stats, ranked: Sequence[Ranked], counts: Sequence[int], left_out: Mapping[str, str]
) -> dict[str, Any]:
    """The recipe, the data, and for each site how many units stay and what their removal is predicted to add to the loss."""
    sites = {}
    for r, count in zip(ranked, counts, strict=True):
        entry: dict[str, Any] = {"units": r.site.units, "kept": r.site.units - count}
        entry["predicted"] = float(r.order.added[:count].sum())
        if recipe.preset == AUTO:
            entry["preset"] = r.recipe.preset
        if r.ordered_by:
            entry["order"] = r.ordered_by
        if r.stats.how:
            entry["curvature"] = r.stats.how
        if r.scores.fell_back.any():
            entry["mean instead of c*"] = int(r.scores.fell_back.sum())
        sites[r.site.name] = entry
    record = {"recipe": recipe.to_json(), "data": stats.digest, "samples": stats.samples, "sites": sites}
    return {**record, "left_out": dict(left_out)} if left_out else record


def record_of_replacements(program: Program, recipe: Recipe, stats: SiteStats, units: Array) -> dict[str, Any]:
    """How the units of a site were replaced, by the statistics of the step that replaced them."""
    rule = recipe.method.replace
    if rule == "learned":
        return {"learned": learnable(program, stats) is not None}
    if rule not in ("optimal", "refit") or recipe.recompute != "never" or not len(units):
        return {}
    return {"c*": _decomposed(stats, units)}


def _decomposed(stats: SiteStats, units: Array) -> dict[str, Any]:
    """What the c* of units that this step replaced are made of; of heads, whose constants are vectors, the lengths."""
    chosen = sorted(int(unit) for unit in units)
    parts = decomposition(stats)
    by_unit = [stats.columns.by_unit(part)[chosen] for part in (parts.weighted_mean, parts.gradient)]
    lengths = stats.columns.features > 1
    mean, gradient = (np.linalg.norm(p, axis=1) if lengths else p[:, 0] for p in by_unit)
    return {"units": chosen, "lengths": lengths, "weighted mean": mean.tolist(), "gradient part": gradient.tolist()}
