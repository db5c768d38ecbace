"""The machinery itself: a bug is caught by its tests, a change that is no bug survives, and the copy is restored."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.mutation.mutant import ROOT

FAST = ("kernel-averaged", "first-rows-of-the-bias", "causal-queries-dropped")
HARMLESS = """
import sys
from pathlib import Path
from tests.mutation.__main__ import run_seeded
from tests.mutation.mutant import ROOT, Mutant
from tests.mutation.tree import Tree

tests = ("tests/ir/test_cost.py", "-k", "cost")
text = "return sum(elements(shape, sizes) for shape in work(node, operands))"
harmless = Mutant("harmless", text, "return 0 + sum(elements(shape, sizes) for shape in work(node, operands))", "nothing", tests)
wrong = Mutant("wrong", text, "return 1 + sum(elements(shape, sizes) for shape in work(node, operands))", "too large costs", tests)
broken = Mutant("broken", text, "return nothing_of_this_name", "a slip of the hand", tests)
tree, log = Tree(ROOT, Path(sys.argv[1])), Path(sys.argv[1]) / "log"
print([run_seeded(mutant, tree, log).passed for mutant in (harmless, wrong, harmless, broken)])
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


def test_some_bugs_are_caught(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    for _ in range(2):  # the second time the record has them
        done = run(
            "-m", "tests.mutation", *(part for name in FAST for part in ("--only", name)), "--record", str(record)
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.splitlines()[-1] == "3 caught"
    seeded = json.loads(record.read_text())["seeded"]
    assert {name: entry["outcome"] for name, entry in seeded.items()} == dict.fromkeys(FAST, "caught")
    assert all(entry["by"].startswith("tests/passes/") for entry in seeded.values())


def test_a_change_that_is_no_bug_survives(tmp_path: Path) -> None:
    done = run("-c", HARMLESS, str(tmp_path))
    assert done.stdout.splitlines()[-1:] == ["[True, False, True, False]"], done.stdout + done.stderr
