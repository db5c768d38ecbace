"""What mkdocs does beside the pages of docs/: pages that are made when the site is built, and links out of docs/.

cli.md           the help of every command
json.md          the schema of what every command prints with --json
contributing.md  CONTRIBUTING.md and CHANGELOG.md of the top folder, which stay where people look for them
changelog.md
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
TOP = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}
SHIM = "https://unpkg.com/iframe-worker/shim"
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """A page that nobody has put into the navigation yet stands at the end of it."""
    listed = re.findall(r"[\w/]+\.md", str(config.nav))
    rest = [path.name for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in listed]
    if rest:
        config.nav.append({"More": rest})
    return config


def on_files(files: Files, config: Any) -> Files:
    for source, target in TOP.items():
        if source != "README.md":
            text = (ROOT / source).read_text(encoding="utf-8")
            files.append(File.generated(config, target, content=text.replace("](docs/", "](")))
    files.append(File.generated(config, "cli.md", content=cli_page()))
    files.append(File.generated(config, "json.md", content=json_page()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """A link to a file of the repository that is no page becomes its name: the site stands alone."""
    parts = FENCED.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(_inward(page.file.src_uri), part) for part in parts)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """The one script that the theme would fetch lies beside the pages."""
    return output.replace(SHIM, f"{'../' * page.file.src_uri.count('/')}assets/iframe-worker.js")


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    return output_content.replace(SHIM, "assets/iframe-worker.js")


def _inward(source: str) -> Any:
    depth = source.count("/")
    out = "../" * (depth + 1)

    def link(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        path, _, anchor = target.partition("#")
        if path.startswith(out) or (source in TOP.values() and path and (ROOT / path).exists()):
            name = path.removeprefix(out)
            if name in TOP:
                return f"[{text}]({'../' * depth}{TOP[name]}{'#' + anchor if anchor else ''})"
            if not (ROOT / name).exists():
                raise ValueError(f"{source}: there is no {target}")
            return text if text.startswith("`") or name.rpartition("/")[2] in text else f"{text} (`{name}`)"
        return match[0]

    return link


# ---------------------------------------------------------------- pages from the code


def cli_page() -> str:
    lines = ["# Command line", "", "What `--help` of every command says.", ""]
    for name, text in helps():
        lines += [f"## {name}", "", "```text", text.rstrip(), "```", ""]
    return "\n".join(lines)


def helps() -> Iterator[tuple[str, str]]:
    from typer.testing import CliRunner

    from cmrc.cli.app import Commands, app
    from cmrc.cli.plan import MakeOrRead

    names = [(), *((name,) for name in Commands.entries)]
    for path in names:
        yield " ".join(("cmrc", *path)), _help(CliRunner(), app, path)
        if path == ("plan",):
            for inner in MakeOrRead.entries:
                yield f"cmrc plan {inner}", _help(CliRunner(), app, (*path, inner))


def _help(runner: Any, app: Any, path: tuple[str, ...]) -> str:
    done = runner.invoke(app, [*path, "--help"], prog_name="cmrc", terminal_width=96, env={"COLUMNS": "96"})
    assert done.exit_code == 0, done.output
    return str(done.output)


def json_page() -> str:
    import json

    from cmrc.cli.documents import DOCUMENTS

    lines = [
        "# JSON",
        "",
        "What every command prints with `--json`; `cmrc schema COMMAND` prints the same. A field that stands here stays, with this type.",
        "Documents may gain fields: readers ignore what they do not know.",
        "",
    ]
    for name, document in DOCUMENTS.items():
        schema = json.dumps(document.model_json_schema(), indent=1)
        lines += [f"## {name}", "", (document.__doc__ or "").strip(), "", "```json", schema, "```", ""]
    return "\n".join(lines)
