"""Least squares towards the original: the least error that there is, op after op, streams and masks included."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from nets import Convs, exported, seeded

import cmrc
from cmrc.recovery import refits as module
from cmrc.recovery.affine import refits
from cmrc.recovery.lessons import Pool
from cmrc.recovery.parameters import trainable
from cmrc.recovery.refits import least_squares, refitted


class Residual(torch.nn.Module):
    """Two blocks x + down(act(up(x))) behind a stem, and a head that reads the mean over the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.act1, self.act2 = torch.nn.Linear(5, 6), torch.nn.GELU(), torch.nn.GELU()
        self.up1, self.down1 = torch.nn.Linear(6, 14), torch.nn.Linear(14, 6)
        self.up2, self.down2 = torch.nn.Linear(6, 14), torch.nn.Linear(14, 6)
        self.head = torch.nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x + self.down1(self.act1(self.up1(x)))
        x = x + self.down2(self.act2(self.up2(x)))
        weight = mask[:, :, None].to(x.dtype)
        return self.head((x * weight).sum(1) / weight.sum(1))


def made(host: str, model: torch.nn.Module, *inputs: np.ndarray) -> cmrc.Program:
    batch = torch.export.Dim("batch")
    args = tuple(torch.from_numpy(x[:2]) for x in inputs)
    program = cmrc.trace(seeded(model, 3).float().eval(), args, dynamic_shapes=tuple({0: batch} for _ in inputs))
    return program if host == "fx" else exported(program)


