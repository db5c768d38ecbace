"""Statistics of arrays: a site without a model."""

from __future__ import annotations

import numpy as np

from cmrc.statistics.columns import Columns
from cmrc.statistics.site_stats import SiteStats

EVERYTHING = ("scatter", "range", "curvature", "coupling", "rows")


def stats_of(rows: np.ndarray, g: np.ndarray | None = None, h: np.ndarray | None = None) -> SiteStats:
    stats = SiteStats(Columns("site", "site", 1, rows.shape[1]), frozenset(EVERYTHING))
    stats.add(rows, gradient=g, curvature=h)
    return stats


def correlated(n: int, d: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) + rng.normal(size=d)
