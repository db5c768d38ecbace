"""A torch program as an ONNX model, by torch's own exporter; planes of ones stay computed.

    ones = Expand(1, [1, 1, H, W])     ->     ones = ConstantOfShape([1, 1, H, W])

The exporter's optimiser stores what it can compute, up to 262,144 numbers for each value. A plane, and all that is computed from
it, would fill the file. A `ConstantOfShape` is left alone by it, and computed by a runtime when it loads the model.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import onnx_ir
import torch
from torch.export import ExportedProgram

# What reads a plane: its convolution, what pads it, and what asks for its type (the exporter's zero bias does).
READERS = {("Conv", 0), ("ConvTranspose", 0), ("Pad", 0), ("CastLike", 1)}


def to_onnx(program: ExportedProgram) -> onnx_ir.Model:
    with warnings.catch_warnings(), _without_word_of_torchvision():
        warnings.simplefilter("ignore")
        exported = torch.onnx.export(program, dynamo=True, verbose=False, optimize=False)
        assert exported is not None
        for node in list(exported.model.graph):
            if _is_plane(node):
                _compute(exported.model.graph, node)
        exported.optimize()
    return exported.model


@contextmanager
def _without_word_of_torchvision() -> Iterator[None]:
    """The exporter warns of every op of torchvision that it cannot register, also where the model has none."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _is_plane(node: onnx_ir.Node) -> bool:
    value = node.outputs[0]
    if node.op_type != "Expand" or value.shape is None or not value.shape.is_static():
        return False
    readers = {(reader.op_type, position) for reader, position in value.uses()}
    return readers <= READERS and readers != {("CastLike", 1)} and _is_one(node)


def _is_one(node: onnx_ir.Node) -> bool:
    """Whether a node spreads the number 1, as it is or cast."""
    source = node.inputs[0]
    maker = None if source is None else source.producer()
    if maker is not None and maker.op_type == "Cast" and maker.inputs[0] is not None:
        maker = maker.inputs[0].producer()
    if maker is None or maker.op_type != "Constant":
        return False
    number = onnx_ir.convenience.get_const_tensor(maker.outputs[0])
    return number is not None and number.size == 1 and number.numpy().item() == 1


def _compute(graph: onnx_ir.Graph, node: onnx_ir.Node) -> None:
    value = node.outputs[0]
    assert value.shape is not None and value.dtype is not None
    sizes = onnx_ir.tensor([int(n) for n in value.shape if isinstance(n, int)], dtype=onnx_ir.DataType.INT64)
    shape = onnx_ir.node("Constant", [], {"value": sizes})
    plane = onnx_ir.node("ConstantOfShape", shape.outputs, {"value": onnx_ir.tensor([1], dtype=value.dtype)})
    (result,) = plane.outputs
    result.name, result.type, result.shape = value.name, value.type, value.shape
    value.name = None
    graph.insert_before(node, [shape, plane])
    onnx_ir.convenience.replace_all_uses_with(value, result)
    graph.remove(node, safe=True)
