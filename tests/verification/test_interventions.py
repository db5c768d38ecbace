"""Interventions against the same ones done by torch's hooks on the whole model."""

from __future__ import annotations

import functools

import numpy as np
import onnx
import pytest
import torch
from interventions import MODELS, Attention, Images, Residual, floats, hooked, make, seen, traced
from tolerances import ACROSS_F32, EXACT_F32, distance
from torch import nn

import cmrc
from cmrc.errors import CmrcError, InterventionError, SiteError
from cmrc.ir.graph import Do

# model, site, where the units lie when the batch comes first, groups of the mask
SITES = [
    ("residual", "act", 1),
    ("residual", "act2", 1),
    ("images", "act", 1),
    ("images", "conv2", 1),
    ("attention", "act", 2),
    ("attention", "up", 2),
    ("attention", "mixed", 1),
]
HOSTS = ["fx", "onnx"]


@functools.cache
def program_of(name: str, host: str, *, dynamic: bool = True) -> cmrc.Program:
    model, draw = make(name)
    return traced(model, draw(3, 0), host, dynamic=dynamic)


def name_of(program: cmrc.Program, site: str) -> str:
    """The site of a module: the exporter names a value after the module where there is one of its own."""
    if site in program.host.names:
        return site
    assert site == "mixed"  # an identity leaves no node: its operand is the product of the attention
    return [n.name for n in program.graph.nodes if n.op == "matmul"][-1]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", sorted(MODELS))
def test_without_interventions_it_is_the_model(name: str, host: str) -> None:
    model, draw = make(name)
    x = draw(7, 1)
    interpreter = cmrc.interpret(program_of(name, host))
    assert distance(interpreter.run((x,))[0], model(x).detach()) <= ACROSS_F32


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(("name", "site", "axis"), SITES)
def test_interchange_equals_hooks(name: str, site: str, axis: int, host: str) -> None:
    model, draw = make(name)
    base, source = draw(9, 1), draw(9, 2)
    program = program_of(name, host)
    theirs, ours = seen(model, source, site), name_of(program, site)
    units = theirs.shape[axis]
    mask = np.random.default_rng(3).random((9, units)) < 0.5
    wide = torch.from_numpy(mask).reshape([9, *(units if i == axis else 1 for i in range(1, theirs.ndim))])
    expected = hooked(model, base, {site: lambda out: torch.where(wide, theirs, out)})
    interpreter = cmrc.interpret(program)
    output = interpreter.interchange((base,), (source,), ours, mask)
    assert distance(output[0], expected) <= ACROSS_F32
    assert distance(output[0], interpreter.run((base,))[0]) > 1000 * ACROSS_F32
    assert distance(interpreter.tap((source,), ours), theirs) <= ACROSS_F32


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", ["sequence-first", "windows"])
def test_rows_of_the_batch_are_followed(name: str, host: str) -> None:
    """The batch as the second axis, and several rows for every input: the mask is still a row for each input."""
    model, draw = make(name)
    base, source = draw(4, 1), draw(4, 2)
    mask = np.random.default_rng(0).random((4, 6)) < 0.5
    wide = (
        torch.from_numpy(mask)[None]
        if name == "sequence-first"
        else torch.from_numpy(mask).repeat_interleave(3, 0)[:, None]
    )
    theirs = seen(model, source, "act")
    expected = hooked(model, base, {"act": lambda out: torch.where(wide, theirs, out)})
    output = cmrc.interpret(program_of(name, host)).interchange((base,), (source,), "act", mask)
    assert distance(output[0], expected) <= ACROSS_F32


@pytest.mark.parametrize("host", HOSTS)
def test_one_site_behind_another(host: str) -> None:
    """The second swap comes after the effect of the first, and takes what the source has without interventions."""
    model, draw = make("residual")
    base, first, second = draw(6, 1), draw(6, 2), draw(6, 3)
    one, two = (np.random.default_rng(i).random((6, 8)) < 0.5 for i in (0, 1))
    sources = seen(model, first, "act"), seen(model, second, "act2")
    expected = hooked(
        model,
        base,
        {
            "act": lambda out: torch.where(torch.from_numpy(one), sources[0], out),
            "act2": lambda out: torch.where(torch.from_numpy(two), sources[1], out),
        },
    )
    interpreter = cmrc.interpret(program_of("residual", host))
    steps = cmrc.Swap("act", (first,), one), cmrc.Swap("act2", (second,), two)
    for order in (steps, steps[::-1]):  # the graph orders them, not the call
        assert distance(interpreter.intervene((base,), *order)[0], expected) <= ACROSS_F32


