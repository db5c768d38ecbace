"""Whether the units that are kept depend on how the same function is written: the paper's table 2.

python -m benchmarks.invariance trained       hidden units of ConvNets, last channels of a ResNet-56
python -m benchmarks.invariance untrained     last channels of a ResNet-20 that has learned nothing

interface     those units times s, the head's columns over s; half are kept
inner layers  hidden layers of the whole trained networks, weights before and weights behind: every other layer, then all at once
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

import cmrc
from benchmarks import rescaling
from benchmarks.data import cifar10
from benchmarks.measure import Resumed, parser, progress, use_threads, write_record
from benchmarks.models import randomise
from benchmarks.reductions import (
    BATCH,
    CONTROL,
    CONVNETS,
    METHODS,
    RESNETS,
    SWAPS,
    Case,
    convnet,
    kept,
    resnet56,
    small,
    spread,
    untrained,
)
from benchmarks.section import COLOURS, Record, Section, claim, claims, table
from benchmarks.trained import TRAININGS, Classifier, ResNet, accuracy, logits
from cmrc.verification.bounds import bootstrap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FACTORS = (2.0, 10.0, 100.0)  # scalings within [1/factor, factor]; the paper has 10 and 100
SHOWN = ("CMR-Logit", "VBP", "magnitude", "random", "CMR-Const", "joint, means", "joint, affine for swaps")
VERIFIED = ("CMR-Logit", "VBP")
INNER = {
    **{name: METHODS[name] for name in ("CMR-Logit", "VBP", "magnitude", "random", "CMR-Const", "joint, affine")},
    "joint, task": {"preset": "joint-task"},
}
DRAWS = 10  # of the factors at least, shared by the checkpoints
# mean and deviation of the Jaccard overlap, by network and factor
PAPER = {
    "ConvNet": {
        "10.0": {"CMR-Logit": (1.0, 0.0), "VBP": (0.371, 0.024), "magnitude": (0.378, 0.027)},
        "100.0": {"CMR-Logit": (1.0, 0.0), "VBP": (0.346, 0.021), "magnitude": (0.359, 0.027), "random": (0.333, 0.030)},
    },
    "ResNet-56": {
        "10.0": {"CMR-Logit": (1.0, 0.0), "VBP": (0.389, 0.038), "magnitude": (0.361, 0.052)},
        "100.0": {"CMR-Logit": (1.0, 0.0), "VBP": (0.374, 0.037), "magnitude": (0.352, 0.049), "random": (0.356, 0.092)},
    },
}  # fmt: skip
GAPS = {"iia": 0.131, "kl": -0.362}  # the paper's, CMR-Logit less VBP, ConvNet, factor 100


def jaccard(one: set[int], other: set[int]) -> float:
    return len(one & other) / len(one | other)


# ---------------------------------------------------------------- the interface of representation and head


def rescaled(case: Case, factor: float, seed: int) -> Case:
    """The same function with other units. Where no weights make them, as in the paper, the pictures' features are scaled."""
    model = copy.deepcopy(case.model)
    scale = rescaling.log_uniform(factor, seed)(case.units)
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    if len(layers) > 1:
        norms = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm1d)]
        rescaling.multiply(layers[-2], norms[0] if norms else None, scale)
        rescaling.divide(layers[-1], scale)
        return replace(case, model=model)
    rescaling.divide(layers[-1], scale)
    (x, y), (held_out, labels) = case.calibration, case.test
    return replace(
        case, model=model, calibration=(x * scale.numpy(), y), test=(held_out * scale.numpy(), labels)
    )  # fmt: skip


def interface(make: Callable[[int], Case], seed: int, draws: int, swaps: int) -> list[dict[str, Any]]:
    """One checkpoint: the overlap of what is kept before and after, and how the reductions of the rescaled network fare."""
    case = make(seed)
    half, plain = case.units // 2, logits(case.model, case.test[0])
    right = accuracy(plain, case.test[1])
    before = {method: kept(case.by(method, half), case.units) for method in SHOWN}
    rows = []
    for factor in FACTORS:
        for number in range(draws):
            other = replace(rescaled(case, factor, 1000 * seed + number), seed=DRAWS * (seed + 1) + number)
            apart = float(np.abs(logits(other.model, other.test[0]) - plain).max())
            for method in SHOWN:
                plan = other.by(method, half)
                row = {"factor": factor, "method": method, "apart": apart, "accuracy": right}
                row["largest"] = float(np.abs(plain).max())
                row["jaccard"] = jaccard(before[method], kept(plan, case.units))
                if method in VERIFIED and factor > 2:
                    verified = other.verified(plan, swaps=swaps, seed=seed)
                    row |= {number: verified[number] for number in ("iia", "kl")}
                rows.append(row)
    return rows


