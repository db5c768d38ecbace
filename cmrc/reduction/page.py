"""The report of a reduction: one HTML page that needs nothing beside it, and the same in Markdown and JSON.

Vega-Lite draws the plots and the graph; its script comes from the package vl-convert and stands in the page, so that it opens
without a network. The page follows the reader's light or dark setting, and prints in light.
"""

from __future__ import annotations

import html
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np

from cmrc._version import __version__
from cmrc.errors import FileError
from cmrc.files import require_writable, write_whole
from cmrc.ir.graph import Graph, Node
from cmrc.reduction.result import WORDS, Reduction

POINTS = 2000  # of the certificate's picture
NODES = 1500  # of the graph, at most
PACKAGES = ("numpy", "onnx", "onnxruntime", "torch", "onnx-ir")
STATES = ("replaced", "folded into", "removed", "does not fold", "unchanged")
COLOURS = ("#d95f02", "#1b9e77", "#999999", "#c0392b", "#9db7d5")


def require_report(path: Path) -> None:
    """That a report can appear there, and that what draws it is there."""
    require_writable(path)
    if path.suffix.lower() != ".html":
        raise FileError(f"cannot write {path}: a report has a name that ends in .html", fix=f"give {path}.html")
    if find_spec("vl_convert") is None:
        raise FileError(f"cannot draw {path}: vl-convert is not installed", fix="pip install 'cmrc[report]'")


def write_report(reduction: Reduction, path: Path, *, name: str) -> list[Path]:
    """The page, and beside it Markdown for a pull request and JSON for a dashboard."""
    require_report(path)
    files = [path, path.with_suffix(".md"), path.with_suffix(".json")]
    texts = [page(reduction, name), markdown(reduction, name), json.dumps(reduction.to_json(), indent=1)]
    for file, text in zip(files, texts, strict=True):
        write_whole(file, text.encode())
    return files


# ---------------------------------------------------------------- words


def in_plain_words(r: Reduction, name: str) -> str:
    """A paragraph for somebody who does not know the method."""
    m, w, q = r.measures, r.whole, r.measures.quality
    speed = f", and runs {m.speed.speedup.value:.2f} times as fast" if m.speed else ""
    agree = (
        f"On {r.data.judged} samples that were set aside and not used to make it, it gave the same answer as the original in "
        f"{100 * q.agreement.value:.1f} of 100 cases; for further samples of the same kind this is at least {100 * q.bound:.1f} "
        f"of 100, a statement that is wrong in at most {100 * r.goals.delta:g} of 100 such reports."
    )
    scores = ""
    pair, what = (q.metric, "metric") if q.metric else (q.accuracy, "accuracy")
    if pair is not None:
        scores = f" Its {what} is {pair[1]:.4f}, that of the original {pair[0]:.4f}."
    end = (
        "It meets what was asked for." if r.ready else f"It does not meet what was asked for: {'; '.join(r.problems)}."
    )
    return (
        f"{name} was made smaller by removing {_removed(r)} of its inner units and adjusting the others, without training. The small model "
        f"has {100 * m.parameters / max(w.parameters, 1):.0f} % of the parameters and needs {100 * m.macs / max(w.macs, 1):.0f} % of "
        f"the multiplications{speed}. {agree}{scores} {end}"
    )


def _removed(r: Reduction) -> int:
    return sum(len(entry.units) for entry in r.plan.entries)


def markdown(r: Reduction, name: str) -> str:
    """For a pull request."""
    lines = [f"# {name}: {'ready' if r.ready else 'not ready'}", "", in_plain_words(r, name), "", r.verdict, ""]
    lines += _markdown_table([("", "before", "after", ""), *r.summary()])
    lines += ["", "## Sizes", "", *_markdown_table(r.frontier())]
    widths = [(site, str(row[0]), str(row[1])) for site, row in r.to_json()["widths"].items()]
    lines += ["", "## Widths", "", *_markdown_table([("layer", "before", "after"), *widths])]
    lines += ["", "## Notes", "", *(f"- {note}" for note in r.notes()), f"- {r.check}"]
    return "\n".join(lines) + "\n"


def _markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *rest = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return [head, "|" + "---|" * len(rows[0]), *rest]


# ---------------------------------------------------------------- pictures


