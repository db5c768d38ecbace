"""A torch case to an outcome: the lowered module against the exported one, run node by node with its units replaced."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx

import cmrc
from cmrc.errors import CmrcError
from tests.fuzz.builder import Unfit
from tests.fuzz.clamp import Replacement
from tests.fuzz.judge import Outcome, Undecided, raw
from tests.fuzz.modules import Step, Stepwise, generate
from tests.fuzz.plans import Request, requests

TOLERANCE = {
    torch.float64: 1e-11,
    torch.float32: 2e-5,
}  # of the largest output; small models of float64 are good to 1e-14


@dataclass(frozen=True, slots=True)
class ModuleCase:
    steps: Sequence[Step]
    shapes: Sequence[tuple[int, ...]]
    requests: Sequence[Request] = ()
    residue: str = "error"
    seed: int = 0
    double: bool = True
    dynamic: bool = False

    def inputs(self, rows: int = 0) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(self.seed + rows)
        shapes = [(s[0] + rows, *s[1:]) for s in self.shapes]
        dtype = torch.float64 if self.double else torch.float32
        return tuple(torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)

    def module(self) -> Stepwise:
        dtype = torch.float64 if self.double else torch.float32
        return Stepwise(self.steps, len(self.shapes), self.seed, dtype).eval()


class Clamped(fx.Interpreter):
    """Every node as it is; behind a replaced one the units are overwritten. An op in place writes to its operand."""

    def __init__(self, module: fx.GraphModule, replacements: Sequence[Replacement]) -> None:
        super().__init__(module)
        self.replacements = replacements
        self.seen: set[str] = set()

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        for one in self.replacements:
            if one.value == n.name:
                self.seen.add(n.name)
                clamped = clamp(result, one)
                in_place = str(n.target).rpartition(".")[0].endswith("_")
                result = result.copy_(clamped) if in_place else clamped
        return result


def clamp(x: torch.Tensor, one: Replacement) -> torch.Tensor:
    slab = torch.from_numpy(np.array(one.slab(x.ndim))).to(x.dtype)
    units = torch.tensor(one.units)
    if one.weight is not None:
        parents = x.index_select(one.axis, torch.tensor(one.parents)).movedim(one.axis, -1)
        mixed = parents @ torch.from_numpy(np.array(one.weight)).to(x.dtype).T
        slab = slab + mixed.movedim(-1, one.axis)
    shape = [len(one.units) if i == one.axis else n for i, n in enumerate(x.shape)]
    clamped = x.clone(memory_format=torch.contiguous_format)
    clamped.index_copy_(one.axis, units, slab.expand(shape).contiguous())
    return clamped


def make(seed: int) -> tuple[ModuleCase, np.random.Generator] | None:
    rng = np.random.default_rng(seed)
    try:
        steps, shapes = generate(rng)
    except Unfit:
        return None
    return ModuleCase(steps, shapes, seed=seed, double=rng.random() < 0.85, dynamic=rng.random() < 0.4), rng


def exported(case: ModuleCase) -> torch.export.ExportedProgram | None:
    """`None` where torch itself refuses the module."""
    batch = torch.export.Dim.AUTO if case.dynamic and all(s[0] > 1 for s in case.shapes) else None
    try:
        with torch.no_grad():
            dynamic = ({0: batch},) * len(case.shapes) if batch is not None else None
            return torch.export.export(case.module(), case.inputs(), dynamic_shapes=(dynamic,) if dynamic else None)
    except Exception:  # torch has many ways to say no
        return None


def run(seed: int, tries: int = 3) -> tuple[Outcome, ModuleCase | None, list[str]]:
    """One module, with plans until one is not refused."""
    fresh = make(seed)
    program = exported(fresh[0]) if fresh is not None else None
    if fresh is None or program is None:
        return Outcome("no graph"), None, []
    case, rng = fresh
    refused: list[str] = []
    outcome = Outcome("no site")
    for _ in range(tries):
        try:
            traced = cmrc.trace(program)
            chosen = requests(traced, rng)
        except CmrcError as error:
            outcome = Outcome("fault" if "fault of cmrc" in str(error) else "refused", f"{error.kind}: {error.reason}")
            refused.append(outcome.detail)
            break
        except Exception as error:
            return raw(error), case, refused
        if not chosen:
            break
        case = replace(case, requests=chosen, residue="keep" if rng.random() < 0.12 else "error")
        outcome = judge(case, program)
        if outcome.kind != "refused":
            break
        refused.append(outcome.detail)
    return outcome, case, refused


def judge(case: ModuleCase, program: torch.export.ExportedProgram | None = None) -> Outcome:
    program = exported(case) if program is None else program
    if program is None:
        return Outcome("no graph")
    before = {name: tensor.clone() for name, tensor in program.state_dict.items()}
    try:
        traced = cmrc.trace(program)
        plan = cmrc.Plan(traced)
        if not case.requests:
            traced.sites()
            traced.groups()
            return Outcome("no site")
        for request in case.requests:
            request.add_to(plan)
        lowered = cmrc.lower(traced, plan, residue=case.residue)  # type: ignore[arg-type]
        module = lowered.module
    except CmrcError as error:
        kind = "fault" if "fault of cmrc" in str(error) else "refused"
        return Outcome(kind, f"{error.kind}: {error.reason}")
    except Exception as error:
        return raw(error)
    if any(not torch.equal(tensor, before[name]) for name, tensor in program.state_dict.items()):
        return Outcome("wrong", "lowering changed the weights of the model")
    try:
        return _compare(case, program, plan, lowered, module)
    except Undecided as error:
        return Outcome("undecided", str(error))


def _compare(case: ModuleCase, program: Any, plan: cmrc.Plan, lowered: cmrc.Lowered, module: Any) -> Outcome:
    replacements = [
        Replacement(e.value, e.axis, tuple(e.units), e.constant, tuple(e.parents), e.weight) for e in plan.entries
    ]
    worst, moved = 0.0, False
    for rows in (0, 2) if case.dynamic else (0,):
        with torch.no_grad():
            try:
                original = case.module()(*case.inputs(rows))
                clamped = Clamped(program.module(), replacements)
                expected = clamped.run(*case.inputs(rows))
            except Exception as error:  # another number of rows, which the exported program guards against
                if rows:
                    continue
                raise Undecided(f"the reference does not run: {error}") from error
            if len(clamped.seen) < len({r.value for r in replacements}):
                raise Undecided("a site is no node of the exported program")
            try:
                actual = module(*case.inputs(rows))
            except Exception as error:
                return raw(error)
        for i, (want, got, plain) in enumerate(zip(expected, actual, original, strict=True)):
            if want.shape != got.shape or want.dtype != got.dtype:
                return Outcome(
                    "wrong", f"output {i} is {got.dtype} {list(got.shape)}, not {want.dtype} {list(want.shape)}"
                )
            if not torch.isfinite(want).all():
                raise Undecided("the reference is not finite")
            scale = max(float(want.abs().max()), 1.0)
            gap, allowed = float((want - got).abs().max()) / scale, TOLERANCE[want.dtype]
            if not gap <= allowed:
                return Outcome("wrong", f"output {i} differs by {gap:.3g} of its scale where {allowed:.0e} is allowed")
            worst, moved = max(worst, gap / allowed), moved or float((want - plain).abs().max()) > 1000 * allowed
    return Outcome("kept" if lowered.result.residue else "equal", "", worst, moved)


# ---------------------------------------------------------------- files and small cases


def save(case: ModuleCase, path: Path, **more: Any) -> None:
    entry = {
        **more, "residue": case.residue, "seed": case.seed, "double": case.double, "dynamic": case.dynamic,
        "shapes": case.shapes, "steps": case.steps,
        "requests": [
            {"site": r.site, "axis": r.axis, "units": r.units, "constant": r.constant, "parents": r.parents,
             "weight": r.weight, "group": r.group}
            for r in case.requests
        ],
    }  # fmt: skip
    path.write_text("{\n " + ",\n ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in entry.items()) + "\n}\n")


def load(path: Path) -> ModuleCase:
    entry = json.loads(path.read_text())
    asked = [
        Request(r["site"], r["axis"], tuple(r["units"]), r["constant"], tuple(r["parents"]), r["weight"], r["group"])
        for r in entry["requests"]
    ]
    shapes = [tuple(s) for s in entry["shapes"]]
    return ModuleCase(entry["steps"], shapes, asked, entry["residue"], entry["seed"], entry["double"], entry["dynamic"])


def minimise(case: ModuleCase, outcome: Outcome) -> ModuleCase:
    """Fewer do's, then fewer steps: the last ones, then any that nobody reads."""

    def fails(candidate: ModuleCase) -> bool:
        try:
            return judge(candidate).kind == outcome.kind
        except Exception:  # a candidate that makes no sense
            return False

    for i in reversed(range(len(case.requests))):
        if len(case.requests) > 1:
            fewer = replace(case, requests=[r for j, r in enumerate(case.requests) if j != i])
            case = fewer if fails(fewer) else case
    for i in reversed(range(len(case.steps))):
        number = len(case.shapes) + i
        if any(number in step["in"] for step in case.steps) or any(
            i in (s.get("again"), s.get("tied")) for s in case.steps
        ):
            continue
        steps = []
        for j, step in enumerate(case.steps):
            if j == i:
                continue
            moved = {**step, "in": [n - (n > number) for n in step["in"]]}
            for key in ("again", "tied"):
                if key in moved:
                    moved[key] -= moved[key] > i
            steps.append(moved)
        shorter = replace(case, steps=steps)
        case = shorter if steps and fails(shorter) else case
    if case.dynamic:
        fixed = replace(case, dynamic=False)
        case = fixed if fails(fixed) else case
    return case
