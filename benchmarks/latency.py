"""How fast a lowered model runs under onnxruntime (CPU), against the native small model and against the original.

python -m benchmarks.latency [--quick] [--json OUT] [--threads N]

Timed as `cmrc bench` does it: see cmrc/bench.py. Also compared: the ops that onnxruntime is left with.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import torch
from rich.console import Console
from rich.table import Table

import cmrc
from benchmarks import models
from benchmarks.measure import Ratio, arguments, console, from_pairs, progress, write_record
from benchmarks.section import Record, Section, comparisons, table
from cmrc.bench import clock_for, start, times

NATIVE_TARGET = 1.03  # lowered / native: equal but for what two sessions of one file differ by
BATCHES = (1, 8)


def export(model: torch.nn.Module, case: models.Case, path: Path) -> Path:
    """By torch's own exporter, with the batch size left open."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shapes = ({0: torch.export.Dim("batch")},)
        torch.onnx.export(
            model, (case.inputs(2),), path, dynamo=True, verbose=False, dynamic_shapes=shapes, external_data=False
        )
    return path


def build(case: models.Case, folder: Path) -> dict[str, Path]:
    """The files of a case: original, native small, and lowered from each host. Every lowering is checked."""
    wide = case.original()
    made = {"original": export(wide, case, folder / "original.onnx")}
    made["native"] = export(case.native(), case, folder / "native.onnx")
    options = {"dynamic_shapes": ({0: torch.export.Dim("batch")},)}
    programs = {"torch": cmrc.trace(wide, (case.inputs(2),), **options), "onnx": cmrc.trace(made["original"])}
    for host, program in programs.items():
        lowered = cmrc.lower(program, case.plan(program))
        check = lowered.check([case.inputs(3).numpy()])
        if not check.holds:
            raise SystemExit(f"{case.name}, {host} host: {check}")
        made[f"lowered ({host})"] = folder / f"lowered_{host}.onnx"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lowered.save(made[f"lowered ({host})"])
    return made


def histogram(path: Path, threads: int = 1) -> dict[str, int]:
    """The ops that are left after onnxruntime's extended optimisations, and how many of each."""
    with tempfile.TemporaryDirectory() as scratch:
        optimised = Path(scratch) / "optimised.onnx"
        start(path, threads=threads, optimised=optimised)
        graph = onnx.load(optimised, load_external_data=False).graph
    return dict(sorted(Counter(node.op_type for node in graph.node).items()))


def measure(case: models.Case, files: Mapping[str, Path], options: argparse.Namespace) -> list[Ratio]:
    sessions, rounds = (2, 5) if options.quick else (10, 15)
    ratios = []
    for batch in BATCHES:
        name = f"{case.name}, batch {batch}"
        x = case.inputs(batch).numpy()
        feeds = {file: {start(path).get_inputs()[0].name: x} for file, path in files.items()}
        counts = {"threads": options.threads, "sessions": sessions, "rounds": rounds, "seed": models.SEED}
        seconds, _ = times(files, feeds, **counts, watch=partial(progress, what=name))
        for lowered in [file for file in files if file.startswith("lowered")]:
            for other in ("native", "original"):
                target = NATIVE_TARGET if other == "native" and not case.extra else None
                pairs = np.stack([seconds[lowered], seconds[other]], axis=-1)
                ratios.append(from_pairs(name, lowered, other, pairs, target))
    return ratios


def show_histograms(found: Mapping[str, Mapping[str, Mapping[str, int]]]) -> None:
    for name, files in found.items():
        table = Table("op", *files, title=f"ops after onnxruntime's optimisation: {name}")
        for op in sorted({op for counts in files.values() for op in counts}):
            table.add_row(op, *(str(counts.get(op, 0)) for counts in files.values()))
        Console().print(table)


# ---------------------------------------------------------------- the page


def body(record: Record) -> str:
    return "\n".join((comparisons(record), histograms(record["histograms"], record["same_ops"])))


def histograms(found: Mapping[str, Mapping[str, Mapping[str, int]]], same: Mapping[str, bool]) -> str:
    parts = ["#### The ops that onnxruntime is left with\n\nAfter `ORT_ENABLE_EXTENDED`.\n"]
    for case, files in found.items():
        names = [name for name in files if name != "original"]
        ops = sorted({op for name in names for op in files[name]})
        verdict = "the same" if same[case] else "**not the same**"
        parts.append(f"{case}: lowered and native are {verdict}.\n")
        parts.append(table(("op", *names), ((op, *(str(files[name].get(op, 0)) for name in names)) for op in ops)))
    return "\n".join(parts)


SECTIONS = (
    Section(
        "latency",
        "How fast the result runs",
        """Half of the units of every site replaced, run by onnxruntime on the CPU with {threads} intra-op thread(s).
The clock is the {clock}.
*native* is the small architecture written by hand and exported by torch; *lowered (torch)* comes from the `nn.Module`,
*lowered (onnx)* from the exported file of the wide model.
""",
        body,
    ),
)


def main() -> None:
    options = arguments(__doc__.splitlines()[0], "latency.json")
    torch.set_num_threads(options.threads)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    ratios: list[Ratio] = []
    histograms: dict[str, dict[str, dict[str, int]]] = {}
    same: dict[str, bool] = {}
    for case in models.cases(quick=options.quick):
        with tempfile.TemporaryDirectory() as scratch:
            console.print(f"{case.name}: exporting and lowering")
            files = build(case, Path(scratch))
            counts = {name: histogram(path) for name, path in files.items()}
            ratios += measure(case, files, options)
        histograms[case.name] = counts
        same[case.name] = all(counts[name] == counts["native"] for name in counts if name.startswith("lowered"))
    show_histograms(histograms)
    told = {"clock": clock_for(options.threads), "histograms": histograms, "same_ops": same}
    write_record(options.json, "latency", ratios, options, **told)


if __name__ == "__main__":
    main()
