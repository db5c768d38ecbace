"""Hidden units replaced inside an LSTM, GRU or RNN, against a recurrence that is unrolled by hand and clamped at every step.

The reference shares nothing with the compiler: one step of each op as the ONNX standard spells it, in float64, with the replacement
written over the hidden state before every step reads it, and over what is returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from recurrences import Clamp, held_at, unrolled
from tolerances import EXACT_F32, distance
from torch import nn

import cmrc
from cmrc.errors import DoError, ResidueError, SiteError
from cmrc.hosts.autograd.arrays import to_numpy
from cmrc.ir.graph import Array
from cmrc.ir.text import parse, to_text

SEEN = 1e-3  # by how much a replacement must move the outputs
READ, HIDDEN, STEPS, BATCH = 4, 5, 6, 3
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def untouched(h: Array) -> Array:
    return h


# ---------------------------------------------------------------- ONNX


@dataclass(frozen=True)
class Model:
    """A recurrent op whose results a matrix reads, with what the standard allows beside it."""

    op: str
    directions: int = 1
    reverse: bool = False
    peepholes: bool = False
    reset_after: bool = True
    bias: bool = True
    lengths: tuple[int, ...] = ()
    state: str = ""  # "stored", or "input": an initial state
    last: bool = False  # the last state is read, and not every step
    arrays: dict[str, Array] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        rng, gates, d = np.random.default_rng(5), GATES[self.op], self.directions
        shapes = {"w": (d, gates * HIDDEN, READ), "r": (d, gates * HIDDEN, HIDDEN), "b": (d, 2 * gates * HIDDEN),
                  "h": (d, BATCH, HIDDEN), "c": (d, BATCH, HIDDEN), "p": (d, 3 * HIDDEN), "out": (d * HIDDEN, 3)}  # fmt: skip
        self.arrays.update((k, (0.6 * rng.normal(size=s)).astype(np.float32)) for k, s in shapes.items())

    def proto(self) -> onnx.ModelProto:
        wide = self.op == "LSTM"
        names = ["x", "w", "r", "b" if self.bias else "", "lengths" if self.lengths else "", "h" if self.state else ""]
        names += ["c" if wide and self.state else "", "p" if self.peepholes else ""] if wide else []
        direction = "bidirectional" if self.directions == 2 else "reverse" if self.reverse else "forward"
        attrs: dict[str, Any] = {"hidden_size": HIDDEN, "direction": direction}
        attrs |= {"linear_before_reset": int(self.reset_after)} if self.op == "GRU" else {}
        while not names[-1]:
            names.pop()
        results = ["", "last"] if self.last else ["every"]
        perm = [1, 0, 2] if self.last else [0, 2, 1, 3]
        nodes = [helper.make_node(self.op, names, results, name="rnn", **attrs),
                 helper.make_node("Transpose", [results[-1]], ["turned"], perm=perm),
                 helper.make_node("Reshape", ["turned", "shape"], ["flat"]),
                 helper.make_node("MatMul", ["flat", "out"], ["y"])]  # fmt: skip
        given = {
            "x": [STEPS, BATCH, READ],
            **({"h": [self.directions, BATCH, HIDDEN]} if self.state == "input" else {}),
        }
        stored = {k: v for k, v in self.arrays.items() if (k in names or k == "out") and k not in given}
        stored["shape"] = np.array([0, -1] if self.last else [0, 0, -1], np.int64)
        stored |= {"lengths": np.array(self.lengths, np.int32)} if self.lengths else {}
        shape = [BATCH, 3] if self.last else [STEPS, BATCH, 3]
        graph = helper.make_graph(
            nodes, "g", [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in given.items()],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
            [numpy_helper.from_array(a, k) for k, a in stored.items()],
        )  # fmt: skip
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)

    def reference(self, x: Array, h: Array, clamp: Clamp) -> Array:
        a = {k: v.astype(np.float64) for k, v in self.arrays.items()}
        each = []
        for d in range(self.directions):
            start = h[d] if self.state == "input" else a["h"][d] if self.state else np.zeros((BATCH, HIDDEN))
            cell = a["c"][d] if self.state else np.zeros((BATCH, HIDDEN))
            every, last = unrolled(
                self.op, x, a["w"][d], a["r"][d], a["b"][d] if self.bias else 0 * a["b"][d], start, cell, clamp,
                peepholes=a["p"][d] if self.peepholes else None, reset_after=self.reset_after,
                lengths=np.array(self.lengths) if self.lengths else None, reverse=self.reverse or d == 1,
            )  # fmt: skip
            each.append(last if self.last else every)
        return np.asarray(np.concatenate(each, -1) @ a["out"])


EVERY_OP = [
    Model("LSTM"),
    Model("LSTM", peepholes=True, state="stored"),
    Model("LSTM", directions=2, last=True),
    Model("LSTM", reverse=True, bias=False),
    Model("GRU"),
    Model("GRU", directions=2, state="stored"),
    Model("GRU", last=True, bias=False),
    Model("RNN"),
    Model("RNN", directions=2, last=True, state="stored"),
]


def name_of(model: Model) -> str:
    return "-".join([model.op, *(f"{k}={getattr(model, k)}" for k, f in Model.__dataclass_fields__.items()
                                 if k not in ("op", "arrays") and getattr(model, k) != f.default)])  # fmt: skip


def check_onnx(model: Model, clamp: Clamp, smaller: int = 2, **do: Any) -> None:
    rng = np.random.default_rng(1)
    x, h = rng.normal(size=(STEPS, BATCH, READ)), rng.normal(size=(model.directions, BATCH, HIDDEN))
    feeds = [a.astype(np.float32) for a in ((x, h) if model.state == "input" else (x,))]
    x, h = x.astype(np.float32).astype(np.float64), h.astype(np.float32).astype(np.float64)
    program = cmrc.trace(model.proto())
    plain, expected = model.reference(x, h, untouched), model.reference(x, h, clamp)
    assert distance(program.run(feeds)[0], plain) <= EXACT_F32  # the unrolled recurrence is the op
    assert distance(expected, plain) > SEEN
    plan = cmrc.Plan(program).do("rnn:hidden", **do)
    lowered = cmrc.lower(program, plan)
    assert distance(lowered.clamped.run(feeds)[0], expected) <= EXACT_F32
    assert distance(lowered.host.run(feeds)[0], expected) <= EXACT_F32
    assert lowered.check().holds
    left = HIDDEN - smaller
    node = next(node for node in lowered.graph.nodes if node.marks.recurrence is not None)
    gates = GATES[model.op]
    assert node.inputs[1].shape == (model.directions, gates * left, READ)  # type: ignore[union-attr]
    assert node.inputs[2].shape == (model.directions, gates * left, left)  # type: ignore[union-attr]
    assert parse(to_text(lowered.graph), lowered.graph.leaves()) == lowered.graph


@pytest.mark.parametrize("model", EVERY_OP, ids=name_of)
def test_constants_at_every_step(model: Model) -> None:
    constants = [0.4, -0.3]
    check_onnx(model, held_at([1, 3], constants), units=[1, 3], constant=constants)


@pytest.mark.parametrize("model", [m for m in EVERY_OP if m.bias], ids=name_of)
def test_affine_functions_of_the_units_that_stay(model: Model) -> None:
    weight, bias = [[0.5, -0.4], [0.3, 0.2]], [0.1, -0.2]
    affine = cmrc.Affine([0, 4], weight, bias)
    check_onnx(model, held_at([1, 3], bias, [0, 4], weight), units=[1, 3], affine=affine)


@pytest.mark.parametrize("model", [Model("GRU", reset_after=False), Model("LSTM", lengths=(6, 2, 4)),
                                   Model("GRU", lengths=(3, 6, 1), directions=2)], ids=name_of)  # fmt: skip
def test_zero_where_no_other_constant_is_exact(model: Model) -> None:
    check_onnx(model, held_at([0, 2], 0.0), units=[0, 2], constant=0.0)


@pytest.mark.parametrize(
    ("model", "do", "reason"),
    [
        (Model("GRU", reset_after=False), {"constant": 0.5}, "its reset gate multiplies the hidden state before R reads it"),
        (Model("GRU", reset_after=False), {"affine": cmrc.Affine([1], [[0.5]])}, "its reset gate multiplies the hidden state"),
        (Model("LSTM", lengths=(6, 2, 4)), {"constant": 0.5}, "what it returns behind their end is 0 (sequence_lens)"),
        (Model("LSTM"), {"constant": np.full((1, 1, BATCH, 1), 0.5)}, "these constants differ by position"),
        (Model("LSTM"), {"constant": 0.5, "axis": 0}, "its hidden units lie along the last axis"),
    ],
)  # fmt: skip
def test_what_is_not_exact_is_refused_with_the_mathematics(model: Model, do: dict[str, Any], reason: str) -> None:
    program = cmrc.trace(model.proto())
    with pytest.raises(DoError) as caught:
        cmrc.Plan(program).do("rnn:hidden", units=[0], **do)
    assert reason in str(caught.value) or "every position" in str(caught.value)
    assert "fix:" in str(caught.value)


def test_all_hidden_units_are_refused() -> None:
    program = cmrc.trace(Model("LSTM").proto())
    with pytest.raises(DoError, match="no hidden unit would be left"):
        cmrc.Plan(program).do("rnn:hidden", units="all", constant=0.1)


def test_units_of_a_state_that_the_model_is_given_stay_in_the_input() -> None:
    """The interface keeps its units: what stays is a gather at run time, if that is allowed."""
    model = Model("GRU", state="input")
    program = cmrc.trace(model.proto())
    plan = cmrc.Plan(program).do("rnn:hidden", units=[1], constant=0.4)
    with pytest.raises(ResidueError, match="it is an input of the model"):
        cmrc.lower(program, plan)
    rng = np.random.default_rng(1)
    x, h = (rng.normal(size=s).astype(np.float32) for s in ((STEPS, BATCH, READ), (1, BATCH, HIDDEN)))
    kept = cmrc.lower(program, plan, residue="keep")
    expected = model.reference(x.astype(np.float64), h.astype(np.float64), held_at([1], 0.4))
    assert distance(kept.host.run([x, h])[0], expected) <= EXACT_F32


def test_a_replacement_behind_the_op_is_another_one() -> None:
    """There the gates go on reading the unit: refused, with the name of the site that is meant."""
    program = cmrc.trace(Model("LSTM").proto())
    with pytest.raises(ResidueError) as caught:
        cmrc.lower(program, cmrc.Plan(program).do("every", units=[1], constant=0.4, axis=3))
    assert "its gates read every hidden unit at the next step" in str(caught.value)
    assert ":hidden" in str(caught.value)


class Stacked(nn.Module):
    """Of two recurrent layers, the first is read by the second."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(READ, 6, num_layers=2, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(x)[0][:, -1])


