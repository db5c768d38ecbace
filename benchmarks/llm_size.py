"""A model of a billion parameters, ONNX to ONNX, in little memory: every FFN of a Llama to three quarters.

python -m benchmarks.llm_size [--quick] [--json OUT] [--folder FOLDER]

The model is written to FOLDER (kept if given), then a process of its own traces, plans, lowers and saves it. That process
may allocate only twice the largest weight that changes and a constant (the kernel refuses more: RLIMIT_DATA), and says
how much it held at most. At the end onnxruntime runs the result and the clamped original on a few tokens.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import cmrc
import cmrc.hosts.onnx.host  # so that the limit counts no code that is imported late
from benchmarks import llama
from benchmarks.measure import console, parser, show, write_record
from benchmarks.section import Record, Section, megabytes, table, verdict

SMALL = llama.Config(layers=4, width=256, ffn=1024, heads=8, served=2, vocabulary=512, positions=128)
CONSTANT = 64 << 20  # bytes beside weights: graphs, plan, report, buffers of files
TOKENS = (1, 8)


def plan_for(program: cmrc.Program, config: llama.Config) -> cmrc.Plan:
    """A quarter of the units of every FFN, each replaced by a constant of its own."""
    random, plan = np.random.default_rng(0), cmrc.Plan(program)
    for site in config.sites():
        units = np.sort(random.choice(config.ffn, config.ffn // 4, replace=False))
        plan.do(site, units=units.tolist(), constant=0.2 * random.standard_normal(len(units)))
    return plan


# ---------------------------------------------------------------- the process that is measured


class Watch:
    """The memory that this process held at most, sampled: `anonymous` is its own, `total` counts mapped files too."""

    def __init__(self) -> None:
        self.peaks: dict[str, dict[str, int]] = {}
        self.seconds: dict[str, float] = {}
        self._stage = ""
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while True:
            held = status()
            peak = self.peaks.setdefault(self._stage, {"anonymous": 0, "total": 0})
            for key, field in (("anonymous", "RssAnon"), ("total", "VmRSS")):
                peak[key] = max(peak[key], held[field])
            time.sleep(0.002)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self._stage, start = name, time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start
        self._stage = ""


def status() -> dict[str, int]:
    """The memory of this process in bytes, as Linux tells it."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if len(words) == 3 and words[2] == "kB"}


def lower(source: Path, target: Path, config: llama.Config) -> dict[str, Any]:
    """Trace, plan, lower and save under the limit; what it took."""
    watch, before = Watch(), status()
    allowed = 2 * changed_bytes(config) + CONSTANT
    resource.setrlimit(resource.RLIMIT_DATA, (before["VmData"] + allowed, resource.RLIM_INFINITY))
    with watch.stage("trace"):
        program = cmrc.trace(source)
        parameters = program.cost().parameters
    with watch.stage("plan and fingerprint"):
        plan = plan_for(program, config)
        program.fingerprint.digest  # noqa: B018  (hashes every weight)
    with watch.stage("lower"):
        lowered = cmrc.lower(program, plan)
    with watch.stage("save"):
        lowered.save(target)
    stages = {name: {**watch.peaks[name], "seconds": seconds} for name, seconds in watch.seconds.items()}
    return {
        "parameters": parameters,
        "parameters_after": lowered.report.after.parameters,
        "weights_bytes": (source.parent / f"{source.name}.data").stat().st_size,
        "largest_changed_bytes": changed_bytes(config),
        "constant_bytes": CONSTANT,
        "before": {"anonymous": before["RssAnon"], "total": before["VmRSS"]},
        "anonymous_peak": max(stage["anonymous"] for stage in stages.values()),
        "resident_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        "stages": stages,
    }


def changed_bytes(config: llama.Config) -> int:
    """The largest weight that changes, as it was: a matrix of an FFN."""
    return config.width * config.ffn * np.dtype(config.dtype).itemsize


