"""What is lost at every size, without fine-tuning: ours by its defaults, beside libraries and published methods.

python -m benchmarks.curves resnet | vit | digits | minilm | magika | recogniser | efficientnet | smollm     [--sizes 0.7 0.5] [--quick]
python -m benchmarks.curves resnet --again cmrc          measure the rows of ours once more, and keep the others

The record is written after every row, and the same command goes on with those that it lacks. A row names the commit that it was measured
at. Sizes are parts of the multiply-accumulates of the whole network. Ours gets a budget of them and nothing else. The others take the same
part of every layer, or share units out by their own rule (named global, adaptive), so that they meet the same budget.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import cmrc
from benchmarks import pruners, subjects
from benchmarks.charts import OURS, PEER, PUBLISHED
from benchmarks.curves_page import DEFAULT, LOSS, OWN, SECTIONS, judge_curves
from benchmarks.latency import quiet_exporters
from benchmarks.measure import STARTED, commit, console, parser, use_threads, write_record
from benchmarks.pretrained import export, file_run, sizes_of_file, stand_in
from benchmarks.pruners import sizes_of_module
from benchmarks.selection import DEVELOPMENT, calibration
from benchmarks.subjects import BATCH, Run, Subject, divergence, in_parts, torch_run
from benchmarks.trained import STAND_INS, TRAININGS, Training, accuracy
from cmrc.hosts.onnx.bench import median_ratio
from cmrc.planning.allocate import Costs
from cmrc.planning.planner import plan_sizes
from cmrc.planning.recipe import make_recipe

__all__ = ["SECTIONS"]

SIZES = (0.9, 0.8, 0.7, 0.6, 0.5)
SAMPLES = 2000  # training pictures to calibrate on
FRONTIER = (0.98, 0.96, 0.94, 0.92, 0.9, 0.85, 0.8, 0.7, 0.6)  # sizes that `cmrc.reduce` tries for it
FOUND = "cmrc reduce"
PAIRS = 31  # runs in turns, of which the median ratio is the latency
ONE_PASS = {"recompute": "never", "multiple_of": 1}
UNIFORM = "cmrc, the same part of every layer"
CORP = "ridge folding (CORP, GRAIL): norm, all retained parents"
FLAP = "FLAP-like: fluctuation, means, adaptive"
OBS = "SlimGPT-, OSSCAR-like: least squares, one pass"
ONNXSIM = "onnxsim, Wanda with its ridge refit"
MEASURED = ("method", "kind", "preset", "size", "parameters", "macs", "latency", "seconds", "why", "commit")
NUMBERS = ("KL", "1 − cosine")  # that count, the first that there is


def classifier(training: Training, name: str, samples: int) -> Subject:
    """A network that was trained here, judged on test pictures that chose nothing."""
    images, model = training.data, training.model()
    test, labels = images.test[DEVELOPMENT:], images.test_labels[DEVELOPMENT:]
    if not len(test):  # of a stand-in
        test, labels = images.test, images.test_labels
    plain = in_parts(torch_run(model), [test], 500)
    chosen = calibration(training, samples, 50)

    def judge(run: Run) -> dict[str, float]:
        answers = in_parts(run, [test], 500)
        same = float((answers.argmax(1) == plain.argmax(1)).mean())
        return {"KL": divergence(plain, answers), "agreement": same, "accuracy": accuracy(answers, labels)}

    def losses(module: nn.Module) -> Iterator[torch.Tensor]:
        for x, y in chosen:
            yield nn.functional.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(y))

    what = f"calibrated on {samples} training pictures, judged on {len(test)} test pictures; whole: accuracy {accuracy(plain, labels):.4f}"
    writers = tuple(site.replace(".mlp.act", ".mlp.fc1").replace(".act", ".conv1") for site in training.sites)
    batches = [{"x": x} for x, _ in chosen]
    return Subject(name, what, model, training.sites, batches, judge, writers, losses, batch=50, task=True)


def trained(name: str, title: str, quick: bool, samples: int = SAMPLES) -> Subject:
    return classifier((STAND_INS if quick else TRAININGS)[name], title, 100 if quick else samples)


SUBJECTS: dict[str, Callable[[bool], Subject]] = {
    "resnet": lambda quick: trained("resnet", "ResNet-8", quick),
    "vit": lambda quick: trained("vit", "ViT", quick),
    "digits": lambda quick: subjects.digits(),
    "minilm": lambda quick: stand_in("minilm") if quick else subjects.minilm(1024),
    "magika": lambda quick: stand_in("magika, in torch") if quick else subjects.magika(),
    "recogniser": lambda quick: stand_in("recogniser, in torch") if quick else subjects.recogniser(),
    "efficientnet": lambda quick: stand_in("efficientnet, in torch") if quick else subjects.efficientnet(800, 400),
    "smollm": lambda quick: stand_in("smollm") if quick else subjects.smollm(),
}


# ---------------------------------------------------------------- how many units each method keeps


class Matched:
    """Numbers of units that go from the layers which the peers cut, so that the model meets a budget."""

    def __init__(self, subject: Subject) -> None:
        self.sites = [subject.sized.find(name)[0] for name in subject.sites]
        self.costs = Costs(subject.sized, self.sites, "macs")
        self.whole = self.costs.measure([0] * len(self.sites))

    def uniform(self, size: float) -> list[int]:
        """The same part of every layer."""
        return self._least(size, lambda part: [min(round(part * s.units), s.units - 1) for s in self.sites])

    def ranked(self, size: float, scores: Sequence[np.ndarray]) -> list[int]:
        """The units of the least scores of all layers together."""
        every = np.sort(np.concatenate(scores))

        def below(part: float) -> list[int]:
            limit = every[min(int(part * len(every)), len(every) - 1)]
            return [min(int((own <= limit).sum()), len(own) - 1) for own in scores]

        return self._least(size, below)

    def _least(self, size: float, gone: Callable[[float], list[int]]) -> list[int]:
        low, high = 0.0, 1.0
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (low, middle) if self.costs.foretell(gone(middle)) <= size * self.whole else (middle, high)
        return gone(high)


def keeps(matched: Matched, gone: Sequence[int]) -> dict[str, int]:
    return {site.value: site.units - count for site, count in zip(matched.sites, gone, strict=True)}


# ---------------------------------------------------------------- one method at one size


@dataclass(eq=False)
class Judge:
    """Sizes, latency beside the whole network, and what the subject is judged by."""

    subject: Subject
    folder: Path

    @cached_property
    def whole(self) -> dict[str, Any]:
        model, subject = self.subject.model, self.subject
        if isinstance(model, Path):
            return {**sizes_of_file(model, subject), **subject.judge(file_run(model))}
        return {**sizes_of_module(model, subject.example), **subject.judge(torch_run(model))}

    @cached_property
    def file(self) -> Path:
        """The whole network as a file, by torch's exporter if it is a module."""
        model = self.subject.model
        return model if isinstance(model, Path) else export(model, self.subject, self.folder / "whole.onnx")

    def of_file(self, path: Path) -> dict[str, Any]:
        return {**sizes_of_file(path, self.subject), **self._latency(path), **self.subject.judge(file_run(path))}

    def of_module(self, module: nn.Module, save: Callable[[Path], object]) -> dict[str, Any]:
        """Judged in torch, and timed as the file that `save` writes."""
        measures = {**sizes_of_module(module, self.subject.example), **self.subject.judge(torch_run(module))}
        if not self.subject.exported:
            return measures
        path = self.folder / "small.onnx"
        path.unlink(missing_ok=True)
        save(path)
        return {**measures, **self._latency(path)}

    def of_plan(self, plan: cmrc.Plan) -> dict[str, Any]:
        small = cmrc.lower(self.subject.program, cmrc.Plan(self.subject.program, plan.entries), growth="allow")
        if not isinstance(self.subject.model, Path):
            return self.of_module(small.module.eval(), small.save)
        path = self.folder / "small.onnx"
        path.unlink(missing_ok=True)
        small.save(path)
        return self.of_file(path)

    def of_pruned(self, module: nn.Module) -> dict[str, Any]:
        return self.of_module(module, lambda path: export(module, self.subject, path))

    def _latency(self, path: Path) -> dict[str, float]:
        """Seconds of one sample under onnxruntime over those of the whole network, in turns."""
        batch = [array[:1] for array in self.subject.batches[0].values()]
        runs = [file_run(path), file_run(self.file)]
        seconds = []
        for i in range(-2, PAIRS):
            pair = []
            for run in runs:
                begin = time.perf_counter()
                run(*batch)
                pair.append(time.perf_counter() - begin)
            if i >= 0:
                seconds.append(pair)
        return {"latency": median_ratio(np.array(seconds))[0]}


