"""The process that fuzzes: `python -m tests.loaders.engine KIND FOLDER SECONDS [SEED]`. It needs atheris, and Python's coverage of cmrc.

FOLDER/corpus     what reached new code            FOLDER/failures    cases that failed, one per place in the code
FOLDER/count.json cases and outcomes of this process, written every second
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["cmrc"]):  # before anything else imports cmrc
    from tests.loaders import mutate, reading, samples

LONGEST = 20_000  # bytes of a case
BY_COMMAND = 20  # one in so many cases goes by the command line
WAIT = 120  # seconds after which libFuzzer ends a process that does not answer


def main(kind: str, folder: Path, seconds: int, seed: int) -> None:
    reading.bound_memory()
    scratch = tempfile.TemporaryDirectory(prefix="cmrc-loaders-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    ground = reading.Ground(Path(scratch.name))
    for name in ("corpus", "failures", "artifacts"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for i, sample in enumerate(samples.samples(kind)):
        (folder / "corpus" / f"sample-{i}").write_bytes(sample)
    counts: Counter[str] = Counter()
    begin = written = time.monotonic()

    def one(data: bytes) -> None:
        nonlocal written
        (folder / "last").write_bytes(data)
        command = counts["cases"] // BY_COMMAND if not counts["cases"] % BY_COMMAND else None
        outcome = reading.judge(ground, kind, data, command=command)
        counts["cases"] += 1
        counts["by command"] += command is not None
        counts[outcome.kind] += 1
        if outcome.failed:
            keep(folder / "failures", data, outcome)
        if time.monotonic() - written > 1:
            written = time.monotonic()
            summary = {"counts": counts, "seconds": round(written - begin, 1), "memory": reading.peak_memory()}
            (folder / "count.new").write_text(json.dumps(summary))
            os.replace(folder / "count.new", folder / "count.json")

    def mutated(data: bytes, longest: int, number: int) -> bytes:
        rng = random.Random(number)
        if rng.random() < 0.1:
            return bytes(atheris.Mutate(data, longest))
        case = mutate.mutate(kind, data, rng)
        return case if len(case) <= longest else bytes(atheris.Mutate(data, longest))

    options = [
        f"-max_total_time={seconds}", f"-max_len={LONGEST}", f"-timeout={WAIT}", "-rss_limit_mb=0", f"-seed={seed}",
        f"-artifact_prefix={folder}/artifacts/", "-print_final_stats=1", "-len_control=0", str(folder / "corpus"),
    ]  # fmt: skip
    atheris.Setup([sys.argv[0], *options], one, custom_mutator=mutated)
    atheris.Fuzz()


def keep(folder: Path, case: bytes, outcome: reading.Outcome) -> None:
    """The smallest case per place."""
    name = "".join(c if c.isalnum() else "-" for c in f"{outcome.kind} {outcome.place}")[:120]
    file = folder / f"{name}.bin"
    if not file.exists() or file.stat().st_size > len(case):
        file.write_bytes(case)
        file.with_suffix(".txt").write_text(f"{outcome.kind}: {outcome.detail}\n{outcome.place}\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 1)
