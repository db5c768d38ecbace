"""Scores, replacements and selections against brute force: every formula of the paper that the code claims."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from nets import Convs, Net, Tokens, activations, data, exported, mlp, seeded, traced
from scipy.optimize import minimize, minimize_scalar
from tolerances import ACROSS_F32, EXACT_F64, distance
from torch import nn
from torch.nn import functional

import cmrc
from cmrc.errors import ObjectiveError
from cmrc.ir.axes import complement
from cmrc.planning import fits as replace
from cmrc.planning.objectives import Context, constant_risk, gram, optimal_constant, score
from cmrc.planning.selection import bottom, eliminate, eliminate_for_interchange, greedy
from cmrc.statistics.columns import Columns
from cmrc.statistics.readers import outgoing, readers
from cmrc.statistics.site_stats import SiteStats

EVERYTHING = ("scatter", "range", "curvature", "coupling", "rows")


def stats_of(rows: np.ndarray, g: np.ndarray | None = None, h: np.ndarray | None = None) -> SiteStats:
    stats = SiteStats(Columns("site", "site", 1, rows.shape[1]), frozenset(EVERYTHING))
    stats.add(rows, gradient=g, curvature=h)
    return stats


def correlated(n: int, d: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) + rng.normal(size=d)


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


# ---------------------------------------------------------------- who reads


def test_readers_are_found_behind_reshapes_norms_and_pools() -> None:
    program = traced(seeded(Convs()), 2, 4, 4)
    columns = {
        name: cmrc.calibrate(program, [data(4, 2, 4, 4)[0]], sites=name)[name].columns
        for name in ("act1", "act2", "bn")
    }
    leaves = program.graph.leaves()
    kernel = leaves["conv2.weight"].load()
    matrix = outgoing(program, columns["act1"])
    assert distance((matrix**2).sum(0), (kernel**2).sum((0, 2, 3))) < EXACT_F64
    assert distance(matrix.T @ matrix, np.einsum("oihw,ojhw->ij", kernel, kernel)) < EXACT_F64
    head = leaves["head.weight"].load().reshape(4, 5, 4)  # a plane of 2 x 2 for each channel
    assert distance(outgoing(program, columns["act2"]).T @ outgoing(program, columns["act2"]),
                    np.einsum("ocp,odp->cd", head, head)) < EXACT_F64  # fmt: skip
    assert [reader.exact for reader in readers(program, columns["bn"])] == [False]  # a relu lies between
    assert [reader.exact for reader in readers(program, columns["act2"])] == [True]


def test_a_scaling_on_the_way_to_a_reader_counts() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.act, self.fc2 = nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)
            self.register_buffer("scale", torch.tensor([2.0, -0.5, 1.0, 3.0]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc2(self.act(self.fc1(x)) * self.scale)

    program = traced(seeded(Scaled()), 5)
    columns = cmrc.calibrate(program, [data(8, 5)[0]], sites="act")["act"].columns
    weight, scale = (program.graph.leaves()[name].load().astype(np.float64) for name in ("fc2.weight", "scale"))
    expected = weight * scale
    assert distance(outgoing(program, columns), expected) < EXACT_F64


def test_a_group_of_a_convolution_reads_its_own_channels() -> None:
    program = traced(seeded(nn.Sequential(nn.Conv2d(2, 4, 1), nn.ReLU(), nn.Conv2d(4, 6, 1, groups=2))), 2, 3, 3)
    columns = cmrc.calibrate(program, [data(4, 2, 3, 3)[0]], sites="1")["1"].columns
    weight = program.graph.leaves()["2.weight"].load().astype(np.float64)[:, :, 0, 0]
    whole = np.zeros((6, 4))
    whole[:3, :2], whole[3:, 2:] = weight[:3], weight[3:]
    read = outgoing(program, columns)
    assert distance(read.T @ read, whole.T @ whole) < EXACT_F64


def test_a_transposed_convolution_has_its_inputs_first() -> None:
    program = traced(seeded(nn.Sequential(nn.Conv2d(2, 3, 1), nn.ReLU(), nn.ConvTranspose2d(3, 5, 1))), 2, 3, 3)
    columns = cmrc.calibrate(program, [data(4, 2, 3, 3)[0]], sites="1")["1"].columns
    weight = program.graph.leaves()["2.weight"].load().astype(np.float64)[:, :, 0, 0]
    read = outgoing(program, columns)
    assert distance(read.T @ read, weight @ weight.T) < EXACT_F64


def test_readers_of_heads_and_of_values_that_nothing_affine_reads() -> None:
    program = traced(seeded(Tokens()), 3, 6)
    x, _ = data(4, 3, 6)
    name = next(site.name for site in program.sites(folds=False) if site.op == "attention")
    columns = cmrc.calibrate(program, [x], sites=name)[name].columns
    assert distance(outgoing(program, columns), program.graph.leaves()["proj.weight"].load()) < EXACT_F64
    with pytest.raises(ObjectiveError, match="no affine op reads its units"):
        outgoing(program, cmrc.calibrate(program, [x], sites="head")["head"].columns)
    with pytest.raises(ObjectiveError, match="no affine op before it makes its units one by one"):
        score("magnitude", Context(program, cmrc.calibrate(program, [x], sites=name)[name]))


def test_both_hosts_read_alike() -> None:
    program = traced(seeded(Convs()).float(), 2, 4, 4)
    x = data(4, 2, 4, 4)[0].astype(np.float32)
    for site in ("act1", "act2"):
        grams = []
        for each in (program, exported(program)):
            weight = outgoing(each, cmrc.calibrate(each, [x], sites=site)[site].columns)
            grams.append(weight.T @ weight)
        assert distance(*grams) < ACROSS_F32


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


# ---------------------------------------------------------------- selection


def test_units_of_equal_score_go_by_number() -> None:
    order = bottom(np.array([2.0, 1.0, 1.0, 0.5, 2.0, 1.0]))
    assert order.units.tolist() == [3, 1, 2, 5, 0, 4]
    assert order.added.tolist() == [0.5, 1.0, 1.0, 1.0, 2.0, 2.0]
    assert order.first(3) == (1, 2, 3)


def test_the_ridge_of_the_elimination_is_relative_to_each_variance() -> None:
    """The first unit adds ‖w_j‖²/P_jj with P = (C + λ diag C)⁻¹."""
    a = correlated(200, 6) * np.array([1.0, 10.0, 0.1, 1.0, 5.0, 1.0])
    covariance, gram_of_outputs = np.cov(a.T, bias=True), np.diag([1.0, 0.2, 3.0, 1.0, 0.5, 2.0])
    for ridge in (0.5, 0.01):
        inverse = np.linalg.inv(covariance + ridge * np.diag(covariance.diagonal()))
        costs = gram_of_outputs.diagonal() / inverse.diagonal()
        order = eliminate(gram_of_outputs, covariance, ridge=ridge)
        assert order.units[0] == costs.argmin()
        assert distance(order.added[0], costs.min()) < 1e-9


def test_elimination_leaves_the_moments_as_they_were() -> None:
    """It works in place, on matrices of its own."""
    covariance = np.cov(correlated(60, 8).T, bias=True)
    readout = np.random.default_rng(1).normal(size=(3, 8))
    gram_of_outputs = readout.T @ readout
    before = covariance.copy(), gram_of_outputs.copy()
    eliminate(gram_of_outputs, covariance)
    assert np.array_equal(covariance, before[0])
    assert np.array_equal(gram_of_outputs, before[1])


def test_the_smallest_scores_are_the_best_set_under_diagonal_curvature() -> None:
    """Theorem (additivity): risks add up, and no other set of that size is better."""
    rng = np.random.default_rng(0)
    a, g, h = rng.normal(size=(30, 6)), 0.3 * rng.normal(size=(30, 6)), rng.gamma(1.0, size=(30, 6))
    stats = stats_of(a, g, h)
    constant, _ = optimal_constant(stats, clip=False)
    scores = constant_risk(stats, constant)

    def joint(units: tuple[int, ...]) -> float:
        chosen = list(units)
        delta = constant[chosen] - a[:, chosen]
        return float(np.mean((g[:, chosen] * delta + 0.5 * h[:, chosen] * delta**2).sum(1)))

    for count in range(1, 6):
        every = {units: joint(units) for units in combinations(range(6), count)}
        best = min(every, key=every.__getitem__)
        assert bottom(scores).first(count) == best
        assert abs(every[best] - scores[list(best)].sum()) < EXACT_F64


def risk_of(units: list[int], covariance: np.ndarray, weights: np.ndarray, p: float | None) -> float:
    """tr(G_SS · residual covariance) by definition: p is None for constants."""
    chosen, keep = np.array(units), complement(units, len(covariance))
    residual = covariance[np.ix_(chosen, chosen)]
    if p is not None and len(keep):
        among, cross = replace.swapped(covariance[np.ix_(keep, keep)], covariance[np.ix_(keep, chosen)], p)
        residual = residual - cross.T @ np.linalg.solve(among, cross)
    return float(np.trace(weights[np.ix_(chosen, chosen)] @ residual))


@pytest.mark.parametrize("rule", ["greedy", "eliminate", "interchange 0", "interchange 0.5"])
@pytest.mark.parametrize("first", [(), (4, 1)])
def test_every_step_removes_the_unit_that_adds_the_least(
    rule: str, first: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cmrc.planning.selection.BLOCK", 3)  # several blocks
    covariance = np.cov(correlated(60, 8).T, bias=True)
    readout = np.random.default_rng(1).normal(size=(3, 8))
    weights = readout.T @ readout
    p = {"greedy": None, "eliminate": 0.0, "interchange 0": 0.0, "interchange 0.5": 0.5}[rule]
    if rule == "greedy":
        order = greedy(weights, covariance, first=first)
    elif rule == "eliminate":
        order = eliminate(weights, covariance, ridge=0.0, first=first)
    else:
        moments = replace.swapped(covariance, covariance, p)
        order = eliminate_for_interchange(weights, *moments, covariance, ridge=0.0, first=first)
    assert sorted(order.units) == list(range(8))
    gone: list[int] = []
    before = 0.0
    for unit, added in zip(order.units[:-1], order.added[:-1], strict=True):
        left = [u for u in range(8) if u not in gone and (u in first or not set(first) - set(gone))]
        costs = {u: risk_of([*gone, u], covariance, weights, p) - before for u in left}
        assert unit == min(costs, key=costs.__getitem__)
        assert added == pytest.approx(costs[unit], rel=1e-6, abs=1e-9)
        gone.append(int(unit))
        before += costs[unit]


def test_elimination_is_near_the_best_set_and_beats_single_scores() -> None:
    won, ratios = 0, []
    for seed in range(12):
        covariance = np.cov(correlated(60, 8, seed).T, bias=True)
        readout = np.random.default_rng(seed).normal(size=(3, 8))
        weights = readout.T @ readout
        best = min(risk_of(list(s), covariance, weights, 0.0) for s in combinations(range(8), 4))
        chosen = risk_of(list(eliminate(weights, covariance).first(4)), covariance, weights, 0.0)
        single = bottom(weights.diagonal() * covariance.diagonal()).first(4)
        ratios.append(chosen / best)
        won += chosen <= risk_of(list(single), covariance, weights, 0.0) + 1e-9
    assert np.median(ratios) < 1.2
    assert won >= 10


def test_dead_units_go_first_and_break_nothing() -> None:
    a = correlated(50, 6)
    a[:, 2] = 0.5
    stats, weights = stats_of(a), np.eye(6)
    for order in (
        eliminate(weights, stats.covariance),
        eliminate_for_interchange(weights, *replace.swapped(*[stats.covariance] * 2, 0.5), stats.covariance),
        greedy(weights, stats.covariance),
    ):
        assert order.units[0] == 2
        assert order.added[0] == pytest.approx(0.0, abs=1e-9)
    fit = replace.affine(stats, [0, 1])
    assert np.isfinite(fit.weight).all()


# ---------------------------------------------------------------- invariance


def rescaled(model: Net, site: int, seed: int) -> Net:
    """The same function: incoming weights times s, outgoing divided by it, s ~ LogUniform[0.01, 100]."""
    import copy

    other = copy.deepcopy(model)
    width = model.layers[site].out_features
    scale = torch.from_numpy(np.exp(np.random.default_rng(seed).uniform(np.log(0.01), np.log(100), width)))
    with torch.no_grad():
        other.layers[site].weight *= scale[:, None]
        other.layers[site].bias *= scale
        other.layers[site + 1].weight /= scale
    return other


def test_kept_sets_do_not_depend_on_exact_rescalings_of_relu_units() -> None:
    model = seeded(Net((10, 64, 64, 10)), 7)
    x, y = data(300, 10, classes=10)
    invariant = ("cmr-logit", "joint", "joint-interchange", "reconstruction", "cmr-const")
    kept: dict[str, list[set[int]]] = {}
    z = None
    for seed in (None, 0, 1, 2, 3):
        net = model if seed is None else rescaled(model, 0, seed)
        program = traced(net, 10)
        if z is None:
            z = program.run([x])[0]
        assert distance(program.run([x])[0], z) < EXACT_F64
        needs = ("scatter", "range", "curvature", "coupling")
        stats = cmrc.calibrate(program, [(x, y)], sites="acts.0", need=needs)
        for preset in (*invariant, "vbp", "magnitude"):
            plan = cmrc.plan(program, stats, sites=["acts.0"], preset=preset, keep=0.5)
            kept.setdefault(preset, []).append(set(complement(plan.entries[0].units, 64).tolist()))
    overlaps = {
        preset: [len(first & other) / len(first | other) for other in others]
        for preset, (first, *others) in kept.items()
    }
    for preset in invariant:
        assert overlaps[preset] == [1.0] * 4, preset
    for preset in ("vbp", "magnitude"):
        assert 0.2 < np.mean(overlaps[preset]) < 0.5


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
