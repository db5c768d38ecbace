"""A plan written on the model itself: it survives saving, loading and exporting again, and lowers to the same result."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from differential.models import chain, randomise, to_onnx
from tolerances import EXACT_F32, MOVES, distance
from torch import nn

import cmrc
from cmrc.hosts.autograd.arrays import to_numpy

BATCH = torch.export.Dim("n", min=1, max=64)


def network() -> nn.Module:
    return randomise(
        chain(
            conv=nn.Conv2d(3, 6, 3),
            bn=nn.BatchNorm2d(6),
            act=nn.ReLU(),
            flat=nn.Flatten(),
            fc1=nn.Linear(72, 80),
            gelu=nn.GELU(),
            fc2=nn.Linear(80, 4),
        )
    ).eval()


X = torch.randn(4, 3, 6, 5, generator=torch.Generator().manual_seed(2))


def fx_program() -> cmrc.Program:
    return cmrc.trace(network(), (X,), dynamic_shapes=({0: BATCH},))


def onnx_program() -> cmrc.Program:
    return cmrc.trace(to_onnx(torch.export.export(network(), (X,), dynamic_shapes=({0: BATCH},))))


def planned(program: cmrc.Program) -> cmrc.Plan:
    """Constants, an affine map, and enough numbers that they are packed."""
    plan = cmrc.Plan(program)
    plan.do("act", units=[1, 4], constant=[0.7, 1.9])
    plan.do("gelu", units=range(70), constant=np.linspace(-2, 2, 70))
    plan.do("gelu", units=[71, 72], affine=cmrc.Affine([74, 79], [[0.5, -0.3], [0.2, 0.8]], [0.1, -0.4]))
    return plan


@pytest.fixture(scope="module", params=["fx", "onnx"])
def program(request: pytest.FixtureRequest) -> cmrc.Program:
    return fx_program() if request.param == "fx" else onnx_program()


def feed(program: cmrc.Program, x: torch.Tensor = X) -> tuple[object, ...]:
    return (x,) if program.host.kind == "fx" else (to_numpy(x),)


def same_plan(given: cmrc.Plan | None, wanted: cmrc.Plan) -> bool:
    assert given is not None
    return all(
        (a.value, a.axis, a.units, a.parents) == (b.value, b.axis, b.units, b.parents)
        and np.array_equal(a.constant, b.constant)
        and (a.weight is None) == (b.weight is None)
        and (a.weight is None or np.array_equal(a.weight, b.weight))
        for a, b in zip(given.entries, wanted.entries, strict=True)
    )


def same_result(model: object, wanted: cmrc.Lowered, **options: object) -> bool:
    lowered = cmrc.lower(model, **options)
    x = feed(lowered.program)
    return (
        lowered.check(x).holds
        and distance(lowered.host.run(x)[0], wanted.host.run(feed(wanted.program))[0]) <= EXACT_F32
    )


def test_the_annotated_program_knows_its_plan(program: cmrc.Program) -> None:
    plan = planned(program)
    annotated = program.annotate(plan)
    assert program.plan is None
    assert same_plan(annotated.plan, plan)
    assert [entry.site for entry in annotated.plan.entries] == ["act", "gelu", "gelu"]


def test_it_runs_literally(program: cmrc.Program) -> None:
    plan = planned(program)
    (output,) = program.annotate(plan).run(feed(program))
    (wanted,) = program.clamped(plan).run(feed(program))
    (plain,) = program.run(feed(program))
    assert np.array_equal(output, wanted)
    assert distance(plain, wanted) >= MOVES * EXACT_F32


def test_it_lowers_without_being_given_a_plan(program: cmrc.Program) -> None:
    plan = planned(program)
    assert same_result(program.annotate(plan), cmrc.lower(program, plan))


def test_annotating_again_replaces_the_plan(program: cmrc.Program) -> None:
    other = cmrc.Plan(program).do("act", units=[0], constant=0.5)
    annotated = program.annotate(planned(program)).annotate(other)
    assert same_plan(annotated.plan, other)


def test_the_result_carries_no_annotation(program: cmrc.Program, tmp_path: Path) -> None:
    lowered = cmrc.lower(program.annotate(planned(program)))
    assert lowered.host.annotations() == []


# ---------------------------------------------------------------- torch


def test_torch_export_save_and_load(tmp_path: Path) -> None:
    program = fx_program()
    plan = planned(program)
    torch.export.save(program.annotate(plan).host.to_exported(), tmp_path / "annotated.pt2")
    loaded = cmrc.trace(torch.export.load(tmp_path / "annotated.pt2"))
    assert same_plan(loaded.plan, plan)
    assert same_result(loaded, cmrc.lower(program, plan))


def test_torch_export_again() -> None:
    program = fx_program()
    plan = planned(program)
    module = program.annotate(plan).host.to_exported().module()
    again = cmrc.trace(torch.export.export(module, (X,), dynamic_shapes=({0: BATCH},)))
    assert same_plan(again.plan, plan)
    assert same_result(again, cmrc.lower(program, plan))


def test_the_annotated_export_computes_the_plain_model() -> None:
    program = fx_program()
    output = program.annotate(planned(program)).host.to_exported().module()(X)
    assert distance(output.detach().numpy(), network()(X).detach().numpy()) <= EXACT_F32


# ---------------------------------------------------------------- ONNX


@pytest.mark.parametrize("source", ["file", "ModelProto"])
def test_onnx_save_and_load(source: str, tmp_path: Path) -> None:
    program = onnx_program()
    plan = planned(program)
    path = tmp_path / "annotated.onnx"
    program.annotate(plan).save(path)
    loaded = cmrc.trace(path if source == "file" else onnx.load(path))
    assert same_plan(loaded.plan, plan)
    assert same_result(loaded, cmrc.lower(program, plan))


def test_torch_annotations_reach_the_onnx_file(tmp_path: Path) -> None:
    program = fx_program()
    plan = planned(program)
    program.annotate(plan).save(tmp_path / "annotated.onnx")
    loaded = cmrc.trace(tmp_path / "annotated.onnx")
    assert loaded.plan is not None
    wanted = cmrc.lower(program, plan).host.run((X,))[0]
    assert distance(cmrc.lower(loaded).host.run((to_numpy(X),))[0], wanted) <= EXACT_F32
