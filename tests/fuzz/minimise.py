"""A failing case made small: fewer do's, units, outputs and nodes, smaller sizes, as long as it fails in the same way."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import onnx
from onnx import AttributeProto, helper, numpy_helper

from tests.fuzz.builder import FLOATS, onnx_type
from tests.fuzz.graphs import Feed
from tests.fuzz.judge import Case, Outcome, judge
from tests.fuzz.session import Array, Refused, outputs_of, run, start


def signature(outcome: Outcome) -> str:
    """What makes two failures the same: the kind, and for an exception its text without numbers and names."""
    if outcome.kind not in ("raw", "fault"):
        return outcome.kind
    return f"{outcome.kind} " + re.sub(r"%\S+|'[^']*'|[\d.]+", "#", outcome.detail)[:160]


def minimise(case: Case, outcome: Outcome, *, seconds: float = 30.0, thorough: bool = False) -> Case:
    """The smallest case found in that time."""
    until, wanted = time.monotonic() + seconds, signature(outcome)

    def fails(candidate: Case) -> bool:
        if time.monotonic() > until:
            return False
        try:
            outputs_of(candidate.model, candidate.arrays())
            return signature(judge(candidate, thorough=thorough)) == wanted
        except Exception:  # a candidate that makes no sense
            return False

    progress = True
    while progress and time.monotonic() < until:
        progress = False
        for step in STEPS:
            case, changed = _exhaust(case, step, fails)
            progress = progress or changed
    return case


def _exhaust(case: Case, step: Callable[[Case], Iterator[Case]], fails: Callable[[Case], bool]) -> tuple[Case, bool]:
    changed = True
    ever = False
    while changed:
        changed = False
        for candidate in step(case):
            if fails(candidate):
                case, changed, ever = candidate, True, True
                break
    return case, ever


# ---------------------------------------------------------------- steps


def fewer_requests(case: Case) -> Iterator[Case]:
    if len(case.requests) > 1:
        for i in range(len(case.requests)):
            yield replace(case, requests=[r for j, r in enumerate(case.requests) if j != i])


def simpler_requests(case: Case) -> Iterator[Case]:
    for i, request in enumerate(case.requests):
        options = []
        constant = np.asarray(request.constant, np.float64)
        if constant.ndim and request.weight is None:
            options.append(replace(request, constant=float(constant.reshape(-1)[0])))
        if len(request.units) > 1 and (constant.ndim == 0 or request.weight is not None):
            for drop in range(len(request.units)):
                units = tuple(u for j, u in enumerate(request.units) if j != drop)
                weight = None if request.weight is None else [w for j, w in enumerate(request.weight) if j != drop]
                bias = 0.0 if request.weight is not None else request.constant
                options.append(replace(request, units=units, weight=weight, constant=bias))
        if len(request.parents) > 1:
            for drop in range(len(request.parents)):
                parents = tuple(u for j, u in enumerate(request.parents) if j != drop)
                weight = [[w for j, w in enumerate(row) if j != drop] for row in request.weight]
                options.append(replace(request, parents=parents, weight=weight))
        for option in options:
            yield replace(case, requests=[option if j == i else r for j, r in enumerate(case.requests)])


def fewer_outputs(case: Case) -> Iterator[Case]:
    if len(case.model.graph.output) > 1:
        for i in range(len(case.model.graph.output)):
            model = _copy(case.model)
            del model.graph.output[i]
            yield _cleaned(case, model)


def earlier_outputs(case: Case) -> Iterator[Case]:
    """What the last node reads becomes the output."""
    arrays = _values(case)
    for i in reversed(range(len(case.model.graph.node))):
        node = case.model.graph.node[i]
        if not any(o.name in node.output for o in case.model.graph.output):
            continue
        model = _copy(case.model)
        kept = [o for o in model.graph.output if o.name not in node.output]
        there = {o.name for o in kept}
        names = [n for n in dict.fromkeys(node.input) if n in arrays and n not in there and n not in case.feeds]
        added = [helper.make_tensor_value_info(n, onnx_type(arrays[n].dtype), None) for n in names]
        del model.graph.output[:]
        model.graph.output.extend([*kept, *added])
        if model.graph.output:
            yield _cleaned(case, model)


def later_inputs(case: Case) -> Iterator[Case]:
    """What a node makes becomes an input."""
    arrays = _values(case)
    sites = {request.site for request in case.requests}
    for i, node in enumerate(case.model.graph.node):
        if node.op_type == "Constant" or any(name in sites or name not in arrays for name in node.output if name):
            continue
        if any(o.name in node.output for o in case.model.graph.output):
            continue
        model = _copy(case.model)
        del model.graph.node[i]
        feeds = dict(case.feeds)
        for name in node.output:
            if not name:
                continue
            array = arrays[name]
            if array.dtype.name not in (*FLOATS, "int64", "bool"):
                break
            below = int(array.max()) + 1 if array.dtype.name not in FLOATS and array.size else 0
            feeds[name] = Feed(array.shape, array.dtype.name, array.shape, max(below, 0))
            model.graph.input.append(helper.make_tensor_value_info(name, onnx_type(array.dtype), array.shape))
        else:
            yield _cleaned(replace(case, feeds=feeds), model)


def bypassed_nodes(case: Case) -> Iterator[Case]:
    """A node whose result looks like one of its operands is left out."""
    arrays = {**_values(case), **case.arrays()}
    for i, node in enumerate(case.model.graph.node):
        if (
            len(node.output) != 1
            or node.output[0] not in arrays
            or any(r.site == node.output[0] for r in case.requests)
        ):
            continue
        result = arrays[node.output[0]]
        for name in node.input:
            like = arrays.get(name)
            if like is None or like.shape != result.shape or like.dtype != result.dtype:
                continue
            model = _copy(case.model)
            del model.graph.node[i]
            for other in model.graph.node:
                _rename(other, node.output[0], name)
            if any(o.name == node.output[0] for o in model.graph.output):
                continue
            yield _cleaned(case, model)


def plain_declarations(case: Case) -> Iterator[Case]:
    """No dynamic sizes, no value infos, no overridable initialisers."""
    if case.model.graph.value_info:
        model = _copy(case.model)
        del model.graph.value_info[:]
        yield replace(case, model=model)
    for name, feed in case.feeds.items():
        for axis, size in enumerate(feed.declared):
            if not isinstance(size, int):
                model = _copy(case.model)
                declared = tuple(feed.shape[i] if i == axis else n for i, n in enumerate(feed.declared))
                for value in model.graph.input:
                    if value.name == name:
                        value.CopyFrom(helper.make_tensor_value_info(name, value.type.tensor_type.elem_type, declared))
                yield replace(case, model=model, feeds={**case.feeds, name: replace(feed, declared=declared)})
    extra = [value.name for value in case.model.graph.input if value.name not in case.feeds]
    if extra:
        model = _copy(case.model)
        kept = [value for value in model.graph.input if value.name in case.feeds]
        del model.graph.input[:]
        model.graph.input.extend(kept)
        yield replace(case, model=model)


def smaller_sizes(case: Case) -> Iterator[Case]:
    """Wherever this size stands, one less."""
    sizes = {n for feed in case.feeds.values() for n in feed.shape}
    sizes |= {n for tensor in case.model.graph.initializer for n in tensor.dims if len(tensor.dims) > 1}
    for size in sorted(sizes, reverse=True):
        if size < 2:
            continue
        for smaller in dict.fromkeys((1, size // 2, size - 1)):
            model = _copy(case.model)
            feeds = {
                name: replace(
                    feed,
                    shape=tuple(smaller if n == size else n for n in feed.shape),
                    declared=tuple(smaller if n == size else n for n in feed.declared),
                )
                for name, feed in case.feeds.items()
            }
            for value in model.graph.input:
                if value.name in feeds:
                    kind = value.type.tensor_type.elem_type
                    value.CopyFrom(helper.make_tensor_value_info(value.name, kind, feeds[value.name].declared))
            for tensor in model.graph.initializer:
                array = numpy_helper.to_array(tensor)
                if array.dtype.name in (*FLOATS, "bool"):
                    cut = array[tuple(slice(0, smaller if n == size else n) for n in array.shape)]
                    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(cut), tensor.name))
            del model.graph.value_info[:]
            outputs = [
                helper.make_tensor_value_info(o.name, o.type.tensor_type.elem_type, None) for o in model.graph.output
            ]
            del model.graph.output[:]
            model.graph.output.extend(outputs)
            yield replace(case, model=model, feeds=feeds)


def rounder_numbers(case: Case) -> Iterator[Case]:
    """Weights with two digits."""
    model = _copy(case.model)
    changed = False
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.dtype.name in FLOATS:
            rounded = np.round(array.astype(np.float64) * 4).astype(array.dtype) / np.asarray(4, array.dtype)
            changed = changed or not np.array_equal(rounded, array)
            tensor.CopyFrom(numpy_helper.from_array(rounded.astype(array.dtype), tensor.name))
    if changed:
        yield replace(case, model=model)


STEPS = (
    fewer_requests, fewer_outputs, earlier_outputs, later_inputs, bypassed_nodes, plain_declarations, simpler_requests,
    smaller_sizes, rounder_numbers,
)  # fmt: skip


# ---------------------------------------------------------------- pieces


def _copy(model: onnx.ModelProto) -> onnx.ModelProto:
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    return copied


def _values(case: Case) -> dict[str, Array]:
    model = _copy(case.model)
    names = [name for node in model.graph.node for name in node.output if name]
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    try:
        return dict(zip(names, run(start(model.SerializeToString()), case.arrays()), strict=True))
    except Refused:
        return {}


def _reads(node: onnx.NodeProto) -> set[str]:
    names = set(node.input)
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            for inner in attribute.g.node:
                names |= _reads(inner)
            names |= {o.name for o in attribute.g.output}
    return names


def _rename(node: onnx.NodeProto, old: str, new: str) -> None:
    for i, name in enumerate(node.input):
        if name == old:
            node.input[i] = new
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            for inner in attribute.g.node:
                _rename(inner, old, new)


def _cleaned(case: Case, model: onnx.ModelProto) -> Case:
    """Without nodes, constants and inputs that nothing reads."""
    graph = model.graph
    while True:
        read = {o.name for o in graph.output} | {name for node in graph.node for name in _reads(node)}
        dead = [i for i, node in enumerate(graph.node) if not read & set(node.output)]
        if not dead:
            break
        for i in reversed(dead):
            del graph.node[i]
    kept = [tensor for tensor in graph.initializer if tensor.name in read]
    inputs = [value for value in graph.input if value.name in read]
    if not any(value.name in case.feeds for value in inputs):  # onnxruntime takes a model without inputs, cmrc too
        inputs = [*inputs, *(value for value in graph.input if value.name in case.feeds)][: len(inputs) + 1]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    del graph.input[:]
    graph.input.extend(inputs)
    del graph.value_info[:]
    names = {value.name for value in inputs}
    return replace(case, model=model, feeds={n: f for n, f in case.feeds.items() if n in names})
