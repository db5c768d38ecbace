"""What is known of a value: units of an axis that are replaced by constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cmrc.ir.axes import Index, compress, spread
from cmrc.ir.evaluate import constant
from cmrc.ir.graph import Array, Node, Tensor
from cmrc.ir.ops.affine import slab_of
from cmrc.passes.rewriting.rewriter import PAST, Declined, RuleOutcome, Sweep

NOTHING = np.zeros(())
NOT_FINITE = "its result for these constants is infinite or not a number"


@dataclass(frozen=True, slots=True)
class Known:
    """Units of an axis and their constants: a slab that broadcasts over the other axes, or the name of a value (`runtime`)."""

    source: str
    axis: int
    units: Index
    slab: Array
    sources: tuple[int, ...]
    runtime: str = ""

    def at(self, units: Sequence[int]) -> Array:
        if units is self.units or tuple(units) == self.units:
            return self.full()
        return self.full().take(self.positions(units), axis=self.axis)

    def positions(self, units: Sequence[int]) -> list[int]:
        where = {unit: i for i, unit in enumerate(self.units)}
        return [where[u] for u in units]

    def full(self) -> Array:
        return spread(self.slab, self.axis, len(self.units))


Facts = dict[int, Known]


def known_of(node: Node) -> Known:
    """What a constant do says."""
    source, value = node.inputs[:2]
    assert isinstance(source, str) and value is not None
    rank, attrs = len(node.output.shape), node.attrs
    units, sources = Index.of(attrs["units"]), node.marks.sources
    if isinstance(value, str):
        return Known(source, attrs["axis"], units, NOTHING, sources, value)
    assert isinstance(value, Tensor)
    return Known(source, attrs["axis"], units, slab_of(constant(value), attrs["axis"], rank), sources)


def bare(node: Node, facts: Facts) -> Node:
    """The node, reading its operands as they were before the do's."""
    return node.with_inputs([facts[i].source if i in facts else o for i, o in enumerate(node.inputs)])


def sources_of(facts: Facts) -> tuple[int, ...]:
    first, *others = facts.values()
    return tuple(sorted({*first.sources, *(s for fact in others for s in fact.sources)})) if others else first.sources


def sink(sweep: Sweep, node: Node, facts: Facts, axis: int, units: Sequence[int], slab: Array) -> RuleOutcome:
    """The op on its operands as they were, and what its units become behind it."""
    if not np.isfinite(slab).all():
        return Declined(NOT_FINITE)
    sweep.emit(bare(node, facts))
    sweep.put_do(node.output, axis, units, compress(slab, axis), sources_of(facts))
    return PAST
