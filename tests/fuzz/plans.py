"""Random plans, steered: most go to sites that `program.sites()` says fold, the others anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import cmrc
from cmrc.program.sites import Site
from tests.fuzz.clamp import Replacement

BLOCK = 16  # how many units share a scale in layers.n_bits


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One call of `plan.do`, or of `plan.do_group` where `group` is named; numbers as plain lists."""

    site: str
    axis: int | None
    units: tuple[int, ...]
    constant: Any = None
    parents: tuple[int, ...] = ()
    weight: Any = None
    group: bool = False

    def add_to(self, plan: cmrc.Plan) -> None:
        if self.group:
            plan.do_group(self.site, units=list(self.units), constant=self.constant)
        elif self.weight is None:
            plan.do(self.site, units=list(self.units), constant=self.constant, axis=self.axis)
        else:
            affine = cmrc.Affine(list(self.parents), self.weight, self.constant)
            plan.do(self.site, units=list(self.units), affine=affine, axis=self.axis)

    def replacement(self, axis: int) -> Replacement:
        weight = None if self.weight is None else np.asarray(self.weight, np.float64)
        constant = np.asarray(self.constant, np.float64)
        return Replacement(self.site, axis, self.units, constant, self.parents, weight)


def folds(text: str, kind: str) -> bool:
    """Whether a site's own account says that a do of this kind folds."""
    if text.startswith("constant "):
        constant, _, affine = text.partition("; affine ")
        text = constant.removeprefix("constant ") if kind == "constant" else affine
    return text.startswith("folds")


def requests(program: cmrc.Program, rng: np.random.Generator, described: dict[str, str] | None = None) -> list[Request]:
    """One to three do's. No two name the same units of an axis: that is refused, and tells nothing.

    `described` keeps how sites fold between plans for one program.
    """
    described = {} if described is None else described
    if rng.random() < 0.1:
        grouped = _group(program, rng)
        if grouped is not None:
            return [grouped]
    sites = program.sites(folds=False)
    chosen: list[Request] = []
    used: set[str] = set()
    for _ in range(int(rng.choice([1, 2, 3], p=[0.68, 0.22, 0.1]))):
        site, kind = _site(program, sites, rng, used, described)
        if site is None:
            break
        used.add(site.value)
        chosen.append(_request(site, kind, rng))
    return chosen


def _site(
    program: cmrc.Program, sites: list[Site], rng: np.random.Generator, used: set[str], described: dict[str, str]
) -> tuple[Site | None, str]:
    kind = "affine" if rng.random() < 0.35 else "constant"
    for value in program.graph.inputs:  # an input that is an output is rare, and wants a do of its own
        fixed = [i for i, n in enumerate(value.shape) if isinstance(n, int)]
        if value.name in program.graph.outputs and value.name not in used and fixed and rng.random() < 0.5:
            return program.site_of(value.name, int(rng.choice(fixed))), kind
    left = [site for site in sites if site.value not in used]
    if not left or rng.random() < 0.04:  # any value at all, an input too
        values = [v for v in program.values.values() if v.shape and v.name not in program.inside and v.name not in used]
        values = [v for v in values if v.dtype.startswith(("float", "bfloat"))]
        if not values:
            return None, kind
        value = values[int(rng.integers(len(values)))]
        axes = [i for i, n in enumerate(value.shape) if isinstance(n, int)]
        if not axes:
            return None, kind
        return program.site_of(value.name, int(rng.choice(axes))), kind
    order = [left[i] for i in rng.permutation(len(left))]
    if rng.random() < 0.5:  # hidden units of recurrent layers are few among the sites
        order.sort(key=lambda site: site.recurrence is None)
    if rng.random() < 0.93:
        other = "constant" if kind == "affine" else "affine"
        for site in order[:6]:
            if site.units < 2:
                continue
            if site.value not in described:
                described[site.value] = program.describe(site).folds
            text = described[site.value]
            for either in (kind, other):
                if folds(text, either):
                    return site, either
    inner = [site for site in order if site.value not in program.graph.outputs]
    return (inner or order)[0], kind


def _request(site: Site, kind: str, rng: np.random.Generator) -> Request:
    size = site.units
    axis = site.axis
    if rng.random() < 0.02:
        fixed = [i for i, n in enumerate(site.shape) if isinstance(n, int)]
        axis = int(rng.choice(fixed))
        size = int(site.shape[axis])
    hidden = site.recurrence is not None and rng.random() < 0.9  # one number for a unit, and one unit stays
    whole = rng.random() < 0.04 and not hidden
    count = size if whole else int(rng.integers(1, max(size, 2)))
    order = [int(i) for i in rng.permutation(size)]
    units = order[:count] if rng.random() < 0.15 else sorted(order[:count])
    if size > BLOCK and kind == "constant" and not whole:  # weights that share scales go by whole blocks
        starts = range(0, size, BLOCK)
        first = starts[int(rng.integers(len(starts)))]
        units = list(range(first, min(first + BLOCK, size)))
        count = len(units)
    if kind == "affine" and 0 < count < size:
        parents = order[count : count + int(rng.integers(1, size - count + 1))]
        weight = np.round(rng.normal(size=(count, len(parents))) * 0.6, 3)
        bias: Any = 0.0 if rng.random() < 0.3 else np.round(rng.normal(size=count), 3).tolist()
        return Request(site.value, axis, tuple(units), bias, tuple(parents), weight.tolist())
    form = rng.random()
    constant: Any = float(np.round(rng.normal(), 3)) if form < 0.3 else 0.0
    if form > (0.45 if not hidden else 0.65):
        constant = np.round(rng.normal(size=count), 3).tolist()
    if form > 0.85 and len(site.shape) > 1 and not hidden:
        shape = [n if isinstance(n, int) and rng.random() < 0.6 else 1 for n in site.shape]
        shape[axis] = count
        constant = np.round(rng.normal(size=shape), 3).tolist()
    return Request(site.value, axis, tuple(units), constant)


def _group(program: cmrc.Program, rng: np.random.Generator) -> Request | None:
    groups = program.groups()
    folding = [group for group in groups if folds(group.folds, "constant")]
    if folding and rng.random() < 0.8:
        groups = folding
    if not groups:
        return None
    group = groups[int(rng.integers(len(groups)))]
    count = int(rng.integers(1, max(group.units, 2)))
    units = sorted(int(i) for i in rng.permutation(group.units)[:count])
    constant: Any = 0.0 if rng.random() < 0.5 else np.round(rng.normal(size=len(units)), 3).tolist()
    return Request(group.name, None, tuple(units), constant, group=True)
