"""One task by several processes: how much time two save, what they send each other, and what 64 would take.

python -m benchmarks.processes [--quick] [--json OUT]

`torchrun` calibrates a Llama-shaped ONNX model in one process and in two of this machine, and in two network namespaces, which are
connected by nothing but a virtual cable: two machines, as far as the processes can tell. The cable counts what they send. Where
namespaces are not permitted, that row is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import cmrc
import cmrc.hosts.onnx.host
from benchmarks import llama
from benchmarks.measure import ROOT, console, parser, show, write_record
from benchmarks.section import Record, Section, claim, claims, megabytes, table
from cmrc.statistics import distributed

MODEL = llama.Config(layers=4, width=512, ffn=1408, heads=8, served=8, vocabulary=2048, positions=256)
SMALL = llama.Config(layers=1, width=64, ffn=128, heads=2, served=2, vocabulary=128, positions=128)
BATCHES, TOKENS = 48, (4, 128)
APART = 1e-12  # of the statistics, relative
NAMES = ("cmrc-first", "cmrc-second")
MODELLED = (4, 16, 64)
LINKS = {"1 Gbit/s": 125e6, "10 Gbit/s": 1.25e9}  # bytes per second


def torchrun(processes: int, *options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), *options]


# ---------------------------------------------------------------- one of the processes


def calibrated(model: Path, config: llama.Config, batches: int, out: Path) -> None:
    """A calibration together with the others; the first process writes what it took and the sums."""
    random = np.random.default_rng(0)
    data = [random.integers(0, config.vocabulary, TOKENS) for _ in range(batches)]
    sites = [config.ffn_site(layer) for layer in range(config.layers)]
    with distributed.group():
        program = cmrc.trace(model)
        program.fingerprint  # noqa: B018  (of the model, once)
        distributed.from_each(0)  # all start at once
        start, used, (rank, world) = time.perf_counter(), time.process_time(), distributed.shard()
        stats = cmrc.calibrate(program, data[rank::world], sites=sites, need="scatter")
        own = time.process_time() - used
        stats = distributed.all_merge(stats)
        took, every = time.perf_counter() - start, distributed.from_each((own, time.process_time() - used))
    if distributed.shard()[0]:
        return
    sums = {f"{i}.{name}": array for i, s in enumerate(stats.sites.values()) for name, array in s.arrays.items()}
    np.savez(out.with_suffix(".npz"), **sums)
    known = {
        "seconds": took,
        "own": max(each[0] for each in every),
        "processor": sum(each[1] for each in every),
        "merged": max(each[1] - each[0] for each in every),
        "bytes": sum(array.nbytes for array in sums.values()),
        "samples": stats.samples,
    }
    out.write_text(json.dumps(known))


# ---------------------------------------------------------------- two machines


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def machines() -> Iterator[bool]:
    """Two network namespaces, connected by a virtual cable; False where this is not permitted."""
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip("link", "add", "cable0", "netns", NAMES[0], "type", "veth", "peer", "name", "cable1", "netns", NAMES[1])
        for i, name in enumerate(NAMES):
            ip("-n", name, "addr", "add", f"10.213.0.{i + 1}/24", "dev", f"cable{i}")
            ip("-n", name, "link", "set", f"cable{i}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        permitted = True
    except (OSError, subprocess.CalledProcessError):
        permitted = False
    try:
        yield permitted
    finally:
        for name in NAMES:
            with suppress(OSError, subprocess.CalledProcessError):
                ip("netns", "del", name)


def sent() -> int:
    """The bytes that went through the cable, both ways."""
    command = ["ip", "netns", "exec", NAMES[0], "cat"]
    files = [f"/sys/class/net/cable0/statistics/{way}_bytes" for way in ("rx", "tx")]
    # In a namespace of its own, /sys still shows the first one's; `ip netns exec` mounts it anew.
    return sum(map(int, subprocess.run([*command, *files], check=True, capture_output=True, text=True).stdout.split()))


def on_two_machines(command: Sequence[str], folder: Path, *options: str) -> int:
    """Run a command by torchrun in both namespaces, a process in each; the bytes that they sent."""
    before, running = sent(), []
    where = ("--nnodes", "2", "--master-addr", "10.213.0.1", "--master-port", "29513", *options)
    for i, name in enumerate(NAMES):
        environment = {**surroundings(), "GLOO_SOCKET_IFNAME": f"cable{i}"}
        started = ["ip", "netns", "exec", name, *torchrun(1, "--node-rank", str(i), *where), *command]
        running.append(subprocess.Popen(started, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True))
    failed = [process.communicate()[1] for process in running if process.wait()]
    if failed:
        raise RuntimeError(failed[0][-2000:])
    return sent() - before


def surroundings() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


# ---------------------------------------------------------------- the command


@dataclass(frozen=True, slots=True)
class Job:
    """What every way of running it is given."""

    folder: Path
    config: llama.Config
    batches: int

    def command(self, out: str) -> list[str]:
        given = [str(self.folder / "model.onnx"), json.dumps(asdict(self.config)), str(self.batches), out]
        return ["-m", "benchmarks.processes", "--child", *given]

    def run(self, processes: int, out: str) -> dict[str, Any]:
        command = [*torchrun(processes, "--standalone"), *self.command(out)]
        subprocess.run(command, cwd=self.folder, env=surroundings(), check=True, capture_output=True)
        return self.read(out)

    def read(self, out: str) -> dict[str, Any]:
        known: dict[str, Any] = json.loads((self.folder / out).read_text())
        return known

    def apart(self, one: str, other: str) -> float:
        """The largest difference of two runs' statistics, each relative to its array's largest number."""
        first, second = (np.load((self.folder / name).with_suffix(".npz")) for name in (one, other))
        return max(float(np.abs(first[n] - second[n]).max() / np.abs(first[n]).max()) for n in first)


def modelled(one: float, bytes_sent: float) -> list[dict[str, Any]]:
    """Seconds of P processes: their share of the work, and a ring that sends 2 (P − 1) / P of the sums through every link."""
    rows = []
    for count in MODELLED:
        exchange = {name: 2 * (count - 1) / count * bytes_sent / speed for name, speed in LINKS.items()}
        rows.append({"processes": count, "work": one / count, "exchange": exchange})
    return rows


def body(record: Record) -> str:
    one = record["one"]
    rows = []
    for name in ("one", "two", "machines"):
        run = record[name]
        if run is not None:
            efficiency = one["own"] / (run["own"] * (1 if name == "one" else 2))
            moved = megabytes(run["sent"]) if "sent" in run else ""
            apart = f"{run['apart']:.1e}" if "apart" in run else ""
            rows.append(
                (
                    run["name"],
                    show(run["seconds"]),
                    show(run["own"]),
                    f"{efficiency:.2f}",
                    show(run["merged"]),
                    moved,
                    apart,
                )
            )
    ways = table(
        ("processes", "wall", "processor time of each", "efficiency", "of the exchange", "through the cable", "statistics differ by"), rows
    )  # fmt: skip
    model = [
        (str(each["processes"]), show(each["work"]), *(show(each["exchange"][link]) for link in LINKS))
        for each in record["modelled"]
    ]
    large = record["paper"]
    paper = table(
        ("what a run of 70 billion parameters, 100 million tokens and 64 machines would take, on paper", ""),
        [(row["what"], row["is"]) for row in large],
    )
    return "\n".join(
        (
            ways,
            table(("processes", "work", *(f"exchange at {link}" for link in LINKS)), model),
            paper,
            claims(record["claims"]),
        )
    )


TEXT = f"""Second moments of every FFN of a Llama-shaped ONNX model, {BATCHES} batches of {TOKENS[0]} x {TOKENS[1]} tokens, calibrated by `torchrun`. Efficiency is the
processor time of one process over that of both together, before the exchange: what sharing out the data costs. (Wall time is that of
two cores which others use too.) The exchange is one all-reduce of the statistics; its size does not depend on the data. *Two machines* are
two network namespaces of one host. The rows for more processes are modelled: the work divided, and a ring that sends the sums twice.
"""
SECTIONS = (Section("processes", "Several processes and machines", TEXT, body),)


def on_paper(one: Record, config: llama.Config, batches: int) -> list[dict[str, str]]:
    """From what a token costs here and grows like: work by parameters, sums by the square of the width of a site."""
    tokens = batches * TOKENS[0] * TOKENS[1]
    matrices = config.layers * (4 * config.width**2 + 3 * config.width * config.ffn)
    work = 2 * matrices + config.layers * config.ffn**2  # multiply-adds twice; half of a symmetric product, twice
    speed = work * tokens / one["own"]
    layers, width, ffn, large = 80, 8192, 28672, 1e8
    parameters = layers * (2 * width**2 + 2 * width * 1024 + 3 * width * ffn)
    forward, sums = 2 * parameters * large / speed / 64, layers * ffn**2 * large / speed / 64
    bytes_of_one = 8 * ffn**2
    elimination = 52.0 * (ffn / 11008) ** 3 * layers / 64
    return [
        {"what": "this core's speed, operations a second", "is": f"{speed:.2g}"},
        {"what": "forward passes, days of one such core in each machine", "is": f"{forward / 86400:.0f}"},
        {"what": "second moments of every FFN, days", "is": f"{sums / 86400:.0f}"},
        {"what": "sums of one FFN, in memory a layer at a time (`--pieces`)", "is": f"{bytes_of_one / 1e9:.1f} GB"},
        {"what": "sent by each machine in all", "is": f"{2 * bytes_of_one * layers / 1e12:.2f} TB, {2 * bytes_of_one * layers / 1.25e9 / 60:.0f} minutes at 10 Gbit/s"},
        {"what": "selection, each machine its layers (52 s for 11,008 units, cubed)", "is": f"{elimination / 3600:.1f} hours"},
    ]  # fmt: skip


def main() -> None:
    arguments = parser("What several processes save and send.", "processes.json")
    arguments.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.child:
        model, sizes, batches, out = options.child
        calibrated(Path(model), llama.Config(**json.loads(sizes)), int(batches), Path(out))
        return
    with tempfile.TemporaryDirectory(prefix="cmrc-") as temporary, machines() as permitted:
        job = Job(Path(temporary), SMALL if options.quick else MODEL, 4 if options.quick else BATCHES)
        llama.write(job.folder / "model.onnx", job.config)
        console.print("one process ...")
        one = {"name": "one", **job.run(1, "one.json")}
        console.print("two processes ...")
        two = {"name": "two", **job.run(2, "two.json")}
        two["apart"], apart = job.apart("one.json", "two.json"), None
        if permitted:
            console.print("two machines ...")
            moved = on_two_machines(job.command("machines.json"), job.folder)
            apart = {"name": "two machines", **job.read("machines.json"), "sent": moved}
            apart["apart"] = job.apart("one.json", "machines.json")
    judged = [claim("statistics of two processes and of one, relative difference", two["apart"], "<=", APART)]
    judged.append(claim("processor time of one process over that of both", one["own"] / (2 * two["own"]), ">=", 0.9))
    write_record(
        options.json,
        "processes",
        [],
        options,
        config=asdict(job.config),
        one=one,
        two=two,
        machines=apart,
        modelled=modelled(one["own"], one["bytes"]),
        paper=on_paper(one, job.config, job.batches),
        claims=[] if options.quick else judged,
    )


if __name__ == "__main__":
    main()
