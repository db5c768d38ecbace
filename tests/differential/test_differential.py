"""Lowered against literally clamped, on both hosts, for every case: equal up to rounding, while the do's are clearly seen.

The reference is proved on its own: `program.clamped(plan)` must agree with torch forward hooks that overwrite the units.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from differential import (  # noqa: F401
    cases_blocks,
    cases_conv,
    cases_layout,
    cases_linear,
    cases_pointwise,
    cases_pooling,
    cases_strangers,
    cases_transformers,
)
from differential.models import CASES, Case, exported, to_onnx
from meaning import gap
from tolerances import ACROSS_F32, EXACT, EXACT_F32, MOVES, MOVES_HALF
from torch.utils import _pytree as pytree

import cmrc
from cmrc.errors import ResidueError
from cmrc.hosts.autograd.arrays import to_numpy
from cmrc.ir.graph import Array, ArrayLiteral, Do, Graph, Tensor

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
RUNS = [
    pytest.param(case, host, variant, id=f"{case.name}-{host}-{variant or 'static'}")
    for case in CASES.values()
    for host in case.hosts
    for variant in (case.dynamic if host == "fx" else case.dynamic[-1:])
]
SAVED = [pytest.param(case, id=case.name) for case in CASES.values() if case.save]


def trace(case: Case, host: str, variant: str) -> cmrc.Program:
    program = exported(case.name, variant)[1]
    return cmrc.trace(program if host == "fx" else to_onnx(program))


def plan_for(program: cmrc.Program, case: Case) -> cmrc.Plan:
    plan = cmrc.Plan(program)
    for ask in case.asks:
        site = ask.onnx_site if program.host.kind == "onnx" and ask.onnx_site else ask.site
        plan.do(site, units=ask.units, constant=ask.constant, affine=ask.affine, axis=ask.axis)
    return plan


def run(host: Any, args: tuple[torch.Tensor, ...]) -> list[Array]:
    outputs: list[Array] = host.run([to_numpy(x) for x in args] if host.kind == "onnx" else args)
    return outputs


@pytest.mark.parametrize(("case", "host", "variant"), RUNS)
def test_lowered_equals_clamped(case: Case, host: str, variant: str) -> None:
    program = trace(case, host, variant)
    plan = plan_for(program, case)
    if case.stops:
        with pytest.raises(ResidueError) as caught:
            cmrc.lower(program, plan)
        assert case.stops in str(caught.value).lower()
        kept = cmrc.lower(program, plan, residue="keep")  # what cannot be folded stays as a clamp
        assert kept.report.declined
        check_values(case, kept, variant)
        return
    lowered = cmrc.lower(program, plan, growth="allow")  # uses of one weight may become different
    check_sizes(case, lowered)
    check_values(case, lowered, variant)


def check_sizes(case: Case, lowered: cmrc.Lowered) -> None:
    """Nothing stays, each site has lost its units, and there is less to store and to compute."""
    assert lowered.report.declined == ()
    for ask, site in zip(case.asks, lowered.report.sites, strict=True):
        assert site.units_after == (site.units_before - site.replaced if ask.left is None else ask.left), site
    if case.shrinks:
        assert stored(lowered.graph) < stored(lowered.program.graph)
    assert lowered.report.after.macs < lowered.report.before.macs


def stored(graph: Graph) -> int:
    """Numbers in parameters; the planes that a fold adds at a border are not counted."""
    nodes = [node for node in graph.nodes if not node.marks.addend]
    tensors = {o for node in nodes for o in node.inputs if isinstance(o, Tensor) and not isinstance(o, ArrayLiteral)}
    return sum(math.prod(tensor.shape) for tensor in tensors)


def check_values(case: Case, lowered: cmrc.Lowered, variant: str) -> None:
    program, plan = lowered.program, lowered.plan
    module = exported(case.name, variant)[0]
    tolerance = EXACT[case.precision]
    for varied in (False, True) if variant else (False,):
        args = case.args(variant, seed=11 + varied, varied=varied)
        expected, computed, plain = run(lowered.clamped, args), run(lowered.host, args), run(program.host, args)
        assert gap(computed, expected) <= tolerance
        assert gap(plain, expected) >= (MOVES_HALF * tolerance if "16" in case.precision else MOVES * EXACT_F32)
        literal = overwritten(module, plan, case, args)
        assert gap(expected, literal) <= (tolerance if program.host.kind == "fx" else max(tolerance, ACROSS_F32))


@pytest.mark.parametrize("case", SAVED)
def test_torch_result_saved_as_onnx(case: Case, tmp_path: Path) -> None:
    variant = case.dynamic[-1]
    program = trace(case, "fx", variant)
    lowered = cmrc.lower(program, plan_for(program, case), growth="allow")
    lowered.save(tmp_path / "small.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "small.onnx", providers=["CPUExecutionProvider"])
    for varied in (False, True) if variant else (False,):
        args = case.args(variant, seed=11 + varied, varied=varied)
        names = [value.name for value in session.get_inputs()]
        outputs = session.run(None, dict(zip(names, [to_numpy(x) for x in args], strict=True)))
        assert gap(outputs, run(lowered.clamped, args)) <= ACROSS_F32


# ---------------------------------------------------------------- the reference's own reference


@torch.no_grad()
def overwritten(module: torch.nn.Module, plan: cmrc.Plan, case: Case, args: tuple[torch.Tensor, ...]) -> list[Array]:
    """The outputs of the module itself, with units overwritten by hooks in its own forward."""
    with hooks(module, [(ask.site, entry) for ask, entry in zip(case.asks, plan.entries, strict=True)]):
        outputs = module(*args)
    return [to_numpy(t) for t in pytree.tree_leaves(outputs)]


@contextmanager
def hooks(module: torch.nn.Module, dos: list[tuple[str, Do]]) -> Iterator[None]:
    handles = []
    for path in dict.fromkeys(site.partition("@")[0] for site, _ in dos):
        calls = iter(range(99))

        def overwrite(_: Any, __: Any, output: torch.Tensor, path: str = path, calls: Iterator[int] = calls) -> Any:
            call = next(calls)
            for site, entry in dos:
                if site in (path, f"{path}@{call}"):
                    output = with_do(output, entry)
            return output

        handles.append(module.get_submodule(path).register_forward_hook(overwrite))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def with_do(value: torch.Tensor, entry: Do) -> torch.Tensor:
    """A copy with the units replaced, the parents read as they were."""
    result = value.clone().movedim(entry.axis, -1)
    new = torch.as_tensor(np.array(entry.constant), dtype=value.dtype)
    new = new.movedim(entry.axis, -1) if new.ndim > 1 else new
    if entry.weight is not None:
        new = result[..., list(entry.parents)] @ torch.as_tensor(np.array(entry.weight), dtype=value.dtype).T + new
    result[..., list(entry.units)] = new
    return result.movedim(-1, entry.axis)
