"""Where the time goes: scoring, compiling, verifying, on the paper's MNIST network.

python -m benchmarks.stages [--quick] [--json OUT] [--threads N]

The last hidden layer of 784-512-512-10, 128 or 256 of 512 units kept, 2000 samples, R = 2000 swaps. By processor time, the
median of several runs for each of ten seeds; then mean, deviation and bootstrap interval over seeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

import cmrc
from benchmarks.measure import arguments, progress, settled, show, timed, use_threads, write_record
from benchmarks.reductions import SWAPS, Case, mnist, small
from benchmarks.section import COLOURS, Record, Section, claim, claims, table
from cmrc.verification.bounds import bootstrap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCORE, CONSTANT, FIT, AFFINE = "score", "compile, constants", "fit affine maps", "compile, affine"
VERIFY, WHOLE = "verify, features at hand", "verify, from the pictures"
# keep, step: seconds in the paper. Its affine compilation fits the maps too, and its swaps run on features at hand.
PAPER = {
    ("all", SCORE): 0.1844,
    ("128", CONSTANT): 8.41e-5, ("256", CONSTANT): 7.51e-5,
    ("128", FIT): 0.3151, ("256", FIT): 0.2007,
    ("128", VERIFY): 0.006269, ("256", VERIFY): 0.007750,
}  # fmt: skip
KEEPS = (128, 256)


def stages(case: Case, repeats: int, swaps: int) -> dict[str, float]:
    """Seconds of every stage. What a stage is given, was made before."""
    program, data = case.program, [case.calibration]
    affine = {"preset": "cmr-affine", "sites": [case.site]}
    ready = case.stats

    def score() -> cmrc.Plan:
        stats = cmrc.calibrate(program, data, sites=case.site)
        return cmrc.plan(program, stats, sites=[case.site], preset="cmr-logit", keep=0.5)

    medians = {f"all {SCORE}": median(score, repeats)}
    for keep in KEEPS:
        left = keep * case.units // 512
        constants = case.by("CMR-Logit", left)
        medians[f"{keep} {CONSTANT}"] = median(lambda plan=constants: cmrc.lower(program, plan), repeats)
        maps = cmrc.plan(program, ready, keep=left, **affine)
        medians[f"{keep} {FIT}"] = median(lambda left=left: cmrc.plan(program, ready, keep=left, **affine), repeats)
        medians[f"{keep} {AFFINE}"] = median(lambda plan=maps: cmrc.lower(program, plan), repeats)
        lowered = cmrc.lower(program, constants)
        verifier = cmrc.Verifier(program, lowered, [case.test])
        draw = verifier.draw(np.random.default_rng(0), swaps)
        medians[f"{keep} {VERIFY}"] = median(lambda one=verifier, draw=draw: one.swap(draw), repeats)
        medians[f"{keep} {WHOLE}"] = median(
            lambda small=lowered: cmrc.verify(program, small, [case.test], swaps=swaps, controls=False), repeats
        )
    return medians


def median(step: Callable[[], object], repeats: int) -> float:
    with settled():
        return float(np.median([timed(step, time.process_time) for _ in range(repeats)]))


def body(record: Record) -> str:
    rows = []
    for row in record["rows"]:
        mean, low, high = row["ours"]
        paper = "" if row["paper"] is None else show(row["paper"])
        rows.append(
            (
                row["keep"],
                row["step"],
                f"{show(mean)} ± {show(row['deviation'])}",
                f"{show(low)} to {show(high)}",
                paper,
            )
        )
    return "\n".join((table(("keep", "step", "ours", "95 % interval", "paper"), rows), claims(record["claims"])))


def draw(record: Record, figure: Figure) -> None:
    panel, rows = figure.subplots(), record["rows"]
    for i, row in enumerate(rows):
        panel.barh(-i, row["ours"][0], color=COLOURS[0], label=None if i else "ours (1 thread of this machine)")
        if row["paper"] is not None:
            panel.plot(
                row["paper"],
                -i,
                "D",
                markersize=8,
                markerfacecolor="none",
                color=COLOURS[1],
                label=None if i else "paper (its machine)",
            )
    panel.set_xscale("log")
    panel.set_xlabel("seconds")
    panel.set_yticks([-i for i in range(len(rows))], [f"{row['step']}, keep {row['keep']}" for row in rows], fontsize=9)
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9)


SECTIONS = (
    Section(
        "stages",
        "Where the time goes",
        """Each stage of the paper's appendix on its MNIST network, by processor time of one thread, and the paper's seconds on its own machine.
*score* runs 2000 samples through the network and ranks the units. *compile* is the whole of `cmrc.lower`: passes, checks and
writing the module, where the paper's number is one product of matrices for a head that it knows, so ours is longer by that
generality and independent of the kind of network. The paper's affine compilation is mostly the fit of the maps, so that is set
beside *fit affine maps*. *verify* is 2000 swaps on features at hand, in both networks, with KL, margins and intervals' inputs.
""",
        body,
        draw,
        size=(8.0, 4.2),
    ),
)


def main() -> None:
    options = arguments(__doc__.splitlines()[0], "stages.json")
    use_threads(options.threads)
    make, seeds, repeats, swaps = (small, 1, 2, 200) if options.quick else (mnist, 10, 5, SWAPS)
    runs = [stages(make(seed), repeats, swaps) for seed in progress(range(seeds), f"{seeds} seeds")]
    rows: list[dict[str, Any]] = []
    for key in runs[0]:
        keep, _, step = key.partition(" ")
        values = [one[key] for one in runs]
        result = {"keep": keep, "step": step, "ours": bootstrap(values).to_json(), "deviation": float(np.std(values))}
        rows.append({**result, "paper": PAPER.get((keep, step)), "seeds": values})
        print(keep, step, show(result["ours"][0]), result["ours"], rows[-1]["paper"])
    fastest = max(row["ours"][0] for row in rows if row["step"] == VERIFY)
    judged = [claim("seconds of 2000 swaps on features at hand, less than the paper's slowest", fastest, "<=", 0.00775)]
    write_record(options.json, "stages", [], options, rows=rows, claims=judged)


if __name__ == "__main__":
    main()
