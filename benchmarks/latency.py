"""How fast a lowered model runs under onnxruntime (CPU), against the native small model and against the original.

python -m benchmarks.latency [--quick] [--json OUT] [--threads N]

Timed as `cmrc bench` does it: see cmrc/bench.py. Also compared: the ops that onnxruntime is left with.
"""

from __future__ import annotations

import argparse
import io
import logging
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import torch
from rich.console import Console
from rich.table import Table

import cmrc
from benchmarks import models
from benchmarks.measure import Ratio, arguments, console, from_pairs, progress, use_threads, write_record
from benchmarks.section import COLOURS, Record, Section, comparisons, table
from cmrc.hosts.onnx.bench import LONG_ENOUGH, clock_for, peak_memory, size_of, start, times

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NATIVE_TARGET = 1.02  # lowered / native: equal but for what two sessions of one file differ by
BATCHES = (1, 8)
SESSIONS = 6
PATIENCE = 8.0  # seconds for all rounds of one case and batch
BATCH = torch.export.Dim("batch")


def quiet_exporters() -> None:
    """They tell of every constant that they cannot fold."""
    for name in ("torch.onnx", "onnxscript"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def export(model: torch.nn.Module, case: models.Case, path: Path) -> Path:
    """By torch's own exporter, with the batch size left open."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        given = case.arguments(2)
        shapes = tuple({0: BATCH} for _ in given)
        torch.onnx.export(model, given, path, dynamo=True, verbose=False, dynamic_shapes=shapes, external_data=False)
    return path


def build(case: models.Case, folder: Path) -> dict[str, Path]:
    """The files of a case: original, masked, native small, and lowered from each host. Every lowering is checked."""
    wide = case.original()
    files = {"original": export(wide, case, folder / "original.onnx")}
    files["native"] = export(case.native(), case, folder / "native.onnx")
    programs = {}
    if "torch" in case.hosts:
        given = case.arguments(2)
        programs["torch"] = cmrc.trace(wide, given, dynamic_shapes=tuple({0: BATCH} for _ in given))
    if "onnx" in case.hosts:
        programs["onnx"] = cmrc.trace(files["original"])
    for host, program in programs.items():
        plan = case.plan(program)
        lowered = cmrc.lower(program, plan)
        check = lowered.check([tensor.numpy() for tensor in case.arguments(3)])
        if not check.holds:
            raise SystemExit(f"{case.name}, {host} host: {check}")
        files[f"lowered ({host})"] = folder / f"lowered_{host}.onnx"
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            lowered.save(files[f"lowered ({host})"])
            if "masked" not in files or host == "onnx":
                files["masked"] = folder / "masked.onnx"
                program.clamped(plan).save(files["masked"])
    return files


def histogram(path: Path, threads: int = 1) -> dict[str, int]:
    """The ops that are left after onnxruntime's extended optimisations, and how many of each."""
    with tempfile.TemporaryDirectory() as scratch:
        optimised = Path(scratch) / "optimised.onnx"
        start(path, threads=threads, optimised=optimised)
        graph = onnx.load(optimised, load_external_data=False).graph
    return dict(sorted(Counter(node.op_type for node in graph.node).items()))


def feeds_for(files: Mapping[str, Path], case: models.Case, batch: int) -> dict[str, dict[str, np.ndarray]]:
    arrays = [tensor.numpy() for tensor in case.arguments(batch)]
    return {
        name: dict(zip([one.name for one in start(path).get_inputs()], arrays, strict=True))
        for name, path in files.items()
    }


def measure(case: models.Case, files: Mapping[str, Path], options: argparse.Namespace) -> list[Ratio]:
    ratios = []
    for batch in BATCHES:
        name = f"{case.name}, batch {batch}"
        feeds = feeds_for(files, case, batch)
        sessions, rounds = (2, 3) if options.quick else (SESSIONS, rounds_for(files, feeds, options.threads))
        counts = {"threads": options.threads, "sessions": sessions, "rounds": rounds, "seed": models.SEED}
        seconds, _ = times(files, feeds, **counts, watch=partial(progress, what=name))
        for ours, theirs in pairs_of(files):
            target = NATIVE_TARGET if theirs == "native" and not case.extra else None
            ratios.append(from_pairs(name, ours, theirs, np.stack([seconds[ours], seconds[theirs]], axis=-1), target))
    return ratios


def pairs_of(files: Mapping[str, Path]) -> Iterator[tuple[str, str]]:
    for lowered in [file for file in files if file.startswith("lowered")]:
        yield from ((lowered, other) for other in ("native", "original"))
    yield from ((file, "original") for file in ("masked", "native") if file in files)


def rounds_for(files: Mapping[str, Path], feeds: Mapping[str, Mapping[str, np.ndarray]], threads: int) -> int:
    """As many rounds as the time for one case and batch allows."""
    one = start(files["original"], threads=threads)
    spent = []
    for _ in range(2):
        begin = time.perf_counter()
        one.run(None, dict(feeds["original"]))
        spent.append(time.perf_counter() - begin)
    a_round = len(files) * max(min(spent), LONG_ENOUGH)
    return int(np.clip(PATIENCE / (SESSIONS * a_round), 3, 15))


def held(case: models.Case, files: Mapping[str, Path], threads: int) -> dict[str, dict[str, int | None]]:
    """Bytes on disk, and at most in memory while running one sample, of every file."""
    feeds = feeds_for(files, case, 1)
    return {
        name: {"bytes": size_of(path), "peak": peak_memory(path, feeds[name], threads)} for name, path in files.items()
    }


def show_histograms(by_network: Mapping[str, Mapping[str, Mapping[str, int]]]) -> None:
    for name, files in by_network.items():
        table = Table("op", *files, title=f"ops after onnxruntime's optimisation: {name}")
        for op in sorted({op for counts in files.values() for op in counts}):
            table.add_row(op, *(str(counts.get(op, 0)) for counts in files.values()))
        Console().print(table)


# ---------------------------------------------------------------- the page


def body(record: Record) -> str:
    native = [r["ratio"] for r in record["ratios"] if r["theirs"] == "native" and r["target"] is not None]
    caption = f"Lowered over native, median of {len(native)} comparisons without an extra op: **{np.median(native):.3f}**.\n\n"
    parts = [caption + comparisons(record), histograms(record["histograms"], record["same_ops"])]
    return "\n".join([parts[0], sizes_table(record["sizes"]), parts[1]] if "sizes" in record else parts)


def sizes_table(by_network: Mapping[str, Mapping[str, Mapping[str, int | None]]]) -> str:
    names = ("original", "masked", "lowered (torch)", "lowered (onnx)", "native")
    rows = []
    for case, files in by_network.items():
        for key, what in (("bytes", "file"), ("peak", "peak memory")):
            cells = (files[name][key] if name in files else None for name in names)
            rows.append((case, what, *("" if cell is None else f"{cell / 1e6:.2f}" for cell in cells)))
    caption = "Peak memory is what a process of its own holds at most while it loads the file and runs one sample, beyond its imports.\n"
    return f"#### Size in MB\n\n{caption}\n" + table(("network", "", *names), rows)


def histograms(by_network: Mapping[str, Mapping[str, Mapping[str, int]]], same: Mapping[str, bool]) -> str:
    """Which networks run the very ops of the native one; the counts where they do not."""
    equal = [case for case in by_network if same[case]]
    parts = [
        f"#### The ops that onnxruntime is left with\n\nAfter `ORT_ENABLE_EXTENDED` lowered and native are the same: {', '.join(equal)}.\n"
    ]
    for case, files in by_network.items():
        if same[case]:
            continue
        names = [name for name in files if name not in ("original", "masked")]
        ops = [op for op in sorted({op for name in names for op in files[name]})
               if len({files[name].get(op, 0) for name in names}) > 1]  # fmt: skip
        parts.append(f"{case}: **not the same**.\n")
        parts.append(table(("op", *names), ((op, *(str(files[name].get(op, 0)) for name in names)) for op in ops)))
    return "\n".join(parts)


def draw(record: Record, figure: Figure) -> None:
    """Time of each file, of the original's."""
    by_name: dict[str, dict[str, Mapping[str, float]]] = {}
    for ratio in record["ratios"]:
        if ratio["theirs"] == "original":
            by_name.setdefault(ratio["name"], {})[ratio["ours"]] = ratio
    names = [name for name in by_name if not name.startswith("ConvNet, constants")]
    files = ("masked", "lowered (torch)", "lowered (onnx)", "native")
    colours = dict(zip(files, (COLOURS[1], COLOURS[0], COLOURS[5], COLOURS[2]), strict=True))
    axes = figure.subplots(1, 2, sharey=True)
    for side, batch in zip(axes, BATCHES, strict=True):
        shown = [name for name in names if name.endswith(f"batch {batch}")]
        for k, file in enumerate(files):
            points = [(i, by_name[name][file]) for i, name in enumerate(shown) if file in by_name[name]]
            places = [i + (k - 1.5) * 0.2 for i, _ in points]
            values = [ratio["ratio"] for _, ratio in points]
            spread = [
                [max(0.0, r["ratio"] - r["low"]) for _, r in points],
                [max(0.0, r["high"] - r["ratio"]) for _, r in points],
            ]
            side.bar(places, values, 0.19, yerr=spread, color=colours[file], label=file, error_kw={"elinewidth": 0.8})
        side.axhline(1, color="black", linewidth=0.8)
        labels = [name.rpartition(", batch")[0].replace(", 3 of 30 layers", "\n(3 layers)") for name in shown]
        side.set_xticks(range(len(shown)), labels, rotation=40, ha="right")
        side.set_title(f"batch {batch}", fontsize=10)
    axes[0].set_ylabel("time, of the original's")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=4, fontsize=8)


