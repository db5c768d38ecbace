"""What it costs to replace a unit: the replacement risk Q_S(φ) = E[g·δ + ½ δᵀHδ], δ = φ(a_K) − a_S, of one unit and a constant.

An objective says what g and H are; the rest follows (paper section 4.1 and table 1). Of a constant c for unit j

    Δ(c) = 1/n Σ g(c − a) + ½ h(c − a)²       minimal at  c* = (Σha − Σg) / Σh       (eq. cstar, score-closed)

    objective       g, h                      constant   score
    variance        0, 1                      ā          Var a                  VBP, mean replacement
    logit           0, 2‖W_:,j‖²              ā          Var a · ‖W_:,j‖²       CMR-Logit
    task            of the loss, per sample   c*         Δ(c*)                  CMR-Const; without gradient also CMR-Affine
    block           of the loss, H whole      argmin     min ΣΔ(c)              a group with the curvature between its columns
    removal         of the loss, per sample   0          Δ(0)                   head removal (eq. head-removal-score)
    norm            0, 2                      0          E‖a‖²                  head removal without gradients (eq. head-variance-score)
    taylor          of the loss               0          E|g a|                 first order, for comparison
    magnitude       -                         ā          ‖incoming weights‖²    for comparison
    random          -                         ā          random                 for comparison

At a site of heads a unit's columns are the elements of its vector (of each position with positions="each"), each with its
own constant, and their scores add up (eq. head-proxy, head-cstar).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.linalg

from cmrc.errors import ObjectiveError
from cmrc.ir.graph import Array
from cmrc.program.sites import Sites
from cmrc.statistics.readers import incoming, outgoing
from cmrc.statistics.site_stats import SiteStats

FLAT = 1e-6  # Σh·Var a below this part of the largest one: c* is undefined there


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """For every unit what its replacement costs, for every column the constant it was scored with."""

    score: Array  # [units]
    constant: Array  # [columns]
    fell_back: Array  # [columns]: where c* is undefined, and the mean was taken


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """What an objective may look at."""

    program: Sites
    stats: SiteStats
    clip_scores: bool = False
    gradient: bool = True  # without it g = 0: curvature alone
    seed: int = 0


def variance(c: Context) -> Scores:
    """s_j = Var[a_j] at the mean: uniform curvature and g = 0 (eq. mean-var with α = 2; VBP)."""
    return _at_mean(c.stats, c.stats.variance)


def logit(c: Context) -> Scores:
    """s_j = Var[a_j]·‖W_:,j‖² at the mean: squared distortion of what the next affine ops make of the units."""
    return _at_mean(c.stats, c.stats.variance * (outgoing(c.program, c.stats.columns) ** 2).sum(0))


def task(c: Context) -> Scores:
    """s_j = Δ(c*_j); Δ(ā) where Σh is too small for a c* (eq. score-closed). With `clip_scores` c* stays within the calibrated range."""
    constant, fell_back = optimal_constant(c.stats, clip=c.clip_scores, gradient=c.gradient)
    return Scores(_by_unit(c.stats, constant_risk(c.stats, constant, gradient=c.gradient)), constant, fell_back)


def block(c: Context) -> Scores:
    """s_J = min over c_J of E[g·δ + ½ δᵀHδ] with all of a group's block of H (Gauss-Newton); of single numbers it is `task`.

    H_JJ has as few dimensions as there are logits, so the least change from the means is taken.
    """
    stats = c.stats
    h, ha, aha = (stats.wanted(name, "coupling") for name in ("H", "HA", "AHA"))
    g, ga = (stats.wanted(name, "curvature") if c.gradient else np.zeros(len(h)) for name in ("g", "ga"))
    constant, score = stats.mean.copy(), np.empty(stats.columns.units)
    for unit in range(stats.columns.units):
        own = stats.columns.of_units([unit])
        within = np.ix_(own, own)
        wanted = ha[within].sum(1) - g[own]
        moved = scipy.linalg.pinvh(h[within], rtol=FLAT) @ (wanted - h[within] @ constant[own])
        constant[own] += moved
        best = constant[own]
        score[unit] = 0.5 * (best @ h[within] @ best + aha[within].sum()) - best @ wanted - ga[own].sum()
    return Scores(score / stats.samples, constant, np.zeros(len(constant), dtype=bool))


def removal(c: Context) -> Scores:
    """s_h = Δ_h(0) = −1/n Σga + 1/2n Σha² (eq. head-removal-score)."""
    zero = np.zeros_like(c.stats.mean)
    risk = constant_risk(c.stats, zero, gradient=c.gradient)
    return Scores(_by_unit(c.stats, risk), zero, np.zeros(len(zero), dtype=bool))


def norm(c: Context) -> Scores:
    """s_h = E‖head_h‖², per sample: Δ_h(0) at g = 0 and uniform curvature (eq. head-variance-score, α = 2)."""
    zero = np.zeros_like(c.stats.mean)
    columns = (c.stats.variance + c.stats.mean**2) * (c.stats.count / c.stats.samples)
    return Scores(_by_unit(c.stats, columns), zero, np.zeros(len(zero), dtype=bool))


def taylor(c: Context) -> Scores:
    """s_j = E|g a|: the first-order change of the loss if the unit were zero."""
    columns = c.stats.wanted("abs_ga", "curvature") / c.stats.samples
    return Scores(_by_unit(c.stats, columns), np.zeros_like(columns), np.zeros(len(columns), dtype=bool))


def magnitude(c: Context) -> Scores:
    """s_j = ‖W_j,:‖²: the squared norm of the weights that make the unit."""
    scores = (incoming(c.program, c.stats.columns) ** 2).sum(1)
    return Scores(scores, c.stats.mean, np.zeros(c.stats.columns.count, dtype=bool))


def random(c: Context) -> Scores:
    """Scores drawn by the seed."""
    drawn = np.random.default_rng(c.seed).random(c.stats.columns.units)
    return Scores(drawn, c.stats.mean, np.zeros(c.stats.columns.count, dtype=bool))


OBJECTIVES: dict[str, Callable[[Context], Scores]] = {
    "variance": variance,
    "logit": logit,
    "task": task,
    "block": block,
    "removal": removal,
    "norm": norm,
    "taylor": taylor,
    "magnitude": magnitude,
    "random": random,
}
NEEDED: dict[str, tuple[str, ...]] = {
    "task": ("curvature", "range"),
    "block": ("curvature", "coupling"),
    "removal": ("curvature",),
    "taylor": ("curvature",),
}


def score(objective: str, context: Context) -> Scores:
    if objective not in OBJECTIVES:
        raise ObjectiveError(f"objective {objective!r} is not known", fix=f"use one of {', '.join(OBJECTIVES)}")
    return OBJECTIVES[objective](context)


def gram(objective: str, context: Context) -> Array:
    """The matrix G by which residuals of units are weighed together: risk = ½ tr(G E[δδᵀ]), up to a factor of the objective.

    variance: I; logit: WᵀW; task: the mean Gauss-Newton matrix. Objectives of single units have none.
    """
    stats = context.stats
    if objective == "variance":
        return np.eye(stats.columns.count)
    if objective == "logit":
        weight = outgoing(context.program, stats.columns)
        return np.asarray(weight.T @ weight)
    if objective == "task":
        return stats.wanted("H", "coupling") / stats.count
    raise ObjectiveError(
        f"the objective {objective!r} scores units one by one, not together",
        node=stats.columns.name,
        fix='use "logit", "variance" or "task" for joint selection, reconstruction and leave-one-out',
    )


# ---------------------------------------------------------------- the quadratic in one constant


def constant_risk(stats: SiteStats, constant: Array, *, gradient: bool = True) -> Array:
    """Δ(c) of every column, per sample: 1/n [cΣg − Σga + ½(c²Σh − 2cΣha + Σha²)] (eq. taylor-proxy); without gradient g = 0."""
    h, ha, haa = (stats.wanted(name, "curvature") for name in ("h", "ha", "haa"))
    risk = 0.5 * (constant**2 * h - 2 * constant * ha + haa)
    if gradient:
        risk = constant * stats.wanted("g", "curvature") - stats.wanted("ga", "curvature") + risk
    return np.asarray(risk / stats.samples)


@dataclass(frozen=True, slots=True, eq=False)
class Decomposition:
    """c* = Σha/Σh − Σg/Σh of every column (eq. cstar-decomp): the curvature-weighted mean less the gradient part."""

    weighted_mean: Array
    gradient: Array
    flat: Array  # where Σh is too small for either: the mean stands there, and no gradient part

    @property
    def constant(self) -> Array:
        return self.weighted_mean - self.gradient


def decomposition(stats: SiteStats) -> Decomposition:
    g, h, ha = (stats.wanted(name, "curvature") for name in ("g", "h", "ha"))
    bent = h * stats.variance  # does not change when a unit is rescaled
    flat = bent <= FLAT * float(np.abs(bent).max())
    whole = np.where(flat, 1.0, h)
    return Decomposition(np.where(flat, stats.mean, ha / whole), np.where(flat, 0.0, g / whole), flat)


def optimal_constant(stats: SiteStats, *, clip: bool = True, gradient: bool = True) -> tuple[Array, Array]:
    """c* = (Σha − Σg)/Σh, and where it is undefined: there the mean stands instead. Clipped to the calibrated range."""
    parts = decomposition(stats)
    constant = parts.constant if gradient else parts.weighted_mean
    if clip:
        constant = np.clip(constant, stats.wanted("low", "range"), stats.wanted("high", "range"))
    return constant, parts.flat


def _at_mean(stats: SiteStats, columns: Array) -> Scores:
    return Scores(_by_unit(stats, columns), stats.mean, np.zeros(len(columns), dtype=bool))


def _by_unit(stats: SiteStats, columns: Array) -> Array:
    return np.asarray(stats.columns.by_unit(columns).sum(-1))
