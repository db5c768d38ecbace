"""`cmrc.lower`: the report, writing back into the user's module, and what stays."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import cmrc
from cmrc.errors import ResidueError
from cmrc.ir.cost import Cost
from cmrc.program.report import Report


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Views(nn.Module):
    """Bakes its width into a view: a change of parameters alone does not make it smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 8
        self.fc1, self.act, self.fc2 = nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x)).view(-1, self.width))


X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


def lowered_by(module: nn.Module, **do: object) -> cmrc.Lowered:
    program = cmrc.trace(module, (X,))
    return cmrc.lower(program, cmrc.Plan(program).do("act", **do))  # type: ignore[arg-type]


def test_the_report_says_what_folded_where() -> None:
    lowered = lowered_by(Mlp(), units=[1, 4], constant=[0.5, -1.0])
    document = lowered.report.to_json()
    assert json.loads(json.dumps(document)) == document
    assert document["sites"] == [
        {
            "site": "act",
            "op": "gelu",
            "replaced": 2,
            "units_before": 8,
            "units_after": 6,
            "folded": ["fc2 (linear): constants into the bias"],
        }
    ]
    assert document["before"] == {"parameters": 110, "bytes": 440, "macs": 480}
    assert document["after"] == {"parameters": 84, "bytes": 336, "macs": 360}
    assert document["declined"] == []
    assert str(lowered.report).splitlines()[:4] == [
        "            before  after  ratio",
        "parameters  110     84     0.764",
        "bytes       440     336    0.764",
        "macs        480     360    0.750",
    ]
    assert "act   gelu  8 -> 6  fc2 (linear): constants into the bias" in str(lowered.report)


def test_a_report_says_first_that_the_result_costs_more() -> None:
    before, after = Cost(10, 40, 1000), Cost(30, 120, 3500)
    grown = Report((), (), before, after, (), {})
    assert str(grown).splitlines()[0] == (
        "this costs more than the model: 20 more parameters, 80 more bytes, 2,500 more multiply-accumulates"
    )
    slower = Report((), (), before, replace(before, macs=1001), (), {})
    assert str(slower).splitlines()[0] == "this costs more than the model: 1 more multiply-accumulates"
    assert str(Report((), (), before, before, (), {})).splitlines()[0].split() == ["before", "after", "ratio"]


def test_the_report_names_who_takes_in_a_zero() -> None:
    lowered = lowered_by(Mlp(), units=[1, 4], constant=0.0)
    assert lowered.report.sites[0].folded == ("fc2 (linear): nothing to add, the constants are 0",)


def test_load_into_writes_the_users_own_module() -> None:
    module = Mlp()
    lowered = lowered_by(module, units=[1, 4], constant=[0.5, -1.0])
    target = copy.deepcopy(module).train()
    lowered.load_into(target)
    assert (target.fc1.out_features, target.fc2.in_features, target.training) == (6, 6, True)
    assert torch.equal(target.eval()(X), lowered.module(X))


def test_load_into_puts_everything_back_when_the_module_cannot_follow() -> None:
    module = Views()
    lowered = lowered_by(module, units=[1, 4], constant=[0.5, -1.0])
    assert lowered.check((X,)).holds
    before = module(X)
    with pytest.raises(cmrc.CmrcError) as error:
        lowered.load_into(module)
    assert str(error.value).startswith("host: the module's forward contains the old sizes: shape '[-1, 8]' is invalid")
    assert str(error.value).endswith("fix: use lowered.module")
    assert (module.fc1.out_features, module.fc1.weight.shape[0]) == (8, 8)
    assert torch.equal(module(X), before)


def test_load_into_refuses_an_inserted_node() -> None:
    module = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 3, padding=1))
    image = torch.randn(2, 2, 3, 3)
    program = cmrc.trace(module, (image,))
    lowered = cmrc.lower(program, cmrc.Plan(program).do("1", units=[0], constant=1.0))
    with pytest.raises(cmrc.CmrcError) as error:
        lowered.load_into(module)
    assert str(error.value) == (
        "host: %2 (add): the lowered graph has a node that is not part of the module's code\n  fix: use lowered.module"
    )


def test_check_notices_a_wrong_model() -> None:
    lowered = lowered_by(Mlp(), units=[1, 4], constant=[0.5, -1.0])
    state = lowered.host.state  # type: ignore[attr-defined]
    assert lowered.check((X,)).holds
    with torch.no_grad():
        state["fc2.bias"] += 1e-3
    wrong = lowered.check((X,))
    assert not wrong.holds
    assert "NOT equal" in str(wrong)


def test_check_refuses_a_reference_that_is_not_finite() -> None:
    lowered = lowered_by(Mlp(), units=[1, 4], constant=[0.5, -1.0])
    with pytest.raises(cmrc.CmrcError, match="the clamped model gives NaN or infinity here"):
        lowered.check((torch.full((2, 6), torch.inf),))


