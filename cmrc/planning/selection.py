"""Which units to replace: an order of removal, and what each step costs. Every rule knows the replacement it selects for.

bottom      smallest scores first; optimal where curvature is diagonal (paper eq. topk)
greedy      constants: risk(S) = Σ_{i,j∈S} G_ij C_ij, always the unit that adds least
eliminate   affine functions of all that stay: risk(S) = tr(G_SS (C_SS − C_SK C_KK⁻¹ C_KS)), always the unit that adds least

A unit with several columns (a head is a vector) goes as a whole: what is a number for one column is a block for these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.linalg
from scipy.linalg import blas, lapack

from cmrc.ir.graph import Array

BLOCK = 128  # eliminations between two updates of the whole matrices


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """Units in the order in which they go, and the risk that each adds."""

    units: Array
    added: Array

    def first(self, count: int) -> tuple[int, ...]:
        """The first so many, in ascending order."""
        return tuple(sorted(int(u) for u in self.units[:count]))

    def by_unit(self) -> Array:
        """What the selection went by, for every unit: its score, or the risk that it added in its turn."""
        risk = np.empty(len(self.units))
        risk[self.units] = self.added
        return risk


def bottom(score: Array) -> Order:
    """Smallest scores first; equal ones by number."""
    units = np.argsort(score, kind="stable")
    return Order(units, score[units])


def greedy(gram: Array, covariance: Array, *, features: int = 1, first: Sequence[int] = ()) -> Order:
    """Constants at their means: replacing S distorts the output by Σ_{i,j∈S} G_ij C_ij (next-layer reconstruction).

    Adding j to S adds G_jj C_jj + 2 Σ_{i∈S} G_ij C_ij; the unit with the least goes next, those of `first` before all.
    Of units with several columns, the products add up over these.
    """
    joint = gram * covariance
    if features > 1:
        joint = joint.reshape(len(joint) // features, features, -1, features).sum((1, 3))
    own = joint.diagonal().copy()
    count = len(own)
    cross, left = np.zeros(count), np.ones(count, dtype=bool)
    units, added = np.empty(count, dtype=np.int64), np.empty(count)
    for step in range(count):
        cost = own + 2 * cross
        j = _next(cost, left, first)
        units[step], added[step], left[j] = j, cost[j], False
        cross += joint[j]
    return Order(units, added)


def _next(cost: Array, left: Array, first: Sequence[int]) -> int:
    """The cheapest unit that is left, of `first` as long as there are any."""
    forced = [unit for unit in first if left[unit]]
    if forced:
        return forced[int(np.argmin(cost[forced]))]
    return int(np.where(left, cost, np.inf).argmin())


def eliminate(
    gram: Array, covariance: Array, *, ridge: float = 1e-6, count: int | None = None, first: Sequence[int] = ()
) -> Order:
    """Backward elimination where every replaced unit is rebuilt from all that stay (optimal-brain-surgeon style).

    With P = C_KK⁻¹ and w̃_j the column of the output weights after all folds so far (G̃ = w̃ᵀw̃), the part of unit j that the
    others cannot rebuild has variance 1/P_jj and is uncorrelated with what was lost before. So removing j adds exactly
    ‖w̃_j‖²/P_jj. Then P ← P − P_:j P_j:/P_jj (Schur complement) and w̃_k ← w̃_k − w̃_j P_jk/P_jj.

    `ridge` is relative to each unit's own variance, so that rescaling units changes nothing.
    """
    d = len(covariance)
    count = d - 1 if count is None else min(count, d - 1)
    inverse, weights = _in_deviations(gram, covariance, ridge)
    alive = np.arange(d)
    units, added = np.empty(d, dtype=np.int64), np.empty(d)
    for start in range(0, count, BLOCK):
        size = min(BLOCK, count - start)
        forced = np.flatnonzero(np.isin(alive, np.asarray(first, dtype=np.int64))).tolist()
        block = _Block(inverse, weights, size)
        for step in range(start, start + size):
            j = _next(block.costs, block.left, forced)
            units[step], added[step] = alive[j], block.costs[j]
            block.remove(j)
        inverse, weights = block.what_is_left()
        alive = alive[block.left]
    # The units that are left go last, in the order of what their removal would add.
    rest = weights.diagonal() / inverse.diagonal()
    order = np.argsort(rest, kind="stable")
    units[count:], added[count:] = alive[order], rest[order]
    return Order(units, np.maximum(added, 0.0))


def eliminate_groups(
    gram: Array, covariance: Array, features: int, *, ridge: float = 1e-6, first: Sequence[int] = ()
) -> Order:
    """`eliminate` for units with several columns each: J, the columns of a unit, take the place of j.

    Removing J adds tr(G̃_JJ P_JJ⁻¹). Then P ← P − P_:J P_JJ⁻¹ P_J: and w̃ ← w̃ − w̃_J A with A = P_JJ⁻¹ P_J:, so that
    G̃ ← G̃ − G̃_:J A − AᵀG̃_J: + AᵀG̃_JJ A. `ridge` is relative to each column's own variance.
    """
    count = len(covariance) // features
    triangle, weights = _in_deviations(gram, covariance, ridge)
    inverse = np.tril(triangle) + np.tril(triangle, -1).T
    alive = np.arange(count)
    units, added = np.empty(count, dtype=np.int64), np.empty(count)
    for step in range(count):
        own = [slice(i * features, (i + 1) * features) for i in range(len(alive))]
        solved = [scipy.linalg.cho_factor(inverse[block, block]) for block in own]
        costs = np.array([
            np.trace(scipy.linalg.cho_solve(factor, weights[block, block]))
            for factor, block in zip(solved, own, strict=True)
        ])  # fmt: skip
        forced = np.flatnonzero(np.isin(alive, np.asarray(first, dtype=np.int64))).tolist()
        j = _next(costs, np.ones(len(alive), dtype=bool), forced)
        units[step], added[step] = alive[j], costs[j]
        block, keep = own[j], np.delete(np.arange(len(inverse)), own[j])
        a = scipy.linalg.cho_solve(solved[j], inverse[block, keep])
        cross = weights[keep, block] @ a
        weights = weights[np.ix_(keep, keep)] - cross - cross.T + a.T @ weights[block, block] @ a
        inverse = inverse[np.ix_(keep, keep)] - inverse[keep, block] @ a
        alive = np.delete(alive, j)
    return Order(units, np.maximum(added, 0.0))


def _in_deviations(gram: Array, covariance: Array, ridge: float) -> tuple[Array, Array]:
    """P = (C + λ)⁻¹ and G of all units, with each unit measured in its own standard deviation: lower triangles.

    A unit that never varies gets variance 1 and weight 0: nothing is lost with it.
    """
    scaled, deviation = _correlations(covariance)
    dead = covariance.diagonal() <= 0
    scaled[np.diag_indices(len(scaled))] += ridge + dead
    reach = np.where(dead, 0.0, deviation)
    weights = gram * reach[:, None]
    weights *= reach
    # Both are symmetric, so that the transposed view has the same numbers in the order that LAPACK works on in place.
    return _inverse(scaled.T), weights.T


def _inverse(matrix: Array) -> Array:
    """The lower triangle of the inverse of a positive definite matrix, in the matrix's own memory."""
    factor, failed = lapack.dpotrf(matrix, lower=1, clean=0, overwrite_a=1)  # pyright: ignore[reportAttributeAccessIssue]
    if failed:
        raise np.linalg.LinAlgError(f"the {failed}-th leading minor is not positive definite")
    return np.asarray(lapack.dpotri(factor, lower=1, overwrite_c=1)[0])  # pyright: ignore[reportAttributeAccessIssue]


