"""Does a lowered model compute what the literally clamped one computes? Every output is compared, and judged by real rounding.

    error     = max |lowered − clamped| / max |clamped|       per output, the largest over all batches
    rounding  = max |nudged − clamped| / max |clamped|        with the inputs moved by their last bit
    tolerance = ROUNDINGS · rounding, between a tenth and ten times what its precision usually needs

A lowered model adds the same numbers in another order, so every layer rounds differently. The same happens to the
clamped model itself when its inputs move by the last bit. An error of the compiler must stand out from that noise.

    folded    = max |lowered − clamped| / max |clamped|       where both are computed in float64, by the meanings of the IR

In float64 almost nothing is rounded, so a wrong fold shows that float32 would hide. This is computed for the rewritten
graph, on one batch, if every op has a meaning, none of them jumps, and the work is small (`folded_apart`). Quantised
models are handled separately (`steps.py`).

Moving inputs does not show all rounding: a norm of constant units divides the last bit of their mean by almost nothing.
So if the two differ more than that, the clamped model is also computed in float64 (`exactly`). The two may then differ
by twice the error of the clamped model itself, since each of them may have that error. If float64 cannot be computed,
they may differ by twice the rounding that moved inputs show.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from cmrc.errors import CheckError
from cmrc.hosts.protocols import Host
from cmrc.ir.cost import cost
from cmrc.ir.evaluate import evaluate, keeps_numbers
from cmrc.ir.graph import Array, Do, Graph, as_dtype, attributes
from cmrc.ir.spec import FunctionAttrs
from cmrc.ir.tensors import is_computable
from cmrc.passes.pipeline import put_dos
from cmrc.program.sites import Sites
from cmrc.program.steps import pairs_between_steps

Inputs: TypeAlias = Sequence[Any] | Mapping[str, Any]

# How far lowered and clamped differ by rounding in the model's own precision, relative to the output's scale.
USUAL = {"float64": 1e-10, "float32": 1e-5, "float16": 1e-2, "bfloat16": 8e-2}
ROUNDINGS = 16
NUDGES = 2
FOLDED = 1e-9  # how far they may differ in float64: a norm of values near zero makes 1e-16 large
FOLDED_IN_STEPS = 2.0**-22  # the same if biases are whole numbers: their scale, the product of two scales, is a float32
WORK = 10**9  # multiply-accumulates of one batch that numpy computes in seconds
JUMPING = frozenset({  # functions that turn a change of the last bit into a large one
    "sign", "floor", "ceil", "round", "quantize", "fmod", "equal", "not_equal", "greater", "greater_equal", "less", "less_equal",
    "argmax", "argmin", "hardmax", "max_pool_indices", "shrink", "threshold", "thresholded_relu", "isnan", "isinf",
})  # fmt: skip
REVIEWED = 8  # batches that are judged again in float64; if more are in question, the result is wrong


@dataclass(frozen=True, slots=True)
class OutputCheck:
    """One output: the largest error over all batches, how much of it rounding explains, and how far the replacement itself moved it."""

    name: str
    error: float
    tolerance: float
    moved: float
    rounding: float
    same: int = 0  # answers with the top class of the original
    answers: int = 0  # 0 if the output has no axis of classes
    exact: bool = False  # whether the rounding is the distance between the clamped model and itself in float64


@dataclass(frozen=True, slots=True)
class Check:
    """Lowered against literally clamped. The numbers are those of the output that is closest to its tolerance."""

    outputs: tuple[OutputCheck, ...]
    batches: int
    retrained: tuple[str, ...] = ()  # weights that were changed after lowering: the two need not be equal
    recovered: bool = False  # it was trained towards the original after lowering: the two need not be equal
    stored: tuple[str, ...] | None = None  # weights whose numbers differ from the fold's; None: not compared
    folded: float | None = None  # how far the two differ in float64, relative to the output's scale; None: not compared
    steps: bool = (
        False  # whether the model rounds to steps: in float64, the values before the rounding are compared too
    )

    @property
    def worst(self) -> OutputCheck:
        return max(self.outputs, key=lambda output: output.error / max(output.tolerance, np.finfo(float).tiny))

    @property
    def error(self) -> float:
        """The largest difference relative to the largest number of the output."""
        return self.worst.error

    @property
    def tolerance(self) -> float:
        return self.worst.tolerance

    @property
    def rounding(self) -> float:
        """How far the clamped model's outputs move when its inputs change by their last bit."""
        return self.worst.rounding

    @property
    def moved(self) -> float:
        """How far the replacement itself moved the outputs, on the same scale."""
        return max(output.moved for output in self.outputs)

    @property
    def answers(self) -> int:
        """How many answers were compared with the original: rows of the first output that can be read as classes."""
        return self._classes.answers if self._classes else 0

    @property
    def agreement(self) -> float | None:
        """The share of answers that have the top class of the *original*: this measures quality, all other numbers measure exactness."""
        return self._classes.same / self._classes.answers if self._classes else None

    @property
    def _classes(self) -> OutputCheck | None:
        return next((output for output in self.outputs if output.answers), None)

    @property
    def _against(self) -> str:
        return ", against float64" if self.worst.exact else ""

    @property
    def holds(self) -> bool:
        close = all(output.error <= output.tolerance for output in self.outputs)
        return close and not self.stored and (self.folded is None or self.folded <= self._folded_allowed)

    @property
    def _folded_allowed(self) -> float:
        return FOLDED_IN_STEPS if self.steps else FOLDED

    def __str__(self) -> str:
        verdict = "equal" if self.holds else "NOT equal"
        where = f" at {self.worst.name}, the worst of {len(self.outputs)} outputs," if len(self.outputs) > 1 else ""
        batches = f" on {self.batches} batches" if self.batches > 1 else ""
        text = (
            f"lowered and clamped are {verdict}{batches}: they differ{where} by {self.error:.2e} of the output's scale "
            f"(allowed {self.tolerance:.0e}, the clamped model's own rounding {self.rounding:.2e}{self._against}); "
            f"the replacement itself moves it by {self.moved:.2e}"
        )
        if self.folded is not None:
            text += f"; in float64 they differ by {self.folded:.1e} (allowed {self._folded_allowed:.0e})"
        if self.stored:
            name, *more_names = self.stored
            others_too = f" and {len(more_names)} more" if more_names else ""
            text += f"\nthe file's numbers differ from what folding this plan gives, in {name}{others_too}"
        if self.recovered and not self.holds:
            return (
                f"{text}\ncompared are the plan and a recovered model, which was trained towards the original after lowering: it "
                "no longer computes what the plan says, and need not be equal. Judge it with verify, on held-out data"
            )
        if not self.retrained:
            return text
        first, *others = self.retrained
        more = f" and {len(others)} more" if others else ""
        return (
            f"{text}\nthe weights of lowered.module were changed after lowering ({first}{more}): it no longer "
            "computes what the plan says, and need not be equal"
        )


