"""Plans: what `do` accepts, what it refuses and in which words, and the file it is saved to."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import cmrc


class Net(nn.Module):
    """fc1 -> act (called twice) -> fc2, and a block of two."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, width)
        self.act = nn.ReLU()
        self.fc2 = nn.Linear(width, 6)
        self.blocks = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.act(self.fc2(self.act(self.fc1(x)))))


@pytest.fixture(scope="module")
def module() -> nn.Module:
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def program(module: nn.Module) -> cmrc.Program:
    return cmrc.trace(module, (torch.ones(2, 4),))


def text(error: pytest.ExceptionInfo[BaseException]) -> str:
    return str(error.value)


REFUSED = {
    "no such site": (
        ("blocks.7", {"units": [0], "constant": 0.0}),
        "site: no site is called 'blocks.7'\n  at plan: do[0]\n  fix: near matches: blocks.2, blocks.1, blocks.0, blocks",
    ),
    "nothing near": (
        ("zzz", {"units": [0], "constant": 0.0}),
        "site: no site is called 'zzz'\n  at plan: do[0]\n  fix: `cmrc inspect` or program.sites() lists the names",
    ),
    "a glob that matches nothing": (
        ("heads.*", {"units": [0], "constant": 0.0}),
        "site: no site is called 'heads.*'\n  at plan: do[0]\n  fix: `cmrc inspect` or program.sites() lists the names",
    ),
    "a module called twice": (
        ("act", {"units": [0], "constant": 0.0}),
        "site: 'act' is called 2 times, and each call is a separate site\n  at plan: do[0]\n  fix: name one: act@0, act@1",
    ),
    "units out of range": (
        ("act@0", {"units": [1, 8, 9], "constant": 0.0}),
        "do-units: %act@0 (relu): units 8, 9 are out of range: there are 8 units\n  at plan: do[0]\n  fix: units run from 0 to 7",
    ),
    "negative units": (
        ("act@0", {"units": [-1], "constant": 0.0}),
        "do-units: %act@0 (relu): units -1 are out of range: there are 8 units\n  at plan: do[0]\n  fix: units run from 0 to 7",
    ),
    "no units": (
        ("act@0", {"units": [], "constant": 0.0}),
        "do-units: %act@0 (relu): names no units\n  at plan: do[0]\n  fix: give at least one of the 8 units",
    ),
    "units named twice": (
        ("act@0", {"units": [1, 1], "constant": 0.0}),
        "do-units: %act@0 (relu): units are named twice\n  at plan: do[0]\n  fix: name each unit once",
    ),
    "units that are no numbers": (
        ("act@0", {"units": [0.5], "constant": 0.0}),
        "do-units: %act@0 (relu): units are not a list of whole numbers\n  at plan: do[0]\n"
        '  fix: give indices, a boolean mask, or "all"',
    ),
    "an unknown word for units": (
        ("act@0", {"units": "most", "constant": 0.0}),
        "do-units: %act@0 (relu): units='most' is not understood\n  at plan: do[0]\n  fix: give indices, a boolean mask, or \"all\"",
    ),
    "wrong number of constants": (
        ("act@0", {"units": [1, 2], "constant": [1.0, 2.0, 3.0]}),
        "do-shape: %act@0 (relu): the plan gives 3 constants for 2 units\n  at plan: do[0]\n"
        "  fix: give one constant per replaced unit, or one for all",
    ),
    "constants that are no numbers": (
        ("act@0", {"units": [1], "constant": "much"}),
        "do-shape: %act@0 (relu): the constants are not an array of numbers\n  at plan: do[0]\n  fix: give numbers",
    ),
    "NaN": (
        ("act@0", {"units": [1, 2], "constant": [np.nan, 1.0]}),
        "do-value: %act@0 (relu): 1 of the constants are NaN or infinite\n  at plan: do[0]\n  fix: give finite numbers",
    ),
    "infinite weights": (
        ("act@0", {"units": [1], "affine": cmrc.Affine([0], [[np.inf]])}),
        "do-value: %act@0 (relu): 1 of the weights are NaN or infinite\n  at plan: do[0]\n  fix: give finite numbers",
    ),
    "a constant beyond float32": (
        ("act@0", {"units": [1, 2], "constant": [1.0, 1e39]}),
        "do-value: %act@0 (relu): the constant 1e+39 of unit 2 is infinite in float32, which ends at 3.4e+38\n  at plan: do[0]\n"
        "  fix: give a smaller number, leave that unit out, or trace the model in a wider type",
    ),
    "a constant beyond float32 at one position": (
        ("act@0", {"units": [1, 2], "constant": [[1.0, 2.0], [-4e38, 1.0]]}),
        "do-value: %act@0 (relu): the constant -4e+38 of unit 1 is infinite in float32, which ends at 3.4e+38\n  at plan: do[0]\n"
        "  fix: give a smaller number, leave that unit out, or trace the model in a wider type",
    ),
    "an affine weight beyond float32": (
        ("act@0", {"units": [1, 4], "affine": cmrc.Affine([0], [[1.0], [1e300]])}),
        "do-value: %act@0 (relu): the weight 1e+300 of unit 4 is infinite in float32, which ends at 3.4e+38\n  at plan: do[0]\n"
        "  fix: give a smaller number, leave that unit out, or trace the model in a wider type",
    ),
    "an affine bias beyond float32": (
        ("act@0", {"units": [1, 4], "affine": cmrc.Affine([0], [[1.0], [1.0]], -1e39)}),
        "do-value: %act@0 (relu): the bias -1e+39 of unit 1 is infinite in float32, which ends at 3.4e+38\n  at plan: do[0]\n"
        "  fix: give a smaller number, leave that unit out, or trace the model in a wider type",
    ),
    "parents that are replaced": (
        ("act@0", {"units": [1, 2], "affine": cmrc.Affine([2, 3], np.ones((2, 2)))}),
        "do-units: %act@0 (relu): parents 2 are themselves replaced\n  at plan: do[0]\n"
        "  fix: choose parents among the units that stay",
    ),
    "an affine weight of the wrong shape": (
        ("act@0", {"units": [1, 2], "affine": cmrc.Affine([3], np.ones((1, 2)))}),
        "do-shape: %act@0 (relu): the affine weight has shape [1, 2] for 2 units and 1 parents\n  at plan: do[0]\n"
        "  fix: give weight as [units, parents] = [2, 1]",
    ),
    "neither constant nor affine": (
        ("act@0", {"units": [1]}),
        "do: a do takes either constant= or affine=\n  at plan: do[0]\n  fix: give exactly one of the two",
    ),
    "an axis that is not there": (
        ("act@0", {"units": [1], "constant": 0.0, "axis": 2}),
        "do: %act@0 (relu): has no axis 2, its shape is [2, 8]\n  at plan: do[0]\n  fix: name an axis from 0 to 1",
    ),
}


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_what_do_refuses_and_says(program: cmrc.Program, case: str) -> None:
    (site, arguments), message = REFUSED[case]
    plan = cmrc.Plan(program)
    with pytest.raises(cmrc.CmrcError) as error:
        plan.do(site, **arguments)
    assert text(error) == message
    assert len(plan) == 0


