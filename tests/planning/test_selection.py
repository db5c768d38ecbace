"""Which units go: orders of removal, their optimality, and what rescaling must not change."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from nets import Net, data, seeded, traced
from site_samples import correlated, stats_of
from tolerances import EXACT_F64, distance

import cmrc
from cmrc.ir.axes import complement
from cmrc.planning import fits as replace
from cmrc.planning.objectives import constant_risk, optimal_constant
from cmrc.planning.selection import bottom, eliminate, eliminate_for_interchange, greedy


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
