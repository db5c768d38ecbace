"""What the zoo asks of every model: half of its inner units, a third of its heads, and both in one plan."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from inner import inner_units
from models import DYNAMIC, Entry, randomise
from stand_ins import let_through

import cmrc
from cmrc.hosts.protocols import Host
from cmrc.program.check import Check
from cmrc.program.sites import Site

REQUESTS = ("inner units", "heads", "both")
HOSTS = ("torch", "ONNX")
TOLERANCE, MOVES = 1e-5, 1000
STORED = ("FLOAT", "FLOAT16", "DOUBLE", "BFLOAT16", "INT32", "INT8", "UINT8", "INT4", "UINT4")


@dataclass(frozen=True)
class Outcome:
    """`exact`, `declined`, `fails` or `none` (nothing of the kind in the model), and what there is to say."""

    verdict: str
    detail: str = ""
    sites: int = 0
    units: int = 0
    parameters: tuple[int, int] = (0, 0)
    error: float = 0.0
    moved: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)  # CPU time of the lowering, and where it went


@dataclass
class Subject:
    """A model of the zoo, traced through both hosts once."""

    entry: Entry
    built: torch.nn.Module | Path
    plans: dict[tuple[str, str], cmrc.Plan] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)  # by request, what the module lowered and exported holds

    @classmethod
    def of(cls, entry: Entry) -> Subject:
        built = entry.build()
        return cls(entry, built if isinstance(built, Path) else randomise(built))

    @property
    def hosts(self) -> tuple[str, ...]:
        return ("ONNX",) if isinstance(self.built, Path) else HOSTS

    @cached_property
    def program(self) -> cmrc.Program:
        """The module, traced."""
        inputs = self.inputs(2)
        shapes = tuple(dict.fromkeys(self.entry.dynamic, DYNAMIC) for _ in inputs)
        return cmrc.trace(self.built, inputs, dynamic_shapes=shapes)

    @cached_property
    def as_onnx(self) -> cmrc.Program:
        """The file, or what torch's exporter makes of the module."""
        return cmrc.trace(self.built if isinstance(self.built, Path) else self.program.host.to_onnx())  # type: ignore[attr-defined]

    def on(self, host: str) -> cmrc.Program:
        return self.program if host == "torch" else self.as_onnx

    def inputs(self, batch: int) -> tuple[torch.Tensor, ...]:
        return tuple(self.entry.inputs(batch).values())

    def arrays(self, batch: int) -> list[object]:
        return [value.numpy() for value in self.inputs(batch)]

    def plan(self, host: str, request: str) -> cmrc.Plan:
        """The request as a plan. The exported graph is asked for the module's own units wherever it names them alike."""
        if (host, request) not in self.plans:
            from_module = host == "ONNX" and not isinstance(self.built, Path)
            carried_plan = carried(self.plan("torch", request), self.as_onnx) if from_module else None
            trained = isinstance(self.built, Path)
            given = self.arrays(2) if trained else None
            self.plans[host, request] = carried_plan or plan_for(self.on(host), request, given, alike=self.entry.alike)
        return self.plans[host, request]

    def alike(self, request: str) -> bool:
        """Whether the exported graph was asked for the module's own units."""
        plans = [[(e.units, e.constant.tolist()) for e in self.plan(host, request).entries] for host in HOSTS]
        return plans[0] == plans[1]


# ---------------------------------------------------------------- requests


def head_sites(program: cmrc.Program) -> list[tuple[Site, int]]:
    """The outputs of attention with an axis of heads, and how many query heads share a key-value head.

    Attention is the fused op, or a product whose left factor is a softmax. Heads that are folded into the batch axis become
    an axis of their own in the reshape that follows.
    """
    heads = []
    for node in program.graph.nodes:
        attends = node.op == "attention" or (node.op == "matmul" and _is_softmax(program, node.inputs[0]))
        value = _with_heads(program, node.name) if attends else None
        if value is None:
            continue
        values = node.inputs[2 if node.op == "attention" else 1]
        q, k = program.values[value].shape, program.values[str(values)].shape
        shared = int(q[-3]) // int(k[-3]) if len(k) > 3 and isinstance(k[-3], int) and int(k[-3]) > 0 else 1
        site = program.site_of(value, program.axes.get(value, len(program.values[value].shape) - 3))
        if site.units == 1:
            continue
        heads.append((site, max(shared, _repeats(program, str(values)))))
    return heads


def _is_softmax(program: cmrc.Program, value: object) -> bool:
    """Whether a value is a softmax, up to casts, dropout, masking and changes of shape."""
    while isinstance(value, str) and (node := program.producers.get(value)) is not None:
        if node.op == "along":
            return bool(node.attrs["fn"] == "softmax")
        if node.op not in ("pointwise", "reshape", "expand"):
            return False
        value = next((operand for operand in node.inputs if isinstance(operand, str)), None)
    return False


