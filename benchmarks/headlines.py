"""Write docs/headlines.md, one page in front of docs/results.md: every number comes from the same records.

python -m benchmarks.headlines
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import RECORDS, ROOT
from benchmarks.section import Record, table

PAGE = ROOT / "docs" / "headlines.md"
PRETRAINED = ("minilm", "smollm", "efficientnet", "magika", "recogniser")
PLANES = "zero padding"  # in the names of models whose constants need an added plane
INTRODUCTION = """# Headline results

One page in front of [all results](results.md), which say how each number was measured, with intervals, and list every target that is missed.
Written by `python -m benchmarks.headlines` from the same records. One machine, CPU, no fine-tuning unless said.
"""


def read(name: str, folder: Path) -> Record | None:
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def best(rows: Iterable[Mapping[str, Any]], kind: str, number: str) -> Mapping[str, Any] | None:
    return min(
        (row for row in rows if row["kind"] == kind and row.get(number) is not None),
        key=lambda row: row[number],
        default=None,
    )


def pretrained(folder: Path) -> Iterator[str]:
    rows = []
    for name in PRETRAINED:
        record = read(f"pretrained_{name}", folder)
        if record is None:
            continue
        number = record["number"]
        cells = []
        for kind in ("cmrc", "as published", "peer"):
            row = best(record["rows"], kind, number)
            cells.append("" if row is None else f"{row[number]:.3g} ({row['method']})")
        setting = record["setting"].split(";")[0]
        rows.append((record["name"], setting, f"{number}; whole: {record['whole'].get(number, 0):.3g}", *cells))
    if rows:
        yield "## Pretrained models, no fine-tuning\n"
        yield (
            "The same units are asked of every tool, or as many parameters. Lower is better. *Published methods* are other people's methods as we "
            "implemented them; *other tools* are Torch-Pruning and onnxsim as they are installed.\n"
        )
        yield table(("model", "what is cut", "measured", "cmrc", "best published method", "best other tool"), rows)


def carried(folder: Path) -> str:
    """What is said of constants under zero padding that a channel carries."""
    record = read("padded", folder)
    ratios = [r["ratio"] for r in record["ratios"] if r["name"].startswith("carried")] if record is not None else []
    return f"; where a channel carries them, {min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""


def shrinking(folder: Path) -> Iterator[str]:
    record = read("latency", folder)
    if record is None:
        return
    ours = [r for r in record["ratios"] if r["ours"].startswith("lowered") and r["theirs"] == "original"]
    pairs = [r for r in record["ratios"] if r["ours"].startswith("lowered") and r["theirs"] == "native"]
    planes = [r["ratio"] for r in pairs if PLANES in r["name"]]
    native = [r["ratio"] for r in pairs if PLANES not in r["name"]]
    yield "## Time under onnxruntime\n"
    yield (
        f"A lowered model takes {min(native):.2f} to {max(native):.2f} (median {median(native):.2f}) of the time of a model that was built at the small "
        "size from the start. Constants under zero-padded convolutions need an added plane at run time: there it is "
        f"{min(planes):.2f} to {max(planes):.2f}{carried(folder)}. Of the original's time, with half of the inner units gone:\n"
    )
    by_model: dict[str, list[float]] = {}
    for r in ours:
        by_model.setdefault(r["name"].split(", batch")[0], []).append(r["ratio"])
    yield table(
        ("model", "time, of the original's"), [(name, f"{min(v):.2f} to {max(v):.2f}") for name, v in by_model.items()]
    )


def allocation(folder: Path) -> Iterator[str]:
    records = [record for name in ("vit", "resnet") if (record := read(f"allocation_{name}", folder)) is not None]
    if records:
        yield "## Where to cut\n"
        yield "A budget that is shared out by measured loss, beside the same part of every layer; KL over KL, geometric mean over sizes.\n"
        yield table(
            ("network", "KL, shared out over uniform"), [(r["name"], f"{r['claims'][0]['value']:.2f}") for r in records]
        )


def compiler(folder: Path) -> Iterator[str]:
    rows = []
    if (record := read("peer_cost", folder)) is not None:
        ratios = [row["ratio"] for row in record["rows"] if isinstance(row.get("ratio"), int | float)]
        if ratios:
            rows.append(
                ("lowering beside Torch-Pruning's graph build and prune", f"median {median(ratios):.2f} of its time")
            )
        slowest = record["claims"][0]
        rows.append((slowest["name"], f"{slowest['value']:.2f} of its time"))
    if (record := read("interventions", folder)) is not None:
        for other in ("pyvene", "TransformerLens", "nnsight"):
            ratios = [r["ratio"] for r in record["ratios"] if r["ours"] == "cmrc" and r["theirs"] == other]
            if ratios:
                rows.append((f"interchange beside {other}", f"{min(ratios):.2f} to {max(ratios):.2f} of its time"))
    if (record := read("coverage", folder)) is not None:
        least = min(claim["value"] for claim in record["claims"])
        rows.append((f"certificates at level 0.95: lowest coverage of {len(record['claims'])} cases", f"{least:.3f}"))
    if rows:
        yield "## The compiler and the certificates\n"
        yield table(("what", "measured"), rows)


def targets(folder: Path) -> Iterator[str]:
    """How many targets are met, as the page of results counts them."""
    from benchmarks.report import CHAPTERS, judged
    from benchmarks.section import sections

    section_records = [(s, r) for modules in CHAPTERS.values() for _, s in sections(modules) if (r := s.read(folder))]
    yield "## What is missed\n"
    yield judged(section_records).split("\n")[0] + " The others are listed at the top of [the results](results.md).\n"


def page(folder: Path = RECORDS) -> str:
    parts = [part for make in (pretrained, shrinking, allocation, compiler, targets) for part in make(folder)]
    return "\n".join([INTRODUCTION, *parts])


if __name__ == "__main__":
    PAGE.write_text(page())