def test_sites_are_listed_and_not_cut() -> None:
    x = torch.randn(8, STEPS, READ, generator=torch.Generator().manual_seed(0))
    program = cmrc.trace(Stacked().eval(), (x,))
    hidden = [site for site in program.sites() if site.recurrence is not None]
    assert [site.name for site in hidden] == ["rnn:hidden@0", "rnn:hidden@1"]
    assert all(site.folding is not None and site.folding.folds for site in hidden)
    with pytest.raises(SiteError, match="no site is called"):  # a glob means what layers return
        program.list_sites("rnn*")
    assert [site.name for site in program.list_sites("rnn:*")] == ["rnn:hidden@0", "rnn:hidden@1"]
    lowered = cmrc.lower(program, cmrc.Plan(program).do("rnn:hidden@1", units=[2], constant=0.3))
    with pytest.raises(SiteError, match="the model cannot be cut there"):
        cmrc.verify(program, lowered, [x])
    assert "agreement without swaps" in str(cmrc.verify(program, lowered, [x], swaps=0))


def test_statistics_of_a_hidden_state_are_those_of_what_the_op_returns() -> None:
    x = torch.randn(8, STEPS, READ, generator=torch.Generator().manual_seed(0))
    net = Stacked().eval()
    program = cmrc.trace(net, (x,))
    stats = cmrc.calibrate(program, [x], sites="rnn:hidden@1")
    (known,) = stats.sites.values()
    with torch.no_grad():
        every = to_numpy(net.rnn(x)[0]).reshape(-1, 6)
    assert distance(known.mean, every.mean(0)) <= EXACT_F32