def test_the_module_keeps_its_mode_through_a_trace() -> None:
    module = Mlp().train()
    module.act.eval()
    cmrc.trace(module, (X,))
    assert (module.training, module.act.training) == (True, False)


def test_lowering_changes_nothing_of_the_original() -> None:
    module = Mlp()
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    program = cmrc.trace(module, (X,))
    before = program.run((X,))[0]
    cmrc.lower(program, cmrc.Plan(program).do("act", units=[0], constant=3.0))
    assert all(torch.equal(state[name], tensor) for name, tensor in module.state_dict().items())
    assert np.array_equal(program.run((X,))[0], before)


class Dropping(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.drop(self.act(self.fc1(x))))


def test_modules_that_share_a_graph_stay_apart() -> None:
    program = cmrc.trace(Dropping(), (X,))
    plan = cmrc.Plan(program)
    plan.do("act", units=[1, 4], constant=[0.5, -1.0])
    first, second = (cmrc.lower(program, plan).module for _ in range(2))
    assert vars(first)["_graph"] is vars(second)["_graph"]
    assert not first.training
    before = second(X)
    torch.manual_seed(0)
    trained = first.train()(X)
    assert not torch.allclose(trained, before)
    with torch.no_grad():
        first.fc2.bias += 1.0
    node = next(n for n in first.graph.nodes if "linear" in str(n.target))
    node.replace_all_uses_with(next(n for n in first.graph.nodes if n.op == "placeholder"))
    assert first.graph.owning_module is first
    for module in (second, copy.deepcopy(second), pickle.loads(pickle.dumps(second))):
        assert torch.equal(module(X), before)
    assert torch.equal(cmrc.lower(program, plan).module(X), before)


def test_a_program_outlives_its_results_without_keeping_weights() -> None:
    module = Mlp()
    lowered = lowered_by(module, units=[1, 4], constant=[0.5, -1.0])
    reference = weakref.ref(module.fc1.weight)
    small = lowered.module
    del module, lowered
    gc.collect()
    assert reference() is None
    assert small(X).shape == (X.shape[0], small.fc2.weight.shape[0])


def test_units_are_followed_through_a_reshape_into_blocks() -> None:
    """(N, 8, 4) to (N, 2, 16): a unit becomes the same unit of four blocks of the last axis."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Unflatten(1, (2, 4)), nn.Flatten(2), nn.Linear(16, 5))
    program = cmrc.trace(model.eval(), (torch.randn(2, 8, 3),))
    places = {site.shape: (site.axis, site.folds) for site in program.sites()}
    assert places[2, 2, 16] == (
        2,
        "stops at 3 (reshape): the units do not fill whole positions of any axis of [2, 2, 4, 4]; a position is units 0 to 3, or units 0, 4, 8, ...",
    )
    plan = cmrc.Plan(program).do("3", units=[1, 5, 9, 13], constant=0.4)
    lowered = cmrc.lower(program, plan)
    assert lowered.check((torch.randn(2, 8, 3),)).holds
    assert lowered.module.get_parameter("0.weight").shape == (3, 3)


class Block(nn.Module):
    """A residual block whose stream is averaged over positions and then read by the head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.start, self.inner = nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8)
        self.end, self.head = nn.ReLU(), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(self.stem(x))
        return self.head(self.end(x + self.inner(x)).mean(1))


def test_a_dry_run_names_the_reader_that_lowering_names() -> None:
    """Nothing here is an output of the model, whatever part of the graph the dry run looks at."""
    program = cmrc.trace(Block().eval(), (torch.randn(2, 5, 6),))
    reason = "the whole value is also read by inner"
    for site in ("end", "mean"):
        (site_seen,) = program.sites(site)
        assert site_seen.folds == f"stops at start (relu): {reason}"
        with pytest.raises(ResidueError) as caught:
            cmrc.lower(program, cmrc.Plan(program).do(site, units=[0], constant=0.4))
        assert caught.value.reason == f"a selection cannot pass: {reason}"


class Joined(nn.Module):
    """Two parts side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 3), nn.Linear(6, 5), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.a(x).relu(), self.b(x).relu()], dim=1))


def test_a_concatenation_that_dissolves_keeps_the_units_of_what_is_left() -> None:
    program = cmrc.trace(Joined(), (torch.randn(2, 6),))
    lowered = cmrc.lower(program, cmrc.Plan(program).do("cat", units=[0, 1, 2], constant=0.5))
    assert "cat" not in lowered.graph.values()
    assert (lowered.report.sites[0].units_before, lowered.report.sites[0].units_after) == (8, 5)


def test_saving_from_torch_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    program = cmrc.trace(Mlp(), (torch.randn(2, 6),))
    cmrc.lower(program, cmrc.Plan(program).do("act", units=[0], constant=0.5)).save(tmp_path / "small.onnx")
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
