"""What some minutes of training give back, without labels: ours, and Torch-Pruning with ordinary distillation.

python -m benchmarks.recovery resnet | vit | minilm | efficientnet     [--minutes 10] [--quick]

Both networks have 0.6 of the multiply-accumulates. Ours is planned by `budget: macs` and trained by `cmrc.recover`; the peer's units
are chosen by Torch-Pruning's Taylor scores, uniformly, and the pruned module is trained by plain Adam on the same loss and the
same data. Minutes are of the processor, of one thread, and count everything: the teacher, the steps, and what is held out.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import cmrc
from benchmarks import data, subjects, weights
from benchmarks.allocation import OPTIONS
from benchmarks.curves import classifier
from benchmarks.measure import Resumed, console, parser, use_threads, write_record
from benchmarks.pretrained import stand_in
from benchmarks.pruners import sizes_of_module, torch_pruned
from benchmarks.section import Record, Section, claim, claims, table
from benchmarks.subjects import Batch, Subject, torch_run
from benchmarks.trained import STAND_INS, TRAININGS

SHARE = 0.6
MINUTES = 10.0


@dataclass(frozen=True)
class Case:
    """A network, the data that it is trained on, and the rate of the peer's Adam: a usual one, which was not tuned."""

    subject: Subject
    train: list[Batch]
    rate: float
    classes: bool = True
    share: float = SHARE  # of the multiply-accumulates


def trained_here(name: str, title: str, writers: tuple[str, ...], quick: bool) -> Case:
    training = (STAND_INS if quick else TRAININGS)[name]
    subject = classifier(training, title, 100 if quick else 1000)
    images = training.data

    def losses(module: nn.Module) -> Iterator[torch.Tensor]:
        for batch in subject.batches:
            x = torch.from_numpy(batch["x"])
            with torch.no_grad():
                own = subject.model(x).argmax(1)  # type: ignore[operator]
            yield functional.cross_entropy(module(x), own)

    x = images.train[: 200 if quick else 50_000]
    train = [{"x": x[i : i + 64]} for i in range(0, len(x) - 63, 64)]
    return Case(replace(subject, writers=writers, losses=losses), train, 1e-3)


def minilm(quick: bool) -> Case:
    if quick:
        return of_stand_in("minilm, in torch")
    subject = subjects.minilm()
    _, tokenizer = weights.minilm()
    found = tokenizer(subjects.sentences(data.chapters()[:60], 6000), padding="max_length", max_length=64, truncation=True,
                      return_tensors="np")  # fmt: skip
    ids, mask = found["input_ids"].astype(np.int64), found["attention_mask"].astype(np.int64)
    train = [{"ids": ids[i : i + 32], "mask": mask[i : i + 32]} for i in range(0, len(ids) - 31, 32)]
    return Case(subject, train, 1e-4, classes=False)


def efficientnet(quick: bool) -> Case:
    if quick:
        return of_stand_in("efficientnet")
    subject, rng = subjects.efficientnet(), np.random.default_rng(1)
    pictures = data.cifar10_pictures()["train"]
    enlarged = subjects.enlarge(pictures[rng.permutation(len(pictures))[:1000]])
    x = np.concatenate([enlarged, subjects.photo_crops(rng, 600)])
    x = x[rng.permutation(len(x))]
    return Case(subject, [{"inputs": x[i : i + 16]} for i in range(0, len(x), 16)], 1e-4)


def of_stand_in(name: str) -> Case:
    subject = stand_in(name)
    return Case(subject, [{"x": subject.batches[0]["x"][i : i + 8]} for i in range(0, 24, 8)], 1e-4, share=0.9)


CASES: dict[str, Callable[[bool], Case]] = {
    "resnet": lambda quick: trained_here("resnet", "ResNet-8", tuple(f"blocks.{i}.conv1" for i in range(3)), quick),
    "vit": lambda quick: trained_here("vit", "ViT", tuple(f"blocks.{i}.mlp.fc1" for i in range(4)), quick),
    "minilm": minilm,
    "efficientnet": efficientnet,
}


def ours(case: Case, minutes: float, recover: Mapping[str, Any]) -> dict[str, Any]:
    subject = case.subject
    budget = {"of": "macs", "amount": round(case.share * subject.program.cost().macs)}
    given = {**OPTIONS, **subject.recipe, "sites": subject.sites, "budget": budget}
    lowered = cmrc.lower(subject.program, cmrc.plan(subject.program, data=subject.batches, **given))
    before = subject.judge(torch_run(lowered.module.eval()))
    size = len(next(iter(case.train[0].values())))
    recovered = cmrc.recover(
        subject.program, lowered, case.train, minutes=minutes, batch=size, clock=time.process_time,
        tell=lambda round: console.print(round), **recover,
    )  # fmt: skip
    assert recovered.recovery is not None
    after = subject.judge(torch_run(recovered.module.eval()))
    size_after = {"macs": lowered.report.after.macs, "parameters": lowered.report.after.parameters}
    told = {key: value for key, value in recovered.recovery.to_json().items() if key != "trained"}
    return {**size_after, "before": before, "after": after, "recovery": told}


