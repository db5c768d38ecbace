"""Swaps in both models: does the reduced one commute with the original under interchange interventions?

The retained units of a plan's sites are the variables of a reduced causal model. A swap takes a base and a source from
held-out data, and each retained unit with probability p; the drawn units take the source's values, in the original (whose
replaced units keep the base's) and in the reduced model. IIA is how often both then answer the same.

The reduced model is a `Lowered`, a traced program beside its plan, or a plan alone, which is then taken literally.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from cmrc.errors import VerifyError
from cmrc.ir.graph import Array, Do
from cmrc.program.lower import Lowered
from cmrc.program.plan import Plan
from cmrc.program.program import Program
from cmrc.program.sites import Site
from cmrc.statistics.batches import Batch, as_array, batches
from cmrc.verification.draws import Draw, Schedule, Scope, draw_anew, easy_inputs, pair_hard, pair_up
from cmrc.verification.evidence import Evidence, Readout, compare
from cmrc.verification.interpreter import BUDGET, HeldInputs, Interpreter
from cmrc.verification.interventions import Swap
from cmrc.verification.result import Plain


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


IN_A_BASIS = "its units are replaced in another basis, and the reduced model does not have the model's own units there"


def not_swapped(program: Program, plan: Plan) -> dict[str, str]:
    """The values of a plan whose units cannot be swapped in both models, with the reason."""
    reasons = {e.value: IN_A_BASIS if e.basis is not None else program.why_apart(e.value) for e in plan.entries}
    return {value: reason for value, reason in reasons.items() if reason}


def variables(program: Program, plan: Plan, site: str | Sequence[str] | None = None) -> list[Variables]:
    """What can be swapped: at every site of the plan, or at those that are named."""
    replaced: dict[tuple[str, int], set[int]] = {}
    fixed = not_swapped(program, plan)
    for entry in plan.entries:
        replaced.setdefault((entry.value, entry.axis), set()).update(entry.units)
    if site is None:
        places = [(value, axis) for value, axis in replaced if value not in fixed]
    else:
        names = [site] if isinstance(site, str) else list(site)
        named = [s for name in names for s in program.find(name)]
        for place in named:
            if any(entry.basis is not None for entry in plan.entries if entry.value == place.value):
                raise VerifyError(IN_A_BASIS, node=place.name, op=place.op, fix="name other sites: site=")
        places = [(s.value, next((a for v, a in replaced if v == s.value), s.axis)) for s in named]
    chosen = []
    for value, axis in places:
        known = program.site_of(value, axis)
        gone = replaced.get((value, axis), set())
        keep = tuple(u for u in range(known.units) if u not in gone)
        if not keep:
            raise VerifyError(
                "the plan retains no unit here on which to intervene",
                node=known.name,
                op=known.op,
                fix="name other sites: site=",
            )
        chosen.append(Variables(known.name, value, axis, known.units, keep))
    if len({v.value for v in chosen}) != len(chosen):
        raise VerifyError("there are interventions on one value along two axes", fix="name the sites to verify: site=")
    if not replaced and not chosen:
        raise VerifyError("the plan replaces nothing", fix="give a plan with at least one do, or name sites: site=")
    return chosen


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Held-out inputs in memory, their labels, and the tokens of each that count."""

    inputs: dict[str, Any]
    labels: Array | None
    counted: Array | None

    @classmethod
    def collect(cls, data: Any, names: Sequence[str], counted: npt.ArrayLike | str | None) -> HeldOut:
        return cls.of(list(batches(data, names)), names, counted)

    @classmethod
    def of(cls, parts: Sequence[Batch], names: Sequence[str], counted: npt.ArrayLike | str | None) -> HeldOut:
        inputs = {name: np.concatenate([as_array(part.inputs[name]) for part in parts]) for name in names}
        labels = None if parts[0].labels is None else np.concatenate([as_array(part.labels) for part in parts])
        tokens = np.concatenate([part.mask(counted) for part in parts]) if isinstance(counted, str) else counted
        return cls(inputs, labels, None if tokens is None else np.asarray(tokens).astype(bool))

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))


