"""How much cutting a site, or all of them, changes the model's output, as measured. This makes the risks of sites comparable.

    inputs ─> piece 0 ─> site 1 ─> piece 1 ─> site 2 ─> ... ─> output      once, without replacements
                           └─ do ─> piece 1 ─> site 2 ─> ... ─> output     once for each site and size: only what lies behind it

The loss is KL(model ‖ cut model) along the last axis of the outputs, or the squared error with `loss: logit` or `squared-error`,
and for outputs that are no rows of classes (one number, or more than three axes).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cmrc.errors import StatsError
from cmrc.ir.graph import Array
from cmrc.planning.allocate import Costs
from cmrc.planning.progress import Progress
from cmrc.planning.ranking import Ranked
from cmrc.planning.recipe import Recipe
from cmrc.planning.replacements import replace_units
from cmrc.planning.selection import Order
from cmrc.program.plan import Plan
from cmrc.program.program import Program
from cmrc.program.sites import Site
from cmrc.statistics.batches import Batch, as_array, batches
from cmrc.statistics.calibrate import Watch
from cmrc.verification.evidence import log_softmax
from cmrc.verification.interpreter import Interpreter

KEPT = (0.8, 0.55, 0.3)  # the parts of a site at which it is measured
PREDICTIONS = 1024  # answers of the model that are compared
FEWEST = 96  # answers, where running more would take too long
WORK = 10**12  # multiply-accumulates of all runs together: half a minute
PAIRS_WORK = 4 * 10**12  # the same where every unit is replaced alone: minutes
LEAST_ROWS = 8
COPIES = 16  # of the outputs, in float64 and at a time
BYTES = 2**29  # of values that are held at a time
HEAT = 0.25  # of the rows, after which a candidate may be given up
BEHIND = 1.3  # times the least loss: such a candidate does not catch up
SOFT = 4.0  # the temperature of classes: where the model is sure, its KL says little about which units matter
TINY = 1e-12  # the least probability whose logarithm is taken
SQUARED = ("logit", "squared-error")


def probed_counts(site: Site, *, vanishes: bool) -> list[int]:
    """The numbers of units whose loss is measured, each at least 1 and less than all, or all of a site that may vanish."""
    some = {min(max(site.units - round(part * site.units), 1), site.units - 1) for part in KEPT}
    return sorted(some | ({site.units} if vanishes else set()))


@dataclass(slots=True, eq=False)
class LossProbe:
    """Measures what plans do to the output, on rows of the first batches."""

    program: Program
    recipe: Recipe
    data: Any
    watch: Watch
    known: dict[tuple[Any, ...], list[list[float]]] = field(default_factory=dict)  # what was measured before
    costs: dict[tuple[str, ...], Costs] = field(default_factory=dict)
    progress: Progress | None = None
    sites: dict[str, Site] = field(default_factory=dict)  # at which the model is cut
    interpreter: Interpreter = field(init=False)

    def __post_init__(self) -> None:
        self.interpreter = Interpreter(self.program)

    def costs_of(self, of: str, sites: Sequence[Site]) -> Costs:
        """What choices cost. It is kept too: several budgets share what was lowered for the first."""
        key = (of, *(site.value for site in sites))
        if key not in self.costs:
            self.costs[key] = Costs(self.program, sites, of, self._sizes())
        return self.costs[key]

    def _sizes(self) -> dict[str, int]:
        """The dynamic sizes of one row of the data, by name: a text has many tokens, and what reads them all weighs accordingly."""
        if self.data is None or isinstance(self.data, Iterator):
            return {}
        batch = next(batches(self.data, self.program.host.inputs, size=self.recipe.batch))
        return {
            name: size if axis else 1
            for value in self.program.graph.inputs
            if value.name in batch.inputs
            for axis, (name, size) in enumerate(zip(value.shape, batch.inputs[value.name].shape, strict=True))
            if isinstance(name, str)
        }

    def of_sites(self, ranked: Sequence[Ranked], counts: Sequence[Sequence[int]]) -> list[list[float]]:
        """For each site the mean loss with so many of its units replaced, for several numbers, and nothing else. Measured once."""
        asked = tuple((r.site.value, *r.order.units.tolist(), *some) for r, some in zip(ranked, counts, strict=True))
        if asked not in self.known:
            plans = [self._planned([r], [count]) for r, some in zip(ranked, counts, strict=True) for count in some]
            losses = iter(self._losses(plans))
            self.known[asked] = [[next(losses) for _ in some] for some in counts]
        return self.known[asked]

    def together(self, ranked: Sequence[Ranked], candidates: Sequence[Sequence[int]]) -> list[float]:
        """For each candidate the mean loss with so many units of each site replaced, all at once, each fitted by itself.

        One that is clearly behind after the first rows is not run on the others; its loss is estimated by those.
        """
        return self._losses([self._planned(ranked, counts) for counts in candidates], race=True)

    def of_pairs(self, ranked: Sequence[Ranked]) -> list[Array] | None:
        """For each site G, with Σ_{j,k∈S} G_jk ≈ the loss of replacing its units S, from what each unit alone does to the outputs.

        All that lies behind the site is in it, norms too. Classes are softened: see `SOFT`. None where it takes too long.
        """
        sites, units = [r.site for r in ranked], sum(r.site.units for r in ranked)
        if self.program.cost().macs * units * FEWEST // 2 > PAIRS_WORK:
            return None
        plans = [[self._planned([alone(r, unit)], [1]) for unit in range(r.site.units)] for r in ranked]
        pairs, weight = [np.zeros((site.units, site.units)) for site in sites], 0.0
        parts = list(self._parts(sites, units, work=PAIRS_WORK, copies=2 * units))
        for part in self.watch(parts, len(parts)):
            run = self.interpreter.hold(part.inputs, sites)
            plain = run.intervene()
            counted = self._counted(part, plain[0])
            for together, some in zip(pairs, plans, strict=True):
                moved = np.array([self._moved(plain, run.intervene(interventions=[plan]), counted) for plan in some])
                together += moved @ moved.T
            weight += float(counted.sum())
        return [together / max(weight, 1.0) for together in pairs]

    def _planned(self, ranked: Sequence[Ranked], counts: Sequence[int]) -> Plan:
        plan = Plan(self.program)
        for r, count in zip(ranked, counts, strict=True):
            plan = replace_units(self.program, r, count, plan, {})
        return plan

    def _losses(self, plans: Sequence[Plan], *, race: bool = False) -> list[float]:
        """What each plan does to the output; measured once, also if the run was interrupted since."""
        losses = None if self.progress is None else self.progress.load_losses(plans)
        if losses is None:
            losses = self._measured(plans, race)
            if self.progress is not None:
                self.progress.save_losses(plans, losses)
        return losses

    def _measured(self, plans: Sequence[Plan], race: bool) -> list[float]:
        if self.data is None:
            raise StatsError(
                "a budget is shared by what the cut at each site does to the output, but there are no data to measure it on",
                fix="give data= beside the statistics (some batches suffice), or keep= instead of a budget",
            )
        self.sites |= {e.value: self.program.site_of(e.value, e.axis) for plan in plans for e in plan.entries}
        sites = list(self.sites.values())
        parts = list(self._parts(sites, len(plans), work=WORK, copies=COPIES))
        losses, weight, behind = np.zeros(len(plans)), 0.0, dict[int, float]()
        for number, part in enumerate(self.watch(parts, len(parts)), 1):
            run = self.interpreter.hold(part.inputs, sites)
            plain = run.intervene()
            counted = self._counted(part, plain[0])
            for place in [place for place in range(len(plans)) if place not in behind]:
                losses[place] += self._loss(plain, run.intervene(interventions=[plans[place]]), counted)
            weight += float(counted.sum())
            if race and number >= HEAT * len(parts):
                best = min(loss for place, loss in enumerate(losses) if place not in behind)
                behind |= {
                    i: loss / best for i, loss in enumerate(losses) if i not in behind and loss > BEHIND * best > 0
                }
        ahead = min(loss for place, loss in enumerate(losses) if place not in behind)
        for place, times in behind.items():
            losses[place] = times * ahead
        return [float(loss) / max(weight, 1.0) for loss in losses]

    def _parts(self, sites: Sequence[Site], plans: int, *, work: int, copies: int) -> Iterator[Batch]:
        """Rows of the first batches, in parts whose values fit. A plan runs half of the model, on average."""
        wanted = at_once = 0
        for batch in batches(self.data, self.program.host.inputs, size=self.recipe.batch):
            if not at_once:
                one = self.interpreter.hold(_rows(batch, slice(0, 1)).inputs, sites)
                outputs = one.intervene()
                bytes_of_one = sum(array.nbytes for array in one.plain.values())
                answers = max(1, math.prod(outputs[0].shape[1:-1]))
                affordable = work // max(self.program.cost().macs * plans // 2, 1)
                wanted = max(LEAST_ROWS, min(PREDICTIONS // answers, max(FEWEST // answers, affordable)))
                at_once = max(
                    1, BYTES // (4 * sum(math.prod(array.shape[1:]) * copies for array in outputs) + bytes_of_one)
                )
            for start in range(0, min(len(batch), wanted), at_once):
                yield _rows(batch, slice(start, min(start + at_once, wanted)))
            wanted -= len(batch)
            if wanted <= 0:
                return

    def _counted(self, batch: Batch, output: Array) -> Array:
        """Which answers count: those of the mask that `positions` names, if it fits."""
        answers = output.shape[:-1] if output.ndim > 1 else output.shape
        named = self.recipe.positions
        if isinstance(named, str) and named not in ("all", "each"):
            mask = np.asarray(batch.mask(named)).astype(np.float64)
            if mask.shape == answers:
                return mask
        return np.ones(answers)

    def _loss(self, plain: Sequence[Array], cut: Sequence[Array], counted: Array) -> float:
        total = 0.0
        for before, after in zip(plain, cut, strict=True):
            if before.dtype.kind != "f":
                continue
            apart = divergence(before, after) if self._is_classes(before) else squared_error(before, after)
            total += (
                float((apart * counted).sum()) if apart.shape == counted.shape else float(apart.mean() * counted.sum())
            )
        return total

    def _moved(self, plain: Sequence[Array], cut: Sequence[Array], counted: Array) -> Array:
        """What a cut does to the outputs, as a vector whose squared length is the loss, to second order and softened."""
        parts = []
        for before, after in zip(plain, cut, strict=True):
            if before.dtype.kind != "f":
                continue
            change = shifted(before, after) if self._is_classes(before) else after.astype(np.float64) - before
            change = change if before.ndim > 1 else change[..., None]
            share = counted[..., None] if change.shape[:-1] == counted.shape else counted.sum() / change[..., 0].size
            parts.append((change * np.sqrt(share)).reshape(-1))
        return np.concatenate(parts) if parts else np.zeros(0)

    def _is_classes(self, output: Array) -> bool:
        return output.ndim in (2, 3) and output.shape[-1] > 1 and self.recipe.loss not in SQUARED


def alone(r: Ranked, unit: int) -> Ranked:
    """The site with one unit before all others."""
    others = r.order.units[r.order.units != unit]
    return replace(r, order=Order(np.concatenate([[unit], others]), r.order.added))


def divergence(plain: Array, cut: Array) -> Array:
    """KL(plain ‖ cut) along the last axis, of logits or of probabilities."""
    p, q = log_probabilities(plain, cut)
    return np.asarray((np.exp(p) * (p - q)).sum(-1))


def shifted(plain: Array, cut: Array, temperature: float = SOFT) -> Array:
    """√(s/2) · (Δ − E_s Δ) for a change Δ of log p, where s is p softened by the temperature.

    At temperature 1 its squared length is KL(plain ‖ cut) to second order.
    """
    p, q = log_probabilities(plain, cut)
    part, change = np.exp(log_softmax(p / temperature)), q - p
    return np.asarray(np.sqrt(part / 2) * (change - (part * change).sum(-1, keepdims=True)))


def log_probabilities(plain: Array, cut: Array) -> tuple[Array, Array]:
    """Along the last axis, of logits or of probabilities."""
    p, q = plain.astype(np.float64), cut.astype(np.float64)
    if p.min() >= 0 and np.allclose(p.sum(-1), 1, atol=1e-3):
        return np.log(np.maximum(p, TINY)), np.log(np.maximum(q, TINY))
    return log_softmax(p), log_softmax(q)


def squared_error(plain: Array, cut: Array) -> Array:
    """‖Δz‖² along the last axis."""
    return np.asarray(((plain.astype(np.float64) - cut) ** 2).sum(-1) if plain.ndim > 1 else (plain - cut) ** 2)


def _rows(batch: Batch, rows: slice) -> Batch:
    inputs = {name: as_array(array)[rows] for name, array in batch.inputs.items()}
    others = {name: as_array(array)[rows] for name, array in batch.others.items()}
    return Batch(inputs, None, others)
