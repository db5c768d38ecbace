"""Files that were changed at random are read or refused; what failed once stays mended; and a failure would be noticed."""

from __future__ import annotations

import random
import secrets
from collections import Counter
from pathlib import Path

import pytest

from cmrc.program.plan import Plan
from tests.loaders import mutate, reading, samples

REGRESSIONS = sorted((Path(__file__).parent / "regressions").glob("*.bin"))
KINDS = list(mutate.FORMATS)
FIXED, FRESH = 120, 40
BY_COMMAND = 10  # one in so many


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> reading.Ground:
    return reading.Ground(tmp_path_factory.mktemp("loaders"))


def run(ground: reading.Ground, kind: str, first: int, count: int) -> Counter[str]:
    """The outcomes of so many seeds, none of them a failure."""
    valid, outcomes = samples.samples(kind), Counter[str]()
    for seed in range(first, first + count):
        rng = random.Random(seed)
        case = mutate.mutate(kind, rng.choice(valid), rng)
        outcome = reading.judge(ground, kind, case, command=None if seed % BY_COMMAND else seed // BY_COMMAND)
        assert not outcome.failed, f"{kind}, seed {seed}: {outcome}"
        outcomes[outcome.kind] += 1
    return outcomes


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_read(ground: reading.Ground, kind: str) -> None:
    for i, sample in enumerate(samples.samples(kind)):
        assert reading.judge(ground, kind, sample) == reading.Outcome("read"), i


@pytest.mark.parametrize("kind", KINDS)
def test_fixed_seeds(ground: reading.Ground, kind: str) -> None:
    outcomes = run(ground, kind, 0, FIXED)
    assert outcomes["refused"] > FIXED / 4
    assert outcomes["read"] > FIXED / 100  # some changes do no harm: else nothing behind the loader would be reached


@pytest.mark.parametrize("kind", KINDS)
def test_fresh_seeds(ground: reading.Ground, kind: str) -> None:
    run(ground, kind, secrets.randbelow(10**9), FRESH)


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: path.stem)
def test_what_failed_once(ground: reading.Ground, path: Path) -> None:
    kind = path.name.partition("-")[0]
    for command in (None, 0, 1):
        outcome = reading.judge(ground, kind, path.read_bytes(), command=command)
        assert not outcome.failed, outcome


@pytest.mark.parametrize("command", [None, 0])
def test_a_raw_exception_would_be_noticed(
    ground: reading.Ground, monkeypatch: pytest.MonkeyPatch, command: int | None
) -> None:
    def load(path: Path) -> Plan:
        raise KeyError(path)

    monkeypatch.setattr(Plan, "load", load)
    assert reading.judge(ground, "plan", b"{}", command=command).kind == "raw exception"
