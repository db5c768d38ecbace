"""A graph under construction. Every node runs at once under onnxruntime: what it refuses is not in the graph.

So a maker of nodes (nodes/) may ask for anything; shapes, dtypes and values of the result are what really came out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.fuzz.session import BFLOAT16, Array, Refused, ir_version, run, start

LARGEST = 600  # numbers in a value
STEEPEST = 60.0  # the largest magnitude: beyond it, functions and their rounding explode
FLOATS = ("float32", "float16", "float64", "bfloat16")


class Unfit(Exception):
    """A node that this graph cannot have: another one is tried."""


@dataclass(frozen=True, slots=True)
class Held:
    """A value of the graph with what it holds for the example inputs."""

    name: str
    array: Array
    constant: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def rank(self) -> int:
        return self.array.ndim

    @property
    def floating(self) -> bool:
        return self.array.dtype.name in FLOATS


def onnx_type(dtype: np.dtype[Any]) -> int:
    return int(TensorProto.BFLOAT16 if dtype == BFLOAT16 else helper.np_dtype_to_tensor_dtype(dtype))


@dataclass
class Builder:
    rng: np.random.Generator
    opset: int
    dtype: np.dtype[Any]
    prefix: str = ""
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: dict[str, onnx.TensorProto] = field(default_factory=dict)
    inputs: dict[str, Held] = field(default_factory=dict)
    values: dict[str, Held] = field(default_factory=dict)
    constants: list[Held] = field(default_factory=list)
    read: set[str] = field(default_factory=set)
    domains: set[str] = field(default_factory=set)
    named: bool = True
    channels_first: bool = False  # whether the latest affine op was a convolution
    current: Held | None = None
    signed: bool | None = (
        None  # whether activations are quantised to int8, else uint8: one of them throughout, as tools do it
    )

    # ------------------------------------------------------------ choices

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def choose(self, options: Sequence[Any]) -> Any:
        if not len(options):
            raise Unfit("nothing to choose from")
        return options[int(self.rng.integers(len(options)))]

    def between(self, low: int, high: int) -> int:
        """A number from `low` to `high`, both included."""
        return int(self.rng.integers(low, high + 1))

    def pick(self, *, least: int = 0, most: int = 6, same: Held | None = None) -> Held:
        """A floating-point value of fitting rank: most often the latest."""
        now = self.current
        if same is None and now is not None and least <= now.rank <= most and now.floating and self.chance(0.75):
            return now
        fitting = [
            value
            for value in self.values.values()
            if value.floating
            and least <= value.rank <= most
            and (same is None or (value.array.dtype == same.array.dtype and value.shape == same.shape))
        ]
        if same is not None and len(fitting) > 1:
            fitting = [value for value in fitting if value.name != same.name] if self.chance(0.9) else fitting
        return self.choose(fitting[-4:] if self.chance(0.6) else fitting)

    def axis(self, operand: Held, *, first: int = 0) -> int:
        """An axis, counted from behind a third of the time."""
        if operand.rank <= first:
            raise Unfit("no such axis")
        axis = self.between(first, operand.rank - 1)
        return axis - operand.rank if self.chance(0.35) else axis

    # ------------------------------------------------------------ pieces

    def fresh(self, hint: str) -> str:
        return f"{self.prefix}{hint}{len(self.values) + len(self.initializers) + len(self.nodes)}"

    def input(self, array: Array) -> Held:
        value = Held(self.fresh("in"), array)
        self.inputs[value.name] = self.values[value.name] = self.current = value
        return value

    def weights(self, *shape: int, scale: float | None = None, dtype: np.dtype[Any] | None = None) -> Array:
        """Numbers of about unit size; sometimes with zeros, all alike, or whole numbers."""
        fan = max(int(np.prod(shape[1:])) if len(shape) > 1 else 1, 1)
        drawn = np.array(self.rng.normal(size=shape) * (scale if scale is not None else 1.2 / np.sqrt(min(fan, 9))))
        if self.chance(0.04):
            drawn = np.array(np.round(drawn * 2))
        if self.chance(0.04) and drawn.ndim:
            drawn[..., : self.between(0, shape[-1])] = 0
        if self.chance(0.02):
            drawn = np.full(shape, drawn.reshape(-1)[0] if drawn.size else 0.0)
        return np.asarray(drawn).astype(dtype or self.dtype)

    def const(self, array: Any, *, plain: bool = False) -> Held:
        """An initialiser or a Constant node; now and then one that is there already, or a copy of it."""
        array = np.asarray(array)
        if not plain and array.ndim and self.chance(0.08):
            like = [c for c in self.constants if c.array.dtype == array.dtype and c.shape == array.shape]
            if like:
                chosen: Held = self.choose(like)
                if self.chance(0.6):
                    return chosen
                array = chosen.array.copy()
        value = Held(self.fresh("w"), array, constant=True)
        tensor = numpy_helper.from_array(array, value.name)
        if self.chance(0.15):
            self.nodes.append(helper.make_node("Constant", [], [value.name], value=tensor))
        else:
            self.initializers[value.name] = tensor
        self.constants.append(value)
        return value

    def ints(self, *numbers: int) -> Held:
        return self.const(np.array(numbers, dtype=np.int64), plain=True)

    def node(
        self,
        op: str,
        operands: Sequence[Held | None],
        *,
        outputs: int = 1,
        domain: str = "",
        captured: Sequence[Held] = (),
        wild: bool = False,
        unnamed: Sequence[int] = (),
        **attrs: Any,
    ) -> list[Held]:
        """Add a node if onnxruntime runs it and its results are tame. Those that are `unnamed`, it does not return."""
        names = [self.fresh(f"{op.lower()}_") + ("" if i == 0 else f"_{i}") for i in range(outputs)]
        names = ["" if i in unnamed and outputs > 1 else name for i, name in enumerate(names)]
        if "Conv" in op and any(o is not None and not o.array.size for o in operands):
            raise Unfit("onnxruntime hangs in a convolution without elements")
        if op in ("LSTM", "GRU", "RNN") and any(o is not None and not o.array.size for o in operands):
            raise Unfit("onnxruntime ends the process in a recurrent layer without samples")
        if op == "MatMul" and any(
            o is not None and (o.shape == (0,) or (not o.array.size and operands[0] is o and not o.shape[-1]))
            for o in operands
        ):
            raise Unfit(
                "onnxruntime leaves the product with a vector of no elements unset, and one over no elements behind a Transpose"
            )
        attrs = {name: value for name, value in attrs.items() if value is not None}
        if any(isinstance(value, list) and not value for value in attrs.values()):
            raise Unfit("an empty list of numbers")
        proto = helper.make_node(op, [o.name if o else "" for o in operands], names, domain=domain or None, **attrs)
        while proto.input and proto.input[-1] == "":
            proto.input.pop()
        if self.named:
            proto.name = f"{self.prefix}{op}_{len(self.nodes)}"
        arrays = self._evaluate(proto, [o for o in (*operands, *captured) if o is not None], list(filter(None, names)))
        for array in arrays:
            if array.size > LARGEST:
                raise Unfit("too large")
            if array.dtype.name in FLOATS and not wild:
                wide = array.astype(np.float64)
                if not np.isfinite(wide).all() or (wide.size and np.abs(wide).max() > STEEPEST):
                    raise Unfit("not tame")
        self.nodes.append(proto)
        self.domains |= {domain} - {""}
        self.read |= {o.name for o in (*operands, *captured) if o is not None}
        results = [Held(name, array) for name, array in zip(filter(None, names), arrays, strict=True)]
        for operand in results:
            self.values[operand.name] = operand
        if results[0].floating:
            self.current = results[0]
        return results

    def _evaluate(self, node: onnx.NodeProto, operands: Sequence[Held], names: Sequence[str]) -> list[Array]:
        feeds: Mapping[str, Array] = {o.name: o.array for o in operands}
        inputs = [helper.make_tensor_value_info(n, onnx_type(a.dtype), a.shape) for n, a in feeds.items()]
        constant = {o.name for o in operands if o.constant}
        initializers = [numpy_helper.from_array(feeds[name], name) for name in constant]
        outputs = [onnx.ValueInfoProto(name=name) for name in names]
        graph = helper.make_graph([node], "g", [i for i in inputs if i.name not in constant], outputs, initializers)
        imports = [helper.make_opsetid("", self.opset)]
        if node.domain:
            imports.append(helper.make_opsetid(node.domain, 1))
        model = helper.make_model(graph, opset_imports=imports, ir_version=ir_version(self.opset))
        try:
            arrays = run(start(model.SerializeToString()), {n: a for n, a in feeds.items() if n not in constant})
        except Refused as error:
            raise Unfit(str(error)) from error
        if node.op_type.startswith("Reduce") and not all(array.size for array in feeds.values()):
            (inferred,) = onnx.shape_inference.infer_shapes(model, data_prop=True).graph.output
            dims = inferred.type.tensor_type.shape.dim
            if [d.dim_value for d in dims] != list(arrays[0].shape):
                raise Unfit("onnxruntime keeps the shape of what has no elements")
        return arrays