class _Block:
    """Some eliminations as thin factors, applied to the whole matrices at the end: O(d³) in all, in matrix products.

    With P₀ and w̃₀ as they were at the start of the block, P = P₀ − UUᵀ and w̃ = w̃₀ − VUᵀ. Each removal adds the columns
    u = P_:j/√P_jj and v = w̃_j/√P_jj. V itself is never needed: only Y = w̃₀ᵀV and VᵀV, because G̃ = w̃ᵀw̃ is. The factors
    are stored as rows, one per removal. Of the whole matrices only the lower triangles are kept up to date.
    """

    def __init__(self, inverse: Array, weights: Array, size: int) -> None:
        d = len(inverse)
        self.inverse, self.weights = inverse, weights  # P₀ and w̃₀ᵀw̃₀
        self.left = np.ones(d, dtype=bool)
        self.diagonal, self.norms = inverse.diagonal().copy(), weights.diagonal().copy()  # P_jj and ‖w̃_j‖²
        self.u, self.y, self.vv = np.zeros((size, d)), np.zeros((size, d)), np.zeros((size, size))
        self.steps = 0
        self.costs = self.norms / self.diagonal

    def remove(self, j: int) -> None:
        """Remove one unit: add its columns to the factors, and follow P_jj, ‖w̃_j‖² and the costs of all units."""
        t, u, y, vv = self.steps, self.u, self.y, self.vv
        root = np.sqrt(self.diagonal[j])
        earlier = u[:t, j]
        column = _column(self.inverse, j) - earlier @ u[:t]  # P_:j
        before = _column(self.weights, j) - earlier @ y[:t]  # w̃₀ᵀ w̃_j
        own = y[:t, j] - vv[:t, :t] @ earlier  # Vᵀ w̃_j
        product = before - own @ u[:t]  # w̃ᵀ w̃_j
        u[t], y[t] = column / root, before / root
        vv[t, :t] = vv[:t, t] = own / root
        vv[t, t] = product[j] / self.diagonal[j]
        self.norms += -2 * u[t] * product / root + u[t] ** 2 * vv[t, t]
        self.diagonal -= u[t] ** 2
        self.diagonal[j] = 1.0
        self.left[j] = False
        self.costs = self.norms / self.diagonal
        self.steps += 1

    def what_is_left(self) -> tuple[Array, Array]:
        """P = P₀ − UUᵀ and G̃ = G̃₀ − ZUᵀ − UZᵀ with Z = Y − ½ U VᵀV, of the units that are left."""
        keep = np.flatnonzero(self.left)
        u, y = self.u[:, keep], self.y[:, keep]
        z = y - 0.5 * (self.vv @ u)
        inverse = blas.dsyrk(-1.0, u.T, beta=1.0, c=_part(self.inverse, keep), lower=1, overwrite_c=1)  # pyright: ignore[reportAttributeAccessIssue]
        weights = blas.dsyr2k(-1.0, u.T, z.T, beta=1.0, c=_part(self.weights, keep), lower=1, overwrite_c=1)  # pyright: ignore[reportAttributeAccessIssue]
        return inverse, weights


