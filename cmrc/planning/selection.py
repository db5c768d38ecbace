"""Which units to replace: an order of removal, and what each step costs. Every rule knows the replacement it selects for.

bottom      smallest scores first; optimal where curvature is diagonal (paper eq. topk)
greedy      constants: risk(S) = Σ_{i,j∈S} G_ij C_ij, always the unit that adds least
eliminate   affine functions of all that stay: risk(S) = tr(G_SS (C_SS − C_SK C_KK⁻¹ C_KS)), likewise
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.linalg

from cmrc.ir.graph import Array

BLOCK = 96  # eliminations between two updates of the whole matrices


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """Units in the order in which they go, and the risk that each adds."""

    units: Array
    added: Array

    def first(self, count: int) -> tuple[int, ...]:
        """The first so many, in ascending order."""
        return tuple(sorted(int(u) for u in self.units[:count]))


def bottom(score: Array) -> Order:
    """Smallest scores first; equal ones by number."""
    units = np.argsort(score, kind="stable")
    return Order(units, score[units])


def greedy(gram: Array, covariance: Array, *, first: Sequence[int] = ()) -> Order:
    """Constants at their means: replacing S distorts the output by Σ_{i,j∈S} G_ij C_ij (next-layer reconstruction).

    Adding j to S adds G_jj C_jj + 2 Σ_{i∈S} G_ij C_ij; the unit with the least goes next, those of `first` before all.
    """
    joint = gram * covariance
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

    With P = C_KK⁻¹ and w_j the column of the output weights after all folds so far (G̃ = w̃ᵀw̃), the part of unit j that the
    others cannot rebuild has variance 1/P_jj and is uncorrelated with what was lost before, so that removing j adds
    exactly ‖w̃_j‖²/P_jj. Then P ← P − P_:j P_j:/P_jj (Schur complement) and w̃_k ← w̃_k − w̃_j P_jk/P_jj.

    `ridge` is relative to each unit's own variance, so that rescaling units changes nothing. The updates of a block of
    steps are kept as thin factors P = P₀ − UUᵀ, w̃ = w̃₀ − VUᵀ and applied at its end: O(d³) in all, in matrix products.
    """
    d = len(covariance)
    count = d - 1 if count is None else min(count, d - 1)
    deviation = _deviations(covariance)
    scaled = covariance / np.outer(deviation, deviation)
    dead = covariance.diagonal() <= 0  # they never vary: nothing is lost with them
    scaled[np.diag_indices(d)] += ridge + dead
    weights = gram * np.outer(deviation, deviation) * np.outer(~dead, ~dead)
    alive = np.arange(d)
    units, added = np.empty(d, dtype=np.int64), np.empty(d)
    inverse = scipy.linalg.cho_solve(scipy.linalg.cho_factor(scaled, lower=True), np.eye(d))
    step = 0
    while step < count:
        size = min(BLOCK, count - step)
        forced = np.flatnonzero(np.isin(alive, np.asarray(first, dtype=np.int64))).tolist()
        inverse, weights, gone, cost = _eliminate_block(inverse, weights, size, forced)
        units[step : step + size], added[step : step + size] = alive[gone], cost
        alive = np.delete(alive, gone)
        step += size
    # Whoever is left goes last, by what the elimination would have done with it.
    rest = weights.diagonal() / inverse.diagonal()
    order = np.argsort(rest, kind="stable")
    units[step:], added[step:] = alive[order], rest[order]
    return Order(units, np.maximum(added, 0.0))


