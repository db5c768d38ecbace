"""Calibrate a model whose weights exceed the memory that the process may have: piece by piece, values on disk.

python -m benchmarks.beyond_memory [--quick] [--json OUT] [--folder FOLDER]

A Llama-shaped ONNX model with random weights is written to FOLDER (kept if given). A process that the kernel refuses more than a share of
the weights' bytes (RLIMIT_DATA) gathers the second moments of every FFN; the ordinary calibration is tried under the same limit. With
the first layers alone, both run without a limit, and their statistics are compared.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime  # noqa: F401  (so that the limit counts no code that is imported late)

import cmrc
import cmrc.hosts.onnx.host
from benchmarks import llama
from benchmarks.llm_size import Watch, status
from benchmarks.measure import console, parser, show, write_record
from benchmarks.section import Record, Section, claim, claims, megabytes, table
from cmrc.planning.spilled import calibrate_by_pieces

MODEL = llama.Config(layers=24, width=2048, ffn=4096, heads=32, served=8, vocabulary=8192)
SMALL = llama.Config(layers=8, width=256, ffn=512, heads=8, served=2, vocabulary=512, positions=128)
SHARE = 0.4  # of the weights, which the process may allocate beyond its imports
COMPARED = 2  # layers on which both ways are compared
BATCHES, TOKENS = 4, (4, 128)


def calibrated(model: Path, config: llama.Config, way: str, allowed: int, folder: Path) -> dict[str, Any]:
    """One calibration in this process: what it took, and a digest of its sums. An `allowed` of 0 is no limit."""
    random = np.random.default_rng(0)
    data = [random.integers(0, config.vocabulary, TOKENS) for _ in range(BATCHES)]
    watch, before = Watch(), status()
    if allowed:
        resource.setrlimit(resource.RLIMIT_DATA, (before["VmData"] + allowed, resource.RLIM_INFINITY))
    sites = [config.ffn_site(layer) for layer in range(config.layers)]
    used = time.process_time()
    with watch.stage("calibrate"):
        program = cmrc.trace(model)
        if way == "pieces":
            stats = calibrate_by_pieces(program, data, folder / "pieces", sites=sites, need="scatter")
        else:
            stats = cmrc.calibrate(program, data, sites=sites, need="scatter")
    own = [s.arrays["scatter"] for s in stats.sites.values()]
    return {
        "processor seconds": time.process_time() - used,
        "seconds": watch.seconds["calibrate"],
        "grown_bytes": watch.peaks["calibrate"]["anonymous"] - before["RssAnon"],
        "sums": [float(np.abs(array).sum()) for array in own],
        "traces": [float(np.trace(array)) for array in own],
    }


def child(model: Path, config: llama.Config, way: str, allowed: int) -> dict[str, Any]:
    """The same in a process of its own; `failed` is the last line of what it said if it could not."""
    given = [str(model), json.dumps(asdict(config)), way, str(allowed)]
    command = [sys.executable, "-m", "benchmarks.beyond_memory", "--child", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or [f"ended by signal {-done.returncode}"])[-1][:200]}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def body(record: Record) -> str:
    pieces, ordinary = record["pieces"], record["ordinary"]
    rows = (
        ("weights", megabytes(record["weights_bytes"])),
        ("allowed beyond the imports", megabytes(record["allowed_bytes"])),
        ("own memory beyond the imports, at most", megabytes(pieces["grown_bytes"])),
        ("processor time", show(pieces["processor seconds"])),
        ("wall time", show(pieces["seconds"])),
        ("the ordinary calibration under the same limit", ordinary.get("failed", "runs")),
        (f"statistics of {COMPARED} layers, both ways", "equal" if record["same"] else "not equal"),
    )
    return "\n".join((table(("what", ""), rows), claims(record["claims"])))


TEXT = f"""Second moments of every FFN of a Llama-shaped ONNX model with random weights, on {BATCHES} batches of {TOKENS[0]} x {TOKENS[1]} tokens. The process
may allocate {SHARE:.0%} of the bytes of the weights beyond what it holds after its imports (RLIMIT_DATA; mapped files are not counted).
"""
SECTIONS = (Section("beyond_memory", "Calibrating a model that does not fit", TEXT, body),)


def main() -> None:
    arguments = parser("Calibrate a model that does not fit into memory.", "beyond_memory.json")
    arguments.add_argument("--folder", type=Path, help="where the model goes, and stays; else a temporary folder")
    arguments.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.child:
        model, sizes, way, allowed = options.child
        with tempfile.TemporaryDirectory(prefix="cmrc-", dir=Path(model).parent) as spilled:
            config = llama.Config(**json.loads(sizes))
            print(json.dumps(calibrated(Path(model), config, way, int(allowed), Path(spilled))))
        return
    config = SMALL if options.quick else MODEL
    with tempfile.TemporaryDirectory(prefix="cmrc-") as temporary:
        folder = options.folder or Path(temporary)
        model, few = folder / "llama.onnx", replace(config, layers=COMPARED)
        console.print(f"writing {COMPARED} layers, and comparing ...")
        llama.write(model, few)
        both = [child(model, few, way, 0) for way in ("pieces", "ordinary")]
        same = all("failed" not in one and one[k] == both[0][k] for one in both for k in ("sums", "traces"))
        console.print(f"writing {config.layers} layers ...")
        llama.write(model, config)
        weights = Path(f"{model}.data").stat().st_size
        # Small models are all overhead of the runtime, which a quick run does not limit.
        allowed = 0 if options.quick else int(SHARE * weights)
        pieces = child(model, config, "pieces", allowed)
        ordinary = child(model, config, "ordinary", allowed)
    if "failed" in pieces:
        raise SystemExit(pieces["failed"])
    judged = [claim("own memory beyond the imports, of the weights", pieces["grown_bytes"] / weights, "<=", SHARE)]
    write_record(
        options.json,
        "beyond memory",
        [],
        options,
        config=asdict(config),
        weights_bytes=weights,
        allowed_bytes=allowed,
        pieces=pieces,
        ordinary=ordinary,
        same=same,
        claims=[] if options.quick else judged,
    )


if __name__ == "__main__":
    main()
