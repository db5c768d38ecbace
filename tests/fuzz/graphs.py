"""Random ONNX graphs that onnxruntime runs: a chain of affine ops with others between, that branches and meets again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper

from tests.fuzz.builder import Builder, Held, Unfit, onnx_type
from tests.fuzz.layers import LAYERS
from tests.fuzz.nodes.affine import AFFINE
from tests.fuzz.nodes.along import ALONG
from tests.fuzz.nodes.blocks import BLOCKS
from tests.fuzz.nodes.layout import LAYOUT
from tests.fuzz.nodes.pointwise import POINTWISE
from tests.fuzz.quantised import QUANTISED
from tests.fuzz.session import BFLOAT16, Array, ir_version, newest_opset

KINDS = (AFFINE, POINTWISE, ALONG, LAYOUT, BLOCKS, LAYERS, QUANTISED)
WEIGHTS = np.array([0.21, 0.28, 0.11, 0.16, 0.09, 0.12, 0.03])
DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.float64), BFLOAT16)


@dataclass(frozen=True, slots=True)
class Feed:
    """How to make one input: normal numbers, or whole ones below a bound. `declared` has symbols where a size is dynamic."""

    shape: tuple[int, ...]
    dtype: str
    declared: tuple[int | str | None, ...]
    below: int = 0

    def array(self, seed: int, sizes: dict[tuple[int, int], int] | None = None) -> Array:
        rng = np.random.default_rng(seed)
        dtype = BFLOAT16 if self.dtype == "bfloat16" else np.dtype(self.dtype)
        if self.below:
            return rng.integers(0, self.below, size=self.shape).astype(dtype)
        return rng.normal(size=self.shape).astype(dtype)


def generate(rng: np.random.Generator) -> tuple[onnx.ModelProto, dict[str, Feed]]:
    """A model with its inputs. `Unfit` where nothing came of it."""
    opset = int(rng.integers(9, newest_opset() + 1))
    dtype = DTYPES[int(rng.choice(4, p=[0.84, 0.06, 0.08, 0.02]))]
    if dtype == BFLOAT16 and opset < 13:
        dtype = DTYPES[0]
    builder = Builder(
        rng, opset, dtype, prefix=str(rng.choice(["", "", "/net/", "a.b.", "x:"])), named=rng.random() < 0.7
    )
    feeds = _inputs(builder)
    if dtype == BFLOAT16 and builder.current is not None:  # onnxruntime computes little in it: weights and inputs only
        builder.dtype = np.dtype(np.float32)
        builder.node("Cast", [builder.current], to=1)
    _grow(builder)
    outputs = _outputs(builder)
    return _model(builder, feeds, outputs), feeds


def _inputs(b: Builder) -> dict[str, Feed]:
    feeds: dict[str, Feed] = {}
    symbols: dict[str | None, int] = {}
    mode = b.rng.random()
    for _ in range(b.choose([1, 1, 1, 2, 3])):
        rank = int(b.rng.choice([1, 2, 3, 4, 5], p=[0.05, 0.33, 0.22, 0.35, 0.05]))
        if feeds and b.chance(0.5):
            shape = b.choose(list(feeds.values())).shape
        else:
            sizes = [1, 2, 3, 4, 5, 6, 7, 8] if rank < 4 else [1, 2, 3, 4, 5]
            shape = tuple(0 if b.chance(0.008) else b.choose(sizes) for _ in range(rank))
        array = b.rng.normal(size=shape).astype(b.dtype)
        declared: list[int | str | None] = list(shape)
        for axis, size in enumerate(shape):
            if (mode > 0.75 and b.chance(0.5)) or (0.45 < mode <= 0.75 and axis == 0):
                name = b.choose(["N", f"N{size}", f"n_{len(feeds)}_{axis}", None])
                if name is None or symbols.setdefault(name, size) == size:  # one name, one size
                    declared[axis] = name
        value = b.input(array)
        feeds[value.name] = Feed(shape, b.dtype.name, tuple(declared))
    if b.chance(0.1):
        shape = tuple(b.between(1, 4) for _ in range(b.between(1, 2)))
        last = b.current
        value = b.input(b.rng.integers(0, 7, size=shape).astype(np.int64))
        declared = ["ids" if axis == 0 and mode > 0.45 else n for axis, n in enumerate(shape)]
        feeds[value.name] = Feed(shape, "int64", tuple(declared), below=7)
        b.current = last
    return feeds


def _grow(b: Builder) -> None:
    steps, tries = b.between(1, 7), 0
    b.channels_first = b.current is not None and b.current.rank > 2 and b.chance(0.6)
    if b.chance(0.9):
        _affine(b)
    while steps and tries < 40:
        tries += 1
        kind = KINDS[int(b.rng.choice(len(KINDS), p=WEIGHTS))]
        try:
            if kind is AFFINE and b.chance(0.8):
                _affine(b)
                steps -= 1
                continue
            kind[b.choose(list(kind))](b)
            steps -= 1
        except Unfit:
            continue
    for leaf in _leaves(b):
        if b.chance(0.9) and leaf.floating:
            b.current = leaf
            _affine(b)


def _affine(b: Builder) -> None:
    """An affine op that most often contracts the units of the last one: channels after a convolution, else the last axis."""
    for _ in range(6):
        current = b.current
        by_window = current is not None and current.rank > 2 and b.chance(0.9 if b.channels_first else 0.1)
        options = ["conv", "conv", "conv_transpose"] if by_window else ["matmul", "matmul", "gemm"]
        try:
            AFFINE[b.choose(options)](b)
            return
        except Unfit:
            continue


def _leaves(b: Builder) -> list[Held]:
    """Values that nobody reads and that are more than an input or a constant."""
    results = {name for node in b.nodes for name in node.output if node.op_type != "Constant"}
    read = {name for node in b.nodes for name in node.input} | b.read
    return [value for name, value in b.values.items() if name in results and name not in read]


def _outputs(b: Builder) -> list[Held]:
    outputs = _leaves(b)
    if not outputs:
        raise Unfit("it has no output")
    if len(outputs) > 1 and b.chance(0.3):  # nodes that nobody reads
        outputs = outputs[: b.between(1, len(outputs))]
    if b.chance(0.12):  # any value, which an input may be too
        outputs.append(b.choose([v for v in b.values.values() if not v.constant]))
    return list({value.name: value for value in outputs}.values())


def _model(b: Builder, feeds: dict[str, Feed], outputs: list[Held]) -> onnx.ModelProto:
    dynamic = any(not isinstance(n, int) for feed in feeds.values() for n in feed.declared)
    inputs = [
        helper.make_tensor_value_info(name, onnx_type(b.inputs[name].array.dtype), feed.declared)
        for name, feed in feeds.items()
    ]
    results = []
    for value in outputs:
        shape: Any = [f"o{len(results)}_{i}" for i in range(value.rank)] if dynamic else value.shape
        results.append(
            helper.make_tensor_value_info(value.name, onnx_type(value.array.dtype), None if b.chance(0.1) else shape)
        )
    initializers = list(b.initializers.values())
    overridable = b.chance(0.05)
    for tensor in initializers:
        if overridable and b.chance(0.5):
            inputs.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    graph = helper.make_graph(b.nodes, "fuzz", inputs, results, initializers)
    imports = [helper.make_opsetid("", b.opset), *(helper.make_opsetid(domain, 1) for domain in sorted(b.domains))]
    model = helper.make_model(graph, opset_imports=imports, ir_version=ir_version(b.opset))
    if b.chance(0.3) and not b.domains:
        try:
            model = onnx.shape_inference.infer_shapes(model)
        except onnx.shape_inference.InferenceError as error:
            raise Unfit("shape inference") from error
    return model
