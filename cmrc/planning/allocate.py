"""One budget spread over all sites: a unit goes where it adds the least loss for what it saves.

Σ risk_i(k_i) is minimised over the numbers k_i of units that go. The risks are in units of the model's output (`probe`), so those of
different sites may be added. For a price λ every site takes the k with the least risk(k) − λ · k · saving; the price is searched for
by bisection, and what a choice really costs is found by lowering it, so that sites that share an op are counted right. What is then
left of the budget goes where it helps most, one site after the other. Which of a few candidates is best together is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cmrc.errors import HostError, OutOfReachError
from cmrc.ir.axes import product
from cmrc.ir.cost import cost
from cmrc.ir.graph import Array, Graph
from cmrc.passes import pipeline as passes
from cmrc.planning.recipe import Budget
from cmrc.program.plan import Plan
from cmrc.program.program import Program
from cmrc.program.sites import Site

ROUNDS = 4  # for each site, in which what is left of a budget is spent
WEIGHTS = (0.25, 0.5, 0.75, 1.0)  # of the same part of every site, in further candidates
STEPS = 40  # bisections of the price
TIMED_STEPS = 8  # the same where every choice is run and timed
RUNS = 30  # of which the median is the latency


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """The risk of replacing the first k units of a site, k = 0, 1, ...; what stays is a multiple, and at least `least`."""

    site: Site
    risk: Array
    multiple: int
    least: int

    def choices(self) -> Array:
        """The numbers of units that may go."""
        kept = np.arange(self.site.units + 1)
        fits = (kept % self.multiple == 0) & (kept >= self.least) | (kept == self.site.units)
        return np.asarray(self.site.units - kept[fits][::-1])


def allocate(program: Program, curves: Sequence[Curve], budget: Budget) -> list[list[int]]:
    """How many units of each site to replace so that the lowered model is within the budget.

    The first candidate has the least sum of risks. Others lie on the way to the same part of every site, since risks that were
    measured one by one do not quite add up: what is cut most suffers most from the rest.
    """
    measure = _measure(program, budget)
    whole = measure([0] * len(curves), curves)
    allowed = budget.amount * whole if budget.amount <= 1 else budget.amount
    choices = [curve.choices() for curve in curves]
    most = [int(c.max()) for c in choices]
    least = measure(most, curves)
    if least > allowed:
        raise OutOfReachError(
            f"the budget of {allowed:,.6g} {budget.of} cannot be met: with all that may go it is {least:,.6g}",
            least=least / whole,
            fix="allow more, lower `minimum`, or give more sites",
        )
    savings = [_saving(measure, curves, i, m, whole) for i, m in enumerate(most)]

    def at(price: float) -> list[int]:
        counts = []
        for curve, options, saving in zip(curves, choices, savings, strict=True):
            worth = curve.risk[options] - price * saving * options
            counts.append(int(options[worth.argmin()]))
        return counts

    steps = TIMED_STEPS if budget.of == "latency" else STEPS
    low, high = 0.0, 1.0
    while at(high) != most and high < 1e30:
        high *= 10
    best = most
    for _ in range(steps):
        middle = (low * high) ** 0.5 if low else high * 1e-3
        counts = at(middle)
        if measure(counts, curves) <= allowed:
            best, high = counts, middle
        else:
            low = middle
    if budget.of == "latency":
        return [best]
    costs = _Costs(measure, curves, choices, savings, allowed)
    candidates = [costs.spend(best)]
    uniform = costs.least_part()
    for weight in WEIGHTS:
        blend = [weight * a + (1 - weight) * b for a, b in zip(uniform, candidates[0], strict=True)]
        candidate = costs.spend(costs.within(blend))
        if candidate not in candidates:
            candidates.append(candidate)
    return candidates


@dataclass(frozen=True, slots=True, eq=False)
class _Costs:
    """Choices within a budget."""

    measure: Measure
    curves: Sequence[Curve]
    choices: Sequence[Array]
    savings: Sequence[float]
    allowed: float

    def least_part(self) -> list[float]:
        """The same part of every site, as little as the budget allows."""
        low, high = 0.0, 1.0
        for _ in range(STEPS // 4):
            middle = (low + high) / 2
            counts = self._nearest([middle * curve.site.units for curve in self.curves])
            low, high = (low, middle) if self._fits(counts) else (middle, high)
        return [high * curve.site.units for curve in self.curves]

    def within(self, wanted: Sequence[float]) -> list[int]:
        """The choices next to these numbers, moved towards all that may go until the budget is met."""
        most = [float(options.max()) for options in self.choices]
        low, high = 0.0, 1.0
        counts = self._nearest(wanted)
        if self._fits(counts):
            return counts
        for _ in range(STEPS // 4):
            middle = (low + high) / 2
            counts = self._nearest([w + middle * (m - w) for w, m in zip(wanted, most, strict=True)])
            low, high = (low, middle) if self._fits(counts) else (middle, high)
        return self._nearest([w + high * (m - w) for w, m in zip(wanted, most, strict=True)])

    def spend(self, counts: list[int]) -> list[int]:
        """Take back cuts while the budget lasts: always the one that lowers the risk most for what it costs."""
        closed = set[int]()
        for _ in range(ROUNDS * len(self.curves)):
            left = self.allowed - self.measure(counts, self.curves)
            options = []
            for i, (curve, saving) in enumerate(zip(self.curves, self.savings, strict=True)):
                fewer = self.choices[i][self.choices[i] < counts[i]]
                fewer = fewer[(counts[i] - fewer) * saving <= left]
                if len(fewer) and i not in closed:
                    worth = (curve.risk[counts[i]] - curve.risk[fewer]) / ((counts[i] - fewer) * saving)
                    options.append((float(worth.max()), i, int(fewer[worth.argmax()])))
            if not options:
                break
            _, i, units = max(options)
            trial = [units if k == i else count for k, count in enumerate(counts)]
            if self._fits(trial):
                counts = trial
            else:
                closed.add(i)  # it costs more than the average says
        return counts

    def _nearest(self, wanted: Sequence[float]) -> list[int]:
        return [
            int(options[np.abs(options - number).argmin()])
            for options, number in zip(self.choices, wanted, strict=True)
        ]

    def _fits(self, counts: Sequence[int]) -> bool:
        return self.measure(counts, self.curves) <= self.allowed


def _saving(measure: Measure, curves: Sequence[Curve], i: int, most: int, whole: float) -> float:
    """What one unit of a site saves, on average over half of those that may go."""
    half = max(most // 2, 1)
    counts = [half if k == i else 0 for k in range(len(curves))] if most else [0] * len(curves)
    return max((whole - measure(counts, curves)) / half, 1e-12)


Measure = Callable[[Sequence[int], Sequence[Curve]], float]


def _measure(program: Program, budget: Budget) -> Measure:
    measured: dict[tuple[int, ...], float] = {}
    timed = budget.of == "latency"
    if timed and program.host.kind != "onnx":
        raise HostError("latency is measured under onnxruntime", fix="trace the exported ONNX model")

    def measure(counts: Sequence[int], curves: Sequence[Curve]) -> float:
        key = tuple(counts)
        if key not in measured and budget.of == "units":
            measured[key] = float(sum(curve.site.units for curve in curves) - sum(counts))
        elif key not in measured:
            graph = _lowered(program, counts, curves)
            measured[key] = (
                _latency(program, graph) if timed else float(getattr(cost(graph, since=program.graph), budget.of))
            )
        return measured[key]

    return measure


def _lowered(program: Program, counts: Sequence[int], curves: Sequence[Curve]) -> Graph:
    """The model with so many units of each site gone: which ones makes no difference to its cost."""
    plan = Plan(program)
    for curve, count in zip(curves, counts, strict=True):
        if count:
            plan.do(curve.site.value, units=range(count), constant=0.5, axis=curve.site.axis)
    return passes.run(program.with_dos(plan), since=program.graph).graph if len(plan) else program.graph


def _latency(program: Program, graph: Graph) -> float:
    """Milliseconds of one run under onnxruntime, the median of several; sizes known only at run time are 1."""
    host = program.host.build(graph) if graph is not program.graph else program.host
    rng = np.random.default_rng(0)
    inputs = {}
    for value in program.graph.inputs:
        shape = [product([dim])[0] for dim in value.shape]
        floating = value.dtype.startswith(("float", "bfloat"))
        inputs[value.name] = (rng.normal(size=shape) if floating else np.zeros(shape)).astype(value.dtype)
    host.run(inputs)
    seconds = []
    for _ in range(RUNS):
        start = time.perf_counter()
        host.run(inputs)
        seconds.append(time.perf_counter() - start)
    return 1e3 * float(np.median(seconds))
