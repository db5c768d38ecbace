"""One budget shared out by measured loss, beside the same share of every site.

python -m benchmarks.allocation resnet | vit | minilm | smollm     [--quick]

Every site keeps the same part of its units (uniform); then a budget of the same multiply-accumulates is shared out by what cutting
each site alone does to the model's output. Both use joint selection with affine maps, fitted in order; nothing is fine-tuned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import cmrc
from benchmarks import subjects
from benchmarks.curves import trained
from benchmarks.measure import Resumed, parser, progress, use_threads, write_record
from benchmarks.pretrained import stand_in
from benchmarks.section import COLOURS, Record, Section, claim, claims, table
from benchmarks.subjects import Subject, torch_run
from cmrc.planning.recipe import make_recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEEPS = (0.9, 0.8, 0.7, 0.6, 0.5)
SAMPLES = 1000  # training pictures to calibrate on
OPTIONS = {"preset": "joint", "recompute": "fits", "multiple_of": 1}


SUBJECTS: dict[str, Callable[[bool], Subject]] = {
    "resnet": lambda quick: trained("resnet", "ResNet-8", quick, SAMPLES),
    "vit": lambda quick: trained("vit", "ViT", quick, SAMPLES),
    "minilm": lambda quick: stand_in("minilm, in torch") if quick else subjects.minilm(),
    "smollm": lambda quick: stand_in("smollm") if quick else subjects.smollm(),
}


def measure(subject: Subject, keeps: tuple[float, ...], resumed: Resumed) -> dict[str, Any]:
    given = {**OPTIONS, **subject.recipe, "sites": subject.sites}
    recipe = make_recipe(**given)
    stats = cmrc.calibrate(
        subject.program, subject.batches, sites=subject.sites, need=recipe.needs, **recipe.calibration
    )
    whole = subject.program.cost()

    def one(**options: Any) -> dict[str, Any]:
        plan = cmrc.plan(subject.program, stats, data=subject.batches, **given, **options)
        lowered = cmrc.lower(subject.program, plan)
        kept = [site["kept"] / site["units"] for site in plan.made["sites"].values()]
        size = {"parameters": lowered.report.after.parameters, "macs": lowered.report.after.macs}
        return {**size, "kept": kept, **subject.judge(torch_run(lowered.module.eval()))}

    rows = []
    for keep in progress(keeps, f"{len(keeps)} sizes"):
        uniform = resumed(f"uniform {keep}", lambda keep=keep: one(keep=keep))
        budget = {"of": "macs", "amount": uniform["macs"]}
        allocated = resumed(f"allocated {keep}", lambda budget=budget: one(budget=budget))
        rows.append({"keep": keep, "uniform": uniform, "allocated": allocated})
        print(keep, uniform, allocated, flush=True)
    number = next(key for key in rows[0]["uniform"] if key not in ("parameters", "macs", "kept"))
    ratios = [row["allocated"][number] / row["uniform"][number] for row in rows]
    return {
        "name": subject.name,
        "subject": subject.what,
        "number": number,
        "whole": {"parameters": whole.parameters, "macs": whole.macs},
        "rows": rows,
        "claims": [
            claim(f"{subject.name}: {number}, allocated over uniform, geometric mean", float(np.exp(np.mean(np.log(ratios)))), "<", 1.0),
        ],
    }  # fmt: skip


# ---------------------------------------------------------------- the page


def body(record: Record) -> str:
    rows = []
    judged = [key for key in record["rows"][0]["uniform"] if key not in ("parameters", "macs", "kept")]
    for row in record["rows"]:
        cells = [f"{row['keep']:g}", f"{row['uniform']['macs'] / record['whole']['macs']:.3f}"]
        for key in judged:
            cells.append(" / ".join(f"{row[way][key]:.4f}" for way in ("uniform", "allocated")))
        kept = row["allocated"]["kept"]
        rows.append((*cells, f"{min(kept):.2f} to {max(kept):.2f}"))
    head = ("units kept", "MACs", *(f"{key}: uniform / allocated" for key in judged), "kept by site, allocated")
    return "\n".join((f"{record['name']}: {record['subject']}.\n", table(head, rows), claims(record["claims"])))


def draw(record: Record, figure: Figure) -> None:
    axes = figure.subplots()
    part = [row["uniform"]["macs"] / record["whole"]["macs"] for row in record["rows"]]
    for way, colour in zip(("uniform", "allocated"), COLOURS, strict=False):
        axes.plot(part, [row[way][record["number"]] for row in record["rows"]], marker="o", color=colour, label=way)
    axes.set(xlabel="multiply-accumulates, of the whole network", ylabel=record["number"], yscale="log")
    axes.legend()


TITLES = {"resnet": "ResNet-8 on CIFAR-10", "vit": "ViT on CIFAR-10", "minilm": "MiniLM-L6", "smollm": "SmolLM2-135M"}
TEXT = """Every site keeps the same part of its units, or a budget of the same multiply-accumulates is shared out by measured loss
(`budget: {{of: macs, ...}}`); joint selection, affine maps fitted in order, no fine-tuning.
"""
SECTIONS: tuple[Section, ...] = tuple(
    Section(f"allocation_{name}", f"Where to cut: {title}", TEXT, body, draw, (name,), (6.0, 3.2))
    for name, title in TITLES.items()
)


def main() -> None:
    arguments = parser(__doc__.splitlines()[0], "allocation_{subject}.json")
    arguments.add_argument("subject", choices=list(SUBJECTS))
    options = arguments.parse_args()
    use_threads(options.threads)
    torch.manual_seed(0)
    resumed = Resumed(options.json)
    subject = SUBJECTS[options.subject](options.quick)
    keeps: tuple[float, ...] = KEEPS[-1:] if options.quick else (0.7, 0.5) if options.subject == "smollm" else KEEPS
    record: Mapping[str, Any] = measure(subject, keeps, resumed)
    write_record(options.json, f"allocation, {options.subject}", [], options, **record, wall_seconds=resumed.seconds)
    resumed.forget()


if __name__ == "__main__":
    main()
