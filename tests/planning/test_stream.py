"""A stream: the same values as runs from the beginning, every piece run once for a batch."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from nets import Branches, data, exported, seeded, traced
from tolerances import ACROSS_F32, EXACT_F64, distance

import cmrc
from cmrc.planning.planner import plan_sizes
from cmrc.planning.stream import Original, Stream
from cmrc.statistics.batches import batches
from cmrc.statistics.calibrate import Taps
from cmrc.statistics.readers import beside, joining
from cmrc.verification.pieces import Part

SITES = ("act_a", "act_b", "act_c", "act_early")


@pytest.fixture(params=["fx", "onnx"])
def program(request: pytest.FixtureRequest) -> cmrc.Program:
    traced_model = traced(seeded(Branches()), 5)
    return traced_model if request.param == "fx" else exported(traced_model)


def parts(x: np.ndarray) -> list[np.ndarray]:
    return [x[:20], x[20:50], x[50:]]


@pytest.mark.parametrize("budget", [2**30, 4000, 0])
def test_values_are_those_of_runs_from_the_beginning(program: cmrc.Program, budget: int) -> None:
    x, _ = data(60, 5)
    sites = [program.find(name)[0] for name in SITES]
    stream, plan = Stream(Original(program, [site.value for site in sites]), budget), cmrc.Plan(program)
    assert [SITES[i] for i in stream.order()] == ["act_a", "act_early", "act_b", "act_c"]
    for i in stream.order():
        host = program.clamped(plan) if len(plan) else program.host
        taps, plain = stream.at(sites[i].value, host), Taps(program.host, host, [sites[i].value])
        for number, batch in enumerate(batches(parts(x), program.host.inputs)):
            a, b = (taps_of.original(number, batch)[sites[i].value] for taps_of in (taps, plain))
            assert distance(a, b) < EXACT_F64
            a_moved, b_moved = (taps_of.running(number, batch)[sites[i].value] for taps_of in (taps, plain))
            assert distance(a_moved, b_moved) < EXACT_F64
            moved = distance(b_moved, b)
            assert (moved > 1e-3) == (SITES[i] in ("act_b", "act_c"))
        plan.do(
            sites[i].name, units=[0, 2], affine=cmrc.Affine((1, 3), np.array([[1.0, 2.0], [0.5, -1.0]]), np.ones(2))
        )


def test_replacements_lie_in_the_weights_of_the_ops_that_read_them(program: cmrc.Program) -> None:
    """The same values as with clamps, and no clamp runs where linear ops alone read the units."""
    x, _ = data(60, 5)
    sites = [program.find(name)[0] for name in SITES]
    names, mapped = [site.value for site in sites], np.array([[1.0, 2.0], [0.5, -1.0]])
    plan = cmrc.Plan(program)
    for site in sites[:2]:
        plan.do(site.name, units=[0, 2], affine=cmrc.Affine((1, 3), mapped, np.ones(2)))
    clamped, stream = program.clamped(plan), Stream(Original(program, names))
    direct = {e.value for e in plan.entries if {n.op for n in program.consumers[e.value]} <= {"linear", "conv"}}
    assert names[0] in direct
    nodes = stream.folded(plan, range(1, len(stream.cut.pieces))).nodes
    assert {node.inputs[0] for node in nodes if node.op == "select" and not node.origin} == direct
    assert {node.inputs[0] for node in nodes if node.op == "do"} == {e.value for e in plan.entries} - direct
    taps = stream.at(names[2], clamped, plan)
    for number, batch in enumerate(batches(parts(x), program.host.inputs)):
        expected = Taps(program.host, clamped, [names[2]]).running(number, batch)[names[2]]
        moved = taps.running(number, batch)[names[2]]
        assert distance(moved, expected) < ACROSS_F32
        assert distance(moved, taps.original(number, batch)[names[2]]) > 1e-3


def test_every_piece_runs_once_for_a_batch(program: cmrc.Program, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = Counter[tuple[str, ...]]()
    outputs_of = cmrc.planning.stream._outputs_of
    monkeypatch.setattr(
        "cmrc.planning.stream._outputs_of", lambda part, values: ran.update([part.outputs]) or outputs_of(part, values)
    )
    x, _ = data(60, 5)
    cmrc.plan(program, data=parts(x), sites=list(SITES), preset="joint", keep=4, recompute="fits")
    # three batches; the first piece is the same with and without replacements
    assert sorted(ran.values()) == [3, 6]


@pytest.mark.parametrize(("shared", "least", "most"), [(2**30, 12, 12), (6000, 13, 17), (0, 18, 18)])
def test_sizes_share_the_values_of_the_original(
    program: cmrc.Program, shared: int, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One plan, or the same plan after a larger one: the same bits, and the original's pieces run once for a batch if they fit."""
    ran = Counter[Part]()
    outputs_of = cmrc.planning.stream._outputs_of
    monkeypatch.setattr(
        "cmrc.planning.stream._outputs_of", lambda part, values: ran.update([part]) or outputs_of(part, values)
    )
    monkeypatch.setattr("cmrc.planning.planner.SHARED", shared)
    x, _ = data(60, 5)
    options = {"data": parts(x), "sites": list(SITES), "preset": "joint", "recompute": "fits"}
    stats = cmrc.calibrate(program, parts(x), sites=list(SITES), need="scatter")
    alone = cmrc.plan(program, stats, keep=3, **options)
    ran.clear()
    _, after_another = plan_sizes(program, stats, [{"keep": 4}, {"keep": 3}], **options)
    for a, b in zip(alone.entries, after_another.entries, strict=True):
        assert (a.site, a.units, a.parents) == (b.site, b.units, b.parents)
        assert np.array_equal(a.weight, b.weight)
        assert np.array_equal(a.constant, b.constant)
    # three batches: two pieces of the original for each size, and one of each size's own model
    assert least <= sum(ran.values()) <= most


