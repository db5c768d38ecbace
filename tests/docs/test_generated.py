"""Pages that are generated are up to date, and pages that name code name what is there."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def test_the_table_of_ops_is_not_stale() -> None:
    spec = importlib.util.spec_from_file_location("ops_table", ROOT / "docs" / "ops_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "ops.md").read_text() == module.page(), "run: python docs/ops_table.py"


def defined(path: Path) -> set[str]:
    """The names that a module defines at its top, and those of its classes' methods as Class.method."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def test_the_table_of_the_paper_is_not_stale_and_names_what_is_there() -> None:
    table = runpy.run_path(str(ROOT / "docs" / "paper_table.py"), run_name="paper_table")
    assert table["PAGE"].read_text(encoding="utf-8") == table["page"](), "run: python docs/paper_table.py"
    for row in table["rows"]():
        assert all((row.what, row.function, row.test, row.ours, row.paper, row.remark)), row.what
        path, _, name = row.function.partition(":")
        file = ROOT / path if path.startswith(("passes/", "benchmarks/")) else ROOT / "cmrc" / path
        assert file.exists(), row.function
        assert not name or name in defined(file), row.function
        test_file, _, test = row.test.partition("::")
        assert test in defined(ROOT / test_file), row.test


def test_the_animation_is_not_stale() -> None:
    animation = runpy.run_path(str(ROOT / "docs" / "site" / "animation.py"))
    assert animation["PICTURE"].read_text(encoding="utf-8") == animation["picture"](), (
        "run: python docs/site/animation.py"
    )


def test_the_examples_of_the_page_on_verification_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "verification.md").read_text()
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), {})
    assert "2000 swaps at rate 0.5 on 360 inputs: act3 (88 of 128 units retained)" in capsys.readouterr().out


def test_the_first_op_of_the_page_on_contributing_works() -> None:
    from cmrc.hosts.autograd import functions
    from cmrc.hosts.fx.ops.row import ROWS
    from cmrc.ir.ops.functions import POINTWISE

    tables: tuple[dict[Any, Any], ...] = (ROWS, POINTWISE, functions.POINTWISE)
    before = [set(table) for table in tables]
    try:
        page = (ROOT / "CONTRIBUTING.md").read_text()
        exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), {"__name__": "page"})
    finally:
        for table, names in zip(tables, before, strict=True):
            for name in table.keys() - names:
                del table[name]


def test_the_page_of_results_and_its_pictures_are_not_stale() -> None:
    from PIL import Image

    from benchmarks import headlines, report, section

    command = "run: python -m benchmarks.report"
    assert (ROOT / "docs" / "results.md").read_text() == report.page(), command
    assert headlines.PAGE.read_text() == headlines.page(), command
    shown = set()
    for modules in report.CHAPTERS.values():
        for _, each in section.sections(modules):
            record = each.read()
            if record is not None and each.draw is not None:
                with Image.open(ROOT / "docs" / "pictures" / f"{each.record}.png") as picture:
                    assert picture.info["Record"] == section.fingerprint(each.shown(record)), command
                shown.add(f"{each.record}.png")
    pages = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md") if path.name != "results.md")
    others = {path.name for path in (ROOT / "docs" / "pictures").glob("*.png")} - shown
    assert not [name for name in others if f"pictures/{name}" not in pages]  # of no record: some page shows it


def test_every_record_is_shown_and_none_is_of_a_quick_run() -> None:
    from benchmarks import report, section
    from benchmarks.measure import RECORDS

    shown = {each.path() for modules in report.CHAPTERS.values() for _, each in section.sections(modules)}
    records = {path for path in RECORDS.glob("*.json") if not path.name.endswith(".part.json")}
    assert records <= shown
    assert not [path.name for path in records if json.loads(path.read_text())["quick"]]


# ---------------------------------------------------------------- pages that name code

