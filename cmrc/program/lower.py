"""`cmrc.lower(model, plan)`: annotate, run the passes, patch the host, and report."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cmrc._version import __version__
from cmrc.errors import CmrcError, GrowthError, HostError, InputError, PlanError, ResidueError
from cmrc.hosts.inputs import random_batches
from cmrc.hosts.protocols import Exports, Host, ReportsUntied, Stored, Trainable
from cmrc.ir.cost import cost, stored_by_node
from cmrc.ir.graph import Apply, ArrayLiteral, Graph, Leaf
from cmrc.passes import pipeline as passes
from cmrc.program.check import (
    Check,
    Inputs,
    check_batches,
    clamped_in_float64,
    folded_apart,
    nudged_host,
)
from cmrc.program.exported import agree, carried
from cmrc.program.plan import Plan
from cmrc.program.program import Program, blaming_contradictions, trace
from cmrc.program.report import Files, Report, make_report
from cmrc.program.steps import rounded_anew, rounds_to_steps

if TYPE_CHECKING:
    import torch

KEY = "cmrc."  # prefix of our entries in the metadata of a file
MADE_WITH = ("numpy", "onnx", "onnx-ir")  # the libraries that compute and write the weights
RECOVERED = "cmrc.recovered"


@dataclass(frozen=True, slots=True)
class Recovery:
    """What training after lowering did (`cmrc.recover`). Losses are on held-out data. `trained` is empty if no step was better."""

    losses: tuple[str, ...]  # how each output was compared with the original's: kl or squared-error
    before: float
    refitted: float | None  # after the least-squares refit, before the first step; None without one
    after: float
    steps: int
    seconds: float
    samples: int
    held_out: int
    seed: int
    trained: tuple[str, ...]
    labels: bool
    stopped_at: str  # a node where gradients stop: the layers before it were hardly trained

    def __str__(self) -> str:
        if not self.trained:
            return f"recovery did not improve the model in {self.steps} steps: it is as it was lowered"
        stopped = (
            f"; gradients stop at {self.stopped_at}: the layers before it were hardly trained"
            if self.stopped_at
            else ""
        )
        fitted = "" if self.refitted is None else f"{self.refitted:.4g} by least squares -> "
        return (
            f"recovered in {self.steps} steps on {self.samples} samples: {' + '.join(self.losses)} on {self.held_out} held-out "
            f"samples {self.before:.4g} -> {fitted}{self.after:.4g}{stopped}"
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "losses": list(self.losses), "trained": list(self.trained)}

    @property
    def note(self) -> str:
        """What a file says about it."""
        return json.dumps(
            {key: value for key, value in self.to_json().items() if key not in ("trained", "stopped_at", "seconds")}
        )


@dataclass(eq=False, repr=False)
class Lowered:
    """The smaller model, with a report of what was folded, what was left, and why. `recovery` says whether it was trained afterwards."""

    program: Program
    plan: Plan
    host: Host
    result: passes.Result
    seconds: dict[str, float]
    recovery: Recovery | None = None
    files: Files | None = None  # what was read and written, after `save`

    @property
    def graph(self) -> Graph:
        """The IR of the result."""
        return self.result.graph

    @property
    def report(self) -> Report:
        """What was folded where, before and after, and what was left and why. After `save`, with the bytes of both files."""
        return replace(self._report, files=self.files)

    @cached_property
    def _report(self) -> Report:
        untied = self.host.untied if isinstance(self.host, ReportsUntied) else ()
        after = cost(self.graph, since=self.program.graph)
        return make_report(self.program, self.plan, self.result, self.program.cost(), after, untied, self.seconds)

    def __repr__(self) -> str:
        return f"Lowered({self.report.before.parameters:,} -> {self.report.after.parameters:,} parameters)"

    @cached_property
    def module(self) -> torch.nn.Module:
        """The result as a trainable torch module (torch host).

        It shares no memory with the model that was traced. After training, `save`, `load_into`, `check` and `verify`
        use its current weights.
        """
        return self._trainable().module()

    def torch_module(self, *, share: bool = False) -> torch.nn.Module:
        """Another module like `module`, with weights of its own.

        With `share=True`, unchanged weights share the memory of the traced model: training one trains the other.
        """
        return self._trainable().new_module(share=share)

    def _trainable(self) -> Trainable:
        if not isinstance(self.host, Trainable):
            raise HostError("an ONNX model has no torch module", fix="trace the nn.Module, or train before exporting")
        return self.host

    def load_into(self, model: torch.nn.Module) -> None:
        """Write the new parameters into the user's module. This works if lowering changed nothing but parameters."""
        if not isinstance(self.host, Trainable):
            raise HostError("an ONNX model cannot be written into an nn.Module", fix="trace the nn.Module itself")
        kwargs = self.program.options.get("kwargs") or {}
        self.host.load_into(model, graph=self.graph, original=self.program.host, args=self.program.args, kwargs=kwargs)

    def save(
        self,
        path: str | Path,
        *,
        overwrite: bool = False,
        results: Mapping[str, Any] | None = None,
        output_names: Sequence[str] | None = None,
    ) -> None:
        """Write the result as ONNX, completely or not at all. Its metadata say which plan and model it came from.

        `output_names` name the outputs of a torch model, in their order. By default they have the keys under which the
        module returns them, or torch's names. `results` are records about the model that travel with the file (`check`,
        `quality`), each a mapping that JSON can hold.

        The file that the model was loaded from is replaced only with `overwrite=True`. A symbolic link stays a link:
        the file that it points to is replaced.
        """
        known = {
            KEY + name: json.dumps(result, sort_keys=True, allow_nan=False) for name, result in (results or {}).items()
        }
        if self.recovery is not None and self.recovery.trained:
            known[RECOVERED] = self.recovery.note
        if retrained := self._retrained():  # the file no longer computes what the plan says
            known["cmrc.retrained"] = ", ".join(retrained)

        def metadata() -> dict[str, str]:
            return {**provenance_of(self.program, self.plan), **known}

        with blaming_contradictions(self.program.host):
            host = self.host
            if self.program.exports_once and output_names is None and not retrained and not self.result.residue:
                host = self.in_export() or host
            sizes = host.save(Path(path), metadata, overwrite=overwrite, output_names=output_names)
        self.program.exports_once = True
        self.files = None if sizes is None else Files(*sizes)

    def in_export(self) -> Host | None:
        """The same in ONNX, from the original's export; `None` where the lowered model has to be exported itself (`exported.py`)."""
        torch = self.program.host
        try:
            original = torch.exported() if isinstance(torch, Exports) else None
            if original is None:
                return None
            program, plan = Program(original), Plan(None, carried(self.plan.entries, torch, original))
            program.require(plan)
            result = passes.run(program.with_dos(plan), since=program.graph)
            lowered = None if result.residue else original.build(result.graph)
            return lowered if lowered is not None and agree(torch, self.host, lowered) else None
        except CmrcError:
            return None

    @cached_property
    def clamped(self) -> Host:
        """The original with its units literally replaced at run time."""
        return self.program.clamped(self.plan)

    def check(self, *batches: Inputs, tolerance: float | None = None, seed: int = 0) -> Check:
        """Compare every output with that of the literally clamped model, on these batches or on random ones.

        A batch contains the model's inputs, in order or by name. `lowered.check()` draws batches of several sizes and
        scales from the seed. Without `tolerance`, the allowed difference follows from the rounding of the clamped
        model.
        """
        chosen = batches or self._batches(seed)
        check = check_batches(
            self.program.host,
            self.clamped,
            self.host,
            chosen,
            tolerance=tolerance,
            nudged=lambda: nudged_host(self.program, self.plan.entries),
            exactly=clamped_in_float64(self.program, self.plan.entries),
            anew=lambda: rounded_anew(self.program, self.plan.entries),
            seed=seed,
        )
        if tolerance is None:
            bound = self.clamped.bind(chosen[0])
            folded = folded_apart(self.program, self.plan.entries, self.graph, bound)
            check = replace(check, folded=folded, steps=any(rounds_to_steps(node) for node in self.graph.nodes))
        recovered = self.recovery is not None and bool(self.recovery.trained)
        return check if check.holds else replace(check, retrained=self._retrained(), recovered=recovered)

    def _retrained(self) -> tuple[str, ...]:
        """The parameters and buffers that were changed after lowering: found by folding once more."""
        if self.recovery is not None and self.recovery.trained:
            return self.recovery.trained
        if "module" not in vars(self) or not isinstance(self.host, Trainable):
            return ()
        return self.host.unequal(self.program.host.build(self.graph))

    def _batches(self, seed: int) -> Sequence[Inputs]:
        try:
            return random_batches(self.program.host, seed=seed)
        except InputError:
            kwargs = self.program.options.get("kwargs") or {}
            if not self.program.args and not kwargs:
                raise
            return [(*self.program.args, *kwargs.values())]  # those of the trace


