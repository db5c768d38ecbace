"""In which order the units of a site go: the score of each, or a joint selection that knows the replacement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cmrc.errors import ObjectiveError
from cmrc.ir.graph import Array
from cmrc.planning.objectives import Context, Scores, gram, score
from cmrc.planning.recipe import AUTO, CONSTANT, Recipe
from cmrc.planning.selection import Order, bottom, eliminate, eliminate_for_interchange, greedy
from cmrc.program.program import Program
from cmrc.program.sites import Site
from cmrc.statistics.site_stats import SiteStats


@dataclass(frozen=True, slots=True, eq=False)
class Ranked:
    """A site with its units in the order in which they would go."""

    site: Site
    stats: SiteStats
    scores: Scores
    order: Order
    gram: Array | None  # for what affine maps are fitted
    recipe: Recipe  # with the preset for this site


def rank(program: Program, site: Site, stats: SiteStats, recipe: Recipe, gone: Sequence[int]) -> Ranked:
    """The units of a site in the order in which they go; those that are gone already come first."""
    columns = stats.columns
    recipe = _for_site(program, site, stats, recipe)
    method = recipe.method
    number = sum(site.value.encode())  # sites that share a seed draw apart
    context = Context(program, stats, recipe.clip, recipe.seed * 1_000_003 + number)
    scores = score(method.objective, context)
    if method.select == "bottom":
        by_score = np.array(scores.score)
        by_score[list(gone)] = -np.inf
        order = bottom(by_score)
        return Ranked(
            site, stats, scores, Order(order.units, scores.score[order.units]), _fit_gram(context, recipe), recipe
        )
    if columns.features > 1:
        raise ObjectiveError(
            "joint selection is for units of one number each", node=site.name, fix="use select: bottom for heads"
        )
    weight, covariance = gram(method.objective, context), stats.covariance
    if method.replace in CONSTANT:
        return Ranked(site, stats, scores, greedy(weight, covariance, first=gone), None, recipe)
    ridge = 1e-6 if method.ridge == "loo" else max(float(method.ridge), 1e-9)
    if method.interchange:
        order = eliminate_for_interchange(weight, covariance, method.interchange, ridge=ridge, first=gone)
    else:
        order = eliminate(weight, covariance, ridge=ridge, first=gone)
    return Ranked(site, stats, scores, order, _fit_gram(context, recipe), recipe)


def _for_site(program: Program, site: Site, stats: SiteStats, recipe: Recipe) -> Recipe:
    if recipe.preset != AUTO:
        return recipe
    folding = site.folding or program.describe(site).folding
    affine = folding is None or folding.affine.folds
    return recipe.at_site(single=stats.columns.features == 1, scatter="scatter" in stats.arrays, affine=affine)


def _fit_gram(context: Context, recipe: Recipe) -> Array | None:
    """How errors of the rebuilt units are weighed where the fit depends on it: by the loss if its curvature is known."""
    if recipe.method.replace != "affine" or (recipe.method.ridge != "loo" and recipe.recompute == "never"):
        return None
    return gram("task" if "H" in context.stats.arrays else "logit", context)