def check_batches(
    original: Host,
    clamped: Host,
    lowered: Host,
    batches: Iterable[Inputs],
    *,
    tolerance: float | None = None,
    nudged: Callable[[], Host] | None = None,
    exactly: Callable[[Mapping[str, Array]], list[Array]] | None = None,
    anew: Callable[[], Iterable[Host]] | None = None,
    seed: int = 0,
) -> Check:
    """Compare every output on every batch. `nudged` makes the clamped model with constants moved by their last bit
    (`nudged_host`): it shows the rounding of a model whose inputs are whole numbers. `exactly` is the clamped model in
    float64 (`clamped_in_float64`), for batches on which the two differ more. `anew` is the clamped model whose
    roundings to steps are decided again (`rounded_anew`)."""
    rng = np.random.default_rng(seed)
    rows, questioned = [], list[Questioned]()
    for inputs in batches:
        expected = clamped.run(inputs)
        results, plain = lowered.run(inputs), original.run(inputs)
        _require_alike(expected, results)
        others = list(_nudged_runs(clamped, inputs, nudged, rng))
        measured = [
            _measure(want, got, before, [other[i] for other in others])
            for i, (want, got, before) in enumerate(zip(expected, results, plain, strict=True))
        ]
        rows.append(measured)
        if any(m[0] > USUAL.get(m[3], 0.0) / 10 for m in measured) and len(questioned) <= REVIEWED:
            questioned.append(Questioned(inputs, expected, results))
    if not rows or not rows[0]:
        raise CheckError("there is nothing to compare", fix="give at least one batch, and a model with outputs")
    names = original.graph.outputs
    outputs = []
    for i, measures in enumerate(zip(*rows, strict=True)):
        error, moved, rounding = np.max([m[:3] for m in measures], axis=0).tolist()
        usual = USUAL.get(measures[0][3], 0.0)
        allowed = min(max(ROUNDINGS * rounding, usual / 10), usual * 10) if rounding else usual
        name = names[i] if len(names) == len(rows[0]) else f"output {i}"
        same, answers = np.sum([m[4:] for m in measures], axis=0).tolist()
        allowed = allowed if tolerance is None else tolerance
        outputs.append(OutputCheck(name, error, allowed, moved, rounding, same, answers))
    if exactly is not None and tolerance is None and not all(o.error <= o.tolerance for o in outputs):
        outputs = _judged_again(outputs, clamped, questioned, exactly)
    if anew is not None and tolerance is None and not all(o.error <= o.tolerance for o in outputs):
        outputs = _judged_by_steps(outputs, questioned, anew())
    return Check(tuple(outputs), len(rows))


