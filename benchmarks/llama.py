"""A Llama-architecture ONNX model with random weights, written to disk layer by layer: no more than one weight in memory.

Root-mean-square norms, rotary positions, grouped queries, gated FFNs, in the ops that opset 23 has for them. Norm scales
are random too, so that nothing folds away by chance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
from onnx import TensorProto, helper

KIND = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}
IR_VERSION = 11  # of opset 23


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes; by default those of a model of 1.1 billion parameters."""

    layers: int = 16
    width: int = 2048
    ffn: int = 8192
    heads: int = 32
    served: int = 8
    vocabulary: int = 32000
    positions: int = 2048
    dtype: str = "float32"

    @property
    def head(self) -> int:
        return self.width // self.heads

    def ffn_site(self, layer: int) -> str:
        """The value whose axis of units is the FFN's."""
        return f"layers.{layer}.mlp.product"

    def head_site(self, layer: int) -> str:
        """What the heads of a layer give, side by side."""
        return f"layers.{layer}.attention.heads"

    def replaced(self, layer: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        """Units of the layer and constants for them: a quarter of the FFN's; a quarter of the keys' heads, with all the
        queries' heads that read them."""
        random, group = np.random.default_rng(layer), self.heads // self.served * self.head
        units = np.sort(random.choice(self.ffn, self.ffn // 4, replace=False))
        heads = np.sort(random.choice(self.served, max(self.served // 4, 1), replace=False))
        inner = np.concatenate([np.arange(head * group, (head + 1) * group) for head in heads])
        return (units, 0.2 * random.standard_normal(len(units))), (inner, 0.2 * random.standard_normal(len(inner)))

    def input_of(self, layer: int) -> str:
        """The value that a layer reads; behind the last layer, what it writes."""
        return f"layers.{layer - 1}.mlp.out" if layer else "embed"


@dataclass(slots=True)
class _Writer:
    """Nodes and initializers of the model under way; every weight goes to the data file at once."""

    config: Config
    data: BinaryIO
    location: str
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def _store(self, name: str, array: np.ndarray) -> str:
        array = np.ascontiguousarray(array.astype(self.config.dtype, copy=False))
        tensor = TensorProto(name=name, data_type=KIND[self.config.dtype], dims=array.shape)
        tensor.data_location = TensorProto.EXTERNAL
        place = {"location": self.location, "offset": self.data.tell(), "length": array.nbytes}
        for key, leaf in place.items():
            entry = tensor.external_data.add()
            entry.key, entry.value = key, str(leaf)
        array.tofile(self.data)
        self.initializers.append(tensor)
        return name

    def matrix(self, name: str, rows: int, columns: int) -> str:
        drawn = self.random.standard_normal((rows, columns), dtype=np.float32)
        drawn *= np.float32(rows**-0.5)
        return self._store(name, drawn)

    def vector(self, name: str, size: int) -> str:
        return self._store(name, 1.0 + 0.1 * self.random.standard_normal(size, dtype=np.float32))

    def ints(self, name: str, *values: int) -> str:
        self.initializers.append(helper.make_tensor(name, TensorProto.INT64, [len(values)], values))
        return name

    def table(self, name: str, array: np.ndarray) -> str:
        return self._store(name, array)

    def add(self, op: str, inputs: list[str], output: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(op, inputs, [output], name=output.replace(".", "/"), **attributes))
        return output


def write(path: Path, config: Config) -> None:
    """Write `path` and, beside it, its weights."""
    location = f"{path.name}.data"
    with (path.parent / location).open("wb") as data:
        writer = _Writer(config, data, location)
        logits = _body(writer)
    kind = KIND[config.dtype]
    graph = helper.make_graph(
        writer.nodes,
        "llama",
        [helper.make_tensor_value_info("tokens", TensorProto.INT64, ["batch", "length"])],
        [helper.make_tensor_value_info(logits, kind, ["batch", "length", config.vocabulary])],
        writer.initializers,
        value_info=[helper.make_tensor_value_info(name, kind, shape) for name, shape in _shapes(config)],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=IR_VERSION), path)


def _body(writer: _Writer) -> str:
    c, add = writer.config, writer.add
    x = add("Gather", [writer.matrix("embed.weight", c.vocabulary, c.width), "tokens"], "embed")
    angles = np.outer(np.arange(c.positions), 10000.0 ** (-np.arange(0, c.head, 2) / c.head))
    tables = [writer.table("rotary.cos", np.cos(angles)), writer.table("rotary.sin", np.sin(angles))]
    length = add("Shape", ["tokens"], "length", start=1, end=2)
    zero, one = writer.ints("zero", 0), writer.ints("one", 1)
    scalars = [add("Squeeze", [name], f"{name}.scalar") for name in (zero, length, one)]
    row = add("Unsqueeze", [add("Range", scalars, "positions"), zero], "positions.row")
    positions = add("Expand", [row, add("Shape", ["tokens"], "tokens.shape")], "position_ids")
    for i in range(c.layers):
        x = _attention(writer, f"layers.{i}.attention", x, positions, tables)
        x = _ffn(writer, f"layers.{i}.mlp", x)
    x = add("RMSNormalization", [x, writer.vector("norm.weight", c.width)], "norm", axis=-1, epsilon=1e-5)
    return add("MatMul", [x, writer.matrix("lm_head.weight", c.width, c.vocabulary)], "logits")


def _attention(writer: _Writer, name: str, x: str, positions: str, tables: list[str]) -> str:
    c, add = writer.config, writer.add
    h = add("RMSNormalization", [x, writer.vector(f"{name}.norm.weight", c.width)], f"{name}.norm", axis=-1)
    q, k, v = (
        add("MatMul", [h, writer.matrix(f"{name}.{part}.weight", c.width, heads * c.head)], f"{name}.{part}")
        for part, heads in (("q", c.heads), ("k", c.served), ("v", c.served))
    )
    q, k = (
        add("RotaryEmbedding", [part, *tables, positions], f"{part}.turned", num_heads=heads)
        for part, heads in ((q, c.heads), (k, c.served))
    )
    heads = {"q_num_heads": c.heads, "kv_num_heads": c.served}
    y = add("Attention", [q, k, v], f"{name}.heads", is_causal=1, **heads)
    y = add("MatMul", [y, writer.matrix(f"{name}.o.weight", c.width, c.width)], f"{name}.o")
    return add("Add", [x, y], f"{name}.out")


def _ffn(writer: _Writer, name: str, x: str) -> str:
    c, add = writer.config, writer.add
    h = add("RMSNormalization", [x, writer.vector(f"{name}.norm.weight", c.width)], f"{name}.norm", axis=-1)
    gate = add("MatMul", [h, writer.matrix(f"{name}.gate.weight", c.width, c.ffn)], f"{name}.gate")
    up = add("MatMul", [h, writer.matrix(f"{name}.up.weight", c.width, c.ffn)], f"{name}.up")
    silu = add("Mul", [gate, add("Sigmoid", [gate], f"{name}.sigmoid")], f"{name}.silu")
    product = add("Mul", [silu, up], f"{name}.product")
    down = add("MatMul", [product, writer.matrix(f"{name}.down.weight", c.ffn, c.width)], f"{name}.down")
    return add("Add", [x, down], f"{name}.out")


def _shapes(c: Config) -> Iterator[tuple[str, list[int | str]]]:
    """The shapes of the values, as exporters write them."""
    yield "embed", ["batch", "length", c.width]
    yield "norm", ["batch", "length", c.width]
    for i in range(c.layers):
        sizes = {"norm": c.width, "q": c.heads * c.head, "k": c.served * c.head, "v": c.served * c.head}
        sizes |= {"q.turned": c.heads * c.head, "k.turned": c.served * c.head, "heads": c.width, "o": c.width}
        for part, size in {**sizes, "out": c.width}.items():
            yield f"layers.{i}.attention.{part}", ["batch", "length", size]
        inner = dict.fromkeys(("gate", "up", "sigmoid", "silu", "product"), c.ffn)
        for part, size in {"norm": c.width, **inner, "down": c.width, "out": c.width}.items():
            yield f"layers.{i}.mlp.{part}", ["batch", "length", size]