def by_presets(subject: Subject) -> dict[str, tuple[str, dict[str, Any]]]:
    """Methods that our code states as a recipe, with the same part of every layer."""
    affine = {
        UNIFORM: (OURS, {"multiple_of": 1}),
        OBS: (PUBLISHED, {"preset": "joint", **ONE_PASS}),
        CORP: (PUBLISHED, {"preset": "magnitude", "replace": "affine", **ONE_PASS}),
    }
    return affine if subject.affine else {UNIFORM: affine[UNIFORM]}


def onnxsim_recovered(judge: Judge, size: float) -> dict[str, Any]:
    """onnxsim's calibrated pruning with its own ridge refit, at the sparsity that meets the size; of a module, of a batch that is fixed."""
    subject, out = judge.subject, judge.folder / "pruned.onnx"
    source = subject.model
    if not isinstance(source, Path):
        source = export(source, subject, judge.folder / "fixed.onnx", batch=subject.batch)
    target = size * judge.whole["macs"]
    reached = pruners.onnxsim_recovered(
        source, out, subject.batches, subject.batch, lambda file: sizes_of_file(file, subject)["macs"] <= target
    )
    if not reached:
        return {"why": f"cannot get below {sizes_of_file(out, subject)['macs'] / judge.whole['macs']:.2f}"}
    return {**sizes_of_file(out, subject), **subject.judge(_in_batches(file_run(out), subject.batch))}