def texts(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    mask = (np.arange(7) < rng.integers(2, 8, size=count)[:, None]).astype(np.int64)
    return {"x": rng.normal(0, 2, size=(count, 7, 5)).astype(np.float32), "mask": mask}


def residual(host: str) -> tuple[cmrc.Program, cmrc.Lowered]:
    program = made(host, Residual(), *texts(2).values())
    plan = cmrc.Plan(program).do("act1", units=range(8), constant=0.3).do("act2", units=range(6), constant=-0.2)
    return program, cmrc.lower(program, plan)


def found(
    program: cmrc.Program, lowered: cmrc.Lowered, data: dict[str, np.ndarray], mask: str = ""
) -> dict[str, np.ndarray]:
    pool = Pool.read([data], lowered.host, 32)
    return refitted(program.host, lowered.host, pool, trainable(lowered.host.graph), mask=mask)


def error(program: cmrc.Program, host: object, data: dict[str, np.ndarray]) -> float:
    want, got = program.host.run(data)[0], host.run(data)[0]  # type: ignore[attr-defined]
    return float(((got - want) ** 2).mean() / want.var())


@pytest.mark.parametrize("host", ["fx", "onnx"])
def test_refits_of_linear_ops_bring_a_model_closer(host: str) -> None:
    program, lowered = residual(host)
    new = found(program, lowered, texts(256))
    leaves = lowered.host.graph.leaves()
    assert len(new) >= 8
    assert {name: array.shape for name, array in new.items()} == {name: leaves[name].shape for name in new}
    test = texts(400, 1)
    assert error(program, lowered.host.with_parameters(new), test) < 0.3 * error(program, lowered.host, test)


@pytest.mark.parametrize("host", ["fx", "onnx"])
def test_refits_of_convolutions_bring_a_model_closer(host: str) -> None:
    x = np.random.default_rng(0).normal(0, 3, size=(300, 2, 4, 4)).astype(np.float32)
    program = made(host, Convs(), x)
    lowered = cmrc.lower(program, cmrc.Plan(program).do("act1", units=[0, 1], constant=0.1))
    (name,) = program.host.inputs
    new = found(program, lowered, {name: x[:256]})
    assert any(leaf.name in new and len(leaf.shape) == 4 for leaf in lowered.host.graph.leaves().values())
    test = {name: x[256:]}
    assert error(program, lowered.host.with_parameters(new), test) < 0.9 * error(program, lowered.host, test)


def test_outputs_that_are_left_are_those_of_the_original() -> None:
    """The second half of the units of `up1` stays: the rows of its weight say so."""
    program, lowered = residual("fx")
    ops = {op.node.label: op for op in refits(program.graph, lowered.host.graph, trainable(lowered.host.graph))}
    assert ops["up1"].kept.tolist() == list(range(8, 14))
    assert ops["up2"].kept.tolist() == list(range(6, 14))
    assert ops["down1"].kept.tolist() == list(range(6))
    assert {name for name, op in ops.items() if op.stream is not None} == {"down1", "down2"}


def test_an_op_is_fitted_to_what_those_before_it_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's weight is numpy's least squares on what it reads in the refitted model."""
    monkeypatch.setattr(module, "RIDGES", (1e-9,))
    program, lowered = residual("fx")
    data = texts(256)
    new = found(program, lowered, data)
    host = lowered.host.with_parameters(new)
    node = next(node for node in host.graph.nodes if node.path == "head")
    (x,) = host.run(data, [str(node.inputs[0])])[1:]
    want = program.host.run(data)[0]
    wide = np.column_stack([x, np.ones(len(x))]).astype(np.float64)
    solved = np.linalg.lstsq(wide, want.astype(np.float64), rcond=None)[0]
    assert np.abs(new["head.weight"] - solved[:-1].T).max() < 1e-4
    assert np.abs(new["head.bias"] - solved[-1]).max() < 1e-4


def test_what_a_stream_has_lost_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its share of the stream's loss the second block leaves the first one's errors as they are."""
    program, lowered = residual("fx")
    data, test = texts(256), texts(400, 1)
    chosen = {"down2.weight", "down2.bias"}
    pool = Pool.read([data], lowered.host, 32)

    def after() -> float:
        return error(program, lowered.host.with_parameters(refitted(program.host, lowered.host, pool, chosen)), test)

    with_stream = after()
    monkeypatch.setattr("cmrc.recovery.affine._stream", lambda *_: None)
    assert with_stream < 0.8 * after()


def test_positions_that_a_mask_leaves_out_count_for_nothing() -> None:
    program, lowered = residual("fx")
    data = texts(128)
    other = {**data, "x": np.where(data["mask"][:, :, None] > 0, data["x"], 50.0).astype(np.float32)}
    a, b = (found(program, lowered, given, "mask") for given in (data, other))
    assert a.keys() == b.keys()
    assert all(np.allclose(a[name], b[name], atol=1e-5) for name in a)
    c = found(program, lowered, other)
    assert any(not np.allclose(a[name], c[name], atol=1e-3) for name in a if name in c)


def test_least_squares_of_noise_change_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What half of the rows say is of no use for the other half; what holds for both is found."""
    rng = np.random.default_rng(0)
    x, noise = rng.normal(size=(60, 1, 50)), rng.normal(size=(60, 1, 2))
    change = least_squares(x, noise, True)
    assert change is None or np.abs(change[0]).max() < 0.1
    exact = least_squares(x, 3 * x[:, :, :2] + 1, True)
    assert exact is not None
    assert np.abs(exact[0][0] - 3 * np.eye(50)[:, :2]).max() < 1e-2
    assert np.abs(exact[1] - 1).max() < 1e-2
    monkeypatch.setattr(module, "RIDGES", (1e-6,))
    overfitted = least_squares(x, noise, True)
    assert overfitted is not None
    assert np.abs(overfitted[0]).max() > 0.5


@pytest.mark.parametrize("host", ["fx", "onnx"])
def test_recovery_begins_with_least_squares(host: str) -> None:
    program, lowered = residual(host)
    data = texts(200)
    given = {"steps": 1, "rate": 1e-9, "loss": "squared-error"}
    recovery = cmrc.recover(program, lowered, [data], **given).recovery
    plain = cmrc.recover(program, lowered, [data], refit=False, **given).recovery
    assert recovery is not None
    assert plain is not None
    assert recovery.before == pytest.approx(plain.before)
    assert recovery.refitted is not None
    assert recovery.refitted < 0.3 * recovery.before
    assert recovery.after <= recovery.refitted
    assert plain.refitted is None
    assert plain.after > 0.9 * plain.before
    assert "by least squares" in str(recovery)
