"""Certified planning: the smallest plan of a recipe whose certificate holds on held-out data.

    keep 0.95 ─> plan ─> swaps on held-out data ─> certified ─> keep 0.9 ─> ... ─> not certified: the one before it

The shares to keep are fixed beforehand and tested from the largest down, so the search needs no correction (`certificates.smallest`).
Every plan is taken literally by the interpreter; lowering it afterwards changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cmrc.errors import CertifyError, VerifyError
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
    reading: Mapping[str, Any] = field(
        default_factory=dict
    )  # as for `cmrc.verify`: site, output, reads, tolerance, ...


def certified(program: Program, stats: Stats, make: Callable[[int | float], Plan], asked: Certify) -> Plan:
    """The smallest certified plan. `plan.made["certificate"]` holds the target, its level, and every test."""
    if asked.held_out is None:
        raise CertifyError("there are no held-out data to certify on", fix="give held_out=, disjoint from data")
    if not asked.keeps or sorted(asked.keeps, reverse=True) != list(asked.keeps):
        raise CertifyError("the shares to keep do not go from large to small", fix="give keeps= in falling order")
    target = Target.parse(asked.target)
    parts = list(batches(asked.held_out, program.host.inputs))
    probe = Stats({})
    for part in parts:
        probe.see(digest_of_batch(part.arrays()))
    if probe.digest == stats.digest:
        raise CertifyError("the held-out data are those of the calibration", fix="keep some data apart for held_out=")
    data = HeldOut.of(parts, program.host.inputs, asked.reading.get("counted"))
    require_enough(target, asked.delta, len(data), Scope.POPULATION)
    plans: list[Plan] = []

    def candidates() -> Iterator[Plan]:
        for keep in asked.keeps:
            plans.append(make(keep))
            yield plans[-1]

    options = {name: value for name, value in asked.reading.items() if name != "counted"}
    search = smallest_certified(
        program, candidates(), data, target, delta=asked.delta, swaps=asked.swaps, p=asked.p, seed=asked.seed, **options
    )
    tests = [{"keep": k, **d.to_json()} for k, d in zip(asked.keeps, search.decisions, strict=False)]
    if search.chosen is None:
        raise CertifyError(
            f"{target} is not certified with {asked.keeps[0]} of the units kept: {search.decisions[0]}",
            fix="ask for less, keep more, or use a stronger preset",
        )
    plan = plans[search.chosen]
    certificate: dict[str, Any] = {
        "target": str(target),
        "about": str(Scope.POPULATION),
        "delta": asked.delta,
        "keep": asked.keeps[search.chosen],
        "tests": tests,
    }
    if (expected := _without_swaps(program, plan, stats, data, options, asked.p)) is not None:
        certificate["without_swaps"] = expected
    plan.made = {**plan.made, "certificate": certificate}
    return plan


def _without_swaps(
    program: Program, plan: Plan, stats: Stats, data: HeldOut, options: Mapping[str, Any], p: float | Sequence[float]
) -> dict[str, float] | None:
    """D2 by the scatter of the calibration, and the certificate that follows with the margins of plain runs.

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
    if not site.exact:
        return None
    plain = Verifier(program, plan, data, **options).plain().evidence
    return {"d2": site.d2, "iia": from_d2(plain.mean(plain.margin), site.d2)[0]}
