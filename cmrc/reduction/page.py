"""The pages: one HTML file that needs nothing beside it, and the same in Markdown and JSON.

    a reduction               `cmrc reduce --report`, and again from its work folder by `cmrc report`
    two reductions            `cmrc compare A B --report`
    two plans                 `cmrc plan diff A B --report`
    a diagnosis               `cmrc diagnose --report`

Vega-Lite draws the pictures; its script comes from the package vl-convert and stands in the page, so that it opens without a
network. The page follows the reader's light or dark setting, and prints in light.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cmrc._version import __version__
from cmrc.errors import FileError
from cmrc.files import require_writable, write_whole
from cmrc.planning.advice import ADDS_UP, MEANINGS, Finding
from cmrc.reduction import charts
from cmrc.reduction.account import Account
from cmrc.reduction.comparison import SideBySide
from cmrc.verification.bounds import shown_percent

Rows = Sequence[Sequence[str]]


def require_report(path: Path) -> None:
    """That a report can appear there, and that what draws it is there."""
    require_writable(path)
    if path.suffix.lower() != ".html":
        raise FileError(f"cannot write {path}: a report has a name that ends in .html", fix=f"give {path}.html")
    if find_spec("vl_convert") is None:
        raise FileError(f"cannot draw {path}: vl-convert is not installed", fix="pip install 'cmrc[report]'")


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, a sentence, and a picture (by its Vega-Lite specification) or a table."""

    key: str
    title: str
    text: str = ""
    chart: Mapping[str, Any] | None = None
    table: Rows = ()
    points: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """What stands on a page, in its order."""

    name: str
    badge: str
    is_good: bool
    words: str
    cards: Sequence[tuple[str, str]]
    verdict: str
    sections: Sequence[Section]

    def to_html(self) -> str:
        drawn = {section.key: section.chart for section in self.sections if section.chart is not None}
        state = "ready" if self.is_good else "not-ready"
        cards = "".join(
            f"<div class=card><b>{html.escape(v)}</b><span>{html.escape(w)}</span></div>" for w, v in self.cards
        )
        return PAGE.format(
            title=html.escape(f"{self.name}: {self.badge}"), name=html.escape(self.name), state=state,
            badge=html.escape(self.badge), words=html.escape(self.words), cards=cards, verdict=html.escape(self.verdict),
            sections="\n".join(map(_section, self.sections)), style=STYLE,
            data=json.dumps(drawn, allow_nan=False).replace("</", "<\\/"), bundle=_bundle(), version=__version__,
        )  # fmt: skip

    def to_markdown(self) -> str:
        """For a pull request: all but the pictures."""
        lines = [f"# {self.name}: {self.badge}", "", self.words, "", self.verdict]
        for section in self.sections:
            if section.table or section.points:
                lines += [
                    "",
                    f"## {section.title}",
                    "",
                    *_markdown_table(section.table),
                    *(f"- {p}" for p in section.points),
                ]
        return "\n".join(lines) + "\n"


def write_page(page: Page, document: Mapping[str, Any], path: Path) -> list[Path]:
    """The page, and beside it Markdown for a pull request and JSON for a dashboard."""
    require_report(path)
    files = [path, path.with_suffix(".md"), path.with_suffix(".json")]
    texts = [page.to_html(), page.to_markdown(), json.dumps(document, indent=1)]
    for file, text in zip(files, texts, strict=True):
        write_whole(file, text.encode())
    return files


# ---------------------------------------------------------------- a reduction


def page_of(a: Account) -> Page:
    """The report of a reduction."""
    m = next(size for size in a["frontier"] if size["share"] == a["chosen"])
    w, q, speed = a["original"], m["quality"], m["speed"]
    cards = [
        ("of the parameters", f"{100 * m['parameters'] / max(w['parameters'], 1):.0f} %"),
        ("of the multiply-adds", f"{100 * m['macs'] / max(w['macs'], 1):.0f} %"),
        ("of the file", f"{100 * m['bytes'] / max(w['bytes'], 1):.0f} %"),
        *([("times as fast", f"{speed['speedup'][0]:.2f}")] if speed else []),
        ("agreement with the original", f"{100 * q['agreement'][0]:.1f} %"),
        ("certified at least", f"{shown_percent(q['bound'])} %"),
    ]
    if pair := q["metric"] or q["accuracy"]:
        cards.append((f"{'metric' if q['metric'] else 'accuracy'}, was {pair[0]:.4f}", f"{pair[1]:.4f}"))
    return Page(
        a["name"], "ready" if a["ready"] else "not ready", a["ready"], a["words"], cards, a["verdict"], _sections(a)
    )