def stored_otherwise(program: Program, plan: Plan, small: Program) -> tuple[str, ...] | None:
    """The weights of a lowered file whose numbers differ from what folding the plan gives; `None` if they are not the same weights.

    A wrong number can move the outputs by less than rounding, if its unit is inactive or its weight small. Here it shows.
    """
    if not isinstance(small.host, Stored):
        return None
    expected = passes.run(program.with_dos(plan), since=program.graph).graph
    return small.host.unequal_stored(program.host.build(expected))


def provenance_of(program: Program, plan: Plan) -> dict[str, str]:
    """What a lowered file says about itself: see `provenance.py`."""
    origin = {"version": __version__, "source": program.fingerprint.digest, "plan": plan_digest(plan)}
    origin["versions"] = _versions()
    recipe, data = plan.made.get("recipe"), plan.made.get("data")
    if recipe is not None:
        origin["recipe"] = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]
    if data:
        origin["data"] = str(data)
    return {KEY + name: text for name, text in origin.items()}


@cache
def _versions() -> str:
    return ", ".join(f"{name} {version(name)}" for name in MADE_WITH)


def plan_digest(plan: Plan) -> str:
    """A short name for the do's of a plan."""
    digest = hashlib.sha256()
    for entry in plan.entries:
        digest.update(repr((entry.value, entry.axis, entry.units, entry.parents)).encode())
        digest.update(np.ascontiguousarray(entry.constant).tobytes())
        for array in (entry.weight, entry.basis):
            digest.update(b"" if array is None else np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def lower(
    model: Any,
    plan: Plan | str | Path | None = None,
    *,
    args: tuple[Any, ...] | None = None,
    residue: Literal["error", "keep"] = "error",
    growth: Literal["error", "allow"] = "error",
    watch: Callable[[str, Graph], None] = passes.unwatched,
    **options: Any,
) -> Lowered:
    """Lower a model by a plan into a smaller dense model that computes exactly the intervened function.

    `model` is anything `cmrc.trace` takes; for an nn.Module give `args` (example inputs) unless the plan was made for a
    traced program, whose example inputs are then used. Without a plan, the one that is annotated on the model is used.
    A replacement that cannot be folded is an error by default; `residue="keep"` leaves it in as a clamp or a gather. A
    result that holds more numbers than the model is an error too; `growth="allow"` accepts it.
    """
    if isinstance(plan, (str, Path)):
        plan = Plan.load(plan)
    program = _program(model, plan, args, options)
    plan = plan if plan is not None else program.plan
    if plan is None:
        raise PlanError(
            "there is no plan: none was given, and the model has no annotation",
            fix="pass a plan, or program.annotate(plan)",
        )
    program.require(plan)
    start = time.perf_counter()
    with blaming_contradictions(program.host):
        result = passes.run(program.with_dos(plan), since=program.graph, watch=watch)
        if result.residue and residue == "error":
            raise _residue_error(program, result, plan)
        if not result.residue and growth == "error":
            _require_no_growth(program, result)
        after = time.perf_counter()
        host = program.host.build(result.graph)
    seconds = {**result.seconds, "patch": time.perf_counter() - after, "total": time.perf_counter() - start}
    return Lowered(program, plan, host, result, seconds)


def _program(model: Any, plan: Plan | None, args: tuple[Any, ...] | None, options: Mapping[str, Any]) -> Program:
    if isinstance(model, Program):
        return model
    if args is not None or options:
        return trace(model, args or (), **options)
    known = plan.program if plan is not None else None
    if known is not None and known.args:
        return trace(model, known.args, **known.options)
    return trace(model)


LISTED = 8  # units in a message


def _residue_error(program: Program, result: passes.Result, plan: Plan) -> ResidueError:
    # A replacement that stays is what keeps its selections from folding, and it knows the plan's entry.
    first = min(result.residue, key=lambda residue: residue.node.op != "do")
    what = "a replacement" if first.node.op == "do" else "a selection"
    more = f" (and {len(result.residue) - 1} more)" if len(result.residue) > 1 else ""
    entry = first.sources[0] if first.sources else None
    return ResidueError(
        f"{what} cannot pass: {first.reason}{more}",
        node=first.stopped_at,
        op=first.stopped_op,
        at="" if entry is None else f"{plan.source}: do[{entry}] ({plan.entries[entry].site})",
        fix=f'{_together(program, plan, result.graph, first)}leave that site out, choose another, or allow what stays at run time with residue="keep"',
    )


def _together(program: Program, plan: Plan, graph: Graph, stopped: passes.Residue) -> str:
    """The call that replaces what the units are coupled with, where a node combines them with others unit by unit."""
    readers = [node for node in graph.nodes if node.op == "pointwise" and stopped.node.name in node.inputs]
    if not stopped.sources or all(len(set(node.values())) < 2 for node in readers):
        return ""
    entry = plan.entries[stopped.sources[0]]
    meant = [
        (g, w) for g in program.groups(folds=False) for w in g.writers
        if (w.value, w.axis) == (entry.value, entry.axis) and set(entry.units) <= set(w.units)
    ]  # fmt: skip
    if len(meant) != 1:
        return ""
    group, writer = meant[0]
    places = dict(zip(writer.units, writer.places, strict=True))
    units = sorted(places[unit] for unit in entry.units)
    listed = f"[{', '.join(map(str, units))}]" if len(units) <= LISTED else f"[{units[0]}, ..., {units[-1]}]"
    return f"replace its group, plan.do_group({group.name!r}, units={listed}, constant=0.0); or "


def _require_no_growth(program: Program, result: passes.Result) -> None:
    """Constants that differ by position, and a shared weight whose uses become different, may need more numbers than the units had."""
    was = program.numbers_read
    if was is not None:
        operands = [o for node in result.graph.nodes for o in node.inputs if isinstance(o, (Leaf, ArrayLiteral, Apply))]
        if sum({id(o): math.prod(o.shape) for o in operands}.values()) <= was:
            return  # it certainly holds no more: this counts at least what a file stores
    more = cost(result.graph, since=program.graph).parameters - program.cost().parameters
    if more <= 0:
        return
    origins = {node.name: node.origin for graph in (program.graph, result.graph) for node in graph.nodes}
    before, after = Counter[str](), Counter[str]()
    for numbers, graph in ((before, program.graph), (after, result.graph)):
        for name, stored in stored_by_node(graph, since=program.graph).items():
            numbers[origins[name] or name] += sum(math.prod(tensor.shape) for tensor, _ in stored)
    node = max(result.graph.nodes, key=lambda node: (after - before)[node.origin or node.name])
    here = node.origin or node.name
    instead = f" instead of {before[here]:,}" if before[here] else ""
    raise GrowthError(
        f"the result would hold {more:,} more numbers than the model: {after[here]:,} would stand here{instead}",
        node=node.label,
        op=node.kind,
        fix="give each unit one constant for all positions, replace the same units wherever a weight is shared, "
        'leave that site out, or take the larger result with growth="allow"',
    )
