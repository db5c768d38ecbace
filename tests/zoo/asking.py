"""What the zoo asks of every model: half of its inner units, a third of its heads, and both in one plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from models import DYNAMIC, Entry, randomise

import cmrc
from cmrc.program import Site

REQUESTS = ("inner units", "heads", "both")
HOSTS = ("torch", "ONNX")
TOLERANCE, MOVES = 1e-5, 1000


@dataclass(frozen=True)
class Outcome:
    """`exact`, `declined`, `fails` or `none` (nothing of the kind in the model), and what there is to say."""

    verdict: str
    detail: str = ""
    sites: int = 0
    units: int = 0
    parameters: tuple[int, int] = (0, 0)
    error: float = 0.0
    seconds: float = 0.0


@dataclass
class Subject:
    """A model of the zoo, traced through both hosts once."""

    entry: Entry
    module: torch.nn.Module
    program: cmrc.Program

    @classmethod
    def of(cls, entry: Entry) -> Subject:
        module = randomise(entry.build())
        inputs = tuple(entry.inputs(2).values())
        shapes = tuple(dict.fromkeys(entry.dynamic, DYNAMIC) for _ in inputs)
        return cls(entry, module, cmrc.trace(module, inputs, dynamic_shapes=shapes))

    @cached_property
    def as_onnx(self) -> cmrc.Program:
        return cmrc.trace(self.program.host.to_onnx())  # type: ignore[attr-defined]

    def on(self, host: str) -> cmrc.Program:
        return self.program if host == "torch" else self.as_onnx


def inner_sites(program: cmrc.Program) -> list[Site]:
    """Where an affine op reads units that fold: FFN hidden units, inner channels."""
    found = []
    for site in program.sites(folds=False):
        readers = program.consumers[site.value]
        affine = [r for r in readers if r.op == "linear" or (r.op == "conv" and r.attrs["groups"] == 1)]
        maker = program.producers.get(site.value)
        if not affine or maker is None or maker.op in ("embedding", "attention", "matmul") or site.units < 4:
            continue
        told = program.describe(site).folds
        if told.startswith(("folds", "constant folds")):
            found.append(site)
    return found


def head_sites(subject: Subject, program: cmrc.Program) -> list[tuple[Site, int]]:
    """The attention outputs, by the torch graph's own names, and how many query heads share a key-value head."""
    found = []
    for node in subject.program.graph.nodes:
        if node.op != "attention" or node.name not in program.host.names:
            continue
        shapes = subject.program.values
        q, k = (shapes[str(o)].shape for o in node.inputs[:2])
        shared = int(q[-3]) // int(k[-3]) if isinstance(q[-3], int) and isinstance(k[-3], int) else 1
        found.append((program.find(node.name)[0], max(shared, _repeats(subject.program, str(node.inputs[1])))))
    return found


def _repeats(program: cmrc.Program, value: str) -> int:
    """How often keys are repeated for the query heads, where the model does that itself."""
    for _ in range(4):
        node = program.producers.get(value)
        if node is None or not isinstance(node.inputs[0], str):
            return 1
        if node.op == "expand":
            before, after = program.values[node.inputs[0]].shape, node.output.shape
            grown = [int(b) for a, b in zip(before, after, strict=False) if a == 1 and isinstance(b, int) and b > 1]
            return grown[0] if grown else 1
        value = node.inputs[0]
    return 1


def plan_for(subject: Subject, program: cmrc.Program, request: str) -> cmrc.Plan:
    rng, plan = np.random.default_rng(0), cmrc.Plan(program)
    if request in ("inner units", "both"):
        for site in inner_sites(program):
            units = np.sort(rng.permutation(site.units)[: site.units // 2])
            plan.do(site.value, units=units, constant=rng.normal(0.3, 0.5, size=len(units)))
    if request in ("heads", "both"):
        for site, shared in head_sites(subject, program):
            axis = len(site.shape) - 3
            groups = int(site.shape[axis]) // shared
            chosen = rng.permutation(groups)[: max(1, groups // 3)]
            units = sorted(int(g) * shared + i for g in chosen for i in range(shared))
            width = site.shape[-1]
            values = rng.normal(0.2, 0.5, size=(len(units), width)) if isinstance(width, int) else 0.3
            plan.do(site.value, units=units, constant=values, axis=axis)
    return plan


def ask(subject: Subject, host: str, request: str, folder: Path) -> Outcome:
    """Lower, compare with the clamped model at two batch sizes, and try the result as a user would."""
    program = subject.on(host)
    plan = plan_for(subject, program, request)
    if not len(plan):
        return Outcome("none")
    replaced = sum(len(entry.units) for entry in plan.entries)
    try:
        lowered = cmrc.lower(program, plan)
    except cmrc.CmrcError as error:
        verdict = "declined" if error.kind == "residue" else "fails"
        return Outcome(verdict, f"{error.node} ({error.op}): {error.reason}", len(plan), replaced)
    checks = [lowered.check(_inputs(subject, batch, host)) for batch in (2, 3)]
    worst, moved = max(c.error for c in checks), min(c.moved for c in checks)
    report = lowered.report
    told = {
        "sites": len(plan), "units": replaced, "parameters": (report.before.parameters, report.after.parameters),
        "error": worst, "seconds": report.seconds["total"],
    }  # fmt: skip
    if worst > TOLERANCE or moved < MOVES * TOLERANCE:
        return Outcome("fails", f"differs by {worst:.1e}, moved by {moved:.1e}", **told)
    if report.after.parameters >= report.before.parameters:
        return Outcome("fails", "it is not smaller", **told)
    problem = use_as_onnx(subject, lowered, host, folder) or (train(subject, lowered) if host == "torch" else "")
    return Outcome("fails" if problem else "exact", problem, **told)


def _inputs(subject: Subject, batch: int, host: str) -> list[object]:
    values = list(subject.entry.inputs(batch).values())
    return list(values) if host == "torch" else [v.numpy() for v in values]


def use_as_onnx(subject: Subject, lowered: cmrc.Lowered, host: str, folder: Path) -> str:
    """The file that `save` writes, under onnxruntime, at two batch sizes."""
    path = folder / "lowered.onnx"
    lowered.save(path)
    small = cmrc.trace(path)
    for batch in (2, 3):
        expected = lowered.clamped.run(_inputs(subject, batch, host))[0]
        found = small.run(_inputs(subject, batch, "ONNX"))[0]
        gap = float(np.abs(found - expected).max() / np.abs(expected).max())
        if not gap <= TOLERANCE * 5:  # torch on one side, onnxruntime's kernels on the other
            return f"the saved file differs by {gap:.1e} at batch {batch}"
    return ""


def train(subject: Subject, lowered: cmrc.Lowered) -> str:
    """One optimiser step on the torch result, and a second export of it."""
    module = lowered.module.train()
    inputs = tuple(subject.entry.inputs(3).values())
    optimiser = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=1e-3)
    before = module(*inputs).square().mean()
    before.backward()
    optimiser.step()
    module.eval()
    exported = torch.export.export(module, inputs)
    with torch.no_grad():
        again = exported.module()(*inputs)
        gap = float((again - module(*inputs)).abs().max())
    return "" if gap <= TOLERANCE * max(1.0, float(again.abs().max())) else f"exported again it differs by {gap:.1e}"
