"""The pictures of a report as Vega-Lite specifications, from the numbers of an account."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cmrc.planning.advice import ADDS_UP, Finding
from cmrc.reduction.account import Account

STATES = ("replaced", "folded into", "removed", "does not fold", "unchanged")
COLOURS = ("#d95f02", "#1b9e77", "#999999", "#c0392b", "#9db7d5")
STATE_COLOURS = (*COLOURS[:3], "#d9a49b", COLOURS[4])  # what does not fold is the usual case, and no alarm
LEAST = 1e-12  # on a logarithmic axis
GREY = "#888888"  # seen on light and on dark
LABELLED = 24  # nodes of a graph that are few enough to stand with their names
DOT = "clamp(pow(width / 80, 2), 14, 70)"  # of a node: smaller where the window is narrow
# names of layers differ at their ends
ENDING = "length(datum.label) > 22 ? '…' + slice(datum.label, -21) : datum.label"
LISTED = 24  # layers of a legend
NARROW = 16  # pixels of a bar, and of the row of a graph


def _chart(values: Sequence[Mapping[str, Any]], **spec: Any) -> dict[str, Any]:
    return {
        "data": {"values": list(values)},
        "width": "container",
        "autosize": {"type": "fit-x", "contains": "padding"},
        "background": None,
        **spec,
    }


def frontier_chart(a: Account) -> dict[str, Any]:
    """Agreement with its interval against the multiply-adds; the chosen size stands out."""
    values = frontier_points(a, "chosen", "others")
    x = {"field": "part", "type": "quantitative", "title": "part of the multiply-adds", "scale": {"zero": False}}
    y = {"field": "agreement", "type": "quantitative", "title": "agreement with the original", "scale": {"zero": False}}
    tip = [{"field": f} for f in ("size", "which")] + [
        {"field": f, "format": ".4f"} for f in ("agreement", "low", "high", "certified", "KL", "speed-up", "part")
    ]
    colour = {
        "field": "which", "type": "nominal", "title": None,
        "scale": {"domain": ["chosen", "others"], "range": [COLOURS[0], COLOURS[4]]},
    }  # fmt: skip
    return _chart(values, height=260, layer=[
        {"mark": {"type": "line", "color": COLOURS[4]}, "encoding": {"x": x, "y": y}},
        {"mark": {"type": "rule"}, "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": colour}},
        {"mark": {"type": "point", "filled": True, "size": 90}, "encoding": {"x": x, "y": y, "color": colour, "tooltip": tip}},
    ])  # fmt: skip


def frontier_points(a: Account, chosen: str, others: str) -> list[dict[str, Any]]:
    """One point per size; `which` calls the chosen one and the others by these names."""
    points = []
    for size in a["frontier"]:
        quality, speed = size["quality"], size["speed"]
        value, low, high = quality["agreement"][:3]
        points.append(
            {"part": size["macs"] / max(a["original"]["macs"], 1), "agreement": value, "low": low, "high": high,
             "certified": quality["bound"], "KL": quality["kl"], "speed-up": speed and speed["speedup"][0],
             "size": f"{size['share']:g}", "which": chosen if size["share"] == a["chosen"] else others}
        )  # fmt: skip
    return points


def latency_chart(a: Account) -> dict[str, Any] | None:
    """Milliseconds per run with their intervals."""
    timed = [(f"{size['share']:g}", size["speed"]) for size in a["frontier"] if size["speed"]]
    if not timed or a["original"]["milliseconds"] is None:
        return None
    low, high = a["original"].get("interval") or (None, None)
    values: list[dict[str, Any]] = [{"size": "original", "ms": a["original"]["milliseconds"], "low": low, "high": high}]
    values += [
        {"size": n, **dict(zip(("ms", "low", "high"), s["milliseconds"], strict=False)), "speed-up": s["speedup"][0]}
        for n, s in timed
    ]
    x = {"field": "ms", "type": "quantitative", "title": "ms per run, 95 % interval"}
    y = {"field": "size", "type": "nominal", "sort": None, "title": None}
    chosen = {"condition": {"test": f"datum.size == '{a['chosen']:g}'", "value": COLOURS[0]}, "value": COLOURS[4]}
    return _chart(values, height=24 * len(values), layer=[
        {"mark": {"type": "bar"}, "encoding": {"x": x, "y": y, "color": chosen,
         "tooltip": [{"field": "size"}, {"field": "ms", "format": ".4g"}, {"field": "speed-up", "format": ".2f"}]}},
        {"mark": {"type": "rule", "color": "#66707c", "strokeWidth": 2}, "encoding": {"x": {**x, "field": "low"}, "x2": {"field": "high"}, "y": y}},
    ])  # fmt: skip


def widths_chart(a: Account) -> dict[str, Any]:
    values = []
    for site, (before, after) in a["widths"].items():
        values.append({"layer": site, "what": "kept", "units": after, "of": before})
        values.append({"layer": site, "what": "removed", "units": before - after, "of": before})
    return _chart(values, height=10 * len(values) + 20, mark="bar", encoding={
        "y": {"field": "layer", "type": "nominal", "sort": None, "title": None, "axis": {"labelExpr": ENDING}},
        "x": {"field": "units", "type": "quantitative", "stack": True, "title": "units"},
        "color": {"field": "what", "type": "nominal", "title": None,
                  "scale": {"domain": ["kept", "removed"], "range": [COLOURS[1], COLOURS[4]]}},
        "order": {"field": "what"},
        "tooltip": [{"field": "layer"}, {"field": "what"}, {"field": "units"}, {"field": "of"}],
    })  # fmt: skip


def risk_chart(a: Account) -> dict[str, Any] | None:
    """By layer the risk that each removal adds, in the order of the selection, with the cut."""
    if not a["risks"]:
        return None
    values = [{**row, "added": max(row["added"], LEAST)} for row in a["risks"]]
    layers = list(dict.fromkeys(row["layer"] for row in a["risks"]))
    return _chart(values, height=280, params=[{"name": "legend", "select": {"type": "point", "fields": ["layer"]}, "bind": "legend"}],
        mark={"type": "point", "filled": True}, encoding={
        "x": {"field": "step", "type": "quantitative", "title": "units removed, in the order of the selection"},
        "y": {"field": "added", "type": "quantitative", "scale": {"type": "log"}, "title": "risk that the removal adds",
              "axis": {"format": ".0e", "tickCount": 8}},
        "color": {"field": "layer", "type": "nominal", "sort": None,
                  "legend": {"symbolLimit": 0, "values": layers[:LISTED], "orient": "bottom", "columns": 3, "labelExpr": ENDING}},
        "shape": {"field": "unit", "type": "nominal", "title": None, "legend": {"orient": "top", "symbolFillColor": GREY},
                  "scale": {"domain": ["removed", "kept"], "range": ["circle", "triangle-up"]}},
        "size": {"condition": {"test": "datum.unit == 'removed'", "value": 34}, "value": 14},
        "opacity": {"condition": {"param": "legend", "value": 0.9}, "value": 0.08},
        "tooltip": [{"field": "layer"}, {"field": "unit"}, {"field": "step"}, {"field": "added", "format": ".3g"},
                    {"field": "total", "format": ".3g", "title": "so far"}],
    })  # fmt: skip


def certificate_chart(a: Account) -> dict[str, Any] | None:
    """Each answer: the original's margin against how far the logits moved. Below the line the answer cannot change."""
    if not a["answers"]:
        return None
    values = [
        {**row, "answer": "the same" if row["same"] else "another",
         "certain": "cannot change" if row["distortion"] < row["margin"] else "not certain by its margin"}
        for row in a["answers"]
    ]  # fmt: skip
    top = min(max(row["margin"] for row in values), max(row["distortion"] for row in values))
    x = {"field": "margin", "type": "quantitative", "title": "margin of the original"}
    y = {"field": "distortion", "type": "quantitative", "title": "distortion of the logits"}
    colour = {"field": "answer", "type": "nominal", "title": "answer",
              "scale": {"domain": ["the same", "another"], "range": [COLOURS[1], COLOURS[3]]}}  # fmt: skip
    tip = [
        {"field": "margin", "format": ".3g"},
        {"field": "distortion", "format": ".3g"},
        {"field": "answer"},
        {"field": "certain"},
    ]
    line = {"data": {"values": [{"a": 0, "b": 0}, {"a": top, "b": top}]}, "mark": {"type": "line", "strokeDash": [4, 4], "color": "#888"},
            "encoding": {"x": {"field": "a", "type": "quantitative"}, "y": {"field": "b", "type": "quantitative"}}}  # fmt: skip
    points = {
        "mark": {"type": "point", "filled": True, "size": 22, "opacity": 0.7},
        "encoding": {"x": x, "y": y, "color": colour, "tooltip": tip},
    }
    return _chart(values, height=300, layer=[points, line])


