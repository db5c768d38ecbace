"""Every table, one after the other, then docs/results.md.

python -m benchmarks                 what has no record of the present code; a stopped run goes on
python -m benchmarks latency depth   these modules or records
python -m benchmarks --quick         everything at a small size in a scratch folder, to see that it runs
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.measure import RECORDS, ROOT, code, console
from benchmarks.section import Section, sections


def chosen(names: list[str]) -> list[tuple[str, Section]]:
    listed = [each for modules in report.CHAPTERS.values() for each in sections(modules)]
    known = {name for module, section in listed for name in (module, section.record)}
    if unknown := sorted(set(names) - known):
        raise SystemExit(f"no table is called {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return [each for each in listed if not names or {each[0], each[1].record} & set(names)]


def measure(tables: list[tuple[str, Section]], folder: Path, *, quick: bool, again: bool, jobs: int) -> list[str]:
    """Run each table's command in a process of its own. Returns the names of those that failed."""

    def one(numbered: tuple[int, tuple[str, Section]]) -> bool:
        i, (module, section) = numbered
        name, before = f"{i} of {len(tables)}: {section.record}", section.read(folder)
        if before is not None and not again and before.get("code") == code():
            console.print(f"{name} has a record of this code")
            return True
        command = [sys.executable, "-m", f"benchmarks.{module}", *section.arguments, "--json", section.path(folder)]
        console.rule(name)
        start = time.perf_counter()
        quiet: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} if quick else {}
        done = subprocess.run([*command, *(["--quick"] if quick else [])], cwd=ROOT, **quiet)
        if done.returncode and quick:
            console.print(done.stdout, markup=False, highlight=False)
        console.print(f"{name}: {'failed' if done.returncode else 'done'} in {time.perf_counter() - start:.0f} s")
        return not done.returncode

    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(one, enumerate(tables, start=1)))
    return [section.record for (_, section), fine in zip(tables, results, strict=True) if not fine]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="modules or records; all of them if absent")
    parser.add_argument("--quick", action="store_true", help="small sizes; leaves records and page alone")
    parser.add_argument("--again", action="store_true", help="measure although there is a record of this code")
    parser.add_argument("--jobs", type=int, default=1, help="tables at once; times are only fair with one")
    options = parser.parse_args()
    tables = chosen(options.names)
    if options.quick:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            failed = measure(tables, folder, quick=True, again=True, jobs=options.jobs)
            report.write(folder, folder / "results.md")
    else:
        failed = measure(tables, RECORDS, quick=False, again=options.again, jobs=options.jobs)
        report.write()
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
