"""A mechanism whose every unit is constant is gone: its nodes, and its parameters on both hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from differential.cases_blocks import residual, resnet, squeeze_excite
from differential.cases_transformers import transformer
from differential.models import chain, net, randomise, to_onnx
from tolerances import EXACT_F32, MOVES
from torch import nn

import cmrc

IMAGE, ROWS = torch.randn(2, 3, 8, 7, generator=torch.Generator().manual_seed(1)), torch.randn(3, 6)
IDS = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(1))
DYNAMIC = torch.export.Dim.DYNAMIC


def bottleneck() -> nn.Module:
    """A residual block of padded convolutions with batch norm and dropout."""

    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = m.stem(x)
        return m.head(y + m.branch(y))

    branch = chain(
        conv1=nn.Conv2d(5, 7, 3, padding=1),
        bn=nn.BatchNorm2d(7),
        act=nn.ReLU(),
        drop=nn.Dropout(0.2),
        conv2=nn.Conv2d(7, 5, 3, padding=1),
    )
    return net(forward, stem=nn.Conv2d(3, 5, 1), branch=branch, head=nn.Conv2d(5, 4, 1))


def branches() -> nn.Module:
    """An inception of two branches."""
    return net(
        lambda m, x: m.out(F.relu(torch.cat([m.a(x), m.c(m.act(m.b(x)))], 1))),
        a=nn.Conv2d(3, 4, 3, padding=1),
        b=nn.Conv2d(3, 6, 1),
        act=nn.ReLU(),
        c=nn.Conv2d(6, 5, 3, padding=1),
        out=nn.Conv2d(9, 2, 3, padding=1),
    )


@dataclass(frozen=True)
class Branch:
    """A model, the site that becomes constant altogether, the prefixes of the parameters that go, and nodes that are left."""

    make: Callable[[], nn.Module]
    x: torch.Tensor
    site: str
    constant: float
    gone: Sequence[str]
    dynamic: tuple[int, ...] = (0,)
    additions: int = 0  # how many more there are afterwards


BRANCHES = {
    "mlp of a transformer": Branch(transformer, IDS, "b0.mlp.act", 0.3, ["b0.mlp", "b0.norm2"], (0, 1)),
    "mlp of a transformer, 0": Branch(
        transformer, IDS, "b0.mlp.fc2", 0.0, ["b0.mlp", "b0.norm2"], (0, 1), additions=-1
    ),
    "attention": Branch(transformer, IDS, "b0.attn.proj", 0.3, ["b0.attn", "b0.norm1"], (0, 1)),
    "attention, 0": Branch(transformer, IDS, "b0.attn.proj", 0.0, ["b0.attn", "b0.norm1"], (0, 1), additions=-1),
    "heads": Branch(transformer, IDS, "heads", 0.3, ["b0.attn", "b0.norm1"], (0, 1)),
    "conv": Branch(bottleneck, IMAGE, "branch.act", 0.6, ["branch"]),
    "conv of any size": Branch(bottleneck, IMAGE, "branch.act", 0.6, ["branch.conv1", "branch.bn"], (0, 2, 3)),
    "conv, 0": Branch(bottleneck, IMAGE, "branch", 0.0, ["branch"], (0, 2, 3), additions=-1),
    "block of a resnet": Branch(resnet, IMAGE, "b1.bn2", 0.4, ["b1"], (0, 2, 3)),
    "squeeze-excite": Branch(squeeze_excite, IMAGE, "se.gate", 0.6, ["se."], (0, 2, 3)),
    "squeeze-excite, inner": Branch(squeeze_excite, IMAGE, "se.act", 0.6, ["se."]),
    "concat": Branch(branches, IMAGE, "act", 0.4, ["b.", "c.weight"], additions=1),
    "concat of any size": Branch(branches, IMAGE, "act", 0.4, ["b."], (0, 2, 3), additions=1),
    "summand": Branch(residual, ROWS, "act", 0.6, ["b.", "c."]),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_a_constant_branch_is_gone(name: str) -> None:
    branch = BRANCHES[name]
    torch.manual_seed(0)
    module = randomise(branch.make()).eval()
    exported = torch.export.export(
        module, (branch.x,), dynamic_shapes=(dict.fromkeys(branch.dynamic, torch.export.Dim.DYNAMIC),)
    )
    for host in ("fx", "onnx"):
        program = cmrc.trace(exported if host == "fx" else to_onnx(exported))
        site = branch.site
        if site == "heads":
            site = next(
                s.value for s in program.sites(folds=False) if s.op in ("attention", "matmul") and s.shape[-1] == 4
            )
        lowered = cmrc.lower(program, cmrc.Plan(program).do(site, units="all", constant=branch.constant))
        check = lowered.check((branch.x,) if host == "fx" else [branch.x.numpy()])
        assert check.error <= EXACT_F32
        assert check.moved >= MOVES * EXACT_F32
        left = stored(lowered)
        assert [n for n in stored(program) if n.startswith(tuple(branch.gone)) and n in left] == []
        paths = {node.path for node in lowered.graph.nodes if node.op in ("linear", "conv", "along") and node.origin}
        assert not [path for path in paths if path.startswith(tuple(branch.gone))]
        if host == "fx":  # the exporter to ONNX writes a linear map as a product and an addition
            assert additions(lowered) - additions(program) == branch.additions


def additions(what: cmrc.Program | cmrc.Lowered) -> int:
    return sum(node.op == "pointwise" and node.attrs["fn"] == "add" for node in what.graph.nodes)


def stored(what: cmrc.Program | cmrc.Lowered) -> set[str]:
    """The names that hold parameters and buffers."""
    host = what.host
    if host.kind == "onnx":
        return set(host.model.graph.initializers)  # type: ignore[attr-defined]
    if isinstance(what, cmrc.Lowered):
        assert set(what.module.state_dict()) == set(host.state)  # type: ignore[attr-defined]
    return set(host.state)  # type: ignore[attr-defined]


def test_a_block_of_zeros_leaves_no_trace() -> None:
    """The residual block that adds nothing is the identity: what is left is what stands before and behind it."""
    module = randomise(bottleneck()).eval()
    program = cmrc.trace(module, (IMAGE,))
    lowered = cmrc.lower(program, cmrc.Plan(program).do("branch", units="all", constant=0.0))
    assert [node.label for node in lowered.graph.nodes] == ["stem", "head"]
    assert sorted(lowered.module.state_dict()) == ["head.bias", "head.weight", "stem.bias", "stem.weight"]
    assert torch.equal(lowered.module(IMAGE), module.head(module.stem(IMAGE)))  # type: ignore[operator]


@pytest.mark.parametrize("host", ["fx", "onnx"])
def test_a_model_that_would_be_constant_is_refused(host: str) -> None:
    exported = torch.export.export(randomise(chain(a=nn.Linear(6, 4), f=nn.ReLU(), b=nn.Linear(4, 2))).eval(), (ROWS,))
    program = cmrc.trace(exported if host == "fx" else to_onnx(exported))
    with pytest.raises(cmrc.CmrcError) as error:
        cmrc.lower(program, cmrc.Plan(program).do("f", units="all", constant=0.5))
    assert str(error.value) == (
        "residue: %output (output): a replacement cannot pass: every unit of this output is constant, so nothing would be "
        "left of the model\n  at plan: do[0] (f)\n"
        '  fix: leave that site out, choose another, or allow what stays at run time with residue="keep"'
    )
