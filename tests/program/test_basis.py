"""A replacement in another basis as an entry of plans: what is refused, files, annotations, differences, and what verifies it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import cli
from nets import exported
from tolerances import EXACT_F32, distance
from torch import nn

import cmrc
from cmrc.errors import CmrcError, ResidueError, VerifyError
from cmrc.program.difference import difference
from cmrc.program.lower import plan_digest
from cmrc.verification.distortion import distortion
from cmrc.verification.interpreter import Interpreter

RNG = np.random.default_rng(0)
BASIS = np.linalg.qr(RNG.normal(size=(2, 3, 3)))[0]
UNITS = {"units": [2, 5], "constant": 0.25}


@pytest.fixture(scope="module")
def program() -> cmrc.Program:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    return cmrc.trace(net.eval(), (torch.randn(3, 4),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))


def planned(program: cmrc.Program, basis: Any = BASIS) -> cmrc.Plan:
    return cmrc.Plan(program).do("0", **UNITS, basis=basis)


REFUSED = {
    "shape": (
        np.eye(4),
        "do-shape: %0 (linear): a basis of shape [4, 4] does not fit 6 units\n  at plan: do[0]\n"
        "  fix: give a square matrix for each block of units, [blocks, size, size] with blocks · size = 6",
    ),
    "singular": (
        np.stack([np.eye(3), np.diag([1.0, 1.0, 1e-5])]),
        "do-value: %0 (linear): matrix 1 of the basis has condition number 1e+05: it cannot be inverted without loss\n"
        "  at plan: do[0]\n  fix: give matrices with condition numbers up to 10000: an orthogonal one has 1",
    ),
    "zero": (
        np.zeros((2, 3, 3)),
        "do-value: %0 (linear): matrix 0 of the basis has condition number inf: it cannot be inverted without loss\n"
        "  at plan: do[0]\n  fix: give matrices with condition numbers up to 10000: an orthogonal one has 1",
    ),
    "not finite": (
        np.full((2, 3, 3), np.nan),
        "do-value: %0 (linear): 18 of the numbers of the basis are NaN or infinite\n  at plan: do[0]\n  fix: give finite numbers",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_basis_that_cannot_be_inverted_is_refused(program: cmrc.Program, name: str) -> None:
    basis, message = REFUSED[name]
    with pytest.raises(CmrcError) as error:
        planned(program, basis)
    assert str(error.value) == message


@pytest.mark.parametrize("first", [{"basis": BASIS}, {}])
def test_one_value_has_one_basis(program: cmrc.Program, first: dict[str, Any]) -> None:
    plan = cmrc.Plan(program).do("0", units=[0], constant=0, **first)
    with pytest.raises(CmrcError) as error:
        plan.do("0", units=[1], constant=0, **({} if first else {"basis": BASIS}))
    assert str(error.value) == (
        "do: %0 (linear): another replacement of this value is before it, and one of the two is in a basis\n"
        "  at plan: do[1]\n  fix: give all units of a value in one replacement with its basis"
    )


def test_hidden_states_have_no_basis() -> None:
    program = cmrc.trace(nn.LSTM(3, 6, batch_first=True).eval(), (torch.randn(2, 4, 3),))
    (name,) = [site.name for site in program.sites(folds=False) if site.recurrence is not None]
    with pytest.raises(CmrcError) as error:
        cmrc.Plan(program).do(name, units=[1], constant=0, basis=BASIS)
    assert "is a hidden state, whose units have no other basis" in str(error.value)


def test_what_does_not_fold_is_refused_with_the_node(program: cmrc.Program) -> None:
    plan = cmrc.Plan(program).do("1", units=[0], constant=0, basis=np.eye(8)[::-1])
    with pytest.raises(ResidueError) as error:
        cmrc.lower(program, plan)
    assert str(error.value) == (
        "residue: %1 (turn): a replacement cannot pass: its basis does not go into weights: %2 (relu) treats its units one by one\n"
        '  at plan: do[0] (1)\n  fix: leave that site out, choose another, or allow what stays at run time with residue="keep"'
    )
    kept = cmrc.lower(program, plan, residue="keep")
    assert kept.check((torch.randn(3, 4),)).holds


@pytest.mark.parametrize("one_file", [False, True])
def test_a_file_keeps_the_basis(program: cmrc.Program, tmp_path: Path, one_file: bool) -> None:
    large = np.linalg.qr(RNG.normal(size=(8, 8)))[0]
    torch.manual_seed(0)
    plan = cmrc.Plan(program).do("1", units=[3], constant=[0.5], basis=large).do("0", **UNITS, basis=BASIS)
    plan.save(tmp_path / "plan.json", one_file=one_file)
    again = cmrc.Plan.load(tmp_path / "plan.json")
    for before, after in zip(plan.entries, again.entries, strict=True):
        assert before.basis is not None
        np.testing.assert_array_equal(before.basis, after.basis)
    assert plan_digest(plan) == plan_digest(again)
    assert plan_digest(planned(program)) != plan_digest(planned(program, BASIS[::-1]))


def test_a_basis_in_a_file_is_checked_where_it_is_used(program: cmrc.Program, tmp_path: Path) -> None:
    planned(program).save(tmp_path / "plan.json", one_file=True)
    document = json.loads((tmp_path / "plan.json").read_text())
    document["do"][0]["basis"] = np.zeros((2, 3, 3)).tolist()
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(CmrcError, match="matrix 0 of the basis has condition number inf"):
        cmrc.lower(program, cmrc.Plan.load(tmp_path / "plan.json"))


@pytest.mark.parametrize("host", ["fx", "onnx"])
def test_an_annotated_model_runs_and_lowers_in_the_basis(program: cmrc.Program, host: str) -> None:
    program = program if host == "fx" else exported(program)
    site = "0" if host == "fx" else next(s.name for s in program.sites(folds=False) if s.shape[-1] == 6)
    plan = cmrc.Plan(program).do(site, **UNITS, basis=BASIS)
    annotated = program.annotate(plan)
    x = torch.randn(5, 4)
    (expected,) = cmrc.lower(program, plan).host.run((x,))
    assert distance(annotated.run((x,))[0], expected) <= EXACT_F32
    assert distance(cmrc.lower(annotated).host.run((x,))[0], expected) <= EXACT_F32
    assert distance(program.run((x,))[0], expected) > 1e-2
    (intervened,) = Interpreter(program).intervene([x.numpy()], plan)
    assert distance(intervened, expected) <= EXACT_F32


def test_plans_of_different_bases_differ(program: cmrc.Program) -> None:
    assert difference(planned(program), planned(program)) == []
    (row,) = difference(planned(program), planned(program, BASIS[::-1]))
    assert (row["site"], row["both"], row["values"]) == ("0", 2, None)
    (row,) = difference(planned(program), cmrc.Plan(program).do("0", **UNITS))
    assert row["values"] is None


def test_a_shown_plan_says_that_there_is_a_basis(program: cmrc.Program, tmp_path: Path) -> None:
    planned(program).save(tmp_path / "plan.json")
    shown = cli("plan", "show", str(tmp_path / "plan.json"))
    assert "in a basis of 2 blocks of 3" in " ".join(shown.stdout.split())
    assert json.loads(cli("plan", "show", str(tmp_path / "plan.json"), "--json").stdout)["do"][0]["basis"] == [2, 3]


def test_verification_swaps_elsewhere(program: cmrc.Program) -> None:
    plan = planned(program).do("2", units=[1], constant=0.5)
    data = [{"input": np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)}]
    result = cmrc.verify(program, cmrc.lower(program, plan), data, swaps=20)
    why = "its units are replaced in another basis, and the reduced model does not have the model's own units there"
    assert result.setting["not swapped"] == {"0": why}
    assert list(result.setting["sites"]) == ["relu"]
    with pytest.raises(VerifyError, match=why):
        cmrc.verify(program, cmrc.lower(program, plan), data, swaps=20, site="0")
    stats = cmrc.calibrate(program, data, sites=["0", "2"])
    with pytest.raises(VerifyError, match="these are replaced in another basis"):
        distortion(program, plan, stats)
