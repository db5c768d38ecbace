"""How latency under onnxruntime follows the number of units that are kept, and what `multiple_of` buys.

python -m benchmarks.widths [--quick] [--json OUT] [--threads N]

One file for each number of kept units, all lowered from the same file, timed in turn as `cmrc bench` does it.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import cmrc
from benchmarks import models
from benchmarks.latency import export, feeds_for, quiet_exporters
from benchmarks.measure import arguments, console, progress, show, use_threads, write_record
from benchmarks.section import COLOURS, Record, Section, table
from cmrc.hosts.onnx.bench import clock_for, median_ratio, times

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEP = 8
BATCH = 4
FFN = (64, 128, 192, 256, 320, 376, 380, 383, 384, 385, 388, 392, 400, 448, 512, 577, 584, 640, 704, 761, 768)
CHANNELS = (8, 12, 16, 20, 23, 24, 25, 28, 31, 32, 33, 36, 39, 40, 41, 44, 47, 48, 49, 52, 55, 56, 57, 60, 63, 64)


def sweeps(quick: bool) -> dict[str, tuple[models.Case, Sequence[int]]]:
    """A transformer's FFNs, and the channels between convolutions of 3 x 3."""
    transformer = replace(models.deit(2, size=64 if quick else 128), name="FFN units of 768, width 192")
    convolutions = replace(models.convnet((64, 64, 64), size=32), name="channels of 64, convolutions of 3 x 3")
    few = (3, 4) if quick else (0, 0)
    return {
        "FFN": (transformer, FFN[: few[0]] or FFN),
        "channels": (convolutions, CHANNELS[-few[1] :] if quick else CHANNELS),
    }


def keep_first(program: cmrc.Program, case: models.Case, kept: int) -> cmrc.Plan:
    plan = cmrc.Plan(program)
    for site, width in zip(case.sites, case.widths, strict=True):
        if kept < width:
            plan.do(site, units=range(kept, width), constant=0.0)
    return plan


def files_of(case: models.Case, widths: Sequence[int], folder: Path) -> dict[str, Path]:
    whole = export(case.original(), case, folder / "original.onnx")
    program = cmrc.trace(whole)
    files = {}
    for kept in widths:
        if kept == case.widths[0]:
            files[str(kept)] = whole
            continue
        files[str(kept)] = folder / f"kept_{kept}.onnx"
        cmrc.lower(program, keep_first(program, case, kept)).save(files[str(kept)])
    return files


