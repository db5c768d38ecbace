"""The report: what it says, that it needs nothing beside it, and that it opens in a real browser."""

from __future__ import annotations

import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import cli

import cmrc
from cmrc.cli.wording import page_in_flags
from cmrc.errors import FileError
from cmrc.planning.advice import MEANINGS, Finding
from cmrc.reduction import account, charts, page
from cmrc.reduction.account import Account, account_of

EXAMPLES = Path(__file__).parents[2] / "examples"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_vega = pytest.mark.skipif(find_spec("vl_convert") is None, reason="vl-convert is not installed: cmrc[report]")


@pytest.fixture(scope="module")
def reduction() -> cmrc.Reduction:
    return cmrc.reduce(
        EXAMPLES / "digits.onnx", EXAMPLES / "digits_train.npz", held_out=EXAMPLES / "digits_test.npz",
        frontier=[0.8, 0.5], refit=False, timed=True, samples=600,
    )  # fmt: skip


@pytest.fixture(scope="module")
def facts(reduction: cmrc.Reduction) -> Account:
    return account_of(reduction, "digits.onnx")


def test_the_paragraph_is_for_people(reduction: cmrc.Reduction) -> None:
    words = account.in_plain_words(reduction, "digits.onnx")
    removed = sum(len(entry.units) for entry in reduction.plan.entries)
    assert words.startswith(f"digits.onnx was made smaller by removing {removed} of its inner units")
    assert "On 360 samples that were set aside and not used to make it" in words
    assert words.endswith("It meets what was asked for.")


def test_markdown_has_the_tables(reduction: cmrc.Reduction, facts: Account) -> None:
    text = page.page_of(facts).to_markdown()
    assert text.startswith("# digits.onnx: ready\n")
    assert reduction.verdict in text
    for rows in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({line.count("|") for line in rows.splitlines()}) == 1


def test_pictures_hold_what_was_measured(reduction: cmrc.Reduction, facts: Account) -> None:
    points = charts.frontier_chart(facts)["data"]["values"]
    assert [point["which"] for point in points].count("chosen") == 1
    assert [point["agreement"] for point in points] == [s.measures.quality.agreement.value for s in reduction.sizes]
    latency = charts.latency_chart(facts)
    assert latency is not None
    assert [row["size"] for row in latency["data"]["values"]] == [
        "original",
        *(f"{s.share:g}" for s in reduction.sizes),
    ]
    widths = charts.widths_chart(facts)["data"]["values"]
    assert sum(row["units"] for row in widths if row["what"] == "removed") == sum(
        len(e.units) for e in reduction.plan.entries
    )
    certificate = charts.certificate_chart(facts)
    assert certificate is not None
    answers = certificate["data"]["values"]
    assert sum(row["answer"] == "the same" for row in answers) / 360 == reduction.measures.quality.agreement.value
    assert not [row for row in answers if row["certain"] == "cannot change" and row["answer"] == "another"]


def test_risks_are_those_of_the_joint_selection_in_its_order_with_its_cut(
    reduction: cmrc.Reduction, facts: Account
) -> None:
    rows = (charts.risk_chart(facts) or {})["data"]["values"]
    for entry in reduction.plan.entries:
        own = [row for row in rows if row["layer"] == entry.site]
        assert [row["unit"] for row in own] == ["removed"] * len(entry.units) + ["kept"] * (len(own) - len(entry.units))
        went_by = reduction.plan.scores[entry.site]
        assert sorted(row["added"] for row in own) == pytest.approx(np.sort(np.maximum(went_by, charts.LEAST)))
        gone = [row["added"] for row in own[: len(entry.units)]]
        assert sorted(gone) == pytest.approx(np.sort(np.maximum(went_by[list(entry.units)], charts.LEAST)))
        assert own[-1]["total"] == pytest.approx(np.maximum(went_by, 0).sum())


