"""How many units of each site are replaced: by `keep`, or by one budget for all sites."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cmrc.ir.graph import Array
from cmrc.planning.allocate import Curve, allocate
from cmrc.planning.ranking import Ranked
from cmrc.planning.recipe import KEEP, Recipe
from cmrc.program.program import Program
from cmrc.program.sites import Site

CHANNELS = 8  # conv widths that are no multiple of 8 were measured to be slower than the next one that is


def _part(amount: float, units: int) -> int:
    """A number of units: a whole number, or a part of them."""
    return min(amount, units) if isinstance(amount, int) else round(amount * units)


def _lookup(by_name: Mapping[str, Any], site: Site, program: Program) -> Any:
    """What a mapping by name or glob says of a site: the first that fits."""
    names = [name for name, values in program.host.names.items() if list(values) == [site.value]]
    for pattern, value in by_name.items():
        if pattern in (site.name, site.value) or any(fnmatch.fnmatchcase(name, pattern) for name in names):
            return value
    return None


def _multiple(program: Program, site: Site, recipe: Recipe) -> int:
    multiple = recipe.multiple_of
    if isinstance(multiple, dict):
        multiple = _lookup(multiple, site, program)
    if multiple is None:
        readers = [node for node in program.consumers[site.value] if node.op == "conv"]
        multiple = CHANNELS if readers and site.units % CHANNELS == 0 else 1
    return int(multiple)


def _least(site: Site, recipe: Recipe) -> int:
    return max(1, _part(recipe.minimum, site.units))


def _kept(program: Program, site: Site, recipe: Recipe, keep: float) -> int:
    """How many units stay: at least the minimum, rounded up to the multiple, never more than there are."""
    step = _multiple(program, site, recipe)
    wanted = max(_part(keep, site.units), _least(site, recipe))
    return min(site.units, math.ceil(wanted / step) * step)


def final_counts(program: Program, ranked: Sequence[Ranked], recipe: Recipe) -> list[int]:
    """How many units of each site are replaced in the end."""
    if recipe.budget is not None:
        curves = [
            Curve(r.site, _risk(r, recipe), _multiple(program, r.site, recipe), _least(r.site, recipe)) for r in ranked
        ]
        return allocate(program, curves, recipe.budget)
    counts = []
    for r in ranked:
        keep = KEEP if recipe.keep is None else recipe.keep
        if isinstance(keep, dict):
            keep = _lookup(keep, r.site, program)
        counts.append(0 if keep is None else r.site.units - _kept(program, r.site, recipe, keep))
    return counts


def counts_of_steps(recipe: Recipe, ranked: Sequence[Ranked]) -> list[list[int]]:
    """How many units of each site are replaced after each earlier step."""
    return [[r.site.units - max(1, _part(keep, r.site.units)) for r in ranked] for keep in recipe.schedule]


def _risk(r: Ranked, recipe: Recipe) -> Array:
    """The risk of replacing the first k units, k = 0, 1, ...: of the loss, or as a part of what the next op varies by.

    Only the loss is the same measure at every site; distortions of different ops are compared by their share.
    """
    curve = np.concatenate([[0.0], np.cumsum(np.maximum(r.order.added, 0.0))])
    if recipe.method.objective in ("task", "removal"):
        return curve
    total = float(curve[-1])
    return curve / total if total > 0 else curve
