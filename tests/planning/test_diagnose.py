"""The diagnostics: bounds hold, norms are right, predictions are measured by clamping."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from nets import Net, Tokens, activations, data, mlp, seeded, traced
from tolerances import EXACT_F64, distance
from torch import nn
from torch.nn import functional

import cmrc
from cmrc.errors import StatsError
from cmrc.planning import advice, diagnose
from cmrc.planning.advice import examine
from cmrc.planning.objectives import constant_risk, optimal_constant
from cmrc.planning.recipe import make_recipe

NEEDS = ("curvature", "range", "coupling")


def test_the_off_diagonal_ratio_bounds_what_adding_up_leaves_out() -> None:
    rng = np.random.default_rng(0)
    factor = rng.normal(size=(12, 8))
    curvature = factor.T @ factor
    for units in ([0, 3, 5], [1, 2, 4, 6, 7]):
        coupled = diagnose.coupling_of(curvature, units)
        block = curvature[np.ix_(units, units)]
        assert coupled.ratio == pytest.approx(np.linalg.norm(block - np.diag(np.diag(block))) / np.linalg.norm(block))
        assert coupled.smallest == pytest.approx(np.linalg.eigvalsh(block)[0])
        for _ in range(200):
            delta = rng.normal(size=len(units))
            apart = abs(0.5 * delta @ block @ delta - 0.5 * delta @ (block.diagonal() * delta))
            assert apart <= coupled.bound(delta) * (1 + 1e-12)
            assert apart <= coupled.relative * (0.5 * delta @ block @ delta) * (1 + 1e-12)
    assert diagnose.coupling_of(np.diag([1.0, 2.0]), [0, 1]).ratio == 0.0
    assert diagnose.coupling_of(np.zeros((2, 2)), [0, 1]).ratio == 0.0
    assert diagnose.coupling_of(np.ones((2, 2)), [0, 1]).relative == np.inf


def test_blocks_of_a_site_are_taken_from_its_curvature() -> None:
    program, (x, y) = mlp(), data(50, 5)
    stats = cmrc.calibrate(program, [(x, y)], sites="acts.1", need=NEEDS)["acts.1"]
    weight = program.graph.leaves()["layers.2.weight"].load()
    p = torch.from_numpy(program.run([x])[0]).softmax(1).numpy()
    middle = np.diag(p.mean(0)) - p.T @ p / 50
    coupled = diagnose.coupling(stats, size=4, blocks=3)
    assert len(coupled) == 3
    for block in coupled:
        expected = diagnose.coupling_of(weight.T @ middle @ weight, block.units)
        assert block.ratio == pytest.approx(expected.ratio)


def test_power_iteration_finds_the_spectral_norm() -> None:
    rng = np.random.default_rng(0)
    for shape in ((4, 9), (9, 4), (30, 30)):
        matrix = rng.normal(size=shape)
        assert diagnose.spectral_norm(matrix, steps=5000) == pytest.approx(np.linalg.norm(matrix, 2), rel=1e-8)


def test_kappa_bounds_the_third_derivative_of_cross_entropy_and_is_reached() -> None:
    rng, largest = np.random.default_rng(0), 0.0
    for _ in range(3000):
        z, v = 3 * rng.normal(size=3), rng.normal(size=3)
        v /= np.linalg.norm(v)
        p = np.exp(z) / np.exp(z).sum()
        largest = max(largest, abs(p @ (v - p @ v) ** 3))
    assert 0.8 * diagnose.KAPPA["cross-entropy"] < largest <= diagnose.KAPPA["cross-entropy"]


@pytest.mark.parametrize("site", ["acts.0", "acts.1"])
def test_the_remainder_stays_within_its_bound(site: str) -> None:
    """Small perturbations, so that no segment crosses a kink: there the bound must hold for every unit."""
    model = seeded(Net((5, 7, 6, 4)), 1)
    with torch.no_grad():  # far from every kink
        model.layers[0].bias += 6.0
        model.layers[1].bias += 40.0
    program, (x, y) = traced(model, 5), data(40, 5)
    x = 0.2 * x
    stats = cmrc.calibrate(program, [(x, y)], sites=site, need=NEEDS)[site]
    constants, _ = optimal_constant(stats)
    bound = diagnose.remainder(program, stats, constants)
    assert list(bound.norms) == (["layers.2"] if site == "acts.0" else [])
    predicted = constant_risk(stats, constants)

    def loss(host: object) -> float:
        z = torch.from_numpy(host.run([x])[0])  # type: ignore[attr-defined]
        return float(functional.cross_entropy(z, torch.from_numpy(y)))

    assert (activations(program, x, site) > 0).all()
    for unit, c in enumerate(constants):
        plan = cmrc.Plan(program).do(site, units=[unit], constant=c)
        error = abs(loss(program.clamped(plan)) - loss(program.host) - predicted[unit])
        assert error <= bound.bound[unit]
        assert error > 0


class Branched(nn.Module):
    """linear, ReLU, then the sum of a branch through a batch norm and a factor and of the units themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.act, self.inner, self.head = nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 7), nn.Linear(7, 4)
        self.norm = nn.BatchNorm1d(7, affine=False)

    def branch(self, h: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.inner(h))) * 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.act(self.enter(x))
        return self.head(self.branch(h) + h).flatten(1)


