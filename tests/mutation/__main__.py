"""python -m tests.mutation: put bugs into a copy of the project one at a time, and see whether the tests notice.

    python -m tests.mutation                        the seeded bugs of the table
    python -m tests.mutation --only 'border-*'      some of them
    python -m tests.mutation --record               into tests/mutation/record.json, going on where it was interrupted
    python -m tests.mutation --sampled 200          mutants drawn from the syntax trees of passes and op tables

A mutant that the tests notice is `caught`. One that they do not is `survived`, one whose tests did not end is `undecided`:
both make the command fail.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.mutation import runner, sample
from tests.mutation.mutant import ROOT, Mutant, place_of
from tests.mutation.record import RECORD, Record, tell
from tests.mutation.runner import Ran, run_tests
from tests.mutation.table import MUTANTS
from tests.mutation.tree import Tree

FEW = 5  # mutants for which it does not pay to import everything beforehand
TIMEOUT = 300.0  # seconds for the tests of one mutant


def run_seeded(mutant: Mutant, tree: Tree, log: Path) -> Ran:
    """The tests of a mutant, on the copy with the mutant in it."""
    module = place_of(tree.root, mutant)
    text = module.read_text(encoding="utf-8").replace(mutant.text, mutant.replacement)
    with tree.changed(module, text):
        return run_tests(tree.root, mutant.tests, timeout=TIMEOUT, log=log)


def entry_of(ran: Ran, digest: str, **more: Any) -> dict[str, Any]:
    outcome = "survived" if ran.passed else "caught" if ran.in_time else "undecided"
    return {"outcome": outcome, "by": ran.failed, "seconds": round(ran.seconds, 1), "digest": digest, **more}


def chosen(patterns: list[str] | None) -> list[Mutant]:
    """The mutants of these names or globs; all without any."""
    return [m for m in MUTANTS.values() if any(fnmatch.fnmatchcase(m.name, p) for p in patterns or ["*"])]


def seeded(options: argparse.Namespace, record: Record, tree: Tree, log: Path) -> Iterator[str]:
    record.forget("seeded", set(MUTANTS))
    caught_by: set[str] = set()
    for mutant in chosen(options.only):
        known = record.data["seeded"].get(mutant.name, {})
        if not options.again and (known.get("outcome"), known.get("digest")) == ("caught", mutant.digest):
            yield "caught"
            continue
        try:
            entry = entry_of(run_seeded(mutant, tree, log), mutant.digest)
        except LookupError as error:
            entry = {"outcome": "does not apply", "by": str(error), "seconds": 0.0, "digest": mutant.digest}
        record.put("seeded", mutant.name, entry)
        tell(mutant.name, entry)
        if entry["outcome"] == "caught" and "::" in entry["by"]:
            caught_by.add(entry["by"])
        yield entry["outcome"]
    require_sound(caught_by, tree, log)


def require_sound(tests: set[str], tree: Tree, log: Path) -> None:
    """That the tests which caught a mutant pass without one: a test that always fails catches nothing."""
    if not tests:
        return
    ran = run_tests(tree.root, sorted(tests), timeout=TIMEOUT + 10 * len(tests), log=log)
    if not ran.passed:
        end = "\n".join(log.read_text(encoding="utf-8").splitlines()[-20:])
        raise SystemExit(f"{end}\n{ran.failed} fails without any mutant")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="a mutant by name or glob; may be repeated")
    parser.add_argument(
        "--record", nargs="?", const=RECORD, type=Path, help="the file of results; those in it are not run again"
    )
    parser.add_argument("--again", action="store_true", help="run what the record has, too")
    parser.add_argument("--sampled", type=int, metavar="N", help="N mutants drawn from passes and op tables instead")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--lines", type=Path, help="which test executes which line: what tests.mutation.lines wrote")
    options = parser.parse_args()
    record = Record.open(options.record)
    with tempfile.TemporaryDirectory(prefix="cmrc-mutants-") as folder:
        tree, log = Tree(ROOT, Path(folder)), Path(folder) / "tests.log"
        if options.sampled is not None or len(chosen(options.only)) > FEW:
            runner.preload()
        if options.sampled is None:
            outcomes = Counter(seeded(options, record, tree, log))
        else:
            outcomes = Counter(sample.outcomes(options, record, tree, log))
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())))  # noqa: T201
    return 0 if set(outcomes) <= {"caught", "explained"} else 1


if __name__ == "__main__":
    sys.exit(main())