@pytest.mark.parametrize(
    ("dtype", "largest", "shown"),
    [(torch.float16, 65504.0, "6.55e+04"), (torch.bfloat16, 3.3895e38, "3.39e+38"), (torch.float64, 1.7e308, "")],
)
def test_constants_must_be_finite_in_the_precision_of_the_model(dtype: torch.dtype, largest: float, shown: str) -> None:
    narrow = cmrc.trace(Net().to(dtype), (torch.ones(2, 4, dtype=dtype),))
    cmrc.Plan(narrow).do("act@0", units=[3], constant=largest)
    if not shown:
        return
    with pytest.raises(cmrc.CmrcError) as error:
        cmrc.Plan(narrow).do("act@0", units=[3], constant=largest * 1.01)
    name = str(dtype).removeprefix("torch.")
    assert f"of unit 3 is infinite in {name}, which ends at {shown}" in text(error)


def test_overlap_is_refused_and_names_the_entry(program: cmrc.Program) -> None:
    plan = cmrc.Plan(program).do("act@0", units=[1, 2], constant=0.0)
    with pytest.raises(cmrc.CmrcError) as error:
        plan.do("relu", units=[2, 3], constant=0.0)  # the same value under its node's name
    assert (
        text(error)
        == "do-units: %relu (relu): units 2 are replaced twice\n  at plan: do[1]\n  fix: name each unit in one do"
    )


def test_replacing_a_parent_later_is_refused(program: cmrc.Program) -> None:
    plan = cmrc.Plan(program).do("act@0", units=[1], affine=cmrc.Affine([2], [[1.0]]))
    with pytest.raises(cmrc.CmrcError) as error:
        plan.do("act@0", units=[2], constant=0.0)
    assert text(error) == (
        "do-units: %act@0 (relu): units 2 are parents of an earlier do\n  at plan: do[1]\n"
        "  fix: rebuild that unit from units that stay"
    )


def test_each_call_of_a_module_is_its_own_site(program: cmrc.Program) -> None:
    first, second = program.find("act@0")[0], program.find("act@1")[0]
    assert (first.value, first.units, second.value, second.units) == ("relu", 8, "relu_1", 6)


def test_a_glob_selects_many(program: cmrc.Program) -> None:
    assert [site.value for site in program.find("blocks.*")] == ["linear_2", "gelu", "linear_3"]
    plan = cmrc.Plan(program).do("act@*", units=[0, 1], constant=0.5)
    assert [entry.value for entry in plan.entries] == ["relu", "relu_1"]


def test_units_may_be_a_mask_or_all(program: cmrc.Program) -> None:
    mask = np.arange(8) % 4 == 1
    plan = cmrc.Plan(program).do("act@0", units=mask, constant=0.0).do("blocks.1", units="all", constant=1.0)
    assert plan.entries[0].units == (1, 5)
    assert plan.entries[1].units == (0, 1, 2, 3, 4)