def _chart(values: Sequence[Mapping[str, Any]], **spec: Any) -> dict[str, Any]:
    return {
        "data": {"values": list(values)},
        "width": "container",
        "autosize": {"type": "fit-x", "contains": "padding"},
        "background": None,
        **spec,
    }


def frontier_chart(r: Reduction) -> dict[str, Any]:
    """Agreement with its interval against the multiply-adds; the chosen size stands out."""
    values = [
        {
            "part": size.measures.macs / max(r.whole.macs, 1),
            "agreement": size.measures.quality.agreement.value,
            "low": size.measures.quality.agreement.low,
            "high": size.measures.quality.agreement.high,
            "certified": size.measures.quality.bound,
            "KL": size.measures.quality.kl,
            "speed-up": size.measures.speed.speedup.value if size.measures.speed else None,
            "size": f"{size.share:g}",
            "which": "chosen" if i == r.chosen else "others",
        }
        for i, size in enumerate(r.sizes)
    ]
    x = {"field": "part", "type": "quantitative", "title": "part of the multiply-adds", "scale": {"zero": False}}
    y = {"field": "agreement", "type": "quantitative", "title": "agreement with the original", "scale": {"zero": False}}
    tip = [{"field": f} for f in ("size", "which")] + [
        {"field": f, "format": ".4f"} for f in ("agreement", "low", "high", "certified", "KL", "speed-up", "part")
    ]
    colour = {
        "field": "which", "type": "nominal", "title": None,
        "scale": {"domain": ["chosen", "others"], "range": [COLOURS[0], COLOURS[4]]},
    }  # fmt: skip
    return _chart(values, height=260, layer=[
        {"mark": {"type": "line", "color": COLOURS[4]}, "encoding": {"x": x, "y": y}},
        {"mark": {"type": "rule"}, "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": colour}},
        {"mark": {"type": "point", "filled": True, "size": 90}, "encoding": {"x": x, "y": y, "color": colour, "tooltip": tip}},
    ])  # fmt: skip


def latency_chart(r: Reduction) -> dict[str, Any] | None:
    """Milliseconds per run with their intervals."""
    timed = [(f"{size.share:g}", size.measures.speed) for size in r.sizes if size.measures.speed]
    if not timed or r.whole.milliseconds is None:
        return None
    values: list[dict[str, Any]] = [{"size": "original", "ms": r.whole.milliseconds}]
    values += [{"size": n, "ms": s.milliseconds.value, "low": s.milliseconds.low, "high": s.milliseconds.high,
                "speed-up": s.speedup.value} for n, s in timed]  # fmt: skip
    x = {"field": "ms", "type": "quantitative", "title": "ms per run, 95 % interval"}
    y = {"field": "size", "type": "nominal", "sort": None, "title": None}
    chosen = {"condition": {"test": f"datum.size == '{r.size.share:g}'", "value": COLOURS[0]}, "value": COLOURS[4]}
    return _chart(values, height=24 * len(values), layer=[
        {"mark": {"type": "bar"}, "encoding": {"x": x, "y": y, "color": chosen,
         "tooltip": [{"field": "size"}, {"field": "ms", "format": ".4g"}, {"field": "speed-up", "format": ".2f"}]}},
        {"mark": {"type": "rule"}, "encoding": {"x": {**x, "field": "low"}, "x2": {"field": "high"}, "y": y}},
    ])  # fmt: skip


def widths_chart(r: Reduction) -> dict[str, Any]:
    values = []
    for site, (before, after) in r.to_json()["widths"].items():
        values.append({"layer": site, "what": "kept", "units": after, "of": before})
        values.append({"layer": site, "what": "removed", "units": before - after, "of": before})
    return _chart(values, height=10 * len(values) + 20, mark="bar", encoding={
        "y": {"field": "layer", "type": "nominal", "sort": None, "title": None},
        "x": {"field": "units", "type": "quantitative", "stack": True, "title": "units"},
        "color": {"field": "what", "type": "nominal", "title": None,
                  "scale": {"domain": ["kept", "removed"], "range": [COLOURS[1], COLOURS[4]]}},
        "order": {"field": "what"},
        "tooltip": [{"field": "layer"}, {"field": "what"}, {"field": "units"}, {"field": "of"}],
    })  # fmt: skip


