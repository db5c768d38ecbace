"""Gradients of an ONNX model: its IR in torch (`hosts/autograd`), and onnxruntime for the ops that the IR does not know."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from cmrc.errors import HostError, StatsError
from cmrc.hosts.onnx.ops.row import ModelReading
from cmrc.hosts.protocols import Derivatives, DerivativesRequest, Learner, Piece
from cmrc.ir.bodies import without_bodies
from cmrc.ir.graph import Array, Node, as_dtype

if TYPE_CHECKING:
    from cmrc.hosts.autograd.network import GraphNetwork, OnHost

APART = 1e-3  # of an output's scale: how far torch and onnxruntime may be apart by rounding
OPTIMISE = (
    "give the model as it was before it was optimised or quantised; or leave out the sites whose gradients pass this op"
)


class Runs(Protocol):
    """What is needed of the host here."""

    def run(self, inputs: Mapping[str, Any], taps: Sequence[str] = ()) -> list[Array]: ...

    def bind(self, inputs: Sequence[Any] | Mapping[str, Any]) -> dict[str, Array]: ...

    def extract(self, inputs: Sequence[str], outputs: Sequence[str]) -> Piece: ...

    @property
    def inputs(self) -> Sequence[str]: ...


def differentiate(host: Runs, reading: ModelReading, request: DerivativesRequest) -> list[Derivatives]:
    """The derivatives at every value asked for, for one batch."""
    network = _network(host, reading)
    from cmrc.hosts.autograd import derivatives

    node = network.stops(request.values)
    if node is not None:
        raise StatsError(f"gradients stop here: {_why(node)}", node=node.label, op=node.kind, fix=OPTIMISE)
    inputs = host.bind(request.inputs)
    outputs, seen = network.watch(inputs, request.values, by_taps=True)
    _require_equal(outputs, host.run(inputs))
    return derivatives.differentiate(reading.graph, seen, outputs[0], request)


def learner(host: Runs, reading: ModelReading, trained: Collection[str]) -> Learner:
    """The model in training."""
    network = _network(host, reading)
    from cmrc.hosts.autograd.learner import TorchLearner

    network.train(trained)
    node = network.stops({node.name for node in reading.graph.nodes if network.reads_trained(node)})
    return TorchLearner(network, "" if node is None else f"{node.label} ({node.kind})")


def _why(node: Node) -> str:
    if node.op == "opaque":
        return f"cmrc does not know what the op computes{': ' + node.marks.why if node.marks.why else ''}, onnxruntime runs it"
    return "cmrc cannot differentiate this op; onnxruntime runs it"


def _network(host: Runs, reading: ModelReading) -> GraphNetwork:
    if find_spec("torch") is None:
        raise HostError(
            "gradients of an ONNX model are computed by torch, which is not installed",
            fix="pip install 'cmrc[torch]'; or use an objective without gradients, such as reconstruction",
        )
    import torch

    from cmrc.hosts.autograd.network import GraphNetwork

    double = any(leaf.dtype == "float64" for leaf in reading.graph.leaves().values())
    return GraphNetwork(
        without_bodies(reading.graph), _on_host(host), reading.inside, torch.float64 if double else torch.float32
    )


def _on_host(host: Runs) -> OnHost:
    """Runs single nodes under onnxruntime; a node that reads no value has its output read off a run of the whole model."""
    pieces: dict[tuple[str, ...], Piece] = {}

    def run(outputs: Sequence[str], feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        names = tuple(outputs)
        if set(feeds) == set(host.inputs):
            return dict(zip(names, host.run(feeds, names)[-len(names) :], strict=True))
        if names not in pieces:
            pieces[names] = host.extract(list(feeds), names)
        return pieces[names].run(feeds)

    return run


def _require_equal(outputs: Sequence[Any], expected: Sequence[Array]) -> None:
    """That torch computes what onnxruntime does, up to rounding: else a gradient would be that of another model."""
    for output, want in zip(outputs, expected, strict=True):
        got = output.detach().numpy()
        scale = float(np.abs(want).max()) if want.size else 0.0
        if got.shape != want.shape or float(
            np.abs(got - as_dtype(want, got.dtype.name)).max(initial=0.0)
        ) > APART * max(scale, 1e-6):
            raise HostError(
                "torch and onnxruntime compute different outputs, so gradients of this model cannot be trusted",
                fix="please report the model; until then use an objective without gradients",
            )
