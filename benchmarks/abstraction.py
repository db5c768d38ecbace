"""Reductions of convolutional networks under interchange interventions: the paper's table 4.

python -m benchmarks.abstraction convnet      the 256 hidden units of CIFAR-10 ConvNets
python -m benchmarks.abstraction resnet56     the 64 last channels of a ResNet-56; and as many of them cut by Torch-Pruning (DepGraph)
python -m benchmarks.abstraction untrained    the 64 last channels of a ResNet-20 that has learned nothing

Three quarters, half and a quarter of them kept by every method, R = 2000 swaps at rate 0.5, five seeds (twelve where
three checkpoints take turns).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks import pruners
from benchmarks.data import Images
from benchmarks.measure import Resumed, parser, progress, use_threads, write_record
from benchmarks.reductions import (
    CONTROL,
    CONVNETS,
    LEARNED,
    METHODS,
    OURS,
    RESNETS,
    SWAPS,
    Case,
    beside_the_best,
    convnet,
    difference,
    resnet56,
    small,
    spread,
    untrained,
)
from benchmarks.section import COLOURS, Record, Section, claims, table
from benchmarks.trained import TRAININGS, ResNet, accuracy, large_digits, logits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = (0.75, 0.5, 0.25)
SHOWN = tuple(name for name in METHODS if not name.startswith("cwvar"))
NETWORKS: dict[str, tuple[str, Callable[[int], Case], int, int]] = {  # seeds take turns with the checkpoints
    "convnet": ("ConvNet", convnet, 5, CONVNETS),
    "resnet56": ("ResNet-56", resnet56, 12, RESNETS),
    "untrained": (CONTROL, untrained, 5, 1),
}
DEPGRAPH = (0.253, 0.065, 0.020)  # the paper's accuracies at these parts, and those of the same parts by CMR-Logit:
DEPGRAPH_BESIDE = (0.670, 0.534, 0.284)
COMPARED = ("CMR-Logit", "VBP", "CMR-Const", LEARNED)  # checkpoint by checkpoint
# IIA and KL (where it is given) at keep 0.75, 0.5, 0.25. The paper's ResNet-56 is for CIFAR-100.
PAPER: dict[str, dict[str, tuple[tuple[float, ...], ...]]] = {
    "ConvNet": {
        "CMR-Logit": ((0.858, 0.082), (0.675, 0.431), (0.483, 1.034)),
        "VBP": ((0.850, 0.087), (0.666, 0.447), (0.456, 1.077)),
        "CMR-Const": ((0.720, 0.356), (0.582, 0.730), (0.455, 1.185)),
        "CMR-Const, iterative": ((), (0.614, 0.597), ()),
        "CMR-Affine, with gradient": ((0.388,), (0.282,), (0.217,)),
        "random": ((0.723,), (0.538,), (0.378,)),
    },
    "ResNet-56": {
        "CMR-Logit": ((0.628, 0.697), (0.369, 1.842), (0.159, 3.232)),
        "VBP": ((0.620, 0.714), (0.361, 1.880), (0.152, 3.224)),
        "CMR-Const": ((0.538, 0.944), (0.303, 2.207), (0.128, 3.436)),
    },
}


def measure(make: Callable[[int], Case], seed: int, swaps: int) -> dict[str, Any]:
    """One seed of one network: every method at every part of its units."""
    case, rows = make(seed), []
    for part in PARTS:
        keep = round(part * case.units)
        for name in SHOWN:
            numbers = case.verified(case.by(name, keep), swaps=swaps)
            rows.append({"part": part, "method": name, **numbers})
    return {"baseline": case.accuracy, "rows": rows}


def summary(name: str, seeds: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over seeds, and CMR-Logit less VBP as the paper pairs them."""
    rows, differences = [], []
    for place, part in enumerate(PARTS):
        by_name = {
            method: [row for one in seeds for row in one["rows"] if (row["part"], row["method"]) == (part, method)]
            for method in SHOWN
        }
        for method, values in by_name.items():
            ours = {number: spread(v[number] for v in values) for number in ("accuracy", "iia", "kl", "d2")}
            paper = PAPER.get(name, {}).get(method, ((),) * len(PARTS))[place]
            rows.append({"part": part, "method": method, "ours": ours, "paper": paper, "seeds": values})
        gaps = {n: difference(by_name["CMR-Logit"], by_name["VBP"], n).to_json() for n in ("iia", "kl")}
        differences.append({"part": part, **gaps})
    return {"baseline": spread(one["baseline"] for one in seeds), "rows": rows, "logit less vbp": differences}