def peer(case: Case, minutes: float) -> dict[str, Any]:
    subject = case.subject
    assert isinstance(subject.model, nn.Module)
    whole = sizes_of_module(subject.model, subject.example)["macs"]
    low, high = 0.05, 1.0
    for _ in range(6):  # the largest uniform share of units that has no more multiply-accumulates
        middle = (low + high) / 2
        pruned = torch_pruned(subject.model, subject.example, subject.writers, "L2 of the layer", keep=middle)
        small = sizes_of_module(pruned, subject.example)["macs"]
        low, high = (middle, high) if small <= case.share * whole else (low, middle)
    pruned = torch_pruned(subject.model, subject.example, subject.writers, "Taylor", losses=subject.losses, keep=low)
    size = sizes_of_module(pruned, subject.example)
    before = subject.judge(torch_run(pruned))
    trained, steps = distilled(subject.model, pruned, case, minutes)
    return {**size, "before": before, "after": subject.judge(torch_run(trained)), "steps": steps}


def distilled(teacher: nn.Module, student: nn.Module, case: Case, minutes: float) -> tuple[nn.Module, int]:
    """Plain Adam with a falling rate; batch norm keeps its statistics, since training them made networks worse."""
    student = copy.deepcopy(student).eval()
    optimiser = torch.optim.Adam(student.parameters(), lr=case.rate)
    start, steps = time.process_time(), 0
    rng = np.random.default_rng(0)
    while True:
        for i in rng.permutation(len(case.train)):
            share = (time.process_time() - start) / (60 * minutes)
            if share >= 1:
                return student, steps
            for group in optimiser.param_groups:
                group["lr"] = case.rate * 0.5 * (1 + math.cos(math.pi * share))
            inputs = [torch.from_numpy(array) for array in case.train[i].values()]
            with torch.no_grad():
                taught = teacher(*inputs)
            answered = student(*inputs)
            if case.classes:
                p, q = taught.log_softmax(-1), answered.log_softmax(-1)
                loss = (p.exp() * (p - q)).sum(-1).mean()
            else:
                loss = (answered - taught).square().sum(-1).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            steps += 1


def measure(case: Case, minutes: float, resumed: Resumed) -> dict[str, Any]:
    subject = case.subject
    assert isinstance(subject.model, nn.Module)
    whole = subject.judge(torch_run(subject.model))
    mine = resumed("ours", lambda: ours(case, minutes, {}))
    theirs = resumed("peer", lambda: peer(case, minutes))
    number = next(iter(mine["before"]))
    found = [
        claim(f"{subject.name}: {number}, after over before", mine["after"][number] / mine["before"][number], "<=", 0.5),
        claim(f"{subject.name}: {number}, ours over the peer's, after", mine["after"][number] / theirs["after"][number], "<", 1.0),
    ]  # fmt: skip
    if "accuracy" in whole:
        lost = whole["accuracy"] - mine["after"]["accuracy"]
        found.append(claim(f"{subject.name}: accuracy lost to the whole network", lost, "<=", 0.005))
    return {
        "name": subject.name, "subject": subject.what, "number": number, "whole": whole, "minutes": minutes,
        "macs": subject.program.cost().macs, "ours": mine, "peer": theirs, "claims": found,
    }  # fmt: skip


# ---------------------------------------------------------------- the page


def body(record: Record) -> str:
    head = ("", "MACs", *(f"{key}: zero-shot / after" for key in record["whole"]))
    rows = [("whole", "1", *(f"{value:.4f}" for value in record["whole"].values()))]
    for way, name in (("ours", "cmrc"), ("peer", "Torch-Pruning, Taylor")):
        row = record[way]
        cells = (f"{row['before'][key]:.4f} / {row['after'][key]:.4f}" for key in record["whole"])
        rows.append((name, f"{row['macs'] / record['macs']:.3f}", *cells))
    return "\n".join((f"{record['name']}: {record['subject']}.\n", table(head, rows), claims(record["claims"])))


TITLES = {
    "resnet": "ResNet-8 on CIFAR-10", "vit": "ViT on CIFAR-10", "minilm": "MiniLM-L6", "efficientnet": "EfficientNet-Lite0",
}  # fmt: skip
TEXT = """At 0.6 of the multiply-accumulates, zero-shot and after {minutes:g} minutes of the processor (one thread), without labels. Ours:
`budget: {{of: macs, ...}}`, then `cmrc.recover` with its defaults. The peer: units by Torch-Pruning's Taylor scores, then Adam on
the same loss and data for the same time.
"""
SECTIONS: tuple[Section, ...] = tuple(
    Section(f"recovery_{name}", f"Recovery: {title}", TEXT, body, None, (name,)) for name, title in TITLES.items()
)


def main() -> None:
    made = parser(__doc__.splitlines()[0], "recovery_{subject}.json")
    made.add_argument("subject", choices=list(CASES))
    made.add_argument("--minutes", type=float, default=MINUTES, help="of the processor, for each of the two")
    options = made.parse_args()
    use_threads(options.threads)
    torch.manual_seed(0)
    resumed = Resumed(options.json)
    minutes = 0.05 if options.quick else options.minutes
    record = measure(CASES[options.subject](options.quick), minutes, resumed)
    write_record(options.json, f"recovery, {options.subject}", [], options, **record, wall_seconds=resumed.seconds)
    resumed.forget()


if __name__ == "__main__":
    main()