def _sections(a: Account) -> list[Section]:
    judged, chosen, graph = a["data"]["held_out"], f"{a['chosen']:g} of the {a['of']}", a["graph"]
    widths = [(site, str(before), str(after)) for site, (before, after) in a["widths"].items()]
    cut = (
        f" The first {len(graph['nodes'])} of {graph['all']} nodes are shown."
        if graph["all"] > len(graph["nodes"])
        else ""
    )
    every = [
        Section("summary", "Before and after", table=[("", "before", "after", ""), *a["summary"]]),
        Section("sizes", "Sizes", table=a["table"]),
        Section("frontier", "Agreement by size", f"Each point is a whole model, measured on {judged} held-out samples. Bars are 95 % "
                f"intervals. The chosen one is {chosen}.", charts.frontier_chart(a)),
        Section("latency", "Latency", "All files in one process, in turns, in random order.", charts.latency_chart(a)),
        Section("widths", "Widths by layer", "Units that were kept, and those that the others stand in for.", charts.widths_chart(a),
                [("layer", "before", "after"), *widths]),
        Section("risk", "What the selection went by", "The risk that each removal adds, given those before it, in their order; removed "
                "units come first. Click a layer in the legend to see it alone.", charts.risk_chart(a)),
        Section("certificate", "Margin against distortion", "One point per answer to a held-out sample. Below the line the logits moved "
                "less than the original's margin, so the answer cannot change.", charts.certificate_chart(a)),
        Section("graph", "The model", "From left to right, row by row. Scroll to zoom, drag to move; search by name, op or state." + cut,
                charts.graph_chart(a)),
        Section("plan", "The plan", table=[("layer", "op", "units", "what it folded into"), *a["plan"]]),
        Section("notes", "Notes", points=a["notes"]),
        Section("environment", "Environment and provenance", table=[("", ""), *a["environment"]]),
    ]  # fmt: skip
    return [each for each in every if each.chart is not None or each.table or each.points]


# ---------------------------------------------------------------- comparisons


def page_of_comparison(c: SideBySide) -> Page:
    """Two reductions of one model, or of two."""
    sections = [
        Section("summary", "Side by side", table=c.table),
        Section("frontier", "Agreement by size", "Both reductions, on the held-out samples of each.", charts.two_frontiers(c.first, c.second, c.names)),
        Section("widths", "Widths by layer", "Units that each keeps.", charts.two_widths(c.widths, c.names), c.width_table),
    ]  # fmt: skip
    return Page(" and ".join(c.names), c.badge, c.is_same_model, c.words, (), c.verdict, sections)


def page_of_difference(rows: Sequence[Mapping[str, Any]], names: tuple[str, str], table: Rows) -> Page:
    """Two plans: the units that one replaces and the other does not."""
    words = (
        "Both plans replace the same units by the same values."
        if not rows
        else f"The plans differ at {len(rows)} sites. Below, how many units only one of them replaces, and how many both do."
    )
    badge = "different" if rows else "the same"
    sections = [
        Section("units", "Replaced units by layer", chart=charts.two_plans(rows, names)),
        Section("sites", "Sites", table=table),
    ]
    return Page(" and ".join(names), badge, not rows, words, (), "", sections if rows else [])


# ---------------------------------------------------------------- a diagnosis


MARKS = {True: "✓", False: "!", None: "–"}  # a number that is good news, that is none, and no number


def page_of_diagnosis(name: str, findings: Sequence[Finding]) -> Page:
    """How far scores can be trusted: every number of every site, with its advice."""
    bad, known = sum(f.good is False for f in findings), sum(f.good is not None for f in findings)
    met = dict.fromkeys(f.what for f in findings if f.what in MEANINGS)
    by_site: dict[str, list[tuple[str, ...]]] = {}
    for f in findings:
        row = (MARKS[f.good], f.what, "" if f.value is None else f"{f.value:.3f}", f.advice)
        by_site.setdefault(f.site, [("", "what", "value", "advice")]).append(row)
    sections = [
        Section("predictions", "Predicted against measured", "Each point is a unit that was replaced alone: what its score predicts of the "
                "loss, and what was measured. On the line both are equal.", charts.predictions_chart(findings)),
        Section("coupling", "Coupling (ρ_off)", "The part of the curvature that lies between units. Up to "
                f"{ADDS_UP:g} single scores may be added up.", charts.coupling_chart(findings)),
        Section("sensitivity", "Sensitivity to the number of samples", "How much of what all the data would keep a part of them would keep (Jaccard).",
                charts.sensitivity_chart(findings)),
        *(Section("advice", site, table=table) for site, table in by_site.items()),
        Section("values", "What the values are", points=[f"{what}: {MEANINGS[what]}" for what in met]),
    ]  # fmt: skip
    words = f"{known - bad} of {known} numbers say that scores can be trusted ({MARKS[True]}); the tables below say what to do about the others ({MARKS[False]})."
    shown = [each for each in sections if each.chart is not None or each.table or each.points]
    return Page(name, "trust" if not bad else "with care", not bad, words, (), "", shown)


# ---------------------------------------------------------------- text


def _section(section: Section) -> str:
    parts = [f"<h2>{html.escape(section.title)}</h2>"]
    if section.text:
        parts.append(f"<p>{html.escape(section.text)}</p>")
    if section.chart is not None:
        parts.append(f'<div class="chart" id="{section.key}"></div>')
    elif section.table:
        parts.append(_html_table(section.table, section.key))
    if section.points:
        parts.append(f"<ul>{''.join(f'<li>{html.escape(point)}</li>' for point in section.points)}</ul>")
    return f"<section>{''.join(parts)}</section>"


