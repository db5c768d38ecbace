"""Models of small integers: constants fold as whole numbers, to the bit, and the pattern that onnxruntime fuses stays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hosts.onnx.lowering import model, nodes_of, random, sizes_of
from hosts.onnx.quantisation import MIXED, OPERATORS, SIGNED, UNSIGNED, quantised
from onnx import TensorProto, helper, numpy_helper
from tolerances import EXACT_F32, MOVES

import cmrc
from cmrc.ir.evaluate import evaluate
from cmrc.ir.graph import Array

CONV = "h = Conv(x, w1, b1)\na = Relu(h)\ng = Conv(a, w2)\nr = Relu(g)\np = GlobalAveragePool(r)\nf = Flatten(p)\ny = Gemm(f, w3, b3)"
PADDED = CONV.replace("Conv(a, w2)", "Conv<pads=[1,1,1,1]>(a, w2)")
DEPTHWISE = "h = Conv(x, w1, b1)\na = Relu(h)\ng = Conv<group=8>(a, dw)\nr = Relu(g)\ny = Conv(r, w4)"
TRANSPOSED = "h = Conv(x, w1, b1)\na = Relu(h)\ny = ConvTranspose<strides=[2,2]>(a, wt, bt)"
ARRAYS = {
    "w1": random(8, 3, 3, 3, scale=0.3), "b1": random(8), "w2": random(12, 8, 3, 3, seed=2, scale=0.2),
    "w3": random(12, 5, seed=4), "b3": random(5, seed=5), "dw": random(8, 1, 3, 3, seed=6), "w4": random(4, 8, 1, 1, seed=7),
    "wt": random(8, 6, 2, 2, seed=8), "bt": random(6, seed=9),
}  # fmt: skip
PICTURES = [{"x": random(4, 3, 8, 8, seed=i)} for i in range(3)]
MATMUL = "h = MatMul(x, up)\na = Relu(h)\ny = MatMul(a, down)"
WORDS = [{"x": random(4, 6, 16, seed=i)} for i in range(3)]


def pictures(nodes: str, folder: Path, **options: Any) -> onnx.ModelProto:
    used = {name: array for name, array in ARRAYS.items() if f"{name}," in nodes or f"{name})" in nodes}
    return quantised(model(nodes, {"x": ("N", 3, 8, 8)}, "y", **used), PICTURES, folder, **options)


def words(folder: Path, **options: Any) -> onnx.ModelProto:
    arrays = {"up": random(16, 32, scale=0.3), "down": random(32, 7, seed=2)}
    return quantised(model(MATMUL, {"x": ("N", 6, 16)}, "y", **arrays), WORDS, folder, **options)


def proved(proto: onnx.ModelProto, site: str, units: Sequence[int], constant: Any, x: Array) -> cmrc.Lowered:
    """Lowered and clamped give the same bits, and the do matters."""
    program = cmrc.trace(proto)
    plan = cmrc.Plan(program).do(site, units=units, constant=constant)
    lowered = cmrc.lower(program, plan)
    (want,), (got,), (plain,) = (host.run([x]) for host in (program.clamped(plan), lowered.host, program.host))
    np.testing.assert_array_equal(got, want)
    assert np.any(want != plain)
    assert lowered.check((x,)).holds
    return lowered


def optimised(lowered: cmrc.Lowered, folder: Path) -> list[str]:
    """The ops that onnxruntime makes of a model."""
    lowered.save(folder / "small.onnx")
    return optimised_file(onnx.load(folder / "small.onnx"), folder)


def optimised_file(proto: onnx.ModelProto, folder: Path) -> list[str]:
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(proto.SerializeToString(), options)
    return [node.op_type for node in onnx.load(folder / "optimised.onnx").graph.node]


KINDS = {
    "mixed": MIXED,
    "signed": SIGNED,
    "unsigned": UNSIGNED,
    "symmetric": {**SIGNED, "extra_options": {"ActivationSymmetric": True}},
    "per channel": {**MIXED, "per_channel": True},
    "signed per channel": {**SIGNED, "per_channel": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_channels_fold_as_whole_numbers(kind: str, tmp_path: Path) -> None:
    proto = pictures(CONV, tmp_path, **KINDS[kind])
    lowered = proved(proto, "a", [0, 3, 6], [0.05, 0.7, 0.31], random(9, 3, 8, 8, seed=50))
    sizes = {name: size for name, size in sizes_of(lowered.host).items() if len(size) == 4}
    assert sizes == {"w1_quantized": [5, 3, 3, 3], "w2_quantized": [12, 5, 3, 3]}
    assert "Conv" not in optimised(lowered, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_units_of_gemm_fold_as_whole_numbers(kind: str, tmp_path: Path) -> None:
    proto = pictures(CONV, tmp_path, **KINDS[kind])
    lowered = proved(proto, "r", [0, 5, 11], [0.05, 0.7, 0.31], random(9, 3, 8, 8, seed=50))
    assert sizes_of(lowered.host)["w3_quantized"] == [9, 5]
    assert {"Conv", "Gemm"}.isdisjoint(optimised(lowered, tmp_path))


@pytest.mark.parametrize("kind", KINDS)
def test_units_of_matmul_fold(kind: str, tmp_path: Path) -> None:
    proto = words(tmp_path, **KINDS[kind])
    lowered = proved(proto, "a", [0, 5, 31], [0.05, 0.7, 0.31], random(3, 6, 16, seed=50))
    assert sizes_of(lowered.host)["up_quantized"] == [16, 29]
    assert sizes_of(lowered.host)["down_quantized"] == [29, 7]


@pytest.mark.parametrize("kind", ["mixed", "per channel"])
def test_depthwise_channels_fold(kind: str, tmp_path: Path) -> None:
    proto = pictures(DEPTHWISE, tmp_path, **KINDS[kind])
    lowered = proved(proto, "a", [0, 5], [0.3, 0.7], random(9, 3, 8, 8, seed=50))
    assert sizes_of(lowered.host)["dw_quantized"] == [6, 1, 3, 3]


def test_a_constant_of_0_is_free_under_padding(tmp_path: Path) -> None:
    lowered = proved(pictures(PADDED, tmp_path), "a", [0, 3], 0.0, random(9, 3, 8, 8, seed=50))
    assert "Conv" not in optimised(lowered, tmp_path)


def test_another_constant_becomes_a_plane_under_padding(tmp_path: Path) -> None:
    lowered = proved(pictures(PADDED, tmp_path), "a", [0, 3], [0.3, 0.7], random(9, 3, 8, 8, seed=50))
    assert sizes_of(lowered.host)["w2_quantized"] == [12, 6, 3, 3]


@pytest.mark.parametrize("constant", [0.0, [0.3, 0.7]], ids=["0", "others"])
def test_what_a_constant_under_padding_costs_is_said(constant: Any, tmp_path: Path) -> None:
    program = cmrc.trace(pictures(PADDED, tmp_path))
    report_text = str(cmrc.lower(program, cmrc.Plan(program).do("a", units=[0, 3], constant=constant)).report)
    leaves = "that needs more than integers: here, only constants that are quantised to 0 can be folded"
    assert (leaves in report_text) == bool(np.any(constant))


IN_INTEGERS = ("QLinearConv", "QGemm", "QLinearMatMul", "MatMulIntegerToFloat")


def in_integers(ops: Sequence[str]) -> int:
    return sum(op in IN_INTEGERS for op in ops)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", [CONV, MATMUL], ids=["convolutions", "products"])
def test_onnxruntime_finds_as_many_ops_on_integers_as_before(nodes: str, kind: str, tmp_path: Path) -> None:
    """A product without a bias has no place for a sum of integers: QLinearMatMul becomes MatMulIntegerToFloat and a sum."""
    proto = (pictures(nodes, tmp_path, **KINDS[kind])) if nodes == CONV else words(tmp_path, **KINDS[kind])
    x = random(9, 3, 8, 8, seed=50) if nodes == CONV else random(3, 6, 16, seed=50)
    lowered = proved(proto, "a", [0, 3, 6], [0.05, 0.7, 0.31], x)
    before = optimised_file(proto, tmp_path)
    after = optimised(lowered, tmp_path)
    assert in_integers(after) == in_integers(before) > 0


def test_a_transposed_convolution(tmp_path: Path) -> None:
    lowered = proved(pictures(TRANSPOSED, tmp_path), "a", [0, 3], [0.3, 0.7], random(9, 3, 8, 8, seed=50))
    assert sizes_of(lowered.host)["wt_quantized"] == [6, 6, 2, 2]


@pytest.mark.parametrize("kind", ["mixed", "signed", "per channel"])
def test_ops_on_integers_fold(kind: str, tmp_path: Path) -> None:
    """QLinearConv and QLinearMatMul behind a part that was left in float."""
    plain = model(
        f"{CONV}", {"x": ("N", 3, 8, 8)}, "y", **{name: ARRAYS[name] for name in ("w1", "b1", "w2", "w3", "b3")}
    )
    for node in plain.graph.node:
        node.name = node.output[0]
    proto = quantised(plain, PICTURES, tmp_path, **KINDS[kind], **OPERATORS, nodes_to_exclude=["h", "a"])
    assert "QLinearConv" in [node.op_type for node in proto.graph.node]
    lowered = proved(proto, "a", [0, 3, 6], [0.05, 0.7, 0.31], random(9, 3, 8, 8, seed=50))
    assert sizes_of(lowered.host)["w2_quantized"] == [12, 5, 3, 3]


def test_products_of_integers_fold_zeros(tmp_path: Path) -> None:
    plain = model(MATMUL, {"x": ("N", 6, 16)}, "y", up=random(16, 32, scale=0.3), down=random(32, 7, seed=2))
    for node in plain.graph.node:
        node.name = node.output[0]
    proto = quantised(plain, WORDS, tmp_path, **OPERATORS, nodes_to_exclude=["h", "a"])
    lowered = proved(proto, "a", [0, 5], 0.0, random(3, 6, 16, seed=50))
    assert sizes_of(lowered.host)["down_quantized"] == [30, 7]


def test_a_model_of_integers_alone_says_where_to_begin(tmp_path: Path) -> None:
    program = cmrc.trace(pictures(CONV, tmp_path, **OPERATORS))
    inner = next(
        node.output[0] for node in pictures(CONV, tmp_path, **OPERATORS).graph.node if "QLinearConv" in node.op_type
    )
    with pytest.raises(cmrc.CmrcError, match="lower the float model, then quantise"):
        cmrc.Plan(program).do(inner, units=[1], constant=0.5)


def test_affine_maps_are_refused(tmp_path: Path) -> None:
    program = cmrc.trace(words(tmp_path))
    site = next(s for s in program.sites("a"))
    assert site.folding is not None
    assert "it is not an affine function" in site.folding.affine.reason
    behind = cmrc.Plan(program).do("a_DequantizeLinear_Output", units=[1], affine=cmrc.Affine([2], [[0.5]], [0.1]))
    with pytest.raises(cmrc.CmrcError, match="lower the float model, then quantise"):
        cmrc.lower(program, behind)


def test_a_constant_off_the_grid_folds_as_a_float(tmp_path: Path) -> None:
    """Put behind the quantisation, a constant need not lie on its grid."""
    program = cmrc.trace(pictures(CONV, tmp_path))
    plan = cmrc.Plan(program).do("a_DequantizeLinear_Output", units=[1, 2], constant=[0.1234, 0.777])
    lowered = cmrc.lower(program, plan)
    x = random(9, 3, 8, 8, seed=50)
    (want,), (got,) = program.clamped(plan).run([x]), lowered.host.run([x])
    quantum = np.diff(np.unique(want)).min()
    assert np.abs(want - got).max() <= 1.01 * quantum


# ---------------------------------------------------------------- weights alone


def blocked(
    bits: int, block: int, *, ins: int = 96, outs: int = 40, zeros: bool = False, bias: bool = False
) -> onnx.ModelProto:
    rng = np.random.default_rng([bits, block, ins])
    nodes, arrays = [], []
    for name, (k, n) in {"up": (16, ins), "down": (ins, outs)}.items():
        count = -(-k // block)
        arrays += [
            numpy_helper.from_array(rng.integers(0, 256, (n, count, block * bits // 8), dtype=np.uint8), f"{name}.q"),
            numpy_helper.from_array(rng.uniform(0.01, 0.02, n * count).astype(np.float32), f"{name}.s"),
        ]
        inputs = ["x" if name == "up" else "a", f"{name}.q", f"{name}.s"]
        if zeros or bias:
            packed = rng.integers(0, 256, n * -(-count * bits // 8), dtype=np.uint8)
            arrays.append(numpy_helper.from_array(packed, f"{name}.z"))
            inputs.append(f"{name}.z")
        if bias:
            arrays.append(numpy_helper.from_array(rng.normal(size=n).astype(np.float32), f"{name}.b"))
            inputs += ["", f"{name}.b"]
        out = "h" if name == "up" else "y"
        nodes.append(
            helper.make_node(
                "MatMulNBits", inputs, [out], domain="com.microsoft", K=k, N=n, bits=bits, block_size=block
            )
        )
    nodes.insert(1, helper.make_node("Relu", ["h"], ["a"]))
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 5, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 5, outs])], arrays,
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def close(proto: onnx.ModelProto, units: Sequence[int], constant: Any) -> cmrc.Lowered:
    program = cmrc.trace(proto)
    lowered = cmrc.lower(program, cmrc.Plan(program).do("a", units=units, constant=constant))
    check = lowered.check((random(3, 5, 16, seed=1),))
    assert check.error <= EXACT_F32
    assert check.moved >= MOVES * EXACT_F32
    return lowered


BLOCKS = {
    "4 bits": {"bits": 4, "block": 32},
    "8 bits": {"bits": 8, "block": 32},
    "zero points": {"bits": 4, "block": 16, "zeros": True},
    "bias": {"bits": 4, "block": 32, "bias": True},
    "a short last block": {"bits": 4, "block": 32, "ins": 112, "zeros": True},
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_whole_blocks_go(kind: str) -> None:
    options: Any = BLOCKS[kind]
    lowered = close(blocked(**options), range(32, 64), np.linspace(-1, 1, 32))
    ins = options.get("ins", 96)
    assert sizes_of(lowered.host)["up.q"][0] == ins - 32
    assert sizes_of(lowered.host)["down.q"][1] == -(-(ins - 32) // options["block"])
    assert nodes_of(lowered.host).count("MatMulNBits") == 2


@pytest.mark.parametrize("bits", [4, 8])
def test_bytes_are_counted_as_they_are_stored(bits: int) -> None:
    for program in (cmrc.trace(blocked(bits, 16)), cmrc.trace(close(blocked(bits, 16), range(32, 64), 0.5).host.model)):  # type: ignore[attr-defined]
        stored = program.host.model.graph.initializers.values()  # type: ignore[attr-defined]
        assert program.cost().bytes == sum(value.const_value.nbytes for value in stored)


def test_a_part_of_a_block_is_refused() -> None:
    program = cmrc.trace(blocked(4, 32))
    with pytest.raises(
        cmrc.CmrcError, match="blocks of 32 units, and only whole blocks can go: units 0 to 31, 32 to 63"
    ):
        cmrc.lower(program, cmrc.Plan(program).do("a", units=[3, 40], constant=0.5))


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_weights_of_dequantize_in_blocks(kind: str) -> None:
    rng = np.random.default_rng(0)
    low, stored = (8, TensorProto.INT4) if kind == "int4" else (128, TensorProto.INT8)
    proto = model(
        "h = MatMul(x, up)\na = Relu(h)\nw = DequantizeLinear<axis=0, block_size=16>(q, s)\ny = MatMul(a, w)",
        {"x": ("N", 5, 16)}, "y", opset=21, ir_version=10, up=random(16, 64), q=np.zeros((64, 6), np.int8),
        s=rng.uniform(0.01, 0.02, (4, 6)).astype(np.float32),
    )  # fmt: skip
    numbers = helper.make_tensor("q", stored, (64, 6), rng.integers(-low, low, 64 * 6).tolist())
    proto.graph.initializer[1].CopyFrom(numbers)
    program = cmrc.trace(proto)
    plan = cmrc.Plan(program).do("a", units=range(16, 48), constant=np.linspace(-1, 1, 32))
    lowered = cmrc.lower(program, plan)
    assert sizes_of(lowered.host) | {"q": [32, 6], "s": [2, 6], "up": [16, 32]} == sizes_of(lowered.host)
    # By numpy: onnxruntime rounds the activations of such a product to 8 bits.
    x = random(3, 5, 16, seed=1)
    want, got = (evaluate(host.graph, {"x": x})["y"] for host in (program.clamped(plan), lowered.host))
    np.testing.assert_allclose(got, want, atol=EXACT_F32 * np.abs(want).max())


def test_the_ops_of_onnxruntime_itself_fold(tmp_path: Path) -> None:
    """QuantizeLinear and DequantizeLinear stood in com.microsoft before the standard had all their types."""
    proto = words(tmp_path, extra_options={"UseQDQContribOps": True})
    assert {n.domain for n in proto.graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")} == {
        "com.microsoft"
    }
    lowered = proved(proto, "a", [0, 5, 31], [0.05, 0.7, 0.31], random(3, 6, 16, seed=50))
    assert sizes_of(lowered.host)["down_quantized"] == [29, 7]


@pytest.mark.parametrize("op", ["MatMulIntegerToFloat", "DynamicQuantizeMatMul"])
def test_fused_products_of_integers_are_refused_with_the_way_out(op: str, tmp_path: Path) -> None:
    """What onnxruntime's optimiser makes of dynamic quantisation; the op stands between two layers of floats."""
    scale, zero = numpy_helper.from_array(np.float32(0.02), "s"), numpy_helper.from_array(np.uint8(128), "z")
    weight = numpy_helper.from_array(np.arange(32, dtype=np.uint8).reshape(8, 4), "w")
    first = numpy_helper.from_array(random(6, 8), "first")
    nodes = [helper.make_node("MatMul", ["x", "first"], ["h"]), helper.make_node("Relu", ["h"], ["a"])]
    given = ["a", "w", "s", "z"]
    if op == "MatMulIntegerToFloat":
        nodes.append(helper.make_node("QuantizeLinear", ["a", "s", "z"], ["q"]))
        given = ["q", "w", "s", "s", "z", "z"]
    nodes.append(helper.make_node(op, given, ["y"], domain="com.microsoft"))
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", size]) for n, size in (("x", 6), ("y", 4))]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [first, weight, scale, zero])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    program = cmrc.trace(helper.make_model(graph, opset_imports=opsets, ir_version=9))
    with pytest.raises(cmrc.CmrcError, match="lower the float model, then quantise"):
        cmrc.lower(program, cmrc.Plan(program).do("a", units=[3], constant=0.5))


