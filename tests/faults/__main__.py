"""python -m tests.faults --kills 200: kill commands at random moments, and record what there was afterwards.

python -m tests.faults --kills 250 --spawned 10 --record tests/faults/records/kills.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.faults import kills
from tests.records import save_record


def summary(scenario: kills.Scenario, results: list[kills.Kill], spawned: list[kills.Kill]) -> dict[str, Any]:
    every = [*results, *spawned]
    tenths = [0] * 10
    for kill in results:
        tenths[min(9, int(10 * kill.at))] += 1
    return {
        "kills": len(every),
        "new interpreters": len(spawned),
        "old output": sum(kill.which == "old" for kill in every),
        "new output": sum(kill.which == "new" for kill in every),
        "left something": sum(bool(kill.left) for kill in every),
        "resumed": sum(kill.resumed for kill in every),
        "tenths of the run": tenths,
        "seconds of a run": round(sorted(scenario.lengths)[len(scenario.lengths) // 2], 3),
        "wrong": [kill.wrong for kill in every if kill.wrong],
    }


def run(scenario: kills.Scenario, count: int, spawned: int, rng: random.Random) -> dict[str, Any]:
    scenario.prepare()
    results, by_spawn = collect(scenario, count, rng, spawn=False), []
    if spawned:
        forked, scenario.lengths = scenario.lengths, [scenario.run(spawn=True)]
        by_spawn = collect(scenario, spawned, rng, spawn=True)
        scenario.lengths = forked
    return summary(scenario, results, by_spawn)


def collect(scenario: kills.Scenario, count: int, rng: random.Random, *, spawn: bool) -> list[kills.Kill]:
    results: list[kills.Kill] = []
    for _ in range(4 * count):
        if len(results) == count:
            break
        if (kill := kills.kill_once(scenario, rng, spawn=spawn)) is not None:
            results.append(kill)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200, help="in all")
    parser.add_argument("--spawned", type=int, default=0, help="of each command, in interpreters of their own")
    parser.add_argument("--seed", type=int, help="of the moments")
    parser.add_argument("--only", choices=list(kills.SCENARIOS))
    parser.add_argument("--record", type=Path)
    asked = parser.parse_args()
    record: dict[str, Any] = {"commands": {}, "seconds": 0.0}
    if asked.record is not None and asked.record.is_file():
        record = json.loads(asked.record.read_text())
    seed = record.get("seed", secrets.randbelow(10**6)) if asked.seed is None else asked.seed
    record["command"] = f"python -m tests.faults --kills {asked.kills} --spawned {asked.spawned} --seed {seed}"
    record["seed"] = seed
    os.environ["OMP_NUM_THREADS"] = "1"
    kills.warm_up()
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # what a kill leaves does not depend on the disk
    with tempfile.TemporaryDirectory(prefix="cmrc-faults-", dir=memory) as folder:
        chosen = [s for s in kills.scenarios(Path(folder)) if asked.only in (None, s.name)]
        each = -(-asked.kills // len(chosen))
        for scenario in chosen:
            if scenario.name in record["commands"]:
                continue
            begin = time.monotonic()
            row = run(scenario, each, asked.spawned, random.Random(f"{seed} {scenario.name}"))
            record["commands"][scenario.name] = row
            record["seconds"] = round(record["seconds"] + time.monotonic() - begin, 1)
            record["kills"] = sum(row["kills"] for row in record["commands"].values())
            record["wrong"] = [wrong for row in record["commands"].values() for wrong in row["wrong"]]
            save_record(record, asked.record)
    sys.stdout.write(json.dumps(record, indent=1) + "\n")
    return int(bool(record["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
