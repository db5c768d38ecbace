"""A trained network reduced at its last hidden layer by a named method, then verified: what the paper's tables share.

Convolutional networks are cut before the last layers: what lies before is run once for all pictures and kept in the cache,
as in the paper. Without the network (`--quick`) a small MLP on scikit-learn's digits stands in for all of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

import cmrc
from benchmarks.data import Images, cache, digits
from benchmarks.models import MLP
from benchmarks.section import claim
from benchmarks.trained import TRAININGS, Classifier, ResNet, Training, accuracy, drawn_anew, fit, logits
from cmrc.statistics.readers import outgoing
from cmrc.verification.bounds import Estimate, bootstrap

BATCH = torch.export.Dim("batch", min=2, max=65536)
NEED = ("scatter", "range", "curvature", "coupling", "rows")
POOL = 10_000  # training pictures that seeds draw their calibration data from
SWAPS = 2000
CONVNETS, RESNETS = 5, 3  # trained checkpoints; seeds take turns
CONTROL = "untrained ResNet-20"
METHODS: dict[str, dict[str, Any]] = {  # as the paper names them; ours follow
    "CMR-Logit": {"preset": "cmr-logit"},
    "VBP": {"preset": "vbp"},
    "cwvar": {
        "objective": "task",
        "replace": "mean",
        "gradient": False,
    },  # ranks by the curvature-weighted variance, folds means
    "cwvar, with gradient": {"objective": "task", "replace": "mean"},
    "CMR-Const, each alone": {"preset": "cmr-const"},
    "CMR-Const": {"preset": "cmr-const-refit"},
    "CMR-Const, no gradient": {"preset": "cmr-const-refit", "gradient": False},
    "CMR-Const, iterative": {"preset": "cmr-const-refit"},  # scored anew halfway: `Case.by`
    "CMR-Affine": {"preset": "cmr-affine"},
    "CMR-Affine, with gradient": {"preset": "cmr-affine", "gradient": True},
    "magnitude": {"preset": "magnitude"},  # of the head's columns: `Case.by`
    "random": {"preset": "random"},
    "joint, means": {"preset": "reconstruction"},
    "joint, affine": {"preset": "joint"},
    "CMR-Logit, affine for swaps": {"preset": "cmr-logit", "replace": "affine", "interchange": 0.5},
    "joint, affine for swaps": {"preset": "joint-interchange"},
    "joint, learned on swaps": {"preset": "joint-learned"},
}
OURS = tuple(METHODS)[tuple(METHODS).index("random") + 1 :]
LEARNED = OURS[-1]
Pair = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Case:
    """A trained network, the site that is reduced, and pictures with labels to calibrate on and to verify on."""

    model: nn.Module
    site: str
    calibration: Pair
    test: Pair
    seed: int = 0
    residue: Literal["error", "keep"] = "error"  # "keep" where nothing before the site can become smaller

    @cached_property
    def program(self) -> cmrc.Program:
        x = torch.from_numpy(self.calibration[0][:2])
        return cmrc.trace(self.model, (x,), dynamic_shapes=({0: BATCH},))

    @cached_property
    def stats(self) -> cmrc.Stats:
        """With the gradient and curvature of the task."""
        return cmrc.calibrate(self.program, [self.calibration], sites=self.site, need=NEED)

    @property
    def units(self) -> int:
        return self.program.find(self.site)[0].units

    @property
    def accuracy(self) -> float:
        return accuracy(logits(self.model, self.test[0]), self.test[1])

    def by(self, method: str, keep: int) -> cmrc.Plan:
        """The plan of a named method. The iterative one is scored anew halfway: 256 to 192 to 128 in the paper.

        Magnitude is the norm of the column that reads a unit, since the paper cuts networks where only those weights are left.
        """
        if method == "magnitude":
            statistics = self.stats[self.site]
            order = np.argsort(np.linalg.norm(outgoing(self.program, statistics.columns), axis=0), kind="stable")
            gone = np.sort(order[: self.units - keep])
            return cmrc.Plan(self.program).do(self.site, units=gone, constant=statistics.mean[gone])
        iterative = {"schedule": [(self.units + keep) // 2]} if method.endswith("iterative") else {}
        return self.plan(keep, {**METHODS[method], **iterative})

    def plan(self, keep: int, options: Mapping[str, Any]) -> cmrc.Plan:
        """By these options of a recipe; what a schedule scores anew, it calibrates anew."""
        recipe = {"sites": [self.site], "keep": keep, "multiple_of": 1, "seed": self.seed, **options}
        return cmrc.plan(self.program, self.stats, data=[self.calibration], **recipe)

    def verified(self, plan: cmrc.Plan, *, swaps: int = SWAPS, seed: int | None = None) -> dict[str, Any]:
        """Lowered, and compared with the network under swaps of what is kept, drawn by the case's seed or another."""
        lowered = cmrc.lower(self.program, plan, residue=self.residue)
        drawn = self.seed if seed is None else seed
        result = cmrc.verify(self.program, lowered, [self.test], swaps=swaps, seed=drawn, controls=False)
        assert result.plain.accuracy is not None
        return {
            "accuracy": result.plain.accuracy[1].value,
            "agreement": result.plain.agreement.value,  # base = source: nothing is swapped
            "iia": result.iia.value,
            "kl": float(result.evidence.kl.mean()),
            "d2": float(result.evidence.squared.mean()),
        }


