"""Follow every link of the built site: `python docs/site/links.py build/site`. Pages, anchors and pictures are there, and nothing is fetched."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}
TELLS = {"canonical", "prev", "next", "edit", "alternate"}  # links that a browser does not fetch


class Page(HTMLParser):
    """What a page links to, and which anchors it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[tuple[str, str]] = []  # tag, target
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value for name, value in attrs if value is not None}
        self.anchors |= {named[name] for name in ("id", "name") if name in named}
        if named.get("rel") in TELLS:
            return
        for name in ("href", "src"):
            if name in named:
                self.links.append(("fetched" if (tag, name) in FETCHED else tag, named[name]))


def problems(site: Path) -> list[str]:
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    problems_seen = [] if pages else ["there are no pages"]
    for path, page in pages.items():
        for tag, target in page.links:
            if problem := _problem(site, path, tag, target, pages):
                problems_seen.append(f"{path.relative_to(site)}: {target}: {problem}")
    for path in [*site.rglob("*.css"), *site.rglob("*.svg")]:
        if "url(http" in (text := path.read_text(encoding="utf-8")) or "@import" in text:
            problems_seen.append(f"{path.relative_to(site)}: fetches something")
    return problems_seen


def _problem(site: Path, path: Path, tag: str, target: str, pages: dict[Path, Page]) -> str:
    parts = urlsplit(target)
    if parts.scheme in ("data", "mailto"):
        return ""
    if parts.scheme or parts.netloc:
        return "is fetched from the network" if tag == "fetched" else ""
    if path.name == "404.html":  # its links are those of the top folder
        return ""
    where = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
    if where.is_dir():
        where = where / "index.html"
    if not where.exists():
        return "is not there"
    known = {page.resolve(): page for page in pages}
    if parts.fragment and where in known and unquote(parts.fragment) not in pages[known[where]].anchors | {"__tabbed"}:
        return "" if parts.fragment.startswith("__") else "has no such anchor"
    return ""


def main() -> None:
    broken = problems(Path(sys.argv[1]))
    sys.stdout.write(
        "\n".join([*broken, f"{len(broken)} links lead nowhere\n" if broken else "every link leads somewhere\n"])
    )
    raise SystemExit(bool(broken))


if __name__ == "__main__":
    main()