# ---------------------------------------------------------------- the real layers


def inner(name: str, factor: float, seed: int, samples: int) -> list[dict[str, Any]]:
    """Hidden layers of a whole network rescaled: the overlap at each of them, and that its outputs stay.

    First so that no rescaled layer reads another: twice, half of the layers each time. Then all of them.
    """
    model, x = network(name, seed, samples)
    move: Any = rescaling.classifier if isinstance(model, Classifier) else rescaling.resnet
    plain, before = logits(model, x), halves(model, x, 0)
    sites = list(before["VBP"])
    groups = (sites[0::2], sites[1::2]) if isinstance(model, Classifier) else (sites[:-1], sites[-1:])
    rows = []
    for way, moved in (("apart", (0,)), ("apart", (1,)), ("together", (0, 1))):
        draw, still = rescaling.log_uniform(factor, seed), rescaling.unchanged
        other = move(model, tuple(draw if i in moved else still for i in (0, 1)))
        after = halves(other, x, 1)
        overlap = {
            method: {site: jaccard(before[method][site], after[method][site]) for i in moved for site in groups[i]}
            for method in INNER
        }
        apart = float(np.abs(logits(other, x) - plain).max() / np.abs(plain).max())
        rows.append({"network": name, "way": way, "factor": factor, "apart": apart, "jaccard": overlap})
    return rows


def network(name: str, seed: int, samples: int) -> tuple[nn.Module, np.ndarray]:
    """A trained network and training pictures; for a quick run random weights and noise."""
    if name == "random weights":
        rng = np.random.default_rng(seed)
        return randomise(Classifier()), rng.normal(size=(samples, 3, 32, 32)).astype(np.float32)
    training = TRAININGS[f"{'convnet' if name == 'ConvNet' else 'resnet56'}-{seed}"]
    return training.model(), cifar10().train[np.random.default_rng(seed).permutation(50_000)[:samples]]


def halves(model: nn.Module, x: np.ndarray, seed: int) -> dict[str, dict[str, set[int]]]:
    """What every method keeps where half of every site stays. Random draws anew for every seed."""
    program = cmrc.trace(model, (torch.from_numpy(x[:2]),), dynamic_shapes=({0: BATCH},))
    sites = [*(f"features.{i}" for i in (2, 5, 8)), "act"]
    if isinstance(model, ResNet):
        sites = [*(f"blocks.{i}.act" for i in range(len(model.blocks))), "mean"]
    batches, need = [x[i : i + 100] for i in range(0, len(x), 100)], ("scatter", "range", "curvature", "coupling")
    stats = cmrc.calibrate(program, batches, sites=sites, need=need, loss="kl")
    kept_units: dict[str, dict[str, set[int]]] = {}
    for method, options in INNER.items():
        plan = cmrc.plan(program, stats, sites=sites, keep=0.5, multiple_of=1, seed=seed, loss="kl", **options)
        gone = {entry.value: set(entry.units) for entry in plan.entries}
        units = {program.find(site)[0].value: program.find(site)[0] for site in sites}
        kept_units[method] = {site.name: set(range(site.units)) - gone[value] for value, site in units.items()}
    return kept_units


# ---------------------------------------------------------------- the record


