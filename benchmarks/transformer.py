"""Feed-forward units of a vision transformer: the paper's table 3.

python -m benchmarks.transformer deit     DeiT-Tiny's depth and width on CIFAR-10: zero-shot, and after the same short fine-tuning for all
python -m benchmarks.transformer grid     the same of a small ViT
python -m benchmarks.transformer shape    DeiT-Tiny's own shape with 100 classes: parameters, MACs, throughput

deit, grid: the last block's FFN at keep 0.75, 0.5, 0.25, scored on the class token of 1024 pictures; then the FFNs of all blocks.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

import cmrc
from benchmarks import models
from benchmarks.data import Images
from benchmarks.measure import Resumed, parser, progress, use_threads, write_record
from benchmarks.section import COLOURS, Record, Section, claim, claims, table
from benchmarks.selection import DEVELOPMENT, divergence
from benchmarks.trained import TRAININGS, accuracy, logits, tuned
from cmrc.hosts.onnx.bench import bench
from cmrc.ir.cost import elements, macs
from cmrc.ir.graph import Graph

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEEPS = (0.75, 0.5, 0.25)
METHODS: dict[str, dict[str, Any]] = {
    "CMR-Logit": {"preset": "cmr-logit"},
    "CMR-Affine": {"preset": "cmr-affine", "gradient": True},  # as in the paper's main text
    "CMR-Const": {"preset": "cmr-const"},
    "VBP": {"preset": "vbp"},
    "magnitude": {"preset": "magnitude"},
    "random": {"preset": "random"},
    "joint, affine": {"preset": "joint"},
    "joint, task": {"preset": "joint-task"},
}
OURS = tuple(METHODS)[6:]
TUNED = {  # top-1 after fine-tuning, of a baseline of 84.62
    "CMR-Logit": (85.16, 84.78, 84.88), "CMR-Affine": (84.70, 85.04, 85.16), "CMR-Const": (84.66, 84.66, 84.96),
    "VBP": (84.50, 85.00, 84.70), "magnitude": (84.70, 84.78, 84.62), "random": (84.68, 84.82, 85.30),
}  # fmt: skip
BASELINE = 84.62
ZERO_SHOT = {  # top-1 before fine-tuning, over the three keeps
    **dict.fromkeys(("CMR-Logit", "VBP", "magnitude", "random"), "83.2 to 84.6"),
    "CMR-Const": "71.6 to 76.1",
    "CMR-Affine": "2.6 to 4.4",
}
NEED = ("scatter", "range", "curvature", "coupling", "rows")


@dataclass(frozen=True)
class Setting:
    """A trained transformer and its pictures."""

    model: nn.Module
    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    sites: tuple[str, ...]
    samples: int
    steps: int
    half: bool = False  # fine-tuned in bfloat16

    @classmethod
    def trained(cls, part: str) -> Setting:
        """The larger network has fewer test pictures and steps, because each takes longer."""
        network, count, steps = {"grid": ("vit", None, 100), "deit": ("deit", 1000, 25)}[part]
        training = TRAININGS[network]
        images, held_out = training.data, slice(DEVELOPMENT, count and DEVELOPMENT + count)
        test = images.test[held_out], images.test_labels[held_out]
        train = images.train, images.train_labels
        return cls(training.model(), train, test, training.sites, 1024, steps, training.half)

    @classmethod
    def quick(cls) -> Setting:
        """Random weights and noise."""
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(128, 3, 32, 32)).astype(np.float32), rng.integers(0, 10, 128)
        model = models.randomise(models.DeiT((32,) * 2, width=16, heads=2, size=32, patch=16, classes=10))
        return cls(model, (x, y), (x, y), tuple(f"blocks.{i}.mlp.act" for i in range(2)), 128, 2)


def statistics(setting: Setting, program: cmrc.Program, sites: Sequence[str], loss: str) -> tuple[cmrc.Stats, Any]:
    """Of the class token where only that is read, else of all tokens (and fewer pictures)."""
    last = len(sites) == 1
    count = setting.samples if last else setting.samples // 4
    rows = np.random.default_rng(0).permutation(len(setting.train[0]))[:count]
    x, y = (part[rows] for part in setting.train)
    data = [(x[i : i + 64], y[i : i + 64]) for i in range(0, count, 64)]
    positions = 0 if last else "all"
    return cmrc.calibrate(program, data, sites=list(sites), need=NEED, loss=loss, positions=positions), data


def tuned_accuracy(module: nn.Module, setting: Setting) -> float:
    """In per cent, after the same steps for every module."""
    images = Images(*setting.train, *setting.test)
    model = tuned(module, images, setting.steps, rate=3e-4, decay=5e-2, half=setting.half)
    return 100 * accuracy(logits(model, images.test), images.test_labels)


def cell(setting: Setting, program: cmrc.Program, plan: cmrc.Plan, plain: np.ndarray, tune: bool) -> dict[str, float]:
    """Zero-shot and after fine-tuning, in per cent."""
    lowered = cmrc.lower(program, plan)
    x, labels = setting.test
    outputs = logits(lowered.module.eval(), x)
    row = {"zero-shot": 100 * accuracy(outputs, labels), "kl": divergence(plain, outputs)}
    row["macs"] = lowered.report.after.macs
    if tune:
        row["tuned"] = tuned_accuracy(lowered.module, setting)
    return row


def grid(setting: Setting, resumed: Resumed) -> dict[str, Any]:
    example = torch.from_numpy(setting.test[0][:2])
    program = cmrc.trace(setting.model, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    plain = logits(setting.model, setting.test[0])
    rows = []
    for where, sites in (("last block", setting.sites[-1:]), ("all blocks", setting.sites)):
        known = cache(partial(statistics, setting, program, sites))  # by the loss; not asked where a run goes on
        for keep in progress(KEEPS, where):
            for method, options in METHODS.items():
                loss = "kl" if method == "joint, task" else "cross-entropy"
                if method.startswith("joint") and where == "all blocks":
                    options = {**options, "recompute": "fits"}

                def made(loss: str = loss, options: Any = options, keep: float = keep) -> Any:
                    stats, data = known(loss)  # noqa: B023
                    positions = {"positions": 0 if where == "last block" else "all"}  # noqa: B023
                    plan = cmrc.plan(program, stats, data=data, sites=list(sites), keep=keep, **positions, **options)  # noqa: B023
                    return cell(setting, program, plan, plain, tune=where == "last block" or keep == 0.5)  # noqa: B023

                row = resumed(f"{where} {keep} {method}", made)
                print(where, keep, method, {k: round(v, 3) for k, v in row.items()}, flush=True)
                rows.append({"where": where, "keep": keep, "method": method, **row})
    baseline = {"zero-shot": 100 * accuracy(plain, setting.test[1])}
    baseline["tuned"] = resumed("baseline", lambda: whole(setting, program))
    return {
        "rows": rows,
        "baseline": baseline,
        "steps": setting.steps,
        "samples": setting.samples,
        "pictures": len(setting.test[0]),
        "claims": judged(rows),
    }


def whole(setting: Setting, program: cmrc.Program) -> float:
    """The network itself after the same fine-tuning."""
    module = cmrc.lower(program, cmrc.Plan(program)).module
    return tuned_accuracy(module, setting)


def judged(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    claims = []
    for where in ("last block", "all blocks"):
        for keep in KEEPS:
            some = {row["method"]: row for row in rows if (row["where"], row["keep"]) == (where, keep)}
            theirs = min(row["kl"] for method, row in some.items() if method not in OURS)
            mine = min(row["kl"] for method, row in some.items() if method in OURS)
            claims.append(
                claim(f"{where}, keep {keep}: zero-shot KL, our best over the paper's best", mine / theirs, "<", 1.0)
            )
    return claims


def grid_body(record: Record) -> str:
    parts = [
        "Baseline {:.2f} %, after the same fine-tuning {:.2f} % (paper: {}).\n".format(
            record["baseline"]["zero-shot"], record["baseline"]["tuned"], BASELINE
        )
    ]
    rows = record["rows"]

    def of(where: str, keep: float, method: str) -> dict[str, Any]:
        return next(r for r in rows if (r["where"], r["keep"], r["method"]) == (where, keep, method))

    lines_made = []
    for method in METHODS:
        cells = []
        for i, keep in enumerate(KEEPS):
            averages = of("last block", keep, method)
            paper = f" (paper {TUNED[method][i]:.2f})" if method in TUNED else ""
            cells.append(f"{averages['zero-shot']:.2f} → {averages['tuned']:.2f}{paper}")
        lines_made.append((f"*{method}*" if method in OURS else method, *cells, ZERO_SHOT.get(method, "")))
    head = ("method", *(f"keep {keep}" for keep in KEEPS), "paper's zero-shot")
    parts += ["Last block, accuracy in per cent, zero-shot → fine-tuned:\n", table(head, lines_made)]
    lines_made = []
    for method in METHODS:
        averages = [of("all blocks", keep, method) for keep in KEEPS]
        cells = [
            f"{f['zero-shot']:.2f} / {f['kl']:.3f}" + (f" → {f['tuned']:.2f}" if "tuned" in f else "") for f in averages
        ]
        lines_made.append((f"*{method}*" if method in OURS else method, *cells))
    parts += ["All blocks, accuracy / KL zero-shot (→ accuracy fine-tuned, at half):\n", table(head[:-1], lines_made)]
    return "\n".join((*parts, claims(record["claims"])))


def grid_draw(record: Record, figure: Figure) -> None:
    """Fine-tuned accuracy stands over the multiply-accumulates where the record has them, as in the paper's figure."""
    panels = figure.subplots(1, 3, sharey=True)
    shown = (("last block", "zero-shot"), ("last block", "tuned"), ("all blocks", "zero-shot"))
    for panel, (where, number) in zip(panels, shown, strict=True):
        over_macs = number == "tuned" and "macs" in record["rows"][0]
        for i, method in enumerate(METHODS):
            some = [r for r in record["rows"] if (r["where"], r["method"]) == (where, method)]
            style = {
                "color": COLOURS[i % 7],
                "linestyle": "-" if method in OURS else "--",
                "marker": "os"[method in OURS],
            }
            x = [r["macs"] / 1e6 if over_macs else r["keep"] for r in some]
            panel.plot(x, [r[number] for r in some], markersize=4, label=method, **style)
        panel.axhline(record["baseline"][number], color="grey", linestyle=":", label="whole network")
        panel.set_title(f"{where}, {'fine-tuned' if number == 'tuned' else number}", fontsize=10)
        if over_macs:
            panel.set_xticks(x, [f"{millions:.1f}\n(keep {keep})" for millions, keep in zip(x, KEEPS, strict=True)])
            panel.set_xlabel("multiply-accumulates, millions")
        else:
            panel.set_xticks(KEEPS)
            panel.set_xlabel("part of the units that is kept")
    panels[0].set_ylabel("accuracy, %")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)