def risk_chart(r: Reduction) -> dict[str, Any]:
    """By layer the risk that each removal adds, in the order of the selection, with the cut."""
    values = []
    for site, (added, gone) in r.risks.items():
        step = max(1, len(added) // 300)
        total = np.cumsum(added)
        for i in range(0, len(added), step):
            state = "removed" if i < gone else "kept"
            values.append({"layer": site, "removed so far": i + 1, "risk": max(float(total[i]), 1e-12), "unit": state})
    return _chart(values, height=280, params=[{"name": "legend", "select": {"type": "point", "fields": ["layer"]}, "bind": "legend"}],
        mark={"type": "point", "filled": True, "size": 14}, encoding={
        "x": {"field": "removed so far", "type": "quantitative", "title": "units removed, in the order of the selection"},
        "y": {"field": "risk", "type": "quantitative", "scale": {"type": "log"}, "title": "predicted risk, added up"},
        "color": {"field": "layer", "type": "nominal", "legend": {"symbolLimit": 40}, "sort": None},
        "shape": {"field": "unit", "type": "nominal", "title": None, "scale": {"domain": ["removed", "kept"]}},
        "opacity": {"condition": {"param": "legend", "value": 0.9}, "value": 0.08},
        "tooltip": [{"field": "layer"}, {"field": "unit"}, {"field": "removed so far"}, {"field": "risk", "format": ".3g"}],
    })  # fmt: skip


def certificate_chart(r: Reduction) -> dict[str, Any]:
    """Each answer: the original's margin against how far the logits moved. Below the line the answer cannot change."""
    e = r.evidence
    margin, spread, agree = (np.asarray(a, dtype=np.float64).reshape(-1) for a in (e.margin, e.spread, e.agree))
    some = np.linspace(0, len(margin) - 1, min(POINTS, len(margin))).astype(int)
    values = [
        {"margin": float(margin[i]), "distortion": float(spread[i]), "answer": "the same" if agree[i] else "another",
         "certain": "cannot change" if spread[i] < margin[i] else "not certain by its margin"}
        for i in some
    ]  # fmt: skip
    top = float(min(margin[some].max(), spread[some].max()))
    x = {"field": "margin", "type": "quantitative", "title": "margin of the original"}
    y = {"field": "distortion", "type": "quantitative", "title": "distortion of the logits"}
    colour = {"field": "answer", "type": "nominal", "title": "answer",
              "scale": {"domain": ["the same", "another"], "range": [COLOURS[1], COLOURS[3]]}}  # fmt: skip
    tip = [
        {"field": "margin", "format": ".3g"},
        {"field": "distortion", "format": ".3g"},
        {"field": "answer"},
        {"field": "certain"},
    ]
    line = {"data": {"values": [{"a": 0, "b": 0}, {"a": top, "b": top}]}, "mark": {"type": "line", "strokeDash": [4, 4], "color": "#888"},
            "encoding": {"x": {"field": "a", "type": "quantitative"}, "y": {"field": "b", "type": "quantitative"}}}  # fmt: skip
    points = {
        "mark": {"type": "point", "filled": True, "size": 22, "opacity": 0.7},
        "encoding": {"x": x, "y": y, "color": colour, "tooltip": tip},
    }
    return _chart(values, height=300, layer=[points, line])


# ---------------------------------------------------------------- the graph


def _states(r: Reduction) -> Iterator[tuple[Node, str, str]]:
    """Every node of the model: what became of it, and a word about it."""
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
    """Each node at its depth; within a depth side by side."""
    net: Any = nx.DiGraph()
    net.add_nodes_from(node.name for node in graph.nodes)
    makers = {value.name: node.name for node in graph.nodes for value in node.outputs}
    net.add_edges_from((makers[o], node.name) for node in graph.nodes for o in node.values() if o in makers)
    return {
        name: (across - (len(layer) - 1) / 2, float(depth))
        for depth, layer in enumerate(nx.topological_generations(net))
        for across, name in enumerate(sorted(layer))
    }


def graph_chart(r: Reduction) -> dict[str, Any]:
    """The model from left to right; drag to move, scroll to zoom, and a field to search."""
    places = _places(r.program.graph)
    states = list(_states(r))[:NODES]
    nodes = [
        {"y": places[node.name][0], "x": places[node.name][1], "name": r.program.title(node.name), "op": node.kind, "what": state,
         "shape": "x".join(map(str, node.output.shape)), "remark": remark}
        for node, state, remark in states
    ]  # fmt: skip
    shown = {node.name for node, _, _ in states}
    makers = {value.name: node.name for node in r.program.graph.nodes for value in node.outputs}
    edges = [
        {"x": places[makers[o]][1], "y": places[makers[o]][0], "u": places[node.name][1], "v": places[node.name][0]}
        for node, _, _ in states
        for o in node.values()
        if o in makers and makers[o] in shown
    ]
    axis = {"axis": None, "type": "quantitative", "scale": {"zero": False, "padding": 14}}
    matches = "search == '' || test(regexp(search, 'i'), datum.name + ' ' + datum.op + ' ' + datum.what)"
    return {
        "width": "container", "height": 460, "background": None,
        "params": [{"name": "search", "value": "", "bind": {"input": "search", "placeholder": "name, op or state", "name": "search "}}],
        "layer": [
            {"data": {"values": edges}, "mark": {"type": "rule", "color": "#9995"},
             "encoding": {"x": {**axis, "field": "x"}, "y": {**axis, "field": "y"}, "x2": {"field": "u"}, "y2": {"field": "v"}}},
            {"data": {"values": nodes}, "params": [{"name": "view", "select": "interval", "bind": "scales"}],
             "mark": {"type": "point", "filled": True},
             "encoding": {
                "x": {**axis, "field": "x"}, "y": {**axis, "field": "y"},
                "color": {"field": "what", "type": "nominal", "title": None, "legend": {"orient": "top", "columns": 3},
                          "scale": {"domain": list(STATES), "range": list(COLOURS)}},
                "size": {"condition": {"test": matches, "value": 70}, "value": 15},
                "opacity": {"condition": {"test": matches, "value": 1}, "value": 0.12},
                "tooltip": [{"field": f} for f in ("name", "op", "shape", "what", "remark")]}},
        ],
        "config": {"view": {"stroke": None}},
    }  # fmt: skip


# ---------------------------------------------------------------- the page


def page(r: Reduction, name: str) -> str:
    """The whole page."""
    charts = {
        "frontier": frontier_chart(r), "latency": latency_chart(r), "widths": widths_chart(r), "risk": risk_chart(r),
        "certificate": None if r.evidence.margin.size == 0 or not np.isfinite(r.evidence.margin).all() else certificate_chart(r),
        "graph": graph_chart(r),
    }  # fmt: skip
    sections = "\n".join(
        f'<section><h2>{title}</h2><p>{text}</p><div class="chart" id="{key}"></div></section>'
        for key, title, text in _sections(r)
        if charts[key] is not None
    )
    drawn = {key: spec for key, spec in charts.items() if spec is not None}
    cards = "".join(f"<div class=card><b>{value}</b><span>{what}</span></div>" for what, value in _cards(r))
    state = "ready" if r.ready else "not-ready"
    return PAGE.format(
        title=html.escape(f"{name}: {'ready' if r.ready else 'not ready'}"), name=html.escape(name), state=state,
        badge="ready" if r.ready else "not ready", words=html.escape(in_plain_words(r, name)), cards=cards,
        verdict=html.escape(r.verdict), frontier=_html_table(r.frontier()), sections=sections, plan=_plan_table(r),
        notes="".join(f"<li>{html.escape(note)}</li>" for note in [*r.notes(), str(r.check)]),
        environment=_html_table([("", ""), *_environment(r)]), style=STYLE,
        data=json.dumps(drawn, allow_nan=False).replace("</", "<\\/"), bundle=_bundle(), version=__version__,
    )  # fmt: skip


def _sections(r: Reduction) -> list[tuple[str, str, str]]:
    chosen = f"{r.size.share:g} of the {WORDS[r.of]}"
    return [
        ("frontier", "Agreement by size", f"Each point is a whole model, measured on {r.data.judged} held-out samples. Bars are 95 % "
         f"intervals. The chosen one is {chosen}."),
        ("latency", "Latency", "All files in one process, in turns, in random order."),
        ("widths", "Widths by layer", "Units that were kept, and those that the others stand in for."),
        ("risk", "What the selection went by", "The predicted risk, added up removal by removal, each given those before it. Filled from the "
         "left: removed. Click a layer in the legend to see it alone."),
        ("certificate", "Margin against distortion", "One point per answer to a held-out sample. Below the line the logits moved less than the "
         "original's margin, so the answer cannot change."),
        ("graph", "The model", "From left to right. Scroll to zoom, drag to move; search by name, op or state."),
    ]  # fmt: skip


def _cards(r: Reduction) -> list[tuple[str, str]]:
    m, w, q = r.measures, r.whole, r.measures.quality
    cards = [
        ("of the parameters", f"{100 * m.parameters / max(w.parameters, 1):.0f} %"),
        ("of the multiply-adds", f"{100 * m.macs / max(w.macs, 1):.0f} %"),
        ("of the file", f"{100 * m.bytes / max(w.bytes, 1):.0f} %"),
    ]
    if m.speed:
        cards.append(("times as fast", f"{m.speed.speedup.value:.2f}"))
    cards += [
        ("agreement with the original", f"{100 * q.agreement.value:.1f} %"),
        ("certified at least", f"{100 * q.bound:.1f} %"),
    ]
    if pair := q.metric or q.accuracy:
        cards.append((f"{'metric' if q.metric else 'accuracy'}, was {pair[0]:.4f}", f"{pair[1]:.4f}"))
    return cards


def _plan_table(r: Reduction) -> str:
    rows = [("layer", "op", "units", "what it folded into")]
    rows += [
        (s.site, s.op, f"{s.units_before} → {s.units_before - s.replaced}", "; ".join(s.folded))
        for s in r.lowered.report.sites
    ]
    return _html_table(rows)


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


def _html_table(rows: Sequence[Sequence[str]]) -> str:
    head, *rest = rows
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr{' class=chosen' if row[0] == '>' else ''}>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>"
        for row in rest
    )
    return f"<div class=wide><table>{f'<tr>{cells}</tr>' if any(head) else ''}{body}</table></div>"


