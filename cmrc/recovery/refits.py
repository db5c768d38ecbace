"""Least squares before gradients: every affine op of a lowered model is fitted to what the original computes there.

    original   x  ─> op  ─> y
    lowered    x' ─> op' ─> y'      W', b' with the least Σ ‖W' x' + b' − y‖², from the first op to the last

x' is what the ops fitted before it make. Where y is added to a stream that has lost something already, y corrects for that too:
its target is y + (stream − stream'). The result is a change of the weights that are there, with a ridge that half of the data
choose for the other half; one of the choices is no change. Every op of either model runs once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cmrc.hosts.protocols import Host
from cmrc.ir.axes import product
from cmrc.ir.graph import Array, Graph
from cmrc.passes.interchange import cut
from cmrc.program.program import Program
from cmrc.recovery.affine import Refit, refits
from cmrc.recovery.lessons import LABELS, Part, Pool
from cmrc.verification.pieces import Part as Piece
from cmrc.verification.pieces import parts_of

ROWS = 16  # for each number that an output is made from
FEWEST = 2048  # rows
SAMPLES = 512
BYTES = 2**29  # of the widest value of all samples
RIDGES = (*(10.0**e for e in range(-6, 2)), np.inf)  # of each input's own power; with the last nothing changes
TINY = 1e-12


@dataclass(slots=True, eq=False)
class TaughtRows:
    """Some rows of an op's result, batch by batch: where they lie, and what the original has there."""

    shapes: list[tuple[int, ...]] = field(default_factory=list)
    places: list[Array] = field(default_factory=list)
    taught: list[list[Array]] = field(default_factory=list)  # y, and what it is added to


def refitted(
    original: Host, small: Host, pool: Pool, chosen: Collection[str], *, mask: str = "", seed: int = 0
) -> dict[str, Array]:
    """The parameters that least squares find. `mask` names an input that says which positions count."""
    ops = refits(original.graph, small.graph, chosen)
    if not ops:
        return {}
    given = [rows.arrays for rows in pool.limited(_samples(pool, original.graph)).in_order()]
    batches = [{name: part[name] for name in part if name != LABELS or name in small.inputs} for part in given]
    rows = _taught(original, ops, batches, mask, seed)
    return _Way(small, ops, rows).go(batches)


