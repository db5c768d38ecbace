"""Steps of training towards a teacher: the losses, the optimiser, and its state as arrays.

    kl             Σ p (log p − log q) along the last axis, of logits or of probabilities
    squared error  ‖s − t‖² / Var t, of an output or of an inner value; 1 is as far off as the mean

Several processes take one step together: what errors are relative to is that of the whole batch, and so is the gradient.

Adam's rate for a parameter is `rate` times the root mean square of its numbers, within bounds: one rate then suits networks
whose weights differ by orders of magnitude.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from cmrc.errors import HostError
from cmrc.hosts.autograd.arrays import from_numpy, to_numpy
from cmrc.hosts.autograd.network import Network
from cmrc.hosts.protocols import Lesson, Teaching, Total, alone
from cmrc.ir.graph import Array

SMALLEST, LARGEST = 0.01, 0.3  # of the root mean square that a rate is relative to
LONGEST = 1.0  # norm of the gradient, each parameter's relative to its own scale
TINY = 1e-12
NO_LABEL = -100


class TorchLearner:
    """Trains those parameters of a network that require a gradient."""

    def __init__(self, network: Network, stopped_at: str) -> None:
        self.stopped_at = stopped_at
        self.network = network
        trained = {id(tensor): name for name, tensor in network.parameters.items() if tensor.requires_grad}
        self.trained = {name: network.parameters[name] for name in trained.values()}  # what is tied, once
        self.scales = [float(t.detach().square().mean().sqrt().clamp(SMALLEST, LARGEST)) for t in self.trained.values()]
        groups = [{"params": [tensor]} for tensor in self.trained.values()]
        self.adam = torch.optim.Adam(groups, lr=0.0, betas=(0.9, 0.99))

    def step(self, lesson: Lesson, teaching: Teaching, rate: float, total: Total = alone) -> float:
        batch = BatchScale.of(lesson, teaching, total)
        with torch.enable_grad():
            outputs, values = self.network.run(lesson.inputs, tuple(lesson.values))
            loss = _answers(outputs, lesson, teaching, batch).sum() / batch.samples
            if lesson.labels is not None and teaching.labels:
                loss = loss + teaching.labels * _task(outputs[0], lesson.labels) / batch.labelled
            if lesson.values and teaching.values:
                apart = [
                    (values[n] - _tensor(values[n], t)).square().sum() / batch.values[n]
                    for n, t in lesson.values.items()
                ]
                loss = loss + teaching.values * torch.stack(apart).mean()
            loss = loss if lesson.counts else 0.0 * loss
            if not loss.requires_grad:
                reason = "no gradient reaches the parameters that lowering changed"
                raise HostError(
                    f"{reason}: it stops at {self.stopped_at}",
                    fix="keep the model as it was lowered, or train it before export",
                )
            self.adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
        size = float(total(np.array([float(loss.detach())]))[0])
        if not np.isfinite(size):
            return size  # the caller gives up on this rate
        if total is not alone:
            self._add_up(total)
        self._shorten()
        for group, scale in zip(self.adam.param_groups, self.scales, strict=True):
            group["lr"] = rate * scale
        self.adam.step()
        return size

    def _add_up(self, total: Total) -> None:
        """The gradients of all processes, in one exchange for every type."""
        tensors = list(self.trained.values())
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            own = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([(t.grad if t.grad is not None else torch.zeros_like(t)).reshape(-1) for t in own])
            wide = flat if dtype == torch.float64 else flat.float()
            added = from_numpy(total(to_numpy(wide))).to(flat)
            for tensor, grad in zip(own, torch.split(added, [tensor.numel() for tensor in own]), strict=True):
                tensor.grad = grad.reshape(tensor.shape)

    def _shorten(self) -> None:
        """Scale a gradient that is longer than `LONGEST`: one strange batch must not throw the network off."""
        grads = [(t.grad, s) for t, s in zip(self.trained.values(), self.scales, strict=True) if t.grad is not None]
        length = float(sum((grad.square().sum() * scale**2 for grad, scale in grads), torch.zeros(())).sqrt())
        if length > LONGEST:
            for grad, _ in grads:
                grad.mul_(LONGEST / length)

    def loss(self, lesson: Lesson, teaching: Teaching) -> tuple[float, float]:
        with torch.no_grad():
            outputs, _ = self.network.run(lesson.inputs)
            apart = _answers(outputs, lesson, teaching, BatchScale.of(lesson, teaching, alone))
        return float(apart.double().sum()), float(apart.numel())

    def parameters(self) -> dict[str, Array]:
        return {name: to_numpy(tensor).copy() for name, tensor in self.trained.items()}

    def state(self) -> dict[str, Array]:
        state = {f"parameter:{name}": to_numpy(tensor).copy() for name, tensor in self.trained.items()}
        for name, tensor in self.trained.items():
            for key, part in self.adam.state.get(tensor, {}).items():
                state[f"{key}:{name}"] = to_numpy(torch.as_tensor(part)).copy()
        return state

    def restore(self, state: Mapping[str, Array]) -> None:
        with torch.no_grad():
            for name, tensor in self.trained.items():
                tensor.copy_(from_numpy(state[f"parameter:{name}"]))
                kept = {
                    key: from_numpy(np.array(state[f"{key}:{name}"]))
                    for key in ("step", "exp_avg", "exp_avg_sq")
                    if f"{key}:{name}" in state
                }
                self.adam.state.pop(tensor, None)
                if kept:
                    self.adam.state[tensor] = kept


def _tensor(like: Tensor, array: Array) -> Tensor:
    return from_numpy(array).to(like)


@dataclass(frozen=True, slots=True)
class BatchScale:
    """What a loss is relative to: of the whole batch, wherever its rows are."""

    samples: float
    labelled: float
    outputs: list[float]  # the variance of each output over all answers
    values: dict[str, float]  # the squared distance of each inner value from its mean

    @classmethod
    def of(cls, lesson: Lesson, teaching: Teaching, total: Total) -> BatchScale:
        rows = len(lesson.outputs[0]) if lesson.outputs[0].ndim else 1
        labelled = 0 if lesson.labels is None else int((np.asarray(lesson.labels) != NO_LABEL).sum())
        taught = [
            _as_rows(t) if kind == "squared-error" else None
            for t, kind in zip(lesson.outputs, teaching.losses, strict=True)
        ]
        sums = [np.array([rows, labelled], dtype=np.float64)]
        sums += [_sums(rows) for rows in taught if rows is not None]
        sums += [_sums(t.reshape(-1, 1).astype(np.float64)) for t in lesson.values.values()]
        packed = np.concatenate(sums)
        parts = iter(np.split(total(packed if lesson.counts else 0.0 * packed), np.cumsum([len(s) for s in sums])[:-1]))
        samples, count = next(parts).tolist()
        outputs = [0.0 if each is None else _variance(next(parts)) for each in taught]
        values = {name: max(float((n := next(parts))[1] - n[2] ** 2 / n[0]), TINY) for name in lesson.values}
        return cls(samples, max(count, 1.0), outputs, values)


def _as_rows(array: Array) -> Array:
    """An answer in each row."""
    return array.reshape(-1, array.shape[-1] if array.ndim > 1 else 1).astype(np.float64)


def _sums(rows: Array) -> Array:
    """The number of rows, the sum of all squares, and the sum of the rows."""
    return np.concatenate([[len(rows), np.square(rows).sum()], rows.sum(0)])


def _variance(sums: Array) -> float:
    """The mean squared distance of the rows from their mean; of one row, its squared length."""
    count, squares, total = sums[0], sums[1], sums[2:]
    return max(float(squares / count - np.square(total / count).sum() if count > 1 else squares), TINY)


def _answers(outputs: Sequence[Tensor], lesson: Lesson, teaching: Teaching, batch: BatchScale) -> Tensor:
    """For each sample how far the outputs are from the teacher's: the sum over outputs of the mean over their answers."""
    parts = []
    for output, taught, kind, variance in zip(outputs, lesson.outputs, teaching.losses, batch.outputs, strict=True):
        if not kind:
            continue
        if tuple(output.shape) != tuple(taught.shape):
            raise HostError(
                f"the model gives shape {list(output.shape)} where the original gives {list(taught.shape)}",
                fix="recover a model that was lowered from this original",
            )
        target = _tensor(output, taught)
        apart = divergence(output, target) if kind == "kl" else squared_errors(output, target) / variance
        parts.append(apart.reshape(len(output), -1).mean(1) if output.ndim > 0 else apart.reshape(1))
    if not parts:
        raise HostError("no output of the model has numbers to compare", fix="recover models with floating outputs")
    return torch.stack(parts).sum(0)


def divergence(output: Tensor, target: Tensor) -> Tensor:
    """KL(teacher ‖ learner) along the last axis, of logits or of probabilities."""
    if bool(target.min() >= 0) and torch.allclose(target.sum(-1), target.new_ones(()), atol=1e-3):
        p, q = target.clamp(min=TINY).log(), output.clamp(min=TINY).log()
    else:
        p, q = target.log_softmax(-1), output.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def squared_errors(output: Tensor, target: Tensor) -> Tensor:
    """For each answer the squared error along the last axis."""
    apart = output - target
    return apart.square().sum(-1).reshape(-1) if apart.ndim > 1 else apart.square().reshape(-1)


def _task(logits: Tensor, labels: Array) -> Tensor:
    flat = logits.reshape(-1, logits.shape[-1])
    return functional.cross_entropy(
        flat, torch.as_tensor(labels).reshape(-1).long(), ignore_index=NO_LABEL, reduction="sum"
    )
