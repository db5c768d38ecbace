"""What some minutes of training give back, without labels: ours, and the best library with ordinary distillation.

python -m benchmarks.recovery resnet | vit | minilm | efficientnet     [--minutes 10] [--only ours] [--quick]

Both networks have 0.6 of the multiply-accumulates. Ours is planned by `budget: macs` with its defaults and trained by `cmrc.recover`; the
peer is Torch-Pruning's network that is best without training (Taylor or group norm, uniform or global), trained by plain Adam on the same
loss and the same data. Minutes are of the processor, of one thread, and count everything: the teacher, the steps, and what is held
out. `--only` measures one of the two, so that both can run at once; the record holds what is there.
"""

from __future__ import annotations

import copy
import json
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
from benchmarks.curves import Matched, classifier
from benchmarks.measure import Resumed, commit, console, parser, use_threads, write_record
from benchmarks.pretrained import stand_in
from benchmarks.pruners import cut_lowest, scores_of, sizes_of_module
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
    tokens = tokenizer(subjects.sentences(data.chapters()[:60], 6000), padding="max_length", max_length=64, truncation=True,
                      return_tensors="np")  # fmt: skip
    ids, mask = tokens["input_ids"].astype(np.int64), tokens["attention_mask"].astype(np.int64)
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


def ours(case: Case, minutes: float) -> dict[str, Any]:
    subject = case.subject
    options = {name: value for name, value in subject.recipe.items() if name in ("positions", "loss")}
    plan = cmrc.plan(subject.program, data=subject.batches, budget={"of": "macs", "amount": case.share}, **options)
    lowered = cmrc.lower(subject.program, plan)
    before = subject.judge(torch_run(lowered.module.eval()))
    recovered = cmrc.recover(
        subject.program, lowered, case.train, minutes=minutes, batch=len(next(iter(case.train[0].values()))),
        clock=time.process_time, tell=lambda round: console.print(round),
    )  # fmt: skip
    assert recovered.recovery is not None
    after = subject.judge(torch_run(recovered.module.eval()))
    size_after = sizes_of_module(lowered.module, subject.example)
    history = {key: value for key, value in recovered.recovery.to_json().items() if key != "trained"}
    return {**size_after, "method": "cmrc", "before": before, "after": after, "recovery": history}


def peer(case: Case, minutes: float) -> dict[str, Any]:
    """The library's network that loses least without training, trained."""
    subject, matched = case.subject, Matched(case.subject)
    assert isinstance(subject.model, nn.Module)
    best: tuple[dict[str, float], str, nn.Module] | None = None
    for name in ("Taylor", "group norm"):
        scores = scores_of(subject.model, subject.example, subject.writers, name, subject.losses)
        counts = {
            "": matched.uniform(case.share),
            ", global": matched.ranked(case.share, [s / s.mean() for s in scores]),
        }
        for way, gone in counts.items():
            pruned = cut_lowest(subject.model, subject.example, subject.writers, scores, gone)
            before = subject.judge(torch_run(pruned))
            number = next(iter(before))
            console.print({"method": f"Torch-Pruning, {name}{way}", **before})
            if best is None or before[number] < best[0][number]:
                best = before, f"Torch-Pruning, {name}{way}", pruned
    assert best is not None
    before, method, pruned = best
    trained, steps = distilled(subject.model, pruned, case, minutes)
    size = sizes_of_module(pruned, subject.example)
    return {**size, "method": method, "before": before, "after": subject.judge(torch_run(trained)), "steps": steps}


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


