"""A stream: the same values as runs from the beginning, every piece run once for a batch."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from nets import Branches, data, exported, seeded, traced
from tolerances import EXACT_F64, distance

import cmrc
from cmrc.planning.stream import Stream
from cmrc.statistics.batches import batches
from cmrc.statistics.calibrate import Taps
from cmrc.verification.pieces import Part

SITES = ("act_a", "act_b", "act_c", "act_early")


@pytest.fixture(params=["fx", "onnx"])
def program(request: pytest.FixtureRequest) -> cmrc.Program:
    made = traced(seeded(Branches()), 5)
    return made if request.param == "fx" else exported(made)


def parts(x: np.ndarray) -> list[np.ndarray]:
    return [x[:20], x[20:50], x[50:]]


@pytest.mark.parametrize("budget", [2**30, 4000, 0])
def test_values_are_those_of_runs_from_the_beginning(program: cmrc.Program, budget: int) -> None:
    x, _ = data(60, 5)
    sites = [program.find(name)[0] for name in SITES]
    stream, plan = Stream(program, [site.value for site in sites], budget), cmrc.Plan(program)
    assert [SITES[i] for i in stream.order()] == ["act_a", "act_early", "act_b", "act_c"]
    for i in stream.order():
        host = program.clamped(plan) if len(plan) else program.host
        taps, plain = stream.at(sites[i].value, host), Taps(program.host, host, [sites[i].value])
        for number, batch in enumerate(batches(parts(x), program.host.inputs)):
            a, b = (found.original(number, batch)[sites[i].value] for found in (taps, plain))
            assert distance(a, b) < EXACT_F64
            a_moved, b_moved = (found.running(number, batch)[sites[i].value] for found in (taps, plain))
            assert distance(a_moved, b_moved) < EXACT_F64
            moved = distance(b_moved, b)
            assert (moved > 1e-3) == (SITES[i] in ("act_b", "act_c"))
        plan.do(
            sites[i].name, units=[0, 2], affine=cmrc.Affine((1, 3), np.array([[1.0, 2.0], [0.5, -1.0]]), np.ones(2))
        )


def test_every_piece_runs_once_for_a_batch(program: cmrc.Program, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = Counter[tuple[str, ...]]()
    made = cmrc.planning.stream._outputs_of
    monkeypatch.setattr(
        "cmrc.planning.stream._outputs_of", lambda part, values: ran.update([part.outputs]) or made(part, values)
    )
    x, _ = data(60, 5)
    cmrc.plan(program, data=parts(x), sites=list(SITES), preset="joint", keep=4, recompute="fits")
    # three batches; the first piece is the same with and without replacements
    assert sorted(ran.values()) == [3, 6]


def test_plans_do_not_depend_on_what_is_held(program: cmrc.Program, monkeypatch: pytest.MonkeyPatch) -> None:
    x, _ = data(60, 5)
    options = {"data": parts(x), "sites": list(SITES), "preset": "joint", "keep": 4, "recompute": "fits"}
    held = cmrc.plan(program, **options)
    monkeypatch.setattr("cmrc.planning.stream.Stream.values", lambda *_: None)
    anew = cmrc.plan(program, **options)
    for a, b in zip(held.entries, anew.entries, strict=True):
        assert (a.site, a.units, a.parents) == (b.site, b.units, b.parents)
        assert distance(a.weight, b.weight) < 1e-6
        assert distance(a.constant, b.constant) < 1e-6


def test_fits_make_up_for_what_the_stream_of_a_residual_block_has_lost(
    program: cmrc.Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, _ = data(400, 5)
    sites = [program.find(name)[0].value for name in SITES]
    beside = Stream(program, sites).beside
    # what act_c's and act_early's ops are added to comes only after act_b, which is no earlier than they are
    assert list(beside) == sites[:2]
    assert beside[sites[0]].value == program.graph.inputs[0].name
    z, options = program.run([x])[0], {"sites": ["act_a", "act_b"], "preset": "joint", "keep": 3, "recompute": "fits"}

    def error() -> float:
        plan = cmrc.plan(program, data=[x[:100], x[100:]], **options)
        return float(((cmrc.lower(program, plan).host.run([x])[0] - z) ** 2).mean())

    with_stream = error()
    monkeypatch.setattr("cmrc.planning.stream.Stream._beside", lambda *_: None)
    assert with_stream < 0.97 * error()


def test_what_a_stream_has_lost_is_the_same_in_parts_and_at_once(program: cmrc.Program) -> None:
    x, _ = data(60, 5)
    site = program.find("act_b")[0].value
    plan = cmrc.Plan(program).do("act_a", units=[0, 2], constant=1.0)
    host, need = program.clamped(plan), ("scatter", "drift")
    found = []
    for given in (parts(x), [x]):
        taps = Stream(program, [program.find("act_a")[0].value, site]).at(site, host)
        found.append(cmrc.calibrate(program, given, sites=site, need=need, host=host, taps=taps)[site].arrays)
    for name in ("lost", "lost_cross", "cross", "origin"):
        assert distance(found[0][name], found[1][name]) < EXACT_F64
    weight = program.graph.leaves().get("back_a.weight")
    a = program.run([x], [program.find("act_a")[0].value])[-1][:, [0, 2]] - 1.0
    if weight is not None:  # the names of an exported file are others
        lost = a @ weight.load()[:, [0, 2]].T
        assert distance(found[1]["lost"], lost.mean(0)) < EXACT_F64


def test_a_part_without_outputs_is_not_extracted(program: cmrc.Program) -> None:
    assert Part.make(program.host, (), (), frozenset()).runner is None