def _in_batches(run: Run, size: int) -> Run:
    """A run of a file whose batch is fixed: the last batch is filled up."""

    def every(*arrays: np.ndarray) -> np.ndarray:
        count = len(arrays[0])
        places = np.minimum(np.arange(-(-count // size) * size), count - 1)
        return in_parts(run, [array[places] for array in arrays], size)[:count]

    return every


@dataclass(eq=False)
class Rows:
    """The record of a network, written after every row. What is there is not measured again, unless it is asked for."""

    subject: Subject
    options: argparse.Namespace
    whole: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    defaults: list[dict[str, Any]] = field(default_factory=list)
    agreeing: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def number(self) -> str:
        return next(
            (name for name in NUMBERS if name in self.whole), next(key for key in self.whole if key not in MEASURED)
        )

    def read(self) -> None:
        """What an earlier run left, if it judged the same network on the same data."""
        path, again = self.options.json, tuple(self.options.again or ())
        before = json.loads(path.read_text()) if path.exists() else {}
        whole = before.get("whole", {})
        same = whole.keys() == self.whole.keys() and np.allclose([*whole.values()], [*self.whole.values()], atol=1e-6)
        if before.get("subject") != self.subject.what or not same:
            return  # another network, or other data: the files of a machine change
        self.seconds = before["wall_seconds"]
        for kept, name in ((self.rows, "rows"), (self.defaults, "defaults"), (self.agreeing, "agreeing")):
            kept += [row for row in before.get(name, ()) if not (again and row["method"].startswith(again))]

    def add(self, rows: list[dict[str, Any]], key: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> None:
        """A row of what `make` measures, unless it is there or left out."""
        left_out = tuple(self.options.without or ())
        if left_out and key["method"].startswith(left_out):
            return
        if any(all(row.get(name) == value for name, value in key.items()) for row in rows):
            return
        begin = time.perf_counter()
        try:
            measures = make()
        except cmrc.CmrcError as error:
            measures = {"why": error.reason}
        rows.append({**key, **measures, "seconds": round(time.perf_counter() - begin, 1), "commit": commit()})
        console.print(rows[-1])
        self.write()

    def write(self) -> None:
        record = {
            "name": self.subject.name, "subject": self.subject.what, "number": self.number, "whole": self.whole,
            "rows": self.rows, "defaults": self.defaults, "agreeing": self.agreeing,
            "claims": judge_curves(self.rows, self.defaults, self.number, self.whole[self.number]),
            "wall_seconds": round(self.seconds + time.perf_counter() - STARTED, 1),
        }  # fmt: skip
        write_record(self.options.json, f"curves, {self.options.subject}", [], self.options, **record)


def measure(rows: Rows, judge: Judge, sizes: Sequence[float], *, peers: bool) -> None:
    subject, matched = judge.subject, Matched(judge.subject)
    own = _Defaults(subject, sizes)
    statistics = _Once(lambda: calibrated(subject))

    def add(method: str, kind: str, size: float, make: Callable[[], dict[str, Any]]) -> None:
        rows.add(rows.rows, {"method": method, "kind": kind, "size": size}, make)

    for size in sizes:
        add(OWN, OURS, size, lambda size=size: judge.of_plan(own.plan(size)))
    for name, (kind, options) in by_presets(subject).items():
        for size in sizes:
            kept = keeps(matched, matched.uniform(size))
            add(name, kind, size, lambda kept=kept, o=options: judge.of_plan(planned(subject, statistics(), kept, o)))
    for size in sizes:
        add(FLAP, PUBLISHED, size, lambda size=size: judge.of_plan(flap(subject, statistics(), matched, size)))
    if isinstance(subject.model, nn.Module) and peers:
        scores = {name: _Once(lambda name=name: pruners.scores_of(subject.model, subject.example, subject.writers, name, subject.losses))
                  for name in ("Taylor", "group norm")}  # fmt: skip
        for name in scores:
            for size in sizes:
                for way, counts in (("", matched.uniform(size)), (", global", None)):

                    def cut(name: str = name, size: float = size, counts: list[int] | None = counts) -> dict[str, Any]:
                        own = scores[name]()
                        gone = matched.ranked(size, [one / one.mean() for one in own]) if counts is None else counts
                        return judge.of_pruned(
                            pruners.cut_lowest(subject.model, subject.example, subject.writers, own, gone)
                        )

                    add(f"Torch-Pruning, {name}{way}", PEER, size, cut)
    if subject.exported and peers:
        for size in sizes:
            add(ONNXSIM, PEER, size, lambda size=size: onnxsim_recovered(judge, size))
    defaults(rows, judge, statistics)
    rows.add(rows.agreeing, {"method": FOUND}, lambda: agreeing(judge))
    rows.write()


class _Once:
    """A value that is computed when somebody asks for it first."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self.compute, self.value = compute, None

    def __call__(self) -> Any:
        if self.value is None:
            self.value = self.compute()
        return self.value


class _Defaults:
    """`cmrc.plan(program, data=..., budget=...)` at every size: ranked and probed once."""

    def __init__(self, subject: Subject, sizes: Sequence[float]) -> None:
        self.subject, self.sizes = subject, sizes
        self.plans: dict[float, cmrc.Plan] = {}

    def plan(self, size: float) -> cmrc.Plan:
        if size not in self.plans:
            left = [one for one in self.sizes if one <= size]
            subject = self.subject
            options = {name: value for name, value in subject.recipe.items() if name in ("positions", "loss")}
            if not subject.affine:
                options["sites"] = subject.sites
            recipe = make_recipe(**options)
            sites = subject.sites if not subject.affine else recipe.sites
            stats = cmrc.calibrate(subject.sized, subject.batches, sites=sites, need=recipe.needs, **recipe.calibration)
            amounts = [{"budget": {"of": "macs", "amount": one}} for one in left]
            plans = plan_sizes(subject.sized, stats, amounts, data=subject.batches, **options)
            self.plans |= dict(zip(left, plans, strict=True))
        return self.plans[size]


def calibrated(subject: Subject) -> cmrc.Stats:
    recipe = make_recipe(**subject.recipe)
    return cmrc.calibrate(subject.sized, subject.batches, sites=subject.sites, need=recipe.needs, **recipe.calibration)


def planned(subject: Subject, stats: cmrc.Stats, kept: dict[str, int], options: Mapping[str, Any]) -> cmrc.Plan:
    given = {**{k: v for k, v in subject.recipe.items() if k != "drift_ridge"}, "sites": subject.sites, **options}
    return cmrc.plan(subject.sized, stats, data=subject.batches, keep=kept, **given)


def flap(subject: Subject, stats: cmrc.Stats, matched: Matched, size: float) -> cmrc.Plan:
    """Variance times the squared norm of the weights that read a unit, standardised within each layer; means take their place."""
    ranked = cmrc.plan(subject.sized, stats, preset="cmr-logit", sites=subject.sites, keep=0.5, recompute="never")
    scores = [np.asarray(ranked.scores[stats.sites[site.value].columns.name]) for site in matched.sites]
    gone = matched.ranked(size, [(own - own.mean()) / max(own.std(), 1e-30) for own in scores])
    return planned(subject, stats, keeps(matched, gone), {"preset": "cmr-logit", **ONE_PASS})


# ---------------------------------------------------------------- the defaults beside every preset


PRESETS: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    "joint, one pass": {"preset": "joint"},
    "joint, fitted in order": {"preset": "joint", "recompute": "fits"},
    "joint, fitted in order, drift_ridge 1": {"preset": "joint", "recompute": "fits", "drift_ridge": 1.0},
    "reconstruction": {"preset": "reconstruction"},
    "cmr-logit": {"preset": "cmr-logit"},
}


def defaults(rows: Rows, judge: Judge, stats: Callable[[], cmrc.Stats]) -> None:
    """Half of the units of the layers that the peers cut, by the default and by each preset."""
    subject = judge.subject
    kept = dict.fromkeys(subject.sites, 0.5)
    for name, options in PRESETS.items():
        if not subject.affine and "joint" in name:
            continue

        def one(options: Mapping[str, Any] = options) -> dict[str, Any]:
            return judge.of_plan(planned(subject, stats(), kept, {"multiple_of": 1, **options}))

        rows.add(rows.defaults, {"method": f"cmrc, {name}", "preset": name}, one)


# ---------------------------------------------------------------- the size that the tool finds by itself


def agreeing(judge: Judge) -> dict[str, Any]:
    """What `cmrc.reduce` chooses for the agreement that a user may lose, by a quarter of the calibration data; then judged like the others."""
    subject = judge.subject
    joined = {name: np.concatenate([batch[name] for batch in subject.batches]) for name in subject.batches[0]}
    given = {
        "agreement": 1 - LOSS,
        "measured": True,
        "frontier": FRONTIER,
        "timed": False,
        "samples": len(next(iter(joined.values()))),
    }
    if isinstance(subject.model, nn.Module):
        given |= {"args": subject.example, "dynamic_shapes": {name: {0: BATCH} for name in joined}}
    reduced = cmrc.reduce(subject.model, joined, **given)
    lowered = reduced.lowered
    chosen = {"size": reduced.size.share, "own agreement": reduced.measures.quality.agreement.value}
    if isinstance(subject.model, nn.Module):
        return {**chosen, **judge.of_module(lowered.module.eval(), lowered.save)}
    path = judge.folder / "reduced.onnx"
    lowered.save(path)
    return {**chosen, **judge.of_file(path)}


def main() -> None:
    arguments = parser(__doc__.splitlines()[0], "curves_{subject}.json")
    arguments.add_argument("subject", choices=list(SUBJECTS))
    arguments.add_argument("--sizes", type=float, nargs="*", default=None, help="parts of the multiply-accumulates")
    arguments.add_argument(
        "--again", nargs="*", default=None, help="measure rows once more whose method begins with one of these"
    )
    arguments.add_argument(
        "--without", nargs="*", default=None, help="leave rows out whose method begins with one of these"
    )
    options = arguments.parse_args()
    use_threads(options.threads)
    quiet_exporters()
    torch.manual_seed(0)
    subject = SUBJECTS[options.subject](options.quick)
    sizes = options.sizes or (SIZES[-2:-1] if options.quick else SIZES)
    peers = not options.quick or options.subject in ("resnet", "minilm")  # the other stand-ins would show the same
    with tempfile.TemporaryDirectory() as folder:
        judge = Judge(subject, Path(folder))
        rows = Rows(subject, options, judge.whole)
        rows.read()
        measure(rows, judge, sizes, peers=peers)


if __name__ == "__main__":
    main()
