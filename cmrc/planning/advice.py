"""All diagnostics of a site at once, each with a sentence of advice: what `cmrc diagnose` shows.

coupling       can single scores be added up?
predictions    do the scores say what clamping does?
kinks          is there a bound on the remainder, and does it hold?
sensitivity    is there enough calibration data?
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cmrc.errors import CmrcError, StatsError
from cmrc.ir.graph import Array
from cmrc.planning import diagnose
from cmrc.planning.objectives import optimal_constant
from cmrc.planning.recipe import Recipe
from cmrc.program.program import Program
from cmrc.program.sites import Site
from cmrc.statistics.batches import Batch, batches, in_batches_of_model
from cmrc.statistics.calibrate import Watch, calibrate, choose, unwatched
from cmrc.statistics.site_stats import SiteStats

NEED = ("curvature", "range", "coupling", "rows")
BLOCK = 32  # units of a block
PARTS = (0.1, 0.25, 0.5)  # of the data, that the kept set is compared with; the last is judged
# From where on a number is good news: ρ_off at most, rank correlation at least, crossings at most, overlap at least.
ADDS_UP, PREDICTS, RARE, STEADY = 0.3, 0.9, 0.0, 0.9
MEANINGS = {  # of each value
    "coupling": f"The part of the curvature that lies between units (ρ_off), mean of random blocks: up to {ADDS_UP:g} single scores may be added up.",
    "predictions": f"The rank correlation of predicted and measured loss, unit by unit: from {PREDICTS:g} on the scores rank units well.",
    "kinks": "The share of samples on which a replacement crosses the kink of a ReLU: the bound on the remainder needs 0.",
    "sensitivity": f"The overlap (Jaccard) of the units that all data keep and those that half of them keep: from {STEADY:g} on the data suffice.",
}
ALIKE = 3.0  # times as much as the cheapest: up to there, units cost about the same


@dataclass(frozen=True, slots=True)
class Finding:
    """One number for a site, or why there is none, and what to do about it."""

    site: str
    what: str
    value: float | None
    good: bool | None  # None if there is no number
    advice: str
    points: tuple[tuple[float, float], ...] = ()  # predictions: predicted, measured; sensitivity: samples, overlap

    def to_json(self) -> dict[str, Any]:
        entry = {"site": self.site, "what": self.what, "value": self.value, "good": self.good, "advice": self.advice}
        return {**entry, "points": [list(point) for point in self.points]}


def examine(
    program: Program,
    data: Any,
    recipe: Recipe,
    *,
    sites: str | Sequence[str] = "*",
    count: int = 16,
    watch: Watch = unwatched,
) -> list[Finding]:
    """Every diagnostic of every site; `count` units are clamped one by one."""
    given = in_batches_of_model(data, program.graph.inputs)
    parts = [_as_item(batch) for batch in batches(given, program.host.inputs, size=recipe.batch)]
    chosen = choose(program, sites)
    return [finding for site in watch(chosen, len(chosen)) for finding in _at(program, parts, recipe, site, count)]


def _as_item(batch: Batch) -> dict[str, Any]:
    labels = {} if batch.labels is None else {"labels": batch.labels}
    return {**batch.inputs, **batch.others, **labels}


def _at(program: Program, parts: list[Any], recipe: Recipe, site: Site, count: int) -> Iterator[Finding]:
    try:
        stats = calibrate(program, parts, sites=site.value, need=NEED, **recipe.calibration)
    except CmrcError as error:
        yield Finding(
            site.name, "curvature", None, None, f"not known here: {error.reason}. Judge plans by cmrc verify."
        )
    else:
        known = stats[site.value]
        blocks = diagnose.coupling(known, size=min(BLOCK, known.columns.count), seed=recipe.seed)
        yield _coupling(site.name, float(np.mean([block.ratio for block in blocks])))
        if known.columns.features == 1:
            measured = diagnose.predictions(
                program, stats, site.value, parts, count=count, loss=recipe.loss, seed=recipe.seed
            )
            yield _predictions(site.name, measured)
            constants, _ = optimal_constant(known)
            crossed = diagnose.kinks(program, known, constants, parts, count=count, seed=recipe.seed)
            yield _kinks(site.name, float(crossed.share.mean()), _unbounded(program, known, constants, recipe.loss))
    if len(parts) > 1:
        yield _sensitivity(site.name, diagnose.sensitivity(program, parts, site.value, recipe, parts=PARTS))


def _judged(
    site: str, what: str, value: float, good: bool, advice: tuple[str, str], points: Iterable[tuple[float, float]] = ()
) -> Finding:
    """A number with the first of two sentences if it is good news, else the second."""
    return Finding(site, what, value, good, advice[0] if good else advice[1], tuple(points))


def _coupling(site: str, ratio: float) -> Finding:
    advice = (
        "Units hardly interact: scores of single units may be added.",
        "Units interact: select them together (preset joint) instead of by single scores.",
    )
    return _judged(site, "coupling", ratio, ratio <= ADDS_UP, advice)


def _predictions(site: str, measured: diagnose.Predictions) -> Finding:
    least, most = float(measured.measured.min()), float(measured.measured.max())
    alike = 0 < most <= ALIKE * least
    advice = (
        "The scores rank units like clamping does.",
        f"Units cost about the same (within a factor of {most / least:.1f}), so their order says little: how many go matters more than which."
        if alike
        else "The scores rank units unlike clamping does: judge plans by cmrc verify, not by predicted risk.",
    )
    points = zip(measured.predicted.tolist(), measured.measured.tolist(), strict=True)
    return _judged(site, "predictions", measured.correlation, measured.correlation >= PREDICTS, advice, points)


def _unbounded(program: Program, stats: SiteStats, constants: Array, loss: str) -> str | None:
    """Why the remainder has no bound at this site."""
    try:
        diagnose.remainder(program, stats, constants, loss=loss)
    except StatsError as error:
        return error.reason
    return None


def _kinks(site: str, share: float, unbounded: str | None) -> Finding:
    advice = (
        "No replacement crosses a kink of a ReLU: the bound on the remainder holds on these data.",
        "Replacements cross kinks of ReLUs: the bound on the remainder does not hold there, so trust measured loss."
        if unbounded is None
        else f"The remainder has no bound here ({unbounded}): trust measured loss.",
    )
    return _judged(site, "kinks", share, share <= RARE and unbounded is None, advice)


def _sensitivity(site: str, parts: Sequence[diagnose.Sensitivity]) -> Finding:
    half = parts[-2]
    advice = (
        f"Half of the data ({half.samples} samples) would keep nearly the same units: the data suffice.",
        f"Half of the data ({half.samples} samples) would keep other units: calibrate on more data.",
    )
    points = ((float(part.samples), part.jaccard) for part in parts)
    return _judged(site, "sensitivity", half.jaccard, half.jaccard >= STEADY, advice, points)
