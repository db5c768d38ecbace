"""What calibrating, selecting and fitting cost.

python -m benchmarks.calibration [--quick]
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

import cmrc
from benchmarks import models
from benchmarks.measure import Ratio, arguments, compare, from_pairs, use_threads, write_record
from benchmarks.section import Record, Section, comparisons
from cmrc.ir.axes import complement
from cmrc.planning import fits as replace
from cmrc.planning.selection import eliminate
from cmrc.statistics.columns import Columns
from cmrc.statistics.site_stats import SiteStats

BATCHES = 12


def first_order(case: models.Case, batch: int, pairs: int) -> Ratio:
    """Means and variances of every FFN against the forward pass alone."""
    x = case.inputs(batch)
    program = cmrc.trace(case.original(), (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    program.fingerprint  # noqa: B018  (of the model, once)
    data = [x.numpy()] * BATCHES

    def calibrate() -> None:
        cmrc.calibrate(program, data, sites=list(case.sites))

    def forward() -> None:
        for part in data:
            program.run([part])

    seconds = []
    for i in range(-1, pairs):
        order = (calibrate, forward) if i % 2 else (forward, calibrate)
        spent = {}
        for step in order:
            start = time.thread_time()  # other processes on the machine do not count
            step()
            spent[step] = time.thread_time() - start
        if i >= 0:
            seconds.append((spent[calibrate], spent[forward]))
    name = f"{case.name}, {len(case.sites)} sites, {BATCHES} batches of {batch}, processor time"
    return from_pairs(name, "calibrate", "forward", np.array(seconds), 1.15)


def memory(case: models.Case, batch: int) -> dict[str, Any]:
    """The peak of what Python and numpy allocate, for little and for four times as much data."""
    x = case.inputs(batch)
    program = cmrc.trace(case.original(), (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    need = ("scatter", "range")
    bytes_of = {}
    for count in (2, 8):
        tracemalloc.start()
        cmrc.calibrate(program, (x.numpy() for _ in range(count)), sites=list(case.sites)[:2], need=need)
        bytes_of[count * batch] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    few, many = bytes_of.values()
    return {"samples to bytes": bytes_of, "grows by": many / few, "met": many <= 1.1 * few}


def site(units: int, samples: int) -> SiteStats:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(samples, units // 4)) @ rng.normal(size=(units // 4, units)) / units**0.5
    rows = np.maximum(rows + 0.5 * rng.normal(size=rows.shape), 0.0)
    stats = SiteStats(Columns("site", "site", 1, units), frozenset({"moments", "scatter", "rows"}))
    stats.add(rows)
    return stats


def selection(units: int) -> dict[str, Any]:
    """Half of the units by backward elimination, with 768 outputs."""
    stats = site(units, 2 * units)
    weight = np.random.default_rng(1).normal(size=(units // 4, units))
    matrix, covariance = weight.T @ weight, stats.covariance
    start, used = time.perf_counter(), time.process_time()
    order = eliminate(matrix, covariance, count=units // 2)
    return {"units": units, "removed": units // 2, "seconds": time.perf_counter() - start,
            "processor seconds": time.process_time() - used, "risk": float(order.added[: units // 2].sum())}  # fmt: skip


def one_factorisation(units: int, samples: int, pairs: int) -> Ratio:
    """All replaced units against one factorisation, or each against its own."""
    stats = site(units, samples)
    replaced = list(range(units // 2))
    keep = complement(replaced, units)
    covariance = stats.covariance

    def ours() -> Callable[[], object]:
        return lambda: replace.affine(stats, replaced)

    def theirs() -> Callable[[], object]:
        def each() -> list[np.ndarray]:
            among = covariance[np.ix_(keep, keep)]
            return [replace.solve_ridge(among, covariance[np.ix_(keep, [unit])], 1e-6) for unit in replaced]

        return each

    name = f"affine maps of {len(replaced)} of {units} units, {samples} samples"
    return compare(name, ("one factorisation", ours), ("unit by unit", theirs), pairs=pairs, target=0.2)


# ---------------------------------------------------------------- the page


def body(record: Record) -> str:
    return "\n".join((comparisons(record), costs(record["calibration_memory"], record["elimination"])))


def costs(memory: Mapping[str, Any], elimination: Mapping[str, Any]) -> str:
    """Memory of calibration and the time of joint selection."""
    sizes = ", ".join(f"{int(n) / 1e6:.1f} MB for {count} samples" for count, n in memory["samples to bytes"].items())
    verdict = "does not grow" if memory["met"] else "**grows**"
    return (
        f"The memory of calibration {verdict} with the data: {sizes}. Joint selection of {elimination['removed']} of "
        f"{elimination['units']} units took {elimination['processor seconds']:.1f} s of processor time.\n"
    )


SECTIONS = (
    Section(
        "calibration",
        "What calibrating, selecting and fitting cost",
        """Means and variances of every FFN site against the forward pass alone, and affine maps by one factorisation against one
for each unit.
""",
        body,
    ),
)


def main() -> None:
    options = arguments(__doc__.splitlines()[0], "calibration.json")
    use_threads(options.threads)
    case = models.deit(2, size=64) if options.quick else models.deit()
    pairs = 3 if options.quick else 11
    ratios = [first_order(case, 8, min(pairs, 5)), one_factorisation(128 if options.quick else 512, 2000, pairs)]
    memory_used = memory(models.deit(2, size=64), 8)
    chosen = selection(512 if options.quick else 3072)
    write_record(options.json, "calibration", ratios, options, calibration_memory=memory_used, elimination=chosen)
    print(f"memory: {memory_used}\nselection: {chosen}")


if __name__ == "__main__":
    main()
