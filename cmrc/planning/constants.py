"""The order of units at sites where only constants fold: of several selections, the one with the least measured loss.

Constants pass ops that no affine map passes, norms among them. What the next op makes of a unit says little about the output then. So
where there are data, three selections are tried at each such site: next-layer reconstruction, single scores, and what each unit alone
does to the outputs, as measured. Where that takes too long, the curvature of the KL divergence of the outputs takes its place, if
gradients reach the site and are affordable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from cmrc.errors import HostError, ObjectiveError, StatsError
from cmrc.planning.probe import LossProbe, probed_counts
from cmrc.planning.ranking import Ranked, rank
from cmrc.planning.recipe import AUTO, Recipe
from cmrc.planning.selection import greedy
from cmrc.program.program import Program
from cmrc.statistics.batches import as_array, batches
from cmrc.statistics.calibrate import calibrate

RECONSTRUCTION, SINGLE, CURVATURE = "reconstruction", "cmr-logit", "reconstruction-task"
MEASURED = "measured"  # an order of its own, with the replacements of reconstruction
MOST = 8  # sites at which this is done; of more, single ones weigh little
ROWS = 256  # on which curvature is gathered
WORK = 8 * 10**12  # multiply-accumulates of all passes for it: minutes
TINY = 1e-12


def with_best_orders(ranked: Sequence[Ranked], recipe: Recipe, probe: LossProbe) -> list[Ranked]:
    """The sites as they are ranked, with the best of several orders where only constants fold and nobody chose a preset."""
    program, data = probe.program, probe.data
    chosen = [i for i, r in enumerate(ranked) if r.recipe.preset == RECONSTRUCTION and r.site.units > 1]
    if recipe.preset != AUTO or data is None or isinstance(data, Iterator) or not 0 < len(chosen) <= MOST:
        return list(ranked)
    first = [ranked[i] for i in chosen]
    tried = [first, [rank(program, r.site, r.stats, dataclasses.replace(r.recipe, preset=SINGLE), ()) for r in first]]
    by_outputs = _by_measurement(first, probe) or _by_curvature(program, first, recipe, data)
    tried += [by_outputs] if by_outputs is not None else []
    counts = [probed_counts(r.site, vanishes=False) for r in first]
    losses = [probe.of_sites(some, counts) for some in tried]
    result = list(ranked)
    for place, i in enumerate(chosen):
        lost = [float(np.log(np.maximum(some[place], TINY)).sum()) for some in losses]
        result[i] = dataclasses.replace(tried[int(np.argmin(lost))][place], tried=tuple(some[place] for some in tried))
    return result


def with_orders_for(ranked: Sequence[Ranked], counts: Sequence[int], probe: LossProbe) -> list[Ranked]:
    """At each site, of the orders that were tried, the one that loses least with as many units gone as will go."""
    result = list(ranked)
    for i, (r, count) in enumerate(zip(ranked, counts, strict=True)):
        if r.tried and 0 < count < r.site.units:
            losses = [loss for (loss,) in probe.of_sites(r.tried, [[count]] * len(r.tried))]
            result[i] = dataclasses.replace(r.tried[int(np.argmin(losses))], tried=r.tried)
    return result


def _by_measurement(ranked: Sequence[Ranked], probe: LossProbe) -> list[Ranked] | None:
    """The same sites in the order of what their units do to the outputs, to second order; None where that takes too long."""
    pairs = probe.of_pairs(ranked)
    if pairs is None:
        return None
    return [
        dataclasses.replace(r, order=greedy(np.ones_like(together), together), ordered_by=MEASURED)
        for r, together in zip(ranked, pairs, strict=True)
    ]


def _by_curvature(program: Program, ranked: Sequence[Ranked], recipe: Recipe, data: Any) -> list[Ranked] | None:
    """The same sites in the order of the curvature; None where it cannot be had. Constants stay the means over all of the data."""
    curved = dataclasses.replace(recipe, preset=CURVATURE, loss="kl", curvature="monte-carlo")
    if program.cost().macs * ROWS * 3 * (1 + recipe.draws) > WORK:
        return None
    try:
        stats = calibrate(
            program, list(_rows(program, data, recipe)), sites=[r.site.value for r in ranked], need=curved.needs,
            **curved.calibration,
        )  # fmt: skip
        orders = [rank(program, r.site, stats[r.site.value], curved, ()).order for r in ranked]
    except (HostError, ObjectiveError, StatsError, np.linalg.LinAlgError):
        return None
    return [
        dataclasses.replace(r, order=order, recipe=dataclasses.replace(curved, replace=r.recipe.replace))
        for r, order in zip(ranked, orders, strict=True)
    ]


def _rows(program: Program, data: Any, recipe: Recipe) -> Iterator[dict[str, Any]]:
    """The first batches, up to `ROWS` rows."""
    left = ROWS
    for batch in batches(data, program.host.inputs, size=recipe.batch):
        yield {name: as_array(array)[:left] for name, array in {**batch.others, **batch.inputs}.items()}
        left -= len(batch)
        if left <= 0:
            return