def by_checkpoint(seeds: list[Mapping[str, Any]], checkpoints: int) -> list[dict[str, Any]]:
    """Every checkpoint's accuracy, and means over the seeds that had it."""
    parts = []
    for number in range(min(checkpoints, len(seeds))):
        own, rows = seeds[number::checkpoints], []
        for method in COMPARED:
            for part in PARTS:
                same = [row for one in own for row in one["rows"] if (row["part"], row["method"]) == (part, method)]
                rows.append(
                    {"part": part, "method": method, **{n: spread(v[n] for v in same)[0] for n in ("iia", "kl")}}
                )
        parts.append({"accuracy": spread(one["baseline"] for one in own)[0], "rows": rows})
    return parts


def judged(networks: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Ours against the best of the paper's methods, paired over seeds. Of a control nothing is asked."""
    checks = []
    for name, network in networks.items():
        for part in PARTS if name != CONTROL else ():
            seeds = {row["method"]: row["seeds"] for row in network["rows"] if row["part"] == part}
            checks += beside_the_best(seeds, f"{name}, keep {part}")
    return checks


def depgraph(model: ResNet, images: Images) -> list[dict[str, Any]]:
    """A residual network whose last stage keeps a part of its channels in every layer that shares them, without tuning.

    Channels go by the norm of the column by which the classifier reads them, as in the paper.
    """
    example, last = (torch.from_numpy(images.test[:2]),), f"blocks.{len(model.blocks) - 1}.conv2"
    scores = model.head.weight.detach().norm(dim=0).numpy()
    before, rows = pruners.sizes_of_module(model, example), []
    for part in PARTS:
        gone = len(scores) - round(part * len(scores))
        cut = pruners.cut_lowest(model, example, [last], [scores], [gone])
        sizes = pruners.sizes_of_module(cut, example)
        right = accuracy(logits(cut, images.test), images.test_labels)
        rows.append({"part": part, "accuracy": right, **{name: sizes[name] / before[name] for name in before}})
    return rows


def cut_network(quick: bool) -> list[dict[str, Any]]:
    """The rows of `depgraph` for the first checkpoint: the paper has one of these, too."""
    if quick:
        torch.manual_seed(0)
        return depgraph(ResNet(blocks=1).eval(), large_digits())
    training = TRAININGS["resnet56-0"]
    model = training.model()
    assert isinstance(model, ResNet)
    return depgraph(model, training.data)


# ---------------------------------------------------------------- the page


def body(record: Record) -> str:
    parts = []
    for name, network in record["networks"].items():
        head = ("method", *(f"keep {part}: IIA / KL" for part in PARTS))
        rows = []
        for method in (name for name in SHOWN if any(row["method"] == name for row in network["rows"])):
            cells = []
            for row in (row for row in network["rows"] if row["method"] == method):
                paper = f" (paper {' / '.join(f'{n:.3f}' for n in row['paper'])})" if row["paper"] else ""
                cells.append(f"{row['ours']['iia'][0]:.3f} / {shown(row['ours']['kl'][0])}{paper}")
            rows.append((f"*{method}*" if method in OURS else method, *cells))
        accuracy = network["baseline"][0]
        parts.append(f"**{name}**, accuracy {accuracy:.3f}; in italics what is ours:\n\n{table(head, rows)}")
        if len(network.get("checkpoints", ())) > 1:
            parts.append(over_checkpoints(network["checkpoints"]))
        gaps = [
            f"keep {d['part']}: IIA {d['iia'][0]:+.3f} [{d['iia'][1]:+.3f}, {d['iia'][2]:+.3f}], "
            f"KL {d['kl'][0]:+.3f} [{d['kl'][1]:+.3f}, {d['kl'][2]:+.3f}]"
            for d in network["logit less vbp"]
        ]
        parts.append(f"CMR-Logit less VBP, paired over seeds: {'; '.join(gaps)}.\n")
    if record.get("depgraph"):
        rows = [
            (f"{row['part']:g}", f"{row['accuracy']:.3f} (paper {paper:.3f})", f"{beside:.3f} (paper {paper_beside:.3f})",
             f"{row['parameters']:.3f}", f"{row['macs']:.3f}")
            for row, paper, paper_beside, beside in zip(record["depgraph"], DEPGRAPH, DEPGRAPH_BESIDE, beside_depgraph(record), strict=True)
        ]  # fmt: skip
        head = ("keep", "DepGraph, accuracy", "CMR-Logit of the last channels, accuracy", "parameters", "MACs")
        parts.append(
            "The first ResNet-56 with its last stage cut by DepGraph, channels by the norm of the classifier's column, without tuning; its size "
            "as a part of the whole network's (cutting the last channels alone saves next to nothing):\n\n"
            + table(head, rows)
        )
    return "\n".join((*parts, *([claims(record["claims"])] if record["claims"] else [])))


def over_checkpoints(checkpoints: Sequence[Mapping[str, Any]]) -> str:
    """Means over checkpoints, and from which to which they go."""
    rows = []
    for method in COMPARED:
        cells = []
        for part in PARTS:
            for number in ("iia", "kl"):
                values = [
                    row[number]
                    for c in checkpoints
                    for row in c["rows"]
                    if (row["part"], row["method"]) == (part, method)
                ]
                cells.append(f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})")
        rows.append((f"*{method}*" if method in OURS else method, *cells))
    accuracies = ", ".join(f"{c['accuracy']:.3f}" for c in checkpoints)
    head = ("method", *(f"keep {part}: {number}" for part in PARTS for number in ("IIA", "KL")))
    return f"The {len(checkpoints)} checkpoints (accuracies {accuracies}), mean and range over them:\n\n{table(head, rows)}"