@pytest.mark.parametrize("keep", [0.5, {"rnn:hidden@0": 4, "rnn:hidden@1": 2}])
def test_a_default_plan_has_hidden_units(keep: Any) -> None:
    """They come last, each fitted with everything before in place, and much better than at random."""
    x = torch.randn(64, STEPS, READ, generator=torch.Generator().manual_seed(0))
    program = cmrc.trace(Stacked().eval(), (x,))
    plan = cmrc.plan(program, data=[x], keep=keep)
    kept = {name: site["kept"] for name, site in plan.made["sites"].items()}
    assert kept == ({"rnn:hidden@0": 3, "rnn:hidden@1": 3} if keep == 0.5 else keep)
    lowered = cmrc.lower(program, plan)
    assert lowered.check([x]).holds
    rng, plain = np.random.default_rng(0), program.run([x])[0]

    def apart(chosen: cmrc.Plan) -> float:
        return float(np.square(cmrc.lower(program, chosen).host.run([x])[0] - plain).mean())

    by_chance = []
    for _ in range(4):
        drawn = cmrc.Plan(program)
        for name, count in kept.items():
            drawn.do(name, units=rng.permutation(6)[count:], constant=0.0)
        by_chance.append(apart(drawn))
    assert apart(plan) < 0.7 * float(np.mean(by_chance))


