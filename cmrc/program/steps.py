"""Models that round to steps (quantised models): how lowered and clamped are compared if the last bit may decide a whole step.

A float within rounding of the middle between two steps may go either way, in onnxruntime's own fusions as well. So

    in float64     both are computed from the same steps: each rounding gives what it gave in the clamped model, and the
                   values before the roundings and the outputs are compared
    in the host    they may differ by twice as much as the clamped model moves when its roundings decide anew: their scales are
                   moved by `MOVED`, which is what float32 models may usually differ by (`check.USUAL`)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from cmrc.hosts.protocols import Host
from cmrc.ir.evaluate import evaluate
from cmrc.ir.graph import Array, Do, Graph, Node, Tensor, attributes, literal
from cmrc.ir.spec import FunctionAttrs
from cmrc.ir.tensors import constant
from cmrc.passes.pipeline import put_dos
from cmrc.program.sites import Sites

MOVED = 2.0**-16
CLOSE = 1e-9  # of the largest number: what differs by less is rounding in float64
STEPS = {"uint8": (0, 255), "int8": (-128, 127), "uint16": (0, 65535), "int16": (-32768, 32767)}


def rounds_to_steps(node: Node) -> bool:
    return node.op == "pointwise" and attributes(node, FunctionAttrs)["fn"] == "quantize"


def rounded_anew(sites: Sites, entries: Sequence[Do]) -> Iterator[Host]:
    """The clamped model twice, with roundings that switch a little earlier and a little later."""
    whole = put_dos(sites.graph, entries)
    for by in (1 - MOVED, 1 + MOVED):
        nodes = tuple(_with_scale(node, by) if rounds_to_steps(node) else node for node in whole.nodes)
        yield sites.host.build(replace(whole, nodes=nodes))


def _with_scale(node: Node, factor: float) -> Node:
    scale = node.inputs[1]
    assert isinstance(scale, Tensor)
    return node.with_inputs((node.inputs[0], literal(constant(scale) * factor, scale.dtype), *node.inputs[2:]))


def pairs_between_steps(clamped: Graph, lowered: Graph, inputs: Mapping[str, Array]) -> Iterator[tuple[Array, Array]]:
    """What both compute in float64, as outputs and before each rounding that has the same size in both."""
    expected = evaluate(clamped, inputs)
    before = {node.name: expected[str(node.inputs[0])] for node in clamped.nodes if rounds_to_steps(node)}
    got = evaluate(lowered, inputs, given={name: expected[name] for name in before})
    for node in lowered.nodes:
        if node.name in before and got[str(node.inputs[0])].shape == before[node.name].shape:
            want, have = before[node.name], got[str(node.inputs[0])]
            apart = np.abs(want - have) > CLOSE * np.abs(want).max(initial=0.0)
            if apart.any() and not _are_read(lowered, inputs, node, apart):
                have = np.where(apart, want, have)  # a replacement of what nobody reads was left out
            yield want, have
    for want_name, name in zip(clamped.outputs, lowered.outputs, strict=True):
        yield expected[want_name], got[name]


def _are_read(graph: Graph, inputs: Mapping[str, Array], node: Node, places: Array) -> bool:
    """Whether these places of a rounded value reach an output: they are set to the first and to the last step."""
    if node.output.dtype not in STEPS:
        return True
    plain = evaluate(graph, inputs)
    for step in STEPS[node.output.dtype]:
        moved = evaluate(graph, inputs, given={node.name: np.where(places, step, plain[node.name])})
        if any(not np.array_equal(plain[name], moved[name], equal_nan=True) for name in graph.outputs):
            return True
    return False