def shown(value: float) -> str:
    return f"{value:.3f}" if value >= 5e-4 else f"{value:.1e}"


def beside_depgraph(record: Record) -> list[float]:
    """Accuracies by CMR-Logit, of the same checkpoint."""
    count = record["checkpoints"]
    rows = [row for row in record["networks"]["ResNet-56"]["rows"] if row["method"] == "CMR-Logit"]
    return [float(np.mean([seed["accuracy"] for seed in row["seeds"][::count]])) for row in rows]


DRAWN = ("CMR-Logit", "VBP", "CMR-Const", "CMR-Affine, with gradient", "random", OURS[0], OURS[-1])


def draw(record: Record, figure: Figure) -> None:
    networks = record["networks"]
    panels = figure.subplots(2, len(networks), sharex=True, squeeze=False)
    for column, (name, network) in enumerate(networks.items()):
        for row, (number, place) in enumerate((("iia", 0), ("kl", 1))):
            panel = panels[row][column]
            for colour, method in zip(COLOURS, DRAWN, strict=False):
                some = [one for one in network["rows"] if one["method"] == method]
                x, y = [one["part"] for one in some], [one["ours"][number] for one in some]
                spread_of = [v[1] for v in y] if number == "iia" else None  # a logarithmic axis has no room for it
                panel.errorbar(
                    x, [v[0] for v in y], yerr=spread_of, marker="o", markersize=4, color=colour, label=method
                )
                paper = [(one["part"], one["paper"][place]) for one in some if len(one["paper"]) > place]
                if paper and name == "ConvNet":
                    panel.plot(*zip(*paper, strict=True), "D", markersize=6, markerfacecolor="none", color=colour)
            if row:
                panel.set_xlabel("part of the units that is kept")
            else:
                panel.set_title(f"{name} (control)" if name == CONTROL else name, fontsize=10)
            panel.set_ylabel("IIA" if number == "iia" else "KL, nats")
            panel.set_xticks(PARTS)
            if number == "kl":
                panel.set_yscale("log")
    panels[0][0].plot([], [], "D", markerfacecolor="none", color="black", label="paper")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)