def test_save_and_load_give_the_same_plan(program: cmrc.Program, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    plan = cmrc.Plan(program)
    plan.do("act@0", units=[6, 1], constant=rng.normal(size=2))
    plan.do("act@1", units=[0, 1], affine=cmrc.Affine([2, 5], rng.normal(size=(2, 2)), rng.normal(size=2)))
    plan.save(tmp_path / "plan.json")
    again = cmrc.Plan.load(tmp_path / "plan.json")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plan.json"]
    for one, two in zip(plan.entries, again.entries, strict=True):
        assert (one.site, one.value, one.axis, one.units, one.parents) == (
            two.site,
            two.value,
            two.axis,
            two.units,
            two.parents,
        )
        assert np.array_equal(one.constant, two.constant)
        assert (one.weight is None) == (two.weight is None)
    assert np.array_equal(plan.entries[1].weight, again.entries[1].weight)
    assert again.fingerprint == program.fingerprint


def test_large_arrays_stay_binary(tmp_path: Path) -> None:
    wide = cmrc.trace(Net(200), (torch.ones(2, 4),))
    values = np.random.default_rng(0).normal(size=150)
    plan = cmrc.Plan(wide).do("act@0", units=range(150), constant=values)
    plan.save(tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["do"][0]["units"] == "0:150"
    assert document["do"][0]["constant"] == {"tensor": "do[0].constant", "shape": [150]}
    assert np.array_equal(cmrc.Plan.load(tmp_path / "plan.json").entries[0].constant, values)


def test_a_plan_for_another_model_says_what_differs(program: cmrc.Program, module: nn.Module) -> None:
    plan = cmrc.Plan(program).do("act@0", units=[1], constant=0.0)
    fix = "\n  at plan\n  fix: lower the model that the plan was made for, or make a plan for this one"
    start = "fingerprint: the plan was made for another model: "
    with pytest.raises(cmrc.CmrcError) as error:
        cmrc.lower(cmrc.trace(Net(9), (torch.ones(2, 4),)), plan)
    assert text(error) == start + "fc1.bias is float32[8] there, float32[9] here" + fix
    with pytest.raises(cmrc.CmrcError) as error:
        cmrc.lower(cmrc.trace(nn.Sequential(nn.Linear(4, 3), nn.GELU()), (torch.ones(2, 4),)), plan)
    assert text(error) == start + "4 linear there, 1 here; 2 relu there, 0 here" + fix
    other = Net()
    other.load_state_dict(module.state_dict())
    with torch.no_grad():
        other.fc2.weight[0, 0] += 1e-6
    with pytest.raises(cmrc.CmrcError) as error:
        cmrc.lower(cmrc.trace(other, (torch.ones(2, 4),)), plan)
    assert text(error) == start + "the values of 1 of 8 parameters differ, fc2.weight first" + fix


def test_a_saved_plan_lowers_the_module_it_was_made_for(
    program: cmrc.Program, module: nn.Module, tmp_path: Path
) -> None:
    cmrc.Plan(program).do("act@0", units=[1, 3], constant=[0.5, -2.0]).save(tmp_path / "plan.json")
    lowered = cmrc.lower(module, tmp_path / "plan.json", args=(torch.ones(2, 4),))
    assert lowered.check((torch.randn(2, 4),)).holds
    assert lowered.report.sites[0].units_after == 6


def test_there_must_be_a_plan(program: cmrc.Program) -> None:
    with pytest.raises(cmrc.CmrcError) as error:
        cmrc.lower(program)
    assert text(error) == (
        "plan: there is no plan: none was given, and the model has no annotation\n  fix: pass a plan, or program.annotate(plan)"
    )


def test_residue_is_an_error_that_names_node_entry_and_fix(program: cmrc.Program) -> None:
    plan = cmrc.Plan(program).do("blocks.2", units=[1], constant=0.0)
    with pytest.raises(cmrc.CmrcError) as error:
        cmrc.lower(program, plan)
    assert text(error) == (
        "residue: %output (output): a replacement cannot pass: it is an output of the model\n"
        "  at plan: do[0] (blocks.2)\n"
        '  fix: leave that site out, choose another, or allow what stays at run time with residue="keep"'
    )
    kept = cmrc.lower(program, plan, residue="keep")
    assert kept.check((torch.randn(2, 4),)).holds
    assert [(d.kind, d.site, d.node, d.reason) for d in kept.report.declined] == [
        ("do", "blocks.2", "output", "it is an output of the model")
    ]


def test_a_vector_for_each_head_stays_with_its_head() -> None:
    class Heads(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    program = cmrc.trace(Heads().eval(), (torch.randn(2, 4, 3, 5),))
    vectors = np.arange(10.0).reshape(2, 5)
    (entry,) = cmrc.Plan(program).do(program.graph.outputs[0], units=[3, 1], constant=vectors, axis=1).entries
    assert entry.constant.shape == (1, 2, 1, 5)
    assert entry.constant[0, :, 0].tolist() == vectors.tolist()
