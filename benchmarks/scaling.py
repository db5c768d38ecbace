"""How the cost of lowering, calibrating, planning and verifying grows with width, depth and samples.

python -m benchmarks.scaling [--quick] [--json OUT]

MLPs with random weights on the torch host. One size grows, the others stay; steps of all sizes are timed in turn, round after
round, by the CPU time of the thread; a step's exponent is the slope of log time over log size. See benchmarks.depth for deep
graphs on both hosts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import cmrc
from benchmarks import models
from benchmarks.measure import arguments, console, progress, settled, show, timed, use_threads, write_record
from benchmarks.section import COLOURS, Record, Section, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INPUTS = 64
BATCH = 256
Steps = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Size:
    """An MLP of `depth` hidden layers of `width` units, `samples` to calibrate on, and as many swaps to verify by."""

    width: int = 256
    depth: int = 4
    samples: int = 1024


GROWS = {
    "width": [Size(width=n) for n in (128, 256, 512, 1024)],
    "depth": [Size(depth=n, width=128) for n in (4, 8, 16, 32)],
    "samples": [Size(samples=n) for n in (512, 1024, 2048, 4096)],
}
QUICK = {
    "width": [Size(width=n, samples=256) for n in (64, 128)],
    "depth": [Size(depth=n, width=32, samples=256) for n in (2, 4)],
    "samples": [Size(samples=n, width=64) for n in (256, 512)],
}


def steps(size: Size) -> Steps:
    """What is timed at one size."""
    model = models.randomise(models.MLP((INPUTS, *(size.width,) * size.depth, 10)))
    generator = torch.Generator().manual_seed(models.SEED)
    x = torch.randn(size.samples, INPUTS, generator=generator)
    program = cmrc.trace(model, (x[:2],), dynamic_shapes=({0: torch.export.Dim("batch")},))
    sites = [f"acts.{i}" for i in range(size.depth)]
    batches = [x[i : i + BATCH].numpy() for i in range(0, size.samples, BATCH)]
    stats = cmrc.calibrate(program, batches, sites=sites, need=("scatter",))
    plan = cmrc.plan(program, stats, preset="joint", sites=sites, keep=0.5)
    constants = cmrc.Plan(program)
    for site in sites:
        constants.do(site, units=range(0, size.width, 2), constant=0.1)
    lowered = cmrc.lower(program, plan)
    last = cmrc.lower(program, cmrc.Plan(program).do(sites[-1], units=range(0, size.width, 2), constant=0.1))
    return {
        "lower, constants": lambda: cmrc.lower(program, constants),
        "lower, affine": lambda: cmrc.lower(program, plan),
        "calibrate, means and variances": lambda: cmrc.calibrate(program, batches, sites=sites),
        "calibrate, second moments": lambda: cmrc.calibrate(program, batches, sites=sites, need=("scatter",)),
        "plan, joint": lambda: cmrc.plan(program, stats, preset="joint", sites=sites, keep=0.5),
        "verify, all sites": lambda: cmrc.verify(program, lowered, batches, swaps=size.samples),
        "verify, last site": lambda: cmrc.verify(program, last, batches, swaps=size.samples),
    }


def measure(axis: str, sizes: list[Size], rounds: int) -> dict[str, Any]:
    """Median seconds of every step at every size, and how each grows."""
    ready = {int(getattr(size, axis)): steps(size) for size in sizes}
    names = list(next(iter(ready.values())))
    seconds: dict[str, dict[int, list[float]]] = {name: {n: [] for n in ready} for name in names}
    with settled():
        for i in progress(range(-1, rounds), axis):
            for name in names:
                for n, prepared in ready.items():
                    spent = timed(prepared[name], time.thread_time)
                    if i >= 0:
                        seconds[name][n].append(spent)
    growth = {}
    for name, by_size in seconds.items():
        median = {n: float(np.median(spent)) for n, spent in by_size.items()}
        slope, _ = np.polyfit(np.log(list(median)), np.log(list(median.values())), 1)
        last = list(median.items())[-2:]
        local = np.log(last[1][1] / last[0][1]) / np.log(last[1][0] / last[0][0])
        growth[name] = {"seconds": median, "exponent": float(slope), "exponent of the last doubling": float(local)}
    fixed = {name: value for name, value in asdict(sizes[0]).items() if name != axis}
    return {"fixed": fixed, "sizes": list(ready), "steps": growth}


# ---------------------------------------------------------------- the page


def body(record: Record) -> str:
    parts = []
    for axis, growth in record["grows"].items():
        fixed = ", ".join(f"{name} {value}" for name, value in growth["fixed"].items())
        rows = [
            (name, *(show(ratios["seconds"][str(n)]) for n in growth["sizes"]), f"{ratios['exponent']:.2f}",
             f"{ratios['exponent of the last doubling']:.2f}")
            for name, ratios in growth["steps"].items()
        ]  # fmt: skip
        head = ("step", *(f"{axis} {n}" for n in growth["sizes"]), "exponent", "of the last doubling")
        parts.append(f"By {axis} ({fixed}):\n\n" + table(head, rows))
    return "\n".join(parts)


def draw(record: Record, figure: Figure) -> None:
    axes = figure.subplots(1, len(record["grows"]), sharey=True)
    for side, (axis, growth) in zip(axes, record["grows"].items(), strict=True):
        for i, (name, ratios) in enumerate(growth["steps"].items()):
            n = growth["sizes"]
            side.loglog(
                n, [ratios["seconds"][str(k)] for k in n], marker="o", markersize=4, color=COLOURS[i], label=name
            )
            side.annotate(f"{ratios['exponent']:.1f}", (n[-1], ratios["seconds"][str(n[-1])]), textcoords="offset points",
                          xytext=(5, -3), fontsize=8, color=COLOURS[i])  # fmt: skip
        side.set_xticks(growth["sizes"], [str(n) for n in growth["sizes"]])
        side.minorticks_off()
        side.margins(x=0.18)
        side.set_xlabel(axis)
    axes[0].set_ylabel("seconds of processor time")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)


SECTIONS = (
    Section(
        "scaling",
        "How the cost grows with width, depth and samples",
        """MLPs with random weights on the torch host; half of the units of every hidden layer are replaced. Samples are what is
calibrated on, and the number of swaps that verify. Medians of the CPU time of the thread; the exponent is the slope of log time over
log size (the numbers in the picture), so 1 is linear; the last column is the slope of the last doubling, where fixed costs count less.
""",
        body,
        draw,
        size=(9.0, 4.2),
    ),
)


def main() -> None:
    options = arguments(__doc__.splitlines()[0], "scaling.json")
    use_threads(options.threads)
    grows: Mapping[str, list[Size]] = QUICK if options.quick else GROWS
    growths = {}
    for axis, sizes in grows.items():
        console.print(f"by {axis}")
        growths[axis] = measure(axis, sizes, 1 if options.quick else 5)
    write_record(options.json, "scaling", [], options, grows=growths)


if __name__ == "__main__":
    main()