def test_a_budget_leaves_hidden_units_out_by_name() -> None:
    class Headed(Stacked):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Linear(3, 16)
            self.last = nn.Linear(16, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.mlp(super().forward(x)).relu())

    x = torch.randn(16, STEPS, READ, generator=torch.Generator().manual_seed(0))
    program = cmrc.trace(Headed().eval(), (x,))
    plan = cmrc.plan(program, data=[x], budget={"of": "units", "amount": 0.5})
    assert all(
        "the model cannot be cut there: name it, with keep=" in plan.made["left_out"][f"rnn:hidden@{i}"] for i in (0, 1)
    )
    both = cmrc.plan(program, data=[x], keep=0.5)
    assert {"rnn:hidden@0", "rnn:hidden@1"} < both.made["sites"].keys()
    verified = cmrc.verify(program, cmrc.lower(program, both), [x], swaps=20)
    assert "not swapped: rnn:hidden@0: its recurrence reads it at every step" in str(verified)


def test_the_site_knows_how_it_folds_and_is_kept_in_files(tmp_path: Path) -> None:
    program = cmrc.trace(Model("LSTM", directions=2).proto())
    site = program.describe(program.find("rnn:hidden")[0])
    assert (site.units, site.name, str(site.folds)) == (HIDDEN, "rnn:hidden", "folds into y")
    plan = cmrc.Plan(program).do("rnn:hidden", units=[1], constant=0.4)
    plan.save(tmp_path / "plan.json")
    again = cmrc.lower(program, cmrc.Plan.load(tmp_path / "plan.json"))
    program.annotate(plan).save(tmp_path / "annotated.onnx")
    annotated = cmrc.lower(tmp_path / "annotated.onnx")
    x = [np.random.default_rng(2).normal(size=(STEPS, BATCH, READ)).astype(np.float32)]
    assert np.array_equal(again.host.run(x)[0], annotated.host.run(x)[0])
    assert [s.units_after for s in again.report.sites] == [HIDDEN - 1]


# ---------------------------------------------------------------- torch

KINDS = {nn.LSTM: "LSTM", nn.GRU: "GRU", nn.RNN: "RNN"}
ORDER = {"LSTM": [0, 3, 1, 2], "GRU": [1, 0, 2], "RNN": [0]}  # torch's gates in the order of ONNX


