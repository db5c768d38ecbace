"""Fewer units inside attention's heads: the keys of every head, and its queries with them, in the basis that loses least.

    softmax(q · k) over keys            does not see what all keys share, so k counts by its covariance Ck, and q by Cq = E q qᵀ
    Cq^½ Ck^½ = U S Vᵀ                  A = Cq^-½ U_r S_r^½ and B = S_r^½ V_rᵀ Ck^-½
    q · k  ->  qᵀA · B k                is the best of rank r for independent q and k: it loses Σ s² beyond r
    T = (rows of B, rows at right angles to A)     and T k := 0 beyond r

The rows of each part are made orthonormal. That changes no product, and T is well conditioned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cmrc.errors import RecipeError, SiteError
from cmrc.ir.graph import Array, Node, attributes
from cmrc.ir.ops.affine import LinearAttrs
from cmrc.one_order import one_order
from cmrc.passes.basis_fold import Turned, Unfoldable
from cmrc.passes.rewriting.layouts import Layout, Reached, walk
from cmrc.program.dry_run import try_dos
from cmrc.program.plan import Plan
from cmrc.program.program import Program
from cmrc.program.sites import Site
from cmrc.statistics.calibrate import Watch, calibrate, unwatched
from cmrc.statistics.site_stats import SiteStats
from cmrc.statistics.stats import Stats

RIDGE = 1e-6  # of the largest eigenvalue: directions in which the data do not move


@dataclass(frozen=True, slots=True)
class Heads:
    """Where queries meet keys: their projections, the units of a head, and the heads of queries that each head of keys serves."""

    query: Site
    key: Site
    size: int
    served: tuple[tuple[int, ...], ...]


def heads_of(program: Program) -> list[Heads]:
    """Every product of queries and keys whose two sides are made by weights alone."""
    return [heads for node in program.graph.nodes for heads in _heads(program, node)]


def _heads(program: Program, node: Node) -> Iterator[Heads]:
    if node.op not in ("attention", "matmul") or not all(isinstance(operand, str) for operand in node.inputs[:2]):
        return
    size = program.values[str(node.inputs[0])].shape[-1]
    if not isinstance(size, int):
        return
    turned = Turned(program.graph, size)
    try:
        steps = [turned.reached(turned.maker(str(node.inputs[i])), node, i) for i in (0, 1)]
        partners = turned.partners(steps[1], steps[0])
        (query, queries), (key, keys) = (_projection(program, turned, step) for step in steps)
    except Unfoldable:  # probabilities times values, rotary positions, norms in between
        return
    served = tuple(tuple(i for i, q in enumerate(queries) if partners.get(q) == k) for k in keys)
    if all(served):
        yield Heads(query, key, size, served)


def _projection(program: Program, turned: Turned, step: Reached) -> tuple[Site, list[int]]:
    """The last value in which the heads lie side by side, and the block of the projection that each of them is."""
    name = str(step.node.inputs[step.position])
    maker = turned.maker(name)
    start = Layout.of(maker.output.shape, attributes(maker, LinearAttrs)["axis"])
    layouts = {str(s.node.inputs[s.position]): s.layout for s, _ in walk(program.graph, maker.name, start, turned.size)}
    while len(layouts[name].along()) != 1:
        name = program.producers[name].values()[0]
        if name not in layouts:
            raise Unfoldable(f"its heads lie side by side nowhere behind {maker.label}")
    (axis,) = layouts[name].along()
    return program.site_of(name, axis, program.title(name)), turned.along(layouts[name], axis, step.node)


@one_order()
def plan_heads(
    program: Program,
    stats: Stats | None = None,
    *,
    data: Any = None,
    keep: int | float,
    positions: Any = "all",
    watch: Watch = unwatched,
) -> Plan:
    """A plan that leaves `keep` units of every head's keys and queries: a number, or a share below 1.

    `stats` come from `cmrc.calibrate(..., need="scatter")` with the sites of `heads_of`; without them this function calibrates
    on `data`. Where a cut does not fold, `plan.made["left_out"]` says why.
    """
    products = heads_of(program)
    if not products:
        raise SiteError(
            "the model has no product of queries and keys that are made by weights alone",
            fix="rotary positions and norms of queries and keys keep their units: cut other sites",
        )
    if stats is None:
        sites = [site.value for heads in products for site in (heads.query, heads.key)]
        stats = calibrate(program, data, sites=sites, need="scatter", positions=positions, watch=watch)
    plan, left_out, cut = Plan(program), dict[str, str](), dict[str, Any]()
    for heads in products:
        number = keep if isinstance(keep, int) else 0
        kept = max(1, round(keep * heads.size)) if 0 < keep < 1 else number
        if not 0 < kept < heads.size:
            raise RecipeError(
                f"keep={keep} of {heads.size} units", fix=f"give 1 to {heads.size - 1}, or a share below 1"
            )
        basis, lost = bases(heads, stats.sites[heads.query.value], stats.sites[heads.key.value], kept)
        units = [heads.size * head + unit for head in range(len(heads.served)) for unit in range(kept, heads.size)]
        one = Plan(program).do(heads.key.value, units=units, constant=0.0, axis=heads.key.axis, basis=basis)
        outcome = try_dos(program.graph, one.entries)
        if not outcome.folds:
            left_out[heads.key.name] = str(outcome)
            continue
        plan.entries += one.entries
        cut[heads.key.name] = {"heads": len(heads.served), "units": heads.size, "kept": kept, "lost": round(lost, 6)}
    plan.made = {"bases": cut, "samples": stats.samples, "left_out": left_out}
    return plan


def bases(heads: Heads, queries: SiteStats, keys: SiteStats, kept: int) -> tuple[Array, float]:
    """The matrix of each head of keys, and the share of the variance of q · k that goes with the units beyond `kept`."""
    matrices, lost, every = [], 0.0, 0.0
    for head, served in enumerate(heads.served):
        moments = sum(_moments(queries, heads.size, q, raw=True) for q in served)
        root, inverse = _roots(np.asarray(moments))
        key_root, key_inverse = _roots(_moments(keys, heads.size, head, raw=False))
        u, s, vt = np.linalg.svd(root @ key_root)
        matrices.append(np.vstack([_orthonormal(vt[:kept] @ key_inverse), _complement(u.T[:kept] @ inverse)]))
        lost, every = lost + float((s[kept:] ** 2).sum()), every + float((s**2).sum())
    return np.stack(matrices), lost / every


def _moments(stats: SiteStats, size: int, head: int, *, raw: bool) -> Array:
    """Second moments of a head's units: about 0, or about their means."""
    units = slice(size * head, size * head + size)
    covariance = stats.covariance[units, units]
    return covariance + np.outer(stats.mean[units], stats.mean[units]) if raw else covariance


def _roots(matrix: Array) -> tuple[Array, Array]:
    """C^½ and C^-½."""
    values, vectors = np.linalg.eigh(matrix)
    roots = np.sqrt(np.maximum(values, RIDGE * max(float(values[-1]), np.finfo(np.float64).tiny)))
    return (vectors * roots) @ vectors.T, (vectors / roots) @ vectors.T


def _orthonormal(rows: Array) -> Array:
    return np.asarray(np.linalg.qr(rows.T)[0].T)


def _complement(rows: Array) -> Array:
    """Orthonormal rows at right angles to all of these."""
    return np.asarray(np.linalg.qr(rows.T, mode="complete")[0][:, len(rows) :].T)