class Verifier:
    """Both models on held-out data: any number of swaps can be asked of it. What lies before the sites runs once.

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
        self.program, self.budget = program, budget
        self.data = data if isinstance(data, HeldOut) else HeldOut.collect(data, program.host.inputs, counted)
        self.variables = variables(program, self.plan, site)
        self.sizes = {v.value: v.units for v in self.variables}
        names, reasons = {e.value: e.site for e in self.plan.entries}, not_swapped(program, self.plan)
        self.not_swapped = {names[value]: reason for value, reason in reasons.items()}
        self.small = Program(program.clamped(reduced) if isinstance(reduced, Plan) else reduced.host)
        self.whole = {
            v.value: _is_whole(self.small, v) for v in self.variables
        }  # whether it still has all units of a site
        if isinstance(reduced, Program) and all(self.whole.values()) and self.variables:
            _require_another(program, reduced)
        self.output = _output(program, output)
        first = Interpreter(program, budget).run({name: array[:1] for name, array in self.data.inputs.items()})
        self.readout = Readout.of(first[self.output].shape, reads, class_axis, tolerance)
        self.tokens = self.readout.logits(first[self.output]).shape[1]

    @cached_property
    def original(self) -> HeldInputs:
        return self._hold(self.program)

    @cached_property
    def reduced(self) -> HeldInputs:
        return self._hold(self.small)

    @cached_property
    def answers(self) -> tuple[Array, Array]:
        """What both models answer to all of the data, without interventions."""
        before, after = (Interpreter(p, self.budget).run(self.data.inputs) for p in (self.program, self.small))
        return before[self.output], after[self.output]

    # ------------------------------------------------------------ draws

    def schedule(
        self,
        rng: np.random.Generator,
        swaps: int,
        *,
        about: str | Scope = Scope.POPULATION,
        distinct: bool = False,
        stress: float | None = None,
    ) -> Schedule:
        """Which inputs meet. For the population a pair of inputs is used once; see `draws`."""
        rows = len(self.data)
        if Scope.parse(about) is Scope.FIXED:
            if stress is not None:
                raise VerifyError(
                    "stress is for statements about the population", fix='leave stress= out, or about="fixed"'
                )
            return draw_anew(rng, rows, swaps, distinct=distinct)
        if stress is None:
            return pair_up(rng, rows, swaps)
        plain = self.plain().evidence
        return pair_hard(rng, easy_inputs(plain.mean(plain.margin), plain.classes[:, 0]), swaps, stress)

    def draw(
        self,
        rng: np.random.Generator,
        swaps: int | Schedule,
        p: float | Sequence[float] = 0.5,
        *,
        sizes: Mapping[str, int] | None = None,
        **chosen: Any,
    ) -> Draw:
        """Swaps at the rates p, by a schedule or by what `schedule` takes. `sizes` where further plans share the draw."""
        rates = [p] if isinstance(p, (int, float)) else list(p)
        if not rates or not all(0 <= rate <= 1 for rate in rates):
            raise VerifyError(f"swaps at rate {p}", fix="give rates within [0, 1]")
        schedule = swaps if isinstance(swaps, Schedule) else self.schedule(rng, swaps, **chosen)
        return Draw.make(rng, schedule, self.sizes if sizes is None else sizes, rates)

    # ------------------------------------------------------------ swaps

    def swap(self, draw: Draw) -> Evidence:
        """The retained units of the draw swapped in both models."""
        before, after = self.outputs(draw)
        return self.compare(draw, before, after)

    def outputs(self, draw: Draw) -> tuple[Array, Array]:
        """What the original and the reduced model answer with the retained units of the draw swapped."""
        chosen = {v.value: v.over(v.keep, draw.masks[v.value]) for v in self.variables}
        narrow = {
            v.value: chosen[v.value] if self.whole[v.value] else np.take(draw.masks[v.value], v.keep, axis=1)
            for v in self.variables
        }
        return self._run(self.original, draw, chosen), self._run(self.reduced, draw, narrow)

    def swap_replaced(self, draw: Draw) -> Evidence:
        """The control that the reduced model cannot follow: the replaced units swapped in the original alone."""
        chosen = {v.value: v.over(v.replaced, draw.masks[v.value]) for v in self.variables}
        return self.compare(draw, self._run(self.original, draw, chosen), self.answers[1][draw.base])

    def swap_random(self, draw: Draw, rng: np.random.Generator) -> Evidence:
        """The control of the selection: as many units at random retained, the others set to their means."""
        chosen, entries = {}, []
        for v in self.variables:
            keep = np.sort(rng.permutation(v.units)[: len(v.keep)])
            gone = np.setdiff1d(np.arange(v.units), keep)
            chosen[v.value] = v.over(keep.tolist(), draw.masks[v.value])
            if len(gone):
                value = np.moveaxis(self.original.tap(v.value), v.axis, -1).reshape(-1, v.units)
                entries.append(Do(v.site, v.value, v.axis, tuple(gone.tolist()), value.mean(0, dtype=np.float64)[gone]))
        clamped = self._hold(Program(self.program.clamped(Plan(self.program, entries))))
        return self.compare(draw, self._run(self.original, draw, chosen), self._run(clamped, draw, chosen))

    def unswapped(self, draw: Draw) -> Evidence:
        """The bases of the draw without any swap."""
        return self.compare(draw, *(answer[draw.base] for answer in self.answers))

    # ------------------------------------------------------------ without swaps

    def truth(self) -> Array | None:
        """The labels as [inputs, tokens], where there are any and the model answers with classes."""
        labels = self.data.labels
        if labels is None or self.readout.kind == "values":
            return None
        classes = labels.reshape(len(labels), -1)
        if classes.shape != (len(self.data), self.tokens) or classes.dtype.kind not in "biuf":
            raise VerifyError(
                f"the labels are {labels.dtype.name} {list(labels.shape)}, the model answers {[len(self.data), self.tokens]}",
                fix="give the number of the class for every answer, or no labels",
            )
        return classes

    def plain(self) -> Plain:
        """Both models on all of the data, without interventions."""
        evidence = compare(self.readout, *self.answers, self.data.counted, np.zeros(len(self.data), dtype=np.float32))
        truth = self.truth()
        if truth is None:
            return Plain(evidence, None, None)
        before, after = (evidence.mean(self.readout.logits(z).argmax(axis=2) == truth) for z in self.answers)
        return Plain(evidence, before, after)

    # ------------------------------------------------------------ parts

    def _hold(self, program: Program) -> HeldInputs:
        return Interpreter(program, self.budget).hold(self.data.inputs, self._sites(program))

    def _sites(self, program: Program) -> list[Site]:
        """The sites by their values: a module may be called like the value of another."""
        return [program.site_of(v.value, v.axis) for v in self.variables]

    def _run(self, model: HeldInputs, draw: Draw, chosen: Mapping[str, Array]) -> Array:
        swaps = [
            Swap(site, draw.source, self._with_positions(model, site.value, draw, chosen[site.value]))
            for site in self._sites(model.interpreter.program)
        ]
        return model.intervene(draw.base, swaps)[self.output]

    def _with_positions(self, model: HeldInputs, value: str, draw: Draw, mask: Array) -> Array:
        """Where tokens are padded, only those are swapped that count in base and source."""
        counted = self.data.counted
        if counted is None or counted.shape[1] not in model.row(value):
            return mask
        return np.asarray(mask[:, None, :] & (counted[draw.base] & counted[draw.source])[:, :, None])

    def compare(self, draw: Draw, original: Array, reduced: Array) -> Evidence:
        """Evidence from what both models answered to a draw."""
        counted = None if self.data.counted is None else self.data.counted[draw.base]
        schedule = draw.schedule
        return compare(
            self.readout, original, reduced, counted, draw.rate, unit=schedule.unit, importance=schedule.importance
        )


def _plan_of(reduced: Lowered | Program | Plan, plan: Plan | None) -> Plan:
    if isinstance(reduced, Plan):
        return reduced
    known = plan if plan is not None else reduced.plan
    if known is None:
        raise VerifyError("the plan by which the model was lowered is not known", fix="give it: plan=")
    return known


def _is_whole(small: Program, v: Variables) -> bool:
    known = small.values.get(v.value)
    size = known.shape[v.axis] if known is not None and len(known.shape) > v.axis else None
    if size not in (len(v.keep), v.units):
        reason = "the reduced model has no such value" if size is None else f"the reduced model has {size} units here"
        raise VerifyError(
            f"{reason}, the plan retains {len(v.keep)} of {v.units}",
            node=v.site,
            fix="name sites whose units only this do removes (site=), or verify the plan in place of the model",
        )
    return size == v.units


def _require_another(program: Program, reduced: Program) -> None:
    """The original agrees with itself under every swap of units that stay: that says nothing about the plan."""
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
    reason = f"the model has {len(names)} outputs" if output is None else f"the model has no output {output!r}"
    raise VerifyError(reason, fix=f"choose which to compare: output= one of {', '.join(names)}")
