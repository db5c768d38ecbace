"""Heads as affine functions of the heads that stay: chosen together, put where their elements lie side by side, folded exactly."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from nets import Tokens, activations, data, exported, seeded, traced
from tolerances import ACROSS_F32, EXACT_F64, distance
from torch import nn

import cmrc
from cmrc.errors import ObjectiveError
from cmrc.planning.selection import eliminate, eliminate_groups, greedy
from cmrc.statistics.readers import elements

HEADS, VECTOR, TOKENS, WIDTH = 4, 3, 3, 12


class Projections(nn.Module):
    """Attention whose queries, keys and values have a projection each."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, _ = x.shape
        q, k, v = (layer(x).reshape(n, t, HEADS, VECTOR).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.proj(mixed.transpose(1, 2).reshape(n, t, WIDTH))


def heads_program(host: str) -> cmrc.Program:
    model = seeded(Tokens(WIDTH, HEADS), seed=3)
    if host == "onnx":  # onnxruntime has no GELU in float64
        return exported(traced(model.float(), TOKENS, WIDTH))
    return traced(model, TOKENS, WIDTH)


def heads_of(program: cmrc.Program) -> cmrc.Site:
    """The first value that holds the heads."""
    return next(site for site in program.sites() if site.units == HEADS and site.folding and site.folding.folds)


@pytest.mark.parametrize("host", ["torch", "onnx"])
@pytest.mark.parametrize("recompute", ["never", "fits"])
def test_heads_become_affine_functions_of_those_that_stay(host: str, recompute: str) -> None:
    program, (x, _) = heads_program(host), data(80, TOKENS, WIDTH)
    x = x.astype(program.graph.inputs[0].dtype)
    site = heads_of(program)
    ffn = next(s for s in program.sites() if s.units == 8 and s.folding and s.folding.folds)
    tolerance = EXACT_F64 if host == "torch" else ACROSS_F32
    asked = {"data": [x[:40], x[40:]], "preset": "joint", "recompute": recompute, "keep": 0.5}
    plan = cmrc.plan(program, sites=[site.name, ffn.name], **asked)
    entry = plan.entries[0]
    assert (len(entry.units), len(entry.parents)) == (2 * VECTOR, 2 * VECTOR)
    assert plan.made["sites"][site.name]["kept"] == 2
    lowered = cmrc.lower(program, plan)
    assert lowered.check((x[:8],)).holds
    clamped = program.clamped(plan).run({program.host.inputs[0]: x[:8]})
    assert distance(lowered.host.run({program.host.inputs[0]: x[:8]})[0], clamped[0]) < tolerance
    assert lowered.report.after.parameters < lowered.report.before.parameters


@pytest.mark.parametrize("host", ["torch", "onnx"])
def test_value_units_of_every_head_become_affine_functions_of_others(host: str) -> None:
    """By hand: the same elements of every head, where the projection reads them."""
    program, (x, _) = traced(seeded(Projections()).float(), TOKENS, WIDTH), data(8, TOKENS, WIDTH)
    program = exported(program) if host == "onnx" else program
    x, rng = x.astype(np.float32), np.random.default_rng(0)
    stats = cmrc.calibrate(program, [x], sites=[heads_of(program).name])
    place = elements(program, next(iter(stats.sites.values())).columns)
    assert place is not None
    units = [VECTOR * head + 1 for head in range(HEADS)]
    parents = [unit for unit in range(WIDTH) if unit not in units]
    mapped = cmrc.Affine(parents, rng.normal(size=(len(units), len(parents))), rng.normal(size=len(units)))
    lowered = cmrc.lower(program, cmrc.Plan(program).do(place.value, units=units, affine=mapped, axis=place.axis))
    assert lowered.check((x,)).holds
    fewer = HEADS * WIDTH + HEADS + HEADS * WIDTH  # rows of the values with their biases, columns of the projection
    assert lowered.report.before.parameters - lowered.report.after.parameters == fewer


def test_the_maps_are_those_of_least_squares_between_elements() -> None:
    program, (x, _) = heads_program("torch"), data(80, TOKENS, WIDTH)
    site = heads_of(program)
    plan = cmrc.plan(program, data=[x], sites=[site.name], preset="joint", keep=0.5)
    (entry,) = plan.entries
    a = activations(program, x, entry.value).reshape(-1, WIDTH).astype(np.float64)
    design = np.column_stack([a[:, entry.parents], np.ones(len(a))])
    wanted = np.linalg.lstsq(design, a[:, entry.units], rcond=None)[0]
    assert entry.weight is not None
    assert distance(entry.weight, wanted[:-1].T) < 1e-3  # a ridge of 1e-6 lies between
    constants = cmrc.plan(program, data=[x], sites=[site.name], preset="reconstruction", keep=0.5)
    errors = []
    for plan_made in (plan, constants):
        run = program.clamped(plan_made).run({program.host.inputs[0]: x})
        errors.append(float(((run[0] - program.run((x,))[0]) ** 2).mean()))
    assert errors[0] < errors[1]


def test_where_heads_were_only_moved_they_are_still_vectors() -> None:
    program, (x, _) = heads_program("torch"), data(40, TOKENS, WIDTH)
    stats = cmrc.calibrate(program, [x], sites="*", need=["scatter"])
    headed = [s.columns for s in stats.sites.values() if s.columns.units == HEADS]
    assert [columns.features for columns in headed] == [VECTOR]
    both = cmrc.calibrate(program, [x], sites=[heads_of(program).name, headed[0].name], need=["scatter"])
    first, moved = both.sites.values()
    assert first.columns.value != moved.columns.value
    assert distance(first.covariance, moved.covariance) < EXACT_F64


def risk(gone: tuple[int, ...], gram: np.ndarray, covariance: np.ndarray, features: int) -> float:
    """tr(G_SS (C_SS − C_SK C_KK⁻¹ C_KS)) of the columns of some units."""
    s = np.array([unit * features + f for unit in gone for f in range(features)])
    k = np.setdiff1d(np.arange(len(gram)), s)
    left = covariance[np.ix_(s, s)]
    if len(k):
        left = left - covariance[np.ix_(s, k)] @ np.linalg.solve(covariance[np.ix_(k, k)], covariance[np.ix_(k, s)])
    return float(np.trace(gram[np.ix_(s, s)] @ left))


def test_groups_are_eliminated_one_by_one_each_at_least_cost() -> None:
    rng = np.random.default_rng(5)
    for features, units in itertools.product((1, 2, 3), (2, 4)):
        rows, weight = rng.normal(size=(200, units * features)), rng.normal(size=(3, units * features))
        rows = rows @ rng.normal(size=(units * features, units * features))
        covariance, gram = np.cov(rows.T, bias=True), weight.T @ weight
        order = eliminate_groups(gram, covariance, features, ridge=0.0)
        total = 0.0
        for step in range(units):
            gone = tuple(order.units[: step + 1])
            total += order.added[step]
            assert total == pytest.approx(risk(gone, gram, covariance, features), rel=1e-6)
            others = [u for u in range(units) if u not in gone[:-1]]
            least = min(risk((*gone[:-1], u), gram, covariance, features) for u in others)
            assert total == pytest.approx(least, rel=1e-6)
        forced = eliminate_groups(gram, covariance, features, ridge=0.0, first=[1])
        assert forced.units[0] == 1
        if features == 1:
            alone = eliminate(gram, covariance, ridge=0.0)
            assert order.units.tolist() == alone.units.tolist()
            assert distance(order.added, alone.added) < EXACT_F64
        means = greedy(gram, covariance, features=features)
        s = [int(means.units[0]) * features + f for f in range(features)]
        assert means.added[0] == pytest.approx(float((gram * covariance)[np.ix_(s, s)].sum()))


def test_what_heads_cannot_become_is_said(tmp_path: Path) -> None:
    program, (x, y) = heads_program("torch"), data(40, TOKENS, WIDTH)
    name = heads_of(program).name
    asked = {"data": [(x, y)], "sites": [name], "keep": 0.5}
    for options, reason in (
        ({"preset": "joint", "positions": "each"}, "an affine map is the same at every position"),
        ({"preset": "joint-interchange"}, "maps for swaps are for units of one number each"),
        ({"preset": "merge"}, "replace: merge is for units of one number each"),
    ):
        with pytest.raises(ObjectiveError, match=reason):
            cmrc.plan(program, **asked, **options)
    whole = cmrc.plan(program, **asked, preset="joint")
    again = cmrc.plan(program, **asked, preset="joint", checkpoint=tmp_path / "unfinished")
    assert [e.units for e in again.entries] == [e.units for e in whole.entries]
