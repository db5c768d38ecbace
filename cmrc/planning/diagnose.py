"""How far the scores can be trusted: what they leave out, how large that can be, and how well they predict.

coupling      ρ_off = ‖H − diag H‖_F / ‖H‖_F of blocks of units, and the bound on adding up single scores   (prop. offdiag)
remainder     the third-order term that the quadratic leaves out: κ, spectral norms by power iteration      (prop. remainder)
kinks         on how many samples a replacement crosses a ReLU's kink, where that bound does not hold       (ass. bounded-relu)
predictions   predicted against measured change of the loss, unit by unit
sensitivity   how much the kept set depends on which half of the data was calibrated on
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import softmax
from scipy.stats import spearmanr

from cmrc.errors import StatsError
from cmrc.hosts.protocols import Host
from cmrc.ir.axes import complement
from cmrc.ir.graph import Array, Node, Tensor, attributes
from cmrc.ir.ops.affine import LinearAttrs
from cmrc.ir.ops.functions import PointwiseAttrs
from cmrc.ir.tensors import constant
from cmrc.planning.objectives import constant_risk, optimal_constant
from cmrc.planning.ranking import rank
from cmrc.planning.recipe import Recipe
from cmrc.program.plan import Plan
from cmrc.program.program import Program
from cmrc.statistics.batches import as_array, batches
from cmrc.statistics.calibrate import calibrate
from cmrc.statistics.columns import Columns
from cmrc.statistics.site_stats import SiteStats
from cmrc.statistics.stats import Stats

# The largest third derivative of cross-entropy along any unit vector of logits: |Σp(v−v̄)³| for p on two classes, v = (1, −1)/√2
# gives 2^(3/2) max q(1−q)|1−2q| = 2^(3/2)/(6√3).
KAPPA = {"cross-entropy": 2**1.5 / (6 * 3**0.5), "kl": 2**1.5 / (6 * 3**0.5), "logit": 0.0, "squared-error": 0.0}


SPANNED = 1e-9  # of the largest: directions of perturbations below it are rounding


@dataclass(frozen=True, slots=True)
class Coupling:
    """Of one block: ρ_off, the norm of its curvature, and μ: the least δᵀHδ/δᵀδ of the perturbations considered (κ_F = ‖H‖_F / μ)."""

    units: tuple[int, ...]
    ratio: float
    norm: float
    smallest: float

    def bound(self, delta: Array) -> float:
        """|½δᵀHδ − ½δᵀDδ| ≤ ½ ρ_off ‖H‖_F ‖δ‖²."""
        return 0.5 * self.ratio * self.norm * float(delta @ delta)

    @property
    def relative(self) -> float:
        """ρ_off κ_F: the same as a part of ½δᵀHδ; infinite where H is singular."""
        return self.ratio * self.norm / self.smallest if self.smallest > 1e-12 * self.norm else np.inf


def coupling_of(curvature: Array, units: Sequence[int], perturbations: Array | None = None) -> Coupling:
    """ρ_off(B) = ‖H_B − diag H_B‖_F / ‖H_B‖_F of one block; 0 where H_B = 0 (paper prop. offdiag-additivity).

    μ is taken on the span of `perturbations` [n, block], else on all of the block: its smallest eigenvalue, 0 where there are fewer
    logits than units.
    """
    block = curvature[np.ix_(units, units)]
    norm = float(np.linalg.norm(block))
    apart = float(np.linalg.norm(block - np.diag(block.diagonal())))
    seen = block
    if perturbations is not None:
        _, size, directions = np.linalg.svd(np.atleast_2d(perturbations), full_matrices=False)
        span = directions[size > SPANNED * max(float(size.max(initial=0.0)), np.finfo(np.float64).tiny)]
        seen = span @ block @ span.T
    smallest = float(np.linalg.eigvalsh(seen).min()) if norm and len(seen) else 0.0
    return Coupling(tuple(int(u) for u in units), apart / norm if norm else 0.0, norm, smallest)


def coupling(stats: SiteStats, *, size: int = 32, blocks: int = 50, seed: int = 0) -> list[Coupling]:
    """Random blocks of units, by the mean Gauss-Newton matrix of the site (need "coupling").

    With rows (need "rows") μ is that of the perturbations ā − a which mean replacement makes on them.
    """
    curvature = stats.wanted("H", "coupling") / stats.samples
    rng, width = np.random.default_rng(seed), len(curvature)
    chosen = [np.sort(rng.permutation(width)[: min(size, width)]) for _ in range(blocks)]
    rows = stats.arrays.get("rows")
    away = None if rows is None else stats.mean - rows
    return [coupling_of(curvature, units.tolist(), None if away is None else away[:, units]) for units in chosen]


# ---------------------------------------------------------------- the third order


def spectral_norm(matrix: Array, *, steps: int = 100, seed: int = 0) -> float:
    """The largest singular value by power iteration on WᵀW, stopped where it no longer changes."""
    vector = np.random.default_rng(seed).normal(size=matrix.shape[1])
    norm = 0.0
    for _ in range(steps):
        vector = matrix.T @ (matrix @ (vector / np.linalg.norm(vector)))
        before, norm = norm, float(np.sqrt(np.linalg.norm(vector)))
        if abs(norm - before) <= 1e-12 * norm:
            break
    return norm


@dataclass(frozen=True, slots=True, eq=False)
class Remainder:
    """ρ of every unit, the bound on the error of its score, and the norms of the layers above that it was made of."""

    lipschitz: Array
    bound: Array
    norms: dict[str, float]


def remainder(program: Program, stats: SiteStats, constants: Array, *, loss: str = "cross-entropy") -> Remainder:
    """|R₃| ≤ ρ/6n ‖δ‖₂³, ρ_j ≤ κ L_j³, ‖δ‖² = n[(c − ā)² + Var a] (eq. rho-bound, layer-remainder).

    L_j bounds how far the logits move with the unit. In a chain it is the paper's Π ‖W_m‖ · ‖W_:,j‖; the branches of a sum add up. It
    holds for ReLU networks, along a segment that crosses no kink (see `kinks`), and for units that are one number of a sample: a channel
    moves its positions together, and its score leaves out the curvature between them, which is no third-order error.
    """
    if stats.columns.features > 1 or stats.count != stats.samples:
        raise StatsError(
            "the bound is for units that are one number of a sample",
            node=stats.columns.name,
            fix="use `predictions` instead",
        )
    growth, norms = _growth(program, stats.columns)
    lipschitz = KAPPA[loss] * growth**3
    squared = stats.count * ((constants - stats.mean) ** 2 + stats.variance)
    return Remainder(lipschitz, lipschitz / (6 * stats.count) * squared**1.5, norms)


def _growth(program: Program, columns: Columns) -> tuple[Array, dict[str, float]]:
    """L_j ≥ ‖∂z/∂a_j‖ of every unit between two kinks, and the spectral norms in it.

    linear           ‖W_:,j‖ of the units themselves, ‖W‖ L_j behind that
    batch norm, ×    the largest factor times L_j
    sum              Σ L_j of its branches
    ReLU, reshape    L_j
    """
    reached, single, norms = {columns.value: np.ones(columns.units)}, {columns.value}, {}
    for node in program.graph.nodes:
        arriving = [name for name in node.values() if name in reached]
        if not arriving:
            continue
        fn = attributes(node, PointwiseAttrs)["fn"] if node.op == "pointwise" else node.op
        first = arriving[0]
        if fn == "linear" and node.inputs[0] == first and isinstance(node.inputs[1], Tensor):
            weight = _matrix(node)
            if first in single and weight.shape[1] == columns.units:
                reached[node.name] = np.linalg.norm(weight, axis=0)
            else:
                norms[node.label] = spectral_norm(weight)
                reached[node.name] = norms[node.label] * reached[first]
        elif fn in ("relu", "identity", "reshape", "batch_norm") or (fn == "mul" and node.values() == [first]):
            reached[node.name] = _factor(node, fn) * reached[first]
            if first in single and fn in ("relu", "identity"):
                single.add(node.name)
        elif fn in ("add", "sub"):
            reached[node.name] = np.sum([reached[name] for name in arriving], axis=0)
        else:
            raise StatsError(
                "the bound is for networks of linear ops, ReLUs and sums",
                node=columns.name,
                op=node.kind,
                fix="use `predictions` instead",
            )
    return reached.get(program.graph.outputs[0], np.zeros(columns.units)), norms


def _factor(node: Node, fn: str) -> float:
    """The largest slope of a batch norm, or of a product with constants."""
    tensors = [constant(t).astype(np.float64) if isinstance(t, Tensor) else np.ones(1) for t in node.inputs[1:]]
    if fn == "batch_norm":
        gamma, _, _, variance = tensors
        return float(np.abs(gamma / np.sqrt(variance + attributes(node, PointwiseAttrs)["eps"])).max())
    if fn == "mul":
        return float(np.prod([np.abs(constant(t)).max() for t in node.inputs if isinstance(t, Tensor)]))
    return 1.0


def _matrix(node: Node) -> Array:
    weight, given = node.inputs[1], attributes(node, LinearAttrs)
    assert isinstance(weight, Tensor)
    matrix = given.get("alpha", 1.0) * constant(weight).astype(np.float64)
    return np.asarray(matrix if given["w_out"] == 0 else matrix.T)


@dataclass(frozen=True, slots=True, eq=False)
class Kinks:
    """For some units, alone: the share of samples on which moving the unit to its constant crosses a ReLU's kink."""

    units: tuple[int, ...]
    share: Array

    @property
    def holds(self) -> bool:
        """Whether the remainder's assumption holds on all samples seen."""
        return not self.share.any()


