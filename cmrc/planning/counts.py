"""How many units of each site are replaced: by `keep`, or by one budget for all sites."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cmrc.ir.graph import Array
from cmrc.planning.allocate import Curve, allocate, require_reach
from cmrc.planning.probe import LossProbe, probed_counts
from cmrc.planning.ranking import Ranked
from cmrc.planning.recipe import KEEP, Recipe
from cmrc.program.program import Program
from cmrc.program.reach import passed_by
from cmrc.program.sites import Site

POWERS = (0.5, 2.0)  # of a risk, as losses grow with it
ALIKE = 1.05  # times the least loss of a candidate: of those up to here the one with the fewest parameters is taken
STEPS_WORTH = 1.1  # times the loss of the finest widths: the steps that the hardware likes may cost this much
NOTHING = 1e-12  # the loss of a site whose units do not reach the output
CHANNELS = 8  # conv widths that are no multiple of 8 were measured to be slower than the next one that is
FINE = 4  # of a narrow site: steps of 8 out of 16 channels leave no choice, which costs more than the speed is worth
NARROW = 128  # channels


def _part(amount: float, units: int) -> int:
    """A number of units: a whole number, or a fraction of all units."""
    return min(amount, units) if isinstance(amount, int) else round(amount * units)


def _lookup(by_name: Mapping[str, Any], site: Site, program: Program) -> Any:
    """The value for a site in a mapping by name or glob: the first that matches."""
    names = [name for name, values in program.names.items() if list(values) == [site.value]]
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
        step = CHANNELS if site.units >= NARROW else FINE
        multiple = step if readers and site.units % step == 0 else 1
    return int(multiple)


def _least(site: Site, recipe: Recipe) -> int:
    return max(1, _part(recipe.minimum, site.units))


def _kept(program: Program, site: Site, recipe: Recipe, keep: float) -> int:
    """How many units stay: at least the minimum, rounded up to the multiple, never more than there are."""
    step = _multiple(program, site, recipe)
    wanted = max(_part(keep, site.units), _least(site, recipe))
    return min(site.units, math.ceil(wanted / step) * step)


def final_counts(
    program: Program, ranked: Sequence[Ranked], recipe: Recipe, probe: LossProbe, larger: Sequence[int] | None = None
) -> list[int]:
    """How many units of each site are replaced in the end; `larger` are those of a larger size of the model."""
    if recipe.budget is not None:
        curves, costs = _curves(program, ranked, recipe), probe.costs_of(recipe.budget.of, [r.site for r in ranked])
        require_reach(curves, recipe.budget, costs)
        probed = [probed_counts(curve.site, vanishes=curve.may_vanish) for curve in curves]
        losses = probe.of_sites(ranked, probed)
        curves = [
            replace(curve, risk=measured_risk(curve.risk, counts, measured))
            for curve, counts, measured in zip(curves, probed, losses, strict=True)
        ]
        candidates = stepped = allocate(curves, recipe.budget, costs, larger=larger)
        if recipe.multiple_of is None and not costs.timed and any(curve.multiple > 1 for curve in curves):
            finest = allocate([replace(curve, multiple=1) for curve in curves], recipe.budget, costs, larger=larger)
            candidates = stepped + [counts for counts in finest if counts not in stepped]
        if len(candidates) == 1:
            return candidates[0]
        together = probe.together(ranked, candidates)
        in_steps = together[: len(stepped)]
        if _within(STEPS_WORTH, min(in_steps), min(together)):
            candidates, together = stepped, in_steps
        least = min(together)
        alike = [counts for counts, loss in zip(candidates, together, strict=True) if _within(ALIKE, loss, least)]
        stored = probe.costs_of("parameters", [r.site for r in ranked])
        return min(alike, key=stored.measure)
    counts = []
    for r in ranked:
        keep = KEEP if recipe.keep is None else recipe.keep
        if isinstance(keep, dict):
            keep = _lookup(keep, r.site, program)
        counts.append(0 if keep is None else r.site.units - _kept(program, r.site, recipe, keep))
    return counts


def _within(factor: float, loss: float, least: float) -> bool:
    """Whether a loss is at most so many times the least. Rounding makes a loss of next to nothing negative."""
    return not loss > max(factor * least, least)


def require_budget(program: Program, ranked: Sequence[Ranked], recipe: Recipe, probe: LossProbe) -> None:
    """Require that the budget of a recipe can be met, before any loss is measured."""
    if recipe.budget is not None:
        costs = probe.costs_of(recipe.budget.of, [r.site for r in ranked])
        require_reach(_curves(program, ranked, recipe), recipe.budget, costs)


def _curves(program: Program, ranked: Sequence[Ranked], recipe: Recipe) -> list[Curve]:
    """The units of every site that may be replaced, with the risk that its selection knows."""
    return [
        Curve(r.site, _risk(r), _multiple(program, r.site, recipe), _least(r.site, recipe), _may_vanish(program, r, recipe))
        for r in ranked
    ]  # fmt: skip


def counts_of_steps(recipe: Recipe, ranked: Sequence[Ranked]) -> list[list[int]]:
    """How many units of each site are replaced after each earlier step."""
    return [[r.site.units - max(1, _part(keep, r.site.units)) for r in ranked] for keep in recipe.schedule]


def _may_vanish(program: Program, r: Ranked, recipe: Recipe) -> bool:
    """Whether a site may lose all its units: the recipe asks for no more than one, and every output is reached without it."""
    return _least(r.site, recipe) == 1 and r.stats.columns.slots == 1 and passed_by(program, r.site)


def _risk(r: Ranked) -> Array:
    """The risk of replacing the first k units, k = 0, 1, ..., by the selection itself: even where it knows of none."""
    curve = np.concatenate([[0.0], np.cumsum(np.maximum(r.order.added, 0.0))])
    return curve if curve[-1] > 0 else np.arange(len(curve), dtype=np.float64)


def measured_risk(risk: Array, counts: Sequence[int], losses: Sequence[float]) -> Array:
    """The risk curve of a site in units of the model's output: through what was measured at some counts.

    Between two measurements, and beyond the last, loss = a · riskᵇ, with b within POWERS, so that noise in a small loss does not
    bend the curve; before the first, and with a single one, b = 1. It never falls.
    """
    known = [(risk[k], loss) for k, loss in zip(counts, losses, strict=True) if risk[k] > 0 < loss]
    if not known:  # what was cut does not reach the output: it costs next to nothing, in the order of its risk
        return np.asarray(risk / risk[-1] * NOTHING)
    (own, loss), power = known[0], 1.0
    curve = loss * risk / own
    for further, more in known[1:]:
        if further > own:
            power = float(np.clip(math.log(more / loss) / math.log(further / own), *POWERS))
            curve = np.where(risk > own, loss * (np.maximum(risk, own) / own) ** power, curve)
            own, loss = further, max(more, loss)
            curve = np.where(risk >= own, loss * (np.maximum(risk, own) / own) ** power, curve)
    return np.maximum.accumulate(curve)
