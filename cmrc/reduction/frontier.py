"""Several sizes of a model from one calibration: each planned, folded, and judged on the held-out rows.

What stands in the work folder is not done again. Sizes that cannot be reached are replaced by ones that can.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from cmrc.errors import GrowthError, OutOfReachError, RecipeError, ResidueError
from cmrc.hosts.onnx.bench import size_of
from cmrc.planning.planner import SizePlanner
from cmrc.program.lower import Lowered, lower
from cmrc.program.plan import Plan
from cmrc.reduction.goals import Goals, Measures, Quality
from cmrc.reduction.measuring import Judge
from cmrc.reduction.observer import Clock
from cmrc.reduction.result import WORDS, Size
from cmrc.reduction.subject import Subject
from cmrc.reduction.workfolder import WorkFolder
from cmrc.statistics.stats import Stats

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
LARGER = (0.98, 0.95)  # tried where none of the others is good enough
FEWEST = 5  # sizes, where fewer can be reached
NOTE = 1024  # bytes that a reduced file says about itself
TINY = 1e-6
MISSED = 3  # sizes in a row that are not good enough, after which smaller ones are not tried
AGAIN = 3  # times that a size which a goal names is planned smaller, because its model came out larger than foretold
MARGIN = 0.002  # of the original, by which such a plan is smaller than what was missing
DROPS = 5  # how many times sites that do not fold together are left out of one plan


def wanted_shares(shares: Sequence[float], goals: Goals) -> list[float]:
    """The sizes to try, from large to small. Those that a goal names are among them."""
    if goals.keep is not None:
        return [goals.keep]
    if not shares or not all(0 < share < 1 for share in shares):
        raise RecipeError(
            "the sizes are not fractions of the model", fix="give numbers between 0 and 1: frontier=0.8,0.6,0.4"
        )
    named = [part for part in (goals.macs, goals.pick, goals.size) if part is not None and part < 1]
    return sorted({round(float(share), 3) for share in (*shares, *named)}, reverse=True)


@dataclass(eq=False)
class Frontier:
    """The sizes of one subject in the making. `of` is what a size is a part of."""

    subject: Subject
    work: WorkFolder
    stats: Stats
    asked: Mapping[str, Any]
    of: str
    judge: Judge
    conditions: str  # under which quality was measured
    clock: Clock
    remarks: list[str]
    goals: Goals = field(default_factory=Goals)
    floor: float = 0.0  # the least part that can be reached, where that is known

    def measure(
        self, wanted: Sequence[float], is_good: Callable[[Measures], bool] | None = None, fewest: int = FEWEST
    ) -> list[Size]:
        """A plan, a model and its measures for every size that can be reached.

        With `is_good`, smaller sizes are left out once several in a row are not: none of them could be chosen. At least `fewest` are tried.
        """
        self.clock.stage("sizes", f"{len(wanted)} sizes: plan, fold, judge on {len(self.judge)} held-out samples")
        known = self.work.load(f"reach-{self.of}", self.work.asked)
        if known is None and not all(self.work.plan(share).is_file() for share in wanted):
            try:
                self.planner.require([self._amount(share) for share in wanted])
            except OutOfReachError as error:
                known = {"least": self._share(error.least)}
                self.work.save(f"reach-{self.of}", self.work.asked, known)
        self.floor = 0.0 if known is None else math.ceil(1000 * known["least"]) / 1000
        return self._all(wanted if min(wanted) >= self.floor else self._within(wanted, self.floor), is_good, fewest)

    @cached_property
    def planner(self) -> SizePlanner:
        """Of all sizes: units are ranked, and losses measured, once."""
        return SizePlanner(self.subject.sized, self.stats, self.subject.rows.calibration, self.asked)

    def _amount(self, share: float) -> dict[str, Any]:
        """What the planner is asked for. Of the bytes of a file it plans those of the numbers: the rest of the file stays."""
        if self.of == "units":
            return {"keep": share}
        if self.of == "bytes":
            numbers, whole = self.subject.sized.cost().bytes, self._bytes
            share = max((share * whole - (whole - numbers) - NOTE) / numbers, TINY)
        return {"budget": {"of": self.of, "amount": share}}

    def _share(self, amount: float) -> float:
        """The part of the original that an amount of the planner is."""
        if self.of != "bytes":
            return amount
        numbers, whole = self.subject.sized.cost().bytes, self._bytes
        return (amount * numbers + (whole - numbers) + NOTE) / whole

    @cached_property
    def _bytes(self) -> int:
        return size_of(self.subject.file(self.work))

    def measure_larger(self) -> list[Size]:
        """Sizes that are larger than the usual ones, for a model of which little can go."""
        self.clock.stage("sizes", f"{SHARES[0]:g} is not good enough: {len(LARGER)} larger sizes")
        try:
            return self._all(LARGER)
        except GrowthError:  # the remarks say so
            return []

    def _within(self, wanted: Sequence[float], floor: float) -> list[float]:
        within = [share for share in wanted if share >= floor]
        if min(wanted) < min(SHARES) and floor < min(within, default=1.0):
            within.append(floor)  # somebody asked for less than there is: this is what there is
        if len(within) < FEWEST and floor < 1:  # spread over what there is
            spread = np.linspace(1.0, floor, FEWEST + 1)[1:]
            within = sorted({*within, *(round(float(share), 3) for share in spread)}, reverse=True)
        self.remarks.append(
            f"less than {floor:g} of the {WORDS[self.of]} is out of reach: that much remains when all units that may be removed are removed"
        )
        if not within:
            raise RecipeError(
                "the units that can be replaced save nothing", fix="`cmrc inspect` shows what stops the others"
            )
        return within

    def _all(
        self, wanted: Sequence[float], is_good: Callable[[Measures], bool] | None = None, fewest: int = FEWEST
    ) -> list[Size]:
        sizes: list[Size] = []
        missed, grown = 0, None
        plans = self._plans(wanted)
        for share in self.clock.track(wanted, len(wanted), "sizes"):
            try:
                size = self._one(share, next(plans))
            except GrowthError as error:  # a shared weight that becomes several
                grown = error
                self.remarks.append(f"the size {share:g} is left out: {error.reason}")
                continue
            if sizes and _same(sizes[-1].plan, size.plan):
                sizes.pop()  # widths come in steps: the same plan, under its smaller name
                missed -= missed > 0
            sizes.append(size)
            for site, reason in size.plan.made.get("left_out", {}).items():
                self.remarks.append(f"left out: {site}: {reason}")
            m = size.measures
            kept = f"{m.parameters / max(self.subject.sized.cost().parameters, 1):.3f} of the parameters"
            self.clock.say(f"  {share:g}", f"{kept}, agrees on {m.quality.agreement.value:.4f}")
            missed = 0 if is_good is None or is_good(m) else missed + 1
            if missed >= MISSED and share != wanted[-1] and len(sizes) >= (fewest if missed == len(sizes) else FEWEST):
                self.remarks.append(
                    f"sizes below {share:g} were not tried, since {missed} in a row are not good enough: frontier= names sizes to try"
                )
                break
        if not sizes and grown is not None:
            raise grown
        return sizes

    def _one(self, share: float, plan: Plan) -> Size:
        path, lowered = self.work.model(share), None
        if not path.is_file() or not self._is_settled(share):
            lowered = self._held(share, self._lower(plan, self.work.plan(share)))
            plan = lowered.plan
            plan.save(self.work.plan(share))
            lowered.save(path, overwrite=True)
            self.work.forget(self.work.name(share))
            self.work.save(f"held-{self.work.name(share)}", self.work.asked, {"within": self._named(share)})
        noted = self.work.load(self.work.name(share), self.conditions)
        if noted is None:
            lowered = lowered or lower(self.subject.program, plan)
            noted = {
                "parameters": lowered.report.after.parameters,
                "macs": self.subject.macs_of(lowered.host),
                "quality": self.judge.quality(lowered).to_json(),
            }
            self.work.save(self.work.name(share), self.conditions, noted)
        quality = Quality.from_json(noted["quality"])
        return Size(share, plan, path, Measures(noted["parameters"], noted["macs"], size_of(path), quality, None))

    def _named(self, share: float) -> float | None:
        """The goal that names this size, as it was said."""
        named = {"macs": self.goals.macs, "bytes": self.goals.size}.get(self.of)
        return named if named is not None and round(named, 3) == share else None

    def _is_settled(self, share: float) -> bool:
        """Whether the model of this size was made for the goal that names it now, if one does."""
        noted = self.work.load(f"held-{self.work.name(share)}", self.work.asked)
        return self._named(share) is None or (noted is not None and noted["within"] == self._named(share))

    def _held(self, share: float, lowered: Lowered) -> Lowered:
        """A size that a goal names, planned smaller where the model came out larger: what folding adds at run time, or to the file,
        is not foretold. The first plan stays where no smaller one is within the goal.
        """
        named = self._named(share)
        if named is None:
            return lowered
        amount, tried = named, lowered
        for _ in range(AGAIN):
            over = self._part(tried) - named
            if over <= 0:
                return tried
            amount -= over + MARGIN
            if amount <= 0:
                break
            try:
                plan = self._new_plan(amount)
            except OutOfReachError:
                break
            tried = self._lower(plan, self.work.plan(share))
        return tried if self._part(tried) <= named else lowered

    def _part(self, lowered: Lowered) -> float:
        """What is left of the multiply-adds or of the file, as it is measured."""
        if self.of == "macs":
            return self.subject.macs_of(lowered.host) / max(self.subject.macs_of(self.subject.program.host), 1)
        trial = self.work.folder / "trial.onnx"
        lowered.save(trial, overwrite=True)
        part = size_of(trial) / self._bytes
        for path in self.work.folder.glob("trial.onnx*"):
            path.unlink()
        return part

    def _new_plan(self, share: float) -> Plan:
        sized = self.planner.plan(self._amount(share))
        return Plan(self.subject.program, sized.entries, made=sized.made, scores=sized.scores)

    def _plans(self, wanted: Sequence[float]) -> Iterator[Plan]:
        """The plan of every size: from the work folder, or new."""
        program = self.subject.program
        done = {share: Plan.load(self.work.plan(share)) for share in wanted if self.work.plan(share).is_file()}
        for share in wanted:
            if share in done:
                plan = done[share]
                program.require(plan)
                if len(done) < len(wanted):
                    self.planner.remember(self._amount(share), plan)
            else:
                plan = self._new_plan(share)
                plan.save(self.work.plan(share))
            yield plan

    def _lower(self, plan: Plan, path: Path) -> Lowered:
        """Lower what folds: sites whose replacements stay in are taken out of the plan, with a remark."""
        for _ in range(DROPS):
            lowered = lower(self.subject.program, plan, residue="keep")
            stuck = {i: residue.reason for residue in lowered.result.residue for i in residue.sources}
            if not lowered.result.residue:
                return lowered
            if not stuck:
                break
            for i, reason in stuck.items():
                self.remarks.append(f"left out: {plan.entries[i].site}: {reason}")
            rest = [entry for i, entry in enumerate(plan.entries) if i not in stuck]
            plan = Plan(self.subject.program, rest, made=plan.made, scores=plan.scores)
            plan.save(path)
        raise ResidueError(
            "the plan does not fold completely: something would stay at run time",
            fix="leave out sites with protect=, or plan and lower by hand with residue=keep",
        )


def _same(one: Plan, other: Plan) -> bool:
    return [(e.value, e.units) for e in one.entries] == [(e.value, e.units) for e in other.entries]
