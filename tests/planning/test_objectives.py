"""Scores, replacements and selections against brute force: every formula of the paper that the code claims."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from nets import Tokens, activations, data, mlp, seeded, traced
from scipy.optimize import minimize, minimize_scalar
from site_samples import EVERYTHING, correlated, stats_of
from tolerances import EXACT_F64, distance
from torch import nn
from torch.nn import functional

import cmrc
from cmrc.errors import ObjectiveError
from cmrc.ir.axes import complement
from cmrc.planning import fits as replace
from cmrc.planning.objectives import Context, constant_risk, gram, optimal_constant, score
from cmrc.planning.selection import bottom
from cmrc.statistics.columns import Columns
from cmrc.statistics.site_stats import SiteStats

# ---------------------------------------------------------------- constants


def test_the_optimal_constant_and_its_score_minimise_the_quadratic() -> None:
    rng = np.random.default_rng(0)
    a, g, h = rng.normal(1, 1, (40, 5)), rng.normal(size=(40, 5)), rng.gamma(1.0, size=(40, 5))
    stats = stats_of(a, g, h)
    constant, fell_back = optimal_constant(stats, clip=False)
    risk = constant_risk(stats, constant)
    assert not fell_back.any()
    for j in range(5):
        best = minimize_scalar(lambda c, j=j: np.mean(g[:, j] * (c - a[:, j]) + 0.5 * h[:, j] * (c - a[:, j]) ** 2))
        assert abs(best.x - constant[j]) < 1e-6
        assert abs(best.fun - risk[j]) < EXACT_F64
        # eq. score-closed, as printed
        n = len(a)
        printed = (a[:, j] @ (h[:, j] * a[:, j])) / (2 * n) - g[:, j] @ a[:, j] / n
        printed -= (h[:, j] @ a[:, j] - g[:, j].sum()) ** 2 / (2 * n * h[:, j].sum())
        assert abs(printed - risk[j]) < EXACT_F64


def test_a_constant_stays_in_range_and_falls_back_to_the_mean_where_the_loss_is_flat() -> None:
    rng = np.random.default_rng(0)
    a, g = rng.normal(1, 1, (40, 3)), rng.normal(5, 1, (40, 3))
    h = np.stack([np.full(40, 1.0), np.full(40, 1e-9), np.full(40, -0.5)], axis=1)
    stats = stats_of(a, g, h)
    wild, _ = optimal_constant(stats, clip=False)
    constant, fell_back = optimal_constant(stats)
    assert fell_back.tolist() == [False, True, True]
    assert wild[0] < a[:, 0].min()
    assert constant[0] == a[:, 0].min()
    assert distance(constant[1:], a[:, 1:].mean(0)) < EXACT_F64


def test_variance_is_recovered_under_uniform_curvature_and_stationarity() -> None:
    """Theorem (VBP): g = 0 and h = α give c* = ā and s = α/2 Var."""
    a = correlated(50, 6)
    stats = stats_of(a, np.zeros_like(a), np.full_like(a, 0.7))
    constant, _ = optimal_constant(stats)
    assert distance(constant, a.mean(0)) < EXACT_F64
    assert distance(constant_risk(stats, constant), 0.35 * a.var(0)) < EXACT_F64
    assert np.array_equal(bottom(constant_risk(stats, constant)).units, bottom(stats.variance).units)


def test_scores_are_what_they_say_on_a_network() -> None:
    program, (x, y) = mlp(), data(60, 5)
    stats = cmrc.calibrate(program, [(x, y)], sites="acts.1", need=EVERYTHING)["acts.1"]
    context, a = Context(program, stats, seed=4), activations(program, x, "acts.1")
    weight = program.graph.leaves()["layers.2.weight"].load()
    incoming = program.graph.leaves()["layers.1.weight"].load()
    assert distance(score("variance", context).score, a.var(0)) < EXACT_F64
    assert distance(score("logit", context).score, a.var(0) * (weight**2).sum(0)) < EXACT_F64
    assert distance(score("magnitude", context).score, (incoming**2).sum(1)) < EXACT_F64
    assert len(set(score("random", context).score)) == 6
    # A logit score is the mean squared change of the logits when the unit is its mean.
    z = program.run([x])[0]
    for j in range(6):
        clamped = cmrc.Plan(program).do("acts.1", units=[j], constant=a[:, j].mean())
        moved = program.clamped(clamped).run([x])[0]
        assert abs(((moved - z) ** 2).sum(1).mean() - score("logit", context).score[j]) < EXACT_F64
    with pytest.raises(ObjectiveError, match="objective 'hope' is not known"):
        score("hope", context)
    with pytest.raises(ObjectiveError, match="the objective 'taylor' scores units one by one, not together"):
        gram("taylor", context)


def test_a_task_score_predicts_the_change_of_the_loss() -> None:
    """To second order: the error of the prediction falls with the third power of the perturbation."""
    program, (x, y) = mlp(), data(400, 5)
    stats = cmrc.calibrate(program, [(x, y)], sites="acts.1", need=EVERYTHING)["acts.1"]

    def loss(host: object) -> float:
        z = torch.from_numpy(host.run([x])[0])  # type: ignore[attr-defined]
        return float(functional.cross_entropy(z, torch.from_numpy(y)))

    constant, _ = optimal_constant(stats)
    predicted = constant_risk(stats, constant)
    for j in range(6):
        plan = cmrc.Plan(program).do("acts.1", units=[j], constant=constant[j])
        measured = loss(program.clamped(plan)) - loss(program.host)
        assert abs(measured - predicted[j]) < 0.15 * max(abs(measured), 0.02)


def test_heads_are_scored_for_removal_and_for_their_best_constant() -> None:
    program, (x, y) = traced(seeded(Tokens()), 3, 6), data(30, 3, 6)
    name = next(site.name for site in program.sites(folds=False) if site.op == "attention")
    for positions, axes in (("all", (0, 2)), ("each", (0,))):
        stats = cmrc.calibrate(
            program, [(x, y)], sites=name, need=EVERYTHING, positions=positions, curvature="gauss-newton"
        )[name]
        a = activations(program, x, name)  # [n, heads, tokens, vector]
        columns = a.transpose(0, 1, 2, 3) if positions == "each" else a.transpose(0, 2, 1, 3)
        rows = columns.reshape(-1, stats.columns.count)
        order = np.lexsort(stats.arrays["rows"].T)
        g, h = (stats.arrays[key][order] for key in ("row_g", "row_h"))
        rows = rows[np.lexsort(rows.T)]
        removal = (-(g * rows) + 0.5 * h * rows**2).sum(0) / 30
        context = Context(program, stats)
        assert distance(score("removal", context).score, removal.reshape(2, -1).sum(1)) < EXACT_F64
        # eq. head-variance-score: without gradients E‖head‖² per sample
        assert distance(score("norm", context).score, (rows**2).sum(0).reshape(2, -1).sum(1) / 30) < EXACT_F64
        bent = h.sum(0) > 1e-9  # with positions="each" nothing reads the later tokens of a head
        constant = np.where(bent, (h * rows - g).sum(0) / np.where(bent, h.sum(0), 1.0), rows.mean(0))
        assert distance(score("task", context).constant, constant) < 1e-7
        best = (g * (constant - rows) + 0.5 * h * (constant - rows) ** 2).sum(0) / 30
        assert distance(score("task", context).score, best.reshape(2, -1).sum(1)) < 1e-7
        assert distance(stats.mean, a.mean(axes).reshape(-1)) < EXACT_F64
    # a constant of its own for every position is never worse
    scores = [
        score("task", Context(program, cmrc.calibrate(
            program, [(x, y)], sites=name, need=EVERYTHING, positions=p, curvature="gauss-newton")[name])).score
        for p in ("all", "each")
    ]  # fmt: skip
    assert (scores[1] <= scores[0] + EXACT_F64).all()


def test_a_block_is_scored_by_all_curvature_between_its_columns() -> None:
    """Against a minimiser of the quadratic itself, with factors B of H = BᵀB for every sample; and of single units it is the task's."""
    rng = np.random.default_rng(0)
    rows, factors, g = rng.normal(size=(50, 6)) + 1.0, rng.normal(size=(50, 4, 6)), rng.normal(size=(50, 6))
    h = (factors**2).sum(1)
    scores = {}
    for features in (1, 3):
        stats = SiteStats(Columns("site", "site", 1, 6 // features, features), frozenset(EVERYTHING))
        stats.add(rows, gradient=g, curvature=h, factors=factors)
        scores[features] = {name: score(name, Context(None, stats)) for name in ("task", "block")}  # type: ignore[arg-type]
    assert distance(scores[1]["block"].score, scores[1]["task"].score) < EXACT_F64
    assert distance(scores[1]["block"].constant, scores[1]["task"].constant) < EXACT_F64
    for unit, own in enumerate((slice(0, 3), slice(3, 6))):

        def risk(c: np.ndarray, own: slice = own) -> float:
            delta = c - rows[:, own]
            moved = np.einsum("nkj,nj->nk", factors[:, :, own], delta)
            return float(((g[:, own] * delta).sum(1) + 0.5 * (moved**2).sum(1)).mean())

        least = minimize(risk, np.zeros(3), options={"gtol": 1e-10})
        assert scores[3]["block"].score[unit] == pytest.approx(least.fun, abs=1e-8)
        assert scores[3]["block"].constant[own] == pytest.approx(least.x, abs=1e-4)
        assert abs(scores[3]["task"].score[unit] - least.fun) > 1e-3


# ---------------------------------------------------------------- replacements


def test_the_joint_refit_minimises_the_coupled_quadratic() -> None:
    program, (x, y) = mlp((5, 7, 6, 4), nn.ReLU), data(80, 5)
    stats = cmrc.calibrate(program, [(x, y)], sites="acts.1", need=EVERYTHING)["acts.1"]
    a = activations(program, x, "acts.1")
    weight = program.graph.leaves()["layers.2.weight"].load()
    p = torch.from_numpy(program.run([x])[0]).softmax(1).numpy()
    hessian = np.einsum(
        "ki,nkl,lj->nij", weight, np.einsum("nk,kl->nkl", p, np.eye(4)) - np.einsum("nk,nl->nkl", p, p), weight
    )
    g = (p - np.eye(4)[y]) @ weight
    chosen = [0, 2, 3]

    def risk(c: np.ndarray) -> float:
        delta = c - a[:, chosen]
        joint = np.einsum("ni,nij,nj->n", delta, hessian[:, chosen][:, :, chosen], delta)
        return float(np.mean((g[:, chosen] * delta).sum(1) + 0.5 * joint))

    free = minimize(risk, a[:, chosen].mean(0), method="BFGS", options={"gtol": 1e-9})
    bias = replace.refit(stats, chosen, clip=False, ridge=1e-12).bias
    assert abs(risk(bias) - free.fun) < 1e-8
    apart = optimal_constant(stats, clip=False)[0][chosen]
    assert risk(bias) < risk(apart)
    clipped = replace.refit(stats, chosen).bias
    assert (clipped >= a[:, chosen].min(0) - EXACT_F64).all()
    assert (clipped <= a[:, chosen].max(0) + EXACT_F64).all()


def test_affine_maps_are_least_squares_and_one_factorisation_serves_all() -> None:
    a = correlated(200, 8)
    stats = stats_of(a)
    fit = replace.affine(stats, [1, 4, 6], ridge=0.0)
    keep = complement([1, 4, 6], 8)
    design = np.concatenate([np.ones((200, 1)), a[:, keep]], axis=1)
    solved = np.linalg.lstsq(design, a[:, [1, 4, 6]], rcond=None)[0]
    assert fit.parents == tuple(keep)
    assert distance(fit.weight, solved[1:].T) < 1e-6
    assert distance(fit.bias, solved[0]) < 1e-6
    alone = replace.affine(stats, range(8))  # no unit stays to rebuild the others from
    assert (alone.parents, alone.weight) == ((), None)
    assert distance(alone.bias, a.mean(0)) < EXACT_F64


def test_the_ridge_is_relative_to_the_variance_of_each_parent() -> None:
    """B = C_SK (C_KK + λ diag C_KK)⁻¹."""
    a = correlated(200, 6) * np.array([1.0, 10.0, 0.1, 1.0, 5.0, 1.0])
    stats, keep = stats_of(a), complement([1, 4], 6)
    covariance = np.cov(a.T, bias=True)
    among = covariance[np.ix_(keep, keep)]
    for ridge in (0.5, 0.01):
        fit = replace.affine(stats, [1, 4], ridge=ridge)
        damped = among + ridge * np.diag(among.diagonal())
        expected = covariance[np.ix_([1, 4], keep)] @ np.linalg.inv(damped)
        assert fit.weight is not None
        assert distance(fit.weight, expected) < 1e-9
        assert distance(fit.bias, a.mean(0)[[1, 4]] - expected @ a.mean(0)[keep]) < 1e-9


def test_leave_one_out_is_leaving_one_out() -> None:
    rng = np.random.default_rng(1)
    a = correlated(30, 9) + 0.5 * rng.normal(size=(30, 9))
    stats, replaced = stats_of(a), np.array([0, 5])
    keep = complement(replaced, 9)
    weight = rng.normal(size=(3, 9))
    left_out = replace.leave_one_out(stats, replaced, keep, weight.T @ weight)

    def error(ridge: float) -> float:
        total = 0.0
        scale = a[:, keep].std(0)
        for i in range(30):
            rest = np.delete(a, i, axis=0)
            centre = a.mean(0)  # the closed form leaves a row out of the fit about the common mean
            x, y = (rest[:, keep] - centre[keep]) / scale, rest[:, replaced] - centre[replaced]
            x = np.concatenate([np.ones((29, 1)), x], axis=1)
            penalty = 30 * ridge * np.diag([0.0, *[1.0] * len(keep)])
            theta = np.linalg.solve(x.T @ x + penalty, x.T @ y)
            row = np.concatenate([[1.0], (a[i, keep] - centre[keep]) / scale])
            left = a[i, replaced] - centre[replaced] - row @ theta
            total += float(((weight[:, replaced] @ left) ** 2).sum())
        return total

    errors = {ridge: error(ridge) for ridge in replace.RIDGES}
    assert left_out == min(errors, key=errors.__getitem__)
    assert left_out > min(replace.RIDGES)  # there is something to regularise
    assert replace.affine(stats, replaced, ridge="loo").ridge in replace.RIDGES


@pytest.mark.parametrize("rule", ["pearson", "output-pearson", "random", "all"])
def test_weighted_least_squares_solve_the_normal_equations(rule: str) -> None:
    rng = np.random.default_rng(0)
    a = correlated(120, 7)
    g, h = 0.1 * rng.normal(size=a.shape), rng.gamma(1.0, size=a.shape)
    stats = stats_of(a, g, h)
    output = rng.normal(size=(4, 7))
    fit = replace.wls(stats, [2, 3], parents=3, rule=rule, ridge=0.0, output=output, seed=1)
    for row, unit in enumerate((2, 3)):
        used = [k for k, w in zip(fit.parents, fit.weight[row], strict=True) if w != 0]
        assert len(used) == (5 if rule == "all" else 3)
        design = np.concatenate([np.ones((120, 1)), a[:, used]], axis=1)
        normal = design.T @ (h[:, [unit]] * design)
        theta = np.linalg.solve(normal, design.T @ (h[:, unit] * a[:, unit]) - design.T @ g[:, unit])
        entries = [fit.weight[row, fit.parents.index(k)] for k in used]
        assert distance(entries, theta[1:]) < 1e-8
        assert abs(fit.bias[row] - theta[0]) < 1e-8
    if rule == "pearson":
        correlation = np.abs(np.corrcoef(a.T))[2, [0, 1, 4, 5, 6]]
        best = {(0, 1, 4, 5, 6)[i] for i in np.argsort(-correlation)[:3]}
        assert best == {k for k, w in zip(fit.parents, fit.weight[0], strict=True) if w != 0}
    with pytest.raises(ObjectiveError, match="the rule 'best' for parents is not known"):
        replace.wls(stats, [2, 3], parents=3, rule="best")


def test_without_parents_weighted_least_squares_are_the_optimal_constant() -> None:
    rng = np.random.default_rng(0)
    a = correlated(60, 4)
    stats = stats_of(a, rng.normal(size=a.shape), rng.gamma(1.0, size=a.shape))
    fit = replace.wls(stats, [1], parents=2, ridge=1e9)
    assert distance(fit.bias, optimal_constant(stats, clip=False)[0][[1]]) < 1e-6


def test_merging_takes_the_most_correlated_unit() -> None:
    a = correlated(100, 6)
    fit = replace.merge(stats_of(a), [0, 3])
    correlation = np.abs(np.corrcoef(a.T))
    for row, unit in enumerate((0, 3)):
        parent = max((k for k in (1, 2, 4, 5)), key=lambda k, unit=unit: correlation[unit, k])
        slope, bias = np.polyfit(a[:, parent], a[:, unit], 1)
        assert fit.weight[row, fit.parents.index(parent)] == pytest.approx(slope)
        assert fit.bias[row] == pytest.approx(bias)
        assert np.count_nonzero(fit.weight[row]) == 1


@pytest.mark.parametrize("p", [0.2, 0.5])
def test_interchange_moments_are_those_of_sampled_swaps(p: float) -> None:
    a, rng = correlated(4000, 6), np.random.default_rng(3)
    covariance = np.cov(a.T, bias=True)
    keep, replaced = np.array([0, 1, 2, 4]), np.array([3, 5])
    among, cross = replace.swapped(covariance[np.ix_(keep, keep)], covariance[np.ix_(keep, replaced)], p)
    sampled, with_replaced = np.zeros_like(among), np.zeros_like(cross)
    for _ in range(60):
        source = a[rng.permutation(len(a))]
        swap = rng.random((len(a), 4)) < p
        mixed = np.where(swap, source[:, keep], a[:, keep])
        both = np.cov(np.concatenate([mixed, a[:, replaced]], axis=1).T, bias=True)
        sampled += both[:4, :4] / 60
        with_replaced += both[:4, 4:] / 60
    scale = np.abs(covariance).max()
    assert np.abs(sampled - among).max() < 0.01 * scale
    assert np.abs(with_replaced - cross).max() < 0.01 * scale


# ---------------------------------------------------------------- what c* is made of


def test_units_are_scored_by_their_unclipped_constant_unless_asked_otherwise() -> None:
    """The constant that is folded is clipped; the order of the units is the paper's."""
    program, (x, y) = mlp(), data(60, 5)
    stats = cmrc.calibrate(program, [(x, y)], sites="acts.1", need=EVERYTHING)
    wild, _ = optimal_constant(stats["acts.1"], clip=False)
    tame, _ = optimal_constant(stats["acts.1"])
    assert (wild != tame).any()
    for clip_scores, constant in ((False, wild), (True, tame)):
        plan = cmrc.plan(program, stats, preset="cmr-const", keep=0.5, clip_scores=clip_scores)
        assert distance(plan.scores["acts.1"], constant_risk(stats["acts.1"], constant)) < EXACT_F64
        (entry,) = plan.entries
        assert distance(entry.constant, tame[list(entry.units)]) < EXACT_F64
    loose = cmrc.plan(program, stats, preset="cmr-const", keep=0.5, clip=False).entries[0]
    assert distance(loose.constant, wild[list(loose.units)]) < EXACT_F64


def test_a_plan_tells_what_its_constants_are_made_of() -> None:
    """c* = Σha/Σh − Σg/Σh (eq. cstar-decomp), for the units that the last step replaced."""
    program, (x, y) = mlp(), data(60, 5)
    stats = cmrc.calibrate(program, [(x, y)], sites="acts.1", need=EVERYTHING)
    rows, g, h = (stats["acts.1"].arrays[name] for name in ("rows", "row_g", "row_h"))
    plan = cmrc.plan(program, stats, preset="cmr-const", keep=0.5, clip=False)
    parts = plan.made["sites"]["acts.1"]["c*"]
    assert parts["units"] == sorted(plan.entries[0].units)
    chosen = parts["units"]
    assert distance(np.array(parts["weighted mean"]), ((h * rows).sum(0) / h.sum(0))[chosen]) < 1e-9
    assert distance(np.array(parts["gradient part"]), (g.sum(0) / h.sum(0))[chosen]) < 1e-9
    folded = np.array(parts["weighted mean"]) - np.array(parts["gradient part"])
    assert distance(np.asarray(plan.entries[0].constant), folded[np.searchsorted(chosen, plan.entries[0].units)]) < 1e-9


def test_without_gradient_a_loss_counts_by_its_curvature_alone() -> None:
    """Cross-entropy without its gradient is the distance to the model's own output: the same h, and g = 0."""
    program, (x, y) = mlp(), data(60, 5)
    task, own = (
        cmrc.calibrate(program, [(x, y)], sites="acts.1", need=EVERYTHING, loss=loss)
        for loss in ("cross-entropy", "kl")
    )
    for options in ({"preset": "cmr-affine"}, {"preset": "cmr-const"}, {"preset": "cmr-const-refit"}):
        plain = cmrc.plan(program, task, keep=0.5, gradient=False, **options)
        zero = cmrc.plan(program, own, keep=0.5, gradient=True, **options)
        bent = cmrc.plan(program, task, keep=0.5, gradient=True, **options)
        assert plain.entries[0].units == zero.entries[0].units
        assert distance(np.asarray(plain.entries[0].constant), np.asarray(zero.entries[0].constant)) < 1e-7
        assert bent.entries[0].units != plain.entries[0].units
    default = cmrc.plan(program, task, keep=0.5, preset="cmr-affine")
    assert (
        default.entries[0].units
        == cmrc.plan(program, task, keep=0.5, preset="cmr-affine", gradient=False).entries[0].units
    )
