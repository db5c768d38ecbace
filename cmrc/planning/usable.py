"""The sites that a recipe plans, and whether their statistics can be used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from cmrc.errors import RecipeError, SiteError, StatsError
from cmrc.planning.recipe import Recipe
from cmrc.program.program import Program
from cmrc.program.reach import last_of_each_run
from cmrc.program.sites import Site
from cmrc.statistics.calibrate import choose
from cmrc.statistics.site_stats import SiteStats
from cmrc.statistics.stats import Stats


def require_usable(stats: SiteStats, site: Site) -> None:
    columns = stats.columns
    if site.axis >= len(site.shape) or not isinstance(site.shape[site.axis], int):
        raise StatsError(
            f"the statistics are of axis {site.axis}, but the site of shape {list(site.shape)} has no units there",
            node=site.name,
            fix="calibrate this model again",
        )
    if (columns.units, columns.axis) != (site.units, site.axis):
        raise StatsError(
            f"the statistics are of {columns.units} units on axis {columns.axis}, but "
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


@contextmanager
def moments_of_data(site: Site) -> Iterator[None]:
    """Moments of real data are solvable once they are regularised: what is not was not gathered from data."""
    try:
        yield
    except np.linalg.LinAlgError as error:
        raise StatsError(
            "the covariance in the statistics is impossible for data: it is not positive definite",
            node=site.name,
            fix="calibrate again, or raise the ridge in the recipe",
        ) from error


def sites_of(program: Program, recipe: Recipe, stats: Stats | None, *, apart: bool = False) -> list[Site]:
    """The sites that the recipe means, at which the model can be cut; or those `apart`, at which it cannot."""
    for pattern in recipe.keep if isinstance(recipe.keep, dict) else ():
        program.find(pattern)  # which says where a name is none of the model
    protected = {site.value for pattern in recipe.protect for site in program.find(pattern)}
    if stats is not None and recipe.sites == ["*"]:
        known = [site.columns for site in stats.sites.values()]
        chosen = [program.site_of(c.value, c.axis, c.name) for c in known]
    else:
        chosen = choose(program, recipe.sites, apart=True)
    if recipe.sites == ["*"]:
        chosen += [site for site in apart_sites(program) if site.value not in {other.value for other in chosen}]
    if not chosen:
        raise SiteError("no site of this model folds", fix="`cmrc inspect` shows what stops each of them")
    if all(site.value in protected for site in chosen):
        raise RecipeError("every site is protected", fix="name sites that may change")
    return [site for site in chosen if site.value not in protected and bool(program.why_apart(site.value)) is apart]


def apart_sites(program: Program) -> list[Site]:
    """The sites that fold, at which the model cannot be cut."""
    if not any(node.marks.recurrence or node.marks.body for node in program.graph.nodes):
        return []
    sites = [site for site in program.list_sites() if program.why_apart(site.value)]
    folding = [s for s in map(program.describe, sites) if s.folding is not None and s.folding.constant.folds]
    return last_of_each_run(program, folding)


def named_sites(program: Program, recipe: Recipe) -> set[str]:
    """The values of the sites that the recipe names one by one: a glob names none."""
    patterns = [pattern for pattern in recipe.sites if not any(c in pattern for c in "*?[")]
    return {site.value for pattern in patterns for site in program.find(pattern)}


def lacks_a_need(stats: Stats, recipe: Recipe) -> bool:
    """Whether the statistics were gathered without what the recipe needs: then no site can be scored as it says."""
    return any(recipe.needs - site.needs for site in stats.sites.values())


def stats_of(stats: Stats, site: Site) -> SiteStats:
    return stats.sites[site.value] if site.value in stats.sites else stats[site.name]
