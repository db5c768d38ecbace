"""The paper's verification tables again: real training, real data, our numbers beside the paper's.

python -m benchmarks.verification boolean     XOR(AND(x1, x2), OR(x3, x4)), MLP 8-64-64-2, six seeds
python -m benchmarks.verification mnist       MLP 784-512-512-10, ten seeds (trains what is not in the cache)

R = 2000 swaps at rate 0.5 of the retained penultimate units; half of the units, or a quarter, kept by each score. The
last lines are the differences that the paper tests, paired over seeds, by the bootstrap.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import cmrc
from benchmarks.data import mnist
from benchmarks.measure import RECORDS, progress, write_record
from benchmarks.models import MLP
from benchmarks.section import Record, Section, claim, claims, table
from benchmarks.trained import Training
from cmrc.bounds import bootstrap

BATCH = torch.export.Dim("batch", min=2, max=65536)
# The paper's cwvar ranks by the score of CMR-Const and folds means; CMR-Const itself folds c*.
METHODS = {
    "CMR-Logit": ("logit", "mean"),
    "VBP": ("variance", "mean"),
    "cwvar": ("task", "mean"),
    "CMR-Const": ("task", "optimal"),
    "random": ("random", "mean"),
}
# accuracy, IIA, KL: means over seeds, from the paper's appendix
PAPER = {
    "boolean": {
        (32, "CMR-Logit"): (1.000, 0.927, 0.172), (32, "VBP"): (0.989, 0.923, 0.234),
        (32, "cwvar"): (0.981, 0.864, 0.527), (32, "random"): (0.921, 0.794, 1.013),
        (16, "CMR-Logit"): (0.987, 0.814, 0.806), (16, "VBP"): (0.951, 0.827, 0.790),
        (16, "cwvar"): (0.928, 0.752, 1.234), (16, "random"): (0.768, 0.710, 1.509),
    },
    "mnist": {
        (384, "CMR-Logit"): (0.981, 0.952, 0.035), (384, "VBP"): (0.981, 0.951, 0.038),
        (384, "cwvar"): (0.981, 0.930, 0.084),
        (256, "CMR-Logit"): (0.980, 0.782, 0.578), (256, "VBP"): (0.979, 0.776, 0.609),
        (256, "cwvar"): (0.980, 0.732, 0.861),
    },
}  # fmt: skip
# What the paper finds significant: keep, better method, worse method, in which number, and which sign.
CLAIMS = {
    "boolean": [(32, "CMR-Logit", "random", "iia", 1), (32, "VBP", "random", "iia", 1),
                (16, "CMR-Logit", "random", "iia", 1), (16, "VBP", "random", "iia", 1)],
    "mnist": [(256, "CMR-Logit", "VBP", "kl", -1)],
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A trained model, calibration data, and held-out data."""

    model: nn.Module
    site: str
    head: np.ndarray
    calibration: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]


def boolean(seeds: int) -> Iterator[Case]:
    """4096 draws of 8 bits, four in five to train on; 2000 of those calibrate."""
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        x = rng.integers(0, 2, size=(4096, 8)).astype(np.float32)
        y = (x[:, 0] * x[:, 1]).astype(np.int64) ^ np.maximum(x[:, 2], x[:, 3]).astype(np.int64)
        model = _fit(MLP((8, 64, 64, 2)), x[:3277], y[:3277], seed)
        yield Case(model, "acts.1", _head(model), (x[:2000], y[:2000]), (x[3277:], y[3277:]))


def _fit(model: nn.Module, x: np.ndarray, y: np.ndarray, seed: int, epochs: int = 60) -> nn.Module:
    torch.manual_seed(seed)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    inputs, labels = torch.from_numpy(x), torch.from_numpy(y)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(128):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
            optimiser.step()
    return model.eval()


def digits(seeds: int) -> Iterator[Case]:
    """All of MNIST, five epochs; 2000 training digits calibrate."""
    images = mnist()
    for seed in range(seeds):
        name = f"mlp-mnist-{seed}"
        model = Training(name, MLP, mnist, ("acts.1",), epochs=5, rate=1e-3, decay=1e-4, seed=seed).model()
        rows = np.random.default_rng(seed).permutation(len(images.train))[:2000]
        calibration = images.train[rows], images.train_labels[rows]
        yield Case(model, "acts.1", _head(model), calibration, (images.test, images.test_labels))


def _head(model: nn.Module) -> np.ndarray:
    return model.layers[-1].weight.detach().numpy().astype(np.float64)


