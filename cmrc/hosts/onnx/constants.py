"""What a model computes from its parameters alone: weights that are standardised, normalised, transposed or put together.

Such a value depends on no input, so it is a parameter like any other. It is computed when somebody asks for its numbers, by onnxruntime
and once; where nothing changes, the nodes that compute it stay in the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np
import onnx_ir

from cmrc.errors import CmrcError
from cmrc.hosts.onnx.nodes import subgraphs
from cmrc.hosts.onnx.session import extract
from cmrc.ir.graph import Array, Leaf, Shape

DOMAINS = ("", "ai.onnx", "com.microsoft")
DRAWS = {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}


@dataclass(slots=True)
class Constants:
    """The values that depend on no input of a model; nodes are shown to it in their order."""

    model: onnx_ir.Model
    sources: dict[str, tuple[Leaf, ...]] = field(default_factory=dict)  # the parameters that each is made of, by name

    def covers(self, node: onnx_ir.Node) -> bool:
        """Whether all that a node reads is known before the model runs. Its results are, from here on."""
        read = [value.name for value in node.inputs if value is not None and value.name]
        known = (
            all(name in self.sources for name in read)
            and bool(node.inputs)
            and node.domain in DOMAINS
            and node.op_type not in DRAWS
            and not subgraphs(node)
        )
        if known:
            parts = tuple(dict.fromkeys(leaf for name in read for leaf in self.sources[name]))
            self.sources.update((value.name, parts) for value in node.outputs if value.name)
        return known

    def leaf(self, name: str, shape: Shape | None, dtype: str) -> Leaf | None:
        """A value as a parameter. Where its shape is not known it is computed at once; `None` where onnxruntime cannot."""
        load = cache(partial(_compute, self.model, name))
        sizes = tuple(n for n in shape or () if isinstance(n, int))
        if shape is not None and len(sizes) == len(shape) and dtype != "unknown":
            return Leaf(name, sizes, dtype, load, self.sources[name])
        try:
            array = load()
        except CmrcError:
            return None
        return Leaf(name, tuple(array.shape), array.dtype.name, load, self.sources[name])


def _compute(model: onnx_ir.Model, name: str) -> Array:
    (array,) = extract(model, {}, [], [name], (), ["CPUExecutionProvider"]).run({}).values()
    return np.asarray(array)