def _column(matrix: Array, j: int) -> Array:
    """One column of a symmetric matrix, from its lower triangle."""
    return np.concatenate((matrix[j, :j], matrix[j:, j]))


def _part(matrix: Array, keep: Array) -> Array:
    """The lower triangle of these rows and columns, in the matrix's own memory.

    Columns move up one after the other. A new column ends before the next old one begins, so nothing unread is lost.
    """
    count = len(keep)
    part = matrix.reshape(-1, order="F")[: count * count].reshape((count, count), order="F")
    for i, j in enumerate(keep):
        part[i:, i] = matrix[:, j].take(keep[i:])
    return part


def eliminate_for_interchange(
    gram: Array, among: Array, cross: Array, own: Array, *, ridge: float = 1e-6, first: Sequence[int] = ()
) -> Order:
    """Backward elimination where the units that stay are swapped and those that go are not.

    With ã the units of an input some of which are another's: among = Cov(ã, ã), cross = Cov(ã, a), own = Cov(a, a), as
    `fits.swapped` gives them or measured on swaps.

    risk(S) = tr(G_SS own_SS) − tr(G_SS cross_KSᵀ P cross_KS), P = among_KK⁻¹. A unit that goes is no longer swapped, so its moments
    change, and no Schur complement of one matrix gives the risk: `_Explained` follows the second term. O(d²) per step; where
    nothing is swapped it is `eliminate`.
    """
    d = len(own)
    c, deviation = _correlations(own)
    apart = np.outer(deviation, deviation)
    g, among = gram * apart, among / apart
    among[np.diag_indices(d)] += ridge + (among.diagonal() <= 0)
    explained = _Explained(among, cross / apart, g)
    left, shared, alone = np.ones(d, dtype=bool), np.zeros(d), g.diagonal() * c.diagonal()
    units, added = np.empty(d, dtype=np.int64), np.empty(d)
    for step in range(d):
        cost = alone + 2 * shared - explained.gain(left)
        j = _next(cost, left, first)
        units[step], added[step], left[j] = j, cost[j], False
        shared += g[j] * c[j]
        explained.remove(j)
    return Order(units, added)


