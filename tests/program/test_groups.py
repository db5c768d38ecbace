"""Coupled units: what `program.groups()` tells, and one request that becomes a do on every writer, through both hosts."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from command import cli
from differential.cases_blocks import InvertedResidual, UNet, gated, residual
from differential.cases_transformers import transformer
from differential.models import chain, net, randomise, to_onnx
from tolerances import EXACT_F32, MOVES
from torch import nn

import cmrc
from cmrc.program.groups import runs
from cmrc.program.strands import Identities

DYNAMIC = torch.export.Dim.DYNAMIC


class BasicBlock(nn.Module):
    """conv-bn-relu-conv-bn plus the input, which a projection fits where its size changes."""

    def __init__(self, width: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.act = nn.ReLU()
        changes = stride != 1 or width != out
        self.downsample = chain(conv=nn.Conv2d(width, out, 1, stride, bias=False), bn=nn.BatchNorm2d(out))
        self.downsample = self.downsample if changes else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(self.act(self.bn1(self.conv1(x)))))
        return self.act(y + (x if self.downsample is None else self.downsample(x)))


def resnet() -> nn.Module:
    return chain(
        conv1=nn.Conv2d(3, 6, 3, padding=1, bias=False),
        bn1=nn.BatchNorm2d(6),
        relu=nn.ReLU(),
        layer1=nn.Sequential(BasicBlock(6, 6), BasicBlock(6, 6)),
        layer2=nn.Sequential(BasicBlock(6, 8, 2), BasicBlock(8, 8)),
        pool=nn.AdaptiveAvgPool2d(1),
        flat=nn.Flatten(),
        fc=nn.Linear(8, 4),
    )


class Dense(nn.Module):
    """Batch norm, activation, 3x3 convolution; what it finds is laid beside what it read."""

    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.norm, self.act, self.conv = nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, growth, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.conv(self.act(self.norm(x)))], 1)


def densenet() -> nn.Module:
    return chain(
        stem=nn.Conv2d(3, 5, 3, padding=1),
        block=nn.Sequential(Dense(5, 3), Dense(8, 3), Dense(11, 3)),
        norm=nn.BatchNorm2d(14),
        act=nn.ReLU(),
        transition=nn.Conv2d(14, 6, 1),
    )


def resnext() -> nn.Module:
    return chain(
        conv1=nn.Conv2d(3, 8, 1),
        act1=nn.ReLU(),
        conv2=nn.Conv2d(8, 8, 3, padding=1, groups=4),
        act2=nn.ReLU(),
        conv3=nn.Conv2d(8, 3, 1),
    )


def mobilenet() -> nn.Module:
    return chain(
        stem=nn.Conv2d(3, 4, 3, 2, 1), b0=InvertedResidual(4, 8), b1=InvertedResidual(4, 8), head=nn.Conv2d(4, 3, 1)
    )


def two_stems() -> nn.Module:
    """Two summands that nobody else reads, of which one is the input itself."""
    return net(lambda m, x: m.out(x + m.a(x)), a=nn.Linear(6, 6), out=nn.Linear(6, 2))


class Norm(nn.Module):
    """An RMS norm as transformers spells it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.03))


def normed() -> nn.Module:
    """A residual stream that is only read through RMS norms."""

    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = m.stem(x)
        for block in m.blocks:
            y = y + block(y)
        return m.head(m.norm(y))

    def block() -> nn.Module:
        return chain(norm=Norm(6), up=nn.Linear(6, 8), act=nn.SiLU(), down=nn.Linear(8, 6))

    return net(
        forward, stem=nn.Linear(6, 6), blocks=nn.ModuleList([block(), block()]), norm=Norm(6), head=nn.Linear(6, 4)
    )


def normed_by_the_fused_op() -> nn.Module:
    model = normed()
    model.norm = nn.RMSNorm(6, eps=0.03)
    for block in model.blocks:
        block.norm = nn.RMSNorm(6, eps=0.03)
    return model


IMAGE, ROWS = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)), torch.randn(3, 6)
IDS = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(1))
MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "resnet": (resnet, IMAGE),
    "densenet": (densenet, IMAGE),
    "unet": (UNet, IMAGE),
    "mobilenet": (mobilenet, IMAGE),
    "resnext": (resnext, IMAGE),
    "gated": (gated, ROWS[:, None]),
    "residual": (residual, ROWS),
    "transformer": (transformer, IDS),
    "two_stems": (two_stems, ROWS),
    "normed": (normed, ROWS),
    "normed_by_the_fused_op": (normed_by_the_fused_op, ROWS),
}