def _bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script."""
    import vl_convert

    script: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return script.replace("</script", "<\\/script")


STYLE = """
:root { --ink: #1c2733; --paper: #fff; --soft: #f2f5f8; --line: #d7dee6; --good: #1b7f5c; --bad: #b3361e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e8ee; --paper: #14191f; --soft: #1d242c; --line: #36414d; --good: #4cc79a; --bad: #ff8a70; } }
@media print { :root { --ink: #000; --paper: #fff; --soft: #f4f4f4; --line: #ccc; } section { break-inside: avoid; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .3rem; }
.badge { padding: .1em .6em; border-radius: 1em; color: #fff; font-size: 1rem; white-space: nowrap; }
.badge.ready { background: #1b7f5c; } .badge.not-ready { background: #b3361e; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: .6rem; margin: 1rem 0; }
.card { background: var(--soft); border-radius: .5rem; padding: .7rem .8rem; } .card b { display: block; font-size: 1.4rem; }
.card span { font-size: .85rem; }
.chart { width: 100%; min-height: 60px; } .wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; } td, th { text-align: left; padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr.chosen td { font-weight: 600; } .verdict { font-weight: 600; overflow-wrap: anywhere; }
.ready-text { color: var(--good); } .not-ready-text { color: var(--bad); }
input { font: inherit; max-width: 100%; } li { overflow-wrap: anywhere; }
""".strip()

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{title}</title><link rel="icon" href="data:,"><style>{style}</style></head><body><main>
<h1>{name} <span class="badge {state}">{badge}</span></h1>
<p>{words}</p>
<div class="cards">{cards}</div>
<p class="verdict {state}-text">{verdict}</p>
<section><h2>Sizes</h2>{frontier}</section>
{sections}
<section><h2>The plan</h2>{plan}</section>
<section><h2>Notes</h2><ul>{notes}</ul></section>
<section><h2>Environment and provenance</h2>{environment}</section>
<p><small>made by cmrc {version}</small></p>
</main>
<script type="application/json" id="charts">{data}</script>
<script type="module">{bundle}</script>
<script type="module">
const charts = JSON.parse(document.getElementById("charts").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const draw = (isDark) => Promise.all(Object.entries(charts).map(([id, spec]) =>
  window.vegaEmbed(document.getElementById(id), spec, {{actions: false, renderer: "svg", mode: "vega-lite", theme: isDark ? "dark" : undefined,
    config: {{background: null, axis: {{labelLimit: 140}}, legend: {{labelLimit: 120}}}}}})));
await draw(dark.matches);
document.documentElement.dataset.drawn = "yes";
dark.addEventListener("change", (event) => draw(event.matches));
window.addEventListener("beforeprint", () => draw(false));
window.addEventListener("afterprint", () => draw(dark.matches));
</script></body></html>
"""
