"""The page of a network's curves: what is claimed, the tables and the figure.

`benchmarks.curves` measures what stands here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.charts import PEER, PUBLISHED, digits
from benchmarks.section import COLOURS, Record, Section, claim, claims, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOSS = 0.01  # of agreement, that a user may lose
OWN = "cmrc, by its defaults"
DEFAULT = "without another word"
TITLES = {
    "resnet": "ResNet-8 on CIFAR-10",
    "vit": "ViT on CIFAR-10",
    "digits": "the digits classifier of the examples",
    "minilm": "MiniLM-L6",
    "magika": "Magika",
    "recogniser": "PP-OCRv4 rec",
    "efficientnet": "EfficientNet-Lite0",
    "smollm": "SmolLM2-135M",
}


# ---------------------------------------------------------------- claims


def judge_curves(rows: Sequence[Record], presets: Sequence[Record], number: str, floor: float) -> list[dict[str, Any]]:
    """At each size, what ours loses over what the best library and the best published method lose: the worst ratio.

    And what half of the units costs by default, over the best preset.
    """
    checks = []
    reached = [row for row in rows if number in row and not row.get("why")]
    for kind, target in ((PEER, 1 / 3), (PUBLISHED, 1.0)):
        ratios = []
        for size in sorted({row["size"] for row in reached}):
            here = [row for row in reached if row["size"] == size]
            own = [row[number] - floor for row in here if row["method"] == OWN]
            others = [row[number] - floor for row in here if row["kind"] == kind]
            if own and others:
                ratios.append(own[0] / max(min(others), 1e-12))
        if ratios:
            checks.append(claim(f"{number} lost, ours over the best {kind}, worst size", max(ratios), "<=", target))
    known = {row["preset"]: row[number] - floor for row in presets if number in row}
    if len(known) > 1 and DEFAULT in known:
        checks.append(
            claim("half of the units by default, over the best preset", known[DEFAULT] / min(known.values()), "<=", 1.1)
        )
    return checks


# ---------------------------------------------------------------- the page


def agreement_of(record: Record) -> str | None:
    """The number that counts how many answers are as before."""
    names = ("agreement", "nearest sentence kept", "strings as before")
    return next((name for name in names if name in record["whole"]), None)


def smallest(record: Record, method: str) -> float | None:
    """The part of the multiply-accumulates at which `LOSS` of the agreement is lost: between two measured sizes, on a straight line.

    None if the method was not measured so far down.
    """
    key, whole = agreement_of(record), record["whole"]["macs"]
    points = [(row["macs"] / whole, row[key]) for row in record["rows"] if row["method"] == method and key in row]
    before = (1.0, 1.0)
    for part, same in sorted(points, reverse=True):
        if same < 1 - LOSS:
            return before[0] - (before[0] - part) * (before[1] - (1 - LOSS)) / (before[1] - same)
        before = (part, same)
    return None


def body(record: Record) -> str:
    number, key = record["number"], agreement_of(record)
    sizes = sorted({row["size"] for row in record["rows"]}, reverse=True)
    methods = list(dict.fromkeys((row["method"], row["kind"]) for row in record["rows"]))
    rows = []
    for method, kind in methods:
        by_size = {row["size"]: row for row in record["rows"] if row["method"] == method}
        cells = []
        for size in sizes:
            row = by_size.get(size, {})
            text = digits(row[number]) if number in row else row.get("why", "")
            if number in row and key:
                text += f" ({100 * row[key]:.1f} %)"
            cells.append(text)
        last = by_size.get(sizes[-1], {})
        fast = f"{last['latency']:.2f}" if "latency" in last else ""
        least = smallest(record, method) if key else None
        rows.append((method, kind, *cells, fast, "" if least is None else f"{least:.3f}"))
    head = ("method", "whose", *(f"{size:g}" for size in sizes), f"latency at {sizes[-1]:g}", "size with 1 % lost")
    shown = f"{number}" + (f" (and {key})" if key else "")
    page = [
        f"{record['name']}: {record['subject']}. {shown} at parts of the multiply-accumulates:\n",
        table(head, rows),
    ]
    presets = [row for row in record["defaults"] if number in row]
    if presets:
        best = min(row[number] for row in presets)
        cells = [(row["preset"], digits(row[number]), f"{row[number] / best:.2f}") for row in presets]
        page += [
            "Half of the units of the same layers, by preset:\n",
            table(("preset", number, "over the best"), cells),
        ]
    for row in record.get("agreeing", ()):
        if number in row and key:
            page.append(
                f"`cmrc reduce --agreement {1 - LOSS:g} --measured` chooses {row['macs'] / record['whole']['macs']:.3f} of the multiply-accumulates, "
                f"where a quarter of its own data agrees on {100 * row['own agreement']:.1f} %; of the data judged on here {100 * row[key]:.1f} % agree.\n"
            )
    return "\n".join((*page, claims(record["claims"])))


def draw(record: Record, figure: Figure) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    whole, number = record["whole"], record["number"]
    methods = list(dict.fromkeys(row["method"] for row in record["rows"]))
    for i, method in enumerate(methods):
        rows = [row for row in record["rows"] if row["method"] == method and number in row]
        style = {"marker": "o", "color": COLOURS[i % len(COLOURS)], "linestyle": "-" if i < len(COLOURS) else ":"}
        lost = [max(row[number] - whole[number], 1e-5) for row in rows]
        left.plot([row["macs"] / whole["macs"] for row in rows], lost, label=method, **style)
        if all("latency" in row for row in rows):
            right.plot([row["latency"] for row in rows], lost, **style)
    left.set(xlabel="multiply-accumulates, of the whole network", ylabel=f"{number} lost", yscale="log")
    right.set(xlabel="latency, of the whole network")
    figure.legend(loc="outside lower center", ncols=2, fontsize=7)


TEXT = """No fine-tuning. Ours gets a budget of multiply-accumulates and nothing else; it may cut every unit and head that folds. The others cut
the layers that the other table of this network names. Sizes that are not shown were not measured yet. Latency is of one sample as an ONNX
file under onnxruntime, in turns with the whole network, on a machine that did other work besides. The size with 1 % lost lies between two
measured ones, on a straight line. Multiply-accumulates of the budget are counted by cmrc; torch's counter, which the figure goes by, differs by up to 3 %.
The record names the commit of each row.
"""
NOTES = {
    "resnet": """Loss is won here, and time is not: at one picture the small files take as long as the whole one, since onnxruntime's convolutions
