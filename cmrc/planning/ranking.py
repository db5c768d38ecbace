"""The order in which the units of a site are replaced: by the score of each, or by a joint selection that knows the replacement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cmrc.errors import ObjectiveError
from cmrc.ir.graph import Array, Node, Tensor, attributes
from cmrc.ir.spec import FunctionAttrs
from cmrc.ir.tensors import quantised
from cmrc.passes.rewriting.convolution import has_border
from cmrc.planning.fits import swapped
from cmrc.planning.learned import hesitant, learnable
from cmrc.planning.objectives import Context, Scores, gram, score
from cmrc.planning.recipe import AUTO, CONSTANT, Recipe
from cmrc.planning.selection import Order, bottom, eliminate, eliminate_for_interchange, eliminate_groups, greedy
from cmrc.program.program import Program
from cmrc.program.sites import Site
from cmrc.statistics.columns import Columns
from cmrc.statistics.readers import Elements, elements
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
    elements: Elements | None  # where affine maps are put
    halves: tuple[SiteStats, ...] = ()  # the statistics of two halves of the data, where they were gathered apart
    tried: tuple[Ranked, ...] = ()  # the orders that this one was chosen from
    ordered_by: str = ""  # where it is not by the recipe

    @property
    def values(self) -> frozenset[str]:
        """The values that hold the do's of this site."""
        return frozenset([self.site.value, *([self.elements.value] if self.elements else [])])


def rank(program: Program, site: Site, stats: SiteStats, recipe: Recipe, gone: Sequence[int]) -> Ranked:
    """The units of a site in the order in which they go; those that are gone already come first."""
    columns, place = stats.columns, elements(program, stats.columns)
    recipe = for_site(program, site, columns, recipe, place, scatter="scatter" in stats.arrays)
    method = recipe.method
    if method.replace not in CONSTANT:
        _require_single(site, stats, recipe, place)
    number = sum(site.value.encode())  # sites that share a seed draw apart
    context = Context(program, stats, recipe.clip_scores, method.gradient, recipe.seed * 1_000_003 + number)
    scores = score(method.objective, context)
    if method.select == "bottom":
        by_score = np.array(scores.score)
        by_score[list(gone)] = -np.inf
        order = bottom(by_score)
        order = Order(order.units, scores.score[order.units])
        return Ranked(site, stats, scores, order, _fit_gram(context, recipe), recipe, place)
    weight, covariance = gram(method.objective, context), stats.covariance
    if method.replace == "zero":  # what is lost of a unit is all of it, not what varies
        covariance = covariance + np.outer(stats.mean, stats.mean)
    if method.replace in CONSTANT:
        order = greedy(weight, covariance, features=columns.features, first=gone)
        return Ranked(site, stats, scores, order, None, recipe, place)
    ridge = 1e-6 if method.ridge == "loo" else max(float(method.ridge), 1e-9)
    if columns.features > 1:
        order = eliminate_groups(weight, covariance, columns.features, ridge=ridge, first=gone)
    elif method.interchange:
        doubted, moments = _under_swaps(program, stats, recipe, weight)
        order = eliminate_for_interchange(doubted, *moments, ridge=ridge, first=gone)
    else:
        order = eliminate(weight, covariance, ridge=ridge, first=gone)
    return Ranked(site, stats, scores, order, _fit_gram(context, recipe, {method.objective: weight}), recipe, place)


def _under_swaps(
    program: Program, stats: SiteStats, recipe: Recipe, weight: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
    """By what errors are weighed, and the moments under swaps; for maps of least KL both are those of the KL."""
    method = recipe.method
    swap, logits = method.interchange or 0.0, None
    if method.replace == "learned" and method.objective == "logit":
        logits = learnable(program, stats)
    if logits is not None:
        return hesitant(stats, *logits, interchange=swap, seed=recipe.seed)
    covariance = stats.covariance
    return weight, (*swapped(covariance, covariance, swap), covariance)


def for_site(
    program: Program, site: Site, columns: Columns, recipe: Recipe, place: Elements | None, *, scatter: bool = True
) -> Recipe:
    """The recipe with the preset that suits a site."""
    if recipe.preset != AUTO:
        return recipe
    folding = site.folding or program.describe(site).folding
    affine = place is not None and (folding is None or folding.affine.folds)
    swapped = columns.features > 1 and bool(recipe.method.interchange)
    zero = recipe.replace is None and only_zero_is_free(program, site)
    return recipe.at_site(scatter=scatter, affine=affine and not swapped, zero=zero)


def _require_single(site: Site, stats: SiteStats, recipe: Recipe, place: Elements | None) -> None:
    """Require that affine maps between the columns of a site can be fitted and inserted."""
    columns, method = stats.columns, recipe.method
    if columns.features == 1:
        return
    if columns.slots > 1:
        raise ObjectiveError(
            "an affine map is the same at every position", node=site.name, fix='use positions="all", or replace: mean'
        )
    if place is None:
        raise ObjectiveError(
            "the elements of its units are never side by side in one axis, so no affine map can be inserted there",
            node=site.name,
            fix="use replace: mean or optimal",
        )
    if method.replace != "affine" or method.interchange:
        what = "maps for swaps are" if method.interchange else f"replace: {method.replace} is"
        raise ObjectiveError(
            f"{what} for units of one number each", node=site.name, fix="use replace: affine without interchange"
        )


def _fit_gram(context: Context, recipe: Recipe, known: Mapping[str, Array] | None = None) -> Array | None:
    """How errors of the rebuilt units are weighed where the fit depends on it: by the loss if its curvature is known."""
    if recipe.method.replace != "affine" or (recipe.method.ridge != "loo" and recipe.recompute == "never"):
        return None
    objective = "task" if "H" in context.stats.arrays else "logit"
    return known[objective] if known and objective in known else gram(objective, context)


# Functions that make 0 of 0, or of values that are all 0.
KEEP_ZERO = frozenset({
    "identity", "quantize", "dequantize", "relu", "leaky_relu", "gelu", "silu", "hardswish", "tanh", "clip", "amax", "mean", "max_pool", "avg_pool",
})  # fmt: skip


def only_zero_is_free(program: Program, site: Site) -> bool:
    """Whether a zero-padded convolution whose weight is stored as small integers reads the units as they are.

    Any constant but 0 needs a plane there, and with it the convolution leaves the integers. Measured on the quantised digits
    classifier at a quarter of the multiply-adds: 1.25 to 1.8 of the time of the whole model with means, 0.8 to 0.9 with zeros.
    """
    left = [site.value]
    while left:
        for node in program.consumers[left.pop()]:
            if node.op == "conv" and has_border(node) and _of_integers(node):
                return True
            if node.op in ("pointwise", "along") and attributes(node, FunctionAttrs)["fn"] in KEEP_ZERO:
                left.append(node.name)
    return False


def _of_integers(node: Node) -> bool:
    weight = node.inputs[1]
    return isinstance(weight, Tensor) and quantised(weight) is not None
