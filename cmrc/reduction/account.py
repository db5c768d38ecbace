"""Everything that a report shows, as one JSON document: it is stored in the work folder, so that a page can be made again.

The words and tables of the reduction, and the numbers behind every picture: the frontier, widths, risks, answers, the graph.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import networkx as nx
import numpy as np

from cmrc._version import __version__
from cmrc.ir.graph import Graph, Node
from cmrc.reduction.result import WORDS, Reduction
from cmrc.verification.bounds import shown_percent

POINTS = 2000  # of the certificate's picture
STEPS = 300  # of the picture of a layer's risk
NODES = 1500  # of the graph, at most
ROW = 48  # steps of the graph in a row of its picture
PACKAGES = ("numpy", "onnx", "onnxruntime", "torch", "onnx-ir")

Account = dict[str, Any]


def account_of(r: Reduction, name: str) -> Account:
    """The document of a reduction."""
    return {
        **r.to_json(),
        "name": name,
        "words": in_plain_words(r, name),
        "of": WORDS[r.of],
        "table": r.frontier(),
        "summary": r.summary(),
        "notes": [*r.notes(), str(r.check)],
        "plan": [
            [s.site, s.op, f"{s.units_before} → {s.units_before - s.replaced}", "; ".join(s.folded)]
            for s in r.lowered.report.sites
        ],
        "environment": _environment(r),
        "risks": _risks(r),
        "answers": _answers(r),
        "graph": _graph(r),
    }


def in_plain_words(r: Reduction, name: str) -> str:
    """A paragraph for somebody who does not know the method."""
    m, w, q = r.measures, r.whole, r.measures.quality
    speed = f", and runs {m.speed.speedup.value:.2f} times as fast" if m.speed else ""
    agree = (
        f"On {r.data.judged} samples that were set aside and not used to make it, it gave the same answer as the original in "
        f"{100 * q.agreement.value:.1f} of 100 cases; for further samples of the same kind this is at least {shown_percent(q.bound)} "
        f"of 100, a statement that is wrong in at most {100 * r.goals.delta:g} of 100 such reports."
    )
    trained = ", then training it towards the original" if r.recovered else ", without training"
    scores = ""
    pair, what = (q.metric, "metric") if q.metric else (q.accuracy, "accuracy")
    if pair is not None:
        scores = f" Its {what} is {pair[1]:.4f}, that of the original {pair[0]:.4f}."
    end = (
        "It meets what was asked for." if r.ready else f"It does not meet what was asked for: {'; '.join(r.problems)}."
    )
    return (
        f"{name} was made smaller by removing {_removed(r)} of its inner units and adjusting the others{trained}. The small model "
        f"has {100 * m.parameters / max(w.parameters, 1):.0f} % of the parameters and needs {100 * m.macs / max(w.macs, 1):.0f} % of "
        f"the multiplications{speed}. {agree}{scores} {end}"
    )


def _removed(r: Reduction) -> int:
    return sum(len(entry.units) for entry in r.plan.entries)


def _risks(r: Reduction) -> list[dict[str, Any]]:
    """By layer and removal, in the order of the selection: the risk that it added, and all of it so far."""
    rows = []
    for site, (added, gone) in r.risks.items():
        total = np.cumsum(added)
        for i in range(0, len(added), max(1, len(added) // STEPS)):
            rows.append(
                {"layer": site, "step": i + 1, "added": float(added[i]), "total": float(total[i]),
                 "unit": "removed" if i < gone else "kept"}
            )  # fmt: skip
    return rows


def _answers(r: Reduction) -> list[dict[str, Any]]:
    """Each answer to a held-out sample: the original's margin, and how far the logits moved."""
    e = r.evidence
    margin, spread, agree = (np.asarray(a, dtype=np.float64).reshape(-1) for a in (e.margin, e.spread, e.agree))
    if not margin.size or not np.isfinite(margin).all():
        return []
    some = np.linspace(0, len(margin) - 1, min(POINTS, len(margin))).astype(int)
    return [{"margin": float(margin[i]), "distortion": float(spread[i]), "same": bool(agree[i])} for i in some]