SECTIONS = (
    Section(
        "latency",
        "How fast the result runs",
        """Half of the units of every site replaced, run by onnxruntime on the CPU with {threads} intra-op thread(s).
The clock is the {clock}; `cmrc bench` is the same code. Weights are random: they do not matter here.
*native* is the small architecture written by hand and exported by torch; *lowered (torch)* comes from the `nn.Module`,
*lowered (onnx)* from the exported file of the wide model; *masked* is the original with the same units clamped at run time,
which is what a mask buys.
""",
        body,
        draw,
        size=(9.0, 4.4),
    ),
)


def main() -> None:
    options = arguments(__doc__.splitlines()[0], "latency.json")
    use_threads(options.threads)
    quiet_exporters()
    ratios: list[Ratio] = []
    histograms: dict[str, dict[str, dict[str, int]]] = {}
    same: dict[str, bool] = {}
    sizes: dict[str, dict[str, dict[str, int | None]]] = {}
    for case in models.cases(quick=options.quick):
        with tempfile.TemporaryDirectory() as scratch:
            console.print(f"{case.name}: exporting and lowering")
            files = build(case, Path(scratch))
            counts = {name: histogram(path) for name, path in files.items()}
            ratios += measure(case, files, options)
            sizes[case.name] = held(case, files, options.threads)
        histograms[case.name] = counts
        same[case.name] = all(counts[name] == counts["native"] for name in counts if name.startswith("lowered"))
    show_histograms(histograms)
    results = {"clock": clock_for(options.threads), "histograms": histograms, "same_ops": same, "sizes": sizes}
    write_record(options.json, "latency", ratios, options, **results)


if __name__ == "__main__":
    main()
