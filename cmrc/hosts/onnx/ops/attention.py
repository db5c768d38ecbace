"""The rows of the ONNX table for attention, which is several things at once.

    Attention(q, k, v), 3-D     reshape and transpose to heads, attention, transpose and reshape back

The results between are inside the node. Heads are a part of the units' axis: a replacement of whole heads goes through the
reshape to the axis of heads, and `writers.py` writes their new number.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from cmrc.hosts.onnx.ops.affine import TAKES_BIAS
from cmrc.hosts.onnx.ops.row import LeftWhole, Slot, Step, View
from cmrc.ir.graph import Dim, Marks, Shape, take

UNKNOWN_HEADS = "the number of its heads or their size is not known"


def _split(slot: Slot, shape: Shape, heads: int, key: str, output: int = 0) -> list[Step]:
    """[N, T, heads · D] -> [N, heads, T, D]."""
    batch, length, width = shape
    if not isinstance(width, int) or not heads or width % heads:
        raise LeftWhole(UNKNOWN_HEADS)
    apart = (batch, length, heads, width // heads)
    turned = (batch, heads, length, width // heads)
    return [
        Step("reshape", (slot,), {}, apart, key=f"{key}.apart"),
        Step("transpose", (f"{key}.apart",), {"perm": (0, 2, 1, 3)}, turned, output, key=key),
    ]


def _merged(view: View, shape: Shape) -> list[Step]:
    """[N, heads, T, D] -> [N, T, heads · D]."""
    batch, heads, length, size = shape
    assert isinstance(heads, int) and isinstance(size, int)
    turned = (batch, length, heads, size)
    return [
        Step("transpose", ("y",), {"perm": (0, 2, 1, 3)}, turned, key="y.turned"),
        Step("reshape", ("y.turned",), {}, view.out([batch, length, heads * size])),
    ]


def _joined(view: View, past: int, key: str, shape: Shape, output: int) -> Step:
    """What was cached before what is new."""
    before, now = view.shape(past)[2], shape[2]
    size: Dim = before + now if isinstance(before, int) and isinstance(now, int) else view.unknown()
    return Step("concat", (past, key), {"axis": 2}, (*shape[:2], size, shape[3]), output, key=f"{key}.all")


def _sizes_fit(q: Shape, k: Shape, v: Shape) -> None:
    if not all(isinstance(n, int) for n in (q[1], k[1], v[1], q[3], v[3])) or k[1] != v[1] or int(q[1]) % int(k[1]):
        raise LeftWhole(UNKNOWN_HEADS)


def read_attention(view: View) -> Step | list[Step]:
    """Queries, keys and values with an axis of heads, or [N, T, heads · D] with the number of heads as attributes."""
    if any(view.used[3:]) or view.attr("softcap", 0.0) or view.operand(6) is not None:
        raise LeftWhole("it outputs or caps its scores, or has lengths of its keys as an input")
    q, k, v = (view.shape(i) for i in range(3))
    if not len(q) == len(k) == len(v):
        raise LeftWhole("only some of its queries, keys and values have an axis of heads")
    causal = bool(view.attr("is_causal", 0))
    cached = view.operand(4) is not None
    if len(q) == 4 and not cached and not any(view.used[1:]):
        _sizes_fit(q, k, v)
        attrs = {"scale": float(view.attr("scale", 1.0 / math.sqrt(int(q[3])))), "causal": causal}
        return Step("attention", (0, 1, 2, 3), attrs, (*q[:3], v[3]))
    steps: list[Step] = []
    slots: list[Slot] = [0, 1, 2]
    if len(q) == 3:
        heads, served = view.attr("q_num_heads", 0), view.attr("kv_num_heads", 0)
        steps += _split(0, q, heads, "q")
        steps += _split(1, k, served, "k", 0 if cached else 1)
        steps += _split(2, v, served, "v", 0 if cached else 2)
        slots = ["q", "k", "v"]
        q, k, v = (steps[i].shape for i in (1, 3, 5))
    elif not cached:
        raise LeftWhole("its other outputs are read too")
    if cached:
        for i, key in ((1, "k"), (2, "v")):
            joined = _joined(view, i + 3, str(slots[i]), (k, v)[i - 1], i)
            steps.append(replace(joined, slots=(i + 3, slots[i]), key=f"{key}.all"))
            slots[i] = f"{key}.all"
    _sizes_fit(q, k, v)
    attrs = {"scale": float(view.attr("scale", 1.0 / math.sqrt(int(q[3])))), "causal": causal}
    if cached:
        attrs["past"] = True
    y = Step("attention", (*slots, 3), attrs, (*q[:3], v[3]), key="y")
    return [*steps, y, *_merged(view, y.shape)] if len(view.shape(0)) == 3 else [*steps, replace(y, key="")]


def read_multi_head_attention(view: View) -> list[Step]:
    """onnxruntime's: a bias for all three projections, a mask of keys, scores to add."""
    if any(view.operand(slot) is not None for slot in range(6, 10)) or any(view.used[1:]):
        raise LeftWhole("it has a cache, or outputs its scores")
    heads = view.attr("num_heads", 0)
    shapes = [view.shape(i) for i in range(3)] if view.operand(1) is not None and view.operand(2) is not None else []
    if [len(s) for s in shapes] != [3, 3, 3]:
        raise LeftWhole("its queries, keys and values are packed into one input")
    steps: list[Step] = []
    slots: list[Slot] = [0, 1, 2]
    if view.operand(3) is not None:
        bias, start = view.tensor(3, "bias"), 0
        for i, key in enumerate(("q", "k", "v")):
            width = shapes[i][2]
            if not isinstance(width, int):
                raise LeftWhole(UNKNOWN_HEADS)
            part = take(bias, 0, range(start, start + width))
            steps.append(Step("pointwise", (i, 3), {"fn": "add"}, shapes[i], tensors={3: part}, key=f"{key}.shifted"))
            slots[i], start = f"{key}.shifted", start + width
    for i, key in enumerate(("q", "k", "v")):
        steps += _split(slots[i], shapes[i], heads, key)
    q, k, v = (next(s.shape for s in steps if s.key == key) for key in "qkv")
    return [*steps, *_attended(view, q, k, v, padding=4, scores=5, square=False)]


