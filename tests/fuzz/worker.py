"""The cases of one process: a seed makes a graph, a plan and an outcome."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import cmrc
from cmrc.errors import CmrcError
from tests.fuzz import case as cases
from tests.fuzz.builder import Unfit
from tests.fuzz.graphs import generate
from tests.fuzz.judge import Case, Outcome, judge, raw
from tests.fuzz.minimise import minimise
from tests.fuzz.plans import requests
from tests.fuzz.session import Refused, outputs_of

TRIES = 3  # plans for a graph, until one is not refused


@dataclass(slots=True)
class Told:
    """What a seed came to, small enough to send."""

    seed: int
    outcome: Outcome
    ops: dict[str, int] = field(default_factory=dict)
    opset: int = 0
    refused: list[str] = field(default_factory=list)  # plans that were tried before
    file: str = ""


def make(seed: int) -> tuple[Case, np.random.Generator] | None:
    """The graph of a seed, without a plan; nothing where onnxruntime refuses it."""
    rng = np.random.default_rng(seed)
    try:
        model, feeds = generate(rng)
        case = Case(model, feeds, (), seed=seed)
        outputs = outputs_of(model, case.arrays())
    except (Unfit, Refused):
        return None
    if not all(np.isfinite(array.astype(np.float64)).all() for array in outputs):
        return None
    return case, rng


def traced(fresh_case: Case) -> cmrc.Program | Outcome:
    try:
        program = cmrc.trace(fresh_case.model)
        program.sites(folds=False)
        return program
    except CmrcError as error:
        return Outcome("fault" if "fault of cmrc" in str(error) else "refused", f"{error.kind}: {error.reason}")
    except Exception as error:
        return raw(error)


def with_plan(
    fresh_case: Case, program: cmrc.Program, rng: np.random.Generator, described: dict[str, str]
) -> Case | Outcome:
    """The case with a random plan, or why there is none."""
    try:
        chosen = requests(program, rng, described)
    except CmrcError as error:
        return Outcome("fault" if "fault of cmrc" in str(error) else "refused", f"{error.kind}: {error.reason}")
    except Exception as error:
        return raw(error)
    if not chosen:
        return Outcome("no site")
    return replace(fresh_case, requests=chosen, residue="keep" if rng.random() < 0.12 else "error")


def run(seed: int, *, folder: Path | None = None, failures: Path | None = None, tell: Any = lambda stage: None) -> Told:
    """One graph. A plan that is refused is followed by another, for most are."""
    tell("generate")
    fresh = make(seed)
    if fresh is None:
        return Told(seed, Outcome("no graph"))
    fresh_case, rng = fresh
    tell("judge")
    verdict = Told(seed, Outcome("no site"), dict(Counter(n.op_type for n in fresh_case.model.graph.node)))
    verdict.opset = fresh_case.model.opset_import[0].version
    case, program, thorough = fresh_case, traced(fresh_case), bool(rng.random() < 0.1)
    if isinstance(program, Outcome):
        verdict.outcome = program
    else:
        described: dict[str, str] = {}
        for _ in range(TRIES):
            planned = with_plan(fresh_case, program, rng, described)
            if isinstance(planned, Outcome):
                case, verdict.outcome = fresh_case, planned
            else:
                case = planned
                verdict.outcome = judge(case, program=program, folder=folder, thorough=thorough, tell=tell)
            if verdict.outcome.kind != "refused":
                break
            verdict.refused.append(verdict.outcome.detail)
    if verdict.outcome.failed and failures is not None:
        tell("minimise")
        small = minimise(case, verdict.outcome, seconds=15.0, thorough=thorough) if case.requests else case
        path = failures / f"{verdict.outcome.kind}-{seed}.json"
        cases.save(small, path, outcome=verdict.outcome.kind, detail=verdict.outcome.detail)
        verdict.file = path.name
    return verdict


def serve(pipe: Connection, failures: Path | None, folder: Path | None) -> None:
    """Run the seeds that come through the pipe; say what is being done, then what came of it."""
    while (seeds := pipe.recv()) is not None:
        for seed in seeds:
            pipe.send(run(seed, folder=folder, failures=failures, tell=lambda stage, s=seed: pipe.send((s, stage))))
        pipe.send(None)