def test_a_value_beside_a_view_of_it_stays() -> None:
    """In torch the two share memory. What is written into the view behind the first site is not written into the value that it views."""
    model, draw = make("views")
    base = draw(6, 1)
    values = [
        np.random.default_rng(i).normal(size=shape).astype(np.float32) for i, shape in enumerate([(6, 8), (6, 2, 4)])
    ]
    masks = [np.random.default_rng(i).random(v.shape) < 0.5 for i, v in enumerate(values)]
    patches = [(torch.from_numpy(mask), torch.from_numpy(value)) for mask, value in zip(masks, values, strict=True)]
    expected = hooked(
        model,
        base,
        {"act": lambda out: torch.where(*patches[0], out), "fold": lambda out: torch.where(*patches[1], out)},
    )
    steps = cmrc.Patch("act", values[0], masks[0]), cmrc.Patch("fold", values[1], masks[1], axis=2)
    output = cmrc.interpret(program_of("views", "fx")).intervene((base,), *steps)
    assert distance(output[0], expected) <= ACROSS_F32


@pytest.mark.parametrize("host", HOSTS)
def test_constants_patches_and_affine_maps_at_once(host: str) -> None:
    model, draw = make("residual")
    base = draw(6, 1)
    program = program_of("residual", host)
    values = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
    mask = np.random.default_rng(1).random((6, 8)) < 0.3
    weight, bias = np.array([[0.5, -1.0], [0.25, 2.0]]), np.array([0.1, -0.2])
    plan = (
        cmrc.Plan(program)
        .do("act2", units=[1, 4], affine=cmrc.Affine([0, 7], weight, bias))
        .do("act2", units=[2], constant=0.7)
    )

    def affine(out: torch.Tensor) -> torch.Tensor:
        out = out.clone()
        out[:, [1, 4]] = out[:, [0, 7]] @ torch.tensor(weight.T, dtype=torch.float32) + torch.tensor(
            bias, dtype=torch.float32
        )
        out[:, 2] = 0.7
        return out

    edits = {"act": lambda out: torch.where(torch.from_numpy(mask), torch.from_numpy(values), out), "act2": affine}
    output = cmrc.interpret(program).intervene((base,), cmrc.Patch("act", values, mask), plan)
    assert distance(output[0], hooked(model, base, edits)) <= ACROSS_F32


@pytest.mark.parametrize("host", HOSTS)
def test_a_plan_means_what_the_clamped_model_computes(host: str) -> None:
    draw = make("images")[1]
    program = program_of("images", host)
    slab = np.random.default_rng(0).normal(size=(1, 2, 4, 4))
    plan = (
        cmrc.Plan(program)
        .do("act", units=[0, 3], constant=slab)
        .do("conv2", units=[1], affine=cmrc.Affine([0], [[2.0]], 0.5))
    )
    x = np.asarray(draw(4, 1))
    assert distance(cmrc.interpret(program).intervene((x,), plan)[0], program.clamped(plan).run((x,))[0]) <= EXACT_F32


@pytest.mark.parametrize("host", HOSTS)
def test_masks_by_position(host: str) -> None:
    model, draw = make("attention")
    base, source = draw(4, 1), draw(4, 2)
    mask = np.random.default_rng(0).random((4, 5, 12)) < 0.5
    theirs = seen(model, source, "act")
    expected = hooked(model, base, {"act": lambda out: torch.where(torch.from_numpy(mask), theirs, out)})
    interpreter = cmrc.interpret(program_of("attention", host))
    assert distance(interpreter.interchange((base,), (source,), "act", mask)[0], expected) <= ACROSS_F32
    images, draw = make("images")
    base, source = draw(4, 1), draw(4, 2)
    theirs = seen(images, source, "act")
    flat = np.random.default_rng(0).random((4, 16, 5)) < 0.5
    wide = torch.from_numpy(flat).transpose(1, 2).reshape(4, 5, 4, 4)
    expected = hooked(images, base, {"act": lambda out: torch.where(wide, theirs, out)})
    interpreter = cmrc.interpret(program_of("images", host))
    assert distance(interpreter.interchange((base,), (source,), "act", flat)[0], expected) <= ACROSS_F32