def test_dynamic_quantisation_is_refused_with_the_way_out(tmp_path: Path) -> None:
    from onnxruntime.quantization import quantize_dynamic

    onnx.save(model(MATMUL, {"x": ("N", 6, 16)}, "y", up=random(16, 32), down=random(32, 7)), tmp_path / "float.onnx")
    quantize_dynamic(tmp_path / "float.onnx", tmp_path / "int8.onnx")
    program = cmrc.trace(tmp_path / "int8.onnx")
    with pytest.raises(cmrc.CmrcError, match="lower the float model, then quantise"):
        cmrc.lower(program, cmrc.Plan(program).do("a", units=[3], constant=0.5))


def test_weights_of_the_quantiser_of_onnxruntime(tmp_path: Path) -> None:
    """A gated FFN as language models have it, its products quantised to 4 bits by onnxruntime's own tool."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    nodes = "g = MatMul(x, gate)\ns = Sigmoid(g)\nsilu = Mul(g, s)\nu = MatMul(x, up)\nh = Mul(silu, u)\ny = MatMul(h, down)"
    arrays = {
        "gate": random(32, 96, scale=0.2),
        "up": random(32, 96, seed=1),
        "down": random(96, 32, seed=2, scale=0.2),
    }
    plain = model(nodes, {"x": ("N", 5, 32)}, "y", opset=21, **arrays)
    for node in plain.graph.node:
        node.name = node.output[0]
    tool = MatMulNBitsQuantizer(plain, block_size=32, is_symmetric=True)
    tool.process()
    proto = tool.model.model
    program = cmrc.trace(proto)
    assert nodes_of(program.host).count("MatMulNBits") == 3
    lowered = cmrc.lower(program, cmrc.Plan(program).do("h", units=range(32, 64), constant=np.linspace(-1, 1, 32)))
    assert nodes_of(lowered.host).count("MatMulNBits") == 3
    check = lowered.check((random(3, 5, 32, seed=3),))
    assert check.error <= EXACT_F32
    assert check.moved >= MOVES * EXACT_F32
    stored = sizes_of(lowered.host)
    assert sorted(size for size in stored.values() if len(size) == 3) == [[32, 2, 16], [64, 1, 16], [64, 1, 16]]


# ---------------------------------------------------------------- the other way round: lower, then quantise


EXAMPLES = Path(__file__).parents[3] / "examples"


def test_a_lowered_model_quantises_like_any_other(tmp_path: Path) -> None:
    """Static and dynamic quantisation of the lowered digits classifier cost no more accuracy than of the original."""
    from onnxruntime.quantization import quant_pre_process, quantize_dynamic

    program = cmrc.trace(EXAMPLES / "digits.onnx")
    train, test = (np.load(EXAMPLES / f"digits_{part}.npz") for part in ("train", "test"))
    image = program.host.inputs[0]
    plan = cmrc.Plan(program)
    for site in [s for s in program.sites() if s.folding is not None and s.folding.constant.folds and s.op == "relu"]:
        seen = np.moveaxis(program.run([train["images"][:200]], [site.value])[-1], site.axis, 0).reshape(site.units, -1)
        calm = np.argsort(seen.std(axis=1))[: site.units // 4]
        plan.do(site.name, units=sorted(calm), constant=seen.mean(axis=1)[sorted(calm)])
    lowered = cmrc.lower(program, plan)
    lowered.save(tmp_path / "lowered.onnx")
    accuracy: dict[str, float] = {}
    for name, path in {"whole": EXAMPLES / "digits.onnx", "lowered": tmp_path / "lowered.onnx"}.items():
        quant_pre_process(path, tmp_path / "ready.onnx", skip_symbolic_shape=True)
        batches = [{image: train["images"][i : i + 50]} for i in range(0, 200, 50)]
        onnx.save(quantised(onnx.load(tmp_path / "ready.onnx"), batches, tmp_path), tmp_path / "static.onnx")
        bare = onnx.load(path)
        del bare.graph.value_info[
            :
        ]  # the tool turns weights around, and trips over the shapes that were declared for them
        onnx.save(bare, tmp_path / "bare.onnx")
        quantize_dynamic(tmp_path / "bare.onnx", tmp_path / "dynamic.onnx", op_types_to_quantize=["Gemm", "MatMul"])
        for kind in ("ready", "static", "dynamic"):
            session = onnxruntime.InferenceSession(tmp_path / f"{kind}.onnx")
            answers = session.run(None, {image: test["images"]})[0].argmax(axis=-1)
            accuracy[f"{name} {kind}"] = float((answers == test["labels"]).mean())
    for kind in ("static", "dynamic"):
        lost = accuracy["lowered ready"] - accuracy[f"lowered {kind}"]
        assert lost <= max(0.01, accuracy["whole ready"] - accuracy[f"whole {kind}"] + 0.005), accuracy


def test_a_plan_takes_constants_where_no_affine_map_folds(tmp_path: Path) -> None:
    """Nobody has to name sites: of a quantised net those are taken that fold for constants, the last of each function."""
    program = cmrc.trace(words(tmp_path))
    assert not any(site.folding is not None and site.folding.folds for site in program.sites())
    plan = cmrc.plan(program, data=WORDS, keep=0.5)
    assert plan.entries
    assert all(entry.weight is None for entry in plan.entries)
    lowered = cmrc.lower(program, plan)
    assert lowered.report.after.parameters < lowered.report.before.parameters
