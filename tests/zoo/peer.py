"""The same requests on Torch-Pruning: its dependency graph, and the pruning of the layers that make the asked units.

It knows no constants: what it should compute is the model with the asked units at 0. Head counts that a model keeps as attributes
are left as they are, as no part of it knows them.
"""

from __future__ import annotations

import copy
import gc
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from asking import Subject

import cmrc
from benchmarks.measure import settled, timed
from cmrc.ir.axes import move
from cmrc.ir.graph import Keep, leaves_of, period_of

EQUAL = 1e-4  # relative; a wrong cut lies at 1e-1
PAIRS = 7
# Of the thread, which does all the work here: while a timer of CPU time runs (`limited`), the process's own clock goes in ticks.
CLOCK = time.thread_time
PATIENCE = 10.0  # seconds of CPU time: on some graphs it does not come to an end


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds:.0f} s of CPU time")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


@dataclass(frozen=True)
class Pruned:
    """`equal` to the model with the units at 0, `wrong`, `nothing` pruned, `error`, `no way` to ask for some of the units, `none`
    in the model, `not compared` where cmrc declines, or `absent`."""

    verdict: str
    detail: str = ""
    parameters: tuple[int, int] = (0, 0)
    error: float = 0.0
    # Processor seconds: graph build and prune, our lowering to the same zeros, and to the constants of the plan.
    cpu: float = 0.0
    ours: float = 0.0
    constants: float = 0.0


