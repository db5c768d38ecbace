"""Derivatives of a loss by inner values: see `statistics/curvature.py` for what is computed and why.

A host has run its model once, with autograd on from the values on. Here are one backward for g, and one vjp for each logit (or
draw) that serves all values together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from cmrc.errors import StatsError
from cmrc.hosts.autograd.meanings import MEANINGS
from cmrc.hosts.protocols import Derivatives, DerivativesRequest
from cmrc.ir.graph import Graph, Node, Operand, attributes
from cmrc.ir.ops.affine import LinearAttrs
from cmrc.ir.ops.functions import POINTWISE
from cmrc.ir.spec import AxisAttrs, FunctionAttrs
from cmrc.ir.tensors import constant

VJPS = 128  # logits of a sample for which "auto" takes one vjp each; beyond, it draws
BENDS = 1024  # inputs of smooth functions above all values for which "auto" adds the terms of their second derivatives


@dataclass(frozen=True, slots=True, eq=False)
class Bend:
    """A smooth pointwise function above the values: where it is read and made, and the weight ∂L/∂out · σ''(in)."""

    node: Node
    before: torch.Tensor
    weight: torch.Tensor


def differentiate(
    graph: Graph, seen: Mapping[str, torch.Tensor], logits: torch.Tensor, request: DerivativesRequest
) -> list[Derivatives]:
    """g, h and the factors of H at every value asked for, for one batch: `seen` are the values of `graph` in that run."""
    values = [seen[name] for name in request.values]
    loss = _loss(logits, request) if request.labelled else logits.sum() * 0.0
    gradients = _grad(loss, values)
    outs = logits[0].numel()
    drawn = request.curvature == "monte-carlo" or (request.curvature == "auto" and outs > VJPS)
    curvatures = [torch.zeros_like(v) for v in values]
    factors: list[list[torch.Tensor]] = [[] for _ in values]
    for row in _draws(logits, values, request) if drawn else _jacobian(logits, values, request.loss):
        for i, b in enumerate(row):
            curvatures[i] += b**2
            if request.factors:
                factors[i].append(b)
    how = f"monte-carlo, {request.draws} draws" if drawn else "gauss-newton"
    if request.labelled and not drawn and request.curvature != "gauss-newton":
        bends = list(_bends(graph, seen, loss))
        if request.curvature == "full" or sum(bend.before[0].numel() for bend in bends) <= BENDS:
            for bend in bends:
                for i, (name, value) in enumerate(zip(request.values, values, strict=True)):
                    curvatures[i] += _bent(graph, bend, name, value)
            how = "gauss-newton and second derivatives" if bends else "gauss-newton"
    return [
        Derivatives(_out(v), _out(g), _out(h), [_out(b) for b in parts], how)
        for v, g, h, parts in zip(values, gradients, curvatures, factors, strict=True)
    ]


def _out(tensor: torch.Tensor) -> Any:
    return tensor.detach().double().cpu().numpy()


def _grad(of: torch.Tensor, by: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(torch.autograd.grad(of, list(by), retain_graph=True, allow_unused=True, materialize_grads=True))


def _loss(logits: torch.Tensor, request: DerivativesRequest) -> torch.Tensor:
    """The sum over samples, and over positions where there are logits at each."""
    labels = torch.as_tensor(request.labels, device=logits.device)
    if request.loss == "squared-error":
        return 0.5 * ((logits - labels.to(logits.dtype)) ** 2).sum()
    if tuple(labels.shape) != tuple(logits.shape[:-1]):
        raise StatsError(
            f"the labels have shape {list(labels.shape)}, the logits {list(logits.shape)}",
            fix="give one label for every logit vector; -100 where there is none",
        )
    flat = logits.reshape(-1, logits.shape[-1])
    return functional.cross_entropy(flat, labels.reshape(-1).long(), ignore_index=-100, reduction="sum")


def _jacobian(logits: torch.Tensor, values: Sequence[torch.Tensor], loss: str) -> Iterator[list[torch.Tensor]]:
    """The rows B: one vjp per logit, and for the softmax losses one for the mean that they are taken about."""
    flat = logits.reshape(len(logits), -1)
    if loss in ("logit", "squared-error"):
        scale = math.sqrt(2.0) if loss == "logit" else 1.0
        for k in range(flat.shape[1]):
            yield [scale * b for b in _grad(flat[:, k].sum(), values)]
        return
    groups, classes = flat.shape[1] // logits.shape[-1], logits.shape[-1]
    p = logits.softmax(-1).reshape(len(logits), -1).detach()
    for group in range(groups):  # logits of one position after the other
        span = slice(group * classes, (group + 1) * classes)
        mean = _grad((p[:, span] * flat[:, span]).sum(), values)
        for k in range(span.start, span.stop):
            row = _grad(flat[:, k].sum(), values)
            weight = p[:, k].sqrt()
            yield [_per_sample(weight, b) * (b - m) for b, m in zip(row, mean, strict=True)]


def _per_sample(weight: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return weight.reshape(-1, *[1] * (like.ndim - 1))


def _draws(
    logits: torch.Tensor, values: Sequence[torch.Tensor], request: DerivativesRequest
) -> Iterator[list[torch.Tensor]]:
    """Rows B whose outer products have the mean JᵀMJ: gradients of drawn labels, or of random signs of the logits."""
    generator = torch.Generator().manual_seed(request.seed)
    flat = logits.reshape(-1, logits.shape[-1])
    scale = 1.0 / math.sqrt(request.draws)
    for _ in range(request.draws):
        if request.loss in ("logit", "squared-error"):
            signs = torch.randint(0, 2, tuple(flat.shape), generator=generator).to(flat) * 2 - 1
            drawn = (flat * signs).sum() * (math.sqrt(2.0) if request.loss == "logit" else 1.0)
        else:
            p = flat.detach().softmax(-1).double().cpu()
            labels = torch.multinomial(p, 1, generator=generator)[:, 0].to(flat.device)
            drawn = functional.cross_entropy(flat, labels, reduction="sum")
        yield [scale * b for b in _grad(drawn, values)]


def _bends(graph: Graph, seen: Mapping[str, torch.Tensor], loss: torch.Tensor) -> Iterator[Bend]:
    for node in graph.nodes:
        before = node.inputs[0] if node.inputs else None
        if node.op != "pointwise" or node.values() != [before] or not isinstance(before, str):
            continue
        if (
            attributes(node, FunctionAttrs)["fn"] == "prelu"
            or 0 in POINTWISE[attributes(node, FunctionAttrs)["fn"]].affine_in
            or node.name not in seen
        ):
            continue  # straight
        if before not in seen or not seen[before].requires_grad:
            continue
        x = seen[before].detach().requires_grad_()
        with torch.enable_grad():
            result = MEANINGS["pointwise"](node.attrs, x, *(_like(x, known) for known in node.inputs[1:]))
            first = torch.autograd.grad(result.sum(), x, create_graph=True)[0] if result.requires_grad else None
            bends = first is not None and first.requires_grad
            second = torch.autograd.grad(first.sum(), x, allow_unused=True)[0] if bends and first is not None else None
        if second is None or not second.any():
            continue
        (by_output,) = _grad(loss, [seen[node.name]])
        yield Bend(node, seen[before], by_output * second)


def _like(x: torch.Tensor, known: Operand) -> torch.Tensor | None:
    return None if known is None or isinstance(known, str) else torch.as_tensor(constant(known)).to(x)


def _bent(graph: Graph, bend: Bend, name: str, value: torch.Tensor) -> torch.Tensor:
    """Σ_i w_i (∂z_i/∂a_j)²: through W² where z is that very affine function of the value, else by a vjp for each i."""
    source = next((n for n in graph.nodes if n.name == bend.node.inputs[0]), None)
    weight = None if source is None or source.op != "linear" or source.inputs[0] != name else source.inputs[1]
    if source is not None and weight is not None and not isinstance(weight, str):
        matrix = torch.as_tensor(constant(weight)).to(value)
        matrix = matrix if attributes(source, LinearAttrs)["w_out"] == 0 else matrix.T
        scaled = matrix * attributes(source, LinearAttrs).get("alpha", 1.0)
        axis = attributes(source, AxisAttrs)["axis"]
        bent: torch.Tensor = (bend.weight.movedim(axis, -1) @ scaled**2).movedim(-1, axis)
        return bent
    total = torch.zeros_like(value)
    if torch.autograd.grad(bend.before.sum(), value, retain_graph=True, allow_unused=True)[0] is None:
        return total
    flat, weights = bend.before.reshape(len(bend.before), -1), bend.weight.reshape(len(bend.weight), -1)
    for i in range(flat.shape[1]):
        (row,) = _grad(flat[:, i].sum(), [value])
        total += _per_sample(weights[:, i], row) * row**2
    return total
