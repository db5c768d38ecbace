"""What selection and replacement do to trained networks, without fine-tuning.

python -m benchmarks.selection [--quick] mnist | resnet | vit

mnist     784-512-512-10, the last hidden layer: accuracy by what is kept, and logit distortion under interchange
resnet    CIFAR-10, half of the inner channels of every block: the same affine folds for every selector, and Torch-Pruning
vit       CIFAR-10, half of the units of every FFN: the same
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import cmrc
from benchmarks.charts import OURS, PEER, bars
from benchmarks.charts import PUBLISHED as AS_PUBLISHED
from benchmarks.measure import parser, use_threads, write_record
from benchmarks.pruners import sizes_of_module, torch_pruned
from benchmarks.section import Record, Section, claim, claims, table
from benchmarks.subjects import divergence
from benchmarks.trained import STAND_INS, TRAININGS, Training, accuracy, logits, tuned
from cmrc.ir.axes import complement

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEEPS = (256, 128, 64)
DEVELOPMENT = 4000  # the first test images of CIFAR-10: ways to fit were compared on them, so nothing is measured there


def traced(training: Training) -> cmrc.Program:
    example = torch.from_numpy(training.data.train[:2])
    return cmrc.trace(training.model(), (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))


def calibration(training: Training, samples: int, size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Batches of training images, without labels where none are needed."""
    chosen = np.random.default_rng(0).permutation(len(training.data.train))[:samples]
    x, y = training.data.train[chosen], training.data.train_labels[chosen]
    return [(x[i : i + size], y[i : i + size]) for i in range(0, samples, size)]


# ---------------------------------------------------------------- MNIST


def mnist(quick: bool) -> dict[str, Any]:
    training = (STAND_INS if quick else TRAININGS)["mlp"]
    program, images = traced(training), training.data
    batches = calibration(training, 1000 if quick else 10_000, 500)
    need = ("scatter", "range", "curvature", "coupling", "rows")
    stats = cmrc.calibrate(program, batches, sites="acts.1", need=need)
    site, weight = stats["acts.1"], training.model().layers[-1].weight.detach().double().numpy()
    plain = program.run([images.test])[0]
    a = program.run([images.test], [site.columns.value])[-1].astype(np.float64)
    methods = {
        "constant: cmr-logit": {"preset": "cmr-logit"},
        "constant: reconstruction": {"preset": "reconstruction"},
        "constant: cmr-logit, refitted": {"preset": "cmr-logit", "replace": "refit"},
        "constant: reconstruction, refitted": {"preset": "reconstruction", "replace": "refit"},
        "constant: cmr-const": {"preset": "cmr-const"},
        "constant: cmr-const-refit": {"preset": "cmr-const-refit"},
        "affine: cmr-affine": {"preset": "cmr-affine", "gradient": True},
        "affine: cmr-logit": {"preset": "cmr-logit", "replace": "affine"},
        "affine: joint": {"preset": "joint"},
        "affine for interchange: joint-interchange": {"preset": "joint-interchange"},
    }
    rows: list[dict[str, Any]] = []
    for keep in KEEPS:
        for name, options in methods.items():
            plan = cmrc.plan(program, stats, sites=["acts.1"], keep=keep, **options)
            outputs = cmrc.lower(program, plan).host.run([images.test])[0]
            rows.append(
                {"keep": keep, "method": name, "accuracy": accuracy(outputs, images.test_labels),
                 "kl": divergence(plain, outputs), "d2": swapped_distortion(plan.entries[0], a, weight)}
            )  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)

    def of(keep: int, name: str, key: str) -> float:
        return float(next(row[key] for row in rows if (row["keep"], row["method"]) == (keep, name)))

    constants = [name for name in methods if name.startswith("constant")]
    swaps = "affine for interchange: joint-interchange"
    ratios = {keep: of(keep, swaps, "d2") / min(of(keep, n, "d2") for n in constants) for keep in KEEPS}
    claims = [
        claim("constant replacement at keep 64, accuracy", max(of(64, n, "accuracy") for n in constants), ">=", 0.83),
        claim("affine/logit at keep 64, accuracy", of(64, "affine: cmr-logit", "accuracy"), ">=", 0.977),
        claim("joint selection at keep 64, accuracy", of(64, "affine: joint", "accuracy"), ">=", 0.978),
        claim("interchange-fitted D2 over the best constant's, worst keep", max(ratios.values()), "<=", 0.6),
    ]
    return {"baseline": accuracy(plain, images.test_labels), "rows": rows, "claims": claims}