@dataclass(frozen=True, slots=True)
class Questioned:
    """A batch on which lowered and clamped are not close, with the outputs of both."""

    inputs: Inputs
    expected: Sequence[Array]
    results: Sequence[Array]


def _judged_again(
    outputs: Sequence[OutputCheck],
    clamped: Host,
    batches: Sequence[Questioned],
    exactly: Callable[[Mapping[str, Array]], list[Array]],
) -> list[OutputCheck]:
    """The outputs that differ too much, judged by how far the clamped model is from itself in float64 on the same batches."""
    if len(batches) > REVIEWED:
        return list(outputs)
    roundings, explained = np.zeros(len(outputs)), np.ones(len(outputs), dtype=bool)
    for batch in batches:
        try:
            truths = exactly(clamped.bind(batch.inputs))
        except Exception:  # an op that only its host can run, or a size that its meaning does not support
            return [replace(o, tolerance=max(o.tolerance, 2 * o.rounding)) for o in outputs]
        for i, (truth, want, got) in enumerate(zip(truths, batch.expected, batch.results, strict=True)):
            if want.dtype.kind in "biu" or not want.size or not (np.isfinite(truth).all() and np.isfinite(got).all()):
                explained[i] = False
                continue
            scale = float(np.abs(want).max()) or 1.0
            error, rounding = (float(np.abs(array - want.astype(np.float64)).max()) / scale for array in (got, truth))
            roundings[i] = max(roundings[i], rounding)
            explained[i] &= error <= max(2 * rounding, outputs[i].tolerance)
    return [
        replace(output, tolerance=max(output.tolerance, 2 * float(rounding)), rounding=float(rounding), exact=True)
        if output.error > output.tolerance and fine
        else output
        for output, rounding, fine in zip(outputs, roundings, explained, strict=True)
    ]