def _samples(pool: Pool, graph: Graph) -> int:
    widest = max(product(value.shape[1:])[0] for value in graph.values().values() if len(value.shape) > 1)
    return max(pool.size, min(SAMPLES, BYTES // (4 * int(widest))))


def _taught(
    original: Host, ops: Sequence[Refit], batches: Sequence[Part], mask: str, seed: int
) -> dict[str, TaughtRows]:
    """What the original computes on the data, at some places of every op."""
    taps = tuple(dict.fromkeys(name for op in ops for name in op.taught()))
    run, rows_of = original.runner(), {op.node.name: TaughtRows() for op in ops}
    for number, batch in enumerate(batches):
        outputs = run(batch, taps)
        seen = dict(zip(taps, outputs[len(outputs) - len(taps) :], strict=True))
        for i, op in enumerate(ops):
            result, rows = seen[op.node.name], rows_of[op.node.name]
            rng = np.random.default_rng([seed, i, number])
            places = _places(result.shape, op, batch.get(mask), -(-op.rows(ROWS, FEWEST) // len(batches)), rng)
            rows.places.append(places)
            rows.shapes.append(result.shape)
            values = [op.outputs_at(seen[name], places) for name in op.taught()]
            rows.taught.append([values[0][:, op.kept], *values[1:]])
    return rows_of


def _places(shape: tuple[int, ...], op: Refit, mask: Array | None, most: int, rng: np.random.Generator) -> Array:
    """Some rows of a result, among those that count."""
    rows = shape[: op.axis] + shape[op.axis + 1 :]
    counted = np.arange(int(np.prod(rows)))
    if mask is not None and mask.shape == rows:
        counted = np.flatnonzero(mask)
    return np.sort(rng.choice(counted, min(most, len(counted)), replace=False))


@dataclass(slots=True, eq=False)
class _Way:
    """From the first op of the lowered model to the last, with the values of all batches that later ops read."""

    small: Host
    ops: Sequence[Refit]
    rows: Mapping[str, TaughtRows]
    fitted: dict[str, Array] = field(default_factory=dict)

    def go(self, batches: Sequence[Part]) -> dict[str, Array]:
        sites = list(dict.fromkeys(op.x for op in self.ops))
        graph_cut = cut(self.small.graph, sites)
        parts = parts_of(Program(self.small), graph_cut, max(graph_cut.levels.values()) + 1)
        live = [self.small.bind(batch) for batch in batches]
        host = self.small
        for level, part in enumerate(parts):
            piece = part if not level else Piece.make(host, part.inputs, part.outputs, part.beyond)
            here = [op for op in self.ops if graph_cut.levels[op.x] == level and op.x not in graph_cut.free]
            later = {name for each in parts[level + 1 :] for name in (*each.inputs, *each.sizes)}
            later |= {op.stream.other for op in self.ops if op.stream is not None and graph_cut.levels[op.x] >= level}
            for i, values in enumerate(live):
                new = piece.runner.run(values) if piece.runner else {}
                live[i] = {**values, **new}
            for op in here:
                self._fit(op, live)
            live = [{name: array for name, array in values.items() if name in later} for values in live]
            if here and self.fitted:
                host = self.small.with_parameters(self.fitted)
        return self.fitted

    def _fit(self, op: Refit, live: Sequence[Mapping[str, Array]]) -> None:
        rows = self.rows[op.node.name]
        matrix = op.matrix(op.weight.load().astype(np.float64))
        start = np.zeros(1) if op.bias is None else op.bias.load().astype(np.float64)
        inputs, missing = [], []
        for values, shape, places, taught in zip(live, rows.shapes, rows.places, rows.taught, strict=True):
            x = op.inputs_at(values[op.x], places, shape).astype(np.float64)
            lacks = taught[0] - op.answer(x, matrix)
            if op.stream is not None and op.stream.other in values:
                lost = taught[1] - op.outputs_at(values[op.stream.other], places)
                lacks = lacks + lost / (
                    1.0 if op.scale is None else np.where(np.abs(op.scale) > TINY, op.scale, np.inf)
                )
            inputs.append(x)
            missing.append(lacks)
        change = least_squares(np.concatenate(inputs), op.grouped(np.concatenate(missing)), op.bias is not None)
        if change is None:
            return
        weight, shift = change
        self.fitted[op.weight.name] = op.stored(matrix + weight).astype(op.weight.load().dtype)
        if op.bias is not None:
            self.fitted[op.bias.name] = op.shifted(start, shift).astype(op.bias.load().dtype)


# ---------------------------------------------------------------- least squares


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Of inputs [groups, inputs] and what is missing [groups, outputs]: means, and sums of products about them."""

    count: int
    mean: Array
    aim: Array
    among: Array
    cross: Array

    @classmethod
    def of(cls, x: Array, missing: Array, centred: bool) -> Moments:
        mean, aim = (array.mean(0) if centred else np.zeros(array.shape[1:]) for array in (x, missing))
        a, b = (np.ascontiguousarray((array - m).swapaxes(0, 1)) for array, m in ((x, mean), (missing, aim)))
        return cls(len(x), mean, aim, a.swapaxes(1, 2) @ a / len(x), a.swapaxes(1, 2) @ b / len(x))


def least_squares(x: Array, missing: Array, centred: bool) -> tuple[Array, Array] | None:
    """A matrix [groups, inputs, outputs] and a shift [groups, outputs] that make of x what is missing; None if nothing does so on held-out rows.

    Along the eigenvectors of the scaled moments a ridge is a factor, so one decomposition serves all ridges.
    """
    halves = [
        Moments.of(part, aim, centred)
        for part, aim in zip(np.array_split(x, 2), np.array_split(missing, 2), strict=True)
    ]
    errors = np.zeros(len(RIDGES))
    for own, other in (halves, halves[::-1]):
        for i, weight in enumerate(_by_ridge(own, RIDGES)):
            if weight is not None:
                errors[i] += float(np.einsum("gio,gij,gjo->", weight, other.among, weight, optimize=True))
                errors[i] -= 2 * float((weight * other.cross).sum())
    best = int(errors.argmin())
    whole = Moments.of(x, missing, centred)
    weight = _by_ridge(whole, RIDGES[best : best + 1])[0]
    if weight is None:
        return None
    return weight, whole.aim - np.einsum("gi,gio->go", whole.mean, weight)


def _by_ridge(moments: Moments, ridges: Sequence[float]) -> list[Array | None]:
    power = np.sqrt(np.maximum(np.einsum("gii->gi", moments.among), 0.0))
    power = np.where(power > 0, power, 1.0)
    values, vectors = np.linalg.eigh(moments.among / (power[:, :, None] * power[:, None, :]))
    basis = vectors / power[:, :, None]
    right = basis.swapaxes(1, 2) @ moments.cross
    return [
        basis @ (right / (np.maximum(values, 0.0) + ridge)[:, :, None]) if np.isfinite(ridge) else None
        for ridge in ridges
    ]