def graph_chart(a: Account) -> dict[str, Any]:
    """The model from left to right; drag to move, scroll to zoom, and a field to search."""
    graph = a["graph"]
    scale = {"zero": False, "padding": 14}
    axis = {"axis": None, "type": "quantitative", "scale": scale}
    down = {**axis, "scale": {**scale, "reverse": True}}
    rows = max((node["y"] for node in graph["nodes"]), default=0.0)
    matches = "search == '' || test(regexp(search, 'i'), datum.name + ' ' + datum.op + ' ' + datum.what)"
    names = {
        "data": {"values": graph["nodes"]}, "encoding": {"x": {**axis, "field": "x"}, "y": {**down, "field": "y"}, "text": {"field": "name"}},
        "mark": {"type": "text", "angle": 40, "align": "left", "dx": 6, "dy": 6, "fontSize": 10, "limit": 90, "color": GREY},
    }  # fmt: skip
    return {
        "width": "container", "height": int(min(900, max(160, NARROW * (rows + 2)))), "background": None,
        "params": [{"name": "search", "value": "", "bind": {"input": "search", "placeholder": "name, op or state", "name": "search "}}],
        "layer": [
            {"data": {"values": graph["edges"]}, "mark": {"type": "rule", "color": "#9995"},
             "encoding": {"x": {**axis, "field": "x"}, "y": {**down, "field": "y"}, "x2": {"field": "u"}, "y2": {"field": "v"}}},
            {"data": {"values": graph["nodes"]}, "params": [{"name": "view", "select": "interval", "bind": "scales"}],
             "mark": {"type": "point", "filled": True},
             "encoding": {
                "x": {**axis, "field": "x"}, "y": {**down, "field": "y"},
                "color": {"field": "what", "type": "nominal", "title": None, "legend": {"orient": "top", "columns": 3},
                          "scale": {"domain": list(STATES), "range": list(STATE_COLOURS)}},
                "size": {"condition": {"test": matches, "value": {"expr": DOT}}, "value": 15},
                "opacity": {"condition": {"test": matches, "value": 1}, "value": 0.12},
                "tooltip": [{"field": f} for f in ("name", "op", "shape", "what", "remark")]}},
            *([names] if len(graph["nodes"]) <= LABELLED else []),
        ],
        "config": {"view": {"stroke": None}},
    }  # fmt: skip


