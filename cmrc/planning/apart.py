"""Sites at which the model cannot be cut: hidden units of recurrent layers, and what lies inside If, Loop and Scan. They are planned
last, each by its own statistics.

    h_1, h_2, ... (at every step, in every run)  ─>  order of removal  ─>  how many (keep)  ─>  do inside

The statistics are those of the model with everything before already replaced, but without the replacement itself: what that does to
later steps shows only when the lowered model is measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from cmrc.errors import CmrcError
from cmrc.planning.ranking import Ranked, rank
from cmrc.planning.recipe import Recipe
from cmrc.planning.record import record_of_plan
from cmrc.planning.replacements import replace_units
from cmrc.planning.usable import moments_of_data, named_sites, require_usable
from cmrc.program.dry_run import try_dos
from cmrc.program.plan import Plan
from cmrc.program.program import Program
from cmrc.program.sites import Site
from cmrc.statistics.stats import Stats

BUDGET = "a budget is shared by what a cut at each site does to the output, and the model cannot be cut there: name it, with keep="


class Planning(Protocol):
    """A plan that is being made, of which `statistics_of` sees what is replaced so far."""

    result: Plan
    left_out: dict[str, str]

    def statistics_of(self, site: Site) -> Stats: ...


def plan_apart(
    program: Program,
    recipe: Recipe,
    sites: Sequence[Site],
    planning: Planning,
    given: Stats | None,
    count: Callable[[Ranked], int],
) -> Plan:
    """The plan with units of these sites replaced too, of each as many as `count` says; `left_out` says why some are not."""
    recipe, named = dataclasses.replace(recipe, recompute="never", schedule=[]), named_sites(program, recipe)
    for site in sites:
        try:
            stats = planning.statistics_of(site) if given is None or site.value not in given.sites else given
            require_usable(stats.sites[site.value], site)
            with moments_of_data(site):
                ranked = rank(program, site, stats.sites[site.value], recipe, ())
            _take(program, recipe, planning, ranked, count(ranked), stats)
        except (CmrcError, np.linalg.LinAlgError) as error:
            if site.value in named:
                raise
            planning.left_out[site.name] = error.reason if isinstance(error, CmrcError) else str(error)
    if planning.left_out:
        planning.result.made["left_out"] = planning.left_out
    return planning.result


def _take(program: Program, recipe: Recipe, planning: Planning, ranked: Ranked, count: int, stats: Stats) -> None:
    before = planning.result
    with moments_of_data(ranked.site):
        after = replace_units(program, ranked, count, before, {})
    after.made, after.scores = dict(before.made), dict(before.scores)
    added = [entry for entry in after.entries if entry.value == ranked.site.value]
    outcome = try_dos(program.graph, added, earlier=before.entries)
    if not outcome.folds:
        planning.left_out[ranked.site.name] = f"a replaced unit {outcome}"
        return
    record = record_of_plan(recipe, stats, [ranked], [count], {})
    after.made = {**record, **after.made, "sites": {**after.made.get("sites", {}), **record["sites"]}}
    after.scores[ranked.site.name] = ranked.order.by_unit()
    planning.result = after
