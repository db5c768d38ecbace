"""The main job on a real model: a digits classifier in ONNX loses half of its inner units and stays a plain ONNX file.

bash examples/run.sh            # sets up an environment without torch and runs this
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import cmrc

HERE = Path(__file__).parent
SITES = ("act1", "pool", "act3", "act4")


def accuracy(logits: np.ndarray, labels: np.ndarray) -> float:
    return float((logits.argmax(axis=1) == labels).mean())


def rebuild(activations: np.ndarray, axis: int, share: float) -> tuple[np.ndarray, cmrc.Affine]:
    """The units that vary least over samples and positions, and the ridge regression that rebuilds them from the rest."""
    samples = np.moveaxis(activations, axis, -1).reshape(-1, activations.shape[axis]).astype(np.float64)
    mean, centred = samples.mean(axis=0), samples - samples.mean(axis=0)
    order = np.argsort(centred.var(axis=0))
    count = int(len(order) * share)
    replaced, kept = np.sort(order[:count]), np.sort(order[count:])
    moments = centred.T @ centred / len(centred)
    ridge = 1e-3 * np.trace(moments) / len(moments)
    inner = moments[np.ix_(kept, kept)] + ridge * np.eye(len(kept))
    weight = np.linalg.solve(inner, moments[np.ix_(kept, replaced)]).T
    return replaced, cmrc.Affine(parents=kept, weight=weight, bias=mean[replaced] - weight @ mean[kept])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, default=0.5, help="how many of the units of each site to replace")
    parser.add_argument("--output", type=Path, default=HERE / "out" / "digits.small.onnx")
    options = parser.parse_args()

    train, test = np.load(HERE / "digits_train.npz"), np.load(HERE / "digits_test.npz")
    source = HERE / "digits.onnx"
    program = cmrc.trace(source)

    plan = cmrc.Plan(program)
    for name in SITES:
        (site,) = program.find(name)
        activations = program.run([train["images"]], taps=[site.value])[-1]
        units, affine = rebuild(activations, site.axis, options.share)
        plan.do(name, units=units, affine=affine)

    lowered = cmrc.lower(program, plan)
    check = lowered.check([test["images"]])
    options.output.parent.mkdir(parents=True, exist_ok=True)
    plan.save(options.output.with_suffix(".plan.json"))
    lowered.save(options.output)
    small = cmrc.trace(options.output)

    report = lowered.report
    table = Table("", "before", "after", "ratio", title="digits.onnx", box=None, header_style="bold")
    for name in ("parameters", "macs"):
        before, after = getattr(report.before, name), getattr(report.after, name)
        table.add_row(name, f"{before:,}", f"{after:,}", f"{after / before:.2f}")
    sizes = source.stat().st_size, options.output.stat().st_size
    table.add_row("bytes on disk", f"{sizes[0]:,}", f"{sizes[1]:,}", f"{sizes[1] / sizes[0]:.2f}")
    scores = [accuracy(p.run([test["images"]])[0], test["labels"]) for p in (program, small)]
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
