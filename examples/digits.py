"""The main job on a real model: a digits classifier in ONNX loses half of its inner units and stays a plain ONNX file.

bash examples/run.sh            # sets up an environment without torch and runs this

The units that go are chosen, and rebuilt from those that stay, on the training images; the accuracies are of the test images.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import cmrc

HERE = Path(__file__).parent


def accuracy(program: cmrc.Program, images: np.ndarray, labels: np.ndarray) -> float:
    return float((program.run([images])[0].argmax(axis=1) == labels).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=float, default=0.5, help="the part of the units of each site that stays")
    parser.add_argument("--output", type=Path, default=HERE / "out" / "digits.small.onnx")
    options = parser.parse_args()

    source = HERE / "digits.onnx"
    program = cmrc.trace(source)
    plan = cmrc.plan(program, data=HERE / "digits_train.npz", preset="joint", keep=options.keep)
    lowered = cmrc.lower(program, plan)

    test = np.load(HERE / "digits_test.npz")
    check = lowered.check([test["images"]])
    options.output.parent.mkdir(parents=True, exist_ok=True)
    plan.save(options.output.with_suffix(".plan.json"))
    lowered.save(options.output)

    report = lowered.report
    table = Table("", "before", "after", "ratio", title="digits.onnx", box=None, header_style="bold")
    for name in ("parameters", "macs"):
        before, after = getattr(report.before, name), getattr(report.after, name)
        table.add_row(name, f"{before:,}", f"{after:,}", f"{after / before:.2f}")
    sizes = source.stat().st_size, options.output.stat().st_size
    table.add_row("bytes on disk", f"{sizes[0]:,}", f"{sizes[1]:,}", f"{sizes[1] / sizes[0]:.2f}")
    scores = [accuracy(p, test["images"], test["labels"]) for p in (program, cmrc.trace(options.output))]
    table.add_row("test accuracy", f"{scores[0]:.4f}", f"{scores[1]:.4f}", "")
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    for site in report.sites:
        console.print(
            f"  {site.site} ({site.op}): {site.units_before} -> {site.units_after} units; {'; '.join(site.folded)}",
            markup=False,
        )
    console.print(str(check))
    console.print(f"wrote {options.output.name} and its plan")
    if not check.holds:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
