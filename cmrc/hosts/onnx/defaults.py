"""Inputs of an ONNX model that have a default: initializers that are inputs as well.

A caller may give another value, so they are no parameters: nothing is folded into them, and they stay inputs of the result.
"""

from __future__ import annotations

import onnx_ir


def defaults(model: onnx_ir.Model) -> dict[str, onnx_ir.Value]:
    """The initializers that are defaults, by name. Before IR version 4 every initializer had to be an input."""
    if model.ir_version < 4:
        return {}
    return {name: value for name, value in model.graph.initializers.items() if value.is_graph_input()}


def reason(name: str) -> str:
    """Why a node that reads a default is left whole."""
    return (
        f"{name!r} is an input of the model with a default, which a caller may replace; "
        "onnx_ir.passes.common.RemoveInitializersFromInputsPass makes it a parameter"
    )