def _markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    head, *rest = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return [head, "|" + "---|" * len(rows[0]), *rest]


def _html_table(rows: Sequence[Sequence[str]], key: str) -> str:
    head, *rest = rows
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr{' class=chosen' if row[0] == '>' else ''}>{''.join(f'<td>{_breakable(cell)}</td>' for cell in row)}</tr>"
        for row in rest
    )
    return f"<div class='wide {key}'><table>{f'<tr>{cells}</tr>' if any(head) else ''}{body}</table></div>"


LONGEST_NUMBER = 24  # characters, with its separators and its unit


def _breakable(cell: str) -> str:
    """A list of numbers without spaces may go on in the next line; a single number stays whole."""
    text = html.escape(cell)
    return text.replace(",", ",<wbr>") if len(cell) > LONGEST_NUMBER else text


def _bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script."""
    import vl_convert

    script: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return script.replace("</script", "<\\/script")


STYLE = """
:root { --ink: #1c2733; --paper: #fff; --soft: #f2f5f8; --line: #d7dee6; --good: #1b7f5c; --bad: #b3361e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e8ee; --paper: #14191f; --soft: #1d242c; --line: #36414d; --good: #4cc79a; --bad: #ff8a70; } }
@media print {
  :root { --ink: #000; --paper: #fff; --soft: #f4f4f4; --line: #ccc; --good: #1b7f5c; --bad: #b3361e; }
  section { break-inside: avoid; } h2 { break-after: avoid; } tr { break-inside: avoid; } .vega-bindings { display: none; }
  .wide { overflow: visible; } .wide table { font-size: .8rem; } .wide td, .wide th { padding-right: .5rem; } .wide td:last-child { overflow-wrap: anywhere; min-width: 4rem; }
  .wide td:not(:first-child):not(:last-child) { white-space: normal; } .wide td:first-child { max-width: 12rem; overflow-wrap: break-word; } .vega-embed svg { max-width: 100%; height: auto; }
  .badge, .card { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .3rem; overflow-wrap: anywhere; }
.badge { padding: .1em .6em; border-radius: 1em; color: #fff; font-size: 1rem; white-space: nowrap; }
.badge.ready { background: #1b7f5c; } .badge.not-ready { background: #b3361e; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: .6rem; margin: 1rem 0; }
.card { background: var(--soft); border-radius: .5rem; padding: .7rem .8rem; } .card b { display: block; font-size: 1.4rem; }
.card span { font-size: .85rem; }
.chart { width: 100%; min-height: 60px; } .wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; } td, th { text-align: left; padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td:last-child { min-width: 9rem; } td:not(:first-child):not(:last-child) { white-space: nowrap; } tr.chosen td { font-weight: 600; } .verdict { font-weight: 600; overflow-wrap: anywhere; }
.ready-text { color: var(--good); } .not-ready-text { color: var(--bad); }
input { font: inherit; max-width: 100%; } li { overflow-wrap: anywhere; } #graph { display: flex; flex-direction: column-reverse; }
@media (max-width: 600px) {
  table { font-size: .8rem; } td, th { padding-right: .45rem; } td:last-child { min-width: 5.5rem; }
  td:first-child { max-width: 8rem; overflow-wrap: break-word; }
  .summary td:not(:first-child):not(:last-child) { white-space: normal; } .summary td:last-child { overflow-wrap: anywhere; }
  .wide { background: linear-gradient(90deg, #0000, var(--paper)) right / 2rem 100% no-repeat local,
                      linear-gradient(270deg, var(--line), #0000) right / .8rem 100% no-repeat scroll; } }
""".strip()

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{title}</title><link rel="icon" href="data:,"><style>{style}</style></head><body><main>
<h1>{name} <span class="badge {state}">{badge}</span></h1>
<p>{words}</p>
<div class="cards">{cards}</div>
<p class="verdict {state}-text">{verdict}</p>
{sections}
<p><small>made by cmrc {version}</small></p>
</main>
<script type="application/json" id="charts">{data}</script>
<script type="module">{bundle}</script>
<script type="module">
const charts = JSON.parse(document.getElementById("charts").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const draw = (isDark) => Promise.all(Object.entries(charts).map(([id, spec]) =>
  window.vegaEmbed(document.getElementById(id), spec, {{actions: false, renderer: "svg", mode: "vega-lite", theme: isDark ? "dark" : undefined,
    config: {{background: null, axis: {{labelLimit: 140, gridColor: "#8883", domainColor: "#8888", tickColor: "#8888"}}, view: {{stroke: "#8884"}}, legend: {{labelLimit: 140}}}}}})));
await draw(dark.matches);
document.documentElement.dataset.drawn = "yes";
dark.addEventListener("change", (event) => draw(event.matches));
window.addEventListener("beforeprint", () => draw(false));
window.addEventListener("afterprint", () => draw(dark.matches));
</script></body></html>
"""
