"""Products that are cut into panels are those of numpy."""

from __future__ import annotations

import numpy as np
import pytest

from cmrc.one_order import PANEL, gram, product


@pytest.mark.parametrize("width", [7, PANEL, 2 * PANEL + 3])
def test_panels_cover_the_whole_product(width: int) -> None:
    rows, other = (np.random.default_rng(seed).integers(-9, 9, size=(5, width)).astype(np.float64) for seed in (0, 1))
    assert np.array_equal(gram(rows), rows.T @ rows)  # whole numbers: the order of sums does not matter
    assert np.array_equal(product(rows, other), rows.T @ other)
