"""python -m tests.loaders KIND --minutes 20: fuzz what reads plans, stats, recipes, models or data, guided by coverage.

    pip install atheris                             (in an environment of its own: it is not part of the development set)
    python -m tests.loaders plan --minutes 20 --folder scratch --record tests/loaders/records/plan.json

The corpus and the failures stay in the folder, and the record goes on where it was. What failed in an earlier run is tried
again at the end: it is mended, or fails still.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.loaders import mutate, reading
from tests.records import save_record

ROUND = 240  # seconds of one process


def one_round(kind: str, folder: Path, seconds: int, seed: int) -> dict[str, Any]:
    """Counts of one process; a case that ends it is kept as a failure."""
    (folder / "count.json").unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.loaders.engine", kind, str(folder), str(seconds), str(seed)]
    begin = time.monotonic()
    with (folder / "log").open("ab") as log:
        ended = subprocess.run(command, stdout=log, stderr=log, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    path = folder / "count.json"
    summary: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"counts": {}, "memory": 0}
    summary["seconds"] = time.monotonic() - begin
    if ended.returncode:
        summary["counts"]["process died"] = 1
        case = (folder / "last").read_bytes()
        name = f"process-died-{abs(hash(case)) % 10**8}"
        (folder / "failures" / f"{name}.bin").write_bytes(case)
        tail = (folder / "log").read_bytes()[-1500:].decode(errors="replace")
        (folder / "failures" / f"{name}.txt").write_text(f"process died: exit code {ended.returncode}\n{tail}\n")
    return summary


def fails_still(kind: str, case: Path) -> bool:
    """In a process of its own, which it may take with it."""
    call = [sys.executable, "-m", "tests.loaders", kind, "--show", str(case)]
    return bool(subprocess.run(call, capture_output=True, check=False).returncode)


def show(kind: str, case: Path) -> int:
    """Print what becomes of one case; 1 if that is a failure."""
    reading.bound_memory()
    with tempfile.TemporaryDirectory() as folder:
        ground = reading.Ground(Path(folder))
        outcomes = [reading.judge(ground, kind, case.read_bytes(), command=command) for command in (None, 0, 1)]
    sys.stdout.writelines(f"{outcome.kind}: {outcome.detail} {outcome.place}\n" for outcome in outcomes)
    return int(any(outcome.failed for outcome in outcomes))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.loaders", description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=list(mutate.FORMATS))
    parser.add_argument("--minutes", type=float, default=20.0, help="in all, with those of the record")
    parser.add_argument("--folder", type=Path, help="for the corpus and the failures")
    parser.add_argument("--record", type=Path, help="where to count; goes on from what is there")
    parser.add_argument("--show", type=Path, help="read this case only")
    asked = parser.parse_args()
    if asked.show is not None:
        return show(asked.kind, asked.show)
    if asked.folder is None:
        parser.error("--folder is missing")
    folder = asked.folder.absolute()
    (folder / "failures").mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"kind": asked.kind, "seconds": 0.0, "memory": 0, "rounds": 0, "counts": {}}
    if asked.record is not None and asked.record.is_file():
        record = json.loads(asked.record.read_text())
    while (left := asked.minutes * 60 - record["seconds"]) > 1:
        summary = one_round(asked.kind, folder, max(2, min(ROUND, int(left))), record["rounds"] + 1)
        record["counts"] = dict(Counter(record["counts"]) + Counter(summary["counts"]))
        record["seconds"] = round(record["seconds"] + summary["seconds"], 1)
        record["memory"] = max(record["memory"], summary["memory"])
        record["rounds"] += 1
        save_record(record, asked.record)
    cases = sorted((folder / "failures").glob("*.bin"))
    places = {case: case.with_suffix(".txt").read_text().splitlines()[0][:200] for case in cases}
    record["failing"] = [places[case] for case in cases if fails_still(asked.kind, case)]
    record["mended"] = [place for place in places.values() if place not in record["failing"]]
    record["corpus"] = len(list((folder / "corpus").iterdir()))
    record["engine"] = f"atheris {version('atheris')}"
    record["limits"] = {"memory": reading.MEMORY, "seconds": reading.SECONDS}
    record["command"] = f"python -m tests.loaders {asked.kind} --minutes {asked.minutes:g} --folder scratch"
    save_record(record, asked.record)
    sys.stdout.write(json.dumps(record, indent=1) + "\n")
    return int(bool(record["failing"]))


if __name__ == "__main__":
    sys.exit(main())