def measure(cases: Iterator[Case], keeps: list[int], swaps: int, count: int) -> dict[tuple[int, str], list[Any]]:
    found: dict[tuple[int, str], list[Any]] = {}
    for seed, case in progress(enumerate(cases), f"{count} seeds"):
        x = torch.from_numpy(case.calibration[0][:2])
        program = cmrc.trace(case.model, (x,), dynamic_shapes=({0: BATCH},))
        for keep in keeps:
            for name, (objective, replace) in METHODS.items():
                plan = cmrc.plan(
                    program, data=[case.calibration], sites=[case.site], keep=keep, seed=seed, objective=objective,
                    replace=replace,
                )  # fmt: skip
                result = cmrc.verify(
                    program, cmrc.lower(program, plan), [case.test], swaps=swaps, seed=seed, controls=False
                )
                assert result.plain.accuracy is not None
                e = result.evidence
                found.setdefault((keep, name), []).append(
                    {
                        "accuracy": result.plain.accuracy[1].value,
                        "iia": result.iia.value,
                        "kl": float(e.kl.mean()),
                        "d2": float(e.squared.mean()),
                        "ladder": {rung.name: [rung.value, rung.bound] for rung in result.ladder},
                    }
                )
    return found


# ---------------------------------------------------------------- the page


def body(record: Record) -> str:
    made = []
    for row in record["rows"]:
        ours = (f"{mean:.3f} ± {deviation:.3f}" for mean, deviation in row["ours"].values())
        made.append((str(row["keep"]), row["score"], "ours", *ours))
        if row["paper"]:
            made.append(("", "", "paper", *(f"{number:.3f}" for number in row["paper"])))
    head = ("keep", "score", "", "accuracy", "IIA", "KL")
    told = "What the paper finds significant, paired over seeds, with 95 % bootstrap intervals:\n"
    return "\n".join((table(head, made), told, claims(record["claims"])))


SECTIONS = (
    Section(
        "verification_boolean",
        "The paper's Boolean circuit",
        """XOR(AND(x1, x2), OR(x3, x4)), MLP 8-64-64-2, penultimate layer, six seeds, 2000 swaps at rate 0.5; means and standard
deviations over seeds, the paper's means below. *cwvar* ranks by the score of CMR-Const and folds means, *CMR-Const* folds c*.
""",
        body,
        arguments=("boolean",),
    ),
    Section(
        "verification_mnist",
        "The paper's MNIST network",
        """MLP 784-512-512-10 trained on all of MNIST, penultimate layer, ten seeds, 2000 swaps at rate 0.5 on the test set. The level of the
IIA depends on how the networks were trained, which the paper does not say; the order of the methods is what can be compared.
""",
        body,
        arguments=("mnist",),
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=sorted(PAPER))
    parser.add_argument("--quick", action="store_true", help="two seeds, to see that it runs")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where to write the record")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    seeds = 2 if options.quick else {"boolean": 6, "mnist": 10}[options.table]
    cases = {"boolean": boolean, "mnist": digits}[options.table](seeds)
    keeps = {"boolean": [32, 16], "mnist": [384, 256]}[options.table]
    found = measure(cases, keeps, 2000, seeds)
    rows, table = (
        [],
        Table("keep", "score", "", "accuracy", "IIA", "KL", title=f"{options.table}, {seeds} seeds", box=None),
    )
    for (keep, name), values in found.items():
        ours = {
            k: (float(np.mean([v[k] for v in values])), float(np.std([v[k] for v in values])))
            for k in ("accuracy", "iia", "kl")
        }
        paper = PAPER[options.table].get((keep, name))
        table.add_row(str(keep), name, "ours", *(f"{m:.3f} ± {s:.3f}" for m, s in ours.values()))
        if paper is not None:
            table.add_row("", "", "paper", *(f"{m:.3f}" for m in paper))
        rows.append({"keep": keep, "score": name, "ours": ours, "paper": paper, "seeds": values})
    Console(width=110).print(table)
    judged = []
    for keep, better, worse, number, sign in CLAIMS[options.table]:
        differences = [a[number] - b[number] for a, b in zip(found[keep, better], found[keep, worse], strict=True)]
        estimate = bootstrap(differences)
        name, relation, end = (
            f"keep {keep}: {better} − {worse}, {number}",
            *((">", estimate.low) if sign > 0 else ("<", estimate.high)),
        )
        judged.append(
            {**claim(f"{name}, the interval's end nearest 0", end, relation, 0.0), "difference": estimate.to_json()}
        )
        print(f"{name}: {estimate} {'as in the paper' if judged[-1]['met'] else 'NOT as in the paper'}")
    if not options.quick or options.json:
        out = options.json or RECORDS / f"verification_{options.table}.json"
        write_record(out, f"verification, {options.table}", [], options, rows=rows, claims=judged)


if __name__ == "__main__":
    main()
