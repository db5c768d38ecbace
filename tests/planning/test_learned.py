"""Affine maps that are learned on swaps: least KL where logits are linear in the units, folded exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from nets import Net, activations, data, mlp, seeded, traced
from scipy.optimize import minimize
from tolerances import EXACT_F64, distance

import cmrc
from cmrc.planning import fits
from cmrc.planning import learned as module
from cmrc.planning.learned import hesitant, learnable, learned
from cmrc.statistics.columns import Columns
from cmrc.statistics.site_stats import SiteStats
from cmrc.verification.evidence import log_softmax

NEED = ("scatter", "rows")
SAMPLED = 0.05  # between moments of 7,680 swaps and of 420,000


def site(rows: np.ndarray) -> SiteStats:
    stats = SiteStats(Columns("site", "site", 1, rows.shape[1]), frozenset(NEED))
    stats.add(rows)
    return stats


def test_the_map_has_the_least_divergence_under_swaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a minimiser that knows nothing of bases, coordinates or held-out rows, on swaps of its own."""
    monkeypatch.setattr(module, "SWAPS", 8192)
    rng = np.random.default_rng(0)
    rows = np.maximum(rng.normal(size=(1500, 6)) @ rng.normal(size=(6, 6)) + 0.3, 0)
    weight, bias = rng.normal(size=(3, 6)), rng.normal(size=3)
    replaced, keep = [1, 4, 5], [0, 2, 3]
    base, source = rng.integers(len(rows), size=(2, 20_000))
    mixed = np.where(rng.random((len(base), 3)) < 0.5, rows[source][:, keep], rows[base][:, keep])
    log_p = log_softmax(mixed @ weight[:, keep].T + bias + rows[base][:, replaced] @ weight[:, replaced].T)

    def divergence(slope: np.ndarray, shift: np.ndarray) -> float:
        log_q = log_softmax(mixed @ (weight[:, keep] + slope).T + bias + shift)
        return float((np.exp(log_p) * (log_p - log_q)).sum(1).mean())

    def of(fit: fits.Fit) -> float:
        assert fit.weight is not None
        return divergence(weight[:, replaced] @ fit.weight, weight[:, replaced] @ fit.bias)

    first = fits.affine(site(rows), replaced, interchange=0.5)
    learned_map = learned(site(rows), replaced, first, weight, bias, interchange=0.5)
    least = minimize(lambda t: divergence(t[:9].reshape(3, 3), t[9:]), np.zeros(12), options={"maxiter": 300}).fun
    squares = of(first)
    assert learned_map.parents == tuple(keep)
    assert of(learned_map) < least + 0.02 * (squares - least) + 1e-3
    assert of(learned_map) < 0.8 * squares
    again = learned(site(rows), replaced, first, weight, bias, interchange=0.5)
    assert again.weight is not None
    assert learned_map.weight is not None
    assert np.array_equal(learned_map.weight, again.weight)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_a_swap_counts_by_how_unsure_its_answer_is(monkeypatch: pytest.MonkeyPatch, p: float) -> None:
    """The moments against those of swaps drawn here; without swaps every row comes equally often, so they are exact."""
    monkeypatch.setattr(module, "SELECTED", 60 * 128)
    monkeypatch.setattr(module, "PART", 60 * 4)
    rng = np.random.default_rng(3)
    rows = np.maximum(rng.normal(size=(60, 5)) @ rng.normal(size=(5, 5)) + 0.3, 0)
    weight, bias = 3 * rng.normal(size=(3, 5)), rng.normal(size=3)
    gram, (among, cross, own) = hesitant(site(rows), weight, bias, interchange=p)
    base, source = np.arange(420_000) % 60, rng.integers(60, size=420_000)
    mixed = np.where(rng.random((len(base), 5)) < p, rows[source], rows[base])
    q = np.exp(log_softmax(mixed @ weight.T + bias))
    expected = np.cov(np.hstack([mixed, rows[base]]).T, aweights=1 - (q**2).sum(1), ddof=0)
    fisher = np.einsum("ni,ij->ij", q, np.eye(3)) / len(q) - q.T @ q / len(q)
    allowed = EXACT_F64 if p == 0 else SAMPLED
    assert distance(gram, weight.T @ fisher @ weight) < allowed
    assert distance(among, expected[:5, :5]) < allowed
    assert distance(cross, expected[:5, 5:]) < allowed
    assert distance(own, expected[5:, 5:]) < allowed


def test_where_every_answer_is_certain_plain_moments_decide() -> None:
    rng = np.random.default_rng(4)
    rows, weight = rng.normal(size=(60, 4)), rng.normal(size=(3, 4))
    gram, (among, cross, own) = hesitant(site(rows), weight, np.array([1e6, 0.0, 0.0]), interchange=0.5)
    covariance = site(rows).covariance
    assert distance(gram, weight.T @ weight) == 0.0
    for learned_map, wanted in zip(
        (among, cross, own), (*fits.swapped(covariance, covariance, 0.5), covariance), strict=True
    ):
        assert distance(learned_map, wanted) == 0.0


def test_units_that_reach_nothing_keep_the_first_fit() -> None:
    rng = np.random.default_rng(1)
    rows, weight = rng.normal(size=(60, 4)), rng.normal(size=(3, 4))
    weight[:, [1, 2]] = 0.0
    first = fits.affine(site(rows), [1, 2], interchange=0.5)
    fit = learned(site(rows), [1, 2], first, weight, np.zeros(3), interchange=0.5)
    assert first.weight is not None
    assert fit.weight is not None
    assert distance(fit.weight, first.weight) == 0.0


def test_a_learned_plan_folds_exactly_and_beats_least_squares_in_kl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SWAPS", 4096)
    model = seeded(Net((5, 16, 12, 4)))
    with torch.no_grad():
        model.layers[-1].weight *= 12.0  # logits as far apart as a trained network's
    program, (x, y) = traced(model, 5), data(600, 5)
    options = {"sites": ["acts.1"], "keep": 4, "data": [(x, y)]}
    plan = cmrc.plan(program, preset="joint-learned", **options)
    squares = cmrc.plan(program, preset="joint-interchange", **options)
    lowered = cmrc.lower(program, plan)
    assert lowered.check((x[:8],)).holds
    fresh = data(600, 5, seed=2)
    kl, other = (cmrc.verify(program, p, [fresh], swaps=2000, controls=False).kl.value for p in (plan, squares))
    assert kl < 0.9 * other


def test_where_logits_are_not_linear_in_the_units_the_least_squares_fit_stays_and_the_plan_says_so() -> None:
    program, (x, y) = mlp(), data(60, 5)
    document = {
        preset: cmrc.plan(program, data=[(x, y)], sites=["acts.0"], preset=preset, keep=4)
        for preset in ("joint-learned", "joint-interchange")
    }
    assert document["joint-learned"].made["sites"]["acts.0"]["learned"] is False
    one, other = (plan.entries[0] for plan in document.values())
    assert one.units == other.units
    assert np.array_equal(np.asarray(one.weight), np.asarray(other.weight))
    few = cmrc.calibrate(program, [(x[:5], y[:5])], sites="acts.1", need=NEED)["acts.1"]
    enough = cmrc.calibrate(program, [(x, y)], sites="acts.1", need=NEED)["acts.1"]
    assert learnable(program, few) is None
    logits = learnable(program, enough)
    assert logits is not None
    z = activations(program, x, "acts.1") @ logits[0].T + logits[1]
    assert distance(z, program.run([x])[0]) < EXACT_F64