def test_masks_of_groups() -> None:
    draw = make("attention")[1]
    interpreter, base, source = cmrc.interpret(program_of("attention", "fx")), draw(4, 1), draw(4, 2)
    groups = np.random.default_rng(0).random((4, 3)) < 0.5
    one = interpreter.interchange((base,), (source,), "act", groups, group=4)
    assert np.array_equal(one[0], interpreter.interchange((base,), (source,), "act", np.repeat(groups, 4, axis=1))[0])


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(("name", "site", "axis"), SITES[:6])
def test_the_result_does_not_depend_on_chunks(name: str, site: str, axis: int, host: str) -> None:
    model, draw = make(name)
    base, source = draw(12, 1), draw(12, 2)
    program = program_of(name, host)
    mask = np.random.default_rng(0).random((12, seen(model, base, site).shape[axis])) < 0.5
    whole = cmrc.interpret(program).interchange((base,), (source,), site, mask)[0]
    for budget in (1, 4096):
        parts = cmrc.interpret(program, budget=budget).interchange((base,), (source,), site, mask)[0]
        assert distance(parts, whole) <= EXACT_F32
    rows = [
        cmrc.interpret(program).interchange((base[i : i + 1],), (source[i : i + 1],), site, mask[i : i + 1])[0]
        for i in range(12)
    ]
    assert distance(np.concatenate(rows), whole) <= EXACT_F32


def test_chunks_are_bitwise_equal_where_no_kernel_sums() -> None:
    class Pointwise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.Tanh()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(x) * x + 1

    draw = floats(5)
    program = traced(Pointwise(), draw(3, 0), "fx")
    mask = np.random.default_rng(0).random((50, 5)) < 0.5
    call = (draw(50, 1),), (draw(50, 2),), "act", mask
    whole = cmrc.interpret(program).interchange(*call)[0]
    assert np.array_equal(whole, cmrc.interpret(program, budget=100).interchange(*call)[0])


@pytest.mark.parametrize("host", HOSTS)
def test_a_batch_that_was_fixed_by_the_trace(host: str) -> None:
    """The model is run on as many rows as it was traced for, the last of them made full."""
    model, draw = make("attention")
    program = program_of("attention", host, dynamic=False)
    base, source, mask = draw(7, 1), draw(7, 2), np.random.default_rng(0).random((7, 12)) < 0.5
    theirs = seen(model, source, "act")
    expected = hooked(model, base, {"act": lambda out: torch.where(torch.from_numpy(mask)[:, None], theirs, out)})
    assert distance(cmrc.interpret(program).interchange((base,), (source,), "act", mask)[0], expected) <= ACROSS_F32