def test_a_batch_of_the_original_is_known_by_its_contents(program: cmrc.Program) -> None:
    """Data that come in another order in the next pass get the values of their own rows."""
    x, _ = data(60, 5)
    site = program.find("act_b")[0].value
    original = Original(program, [program.find("act_a")[0].value, site], 2**30)
    for rows in (parts(x), parts(x)[::-1]):
        stream = Stream(original)
        taps, plain = stream.at(site, program.host), Taps(program.host, program.host, [site])
        for number, batch in enumerate(batches(rows, program.host.inputs)):
            assert distance(taps.original(number, batch)[site], plain.original(number, batch)[site]) < EXACT_F64
            assert taps.running(number, batch)[site] is taps.original(number, batch)[site]  # nothing is replaced yet


def test_a_site_that_loses_no_unit_is_not_fitted_again(program: cmrc.Program, monkeypatch: pytest.MonkeyPatch) -> None:
    calibrated: list[str] = []
    calibrate = cmrc.calibrate
    monkeypatch.setattr(
        "cmrc.planning.planner.calibrate", lambda *a, **o: calibrated.extend(o["sites"]) or calibrate(*a, **o)
    )
    x, _ = data(60, 5)
    sites = {name: program.find(name)[0] for name in SITES}
    stats = calibrate(program, parts(x), sites=list(SITES), need="scatter")
    keep = {"act_a": 4, "act_early": 4, "act_b": sites["act_b"].units, "act_c": 4}
    plan = cmrc.plan(program, stats, data=parts(x), sites=list(SITES), preset="joint", keep=keep, recompute="fits")
    assert calibrated == [sites[name].value for name in ("act_early", "act_c")]
    assert {entry.value for entry in plan.entries} == {site.value for name, site in sites.items() if name != "act_b"}


