"""How often the bounds hold, and how close they are, where the truth is known.

python -m benchmarks.coverage

Many swaps on `examples/digits.onnx` are the population, so that every certificate's true value is known; 1000 times 2000 of them
are drawn, and each bound at δ = 0.05 is compared with the truth. A target is also looked at every 250 swaps: the interval must
hold at all looks together.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import cmrc
from benchmarks.measure import ROOT, arguments, progress, write_record
from benchmarks.section import Record, Section, table
from cmrc.verification.bounds import at_any_time
from cmrc.verification.certificates import NAMES, indicator, ladder
from cmrc.verification.evidence import Evidence

DELTA, SWAPS, LOOK = 0.05, 2000, 250
REPLACED = (16, 40, 64)  # of the 128 units of act3, by variance


def population(replaced: int, count: int) -> Evidence:
    examples = ROOT / "examples"
    program = cmrc.trace(examples / "digits.onnx")
    train, test = (np.load(examples / f"digits_{part}.npz")["images"] for part in ("train", "test"))
    held = cmrc.interpret(program).tap((train,), "act3")
    gone = np.sort(np.argsort(held.var(0))[:replaced])
    plan = cmrc.Plan(program).do("act3", units=gone, constant=held.mean(0)[gone])
    verifier = cmrc.Verifier(program, cmrc.lower(program, plan), [test])
    rng = np.random.default_rng(0)
    return Evidence.join([verifier.swap(verifier.draw(rng, 10_000)) for _ in range(count // 10_000)])


def simulate(everything: Evidence, repetitions: int) -> dict[str, Any]:
    truth = {rung.name: rung.value for rung in ladder(everything)}
    held = dict.fromkeys([*NAMES, "at any time"], 0)
    gaps: dict[str, list[float]] = {name: [] for name in NAMES}
    rng, ordered = np.random.default_rng(1), True
    for _ in progress(range(repetitions), f"IIA {truth['direct']:.3f}"):
        sample = everything.part(rng.integers(len(everything), size=SWAPS))
        rungs = ladder(sample, delta=DELTA)
        for rung in rungs:
            # The bound of `markov` cuts ‖Δz‖² off at ε², so it bounds the IIA by more than the rung itself.
            held[rung.name] += rung.bound <= truth["tail" if rung.name == "markov" else rung.name]
            gaps[rung.name].append(rung.value - rung.bound)
        values = [rung.value for rung in rungs]
        ordered &= all(low <= high + 1e-12 for low, high in itertools.pairwise(values))
        agree = indicator("direct", sample)
        looks = [at_any_time(agree[:n], DELTA) for n in range(LOOK, SWAPS + 1, LOOK)]
        held["at any time"] += all(low <= truth["direct"] <= high for low, high in looks)
    return {
        "truth": truth,
        "held": {name: count / repetitions for name, count in held.items()},
        "gap": {name: float(np.mean(values)) for name, values in gaps.items()},
        "ordered": ordered,
    }


# ---------------------------------------------------------------- the page


def body(record: Record) -> str:
    rows = [
        (str(case["replaced"]), name, *(f"{case[key][name]:.4f}" if name in case[key] else "" for key in ("truth", "gap")), f"{100 * share:.1f} %")
        for case in record["cases"]
        for name, share in case["held"].items()
    ]  # fmt: skip
    return table(("units replaced, of 128", "bound", "truth", "estimate − bound, mean", "holds in"), rows)


SECTIONS = (
    Section(
        "coverage",
        "How often the bounds hold",
        """200,000 swaps on the digits example are the population; {repetitions} times {swaps} of them are drawn, and each bound at δ = {delta} is compared with the
truth. *at any time*: the interval is looked at every 250 swaps and must hold at all looks together.
""",
        body,
    ),
)


def main() -> None:
    options = arguments(__doc__, "coverage.json")
    repetitions = 20 if options.quick else 1000
    table = Table(
        "replaced", "bound", "truth", "holds in", "estimate − bound", title=f"{repetitions} repetitions", box=None
    )
    found = []
    for replaced in REPLACED:
        told = simulate(population(replaced, 20_000 if options.quick else 200_000), repetitions)
        found.append({"replaced": replaced, **told})
        for name, share in told["held"].items():
            truth, gap = told["truth"].get(name), told["gap"].get(name)
            cells = ("" if value is None else f"{value:.4f}" for value in (truth, gap))
            shown, wide = cells
            table.add_row(str(replaced), name, shown, f"{100 * share:.1f} %", wide)
    Console(width=100).print(table)
    told = {"delta": DELTA, "swaps": SWAPS, "repetitions": repetitions, "cases": found}
    write_record(options.json, "coverage", [], options, **told)


if __name__ == "__main__":
    main()
