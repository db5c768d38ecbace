"""Write docs/results.md and its pictures from the records: every number on that page comes from there.

python -m benchmarks.report [--records FOLDER] [--out PAGE]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from benchmarks import headlines
from benchmarks.measure import RECORDS, ROOT
from benchmarks.section import Record, Section, sections

PAGE = ROOT / "docs" / "results.md"
CHAPTERS = {  # title, to the modules that measure it, in the page's order
    "The paper": ("invariance", "transformer", "abstraction", "verification", "mechanisms", "ablations", "stages"),
    "Quality, beside other selectors and libraries": (
        "curves",
        "selection",
        "allocation",
        "recovery",
        "pretrained",
        "heads",
        "masked",
    ),
    "Interventions": ("interventions", "coverage"),
    "Deployment": ("latency", "padded", "widths", "quantised"),
    "What cmrc itself costs": (
        "compile_cost",
        "peer_cost",
        "calibration",
        "planning_cost",
        "depth",
        "scaling",
        "llm_size",
        "beyond_memory",
        "processes",
        "checkpoint_size",
    ),
}
INTRODUCTION = """# Results

Written by `python -m benchmarks.report` from `benchmarks/records/`. `bash benchmarks/run.sh` measures again what has no
record of the present code, and writes this page anew; `bash benchmarks/run.sh NAME` measures one table; `--quick` only
shows that everything runs.

A ratio is ours over theirs, so below 1 means that cmrc takes less time. Both sides run in one process, one right after
the other, in alternating order; the ratio is the median over the pairs, in brackets its 95 % bootstrap interval (for
latency over whole sessions, whose pairs are not independent). The times beside it are medians too and belong to the
machine; compare ratios.
"""


def conditions(record: Record, command: str) -> str:
    machine = record["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    took = f", {record['wall_seconds']:.0f} s" if "wall_seconds" in record else ""
    quick = " A quick run: the numbers mean nothing." if record["quick"] else ""
    return (
        f"<sub>`{command}`{took}. Measured {record['when']} at commit {record['commit']}: {machine['processor']}, "
        f"{machine['cores']} cores (load {machine['load']} at the end), {machine['system']}, {record['threads']} "
        f"thread(s), Python {machine['python']}, {versions}.{quick}</sub>\n"
    )


def judged(records: Iterable[tuple[Section, Record]]) -> str:
    """How many targets are met, and which are not."""
    count, missed = 0, []
    for section, record in records:
        for r in record["ratios"]:
            if r["met"] is not None:
                count += 1
                if not r["met"]:
                    missed.append(
                        f"{r['name']}, {r['ours']} / {r['theirs']}: {r['ratio']:.3f} (target {r['target']:.3g})"
                    )
        for c in record.get("claims", ()):
            count += 1
            if not c["met"]:
                missed.append(
                    f"{section.title}: {c['name']}: {c['value']:.3f} (target {c['relation']} {c['target']:.3g})"
                )
    summary = f"{count - len(missed)} of {count} targets are met.\n"
    return summary + ("\nMissed:\n\n" + "\n".join(f"- {line}" for line in missed) + "\n" if missed else "")


def page(folder: Path = RECORDS) -> str:
    records = [(c, m, s, r) for c, modules in CHAPTERS.items() for m, s in sections(modules) if (r := s.read(folder))]
    total = sum(record.get("wall_seconds", 0) for *_, record in records)
    parts = [INTRODUCTION, judged((section, record) for _, _, section, record in records)]
    parts.append(f"The records that state their time took {total / 60:.0f} minutes together.\n")
    shown = ""
    for chapter, module, section, record in records:
        if chapter != shown:
            parts.append(f"## {chapter}\n")
            shown = chapter
        parts.append(f"### {section.title}\n\n{section.text.format(**record)}")
        if section.draw is not None:
            parts.append(f"![{section.title}](pictures/{section.record}.png)\n")
        parts.append(section.body(record))
        parts.append(conditions(record, " ".join(("python -m", f"benchmarks.{module}", *section.arguments))))
    return "\n".join(parts)


def write(folder: Path = RECORDS, out: Path = PAGE) -> None:
    """The page and the pictures beside it."""
    for modules in CHAPTERS.values():
        for _, section in sections(modules):
            if (record := section.read(folder)) is not None:
                section.picture(section.shown(record, folder), out.parent / "pictures")
    out.write_text(page(folder))
    if out == PAGE:
        headlines.PAGE.write_text(headlines.page(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the records")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page to write")
    options = parser.parse_args()
    write(options.records, options.out)


if __name__ == "__main__":
    main()
