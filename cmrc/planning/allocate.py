"""One budget spread over all sites: units are replaced where they add the least loss for what they save.

Σ risk_i(k_i) is minimised over the numbers k_i of units that go. The risks are in units of the model's output (`probe`), so those of
different sites may be added. For a price λ every site takes the k with the least risk(k) − λ · k · saving, and the price is searched for
by bisection. What a choice costs is foretold from a few lowered models (`Costs`) and then found by lowering that choice itself. What is
left of the budget goes where it helps most, one site after the other. Which of a few candidates is best together is measured.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np

from cmrc.errors import HostError, OutOfReachError
from cmrc.ir.axes import product
from cmrc.ir.cost import cost
from cmrc.ir.graph import Array, Graph
from cmrc.passes import pipeline as passes
from cmrc.planning.recipe import Budget
from cmrc.program.plan import Plan
from cmrc.program.program import Program
from cmrc.program.reach import ops_around
from cmrc.program.sites import Site

ROUNDS = 16  # for each site, in which what is left of a budget is spent
NEARLY = 0.9  # of the best worth: how much is taken back at once
WEIGHTS = (0.25, 0.5, 0.75, 1.0)  # of the same part of every site, in further candidates
STEPS = 40  # bisections of the price
TRIES = 8  # choices that are lowered until one meets the budget
SLACK = 0.005  # of the budget, that a choice may leave
RUNS = 30  # of which the median is the latency


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """The risk of replacing the first k units of a site, k = 0, 1, ...; what stays is a multiple, and at least `least`.

    A site that `may_vanish` may also lose all its units: the rest of the model passes by it.
    """

    site: Site
    risk: Array
    multiple: int
    least: int
    may_vanish: bool = False

    def choices(self) -> Array:
        """The numbers of units that may be replaced."""
        kept = np.arange(self.site.units + 1)
        fits = (kept % self.multiple == 0) & (kept >= self.least) | (kept == self.site.units)
        fits[0] |= self.may_vanish
        return np.asarray(self.site.units - kept[fits][::-1])


def allocate(
    curves: Sequence[Curve], budget: Budget, costs: Costs, *, larger: Sequence[int] | None = None
) -> list[list[int]]:
    """How many units of each site to replace so that the lowered model is within the budget.

    The first candidate has the least sum of risks. Others lie on the way to the same part of every site, since risks that were
    measured one by one do not quite add up: what is cut most suffers most from the rest. The last one leaves out what a `larger`
    size of the model leaves out, and more.
    """
    allowed = require_reach(curves, budget, costs)
    choices = [curve.choices() for curve in curves]
    most = [int(c.max()) for c in choices]
    sharing = _Sharing(costs, curves, choices)
    best = sharing.within(allowed, sharing.cheapest)
    candidates = [most if best is None else best]
    uniform = sharing.least_part(allowed)
    for weight in () if costs.timed else WEIGHTS:
        blend = [weight * a + (1 - weight) * b for a, b in zip(uniform, candidates[0], strict=True)]
        candidate = sharing.within(allowed, partial(sharing.towards_most, blend))
        if candidate is not None and candidate not in candidates:
            candidates.append(candidate)
    if larger is not None:
        further = [options[options >= gone] for options, gone in zip(choices, larger, strict=True)]
        within = _Sharing(costs, curves, further)
        candidate = within.within(allowed, within.cheapest)
        if candidate is not None and candidate not in candidates:
            candidates.append(candidate)
    return candidates


def require_reach(curves: Sequence[Curve], budget: Budget, costs: Costs) -> float:
    """The amount that the budget allows; an error if even the smallest possible model exceeds it."""
    whole = costs.measure([0] * len(curves))
    allowed = budget.amount * whole if budget.amount <= 1 else budget.amount
    least = costs.measure([int(curve.choices().max()) for curve in curves])
    if least > allowed:
        raise OutOfReachError(
            f"the budget of {allowed:,.6g} {budget.of} cannot be met: with all units removed that may be removed, it is {least:,.6g}",
            least=least / whole,
            fix="allow more, lower `minimum`, or give more sites",
        )
    return allowed


@dataclass(frozen=True, slots=True, eq=False)
class _Sharing:
    """Choices whose predicted cost is below an amount."""

    costs: Costs
    curves: Sequence[Curve]
    choices: Sequence[Array]

    def within(self, allowed: float, choose: Callable[[float], list[int]]) -> list[int] | None:
        """What `choose` takes and `spend` gives back, so that the lowered model meets the budget, close to it; None if it never does."""
        below, best, nearest = allowed, None, -np.inf
        for _ in range(TRIES):
            counts = self.spend(choose(below), below)
            cost = self.costs.measure(counts)
            if nearest < cost <= allowed:
                best, nearest = counts, cost
            if allowed * (1 - SLACK) <= cost <= allowed:
                break
            foretold = self.costs.foretell(counts)
            if cost <= allowed and below - foretold >= allowed - cost:
                break  # what is left is too little for any further unit
            below += 0.9 * (allowed - cost) if cost <= allowed else 1.05 * (allowed - cost)
        return best

    def cheapest(self, below: float) -> list[int]:
        """The least sum of risks: the same price for what every site saves."""
        low, high, best = 0.0, 1.0, [int(options.max()) for options in self.choices]
        while self._at(high) != best and high < 1e30:
            high *= 10
        for _ in range(STEPS):
            middle = (low * high) ** 0.5 if low else high * 1e-3
            counts = self._at(middle)
            if self.costs.foretell(counts) <= below:
                best, high = counts, middle
            else:
                low = middle
        return best

    def _at(self, price: float) -> list[int]:
        counts = []
        for curve, options, saving in zip(self.curves, self.choices, self.costs.savings, strict=True):
            worth = curve.risk[options] - price * saving * options
            counts.append(int(options[worth.argmin()]))
        return counts

    def least_part(self, below: float) -> list[float]:
        """The same part of every site, as little as the budget allows."""
        return self._bisect([0.0] * len(self.curves), [float(curve.site.units) for curve in self.curves], below)

    def towards_most(self, wanted: Sequence[float], below: float) -> list[int]:
        """The choices next to these numbers, moved towards all that may go until the budget is met."""
        if self.costs.foretell(self._nearest(wanted)) <= below:
            return self._nearest(wanted)
        return self._nearest(self._bisect(wanted, [float(options.max()) for options in self.choices], below))

    def _bisect(self, start: Sequence[float], end: Sequence[float], below: float) -> list[float]:
        low, high = 0.0, 1.0
        for _ in range(STEPS // 4):
            middle = (low + high) / 2
            counts = self._nearest([a + middle * (b - a) for a, b in zip(start, end, strict=True)])
            low, high = (low, middle) if self.costs.foretell(counts) <= below else (middle, high)
        return [a + high * (b - a) for a, b in zip(start, end, strict=True)]

    def _nearest(self, wanted: Sequence[float]) -> list[int]:
        return [
            int(options[np.abs(options - number).argmin()])
            for options, number in zip(self.choices, wanted, strict=True)
        ]

    def spend(self, counts: list[int], below: float) -> list[int]:
        """Undo cuts while the budget allows it: always the cut that lowers the risk most for its cost."""
        closed = set[int]()
        for _ in range(ROUNDS * len(self.curves)):
            left = below - self.costs.foretell(counts)
            options = []
            for i, (curve, saving) in enumerate(zip(self.curves, self.costs.savings, strict=True)):
                fewer = self.choices[i][self.choices[i] < counts[i]]
                fewer = fewer[(counts[i] - fewer) * saving <= left]
                if len(fewer) and i not in closed:
                    worth = (curve.risk[counts[i]] - curve.risk[fewer]) / ((counts[i] - fewer) * saving)
                    options.append((float(worth.max()), i, int(fewer[worth >= NEARLY * worth.max()].min())))
            if not options:
                break
            _, i, units = max(options)
            trial = [units if k == i else count for k, count in enumerate(counts)]
            if self.costs.foretell(trial) <= below:
                counts = trial
            else:
                closed.add(i)  # it costs more than the average says
        return counts


@dataclass(eq=False)
class Costs:
    """What the model costs with so many units of each site gone: by lowering it, once for each choice, and foretold.

    A linear map between two sites costs the product of the units that both keep. So with k units gone the cost is
    whole − Σ s_i k_i + Σ x_ij k_i k_j, where only pairs that share an op have an x. Both are found by lowering each site, and each
    such pair, at half. Nothing is lowered twice, whatever the number of budgets.
    """

    program: Program
    sites: Sequence[Site]
    of: str
    sizes: Mapping[str, int] = field(default_factory=dict)  # dynamic ones; others count as 1
    measured: dict[tuple[int, ...], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.timed and self.program.host.kind != "onnx":
            raise HostError("latency is measured under onnxruntime", fix="trace the exported ONNX model")

    @property
    def timed(self) -> bool:
        return self.of == "latency"

    def measure(self, counts: Sequence[int]) -> float:
        """The cost of a choice, by lowering it."""
        key = tuple(counts)
        if key not in self.measured:
            if self.of == "units":
                self.measured[key] = float(sum(site.units for site in self.sites) - sum(counts))
            else:
                graph = self._lowered(counts)
                self.measured[key] = (
                    _latency(self.program, graph)
                    if self.timed
                    else float(getattr(cost(graph, self.sizes, since=self.program.graph), self.of))
                )
        return self.measured[key]

    def foretell(self, counts: Sequence[int]) -> float:
        """The predicted cost of a choice, without lowering."""
        gone = np.asarray(counts, dtype=np.float64)
        return self.measure([0] * len(counts)) - float(gone @ self.savings) + float(gone @ self._shared @ gone) / 2

    @cached_property
    def savings(self) -> Array:
        """What one unit of each site saves while no other site is cut; never 0."""
        whole = self.measure([0] * len(self.sites))
        alone = [self.measure(self._half(i)) for i in range(len(self.sites))]
        return np.array([
            max((whole - cost) / max(half, 1), 1e-12) for cost, half in zip(alone, self._halves, strict=True)
        ])  # fmt: skip

    @cached_property
    def _shared(self) -> Array:
        """x_ij: what two units of two sites save less together than one by one."""
        count = len(self.sites)
        shared, whole = np.zeros((count, count)), self.measure([0] * count)
        if self.of == "units" or self.timed:  # the one adds up, the other is not known so well
            return shared
        around = [{node.name for node in ops_around(self.program, site)} for site in self.sites]
        for i, j in itertools.combinations(range(count), 2):
            if around[i] & around[j] and self._halves[i] and self._halves[j]:
                both = whole - self.measure(self._half(i, j))
                apart = 2 * whole - self.measure(self._half(i)) - self.measure(self._half(j))
                shared[i, j] = shared[j, i] = (apart - both) / (self._halves[i] * self._halves[j])
        return shared

    @cached_property
    def _halves(self) -> list[int]:
        return [site.units // 2 for site in self.sites]

    def _half(self, *chosen: int) -> list[int]:
        return [half if i in chosen else 0 for i, half in enumerate(self._halves)]

    def _lowered(self, counts: Sequence[int]) -> Graph:
        """The model with so many units of each site gone: which ones makes no difference to its cost."""
        plan = Plan(self.program)
        for site, count in zip(self.sites, counts, strict=True):
            if count:
                plan.do(site.value, units=range(count), constant=0.5, axis=site.axis)
        return (
            passes.run(self.program.with_dos(plan), since=self.program.graph).graph if len(plan) else self.program.graph
        )


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
