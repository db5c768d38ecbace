"""The do's of a plan, recorded in `node.meta["custom"]`: the only meta that survives re-export and torch.export.save."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from torch import fx

from cmrc.errors import TraceError
from cmrc.hosts.fx.clean import copy_graph
from cmrc.strict_json import parse_records

KEY = "cmrc.do"


def annotate(graph: fx.Graph, entries: Sequence[tuple[str, dict[str, Any]]]) -> fx.Graph:
    """A copy with these plan entries, and no others, on the nodes that compute the values."""
    copied = copy_graph(graph)
    drop_annotations(copied)
    nodes = {node.name: node for node in copied.nodes}
    for order, (name, entry) in enumerate(entries):
        node = nodes[name]
        custom = dict(node.meta.get("custom") or {})
        custom[KEY] = json.dumps([*json.loads(custom.get(KEY, "[]")), [order, entry]])
        node.meta["custom"] = custom
    return copied


def read_annotations(graph: fx.Graph) -> list[dict[str, Any]]:
    """The entries in the plan's order."""
    ordered: list[tuple[int, dict[str, Any]]] = []
    for node in graph.nodes:
        text = (node.meta.get("custom") or {}).get(KEY)
        if not text:
            continue
        try:
            records = parse_records(text, fields=2)
        except ValueError as error:
            problem = f"the {KEY} annotation cannot be read: {error}"
            raise TraceError(problem, node=node.name, fix="remove it") from error
        ordered += [(order, {"site": node.name, **entry}) for order, entry in records]
    return [entry for _, entry in sorted(ordered, key=lambda pair: pair[0])]


def drop_annotations(graph: fx.Graph) -> None:
    for node in graph.nodes:
        custom = node.meta.get("custom") or {}
        if KEY in custom:
            node.meta["custom"] = {k: v for k, v in custom.items() if k != KEY}