def summary(rows: list[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """By factor and method; and CMR-Logit less VBP on the rescaled networks, paired."""
    by_factor: dict[str, Any] = {}
    for factor in FACTORS:
        by_method = {method: [r for r in rows if (r["factor"], r["method"]) == (factor, method)] for method in SHOWN}
        methods: dict[str, Any] = {}
        for method, some in by_method.items():
            methods[method] = {
                "jaccard": spread(r["jaccard"] for r in some),
                "paper": PAPER.get(name, {}).get(str(factor), {}).get(method),
            }
            if "iia" in some[0]:
                methods[method] |= {number: spread(r[number] for r in some) for number in ("iia", "kl")}
        gaps = {}
        if factor > 2:
            pairs = list(zip(by_method["CMR-Logit"], by_method["VBP"], strict=True))
            gaps = {n: bootstrap([a[n] - b[n] for a, b in pairs]).to_json() for n in ("iia", "kl")}
        apart = max(r["apart"] / r["largest"] for some in by_method.values() for r in some)
        by_factor[str(factor)] = {"methods": methods, "gaps": gaps, "apart": apart, "draws": len(by_method["VBP"])}
    return by_factor


def judged(networks: Mapping[str, Any], layers: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    checks = []
    for name, factors in networks.items():
        least = min(numbers["methods"]["CMR-Logit"]["jaccard"][0] for numbers in factors.values())
        checks.append(claim(f"{name}: Jaccard of CMR-Logit at the interface, least factor's mean", least, ">=", 1.0))
    if not layers:
        return checks
    for way, method in (("apart", "CMR-Logit"), ("together", "CMR-Const")):
        least = min(
            np.mean(overlaps(some, method)) for (_, moved, _), some in by_network(layers).items() if moved == way
        )
        checks.append(claim(f"inner layers {way}: Jaccard of {method}, least network's mean", float(least), ">=", 0.99))
    checks.append(claim("inner layers: largest change of an output", max(row["apart"] for row in layers), "<=", 1e-4))
    gap = networks["ConvNet"]["100.0"]["gaps"]
    checks.append(
        claim("ConvNet, factor 100: IIA of CMR-Logit less VBP, the interval's low end", gap["iia"][1], ">", 0.0)
    )
    checks.append(
        claim("ConvNet, factor 100: KL of CMR-Logit less VBP, the interval's high end", gap["kl"][2], "<", 0.0)
    )
    return checks


# ---------------------------------------------------------------- the page


def body(record: Record) -> str:
    rows, gaps = [], []
    for name, factors in record["networks"].items():
        for factor, numbers in factors.items():
            cells = []
            for method in SHOWN:
                means = numbers["methods"][method]
                paper = " (paper {:.3f} ± {:.3f})".format(*means["paper"]) if means["paper"] else ""
                cells.append("{:.3f} ± {:.3f}".format(*means["jaccard"]) + paper)
            rows.append((name, f"[{1 / float(factor):g}, {float(factor):g}]", *cells))
            if numbers["gaps"]:
                paper = GAPS if (name, factor) == ("ConvNet", "100.0") else {}
                cells = [
                    "{:+.3f} [{:+.3f}, {:+.3f}]".format(*numbers["gaps"][n])
                    + (f" (paper {paper[n]:+.3f})" if paper else "")
                    for n in ("iia", "kl")
                ]
                gaps.append((name, f"[{1 / float(factor):g}, {float(factor):g}]", *cells, f"{numbers['apart']:.1e}"))
    head = ("network", "scalings", *(f"*{m}*" if "joint" in m else m for m in SHOWN))
    parts = [
        table(head, rows),
        "What that does to the reduced networks, CMR-Logit less VBP, and how far the rescaling moves the logits:\n",
    ]
    parts.append(table(("network", "scalings", "IIA", "KL", "largest change / largest logit"), gaps))
    if not record["inner"]:
        return "\n".join((*parts, claims(record["claims"])))
    layers = []
    for (name, way, factor), some in by_network(record["inner"]).items():
        cells = [f"{np.mean(overlaps(some, method)):.3f}" for method in INNER]
        apart = f"{max(r['apart'] for r in some):.1e}"
        layers.append((name, way, f"[{1 / factor:g}, {factor:g}]", *cells, apart))
    parts.append("Hidden layers of the whole networks, half of every layer kept; means over layers and checkpoints:\n")
    parts.append(table(("network", "layers", "scalings", *INNER, "largest change / largest logit"), layers))
    return "\n".join((*parts, claims(record["claims"])))


Group = tuple[str, str, float]


def by_network(rows: list[Mapping[str, Any]]) -> dict[Group, list[Mapping[str, Any]]]:
    groups: dict[Group, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["network"], row["way"], row["factor"]), []).append(row)
    return groups


def overlaps(rows: list[Mapping[str, Any]], method: str) -> list[float]:
    """Of every layer that was rescaled."""
    return [value for row in rows for value in row["jaccard"][method].values()]


def draw(record: Record, figure: Figure) -> None:
    panels = figure.subplots(1, len(record["networks"]), sharey=True, squeeze=False)[0]
    drawn = ("CMR-Logit", "VBP", "magnitude", "random")
    for panel, (name, factors) in zip(panels, record["networks"].items(), strict=True):
        places = np.arange(len(factors))
        for i, (method, colour) in enumerate(zip(drawn, COLOURS, strict=False)):
            numbers = [at_factor["methods"][method] for at_factor in factors.values()]
            shifted = places + 0.12 * (i - 1.5)
            panel.errorbar(
                shifted,
                [f["jaccard"][0] for f in numbers],
                yerr=[f["jaccard"][1] for f in numbers],
                fmt="o",
                color=colour,
                label=method,
            )
            paper = [(x, f["paper"][0]) for x, f in zip(shifted, numbers, strict=True) if f["paper"]]
            if paper:
                panel.plot(*zip(*paper, strict=True), "D", markersize=9, markerfacecolor="none", color=colour)
        panel.axhline(1 / 3, color="grey", linestyle=":", label="chance")
        panel.plot([], [], "D", markersize=9, markerfacecolor="none", color="black", label="paper")
        panel.set_xticks(places, [f"[{1 / float(f):g}, {float(f):g}]" for f in factors])
        panel.set_xlabel("range of the scalings")
        panel.set_title(f"{name} (control)" if name == CONTROL else name, fontsize=10)
        panel.set_ylim(0, 1.08)
    panels[0].set_ylabel("overlap of kept sets (Jaccard)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=9)


SECTIONS = (
    Section(
        "invariance_trained",
        "What is kept when the same function is written otherwise (table 2)",
        """A positive factor on a ReLU unit and its inverse on what reads the unit change no output. The paper scores the 256 hidden units of
five CIFAR-10 ConvNets and the 64 last channels of ResNet-56 networks for CIFAR-100, keeps half, and finds that CMR-Logit keeps the same
units whatever the factors are, while VBP and magnitude fall to chance (1/3). CIFAR-100 cannot be had here: our three ResNet-56 are for CIFAR-10,
with a mean accuracy of {accuracies[ResNet-56]:.3f} after seven epochs ({checkpoints} ConvNets: {accuracies[ConvNet]:.3f}). At least ten draws for each range. The
paper's result is ours; the last three columns show that CMR-Const and joint selection do not depend on the factors either.
Our gap in IIA is smaller than the paper's because rescaled VBP is a random choice, and our ConvNets lose less by that: in table 4
CMR-Logit less random is 0.05 at half for ours and 0.14 for the paper's.

Beyond the paper, the factors are put into the weights of the hidden layers of the whole networks, before and behind the units.
*apart*: no rescaled layer reads another one. *together*: all layers. There CMR-Logit is no longer invariant, because away from the
output it measures the distortion of the next layer's units, which have factors of their own. What measures the network's output
(CMR-Const, joint selection by the task) still is.
The paper's figure pools its three networks into one curve for each method; here each has a panel, and the one that has learned nothing is the last.
""",
        body,
        draw,
        arguments=("trained",),
        size=(11.0, 4.0),
        beside=("invariance_untrained",),
    ),
    Section(
        "invariance_untrained",
        "What is kept when the same function is written otherwise: a network that has learned nothing",
        """The 64 last channels of a ResNet-20 with random weights; ten draws for each range. The paper pools this control into its curves; in the picture above
it has a panel of its own. What a method keeps of it depends on the factors as in a trained network: the overlap is a matter of the score, not of what was learned.
""",
        body,
        arguments=("untrained",),
    ),
)
NETWORKS: dict[str, dict[str, tuple[Callable[[int], Case], int]]] = {  # and the number of their checkpoints
    "trained": {"ConvNet": (convnet, CONVNETS), "ResNet-56": (resnet56, RESNETS)},
    "untrained": {CONTROL: (untrained, 1)},
}
INSIDE = {"trained": [*(("ConvNet", seed) for seed in range(CONVNETS)), ("ResNet-56", 0)], "untrained": []}


def main() -> None:
    asked_for = parser(__doc__, "invariance_{networks}.json")
    asked_for.add_argument("networks", choices=sorted(NETWORKS))
    options = asked_for.parse_args()
    use_threads(options.threads)
    quick, resumed = options.quick, Resumed(options.json)
    networks, accuracies = {}, {}
    for name, (make, seeds) in NETWORKS[options.networks].items():
        rows: list[Mapping[str, Any]] = []
        for seed in progress(range(1 if quick else seeds), name):
            asked = (small if quick else make, seed, 2 if quick else -(-DRAWS // seeds), 200 if quick else SWAPS)
            rows += resumed(f"{name} {seed}", lambda asked=asked: interface(*asked))
        networks[name] = summary(rows, name)
        accuracies[name] = float(np.mean([row["accuracy"] for row in rows]))
        for factor, numbers in networks[name].items():
            print(name, factor, {m: round(f["jaccard"][0], 3) for m, f in numbers["methods"].items()}, numbers["gaps"])
    inside = INSIDE[options.networks]
    whole = [("random weights", 0)] if quick and inside else inside
    layers: list[Mapping[str, Any]] = []
    for name, seed in progress(whole, "inner layers"):
        for factor in FACTORS[2:]:
            samples = 8 if quick else 200 if name == "ConvNet" else 50
            layers += resumed(
                f"inner {name} {seed} {factor}",
                lambda name=name, seed=seed, factor=factor, samples=samples: inner(name, factor, seed, samples),
            )
    for group, some in by_network(layers).items():
        print(*group, {method: round(float(np.mean(overlaps(some, method))), 4) for method in INNER})
    write_record(
        options.json,
        f"invariance, {options.networks}",
        [],
        options,
        networks=networks,
        accuracies=accuracies,
        checkpoints=CONVNETS,
        inner=layers,
        claims=judged(networks, layers),
    )
    resumed.forget()


if __name__ == "__main__":
    main()
