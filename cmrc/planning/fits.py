"""What the chosen units become: constants, or affine functions of units that stay.

    zero, mean, optimal   constants 0, ā, c*
    refit                 all constants of the site together, with the curvature between units (paper section 5.3)
    affine                B = C_SK (C_KK + λ)⁻¹, β = ā_S − B ā_K: every unit that stays is a parent, one factorisation for all
    wls                   a few parents for each unit, weighed by its own curvature (the paper's CMR-Affine), with or without g
    merge                 one parent, the most correlated one (neuron merging)
    learned               an affine map of all that stay, by gradient: see `learned.py`

λ is relative to each parent's own variance, so that rescaling a unit changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.linalg

from cmrc.errors import ObjectiveError
from cmrc.ir.axes import complement
from cmrc.ir.graph import Array
from cmrc.planning.objectives import optimal_constant
from cmrc.planning.selection import root_of
from cmrc.statistics.site_stats import SiteStats

RIDGES = tuple(10.0**e for e in range(-8, 2))  # what leave-one-out chooses from
DRIFT_RIDGES = (
    *(10.0**e for e in range(-4, 2)),
    np.inf,
)  # what held-out error chooses from; with the last nothing is corrected
GRAM_RIDGE = 1e-2  # of G_SS, which is singular where there are fewer outputs than units
FLOOR = 1e-4  # of the largest reach of a replaced unit: the least by which G_SS is damped
PROBES = 64  # random directions that stand for more replaced units than this when the ridge of the drift is chosen
CHUNK = 32  # units whose weighted systems are formed at a time
VANISHING = 1e-290  # a curvature or reach below this is no more than rounding
BLOWN_UP = 100.0  # times the largest value that a unit had: a fit beyond it is an artefact of too few or equal samples


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """columns := weight · parents + bias, where parents are columns; constants have none. `ridge` is what was used."""

    bias: Array
    parents: tuple[int, ...] = ()
    weight: Array | None = None
    ridge: float | None = None


def refit(
    stats: SiteStats, units: Sequence[int], *, clip: bool = True, gradient: bool = True, ridge: float = 1e-6
) -> Fit:
    """All constants together: minimise Σ_s g·δ + ½ δᵀHδ over c_S, δ = c − a; without gradient g = 0.

    The normal equations are H̄_SS c = Σ_k E[H_jk a_k] − E[g_j]. H̄ has as few dimensions as there are logits, so the least
    change from the means is taken; never worse than the means, which are taken if the clipped solution were.
    """
    chosen = np.asarray(units, dtype=np.int64)
    n = stats.count
    h = stats.wanted("H", "coupling")[np.ix_(chosen, chosen)] / n
    ha = stats.wanted("HA", "coupling")[np.ix_(chosen, chosen)].sum(1) / n
    g = stats.wanted("g", "curvature")[chosen] / n if gradient else np.zeros(len(chosen))
    mean = stats.mean[chosen]
    if float(h.diagonal().max(initial=0.0)) < VANISHING:
        return Fit(mean)  # the loss does not depend on these units
    scale = np.diag(np.full(len(chosen), ridge * max(float(h.diagonal().mean()), np.finfo(np.float64).tiny)))
    constant = mean + scipy.linalg.solve(h + scale, ha - g - h @ mean, assume_a="pos")
    if clip:
        low, high = (stats.wanted(name, "range")[chosen] for name in ("low", "high"))
        constant = np.clip(constant, low, high)

    def risk(c: Array) -> float:
        return float(c @ (g - ha) + 0.5 * c @ h @ c)

    return Fit(constant if risk(constant) <= risk(mean) else mean)


def affine(
    stats: SiteStats,
    units: Sequence[int],
    *,
    ridge: float | str = 1e-6,
    interchange: float | None = None,
    gram: Array | None = None,
    output: Array | None = None,
    drift_ridge: float | None = None,
    halves: Sequence[SiteStats] = (),
) -> Fit:
    """Every unit from all that stay: B = C_SK (C_KK + λ diag C_KK)⁻¹, one Cholesky factorisation for all.

    If the statistics have a drift, earlier replacements have moved a to a' at this site. The fit then aims at what the next
    op originally read: W_K a'_K + W_S (B a'_K + β) ≈ W a. With G = WᵀW this is a regression of a'_S + d on a'_K, where
    d = a_S − a'_S + G_SS⁻¹ G_SK (a_K − a'_K): the replaced units also correct the drift of the units that stay. With
    `output` = W, d has the term G_SS⁻¹ W_Sᵀ e as well, which corrects what the stream of a residual block has lost.
    Little of d follows from a'_K, so this part overfits more easily, and the error is carried on from site to site. It
    has its own regularisation, `drift_ridge`. By default each of two `halves` of the statistics is fitted, and the ridge
    with the least error on the other half is taken; without halves |K|/n for n rows (Hoerl, Kennard and Baldwin).
    `interchange=p` fits for swaps of each kept unit with probability p: see `swapped`. `ridge="loo"` takes the λ with the
    least leave-one-out error of the sampled rows, weighed by `gram`.
    """
    replaced = stats.columns.of_units(units)
    keep = complement(replaced, stats.columns.count)
    if output is not None and "lost" in stats.arrays:
        gram = output.T @ output
    covariance = stats.covariance
    chosen = leave_one_out(stats, replaced, keep, gram) if ridge == "loo" else float(ridge)
    among, cross = covariance[np.ix_(keep, keep)], covariance[np.ix_(keep, replaced)]
    mean = stats.mean[replaced]
    if not len(keep):  # constants: the mean, corrected for the mean drift
        if "cross" in stats.arrays:
            mean = mean + _drift(stats, replaced, keep, _makeup(stats, replaced, keep, gram, output))[1]
        return Fit(mean)
    if interchange is not None:
        among, cross = swapped(among, cross, interchange)
    weight = solve_ridge(among, cross, chosen).T
    if "cross" in stats.arrays:
        makeup = _makeup(stats, replaced, keep, gram, output)
        drift, moved = _drift(stats, replaced, keep, makeup)
        if interchange is not None:
            drift = (1 - interchange) * drift
        elif drift_ridge is None and len(halves) > 1:
            drift_ridge = _held_out(halves, replaced, keep, makeup, gram, chosen)
        stiff = len(keep) / stats.count if drift_ridge is None else drift_ridge
        if np.isfinite(stiff):
            weight = weight + solve_ridge(among, drift, max(chosen, stiff)).T
        mean = mean + moved
    bias = mean - weight @ stats.mean[keep]
    return Fit(bias, tuple(int(k) for k in keep), weight, chosen)


Makeup = tuple[Array, Array | None]  # M and P of `_drift`


def _makeup(stats: SiteStats, replaced: Array, keep: Array, gram: Array | None, output: Array | None) -> Makeup | None:
    """M = G_SS⁻¹ G_SK and P = G_SS⁻¹ W_Sᵀ: how the replaced units would have to move for what else has moved.

    G_SS is damped: it is singular where there are fewer outputs than units. A unit that hardly reaches the next op would have to
    move without bound to correct anything, so that its damping is at least that of a unit with the part `FLOOR` of the
    largest G_ss Var a_s. That product, and so all of this, does not change when a unit is rescaled.
    """
    if gram is None:
        return None
    deviation = np.sqrt(np.maximum(stats.variance[replaced], 0.0))
    own = gram[np.ix_(replaced, replaced)] * np.outer(deviation, deviation)
    reach = own.diagonal()
    if float(reach.max()) < VANISHING:
        return None  # nothing of these units arrives, so they cannot correct anything
    every = float((gram.diagonal() * stats.variance).max())
    least = max(FLOOR * float(reach.max()), FLOOR**2 * every, np.finfo(np.float64).tiny)
    damped = own + np.diag(GRAM_RIDGE * np.maximum(reach, least))

    def solved(right: Array) -> Array:
        units = scipy.linalg.solve(damped, deviation[:, None] * right, assume_a="pos")
        return np.asarray(deviation[:, None] * units)

    lost = output is not None and "lost" in stats.arrays
    return solved(gram[np.ix_(replaced, keep)]), solved(output[:, replaced].T) if output is not None and lost else None


def _drift(
    stats: SiteStats, replaced: Array, keep: Array, makeup: Makeup | None, onto: Array | None = None
) -> tuple[Array, Array]:
    """Cov(a'_K, d) and E[d] of d = a_S − a'_S + M (a_K − a'_K) + P e (without M and P where there is no make-up).

    With `onto` Cov(a'_K, d) times this matrix, which is less work where it has few columns.
    """

    def times(matrix: Array) -> Array:
        return matrix if onto is None else np.asarray(matrix @ onto)

    moved = stats.arrays["cross"] / stats.count - stats.covariance
    apart = stats.arrays["origin"] - stats.mean
    cross, mean = times(moved[np.ix_(keep, replaced)]), apart[replaced]
    if makeup is None:
        return cross, mean
    m, p = makeup
    cross, mean = cross + moved[np.ix_(keep, keep)] @ times(m.T), mean + m @ apart[keep]
    if p is not None:
        cross = cross + stats.arrays["lost_cross"][keep] / stats.count @ times(p.T)
        mean = mean + p @ stats.arrays["lost"]
    return cross, mean


def _held_out(
    halves: Sequence[SiteStats], replaced: Array, keep: Array, makeup: Makeup | None, gram: Array | None, ridge: float
) -> float:
    """The ridge of the drift's part with the least error on one half of the data of what was fitted on the other.

    The error of a weight B is tr(G_SS (B C_KK Bᵀ − 2 B Cov(a_K, a_S + d))) and a constant, with moments of the other half. A
    trace tr(G_SS E) is the mean of rᵀ E r over random r with E[r rᵀ] = G_SS, so that a few of them stand for all replaced units.
    """
    onto = _probes(len(replaced), None if gram is None else gram[np.ix_(replaced, replaced)])
    parts = []
    for half in halves:
        among, cross = half.covariance[np.ix_(keep, keep)], half.covariance[np.ix_(keep, replaced)] @ onto
        parts.append((among, cross, _drift(half, replaced, keep, makeup, onto)[0]))
    errors = np.zeros(len(DRIFT_RIDGES))
    for (among, cross, drift), (other, other_cross, other_drift) in (parts, parts[::-1]):
        aim = other_cross + other_drift - other @ solve_ridge(among, cross, ridge)  # fitted without the drift
        for i, stiff in enumerate(DRIFT_RIDGES):
            if np.isfinite(stiff):
                weight = solve_ridge(among, drift, max(stiff, ridge))
                errors[i] += float((weight * (other @ weight - 2 * aim)).sum())
    return float(DRIFT_RIDGES[int(errors.argmin())])


def _probes(count: int, weigh: Array | None) -> Array:
    """R, with columns r for which Σ r rᵀ is the weight of the errors (1 where there is none): its root, or `PROBES` at random."""
    if count > PROBES:
        drawn = np.random.default_rng(0).normal(size=(count, PROBES)) / np.sqrt(PROBES)
        return np.asarray(drawn if weigh is None else _triangle(weigh) @ drawn)
    return np.eye(count) if weigh is None else root_of(weigh)


def _triangle(weigh: Array) -> Array:
    """L with L Lᵀ the matrix, apart from a millionth of its diagonal."""
    scale = np.sqrt(np.maximum(weigh.diagonal(), 0.0))
    whole = np.where(scale > 0, scale, 1.0)
    scaled = weigh / np.outer(whole, whole)
    scaled[np.diag_indices(len(scaled))] += 1e-6
    return np.asarray(scale[:, None] * np.linalg.cholesky(scaled))


def swapped(among: Array, cross: Array, p: float) -> tuple[Array, Array]:
    """The moments under Bernoulli(p) interchange of the kept units: two stay together if both or neither are swapped.

    C̃_ij = ((1−p)² + p²) C_ij off the diagonal, C̃_ii = C_ii; with the replaced units, which are not swapped, (1−p) C_KS.
    """
    changed = ((1 - p) ** 2 + p**2) * among
    changed[np.diag_indices(len(among))] = among.diagonal()
    return changed, (1 - p) * cross


def solve_ridge(among: Array, cross: Array, ridge: float) -> Array:
    """(C_KK + λ diag C_KK)⁻¹ C_KS for all columns by one factorisation, in units of each parent's deviation."""
    deviation = np.sqrt(np.maximum(among.diagonal(), 0.0))
    deviation = np.where(deviation > 0, deviation, 1.0)
    scaled = among / np.outer(deviation, deviation)
    scaled[np.diag_indices(len(scaled))] += max(ridge, 1e-12) + (among.diagonal() <= 0)
    factor = scipy.linalg.cho_factor(scaled, lower=True, overwrite_a=True, check_finite=False)
    solved = scipy.linalg.cho_solve(factor, cross / deviation[:, None], check_finite=False)
    return np.asarray(solved / deviation[:, None])


def leave_one_out(stats: SiteStats, replaced: Array, keep: Array, gram: Array | None) -> float:
    """The ridge with the least Σ_i e_iᵀ G e_i / (1 − h_ii)², which is the error on each row of a fit without that row.

    With the kept columns of the rows, centred and scaled, as U diag(s) Vᵀ: fitted = U diag(s²/(s²+nλ)) Uᵀ y and
    h_ii = 1/n + Σ_k U_ik² s_k²/(s_k²+nλ), so one decomposition serves every λ.
    """
    rows = stats.wanted("rows", "rows")
    centred = rows - rows.mean(0)
    deviation = np.maximum(centred[:, keep].std(0), np.finfo(np.float64).tiny)
    u, s, _ = scipy.linalg.svd(centred[:, keep] / deviation, full_matrices=False)
    target = centred[:, replaced]
    projected = u.T @ target
    weigh = np.eye(len(replaced)) if gram is None else gram[np.ix_(replaced, replaced)]
    root = root_of(weigh)
    projected, target = projected @ root, target @ root
    best, least = RIDGES[0], np.inf
    for ridge in RIDGES:
        shrink = s**2 / (s**2 + len(rows) * ridge)
        leverage = 1.0 / len(rows) + (u**2 @ shrink)
        error = (target - u @ (shrink[:, None] * projected)) / np.maximum(1.0 - leverage, 1e-9)[:, None]
        total = float((error**2).sum())
        if total < least:
            best, least = ridge, total
    return best


# ---------------------------------------------------------------- a few parents, weighed by curvature


def choose_parents(
    stats: SiteStats, units: Array, keep: Array, count: int, rule: str, weight: Array | None, seed: int
) -> Array:
    """For each unit `count` parents among those that stay, [units, count].

    pearson: largest |correlation|; output-pearson: |correlation| · ‖W_:,k‖·std_k, so that a parent counts by what it does to the
    output; random: drawn by the seed; all: every one.
    """
    if rule == "all" or count >= len(keep):
        return np.broadcast_to(keep, (len(units), len(keep)))
    if rule == "random":
        rng = np.random.default_rng(seed)
        return np.stack([np.sort(rng.choice(keep, count, replace=False)) for _ in units])
    covariance = stats.covariance
    deviation = np.sqrt(np.maximum(covariance.diagonal(), np.finfo(np.float64).tiny))
    strength = np.abs(covariance[np.ix_(units, keep)]) / np.outer(deviation[units], deviation[keep])
    if rule == "output-pearson":
        assert weight is not None
        strength = strength * (np.linalg.norm(weight, axis=0) * deviation)[keep]
    elif rule != "pearson":
        raise ObjectiveError(
            f"the rule {rule!r} for parents is not known", fix="use pearson, output-pearson, random or all"
        )
    order = np.argsort(-strength, axis=1, kind="stable")[:, :count]
    return np.sort(keep[order], axis=1)


def wls(
    stats: SiteStats,
    units: Sequence[int],
    *,
    parents: int = 16,
    rule: str = "pearson",
    ridge: float = 1e-2,
    gradient: bool = True,
    output: Array | None = None,
    seed: int = 0,
) -> Fit:
    """Curvature-weighted ridge least squares, unit by unit: θ = (ΦᵀDΦ + λ)⁻¹ (ΦᵀDa − Φᵀg), Φ = [1, a_P], D = diag h.

    Without gradient g = 0. With it every unit's map is bent towards a lower loss by itself, and together they overshoot.
    h below zero counts as zero, and a unit whose Σh is flat is fitted by h = 1 and g = 0: the proxy has no minimum there.
    Φ is centred and scaled by D's own moments, so λ is relative and never shrinks the constant term. A unit whose fit leaves
    all that was seen of it far behind (`BLOWN_UP`) gets its mean instead.
    """
    replaced = np.asarray(units, dtype=np.int64)
    keep = complement(replaced, stats.columns.units)
    chosen = choose_parents(stats, replaced, keep, parents, rule, output, seed)
    rows, h = (stats.wanted(name, "rows and curvature") for name in ("rows", "row_h"))
    g = stats.wanted("row_g", "rows and curvature") if gradient else np.zeros_like(h)
    flat = optimal_constant(stats, clip=False)[1]
    place = {int(unit): i for i, unit in enumerate(keep)}
    weight, bias = np.zeros((len(replaced), len(keep))), np.empty(len(replaced))
    for start in range(0, len(replaced), CHUNK):
        some = slice(start, start + CHUNK)
        theta, constant = _weighted(rows, g, h, flat, replaced[some], chosen[some], ridge)
        for i, (row, slopes) in enumerate(zip(chosen[some], theta, strict=True)):
            weight[start + i, [place[int(k)] for k in row]] = slopes
        bias[some] = constant
    fitted = rows[:, keep] @ weight.T + bias
    lost = np.abs(fitted).max(0) > BLOWN_UP * np.abs(rows[:, replaced]).max(0)
    weight[lost], bias[lost] = 0.0, stats.mean[replaced][lost]
    used = np.flatnonzero(np.any(weight != 0, axis=0)) if len(keep) > chosen.shape[1] else np.arange(len(keep))
    return Fit(bias, tuple(int(keep[i]) for i in used), weight[:, used], ridge)


def _weighted(
    rows: Array, g: Array, h: Array, flat: Array, units: Array, parents: Array, ridge: float
) -> tuple[Array, Array]:
    """The systems of some units at once: weights [units, parents] and constant terms."""
    d = np.where(flat[units], 1.0, np.maximum(h[:, units], 0.0)).T  # [units, rows]
    slope = np.where(flat[units], 0.0, g[:, units]).T
    target = rows[:, units].T
    total = np.maximum(d.sum(1), np.finfo(np.float64).tiny)
    design = rows[:, parents].transpose(1, 0, 2)  # [units, rows, parents]
    centre = np.einsum("un,unp->up", d, design) / total[:, None]
    design = design - centre[:, None]
    middle = (d * target).sum(1) / total
    normal = np.einsum("unp,un,unq->upq", design, d, design, optimize=True)
    right = np.einsum("unp,un->up", design, d * (target - middle[:, None]) - slope)
    power = np.einsum("upp->up", normal)
    power += np.where(power > 0, 0.0, 1.0)
    normal[:, np.arange(normal.shape[1]), np.arange(normal.shape[1])] += ridge * power
    theta = np.linalg.solve(normal, right[..., None])[..., 0]
    constant = middle - slope.sum(1) / total - (theta * centre).sum(1)
    return theta, constant


def merge(stats: SiteStats, units: Sequence[int]) -> Fit:
    """One parent for each unit: the most correlated unit that stays, with slope C_jk/C_kk and the means matched."""
    replaced = np.asarray(units, dtype=np.int64)
    keep = complement(replaced, stats.columns.units)
    parent = choose_parents(stats, replaced, keep, 1, "pearson", None, 0)[:, 0]
    covariance = stats.covariance
    power = covariance.diagonal()[parent]
    slope = np.where(power > 0, covariance[replaced, parent] / np.where(power > 0, power, 1.0), 0.0)
    used = np.unique(parent)
    weight = np.zeros((len(replaced), len(used)))
    weight[np.arange(len(replaced)), np.searchsorted(used, parent)] = slope
    return Fit(stats.mean[replaced] - slope * stats.mean[parent], tuple(int(k) for k in used), weight)
