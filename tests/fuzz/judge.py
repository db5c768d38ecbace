"""One case to one outcome: lower, save, run under onnxruntime, and compare with the clamp.

How close is equal follows from the reference itself. First a few units of rounding of the output's own scale; where that is
not met, the clamped model is run again with every weight and every value in it disturbed by a unit of rounding, and the
result may differ by a small multiple of what that moves. A wrong fold is off by far more (test_fuzz.py seeds some).
"""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, helper, numpy_helper

import cmrc
from cmrc.errors import CmrcError, GraphError, GrowthError
from cmrc.program.check import FOLDED, FOLDED_IN_STEPS, folded_apart
from cmrc.program.steps import rounds_to_steps
from tests.fuzz.builder import FLOATS
from tests.fuzz.clamp import Replacement, clamp
from tests.fuzz.graphs import Feed
from tests.fuzz.plans import Request
from tests.fuzz.session import USUAL, Array, Refused, outputs_of, run, start

FAILURES = ("wrong", "raw", "fault", "unloadable", "hang", "crash", "grown", "alarm")
EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
AT_ONCE = 24  # units of rounding, of the largest number around, that are equal without a second look
NARROWING = ("MatMulScaleFusion",)  # onnxruntime keeps the factor as a float32, also in models of float64
NOISES = 5
MANY_NOISES = 30  # before a result is called wrong: a jump may need a rare combination of roundings
MULTIPLE = 12.0


@dataclass(frozen=True, slots=True)
class Case:
    """A model, its inputs, the do's, and what becomes of a residue."""

    model: onnx.ModelProto
    feeds: Mapping[str, Feed]
    requests: Sequence[Request]
    residue: str = "error"
    seed: int = 0
    given: Mapping[str, Array] | None = None
    """The inputs themselves, where they are not random."""

    def arrays(self, shapes: Mapping[str, Sequence[int]] | None = None, seed: int = 0) -> dict[str, Array]:
        if self.given is not None:
            return dict(self.given)
        arrays = {}
        for number, (name, feed) in enumerate(self.feeds.items()):
            other = feed if shapes is None else Feed(tuple(shapes[name]), feed.dtype, feed.declared, feed.below)
            arrays[name] = other.array(1000 * self.seed + number + 7919 * seed)
        return arrays


@dataclass(frozen=True, slots=True)
class Outcome:
    kind: str
    detail: str = ""
    error: float = 0.0  # over what is allowed
    moved: bool = False  # whether the replacement moves an output by more than rounding could
    slow: bool = False  # whether equality took a second look
    grown: bool = False  # whether more numbers are held than before: `lower` refuses that unless it is allowed

    apart: float | None = None  # how far `lowered.check()` sees the rewritten graph from the clamped one in float64

    @property
    def failed(self) -> bool:
        return self.kind in FAILURES


class Undecided(Exception):
    """The reference itself is not finite, or jumps when it is disturbed: the case tells nothing."""


def judge(
    case: Case,
    *,
    program: cmrc.Program | None = None,
    folder: Path | None = None,
    thorough: bool = False,
    tell: Callable[[str], None] = lambda stage: None,
) -> Outcome:
    """The outcome of a case; a raw exception is one, too. `program` is its model, traced already.

    `tell` hears when only the original runs: if the process dies there, that says nothing about cmrc.
    """
    try:
        program = cmrc.trace(case.model) if program is None else program
        plan = cmrc.Plan(program)
        if not case.requests:  # what a user sees before there is a plan
            program.sites()
            program.groups()
            return Outcome("no site")
        for request in case.requests:
            request.add_to(plan)
        try:
            lowered, larger = cmrc.lower(program, plan, residue=case.residue), False  # type: ignore[arg-type]
        except GrowthError:  # it must still be right
            lowered, larger = cmrc.lower(program, plan, residue=case.residue, growth="allow"), True  # type: ignore[arg-type]
    except GraphError as error:
        return Outcome("fault", str(error))
    except CmrcError as error:
        if "fault of cmrc" in str(error):
            return Outcome("fault", str(error))
        return Outcome("refused", f"{error.kind}: {error.reason}")
    except Exception as error:
        return raw(error)
    try:
        outcome = _compare(case, program, plan, lowered, folder, thorough, tell)
    except Undecided as error:
        return Outcome("undecided", str(error))
    except Refused as error:  # of the disturbed reference, whose declared sizes onnxruntime does not take
        return Outcome("undecided", f"the reference cannot be disturbed: {error}")
    if outcome.kind == "equal" and case.given is None:
        apart = folded_apart(program, plan.entries, lowered.graph, case.arrays())
        allowed = FOLDED_IN_STEPS if any(rounds_to_steps(node) for node in lowered.graph.nodes) else FOLDED
        if apart is not None and apart > allowed:
            return Outcome("alarm", f"equal, and `check` would say that it lies {apart:.2g} apart in float64")
        outcome = replace(outcome, apart=apart if allowed == FOLDED else None)
    if outcome.kind == "equal" and outcome.grown and not larger:
        return replace(
            outcome, kind="grown", detail="the file holds more numbers than the model, and lower did not refuse"
        )
    return outcome