def eliminate_for_interchange(
    gram: Array, covariance: Array, p: float, *, ridge: float = 1e-6, first: Sequence[int] = ()
) -> Order:
    """Backward elimination where what stays is swapped with probability p: see `fits.swapped`.

    risk(S) = tr(G_SS C_SS) − (1−p)² tr(G_SS C_SK P C_KS), P = C̃_KK⁻¹. A unit that goes is no longer swapped, so its moments
    change and no Schur complement of one matrix gives the risk. With X = C_KS w_Sᵀ, removing j makes it X + c_j w_jᵀ, and
    P' = P − P_:j P_j:/P_jj, so that what is explained changes by
        2 w_j·(XᵀP c_j) + ‖w_j‖² c_jᵀP c_j − ‖P_j:X + (P_j:c_j) w_j‖² / P_jj.
    PX, PC, CPC and CPX follow by rank-one updates: O(d²) a step, p = 0 is `eliminate`.
    """
    d = len(covariance)
    deviation = _deviations(covariance)
    c = covariance / np.outer(deviation, deviation)
    g = gram * np.outer(deviation, deviation)
    w = root_of(g)  # [d, m] with w wᵀ = G: row j is the output column of unit j
    both = (1 - p) ** 2 + p**2
    among = both * c
    among[np.diag_indices(d)] = c.diagonal() + ridge + (c.diagonal() <= 0)
    inverse = scipy.linalg.cho_solve(scipy.linalg.cho_factor(among, lower=True), np.eye(d))
    pc = inverse @ c
    cpc = c @ pc
    px, cpx = np.zeros_like(w), np.zeros_like(w)
    left, cross, own = np.ones(d, dtype=bool), np.zeros(d), g.diagonal() * c.diagonal()
    units, added = np.empty(d, dtype=np.int64), np.empty(d)
    for step in range(d):
        diagonal, reach = np.where(left, inverse.diagonal(), 1.0), pc.diagonal()
        lost = (px**2).sum(1) + 2 * reach * (px * w).sum(1) + reach**2 * g.diagonal()
        explained = 2 * (cpx * w).sum(1) + g.diagonal() * cpc.diagonal() - lost / diagonal
        cost = own + 2 * cross - (1 - p) ** 2 * explained
        j = _next(cost, left, first)
        units[step], added[step], left[j] = j, cost[j], False
        cross += g[j] * c[j]
        column, row, power = inverse[:, j].copy(), pc[j].copy(), inverse[j, j]
        after = px[j] + pc[j, j] * w[j]  # P_j: X'
        px += np.outer(pc[:, j], w[j]) - np.outer(column, after) / power
        cpx += np.outer(cpc[:, j], w[j]) - np.outer(row, after) / power
        inverse -= np.outer(column, column) / power
        pc -= np.outer(column, row) / power
        cpc -= np.outer(row, row) / power
    return Order(units, added)


def root_of(matrix: Array) -> Array:
    """R with R Rᵀ the matrix, of as few columns as it has rank."""
    values, vectors = np.linalg.eigh(matrix)
    positive = values > 1e-13 * max(values.max(), 0.0)
    return np.asarray(vectors[:, positive] * np.sqrt(values[positive]))


def _deviations(covariance: Array) -> Array:
    """Standard deviations; 1 for a unit that never varies, whose row of the covariance is zero anyway."""
    deviation = np.sqrt(np.maximum(covariance.diagonal(), 0.0))
    return np.where(deviation > 0, deviation, 1.0)


def _eliminate_block(
    inverse: Array, weights: Array, size: int, first: Sequence[int]
) -> tuple[Array, Array, Array, Array]:
    """`size` eliminations; returns both matrices without the units that went, their places, and what each cost."""
    d = len(inverse)
    left = np.ones(d, dtype=bool)
    diagonal, norms = inverse.diagonal().copy(), weights.diagonal().copy()
    u, y, vv = np.zeros((d, size)), np.zeros((d, size)), np.zeros((size, size))  # Y = w̃₀ᵀV
    gone, cost = np.empty(size, dtype=np.int64), np.empty(size)
    for t in range(size):
        score = norms / diagonal
        j = _next(score, left, first)
        gone[t], cost[t], left[j] = j, score[j], False
        root = np.sqrt(diagonal[j])
        column = inverse[:, j] - u[:, :t] @ u[j, :t]  # P_:j now
        before = weights[:, j] - y[:, :t] @ u[j, :t]  # w̃₀ᵀ w̃_j
        own = y[j, :t] - vv[:t, :t] @ u[j, :t]  # Vᵀ w̃_j
        product = before - u[:, :t] @ own  # w̃ᵀ w̃_j
        u[:, t], y[:, t] = column / root, before / root
        vv[t, :t] = vv[:t, t] = own / root
        vv[t, t] = product[j] / diagonal[j]
        norms += -2 * u[:, t] * product / root + u[:, t] ** 2 * vv[t, t]
        diagonal -= u[:, t] ** 2
        diagonal[j] = 1.0
    keep = np.flatnonzero(left)
    u, y = u[keep], y[keep]
    inverse = inverse[np.ix_(keep, keep)] - u @ u.T
    cross = y @ u.T
    weights = weights[np.ix_(keep, keep)] - cross - cross.T + u @ vv @ u.T
    return inverse, weights, gone, cost