# ---------------------------------------------------------------- DeiT-Tiny's shape

CONVENTIONS = ("linear and convolution", "with their biases", "with attention's products")


def additions(graph: Graph) -> int:
    """Of biases: one for every output of a linear op or convolution that has one."""
    biased = [n for n in graph.nodes if n.op in ("linear", "conv") and len(n.inputs) > 2 and n.inputs[2] is not None]
    return sum(elements(node.output.shape, {}) for node in biased)


def products(graph: Graph) -> int:
    """Multiply-accumulates inside attention ops: queries with keys, then weights with values."""
    shapes = {name: value.shape for name, value in graph.values().items()}
    return sum(macs(node, shapes, {}) for node in graph.nodes if node.op == "attention")


def counts(graph: Graph, total: int) -> dict[str, int]:
    """`total` is what `cmrc` counts: affine ops and attention's products, no additions."""
    plain, inside = total - products(graph), products(graph)
    with_biases = plain + additions(graph)
    return dict(zip(CONVENTIONS, (plain, with_biases, with_biases + inside), strict=True))


def shape(quick: bool, threads: int) -> dict[str, Any]:
    case = models.deit(2, size=32) if quick else models.deit()
    program = cmrc.trace(case.original(), (case.inputs(2),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    rows = [
        {
            "name": "original",
            "parameters": program.cost().parameters,
            "macs": counts(program.graph, program.cost().macs),
        }
    ]
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        files = [Path(scratch) / "original.onnx"]
        cmrc.lower(program, cmrc.Plan(program)).save(files[0])
        exported = cmrc.trace(files[0])
        for where, sites in (("last block", case.sites[-1:]), ("all blocks", case.sites)):
            for keep in KEEPS[-1:] if quick else KEEPS:
                lowered = cmrc.lower(program, drawn(program, sites, case.widths[0], keep))
                after = lowered.report.after
                sizes = {"parameters": after.parameters, "macs": counts(lowered.graph, after.macs)}
                rows.append({"name": f"{where}, keep {keep}", **sizes})
                files.append(Path(scratch) / f"{where}-{keep}.onnx")
                cmrc.lower(exported, drawn(exported, sites, case.widths[0], keep)).save(files[-1])
        sessions, rounds = (1, 2) if quick else (4, 6)
        timed = bench(
            files, batch=8, threads=threads, sessions=sessions, rounds=rounds, watch=lambda s: progress(s, "runs")
        )
    for row, file in zip(rows, timed.files, strict=True):
        row |= {"throughput": timed.ratio(file), "per second": timed.samples / file.median, "bytes": file.bytes}
    return {"rows": rows, "clock": timed.clock, "claims": shape_judged(rows)}


def drawn(program: cmrc.Program, sites: Sequence[str], units: int, keep: float) -> cmrc.Plan:
    """Constants for units at random: which ones makes no difference to size and speed."""
    plan, draw = cmrc.Plan(program), np.random.default_rng(0)
    for site in sites:
        gone = np.sort(draw.permutation(units)[round(keep * units) :])
        plan.do(site, units=gone, constant=draw.normal(size=len(gone)))
    return plan


def shape_judged(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The paper's 5.32 to 5.47 M parameters and 1.04 to 1.06 G MACs, as it rounds them."""
    last = [row for row in rows if row["name"].startswith("last")]
    sizes = [(row["parameters"] / 1e6, row["macs"][CONVENTIONS[1]] / 1e9) for row in last]
    claims = []
    for what, place, ends in (("parameters, millions", 0, (5.32, 5.47)), ("MACs, billions", 1, (1.04, 1.06))):
        for paper, mine in zip(ends, (sizes[-1][place], sizes[0][place]), strict=True):
            claims.append(
                claim(f"{what}: rounded, less the paper's {paper}, absolute", abs(round(mine, 2) - paper), "<=", 1e-9)
            )
    return claims


def shape_body(record: Record) -> str:
    rows = []
    for row in record["rows"]:
        macs = (f"{row['macs'][name] / 1e9:.3f}" for name in CONVENTIONS)
        ratio, low, high = row["throughput"]
        rows.append(
            (
                row["name"],
                f"{row['parameters'] / 1e6:.2f}",
                *macs,
                f"{ratio:.3f} ({low:.3f} to {high:.3f})",
                f"{row['per second']:.1f}",
            )
        )
    head = (
        "",
        "parameters, M",
        *(f"G MACs: {name}" for name in CONVENTIONS),
        "throughput / original's",
        "pictures a second",
    )
    return "\n".join((table(head, rows), claims(record["claims"])))


SECTIONS = (
    Section("transformer_deit", "Feed-forward units of DeiT-Tiny (table 3)", """The paper's network (12 blocks, 192 wide, 3 heads, FFN 768), but trained from nothing on CIFAR-10, 32 px in patches of 8: neither ImageNet nor
pretrained weights are to be had here. It had eight epochs, about twenty minutes of processor time, which is what an hour of a shared machine gave, so its
accuracy is low. The protocol is the paper's: the last block's FFN, scored on the class token of {samples} pictures, one seed, and the same fine-tuning for all,
but {steps} steps instead of ten epochs. With {pictures} test pictures, differences below three points mean little.

The paper (ImageNet-100) finds that before fine-tuning CMR-Const loses some accuracy, CMR-Affine nearly all and the others none, and that fine-tuning brings
everything, even random selection, within 0.7 points of the baseline: the last block does not tell methods apart. Nor does it here. Zero-shot CMR-Affine
loses much, if not nearly all, and CMR-Const nothing. So few steps of fine-tuning cost the whole network some accuracy, too; after them all methods
stand close together, CMR-Affine at a quarter a little below. The FFNs of all blocks do tell methods apart: there joint selection with affine maps, each block
fitted after those before it (in italics, ours), has a small part of the others' KL.
""", grid_body, grid_draw, ("deit",), (8.4, 4.4)),
    Section("transformer_grid", "Feed-forward units of a small vision transformer", """The same protocol on a small ViT for CIFAR-10 (four blocks, 64 wide, FFN 256, patches of 4), with {steps} steps of fine-tuning and 6000 test
pictures, so differences below 1.2 points mean little. Zero-shot and in the last block methods differ as in the paper: CMR-Const loses some accuracy, CMR-Affine
most, the others none. {steps} steps bring back most of what those two lose, but not all; the others stay where they were. Over all blocks joint selection with
affine maps has a small part of the others' KL here, too.
""", grid_body, grid_draw, ("grid",), (8.4, 4.4)),
    Section("transformer_shape", "DeiT-Tiny's size and speed", """DeiT-Tiny's shape (12 blocks, 192 wide, 3 heads, patches of 16, 224 px) with 100 classes and random weights. The paper states 5.32 to
5.47 M parameters and 1.04 to 1.06 G MACs for the last block's FFN at keep 0.25 to 0.75. The MACs are met if linear layers and the
patch convolution count with their bias additions, and attention's two products do not count (as in common counters that see
modules only); `cmrc`'s own report counts attention's products and no additions. Throughput of the ONNX files by `cmrc bench`, batch 8, clock: {clock}.
""", shape_body, None, ("shape",)),
)  # fmt: skip


def main() -> None:
    options_of = parser(__doc__, "transformer_{part}.json")
    options_of.add_argument("part", choices=("deit", "grid", "shape"))
    options = options_of.parse_args()
    use_threads(options.threads)
    resumed = Resumed(options.json)
    if options.part == "shape":
        outcome = shape(options.quick, options.threads)
        for row in outcome["rows"]:
            print(row)
    else:
        outcome = grid(Setting.quick() if options.quick else Setting.trained(options.part), resumed)
    write_record(
        options.json, f"transformer, {options.part}", [], options, **outcome, wall_seconds=round(resumed.seconds, 1)
    )
    resumed.forget()


if __name__ == "__main__":
    main()