@cache
def exported(model: str) -> torch.export.ExportedProgram:
    torch.manual_seed(0)
    make, x = MODELS[model]
    return torch.export.export(randomise(make()).eval(), (x,), dynamic_shapes=({0: DYNAMIC},))


@cache
def traced(model: str, host: str) -> cmrc.Program:
    return cmrc.trace(exported(model) if host == "fx" else to_onnx(exported(model)))


def proved(program: cmrc.Program, plan: cmrc.Plan, model: str) -> cmrc.Lowered:
    """Lowered, equal to the clamped model, which the replacement visibly moves."""
    lowered = cmrc.lower(program, plan)
    x = MODELS[model][1]
    check = lowered.check([x.numpy()] if program.host.kind == "onnx" else (x,))
    assert check.error <= EXACT_F32
    assert check.moved >= MOVES * EXACT_F32
    assert lowered.report.after.macs < lowered.report.before.macs
    return lowered


HOSTS = pytest.mark.parametrize("host", ["fx", "onnx"])


@pytest.mark.parametrize("model", MODELS)
def test_what_is_coupled_with_what(model: str, golden: Callable[[str, str], None]) -> None:
    listings = [f"{host}\n" + "\n".join(str(g) for g in traced(model, host).groups()) for host in ("fx", "onnx")]
    golden(f"groups/{model}", "\n\n".join(listings) + "\n")


# model, group, units, constant, and how many units each writer keeps
ASKED: list[tuple[str, str, list[int], object, list[int]]] = [
    ("resnet", "layer1", [0, 3], [0.7, 1.9], [4, 4, 4]),
    ("resnet", "layer2", [3, 7], 0.0, [6, 6, 6]),
    ("resnet", "layer2", [3, 7], [0.7, -1.9], [6, 6, 6]),
    ("densenet", "block", [1, 6, 7, 13], [0.7, -0.4, 1.3, 0.9], [4, 1, 3, 2]),
    ("unet", "cat", [0, 3, 8], [0.6, 1.1, -0.8], [4, 4]),
    ("mobilenet", "b0..b1", [1, 2], [0.8, -0.5], [2, 2, 2]),
    ("mobilenet", "b1.se.mul", [1, 5], 0.0, [6, 6]),
    ("resnext", "act1", [0, 3, 5, 6], [0.5, -0.7, 1.1, 0.9], [4]),
    ("resnext", "conv2", [0, 1], [0.5, 0.7], [6]),
    ("gated", "mul", [1, 4], 0.0, [6, 6]),
    ("normed", "stem", [1, 4], 0.0, [4, 4, 4]),
    ("normed_by_the_fused_op", "stem", [1, 4], 0.0, [4, 4, 4]),
    ("residual", "add", [1, 3], [0.5, -1.2], [3, 3]),
]


@HOSTS
@pytest.mark.parametrize(
    ("model", "name", "units", "constant", "left"), ASKED, ids=lambda x: str(x) if isinstance(x, str) else ""
)
def test_one_request_folds_in_every_writer(
    model: str, name: str, units: list[int], constant: object, left: list[int], host: str
) -> None:
    program = traced(model, host)
    plan = cmrc.Plan(program).do_group(name, units=units, constant=constant)  # type: ignore[arg-type]
    group = program.group(name)
    assert [entry.value for entry in plan.entries] == [w.value for w in group.writers if w.at(units)[0]]
    lowered = proved(program, plan, model)
    assert lowered.report.declined == ()
    values = lowered.graph.values()
    assert [values[w.value].shape[w.axis] for w in group.writers] == left


@HOSTS
def test_the_stream_is_constant_wherever_it_is_read(host: str) -> None:
    program = traced("resnet", host)
    plan = cmrc.Plan(program).do_group("layer1", units=[2], constant=1.5)
    taps = [program.find(name)[0].value for name in ("layer1.0", "layer1.1")]
    _, *read = program.clamped(plan).run([IMAGE.numpy()] if host == "onnx" else (IMAGE,), taps=taps)
    for seen in read:
        assert np.allclose(seen[:, 2], 1.5, atol=1e-6)
        assert seen[:, 3].std() > 0.1


@HOSTS
def test_a_constant_for_every_writer(host: str) -> None:
    program = traced("gated", host)
    first, second = (w.site for w in program.group("mul").writers)
    plan = cmrc.Plan(program).do_group("mul", units=[1, 4], constant={first: [0.4, -1.1], second: 2.0})
    assert [entry.constant.tolist() for entry in plan.entries] == [[0.4, -1.1], [2.0, 2.0]]
    proved(program, plan, "gated")