def sweep(case: models.Case, widths: Sequence[int], options: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        files = files_of(case, widths, Path(folder))
        feeds = feeds_for(files, case, BATCH)
        sessions, rounds = (1, 3) if options.quick else (6, 10)
        counts = {"threads": options.threads, "sessions": sessions, "rounds": rounds, "seed": models.SEED}
        seconds, _ = times(files, feeds, **counts, watch=partial(progress, what=case.name))
    most = str(max(widths))
    rows = []
    for kept in widths:
        ratio, low, high = median_ratio(np.stack([seconds[str(kept)], seconds[most]], axis=-1))
        rows.append({"kept": kept, "seconds": float(np.median(seconds[str(kept)])), "of the whole": ratio,
                     "low": low, "high": high})  # fmt: skip
    return {"name": case.name, "rows": rows, "rounded": rounded(widths, seconds)}


def rounded(widths: Sequence[int], seconds: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """For each width that is no multiple: the time of the next multiple, of its own."""
    rounded_widths = []
    for kept in widths:
        up = math.ceil(kept / STEP) * STEP
        if up != kept and up in widths:
            ratio, low, high = median_ratio(np.stack([seconds[str(up)], seconds[str(kept)]], axis=-1))
            rounded_widths.append({"kept": kept, "rounded": up, "ratio": ratio, "low": low, "high": high})
    return rounded_widths


# ---------------------------------------------------------------- the page


def body(record: Record) -> str:
    parts = []
    for sweep in record["sweeps"].values():
        rows = [(str(r["kept"]), show(r["seconds"]), f"{r['of the whole']:.3f} ({r['low']:.3f} to {r['high']:.3f})")
                for r in sweep["rows"]]  # fmt: skip
        parts.append(f"{sweep['name']}:\n\n" + table(("kept", "a run", "of the whole"), rows))
        more = [(str(r["kept"]), str(r["rounded"]), f"{r['ratio']:.3f} ({r['low']:.3f} to {r['high']:.3f})")
                for r in sweep["rounded"]]  # fmt: skip
        middle = float(np.median([r["ratio"] for r in sweep["rounded"]])) if more else 1.0
        parts.append(
            f"Rounded up to a multiple of {STEP}, with more units, the time is {middle:.3f} of what it was (median):\n\n"
            + table(("kept", "rounded up to", "time, of the unrounded"), more)
        )
    parts.append(stairs(record["sweeps"]["channels"]["rows"]))
    return "\n".join(parts)


def stairs(rows: Sequence[Mapping[str, float]]) -> str:
    """In words: what a few widths of convolutions cost beside their neighbours."""
    took = {row["kept"]: row["seconds"] for row in rows}
    pairs = [(a, b) for a, b in ((63, 64), (31, 32), (24, 32), (28, 32), (36, 48)) if a in took and b in took]
    listing = ", ".join(f"{a} channels take {took[a] / took[b]:.2f} of what {b} take" for a, b in pairs)
    return (
        f"Convolutions run in blocks of channels: {listing}. A width that fills no block falls to a slower kernel, and everything up to the "
        "next whole block costs the same, which `multiple_of` is for: 8 by default for channels, 16 where that is the block.\n"
    )


def draw(record: Record, figure: Figure) -> None:
    axes = figure.subplots(1, len(record["sweeps"]))
    for side, sweep in zip(np.atleast_1d(axes), record["sweeps"].values(), strict=True):
        rows = sweep["rows"]
        whole = max(row["kept"] for row in rows)
        side.plot([0, whole], [0, 1], color="grey", linestyle=":", label="in proportion")
        kept, of = ([row[key] for row in rows] for key in ("kept", "of the whole"))
        side.plot(kept, of, color="grey", linewidth=0.7)
        for multiple, marker, colour in ((True, "o", COLOURS[0]), (False, "x", COLOURS[1])):
            some = [row for row in rows if (row["kept"] % STEP == 0) == multiple]
            spread = [
                [max(0.0, r["of the whole"] - r["low"]) for r in some],
                [max(0.0, r["high"] - r["of the whole"]) for r in some],
            ]
            side.errorbar([r["kept"] for r in some], [r["of the whole"] for r in some], yerr=spread, fmt=marker, color=colour,
                          elinewidth=0.8, markersize=5,
                          label=f"{'a' if multiple else 'no'} multiple of {STEP}")  # fmt: skip
        side.set_xlabel(f"kept {sweep['name']}")
        side.set_ylim(bottom=0)
        side.legend(fontsize=8)
    np.atleast_1d(axes)[0].set_ylabel("time, of the whole network's")


SECTIONS = (
    Section(
        "widths",
        "Latency against the units that are kept",
        """Files lowered to different widths, run at batch {batch} under onnxruntime with {threads} thread(s) ({clock}). FFN: a two-block
transformer at 65 tokens, everything else untouched; channels: three convolutions of 64 channels at 32, 16 and 8 pixels.
""",
        body,
        draw,
        size=(9.0, 3.8),
    ),
)


def main() -> None:
    options = arguments(__doc__.splitlines()[0], "widths.json")
    use_threads(options.threads)
    quiet_exporters()
    by_network = {}
    for name, (case, widths) in sweeps(options.quick).items():
        console.print(case.name)
        by_network[name] = sweep(case, widths, options)
    write_record(options.json, "widths", [], options, sweeps=by_network, batch=BATCH, clock=clock_for(options.threads))


if __name__ == "__main__":
    main()
