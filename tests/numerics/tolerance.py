"""The error of a right result and of wrong ones, each over the tolerance that `check` gives them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
from onnx import numpy_helper

import cmrc
from cmrc.hosts.inputs import random_batches
from cmrc.hosts.onnx.host import OnnxHost
from cmrc.ir.graph import Graph, Tensor, literal
from cmrc.ir.tensors import constant
from cmrc.program.check import (
    FOLDED,
    OutputCheck,
    check_batches,
    clamped_in_float64,
    folded_apart,
    nudged_host,
)
from cmrc.program.lower import stored_otherwise

OFF = 1e-3  # of the largest entry of a weight
SITES = 4


@dataclass(frozen=True, slots=True)
class Measured:
    """Error over tolerance: of the right result, and of every wrong one; and how many wrong entries `cmrc check` sees in the file.

    `in_float64` is how far folds with one wrong entry lie from the clamped model where both are computed in float64.
    """

    right: float
    wrong: list[float]
    in_file: int
    right_in_file: bool
    right_in_float64: float | None
    in_float64: list[float]

    def to_json(self) -> dict[str, Any]:
        return {
            "right": round(self.right, 4),
            "cases": len(self.wrong),
            "noticed": sum(ratio > 1 for ratio in self.wrong),
            "noticed in the file": self.in_file,
            "right in the file": self.right_in_file,
            "right in float64": self.right_in_float64,
            "noticed in float64": sum(apart > FOLDED for apart in self.in_float64),
            "within rounding": sum(
                ratio <= 2 * self.right for ratio in self.wrong
            ),  # no more than twice the right result
            "median": round(float(np.median(self.wrong)), 3),
            "smallest": round(min(self.wrong), 4),
        }


def measure(path: Path, *, cases: int, seed: int = 0) -> Measured:
    """Replace a tenth of the units of some sites that fold, and put one wrong entry after the other into what was folded."""
    rng = np.random.default_rng(seed)
    program = cmrc.trace(path)
    sites = [s for s in program.sites() if s.folding is not None and s.folding.constant.folds and s.units >= 10]
    plan = cmrc.Plan(program)
    for i in sorted(rng.permutation(len(sites))[:SITES].tolist()):
        units = sorted(rng.permutation(sites[i].units)[: sites[i].units // 10].tolist())
        plan.do(sites[i].value, units=units, constant=rng.normal(size=len(units)) / 4)
    lowered = cmrc.lower(program, plan, residue="keep")
    clamped, batches = program.clamped(plan), random_batches(program.host, seed=seed)

    def worst_of(host: OnnxHost) -> OutputCheck:
        """As `lowered.check` compares."""
        nudged = lambda: nudged_host(program, plan.entries)  # noqa: E731
        exactly = clamped_in_float64(program, plan.entries)
        return check_batches(program.host, clamped, host, batches, nudged=nudged, exactly=exactly).worst

    assert isinstance(lowered.host, OnnxHost)
    right = worst_of(lowered.host)
    proto = onnx_ir.to_proto(lowered.host.model)
    names = changed(onnx_ir.to_proto(program.host.model), proto)  # type: ignore[attr-defined]
    bound = clamped.bind(batches[0])
    right64 = folded_apart(program, plan.entries, lowered.graph, bound)
    wrong, in_float64, in_file = [], [], 0
    for _ in range(cases):
        altered = with_wrong_entry(proto, str(rng.choice(names)), rng)
        apart = folded_apart(program, plan.entries, with_wrong_fold(program.graph, lowered.graph, rng), bound)
        in_float64.append(0.0 if apart is None else apart)
        worst = worst_of(OnnxHost.from_model(altered))
        wrong.append(worst.error / worst.tolerance)
        in_file += bool(stored_otherwise(program, plan, cmrc.trace(altered)))
    fine = stored_otherwise(program, plan, cmrc.trace(proto)) == ()
    return Measured(right.error / right.tolerance, wrong, in_file, fine, right64, in_float64)


def changed(before: onnx.ModelProto, after: onnx.ModelProto) -> list[str]:
    """The weights and biases that the fold made."""
    known = {tensor.SerializeToString() for tensor in before.graph.initializer}
    return [
        tensor.name
        for tensor in after.graph.initializer
        if tensor.SerializeToString() not in known and tensor.data_type == onnx.TensorProto.FLOAT
    ]


def with_wrong_fold(before: Graph, after: Graph, rng: np.random.Generator) -> Graph:
    """The lowered graph with one entry of one folded tensor off by a thousandth of the largest there."""
    own = {(node.name, operand) for node in before.nodes for operand in node.inputs if isinstance(operand, Tensor)}
    places = [
        (number, i)
        for number, node in enumerate(after.nodes)
        for i, operand in enumerate(node.inputs)
        if isinstance(operand, Tensor) and operand.shape and (node.name, operand) not in own
    ]
    number, i = places[int(rng.integers(len(places)))]
    node = after.nodes[number]
    array = np.array(constant(node.inputs[i]), dtype=np.float64)  # type: ignore[arg-type]
    array[tuple(rng.integers(0, n) for n in array.shape)] += OFF * np.abs(array).max()
    wrong = node.with_inputs(literal(array) if k == i else operand for k, operand in enumerate(node.inputs))
    return replace(after, nodes=(*after.nodes[:number], wrong, *after.nodes[number + 1 :]))


def with_wrong_entry(proto: onnx.ModelProto, name: str, rng: np.random.Generator) -> onnx.ModelProto:
    """A copy with one entry of one weight off by a thousandth of the largest there."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for tensor in copy.graph.initializer:
        if tensor.name == name:
            array = numpy_helper.to_array(tensor).copy()
            array[tuple(rng.integers(0, n) for n in array.shape)] += OFF * np.abs(array).max()
            tensor.CopyFrom(numpy_helper.from_array(array, name))
    return copy
