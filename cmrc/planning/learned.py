"""Affine maps that are learned on swaps: the least KL of the outputs, where these are linear in the units.

Under a swap the kept units ã_K are partly those of another input, and the replaced units keep the values of the base:

    original   z  = W_K ã_K + W_S a_S + b
    reduced    z' = W_K ã_K + W_S (B ã_K + β) + b = (W_K + M) ã_K + b + v,    M = W_S B,  v = W_S β

A least-squares fit (`fits.affine` with `interchange`) has the least E‖z' − z‖². That is not the least divergence: it is as exact where the
original is sure as where it hesitates, and what cannot be known of a_S is left in the logits as if it were known. E KL(softmax z ‖ softmax z')
is convex in (M, v), so its minimum is found by gradient: L-BFGS on sampled swaps of the calibrated rows, from the least-squares fit, in
coordinates in which the kept units are uncorrelated. A quarter of the rows is held out. Of all steps the one with the least KL on swaps
of those is taken, the start included, so that a fit that only follows the sample is never taken.

Which units stay is decided for the same risk, to second order: KL ≈ ½ eᵀ(diag p − ppᵀ)e with e = z' − z. `hesitant` has its
moments under swaps, so that an error counts for little where the original is sure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.linalg

from cmrc.ir.axes import complement
from cmrc.ir.graph import Array
from cmrc.planning import fits
from cmrc.program.sites import Sites
from cmrc.statistics.readers import logits_of
from cmrc.statistics.site_stats import SiteStats
from cmrc.verification.evidence import log_softmax

SWAPS = 49_152  # that are fitted to, and fewer where they would hold more numbers than this:
LARGEST = 32 << 20
EACH = 64  # swaps of a row at most: more of few rows say nothing new
HELD_OUT = 4  # one row in so many
STEPS = 60
RIDGE = 1e-3  # of the coordinates, relative to the kept units' own variance
SELECTED = 16_384  # swaps that moments are taken from, in parts of
PART = 4096
UNSURE = 1e-12  # of a swap at least: below it every answer is certain, and least squares decide
RANK = 1e-9  # of the largest singular value of W_S: what lies below is not there


@dataclass(frozen=True, slots=True, eq=False)
class _Swaps:
    """Swaps as features [R, K + 1] in the fit's coordinates, the logits that the kept units give, and the original's answer."""

    features: Array
    offset: Array
    target: Array  # probabilities
    entropy: float  # the mean of Σ p log p

    def divergence(self, weight: Array) -> tuple[float, Array]:
        """The mean KL of a map [classes, K + 1], and its gradient."""
        log_q = log_softmax(self.offset + self.features @ weight.T.astype(np.float32))
        value = self.entropy - float((self.target * log_q).sum(axis=1).mean())
        apart = ((np.exp(log_q) - self.target) / len(log_q)).astype(np.float32)
        return value, np.asarray(apart.T @ self.features, dtype=np.float64)


def learnable(program: Sites, stats: SiteStats) -> tuple[Array, Array] | None:
    """W and b of logits W a + b, where a map of these units can be learned: more than one class, and rows to hold out."""
    logits = logits_of(program, stats.columns) if stats.columns.features == 1 else None
    enough = len(stats.arrays.get("rows", ())) >= 2 * HELD_OUT
    return logits if logits is not None and enough and len(logits[0]) > 1 else None


def learned(
    stats: SiteStats,
    units: Sequence[int],
    start: fits.Fit,
    weight: Array,
    bias: Array,
    *,
    interchange: float,
    seed: int = 0,
) -> fits.Fit:
    """The map of least KL under swaps with probability `interchange`, for logits W a + b, from a first fit."""
    replaced, keep = np.asarray(units, dtype=np.int64), complement(units, stats.columns.units)
    rows = stats.wanted("rows", "rows")
    basis, singular, _ = scipy.linalg.svd(weight[:, replaced], full_matrices=False)
    basis = basis[:, singular > RANK * max(float(singular[0]), np.finfo(np.float64).tiny)]
    if not basis.shape[1]:
        return start  # nothing of these units arrives
    assert start.weight is not None
    rng = np.random.default_rng([seed, *stats.columns.value.encode()])
    order = rng.permutation(len(rows))
    few = len(rows) // HELD_OUT
    centre = rows[:, keep].mean(0)
    factor = _whitening(rows[:, keep], interchange)

    def swaps(drawn: Array, count: int) -> _Swaps:
        base, source = np.resize(np.arange(len(drawn)), count), rng.integers(len(drawn), size=count)
        swapped = rng.random((count, len(keep))) < interchange
        mixed = np.where(swapped, drawn[source][:, keep], drawn[base][:, keep])
        offset = mixed @ weight[:, keep].T + bias
        log_p = log_softmax(offset + drawn[base][:, replaced] @ weight[:, replaced].T)
        plain = scipy.linalg.solve_triangular(factor, (mixed - centre).T, lower=True).T
        target = np.exp(log_p)
        features = np.hstack([plain, np.ones((count, 1))]).astype(np.float32)  # which halves the time
        return _Swaps(features, offset, target, float((target * log_p).sum(axis=1).mean()))

    count = max(len(rows), min(SWAPS, LARGEST // len(keep), EACH * len(rows)))
    train, test = swaps(rows[order[few:]], count), swaps(rows[order[:few]], count // HELD_OUT)
    slope = weight[:, replaced] @ start.weight
    shift = weight[:, replaced] @ start.bias + slope @ centre
    best = _descended(train, test, basis, basis.T @ np.hstack([slope @ factor, shift[:, None]]))
    if best is None:
        return start
    fitted = basis @ best
    slope = scipy.linalg.solve_triangular(factor, fitted[:, :-1].T, lower=True, trans=1).T
    back = scipy.linalg.pinv(weight[:, replaced])
    return fits.Fit(back @ (fitted[:, -1] - slope @ centre), start.parents, back @ slope, start.ridge)


def hesitant(
    stats: SiteStats, weight: Array, bias: Array, *, interchange: float, seed: int = 0
) -> tuple[Array, tuple[Array, Array, Array]]:
    """Wᵀ E[diag p − ppᵀ] W, and Cov(ã, ã), Cov(ã, a), Cov(a, a) where a swap counts by its 1 − Σp², the trace of its diag p − ppᵀ.

    All units are candidates to stay, so all are swapped here.
    """
    rows = stats.wanted("rows", "rows")
    rng = np.random.default_rng([seed, *stats.columns.value.encode()])
    d, total = rows.shape[1], 0.0
    fisher, mean, second = np.zeros((len(weight),) * 2), np.zeros(2 * d), np.zeros((2 * d, 2 * d))
    for start in range(0, SELECTED, PART):
        base, source = np.arange(start, start + PART) % len(rows), rng.integers(len(rows), size=PART)
        mixed = np.where(rng.random((PART, d)) < interchange, rows[source], rows[base])
        p = np.exp(log_softmax(mixed @ weight.T + bias))
        share = 1.0 - (p**2).sum(axis=1)
        both = np.hstack([mixed, rows[base]])
        fisher += np.diag(p.sum(axis=0)) - p.T @ p
        total, mean, second = total + share.sum(), mean + share @ both, second + (both * share[:, None]).T @ both
    if total < UNSURE * SELECTED:
        covariance = stats.covariance
        return weight.T @ weight, (*fits.swapped(covariance, covariance, interchange), covariance)
    second = second / total - np.outer(mean, mean) / total**2
    return weight.T @ fisher @ weight / SELECTED, (second[:d, :d], second[:d, d:], second[d:, d:])


def _whitening(kept: Array, interchange: float) -> Array:
    """The factor L of the kept units' covariance under swaps: ã = L u has uncorrelated u."""
    covariance = np.atleast_2d(np.cov(kept, rowvar=False))
    among, _ = fits.swapped(covariance, np.zeros((len(covariance), 0)), interchange)
    own = among.diagonal()
    among = among + np.diag(RIDGE * np.maximum(own, max(float(own.max()), np.finfo(np.float64).tiny) * RIDGE))
    return np.asarray(scipy.linalg.cholesky(among, lower=True))


def _descended(train: _Swaps, test: _Swaps, basis: Array, start: Array) -> Array | None:
    """The step with the least KL on the held-out swaps; None where that is the start."""
    from scipy.optimize import minimize

    least, best = test.divergence(basis @ start)[0], None

    def risk(flat: Array) -> tuple[float, Array]:
        value, slope = train.divergence(basis @ flat.reshape(start.shape))
        return value, np.asarray(basis.T @ slope).ravel()

    def look(flat: Array) -> None:
        nonlocal least, best
        value = test.divergence(basis @ flat.reshape(start.shape))[0]
        if value < least:
            least, best = value, np.array(flat).reshape(start.shape)

    minimize(risk, start.ravel(), jac=True, method="L-BFGS-B", callback=look, options={"maxiter": STEPS})
    return best