def test_a_group_is_also_found_by_a_site_that_writes_it() -> None:
    program = traced("resnet", "fx")
    assert program.group("layer2.0.downsample") == program.group("layer2")
    assert program.groups("layer*", folds=False) == program.groups(folds=False)


def crossed() -> nn.Module:
    """The units of `a` are coupled along both axes: with what mixes tokens, and with what mixes channels."""

    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = m.a(x)
        return m.out(m.across(y + m.tokens(y.transpose(1, 2)).transpose(1, 2)) + y)

    return net(forward, a=nn.Linear(6, 6), tokens=nn.Linear(5, 5), across=nn.Linear(6, 6), out=nn.Linear(6, 2))


def test_a_site_of_two_groups_is_ambiguous() -> None:
    program = cmrc.trace(crossed(), (torch.randn(2, 5, 6),))
    with pytest.raises(cmrc.CmrcError) as error:
        program.group("a")
    assert str(error.value) == "site: 'a' belongs to 2 groups\n  fix: name one: add_1, add"


REFUSED = {
    "no such group": (
        ("resnet", "layer3", {"units": [0], "constant": 0.0}),
        "site: no group is called 'layer3'\n  at plan: do[0]\n  fix: there are: layer2, layer1",
    ),
    "units out of range": (
        ("resnet", "layer2", {"units": [8], "constant": 0.0}),
        "do-units: %layer2 (group): units 8 are out of range: there are 8 units\n  at plan: do[0]\n  fix: units run from 0 to 7",
    ),
    "wrong number of constants": (
        ("resnet", "layer2", {"units": [1, 2, 3], "constant": [1.0, 2.0]}),
        "do-shape: %layer2 (group): the constants must be one number, or one for each of the 3 units\n  at plan: do[0]\n"
        "  fix: give one constant per replaced unit, or one for all",
    ),
    "NaN": (
        ("resnet", "layer2", {"units": [1], "constant": np.nan}),
        "do-value: %layer2.0.bn2 (batch_norm): 1 of the constants are NaN or infinite\n  at plan: do[0]\n  fix: give finite numbers",
    ),
    "a product": (
        ("gated", "mul", {"units": [1], "constant": 0.5}),
        "do: %mul (group): its writers meet in mul mul: one constant does not determine what each of them becomes\n"
        "  at plan: do[0]\n  fix: give a constant for each writer by name, or replace units of the site behind that node",
    ),
    "a writer that is not named": (
        ("gated", "mul", {"units": [1], "constant": {"act": 1.0}}),
        "do: %mul (group): there is no constant for 'up'\n  at plan: do[0]\n  fix: name each of act, up",
    ),
    "a writer that writes none of the units": (
        ("densenet", "block", {"units": [1], "constant": {"stem": 1.0, "block.1.conv": 0.0}}),
        "do: %block (group): 'block.1.conv' writes no such unit\n  at plan: do[0]\n  fix: name each of stem",
    ),
    "groups of a convolution that would differ": (
        ("resnext", "act1", {"units": [1], "constant": 0.0}),
        "do: %act1 (group): a replaced unit stops at conv2 (conv): its groups would keep different numbers of channels\n"
        "  at plan: do[0]\n  fix: choose another group, or sites behind that node",
    ),
    "an input of the model": (
        ("two_stems", "add", {"units": [1], "constant": 0.0}),
        "do: %add (group): a replaced unit stops at x (input): it is an input of the model\n"
        "  at plan: do[0]\n  fix: choose another group, or sites behind that node",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    (model, group, asked), expected = REFUSED[name]
    plan = cmrc.Plan(traced(model, "fx"))
    with pytest.raises(cmrc.CmrcError) as error:
        plan.do_group(group, **asked)  # type: ignore[arg-type]
    assert str(error.value) == expected
    assert plan.entries == []


def test_nothing_is_coupled() -> None:
    program = cmrc.trace(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)), (ROWS,))
    assert program.groups() == []
    with pytest.raises(cmrc.CmrcError) as error:
        cmrc.Plan(program).do_group("0", units=[0], constant=0.0)
    assert str(error.value) == (
        "site: no group is called '0'\n  at plan: do[0]\n  fix: nothing is coupled here: plan.do replaces units of a site"
    )