def kinks(program: Program, stats: SiteStats, constants: Array, data: Any, *, count: int = 16, seed: int = 0) -> Kinks:
    """Check on data what `remainder` assumes: that the way from a to c stays in one region of the ReLUs behind the site.

    Behind the site the first ReLU's operand moves along a straight line, so it crosses 0 on the way only if its signs at both ends differ;
    if none does, the next ReLU's operand moves along a straight line too. So the signs at both ends decide.
    """
    operands = [
        node.inputs[0]
        for node in program.graph.nodes
        if node.op == "pointwise"
        and attributes(node, PointwiseAttrs)["fn"] == "relu"
        and isinstance(node.inputs[0], str)
    ]
    width = stats.columns.units
    units = np.sort(np.random.default_rng(seed).permutation(width)[: min(count, width)])
    parts = list(batches(data, program.host.inputs))
    rows = sum(len(batch) for batch in parts)

    def signs(host: Host) -> list[Array]:
        return [
            np.concatenate([(host.run(b.inputs, [name])[-1] > 0).reshape(len(b), -1) for b in parts])
            for name in operands
        ]

    before = signs(program.host)
    share = []
    for unit in units:
        plan = Plan(program).do(stats.columns.value, units=[int(unit)], constant=float(constants[unit]))
        crossed = np.zeros(rows, dtype=bool)
        for one, other in zip(before, signs(program.clamped(plan)), strict=True):
            crossed |= (one != other).any(axis=1)
        share.append(float(crossed.mean()))
    return Kinks(tuple(int(u) for u in units), np.array(share))


