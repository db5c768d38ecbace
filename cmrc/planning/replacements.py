"""What the chosen units of a site become: a do with constants, or with an affine map of the units that stay."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cmrc.ir.graph import Array
from cmrc.planning import fits
from cmrc.planning.learned import learnable, learned
from cmrc.planning.objectives import optimal_constant
from cmrc.planning.ranking import Ranked
from cmrc.planning.recipe import CONSTANT, Recipe
from cmrc.program.plan import Affine, Plan
from cmrc.program.program import Program
from cmrc.program.sites import Site
from cmrc.statistics.readers import joining, outgoing
from cmrc.statistics.site_stats import SiteStats


def replace_units(program: Program, r: Ranked, count: int, so_far: Plan, constants_so_far: dict[int, Array]) -> Plan:
    """The plan with the first `count` units of a site replaced, and everything that is there of other sites."""
    others = [entry for entry in so_far.entries if entry.value not in r.values]
    result = Plan(program, others)
    if count <= 0:
        return result
    units = r.order.first(count)
    recipe, stats = r.recipe, r.stats
    method = recipe.method
    name = r.site.name if list(program.names.get(r.site.name, ())) == [r.site.value] else r.site.value
    if method.replace in CONSTANT:
        fresh = [unit for unit in units if unit not in constants_so_far]
        if fresh:
            constants = _constants(program, r, fresh, recipe)
            if method.replace in ("zero", "mean"):
                constants_so_far.clear()  # means follow what is upstream
                fresh, constants = list(units), _constants(program, r, units, recipe)
            constants_so_far.update(zip(fresh, constants, strict=True))
        slab = np.stack([constants_so_far[unit] for unit in units])
        return result.do(name, units=units, constant=shape_constants(stats, slab, r.site), axis=r.site.axis)
    constants_so_far.update(dict.fromkeys(units, np.zeros(0)))
    fit, place = _affine(program, r, units, recipe), r.elements
    assert place is not None
    replaced = place.unit[stats.columns.of_units(units)]
    called = name if place.value == r.site.value else program.title(place.value)
    if fit.weight is None or not fit.parents:  # no unit stays, or is of any use, to rebuild others from
        return result.do(called, units=replaced, constant=fit.bias, axis=place.axis)
    mapped = Affine(place.unit[list(fit.parents)].tolist(), fit.weight, fit.bias)
    return result.do(called, units=replaced, affine=mapped, axis=place.axis)


def _constants(program: Program, r: Ranked, units: Sequence[int], recipe: Recipe) -> Array:
    """The constants of some units, [units, features]."""
    method, stats = recipe.method, r.stats
    rule = method.replace
    if rule == "zero":
        return np.zeros((len(units), stats.columns.features))
    if rule == "refit":
        columns = stats.columns.of_units(units).tolist()
        fit = fits.refit(stats, columns, clip=recipe.clip, gradient=method.gradient)
        return fit.bias.reshape(len(units), stats.columns.features)
    constant = stats.mean
    if rule == "optimal":
        constant, _ = optimal_constant(stats, clip=recipe.clip, gradient=method.gradient)
    return np.asarray(stats.columns.by_unit(constant)[list(units)])


def _affine(program: Program, r: Ranked, units: Sequence[int], recipe: Recipe) -> fits.Fit:
    method, stats = recipe.method, r.stats
    output = joining(program, stats.columns) if "lost" in stats.arrays else None
    if len(units) == stats.columns.units:
        return fits.affine(stats, units, gram=r.gram, output=output)
    if method.replace == "merge":
        return fits.merge(stats, units)
    if method.replace == "wls":
        weights = outgoing(program, stats.columns) if method.parent_rule == "output-pearson" else None
        ridge = 1e-2 if method.ridge == "loo" else float(method.ridge)
        return fits.wls(
            stats, units, parents=method.parents, rule=method.parent_rule, ridge=ridge, gradient=method.gradient,
            output=weights, seed=recipe.seed,
        )  # fmt: skip
    if method.replace == "learned":
        return _learned(program, r, units, recipe)
    return fits.affine(
        stats, units, ridge=method.ridge, interchange=method.interchange, gram=r.gram, output=output,
        drift_ridge=method.drift_ridge, halves=r.halves,
    )  # fmt: skip


def _learned(program: Program, r: Ranked, units: Sequence[int], recipe: Recipe) -> fits.Fit:
    """Learned where that is a convex problem; the plan's record says at which sites, and elsewhere it is the least-squares fit for swaps."""
    method, logits = recipe.method, learnable(program, r.stats)
    first = fits.affine(r.stats, units, ridge=method.ridge, interchange=method.interchange, gram=r.gram)
    if logits is None:
        return first
    return learned(r.stats, units, first, *logits, interchange=method.interchange or 0.0, seed=recipe.seed)


def shape_constants(stats: SiteStats, constants: Array, site: Site) -> Array:
    """[units, features] as a do takes it: numbers, one vector per head, or a slab with every position."""
    columns = stats.columns
    if columns.features == 1:
        return constants[:, 0]
    if columns.slots == 1:
        return constants
    headed = columns.features > columns.slots
    apart = {columns.axis, 0, *({len(site.shape) - 1} if headed else ())}
    places = [d for d in range(len(site.shape)) if d not in apart]
    inner = [int(site.shape[d]) for d in places]
    vector = [columns.features // columns.slots] if headed else []
    slab = constants.reshape(len(constants), *inner, *vector)
    order = [columns.axis, *places, *([len(site.shape) - 1] if headed else [])]
    return np.expand_dims(np.moveaxis(slab, range(slab.ndim), [d - 1 for d in order]), 0)
