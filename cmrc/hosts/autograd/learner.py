"""Steps of training towards a teacher: the losses, the optimiser, and its state as arrays.

    kl             Σ p (log p − log q) along the last axis, of logits or of probabilities
    squared error  ‖s − t‖² / Var t, of an output or of an inner value; 1 is as far off as the mean

Adam's rate for a parameter is `rate` times the root mean square of its numbers, within bounds: one rate then suits networks
whose weights differ by orders of magnitude.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from cmrc.errors import HostError
from cmrc.hosts.autograd.arrays import from_numpy, to_numpy
from cmrc.hosts.autograd.network import Network
from cmrc.hosts.protocols import Lesson, Teaching
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

    def step(self, lesson: Lesson, teaching: Teaching, rate: float) -> float:
        with torch.enable_grad():
            outputs, values = self.network.run(lesson.inputs, tuple(lesson.values))
            loss = _answers(outputs, lesson, teaching).mean()
            if lesson.labels is not None and teaching.labels:
                loss = loss + teaching.labels * _task(outputs[0], lesson.labels)
            if lesson.values and teaching.values:
                apart = [relative_error(values[name], _tensor(values[name], t)) for name, t in lesson.values.items()]
                loss = loss + teaching.values * torch.stack(apart).mean()
            self.adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
        size = float(loss.detach())
        if not np.isfinite(size):
            return size  # the caller gives up on this rate
        self._shorten()
        for group, scale in zip(self.adam.param_groups, self.scales, strict=True):
            group["lr"] = rate * scale
        self.adam.step()
        return size

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
            apart = _answers(outputs, lesson, teaching)
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


def _answers(outputs: Sequence[Tensor], lesson: Lesson, teaching: Teaching) -> Tensor:
    """For each sample how far the outputs are from the teacher's: the sum over outputs of the mean over their answers."""
    parts = []
    for output, taught, kind in zip(outputs, lesson.outputs, teaching.losses, strict=True):
        if not kind:
            continue
        if tuple(output.shape) != tuple(taught.shape):
            raise HostError(
                f"the model gives shape {list(output.shape)} where the original gives {list(taught.shape)}",
                fix="recover a model that was lowered from this original",
            )
        target = _tensor(output, taught)
        apart = divergence(output, target) if kind == "kl" else squared_errors(output, target)
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
    """For each answer the squared error along the last axis, relative to the variance over all answers."""
    flat, taught = (t.reshape(-1, t.shape[-1]) if t.ndim > 1 else t.reshape(-1, 1) for t in (output, target))
    variance = (taught - taught.mean(0)).square().sum(1).mean() if len(taught) > 1 else taught.square().sum()
    return (flat - taught).square().sum(1) / variance.clamp(min=TINY)


def relative_error(value: Tensor, target: Tensor) -> Tensor:
    return (value - target).square().sum() / (target - target.mean()).square().sum().clamp(min=TINY)


def _task(logits: Tensor, labels: Array) -> Tensor:
    flat = logits.reshape(-1, logits.shape[-1])
    return functional.cross_entropy(flat, torch.as_tensor(labels).reshape(-1).long(), ignore_index=NO_LABEL)
