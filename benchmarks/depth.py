"""How the cost of lowering grows with depth: 12, 24, 48, 96 layers, on both hosts.

python -m benchmarks.depth [--quick] [--json OUT]

torch: DeiT-like, half of every FFN. ONNX: Llama-like, a quarter of every FFN. Narrow, so that the graph and not its weights
is what takes time. Steps of all depths are timed in turn, round after round, by the CPU time of the thread, so that a busy
machine slows all alike; a step's exponent is the slope of log time over log nodes, and 1 is linear.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cmrc
from benchmarks import llama, models
from benchmarks.llm_size import plan_for
from benchmarks.measure import arguments, console, progress, settled, show, timed, use_threads, write_record
from benchmarks.section import Record, Section, table, verdict

DEPTHS = (12, 24, 48, 96)
QUICK = (4, 8)
LINEAR = 1.1  # an exponent up to which growth counts as linear: what a timing can tell
Steps = dict[str, Callable[[], Any]]


def torch_steps(layers: int) -> tuple[int, Steps]:
    """The number of IR nodes, and what is timed."""
    case = models.deit(layers, width=32, heads=2, size=32)
    exported = torch.export.export(case.original(), (case.inputs(1),))
    program = cmrc.trace(exported)
    plan = case.plan(program)

    def lower() -> object:
        return cmrc.lower(program, plan)

    steps: Steps = {"read": lambda: cmrc.trace(exported).graph, "lower": lower}
    steps["lower to module"] = lambda: cmrc.lower(program, plan).module
    return len(program.graph.nodes), steps


def onnx_steps(layers: int, folder: Path) -> tuple[int, Steps]:
    config = llama.Config(layers=layers, width=32, ffn=128, heads=4, served=2, vocabulary=64, positions=32)
    path = folder / f"llama{layers}.onnx"
    llama.write(path, config)
    program = cmrc.trace(path)
    plan = plan_for(program, config, heads=False)
    lowered = cmrc.lower(program, plan)
    steps: Steps = {
        "read": lambda: cmrc.trace(path).graph,
        "plan": lambda: plan_for(cmrc.Program(program.host), config, heads=False),
        "lower": lambda: cmrc.lower(program, plan),
        "save": lambda: lowered.save(folder / f"small{layers}.onnx"),
    }
    return len(program.graph.nodes), steps


def measure(built: dict[int, tuple[int, Steps]], rounds: int, name: str) -> dict[str, Any]:
    """Median seconds of every step at every depth, and how each grows."""
    steps = list(next(iter(built.values()))[1])
    seconds: dict[str, dict[int, list[float]]] = {step: {depth: [] for depth in built} for step in steps}
    with settled():
        for i in progress(range(-1, rounds), name):
            for step in steps:
                for depth, (_, step_list) in built.items():
                    spent = timed(step_list[step], time.thread_time)
                    if i >= 0:
                        seconds[step][depth].append(spent)
    nodes = {depth: count for depth, (count, _) in built.items()}
    growth = {}
    for step, by_depth in seconds.items():
        median = {depth: float(np.median(spent)) for depth, spent in by_depth.items()}
        slope = float(np.polyfit(np.log(list(nodes.values())), np.log(list(median.values())), 1)[0])
        growth[step] = {"seconds": median, "exponent": slope, "met": slope <= LINEAR}
    return {"nodes": nodes, "steps": growth}


# ---------------------------------------------------------------- the page


def body(record: Record) -> str:
    parts = []
    for host, growth in record["growth"].items():
        nodes = growth["nodes"]
        rows = []
        for step, ratios in growth["steps"].items():
            times = [show(ratios["seconds"][depth]) for depth in nodes]
            each = [ratios["seconds"][depth] / count for depth, count in nodes.items()]
            rows.append(
                (
                    step,
                    *times,
                    f"{show(each[0])} to {show(each[-1])}",
                    f"{ratios['exponent']:.2f}",
                    verdict(ratios["met"]),
                )
            )
        depths = [f"{depth} layers, {count} nodes" for depth, count in nodes.items()]
        parts.append(f"{host}:\n\n" + table(("step", *depths, "a node", "exponent", "linear"), rows))
    return "\n".join(parts)


SECTIONS = (
    Section(
        "depth",
        "How the cost grows with depth",
        """Narrow models of growing depth: DeiT-like on the torch host (half of every FFN), Llama-like on the ONNX host (a quarter of
every FFN). Medians of the CPU time of the thread; the exponent is the slope of log time over log nodes, and up to {linear} counts
as linear.
""",
        body,
    ),
)


def main() -> None:
    options = arguments("How lowering grows with depth.", "depth.json")
    use_threads(options.threads)
    depths, rounds = (QUICK, 2) if options.quick else (DEPTHS, 9)
    with tempfile.TemporaryDirectory(prefix="cmrc-") as temporary:
        folder = Path(temporary)
        console.print("exporting ...")
        hosts = {
            "onnx": {depth: onnx_steps(depth, folder) for depth in depths},
            "torch": {depth: torch_steps(depth) for depth in depths},
        }
        growth = {host: measure(step_of, rounds, host) for host, step_of in hosts.items()}
    write_record(options.json, "depth", [], options, growth=growth, linear=LINEAR)


if __name__ == "__main__":
    main()
