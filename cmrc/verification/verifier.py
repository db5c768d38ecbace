"""`cmrc.verify(program, lowered, data)`: does the reduced model commute with the original under interchange interventions?

The retained units of a plan's sites are the variables of a reduced causal model. A swap draws a base and a source from
held-out data, and each retained unit with probability p; the drawn units take the source's values, in the original (whose
replaced units keep the base's) and in the reduced model. IIA is how often both then answer the same.

The reduced model is a `Lowered`, a traced program beside its plan, or a plan alone, which is then taken literally.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cmrc.errors import CertifyError, VerifyError
from cmrc.ir.graph import Array
from cmrc.program.do import Do
from cmrc.program.lower import Lowered
from cmrc.program.plan import Plan
from cmrc.program.program import Program
from cmrc.program.sites import Site
from cmrc.program.trace import trace
from cmrc.statistics.batches import Batch, as_array, batches
from cmrc.verification.certificates import Decision, Search, Target, decide, require_level, smallest
from cmrc.verification.evidence import Evidence, Readout, compare
from cmrc.verification.interpreter import BUDGET, HeldInputs, Interpreter
from cmrc.verification.interventions import Swap
from cmrc.verification.result import Plain, Verification

LOOK = 250  # swaps between two looks at a target


@dataclass(frozen=True, slots=True)
class Variables:
    """The retained units of a site, and those that a plan replaces there."""

    site: str
    value: str
    axis: int
    units: int
    keep: tuple[int, ...]

    @property
    def replaced(self) -> list[int]:
        return sorted(set(range(self.units)) - set(self.keep))

    def over(self, chosen: Sequence[int], mask: Array) -> Array:
        """Only these units of a mask over all."""
        allowed = np.zeros(self.units, dtype=bool)
        allowed[list(chosen)] = True
        return mask & allowed


def variables(program: Program, plan: Plan, site: str | Sequence[str] | None = None) -> list[Variables]:
    """What can be swapped: at every site of the plan, or at those that are named."""
    replaced: dict[tuple[str, int], set[int]] = {}
    for entry in plan.entries:
        replaced.setdefault((entry.value, entry.axis), set()).update(entry.units)
    if site is None:
        places = list(replaced)
    else:
        names = [site] if isinstance(site, str) else list(site)
        found = [s for name in names for s in program.find(name)]
        places = [(s.value, next((a for v, a in replaced if v == s.value), s.axis)) for s in found]
    made = []
    for value, axis in places:
        known = program.site_of(value, axis)
        gone = replaced.get((value, axis), set())
        keep = tuple(u for u in range(known.units) if u not in gone)
        if not keep:
            raise VerifyError(
                "the plan leaves no unit here to intervene on",
                node=known.name,
                op=known.op,
                fix="name other sites: site=",
            )
        made.append(Variables(known.name, value, axis, known.units, keep))
    if len({v.value for v in made}) != len(made):
        raise VerifyError("a value is intervened on along two axes", fix="name the sites to verify: site=")
    if not made:
        raise VerifyError("the plan replaces nothing", fix="give a plan with at least one do, or name sites: site=")
    return made


def bernoulli(rng: np.random.Generator, p: float, shape: tuple[int, ...]) -> Array:
    """True with probability p each, to 2^-17. Takes as many random bits for each as p has binary digits: one for a half.

    From the last digit to the first, m := bit | m where the digit is 1, bit & m where it is 0: P(m) := (digit + P(m)) / 2.
    """
    digits, size = round(p * 2**16), math.prod(shape)
    if digits == 2**16:
        return np.ones(shape, dtype=bool)
    found = np.zeros(-(-size // 8), dtype=np.uint8)
    for i in range((digits & -digits).bit_length() - 1, 16) if digits else ():
        bits = np.frombuffer(rng.bytes(len(found)), dtype=np.uint8)
        found = bits | found if digits >> i & 1 else bits & found
    return np.unpackbits(found, count=size).view(bool).reshape(shape)


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """Interventions: rows of the data, and for every site a mask over all of its units."""

    base: Array
    source: Array
    masks: dict[str, Array]
    rate: Array

    @classmethod
    def make(
        cls, rng: np.random.Generator, count: int, rows: int, sizes: Mapping[str, int], p: Sequence[float]
    ) -> Draw:
        """`count` swaps. Several rates take turns. Masks are over all units, so that plans can be compared on one draw."""
        base, source = rng.integers(rows, size=(2, count))
        rates = np.asarray(p, dtype=np.float64)[np.arange(count) % len(p)]
        masks = {value: np.empty((count, units), dtype=bool) for value, units in sizes.items()}
        for mask in masks.values():
            for turn, rate in enumerate(p):
                mask[turn :: len(p)] = bernoulli(rng, rate, mask[turn :: len(p)].shape)
        return cls(base, source, masks, rates)

    @classmethod
    def join(cls, parts: Sequence[Draw]) -> Draw:
        masks = {value: np.concatenate([part.masks[value] for part in parts]) for value in parts[0].masks}
        base, source, rate = (np.concatenate([getattr(q, f) for q in parts]) for f in ("base", "source", "rate"))
        return cls(base, source, masks, rate)


@dataclass(frozen=True, slots=True)
class Data:
    """Held-out inputs in memory, their labels, and which tokens of each count."""

    inputs: dict[str, Any]
    labels: Array | None
    counted: Array | None

    @classmethod
    def collect(cls, data: Any, names: Sequence[str], counted: npt.ArrayLike | str | None) -> Data:
        return cls.of(list(batches(data, names)), names, counted)

    @classmethod
    def of(cls, parts: Sequence[Batch], names: Sequence[str], counted: npt.ArrayLike | str | None) -> Data:
        inputs = {name: np.concatenate([as_array(part.inputs[name]) for part in parts]) for name in names}
        labels = None if parts[0].labels is None else np.concatenate([as_array(part.labels) for part in parts])
        tokens = np.concatenate([part.mask(counted) for part in parts]) if isinstance(counted, str) else counted
        return cls(inputs, labels, None if tokens is None else np.asarray(tokens).astype(bool))

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))


class Verifier:
    """Both models with all that lies before the sites already run: any number of swaps can be asked of it.

    `output` names one of several outputs (by name or place); `reads` says how to compare it: "classes" along `class_axis`,
    "binary" for a single logit, "values" within a `tolerance`. `counted` ([inputs, tokens], or the name of such an array in
    the data) says which tokens of a sequence count; others are neither swapped nor compared.
    """

    def __init__(
        self,
        program: Program,
        reduced: Lowered | Program | Plan,
        data: Any,
        *,
        plan: Plan | None = None,
        site: str | Sequence[str] | None = None,
        output: str | int | None = None,
        reads: str | None = None,
        class_axis: int = -1,
        tolerance: float | None = None,
        counted: npt.ArrayLike | str | None = None,
        budget: int = BUDGET,
    ) -> None:
        self.plan = _plan_of(reduced, plan)
        program.require(self.plan)
        self.program = program
        self.data = data if isinstance(data, Data) else Data.collect(data, program.host.inputs, counted)
        self.variables = variables(program, self.plan, site)
        self.sizes = {v.value: v.units for v in self.variables}
        self.original = self._hold(program, budget)
        small = Program(program.clamped(reduced) if isinstance(reduced, Plan) else reduced.host)
        self.whole = {v.value: _is_whole(small, v) for v in self.variables}  # whether it still has all units of a site
        if isinstance(reduced, Program) and all(self.whole.values()) and self.plan.entries:
            _require_another(program, reduced)
        self.reduced = self._hold(small, budget)
        self.output = _output(program, output)
        first = self.original.intervene(np.zeros(1, dtype=np.int64))[self.output]
        self.readout = Readout.of(first.shape, reads, class_axis, tolerance)
        self.tokens = self.readout.logits(first).shape[1]

    def draw(self, rng: np.random.Generator, swaps: int, p: float | Sequence[float] = 0.5) -> Draw:
        rates = [p] if isinstance(p, (int, float)) else list(p)
        if swaps < 1 or not rates or not all(0 <= rate <= 1 for rate in rates):
            raise VerifyError(f"{swaps} swaps at rate {p}", fix="ask for at least one swap, at rates within [0, 1]")
        return Draw.make(rng, swaps, len(self.data), self.sizes, rates)

    def swap(self, draw: Draw) -> Evidence:
        """The retained units of the draw swapped in both models."""
        chosen = {v.value: v.over(v.keep, draw.masks[v.value]) for v in self.variables}
        narrow = {
            v.value: chosen[v.value] if self.whole[v.value] else np.take(draw.masks[v.value], v.keep, axis=1)
            for v in self.variables
        }
        return self._compare(draw, self._run(self.original, draw, chosen), self._run(self.reduced, draw, narrow))

    def swap_replaced(self, draw: Draw) -> Evidence:
        """The control that the reduced model cannot follow: the replaced units swapped in the original alone."""
        chosen = {v.value: v.over(v.replaced, draw.masks[v.value]) for v in self.variables}
        return self._compare(draw, self._run(self.original, draw, chosen), self._run(self.reduced, draw, {}))

    def swap_random(self, draw: Draw, rng: np.random.Generator) -> Evidence:
        """The control of the selection: as many units at random retained, the others set to their means."""
        chosen, entries = {}, []
        for v in self.variables:
            keep = np.sort(rng.permutation(v.units)[: len(v.keep)])
            gone = np.setdiff1d(np.arange(v.units), keep)
            chosen[v.value] = v.over(keep.tolist(), draw.masks[v.value])
            if len(gone):
                value = np.moveaxis(self.original.tap(v.value).astype(np.float64), v.axis, -1).reshape(-1, v.units)
                entries.append(Do(v.site, v.value, v.axis, tuple(gone.tolist()), value.mean(axis=0)[gone]))
        clamped = Program(self.program.clamped(Plan(self.program, entries)))
        held = self._hold(clamped, self.original.interpreter.budget)
        return self._compare(draw, self._run(self.original, draw, chosen), self._run(held, draw, chosen))

    def truth(self) -> Array | None:
        """The labels as [inputs, tokens], where there are any and the model answers with classes."""
        labels = self.data.labels
        if labels is None or self.readout.kind == "values":
            return None
        found = labels.reshape(len(labels), -1)
        if found.shape != (len(self.data), self.tokens) or found.dtype.kind not in "biuf":
            raise VerifyError(
                f"the labels are {labels.dtype.name} {list(labels.shape)}, the model answers {[len(self.data), self.tokens]}",
                fix="give the number of the class for every answer, or no labels",
            )
        return found

    def plain(self) -> Plain:
        """Both models on all of the data, without interventions."""
        every = np.arange(len(self.data))
        draw = Draw(every, every, {}, np.zeros(len(every), dtype=np.float32))
        before = self._run(self.original, draw, {})
        after = self._run(self.reduced, draw, {})
        evidence = self._compare(draw, before, after)
        truth = self.truth()
        if truth is None:
            return Plain(evidence, None, None)
        tops = [self.readout.logits(z).argmax(axis=2) for z in (before, after)]
        return Plain(evidence, *(evidence.mean(top == truth) for top in tops))

    def _hold(self, program: Program, budget: int) -> HeldInputs:
        return Interpreter(program, budget).hold(self.data.inputs, self._sites(program))

    def _sites(self, program: Program) -> list[Site]:
        """The sites by their values: a module may be called like the value of another."""
        return [program.site_of(v.value, v.axis) for v in self.variables]

    def _run(self, held: HeldInputs, draw: Draw, chosen: Mapping[str, Array]) -> Array:
        swaps = [
            Swap(site, draw.source, self._with_positions(held, site.value, draw, chosen[site.value]))
            for site in self._sites(held.interpreter.program)
            if site.value in chosen
        ]
        return held.intervene(draw.base, swaps)[self.output]

    def _with_positions(self, held: HeldInputs, value: str, draw: Draw, mask: Array) -> Array:
        """Where tokens are padded, only those are swapped that count in base and source."""
        counted = self.data.counted
        if counted is None or counted.shape[1] not in held.row(value):
            return mask
        return mask[:, None, :] & (counted[draw.base] & counted[draw.source])[:, :, None]

    def _compare(self, draw: Draw, original: Array, reduced: Array) -> Evidence:
        counted = None if self.data.counted is None else self.data.counted[draw.base]
        return compare(self.readout, original, reduced, counted, draw.rate)


def _plan_of(reduced: Lowered | Program | Plan, plan: Plan | None) -> Plan:
    if isinstance(reduced, Plan):
        return reduced
    found = plan if plan is not None else reduced.plan
    if found is None:
        raise VerifyError("the plan that the model was lowered by is not known", fix="give it: plan=")
    return found


def _is_whole(small: Program, v: Variables) -> bool:
    known = small.values.get(v.value)
    size = known.shape[v.axis] if known is not None and len(known.shape) > v.axis else None
    if size not in (len(v.keep), v.units):
        told = "the reduced model has no such value" if size is None else f"the reduced model has {size} units here"
        raise VerifyError(
            f"{told}, the plan retains {len(v.keep)} of {v.units}",
            node=v.site,
            fix="name sites whose units only this do removes (site=), or verify the plan in place of the model",
        )
    return size == v.units


def _require_another(program: Program, reduced: Program) -> None:
    """The original agrees with itself under every swap of units that stay: that says nothing of the plan."""
    if reduced.fingerprint == program.fingerprint:
        raise VerifyError("the reduced model is the original itself", fix="give the model that was lowered by the plan")


def _output(program: Program, output: str | int | None) -> int:
    names = program.graph.outputs
    if output is None and len(names) == 1:
        return 0
    if isinstance(output, str) and output in names:
        return names.index(output)
    if isinstance(output, int) and 0 <= output < len(names):
        return output
    told = f"the model has {len(names)} outputs" if output is None else f"the model has no output {output!r}"
    raise VerifyError(told, fix=f"say which to compare, output= one of {', '.join(names)}")


def verify(
    program: Any,
    reduced: Lowered | Program | Plan | str | Path,
    data: Any,
    *,
    plan: Plan | str | Path | None = None,
    site: str | Sequence[str] | None = None,
    swaps: int = 2000,
    p: float | Sequence[float] = 0.5,
    seed: int = 0,
    until: str | Target | None = None,
    delta: float = 0.05,
    controls: bool = True,
    **reading: Any,
) -> Verification:
    """Verify a reduced model under `swaps` interchange interventions at rate `p` (several rates take turns).

    `data` are held-out batches as for `cmrc.calibrate`, with labels for the accuracies. Swaps are at every site of the plan
    together, or at those of `site`. With `until="iia>=0.95"` the run stops as soon as the target is decided at level 1 − δ, at
    most after `swaps`. `Verifier` describes the rest of the arguments.
    """
    program = trace(program)
    plan = Plan.load(plan) if isinstance(plan, (str, Path)) else plan
    model = trace(reduced) if isinstance(reduced, (str, Path)) else reduced
    verifier = Verifier(program, model, data, plan=plan, site=site, **reading)
    return run(verifier, swaps=swaps, p=p, seed=seed, until=until, delta=delta, controls=controls)


def run(
    verifier: Verifier,
    *,
    swaps: int = 2000,
    p: float | Sequence[float] = 0.5,
    seed: int = 0,
    until: str | Target | None = None,
    delta: float = 0.05,
    controls: bool = True,
) -> Verification:
    """The protocol on a verifier that is ready."""
    require_level(delta)
    verifier.truth()  # labels that do not fit are told before the work
    rng = np.random.default_rng(seed)
    target = Target.parse(until) if isinstance(until, str) else until
    evidence, decision, draws = gather(verifier, rng, swaps, p, target, delta)
    found: dict[str, Evidence] = {}
    if controls:
        side = np.random.default_rng([seed, 1])
        draw = Draw.join(draws)
        found = {
            "replaced": verifier.swap_replaced(draw),
            "random": verifier.swap_random(draw, side),
            "unswapped": verifier.swap(verifier.draw(side, len(evidence), 0.0)),
        }
    setting = {
        "swaps": len(evidence),
        "p": p,
        "seed": seed,
        "inputs": len(verifier.data),
        "sites": dict(verifier.sizes),
    }
    keep = {v.site: (len(v.keep), v.units) for v in verifier.variables}
    return Verification(keep, evidence, verifier.plain(), found, decision, delta, setting)


def gather(
    verifier: Verifier,
    rng: np.random.Generator,
    swaps: int,
    p: float | Sequence[float],
    target: Target | None,
    delta: float,
) -> tuple[Evidence, Decision | None, list[Draw]]:
    """Swap until the target is decided, at most so often; without a target, so often."""
    parts: list[Evidence] = []
    draws: list[Draw] = []
    decision: Decision | None = None
    while (done := sum(map(len, parts))) < max(swaps, 1) and (decision is None or decision.holds is None):
        draws.append(verifier.draw(rng, min(swaps - done, LOOK) if target else swaps, p))
        parts.append(verifier.swap(draws[-1]))
        decision = decide(target, Evidence.join(parts), delta) if target else None
    return Evidence.join(parts), decision, draws


def smallest_certified(
    program: Program,
    plans: Iterable[Plan],
    data: Any,
    target: str | Target,
    *,
    delta: float = 0.05,
    swaps: int = 20_000,
    p: float | Sequence[float] = 0.5,
    seed: int = 0,
    **reading: Any,
) -> Search:
    """The last of these plans, from the one that keeps most to the one that keeps least, whose target is certified.

    `data` must be disjoint from what the plans were calibrated on. `certify.smallest` says why the search needs no further
    correction. Each plan is taken literally, on swaps of its own; plans behind the first that fails are not asked for.
    """
    require_level(delta)
    wanted = Target.parse(target) if isinstance(target, str) else target
    counted = reading.pop("counted", None)
    held = data if isinstance(data, Data) else Data.collect(data, program.host.inputs, counted)
    rng = np.random.default_rng(seed)

    def test(plan: Plan) -> Decision:
        _, decision, _ = gather(Verifier(program, plan, held, **reading), rng.spawn(1)[0], swaps, p, wanted, delta)
        assert decision is not None
        return decision

    found = smallest(plans, test)
    if not found.decisions:
        raise CertifyError("there are no plans to choose from", fix="give plans from large to small")
    return found