class Net(nn.Module):
    """Every step and the last state of a recurrent module."""

    def __init__(self, kind: Any, *, last: bool = False, **options: Any) -> None:
        super().__init__()
        self.rnn = kind(READ, HIDDEN, **options)
        self.last = last
        self.out = nn.Linear(HIDDEN * self.rnn.num_layers if last else HIDDEN * (1 + self.rnn.bidirectional), 3)
        self.beside = nn.Linear(HIDDEN, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        every, states = self.rnn(x)
        if not self.last:
            return self.out(every)
        state = states[0] if isinstance(states, tuple) else states
        return self.out(state.transpose(0, 1).flatten(1)) + self.beside(every.mean(0)) * self.beside(state[-1])

    def reference(self, x: Array, clamps: Sequence[Sequence[Clamp]]) -> Array:
        """The layers unrolled; `clamps` by layer and direction."""
        rnn, op = self.rnn, KINDS[type(self.rnn)]
        start, lasts = np.zeros((x.shape[1], HIDDEN)), []
        for layer in range(rnn.num_layers):
            each = []
            for d in range(1 + rnn.bidirectional):
                w, r, wb, rb = (self._gates(f"{name}_l{layer}{'_reverse' * d}", op) for name in
                                ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))  # fmt: skip
                every, last = unrolled(
                    op, x, w, r, np.concatenate([wb, rb]), start, start, clamps[layer][d], reverse=d == 1
                )
                each.append(every)
                lasts.append(last)
            x = np.concatenate(each, -1)
        weight, bias = (to_numpy(t.detach()).astype(np.float64) for t in (self.out.weight, self.out.bias))
        if not self.last:
            return np.asarray(x @ weight.T + bias)
        matrix, more = (to_numpy(t.detach()).astype(np.float64) for t in (self.beside.weight, self.beside.bias))
        beside, ends = x.mean(0) @ matrix.T + more, lasts[-1] @ matrix.T + more
        return np.asarray(np.concatenate(lasts, -1) @ weight.T + bias + beside * ends)

    def _gates(self, name: str, op: str) -> Array:
        if not hasattr(self.rnn, name):
            return np.zeros(GATES[op] * HIDDEN)
        array = to_numpy(getattr(self.rnn, name).detach()).astype(np.float64)
        blocks = np.split(array, GATES[op])
        return np.concatenate([blocks[i] for i in ORDER[op]])


