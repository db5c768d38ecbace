"""`cmrc.plan`: from a model and its statistics to a plan.

    for each step of the schedule, for each site:
        statistics ─> objective ─> order of removal ─> how many (keep, or a share of the budget) ─> replacement ─> do

The plan records the recipe, the seed, the data's fingerprint and every unit's score. The same inputs give the same plan.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cmrc.errors import ObjectiveError, RecipeError, StatsError
from cmrc.ir.graph import Array
from cmrc.planning import fits
from cmrc.planning.allocate import Curve, allocate
from cmrc.planning.certified import KEEPS, Certify, certified
from cmrc.planning.objectives import Context, Scores, gram, optimal_constant, score
from cmrc.planning.recipe import KEEP, Recipe, make_recipe
from cmrc.planning.selection import Order, bottom, eliminate, eliminate_for_interchange, greedy
from cmrc.planning.stream import Stream
from cmrc.program.do import Affine
from cmrc.program.plan import Plan
from cmrc.program.program import Program
from cmrc.program.sites import Site
from cmrc.statistics.calibrate import BY_DERIVATIVES, Watch, calibrate, choose
from cmrc.statistics.readers import outgoing
from cmrc.statistics.site_stats import SiteStats
from cmrc.statistics.stats import Stats

CONSTANT = ("zero", "mean", "optimal", "refit")
CHANNELS = 8  # conv widths that are no multiple of 8 were measured to be slower than the next one that is


@dataclass(frozen=True, slots=True, eq=False)
class Ranked:
    """A site with its units in the order in which they would go."""

    site: Site
    stats: SiteStats
    scores: Scores
    order: Order
    gram: Array | None  # for what affine maps are fitted


def plan(
    program: Program,
    stats: Stats | None = None,
    *,
    data: Any = None,
    recipe: Recipe | Mapping[str, Any] | str | Path | None = None,
    watch: Watch = lambda found, count: found,
    certify: str | None = None,
    delta: float = 0.05,
    held_out: Any = None,
    keeps: Sequence[int | float] = KEEPS,
    reading: Mapping[str, Any] | None = None,
    **options: Any,
) -> Plan:
    """A plan by a recipe (or a preset and options of its own: `preset="joint", keep=0.5`).

    `stats` come from `cmrc.calibrate`; without them, and for a schedule or `recompute`, `data` are calibrated on here.

    With `certify="iia>=0.95"` it is the smallest plan, over the shares to keep of `keeps` from large to small, of which that is
    certified at level 1 − `delta` on `held_out` data; `reading` holds arguments of `cmrc.verify` (`site`, `output`, `tolerance`).
    """
    chosen = make_recipe(recipe, **options)
    sites = _sites(program, chosen)
    made = stats if stats is not None else _calibrate(program, data, chosen, [s.value for s in sites], None, watch)
    if certify is not None:
        if chosen.budget is not None:
            raise RecipeError(
                "certify and budget both decide how many units stay",
                fix="leave out the budget: certify tries one share of the units after the other",
            )
        asked = Certify(certify, held_out, delta, seed=chosen.seed, keeps=keeps, reading=reading or {})
        given = {"recipe": chosen, "data": data, "watch": watch}
        return certified(program, made, lambda keep: plan(program, made, **given, keep=keep), asked)
    if made.fingerprint is not None:
        fix = "calibrate this model, or plan for the one that they are of"
        made.fingerprint.require(program.fingerprint, "", what="the statistics were", fix=fix)
    for site in sites:
        _require_usable(made[site.value], site)
    ranked = [rank(program, site, made[site.value], chosen, ()) for site in sites]
    wanted = _counts(program, ranked, chosen)
    result = Plan(program)
    replaced: dict[str, dict[int, Array]] = {site.value: {} for site in sites}
    for number, counts in enumerate([*_steps(chosen, ranked), wanted]):
        if number:
            made = _calibrate(program, data, chosen, [s.value for s in sites], result, watch)
            ranked = [rank(program, r.site, made[r.site.value], chosen, tuple(replaced[r.site.value])) for r in ranked]
        stream = Stream(program, [s.value for s in sites]) if chosen.recompute != "never" else None
        for i in range(len(sites)) if stream is None else stream.order():
            site = sites[i]
            if i and stream is not None:
                moved = _calibrate(program, data, chosen, [site.value], result, watch, stream)[site.value]
                if chosen.recompute == "all":
                    ranked[i] = rank(program, site, moved, chosen, tuple(replaced[site.value]))
                ranked[i] = dataclasses.replace(ranked[i], stats=moved)
            result = _put(program, ranked[i], counts[i], chosen, result, replaced[site.value])
    result.made = _record(chosen, made if stats is None else stats, ranked, wanted)
    result.scores = {r.site.name: r.scores.score for r in ranked}
    return result


def _require_usable(stats: SiteStats, site: Site) -> None:
    columns = stats.columns
    if (columns.units, columns.axis) != (site.units, site.axis):
        raise StatsError(
            f"the statistics are of {columns.units} units on axis {columns.axis}, "
            f"the site has {site.units} on axis {site.axis}",
            node=site.name,
            fix="calibrate this model again",
        )
    if not stats.count:
        raise StatsError(
            "the statistics have no rows for this site",
            node=site.name,
            fix="calibrate on more data, or check the mask that `positions` names",
        )


def _sites(program: Program, recipe: Recipe) -> list[Site]:
    for pattern in recipe.keep if isinstance(recipe.keep, dict) else ():
        program.find(pattern)  # which says where a name is none of the model
    protected = {site.value for pattern in recipe.protect for site in program.find(pattern)}
    found = [site for site in choose(program, recipe.sites) if site.value not in protected]
    if not found:
        raise RecipeError("every site is protected", fix="name sites that may change")
    return found


def _calibrate(
    program: Program,
    data: Any,
    recipe: Recipe,
    sites: Sequence[str],
    so_far: Plan | None,
    watch: Watch,
    stream: Stream | None = None,
) -> Stats:
    """Statistics of sites with what is replaced so far; of one that a stream has reached, beside those before it."""
    if data is None:
        raise StatsError(
            "there is no data to calibrate on",
            fix="give data=, or stats= and neither a schedule nor recompute",
        )
    host = None if so_far is None or not len(so_far) else program.clamped(so_far)
    need = recipe.needs
    if stream is not None and recipe.method.replace == "affine":
        need = need | {"drift"} if recipe.recompute == "all" else need - {"curvature", "coupling", "range"} | {"drift"}
    taps = None if stream is None or need & BY_DERIVATIVES else stream.at(sites[0], host or program.host)
    given = {"sites": list(sites), "need": need, **recipe.calibration}
    return calibrate(program, data, **given, host=host, taps=taps, watch=watch)


# ---------------------------------------------------------------- in which order


def rank(program: Program, site: Site, stats: SiteStats, recipe: Recipe, gone: Sequence[int]) -> Ranked:
    """The units of a site in the order in which they go; those that are gone already come first."""
    method, columns = recipe.method, stats.columns
    number = sum(site.value.encode())  # sites that share a seed draw apart
    context = Context(program, stats, recipe.clip, recipe.seed * 1_000_003 + number)
    scores = score(method.objective, context)
    if method.select == "bottom":
        found = np.array(scores.score)
        found[list(gone)] = -np.inf
        order = bottom(found)
        return Ranked(site, stats, scores, Order(order.units, scores.score[order.units]), _fit_gram(context, recipe))
    if columns.features > 1:
        raise ObjectiveError(
            "joint selection is for units of one number each", node=site.name, fix="use select: bottom for heads"
        )
    weight, covariance = gram(method.objective, context), stats.covariance
    if method.replace in CONSTANT:
        return Ranked(site, stats, scores, greedy(weight, covariance, first=gone), None)
    ridge = 1e-6 if method.ridge == "loo" else max(float(method.ridge), 1e-9)
    if method.interchange:
        order = eliminate_for_interchange(weight, covariance, method.interchange, ridge=ridge, first=gone)
    else:
        order = eliminate(weight, covariance, ridge=ridge, first=gone)
    return Ranked(site, stats, scores, order, _fit_gram(context, recipe))


def _fit_gram(context: Context, recipe: Recipe) -> Array | None:
    """How errors of the rebuilt units are weighed where the fit depends on it: by the loss if its curvature is known."""
    if recipe.method.replace != "affine" or (recipe.method.ridge != "loo" and recipe.recompute == "never"):
        return None
    return gram("task" if "H" in context.stats.arrays else "logit", context)


# ---------------------------------------------------------------- how many


def _part(amount: float, units: int) -> int:
    """A number of units: a whole number, or a part of them."""
    return min(amount, units) if isinstance(amount, int) else round(amount * units)


def _lookup(told: Mapping[str, Any], site: Site, program: Program) -> Any:
    """What a mapping by name or glob says of a site: the first that fits."""
    names = [name for name, values in program.host.names.items() if list(values) == [site.value]]
    for pattern, value in told.items():
        if pattern in (site.name, site.value) or any(fnmatch.fnmatchcase(name, pattern) for name in names):
            return value
    return None


def _multiple(program: Program, site: Site, recipe: Recipe) -> int:
    told = recipe.multiple_of
    if isinstance(told, dict):
        told = _lookup(told, site, program)
    if told is None:
        readers = [node for node in program.consumers[site.value] if node.op == "conv"]
        told = CHANNELS if readers and site.units % CHANNELS == 0 else 1
    return int(told)


def _least(site: Site, recipe: Recipe) -> int:
    return max(1, _part(recipe.minimum, site.units))


def _kept(program: Program, site: Site, recipe: Recipe, keep: float) -> int:
    """How many units stay: at least the minimum, rounded up to the multiple, never more than there are."""
    step = _multiple(program, site, recipe)
    wanted = max(_part(keep, site.units), _least(site, recipe))
    return min(site.units, math.ceil(wanted / step) * step)


def _counts(program: Program, ranked: Sequence[Ranked], recipe: Recipe) -> list[int]:
    """How many units of each site are replaced in the end."""
    if recipe.budget is not None:
        curves = [
            Curve(r.site, _risk(r, recipe), _multiple(program, r.site, recipe), _least(r.site, recipe)) for r in ranked
        ]
        return allocate(program, curves, recipe.budget)
    found = []
    for r in ranked:
        keep = KEEP if recipe.keep is None else recipe.keep
        if isinstance(keep, dict):
            keep = _lookup(keep, r.site, program)
        found.append(0 if keep is None else r.site.units - _kept(program, r.site, recipe, keep))
    return found


def _steps(recipe: Recipe, ranked: Sequence[Ranked]) -> list[list[int]]:
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


# ---------------------------------------------------------------- what they become


def _put(program: Program, r: Ranked, count: int, recipe: Recipe, so_far: Plan, held: dict[int, Array]) -> Plan:
    """The plan with the first `count` units of a site replaced, and everything that is there of other sites."""
    others = [entry for entry in so_far.entries if entry.value != r.site.value]
    made = Plan(program, others)
    if count <= 0:
        return made
    units = r.order.first(count)
    method, stats = recipe.method, r.stats
    name = r.site.name if list(program.host.names.get(r.site.name, ())) == [r.site.value] else r.site.value
    if method.replace in CONSTANT:
        fresh = [unit for unit in units if unit not in held]
        if fresh:
            constants = _constants(program, r, fresh, recipe)
            if method.replace in ("zero", "mean"):
                held.clear()  # means follow what is upstream
                fresh, constants = list(units), _constants(program, r, units, recipe)
            held.update(zip(fresh, constants, strict=True))
        slab = np.stack([held[unit] for unit in units])
        return made.do(name, units=units, constant=shape_constants(stats, slab, r.site), axis=r.site.axis)
    if stats.columns.features > 1:
        raise ObjectiveError(
            "heads are replaced by constants only", node=r.site.name, fix="use replace: mean or optimal"
        )
    held.update(dict.fromkeys(units, np.zeros(0)))
    fit = _affine(program, r, units, recipe)
    assert fit.weight is not None
    return made.do(name, units=units, affine=Affine(fit.parents, fit.weight, fit.bias), axis=r.site.axis)


def _constants(program: Program, r: Ranked, units: Sequence[int], recipe: Recipe) -> Array:
    """The constants of some units, [units, features]."""
    rule, stats = recipe.method.replace, r.stats
    if rule == "zero":
        return np.zeros((len(units), stats.columns.features))
    if rule == "refit":
        features = stats.columns.features
        columns = [unit * features + f for unit in units for f in range(features)]
        return fits.refit(stats, columns, clip=recipe.clip).bias.reshape(len(units), features)
    constant = stats.mean if rule == "mean" else optimal_constant(stats, clip=recipe.clip)[0]
    return np.asarray(stats.columns.by_unit(constant)[list(units)])


def _affine(program: Program, r: Ranked, units: Sequence[int], recipe: Recipe) -> fits.Fit:
    method, stats = recipe.method, r.stats
    if method.replace == "merge":
        return fits.merge(stats, units)
    if method.replace == "wls":
        output = outgoing(program, stats.columns) if method.parent_rule == "output-pearson" else None
        ridge = 1e-2 if method.ridge == "loo" else float(method.ridge)
        return fits.wls(
            stats, units, parents=method.parents, rule=method.parent_rule, ridge=ridge, output=output, seed=recipe.seed
        )
    output = outgoing(program, stats.columns) if "lost" in stats.arrays else None
    return fits.affine(
        stats, units, ridge=method.ridge, interchange=method.interchange, gram=r.gram, output=output,
        drift_ridge=method.drift_ridge,
    )  # fmt: skip


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


def _record(recipe: Recipe, stats: Stats, ranked: Sequence[Ranked], counts: Sequence[int]) -> dict[str, Any]:
    sites = {}
    for r, count in zip(ranked, counts, strict=True):
        told: dict[str, Any] = {"units": r.site.units, "kept": r.site.units - count}
        told["predicted"] = float(r.order.added[:count].sum())
        if r.stats.how:
            told["curvature"] = r.stats.how
        if r.scores.fell_back.any():
            told["mean instead of c*"] = int(r.scores.fell_back.sum())
        sites[r.site.name] = told
    return {"recipe": recipe.to_json(), "data": stats.digest, "samples": stats.samples, "sites": sites}