def layers_of(program: cmrc.Program, value: str, axis: int, units: tuple[int, ...]) -> list[tuple[str, list[int]]]:
    """The layers whose outputs are these units, and which outputs: back along the axis to the nearest affine ops."""
    node = program.producers.get(value)
    if node is None:
        return []
    if node.op in ("linear", "conv"):
        of_a_layer = (f"{node.path}.weight", f"{node.path}.parametrizations.weight")  # not packed into a larger module
        own = any(leaf.name.startswith(of_a_layer) for leaf in leaves_of(node.inputs[1]))
        return [(node.path, list(units))] if own and axis == node.attrs["axis"] else []
    if node.op == "attention" or (node.op == "matmul" and axis == len(node.output.shape) - 3):
        layers = []
        for operand in node.inputs[:3]:
            if isinstance(operand, str):
                size = program.values[operand].shape[axis]
                shared = int(node.output.shape[axis]) // int(size) if isinstance(size, int) else 1
                served = units if shared == 1 else tuple(sorted({u // shared for u in units}))
                layers += layers_of(program, operand, axis, served)
        return layers
    if not node.inputs or not isinstance(node.inputs[0], str):
        return []
    source, after = node.inputs[0], node.output.shape
    if node.op == "transpose":
        return layers_of(program, source, node.attrs["perm"][axis], units)
    if node.op == "reshape":
        moved = move(after, program.values[source].shape, axis, units, period_of(units))
        return [] if isinstance(moved, str) else layers_of(program, source, moved.axis, Keep(moved.index, moved.period))
    if node.op == "select" and axis == node.attrs["axis"]:
        return layers_of(program, source, axis, tuple(node.attrs["keep"][u] for u in units))
    if node.op == "along" and node.attrs.get("drop"):
        left = [d for d in range(len(program.values[source].shape)) if d not in node.attrs["axes"]]
        return layers_of(program, source, left[axis], units)
    layers = []
    for operand in node.inputs if node.op in ("pointwise", "along", "expand", "select", "concat") else ():
        shape = program.values[operand].shape if isinstance(operand, str) else ()
        local = axis - (len(after) - len(shape))
        if isinstance(operand, str) and local >= 0 and shape[local] == after[axis]:
            layers += layers_of(program, operand, local, units)
    return layers


def layers_for(program: cmrc.Program, plan: cmrc.Plan) -> tuple[list[tuple[str, list[int]]], str]:
    """The layers of all that a plan asks for, and what to say where the units of a site are no layer's outputs."""
    by_site = {do.value: layers_of(program, do.value, do.axis, do.units) for do in plan.entries}
    unnamed = next((value for value, layers in by_site.items() if not layers), "")
    problem = f"no layer of the module has the units of {unnamed} for its outputs" if unnamed else ""
    return [layer for layers in by_site.values() for layer in layers], problem


def prune(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], asked: list[tuple[str, list[int]]]) -> str:
    """Cut each layer that its coupling has not cut already. Says what it has no way to cut."""
    import torch_pruning as tp

    graph = tp.DependencyGraph().build_dependency(model, example_inputs=inputs)
    widths = {path: _outputs(graph, model.get_submodule(path)) for path, _ in asked}
    for path, outputs in asked:
        layer = model.get_submodule(path)
        pruner = graph.get_pruner_of_module(layer)
        if pruner is None or widths[path] is None:
            return f"it has no pruner for {type(layer).__name__}"
        if _outputs(graph, layer) == widths[path]:
            graph.get_pruning_group(layer, pruner.prune_out_channels, idxs=outputs).prune()
    return ""


def _outputs(graph: Any, layer: torch.nn.Module) -> int | None:
    pruner = graph.get_pruner_of_module(layer)
    return None if pruner is None else pruner.get_out_channels(layer)


def ask(subject: Subject, request: str) -> Pruned:
    if find_spec("torch_pruning") is None:
        return Pruned("absent", "torch-pruning is not installed")
    program, plan = subject.program, subject.plan("torch", request)
    if not len(plan):
        return Pruned("none")
    assert isinstance(subject.built, torch.nn.Module)
    asked, unnamed = layers_for(program, plan)
    if unnamed:
        return Pruned("no way", unnamed)
    try:
        cmrc.lower(program, plan, growth="allow")
    except cmrc.CmrcError:
        return Pruned("not compared", "cmrc declines this request")
    compared = side_by_side(subject, plan, asked, PAIRS)
    ours, theirs, constants = (min(column) for column in list(zip(*compared.seconds, strict=True))[:3])
    document: dict[str, Any] = {"ours": ours, "constants": constants}
    if compared.error:
        return Pruned("error", compared.error, **document)
    before, after = (sum(p.numel() for p in model.parameters()) for model in (subject.built, compared.model))
    document |= {"cpu": theirs, "parameters": (before, after)}
    verdict, detail, gap = judged(subject, silent(program, plan), compared.model, subject.inputs(2))
    return Pruned(verdict, detail or compared.problem, error=gap, **document)


@dataclass(frozen=True)
class SideBySide:
    """Processor seconds of lowering to zeros, of the peer, of lowering to constants and of assembling the lowered module; what came
    of it, and what the peer said or raised."""

    seconds: list[tuple[float, float, float, float]]
    lowered: cmrc.Lowered
    model: torch.nn.Module
    problem: str = ""
    error: str = ""


def side_by_side(
    subject: Subject, constants: cmrc.Plan, asked: list[tuple[str, list[int]]], pairs: int, patience: float = PATIENCE
) -> SideBySide:
    """Both at the same task, in turns, after one round to warm up. An error of the peer ends it."""
    program, zeros, inputs = subject.program, silent(subject.program, constants), subject.inputs(2)
    seconds: list[tuple[float, float, float, float]] = []
    with settled():
        for i in range(-1, pairs):
            models: list[Any] = []
            folded = timed(lambda: cmrc.lower(program, constants), CLOCK)
            ours = timed(lambda: models.append(cmrc.lower(program, zeros)), CLOCK)  # noqa: B023
            assembled = timed(lambda: models[0].module, CLOCK)  # noqa: B023
            model = copy.deepcopy(subject.built)
            gc.collect()
            start = CLOCK()
            try:
                with limited(patience):
                    problem = prune(model, inputs, asked)
            except Exception as error:
                failure = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                return SideBySide([(ours, 0.0, folded, assembled)], models[0], model, error=failure)
            theirs = CLOCK() - start
            if i >= 0:
                seconds.append((ours, theirs, folded, assembled))
    return SideBySide(seconds, models[0], model, problem)


def silent(program: cmrc.Program, plan: cmrc.Plan) -> cmrc.Plan:
    """The same units, at 0."""
    zeros = cmrc.Plan(program)
    for do in plan.entries:
        zeros.do(do.value, units=do.units, constant=0.0, axis=do.axis)
    return zeros


def judged(
    subject: Subject, zeros: cmrc.Plan, model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]
) -> tuple[str, str, float]:
    """Whether a pruned model computes the model with the asked units at 0: the verdict, what to say, and the gap."""
    assert isinstance(subject.built, torch.nn.Module)
    if sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in subject.built.parameters()):
        return "nothing", "", 0.0
    expected = subject.program.clamped(zeros).run(inputs)[0]
    try:
        with torch.no_grad():
            output = model.eval()(*inputs).numpy()
    except Exception as error:
        return "error", f"the pruned model does not run: {' '.join(str(error).split())[:160]}", 0.0
    if output.shape != expected.shape:
        return "wrong", f"its output has shape {list(output.shape)}", 0.0
    gap = float(np.abs(output - expected).max() / np.abs(expected).max())
    return "equal" if gap <= EQUAL else "wrong", "", gap