def kept(plan: cmrc.Plan, units: int) -> set[int]:
    """The units of a plan for one site that stay."""
    return set(range(units)) - {unit for entry in plan.entries for unit in entry.units}


# ---------------------------------------------------------------- networks


def small(seed: int, samples: int = 1000) -> Case:
    """64-32-32-10 on scikit-learn's digits, trained in a second."""
    images = digits()
    model = fit(drawn_anew(MLP((64, 32, 32, 10)), seed), images.train, images.train_labels, epochs=10)
    return Case(model, "acts.1", *_drawn(images, seed, samples), seed)


def mnist(seed: int, samples: int = 2000) -> Case:
    """784-512-512-10 on all of MNIST, one checkpoint per seed."""
    training = TRAININGS[f"mlp-{seed}"]
    return Case(training.model(), "acts.1", *_drawn(training.data, seed, samples), seed)


def convnet(seed: int, samples: int = 2000) -> Case:
    """The last layers of a ConvNet with 256 hidden units on CIFAR-10."""
    training = TRAININGS[f"convnet-{seed % CONVNETS}"]
    model = training.model()
    assert isinstance(model, Classifier)
    tail = nn.Sequential(OrderedDict(hidden=model.hidden, norm=model.norm, act=model.act, head=model.head))
    return Case(tail.eval(), "act", *_drawn(before(training, model.features), seed, samples), seed)


def resnet56(seed: int, samples: int = 2000) -> Case:
    """The last channels of a ResNet-56 on CIFAR-10."""
    return _last_channels(f"resnet56-{seed % RESNETS}", seed, samples)


def untrained(seed: int, samples: int = 2000) -> Case:
    """The same of a ResNet-20 that has learned nothing, which the paper's figures have as a control."""
    return _last_channels("resnet20", seed, samples)


def _last_channels(name: str, seed: int, samples: int) -> Case:
    """The 64 channels behind the mean of a residual network and its classifier.

    They are means of what a ReLU gave, so the ReLU that names them here changes nothing.
    """
    training = TRAININGS[name]
    model = training.model()
    assert isinstance(model, ResNet)
    tail = nn.Sequential(OrderedDict(act=nn.ReLU(), head=model.head))
    return Case(tail.eval(), "act", *_drawn(before(training, model.represent), seed, samples), seed, "keep")


def before(training: Training, part: Any) -> Images:
    """What the part of a network before its last layers makes of a pool of training pictures and of all test pictures."""
    path, images = cache() / f"{training.name}-features.npz", training.data
    chosen = np.random.default_rng(0).permutation(len(images.train))[:POOL]
    if not path.exists():
        features = {"train": logits(part, images.train[chosen]), "test": logits(part, images.test)}
        np.savez(path.with_suffix(".new.npz"), **features)
        path.with_suffix(".new.npz").rename(path)
    stored = np.load(path)
    return Images(stored["train"], images.train_labels[chosen], stored["test"], images.test_labels)


def _drawn(images: Images, seed: int, samples: int) -> tuple[Pair, Pair]:
    rows = np.random.default_rng(seed).permutation(len(images.train))[:samples]
    return (images.train[rows], images.train_labels[rows]), (images.test, images.test_labels)


# ---------------------------------------------------------------- over seeds


def spread(values: Iterable[float]) -> list[float]:
    """Mean and standard deviation."""
    numbers = np.array(list(values), dtype=np.float64)
    return [float(numbers.mean()), float(numbers.std())]


def difference(better: Sequence[Mapping[str, Any]], worse: Sequence[Mapping[str, Any]], number: str) -> Estimate:
    """The mean of a number's differences, seed by seed, with its bootstrap interval."""
    return bootstrap([a[number] - b[number] for a, b in zip(better, worse, strict=True)])


def beside_the_best(seeds_of: Mapping[str, Sequence[Mapping[str, Any]]], at: str) -> list[dict[str, Any]]:
    """Maps learned on swaps less the best of the paper's methods, in IIA and in KL: the mean, and the interval's end nearest 0."""
    checks, theirs = [], {name: seeds for name, seeds in seeds_of.items() if name not in OURS}
    for number, sign in (("iia", 1), ("kl", -1)):
        best = max(theirs, key=lambda name: sign * float(np.mean([v[number] for v in theirs[name]])))
        estimate = difference(seeds_of[LEARNED], theirs[best], number)
        relation, end = (">", estimate.low) if sign > 0 else ("<", estimate.high)
        what = f"{at}: {LEARNED} − {best} (the paper's best), {number}"
        checks.append(claim(f"{what}, mean", estimate.value, relation, 0.0))
        checks.append(
            {**claim(f"{what}, the interval's end nearest 0", end, relation, 0.0), "difference": estimate.to_json()}
        )
    return checks