# ---------------------------------------------------------------- two of them


def two_frontiers(first: Account, second: Account, names: tuple[str, str]) -> dict[str, Any]:
    """Agreement against the multiply-adds, a line for each reduction; the chosen sizes are filled."""
    values = [
        {**point, "chosen": point.pop("which"), "which": name}
        for a, name in zip((first, second), names, strict=True)
        for point in frontier_points(a, "chosen", "other")
    ]
    x = {"field": "part", "type": "quantitative", "title": "part of the multiply-adds", "scale": {"zero": False}}
    y = {"field": "agreement", "type": "quantitative", "title": "agreement with the original", "scale": {"zero": False}}
    colour = {"field": "which", "type": "nominal", "title": None, "sort": None, "legend": {"orient": "top"},
              "scale": {"domain": list(names), "range": list(COLOURS[:2])}}  # fmt: skip
    tip = [{"field": f} for f in ("which", "size", "chosen")] + [
        {"field": f, "format": ".4f"} for f in ("agreement", "low", "high", "certified", "KL", "speed-up", "part")
    ]
    opacity = {"condition": {"test": "datum.chosen == 'chosen'", "value": 1}, "value": 0.35}
    return _chart(values, height=280, layer=[
        {"mark": "line", "encoding": {"x": x, "y": y, "color": colour}},
        {"mark": "rule", "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": colour}},
        {"mark": {"type": "point", "filled": True, "size": 90},
         "encoding": {"x": x, "y": y, "color": colour, "fillOpacity": opacity, "tooltip": tip}},
    ])  # fmt: skip


def two_widths(widths: Mapping[str, Sequence[int | None]], names: tuple[str, str]) -> dict[str, Any]:
    values = [
        {"layer": layer, "which": name, "units": kept}
        for layer, pair in widths.items()
        for name, kept in zip(names, pair, strict=True)
        if kept is not None
    ]
    return _bars(values, names, "units kept")


def two_plans(rows: Sequence[Mapping[str, Any]], names: tuple[str, str]) -> dict[str, Any]:
    """By layer: units that only the first replaces, both, and only the second."""
    kinds = (f"only {names[0]}", "both", f"only {names[1]}")
    values = [
        {"layer": row["site"], "which": kind, "units": number}
        for row in rows
        for kind, number in zip(kinds, (row["only_first"], row["both"], row["only_second"]), strict=True)
    ]
    return _bars(values, kinds, "replaced units")


def _bars(values: Sequence[Mapping[str, Any]], kinds: Sequence[str], title: str) -> dict[str, Any]:
    """Bars side by side, a row of them for every layer."""
    layers = len({value["layer"] for value in values})
    return _chart(values, height=NARROW * len(kinds) * max(layers, 1) + 20, mark="bar", encoding={
        "y": {"field": "layer", "type": "nominal", "sort": None, "title": None},
        "yOffset": {"field": "which", "type": "nominal", "sort": list(kinds)},
        "x": {"field": "units", "type": "quantitative", "title": title},
        "color": {"field": "which", "type": "nominal", "title": None, "legend": {"orient": "top"},
                  "scale": {"domain": list(kinds), "range": [COLOURS[0], COLOURS[1], COLOURS[4]][: len(kinds)]}},
        "tooltip": [{"field": "layer"}, {"field": "which"}, {"field": "units"}],
    })  # fmt: skip