def _with_heads(program: cmrc.Program, value: str) -> str | None:
    shape = program.values[value].shape
    if len(shape) > 3 and isinstance(shape[-3], int):
        return value if shape[-3] > 1 else None
    for reader in program.consumers[value]:
        after = reader.output.shape
        if reader.op == "reshape" and len(after) > 3 and after[-2:] == shape[-2:] and isinstance(after[-3], int):
            return reader.name
    return None


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


def plan_for(
    program: cmrc.Program, request: str, inputs: list[object] | None = None, *, alike: bool = False
) -> cmrc.Plan:
    """Units and constants are drawn for each module: where a module is called twice, both calls lose the same units.

    With inputs, constants are drawn around what the units are there, as a calibration would find them: a trained model whose
    units are set to anything else computes noise.
    """
    plan = cmrc.Plan(program)
    if request in ("inner units", "both"):
        asked = inner_units(program, lambda site: drawn_for(program, site))
        seen = [] if inputs is None else program.run(inputs, [site.value for site, _ in asked])[-len(asked) :]
        for i, (site, chosen) in enumerate(asked):
            rng = drawn_for(program, site)
            drawn = rng.normal(0.3, 0.5, len(chosen))
            unseen = inputs is None or not seen[i].size  # a branch that these inputs do not take
            constants = drawn if unseen else like(seen[i], site, chosen, rng, whole=is_quantised(program))
            plan.do(site.value, units=chosen, constant=constants, axis=site.axis)
    if request in ("heads", "both"):
        for site, shared in head_sites(program):
            rng = drawn_for(program, site)
            groups = site.units // shared
            chosen = (np.random.default_rng(0) if alike else rng).permutation(groups)[: max(1, groups // 3)]
            units = sorted(int(g) * shared + i for g in chosen for i in range(shared))
            width = site.shape[-1]
            values = rng.normal(0.2, 0.5, size=(len(units), width)) if isinstance(width, int) else 0.3
            plan.do(site.value, units=units, constant=values, axis=site.axis)
    return plan


def is_quantised(program: cmrc.Program) -> bool:
    return any(node.attrs.get("fn") == "quantize" for node in program.graph.nodes)


def like(seen: np.ndarray, site: Site, units: list[int], rng: np.random.Generator, *, whole: bool) -> np.ndarray:
    """Constants around the mean of each unit, off by a third of its deviation; by position in sequences of a fixed length, unless
    a bias of whole numbers takes them in."""
    by_position = not whole and len(site.shape) == 3 and site.axis == 2 and isinstance(site.shape[1], int)
    over = tuple(i for i in range(seen.ndim) if i != site.axis and not (by_position and i == 1))
    some = np.take(seen, units, axis=site.axis)
    mean, deviation = (f(axis=over, keepdims=by_position) for f in (some.mean, some.std))
    return mean + deviation / 3 * rng.normal(size=mean.shape)


def drawn_for(program: cmrc.Program, site: Site) -> np.random.Generator:
    maker = program.producers.get(site.value)
    return np.random.default_rng(zlib.crc32((maker.path if maker and maker.path else site.value).encode()))


def carried(plan: cmrc.Plan, program: cmrc.Program) -> cmrc.Plan | None:
    """The same do's on the exported graph, if it has a value of the same name and shape for each."""
    small_plan = cmrc.Plan(program)
    for entry in plan.entries:
        values = program.host.names.get(entry.value, ())
        shape = program.values[values[0]].shape if len(values) == 1 else ()
        before = plan.program.values[entry.value].shape  # type: ignore[union-attr]
        if len(shape) != len(before) or shape[entry.axis] != before[entry.axis]:
            return None
        small_plan.do(values[0], units=entry.units, constant=entry.constant, axis=entry.axis)
    return small_plan


# ---------------------------------------------------------------- answers


def ask(subject: Subject, host: str, request: str, folder: Path) -> Outcome:
    """Lower, compare with the clamped model at two batch sizes, count, and try the result as a user would."""
    program, plan = subject.on(host), subject.plan(host, request)
    if not program.axes:  # there is nothing to ask for: what a user who tries reads
        with pytest.raises(cmrc.CmrcError) as refusal:
            program.find("*")
        return Outcome("declined", refusal.value.reason)
    if not len(plan):
        return Outcome("none")
    replaced = sum(len(entry.units) for entry in plan.entries)
    start = time.process_time()
    try:
        lowered = cmrc.lower(program, plan, growth="allow")  # what is asked is exactness
    except cmrc.CmrcError as error:
        verdict = "declined" if error.kind == "residue" else "fails"
        return Outcome(verdict, f"{error.node} ({error.op}): {error.reason}", len(plan), replaced)
    spent = time.process_time() - start
    inputs = {
        batch: subject.inputs(batch) if host == "torch" else subject.arrays(batch) for batch in subject.entry.batches
    }
    checks = [lowered.check(given) for given in inputs.values()]
    worst, moved = max(c.error for c in checks), min(c.moved for c in checks)
    if isinstance(subject.built, Path) and not is_quantised(program):
        worst, moved = before_squashing(lowered, inputs, worst)
    lowered.save(folder / "lowered.onnx")
    counts = counted(subject, lowered, host, request, folder)
    record = {
        "sites": len(plan), "units": replaced, "parameters": counts[:2], "error": worst, "moved": moved,
        "seconds": {**lowered.seconds, "cpu": spent},
    }  # fmt: skip
    problem = counts[2]
    allowed = TOLERANCE if worst <= TOLERANCE else max(TOLERANCE, rounding(lowered.clamped, inputs))
    if is_quantised(program):
        allowed = max(c.tolerance for c in checks)
        problem = problem or in_steps(checks)
    elif worst > allowed or moved < MOVES * allowed:
        problem = f"differs by {worst:.1e}, moved by {moved:.1e}"
    problem = problem or used_as_onnx(subject, lowered, inputs, folder, max(allowed, 5 * TOLERANCE))
    if host == "torch":
        problem = problem or trained(subject, lowered)
    return Outcome("fails" if problem else "exact", problem, **record)  # type: ignore[arg-type]


def in_steps(checks: Sequence[Check]) -> str:
    """What is wrong with a quantised model: it gives the same bits, or the same numbers in float64 before every rounding."""
    for check in checks:
        if check.error and check.folded is None:
            return f"differs by {check.error:.1e} of the scale, and was not compared in float64"
        if not check.holds:
            return str(check)
        if not check.moved > 2 * check.error:
            return f"differs by {check.error:.1e}, moved by {check.moved:.1e}"
    return ""


SQUASHES = {"sigmoid", "softmax", "tanh", "hard_sigmoid", "clip", "identity"}


def before_squashing(lowered: cmrc.Lowered, inputs: Mapping[int, Any], worst: float) -> tuple[float, float]:
    """Error and movement of what the last sigmoid or softmax reads: a trained model without half of its units may be sure of
    everything, and its probabilities would hide any difference."""
    moved = np.inf
    for given in inputs.values():
        clamped, small, whole = (
            host.run(given, [squashed(host)])[-1] for host in (lowered.clamped, lowered.host, lowered.program.host)
        )
        scale = float(np.abs(clamped).max())
        worst = max(worst, float(np.abs(small - clamped).max()) / scale)
        moved = min(moved, float(np.abs(whole - clamped).max()) / scale)
    return worst, moved


def squashed(host: Host) -> str:
    """The first output, or what it is squashed from."""
    makers = {node.name: node for node in host.graph.nodes}
    value = host.graph.outputs[0]
    while value in makers and makers[value].attrs.get("fn") in SQUASHES:
        value = str(makers[value].inputs[0])
    return value


def rounding(clamped: Host, inputs: Mapping[int, Sequence[Any]]) -> float:
    """How far the clamped model itself moves when the last digit of its inputs does, four times that: every layer rounds anew."""
    worst, rng = 0.0, np.random.default_rng(0)
    for given in inputs.values():
        arrays = [np.asarray(x) for x in given]
        here = clamped.run(arrays)[0]
        for _ in range(4):
            ends = [
                rng.choice([-np.inf, np.inf], x.shape).astype(x.dtype) if x.dtype.kind == "f" else x for x in arrays
            ]
            near = [np.nextafter(x, end) if x.dtype.kind == "f" else x for x, end in zip(arrays, ends, strict=True)]
            there = clamped.run(near)[0]
            worst = max(worst, float(np.abs(here - there).max() / np.abs(here).max()))
    return 4 * worst


def counted(subject: Subject, lowered: cmrc.Lowered, host: str, request: str, folder: Path) -> tuple[int, int, str]:
    """Parameters before and after, counted in the models themselves, and what is wrong with the numbers."""
    if host == "torch":
        subject.sizes[request] = stored(folder / "lowered.onnx")
        before, after = tensors(subject.program.host), tensors(lowered.host)
        dead = {
            name: count
            for name, count in unread(subject, lowered).items()
            if name in after or count == before[name].numel()  # else what is computed from it is stored instead
        }
        gone = sum(before[name].numel() - (after[name].numel() if name in after else 0) for name in dead)
        expected = sum(dead.values())
        wrong = "" if gone == expected else f"{gone:,} parameters went, {expected:,} are without effect"
        return sum(t.numel() for t in before.values()), sum(t.numel() for t in after.values()), wrong
    subject.as_onnx.save(folder / "whole.onnx")
    whole, small = (stored(folder / f"{name}.onnx") for name in ("whole", "lowered"))
    if isinstance(subject.built, Path) or not subject.alike(request):
        return whole, small, "" if small < whole else "it is not smaller"
    if request not in subject.sizes:
        cmrc.lower(subject.program, subject.plan("torch", request), growth="allow").save(folder / "twin.onnx")
        subject.sizes[request] = stored(folder / "twin.onnx")
    expected = subject.sizes[request]
    problem = f"{small:,} parameters are left, the module lowered and exported has {expected:,}"
    return (
        whole,
        small,
        "" if small <= expected else problem,
    )  # fewer where the exporter had folded a norm into a weight


def tensors(host: Host) -> dict[str, torch.Tensor]:
    """The floating-point parameters and buffers of a torch host."""
    module = host.module()  # type: ignore[attr-defined]
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: tensor for name, tensor in named.items() if tensor.is_floating_point()}


def unread(subject: Subject, lowered: cmrc.Lowered) -> dict[str, int]:
    """For each tensor, how many of its numbers lose all effect when the plan's units are 0: their gradient vanishes.

    A unit that is 0 hides what makes it, and the weights that read it; so these are the numbers that a lowering must remove.
    """
    silent = cmrc.Plan(subject.program)
    for entry in lowered.plan.entries:
        silent.do(entry.value, units=entry.units, constant=0.0, axis=entry.axis)
    with_effect, left = (effects(subject, host) for host in (subject.program.host, subject.program.clamped(silent)))
    unread_inputs = {}
    for name, seen in with_effect.items():
        alive = seen & left.get(name, torch.zeros_like(seen))
        gone = seen & ~alive
        for axis in range(
            seen.dim()
        ):  # numbers that these inputs never reach (rows of a table) go with the rest of their slice
            others = [d for d in range(seen.dim()) if d != axis]
            whole = seen.sum(others) * (alive.sum(others) == 0) if others else seen & ~alive
            gone = gone | (whole > 0).reshape([-1 if d == axis else 1 for d in range(seen.dim())])
        unread_inputs[name] = int(gone.sum())
    return unread_inputs


def effects(subject: Subject, host: Host) -> dict[str, torch.Tensor]:
    """Which numbers of which tensors have a gradient. Rectifiers leak here and pooling averages, lest a unit that happens to be
    off or a position that happens to be the largest hides them."""
    module = host.module().eval()  # type: ignore[attr-defined]
    let_through(module)
    state = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors(host).items()}
    seen = {name: torch.zeros_like(tensor, dtype=torch.bool) for name, tensor in state.items()}
    for batch in (*subject.entry.batches, *(range(4, 8) if subject.entry.dynamic else ())):  # none vanishes by chance
        result = torch.func.functional_call(module, state, subject.inputs(batch))
        weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(batch))
        gradients = torch.autograd.grad((result * weights).sum(), list(state.values()), allow_unused=True)
        for name, gradient in zip(state, gradients, strict=True):
            if gradient is not None:
                seen[name] |= gradient != 0
    return {name: gradients for name, gradients in seen.items() if gradients.any()}


