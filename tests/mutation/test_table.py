"""The table of seeded bugs does not rot: every text stands in the source once, and what becomes of it is Python."""

from __future__ import annotations

import ast
import itertools
import warnings

import pytest

from tests.mutation.mutant import ROOT, Mutant, place_of, sources
from tests.mutation.record import RECORD, Record
from tests.mutation.sample import candidates, draw
from tests.mutation.table import MUTANTS, ROOMS

SOURCE = {path: path.read_text(encoding="utf-8") for path in sources(ROOT)}


def test_there_are_bugs_for_every_room() -> None:
    assert len(MUTANTS) == sum(len(table.rows) for table in ROOMS.values()) >= 100  # no name twice
    assert all(len(table.rows) >= 10 for table in ROOMS.values())


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=lambda mutant: mutant.name)
def test_a_mutant_applies_exactly_once(mutant: Mutant) -> None:
    assert mutant.text != mutant.replacement
    modules = [path for path, text in SOURCE.items() for _ in range(text.count(mutant.text))]
    assert len(modules) == 1, f"mend the row of {mutant.name}: its text stands {len(modules)} times in the source"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        ast.parse(SOURCE[modules[0]].replace(mutant.text, mutant.replacement))


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=lambda mutant: mutant.name)
def test_the_tests_of_a_mutant_exist(mutant: Mutant) -> None:
    paths = list(itertools.takewhile(lambda argument: argument != "-k", mutant.tests))
    assert paths
    assert all((ROOT / path.split("::")[0]).exists() for path in paths)


def test_a_text_that_stands_twice_is_refused() -> None:
    with pytest.raises(LookupError, match=r"many: its text stands \d+ times in the source, not once"):
        place_of(ROOT, Mutant("many", "from __future__ import annotations", "", "", ()))


def test_every_bug_that_was_run_was_caught() -> None:
    """What is recorded; `python -m tests.mutation --record` runs the rest."""
    seeded = Record.open(RECORD).data["seeded"]
    assert len(seeded) >= 250
    assert seeded.keys() <= MUTANTS.keys()
    assert [name for name, entry in seeded.items() if entry["outcome"] != "caught"] == []


def test_drawn_mutants_are_python_and_have_names_of_their_own() -> None:
    every = candidates(ROOT)
    assert len({mutant.name for mutant in every}) == len(every) > 1000
    for mutant in draw(ROOT, 50, seed=0):
        ast.parse(mutant.applied((ROOT / mutant.module).read_bytes()))


def test_a_draw_goes_on_where_a_smaller_one_ends() -> None:
    assert draw(ROOT, 50, seed=3) == draw(ROOT, 80, seed=3)[:50] != draw(ROOT, 50, seed=4)
