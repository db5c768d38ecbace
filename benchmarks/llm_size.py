"""Models of one and of seven billion parameters, ONNX to ONNX, in little memory: FFNs and heads to three quarters.

python -m benchmarks.llm_size [--model 7b] [--quick] [--json OUT] [--folder FOLDER]

The model is written to FOLDER (kept if given), then a process of its own traces, plans, lowers and saves it. That process
may allocate only twice the largest weight that changes and a constant (the kernel refuses more: RLIMIT_DATA), and says
how much it held at most. Its time stands beside that of copying the result's files. The same is done with half and a
quarter of the layers. At the end onnxruntime runs some layers of the result and of the clamped original, cut out, so that
they fit into memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import cmrc
import cmrc.hosts.onnx.host  # so that the limit counts no code that is imported late
from benchmarks import llama
from benchmarks.measure import console, parser, show, write_record
from benchmarks.section import Record, Section, megabytes, table, verdict

SMALL = llama.Config(layers=4, width=256, ffn=1024, heads=8, served=2, vocabulary=512, positions=128)
MODELS = {
    "1b": llama.Config(),
    "7b": llama.Config(layers=32, width=4096, ffn=11008, heads=32, served=32, dtype="float16"),
}
CONSTANT = 200 << 20  # bytes beside weights: graphs, plan, report, buffers of files, stacks of threads
TIME = 1.5  # of copying the result's bytes, at most
LINEAR = 1.1  # an exponent up to which growth counts as linear: what a timing can tell
TOKENS = (1, 8)
CUT = 2  # layers that onnxruntime runs together


def plan_for(
    program: cmrc.Program, config: llama.Config, layers: range | None = None, *, heads: bool = True
) -> cmrc.Plan:
    """A quarter of every FFN, and with `heads` a quarter of every layer's heads, each unit replaced by a constant of its own."""
    plan = cmrc.Plan(program)
    for layer in layers or range(config.layers):
        inner, attention = config.replaced(layer)
        plan.do(config.ffn_site(layer), units=inner[0].tolist(), constant=inner[1])
        if heads:
            plan.do(config.head_site(layer), units=attention[0].tolist(), constant=attention[1])
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
            self._look(self._stage)
            time.sleep(0.01)

    def _look(self, stage: str) -> None:
        memory = status()
        peak = self.peaks.setdefault(stage, {"anonymous": 0, "total": 0})
        for key, field in (("anonymous", "RssAnon"), ("total", "VmRSS")):
            peak[key] = max(peak[key], memory[field])

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self._stage, start = name, time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start
        self._look(name)  # a short stage may end before it is sampled
        self._stage = ""


