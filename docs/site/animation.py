"""Write docs/pictures/do_sinks_select_rises.svg: `python docs/site/animation.py`. A test fails if the picture is stale.

Six hidden units between two linear maps, two of them replaced by constants. Everything moves by CSS inside the picture, so it plays
wherever an image does; who prefers less motion sees the last step beside the first.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

PICTURE = Path(__file__).parents[1] / "pictures" / "do_sinks_select_rises.svg"

UNITS, GONE, INPUTS, OUTPUTS = 6, (1, 4), 4, 3
CELL, GAP = 22, 26  # of a cell, and from one to the next
LEFT, TOP = 40, 72
FIRST = LEFT + 20  # fc1.weight
BIAS1 = FIRST + INPUTS * GAP + 12
ACT = BIAS1 + 96  # the units
SECOND = ACT + 96  # fc2.weight
BIAS2 = SECOND + UNITS * GAP + 12
WIDTH, HEIGHT = BIAS2 + 110, TOP + UNITS * GAP + 78
SECONDS = 16

# When things happen, in per cent of the whole.
DO, SINK, SUNK, RISE, RISEN, CLOSE, CLOSED, END = 14, 32, 46, 54, 66, 72, 80, 97
CAPTIONS = (
    (0, DO, "A trained network: a linear map, six units, a linear map."),
    (DO, SINK, "do: two units are replaced by constants."),
    (SINK, RISE, "A do sinks: the constants go into the next bias,  b += W c."),
    (RISE, CLOSE, "A select rises: nobody reads the two units, so their rows go."),
    (CLOSE, 100, "What is left is smaller and dense, and computes exactly the same."),
)


def keyframes(name: str, *steps: tuple[float, str]) -> str:
    return f"@keyframes {name} {{ " + " ".join(f"{at:g}% {{ {style} }}" for at, style in steps) + " }"


def moved_up(unit: int) -> int:
    return sum(gone < unit for gone in GONE) * GAP


def style() -> str:
    rules = [
        "text { font: 13px ui-sans-serif, system-ui, sans-serif; fill: #37474f; }",
        ".caption { font-size: 15px; fill: #263238; opacity: 0; }",
        ".c { fill: #b0bec5; } .b { fill: #78909c; } .u { fill: #eceff1; stroke: #546e7a; stroke-width: 1.5; }",
        ".k { fill: #ef6c00; opacity: 0; } .k text { fill: #fff; font-size: 10px; text-anchor: middle; }",
        ".s { fill: none; stroke: #1565c0; stroke-width: 2.5; opacity: 0; }",
        f"g, rect, circle, path, text {{ animation-duration: {SECONDS}s; animation-iteration-count: infinite; }}",
        # A row, a unit or a column that goes, and the places that close behind it.
        keyframes("row", (0, "opacity: 1"), (RISE + 4, "opacity: 1"), (RISEN, "opacity: .06"), (CLOSE, "opacity: 0"),
                  (END, "opacity: 0"), (100, "opacity: 1")),
        keyframes("column", (0, "opacity: 1"), (SINK + 6, "opacity: 1"), (SUNK, "opacity: .06"), (CLOSE, "opacity: 0"),
                  (END, "opacity: 0"), (100, "opacity: 1")),
        keyframes("tint", (0, "fill: #eceff1"), (DO, "fill: #eceff1"), (DO + 4, "fill: #ffe0b2"), (END, "fill: #ffe0b2"),
                  (100, "fill: #eceff1")),
        keyframes("glow", (0, "fill: #78909c"), (SUNK - 3, "fill: #78909c"), (SUNK, "fill: #ef6c00"), (CLOSE, "fill: #ef6c00"),
                  (CLOSED, "fill: #78909c"), (100, "fill: #78909c")),
        ".row { animation-name: row; } .column { animation-name: column; } .tint { animation-name: tint; } .glow { animation-name: glow; }",
    ]  # fmt: skip
    for gone in GONE:
        across = BIAS2 - ACT
        down = TOP + GAP - (TOP + gone * GAP)
        rules.append(
            keyframes(
                f"token{gone}", (0, "opacity: 0"), (DO, "opacity: 0"), (DO + 4, "opacity: 1; transform: translate(0, 0)"),
                (SINK, "opacity: 1; transform: translate(0, 0)"),
                (SUNK, f"opacity: 1; transform: translate({across}px, {down}px)"), (SUNK + 2, "opacity: 0"), (100, "opacity: 0"),
            )
        )  # fmt: skip
        rules.append(f".token{gone} {{ animation-name: token{gone}; }}")
    for places in {moved_up(unit) for unit in range(UNITS)} - {0}:
        for name, move in (("up", f"translate(0, -{places}px)"), ("left", f"translate(-{places}px, 0)")):
            rules.append(
                keyframes(f"{name}{places}", (0, "transform: none"), (CLOSE, "transform: none"), (CLOSED, f"transform: {move}"),
                          (END, f"transform: {move}"), (100, "transform: none"))
            )  # fmt: skip
            rules.append(f".{name}{places} {{ animation-name: {name}{places}; }}")
    across = ACT + CELL / 2 - (BIAS1 + CELL)
    rules.append(
        keyframes("select", (0, "opacity: 0"), (RISE - 2, "opacity: 0; transform: translate(0, 0)"),
                  (RISE, "opacity: 1; transform: translate(0, 0)"), (RISEN, f"opacity: 1; transform: translate(-{across + 90}px, 0)"),
                  (RISEN + 3, "opacity: 0"), (100, "opacity: 0"))
    )  # fmt: skip
    rules.append(".s { animation-name: select; }")
    for i, (begin, end, _) in enumerate(CAPTIONS):
        steps = [
            (0.0, "opacity: 0"),
            (begin + 0.1, "opacity: 0"),
            (begin + 1, "opacity: 1"),
            (end - 1, "opacity: 1"),
            (end, "opacity: 0"),
        ]
        steps = steps[2:] if not begin else steps
        rules.append(keyframes(f"caption{i}", *steps))
        rules.append(f".caption{i} {{ animation-name: caption{i}; }}")
    still = "g, rect, circle, path, text { animation-play-state: paused; animation-delay: -" + f"{SECONDS * 0.9:g}s; }}"
    rules.append(f"@media (prefers-reduced-motion: reduce) {{ {still} }}")
    return "\n".join(rules)


def cell(x: float, y: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{CELL}" height="{CELL}" rx="3"/>'


def group(classes: str, parts: Iterable[str]) -> str:
    return f'<g class="{classes}">' + "".join(parts) + "</g>"


def behind(name: str, unit: int) -> str:
    """The classes of what belongs to a unit: it goes, or it closes up."""
    if unit in GONE:
        return name
    places = moved_up(unit)
    return f"{'up' if name == 'row' else 'left'}{places}" if places else "stays"


def picture() -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'aria-label="Two of six units are replaced by constants; the constants sink into the next bias, the selection rises into the '
        'rows of the map before, and a smaller dense network is left.">',
        f"<style>{style()}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" style="fill:#fff"/>',
        f'<text x="{FIRST}" y="{TOP - 22}">fc1.weight</text><text x="{BIAS1 - 2}" y="{TOP - 22}">bias</text>',
        f'<text x="{ACT - 8}" y="{TOP - 22}">units</text>',
        f'<text x="{SECOND}" y="{TOP - 22}">fc2.weight</text><text x="{BIAS2 - 2}" y="{TOP - 22}">bias</text>',
    ]  # fmt: skip
    for unit in range(UNITS):
        y = TOP + unit * GAP
        row = [cell(FIRST + i * GAP, y, "c") for i in range(INPUTS)] + [cell(BIAS1, y, "b")]
        tint = " tint" if unit in GONE else ""
        row.append(f'<circle class="u{tint}" cx="{ACT + CELL / 2:g}" cy="{y + CELL / 2:g}" r="{CELL / 2 - 1:g}"/>')
        parts.append(group(behind("row", unit), row))
        column = [cell(SECOND + unit * GAP, TOP + (k + 1) * GAP, "c") for k in range(OUTPUTS)]
        parts.append(group(behind("column", unit), column))
    parts += [cell(BIAS2, TOP + (k + 1) * GAP, "b glow") for k in range(OUTPUTS)]
    middle = TOP + 2 * GAP + CELL / 2
    for begin, end in (
        (BIAS1 + CELL + 14, ACT - 16),
        (ACT + CELL + 16, SECOND - 14),
        (BIAS2 + CELL + 14, BIAS2 + CELL + 62),
    ):
        parts.append(
            f'<path d="M{begin:g} {middle:g} H{end:g} m-7 -5 l7 5 l-7 5" style="fill:none;stroke:#90a4ae;stroke-width:2"/>'
        )
    parts.append(f'<path class="s" d="M{SECOND - 16} {TOP - 6} h-12 v{UNITS * GAP + 8} h12"/>')
    for gone, number in zip(GONE, (".5", ".25"), strict=True):
        x, y = ACT + CELL / 2, TOP + gone * GAP + CELL / 2
        parts.append(
            f'<g class="k token{gone}"><circle cx="{x:g}" cy="{y:g}" r="11"/><text x="{x:g}" y="{y + 4:g}">{number}</text></g>'
        )
    for i, (_, _, text) in enumerate(CAPTIONS):
        parts.append(f'<text class="caption caption{i}" x="{LEFT}" y="{HEIGHT - 28}">{text}</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