def test_the_remainder_is_bounded_through_branches() -> None:
    """By hand, and against the slopes of the logits themselves; away from kinks the bound holds for every unit."""
    model = seeded(Branched(), 2)
    with torch.no_grad():
        model.norm.running_var.uniform_(0.5, 2.0)
        model.enter.bias += 6.0
        model.inner.bias += 40.0
    program, (x, y) = traced(model, 5), data(40, 5)
    x = 0.2 * x
    stats = cmrc.calibrate(program, [(x, y)], sites="act", need=NEEDS)["act"]
    constants, _ = optimal_constant(stats)
    bound = diagnose.remainder(program, stats, constants)
    assert list(bound.norms) == ["head"]
    head, inner = (layer.weight.detach().double().numpy() for layer in (model.head, model.inner))
    scale = float((1 / (model.norm.running_var + model.norm.eps).sqrt()).max())
    growth = (bound.lipschitz / diagnose.KAPPA["cross-entropy"]) ** (1 / 3)
    assert growth == pytest.approx(np.linalg.norm(head, 2) * (0.5 * scale * np.linalg.norm(inner, axis=0) + 1), 1e-5)
    h = model.act(model.enter(torch.from_numpy(x))).detach()
    slopes = torch.autograd.functional.jacobian(lambda a: model.head(model.branch(a) + a).sum(0), h)
    assert (slopes.norm(dim=0) <= torch.from_numpy(growth)).all()
    predicted, plain = constant_risk(stats, constants), program.host.run([x])[0]

    def loss(z: np.ndarray) -> float:
        return float(functional.cross_entropy(torch.from_numpy(z).double(), torch.from_numpy(y)))

    assert diagnose.kinks(program, stats, constants, [(x, y)]).holds
    for unit, c in enumerate(constants):
        moved = program.clamped(cmrc.Plan(program).do("act", units=[unit], constant=c)).run([x])[0]
        assert 0 < abs(loss(moved) - loss(plain) - predicted[unit]) <= bound.bound[unit]


def test_the_bound_is_refused_where_it_does_not_hold() -> None:
    program, (x, y) = traced(seeded(Net((5, 7, 6, 4), nn.GELU)), 5), data(20, 5)
    stats = cmrc.calibrate(program, [(x, y)], sites="acts.0", need=NEEDS)["acts.0"]
    with pytest.raises(StatsError, match="the bound is for networks of linear ops, ReLUs and sums"):
        diagnose.remainder(program, stats, stats.mean)
    tokens = traced(seeded(Tokens()), 3, 6)
    stats = cmrc.calibrate(tokens, [data(5, 3, 6)[0]], sites="act")["act"]
    with pytest.raises(StatsError, match="the bound is for units that are one number of a sample"):
        diagnose.remainder(tokens, stats, stats.mean)


@pytest.mark.parametrize("loss", ["cross-entropy", "kl", "logit", "squared-error"])
def test_predictions_are_compared_with_what_clamping_does(loss: str) -> None:
    program, (x, y) = mlp(), data(300, 5)
    targets = y if loss != "squared-error" else data(300, 4, seed=4)[0]
    stats = cmrc.calibrate(program, [(x, targets)], sites="acts.1", need=NEEDS, loss=loss)
    predicted = diagnose.predictions(program, stats, "acts.1", [(x, targets)], loss=loss)
    assert predicted.units == tuple(range(6))
    assert predicted.correlation > 0.9
    exact = loss in ("logit", "squared-error")  # quadratic in the unit
    assert distance(predicted.predicted, predicted.measured) < (EXACT_F64 if exact else 0.1)
    if loss == "cross-entropy":
        with pytest.raises(StatsError, match="the data have no labels"):
            diagnose.predictions(program, stats, "acts.1", [x])


def test_more_data_bring_the_kept_set_closer() -> None:
    program, (x, y) = mlp((5, 16, 12, 4)), data(800, 5)
    parts = [(x[i : i + 20], y[i : i + 20]) for i in range(0, 800, 20)]
    sensitivities = diagnose.sensitivity(program, parts, "acts.0", make_recipe(preset="joint"), parts=(0.025, 0.5))
    assert [s.samples for s in sensitivities] == [20, 400, 800]
    assert sensitivities[0].jaccard < sensitivities[1].jaccard <= sensitivities[2].jaccard == 1.0


