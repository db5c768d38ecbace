"""python -m tests.fuzz: run cases by seed, in processes of their own, into a record that resumes.

    python -m tests.fuzz --cases 50000 --processes 2 --record record.json
    python -m tests.fuzz --first 170 --cases 1 --show

A process that dies, or takes longer than a minute of processor time over one case or five seconds to make it, is replaced; a case
that kills or hangs it while cmrc works is a failure, one that does so while the graph is still being made, or while onnxruntime
runs the original, says something about onnxruntime only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import re
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil

from tests.fuzz import worker
from tests.fuzz.judge import Outcome
from tests.records import commit, save_record

ROOT = Path(__file__).parents[2]
CHUNK = 25
PATIENCE = {
    "generate": 5.0,
    "original": 60.0,
    "judge": 60.0,
    "minimise": 120.0,
    "": 60.0,
}  # of processor time; onnxruntime itself may hang


class Process:
    """One child and what it is at."""

    def __init__(self, failures: Path | None, folder: Path | None) -> None:
        self.failures, self.folder = failures, folder
        self.left: list[int] = []
        self.at: tuple[int, str] = (-1, "")
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.child = context.Process(target=worker.serve, args=(other, self.failures, self.folder), daemon=True)
        self.child.start()
        self.since = self.spent()
        other.close()

    def spent(self) -> float:
        """Processor time of the child: on a busy machine a case may wait for long, and does not hang."""
        try:
            times = psutil.Process(self.child.pid).cpu_times()
        except psutil.Error:  # it has just ended: the pipe will say so
            return 0.0
        return float(times.user + times.system)

    def give(self, seeds: list[int]) -> None:
        self.left, self.since = list(seeds), self.spent()
        self.pipe.send(seeds)

    def replaced(self, kind: str) -> worker.Told:
        """The case that the child died or hung over; another child goes on behind it."""
        seed, stage = self.at
        if seed < 0:
            raise RuntimeError("a process of the fuzzer dies before its first case")
        self.child.kill()
        self.child.join()
        self.pipe.close()
        self._start()
        self.left = [s for s in self.left if s > seed]
        if self.left:
            self.pipe.send(self.left)
        outcome = (
            Outcome("no graph", f"{kind} in onnxruntime")
            if stage in ("generate", "original")
            else Outcome(kind, f"during {stage}")
        )
        return worker.Told(seed, outcome)


def digest_of_code() -> str:
    """Of all sources of cmrc and of the fuzzer, so that a record says which graphs were judged by the same code."""
    digest = hashlib.sha256()
    for folder in ("cmrc", "passes", "tests/fuzz"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


class Record:
    """Counts, kept in a file. `code` has one entry per start: which code judged how many graphs."""

    def __init__(self, path: Path | None, first: int) -> None:
        self.path = path
        self.data: dict[str, Any] = {
            "first": first, "next": first, "seconds": 0.0, "graphs": 0, "folded": 0, "folded_and_seen": 0, "kept": 0,
            "refused": 0, "undecided": 0, "without_site": 0, "no_graph": 0, "grown": 0, "plans_refused": 0, "second_look": 0, "worst": 0.0, "in_float64": 0, "worst_in_float64": 0.0, "reasons": {},
            "opsets": {}, "ops": {}, "failures": [], "mended": [], "code": [],
        }  # fmt: skip
        if path is not None and path.is_file():
            self.data.update(json.loads(path.read_text()))
        self.data["code"].append(
            {"digest": digest_of_code(), "commit": commit(), "from_seed": self.data["next"], "graphs": 0}
        )
        # What failed before is tried again first: it is mended, or fails still.
        self.again = {int(failure["seed"]): failure for failure in self.data["failures"] if failure["seed"] >= 0}
        self.data["failures"] = []
        self.before = float(self.data["seconds"])
        self.start = time.monotonic()

    def add(self, verdict: worker.Told) -> None:
        data, outcome = self.data, verdict.outcome
        former = self.again.pop(verdict.seed, None)
        if former is not None and not outcome.failed:
            data["mended"].append(former)
        if outcome.kind == "no graph":
            data["no_graph"] += 1
            return
        if former is None:
            data["graphs"] += 1
            data["code"][-1]["graphs"] += 1
        data["second_look"] += outcome.slow
        for table, counts in (("opsets", {str(verdict.opset): 1}), ("ops", verdict.ops)):
            for name, count in counts.items():
                data[table][name] = data[table].get(name, 0) + count
        if outcome.kind == "equal":
            data["folded"] += 1
            data["folded_and_seen"] += outcome.moved
            data["grown"] += outcome.grown
            if outcome.apart is not None:
                data["in_float64"] += 1
                data["worst_in_float64"] = max(data["worst_in_float64"], float(f"{outcome.apart:.1e}"))
            data["worst"] = max(data["worst"], round(outcome.error, 3))
        elif outcome.kind == "no site":
            data["without_site"] += 1
        elif outcome.failed:
            data["failures"].append(
                {"seed": verdict.seed, "kind": outcome.kind, "detail": outcome.detail, "file": verdict.file}
            )
        else:
            data[outcome.kind] += 1
        for detail in [*verdict.refused, *([outcome.detail] if outcome.kind == "undecided" else [])]:
            reason = re.sub(r"'[^']*'|\[[^]]*\]| \(and \d+ more\)|[\d.]+", "#", detail)[:120]
            data["reasons"][reason] = data["reasons"].get(reason, 0) + 1
        data["plans_refused"] += len(verdict.refused)

    def save(self) -> None:
        self.data["seconds"] = round(self.before + time.monotonic() - self.start, 1)
        if self.path is not None:
            ordered = {**self.data, "failures": [*self.data["failures"], *self.again.values()]}
            for key in ("reasons", "ops", "opsets"):
                ordered[key] = dict(sorted(self.data[key].items(), key=lambda item: (-item[1], item[0])))
            partial = self.path.with_suffix(".part")
            partial.write_text(json.dumps(ordered, indent=1) + "\n")
            partial.replace(self.path)

    def line(self) -> str:
        data = self.data
        spent = max(time.monotonic() - self.start, 1e-9)
        return (
            f"{data['graphs']} graphs, {data['folded']} folded cleanly ({data['folded_and_seen']} of them moved an output), "
            f"{data['kept']} kept, {data['refused']} refused, {data['undecided']} undecided, "
            f"{len(data['failures'])} failures, next seed {data['next']}, {spent:.0f} s"
        )


def campaign(
    record: Record, last: int, *, minutes: float, processes: int, failures: Path | None, folder: Path | None, say: Any
) -> None:
    """Run seeds up to `last`, or until the time is over."""
    until = time.monotonic() + 60 * minutes
    crew = [Process(failures, folder) for _ in range(processes)]
    following, again = int(record.data["next"]), sorted(record.again)
    said = time.monotonic()
    try:
        while True:
            for process in crew:
                if not process.left and again:
                    process.give(again)
                    again = []
                elif not process.left and following < last and time.monotonic() < until:
                    seeds = list(range(following, min(following + CHUNK, last)))
                    following = seeds[-1] + 1
                    process.give(seeds)
            busy = [process for process in crew if process.left]
            if not busy:
                break
            ready = wait([process.pipe for process in busy], timeout=1.0)
            for process in busy:
                if process.pipe in ready:
                    try:
                        message = process.pipe.recv()
                    except (EOFError, OSError):
                        record.add(process.replaced("crash"))
                        continue
                    process.since = process.spent()
                    if isinstance(message, tuple):
                        process.at = message
                    elif message is not None:
                        record.add(message)
                        if message.outcome.failed:
                            say(f"seed {message.seed}: {message.outcome.kind}: {message.outcome.detail[:300]}")
                        process.left = [s for s in process.left if s > message.seed]
                elif process.spent() - process.since > PATIENCE[process.at[1]]:
                    record.add(process.replaced("hang"))
            record.data["next"] = min(
                [following, *(p.left[0] for p in crew if p.left and p.left[0] >= record.data["next"])]
            )
            if time.monotonic() - said > 30:
                said = time.monotonic()
                record.save()
                say(record.line())
    finally:
        for process in crew:
            process.child.kill()
            process.child.join()
        record.save()
        say(record.line())


def _modules(chosen: argparse.Namespace) -> Iterator[tuple[str, Outcome]]:
    from tests.fuzz import torch_judge

    for seed in range(chosen.first, chosen.first + chosen.cases):
        outcome, case, _ = torch_judge.run(seed)
        if outcome.failed and case is not None and chosen.failures is not None:
            small = torch_judge.minimise(case, outcome)
            torch_judge.save(small, chosen.failures / f"torch-{outcome.kind}-{seed}.json", detail=outcome.detail)
        yield f"seed {seed}", outcome


def _node_models() -> Iterator[tuple[str, Outcome]]:
    from tests.fuzz.node_models import node_models, outcomes

    for model in node_models():
        yield from outcomes(model)


def _tally(results: Iterator[tuple[str, Outcome]], record: Path | None, *, until: float, say: Any) -> int:
    """Count outcomes by kind, and name what failed."""
    start, counts, failures = time.monotonic(), dict[str, int](), list[dict[str, str]]()
    for name, outcome in results:
        counts[outcome.kind] = counts.get(outcome.kind, 0) + 1
        if outcome.failed:
            failures.append({"case": name, "kind": outcome.kind, "detail": outcome.detail})
            say(f"{name}: {outcome.kind}: {outcome.detail[:300]}")
        if time.monotonic() > until:
            break
    total = {
        "cases": sum(counts.values()),
        "seconds": round(time.monotonic() - start, 1),
        **counts,
        "failures": failures,
    }
    say(json.dumps({name: value for name, value in total.items() if name != "failures"}))
    save_record(total, record)
    return 1 if failures else 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--cases", type=int, default=1000, help="how many seeds")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so many minutes")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--record", type=Path, help="a JSON file; goes on where it stopped")
    parser.add_argument("--failures", type=Path, help="a folder for failures, made small")
    parser.add_argument("--folder", type=Path, help="where models are written while they are compared")
    parser.add_argument("--torch", action="store_true", help="random torch modules, in this process")
    parser.add_argument(
        "--node-models", action="store_true", help="the node tests that ship with onnx, in this process"
    )
    chosen = parser.parse_args(arguments)
    if chosen.failures is not None:
        chosen.failures.mkdir(parents=True, exist_ok=True)

    def say(line: str) -> None:
        sys.stderr.write(line + "\n")

    if chosen.torch or chosen.node_models:
        some = _modules(chosen) if chosen.torch else _node_models()
        return _tally(some, chosen.record, until=time.monotonic() + 60 * chosen.minutes, say=say)
    record = Record(chosen.record, chosen.first)
    last = int(record.data["first"]) + chosen.cases
    campaign(
        record, last, minutes=chosen.minutes, processes=chosen.processes, failures=chosen.failures,
        folder=chosen.folder, say=say,
    )  # fmt: skip
    return 1 if record.data["failures"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
