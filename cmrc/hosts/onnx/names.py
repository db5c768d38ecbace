"""What a user may call the values of an ONNX model: by value, by node, or by the module of the model it came from.

A module path names what the module returns. A module that was called several times returns several values: its path
names them all, `path@0`, `path@1`, ... one each.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import onnx_ir

from cmrc.ir.graph import Graph

SCOPES = "pkg.torch.onnx.name_scopes"
QUOTED = re.compile(r"'([^']*)'")  # the entries of a list of names, as Python prints it


def module_path(node: onnx_ir.Node) -> str:
    """`blocks.0.mlp.fc1`, from what torch's exporters leave: the scopes in the metadata, or a name like a path."""
    text = node.metadata_props.get(SCOPES)
    if text is not None:
        scopes = QUOTED.findall(text)
        return str(scopes[-2]) if len(scopes) > 1 else ""
    name = node.name or ""
    return ".".join(name.split("/")[1:-1]) if name.startswith("/") else ""


def unique_origins(graph: onnx_ir.Graph) -> dict[onnx_ir.Node, tuple[str, str]]:
    """A name of its own for every node (its output where it has none), and its module path."""
    counts = Counter(node.name for node in graph)
    origins = {}
    for node in graph:
        stand_in = next((v.name for v in node.outputs if v.name), "")
        origins[node] = (node.name if node.name and counts[node.name] == 1 else stand_in, module_path(node))
    return origins


def name_values(graph: Graph, onnx_graph: onnx_ir.Graph) -> dict[str, list[str]]:
    """Every alias to the values it names."""
    hidden = {node.name for node in graph.nodes if node.marks.inside}
    names: dict[str, list[str]] = {name: [name] for name in graph.values() if name not in hidden}

    def add(alias: str, values: Iterable[str]) -> None:
        listed = names.setdefault(alias, [])
        listed.extend(value for value in values if value not in listed)

    outputs: dict[onnx_ir.Node, list[str]] = {}
    for node in onnx_graph:
        named = [v.name for v in node.outputs if v.name in names]
        if named:
            outputs[node] = [name for name in named if name]
            add(node.name or "", outputs[node])
    names.pop("", None)
    members: dict[str, list[onnx_ir.Node]] = {}
    for node in outputs:
        parts = module_path(node).split(".")
        for depth in range(1, len(parts) + 1):
            members.setdefault(".".join(parts[:depth]), []).append(node)
    members.pop("", None)
    for path, nodes in members.items():
        calls = _calls(nodes)
        for i, call in enumerate(calls):
            returned = _returned(call, outputs)
            add(path, returned)
            if len(calls) > 1:
                add(f"{path}@{i}", returned)
    return names


def _calls(nodes: Sequence[onnx_ir.Node]) -> list[list[onnx_ir.Node]]:
    """Parts of a module that exchange no values and do the same ops are separate calls of it."""
    group: dict[onnx_ir.Node, onnx_ir.Node] = {node: node for node in nodes}

    def root(node: onnx_ir.Node) -> onnx_ir.Node:
        while group[node] is not node:
            group[node] = group[group[node]]
            node = group[node]
        return node

    for node in nodes:
        for value in node.inputs:
            maker = None if value is None else value.producer()
            if maker in group and maker is not None:
                group[root(node)] = root(maker)
    calls: dict[onnx_ir.Node, list[onnx_ir.Node]] = {}
    for node in nodes:
        calls.setdefault(root(node), []).append(node)
    kinds = {tuple(sorted(node.op_type for node in call)) for call in calls.values()}
    return list(calls.values()) if len(kinds) == 1 else [list(nodes)]


def _returned(call: Sequence[onnx_ir.Node], outputs: dict[onnx_ir.Node, list[str]]) -> list[str]:
    """The outputs of the last node of a call that anything outside reads."""
    inside = set(call)
    for node in reversed(call):
        left = [
            value.name or ""
            for value in node.outputs
            if value.name in outputs[node]
            and (value.is_graph_output() or any(use.node not in inside for use in value.uses()))
        ]
        if left:
            return left
    return outputs[call[-1]]