def status() -> dict[str, int]:
    """The memory of this process in bytes, as Linux tells it."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if len(words) == 3 and words[2] == "kB"}


def lower_in_stages(
    source: Path, target: Path, plan_of: Callable[[cmrc.Program], cmrc.Plan], watch: Watch
) -> dict[str, Any]:
    """Trace, plan, lower and save; time and memory of each step, and the parameters before and after."""
    with watch.stage("trace"):
        program = cmrc.trace(source)
        parameters = program.cost().parameters
    with watch.stage("plan"):
        plan = plan_of(program)
    with watch.stage("lower"):
        lowered = cmrc.lower(program, plan)
    with watch.stage("save"):
        lowered.save(target)
    stages = {name: {**watch.peaks[name], "seconds": seconds} for name, seconds in watch.seconds.items()}
    return {
        "parameters": parameters,
        "parameters_after": lowered.report.after.parameters,
        "anonymous_peak": max(stage["anonymous"] for stage in stages.values()),
        "stages": stages,
    }


def lower(source: Path, target: Path, config: llama.Config) -> dict[str, Any]:
    """The steps under the limit; what they took."""
    watch, before = Watch(), status()
    allowed = 2 * changed_bytes(config) + CONSTANT
    resource.setrlimit(resource.RLIMIT_DATA, (before["VmData"] + allowed, resource.RLIM_INFINITY))
    return {
        **lower_in_stages(source, target, lambda program: plan_for(program, config), watch),
        "weights_bytes": (source.parent / f"{source.name}.data").stat().st_size,
        "largest_changed_bytes": changed_bytes(config),
        "constant_bytes": CONSTANT,
        "before": {"anonymous": before["RssAnon"], "total": before["VmRSS"]},
        "resident_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }


def changed_bytes(config: llama.Config) -> int:
    """The largest weight that changes, as it was: a matrix of an FFN."""
    return config.width * config.ffn * np.dtype(config.dtype).itemsize


def run(source: Path, target: Path, config: llama.Config, kind: str, first: int, out: Path) -> None:
    """What some layers of one of the models give, by onnxruntime in a process of its own: one copy of the weights at a time."""
    layers = range(first, first + CUT)
    piece = cut_out(target if kind == "lowered" else source, config, layers)
    program = cmrc.trace(piece)
    host = program.clamped(plan_for(program, config, layers)) if kind == "clamped" else program.host
    random = np.random.default_rng(1)
    tokens = random.integers(0, config.vocabulary, TOKENS)
    hidden = random.standard_normal((*TOKENS, config.width)).astype(config.dtype)
    given = {"tokens": tokens, config.input_of(first): hidden}
    np.save(out, host.run(tuple(given[value.name] for value in program.graph.inputs))[0])
    piece.unlink()


def cut_out(path: Path, config: llama.Config, layers: range) -> Path:
    """A file of these layers alone, beside the model whose data file it reads."""
    whole = onnx.load(path, load_external_data=False)
    extractor = onnx.utils.Extractor(whole)
    piece = extractor.extract_model(["tokens", config.input_of(layers[0])], [config.input_of(layers[-1] + 1)])
    cut = path.with_name(f"cut-{path.name}")
    onnx.save(piece, cut)
    return cut


# ---------------------------------------------------------------- the command


def child(step: str, source: Path, target: Path, config: llama.Config, out: Path, first: int = 0) -> None:
    given = [step, str(source), str(target), json.dumps(asdict(config)), str(out), str(first)]
    subprocess.run([sys.executable, "-m", "benchmarks.llm_size", "--child", *given], check=True)


def measure(folder: Path, config: llama.Config) -> dict[str, Any]:
    """Write, lower and copy a model of this size; what that took."""
    source, target, out = model_in(folder, config), folder / "smaller.onnx", folder / "size.json"
    for before in folder.glob("smaller.*"):
        before.unlink()
    known, note = source.with_suffix(".json"), json.dumps(asdict(config))
    if not known.exists() or known.read_text() != note:
        console.print(f"writing {config.layers} layers ...")
        llama.write(source, config)
        known.write_text(note)
    console.print("lowering ...")
    forget([source, Path(f"{source}.data")])
    start = time.perf_counter()
    child("lower", source, target, config, out)
    size: dict[str, Any] = {**json.loads(out.read_text()), "wall_seconds": time.perf_counter() - start}
    size["copy_seconds"] = copy_seconds([target, *folder.glob("smaller.*.data")], folder)
    size["grown_bytes"] = size["anonymous_peak"] - size["before"]["anonymous"]
    size["bound_bytes"] = 2 * size["largest_changed_bytes"] + CONSTANT
    size["met"] = size["grown_bytes"] <= size["bound_bytes"]
    return size


def model_in(folder: Path, config: llama.Config) -> Path:
    """The file of a model of this depth. In a folder that is kept it is written once."""
    return folder / f"llama-{config.layers}.onnx"


def copy_seconds(files: list[Path], folder: Path) -> float:
    """Seconds to copy files as a careful program does: from the disk, and until the disk has them."""
    forget(files)
    start = time.perf_counter()
    for file in files:
        copy = folder / f"copy-{file.name}"
        shutil.copyfile(file, copy)
        with copy.open("rb") as written:
            os.fsync(written.fileno())
    seconds = time.perf_counter() - start
    for file in files:
        (folder / f"copy-{file.name}").unlink()
    return seconds


def forget(files: list[Path]) -> None:
    """Let the kernel drop what it holds of files in memory: both sides of the comparison read from the disk."""
    os.sync()
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def differences(folder: Path, config: llama.Config) -> list[dict[str, Any]]:
    """How far the lowered layers are from the clamped ones, at the start, in the middle and at the end."""
    source, target, out = model_in(folder, config), folder / "smaller.onnx", folder / "values.npy"
    rows = []
    for first in sorted({0, (config.layers - CUT) // 2, config.layers - CUT}):
        console.print(f"running layers {first} to {first + CUT - 1} ...")
        values = {}
        for kind in ("original", "clamped", "lowered"):
            child(kind, source, target, config, out, first)
            values[kind] = np.load(out).astype(np.float64)
        scale = np.abs(values["clamped"]).max()
        error, moved = (
            float(np.abs(values[kind] - values["clamped"]).max() / scale) for kind in ("lowered", "original")
        )
        rows.append({"layers": [first, first + CUT - 1], "error": error, "moved": moved})
    return rows


# ---------------------------------------------------------------- the page


def body(record: Record) -> str:
    size = record["size"]
    numbers = (
        ("parameters", f"{size['parameters']:,} to {size['parameters_after']:,}"),
        ("weights", f"{megabytes(size['weights_bytes'])} of {record['config']['dtype']}"),
        ("largest weight that changes", megabytes(size["largest_changed_bytes"])),
        ("own memory after the imports", megabytes(size["before"]["anonymous"])),
        ("own memory beyond that, at most", megabytes(size["grown_bytes"])),
        ("allowed: twice the largest weight that changes and a constant", megabytes(size["bound_bytes"])),
        ("met", verdict(size["met"])),
        ("all memory with mapped files, at most (ru_maxrss)", megabytes(size["resident_peak"])),
        (
            "the whole process, and copying the files of the result",
            f"{show(size['wall_seconds'])}, {show(size['copy_seconds'])}",
        ),
        ("ratio, and the target", f"{record['time_ratio']:.2f}, ≤ {TIME} {verdict(record['time_ratio'] <= TIME)}"),
        (
            "growth with layers, exponent of the whole time",
            f"{record['exponent']:.2f} {verdict(record['exponent'] <= LINEAR)}",
        ),
    )
    stages = [
        (name, show(stage["seconds"]), megabytes(stage["anonymous"]), megabytes(stage["total"]))
        for name, stage in size["stages"].items()
    ]
    layers = [(str(row["layers"]), f"{row['error']:.1e}", f"{row['moved']:.1e}") for row in record["differences"]]
    depths = [
        (str(row["layers"]), show(row["wall_seconds"]), show(row["copy_seconds"]), megabytes(row["grown_bytes"]))
        for row in record["depths"]
    ]
    return "\n".join(
        (
            table(("what", ""), numbers),
            table(("step", "time", "own memory", "with mapped files"), stages),
            table(("layers", "the whole process", "copying the result", "own memory beyond the imports"), depths),
            table(("layers", "lowered and clamped differ by", "the replacement itself moves the values by"), layers),
        )
    )


TEXT = """A Llama-architecture ONNX model with random weights in an external data file; every FFN and the heads of every layer to three
quarters, ONNX file to ONNX file. The process may allocate only twice the largest weight that changes and a constant beyond
what it holds after its imports: the kernel enforces it. *own* memory is anonymous, *with mapped files* counts the pages of
the data file that are mapped at that moment, one weight at a time, which the kernel may drop at will. Differences are shares
of the largest value after two layers, which onnxruntime runs alone.
"""
SECTIONS = tuple(
    Section(f"llm_size_{name}", f"What a model of {words} parameters takes", TEXT, body, arguments=("--model", name))
    for name, words in (("1b", "1.1 billion"), ("7b", "seven billion"))
)


def main() -> None:
    arguments = parser("Billions of parameters in little memory.", "llm_size_{model}.json")
    arguments.add_argument("--model", choices=list(MODELS), default="1b", help="which sizes")
    arguments.add_argument("--folder", type=Path, help="where the models go, and stay; else a temporary folder")
    arguments.add_argument("--child", nargs=6, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.child:
        step, source, target, sizes, out, first = options.child
        config = llama.Config(**json.loads(sizes))
        if step == "lower":
            Path(out).write_text(json.dumps(lower(Path(source), Path(target), config)))
        else:
            run(Path(source), Path(target), config, step, int(first), Path(out))
        return
    config = replace(SMALL, dtype=MODELS[options.model].dtype) if options.quick else MODELS[options.model]
    with tempfile.TemporaryDirectory(prefix="cmrc-") as temporary:
        folder = options.folder or Path(temporary)
        depths = {
            layers: measure(folder, replace(config, layers=layers))
            for layers in (config.layers // 4, config.layers // 2, config.layers)
        }
        rows = differences(folder, config)
    size = depths[config.layers]
    exponent = np.polyfit(np.log(list(depths)), np.log([each["wall_seconds"] for each in depths.values()]), 1)[0]
    write_record(
        options.json,
        "llm size",
        [],
        options,
        config=asdict(config),
        size=size,
        depths=[{"layers": layers, **each} for layers, each in depths.items()],
        exponent=float(exponent),
        time_ratio=size["wall_seconds"] / size["copy_seconds"],
        differences=rows,
    )


if __name__ == "__main__":
    main()