@pytest.mark.parametrize("host", ["fx", "onnx"])
def test_an_error_names_the_group_and_the_call(host: str) -> None:
    """A gate alone cannot be replaced: what it multiplies still varies."""
    torch.manual_seed(0)
    module = net(
        lambda m, x: m.out(m.act(m.wide(x)) * m.gate(m.narrow(x))),
        wide=nn.Linear(4, 12), act=nn.ReLU(), narrow=nn.Linear(4, 12), gate=nn.Sigmoid(), out=nn.Linear(12, 3),
    ).eval()  # fmt: skip
    exported = torch.export.export(module, (torch.randn(2, 4),))
    program = cmrc.trace(exported if host == "fx" else to_onnx(exported))
    for units, listed in (([5, 1], "[1, 5]"), (list(range(10)), "[0, ..., 9]")):
        with pytest.raises(cmrc.CmrcError) as error:
            cmrc.lower(program, cmrc.Plan(program).do("gate", units=units, constant=0.5))
        (group,) = program.groups()
        call = f"plan.do_group({group.name!r}, units={listed}, constant=0.0)"
        assert error.value.fix == (
            f"replace its group, {call}; or leave that site out, choose another, or allow what stays at run time "
            'with residue="keep"'
        )
    plan = cmrc.Plan(program).do_group(group.name, units=[1, 5], constant=0.0)
    given = torch.randn(2, 4)
    assert cmrc.lower(program, plan).check((given,) if host == "fx" else [given.numpy()]).holds


def test_an_error_names_no_group_for_units_along_another_axis() -> None:
    """A group is of channels; the plan replaces rows of the picture."""
    module = net(
        lambda m, x: torch.maximum(m.second(m.first(x)), m.first(x)), first=nn.Conv2d(4, 2, 3, padding=1), second=nn.Conv2d(2, 2, 3, padding=1)
    ).eval()  # fmt: skip
    program = cmrc.trace(module, (torch.randn(2, 4, 4, 4),))
    with pytest.raises(cmrc.CmrcError) as error:
        cmrc.lower(program, cmrc.Plan(program).do("second", axis=2, units=[2, 3], constant=[0.5, -0.3]))
    assert error.value.fix == 'leave that site out, choose another, or allow what stays at run time with residue="keep"'


def test_a_plan_without_a_model_has_no_groups() -> None:
    with pytest.raises(cmrc.CmrcError) as error:
        cmrc.Plan().do_group("layer1", units=[0], constant=0.0)
    assert str(error.value) == (
        "do: this plan is not bound to a model\n  at plan: do[0]\n  fix: make it with cmrc.Plan(program)"
    )


def test_units_are_replaced_once() -> None:
    plan = cmrc.Plan(traced("resnet", "fx")).do_group("layer1", units=[2], constant=1.0)
    with pytest.raises(cmrc.CmrcError, match="units 2 are replaced twice"):
        plan.do_group("layer1", units=[1, 2], constant=0.0)
    assert len(plan) == 3
    proved(traced("resnet", "fx"), plan.do_group("layer2", units=[0, 5], constant=[0.3, 1.2]), "resnet")


def test_runs() -> None:
    assert [runs([0, 1, 2]), runs([0, 1, 0, 1, 5]), runs([3])] == ["0:3", "0:2,0:2,5", "3"]


def test_the_command_line_lists_groups(tmp_path: Path) -> None:
    path = str(tmp_path / "model.onnx")
    traced("resnet", "onnx").save(path)
    shown = cli("inspect", path, "--groups")
    assert shown.exit_code == 0
    assert shown.stdout == "\n".join(str(g) for g in traced("resnet", "onnx").groups()) + "\n2 groups\n"
    document = json.loads(cli("inspect", path, "--groups", "--json", "--sites", "layer2").stdout)
    assert [(g["name"], g["units"], g["reasons"], g["folds"]) for g in document["groups"]] == [
        ("layer2", 8, ["add layer2.0", "add layer2.1"], "folds")
    ]
    assert [w["units"] for w in document["groups"][0]["writers"]] == ["0:8", "0:8", "0:8"]


def test_identities_that_stand_several_times_on_one_side_are_joined() -> None:
    """Each of these once set a set's parent to itself again, and never ended."""
    identities = Identities()
    ids = identities.fresh(6)
    identities.join(np.array([3, 3, 2]), np.array([1, 2, 2]))
    assert identities.find(ids).tolist() == [0, 1, 1, 1, 4, 5]
    identities.join(np.array([0, 0, 4]), np.array([5, 3, 4]))
    assert identities.find(ids).tolist() == [0, 0, 0, 0, 4, 0]