# ---------------------------------------------------------------- the graph


def _states(r: Reduction) -> Iterator[tuple[Node, str, str]]:
    """What became of every node of the model, with a remark."""
    names = {value.name for node in r.lowered.graph.nodes for value in node.outputs}
    entries = {entry.value: entry for entry in r.plan.entries}
    folded = {action.node for action in r.lowered.result.actions if action.ends_here}
    for node in r.program.graph.nodes:
        title = r.program.title(node.name)
        if node.name in entries:
            entry = entries[node.name]
            yield node, "replaced", f"{len(entry.units)} of {node.output.shape[entry.axis]} units replaced"
        elif node.label in folded or node.name in folded:
            yield node, "folded into", "takes in what was replaced"
        elif node.name not in names:
            yield node, "removed", "is no longer there"
        elif title in r.declined:
            yield node, "does not fold", r.declined[title]
        else:
            yield node, "unchanged", ""


def _places(graph: Graph) -> dict[str, tuple[float, float]]:
    """Each node at its depth, from left to right; within a depth one below the other. A deep model goes on in further rows."""
    net: Any = nx.DiGraph()
    net.add_nodes_from(node.name for node in graph.nodes)
    makers = {value.name: node.name for node in graph.nodes for value in node.outputs}
    net.add_edges_from((makers[o], node.name) for node in graph.nodes for o in node.values() if o in makers)
    layers = [sorted(layer) for layer in nx.topological_generations(net)]
    rows = [layers[start : start + ROW] for start in range(0, len(layers), ROW)]
    places, top = {}, 0.0
    for row in rows:
        tall = max(len(layer) for layer in row)
        for step, layer in enumerate(row):
            for across, name in enumerate(layer):
                places[name] = (float(step), top + across + (tall - len(layer)) / 2)
        top += tall + 1
    return places


def _graph(r: Reduction) -> dict[str, Any]:
    """Nodes with their places, states and remarks, and edges as lines between places."""
    places = _places(r.program.graph)
    states = list(_states(r))
    nodes = [
        {"x": places[node.name][0], "y": places[node.name][1], "name": r.program.title(node.name), "op": node.kind, "what": state,
         "shape": "x".join(map(str, node.output.shape)), "remark": remark}
        for node, state, remark in states[:NODES]
    ]  # fmt: skip
    shown = {node.name for node, _, _ in states[:NODES]}
    makers = {value.name: node.name for node in r.program.graph.nodes for value in node.outputs}
    edges = [
        {"x": places[makers[o]][0], "y": places[makers[o]][1], "u": places[node.name][0], "v": places[node.name][1]}
        for node, _, _ in states[:NODES]
        for o in node.values()
        if o in makers and makers[o] in shown
    ]
    return {"nodes": nodes, "edges": edges, "all": len(states)}


def _environment(r: Reduction) -> list[tuple[str, str]]:
    rows = [
        ("cmrc", __version__),
        ("Python", platform.python_version()),
        ("machine", f"{platform.system()} {platform.machine()}"),
    ]
    for package in PACKAGES:
        try:
            rows.append((package, version(package)))
        except PackageNotFoundError:
            continue
    speed = r.measures.speed
    rows += [("timed on", speed.provider)] if speed else []
    rows += [
        ("model", r.program.fingerprint.digest),
        ("data", f"{r.data.what}; digest {r.size.plan.made.get('data', '')}"),
    ]
    rows += [("calibration, held-out", f"{r.data.calibration}, {r.data.judged} samples")]
    rows += [("recipe", ", ".join(f"{k} {v}" for k, v in r.recipe.items() if v not in (None, [], "")))]
    rows += [("seconds", ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in r.seconds.items()))]
    return rows