@pytest.mark.parametrize("host", HOSTS)
def test_the_prefix_runs_once_for_every_distinct_input(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = make("residual")[1]
    interpreter = cmrc.interpret(program_of("residual", host))
    few = draw(4, 1)
    base, source = few[torch.arange(40) % 4], few[torch.arange(40) % 3]
    ran: list[int] = []
    kind = type(interpreter.hold((few,), ("act",)))
    real = kind._run
    monkeypatch.setattr(
        kind, "_run", lambda self, level, feeds, count: ran.append((level, count)) or real(self, level, feeds, count)
    )
    interpreter.interchange((base,), (source,), "act", np.ones((40, 8), dtype=bool))
    assert ran == [(0, 4), (1, 40)]


def test_the_pieces_hold_no_work_twice() -> None:
    """Every product of the model is in exactly one piece: the work is that of the cut, no more."""
    draw = make("attention")[1]
    program = program_of("attention", "fx")
    interpreter = cmrc.interpret(program)
    interpreter.interchange((draw(4, 1),), (draw(4, 2),), "act", np.ones(12, dtype=bool))
    (pieces,) = interpreter._pieces.values()
    weighty = [
        [n.target for n in runner.module.graph.nodes if "linear" in str(n.target) or "matmul" in str(n.target)]
        for runner in pieces.runners
        if runner is not None
    ]
    assert [len(part) for part in weighty] == [5, 2]  # qkv, q·k, softmax·v, out, up; down, head


def broken() -> dict[str, tuple[str, str, object]]:
    ones = np.ones((4, 8), dtype=bool)
    return {
        "unknown": ("acts", "no site is called 'acts'", ones),
        "mask-of-other-units": ("act", "the mask has shape [4, 7]", ones[:, :7]),
        "mask-of-other-rows": ("act", "there are 5 rows of interventions and 4 of inputs", np.ones((5, 8), dtype=bool)),
        "mask-of-numbers": ("act", "the mask has numbers other than 0 and 1", ones * 0.5),
        "mask-by-odd-positions": ("act", "the mask has shape [4, 3, 8]", np.ones((4, 3, 8), dtype=bool)),
        "several": ("act*", "'act*' means 2 sites", ones),
    }


@pytest.mark.parametrize("case", sorted(broken()))
def test_what_does_not_fit_is_refused(case: str) -> None:
    site, reason, mask = broken()[case]
    draw = make("residual")[1]
    interpreter = cmrc.interpret(program_of("residual", "fx"))
    with pytest.raises(CmrcError) as caught:
        interpreter.interchange((draw(4, 1),), (draw(4, 2),), site, mask)
    assert caught.value.reason == reason


class Odd(nn.Module):
    """A module that is called twice, one that reaches no output, and one that no input reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.idle, self.fixed, self.head = (
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 2),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.twice(torch.relu(self.twice(x)))
        idle = self.idle(h)
        return self.head(h + self.fixed(torch.arange(4.0)) + 0 * idle.shape[0])


def test_sites_that_fire_never_or_twice_are_refused() -> None:
    interpreter = cmrc.interpret(traced(Odd(), torch.zeros(3, 4), "fx"))
    call = (torch.zeros(2, 4),), (torch.ones(2, 4),)
    for site, reason in {
        "twice": "'twice' is called 2 times, and each call is a separate site",
        "idle": "no output of the model depends on it",
        "fixed": "does not depend on the inputs of the model",
    }.items():
        with pytest.raises(SiteError) as caught:
            interpreter.interchange(*call, site, np.ones(4, dtype=bool))
        assert caught.value.reason == reason
    assert np.isfinite(interpreter.interchange(*call, "twice@1", np.ones(4, dtype=bool))[0]).all()


def test_rows_that_do_not_fit_are_refused() -> None:
    draw = make("residual")[1]
    interpreter = cmrc.interpret(program_of("residual", "fx"))
    with pytest.raises(InterventionError, match="there are 4 rows of interventions and 3 of inputs"):
        interpreter.interchange((draw(4, 1),), (draw(3, 2),), "act", np.ones((4, 8), dtype=bool))
    with pytest.raises(InterventionError, match="base and source differ in shape"):
        interpreter.interchange((draw(4, 1),), (torch.zeros(4, 7),), "act", np.ones((4, 8), dtype=bool))
    with pytest.raises(InterventionError, match="its units are along the batch axis"):
        interpreter.intervene((draw(4, 1),), Do("act", "gelu", 0, (0,), np.zeros(1)))
    with pytest.raises(InterventionError, match="the array of values has shape"):
        interpreter.patch((draw(4, 1),), "act", np.zeros((4, 3)))


def test_what_is_held_serves_any_number_of_interventions() -> None:
    draw = make("residual")[1]
    interpreter, x = cmrc.interpret(program_of("residual", "fx")), draw(10, 1)
    inputs_kept = interpreter.hold((x,), ["act"])
    for seed in range(2):
        rng = np.random.default_rng(seed)
        base, source, mask = rng.integers(10, size=20), rng.integers(10, size=20), rng.random((20, 8)) < 0.5
        output = inputs_kept.intervene(base, [cmrc.Swap("act", source, mask)])[0]
        assert distance(output, interpreter.interchange((x[base],), (x[source],), "act", mask)[0]) <= EXACT_F32
    with pytest.raises(SiteError, match="the held values were not cut there"):
        inputs_kept.intervene(base, [cmrc.Swap("act2", source, mask)])
    with pytest.raises(SiteError, match="no site is called 'acts'"):
        interpreter.hold((x,), ["acts"])


def test_an_input_without_a_batch_is_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return self.head(x * scale)

    program = cmrc.trace(Scaled(), (torch.zeros(3, 4), torch.ones(4)))
    with pytest.raises(InterventionError, match="the inputs have no common first axis"):
        cmrc.interpret(program).run((torch.zeros(3, 4), torch.ones(4)))


def test_models_are_the_ones_meant() -> None:
    assert {type(make(n)[0]) for n in ("residual", "images", "attention")} == {Residual, Images, Attention}


def test_sizes_of_what_no_input_reaches() -> None:
    """A constant is made as long as the batch, and its own size is read on both sides of the cut."""
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 18]>
        sizes (float[N,4] x) => (float[N,4] y)
        <float[4,4] w = {1,2,0,0, 0,1,3,0, 0,0,1,-1, 2,0,0,1}, int64[1] one = {1}, float[1,1] half = {0.5}> {
            rows = Shape <start = 0, end = 1> (x)
            shape = Concat <axis = 0> (rows, one)
            ones = ConstantOfShape <value = float[1] {1.0}> (shape)
            again = Shape (ones)
            halves = Expand (half, again)
            h = MatMul (x, w)
            shifted = Sub (h, halves)
            act = Relu (shifted)
            z = MatMul (act, w)
            y = Add (z, halves)
        }
    """)
    rng = np.random.default_rng(0)
    base, source = rng.normal(size=(2, 5, 4)).astype(np.float32)
    mask = rng.random((5, 4)) < 0.5
    weight = onnx.numpy_helper.to_array(model.graph.initializer[0])
    ours, theirs = (np.maximum(x @ weight - 0.5, 0) for x in (base, source))
    output = cmrc.interpret(cmrc.trace(model), budget=200).interchange((base,), (source,), "act", mask)[0]
    assert distance(output, np.where(mask, theirs, ours) @ weight + 0.5) <= EXACT_F32