def swapped_distortion(entry: Any, a: np.ndarray, weight: np.ndarray, p: float = 0.5) -> float:
    """E‖z_H − z_L‖² where every kept unit is swapped with that of another sample with probability p."""
    rng, units = np.random.default_rng(0), list(entry.units)
    keep = complement(units, a.shape[1])
    mixed = a.copy()
    mixed[:, keep] = np.where(rng.random((len(a), len(keep))) < p, a[rng.permutation(len(a))][:, keep], a[:, keep])
    rebuilt = entry.constant + (mixed[:, list(entry.parents)] @ entry.weight.T if entry.weight is not None else 0.0)
    return float((((rebuilt - mixed[:, units]) @ weight[:, units].T) ** 2).sum(1).mean())


# ---------------------------------------------------------------- CIFAR-10


PUBLISHED = "ridge folding (CORP, GRAIL): L2, all parents, one pass"
SELECTORS = {
    "joint": {"preset": "joint-task"},
    "joint, next layer only": {"preset": "joint"},
    "CMR-Const": {"preset": "cmr-const", "replace": "affine"},
    "CMR-Logit": {"preset": "cmr-logit", "replace": "affine"},
    "VBP": {"preset": "vbp", "replace": "affine"},
    "L2": {"preset": "magnitude", "replace": "affine"},
    "Taylor": {"preset": "taylor", "replace": "affine"},
    "random": {"preset": "random", "replace": "affine"},
    PUBLISHED: {"preset": "magnitude", "replace": "affine", "recompute": "never"},
    "joint, constants": {"preset": "reconstruction"},
    "CMR-Const refitted, constants": {"preset": "cmr-const-refit", "loss": "kl"},
}
CONSTANTS = ("joint, constants", "CMR-Const refitted, constants")
TUNED = ("joint", PUBLISHED, "Torch-Pruning group norm", "Torch-Pruning Taylor")
TUNING_STEPS = 60
RIVALS = ("CMR-Logit", "VBP", "L2", "Taylor", "random")


def cifar(name: str, quick: bool) -> dict[str, Any]:
    training = (STAND_INS if quick else TRAININGS)[name]
    program, images, sites = traced(training), training.data, list(training.sites)
    count = 100 if quick else 600
    batches = calibration(training, count, 50)
    stats = with_task_gradients(program, batches, sites)
    held_out = slice(0 if quick else DEVELOPMENT, None)
    test, labels = images.test[held_out], images.test_labels[held_out]
    plain, example = logits(training.model(), test), (torch.from_numpy(test[:1]),)
    steps = 2 if quick else TUNING_STEPS
    rows = []

    def add(method: str, folds: str, model: nn.Module) -> None:
        outputs = logits(model.eval(), test)
        apart = float(np.linalg.norm(outputs - plain) / np.linalg.norm(plain))
        rows.append({"method": method, "folds": folds, "accuracy": accuracy(outputs, labels),
                     "kl": divergence(plain, outputs), "error": apart, **sizes_of_module(model, example)})  # fmt: skip
        if method in TUNED:
            rows[-1]["tuned"] = accuracy(logits(tuned(model, images, steps), test), labels)
        print(json.dumps(rows[-1]), flush=True)

    for label, options in SELECTORS.items():
        for seed in range(3) if label == "random" else range(1):
            plan = cmrc.plan(
                program, stats, data=batches, sites=sites, keep=0.5, multiple_of=1, seed=seed,
                **{"recompute": "fits", **options},
            )  # fmt: skip
            folds = "constant" if label in CONSTANTS else "affine"
            add(label, folds, cmrc.lower(program, plan).module)
    for label, model in torch_pruning(training, batches):
        add(f"Torch-Pruning {label}", "zero", model)
    whole = {"accuracy": accuracy(plain, labels), **sizes_of_module(training.model(), example)}
    whole["tuned"] = accuracy(logits(tuned(training.model(), images, steps), test), labels)
    return {"baseline": whole["accuracy"], "whole": whole, "rows": rows, "claims": cifar_claims(rows), "samples": count,
            "steps": steps}  # fmt: skip


def with_task_gradients(program: cmrc.Program, batches: list[Any], sites: list[str]) -> cmrc.Stats:
    """Statistics with the curvature of the KL to the model itself, and Taylor's gradient of the task."""
    need = ("scatter", "range", "curvature", "coupling")
    stats = cmrc.calibrate(program, batches, sites=sites, need=need, loss="kl")
    labelled = cmrc.calibrate(
        program, batches, sites=sites, need=("scatter", "curvature"), curvature="monte-carlo", draws=1
    )
    for value, site_stats in stats.sites.items():
        site_stats.arrays["abs_ga"] = labelled.sites[value].arrays["abs_ga"]
    return stats


