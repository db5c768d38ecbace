"""The affine ops that read a site, and by which weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from nets import Convs, Tokens, data, exported, seeded, traced
from tolerances import ACROSS_F32, EXACT_F64, distance
from torch import nn

import cmrc
from cmrc.errors import ObjectiveError
from cmrc.planning.objectives import Context, score
from cmrc.statistics.readers import outgoing, readers


def test_readers_are_found_behind_reshapes_norms_and_pools() -> None:
    program = traced(seeded(Convs()), 2, 4, 4)
    columns = {
        name: cmrc.calibrate(program, [data(4, 2, 4, 4)[0]], sites=name)[name].columns
        for name in ("act1", "act2", "bn")
    }
    leaves = program.graph.leaves()
    kernel = leaves["conv2.weight"].load()
    matrix = outgoing(program, columns["act1"])
    assert distance((matrix**2).sum(0), (kernel**2).sum((0, 2, 3))) < EXACT_F64
    assert distance(matrix.T @ matrix, np.einsum("oihw,ojhw->ij", kernel, kernel)) < EXACT_F64
    head = leaves["head.weight"].load().reshape(4, 5, 4)  # a plane of 2 x 2 for each channel
    assert distance(outgoing(program, columns["act2"]).T @ outgoing(program, columns["act2"]),
                    np.einsum("ocp,odp->cd", head, head)) < EXACT_F64  # fmt: skip
    assert [reader.exact for reader in readers(program, columns["bn"])] == [False]  # a relu lies between
    assert [reader.exact for reader in readers(program, columns["act2"])] == [True]


def test_a_scaling_on_the_way_to_a_reader_counts() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.act, self.fc2 = nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)
            self.register_buffer("scale", torch.tensor([2.0, -0.5, 1.0, 3.0]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc2(self.act(self.fc1(x)) * self.scale)

    program = traced(seeded(Scaled()), 5)
    columns = cmrc.calibrate(program, [data(8, 5)[0]], sites="act")["act"].columns
    weight, scale = (program.graph.leaves()[name].load().astype(np.float64) for name in ("fc2.weight", "scale"))
    expected = weight * scale
    assert distance(outgoing(program, columns), expected) < EXACT_F64


def test_a_group_of_a_convolution_reads_its_own_channels() -> None:
    program = traced(seeded(nn.Sequential(nn.Conv2d(2, 4, 1), nn.ReLU(), nn.Conv2d(4, 6, 1, groups=2))), 2, 3, 3)
    columns = cmrc.calibrate(program, [data(4, 2, 3, 3)[0]], sites="1")["1"].columns
    weight = program.graph.leaves()["2.weight"].load().astype(np.float64)[:, :, 0, 0]
    whole = np.zeros((6, 4))
    whole[:3, :2], whole[3:, 2:] = weight[:3], weight[3:]
    read = outgoing(program, columns)
    assert distance(read.T @ read, whole.T @ whole) < EXACT_F64


def test_a_transposed_convolution_has_its_inputs_first() -> None:
    program = traced(seeded(nn.Sequential(nn.Conv2d(2, 3, 1), nn.ReLU(), nn.ConvTranspose2d(3, 5, 1))), 2, 3, 3)
    columns = cmrc.calibrate(program, [data(4, 2, 3, 3)[0]], sites="1")["1"].columns
    weight = program.graph.leaves()["2.weight"].load().astype(np.float64)[:, :, 0, 0]
    read = outgoing(program, columns)
    assert distance(read.T @ read, weight @ weight.T) < EXACT_F64


def test_readers_of_heads_and_of_values_that_nothing_affine_reads() -> None:
    program = traced(seeded(Tokens()), 3, 6)
    x, _ = data(4, 3, 6)
    name = next(site.name for site in program.sites(folds=False) if site.op == "attention")
    columns = cmrc.calibrate(program, [x], sites=name)[name].columns
    assert distance(outgoing(program, columns), program.graph.leaves()["proj.weight"].load()) < EXACT_F64
    with pytest.raises(ObjectiveError, match="no affine op reads its units"):
        outgoing(program, cmrc.calibrate(program, [x], sites="head")["head"].columns)
    with pytest.raises(ObjectiveError, match="no affine op before it makes its units one by one"):
        score("magnitude", Context(program, cmrc.calibrate(program, [x], sites=name)[name]))


def test_both_hosts_read_alike() -> None:
    program = traced(seeded(Convs()).float(), 2, 4, 4)
    x = data(4, 2, 4, 4)[0].astype(np.float32)
    for site in ("act1", "act2"):
        grams = []
        for each in (program, exported(program)):
            weight = outgoing(each, cmrc.calibrate(each, [x], sites=site)[site].columns)
            grams.append(weight.T @ weight)
        assert distance(*grams) < ACROSS_F32