# ---------------------------------------------------------------- predicted against measured


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """For some units, alone: what the quadratic predicts of the loss, and what clamping them really does."""

    units: tuple[int, ...]
    predicted: Array
    measured: Array

    @property
    def correlation(self) -> float:
        """Of the ranks (Spearman)."""
        return float(np.asarray(spearmanr(self.predicted, self.measured))[0])


def predictions(
    program: Program, stats: Stats, site: str, data: Any, *, count: int = 16, loss: str = "cross-entropy", seed: int = 0
) -> Predictions:
    """Clamp sampled units to their own c* (within the calibrated range), one at a time, and measure the loss on the data."""
    site_stats = stats[site]
    constants, _ = optimal_constant(site_stats)
    width = site_stats.columns.units
    units = np.sort(np.random.default_rng(seed).permutation(width)[: min(count, width)])
    predicted = site_stats.columns.by_unit(constant_risk(site_stats, constants)).sum(-1)[units]
    parts = list(batches(data, program.host.inputs))
    plain = [program.host.run(batch.inputs)[0] for batch in parts]
    targets = [None if batch.labels is None else as_array(batch.labels) for batch in parts]
    base = _mean_loss(plain, plain, targets, loss)
    measured = []
    for unit in units:
        plan = Plan(program).do(site_stats.columns.value, units=[int(unit)], constant=float(constants[unit]))
        host: Host = program.clamped(plan)
        measured.append(_mean_loss([host.run(b.inputs)[0] for b in parts], plain, targets, loss) - base)
    return Predictions(tuple(int(u) for u in units), predicted, np.array(measured))