def read_packed_attention(view: View) -> list[Step]:
    """onnxruntime's: the projections of queries, keys and values inside, one matrix."""
    if view.attr("do_rotary", 0) or any(view.operand(slot) is not None for slot in (4, 6)) or any(view.used[1:]):
        raise LeftWhole("it has a cache, or rotary positions")
    weight, heads = view.tensor(1, "weight"), view.attr("num_heads", 0)
    shape = view.fitted(0, 2, weight.shape[0])
    if len(shape) != 3 or shape[2] != weight.shape[0]:
        raise LeftWhole("its weight is not known to match")
    if view.operand(2) is not None:
        view.tensor(2, "bias")
    total = weight.shape[1]
    sizes = tuple(view.attr("qkv_hidden_sizes", (total // 3,) * 3))
    if sum(sizes) != total:
        raise LeftWhole(UNKNOWN_HEADS)
    attrs = {"axis": 2, "w_in": 0, "w_out": 1}
    steps = [Step("linear", (0, 1, 2), attrs, (*shape[:2], total), key="qkv", marks=TAKES_BIAS)]
    start = 0
    for key, size in zip("qkv", sizes, strict=True):
        part = (*shape[:2], size)
        keep = tuple(range(start, start + size))
        steps.append(Step("select", ("qkv",), {"axis": 2, "keep": keep}, part, key=f"{key}.part"))
        steps += _split(f"{key}.part", part, heads, key)
        start += size
    q, k, v = (next(s.shape for s in steps if s.key == key) for key in "qkv")
    return [*steps, *_attended(view, q, k, v, padding=3, scores=5, square=False)]


def _attended(view: View, q: Shape, k: Shape, v: Shape, *, padding: int, scores: int, square: bool) -> list[Step]:
    """The attention of onnxruntime's ops, and its result without heads."""
    _sizes_fit(q, k, v)
    scale = float(view.attr("scale", 0.0)) or 1.0 / math.sqrt(int(q[3]))
    attrs: dict[str, Any] = {"scale": scale, "causal": bool(view.attr("unidirectional", 0))}
    slots: tuple[Slot, ...] = ("q", "k", "v", scores)
    if view.operand(padding) is not None:
        seen = view.shape(padding)
        dims = {1: (0,), 2: (0, 3), 3: (0, 2, 3)}.get(len(seen))
        if dims is None or (len(seen) == 1 and seen[0] != q[0]):
            raise LeftWhole("its mask counts keys from both ends, or has an axis of heads")
        attrs["align"] = (None, None, None, None, dims)
        attrs["padding"] = float(view.attr("mask_filter_value", -10000.0))
        slots = (*slots, padding)
    y = Step("attention", slots, attrs, (*q[:3], v[3]), key="y")
    return [y, *_merged(view, y.shape)]


def read_grouped_attention(view: View) -> list[Step]:
    """onnxruntime's GroupQueryAttention: a cache, rotary positions, grouped queries; its positions follow from lengths."""
    if any(view.used[3:]):
        raise LeftWhole("it outputs its scores")
    heads, served = view.attr("num_heads", 0), view.attr("kv_num_heads", 0)
    shape = view.shape()
    steps: list[Step] = []
    slots: list[Slot] = [0, 1, 2]
    shapes = [shape, *(view.shape(i) for i in (1, 2) if view.operand(i) is not None)]
    if len(shapes) == 1:
        width = shape[2] if len(shape) == 3 else None
        if not isinstance(width, int) or width % (heads + 2 * served):
            raise LeftWhole(UNKNOWN_HEADS)
        size, start = width // (heads + 2 * served), 0
        for i, (key, count) in enumerate((("q", heads), ("k", served), ("v", served))):
            keep = tuple(range(start, start + count * size))
            part = (*shape[:2], len(keep))
            steps.append(Step("select", (0,), {"axis": 2, "keep": keep}, part, key=f"{key}.part"))
            slots[i], start = f"{key}.part", start + count * size
        shapes = [step.shape for step in steps]
    if [len(s) for s in shapes] != [3, 3, 3]:
        raise LeftWhole(UNKNOWN_HEADS)
    for i, (key, count) in enumerate((("q", heads), ("k", served), ("v", served))):
        steps += _split(slots[i], shapes[i], count, key)
    q, k, v = (next(s.shape for s in steps if s.key == key) for key in "qkv")
    _sizes_fit(q, k, v)
    lengths = {5: _along_batch(view, 5), 6: (2,) * len(view.shape(6))}
    names: dict[str, str] = {key: key for key in "qkv"}
    if view.attr("do_rotary", 0):
        tables = {7: (2, 3), 8: (2, 3), **({9: (0, 2)} if view.operand(9) is not None else {})}
        for key, seen in (("q", q), ("k", k)):
            steps.append(_positioned("rotary", (2, 3), key, {**tables, **lengths}, seen, f"{key}.turned"))
            names[key] = f"{key}.turned"
    for key, seen, past, output in (("k", k, 3, 1), ("v", v, 4, 2)):
        total = (*seen[:2], view.unknown(), seen[3])
        cached = {past: (0, 1, 2, 3)} if view.operand(past) is not None else {}
        steps.append(_positioned("cache", (2,), names[key], {**cached, **lengths}, total, f"{key}.all", output))
        names[key] = f"{key}.all"
    attrs: dict[str, Any] = {"causal": True}
    extra = {10: None, 11: (1,)}
    given = {slot: dims for slot, dims in extra.items() if view.operand(slot) is not None}
    attrs["align"] = (None, None, None, *given.values())
    y = Step("attention", (*names.values(), *given), attrs, (*q[:3], v[3]), key="y", marks=Marks(square=True))
    return [*steps, y, *_merged(view, y.shape)]


def _along_batch(view: View, slot: int) -> tuple[int, ...]:
    return (0, *(2,) * (len(view.shape(slot)) - 1))


def _positioned(
    fn: str, axes: tuple[int, ...], x: Slot, parameters: dict[int, tuple[int, ...]], shape: Shape, key: str,
    output: int = 0,
) -> Step:  # fmt: skip
    """An op that depends on positions, which further inputs say."""
    attrs = {"fn": fn, "axes": axes, "align": (None, *parameters.values())}
    return Step("along", (x, *parameters), attrs, shape, output, key=key)


def read_rotary(view: View, positions: int, tables: tuple[int, int]) -> Step | list[Step]:
    """Pairs of units turned by an angle that grows with the position: [N, heads, T, D], or [N, T, heads · D]."""
    shape, table = view.shape(), view.shape(tables[0])
    four = len(shape) == 4
    time, size = (2, 3) if four else (1, 3)
    parameters: dict[int, tuple[int, ...]] = {}
    for slot in tables:
        parameters[slot] = (time, size) if len(table) == 2 else (0, time, size)
    if view.operand(positions) is not None:
        parameters[positions] = (0, time) if len(view.shape(positions)) == 2 else (time,)
    if four:
        return replace(_positioned("rotary", (time, size), 0, parameters, view.out(shape), ""), key="")
    heads, width = view.attr("num_heads", 0), shape[2]
    if not isinstance(width, int):
        raise LeftWhole(UNKNOWN_HEADS)
    if not heads and isinstance(table[-1], int) and not view.attr("rotary_embedding_dim", 0):
        heads = width // (2 * table[-1])
    if not heads or width % heads:
        raise LeftWhole(UNKNOWN_HEADS)
    apart = (*shape[:2], heads, width // heads)
    return [
        Step("reshape", (0,), {}, apart, key="apart"),
        _positioned("rotary", (time, size), "apart", parameters, apart, "turned"),
        Step("reshape", ("turned",), {}, view.out(shape)),
    ]