def test_the_graph_marks_what_became_of_each_node(reduction: cmrc.Reduction, facts: Account) -> None:
    spec = charts.graph_chart(facts)
    nodes = spec["layer"][1]["data"]["values"]
    assert len(nodes) == len(reduction.program.graph.nodes)
    assert {node["name"] for node in nodes if node["what"] == "replaced"} == {e.site for e in reduction.plan.entries}
    assert {node["what"] for node in nodes} <= set(charts.STATES)
    assert len({(node["x"], node["y"]) for node in nodes}) == len(nodes)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (
            "report.txt",
            "file: cannot write report.txt: a report has a name that ends in .html\n  fix: give report.txt.html",
        ),
        (
            "nowhere/report.html",
            "file: cannot write nowhere/report.html: there is no folder nowhere\n  fix: mkdir -p nowhere",
        ),
    ],
)
def test_a_report_that_cannot_appear_is_refused_before_the_work(path: str, text: str) -> None:
    with pytest.raises(FileError) as caught:
        page.require_report(Path(path))
    assert str(caught.value) == text


def test_without_the_package_it_says_which(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(page, "find_spec", lambda name: None)
    with pytest.raises(FileError) as caught:
        page.require_report(tmp_path / "r.html")
    assert str(caught.value).endswith("vl-convert is not installed\n  fix: pip install 'cmrc[report]'")


@needs_vega
def test_the_page_needs_nothing_beside_it(reduction: cmrc.Reduction) -> None:
    text = page.page_of(account_of(reduction, "<digits>.onnx")).to_html()
    assert "<h1>&lt;digits&gt;.onnx" in text
    assert f"<td>{reduction.whole.parameters:,}</td>" in text  # a number does not break
    head = text[: text.index('<script type="module">')]
    assert not re.findall(r'(?:src|href)="(?!data:)', head)
    drawn = re.search(r'id="charts">(.*?)</script>', text, re.DOTALL)
    assert drawn is not None
    assert set(json.loads(drawn[1].replace("<\\/", "</"))) == {
        "frontier",
        "latency",
        "widths",
        "risk",
        "certificate",
        "graph",
    }


@needs_vega
def test_the_command_writes_page_markdown_and_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = cli("reduce", str(EXAMPLES / "digits.onnx"), "--data", str(EXAMPLES / "digits_train.npz"), "-o", "small.onnx", "--report", "r.html",
                "--frontier", "0.8", "--no-refit", "--no-timed", "--samples", "600")  # fmt: skip
    assert "wrote small.onnx, small.plan.json, r.html, r.md and r.json" in shown.stdout, shown.output
    assert json.loads((tmp_path / "r.json").read_text())["chosen"] == 0.8


@needs_vega
def test_the_page_is_made_again_from_the_work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after the model and the data are gone; two runs are compared, and so are their plans, each with a page."""
    monkeypatch.chdir(tmp_path)
    for name, share in (("a", "0.8"), ("b", "0.5")):
        cli("reduce", str(EXAMPLES / "digits.onnx"), "--data", str(EXAMPLES / "digits_train.npz"), "-o", f"{name}.onnx", "--report",
            f"{name}.html", "--frontier", share, "--no-refit", "--no-timed", "--samples", "600", "--pick", share)  # fmt: skip
    shown = cli("report", "a.onnx", "-o", "again.html")
    assert shown.stdout == "wrote again.html, again.md and again.json\n", shown.output
    assert Path("again.html").read_text() == Path("a.html").read_text()
    compared = cli("compare", "a.work", "b.work", "--report", "two.html")
    assert compared.exit_code == 0, compared.output
    assert compared.stdout.splitlines()[-2].startswith("b needs fewer multiply-adds; ")
    assert json.loads(Path("two.json").read_text())["same_model"] is True
    plans = cli("plan", "diff", "a.plan.json", "b.plan.json", "--report", "diff.html")
    assert plans.exit_code == 1, plans.output
    assert plans.stdout.splitlines()[-1] == "wrote diff.html, diff.md and diff.json"
    for path in ("two.html", "diff.html"):
        assert 'id="charts">{"' in Path(path).read_text()
    missing = cli("report", "nowhere.work", "-o", "again.html")
    assert missing.stderr == (
        "file: there is no nowhere.work\n  fix: name the work folder that `cmrc reduce` made, or its report (.json)\n"
    )


FINDINGS = [
    Finding("a", "coupling", 0.5, False, "Choose them together."),
    Finding("a", "predictions", 0.9, True, "As clamping does.", ((1e-4, 2e-4), (-3e-6, -2e-6), (0.0, 1e-5))),
    Finding("a", "sensitivity", 0.8, False, "Calibrate on more.", ((10.0, 0.6), (20.0, 0.8), (40.0, 1.0))),
    Finding("b", "curvature", None, None, "Not known here."),
]


def test_a_diagnosis_has_its_pictures_and_every_number() -> None:
    page_text = page.page_of_diagnosis("m.onnx", FINDINGS)
    assert not page_text.is_good
    assert page_text.words.startswith("1 of 3 numbers")
    drawn = {section.key: section.chart for section in page_text.sections if section.chart is not None}
    assert list(drawn) == ["predictions", "coupling", "sensitivity"]
    points = drawn["predictions"]["data"]["values"]
    assert [(p["site"], p["predicted"], p["measured"]) for p in points] == [("a", *p) for p in FINDINGS[1].points]
    ticks = drawn["predictions"]["layer"][1]["encoding"]["x"]["axis"]["values"]
    assert ticks == pytest.approx([0.0, -1e-6, 1e-6, 1e-5, 1e-4])
    assert [p["overlap"] for p in drawn["sensitivity"]["data"]["values"]] == [0.6, 0.8, 1.0]
    assert drawn["sensitivity"]["encoding"]["color"]["legend"] is None  # of one site
    assert [(s.title, [row[0] for row in s.table[1:]]) for s in page_text.sections[3:-1]] == [
        ("a", ["!", "✓", "!"]),
        ("b", ["–"]),
    ]
    assert page_text.sections[-1].points == [
        f"{what}: {MEANINGS[what]}" for what in ("coupling", "predictions", "sensitivity")
    ]
    assert [s.key for s in page.page_of_diagnosis("m.onnx", FINDINGS[3:]).sections] == ["advice"]


@pytest.mark.parametrize(("smallest", "scale"), [(6e-6, None), (2e-7, "log"), (1e-9, "symlog"), (-1e-6, "symlog")])
def test_points_fill_the_picture(smallest: float, scale: str | None) -> None:
    """By the spread of the numbers: linear, logarithmic, and on both sides of 0."""
    points = ((smallest, 7e-6), (8e-6, 9e-6))
    chart = page.charts.predictions_chart([Finding("a", "predictions", 0.9, True, "", points)])
    assert chart is not None
    drawn = chart["layer"][1]["encoding"]["y"]["scale"]
    assert drawn.get("type") == scale
    assert drawn["domain"] == [smallest, 9e-6]


@needs_vega
def test_diagnose_writes_page_markdown_and_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = f"diagnose {EXAMPLES / 'digits.onnx'} --data {EXAMPLES / 'digits_test.npz'} --sites act4 --units 2"
    assert cli(*given.split(), "--report", "page.html").exit_code == 0
    findings = json.loads(Path("page.json").read_text())["findings"]
    assert [f["what"] for f in findings] == ["coupling", "predictions", "kinks", "sensitivity"]
    assert len(findings[1]["points"]) == 2
    assert Path("page.md").read_text().startswith("# digits.onnx: ")
    assert cli(*given.split(), "--report", "page.txt").exit_code != 0


@needs_vega
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
@pytest.mark.skipif(find_spec("playwright") is None, reason="playwright is not installed: cmrc[browser]")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_diagnosis_opens_in_a_browser(tmp_path: Path, width: int) -> None:
    from playwright.sync_api import sync_playwright

    page.write_page(page.page_of_diagnosis("m.onnx", FINDINGS), {}, tmp_path / "page.html")
    said: list[str] = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_context(viewport={"width": width, "height": 900}, offline=True).new_page()
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.goto(f"file://{tmp_path / 'page.html'}")
        tab.wait_for_function("document.documentElement.dataset.drawn === 'yes'", timeout=60_000)
        assert tab.locator(".chart svg").count() == 3
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        browser.close()
    assert not said


@needs_vega
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
@pytest.mark.skipif(find_spec("playwright") is None, reason="playwright is not installed: cmrc[browser]")
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "light"), (1280, "dark")])
def test_the_page_opens_in_a_browser(
    reduction: cmrc.Reduction, facts: Account, tmp_path: Path, width: int, scheme: Any
) -> None:
    """Offline, without a word on the console; every picture is drawn, nothing is wider than the window; hover and search work."""
    from playwright.sync_api import sync_playwright

    page.write_page(page.page_of(facts), facts, tmp_path / "report.html")
    said: list[str] = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
        tab = context.new_page()
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.goto(f"file://{tmp_path / 'report.html'}")
        tab.wait_for_function("document.documentElement.dataset.drawn === 'yes'", timeout=60_000)
        assert tab.locator(".chart svg").count() == 6
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        dim = (
            "[...document.querySelectorAll('#graph svg path')].filter(p => p.getAttribute('opacity') === '0.12').length"
        )
        assert tab.evaluate(dim) == 0
        tab.locator("#graph input").fill("gelu")
        tab.wait_for_function(f"{dim} === {len(reduction.program.graph.nodes) - 1}")
        tab.locator("#graph svg path[aria-label*='gelu']").first.hover()
        tab.wait_for_selector("#vg-tooltip-element.visible")
        assert "gelu" in tab.locator("#vg-tooltip-element").inner_text()
        where = "document.querySelector('#graph svg path[aria-label*=gelu]').getBoundingClientRect().x"
        before = tab.evaluate(where)
        tab.locator("#graph svg").hover()
        tab.mouse.wheel(0, -300)
        tab.wait_for_function(f"Math.abs({where} - {before}) > 2")
        browser.close()
    assert said == []


@needs_vega
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
@pytest.mark.skipif(find_spec("playwright") is None, reason="playwright is not installed: cmrc[browser]")
def test_long_names_show_their_ends_and_fit_on_paper(facts: Account, tmp_path: Path) -> None:
    """Exporters give all layers one long beginning; nobody can scroll a table that is printed."""
    from playwright.sync_api import sync_playwright

    prefix = "a_beginning_that_all_layers_share/" * 3
    renamed = {
        **facts,
        "widths": {prefix + name: pair for name, pair in facts["widths"].items()},
        "plan": [(prefix + row[0], *row[1:3], prefix + row[3]) for row in facts["plan"]],
        "risks": [{**row, "layer": prefix + row["layer"]} for row in facts["risks"]],
    }
    page.write_page(page.page_of(renamed), renamed, tmp_path / "report.html")
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_context(viewport={"width": 1000, "height": 900}, offline=True).new_page()
        tab.goto(f"file://{tmp_path / 'report.html'}")
        tab.wait_for_function("document.documentElement.dataset.drawn === 'yes'", timeout=60_000)
        for key in ("widths", "risk"):
            labels = "\n".join(tab.locator(f"#{key} svg text").all_text_contents())
            assert all(f"…{(prefix + name)[-21:]}\n" in f"{labels}\n" for name in facts["widths"]), labels
        tab.set_viewport_size({"width": 660, "height": 900})  # A4 without its margins; pictures stay as they were drawn
        beyond = "[...document.querySelectorAll('table, svg')].filter(e => e.getBoundingClientRect().right > 660).map(e => e.outerHTML.slice(0, 300))"
        assert tab.evaluate(beyond), "everything fits without the rules for print: the test shows nothing"
        tab.emulate_media(media="print")
        assert tab.evaluate(beyond) == []
        browser.close()


def test_what_a_page_says_speaks_of_flags(facts: Account) -> None:
    said = {
        "words": "It is out of reach: try frontier=0.2,0.1.",
        "verdict": "not ready: give data=",
        "notes": ["give samples="],
    }
    shown = page_in_flags({**facts, **said, "problems": ["give metric="]})
    assert [shown[key] for key in ("words", "verdict", "notes", "problems")] == [
        "It is out of reach: try --frontier 0.2,0.1.", "not ready: give --data", ["give --samples"], ["give --metric"],
    ]  # fmt: skip