def _mean_loss(logits: Sequence[Array], plain: Sequence[Array], targets: Sequence[Array | None], loss: str) -> float:
    total, count = 0.0, 0
    for z, base, target in zip(logits, plain, targets, strict=True):
        z, base = z.astype(np.float64), base.astype(np.float64)
        count += len(z)
        if loss == "logit":
            total += float(((z - base) ** 2).sum())
            continue
        if loss == "squared-error":
            assert target is not None
            total += 0.5 * float(((z - target) ** 2).sum())
            continue
        logs = np.log(np.maximum(softmax(z, axis=-1), np.finfo(np.float64).tiny))
        if loss == "kl":
            p = softmax(base, axis=-1)
            total += float((p * (np.log(np.maximum(p, np.finfo(np.float64).tiny)) - logs)).sum())
        else:
            if target is None:
                raise StatsError("the data have no labels", fix='give (inputs, labels), or loss="kl"')
            total -= float(np.take_along_axis(logs, target[..., None], -1).sum())
    return total / count


# ---------------------------------------------------------------- how much data


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """With `samples` samples: the mean overlap (Jaccard) of the set that is kept with the one of all the data."""

    samples: int
    jaccard: float


def sensitivity(
    program: Program,
    data: Any,
    site: str,
    recipe: Recipe,
    *,
    parts: Sequence[float] = (0.1, 0.25, 0.5),
    keep: float = 0.5,
) -> list[Sensitivity]:
    """Calibrate on parts of the batches and compare what would be kept: whether more data would change the plan."""
    parts_of_data = list(data)
    sites = program.find(site)

    def kept(some: list[Any]) -> tuple[set[int], int]:
        stats = calibrate(program, some, sites=site, need=recipe.needs, loss=recipe.loss, positions=recipe.positions)
        ranked = rank(program, sites[0], stats[sites[0].value], recipe, ())
        gone = ranked.order.first(sites[0].units - round(keep * sites[0].units))
        return set(complement(gone, sites[0].units).tolist()), stats.samples

    whole, samples = kept(parts_of_data)
    results = []
    for size in dict.fromkeys(max(1, round(part * len(parts_of_data))) for part in parts):
        overlaps, counts = [], []
        for start in range(0, len(parts_of_data) - size + 1, size):
            other, count = kept(parts_of_data[start : start + size])
            overlaps.append(len(whole & other) / len(whole | other))
            counts.append(count)
        results.append(Sensitivity(round(float(np.mean(counts))), float(np.mean(overlaps))))
    return [*results, Sensitivity(samples, 1.0)]