def stored(path: Path) -> int:
    """The floating-point numbers that an ONNX file holds, and those that are stored as small integers."""
    kinds = [getattr(onnx.TensorProto, kind) for kind in STORED]
    tensors = tensors_of(onnx.load(path, load_external_data=False).graph)
    return sum(int(np.prod(tensor.dims)) for tensor in tensors if tensor.data_type in kinds)


def tensors_of(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Those of the bodies inside it as well."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.name == "value":
                yield attribute.t
            if attribute.HasField("g"):
                yield from tensors_of(attribute.g)


def used_as_onnx(
    subject: Subject, lowered: cmrc.Lowered, inputs: dict[int, object], folder: Path, allowed: float
) -> str:
    """The file that `save` wrote, under onnxruntime, at every batch size."""
    small = cmrc.trace(folder / "lowered.onnx")
    for batch, given in inputs.items():
        expected = lowered.clamped.run(given)[0]  # type: ignore[arg-type]
        output = small.run(subject.arrays(batch))[0]
        gap = float(np.abs(output - expected).max() / (np.abs(expected).max() or 1.0))
        if not gap <= allowed:  # torch on one side, onnxruntime's kernels on the other
            return f"the saved file differs by {gap:.1e} at batch {batch}"
    return ""


def trained(subject: Subject, lowered: cmrc.Lowered) -> str:
    """One optimiser step on the torch result, and a second export of it."""
    module = lowered.module.train()
    inputs = subject.inputs(subject.entry.batches[-1])
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