# ---------------------------------------------------------------- a diagnosis

TENFOLD = 10  # from where on an axis is logarithmic
NEAR = 1e-3  # of the largest change: what counts as close to 0


def _colour_by_site(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A colour for every site; a single one needs no legend."""
    longest = max(len(value["site"]) for value in values)
    legend = {
        "symbolLimit": 12,
        "orient": "bottom",
        "columns": max(1, min(3, 36 // longest)),
        "labelLimit": 240,
        "title": None,
    }
    several = len({value["site"] for value in values}) > 1
    return {"field": "site", "type": "nominal", "sort": None, "legend": legend if several else None}


def predictions_chart(findings: Sequence[Finding]) -> dict[str, Any] | None:
    """Predicted against measured change of the loss, a point for every unit that was clamped alone."""
    values = [
        {"site": f.site, "predicted": a, "measured": b}
        for f in findings
        if f.what == "predictions"
        for a, b in f.points
    ]
    if not values:
        return None
    ends = [end for f in findings if f.what == "predictions" for point in f.points for end in point]
    least, top = min(ends), max(max(map(abs, ends)), LEAST)
    scale: dict[str, Any] = {"zero": False, "domain": [least, max(ends)], "nice": False}
    ticks = None
    if least < top * NEAR:
        # Units differ by orders of magnitude, and some lower the loss: logarithmic on both sides of 0, linear close to it.
        decades = [10.0**e for e in range(math.ceil(math.log10(top * NEAR)), math.floor(math.log10(top)) + 1)]
        ticks = [0.0, *(sign * decade for decade in decades for sign in (-1, 1) if least <= sign * decade <= max(ends))]
        scale |= {"type": "symlog", "constant": top * NEAR}
    elif top > TENFOLD * least:
        scale |= {"type": "log"}
    shown = {"format": ".1~e", "values": ticks, "tickCount": 5, "labelOverlap": True}
    shown["labelExpr"] = "datum.value ? datum.label : '0'"
    axis = {"type": "quantitative", "scale": scale, "axis": shown}
    x = {**axis, "field": "predicted", "title": "predicted change of the loss"}
    y = {**axis, "field": "measured", "title": "measured change of the loss"}
    line = {"data": {"values": [{"a": end} for end in (min(ends), max(ends))]},
            "mark": {"type": "line", "strokeDash": [4, 4], "color": "#888"},
            "encoding": {"x": {**x, "field": "a"}, "y": {**y, "field": "a"}}}  # fmt: skip
    points = {
        "mark": {"type": "point", "filled": True, "size": 40},
        "encoding": {"x": x, "y": y, "color": _colour_by_site(values),
                     "tooltip": [{"field": "site"}, *({"field": f, "format": ".3g"} for f in ("predicted", "measured"))]},
    }  # fmt: skip
    return _chart(values, height=300, layer=[points, line])


def coupling_chart(findings: Sequence[Finding]) -> dict[str, Any] | None:
    """ρ_off of every site, and where adding up single scores ends."""
    values = [{"site": f.site, "ratio": f.value} for f in findings if f.what == "coupling"]
    if not values:
        return None
    x = {"field": "ratio", "type": "quantitative", "title": "ρ_off", "scale": {"domain": [0, 1]}}
    y = {"field": "site", "type": "nominal", "sort": None, "title": None}
    rule = {"data": {"values": [{"end": ADDS_UP}]}, "mark": {"type": "rule", "strokeDash": [4, 4], "color": "#888"},
            "encoding": {"x": {"field": "end", "type": "quantitative"}}}  # fmt: skip
    bars = {"mark": {"type": "bar", "color": COLOURS[4]},
            "encoding": {"x": x, "y": y, "tooltip": [{"field": "site"}, {"field": "ratio", "format": ".3f"}]}}  # fmt: skip
    return _chart(values, height=NARROW * len(values) + 20, layer=[bars, rule])


def sensitivity_chart(findings: Sequence[Finding]) -> dict[str, Any] | None:
    """Overlap with what all the data would keep, by the number of samples; a line for every site."""
    values = [
        {"site": f.site, "samples": a, "overlap": b} for f in findings if f.what == "sensitivity" for a, b in f.points
    ]
    if not values:
        return None
    return _chart(values, height=260, mark={"type": "line", "point": True}, encoding={
        "x": {"field": "samples", "type": "quantitative", "title": "samples"},
        "y": {"field": "overlap", "type": "quantitative", "title": "overlap of what is kept", "scale": {"domain": [0, 1]}},
        "color": _colour_by_site(values),
        "tooltip": [{"field": "site"}, {"field": "samples"}, {"field": "overlap", "format": ".3f"}],
    })  # fmt: skip
