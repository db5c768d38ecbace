"""A torch program as an ONNX model, by torch's own exporter; planes of ones stay computed.

    ones = Expand(1, [1, 1, H, W])     ->     ones = ConstantOfShape([1, 1, H, W])

The exporter's optimiser stores what it can compute, up to 262,144 numbers for each value. A plane, and all that is computed from
it, would fill the file. It does not change a `ConstantOfShape`, which a runtime computes when it loads the model.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import onnx_ir
import torch
import torch.utils._pytree as pytree
from torch.export import ExportedProgram

from cmrc.errors import HostError

TALKATIVE = ("torch.onnx._internal.exporter._registration", "onnxscript.optimizer._constant_folding")  # loggers
# The readers of a plane: its convolution, a pad, and ops that need its type (for the exporter's zero bias).
READERS = {("Conv", 0), ("ConvTranspose", 0), ("Pad", 0), ("CastLike", 1)}


def to_onnx(program: ExportedProgram, output_names: Sequence[str] | None = None) -> onnx_ir.Model:
    """The model. Its outputs get the given names, otherwise the keys under which the module returns them, otherwise torch's names."""
    with warnings.catch_warnings(), _without_a_word():
        warnings.simplefilter("ignore")
        exported = torch.onnx.export(program, dynamo=True, verbose=False, optimize=False)
        assert exported is not None
        for node in list(exported.model.graph):
            if _is_plane(node):
                _compute(exported.model.graph, node)
        exported.optimize()
    _name_outputs(exported.model.graph, program, output_names)
    return exported.model


def _name_outputs(graph: onnx_ir.Graph, program: ExportedProgram, asked: Sequence[str] | None) -> None:
    names = _keys_of_outputs(program) if asked is None else list(asked)
    if asked is not None and (len(names) != len(graph.outputs) or len(set(names)) != len(names) or not all(names)):
        raise HostError(
            f"{', '.join(map(repr, names)) or 'nothing'} does not name {len(graph.outputs)} outputs",
            fix=f"give one name for each of {', '.join(str(value.name) for value in graph.outputs)}",
        )
    others = {value.name for node in graph for value in node.outputs if value not in graph.outputs}
    taken = others | {value.name for value in graph.inputs} | set(graph.initializers)
    for value, name in zip(graph.outputs, names, strict=False):
        if asked is not None and name in taken:
            raise HostError(f"{name!r} is the name of another value of the model", fix="choose another name")
        if name and name not in taken:
            value.name = name


def _keys_of_outputs(program: ExportedProgram) -> list[str]:
    """`logits` of a Hugging Face model, the keys of a mapping; empty if there are no keys."""
    spec = program.call_spec.out_spec
    if spec is None or len(set(names := [_key(path) for path in _paths(spec)]) - {""}) != len(names):
        return []
    return names


def _paths(spec: Any) -> list[tuple[Any, ...]]:
    leaves, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(spec.num_leaves)), spec))
    return [path for path, _ in leaves]


def _key(path: tuple[Any, ...]) -> str:
    """The key at the end of a path of keys."""
    last = path[-1] if path else None
    return last.key if isinstance(last, pytree.MappingKey) and isinstance(last.key, str) else ""


@contextmanager
def _without_a_word() -> Iterator[None]:
    """Hide warnings that are not faults: about torchvision's ops that cannot be registered, and about what is not folded."""
    loggers = [logging.getLogger(name) for name in TALKATIVE]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _is_plane(node: onnx_ir.Node) -> bool:
    value = node.outputs[0]
    if node.op_type != "Expand" or value.shape is None or not value.shape.is_static():
        return False
    readers = {(reader.op_type, position) for reader, position in value.uses()}
    return readers <= READERS and readers != {("CastLike", 1)} and _is_one(node)


def _is_one(node: onnx_ir.Node) -> bool:
    """Whether a node expands the number 1, possibly after a cast."""
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
