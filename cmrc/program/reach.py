"""How much of a model its sites reach: the ops that write or read their units, whose weights lose rows and columns with them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cmrc.ir.cost import macs, stored_parts
from cmrc.ir.graph import Node, Tensor, attributes
from cmrc.ir.spec import FunctionAttrs
from cmrc.program.program import Program
from cmrc.program.sites import Site

WITH_WEIGHTS = ("linear", "conv", "embedding")  # units begin and end at these


@dataclass(frozen=True, slots=True)
class Reach:
    """Parameters and multiply-accumulates of the ops that sites reach, and their shares of the model's."""

    parameters: int
    macs: int
    share_of_parameters: float
    share_of_macs: float


def reach(program: Program, sites: Iterable[Site]) -> Reach:
    """What the units of these sites reach. An op that several sites reach counts once."""
    nodes = {node.name: node for site in sites for node in ops_around(program, site)}
    shapes = {name: value.shape for name, value in program.values.items()}
    tensors = {
        part: None
        for node in nodes.values()
        for operand in node.inputs
        if operand is not None and not isinstance(operand, str)
        for part in stored_parts(operand)
    }
    parameters = sum(math.prod(tensor.shape) for tensor in tensors if _counts(tensor))
    products = sum(macs(node, shapes, {}) for node in nodes.values())
    whole = program.cost()
    return Reach(parameters, products, parameters / max(whole.parameters, 1), products / max(whole.macs, 1))


def _counts(tensor: Tensor) -> bool:
    return bool(tensor.shape)  # a single number is not a parameter


def ops_around(program: Program, site: Site) -> list[Node]:
    """The ops that make the units of a site, back to those with weights, and those that read them, likewise."""
    maker = program.producers.get(site.value)
    return [*_walk(program, [maker] if maker else [], back=True), *_walk(program, program.consumers[site.value])]


def _walk(program: Program, start: Sequence[Node], *, back: bool = False) -> list[Node]:
    seen: dict[str, Node] = {}
    waiting = list(start)
    while waiting:
        node = waiting.pop()
        if node.name in seen:
            continue
        seen[node.name] = node
        if node.op in WITH_WEIGHTS:
            continue
        if back:
            waiting += [program.producers[name] for name in node.values() if name in program.producers]
        else:
            waiting += [reader for value in node.outputs for reader in program.consumers[value.name]]
    return list(seen.values())


def passed_by(program: Program, site: Site) -> bool:
    """Whether the inputs reach every output without this site, as a residual stream reaches the next block."""
    reached = {value.name for value in program.graph.inputs} - {site.value}
    for node in program.graph.nodes:
        if node.marks.shape_only is None and not reached.isdisjoint(node.values()):
            reached |= {value.name for value in node.outputs} - {site.value}
    return reached.issuperset(program.graph.outputs)


def last_of_each_run(program: Program, sites: Sequence[Site]) -> list[Site]:
    """Of sites with the same units, between one affine op and the next, the last: it is what the next op reads."""
    values = {site.value for site in sites}

    def passed_on(site: Site) -> bool:
        readers = program.consumers[site.value]
        while len(readers) == 1 and attributes(readers[0], FunctionAttrs).get("fn") in ("quantize", "dequantize"):
            readers = program.consumers[readers[0].name]
        return len(readers) == 1 and readers[0].op not in ("linear", "conv") and readers[0].name in values

    return [site for site in sites if not passed_on(site)]


def last_of_each_function(program: Program, sites: Sequence[Site]) -> list[Site]:
    """The same where a function of the units is spelled out in several ops that read them, as a GELU is."""
    units = {site.value: site.units for site in sites}

    def passed_on(site: Site) -> bool:
        seen, waiting = set[str](), list(program.consumers[site.value])
        while waiting:
            node = waiting.pop()
            if node.op != "pointwise" or node.name in seen:
                continue
            seen.add(node.name)
            if units.get(node.name) == site.units:
                return True
            waiting += program.consumers[node.name]
        return False

    return [site for site in last_of_each_run(program, sites) if not passed_on(site)]