def run(source: Path, target: Path, config: llama.Config, kind: str, out: Path) -> None:
    """The logits of one of the models, by onnxruntime in a process of its own: one copy of the weights at a time."""
    program = cmrc.trace(target if kind == "lowered" else source)
    plan = cmrc.Plan(program) if kind != "clamped" else plan_for(program, config)
    host = program.host if kind != "clamped" else program.clamped(plan)
    tokens = np.random.default_rng(1).integers(0, config.vocabulary, TOKENS)
    np.save(out, host.run((tokens,))[0])


# ---------------------------------------------------------------- the command


def child(step: str, source: Path, target: Path, config: llama.Config, out: Path) -> None:
    given = [step, str(source), str(target), json.dumps(asdict(config)), str(out)]
    command = [sys.executable, "-m", "benchmarks.llm_size", "--child", *given]
    subprocess.run(command, check=True)


# ---------------------------------------------------------------- the page


def body(record: Record) -> str:
    found = record["size"]
    numbers = (
        ("parameters", f"{found['parameters']:,} to {found['parameters_after']:,}"),
        ("weights", megabytes(found["weights_bytes"])),
        ("largest weight that changes", megabytes(found["largest_changed_bytes"])),
        ("own memory after the imports", megabytes(found["before"]["anonymous"])),
        ("own memory beyond that, at most", megabytes(found["grown_bytes"])),
        ("allowed: twice the largest weight that changes and a constant", megabytes(found["bound_bytes"])),
        ("met", verdict(found["met"])),
        ("all memory with mapped files, at most (ru_maxrss)", megabytes(found["resident_peak"])),
        ("lowered and clamped differ by", f"{found['error']:.1e} of the largest logit"),
        ("the replacement itself moves the logits by", f"{found['moved']:.1e}"),
    )
    stages = [
        (name, show(told["seconds"]), megabytes(told["anonymous"]), megabytes(told["total"]))
        for name, told in found["stages"].items()
    ]
    return table(("what", ""), numbers) + "\n" + table(("step", "time", "own memory", "with mapped files"), stages)


SECTIONS = (
    Section(
        "llm_size",
        "What a large model takes",
        """A Llama-architecture ONNX model with random weights in an external data file, every FFN to three quarters, ONNX file to
ONNX file. The process may allocate only twice the largest weight that changes and a constant beyond what it holds after
its imports: the kernel enforces it. *own* memory is anonymous, *with mapped files* counts the pages of the data file that
are mapped at that moment, one weight at a time, which the kernel may drop at will.
""",
        body,
    ),
)


def main() -> None:
    arguments = parser("A billion parameters in little memory.", "llm_size.json")
    arguments.add_argument("--folder", type=Path, help="where the models go, and stay; else a temporary folder")
    arguments.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.child:
        step, source, target, sizes, out = options.child
        config = llama.Config(**json.loads(sizes))
        if step == "lower":
            Path(out).write_text(json.dumps(lower(Path(source), Path(target), config)))
        else:
            run(Path(source), Path(target), config, step, Path(out))
        return
    config = SMALL if options.quick else llama.Config()
    with tempfile.TemporaryDirectory(prefix="cmrc-") as temporary:
        folder = options.folder or Path(temporary)
        source, target, told = folder / "llama.onnx", folder / "smaller.onnx", folder / "told.json"
        console.print(f"writing {source.name} ...")
        llama.write(source, config)
        console.print("lowering ...")
        child("lower", source, target, config, told)
        found = json.loads(told.read_text())
        found["grown_bytes"] = found["anonymous_peak"] - found["before"]["anonymous"]
        found["bound_bytes"] = 2 * found["largest_changed_bytes"] + CONSTANT
        found["met"] = found["grown_bytes"] <= found["bound_bytes"]
        logits = {}
        for kind in ("original", "clamped", "lowered"):
            console.print(f"running {kind} ...")
            child(kind, source, target, config, folder / f"{kind}.npy")
            logits[kind] = np.load(folder / f"{kind}.npy").astype(np.float64)
    scale = np.abs(logits["clamped"]).max()
    found["error"] = float(np.abs(logits["lowered"] - logits["clamped"]).max() / scale)
    found["moved"] = float(np.abs(logits["original"] - logits["clamped"]).max() / scale)
    write_record(options.json, "llm size", [], options, config=asdict(config), size=found)


if __name__ == "__main__":
    main()
