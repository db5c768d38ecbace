"""Derivatives of a loss by inner values of a torch graph: see `cmrc/curvature.py` for what is computed and why.

One forward pass with autograd on, one backward for g, and one vjp for each logit (or draw) that serves all sites together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.nn import functional
from torch.utils import _pytree as pytree

from cmrc.errors import StatsError
from cmrc.ir.ops import AFFINE_OPERANDS, constant
from cmrc.statistics.batches import Batch
from cmrc.statistics.curvature import LABELLED, Derivatives
from cmrc.statistics.stats import Columns

if TYPE_CHECKING:
    from cmrc.hosts.fx.host import FxHost
    from cmrc.ir.graph import Node
    from cmrc.statistics.calibrate import Options

VJPS = 128  # logits of a sample for which "auto" takes one vjp each; beyond, it draws
BENDS = 1024  # inputs of smooth functions above all sites for which "auto" adds the terms of their second derivatives


@dataclass(frozen=True, slots=True, eq=False)
class Bend:
    """A smooth pointwise function above the sites: where it is read and made, and the weight ∂L/∂out · σ''(in)."""

    node: Node
    before: torch.Tensor
    weight: torch.Tensor


def differentiate(
    host: FxHost, batch: Batch, columns: Sequence[Columns], options: Options, number: int, factors: bool
) -> list[Derivatives]:
    """g, h and the factors of H at every site, for one batch."""
    taps = [c.value for c in columns]
    seen, outputs = _run(host, batch, taps)
    values, logits = [seen[name] for name in taps], outputs[0]
    labelled = options.loss in LABELLED
    loss = _loss(logits, batch, options) if labelled else logits.sum() * 0.0
    gradients = _grad(loss, values)
    outs = logits[0].numel()
    drawn = options.curvature == "monte-carlo" or (options.curvature == "auto" and outs > VJPS)
    curvatures = [torch.zeros_like(v) for v in values]
    held: list[list[torch.Tensor]] = [[] for _ in values]
    rows = _draws(logits, values, options, number) if drawn else _jacobian(logits, values, options)
    for row in rows:
        for i, b in enumerate(row):
            curvatures[i] += b**2
            if factors:
                held[i].append(b)
    how = f"monte-carlo, {options.draws} draws" if drawn else "gauss-newton"
    if labelled and not drawn and options.curvature != "gauss-newton":
        bends = list(_bends(host, seen, loss))
        if options.curvature == "full" or sum(bend.before[0].numel() for bend in bends) <= BENDS:
            for bend in bends:
                for i, (c, value) in enumerate(zip(columns, values, strict=True)):
                    curvatures[i] += _bent(host, bend, c, value)
            how = "gauss-newton and second derivatives" if bends else "gauss-newton"
    return [
        Derivatives(_out(v), _out(g), _out(h), [_out(b) for b in parts], how)
        for v, g, h, parts in zip(values, gradients, curvatures, held, strict=True)
    ]


def _out(tensor: torch.Tensor) -> Any:
    return tensor.detach().double().cpu().numpy()


def _run(host: FxHost, batch: Batch, taps: Sequence[str]) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Every float value of the run from the first site on, and the outputs, with autograd on."""
    seen: dict[str, torch.Tensor] = {}

    class Watched(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if isinstance(result, torch.Tensor) and result.is_floating_point() and n.op == "call_function":
                if n.name in taps and not result.requires_grad:
                    result = result.requires_grad_()
                seen[n.name] = result
            return result

    module = host._runner
    args = host._bind(batch.inputs)
    with torch.enable_grad(), _frozen(module):
        result = Watched(module).run(*module.graph._codegen.process_inputs(*args), enable_io_processing=False)
    outputs = [t for t in pytree.tree_leaves(module.graph._codegen.process_outputs(result)) if torch.is_tensor(t)]
    return seen, outputs


class _frozen:
    """Parameters need no gradient here: only what lies above the sites is recorded."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.held = [(p, p.requires_grad) for p in module.parameters()]

    def __enter__(self) -> None:
        for parameter, _ in self.held:
            parameter.requires_grad_(False)

    def __exit__(self, *_: object) -> None:
        for parameter, needed in self.held:
            parameter.requires_grad_(needed)


def _grad(of: torch.Tensor, by: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(torch.autograd.grad(of, list(by), retain_graph=True, allow_unused=True, materialize_grads=True))


def _loss(logits: torch.Tensor, batch: Batch, options: Options) -> torch.Tensor:
    """The sum over samples, and over positions where there are logits at each."""
    labels = torch.as_tensor(batch.labels, device=logits.device)
    if options.loss == "squared-error":
        return 0.5 * ((logits - labels.to(logits.dtype)) ** 2).sum()
    if tuple(labels.shape) != tuple(logits.shape[:-1]):
        raise StatsError(
            f"the labels have shape {list(labels.shape)}, the logits {list(logits.shape)}",
            fix="give one label for every logit vector; -100 where there is none",
        )
    flat = logits.reshape(-1, logits.shape[-1])
    return functional.cross_entropy(flat, labels.reshape(-1).long(), ignore_index=-100, reduction="sum")


def _jacobian(logits: torch.Tensor, values: Sequence[torch.Tensor], options: Options) -> Iterator[list[torch.Tensor]]:
    """The rows B: one vjp a logit, and for the softmax losses one for the mean that they are taken about."""
    flat = logits.reshape(len(logits), -1)
    if options.loss in ("logit", "squared-error"):
        scale = math.sqrt(2.0) if options.loss == "logit" else 1.0
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
    logits: torch.Tensor, values: Sequence[torch.Tensor], options: Options, number: int
) -> Iterator[list[torch.Tensor]]:
    """Rows B whose outer products have the mean JᵀMJ: gradients of drawn labels, or of random signs of the logits."""
    generator = torch.Generator().manual_seed(options.seed * 1_000_003 + number)
    flat = logits.reshape(-1, logits.shape[-1])
    scale = 1.0 / math.sqrt(options.draws)
    for _ in range(options.draws):
        if options.loss in ("logit", "squared-error"):
            signs = torch.randint(0, 2, tuple(flat.shape), generator=generator).to(flat) * 2 - 1
            drawn = (flat * signs).sum() * (math.sqrt(2.0) if options.loss == "logit" else 1.0)
        else:
            p = flat.detach().softmax(-1).double().cpu()
            labels = torch.multinomial(p, 1, generator=generator)[:, 0].to(flat.device)
            drawn = functional.cross_entropy(flat, labels, reduction="sum")
        yield [scale * b for b in _grad(drawn, values)]


def _bends(host: FxHost, seen: dict[str, torch.Tensor], loss: torch.Tensor) -> Iterator[Bend]:
    nodes = {node.name: node for node in host._runner.graph.nodes}
    for node in host.graph.nodes:
        before = node.inputs[0]
        if node.op != "pointwise" or len(list(node.values())) != 1 or not isinstance(before, str):
            continue
        if node.attrs["fn"] == "prelu" or 0 in AFFINE_OPERANDS.get(node.attrs["fn"], ()):
            continue  # straight, and with parameters as further arguments
        if node.name not in nodes or before not in seen or not seen[before].requires_grad:
            continue
        call = nodes[node.name]
        x = seen[before].detach().requires_grad_()
        with torch.enable_grad():
            made = call.target(x, *_plain(call.args[1:]), **call.kwargs)
            (first,) = torch.autograd.grad(made.sum(), x, create_graph=True)
            second = torch.autograd.grad(first.sum(), x, allow_unused=True)[0] if first.requires_grad else None
        if second is None or not second.any():
            continue
        (by_output,) = _grad(loss, [seen[node.name]])
        yield Bend(node, seen[before], by_output * second)


def _plain(args: Sequence[Any]) -> list[Any]:
    return [arg for arg in args if not isinstance(arg, fx.Node)]


def _bent(host: FxHost, bend: Bend, columns: Columns, value: torch.Tensor) -> torch.Tensor:
    """Σ_i w_i (∂z_i/∂a_j)²: through W² where z is that very affine function of the site, else by a vjp for each i."""
    source = next((n for n in host.graph.nodes if n.name == bend.node.inputs[0]), None)
    if source is not None and source.op == "linear" and source.inputs[0] == columns.value:
        weight = constant(source.inputs[1])  # type: ignore[arg-type]
        matrix = torch.as_tensor(weight, dtype=value.dtype, device=value.device)
        matrix = matrix if source.attrs["w_out"] == 0 else matrix.T
        scaled = matrix * source.attrs.get("alpha", 1.0)
        axis = source.attrs["axis"]
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
