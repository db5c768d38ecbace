"""The folded heads that networks are set beside, and the swaps that both are judged on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks import mechanisms
from benchmarks.reductions import LEARNED, Case, kept, small


@pytest.fixture(scope="module")
def case() -> Case:
    return small(0)


def test_the_folded_head_is_the_plan_that_was_learned(case: Case) -> None:
    units, head = mechanisms.affine(case, 16)
    plan = case.by(LEARNED, 16)
    assert units == sorted(kept(plan, case.units))
    expected = case.program.clamped(plan).run([case.test[0]])[0]
    inside = torch.from_numpy(mechanisms.activations(case, case.test[0])[:, units]).float()
    with torch.no_grad():
        assert np.allclose(head(inside).numpy(), expected, atol=1e-3)
        assert not np.allclose(head(inside).numpy(), case.program.run([case.test[0]])[0], atol=1e-3)


def test_swaps_change_kept_units_alone(case: Case) -> None:
    """Of two inputs: a kept unit is one's or the other's, and what the replaced ones add to the logits is all one's or all the other's."""
    inside, keep = mechanisms.activations(case, case.test[0])[:2], [0, 3, 5]
    swaps = mechanisms.Swaps(case, inside, keep)
    x, original = (drawn.numpy() for drawn in swaps.drawn(200, torch.Generator().manual_seed(0)))
    assert (np.abs(x[:, None] - inside[:, keep]).min(axis=1) == 0).all()
    assert len(np.unique(x, axis=0)) > 2
    weight, others = swaps.weight.numpy(), np.delete(np.arange(case.units), keep)
    rest = original - x @ weight[:, keep].T - swaps.bias.numpy()
    assert np.abs(rest[:, None] - inside[:, others] @ weight[:, others].T).max(axis=2).min(axis=1).max() < 1e-4