def _judged_by_steps(
    outputs: Sequence[OutputCheck], batches: Sequence[Questioned], hosts: Iterable[Host]
) -> list[OutputCheck]:
    """The outputs that differ too much, judged by how far the clamped model moves when its roundings to steps are decided again."""
    if len(batches) > REVIEWED:
        return list(outputs)
    moves = np.zeros(len(outputs))
    for host in hosts:
        for batch in batches:
            for i, (want, other) in enumerate(zip(batch.expected, host.run(batch.inputs), strict=True)):
                if want.dtype.kind not in "biu" and want.size:
                    gap = np.abs(other.astype(np.float64) - want.astype(np.float64)).max()
                    moves[i] = max(moves[i], float(gap) / (float(np.abs(want).max()) or 1.0))
    return [
        replace(o, rounding=max(o.rounding, float(move)), tolerance=max(o.tolerance, 2 * float(move)))
        if o.error > o.tolerance
        else o
        for o, move in zip(outputs, moves, strict=True)
    ]


def _require_alike(expected: Sequence[Array], results: Sequence[Array]) -> None:
    if len(expected) != len(results):
        raise CheckError(f"the lowered model has {len(results)} outputs, the clamped one {len(expected)}")
    for want, got in zip(expected, results, strict=True):
        if want.shape != got.shape:
            raise CheckError(f"the lowered model gives shape {list(got.shape)}, the clamped one {list(want.shape)}")
        if want.dtype != got.dtype:
            raise CheckError(f"the lowered model gives {got.dtype.name}, the clamped one {want.dtype.name}")


def _measure(
    want: Array, got: Array, before: Array, others: Sequence[Array]
) -> tuple[float, float, float, str, int, int]:
    """Error, movement and rounding of one output for one batch, its precision, and how many answers equal the original's."""
    if want.dtype.kind in "biu" or not want.size:
        return (
            float(np.any(want != got)),
            float(want.shape != before.shape or np.any(want != before)),
            max((float(np.any(want != other)) for other in others), default=0.0),
            want.dtype.name,
            0,
            0,
        )
    reference = want.astype(np.float64)
    if not np.isfinite(reference).all():
        raise CheckError(
            "the clamped model gives NaN or infinity here", fix="check on inputs for which the model is finite"
        )
    scale = float(np.abs(reference).max()) or 1.0

    def apart(array: Array) -> float:
        """The largest deviation; NaN counts as infinitely far."""
        return float(np.nan_to_num(np.abs(array.astype(np.float64) - reference), nan=np.inf).max()) / scale

    rounding = max((apart(other) for other in others), default=0.0)
    return apart(got), apart(before), rounding, want.dtype.name, *_same_classes(got, before)


def _same_classes(got: Array, before: Array) -> tuple[int, int]:
    """Answers with the same top class along the last axis, and how many there are."""
    if got.ndim < 2 or got.shape[-1] < 2 or got.shape != before.shape:
        return 0, 0
    same = got.argmax(-1) == before.argmax(-1)
    return int(same.sum()), same.size


# ---------------------------------------------------------------- rounding


def _nudged_runs(
    clamped: Host, inputs: Inputs, nudged: Callable[[], Host] | None, rng: np.random.Generator
) -> Iterator[list[Array]]:
    """The outputs of the clamped model for inputs that differ in the last bit."""
    bound = clamped.bind(inputs)
    if set(bound) == set(clamped.inputs) and any(_is_floating(array) for array in bound.values()):
        for _ in range(NUDGES):
            yield clamped.run({name: nudge(array, rng) for name, array in bound.items()})
    elif nudged is not None:
        yield nudged().run(inputs)


def _is_floating(array: Array) -> bool:
    return array.dtype.kind == "f" or array.dtype.name == "bfloat16"


def nudge(array: Array, rng: np.random.Generator) -> Array:
    """Every number moved by its last bit, up or down. Zeros stay, since a step away from zero is not rounding."""
    if not _is_floating(array):
        return array
    ends = np.where(rng.integers(0, 2, array.shape) == 1, np.inf, -np.inf).astype(array.dtype)
    moved: Array = np.where(array == 0, array, np.nextafter(array, ends))
    return moved


