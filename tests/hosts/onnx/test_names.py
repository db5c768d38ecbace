"""The names of values: module paths of the exporters, and names of nodes."""

from __future__ import annotations

import onnx
from hosts.onnx.lowering import (
    model,
)

from cmrc.hosts.onnx.host import OnnxHost


def test_names_follow_scopes_of_the_exporter() -> None:
    proto = model("h = Relu(x)\na = Tanh(h)\nb = Relu(a)\ny = Tanh(b)", {"x": ("N", 5)}, "y")
    for node, scopes in zip(proto.graph.node, ("net.act", "net.act", "net.act", "net"), strict=True):
        parts = scopes.split(".")
        stack = ["", *(".".join(parts[: i + 1]) for i in range(len(parts))), f"fx_{node.output[0]}"]
        node.metadata_props.append(onnx.StringStringEntryProto(key="pkg.torch.onnx.name_scopes", value=str(stack)))
    proto.graph.node[1].metadata_props[0].value = "['', 'net', 'fx_a']"
    host = OnnxHost.from_model(proto)
    assert host.graph.nodes[0].path == "net.act"
    assert host.names["net.act"] == ["h", "b"]
    assert (host.names["net.act@0"], host.names["net.act@1"], host.names["net"]) == (["h"], ["b"], ["y"])


def test_names_follow_node_names_of_the_old_exporter() -> None:
    proto = model("h = Relu(x)\ny = Tanh(h)", {"x": ("N", 5)}, "y")
    proto.graph.node[0].name, proto.graph.node[1].name = "/blocks.0/mlp/act/Relu", "Tanh_7"
    host = OnnxHost.from_model(proto)
    assert [(node.origin, node.path) for node in host.graph.nodes] == [
        ("/blocks.0/mlp/act/Relu", "blocks.0.mlp.act"), ("Tanh_7", ""),
    ]  # fmt: skip
    assert host.names["blocks.0.mlp"] == host.names["/blocks.0/mlp/act/Relu"] == ["h"]
