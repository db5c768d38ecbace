"""Bases for keys and queries: found in every form of attention, and best where the formula says so."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from structures.test_basis import FORMS, LENGTH, SIZE, traced

import cmrc
from cmrc.errors import CmrcError
from cmrc.planning.bases import bases, heads_of, plan_heads

DATA = [np.random.default_rng(i).normal(size=(8, LENGTH, 4 * SIZE)).astype(np.float32) for i in range(4)]


@pytest.mark.parametrize("form", FORMS)
def test_heads_are_found_and_cut(form: str) -> None:
    program = traced(form, "fx")
    (heads,) = heads_of(program)
    each = FORMS[form][1] // FORMS[form][2]
    assert heads.size == SIZE
    assert heads.served == tuple(tuple(range(each * k, each * k + each)) for k in range(FORMS[form][2]))
    plan = plan_heads(program, data=DATA, keep=4)
    assert plan.made["left_out"] == {}
    lowered = cmrc.lower(program, plan)
    assert lowered.check((torch.from_numpy(DATA[0]),)).holds
    assert lowered.report.after.macs < lowered.report.before.macs


def test_the_basis_is_the_best_of_its_rank() -> None:
    """Against the products of all q and k of the data: no other cut of as many units comes near, and `lost` is what it loses."""
    program = traced("separate", "fx")
    (heads,) = heads_of(program)
    stats = cmrc.calibrate(program, DATA, sites=[heads.query.value, heads.key.value], need="scatter")
    q, k = (
        np.concatenate([program.run((x,), [s.value])[-1].reshape(-1, 4, SIZE) for x in DATA])
        for s in (heads.query, heads.key)
    )
    k = k - k.mean(0)
    products = np.einsum("nhi,mhi->hnm", q, k)

    def lost(matrices: np.ndarray, kept: int) -> float:
        keys = np.einsum("hij,nhj->nhi", matrices, k)
        keys[..., kept:] = 0
        keys = np.einsum("hij,nhj->nhi", np.linalg.inv(matrices), keys)
        return float(((np.einsum("nhi,mhi->hnm", q, keys) - products) ** 2).sum() / (products**2).sum())

    for kept in (2, 4):
        basis, predicted = bases(heads, stats.sites[heads.query.value], stats.sites[heads.key.value], kept)
        assert lost(basis, kept) == pytest.approx(predicted, rel=1e-3)
        rng = np.random.default_rng(0)
        others = [np.linalg.qr(basis + 0.1 * rng.normal(size=basis.shape))[0] for _ in range(5)]
        assert lost(basis, kept) < min(lost(other, kept) for other in [np.stack([np.eye(SIZE)] * 4), *others])
        assert np.linalg.cond(basis).max() < 10


@pytest.mark.parametrize("keep", [0, SIZE, 1.0, -0.5])
def test_a_number_that_leaves_nothing_or_everything_is_refused(keep: float) -> None:
    with pytest.raises(CmrcError, match=r"give 1 to 5, or a share below 1"):
        plan_heads(traced("separate", "fx"), data=DATA, keep=keep)


def test_a_model_without_attention_is_refused() -> None:
    program = cmrc.trace(torch.nn.Linear(3, 4), (torch.randn(2, 3),))
    with pytest.raises(CmrcError) as error:
        plan_heads(program, data=[np.zeros((2, 3), np.float32)], keep=0.5)
    assert str(error.value) == (
        "site: the model has no product of queries and keys that are made by weights alone\n"
        "  fix: rotary positions and norms of queries and keys keep their units: cut other sites"
    )