@pytest.mark.parametrize("drift_ridge", [None, 1.0])
def test_ranking_along_the_stream_plans_what_a_pass_before_it_does(
    program: cmrc.Program, drift_ridge: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, _ = data(60, 5)
    ran = Counter[int]()
    calibrated = cmrc.calibrate
    monkeypatch.setattr(
        "cmrc.planning.planner.calibrate",
        lambda *a, **options: ran.update([len(options["sites"])]) or calibrated(*a, **options),
    )
    given = {"sites": list(SITES), "preset": "joint", "keep": 4, "drift_ridge": drift_ridge}
    along = cmrc.plan(program, data=parts(x), recompute="fits", **given)
    assert ran == {1: 4}  # each site once
    stats = calibrated(program, parts(x), sites=list(SITES), need="scatter")
    before = cmrc.plan(program, stats, data=parts(x), recompute="fits", **given)
    assert (along.made["data"], along.made["samples"]) == (before.made["data"], 60)
    assert [list(along.made["sites"]), list(along.scores)] == [list(before.made["sites"]), list(before.scores)]
    for a, b in zip(along.entries, before.entries, strict=True):
        assert (a.site, a.units, a.parents) == (b.site, b.units, b.parents)
        assert distance(a.constant, b.constant) < ACROSS_F32
        assert distance(a.weight, b.weight) < ACROSS_F32


def test_plans_do_not_depend_on_what_is_held(program: cmrc.Program, monkeypatch: pytest.MonkeyPatch) -> None:
    x, _ = data(60, 5)
    options = {"data": parts(x), "sites": list(SITES), "preset": "joint", "keep": 4, "recompute": "fits"}
    plan = cmrc.plan(program, **options)
    monkeypatch.setattr("cmrc.planning.stream.Stream.values", lambda *_: None)
    anew = cmrc.plan(program, **options)
    for a, b in zip(plan.entries, anew.entries, strict=True):
        assert (a.site, a.units, a.parents) == (b.site, b.units, b.parents)
        assert distance(a.weight, b.weight) < 1e-6
        assert distance(a.constant, b.constant) < 1e-6


def test_fits_make_up_for_what_the_stream_of_a_residual_block_has_lost(
    program: cmrc.Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, _ = data(400, 5)
    sites = [program.find(name)[0].value for name in SITES]
    beside = Original(program, sites).beside
    # what act_c's and act_early's ops are added to comes only after act_b, which is no earlier than they are
    assert list(beside) == sites[:2]
    assert beside[sites[0]].value == program.graph.inputs[0].name
    z, options = program.run([x])[0], {"sites": ["act_a", "act_b"], "preset": "joint", "keep": 3, "recompute": "fits"}

    def error() -> float:
        plan = cmrc.plan(program, data=[x[:100], x[100:]], **options)
        return float(((cmrc.lower(program, plan).host.run([x])[0] - z) ** 2).mean())

    with_stream = error()
    monkeypatch.setattr("cmrc.planning.stream.Original._beside", lambda *_: None)
    assert with_stream < 0.97 * error()


class Dropping(torch.nn.Module):
    """norm(x + drop(down(act(up(x))))) of tokens, twice, as BERT is built: exported, a product and a sum make `down`."""

    def __init__(self) -> None:
        super().__init__()
        self.ups = torch.nn.ModuleList(torch.nn.Linear(5, 12) for _ in range(2))
        self.acts = torch.nn.ModuleList(torch.nn.GELU() for _ in range(2))
        self.downs = torch.nn.ModuleList(torch.nn.Linear(12, 5) for _ in range(2))
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(5) for _ in range(2))
        self.drop, self.head = torch.nn.Dropout(0.1), torch.nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, act, down, norm in zip(self.ups, self.acts, self.downs, self.norms, strict=True):
            x = norm(x + self.drop(down(act(up(x)))))
        return self.head(x)


@pytest.mark.parametrize("host", ["fx", "onnx"])
def test_idle_dropout_and_a_bias_may_stand_before_the_sum(host: str) -> None:
    x = np.random.default_rng(0).normal(size=(40, 7, 5)).astype(np.float32)
    model, shapes = seeded(Dropping(), 1).float().eval(), ({0: torch.export.Dim("batch")},)
    traced_model = cmrc.trace(model, (torch.from_numpy(x[:2]),), dynamic_shapes=shapes)
    program = traced_model if host == "fx" else exported(traced_model)
    sites = [program.find(f"acts.{i}")[0].value for i in range(2)]
    beside = Original(program, sites).beside
    assert [beside[site].value for site in sites] == [program.graph.inputs[0].name, program.find("norms.0")[0].value]


class Bottlenecks(torch.nn.Module):
    """x + norm(down(act(norm(up(x))))), a few times, as mobile networks are built."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 6, 3, padding=1)
        self.ups = torch.nn.ModuleList(torch.nn.Conv2d(6, 16, 1, bias=False) for _ in range(3))
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm2d(16) for _ in range(3))
        self.acts = torch.nn.ModuleList(torch.nn.ReLU() for _ in range(3))
        self.downs = torch.nn.ModuleList(torch.nn.Conv2d(16, 6, 1, bias=False) for _ in range(3))
        self.last = torch.nn.ModuleList(torch.nn.BatchNorm2d(6) for _ in range(3))
        self.head = torch.nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for parts in zip(self.ups, self.norms, self.acts, self.downs, self.last, strict=True):
            y = x
            for part in parts:
                y = part(y)
            x = x + y
        return self.head(x.mean((2, 3)))


def bottlenecks(host: str) -> tuple[cmrc.Program, np.ndarray]:
    """Batch norm has scales and statistics of its own, so that a wrong scale of the lost part shows."""
    model = seeded(Bottlenecks(), 1).float()
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for norm in (*model.norms, *model.last):
            for tensor, low, high in ((norm.weight, 0.3, 2), (norm.running_var, 0.2, 3), (norm.running_mean, -1, 1)):
                tensor.copy_(torch.from_numpy(rng.uniform(low, high, len(tensor))))
    x = rng.normal(size=(160, 3, 5, 5)).astype(np.float32)
    program = cmrc.trace(model.eval(), (torch.from_numpy(x[:2]),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    return program if host == "fx" else exported(program), x


@pytest.mark.parametrize("host", ["fx", "onnx"])
def test_fits_make_up_for_a_stream_of_convolutions_with_batch_norm_between(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, x = bottlenecks(host)
    sites = [program.find(f"acts.{i}")[0].value for i in range(3)]
    assert list(Original(program, sites).beside) == sites
    z = program.run([x])[0]

    def error() -> float:
        plan = cmrc.plan(program, data=[x[:80], x[80:]], sites=sites, preset="joint", keep=0.5, recompute="fits")
        return float(((cmrc.lower(program, plan).host.run([x])[0] - z) ** 2).mean())

    with_stream = error()
    monkeypatch.setattr("cmrc.planning.stream.Original._beside", lambda *_: None)
    assert with_stream < 0.9 * error()


def test_weights_that_join_a_stream_are_those_of_the_norm_too() -> None:
    program, x = bottlenecks("fx")
    columns = cmrc.calibrate(program, [x[:8]], sites="acts.1")["acts.1"].columns
    beside_it, leaves = beside(program, columns), program.graph.leaves()
    assert beside_it is not None
    name = program.producers[program.find("downs.1")[0].value]
    behind = program.consumers[program.consumers[name.name][0].name][0]
    a, other, total = program.run([x], [columns.value, beside_it.value, behind.name])[-3:]
    weight = joining(program, columns)
    assert weight.shape == (6, 16)
    bias, mean, scale = (leaves[f"last.1.{part}"].load() for part in ("bias", "running_mean", "weight"))
    shift = bias - mean * scale / np.sqrt(leaves["last.1.running_var"].load() + 1e-5)
    rebuilt = np.einsum("oc,nchw->nohw", weight, a) + shift[:, None, None]
    assert distance(rebuilt, total - other) < 1e-5


def test_what_a_stream_has_lost_is_the_same_in_parts_and_at_once(program: cmrc.Program) -> None:
    x, _ = data(60, 5)
    site = program.find("act_b")[0].value
    plan = cmrc.Plan(program).do("act_a", units=[0, 2], constant=1.0)
    host, need = program.clamped(plan), ("scatter", "drift")
    results = []
    for given in (parts(x), [x]):
        taps = Stream(Original(program, [program.find("act_a")[0].value, site])).at(site, host)
        results.append(cmrc.calibrate(program, given, sites=site, need=need, host=host, taps=taps)[site].arrays)
    for name in ("lost", "lost_cross", "cross", "origin"):
        assert distance(results[0][name], results[1][name]) < EXACT_F64
    weight = program.graph.leaves().get("back_a.weight")
    a = program.run([x], [program.find("act_a")[0].value])[-1][:, [0, 2]] - 1.0
    if weight is not None:  # the names of an exported file are others
        lost = a @ weight.load()[:, [0, 2]].T
        assert distance(results[1]["lost"], lost.mean(0)) < EXACT_F64


def test_a_part_without_outputs_is_not_extracted(program: cmrc.Program) -> None:
    assert Part.make(program.host, (), (), frozenset()).runner is None