def _compare(
    case: Case,
    program: cmrc.Program,
    plan: cmrc.Plan,
    lowered: cmrc.Lowered,
    folder: Path | None,
    thorough: bool,
    tell: Callable[[str], None],
) -> Outcome:
    feeds = case.arrays()
    replacements = _replacements(case, program, plan)
    facts = {r.value: _facts(program, r) for r in replacements}
    clamped = clamp(case.model, replacements, facts)
    try:
        reference = start(clamped.SerializeToString())
        expected = run(reference, feeds)
    except Refused as error:  # onnxruntime lacks Where or MatMul in this dtype
        raise Undecided(f"the reference does not run: {error}") from error
    try:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            path = Path(place) / "lowered.onnx"
            lowered.save(path)
            saved = path.read_bytes()
    except CmrcError as error:
        return Outcome("refused", f"save: {error.kind}: {error.reason}")
    except Exception as error:
        return raw(error)
    kept = bool(lowered.result.residue)
    try:
        session = start(saved)
        actual = run(session, feeds)
    except Refused as error:
        _require_own_fault(saved, feeds, error)
        return Outcome("unloadable", str(error))
    noise = Noise(clamped, feeds)
    verdict = close(expected, actual, noise)
    if verdict.problem and _reduces_nothing(case):
        raise Undecided("a reduction over a dynamic axis that has no elements: docs/limits.md")
    if verdict.problem:
        return Outcome("wrong", verdict.problem, verdict.error)
    original = outputs_of(case.model, feeds)
    moved = any(_moved(a, b) for a, b in zip(original, expected, strict=True))
    for number, shapes in enumerate(other_sizes(case)):
        again = case.arrays(shapes, seed=number + 1)
        try:
            tell("original")
            outputs_of(case.model, again)
            wanted = run(reference, again)
        except Refused:
            continue  # the original takes no such sizes
        finally:
            tell("judge")
        try:
            got = run(session, again)
        except Refused as error:
            _require_own_fault(saved, again, error)
            return Outcome("unloadable", f"at sizes {shapes}: {error}")
        more = close(wanted, got, Noise(clamped, again))
        if more.problem:
            return Outcome("wrong", f"at sizes {shapes}: {more.problem}", more.error)
    if thorough:
        try:
            outputs_of(case.model, feeds, level=USUAL)
            usual = run(start(saved, level=USUAL, without=NARROWING if _has_float64(expected) else ()), feeds)
        except Refused as error:
            if _loads(case.model, feeds):
                return Outcome("unloadable", f"with optimisations: {error}")
        else:
            more = close(expected, usual, noise)
            if more.problem and not close(expected, outputs_of(clamped, feeds, level=USUAL), noise).problem:
                return Outcome("wrong", f"with optimisations: {more.problem}", more.error)
    before, after = numbers_in(case.model), numbers_in(onnx.load_model_from_string(saved), case.model)
    grown = not kept and all(now > then for then, now in zip(before, after, strict=True))
    return Outcome("kept" if kept else "equal", "", verdict.error, moved, verdict.slow, grown)


def _require_own_fault(saved: bytes, feeds: Mapping[str, Array], error: Refused) -> None:
    """onnxruntime plans its memory by sizes; where those that it infers by itself mislead it, the file is not to blame."""
    if "re-use buffer" not in str(error):
        return
    bare = onnx.load_model_from_string(saved)
    del bare.graph.value_info[:]
    for output in bare.graph.output:
        output.type.tensor_type.ClearField("shape")
    try:
        outputs_of(bare, feeds)
    except Refused as again:
        if "re-use buffer" in str(again):
            raise Undecided("onnxruntime infers a wrong size and plans its memory by it") from error


