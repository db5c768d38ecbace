"""Certified planning: the smallest plan of a recipe whose certificate holds on held-out data.

    keep 0.95 ─> plan ─> swaps on held-out data ─> certified ─> keep 0.9 ─> ... ─> not certified: the one before it

The shares to keep are fixed before the held-out data are looked at and tested from the largest down, so the search needs no
correction (`certificates.smallest`). Where the scatter of the calibration gives D2 exactly, the certificate that follows says where to
start: shares that it shows to be safe without a swap are not tested. It is computed from the calibration data alone. Every plan is taken literally by the interpreter; lowering it afterwards changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cmrc.errors import CertifyError, RecipeError, VerifyError
from cmrc.ir.graph import Array
from cmrc.planning.recipe import AUTO, Recipe
from cmrc.program.plan import Plan
from cmrc.program.program import Program
from cmrc.statistics.batches import batches
from cmrc.statistics.stats import Stats, digest_of_batch
from cmrc.verification.certificates import from_d2
from cmrc.verification.distortion import distortion
from cmrc.verification.draws import Scope
from cmrc.verification.protocol import smallest_certified
from cmrc.verification.targets import Target, require_enough
from cmrc.verification.verifier import HeldOut, Verifier

INPUTS = 2000  # of the calibration, and swaps of them, that give the margins
FOR_SWAPS = 0.5  # the probability of a swap that maps are fitted for, where a target of swaps is certified
KEEPS = tuple(round(0.95 - 0.05 * i, 2) for i in range(19))


@dataclass(frozen=True, slots=True)
class Certify:
    """What is certified, and on what: `held_out` must be data that no plan was calibrated on."""

    target: str
    held_out: Any
    delta: float = 0.05
    swaps: int | None = None  # at most, for each plan; 16 for each pair of inputs unless given
    p: float | Sequence[float] = 0.5
    seed: int = 0
    keeps: Sequence[int | float] = KEEPS
    calibration: Any = None  # data of the calibration, whose margins say where to start
    reading: Mapping[str, Any] = field(
        default_factory=dict
    )  # as for `cmrc.verify`: site, output, reads, tolerance, ...


def certified(program: Program, stats: Stats, make: Callable[[int | float], Plan], asked: Certify) -> Plan:
    """The smallest certified plan. `plan.made["certificate"]` holds the target, its level, and every test."""
    if asked.held_out is None:
        raise CertifyError("there are no held-out data to certify on", fix="give held_out=, disjoint from data")
    if not asked.keeps or sorted(asked.keeps, reverse=True) != list(asked.keeps):
        raise CertifyError("the shares to keep are not in falling order", fix="give keeps= from large to small")
    target = Target.parse(asked.target)
    parts = list(batches(asked.held_out, program.host.inputs))
    probe = Stats({})
    for part in parts:
        probe.see(digest_of_batch(part.arrays()))
    if probe.digest == stats.digest:
        raise CertifyError("the held-out data are the calibration data", fix="keep some data apart for held_out=")
    data = HeldOut.of(parts, program.host.inputs, asked.reading.get("counted"))
    require_enough(target, asked.delta, len(data), Scope.POPULATION)
    plans: dict[int | float, Plan] = {}

    def planned(keep: int | float) -> Plan:
        if keep not in plans:
            plans[keep] = make(keep)
        return plans[keep]

    options = {name: value for name, value in asked.reading.items() if name != "counted"}
    keeps = asked.keeps[_start(program, stats, planned, asked, target, options) :]
    search = smallest_certified(
        program,
        map(planned, keeps),
        data,
        target,
        delta=asked.delta,
        swaps=asked.swaps,
        p=asked.p,
        seed=asked.seed,
        **options,
    )
    tests = [{"keep": k, **d.to_json()} for k, d in zip(keeps, search.decisions, strict=False)]
    if search.chosen is None:
        raise CertifyError(
            f"{target} is not certified with {keeps[0]} of the units kept: {search.decisions[0]}",
            fix="ask for less, keep more, or use a better preset",
        )
    plan = plans[keeps[search.chosen]]
    certificate: dict[str, Any] = {
        "target": str(target),
        "about": str(Scope.POPULATION),
        "delta": asked.delta,
        "keep": keeps[search.chosen],
        "tests": tests,
    }
    d2 = _exact_d2(program, plan, stats, asked.p)
    if d2 is not None:
        plain = Verifier(program, plan, data, **options).plain().evidence
        certificate["without_swaps"] = {"d2": d2, "iia": from_d2(plain.mean(plain.margin), d2)[0]}
    plan.made = {**plan.made, "certificate": certificate}
    return plan


def _start(
    program: Program,
    stats: Stats,
    planned: Callable[[int | float], Plan],
    asked: Certify,
    target: Target,
    options: Mapping[str, Any],
) -> int:
    """The place of the first share to test: the last of those that the calibration shows to be safe, or 0.

    Safe is a certificate `from_d2` at least halfway from the target to 1, with the margins of the original under swaps of all
    units of the site. It looks at the calibration alone, so the tests that follow keep their level.
    """
    once = isinstance(asked.calibration, Iterator)  # read by the calibration, and gone
    if target.name != "iia" or asked.calibration is None or once or "site" in options:
        return 0
    margins: Array | None = None
    start = 0
    for place, keep in enumerate(asked.keeps):
        plan = planned(keep)
        d2 = _exact_d2(program, plan, stats, asked.p)
        if d2 is None:
            return 0
        if margins is None:
            margins = _margins_under_swaps(program, plan.entries[0].site, asked, options)
        if from_d2(margins, d2)[0] < (1 + target.value) / 2:
            break
        start = place
    return start


def _margins_under_swaps(program: Program, site: str, asked: Certify, options: Mapping[str, Any]) -> Array:
    """Of the original, on some of the calibration data, where every unit of the site may be swapped."""
    parts, count = [], 0
    for part in batches(asked.calibration, program.host.inputs):
        parts.append(part)
        count += len(part.arrays()[0])
        if count >= INPUTS:
            break
    data = HeldOut.of(parts, program.host.inputs, asked.reading.get("counted"))
    verifier = Verifier(program, Plan(program), data, site=site, **options)
    draw = verifier.draw(np.random.default_rng(asked.seed), INPUTS, asked.p)
    return verifier.swap(draw).margin.ravel()


def _exact_d2(program: Program, plan: Plan, stats: Stats, p: float | Sequence[float]) -> float | None:
    """D2 of the logits by the scatter of the calibration.

    None where the plan replaces units at another place than before the model's last linear op, or the scatter is not known.
    """
    values = {entry.value for entry in plan.entries}
    known = [site for site in stats.sites.values() if site.columns.value in values and "scatter" in site.arrays]
    if len(values) != 1 or not known:
        return None
    try:
        (site,) = distortion(program, plan, stats, p=p if isinstance(p, (int, float)) else float(np.mean(p)))
    except VerifyError:
        return None
    return site.d2 if site.exact else None


def for_swaps(recipe: Recipe, target: str) -> Recipe:
    """With maps that are fitted for swaps, where nobody chose a preset and the target is one of swaps."""
    if recipe.preset != AUTO or recipe.interchange is not None or not Target.parse(target).quantity.swaps:
        return recipe
    return dataclasses.replace(recipe, interchange=FOR_SWAPS)


def require_plain(recipe: Recipe, checkpoint: str | Path | None) -> None:
    """What cannot be combined with certify."""
    if recipe.budget is not None:
        raise RecipeError(
            "both certify and budget decide how many units stay",
            fix="leave out the budget: certify tries one share of the units after the other",
        )
    if checkpoint is not None:
        raise RecipeError(
            "a checkpoint is for one plan, and certify makes several",
            fix="leave out the checkpoint, or calibrate first and give stats=",
        )