want channels in multiples of 8 (Torch-Pruning's uniform half has them by chance). Who needs time asks for it: `--speedup`, or `multiple_of: 8`.
""",
    "vit": """Attention is left to ours alone: the others cut the hidden units of the MLPs, as their tables do elsewhere. What onnxsim and each preset lose
stands here once it is measured.
""",
    "digits": """The file that the worked example reduces, so that a minute gives every row. One picture takes about 12 microseconds, most of it outside the arithmetic, and
widths that are no multiple of 8 cost more than they save: who needs time asks for it. At 0.5 the same part of every layer loses less than what is chosen by measured loss. On the
calibration pictures, which the network was trained on, it loses twice as much.
""",
    "minilm": """Ours at 0.9, 0.8 and 0.6, onnxsim and the presets are not measured yet: they go on with the command below.
""",
    "magika": """A single layer can be cut, and by constants alone, so that the methods differ in the order of its units only. No library here cuts it. The
FLAP-like order is one of the three that ours tries; another is by what each unit alone does to the outputs. Ours takes the one that loses least on the 300
calibration files, on which the others' statistics were gathered too. The files are those of the machine that measures, and which 600 of them are judged
matters: on another 600 the measured order alone was between .87 and 1.07 of the FLAP-like one. The same part of every layer is the same cut here. What
onnxsim does and the presets are not measured by the present code.
""",
}
SECTIONS: tuple[Section, ...] = tuple(
    Section(f"curves_{name}", f"Curves: {title}", TEXT + NOTES.get(name, ""), body, draw, (name,), (9.0, 4.6))
    for name, title in TITLES.items()
)