TORCH = [
    (nn.LSTM, {}), (nn.LSTM, {"last": True}), (nn.LSTM, {"bidirectional": True}), (nn.LSTM, {"num_layers": 2, "dropout": 0.3}),
    (nn.GRU, {}), (nn.GRU, {"num_layers": 3, "last": True}), (nn.GRU, {"num_layers": 2, "bidirectional": True}), (nn.RNN, {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "options"), TORCH, ids=lambda o: o.__name__ if isinstance(o, type) else "-".join(o) or "plain"
)
def test_torch_modules(kind: Any, options: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = Net(kind, **options).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(STEPS, BATCH, READ, generator=torch.Generator().manual_seed(1))
    dynamic = ({1: torch.export.Dim.DYNAMIC},)
    program = cmrc.trace(model, (x,), dynamic_shapes=dynamic)
    layers, directions = model.rnn.num_layers, 1 + model.rnn.bidirectional
    plan, clamps = cmrc.Plan(program), []
    for layer in range(layers):
        name = f"rnn:hidden@{layer}" if layers > 1 else "rnn:hidden"
        shift = 0 if model.last else layer  # others in each layer and direction, unless one value has them all
        own = [[(shift + d) % HIDDEN, (shift + d + 2) % HIDDEN] for d in range(directions)]
        constants = [[0.4 + 0.1 * layer, -0.3 - 0.1 * d] for d in range(directions)]
        flat = [d * HIDDEN + u for d, units in enumerate(own) for u in units]
        plan.do(name, units=flat, constant=np.ravel(constants))
        clamps.append([held_at(u, c) for u, c in zip(own, constants, strict=True)])
    lowered = cmrc.lower(program, plan)
    double = to_numpy(x).astype(np.float64)
    nothing = [[untouched] * directions] * layers
    assert distance(to_numpy(model(x).detach()), model.reference(double, nothing)) <= EXACT_F32
    expected = model.reference(double, clamps)
    assert distance(expected, model.reference(double, nothing)) > SEEN
    assert distance(lowered.clamped.run((x,))[0], expected) <= EXACT_F32
    assert distance(lowered.host.run((x,))[0], expected) <= EXACT_F32
    assert [s.units_after for s in lowered.report.sites] == [directions * (HIDDEN - 2)] * layers
    other = torch.randn(STEPS, BATCH + 1, READ, generator=torch.Generator().manual_seed(4))
    wider = model.reference(to_numpy(other).astype(np.float64), clamps)
    assert distance(lowered.host.run((other,))[0], wider) <= EXACT_F32
    if kind is not nn.RNN:  # torch's exporter writes an RNN step by step
        lowered.save(tmp_path / "small.onnx")
        assert distance(cmrc.trace(tmp_path / "small.onnx").run([to_numpy(x)])[0], expected) <= EXACT_F32


def test_both_directions_lose_equally_many() -> None:
    model = Net(nn.LSTM, bidirectional=True).eval()
    program = cmrc.trace(model, (torch.randn(STEPS, BATCH, READ),))
    with pytest.raises(ResidueError, match=r"its directions would keep different numbers of hidden units \(4 and 5\)"):
        cmrc.lower(program, cmrc.Plan(program).do("rnn:hidden", units=[1], constant=0.2))


def test_one_direction_does_not_rebuild_the_other() -> None:
    program = cmrc.trace(Net(nn.GRU, bidirectional=True).eval(), (torch.randn(STEPS, BATCH, READ),))
    with pytest.raises(DoError, match="one direction would read the other, which runs the other way"):
        cmrc.Plan(program).do("rnn:hidden", units=[1, 6], affine=cmrc.Affine([0, 7], [[0.1, 0.2], [0.0, 0.3]]))


def test_a_bias_that_is_not_there_leaves_zero() -> None:
    program = cmrc.trace(Net(nn.LSTM, bias=False).eval(), (torch.randn(STEPS, BATCH, READ),))
    with pytest.raises(DoError, match=r"it has no bias that could take R c in\n.*\n?.*the constant 0 is exact here"):
        cmrc.Plan(program).do("rnn:hidden", units=[1], constant=0.2)
    assert cmrc.lower(program, cmrc.Plan(program).do("rnn:hidden", units=[1], constant=0.0)).check().holds


class Streaming(nn.Module):
    """It returns its cell state, so that somebody else goes on from there."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(READ, HIDDEN), nn.Linear(HIDDEN, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        every, (_, cell) = self.rnn(x)
        return self.out(every), cell


def test_a_cell_state_that_the_model_returns_keeps_its_units() -> None:
    program = cmrc.trace(Streaming().eval(), (torch.randn(STEPS, BATCH, READ),))
    with pytest.raises(ResidueError, match="its gates read every hidden unit"):
        cmrc.lower(program, cmrc.Plan(program).do("rnn:hidden", units=[1], constant=0.2))


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_a_projected_lstm_of_two_directions_is_read_by_its_own_weights() -> None:
    """A projection of the hidden state stands among the weights of each direction."""
    torch.manual_seed(0)
    act = nn.Sequential(nn.Linear(READ, HIDDEN), nn.ReLU())
    rnn = nn.LSTM(HIDDEN, HIDDEN, proj_size=2, bidirectional=True)

    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act, self.rnn, self.out = act, rnn, nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.rnn(self.act(x))[0])

    model, x = Projected().eval(), torch.randn(STEPS, BATCH, READ)
    program = cmrc.trace(model, (x,))
    assert "rnn:hidden" not in program.names
    lowered = cmrc.lower(program, cmrc.Plan(program).do("act", units=[1, 2], constant=[0.7, 1.1]))
    with torch.no_grad():
        seen = act(x)
        seen[..., [1, 2]] = torch.tensor([0.7, 1.1])
        expected = model.out(rnn(seen)[0])
    assert distance(lowered.host.run((x,))[0], to_numpy(expected)) <= EXACT_F32
