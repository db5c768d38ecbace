"""Valid files of every kind, small: what a fuzzer starts from."""

from __future__ import annotations

import io
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, parser

import cmrc

BESIDE = b"\0beside\0"  # parts the file of a case from the one that lies beside it
HASH = b"0123456789ab"  # stands for the digest in the name of a plan's array file, which a mutation would make wrong
RECIPES = (
    "preset: joint\nkeep: {act1: 0.5, act2: 2}\nmultiple_of: 2\nprotect: []\nridge: 1e-6\nseed: 3\n",
    "objective: task\nselect: bottom\nreplace: optimal\nsites: [act2]\nkeep: 0.5\nloss: cross-entropy\ncurvature: auto\nbatch: 4\n",
    "preset: cmr-affine\nparents: 4\nparent_rule: pearson\nridge: loo\nsites: ['*act2']\nminimum: 1\nclip: true\n",
    "preset: cmr-logit\nbudget: {of: parameters, amount: 0.8}\nschedule: [0.7]\nrecompute: fits\npositions: all\n",
    "preset: joint\nkeep: 3\nrecompute: all\ndrift_ridge: 0.1\ninterchange: 0.5\ndraws: 2\n",
)


def random(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


def build(text: str, inputs: dict[str, Any], outputs: str, **arrays: Any) -> onnx.ModelProto:
    nodes = [parser.parse_node(line.strip()) for line in text.strip().splitlines()]
    graph = helper.make_graph(
        nodes,
        "main",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs.split()],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return onnx.shape_inference.infer_shapes(model)


@cache
def mlp() -> onnx.ModelProto:
    """The model that plans, statistics and data are for."""
    return build(
        """h1 = Gemm<transB=1>(x, w1, b1)
        act1 = Relu(h1)
        h2 = Gemm<transB=1>(act1, w2, b2)
        act2 = Relu(h2)
        y = Gemm<transB=1>(act2, w3, b3)""",
        {"x": ("N", 4)}, "y",
        w1=random(6, 4), b1=random(6), w2=random(5, 6), b2=random(5), w3=random(3, 5), b3=random(3),
    )  # fmt: skip


@cache
def batch() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(24, 4)).astype(np.float32), rng.integers(0, 3, 24)


def models() -> list[onnx.ModelProto]:
    conv = build(
        """c = Conv<pads=[1, 1, 1, 1], kernel_shape=[3, 3]>(x, w1, b1)
        n = BatchNormalization(c, scale, b, mean, var)
        a = Relu(n)
        p = MaxPool<kernel_shape=[2, 2], strides=[2, 2]>(a)
        d = Conv<group=4, pads=[1, 1, 1, 1]>(p, w2)
        e = Clip(d, low, high)
        g = GlobalAveragePool(e)
        f = Flatten(g)
        y = MatMul(f, w3)""",
        {"x": ("N", 2, 6, 6)}, "y",
        w1=random(4, 2, 3, 3), b1=random(4), scale=random(4), b=random(4), mean=random(4), var=abs(random(4)) + 1,
        w2=random(4, 1, 3, 3), low=np.float32(0), high=np.float32(6), w3=random(4, 3),
    )  # fmt: skip
    attention = build(
        """q = MatMul(x, wq)
        k = MatMul(x, wk)
        v = MatMul(x, wv)
        q4 = Reshape(q, heads)
        k4 = Reshape(k, heads)
        v4 = Reshape(v, heads)
        qt = Transpose<perm=[0, 2, 1, 3]>(q4)
        kt = Transpose<perm=[0, 2, 3, 1]>(k4)
        vt = Transpose<perm=[0, 2, 1, 3]>(v4)
        s = MatMul(qt, kt)
        a = Softmax<axis=-1>(s)
        o = MatMul(a, vt)
        ot = Transpose<perm=[0, 2, 1, 3]>(o)
        o3 = Reshape(ot, flat)
        z = MatMul(o3, wo)
        r = Add(x, z)
        y = LayerNormalization<axis=-1>(r, gamma)""",
        {"x": ("N", 3, 4)}, "y",
        wq=random(4, 4), wk=random(4, 4), wv=random(4, 4), wo=random(4, 4), gamma=random(4),
        heads=np.array([0, 3, 2, 2]), flat=np.array([0, 3, 4]),
    )  # fmt: skip
    layout = build(
        """a, b = Split<axis=1>(x, sizes)
        c = Concat<axis=1>(b, a)
        d = Slice(c, starts, ends, axes)
        e = Gather<axis=1>(d, order)
        f = Pad(e, pads)
        s = Shape(f)
        g = ReduceMean<axes=[1], keepdims=1>(f)
        h = Sub(f, g)
        y = Gemm<transB=1>(h, w, bias)""",
        {"x": (2, 6)}, "y s",
        sizes=np.array([2, 4]), starts=np.array([1]), ends=np.array([6]), axes=np.array([1]), order=np.array([4, 2, 0, 1]),
        pads=np.array([0, 1, 0, 1]), w=random(3, 6), bias=random(3),
    )  # fmt: skip
    return [mlp(), conv, attention, layout]


