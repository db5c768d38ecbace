"""Bugs put into the source one at a time: the suite must notice every one.

mutant.py     a seeded bug as a row: source text, its replacement, and the tests that must fail
in_*.py       the rows, one module per room                     table.py      all of them
tree.py       a copy of the project, with one mutant in it      runner.py     tests in a fork of a process with all imports
sample.py     mutants drawn from the syntax tree of a module    lines.py      which test executes which line
explained.py  why drawn mutants that nobody notices are no bugs
__main__.py   `python -m tests.mutation`                        record.py     what became of each, in record.json
"""
