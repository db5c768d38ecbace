"""Pictures that several tables share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from benchmarks.section import COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS, PUBLISHED, PEER = "cmrc", "as published", "peer"
KINDS = {OURS: COLOURS[0], PUBLISHED: COLOURS[2], PEER: COLOURS[1]}


def digits(value: float) -> str:
    """Three digits, or all of a large number."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def bars(
    figure: Figure, rows: Sequence[Mapping[str, object]], number: str, label: str, *, whole: float | None = None
) -> None:
    """One bar a method, coloured by whose it is; `whole` is the untouched network. On a log scale where they lie far apart."""
    from matplotlib.patches import Patch

    rows = [row for row in rows if number in row][::-1]
    values = [float(str(row[number])) for row in rows]
    low, high = min(values), max(values)
    wide = high / low > 30
    axes = figure.subplots()
    axes.barh(range(len(rows)), values, color=[KINDS[str(row["kind"])] for row in rows])
    axes.set_yticks(range(len(rows)), [str(row["method"]) for row in rows])
    if wide:
        axes.set_xscale("log")
        axes.set_xlim(min(low, whole or low) / 2, high * (high / low) ** 0.2)
    else:
        axes.set_xlim(0, 1.15 * high)
    for i, value in enumerate(values):
        axes.annotate(f" {digits(value)}", (value, i), va="center", fontsize=9)
    if whole:
        axes.axvline(whole, color="black", linestyle="--", linewidth=1, label="whole network")
    axes.set_xlabel(f"{label} ({'log scale; ' if wide else ''}less is better)")
    axes.grid(axis="y", visible=False)
    shown = [
        Patch(color=colour, label=kind) for kind, colour in KINDS.items() if any(row["kind"] == kind for row in rows)
    ]
    figure.legend(handles=[*shown, *axes.get_lines()], loc="outside upper right", ncols=4, fontsize=8)