def samples(kind: str) -> list[bytes]:
    """The content of valid files."""
    return {"plan": plans, "stats": stats, "recipe": recipes, "model": model_files, "data": data_files}[kind]()


def plans() -> list[bytes]:
    program, (x, labels) = cmrc.trace(mlp()), batch()
    small = cmrc.Plan(program).do("act1", units=[0, 3], constant=[0.5, 0.25])
    affine = cmrc.Affine([1, 2], np.ones((2, 2)), np.zeros(2))
    both = cmrc.Plan(program).do("act1", units=[0, 3], affine=affine).do("act2", units="all", constant=0.5)
    large = cmrc.Plan(program).do("act1", units=[0, 3], affine=cmrc.Affine([1, 2], np.ones((2, 2)), np.zeros(2)))
    large.scores = {"act1": np.linspace(0, 1, 6), "act2": np.linspace(0, 1, 900)}
    by_recipe = cmrc.plan(program, data=[(x, labels)], preset="joint", keep=0.5)
    return [_saved_plan(plan) for plan in (small, both, large, by_recipe)]


def _saved_plan(plan: cmrc.Plan) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder) / "plan.json")
        text = (Path(folder) / "plan.json").read_bytes()
        for file in Path(folder).glob("*.safetensors"):
            return text.replace(file.name.split(".")[1].encode(), HASH) + BESIDE + file.read_bytes()
        return text


def stats() -> list[bytes]:
    program, (x, labels) = cmrc.trace(mlp()), batch()
    asked = [
        {"need": ["scatter"]},
        {"need": ["curvature", "range", "coupling"], "sites": ["act2"]},
        {"need": ["rows", "scatter"]},
        {"positions": "each"},
    ]
    files = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stats.safetensors"
        for options in asked:
            cmrc.calibrate(program, [(x, labels)], **options).save(path)
            files.append(path.read_bytes())
    return files


def recipes() -> list[bytes]:
    return [text.encode() for text in RECIPES]


def model_files() -> list[bytes]:
    files = [model.SerializeToString() for model in models()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(
            onnx.ModelProto.FromString(files[0]), path, save_as_external_data=True, location="beside", size_threshold=0
        )
        files.append(path.read_bytes() + BESIDE + (Path(folder) / "beside").read_bytes())
        program = cmrc.trace(mlp())
        program.annotate(cmrc.Plan(program).do("act1", units=[1], constant=0.5)).save(path)
        files.append(path.read_bytes())
    return files


def data_files() -> list[bytes]:
    x, labels = batch()
    files = []
    for save, arrays in (
        (np.save, {"arr": x}),
        (np.save, {"arr": np.asfortranarray(x.astype(">f4"))}),
        (np.savez, {"x": x, "labels": labels}),
        (np.savez_compressed, {"x": x, "label": labels.astype(np.uint8), "mask": labels > 0}),
    ):
        file = io.BytesIO()
        save(file, **arrays)
        files.append(file.getvalue())
    return files