def cifar_claims(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    def of(label: str, key: str) -> list[float]:
        return [float(row[key]) for row in rows if row["method"] == label]

    peers = [row for row in rows if row["folds"] == "zero"]
    others = [k for rival in RIVALS for k in of(rival, "kl")]
    best = min(float(row["kl"]) for row in peers)
    return [
        claim("KL of joint selection over the best other selector's", of("joint", "kl")[0] / min(others), "<", 1.0),
        claim("accuracy of joint selection less the best other selector's",
              of("joint", "accuracy")[0] - max(a for rival in RIVALS for a in of(rival, "accuracy")), ">", 0.0),
        claim("KL of joint selection over Torch-Pruning's best", of("joint", "kl")[0] / best, "<=", 1 / 3),
        claim("accuracy after tuning, joint selection less Torch-Pruning's best",
              of("joint", "tuned")[0] - max(float(row["tuned"]) for row in peers if "tuned" in row), ">=", 0.0),
    ]  # fmt: skip


def torch_pruning(training: Training, batches: list[Any]) -> Iterator[tuple[str, nn.Module]]:
    """The same layers cut to half by Torch-Pruning, by each criterion that it has."""
    names = ["L1", "L2 of the layer", "group norm", "LAMP", "FPGM", "Taylor", "random"]
    names += ["BN scale"] if training.name.startswith("resnet") else []

    def losses(model: nn.Module) -> Iterator[torch.Tensor]:
        for x, y in batches:
            yield functional.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y))

    layer = "conv1" if training.name.startswith("resnet") else "fc1"
    layers = [f"{site.rpartition('.')[0]}.{layer}" for site in training.sites]
    for name in names:
        yield name, torch_pruned(training.model(), (torch.from_numpy(batches[0][0][:2]),), layers, name, losses=losses)


# ---------------------------------------------------------------- the page


COLUMNS = {
    "keep": "{}", "method": "{}", "folds": "{}", "accuracy": "{:.4f}", "tuned": "{:.4f}", "kl": "{:.4f}", "d2": "{:.2f}",
    "error": "{:.3f}", "parameters": "{:,}", "macs": "{:,}",
}  # fmt: skip


def body(record: Record) -> str:
    rows = record["rows"]
    head = [key for key in COLUMNS if any(key in row for row in rows)]
    whole = f"The whole network: accuracy {record['baseline']:.4f}"
    if "whole" in record:
        whole_numbers = record["whole"]
        whole += f", after the same tuning {whole_numbers['tuned']:.4f}; {whole_numbers['parameters']:,} parameters, {whole_numbers['macs']:,} MACs"
    cells = [[COLUMNS[key].format(row[key]) if key in row else "" for key in head] for row in rows]
    sizes = (
        f"*tuned* is the accuracy after {record['steps']} further steps of training, the same for all. Parameters and MACs are those of "
        "the same shapes, but for biases and for what keeps folds exact at padded borders.\n\n"
        if "whole" in record
        else ""
    )
    return "\n".join((f"{whole}.\n", claims(record["claims"]), sizes + table(head, cells)))


def draw(record: Record, figure: Figure) -> None:
    kinds = {"zero": PEER, "affine": OURS, "constant": OURS}
    rows = [
        {**row, "kind": AS_PUBLISHED if row["method"] == PUBLISHED else kinds[row["folds"]]} for row in record["rows"]
    ]
    bars(figure, rows, "kl", "KL from the whole network")


NO_TUNING = "No fine-tuning anywhere; the network was trained here (`benchmarks/trained.py`). "
SAME_FOLDS = (
    "The network was trained here (`benchmarks/trained.py`). "
    "Every selector gets the same affine folds, fitted on 600 training images; Torch-Pruning's units are set to zero. "
    "*error* is the distance of the logits from the whole network's, relative to their norm. Measured on 6000 test images that chose "
    "nothing, without fine-tuning but in the column *tuned*, if there is one.\n"
)
SECTIONS = (
    Section(
        "selection_mnist",
        "Selection and replacement: MLP on MNIST, last hidden layer",
        NO_TUNING + "*d2* is the logit distortion under interchange (p = 0.5).\n",
        body,
        arguments=("mnist",),
    ),
    Section(
        "selection_resnet",
        "Selection and replacement: ResNet-8 on CIFAR-10, half of the inner channels of every block",
        SAME_FOLDS,
        body,
        draw,
        ("resnet",),
        (8.0, 5.4),
    ),
    Section(
        "selection_vit",
        "Selection and replacement: ViT on CIFAR-10, half of the units of every FFN",
        SAME_FOLDS,
        body,
        draw,
        ("vit",),
        (8.0, 5.4),
    ),
)


def main() -> None:
    options_of = parser(__doc__.splitlines()[0], "selection_{part}.json")
    options_of.add_argument("part", choices=("mnist", "resnet", "vit"))
    options = options_of.parse_args()
    use_threads(options.threads)
    result = mnist(options.quick) if options.part == "mnist" else cifar(options.part, options.quick)
    write_record(options.json, f"selection, {options.part}", [], options, **result)
    for row in result["claims"]:
        print(
            f"{row['name']}: {row['value']:.4f} {row['relation']} {row['target']:.4f}: {'yes' if row['met'] else 'NO'}"
        )


if __name__ == "__main__":
    main()
