"""Running a ModelProto under onnxruntime exactly as it stands: one thread, no graph optimisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

Array = np.ndarray[Any, np.dtype[Any]]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
PLAIN = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
USUAL = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL

onnxruntime.set_default_logger_severity(4)


class Refused(Exception):
    """onnxruntime takes no such model, or not with these inputs."""


def start(model: bytes, *, level: Any = PLAIN, without: Sequence[str] = ()) -> onnxruntime.InferenceSession:
    """A session; `without` names optimisations of onnxruntime that are left out."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    options.enable_cpu_mem_arena = False
    try:
        return onnxruntime.InferenceSession(
            model, options, providers=["CPUExecutionProvider"], disabled_optimizers=list(without)
        )
    except Exception as error:  # onnxruntime has a class for each status
        raise Refused(" ".join(str(error).split())) from error


def run(session: onnxruntime.InferenceSession, feeds: Mapping[str, Array]) -> list[Array]:
    """All outputs; bfloat16 goes in and comes out by its bits."""
    try:
        if not any(array.dtype == BFLOAT16 for array in feeds.values()) and not any(
            output.type == "tensor(bfloat16)" for output in session.get_outputs()
        ):
            return [np.asarray(array) for array in session.run(None, dict(feeds))]
        values = {name: _lend(array) for name, array in feeds.items()}
        return [_fetch(value) for value in session.run_with_ort_values(None, values)]
    except Exception as error:
        raise Refused(" ".join(str(error).split())) from error


def _lend(array: Array) -> Any:
    if array.dtype == BFLOAT16:
        bits = np.ascontiguousarray(array).view(np.uint16)
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, TensorProto.BFLOAT16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))


def _fetch(value: Any) -> Array:
    if value.data_type() != "tensor(bfloat16)":
        return np.asarray(value.numpy())
    session = _widen(len(value.shape()))
    return np.asarray(session.run_with_ort_values(None, {"x": value})[0].numpy()).astype(BFLOAT16)


@cache
def _widen(rank: int) -> onnxruntime.InferenceSession:
    dims = [f"d{i}" for i in range(rank)]
    node = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)
    x = helper.make_tensor_value_info("x", TensorProto.BFLOAT16, dims)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, dims)
    graph = helper.make_graph([node], "widen", [x], [y])
    return start(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8).SerializeToString()
    )


def outputs_of(model: onnx.ModelProto, feeds: Mapping[str, Array], *, level: Any = PLAIN) -> list[Array]:
    return run(start(model.SerializeToString(), level=level), feeds)


@cache
def newest_opset() -> int:
    """The newest opset of the default domain that this onnxruntime runs."""
    for opset in range(onnx.defs.onnx_opset_version(), 8, -1):
        value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy"]
        graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "probe", value[:1], value[1:])
        try:
            start(model_of(graph, opset).SerializeToString())
        except Refused:
            continue
        return opset
    raise Refused("onnxruntime runs no opset at all")


@cache
def ir_version(opset: int) -> int:
    return max(int(helper.find_min_ir_version_for([helper.make_opsetid("", opset)])), 4)


def model_of(graph: onnx.GraphProto, opset: int, domains: Sequence[str] = ()) -> onnx.ModelProto:
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    return helper.make_model(graph, opset_imports=imports, ir_version=ir_version(opset))
