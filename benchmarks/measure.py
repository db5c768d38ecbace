"""Timing by pairs, and the record of a run.

Two things are compared only inside one process, one right after the other, in alternating order: a busy machine then
slows both alike. The result is the median of the ratios of the pairs, with a bootstrap interval of that median.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from threadpoolctl import threadpool_limits

from cmrc.files import write_whole
from cmrc.hosts.onnx.bench import median_ratio

Item = TypeVar("Item")
ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "records"
QUICK = ROOT / "benchmarks" / "quick"  # not in git: what quick runs write, since their numbers mean nothing
PACKAGES = (
    "torch", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "torch-pruning", "onnxsim", "onnxslim", "transformers", "numpy",
)  # fmt: skip
STARTED = time.perf_counter()
console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Ratio:
    """seconds(ours) / seconds(theirs): the median of the pairs, its 95 % interval, and the target if there is one."""

    name: str
    ours: str
    theirs: str
    ratio: float
    low: float
    high: float
    pairs: int
    ours_seconds: float
    theirs_seconds: float
    target: float | None = None

    @property
    def met(self) -> bool | None:
        return None if self.target is None else self.ratio <= self.target


def compare(
    name: str,
    ours: tuple[str, Callable[[], Callable[[], object]]],
    theirs: tuple[str, Callable[[], Callable[[], object]]],
    *,
    pairs: int,
    target: float | None = None,
    warm_up: int = 1,
) -> Ratio:
    """Time two things in alternating pairs. Each is a function that prepares, untimed, and returns the step to time."""
    seconds: list[tuple[float, float]] = []
    with settled():
        for i in progress(range(-warm_up, pairs), name):
            if i % 2:
                second, first = timed(theirs[1]()), timed(ours[1]())
            else:
                first, second = timed(ours[1]()), timed(theirs[1]())
            if i >= 0:
                seconds.append((first, second))
    return from_pairs(name, ours[0], theirs[0], np.array(seconds), target)


@contextmanager
def settled() -> Iterator[None]:
    """What lies around from before is not searched for garbage again: neither in somebody's timed step, nor right before
    it, which would leave the caches cold for a step of milliseconds."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def timed(step: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    gc.collect()
    start = clock()
    result = step()
    seconds = clock() - start
    del result
    return seconds


def from_pairs(name: str, ours: str, theirs: str, seconds: np.ndarray, target: float | None = None) -> Ratio:
    """The median ratio of paired times, [pairs, 2] or [groups, pairs, 2]; the interval resamples pairs or groups."""
    ratio, low, high = median_ratio(seconds)
    mine, other = (float(np.median(seconds[..., side])) for side in (0, 1))
    return Ratio(name, ours, theirs, ratio, low, high, seconds[..., 0].size, mine, other, target)


def progress(items: Sequence[Item] | Iterable[Item], what: str) -> Iterator[Item]:
    yield from track(items, what, console=console, transient=True, disable=not console.is_terminal)


# ---------------------------------------------------------------- the command line and the record


def arguments(description: str, record: str) -> argparse.Namespace:
    return parser(description, record).parse_args()


class Format(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """A description as it is written, and the defaults."""


class Parser(argparse.ArgumentParser):
    """Says where the record goes. A quick run never writes among the records."""

    record = ""  # its file's name, with {options} in it

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options = super().parse_args(args, namespace)
        if options.json == self.get_default("json"):
            options.json = (QUICK if options.quick else RECORDS) / self.record.format(**vars(options))
        elif options.quick and options.json.resolve().is_relative_to(RECORDS):
            self.error(f"a quick run is no record: give --json a place outside of {RECORDS.relative_to(ROOT)}")
        return options


def parser(description: str, record: str) -> argparse.ArgumentParser:
    """What every benchmark takes; one with options of its own adds them, and may name its record by them: selection_{part}.json."""
    made_parser = Parser(description=description, formatter_class=Format)
    made_parser.record = record
    made_parser.add_argument("--quick", action="store_true", help="small sizes and few pairs, to see that it runs")
    made_parser.add_argument(
        "--json",
        type=Path,
        default=RECORDS / record,
        metavar="OUT",
        help="where to write the record; with --quick in benchmarks/quick if absent",
    )
    made_parser.add_argument(
        "--threads", type=int, default=1, help="threads of torch, of numpy, and of an onnxruntime session"
    )
    return made_parser


def use_threads(count: int) -> None:
    """For torch, and for the linear algebra under numpy."""
    import torch

    torch.set_num_threads(count)
    threadpool_limits(count)


def machine() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def versions() -> dict[str, str]:
    import cmrc

    known = {"cmrc": cmrc.__version__}
    for package in PACKAGES:
        try:
            known[package] = version(package)
        except PackageNotFoundError:
            continue
    return known


def commit() -> str:
    """The commit that was measured, marked where the code differs from it."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)

    try:
        description_of = git("describe", "--always")
        changed = git("status", "--porcelain", "--", "*.py").stdout.strip()
    except OSError:
        return "unknown"
    return description_of.stdout.strip() + ("-dirty" if changed else "") if not description_of.returncode else "unknown"


@cache
def code() -> str:
    """A digest of the compiler and the benchmarks: what a record's numbers come from."""
    digest = hashlib.sha256()
    for path in sorted((*ROOT.glob("cmrc/**/*.py"), *ROOT.glob("passes/*.py"), *ROOT.glob("benchmarks/*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class Resumed:
    """The parts of a long run, each kept as soon as it is there: the same command goes on after an interruption.

    value = resumed("seed 3", lambda: compute(3))
    """

    def __init__(self, out: Path) -> None:
        self.path = out.with_suffix(".part.json")
        stored = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.parts: dict[str, Any] = stored["parts"] if stored.get("code") == code() else {}
        self.seconds_before: float = stored["seconds"] if self.parts else 0.0

    def __call__(self, name: str, compute: Callable[[], Any]) -> Any:
        if name not in self.parts:
            self.parts[name] = compute()
            document = {"code": code(), "seconds": self.seconds, "parts": self.parts}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(document).encode())
        return self.parts[name]

    @property
    def seconds(self) -> float:
        """What all runs took together, for the record's `wall_seconds`."""
        return self.seconds_before + time.perf_counter() - STARTED

    def forget(self) -> None:
        """The record is written."""
        self.path.unlink(missing_ok=True)


def write_record(out: Path, what: str, ratios: Sequence[Ratio], options: argparse.Namespace, **more: Any) -> None:
    """Write the record and show its ratios."""
    document = {
        "what": what,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "code": code(),
        "wall_seconds": round(time.perf_counter() - STARTED, 1),
        "quick": options.quick,
        "threads": options.threads,
        "machine": machine(),
        "versions": versions(),
        "ratios": [{**asdict(ratio), "met": ratio.met} for ratio in ratios],
        **more,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, (json.dumps(document, indent=1) + "\n").encode())
    if not ratios:
        return
    table = Table("comparison", "ours", "theirs", "ratio", "95 % interval", "target", "met", title=what, box=None)
    for r in ratios:
        met = "" if r.met is None else "yes" if r.met else "no"
        target = "" if r.target is None else f"{r.target:.3g}"
        cells = (r.name, f"{r.ours}: {show(r.ours_seconds)}", f"{r.theirs}: {show(r.theirs_seconds)}")
        table.add_row(*cells, f"{r.ratio:.3f}", f"{r.low:.3f}-{r.high:.3f}", target, met)
    Console(width=160).print(table)


def show(seconds: float) -> str:
    for scale, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