NAMING_PAGES = ("design.md", "glossary.md", "decisions.md")
OTHER_PROJECTS = ("xdsl/", "src/onnx_ir/", "tinygrad/", "onnxscript/")  # that the decisions compare with
CODE = re.compile(r"(?<![\w/.-])((?:[\w.-]+/)*[\w-]+\.py)(?::([A-Za-z_][\w.]*))?")
FOLDER = re.compile(r"`((?:[\w.-]+/)+)`")
NAME = re.compile(r"`([A-Za-z_]\w*)`")


def source_of(path: str) -> Path:
    """`passes/pipeline.py` lies at the top of the tree, `program/lower.py` in cmrc/."""
    for start in (ROOT, ROOT / "cmrc"):
        if (start / path).exists():
            return start / path
    raise AssertionError(f"there is no {path}")


def names_in(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    names: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[node.target.id] = node
        elif isinstance(node, ast.Assign):
            names |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    return names


def require_name(path: str, dotted: str) -> None:
    body = ast.parse(source_of(path).read_text()).body
    for part in dotted.split("."):
        names = names_in(body)
        assert part in names, f"there is no {dotted} in {path}"
        body = getattr(names[part], "body", [])


@pytest.mark.parametrize("page", NAMING_PAGES)
def test_modules_folders_and_names_of_a_page_exist(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    places = [place for place in CODE.findall(text) if not place[0].startswith(OTHER_PROJECTS)]
    assert len(places) >= 10
    for path, dotted in places:
        source_of(path)
        if dotted:
            require_name(path, dotted)
    for folder in FOLDER.findall(text):
        source_of(folder)


def test_single_names_of_the_design_page_are_used_in_the_code() -> None:
    sources = [path for folder in ("cmrc", "passes", "tests") for path in (ROOT / folder).rglob("*.py")]
    words = set(re.findall(r"\w+", "\n".join(path.read_text() for path in sources)))
    unknown = sorted(set(NAME.findall((ROOT / "docs" / "design.md").read_text())) - words)
    assert unknown == []


def test_the_graphs_of_the_design_page_are_what_the_passes_print() -> None:
    from cmrc.ir.text import parse, to_text
    from cmrc.passes import pipeline

    page = (ROOT / "docs" / "design.md").read_text()
    graphs = [block.replace("\n     ", " ") for block in re.findall(r"```\n(graph.*?)```", page, re.DOTALL)]
    printed = [to_text(parse(graphs[0]))]
    pipeline.run(parse(graphs[0]), watch=lambda name, graph: printed.append(to_text(graph)))
    assert graphs == printed


def counted(snippet: Path) -> list[int]:
    """The lines of a snippet that do the job, and those that tell how good it is."""
    text = snippet.read_text(encoding="utf-8")
    parts = re.findall(
        r"^# (?:the job|how good is it)\n(.*?)(?=^# (?:how good is it|end)$)", text, re.DOTALL | re.MULTILINE
    )
    lines = [[line.strip() for line in part.splitlines()] for part in parts]
    return [sum(bool(line) and not line.startswith("#") for line in part) for part in lines]


def test_lines_of_the_comparison_are_counted() -> None:
    rows = re.findall(
        r"^\| \*\*(.+?)\*\*[^|]*\|[^|]*\| ([^|]+) \|", (ROOT / "docs" / "comparison.md").read_text(), re.MULTILINE
    )
    said = {name.lower().split()[-1].replace("-", "_"): lines for name, lines in rows if re.match(r"\d", lines)}
    snippets = {path.stem.removeprefix("with_"): path for path in (ROOT / "examples" / "peers").glob("with_*")}
    counts = {name: " + ".join(map(str, counted(path))) for name, path in snippets.items()}
    counts["olive"] = str(len((ROOT / "examples" / "integrations" / "recipe.json").read_text().splitlines()))
    assert said == counts


def test_links_between_pages_lead_somewhere() -> None:
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