def measure(case: Case, rows: Mapping[str, dict[str, Any]], minutes: float) -> dict[str, Any]:
    """The record of those of the two that are measured."""
    subject = case.subject
    assert isinstance(subject.model, nn.Module)
    whole = subject.judge(torch_run(subject.model))
    number, checks = next(iter(whole)), []
    if mine := rows.get("ours"):
        before, after = mine["before"], mine["after"]
        checks.append(claim(f"{subject.name}: {number}, after over before", after[number] / before[number], "<=", 0.5))
        if theirs := rows.get("peer"):
            ratio = after[number] / theirs["after"][number]
            checks.append(claim(f"{subject.name}: {number}, ours over the peer's, after", ratio, "<", 1.0))
        if "accuracy" in whole:
            lost = whole["accuracy"] - after["accuracy"]
            checks.append(claim(f"{subject.name}: accuracy lost to the whole network", lost, "<=", 0.005))
    return {
        "name": subject.name, "subject": subject.what, "number": number, "whole": whole, "minutes": minutes,
        "macs": sizes_of_module(subject.model, subject.example)["macs"], **rows, "claims": checks,
    }  # fmt: skip


WAYS: dict[str, Callable[[Case, float], dict[str, Any]]] = {"ours": ours, "peer": peer}


# ---------------------------------------------------------------- the page


def body(record: Record) -> str:
    head = ("", "MACs", *(f"{key}: zero-shot / after" for key in record["whole"]))
    rows = [("whole", "1", *(f"{value:.4f}" for value in record["whole"].values()))]
    for way in WAYS:
        if way not in record:
            continue
        row = record[way]
        cells = (f"{row['before'][key]:.4f} / {row['after'][key]:.4f}" for key in record["whole"])
        rows.append((row["method"], f"{row['macs'] / record['macs']:.3f}", *cells))
    parts = [f"{record['name']}: {record['subject']}.\n", table(head, rows), claims(record["claims"])]
    return "\n".join(parts if "peer" in record else [*parts, "The peer is not measured yet.\n"])


TITLES = {
    "resnet": "ResNet-8 on CIFAR-10", "vit": "ViT on CIFAR-10", "minilm": "MiniLM-L6", "efficientnet": "EfficientNet-Lite0",
}  # fmt: skip
TEXT = """At 0.6 of the multiply-accumulates, zero-shot and after {minutes:g} minutes of the processor (one thread), without labels. Ours:
`budget: {{of: macs, ...}}`, then `cmrc.recover`, both with their defaults. The peer: of Torch-Pruning's networks the best without training, then
Adam on the same loss and data for the same time, its rate not tuned.
"""
SECTIONS: tuple[Section, ...] = tuple(
    Section(f"recovery_{name}", f"Recovery: {title}", TEXT, body, None, (name,)) for name, title in TITLES.items()
)


def main() -> None:
    arguments = parser(__doc__.splitlines()[0], "recovery_{subject}.json")
    arguments.add_argument("subject", choices=list(CASES))
    arguments.add_argument("--minutes", type=float, default=MINUTES, help="of the processor, for each of the two")
    arguments.add_argument(
        "--only", choices=list(WAYS), default=None, help="measure one of the two, and wait for the other"
    )
    options = arguments.parse_args()
    use_threads(options.threads)
    torch.manual_seed(0)
    minutes = 0.05 if options.quick else options.minutes
    case = CASES[options.subject](options.quick)
    parts_of = {way: Resumed(options.json.with_suffix(f".{way}.json")) for way in WAYS}
    for way, measured in WAYS.items():
        if options.only in (None, way):
            parts_of[way]("all", lambda measured=measured: measured(case, minutes))
    finished = {way: Resumed(options.json.with_suffix(f".{way}.json")) for way in WAYS}
    earlier = json.loads(options.json.read_text()) if options.json.exists() else {}
    same = earlier.get("subject") == case.subject.what and earlier.get("minutes") == minutes
    rows = {way: earlier[way] for way in WAYS if same and way in earlier}
    rows |= {way: {**parts.parts["all"], "commit": commit()} for way, parts in finished.items() if "all" in parts.parts}
    seconds = sum(parts.seconds_before for parts in finished.values())
    record = measure(case, rows, minutes)
    write_record(options.json, f"recovery, {options.subject}", [], options, **record, wall_seconds=round(seconds, 1))
    for parts in finished.values() if len(rows) == len(WAYS) else ():
        parts.forget()


if __name__ == "__main__":
    main()