class _Explained:
    """tr(XᵀPX) with X = cross_KS w_Sᵀ: what the units that stay explain of those that went, weighed by the output.

    With c_j a column of cross, removing j makes X into X + c_j w_jᵀ and P into P − P_:j P_j:/P_jj, so the trace changes by
        2 w_j·(XᵀP c_j) + ‖w_j‖² c_jᵀP c_j − ‖P_j:X + (P_j:c_j) w_j‖² / P_jj.
    PX, PC, CᵀPC and CᵀPX follow by rank-one updates.
    """

    def __init__(self, among: Array, cross: Array, g: Array) -> None:
        self.w, self.norms = root_of(g), g.diagonal()  # w wᵀ = G: row j is the output column of unit j
        self.p = scipy.linalg.cho_solve(scipy.linalg.cho_factor(among, lower=True), np.eye(len(g)))
        self.pc = self.p @ cross
        self.cpc = cross.T @ self.pc
        self.px, self.cpx = np.zeros_like(self.w), np.zeros_like(self.w)

    def gain(self, left: Array) -> Array:
        """How the trace would change with the removal of each unit."""
        diagonal, reach = np.where(left, self.p.diagonal(), 1.0), self.pc.diagonal()
        lost = (self.px**2).sum(1) + 2 * reach * (self.px * self.w).sum(1) + reach**2 * self.norms
        return np.asarray(2 * (self.cpx * self.w).sum(1) + self.norms * self.cpc.diagonal() - lost / diagonal)

    def remove(self, j: int) -> None:
        column, row, power = self.p[:, j].copy(), self.pc[j].copy(), self.p[j, j]
        after = self.px[j] + self.pc[j, j] * self.w[j]  # P_j: X'
        self.px += np.outer(self.pc[:, j], self.w[j]) - np.outer(column, after) / power
        self.cpx += np.outer(self.cpc[:, j], self.w[j]) - np.outer(row, after) / power
        self.p -= np.outer(column, column) / power
        self.pc -= np.outer(column, row) / power
        self.cpc -= np.outer(row, row) / power


def root_of(matrix: Array) -> Array:
    """R with R Rᵀ the matrix, of as few columns as it has rank."""
    values, vectors = np.linalg.eigh(matrix)
    positive = values > 1e-13 * max(values.max(), 0.0)
    return np.asarray(vectors[:, positive] * np.sqrt(values[positive]))


def _correlations(covariance: Array) -> tuple[Array, Array]:
    """The covariance with each unit measured in its own standard deviation, and those deviations."""
    deviation = _deviations(covariance)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        scaled = covariance / deviation[:, None]
        scaled /= deviation
    if not np.isfinite(scaled).all():
        raise np.linalg.LinAlgError("correlations are not finite")  # data have none above 1
    return scaled, deviation


def _deviations(covariance: Array) -> Array:
    """Standard deviations; 1 for a unit that never varies, whose row of the covariance is zero anyway."""
    deviation = np.sqrt(np.maximum(covariance.diagonal(), 0.0))
    return np.where(deviation > 0, deviation, 1.0)