def nudged_host(sites: Sites, entries: Sequence[Do]) -> Host:
    """The clamped model with the constants of its do's moved by their last bit."""
    rng, values = np.random.default_rng(0), sites.values
    moved = [
        replace(entry, constant=nudge(as_dtype(entry.constant, values[entry.value].dtype), rng).astype(np.float64))
        for entry in entries
    ]
    return sites.host.build(put_dos(sites.graph, moved))


def clamped_in_float64(sites: Sites, entries: Sequence[Do]) -> Callable[[Mapping[str, Array]], list[Array]]:
    """The outputs of the clamped model by the meanings of the IR. An op that only its host can run is an error."""
    return _in_float64(put_dos(sites.graph, entries))


def _in_float64(whole: Graph) -> Callable[[Mapping[str, Array]], list[Array]]:

    def run(inputs: Mapping[str, Array]) -> list[Array]:
        graph = _computed(whole)
        values = evaluate(graph, inputs)
        return [values[name] for name in graph.outputs]

    return run


def _computed(whole: Graph) -> Graph:
    """What the meanings compute, or an error."""
    graph = _read_by_outputs(whole)
    if not all(is_computable(node) for node in graph.nodes):
        raise CheckError("the model has ops that only its host can run")
    return graph


def _read_by_outputs(whole: Graph) -> Graph:
    """Without values of which only the size is read, which have no meaning here."""
    read, nodes = set(whole.outputs), []
    for node in reversed(whole.nodes):
        if read & {value.name for value in node.outputs}:
            read.update(node.values())
            nodes.append(node)
    return replace(whole, nodes=tuple(reversed(nodes)))


def folded_apart(sites: Sites, entries: Sequence[Do], lowered: Graph, inputs: Mapping[str, Array]) -> float | None:
    """How far the rewritten graph is from the clamped one when both are computed in float64; `None` if that cannot be computed."""
    whole = put_dos(sites.graph, entries)
    samples = max((array.shape[0] for array in inputs.values() if array.ndim), default=1)
    casts = _rounding_casts(whole)
    rounds_anew = _rounding_casts(lowered) - casts
    if rounds_anew or _jumping_behind_a_do(whole, casts) - {"quantize"} or samples * cost(sites.graph).macs > WORK:
        return None
    try:
        with (
            warnings.catch_warnings(),
            np.errstate(all="ignore"),
        ):  # from sizes of 0, and from values that are not numbers
            warnings.simplefilter("ignore")
            pairs = list(pairs_between_steps(_computed(whole), _computed(lowered), inputs))
    except Exception:  # an op that only its host can run, or a size that its meaning does not support
        return None
    apart = 0.0
    for want, array in pairs:
        if want.dtype.kind != "f" or not want.size:
            continue
        if not np.isfinite(want).all():
            return None
        gap = np.nan_to_num(np.abs(array - want), nan=np.inf).max() / (np.abs(want).max() or 1.0)
        apart = max(apart, float(gap))
    return apart


def _rounding_casts(graph: Graph) -> set[str]:
    """The casts that round. A half-precision norm that is taken apart has new ones."""
    dtypes = {name: value.dtype for name, value in graph.values().items()}
    casts = [n for n in graph.nodes if n.op == "pointwise" and attributes(n, FunctionAttrs)["fn"] == "cast"]
    return {node.name for node in casts if node.output.dtype != "float64" and not keeps_numbers(node, dtypes)}


def _jumping_behind_a_do(graph: Graph, casts: Collection[str]) -> set[str]:
    """The functions that turn a change of the last bit into a large one, or casts that round, that read what a replacement moved."""
    moved, jumping = set[str](), set[str]()
    for node in graph.nodes:
        if node.op != "do" and not any(name in moved for name in node.values()):
            continue
        moved.update(value.name for value in node.outputs)
        fn = attributes(node, FunctionAttrs)["fn"] if node.op in ("pointwise", "along") else ""
        if node.name in casts or fn in JUMPING:
            jumping.add(fn)
    return jumping