def _reduces_nothing(case: Case) -> bool:
    """Whether a dynamic axis may be reduced that has no elements here, of which the compiler knows nothing."""
    open_and_empty = any(
        size == 0 and not isinstance(declared, int)
        for feed in case.feeds.values()
        for size, declared in zip(feed.shape, feed.declared, strict=True)
    )
    return open_and_empty and any(node.op_type.startswith("Reduce") for node in case.model.graph.node)


def _has_float64(arrays: Sequence[Array]) -> bool:
    return any(array.dtype == np.float64 for array in arrays)


def _loads(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> bool:
    try:
        outputs_of(model, feeds, level=USUAL)
    except Refused:
        return False
    return True


def _replacements(case: Case, program: cmrc.Program, plan: cmrc.Plan) -> list[Replacement]:
    if any(request.group for request in case.requests):  # what a group asks of each writer is the plan's own account
        return [
            Replacement(e.value, e.axis, tuple(e.units), e.constant, tuple(e.parents), e.weight) for e in plan.entries
        ]
    placed = []
    for request in case.requests:
        rank = len(program.values[request.site].shape)
        axis = request.axis if request.axis is not None else program.axes[request.site]
        placed.append(request.replacement(axis % rank))
    return placed


def _facts(program: cmrc.Program, one: Replacement) -> tuple[int, np.dtype[Any], int]:
    value = program.values[one.value]
    from cmrc.ir.graph import numpy_dtype

    return len(value.shape), numpy_dtype(value.dtype), int(value.shape[one.axis])


def other_sizes(case: Case) -> list[dict[str, list[int]]]:
    """The inputs at other sizes of their dynamic axes: axes that were equally long stay so, or those of one name do."""
    dynamic = sorted(
        {feed.shape[i] for feed in case.feeds.values() for i, n in enumerate(feed.declared) if not isinstance(n, int)}
    )
    if not dynamic:
        return []
    together = {size: size + 1 + position for position, size in enumerate(dynamic)}
    changes: list[Callable[[int, int | str | None], int]] = [lambda size, name: together[size]]
    named = sorted({str(n) for feed in case.feeds.values() for n in feed.declared if isinstance(n, str)})
    if len(named) > 1:
        changes.append(lambda size, name: size + (named.index(name) if isinstance(name, str) else 0))
    return [
        {
            name: [
                change(n, d) if not isinstance(d, int) else n for n, d in zip(feed.shape, feed.declared, strict=True)
            ]
            for name, feed in case.feeds.items()
        }
        for change in changes
    ]


# ---------------------------------------------------------------- how close is equal


@dataclass(frozen=True, slots=True)
class Verdict:
    problem: str = ""
    error: float = 0.0
    slow: bool = False


def close(expected: Sequence[Array], actual: Sequence[Array], noise: Noise | None) -> Verdict:
    if len(expected) != len(actual):
        return Verdict(f"{len(actual)} outputs instead of {len(expected)}", np.inf)
    worst, slow = 0.0, False
    for i, (want, got) in enumerate(zip(expected, actual, strict=True)):
        if want.shape != got.shape:
            return Verdict(f"output {i} has shape {list(got.shape)}, not {list(want.shape)}", np.inf)
        if want.dtype != got.dtype:
            return Verdict(f"output {i} is {got.dtype}, not {want.dtype}", np.inf)
        if not want.size:
            continue
        a, b = want.astype(np.float64), got.astype(np.float64)
        if not np.isfinite(a).all():
            raise Undecided("the reference is not finite")
        gap = np.abs(a - b)
        gap = float(gap.max()) if np.isfinite(gap).all() else np.inf
        if want.dtype.name not in FLOATS:
            if gap and noise is not None and (noise.moves(i) or noise.moves(i, MANY_NOISES)):
                raise Undecided("a whole number that a unit of rounding moves")
            if gap:
                return Verdict(f"output {i} of whole numbers differs", gap)
            continue
        unit = EPSILON[want.dtype.name]
        allowed = AT_ONCE * unit * max(float(np.abs(a).max()), 1e-3)
        if gap > allowed and noise is not None:
            slow = True
            scale, at_once = float(np.abs(a).max()), allowed
            for draws in (NOISES, MANY_NOISES):
                if gap <= allowed:
                    break
                moves = noise.moves(i, draws)
                if moves > max(0.02 * scale, 1e-4) and moves > 50 * at_once:
                    raise Undecided("the reference jumps when it is disturbed by a unit of rounding")
                allowed = max(at_once, MULTIPLE * moves)
        worst = max(worst, gap / allowed)
        if gap > allowed:
            return Verdict(f"output {i} differs by {gap:.3g} where {allowed:.2g} is allowed", gap / allowed, slow)
    return Verdict("", worst, slow)


def _moved(before: Array, after: Array) -> bool:
    if before.shape != after.shape or before.dtype.name not in FLOATS or not before.size:
        return bool(np.any(before != after)) if before.shape == after.shape else True
    gap = np.abs(before.astype(np.float64) - after.astype(np.float64)).max()
    return bool(
        gap > 1000 * AT_ONCE * EPSILON[after.dtype.name] * max(float(np.abs(after.astype(np.float64)).max()), 1e-3)
    )


class Noise:
    """How far each output of a model moves when all that it computes is disturbed by a unit of rounding."""

    def __init__(self, model: onnx.ModelProto, feeds: Mapping[str, Array]) -> None:
        self.model, self.feeds = model, feeds
        self._moves: dict[int, list[float]] = {}

    def moves(self, output: int, draws: int = NOISES) -> float:
        if draws not in self._moves:
            self._moves[draws] = self._measure(draws)
        return self._moves[draws][output]

    def _measure(self, draws: int) -> list[float]:
        plain = outputs_of(self.model, self.feeds)
        tapped, names = _tapped(self.model)
        values = dict(zip(names, run(start(tapped.SerializeToString()), self.feeds)[len(plain) :], strict=True))
        moved = np.zeros(len(plain))
        for seed in range(draws):
            rng = np.random.default_rng(seed)
            feeds = {name: _disturbed(array, rng, 2.0) for name, array in self.feeds.items()}
            arrays = outputs_of(_disturb(self.model, values, rng), feeds)
            for i, (a, b) in enumerate(zip(plain, arrays, strict=True)):
                gap = np.abs(a.astype(np.float64) - b.astype(np.float64))
                worst = 0.0 if not gap.size else float(gap.max()) if np.isfinite(gap).all() else np.inf
                moved[i] = max(moved[i], worst)
        return [float(m) for m in moved]


def _disturbed(array: Array, rng: np.random.Generator, units: float) -> Array:
    if array.dtype.name not in FLOATS:
        return array
    factor = 1 + units * EPSILON[array.dtype.name] * rng.uniform(-1, 1, size=array.shape)
    return (array.astype(np.float64) * factor).astype(array.dtype)


def _tapped(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[str]]:
    tapped = onnx.ModelProto()
    tapped.CopyFrom(model)
    there = {value.name for value in model.graph.output}
    names = [name for node in model.graph.node for name in node.output if name and name not in there]
    tapped.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return tapped, names


def _disturb(model: onnx.ModelProto, values: Mapping[str, Array], rng: np.random.Generator) -> onnx.ModelProto:
    """Every float value in the main graph is multiplied by numbers within two units of rounding of one."""
    noisy = onnx.ModelProto()
    noisy.CopyFrom(model)
    graph = noisy.graph
    del graph.value_info[:]
    for tensor in graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.dtype.name in ("float32", "float64", "float16") and not tensor.name.startswith("clamp.mask"):
            tensor.CopyFrom(numpy_helper.from_array(_disturbed(array, rng, 2.0), tensor.name))
    nodes: list[onnx.NodeProto] = []
    for node in list(graph.node):
        source = values.get(node.input[0]) if node.op_type == "Cast" else None
        rounded = values.get(node.output[0]) if node.op_type == "Cast" else None
        if source is not None and rounded is not None and rounded.dtype.name == "bfloat16":
            # onnxruntime multiplies no bfloat16: what is rounded to it is disturbed before
            factor = 1 + 2 * EPSILON["bfloat16"] * rng.uniform(-1, 1, size=source.shape)
            name = f"{node.output[0]}.rough"
            graph.initializer.append(numpy_helper.from_array(np.asarray(factor, source.dtype), f"{name}.noise"))
            nodes.append(helper.make_node("Mul", [node.input[0], f"{name}.noise"], [name]))
            node.input[0] = name
        nodes.append(node)
        for i, name in enumerate(node.output):
            array = values.get(name)
            if array is None or array.dtype.name not in ("float32", "float64", "float16") or node.op_type == "Constant":
                continue
            inner = f"{name}.plain"
            node.output[i] = inner
            ones = _disturbed(np.ones(array.shape, array.dtype), rng, 2.0)
            graph.initializer.append(numpy_helper.from_array(ones, f"{name}.noise"))
            nodes.append(helper.make_node("Mul", [inner, f"{name}.noise"], [name]))
    del graph.node[:]
    graph.node.extend(nodes)
    return noisy


def numbers_in(model: onnx.ModelProto, original: onnx.ModelProto | None = None) -> tuple[int, int, int]:
    """The numbers that a model holds, in three counts, all of which must grow before it has grown.

    The first has the numbers of weights, those of quantised weights too, in larger tensors that outputs need: the sizes and
    indices of a Reshape or Gather that a fold puts in are of other types, and no growth. The second has every number that outputs need: a fold may cut indices
    short, or take in a single number; numbers of a few bits count one by one, not by the bytes of their blocks. The third has
    every number in the file, but for single ones that are not in the `original`: a fold may cut short what nobody reads, and put those in.
    """
    graph = _needed(model.graph)
    needed = _tensors(graph)
    packed = {
        node.input[1]: _number(node, "K") * _number(node, "N") for node in graph.node if node.op_type == "MatMulNBits"
    }
    kinds = onnx.TensorProto
    wanted = (kinds.FLOAT, kinds.FLOAT16, kinds.DOUBLE, kinds.BFLOAT16, kinds.BOOL)
    wanted += (kinds.INT8, kinds.UINT8, kinds.INT16, kinds.UINT16, kinds.INT4, kinds.UINT4)
    sizes = [(packed.get(tensor.name, int(np.prod(tensor.dims))), tensor.data_type in wanted) for tensor in needed]
    counted = {tensor.name for tensor in _tensors((original or model).graph)}
    whole = [(tensor.name, int(np.prod(tensor.dims))) for tensor in _tensors(model.graph)]
    everything = sum(size for name, size in whole if size > 1 or name in counted)
    return sum(size for size, counts in sizes if counts and size > 1), sum(size for size, _ in sizes), everything


def _number(node: onnx.NodeProto, name: str) -> int:
    return next(int(attribute.i) for attribute in node.attribute if attribute.name == name)


def _tensors(graph: onnx.GraphProto) -> list[onnx.TensorProto]:
    """Initialisers and constants, those of subgraphs too."""
    tensors = list(graph.initializer)
    for node in graph.node:
        for attribute in node.attribute:
            tensors += [attribute.t] if attribute.type == AttributeProto.TENSOR else []
            bodies = [attribute.g] if attribute.type == AttributeProto.GRAPH else list(attribute.graphs)
            tensors += [tensor for body in bodies for tensor in _tensors(body)]
    return tensors


def _needed(graph: onnx.GraphProto) -> onnx.GraphProto:
    """A graph without what no output reads: a runtime leaves it out as well."""
    read, nodes = {output.name for output in graph.output}, []
    for node in reversed(graph.node):
        if read & set(node.output):
            nodes.append(node)
            read |= _reads(node)
    return onnx.GraphProto(node=nodes, initializer=[tensor for tensor in graph.initializer if tensor.name in read])


def _reads(node: onnx.NodeProto) -> set[str]:
    """The names that a node and the bodies of its subgraphs read."""
    bodies = [a.g for a in node.attribute if a.type == AttributeProto.GRAPH]
    return (
        set(node.input)
        .union(*({o.name for o in body.output} for body in bodies))
        .union(*(_reads(inner) for body in bodies for inner in body.node))
    )


def raw(error: BaseException) -> Outcome:
    """An exception that is no CmrcError, with where it came from."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    where = " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames))
    return Outcome("raw", f"{type(error).__name__}: {error} at {where}")