def test_mu_is_that_of_the_perturbations_considered() -> None:
    """H is singular where there are fewer logits than units; on the span of the perturbations the relative bound still holds."""
    rng = np.random.default_rng(0)
    factor, directions = rng.normal(size=(3, 6)), rng.normal(size=(2, 6))
    curvature = factor.T @ factor
    deltas = rng.normal(size=(50, 2)) @ directions
    whole, spanned = (diagnose.coupling_of(curvature, range(6), p) for p in (None, deltas))
    assert whole.relative == np.inf
    quotients = [d @ curvature @ d / (d @ d) for d in deltas]
    assert 0 < spanned.smallest <= min(quotients)
    for delta in deltas:
        apart = abs(0.5 * delta @ curvature @ delta - 0.5 * delta @ (curvature.diagonal() * delta))
        assert apart <= spanned.relative * (0.5 * delta @ curvature @ delta) * (1 + 1e-9)


def test_kinks_are_found_where_a_replacement_crosses_one() -> None:
    """Against the pattern of the next ReLU at many points of the way from a to c."""
    program, (x, y) = mlp(), data(40, 5)
    stats = cmrc.calibrate(program, [(x, y)], sites="acts.*", need=NEEDS)
    constants, _ = optimal_constant(stats["acts.0"])
    counted = diagnose.kinks(program, stats["acts.0"], constants, [(x, y)], count=7)
    a = activations(program, x, "acts.0")
    weight, bias = (program.graph.leaves()[f"layers.1.{name}"].load() for name in ("weight", "bias"))
    for unit, share in zip(counted.units, counted.share, strict=True):
        patterns = []
        for part in np.linspace(0, 1, 101):
            moved = a.copy()
            moved[:, unit] += part * (constants[unit] - a[:, unit])
            patterns.append(moved @ weight.T + bias > 0)
        crossed = (np.stack(patterns) != patterns[0]).any(axis=(0, 2))
        assert share == crossed.mean()
    assert not counted.holds
    last = diagnose.kinks(program, stats["acts.1"], optimal_constant(stats["acts.1"])[0], [(x, y)])
    assert last.holds


def test_every_finding_has_a_number_and_a_sentence_of_advice() -> None:
    program, (x, y) = mlp(), data(200, 5)
    parts = [(x[i : i + 50], y[i : i + 50]) for i in range(0, 200, 50)]
    findings = examine(program, parts, make_recipe(loss="cross-entropy"), sites=["acts.0", "acts.1"], count=4)
    assert [(f.site, f.what) for f in findings] == [
        (site, what) for site in ("acts.0", "acts.1") for what in ("coupling", "predictions", "kinks", "sensitivity")
    ]
    assert all(f.value is not None and f.advice.endswith(".") for f in findings)
    by_name = {(f.site, f.what): f for f in findings}
    assert len(by_name["acts.0", "predictions"].points) == 4
    assert [samples for samples, _ in by_name["acts.0", "sensitivity"].points] == [50.0, 100.0, 200.0]
    assert by_name["acts.1", "kinks"].good
    assert not by_name["acts.0", "kinks"].good


@pytest.mark.parametrize(
    ("measured", "start"),
    [([1.0, 2.0, 3.0], "The scores rank"), ([2.0, 1.0, 2.5], "Units cost about the same (within a factor of 2.5)"),
     ([9.0, 1.0, 3.0], "The scores rank units unlike"), ([1.0, -1.0, 1.0], "The scores rank units unlike")],
)  # fmt: skip
def test_units_that_cost_about_the_same_need_no_order(measured: list[float], start: str) -> None:
    shown = diagnose.Predictions((0, 1, 2), np.array([1.0, 2.0, 3.0]), np.array(measured))
    assert advice._predictions("a", shown).advice.startswith(start)


def test_where_the_remainder_has_no_bound_the_advice_says_why() -> None:
    program, (x, y) = mlp(act=nn.GELU), data(60, 5)
    findings = examine(program, [(x, y)], make_recipe(loss="kl"), sites="acts.0", count=2)
    (kinks,) = (f for f in findings if f.what == "kinks")
    assert (
        kinks.advice
        == "The remainder has no bound here (the bound is for networks of linear ops, ReLUs and sums): trust measured loss."
    )
    assert not kinks.good


def test_where_curvature_is_not_known_the_reason_stands_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object, **options: object) -> None:
        if "curvature" in options["need"]:  # type: ignore[operator]
            raise StatsError("there are no gradients here", fix="none")
        return calibrate(*arguments, **options)  # type: ignore[arg-type, return-value]

    calibrate = cmrc.calibrate
    monkeypatch.setattr(advice, "calibrate", refused)
    program, (x, y) = mlp(), data(120, 5)
    findings = examine(program, [(x[:60], y[:60]), (x[60:], y[60:])], make_recipe(loss="kl"), sites="acts.0", count=2)
    assert [f.what for f in findings] == ["curvature", "sensitivity"]
    assert findings[0].value is None
    assert findings[0].advice == "not known here: there are no gradients here. Judge plans by cmrc verify."
