"""D2 = E‖Δz‖² of a plan from calibration statistics alone: no model runs, no swap.

Let δ = B a_K + β − a_S be what the replacement of S changes, written δ = A a + β with −1 in A for each replaced unit, and W the
weights that read the site. Then Δz = W_S δ, and with C the covariance of the units and b = A ā + β

    D2 = tr(G_SS (A C Aᵀ + b bᵀ)),    G = WᵀW;    for means as constants tr(G_SS C_SS)

The sum of single scores Σ G_jj C_jj leaves out how units vary together, and can be far too small. Under swaps of the retained
units at rate p the replaced ones keep the base's values, and retained ones come from base or source: C_ij of two retained units
becomes ((1 − p)² + p²) C_ij, of a retained and a replaced one (1 − p) C_ij. Constants do not notice.

It is exact, for the distribution of the calibration data, where the reader is the model's last linear op. Before other sites Δz is the
change of what the next op computes, not of the logits: `exact` says which.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cmrc.errors import VerifyError
from cmrc.ir.graph import Array, Do
from cmrc.program.plan import Plan
from cmrc.program.program import Program
from cmrc.statistics.readers import readers
from cmrc.statistics.site_stats import SiteStats
from cmrc.statistics.stats import Stats


@dataclass(frozen=True, slots=True)
class Distortion:
    """D2 at one site, and whether it is that of the logits."""

    site: str
    d2: float
    exact: bool


def distortion(program: Program, plan: Plan, stats: Stats, *, p: float = 0.0) -> list[Distortion]:
    """For each site of the plan, under swaps of its retained units at rate p (0: without swaps). Needs the scatter."""
    by_value: dict[str, list[Do]] = {}
    for entry in plan.entries:
        by_value.setdefault(entry.value, []).append(entry)
    return [
        _at_site(program, stats.sites.get(value) or stats[entries[0].site], entries, p)
        for value, entries in by_value.items()
    ]


def _at_site(program: Program, site: SiteStats, entries: list[Do], p: float) -> Distortion:
    columns = site.columns
    if any(entry.basis is not None for entry in entries):
        raise VerifyError(
            "D2 from statistics is for the model's own units, and these are replaced in another basis",
            node=columns.name,
            fix="compare the outputs of both models: `cmrc check` and `cmrc quality` do",
        )
    if columns.features > 1 or any(entry.constant.ndim > 1 for entry in entries):
        raise VerifyError(
            "D2 from statistics is for units that are single numbers, with one constant each",
            node=columns.name,
            fix="verify the plan with swaps",
        )
    reading = readers(program, columns)
    if not reading:
        raise VerifyError("no affine op reads its units", node=columns.name, fix="verify the plan with swaps")
    weight = np.concatenate([reader.weight for reader in reading])
    gone = [unit for entry in entries for unit in entry.units]
    change = np.zeros((len(gone), columns.units))
    constant = np.concatenate([np.broadcast_to(entry.constant, len(entry.units)) for entry in entries])
    change[np.arange(len(gone)), gone] = -1.0
    row = 0
    for entry in entries:
        if entry.weight is not None:
            change[row : row + len(entry.units), list(entry.parents)] += entry.weight
        row += len(entry.units)
    bias = change @ site.mean + constant
    second = change @ _swapped(site.covariance, gone, p) @ change.T + np.outer(bias, bias)
    read = weight[:, gone]
    only = reading[0]
    exact = len(reading) == 1 and only.exact and only.node.output.name in program.graph.outputs
    return Distortion(columns.name, float(np.einsum("oi,ij,oj->", read, second, read)), exact)


def _swapped(covariance: Array, gone: list[int], p: float) -> Array:
    """The covariance of the units when retained ones are swapped at rate p."""
    kept = np.ones(len(covariance), dtype=bool)
    kept[gone] = False
    factor = np.where(kept[:, None] & kept, (1 - p) ** 2 + p**2, np.where(kept[:, None] ^ kept, 1 - p, 1.0))
    np.fill_diagonal(factor, 1.0)
    return np.asarray(covariance * factor)
