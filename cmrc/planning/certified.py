"""Certified planning: the smallest plan of a recipe whose certificate holds on held-out data.

    keep 0.95 ─> plan ─> swaps on held-out data ─> certified ─> keep 0.9 ─> ... ─> not certified: the one before it

The shares to keep are fixed beforehand and tested from the largest down, so the search needs no correction (`certify.smallest`).
Every plan is taken literally by the interpreter; lowering it afterwards changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cmrc.errors import CertifyError
from cmrc.program.plan import Plan
from cmrc.program.program import Program
from cmrc.statistics.batches import batches
from cmrc.statistics.stats import Stats, digest_of_batch
from cmrc.verification.certificates import Target
from cmrc.verification.verifier import Data, smallest_certified

KEEPS = tuple(round(0.95 - 0.05 * i, 2) for i in range(19))
SWAPS = 20_000


@dataclass(frozen=True, slots=True)
class Certify:
    """What is certified, and on what: `held_out` must be data that no plan was calibrated on."""

    target: str
    held_out: Any
    delta: float = 0.05
    swaps: int = SWAPS  # at most, for each plan
    p: float | Sequence[float] = 0.5
    seed: int = 0
    keeps: Sequence[int | float] = KEEPS
    reading: Mapping[str, Any] = field(
        default_factory=dict
    )  # as for `cmrc.verify`: site, output, reads, tolerance, ...


def certified(program: Program, stats: Stats, make: Callable[[int | float], Plan], asked: Certify) -> Plan:
    """The smallest certified plan. `plan.made["certificate"]` tells the target, its level, and every test that was made."""
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
    data = Data.of(parts, program.host.inputs, asked.reading.get("counted"))
    plans: list[Plan] = []

    def candidates() -> Iterator[Plan]:
        for keep in asked.keeps:
            plans.append(make(keep))
            yield plans[-1]

    options = {name: value for name, value in asked.reading.items() if name != "counted"}
    found = smallest_certified(
        program, candidates(), data, target, delta=asked.delta, swaps=asked.swaps, p=asked.p, seed=asked.seed, **options
    )
    tests = [{"keep": k, **d.to_json()} for k, d in zip(asked.keeps, found.decisions, strict=False)]
    if found.chosen is None:
        raise CertifyError(
            f"{target} is not certified with {asked.keeps[0]} of the units kept: {found.decisions[0]}",
            fix="ask for less, keep more, or use a stronger preset",
        )
    plan = plans[found.chosen]
    certificate = {"target": str(target), "delta": asked.delta, "keep": asked.keeps[found.chosen], "tests": tests}
    plan.made = {**plan.made, "certificate": certificate}
    return plan
