"""Models around one fused op: the op, a site in it, and what must be left of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser
from tolerances import EXACT_F32, MOVES

import cmrc
from cmrc.ir.graph import Array

HEADS, SIZE = 4, 16
WIDTH = HEADS * SIZE


def random(*shape: int, seed: int = 0, scale: float | None = None) -> Array:
    """Weights of a scale that keeps activations near one."""
    scale = shape[0] ** -0.5 if scale is None and len(shape) == 2 else scale or 1.0
    return (np.random.default_rng([seed, *shape]).normal(size=shape) * scale).astype(np.float32)


KINDS = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.int32): TensorProto.INT32,
    np.dtype(np.int64): TensorProto.INT64,
}
Inputs = Mapping[str, Array]


@dataclass(frozen=True)
class Case:
    """A model around one op, a site in it, units to replace, and what is left of parameters and attributes."""

    nodes: str
    site: str
    units: Sequence[int]
    arrays: dict[str, Array]
    inputs: Callable[[int], Inputs]
    left: dict[str, tuple[int, ...]]
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: str = "y"
    opset: int = 17
    axis: int | None = None
    evaluated: bool = True


def model(case: Case) -> onnx.ModelProto:
    feeds = case.inputs(2)
    inputs = [
        helper.make_tensor_value_info(name, KINDS[array.dtype], ["N", *array.shape[1:]] if array.ndim else [])
        for name, array in feeds.items()
    ]
    graph = helper.make_graph(
        [parser.parse_node(line.strip()) for line in case.nodes.strip().splitlines()],
        "main",
        inputs,
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in case.outputs.split()],
        [numpy_helper.from_array(array, name) for name, array in case.arrays.items()],
    )
    opsets = [helper.make_opsetid("", case.opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def tokens(*shape: int, **more: Callable[[int], Array]) -> Callable[[int], Inputs]:
    def feeds(batch: int) -> Inputs:
        x = random(batch, *shape, seed=batch)
        return {"x": x, **{name: make(batch) for name, make in more.items()}}

    return feeds


def heads(*which: int, size: int = SIZE) -> list[int]:
    return [head * size + i for head in which for i in range(size)]


def proved(case: Case, *, constant: Any = None) -> cmrc.Lowered:
    """Lowered and clamped agree at two batch sizes, and the do matters."""
    program = cmrc.trace(model(case))
    constant = random(len(case.units), seed=9, scale=1.0) if constant is None else constant
    plan = cmrc.Plan(program).do(case.site, units=case.units, constant=constant, axis=case.axis)
    lowered = cmrc.lower(program, plan, growth="allow")  # some models here read one weight twice
    for batch in (2, 3):
        check = lowered.check(case.inputs(batch))
        assert check.error <= EXACT_F32
        assert check.moved >= MOVES * EXACT_F32
    return lowered


def sizes(lowered: cmrc.Lowered) -> dict[str, tuple[int, ...]]:
    return {name: tuple(v.shape.numpy()) for name, v in lowered.host.model.graph.initializers.items()}  # type: ignore


FFN = {"up": random(WIDTH, 48, seed=1), "down": random(48, WIDTH, seed=2)}
FFN_LEFT = {"up": (WIDTH, 40), "down": (40, WIDTH)}
SCALES = {"gamma": random(WIDTH, seed=3), "beta": random(WIDTH, seed=4)}
SOME = [0, 3, 7, 8, 21, 30, 40, 47]
OUT = {"o": random(WIDTH, WIDTH, seed=5)}
PROJECTIONS = {name: random(WIDTH, WIDTH, seed=seed) for name, seed in (("wq", 6), ("wk", 7), ("wv", 8))}
PROJECT = """
q = MatMul(x, wq)
k = MatMul(x, wk)
v = MatMul(x, wv)
"""
SERVED = {"wk": random(WIDTH, 2 * SIZE, seed=7), "wv": random(WIDTH, 2 * SIZE, seed=8)}
ANGLES = np.outer(np.arange(16), 100.0 ** (-np.arange(SIZE // 2) / (SIZE // 2)))
TABLES = {"cos": np.cos(ANGLES).astype(np.float32), "sin": np.sin(ANGLES).astype(np.float32)}
LENGTHS: dict[str, Callable[[int], Array]] = {"seqlens": lambda n: np.full((n,), 4, dtype=np.int32)}


def mask(batch: int) -> Array:
    return (np.arange(5) < 3 + np.arange(batch)[:, None] % 3).astype(np.int32)


def stopped(case: Case, *sites: tuple[str, Sequence[int]]) -> tuple[cmrc.Lowered, str]:
    """Kept as a residue the result is still right; by default it is refused. Gives the result and the reason."""
    program = cmrc.trace(model(case))
    plan = cmrc.Plan(program)
    for site, units in sites or ((case.site, case.units),):
        plan.do(site, units=units, constant=0.7)
    with pytest.raises(cmrc.CmrcError) as error:
        cmrc.lower(program, plan)
    lowered = cmrc.lower(program, plan, residue="keep")
    for batch in (2, 3):
        check = lowered.check(case.inputs(batch))
        assert check.error <= EXACT_F32
        assert check.moved >= MOVES * EXACT_F32
    return lowered, str(error.value)
