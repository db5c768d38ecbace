"""Writing a lowered graph back: what stays the same object, which ops are left, how small the weights are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest
from hosts.onnx.lowering import (
    Shape,
    ints,
    lower,
    mlp,
    model,
    nodes_of,
    random,
    sizes_of,
)
from hosts.onnx.rows import CHANNELS, row_model
from onnx import TensorProto, helper

import cmrc
from cmrc.errors import HostError
from cmrc.hosts.onnx.host import OnnxHost


def test_building_the_graph_as_read_changes_nothing(tmp_path: Path) -> None:
    for key in ("Split", "Conv grouped", "Reshape flat", "BatchNormalization", "unused constants"):
        proto, _ = row_model(key)
        proto.graph.node[0].metadata_props.append(onnx.StringStringEntryProto(key="mine", value="kept"))
        proto.metadata_props.append(onnx.StringStringEntryProto(key="also", value="kept"))
        before = onnx_ir.to_proto(onnx_ir.from_proto(proto))
        host = OnnxHost.from_model(proto)
        built = host.build(host.graph)
        assert onnx_ir.to_proto(built.model).SerializeToString(deterministic=True) == before.SerializeToString(
            deterministic=True
        )
        for name, value in built.model.graph.initializers.items():
            assert value.const_value is host.model.graph.initializers[name].const_value


def test_the_users_model_is_never_changed() -> None:
    proto, feeds = row_model("Reshape flat")
    mine = onnx_ir.from_proto(proto)
    before = onnx_ir.to_proto(mine).SerializeToString(deterministic=True)
    host = OnnxHost.from_model(mine)
    lower(host, feeds, "h", 1, (1, 4), (0.6, -0.8))
    assert onnx_ir.to_proto(mine).SerializeToString(deterministic=True) == before
    assert onnx_ir.to_proto(host.model).SerializeToString(deterministic=True) == before


def test_untouched_nodes_and_initializers_stay_as_they_were() -> None:
    proto = model(
        "h = MatMul(x, w1)\na = Relu(h)\nb = MatMul(a, w2)\nc = Tanh(b)\ny = MatMul(c, w3)",
        {"x": ("N", 5)}, "y", w1=random(5, 8), w2=random(8, 6), w3=random(6, 3),
    )  # fmt: skip
    for i, node in enumerate(proto.graph.node):
        node.name = f"node{i}"
        node.metadata_props.append(onnx.StringStringEntryProto(key="mine", value=str(i)))
    host = OnnxHost.from_model(proto)
    lowered = lower(host, [random(4, 5)], "a", 1, (1, 4), (0.6, 0.8))
    assert lowered.model.graph.initializers["w3"].const_value is host.model.graph.initializers["w3"].const_value
    kept = [
        (node.name, node.metadata_props) for node in lowered.model.graph if "cmrc.inserted" not in node.metadata_props
    ]
    assert kept == [(f"node{i}", {"mine": str(i)}) for i in range(5)]
    assert sizes_of(lowered) == {"w1": [5, 6], "w2": [6, 6], "w3": [6, 3], "w2.bias": [6]}


def test_mlp_lowers_to_plain_smaller_gemms() -> None:
    lowered = lower(mlp(), [random(4, 5)], "a", 1, (6, 2), (0.5, -1.0))
    assert nodes_of(lowered) == ["Gemm", "Relu", "Gemm"]
    assert sizes_of(lowered) == {"fc1": [6, 5], "b1": [6], "fc2": [3, 6], "b2": [3]}


def test_gemm_without_bias_gains_one() -> None:
    proto = model(
        "h = Gemm(x, w1)\na = Tanh(h)\ny = Gemm<alpha=0.5>(a, w2)",
        {"x": ("N", 5)},
        "y",
        w1=random(5, 8),
        w2=random(8, 3),
    )
    lowered = lower(OnnxHost.from_model(proto), [random(4, 5)], "a", 1, (6, 2), (0.5, -1.0))
    assert sizes_of(lowered) == {"w1": [5, 6], "w2": [6, 3], "w2.bias": [3]}


def test_gemm_with_a_bias_of_two_axes_and_scales() -> None:
    proto = model(
        "h = Gemm<alpha=2.0>(x, w1, b1)\na = Tanh(h)\ny = Gemm<alpha=0.5, beta=3.0>(a, w2, b2)",
        {"x": ("N", 5)}, "y", w1=random(5, 8), b1=random(1, 8), w2=random(8, 3), b2=random(1),
    )  # fmt: skip
    lowered = lower(OnnxHost.from_model(proto), [random(4, 5)], "a", 1, (6, 2), (0.5, -1.0))
    assert sizes_of(lowered) == {"w1": [5, 6], "b1": [6], "w2": [6, 3], "b2": [3]}


def test_matmul_and_add_keep_their_ops() -> None:
    proto = model(
        "h = MatMul(x, w1)\ng = Add(h, b1)\na = Relu(g)\no = MatMul(a, w2)\ny = Add(b2, o)",
        {"x": ("N", 7, 5)}, "y", w1=random(5, 8), b1=random(8), w2=random(8, 3), b2=random(3),
    )  # fmt: skip
    lowered = lower(OnnxHost.from_model(proto), [random(4, 7, 5)], "a", 2, (6, 2), (0.5, -1.0))
    assert nodes_of(lowered) == ["MatMul", "Add", "Relu", "MatMul", "Add"]
    assert sizes_of(lowered) == {"w1": [5, 6], "b1": [6], "w2": [6, 3], "b2": [3]}


@pytest.mark.parametrize("spatial", [(5, 5), ("H", "W")])
@pytest.mark.parametrize("opset", [9, 17])
def test_conv_bn_relu_conv_with_a_border(spatial: Shape, opset: int) -> None:
    proto = model(
        "h = Conv<pads=[1,1,1,1]>(x, k1)\nn = BatchNormalization(h, w, b, mean, var)\na = Relu(n)\ny = Conv<pads=[1,1,1,1]>(a, k2, b2)",
        {"x": ("N", 3, *spatial)}, "y", opset=opset, k1=random(8, 3, 3, 3), k2=random(4, 8, 3, 3), b2=random(4), **CHANNELS,
    )  # fmt: skip
    host = OnnxHost.from_model(proto)
    lowered = lower(host, [random(2, 3, 5, 5)], "a", 1, (1, 5, 6), (1.5, 0.7, -2.0))
    assert sizes_of(lowered)["k1"] == [5, 3, 3, 3]
    assert ("ConstantOfShape" in nodes_of(lowered)) == (spatial != (5, 5))
    lower(host, [random(2, 3, 5, 5)], "h", 1, (1, 5, 6), (1.5, 0.7, -2.0))
    lower(host, [random(2, 3, 5, 5)], "n", 1, (1, 5), (1.5, 0.7), parents=(0, 2), weight=random(2, 2), residue=True)


@pytest.mark.parametrize("spatial", [(6, 6), ("H", "W")])
def test_depthwise_conv_shrinks_with_its_channels(spatial: Shape) -> None:
    """At a size known only at run time the constant channels are a plane that goes through copies of the nodes."""
    proto = model(
        "h = Conv(x, k1)\na = Relu(h)\nd = Conv<group=8, pads=[1,1,1,1]>(a, k2, b2)\ne = Relu(d)\ny = Conv(e, k3)",
        {"x": ("N", 3, *spatial)}, "y", k1=random(8, 3, 1, 1), k2=random(8, 1, 3, 3), b2=random(8), k3=random(4, 8, 1, 1),
    )  # fmt: skip
    lowered = lower(OnnxHost.from_model(proto), [random(2, 3, 6, 6)], "a", 1, (1, 5, 6), (1.5, 0.7, 0.2))
    assert sizes_of(lowered)["k2"] == [5, 1, 3, 3]
    groups = [n.attributes["group"].as_int() for n in lowered.model.graph if "group" in n.attributes]
    assert max(groups) == 5


def test_flatten_spreads_a_channel_over_a_block() -> None:
    proto = model(
        "h = Conv(x, k1)\na = Relu(h)\nf = Flatten(a)\ny = Gemm<transB=1>(f, w, b)",
        {"x": ("N", 3, 4, 5)}, "y", k1=random(8, 3, 1, 1), w=random(6, 8 * 20), b=random(6),
    )  # fmt: skip
    host = OnnxHost.from_model(proto)
    lowered = lower(host, [random(2, 3, 4, 5)], "a", 1, (1, 5), (1.5, 0.7))
    assert sizes_of(lowered)["w"] == [6, 6 * 20]
    lower(host, [random(2, 3, 4, 5)], "a", 1, (1, 5), (1.5, 0.7), parents=(0, 7), weight=random(2, 2))


@pytest.mark.parametrize("opset", [11, 13, 18])
def test_gated_mlp_with_a_split(opset: int) -> None:
    split = "g, u = Split<axis=2>(h)" if opset < 18 else "g, u = Split<axis=2, num_outputs=2>(h)"
    proto = model(
        f"h = MatMul(x, w1)\n{split}\ns = Sigmoid(g)\nt = Mul(g, s)\na = Mul(t, u)\ny = MatMul(a, w2)",
        {"x": ("N", 7, 5)}, "y", opset=opset, w1=random(5, 16), w2=random(8, 3),
    )  # fmt: skip
    lowered = lower(OnnxHost.from_model(proto), [random(4, 7, 5)], "a", 2, (6, 2), (0.5, -1.0))
    assert sizes_of(lowered)["w1"] == [5, 12]
    assert nodes_of(lowered).count("Split") == 1


def test_a_split_whose_parts_shrink_apart_becomes_slices() -> None:
    proto = model(
        "h = MatMul(x, w1)\np, q, r = Split<axis=1>(h, sizes)\na = Relu(q)\nb = MatMul(a, w2)\nc = MatMul(h, w3)\nd = Concat<axis=1>(p, r, b, c)\ny = MatMul(d, w4)",
        {"x": ("N", 5)}, "y", sizes=ints(2, 4, 2), w1=random(5, 8), w2=random(4, 3), w3=random(8, 3), w4=random(10, 2),
    )  # fmt: skip
    lowered = lower(OnnxHost.from_model(proto), [random(4, 5)], "a", 1, (0, 3), (0.5, 1.5))
    assert nodes_of(lowered).count("Split") == 0
    proto = model(
        "h = MatMul(x, w1)\np, q, r = Split<axis=1>(h, sizes)\na = Relu(q)\nb = MatMul(a, w2)\nd = Concat<axis=1>(p, r)\nc = MatMul(d, w3)\ny = Add(b, c)",
        {"x": ("N", 5)}, "y", sizes=ints(2, 4, 2), w1=random(5, 8), w2=random(4, 3), w3=random(4, 3),
    )  # fmt: skip
    lowered = lower(OnnxHost.from_model(proto), [random(4, 5)], "a", 1, (0, 1, 2, 3), (0.5, 1.5, 0.1, 0.2))
    split = next(node for node in lowered.model.graph if node.op_type == "Split")
    assert [value.name for value in split.outputs] == ["p", "r"]
    assert sizes_of(lowered)["w1"] == [5, 4]


def test_a_shared_initializer_is_never_edited() -> None:
    w = random(8, 8)
    proto = model(
        "a = MatMul(x, w)\nb = Relu(a)\nc = MatMul(b, w)\nd = Relu(c)\ne = MatMul(d, w)\nf = Add(e, zero)\ny = Add(f, zero)",
        {"x": ("N", 8)}, "y", w=w, zero=random(8, scale=0.1),
    )  # fmt: skip
    host = OnnxHost.from_model(proto)
    lowered = lower(host, [random(4, 8)], "d", 1, (3, 4), (0.5, 1.5))
    sizes = sizes_of(lowered)
    assert sizes["w"] == [8, 8]
    assert lowered.model.graph.initializers["w"].const_value is host.model.graph.initializers["w"].const_value
    assert sizes["w.cmrc1"] == [8, 6]
    assert sizes["w.cmrc2"] == [6, 8]


def test_an_initializer_that_is_also_an_input() -> None:
    proto = model(
        "h = MatMul(x, w1)\na = Relu(h)\ny = MatMul(a, w2)", {"x": ("N", 5)}, "y", w1=random(5, 8), w2=random(8, 3)
    )
    proto.ir_version = 3
    for tensor in proto.graph.initializer:
        proto.graph.input.append(helper.make_tensor_value_info(tensor.name, TensorProto.FLOAT, tensor.dims))
    proto.opset_import[0].version = 9
    lowered = lower(OnnxHost.from_model(proto), [random(4, 5)], "a", 1, (0, 2), (0.5, 1.5))
    assert {value.name for value in lowered.model.graph.inputs} == {"x", *lowered.model.graph.initializers}


def test_an_embedding_loses_columns() -> None:
    proto = model(
        "e = Gather(table, ids)\na = Relu(e)\ny = MatMul(a, w)",
        {"ids": ("N", "T")},
        "y",
        table=random(11, 8),
        w=random(8, 3),
    )
    proto.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    lowered = lower(OnnxHost.from_model(proto), [np.asarray([[1, 2, 10], [0, 0, 3]])], "a", 2, (0, 2), (0.5, 1.5))
    assert sizes_of(lowered) == {"table": [11, 6], "w": [6, 3], "w.bias": [3]}


def test_an_input_that_is_an_output_keeps_its_name() -> None:
    """An ONNX graph cannot have an input and another output of one name."""
    proto = model("y = MatMul(x, w)", {"x": (2, 4)}, "y", w=random(4, 3))
    proto.graph.output.append(proto.graph.input[0])
    program = cmrc.trace(proto)
    plan = cmrc.Plan(program).do("x", units=[0], constant=1.0)
    with pytest.raises(HostError) as error:
        cmrc.lower(program, plan, residue="keep")
    assert str(error.value) == (
        "host: %x (input): it is both an input and an output of the model: a replaced output would need another name\n"
        "  fix: leave that site out, or choose another"
    )


@pytest.mark.parametrize("opset", [11, 17])
def test_a_squeeze_without_axes_keeps_the_axis_of_a_single_unit(opset: int) -> None:
    """It drops the axes that had size 1 when it was read, and not that of the units, of which one is left."""
    nodes = "h = Conv(x, k)\na = Relu(h)\np = GlobalAveragePool(a)\ns = Squeeze(p)\ny = MatMul(s, w)"
    proto = model(nodes, {"x": (2, 4, 5, 5)}, "y", opset=opset, k=random(3, 4, 1, 1), w=random(3, 6))
    lowered = lower(OnnxHost.from_model(proto), [random(2, 4, 5, 5)], "a", 1, (2, 0), (0.5, 1.5))
    assert sizes_of(lowered)["k"] == [1, 4, 1, 1]


def test_declared_shapes_follow_what_shrank() -> None:
    proto = model(
        "h = Conv(x, k1)\na = Relu(h)\nf = Flatten(a)\ny = MatMul(f, w)",
        {"x": ("N", 4, 3, 3)}, "y", k1=random(8, 4, 1, 1), w=random(72, 5),
    )  # fmt: skip
    declared = onnx.shape_inference.infer_shapes(proto)
    assert {value.name for value in declared.graph.value_info} >= {"h", "a", "f"}
    feeds = [random(2, 4, 3, 3)]
    lowered = lower(OnnxHost.from_model(declared), feeds, "a", 1, (1, 4), (0.6, -0.8))
    shapes = {value.name: list(value.shape) for node in lowered.model.graph for value in node.outputs}  # type: ignore[arg-type]
    assert [list(map(str, shapes[name])) for name in ("h", "a", "f")] == [["N", "6", "3", "3"]] * 2 + [["N", "54"]]
