"""The node tests that ship with onnx: a do at every floating-point value of each model, equal or refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx

import cmrc
from cmrc.errors import CmrcError
from tests.fuzz.judge import Case, Outcome, judge, raw
from tests.fuzz.plans import Request
from tests.fuzz.session import Array, Refused, outputs_of


@dataclass(frozen=True, slots=True)
class NodeModel:
    name: str
    model: onnx.ModelProto
    inputs: dict[str, Array]


def node_models() -> list[NodeModel]:
    """Those that onnxruntime runs by inputs that are arrays."""
    from onnx.backend.test.loader import load_model_tests

    models = []
    for test in load_model_tests(kind="node"):
        if test.model is None or not test.data_sets:
            continue
        arrays = test.data_sets[0][0]
        if all(isinstance(array, np.ndarray) and array.dtype.kind in "fiub" for array in arrays):
            names = [value.name for value in test.model.graph.input]
            models.append(NodeModel(test.name, test.model, dict(zip(names, arrays, strict=False))))
    return models


def outcomes(one: NodeModel) -> Iterator[tuple[str, Outcome]]:
    """What a do at each value and axis comes to; nothing where onnxruntime does not run the model."""
    try:
        outputs_of(one.model, one.inputs)
    except Refused:
        return
    base = Case(one.model, {}, (), given=one.inputs)
    try:
        program = cmrc.trace(one.model)
        values = list(program.values.values())
    except CmrcError as error:
        yield one.name, Outcome("fault" if "fault of cmrc" in str(error) else "refused", str(error))
        return
    except Exception as error:
        yield one.name, raw(error)
        return
    yield one.name, judge(base, program=program)
    for value in values:
        if not value.dtype.startswith("float") or value.name in program.inside:
            continue
        axes = [i for i, n in enumerate(value.shape) if isinstance(n, int) and n > 0]
        for axis in dict.fromkeys(axes[:2] + axes[-1:]):
            units = tuple(range(0, int(value.shape[axis]), 2))
            request = Request(value.name, axis, units, 0.37)
            case = Case(one.model, {}, [request], "keep", given=one.inputs)
            yield f"{one.name} {value.name}[{axis}]", judge(case, program=program)