SECTIONS = (
    Section(
        "abstraction_convnet",
        "Reductions under interchange interventions (table 4): ConvNets",
        """The 256 hidden units of CIFAR-10 ConvNets, R = 2000 swaps at rate 0.5 on the test set, five seeds. In the paper CMR-Logit is best, VBP close
behind, CMR-Const with its constants refitted below both, and CMR-Affine (with the gradient term) below random. The order of CMR-Logit, VBP and
random is the same here. *CMR-Const, each alone* folds every unit's own c*; *no gradient* scores and refits by curvature alone, which is better
throughout: see the MNIST baseline. Scoring anew halfway (*iterative*) helps CMR-Const as it does there. The last five are ours: of all methods, maps learned
on swaps have the highest IIA at every size. Their KL is the lowest at half and a quarter, and with a gap of 0.004 the second lowest at three quarters, behind
the least-squares fit that they start from.

What differs: ours are {checkpoints} ConvNets trained by plain Adam for two epochs, so they are less accurate, and lower in IIA for random selection too:
a matter of the networks and not of the scores. The paper's figure pools its three networks into one curve for each method; here each has a column,
and the one that has learned nothing is the last.
""",
        body,
        draw,
        arguments=("convnet",),
        size=(11.0, 7.0),
        beside=("abstraction_resnet56", "abstraction_untrained"),
    ),
    Section(
        "abstraction_resnet56",
        "Reductions under interchange interventions (table 4): ResNet-56",
        """The 64 last channels of a ResNet-56; the rest as above, with twelve seeds, four for each checkpoint. The paper has three checkpoints for CIFAR-100. CIFAR-100
cannot be had here: ours are {checkpoints} for CIFAR-10, trained for seven epochs, six of them at half the size of the pictures. Their accuracy is below the 0.93 that
such a network can reach, because that is all the training a CPU allows here; so the level of the IIA cannot be compared. With six seeds the gain in IIA
at three quarters, +0.005 [-0.002, +0.013], was not yet apart from 0; so there are twelve.
""",
        body,
        arguments=("resnet56",),
    ),
    Section(
        "abstraction_untrained",
        "Reductions under interchange interventions: a network that has learned nothing",
        """The 64 last channels of a ResNet-20 with random weights. The paper pools this control into its curves; here it has a column of its own in the picture
of the ConvNets. The rest as above. A high IIA here says nothing about what a method keeps of a network that knows something.
""",
        body,
        arguments=("untrained",),
    ),
)


def main() -> None:
    asked = parser(__doc__, "abstraction_{network}.json")
    asked.add_argument("network", choices=sorted(NETWORKS))
    options = asked.parse_args()
    use_threads(options.threads)
    name, make, count, checkpoints = NETWORKS[options.network]
    resumed, seeds = Resumed(options.json), range(2 if options.quick else count)
    swaps = 200 if options.quick else SWAPS
    make = small if options.quick else make
    measured = [
        resumed(f"seed {seed}", lambda seed=seed: measure(make, seed, swaps))
        for seed in progress(seeds, f"{name}, {len(seeds)} seeds")
    ]
    results = {**summary(name, measured), "checkpoints": by_checkpoint(measured, checkpoints)}
    for row in results["rows"]:
        numbers = ", ".join(f"{number} {row['ours'][number][0]:.3f}" for number in ("accuracy", "iia", "kl"))
        print(name, row["part"], row["method"], numbers, row["paper"] or "")
    more: dict[str, Any] = {
        "networks": {name: results},
        "claims": judged({name: results}),
        "checkpoints": checkpoints,
    }
    if name == "ResNet-56":
        more["depgraph"] = resumed("depgraph", lambda: cut_network(options.quick))
    write_record(options.json, f"abstraction, {options.network}", [], options, **more)
    resumed.forget()


if __name__ == "__main__":
    main()
